"""The decay explorer: its numbers are the average's own, and its slider redraws the picture."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from fsdp_ema_lib.decay import Warmup
from fsdp_ema_lib.lab.plots import save
from fsdp_ema_lib.lab.widgets import DecayFigure, decay_explorer, track_average


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


def test_measured_lines_lie_on_the_closed_form():
    drawing = DecayFigure(updates=100)
    for decay in (0.9, 0.5, 0.0, 0.99):  # the same figure, drawn again
        figure = drawing.draw(decay)
        for axes in figure.axes[:2]:
            lines = {line.get_label(): line for line in axes.lines}
            measured, predicted = lines["average, measured"], lines["closed form"]
            assert np.allclose(measured.get_ydata(), predicted.get_ydata(), atol=1e-5), decay
        assert figure.axes[0].lines[0].get_ydata()[1] == pytest.approx(decay, abs=1e-6)


def pixels(png: bytes, tmp_path) -> np.ndarray:
    (tmp_path / "picture.png").write_bytes(bytes(png))
    return plt.imread(tmp_path / "picture.png")


def test_a_redraw_shows_what_drawing_from_scratch_shows(tmp_path):
    drawing = DecayFigure(updates=80)
    drawing.draw(0.5)
    drawing.png()
    drawing.draw(0.95)
    again = pixels(drawing.png(), tmp_path)
    fresh = DecayFigure(updates=80)
    fresh.draw(0.95)
    assert np.array_equal(again, pixels(fresh.png(), tmp_path))


def test_the_saved_figure_still_holds_the_curves(tmp_path):
    drawing = DecayFigure(updates=80)
    empty = plt.imread(save(drawing.figure, tmp_path, "empty"))
    drawing.draw(0.95)
    drawing.png()  # leaves the curves visible to an ordinary save
    assert not np.array_equal(plt.imread(save(drawing.figure, tmp_path, "drawn")), empty)


def test_the_slider_starts_at_the_given_decay_and_redraws_the_picture():
    slider, picture, complaint = decay_explorer(0.97, updates=60).children
    assert slider.value == 0.97
    before = bytes(picture.value)
    slider.value = 0.6
    assert bytes(picture.value) != before
    slider.value = 0.97
    assert bytes(picture.value) == before
    assert complaint.value == ""


@pytest.mark.parametrize("decay", [0.0, 0.2, 0.99999])
def test_the_slider_reaches_decays_beyond_its_usual_range(decay):
    slider, picture, _ = decay_explorer(decay, updates=20).children
    assert slider.value == decay
    assert bytes(picture.value)[:4] == b"\x89PNG"


def test_an_error_while_sliding_is_shown_and_raised(monkeypatch):
    slider, _, complaint = decay_explorer(0.9, updates=20).children

    def fail(*args, **kwargs):
        raise RuntimeError("no memory left")

    monkeypatch.setattr("fsdp_ema_lib.lab.widgets.track_average", fail)
    with pytest.raises(RuntimeError, match="no memory left"):
        slider.value = 0.8
    assert "RuntimeError: no memory left" in complaint.value
    monkeypatch.undo()
    slider.value = 0.7
    assert complaint.value == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"decay": 1.0}, r"decay must be a finite number in \[0, 1\), got 1.0"),
        ({"updates": 1}, r"updates must be at least 2, got 1"),
        ({"noise": -0.1}, r"noise must be a finite standard deviation of at least 0, got -0.1"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_drawn(arguments, text):
    with pytest.raises(ValueError, match=text):
        decay_explorer(**arguments)
