"""The decay explorer: its numbers are the average's own, and its controls redraw the picture."""

import math
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from explorers import errors_found_headless, keyboard_controls, move, pixels

from fsdp_ema_lib import decay as decays
from fsdp_ema_lib.decay import Warmup
from fsdp_ema_lib.ema import PRECISIONS
from fsdp_ema_lib.lab.decay_explorer import (
    NAIVE_BF16,
    SCHEDULES,
    DecayFigure,
    decay_explorer,
    make_schedule,
    track_average,
    track_in_bf16,
)
from fsdp_ema_lib.lab.plots import save

NUMBERS = {"decay": 0.9, "share": 0.1, "width": 0.15, "updates": 60}


@pytest.mark.parametrize(("decay", "schedule"), [(0.9, lambda n: 0.9), (Warmup(0.9), Warmup(0.9)), (0.0, lambda n: 0)])
def test_track_average_is_the_recursion_in_float64(decay, schedule):
    live, start = torch.randn(20, 3), torch.randn(3)
    average, expected = start.double(), []
    for n, row in enumerate(live.double(), start=1):
        average = schedule(n) * average + (1 - schedule(n)) * row
        expected.append(average)
    torch.testing.assert_close(
        track_average(decay, live, start=start).double(), torch.stack(expected), rtol=0, atol=1e-6
    )


def test_track_average_passes_settings_on():
    share = track_average(0.9, torch.zeros(6, 1), start=torch.ones(1), update_every=3)[:, 0]
    torch.testing.assert_close(share, torch.tensor([1.0, 1.0, 0.9**3, 0.9**3, 0.9**3, 0.9**6]))


@pytest.mark.parametrize(
    ("live", "start", "text"),
    [
        (torch.ones(3), None, r"live must have shape \(updates, width\), at least \(1, 1\); got \(3,\)"),
        (torch.ones(0, 2), None, r"got \(0, 2\)"),
        (torch.ones(3, 2), torch.ones(3), r"start must have shape \(2,\), as a row of live; got \(3,\)"),
    ],
)
def test_track_average_refuses_other_shapes(live, start, text):
    with pytest.raises(ValueError, match=text):
        track_average(0.9, live, start=start)


def test_track_average_keeps_the_dtype_of_the_average():
    kept = track_average(0.9, torch.ones(2, 1), precision="fp64")
    assert kept.dtype == torch.float64
    assert kept[:, 0].tolist() == pytest.approx([1 - 0.9, 1 - 0.9**2], rel=1e-15)


def curves(figure, panel):
    return {line.get_label(): np.asarray(line.get_ydata(), dtype=float) for line in figure.axes[panel].lines}


@pytest.mark.parametrize("update_every", [1, 7])
@pytest.mark.parametrize("name", SCHEDULES)
def test_average_and_exact_curves_are_those_of_the_schedule(name, update_every):
    schedule = make_schedule(name, **NUMBERS)
    figure = DecayFigure(updates=60).draw(schedule, update_every=update_every)
    average, expected, weights = 0.0, [], np.zeros(60)
    for n in range(1, 61):
        if n % update_every == 0:
            decay = math.prod(schedule(step) for step in range(n - update_every + 1, n + 1))
            average = decay * average + 1 - decay
            weights *= decay
            weights[n - 1] = 1 - decay
        expected.append(average)
    step, profile = curves(figure, 1), curves(figure, 0)
    np.testing.assert_allclose(step["exact (float64)"], expected, atol=1e-12)
    np.testing.assert_allclose(step["average"], expected, atol=1e-6)
    np.testing.assert_allclose(profile["exact (float64)"], weights / weights.max(), atol=1e-12)
    np.testing.assert_allclose(profile["average"], weights / weights.max(), atol=1e-5)
    path = curves(figure, 2)
    np.testing.assert_allclose(path["average"], path["exact (float64)"], atol=1e-6)


def test_the_titles_say_the_half_life_the_share_of_the_start_and_the_noise():
    figure = DecayFigure(updates=400).draw(0.99)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    # 0.99**69 is just below one half; a constant decay leaves 0.99**400 of the start.
    assert titles[0] == "Profile: half of it in the last 69 steps"
    assert titles[1] == f"Step: the start keeps {0.99**400:.2g}"
    exact = math.sqrt((1 - 0.99) / (1 + 0.99) * (1 - 0.99**800))
    assert titles[2] == f"Noisy path: noise x {exact:.2g}"
    assert DecayFigure(updates=20).draw(0.99).axes[0].get_title(loc="left") == "Profile: half is the start"


