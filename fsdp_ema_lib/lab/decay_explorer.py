"""What a decay does, measured on the real average: a figure, and controls that redraw it."""

from __future__ import annotations

import io
import math
from dataclasses import asdict, is_dataclass
from typing import Any

import ipywidgets
import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

from fsdp_ema_lib.decay import (
    BiasCorrected,
    Constant,
    Cosine,
    HalfLife,
    HalfLifeFraction,
    InverseGamma,
    PowerFunction,
    Schedule,
    Warmup,
    check_decay,
    decay_from_half_life,
    decay_over_interval,
    half_life_of,
    sigma_rel_to_gamma,
)
from fsdp_ema_lib.ema import EMA_FSDP, PRECISIONS
from fsdp_ema_lib.lab.plots import LIVE_COLOR, OKABE_ITO, plain_log_axis, style
from fsdp_ema_lib.lab.widgets import Explorer

#: In place of an EMA's `precision`: an average that is kept in bf16, as the live weights often are. No EMA does that.
NAIVE_BF16 = "bf16, no EMA_FSDP"
#: Schedules by the name that the explorer shows, and which of its numbers each depends on.
SCHEDULES: dict[str, tuple[str, ...]] = {
    "constant": ("decay",),
    "warm-up": ("decay",),
    "inverse gamma": ("decay",),
    "half-life": ("half_life",),
    "half-life, share of training": ("share",),
    "power function": ("width",),
    "cosine": ("decay",),
    "bias-corrected": ("decay",),
}
_FLOOR = 1e-17


def track_average(
    decay: float | Schedule,
    live: Tensor,
    *,
    start: Tensor | None = None,
    device: str | torch.device = "cpu",
    **settings: Any,
) -> Tensor:
    """Run a real `EMA_FSDP` over a trajectory of live weights and record its average after every update.

    Args:
        decay: a number, or a schedule from `fsdp_ema_lib.decay`.
        live: shape (updates, width), the live weights at each update; the columns are independent weights of one layer.
        start: shape (width,), the weights when the average is built; zeros by default.
        device: where the layer and its average live.
        settings: what else to give `EMA_FSDP`, such as `update_every`.

    Returns:
        Shape (updates, width), in the average's dtype (fp32, or fp64 with that `precision`), on the CPU: row n - 1 is
        the average after update n.

    Raises:
        ValueError: `live` is not of shape (updates, width) with at least one of each, or `start` not of (width,).

    Example:
        >>> track_average(0.5, torch.ones(3, 1)).flatten().tolist()
        [0.5, 0.75, 0.875]
    """
    if live.ndim != 2 or 0 in live.shape:
        raise ValueError(f"live must have shape (updates, width), at least (1, 1); got {tuple(live.shape)}")
    if start is not None and start.shape != live.shape[1:]:
        raise ValueError(f"start must have shape {tuple(live.shape[1:])}, as a row of live; got {tuple(start.shape)}")
    layer = nn.Linear(live.shape[1], 1, bias=False, device=device)
    rows = live.to(layer.weight)
    with torch.no_grad():
        layer.weight.copy_(torch.zeros_like(rows[0]) if start is None else start)
        ema = EMA_FSDP(layer, decay, **settings)
        averages = torch.empty_like(rows, dtype=ema.shadow["weight"].dtype)
        for row, average in zip(rows, averages, strict=True):
            layer.weight.copy_(row)
            ema.update(layer)
            average.copy_(ema.shadow["weight"][0])
    return averages.cpu()


def track_in_bf16(decays: dict[int, float], live: Tensor, start: Tensor) -> Tensor:
    """The average that is kept in bf16 and updated by `mul_` and `add_`, without any care for rounding.

    Args:
        decays: update, counted from 1, to its decay; at all others the average rests.
        live: shape (updates, width).
        start: shape (width,).

    Returns:
        Shape (updates, width), bf16.
    """
    average, averages = start.bfloat16(), torch.empty(live.shape, dtype=torch.bfloat16)
    for n, row in enumerate(live, start=1):
        if n in decays:
            average.mul_(decays[n]).add_(row, alpha=1 - decays[n])
        averages[n - 1] = average
    return averages


