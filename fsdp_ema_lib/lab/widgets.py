"""What a decay does, measured on the real average: a figure, and a slider that redraws it."""

from __future__ import annotations

import io
import math
from typing import Any

import ipywidgets
import numpy as np
import torch
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imsave
from torch import Tensor, nn

from fsdp_ema_lib.decay import Schedule, check_decay, half_life_of, window_of
from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.lab.plots import LIVE_COLOR, OKABE_ITO, style


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
        Shape (updates, width), fp32, on the CPU: row n - 1 is the average after update n.

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
    averages = torch.empty_like(rows)
    with torch.no_grad():
        layer.weight.copy_(torch.zeros_like(rows[0]) if start is None else start)
        ema = EMA_FSDP(layer, decay, **settings)
        for n, row in enumerate(rows):
            layer.weight.copy_(row)
            ema.update(layer)
            averages[n] = ema.shadow["weight"][0]
    return averages.cpu()


class DecayFigure:
    """Three panels for one constant decay, measured and in closed form; drawn once, then only its data change.

    An impulse (how much of one step is left), a step (how long until the average follows), and a noisy trajectory
    (what is smoothed away, and how far the average lags).

    Args:
        updates: length of the trajectories, at least 2.
        noise: standard deviation of the noise around a trajectory that falls from 1 to 0; at least 0.
        seed: of the noise.
        device: where the average runs.

    Example:
        >>> figure = DecayFigure(updates=200).draw(0.9)
        >>> [axes.get_title(loc="left") for axes in figure.axes]
        ['decay 0.9: half-life 6.58 updates', 'window 10 updates', 'std of the noise x 0.23']
    """

    def __init__(
        self, *, updates: int = 600, noise: float = 0.3, seed: int = 0, device: str | torch.device = "cpu"
    ) -> None:
        if updates < 2:
            raise ValueError(f"updates must be at least 2, got {updates}")
        if not (math.isfinite(noise) and noise >= 0):
            raise ValueError(f"noise must be a finite standard deviation of at least 0, got {noise}")
        self._device = device
        self._ages = torch.arange(updates)
        impulse = torch.zeros(updates)
        impulse[0] = 1.0
        falling = torch.exp(-self._ages / (updates / 4))
        noisy = falling + noise * torch.randn(updates, generator=torch.Generator().manual_seed(seed))
        self._live = torch.stack([impulse, torch.ones(updates), noisy], dim=1)
        self._start = torch.tensor([0.0, 0.0, float(noisy[0])])
        self._build()

    def _build(self) -> None:
        with style():
            self.figure = Figure(figsize=(11.0, 3.7))
            self._canvas = FigureCanvasAgg(self.figure)
            self._background: Any = None
            panels = self.figure.subplots(1, 3)
            for axes, ylabel in zip(panels, ["share of the impulse left", "average", "weight"], strict=True):
                axes.set(xlabel="update", ylabel=ylabel, xlim=(0, len(self._ages)))
            steps = self._ages + 1
            for axes, column in zip(panels[1:], [1, 2], strict=True):
                axes.plot(steps, self._live[:, column], color=LIVE_COLOR, alpha=0.4, linewidth=0.9, label="live")
            panels[0].set(xlabel="updates since the impulse", ylim=(-0.03, 1.05))
            panels[1].set(ylim=(-0.03, 1.08))
            self._measured = [
                axes.plot(x, x * 0.0, color=OKABE_ITO[0], label="average, measured")[0]
                for axes, x in zip(panels, [self._ages, steps, steps], strict=True)
            ]
            self._predicted = [
                axes.plot(x, x * 0.0, "--", color=OKABE_ITO[1], label="closed form")[0]
                for axes, x in zip(panels[:2], [self._ages, steps], strict=True)
            ]
            self._titles = [axes.set_title(" ") for axes in panels]
            self._marks = [
                axes.axvline(0, color=OKABE_ITO[2], linewidth=1.0, linestyle=":", label=label)
                for axes, label in zip(panels[:2], ["half-life, window", None], strict=True)
            ]
            handles = [panels[1].lines[0], self._measured[0], self._predicted[0], self._marks[0]]
            self.figure.legend(handles=handles, loc="outside lower center", ncols=4)

    def draw(self, decay: float) -> Figure:
        """Measure anew with this decay in [0, 1) and put the result into the figure, which is returned."""
        check_decay(decay)
        averages = track_average(decay, self._live, start=self._start, device=self._device)
        # An average with decay d gives a new step the weight 1 - d.
        self._measured[0].set_ydata(averages[:, 0] / (1 - decay))
        self._measured[1].set_ydata(averages[:, 1])
        self._measured[2].set_ydata(averages[:, 2])
        self._predicted[0].set_ydata(decay ** self._ages.double())
        self._predicted[1].set_ydata(1 - decay ** (self._ages.double() + 1))
        half_life, window = half_life_of(decay), window_of(decay)
        for mark, where in zip(self._marks, [half_life, window], strict=True):
            mark.set_xdata([where, where])
        titles = [
            f"decay {decay:.4g}: half-life {half_life:.3g} updates",
            f"window {window:.3g} updates",
            f"std of the noise x {math.sqrt((1 - decay) / (1 + decay)):.2g}",
        ]
        for title, text in zip(self._titles, titles, strict=True):
            title.set_text(text)
        return self.figure

    def png(self) -> bytes:
        """The figure as it is now, for the screen."""
        if self._background is None:
            self._draw_background()
        # Axes, ticks and the live weights are the same every time, and drawing them takes 30 times as long as the rest.
        self._canvas.restore_region(self._background)
        for axes, artist in self._moving():
            axes.draw_artist(artist)
        buffer = io.BytesIO()
        pixels = np.asarray(self._canvas.buffer_rgba())
        imsave(buffer, pixels, format="png", pil_kwargs={"compress_level": 1})
        return buffer.getvalue()

    def _draw_background(self) -> None:
        moving = [artist for _, artist in self._moving()]
        for artist in moving:
            artist.set_animated(True)  # left out by canvas.draw
        self._canvas.draw()
        self._background = self._canvas.copy_from_bbox(self.figure.bbox)
        for artist in moving:
            artist.set_animated(False)

    def _moving(self) -> list[tuple[Axes, Artist]]:
        return [(line.axes, line) for line in [*self._marks, *self._measured, *self._predicted]] + [
            (title.axes, title) for title in self._titles
        ]