def test_the_rounding_panel_tells_the_precisions_apart():
    drawing = DecayFigure(updates=600)
    worst = {
        precision: curves(drawing.draw(0.99, precision=precision), 3)["average"].max()
        for precision in (*PRECISIONS, NAIVE_BF16)
    }
    assert worst["fp64"] < 1e-14
    assert worst["compensated"] < 2e-7 < worst["fp32"] < 1e-4
    assert worst[NAIVE_BF16] > 0.1


def test_an_average_kept_in_bf16_follows_where_numbers_are_exact_and_stands_still_near_1():
    """Around 1 the spacing of bf16 is 2**-7 above and 2**-8 below: 0.999 and 0.001 x 1.005 round away."""
    live = torch.tensor([[1.0, 1.005]] * 300)
    half = track_in_bf16(dict.fromkeys(range(1, 301), 0.5), live[:, :1], torch.zeros(1))
    assert half[:3, 0].tolist() == [0.5, 0.75, 0.875]
    slow = track_in_bf16(dict.fromkeys(range(1, 301), 0.999), live[:, 1:], torch.ones(1))
    assert (slow == 1).all()
    every_third = track_in_bf16({3: 0.5}, live[:4, :1], torch.zeros(1))
    assert every_third[:, 0].tolist() == [0, 0, 0.5, 0.5]


def test_a_redraw_shows_what_drawing_from_scratch_shows():
    drawing = DecayFigure(updates=80)
    drawing.draw(0.5)
    drawing.png()
    drawing.draw(0.95, update_every=3)
    again = pixels(drawing.png())
    fresh = DecayFigure(updates=80)
    fresh.draw(0.95, update_every=3)
    assert np.array_equal(again, pixels(fresh.png()))


def test_axes_are_drawn_once_for_all_pictures(monkeypatch):
    """What a redraw under 100 ms rests on: drawing the axes takes most of the time."""
    drawing, draws = DecayFigure(updates=80), []
    monkeypatch.setattr(drawing._canvas, "draw", partial(lambda draw: draws.append(draw()), drawing._canvas.draw))
    for decay in (0.5, 0.9, 0.99):
        drawing.draw(decay)
        drawing.png()
    assert len(draws) == 1


def test_the_saved_figure_still_holds_the_curves(tmp_path):
    drawing = DecayFigure(updates=80)
    empty = plt.imread(save(drawing.figure, tmp_path, "empty"))
    drawing.draw(0.95)
    drawing.png()  # leaves the curves visible to an ordinary save
    assert not np.array_equal(plt.imread(save(drawing.figure, tmp_path, "drawn")), empty)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"decay": 1.0}, r"decay must be a finite number in \[0, 1\), got 1.0"),
        ({"update_every": 81}, r"update_every must be from 1 to the 80 steps, got 81"),
        ({"update_every": 0}, r"update_every must be from 1 to the 80 steps, got 0"),
        ({"precision": "fp8"}, r"precision"),
    ],
)
def test_drawing_refuses_what_cannot_be(arguments, text):
    drawing = DecayFigure(updates=80)
    drawing.draw(0.9)
    before = drawing.png()
    with pytest.raises(ValueError, match=text):
        drawing.draw(**{"decay": 0.9, **arguments})
    assert drawing.png() == before


def test_an_unknown_schedule_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="one of 'constant', 'warm-up', .*; got 'linear'"):
        make_schedule("linear", **NUMBERS)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("warm-up", Warmup(0.9)),
        ("half-life", decays.HalfLife(decays.half_life_of(0.9))),
        ("half-life, share of training", decays.HalfLifeFraction(0.1)),
        ("power function", decays.PowerFunction.from_sigma_rel(0.15)),
        ("cosine", decays.Cosine(0.9, 60)),
    ],
)
def test_schedules_are_those_of_the_library(name, expected):
    assert make_schedule(name, **NUMBERS) == expected


def test_the_explorer_starts_at_what_it_is_given():
    explorer = decay_explorer(
        0.97, schedule="cosine", share=0.2, width=0.2, update_every=3, precision="compensated", updates=60
    )
    values = {name: control.value for name, control in explorer.controls.items()}
    assert values.pop("half_life") == pytest.approx(decays.half_life_of(0.97))
    assert values == {
        "schedule": "cosine",
        "decay": 0.97,
        "share": 0.2,
        "width": 0.2,
        "update_every": 3,
        "precision": "compensated",
    }
    drawing = DecayFigure(updates=60)
    drawing.draw(decays.Cosine(0.97, 60), update_every=3, precision="compensated")
    assert bytes(explorer.picture.value) == drawing.png(), "the picture is not that of the plain figure"


