"""The checkpoint browser: what it finds on disk, what it says of a difference, and how it fails."""

import weakref

import ipywidgets
import numpy as np
import pytest
import torch
from explorers import errors_found_headless, keyboard_controls, move, pixels
from torch import nn

from fsdp_ema_lib import EMA_FSDP, CheckpointManager, DamagedCheckpointError, export_safetensors, offline
from fsdp_ema_lib.lab.checkpoint_browser import (
    BINS,
    PANELS,
    checkpoint_browser,
    comparable,
    compare,
    difference,
    difference_figure,
    find_weights,
)
from fsdp_ema_lib.lab.widgets import png


def model_of(seed, width=4):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


@pytest.fixture
def saved(tmp_path):
    """Two checkpoints with an average, the average of the second exported, and the live weights of both."""
    model, live = model_of(0), {}
    ema = EMA_FSDP(model, 0.5)
    with CheckpointManager(tmp_path / "run") as checkpoints:
        for step in (10, 20):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter))
            ema.update(model)
            live[step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            checkpoints.save(step, model=model, ema=ema)
    export_safetensors(tmp_path / "average.safetensors", ema, model)
    export_safetensors(tmp_path / "split", ema, model, max_shard_size=40)
    torch.save({"generator": live[20], "generator_ema": ema.full_state_dict(model)}, tmp_path / "both.pt")
    return tmp_path, live, ema.full_state_dict(model)


def test_every_set_of_weights_is_found_and_read(saved):
    folder, live, average = saved
    files = [folder / name for name in ("average.safetensors", "split", "both.pt")]
    found = find_weights(folder / "run", *files)
    assert list(found) == [
        "step_00000010, live",
        "step_00000010, average 0",
        "step_00000020, live",
        "step_00000020, average 0",
        "average.safetensors",
        "split",
        "both.pt",
    ]
    expected = dict.fromkeys(list(found)[3:], average)
    expected |= {f"step_000000{step}, live": live[step] for step in (10, 20)}
    for label, tensors in expected.items():
        with found[label]() as opened:
            for name in opened:
                assert torch.equal(opened[name][()], tensors[name]), (label, name)
            assert set(opened) >= {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_a_checkpoint_and_one_of_the_same_name_elsewhere_have_labels_of_their_own(saved):
    folder, _, _ = saved
    with CheckpointManager(folder / "other") as checkpoints:
        checkpoints.save(10, model=model_of(1))
    found = find_weights(folder / "run" / "step_00000010", folder / "other")
    assert list(found) == ["step_00000010, live", "step_00000010, average 0", "other/step_00000010, live"]
    assert compare(found["step_00000010, live"], found["other/step_00000010, live"], ["0.weight"])["0.weight"].unequal


@pytest.mark.parametrize("where", ["nothing", "empty"])
def test_a_path_without_weights_is_named(tmp_path, where):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=rf"{where}: no checkpoint and no exported weights here"):
        find_weights(tmp_path / where)
    with pytest.raises(ValueError, match="name at least one checkpoint or exported file"):
        find_weights()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_difference_is_that_of_float64_arithmetic(monkeypatch, dtype):
    monkeypatch.setattr("fsdp_ema_lib.lab.checkpoint_browser._CHUNK", 7)  # so that it takes several
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-5, 5, (6, 5), generator=generator).to(dtype) for _ in range(2))
    found = difference(a, b)
    apart = b.double().numpy() - a.double().numpy()
    assert (found.elements, found.unequal, found.not_finite) == (30, np.count_nonzero(apart), 0)
    assert found.largest == abs(apart).max()
    assert found.relative == pytest.approx(np.linalg.norm(apart) / np.linalg.norm(a.double().numpy()), rel=1e-12)
    counts, _ = np.histogram(apart, bins=BINS, range=(-found.largest, found.largest))
    assert found.counts.tolist() == counts.tolist()


def test_equal_tensors_lie_in_the_middle_bin_and_what_is_not_finite_is_counted_apart():
    equal = difference(torch.ones(5), torch.ones(5))
    assert (equal.unequal, equal.largest, equal.relative) == (0, 0.0, 0.0)
    assert equal.counts[BINS // 2] == equal.counts.sum() == 5
    broken = difference(torch.ones(4), torch.tensor([1.0, 1.5, torch.nan, torch.inf]))
    assert (broken.unequal, broken.not_finite, broken.largest, broken.counts.sum()) == (3, 2, 0.5, 2)
    assert difference(torch.zeros(2), torch.ones(2)).relative == float("inf")
    assert difference(torch.zeros(0), torch.zeros(0)).elements == 0
    assert difference(torch.tensor(1.0), torch.tensor(3.0)).largest == 2


def test_what_cannot_be_compared_is_named(saved):
    folder, _, _ = saved
    export_safetensors(folder / "wide.safetensors", EMA_FSDP(wide := model_of(0, width=5)), wide)
    found = find_weights(folder / "average.safetensors", folder / "wide.safetensors")
    narrow, wider = found.values()
    assert set(comparable(narrow, wider)) == {"2.bias", "1.num_batches_tracked"}
    text = r"0.bias is \(4,\) in the first and \(5,\) in the second; x is not in the first and the second"
    with pytest.raises(ValueError, match=text):
        compare(narrow, wider, ["0.bias", "2.bias", "x"])


def test_one_tensor_of_each_side_is_read_at_a_time(saved, monkeypatch):
    folder, _, _ = saved
    read, living = offline.Saved.read, []

    def counted(self, name):
        tensor = read(self, name)
        living.append(sum(1 for reference in references if reference() is not None))
        references.append(weakref.ref(tensor))
        return tensor

    references = []
    monkeypatch.setattr(offline.Saved, "read", counted)
    first, _, second, _ = find_weights(folder / "run").values()
    names = comparable(first, second)
    assert living == [], "nothing is read to list what there is"
    compare(first, second, names)
    assert len(living) == 2 * len(names) and max(living) == 1


def test_the_figure_has_a_labelled_panel_for_each_parameter():
    pair = {"weight": difference(torch.zeros(9), torch.linspace(-1, 1, 9)), "bias": difference(*[torch.ones(2)] * 2)}
    figure = difference_figure(pair, title="b minus a")
    figure.draw_without_rendering()
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["weight\nlargest 1, relative inf", "bias\nequal in every element"]
    for axes in figure.axes:
        assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_yscale()) == ("second - first", "elements", "log")
    drawn = figure.axes[0].patches[0].get_data().values
    assert drawn.tolist() == pair["weight"].counts.tolist()
    for number in (0, PANELS + 1):
        with pytest.raises(ValueError, match=f"room for 1 to 12 parameters, got {number}"):
            difference_figure(dict.fromkeys(range(number)))


