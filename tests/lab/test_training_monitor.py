"""The training monitor: the same numbers as a plain training, steered from outside, with errors that are found."""

import signal
import threading
from dataclasses import replace

import ipywidgets
import numpy as np
import pytest
from explorers import errors_found_headless, keyboard_controls, move, pixels, press

from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.lab.digits import load_digits
from fsdp_ema_lib.lab.flow import cycled_labels, sample
from fsdp_ema_lib.lab.frechet import DigitDistance
from fsdp_ema_lib.lab.notebooks import inspect_notebook
from fsdp_ema_lib.lab.runs import run_notebook
from fsdp_ema_lib.lab.training import TrainingConfig, build_model, train
from fsdp_ema_lib.lab.training_monitor import TrainingMonitor

CONFIG = TrainingConfig(steps=12, eval_every=6, batch_size=16, hidden=16, blocks=1, wrapper="none")
ENDLESS = TrainingConfig(steps=10**6, eval_every=10**6, batch_size=8, hidden=16, blocks=1, wrapper="none")


@pytest.fixture(scope="module")
def digits():
    return load_digits()


@pytest.fixture(scope="module")
def frechet(digits):
    return DigitDistance(digits)


@pytest.fixture
def make_monitor(digits, frechet):
    made = []

    def make(config=CONFIG, **settings):
        made.append(TrainingMonitor(digits.train, frechet, config, **{"samples": 30, "decay": 0.9, **settings}))
        return made[-1]

    yield make
    for monitor in made:
        monitor.stop()
        if monitor.state != "ready":
            monitor.wait_for("stopped", "finished", "failed", timeout=120)
    assert "training monitor" not in [thread.name for thread in threading.enumerate()]


def plain_training(digits, frechet, config=CONFIG, decay=0.9):
    model = build_model(config)
    labels = cycled_labels(30)

    def evaluate(weights):
        return {"frechet": frechet(sample(weights, labels, steps=8, seed=config.seed))}

    emas = {f"EMA {decay:g}": EMA_FSDP(model, decay)}
    return train(model, digits.train, config, emas=emas, evaluate=evaluate, progress=False)


def buttons_on(monitor):
    return {name for name in ("start", "pause", "resume", "stop") if not monitor.controls[name].disabled}


def test_it_measures_what_a_plain_training_measures_though_it_was_paused(make_monitor, digits, frechet, tmp_path):
    monitor = make_monitor()
    assert buttons_on(monitor) == {"start"}
    press(monitor.controls["start"])
    press(monitor.controls["pause"])
    monitor.wait_for("paused", timeout=120)
    assert buttons_on(monitor) == {"resume", "stop"}
    assert monitor.controls["decay"].disabled
    press(monitor.controls["resume"])
    assert monitor.wait(timeout=120) == plain_training(digits, frechet)
    assert monitor.ema.num_updates == 12
    assert buttons_on(monitor) == {"start"}
    assert errors_found_headless(monitor, tmp_path) == []


def test_the_picture_shows_what_was_measured(make_monitor):
    monitor = make_monitor()
    empty = pixels(monitor.picture)
    monitor.start()
    monitor.wait(timeout=120)
    assert not np.array_equal(pixels(monitor.picture), empty)
    loss, apart, quality, live, average = monitor.figure().axes
    assert len(loss.lines[0].get_ydata()) == 12
    assert list(apart.lines[0].get_ydata()) == monitor.history.series("distance_to_live")[1]["EMA 0.9"]
    drawn = {line.get_label(): list(line.get_ydata()) for line in quality.lines[:2]}
    assert drawn == monitor.history.series("frechet")[1]
    for axes, images in ((live, sample(monitor.model, cycled_labels(30), steps=8)), (average, averaged(monitor))):
        assert np.array_equal(axes.images[0].get_array()[:8, :8], images[0].double().numpy())


def averaged(monitor):
    with monitor.ema.swapped_into(monitor.model):
        return sample(monitor.model, cycled_labels(30), steps=8)


def test_a_stopped_training_keeps_what_it_measured_and_another_one_can_start(make_monitor, digits, frechet):
    monitor = make_monitor(ENDLESS)
    monitor.start()
    assert buttons_on(monitor) == {"pause", "stop"}
    with pytest.raises(RuntimeError, match="start: a training is running; stop it first"):
        monitor.start()
    press(monitor.controls["stop"])
    stopped = monitor.wait(timeout=120)
    assert monitor.state == "stopped"
    assert {record["step"] for record in stopped.records} == {len(stopped.losses)}, "the last step is measured"
    move(monitor.controls["steps"], 100)
    move(monitor.controls["decay"], 0.8)
    press(monitor.controls["start"])
    assert len(monitor.wait(timeout=120).losses) == 100
    assert set(monitor.history.series("distance_to_live")[1]) == {"EMA 0.8"}
    assert stopped is not monitor.history


