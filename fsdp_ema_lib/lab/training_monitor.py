"""Watch a training of the digits' flow while it runs: in a thread of its own, so that the notebook stays free."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ipywidgets
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from fsdp_ema_lib.decay import check_decay, half_life_of
from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.lab.digits import Split
from fsdp_ema_lib.lab.flow import cycled_labels, sample
from fsdp_ema_lib.lab.frechet import DigitDistance
from fsdp_ema_lib.lab.plots import training_progress
from fsdp_ema_lib.lab.threads import Worker
from fsdp_ema_lib.lab.training import History, TrainingConfig, build_model, train
from fsdp_ema_lib.lab.widgets import ErrorBox, panel, picture, png

SHOWN = 30  # digits of each set of weights in the picture
SLIDERS = ("decay", "learning_rate", "steps")
BUTTONS = ("start", "pause", "resume", "stop")
_DECAYS = (0.5, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995)
_RATES = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2)
_STEPS = (100, 200, 500, 1000, 1500, 2000, 3000, 5000)
_IDLE = ("ready", "stopped", "finished", "failed")
#: Which buttons can be pressed in which state.
_USEFUL = {"running": ("pause", "stop"), "paused": ("resume", "stop"), "stopping": ()}
_latest: TrainingMonitor | None = None


class TrainingMonitor(ipywidgets.VBox):
    """Start, pause, resume and stop a training, and watch loss, distances and digits while it runs.

    It trains in a thread: cells run meanwhile, an interrupt does not reach it, and it ends when the kernel restarts or
    when another monitor is built (so a cell that builds one can run again). An error is shown below the picture, and
    `wait` raises it.

    Attributes:
        controls: the sliders "decay", "learning_rate" and "steps" of the next training, and the buttons "start",
            "pause", "resume" and "stop".
        picture, errors: as of an `Explorer`.
        history: what was measured so far.
        model, ema: what is trained, after `start`; use them when it is paused or has ended.

    Args:
        split: the training images.
        frechet: judges what is drawn.
        config: of the training; its wrapper must be "none", the thread is a job of one. Learning rate and steps are
            where the sliders start.
        decay: of the average, in [0, 1).
        samples: digits drawn at each evaluation by each set of weights, at least 30.
        device: where to train.

    Raises:
        ValueError: another wrapper, fewer samples, or a decay out of range.

    Example:
        >>> from fsdp_ema_lib.lab.digits import load_digits
        >>> digits = load_digits()
        >>> config = TrainingConfig(steps=2, eval_every=1, hidden=16, wrapper="none")
        >>> monitor = TrainingMonitor(digits.train, DigitDistance(digits), config, samples=30)
        >>> monitor.start()
        >>> history = monitor.wait(timeout=60)
        >>> monitor.state, history.series("frechet")[0]
        ('finished', [1, 2])
    """

    def __init__(
        self,
        split: Split,
        frechet: DigitDistance,
        config: TrainingConfig,
        *,
        decay: float = 0.99,
        samples: int = 200,
        device: torch.device | str = "cpu",
    ) -> None:
        if config.wrapper != "none":
            raise ValueError(
                f'config: wrapper must be "none", got {config.wrapper!r}: the monitor trains in a thread of this '
                "process, and the ranks of a sharded job must all take part"
            )
        if samples < SHOWN:
            raise ValueError(f"samples must be at least {SHOWN}, got {samples}")
        self._split, self._frechet, self._config = split, frechet, config
        self._decay = check_decay(decay)
        self._labels, self._device = cycled_labels(samples, device), device
        self.history = History()
        self._images: dict[str, Tensor] = {}
        self.controls = _controls(config, decay)
        self.picture = picture("training-monitor", "Loss, distance to the live weights, Frechet distance and samples")
        self.errors = ErrorBox()
        self._status, self._progress = ipywidgets.HTML(), ipywidgets.IntProgress(description="progress")
        self._worker = self._new_worker()
        sliders = panel([self.controls[name] for name in SLIDERS])
        buttons = ipywidgets.HBox([self.controls[name] for name in BUTTONS])
        state = ipywidgets.HBox([self._progress, self._status])
        super().__init__([sliders, buttons, state, self.picture, self.errors])
        self.add_class("training-monitor")
        for name, act in zip(BUTTONS, (self.start, self.pause, self.resume, self.stop), strict=True):
            self.controls[name].on_click(lambda _, act=act: self._guarded(act))
        for name in SLIDERS:
            self.controls[name].observe(lambda _: self._guarded(self._preview), names="value")
        self._preview()
        _stop_the_one_before(self)

    # ------------------------------------------------------------ steering

    @property
    def state(self) -> str:
        """ "ready", "running", "paused", "stopping", "stopped", "finished" or "failed"."""
        return self._worker.state

    def start(self) -> None:
        """Begin a training with the sliders' values and fresh weights.

        Raises:
            RuntimeError: one is running or paused.
        """
        if self.state not in _IDLE:
            raise RuntimeError(f"start: a training is {self.state}; stop it first")
        self._take_sliders()
        self.errors.clear()
        self.history, self._images = History(), {}
        self.model = build_model(self._config, self._device)
        self.ema = EMA_FSDP(self.model, self._decay)
        self._redraw()
        self._worker = self._new_worker()
        self._worker.start()

    def pause(self) -> None:
        """Let it wait at the end of this step."""
        self._worker.pause()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._worker.resume()

    def stop(self) -> None:
        """End it after this step. What was measured stays."""
        self._worker.stop()

    def wait(self, timeout: float | None = None) -> History:
        """Wait for the end and return the history; an interrupt ends the waiting, not the training.

        Raises:
            TimeoutError: it takes longer than `timeout` seconds. RuntimeError: it was not started. And whatever the
            training raised.
        """
        return self._worker.result(timeout)

    def wait_for(self, *states: str, timeout: float | None = None) -> str:
        """Wait until `state` is one of these, and return which.

        Raises:
            TimeoutError: it was not, for `timeout` seconds.
        """
        return self._worker.wait_for(*states, timeout=timeout)

    # ------------------------------------------------------------ in the thread

    def _new_worker(self) -> Worker:
        return Worker(self._train, name="training monitor", on_change=lambda: self._guarded(self._show_state))

    def _train(self, worker: Worker) -> History:
        with self.errors.showing():
            drawn = 0

            def after_step(step: int, history: History) -> None:
                nonlocal drawn
                self.history, self._progress.value = history, step
                if len(history.records) > drawn:
                    drawn = len(history.records)
                    self._redraw()
                    self._show_state()

            return train(
                self.model,
                self._split,
                self._config,
                emas={self._average: self.ema},
                evaluate=self._evaluate,
                progress=False,
                should_stop=lambda: not worker.keep_going(),
                after_step=after_step,
            )

    def _evaluate(self, weights: nn.Module) -> dict[str, float]:
        images = sample(weights, self._labels, steps=8, seed=self._config.seed)
        self._images[self._average if self.ema.is_swapped else "live"] = images[:SHOWN].cpu()
        return {"frechet": self._frechet(images)}

    # ------------------------------------------------------------ showing

    @property
    def _average(self) -> str:
        return f"EMA {self._decay:g}"

    def figure(self) -> Figure:
        """The picture as a figure, of the training so far."""
        steps, distances, frechet = [], {}, {}
        if self.history.records:
            steps, distances = self.history.series("distance_to_live")
            _, frechet = self.history.series("frechet")
        return training_progress(
            self.history.losses,
            steps,
            distances,
            frechet,
            self._images,
            total_steps=self._config.steps,
            reference=("real digits", self._frechet.real),
            title=f"{self._average} (half-life {half_life_of(self._decay):.3g} updates), "
            f"learning rate {self._config.learning_rate:.2g}",
        )

    def _guarded(self, act: Callable[[], None]) -> None:
        with self.errors.showing():
            act()

    def _take_sliders(self) -> None:
        decay, rate, steps = (self.controls[name].value for name in SLIDERS)
        self._config, self._decay = replace(self._config, learning_rate=rate, steps=steps), decay

    def _preview(self) -> None:
        """Before the first training the picture shows what the sliders ask for; later on, what was trained."""
        if self.state == "ready":
            self._take_sliders()
            self._redraw()
            self._show_state()

    def _redraw(self) -> None:
        self.picture.value = png(self.figure())

    def _show_state(self) -> None:
        useful = _USEFUL.get(self.state, ("start",))
        for name in BUTTONS:
            self.controls[name].disabled = name not in useful
        for name in SLIDERS:
            self.controls[name].disabled = self.state not in _IDLE
        losses = self.history.losses[-50:]
        loss = f", mean of the last {len(losses)} losses {sum(losses) / len(losses):.4f}" if losses else ""
        self._progress.max = self._config.steps
        self._status.value = f"{self.state}, step {self._progress.value} of {self._config.steps}{loss}"


def _controls(config: TrainingConfig, decay: float) -> dict[str, Any]:
    return {
        "decay": _slider("decay", _DECAYS, decay),
        "learning_rate": _slider("learning rate", _RATES, config.learning_rate),
        "steps": _slider("steps", _STEPS, config.steps),
        **{name: ipywidgets.Button(description=name.capitalize()) for name in BUTTONS},
    }


def _slider(description: str, usual: Sequence[float], value: float) -> ipywidgets.SelectionSlider:
    # Over a list, because the page rounds the value of any other slider to its steps and sends that back.
    options = [(f"{number:g}", number) for number in sorted({*usual, value})]
    return ipywidgets.SelectionSlider(options=options, value=value, description=description)


def _stop_the_one_before(monitor: TrainingMonitor) -> None:
    """Two trainings at once would halve each other's speed, and the cell that built the other one may be gone."""
    global _latest
    if _latest is not None:
        _latest.stop()
    _latest = monitor