def make_schedule(name: str, *, decay: float, share: float, width: float, updates: int) -> Schedule:
    """Build one of `SCHEDULES`.

    Args:
        name: which one.
        decay: constant decay, or where the schedule is going; of the cosine where it begins. "half-life" takes that
            decay's half-life.
        share: the half-life as a share of training so far.
        width: `sigma_rel` of the power function.
        updates: after how many the cosine is at 1.

    Raises:
        ValueError: a number out of its range, or an unknown name, with those that there are.

    Example:
        >>> make_schedule("warm-up", decay=0.99, share=0.05, width=0.1, updates=600)
        Warmup(decay=0.99)
    """
    kinds = {
        "constant": lambda: Constant(decay),
        "warm-up": lambda: Warmup(decay),
        "inverse gamma": lambda: InverseGamma(max_decay=decay),
        # No decay has the half-life 0.
        "half-life": lambda: HalfLife(half_life_of(decay)) if decay > 0 else Constant(0.0),
        "half-life, share of training": lambda: HalfLifeFraction(share),
        "power function": lambda: PowerFunction.from_sigma_rel(width),
        "cosine": lambda: Cosine(decay, updates),
        "bias-corrected": lambda: BiasCorrected(decay),
    }
    if name not in kinds:
        raise ValueError(f"schedule must be one of {', '.join(map(repr, kinds))}; got {name!r}")
    return kinds[name]()


class DecayFigure:
    """Four panels for one average, measured and computed exactly; drawn once, then only its data change.

    Its profile (which steps are in it), a step (how soon it follows), a noisy path (what is smoothed away, and how far
    it lags), and its rounding error.

    Args:
        updates: length of training, in steps, at least 2.
        noise: standard deviation of the noise around a path that falls from 1 to 0; at least 0.
        seed: of the noise.
        device: where the average runs.

    Example:
        >>> figure = DecayFigure(updates=200).draw(0.9)
        >>> [axes.get_title(loc="left") for axes in figure.axes]
        ['Profile: half of it in the last 7 steps', 'Step: the start keeps 7.1e-10',
         'Noisy path: noise x 0.23', 'Rounding: up to ... off']
    """

    def __init__(
        self, *, updates: int = 600, noise: float = 0.3, seed: int = 0, device: str | torch.device = "cpu"
    ) -> None:
        if updates < 2:
            raise ValueError(f"updates must be at least 2, got {updates}")
        if not (math.isfinite(noise) and noise >= 0):
            raise ValueError(f"noise must be a finite standard deviation of at least 0, got {noise}")
        self._device = device
        self._steps = np.arange(1, updates + 1)
        falling = torch.exp(-torch.arange(updates) / (updates / 4))
        noisy = falling + noise * torch.randn(updates, generator=torch.Generator().manual_seed(seed))
        # Columns: the step, the path, and for the profile one weight per step that is 1 at that step alone.
        self._live = torch.cat([torch.ones(updates, 1), noisy[:, None], torch.eye(updates)], dim=1)
        self._start = torch.zeros(updates + 2)
        self._start[1] = noisy[0]
        self._build()

    def _build(self) -> None:
        steps, nothing = self._steps, np.full(len(self._steps), np.nan)
        with style():
            self.figure = Figure(figsize=(9.6, 6.4))
            self._canvas = FigureCanvasAgg(self.figure)
            self._background: Any = None
            panels = self.figure.subplots(2, 2).ravel()
            ylabels = ["weight / largest weight", "weight", "weight", "error of the average"]
            for axes, ylabel in zip(panels, ylabels, strict=True):
                axes.set(xlabel="training step", ylabel=ylabel, xlim=(0, len(steps)))
            profile, step, path, rounding = panels
            for axes, column in ((step, 0), (path, 1)):
                axes.plot(steps, self._live[:, column], color=LIVE_COLOR, alpha=0.4, linewidth=0.9, label="live weight")
            profile.set(ylim=(-0.03, 1.05))
            step.set(ylim=(-0.03, 1.08))
            plain_log_axis(rounding, subs=(1,))
            rounding.set(ylim=(_FLOOR / 2, 2.0))
            self._measured = [axes.plot(steps, nothing, color=OKABE_ITO[0], label="average")[0] for axes in panels]
            self._exact = [
                axes.plot(steps, nothing, "--", color=OKABE_ITO[1], label="exact (float64)")[0]
                for axes in (profile, step, path)
            ]
            self._half = profile.axvline(0, color=OKABE_ITO[2], linewidth=1.2, linestyle=":")
            self._half.set_label("half of the weight is right of it")
            self._titles = [axes.set_title(" ") for axes in panels] + [self.figure.suptitle(" ", x=0.01, ha="left")]
            handles = [step.lines[0], self._measured[0], self._exact[0], self._half]
            self.figure.legend(handles=handles, loc="outside lower center", ncols=4)

    def draw(self, decay: float | Schedule, *, update_every: int = 1, precision: str = "fp32") -> Figure:
        """Measure anew and put the result into the figure, which is returned.

        Args:
            decay: a number in [0, 1), or a schedule.
            update_every: steps per update, as for `EMA_FSDP`, at most the length of training.
            precision: as for `EMA_FSDP`, or `NAIVE_BF16`.

        Raises:
            ValueError: one of them out of its range; the figure is as it was.
        """
        if not callable(decay):
            decay = Constant(check_decay(decay))
        if not 1 <= update_every <= len(self._steps):
            raise ValueError(f"update_every must be from 1 to the {len(self._steps)} steps, got {update_every}")
        ends = range(update_every, len(self._steps) + 1, update_every)
        decays = {n: decay_over_interval(decay, n - update_every + 1, n) for n in ends}
        if precision == NAIVE_BF16:
            averages = track_in_bf16(decays, self._live, self._start)
        else:
            settings = {"update_every": update_every, "precision": precision}
            averages = track_average(decay, self._live, start=self._start, device=self._device, **settings)
        self._fill(averages.double().numpy(), decays)
        every = "every step" if update_every == 1 else f"every {update_every} steps"
        self._titles[-1].set_text(f"{_words(decay)}, {every}, {precision}")
        return self.figure

    def _fill(self, averages: np.ndarray, decays: dict[int, float]) -> None:
        profile, kept = _exact_profile(decays, len(self._steps))
        step = 1 - kept
        path = _exact_average(decays, self._live[:, 1].tolist(), float(self._start[1]))
        error = np.abs(averages[:, 0] - step)
        top = profile.max()
        for line, values in zip(
            self._measured, [averages[-1, 2:] / top, averages[:, 0], averages[:, 1], error.clip(_FLOOR)], strict=True
        ):
            line.set_ydata(values)
        for line, values in zip(self._exact, [profile / top, step, path], strict=True):
            line.set_ydata(values)
        inside = np.cumsum(profile[::-1]) >= 0.5
        last = int(inside.argmax()) + 1 if inside.any() else None
        self._half.set_xdata([len(self._steps) - last + 0.5 if last else np.nan] * 2)
        texts = [
            f"Profile: half of it in the last {last} step{'s' * (last > 1)}" if last else "Profile: half is the start",
            f"Step: the start keeps {kept[-1]:.2g}",
            # Independent noise of every step, weighed by the profile.
            f"Noisy path: noise x {math.sqrt((profile**2).sum()):.2g}",
            f"Rounding: up to {error.max():.1g} off",
        ]
        for title, text in zip(self._titles, texts, strict=False):
            title.set_text(text)

    def png(self) -> bytes:
        """The figure as it is now, for the screen."""
        if self._background is None:
            self._draw_background()
        # Axes, ticks and the live weights are the same every time, and drawing them takes 30 times as long as the rest.
        self._canvas.restore_region(self._background)
        for artist in self._moving():
            artist.draw(self._canvas.get_renderer())
        buffer = io.BytesIO()
        pixels = np.asarray(self._canvas.buffer_rgba())[:, :, :3]
        Image.fromarray(np.ascontiguousarray(pixels)).save(buffer, format="png", compress_level=1)
        return buffer.getvalue()

    def _draw_background(self) -> None:
        for artist in self._moving():
            artist.set_animated(True)  # left out by canvas.draw
        self._canvas.draw()
        self._background = self._canvas.copy_from_bbox(self.figure.bbox)
        for artist in self._moving():
            artist.set_animated(False)

    def _moving(self) -> list[Artist]:
        return [self._half, *self._measured, *self._exact, *self._titles]