def test_every_control_changes_the_picture_and_moving_it_back_restores_it():
    explorer = decay_explorer(0.97, updates=60)
    moves = {
        "schedule": "warm-up",
        "decay": 0.6,
        "update_every": 7,
        "precision": NAIVE_BF16,
    }
    for name, value in moves.items():
        before, control = bytes(explorer.picture.value), explorer.controls[name]
        old = control.value
        move(control, value)
        assert bytes(explorer.picture.value) != before, name
        move(control, old)
        assert bytes(explorer.picture.value) == before, name
    assert explorer.errors.text == ""


@pytest.mark.parametrize(
    ("schedule", "name"),
    [("half-life", "half_life"), ("half-life, share of training", "share"), ("power function", "width")],
)
def test_controls_that_the_schedule_does_not_use_are_off(schedule, name):
    explorer = decay_explorer(0.97, updates=60)
    on = {name for name, control in explorer.controls.items() if not control.disabled}
    assert on == {"schedule", "precision", "update_every", "decay"}
    move(explorer.controls["schedule"], schedule)
    on = {name for name, control in explorer.controls.items() if not control.disabled}
    assert on == {"schedule", "precision", "update_every", name}
    before = bytes(explorer.picture.value)
    move(explorer.controls[name], 0.07)
    assert bytes(explorer.picture.value) != before


def test_no_slider_sets_another_one_which_the_page_would_round_and_send_back():
    explorer = decay_explorer(0.9, updates=20)
    drawn = []
    explorer._draw = lambda **values: drawn.append(values) or b""
    explorer.controls["decay"].value = 0.99
    explorer.controls["half_life"].value = 1.0
    assert [(values["decay"], values["half_life"]) for values in drawn] == [
        (0.99, pytest.approx(decays.half_life_of(0.9))),
        (0.99, 1.0),
    ]


def test_the_schedule_of_a_half_life_takes_it_from_its_slider():
    explorer = decay_explorer(0.9, schedule="half-life", updates=60)
    explorer.controls["half_life"].value = 3.0
    drawing = DecayFigure(updates=60)
    drawing.draw(decays.HalfLife(decays.half_life_of(decays.decay_from_half_life(3.0))))
    assert bytes(explorer.picture.value) == drawing.png()


@pytest.mark.parametrize("decay", [0.0, 0.2, 0.999999])
def test_the_sliders_reach_decays_beyond_their_usual_range(decay):
    explorer = decay_explorer(decay, updates=20)
    assert explorer.controls["decay"].value == decay
    assert explorer.controls["half_life"].value == pytest.approx(max(decays.half_life_of(decay), 0.1))


def test_an_error_in_its_callback_is_shown_and_found_headless(monkeypatch, tmp_path):
    explorer = decay_explorer(0.9, updates=20)

    def fail(*args, **kwargs):
        raise RuntimeError("no memory left")

    monkeypatch.setattr("fsdp_ema_lib.lab.decay_explorer.track_average", fail)
    move(explorer.controls["decay"], 0.8)
    assert errors_found_headless(explorer, tmp_path) == ["RuntimeError: no memory left"]
    monkeypatch.undo()
    move(explorer.controls["decay"], 0.7)
    assert errors_found_headless(explorer, tmp_path) == []


def test_every_control_has_a_description():
    assert set(keyboard_controls(decay_explorer(updates=20))) == {
        "schedule",
        "precision",
        "decay",
        "half-life",
        "share of training",
        "width (sigma_rel)",
        "update every",
    }


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"decay": 1.0}, r"decay must be a finite number in \[0, 1\), got 1.0"),
        ({"updates": 1}, r"updates must be at least 2, got 1"),
        ({"noise": -0.1}, r"noise must be a finite standard deviation of at least 0, got -0.1"),
        ({"schedule": "linear"}, r"schedule must be one of"),
        ({"share": 0.0}, r"fraction must be in \(0, 1\]"),
        ({"width": 0.5}, r"sigma_rel must be in"),
        ({"update_every": 0}, r"update_every must be from 1 to the 600 steps, got 0"),
        ({"precision": "fp8"}, r"precision must be one of"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_drawn(arguments, text):
    with pytest.raises(ValueError, match=text):
        decay_explorer(**arguments)