def decay_explorer(
    decay: float = 0.99,
    *,
    updates: int = 600,
    noise: float = 0.3,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> ipywidgets.VBox:
    """A slider for the decay over a `DecayFigure` that follows it.

    A notebook draws the same figure once in a plain cell: what goes wrong inside a widget fails no run, and viewers
    without a kernel show no widget.

    Args:
        decay: where the slider starts, in [0, 1); its range grows to hold it.
        updates, noise, seed, device: as for `DecayFigure`.

    Returns:
        The slider, the picture, and a line for errors.

    Raises:
        ValueError: `decay`, `updates` or `noise` outside their range.

    Example:
        >>> slider, picture, complaint = decay_explorer(decay=0.95, updates=50).children
        >>> slider.value, bytes(picture.value[:4]), complaint.value
        (0.95, b'\\x89PNG', '')
    """
    decay = check_decay(decay)
    drawing = DecayFigure(updates=updates, noise=noise, seed=seed, device=device)
    slider = ipywidgets.FloatSlider(
        value=decay,
        min=min(0.5, decay),
        max=max(0.999, decay),
        step=0.0005,
        readout_format=".4f",
        description="decay",
        layout=ipywidgets.Layout(width="640px"),
    )
    picture = ipywidgets.Image(format="png")
    complaint = ipywidgets.HTML()

    def redraw(change: dict[str, Any]) -> None:
        try:
            drawing.draw(change["new"])
            picture.value = drawing.png()
            complaint.value = ""
        except Exception as error:
            # The front end would keep the old picture and say nothing.
            complaint.value = f"<b>{type(error).__name__}: {error}</b>"
            raise

    redraw({"new": slider.value})
    slider.observe(redraw, names="value")
    return ipywidgets.VBox([slider, picture, complaint])