def _exact_profile(decays: dict[int, float], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Weight of each step in the average at the end, and share of the start after each step."""
    factors, new = np.ones(length), np.zeros(length)
    for n, decay in decays.items():
        factors[n - 1], new[n - 1] = decay, 1 - decay
    after = np.append(np.cumprod(factors[::-1])[::-1][1:], 1.0)
    return new * after, np.cumprod(factors)


def _exact_average(decays: dict[int, float], live: list[float], start: float) -> list[float]:
    average, averages = start, []
    for n, value in enumerate(live, start=1):
        decay = decays.get(n, 1.0)
        average = decay * average + (1 - decay) * value
        averages.append(average)
    return averages


def _words(schedule: Schedule) -> str:
    """A schedule in a line: "Warmup, decay 0.99"."""
    if isinstance(schedule, Constant):
        return f"Constant decay {schedule.decay:.5g}, half-life {half_life_of(schedule.decay):.3g} updates"
    name = type(schedule).__name__
    numbers = asdict(schedule) if is_dataclass(schedule) else {}
    return ", ".join([name, *(f"{key} {value:.4g}" for key, value in numbers.items())])


def decay_explorer(
    decay: float = 0.99,
    *,
    schedule: str = "constant",
    share: float = 0.05,
    width: float = 0.10,
    update_every: int = 1,
    precision: str = "fp32",
    updates: int = 600,
    noise: float = 0.3,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Explorer:
    """Controls over a `DecayFigure` that follows them: schedule, decay, half-life, interval, precision.

    A control that the schedule does not depend on is switched off: the half-life belongs to the schedule of that name.
    A notebook draws the same figure once in a plain cell: viewers without a kernel show no widget.

    Args:
        decay: where its slider starts, in [0, 1); the ranges of all sliders grow to hold what is given.
        schedule: one of `SCHEDULES`.
        share: half-life as a share of training, in (0, 1].
        width: `sigma_rel` of the power function, in (0, 0.2887].
        update_every, precision: as for `DecayFigure.draw`.
        updates, noise, seed, device: as for `DecayFigure`.

    Returns:
        The explorer; its `controls` are "schedule", "decay", "half_life", "share", "width", "update_every" and
        "precision".

    Raises:
        ValueError: one of the arguments outside its range.

    Example:
        >>> explorer = decay_explorer(decay=0.95, updates=50)
        >>> explorer.controls["decay"].value = 0.5
        >>> bytes(explorer.picture.value[:4]), explorer.errors.text
        (b'\\x89PNG', '')
    """
    drawing = DecayFigure(updates=updates, noise=noise, seed=seed, device=device)
    # Whatever is chosen first, the others can be chosen later, so all must be right.
    check_decay(decay), HalfLifeFraction(share), sigma_rel_to_gamma(width)
    chosen = make_schedule(schedule, decay=decay, share=share, width=width, updates=updates)
    drawing.draw(chosen, update_every=update_every, precision=precision)
    controls = _controls(schedule, decay, share, width, update_every, precision, updates)

    def adjust(changed: str) -> None:
        if changed == "schedule":
            _switch(controls)

    def draw(schedule: str, half_life: float, update_every: int, precision: str, **numbers: float) -> bytes:
        # Two sliders that set each other would never come to rest: the page rounds what it is given to a slider's own
        # steps, and sends that back as if it was moved.
        if schedule == "half-life":
            numbers["decay"] = decay_from_half_life(half_life)
        chosen = make_schedule(schedule, updates=updates, **numbers)
        drawing.draw(chosen, update_every=update_every, precision=precision)
        return drawing.png()

    _switch(controls)
    alt = "Profile, step response, noisy path and rounding error of an average, measured and exact"
    return Explorer("decay-explorer", controls, draw, alt=alt, adjust=adjust)


def _controls(
    schedule: str, decay: float, share: float, width: float, update_every: int, precision: str, updates: int
) -> dict[str, Any]:
    half_life = half_life_of(decay)
    longest = max(10_000.0, half_life)
    # A decay of 0 has the half-life 0, which no logarithmic slider reaches.
    shortest = max(min(1.0, half_life), 0.1)
    return {
        "schedule": ipywidgets.Dropdown(options=list(SCHEDULES), value=schedule, description="schedule"),
        "precision": ipywidgets.Dropdown(options=[*PRECISIONS, NAIVE_BF16], value=precision, description="precision"),
        "decay": ipywidgets.FloatSlider(
            value=decay,
            min=min(0.5, decay),
            max=max(decay_from_half_life(longest), decay),
            step=0.0005,
            readout_format=".5f",
            description="decay",
        ),
        "half_life": ipywidgets.FloatLogSlider(
            value=half_life,
            min=math.log10(shortest),
            max=math.log10(longest) + 1e-9,
            step=0.02,
            readout_format=".3g",
            description="half-life",
        ),
        "share": ipywidgets.FloatSlider(
            value=share,
            min=min(0.01, share),
            max=max(0.5, share),
            step=0.01,
            readout_format=".2f",
            description="share of training",
        ),
        "width": ipywidgets.FloatSlider(
            value=width,
            min=min(0.02, width),
            max=max(0.28, width),
            step=0.005,
            readout_format=".3f",
            description="width (sigma_rel)",
        ),
        "update_every": ipywidgets.IntSlider(
            value=update_every, min=1, max=min(max(50, update_every), updates), description="update every"
        ),
    }


def _switch(controls: dict[str, Any]) -> None:
    """Switch off the controls that the chosen schedule does not depend on."""
    used = SCHEDULES[controls["schedule"].value]
    for name in ("decay", "half_life", "share", "width"):
        controls[name].disabled = name not in used