def test_every_control_changes_the_picture(saved):
    folder, live, _ = saved
    browser = checkpoint_browser(folder / "run")
    values = {name: control.value for name, control in browser.controls.items()}
    assert (values["first"], values["second"]) == ("step_00000010, live", "step_00000020, average 0")
    picked = {name: difference(live[10][name], live[20][name]) for name in ("0.weight", "2.bias")}
    for name, value in (
        ("second", "step_00000020, live"),
        ("parameters", ("0.weight", "2.bias")),
        ("first", "step_00000010, average 0"),
        ("first", "step_00000010, live"),
    ):
        before = bytes(browser.picture.value)
        browser.controls[name].value = value
        assert bytes(browser.picture.value) != before, name
    expected = difference_figure(picked, title="step_00000020, live  minus  step_00000010, live")
    assert np.array_equal(pixels(browser.picture), pixels(png(expected))), "not the picture of the plain figure"


def test_parameters_follow_the_chosen_pair(saved):
    folder, _, _ = saved
    export_safetensors(folder / "wide.safetensors", EMA_FSDP(wide := model_of(0, width=5)), wide)
    files = [folder / name for name in ("average.safetensors", "split", "wide.safetensors")]
    browser = checkpoint_browser(*files, second="split", parameters=["0.weight", "2.bias"])
    move(browser.controls["second"], "wide.safetensors")
    assert set(browser.controls["parameters"].options) == {"2.bias", "1.num_batches_tracked"}
    assert browser.controls["parameters"].value == ("2.bias",), "what is still there stays chosen"
    assert browser.errors.text == ""


def test_more_parameters_than_panels_are_counted_in_the_title(tmp_path, monkeypatch):
    many = nn.ModuleList(nn.Linear(1, 1) for _ in range(10))
    export_safetensors(tmp_path / "many.safetensors", EMA_FSDP(many), many)
    browser, drawn = checkpoint_browser(tmp_path / "many.safetensors"), []

    def look(differences, title):
        drawn.append((len(differences), title))
        return difference_figure(differences, title=title)

    monkeypatch.setattr("fsdp_ema_lib.lab.checkpoint_browser.difference_figure", look)
    browser.controls["parameters"].value = browser.controls["parameters"].options
    [(panels, title)] = drawn
    assert panels == PANELS and title.endswith("; the first 12 of 20 parameters")


def test_a_damaged_checkpoint_is_shown_as_an_error_and_found_headless(saved, tmp_path):
    folder, _, _ = saved
    (folder / "run" / "step_00000020" / "manifest.json").write_text("{")
    browser = checkpoint_browser(folder / "run")
    assert browser.controls["second"].options[-1] == "step_00000020, unreadable"
    move(browser.controls["second"], "step_00000020, unreadable")
    assert errors_found_headless(browser, tmp_path)[0].startswith("DamagedCheckpointError: ")
    move(browser.controls["second"], "step_00000010, live")
    assert errors_found_headless(browser, tmp_path) == []


def test_an_error_in_its_callback_is_found_headless(saved, monkeypatch, tmp_path):
    folder, _, _ = saved
    browser = checkpoint_browser(folder / "run")

    def fail(*args, **kwargs):
        raise RuntimeError("no memory left")

    monkeypatch.setattr("fsdp_ema_lib.lab.checkpoint_browser.difference", fail)
    move(browser.controls["first"], "step_00000020, live")
    assert errors_found_headless(browser, tmp_path) == ["RuntimeError: no memory left"]
    monkeypatch.undo()
    browser.controls["first"].value = "step_00000010, live"
    with pytest.raises(ValueError, match="parameters: choose at least one of the"):
        browser.controls["parameters"].value = ()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"first": "step 10"}, "first: 'step 10' not found; there are 'step_00000010, live', "),
        ({"parameters": ["0.weight", "x"]}, "parameters: 'x' not found; there are '0.bias', '0.weight'"),
    ],
)
def test_an_unknown_choice_is_refused_with_those_there_are(saved, arguments, text):
    folder, _, _ = saved
    with pytest.raises(ValueError, match=text):
        checkpoint_browser(folder / "run", **arguments)


def test_a_damaged_file_is_named_when_it_is_opened(tmp_path):
    (tmp_path / "broken.safetensors").write_bytes(b"no header")
    with pytest.raises(DamagedCheckpointError, match="broken.safetensors"):
        checkpoint_browser(tmp_path / "broken.safetensors")


def test_every_control_has_a_description(saved):
    folder, _, _ = saved
    assert keyboard_controls(checkpoint_browser(folder / "run")) == {
        "first": ipywidgets.Dropdown,
        "second": ipywidgets.Dropdown,
        "parameters": ipywidgets.SelectMultiple,
    }