def test_the_sliders_start_at_the_configuration_and_change_the_empty_picture(make_monitor):
    monitor = make_monitor()
    values = {name: monitor.controls[name].value for name in ("decay", "learning_rate", "steps")}
    assert values == {"decay": 0.9, "learning_rate": CONFIG.learning_rate, "steps": 12}
    for name, value in (("decay", 0.95), ("learning_rate", 0.01), ("steps", 3000)):
        before = bytes(monitor.picture.value)
        move(monitor.controls[name], value)
        assert bytes(monitor.picture.value) != before, name


def test_an_interrupt_does_not_reach_the_training(make_monitor):
    monitor = make_monitor(ENDLESS)
    monitor.start()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
        monitor.wait(timeout=120)
    assert monitor.state == "running"
    monitor.pause()
    monitor.wait_for("paused", timeout=120)


def test_a_newer_monitor_ends_the_training_of_the_older(make_monitor):
    older = make_monitor(ENDLESS)
    older.start()
    make_monitor()
    older.wait(timeout=120)
    assert older.state == "stopped"


@pytest.mark.parametrize("where", ["frechet", "png"])
def test_an_error_in_the_thread_is_shown_found_headless_and_raised_to_who_waits(
    make_monitor, monkeypatch, tmp_path, where
):
    monitor = make_monitor()

    def fail(*args, **kwargs):
        raise RuntimeError("no memory left")

    press(monitor.controls["start"])
    press(monitor.controls["pause"])
    monitor.wait_for("paused", timeout=120)
    if where == "frechet":
        monitor._frechet = fail
    else:
        monkeypatch.setattr("fsdp_ema_lib.lab.training_monitor.png", fail)
    press(monitor.controls["resume"])
    with pytest.raises(RuntimeError, match="no memory left"):
        monitor.wait(timeout=120)
    assert monitor.state == "failed"
    assert buttons_on(monitor) == {"start"}
    assert errors_found_headless(monitor, tmp_path) == ["RuntimeError: no memory left"]


def test_an_error_in_the_callback_of_a_button_is_found_headless_until_the_next_start(
    make_monitor, monkeypatch, tmp_path
):
    monitor = make_monitor()

    def fail(*args):
        raise RuntimeError("no such device")

    monkeypatch.setattr("fsdp_ema_lib.lab.training_monitor.build_model", fail)
    press(monitor.controls["start"])
    assert errors_found_headless(monitor, tmp_path) == ["RuntimeError: no such device"]
    monkeypatch.undo()
    press(monitor.controls["start"])
    monitor.wait(timeout=120)
    assert errors_found_headless(monitor, tmp_path) == []


def test_a_diverging_training_says_so(make_monitor, tmp_path):
    monitor = make_monitor(replace(CONFIG, learning_rate=1e30))
    monitor.start()
    with pytest.raises(FloatingPointError, match="training diverged"):
        monitor.wait(timeout=120)
    assert errors_found_headless(monitor, tmp_path)[0].startswith("FloatingPointError: the loss became")


def test_every_control_has_a_description(make_monitor):
    assert keyboard_controls(make_monitor()) == {
        **dict.fromkeys(("decay", "learning rate", "steps"), ipywidgets.SelectionSlider),
        **dict.fromkeys(("Start", "Pause", "Resume", "Stop"), ipywidgets.Button),
    }


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"config": replace(CONFIG, wrapper="fsdp2")}, "config: wrapper must be \"none\", got 'fsdp2'"),
        ({"samples": 29}, "samples must be at least 30, got 29"),
        ({"decay": 1.0}, r"decay must be a finite number in \[0, 1\)"),
    ],
)
def test_what_cannot_be_monitored_is_refused(make_monitor, arguments, text):
    with pytest.raises(ValueError, match=text):
        make_monitor(**arguments)


BUILD = """
from fsdp_ema_lib.lab.digits import load_digits
from fsdp_ema_lib.lab.frechet import DigitDistance
from fsdp_ema_lib.lab.training import TrainingConfig
from fsdp_ema_lib.lab.training_monitor import TrainingMonitor

def build(steps):
    digits = load_digits()
    config = TrainingConfig(steps=steps, eval_every=steps, hidden=16, wrapper="none")
    return TrainingMonitor(digits.train, DigitDistance(digits), config, samples=30)
"""
FAIL = """
monitor = build(10)
monitor._labels = None
monitor.start()
monitor.wait_for("failed", timeout=120)
monitor
"""
LEAVE_RUNNING = "monitor = build(10**6)\nmonitor.start()\nmonitor"


def test_a_kernel_ends_though_a_training_runs_in_it_and_the_run_finds_an_error_in_a_thread(
    make_notebook, no_orphans, tmp_path
):
    path = make_notebook(BUILD, FAIL, LEAVE_RUNNING)
    result = run_notebook(inspect_notebook(path), {}, tmp_path / "run", timeout=240)
    assert (result.status, result.error) == (
        "failed",
        "an error hidden in a widget: TypeError: object of type 'NoneType' has no len()",
    )
