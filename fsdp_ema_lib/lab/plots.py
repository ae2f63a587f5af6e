"""One look for every figure of the notebooks, and the figures that more than one of them draws."""

from __future__ import annotations

import contextlib
import math
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from fsdp_ema_lib.lab import figure_check

# Okabe and Ito (2008), "Color Universal Design". Black and yellow come last: black marks the live
# weights (`series_colors`), and yellow is hard to see on white.
OKABE_ITO = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
LIVE_COLOR = "#000000"
_LINE_STYLES = ("-", "--", ":", "-.")

_STYLE: dict[str, Any] = {
    "axes.prop_cycle": plt.cycler(color=OKABE_ITO),
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "figure.constrained_layout.use": True,
    "figure.dpi": 100,
    "figure.figsize": (7.2, 4.0),
    "figure.titlesize": 12,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # ships with matplotlib, so figures are the same on every machine
    "font.size": 10,
    "grid.alpha": 0.3,
    "image.cmap": "gray_r",
    "image.interpolation": "nearest",
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "savefig.dpi": 120,
    "svg.hashsalt": "fsdp_ema_lib",  # else the ids in an SVG are other ones every time
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
}
_STYLING = threading.RLock()


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Draw in the house style inside the block, and leave matplotlib's settings as they were after it.

    The settings belong to the process, so one thread at a time is inside; the others wait.

    Example:
        >>> with style():
        ...     figure, axes = plt.subplots()
        >>> figure.get_dpi()
        100.0
        >>> plt.close(figure)
    """
    # Not `rc_context`, which puts back every setting: a notebook's first figure starts the inline backend, and that
    # makes pyplot interactive. Undone, no later figure of the notebook would show.
    with _STYLING:
        before = {key: matplotlib.rcParams[key] for key in _STYLE}
        matplotlib.rcParams.update(_STYLE)
        try:
            yield
        finally:
            matplotlib.rcParams.update(before)


def save(figure: Figure, folder: str | Path, name: str) -> Path:
    """Write a figure as `folder/name.png` (120 dpi, for the screen) and `folder/name.svg` (for print).

    The same data drawn anew give the same bytes. The figure stays open, so a notebook shows it when the cell ends;
    naming it on the cell's last line as well would show it twice. Every axis must say what it shows (`figure_check`).

    Args:
        figure: the figure to write.
        folder: where the files go; made if missing.
        name: file name, with or without ".png"; no folders in it.

    Returns:
        The path of the PNG.

    Raises:
        ValueError: `name` is empty, holds a path separator, or has the suffix of another kind of picture; or an axis
            has no label (all are named).

    Warns:
        FigureWarning: text is cut off, a legend lies over data, or labels collide. The files are written all the same.

    Example:
        >>> import tempfile
        >>> figure = loss_curve([3.0, 2.0, 1.5])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(figure, folder, "loss").name, sorted(path.name for path in Path(folder).iterdir())
        ('loss.png', ['loss.png', 'loss.svg'])
        >>> plt.close(figure)
    """
    stem = name.removesuffix(".png")
    if not stem or Path(stem).name != stem or Path(stem).suffix in {".pdf", ".svg", ".jpg", ".jpeg"}:
        raise ValueError(
            f'name must be a plain file name such as "loss" or "loss.png", got {name!r}. '
            "Give the directory as `folder`; figures are written as PNG and as SVG."
        )
    if complaints := figure_check.unlabelled(figure):
        raise ValueError(
            f"{stem}: {'; '.join(complaints)}. Say what each axis shows, with its unit: axes.set(xlabel=, ylabel=), "
            "figure.supxlabel for panels that share it, or axes.set_axis_off() for a picture."
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}.png"
    # Without what matplotlib would add by itself: its version, the time.
    figure.savefig(path, dpi=_STYLE["savefig.dpi"], metadata={"Software": None})
    with style():  # for the ids in the SVG
        figure.savefig(path.with_suffix(".svg"), metadata={"Creator": None, "Date": None})
    for complaint in figure_check.hard_to_read(figure):
        warnings.warn(f"{path.name}: {complaint}", figure_check.FigureWarning, stacklevel=2)
    return path


def series_colors(names: Sequence[str]) -> dict[str, str]:
    """Give every series its color: black for "live", the house cycle for the rest, in the order given.

    The same names in the same order get the same colors in every figure.

    Example:
        >>> series_colors(["live", "EMA 0.9"])
        {'live': '#000000', 'EMA 0.9': '#0072B2'}
    """
    cycle = [color for color in OKABE_ITO if color != LIVE_COLOR]
    averages = [name for name in names if name != "live"]
    colors = {name: cycle[index % len(cycle)] for index, name in enumerate(averages)}
    return {name: colors.get(name, LIVE_COLOR) for name in names}


def loss_curve(
    losses: Sequence[float],
    *,
    window: int = 50,
    title: str = "Training loss",
    ylabel: str = "loss (mean squared error)",
) -> Figure:
    """Draw the loss of every step, pale, under its mean over the last `window` steps.

    Args:
        losses: one finite value per step, first step first.
        window: steps in the trailing mean, at least 1; the first `window - 1` means are over the steps so far.
        title: title of the figure.
        ylabel: what the loss is.

    Raises:
        ValueError: `losses` is empty, or `window` is below 1.

    Example:
        >>> figure = loss_curve([2.0, 1.0, 1.0], window=2)
        >>> [line.get_label() for line in figure.axes[0].lines]
        ['loss of each step', 'mean of the last 2 steps']
        >>> plt.close(figure)
    """
    values = np.asarray(losses, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"losses must be a sequence of at least one number, got shape {values.shape}")
    if window < 1:
        raise ValueError(f"window must be at least 1 step, got {window}")
    with style():
        figure, axes = plt.subplots()
        _draw_losses(axes, values, window)
        axes.set(title=title, ylabel=ylabel)
        _legend_beside(figure, axes)
    return figure


def _draw_losses(axes: Axes, values: np.ndarray, window: int) -> None:
    steps = np.arange(1, len(values) + 1)
    # Black: the loss is that of the live weights.
    axes.plot(steps, values, color="0.7", linewidth=0.7, label="loss of each step")
    axes.plot(steps, trailing_mean(values, window), color=LIVE_COLOR, label=f"mean of the last {window} steps")
    axes.set(xlabel="optimizer step", ylabel="loss (mean squared error)")
    if len(values):
        axes.set_ylim(*_robust_limits(values))


def trailing_mean(values: Sequence[float] | np.ndarray, window: int) -> np.ndarray:
    """Mean of each value and the up to `window - 1` values before it, in float64; shape (n,) to (n,).

    Example:
        >>> trailing_mean([1.0, 3.0, 5.0], window=2).tolist()
        [1.0, 2.0, 4.0]
    """
    sums = np.cumsum(np.concatenate([[0.0], np.asarray(values, dtype=np.float64)]))
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def metric_over_training(
    steps: Sequence[int],
    series: Mapping[str, Sequence[float]],
    *,
    ylabel: str,
    title: str = "",
    reference: tuple[str, float] | None = None,
    log: bool = False,
) -> Figure:
    """Draw how one number develops over training for several sets of weights.

    Args:
        steps: the steps at which it was measured, ascending.
        series: name of the weights to one value per step; "live" is drawn in black.
        ylabel: the axis label: what the number is, and which way is better.
        title: title of the figure.
        reference: label and value of a horizontal line to compare with, such as real data against real data.
        log: logarithmic vertical axis.

    Raises:
        ValueError: a series has another length than `steps` (all such series are named), or there is none.

    Example:
        >>> figure = metric_over_training([1, 2], {"live": [3.0, 2.0], "EMA 0.9": [4.0, 1.5]}, ylabel="distance")
        >>> [text.get_text() for text in figure.legends[0].get_texts()]
        ['live', 'EMA 0.9']
        >>> plt.close(figure)
    """
    _check_series(steps, series)
    with style():
        figure, axes = plt.subplots()
        _draw_series(axes, steps, series)
        if reference is not None:
            label, value = reference
            axes.axhline(value, color="0.45", linestyle="--", linewidth=1.2, label=label)
        if log:
            plain_log_axis(axes)
        axes.set(xlabel="optimizer step", ylabel=ylabel, title=title)
        _legend_beside(figure, axes)
    return figure


def _draw_series(axes: Axes, steps: Sequence[int], series: Mapping[str, Sequence[float]]) -> None:
    colors = series_colors(list(series))
    averages = [name for name in series if name != "live"]
    for name, values in series.items():
        # Past the end of the color cycle the line style tells the series apart.
        rounds = averages.index(name) // (len(OKABE_ITO) - 1) if name in averages else 0
        line = _LINE_STYLES[rounds % len(_LINE_STYLES)]
        axes.plot(steps, values, line, color=colors[name], label=name, marker="o", markersize=3.5)


def distance_to_live(
    steps: Sequence[int],
    series: Mapping[str, Sequence[float]],
    *,
    title: str = "Distance between each average and the live weights",
) -> Figure:
    """Draw the relative distance of each average to the live weights, ||average - live|| / ||live||.

    Args:
        steps: the steps at which it was measured, ascending.
        series: name of the average to one distance per step (dimensionless, positive).
        title: title of the figure.

    Raises:
        ValueError: as `metric_over_training`.

    Example:
        >>> figure = distance_to_live([1, 2], {"EMA 0.9": [0.1, 0.05]})
        >>> figure.axes[0].get_yscale()
        'log'
        >>> plt.close(figure)
    """
    return metric_over_training(steps, series, ylabel="relative distance to live", title=title, log=True)


def sample_grid(
    images: Mapping[str, Any],
    *,
    columns: int = 10,
    limits: tuple[float, float] = (-1.0, 1.0),
    title: str = "",
) -> Figure:
    """Show several sets of images side by side, each as a grid under its name.

    Args:
        images: name to array or tensor of shape (n, height, width), all of one image size.
        columns: images per row of each grid, at least 1.
        limits: values drawn as white and as black.
        title: title over all the grids.

    Raises:
        ValueError: there is no set, `columns` is below 1, or a set is not (n >= 1, height, width); the set is named.

    Example:
        >>> figure = sample_grid({"live": np.zeros((6, 8, 8))}, columns=3)
        >>> figure.axes[0].images[0].get_array().shape
        (17, 26)
        >>> plt.close(figure)
    """
    if not images:
        raise ValueError("images must hold at least one set of images, got none")
    if columns < 1:
        raise ValueError(f"columns must be at least 1, got {columns}")
    tiles = {name: _tile(name, batch, columns, limits[0]) for name, batch in images.items()}
    rows, cols = next(iter(tiles.values())).shape
    across = min(len(tiles), 3)
    down = -(-len(tiles) // across)
    size = (3.6 * across, (3.4 * rows / cols + 0.3) * down + (0.35 if title else 0.05))
    with style():
        figure, grid = plt.subplots(down, across, figsize=size, squeeze=False)
        figure.get_layout_engine().set(w_pad=0.1, wspace=0)
        for axes in grid.flat:
            axes.set_axis_off()
        for axes, (name, picture) in zip(grid.flat, tiles.items(), strict=False):
            axes.imshow(picture, vmin=limits[0], vmax=limits[1])
            axes.set_title(name)
        if title:
            figure.suptitle(title, x=0.1 / size[0], ha="left")
    return figure


def training_progress(
    losses: Sequence[float],
    steps: Sequence[int],
    distances: Mapping[str, Sequence[float]],
    frechet: Mapping[str, Sequence[float]],
    images: Mapping[str, Any],
    *,
    total_steps: int,
    reference: tuple[str, float] | None = None,
    title: str = "",
) -> Figure:
    """Draw a training so far on one page: loss, distance to the live weights, Frechet distance, and what they draw.

    Any of the data may be empty: nothing was measured yet. The figure is no pyplot figure, so any thread may draw one,
    and a notebook shows it where a cell ends with it.

    Args:
        losses: of every step so far.
        steps: at which the rest was measured.
        distances: name of an average to its relative distance to the live weights at those steps.
        frechet: name of the weights to their Frechet distance at those steps; "live" is drawn in black.
        images: name to what these weights draw now, shape (n, height, width), for at most two sets of weights.
        total_steps: where the horizontal axes end.
        reference: label and value of a horizontal line in the panel of Frechet distances.
        title: over all of it.

    Raises:
        ValueError: a series of another length than `steps`, or more than two sets of images.

    Example:
        >>> images = {"live": np.zeros((4, 8, 8)), "EMA": np.zeros((4, 8, 8))}
        >>> figure = training_progress([2.0, 1.0], [2], {"EMA": [0.1]}, {"live": [9.0], "EMA": [8.0]}, images,
        ...                            total_steps=10)
        >>> [axes.get_title(loc="left") for axes in figure.axes]
        ['Loss', 'Distance to live', 'Frechet distance', 'live draws', 'EMA draws']
    """
    if len(images) > 2:
        raise ValueError(f"images: there is room for two sets of weights, got {', '.join(images)}")
    for series in (distances, frechet):
        _check_series(steps, series, or_none=True)
    with style():
        figure = Figure(figsize=(9.6, 6.4))
        grid = figure.add_gridspec(2, 4)
        loss, apart, quality = (figure.add_subplot(cells) for cells in (grid[0, :2], grid[0, 2:], grid[1, :2]))
        _draw_losses(loss, np.asarray(losses, dtype=np.float64), 50)
        _draw_series(apart, steps, distances)
        _draw_series(quality, steps, frechet)
        if reference is not None:
            quality.axhline(reference[1], color="0.45", linestyle="--", linewidth=1.2, label=reference[0])
        loss.set(title="Loss")
        apart.set(title="Distance to live", xlabel="optimizer step", ylabel="||average - live|| / ||live||")
        quality.set(title="Frechet distance", xlabel="optimizer step", ylabel="distance (lower is better)")
        apart.set_ylim(bottom=0)
        if frechet:
            plain_log_axis(quality)
        for axes in (loss, apart, quality):
            axes.set_xlim(0, total_steps)
        for column, (name, batch) in enumerate(images.items(), start=2):
            axes = figure.add_subplot(grid[1, column])
            axes.imshow(_tile(name, batch, 5, -1.0), vmin=-1.0, vmax=1.0)
            axes.set_title(f"{name} draws")
            axes.set_axis_off()
        if title:
            figure.suptitle(title, x=0.01, ha="left")
        found = {
            label: handle
            for axes in (loss, quality)
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(list(found.values()), list(found), loc="outside lower center", ncols=5)
    return figure


def _tile(name: str, batch: Any, columns: int, background: float) -> np.ndarray:
    """One picture of a batch (n, height, width), row by row, a background pixel between the images."""
    pixels = np.asarray(batch.detach().cpu() if hasattr(batch, "detach") else batch, dtype=np.float64)
    if pixels.ndim != 3 or pixels.shape[0] == 0:
        raise ValueError(f"{name}: expected images of shape (n, height, width) with n at least 1, got {pixels.shape}")
    count, height, width = pixels.shape
    rows = -(-count // columns)
    picture = np.full((rows * (height + 1) - 1, columns * (width + 1) - 1), background)
    for index, image in enumerate(pixels):
        top, left = (index // columns) * (height + 1), (index % columns) * (width + 1)
        picture[top : top + height, left : left + width] = image
    return picture


def _check_series(steps: Sequence[int], series: Mapping[str, Sequence[float]], *, or_none: bool = False) -> None:
    if not series and not or_none:
        raise ValueError("series must hold at least one line to draw, got none")
    wrong = {name: len(values) for name, values in series.items() if len(values) != len(steps)}
    if wrong:
        found = ", ".join(f"{name}: {length}" for name, length in wrong.items())
        raise ValueError(f"every series needs one value for each of the {len(steps)} steps, got {found}")


def _legend_beside(figure: Figure, axes: Axes) -> None:
    """A legend right of the axes never hides a curve; constrained layout makes room for it."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")


def plain_log_axis(axes: Axes, *, subs: Sequence[float] = (1, 2, 5)) -> None:
    """Make the vertical axis logarithmic, with plain numbers at these multiples of the powers of ten.

    Example:
        >>> figure, axes = plt.subplots()
        >>> plain_log_axis(axes)
        >>> axes.get_yscale(), axes.yaxis.get_major_formatter()(0.05)
        ('log', '0.05')
        >>> plt.close(figure)
    """
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _robust_limits(values: np.ndarray) -> tuple[float, float]:
    """Axis limits that a few extreme first steps cannot stretch until the rest is a flat line."""
    low, high = float(values.min()), float(np.quantile(values, 0.995))
    margin = 0.08 * (high - low) or 0.5
    return low - margin, high + margin


def rank_grid(
    layouts: Mapping[str, Mapping[str, np.ndarray]], *, title: str = "", figure: Figure | None = None
) -> Figure:
    """Draw every element of every parameter as a cell in the color of the rank that holds it; one row per layout.

    A cell that several ranks hold is divided among their colors; one that nobody holds is white. Matrices have their
    rows downwards and their columns to the right, vectors go downwards.

    Args:
        layouts: label to parameter name to a boolean array of shape (ranks, n) or (ranks, rows, columns): does the rank
            hold the element? The same parameters in every layout, at most 8 ranks.
        title: title of the figure.
        figure: an empty one to draw in, whose size changes; by default a new one of pyplot's, which a notebook shows.

    Raises:
        ValueError: no layout, layouts of different parameters, an array of another shape, or more ranks than colors.

    Example:
        >>> figure = rank_grid({"by rows": {"weight": np.array([[[True], [False]], [[False], [True]]])}})
        >>> figure.axes[0].images[0].get_array().shape, [text.get_text() for text in figure.legends[0].get_texts()]
        ((2, 1, 3), ['rank 0', 'rank 1'])
        >>> plt.close(figure)
    """
    names, ranks = _check_layouts(layouts)
    first = next(iter(layouts.values()))
    rows = max(first[name].shape[1] for name in names)
    columns = [max(math.prod(first[name].shape[2:]), 4) for name in names]
    margin = 0.09 * max(len(line) for label in layouts for line in label.splitlines()) + 1.6
    with style():
        size = (0.17 * sum(columns) + 0.3 * len(names) + margin, 0.17 * (rows + 1) * len(layouts) + 1.0)
        figure = plt.figure() if figure is None else figure
        figure.set_size_inches(size)
        panels = figure.subplots(len(layouts), len(names), squeeze=False, width_ratios=columns)
        for line, (label, holders) in zip(panels, layouts.items(), strict=True):
            for axes, name in zip(line, names, strict=True):
                _draw_holders(axes, holders[name], rows)
            line[0].set_ylabel(label, rotation=0, ha="right", va="center", labelpad=8)
        for axes, name in zip(panels[0], names, strict=True):
            axes.set_title(name, fontsize=8, pad=4)
        figure.supxlabel("column", fontsize=9)
        figure.supylabel("row", fontsize=9)
        figure.suptitle(title, x=0.01, ha="left")
        patches = [Patch(color=OKABE_ITO[rank], label=f"rank {rank}") for rank in range(ranks)]
        figure.legend(handles=patches, loc="outside right upper")
    return figure


def _check_layouts(layouts: Mapping[str, Mapping[str, np.ndarray]]) -> tuple[list[str], int]:
    """The names of the parameters, and the number of ranks of the largest job."""
    if not layouts:
        raise ValueError("layouts must hold at least one layout to draw, got none")
    names = list(next(iter(layouts.values())))
    for label, holders in layouts.items():
        if list(holders) != names:
            raise ValueError(f"{label}: every layout must have the parameters {names}, this one has {list(holders)}")
        for name, array in holders.items():
            if array.dtype != bool or array.ndim not in (2, 3):
                raise ValueError(
                    f"{label}: {name}: expected a boolean array of shape (ranks, n) or (ranks, rows, columns), "
                    f"got {array.dtype} of shape {array.shape}"
                )
    ranks = max(len(array) for holders in layouts.values() for array in holders.values())
    if ranks > len(OKABE_ITO):
        raise ValueError(f"layouts: there are colors for {len(OKABE_ITO)} ranks, got {ranks}")
    return names, ranks


def _draw_holders(axes: Axes, holders: np.ndarray, rows: int) -> None:
    cells = holders.reshape(*holders.shape[:2], -1)
    _, height, width = cells.shape
    strips = max(int(cells.sum(0).max()), 1)
    picture = np.ones((height, width * strips, 3))
    for row, column in np.ndindex(height, width):
        of_cell = np.flatnonzero(cells[:, row, column])
        for strip in range(strips if len(of_cell) else 0):
            rank = of_cell[strip * len(of_cell) // strips]
            picture[row, column * strips + strip] = to_rgb(OKABE_ITO[rank])
    axes.imshow(picture, extent=(0, width, height, 0), aspect="equal")
    axes.hlines(range(height + 1), 0, width, color="white", linewidth=1.2)
    axes.vlines(range(width + 1), 0, height, color="white", linewidth=1.2)
    axes.set(xlim=(0, width), ylim=(rows + 1, 0), anchor="NW", xticks=[])
    # Right below the last row, which need not be where the axes end.
    for column in (0, width - 1) if width > 1 else ():
        axes.text(column + 0.5, height + 0.15, str(column), ha="center", va="top", fontsize=7)
    ends = sorted({0, height - 1})
    axes.set_yticks([row + 0.5 for row in ends], [str(row) for row in ends])
    axes.tick_params(length=0, labelsize=7, pad=1)
    axes.grid(False)
    axes.spines[:].set_visible(False)


def equality_matrix(
    rows: Sequence[str], columns: Sequence[str], differing: Mapping[str, np.ndarray], *, title: str = ""
) -> Figure:
    """Draw which parts came back bit for bit for every pair of a row and a column, and elsewhere how many bytes differ.

    Args:
        rows: labels downwards, such as what was saved.
        columns: labels to the right, such as what loaded it.
        differing: part to an array of shape (rows, columns): how many of its bytes differ. The parts share each cell.
        title: title of the figure.

    Raises:
        ValueError: no part, or an array of another shape (all such are named).

    Example:
        >>> figure = equality_matrix(["a", "b"], ["a"], {"model": np.array([[0], [7]])})
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['0', '7', 'model']
        >>> plt.close(figure)
    """
    shape = (len(rows), len(columns))
    wrong = {part: np.shape(counts) for part, counts in differing.items() if np.shape(counts) != shape}
    if wrong or not differing:
        raise ValueError(f"differing: every part needs an array of shape {shape}, got {wrong or 'no part'}")
    width = 0.95 / len(differing)
    with style():
        figure, axes = plt.subplots(figsize=(1.05 * len(columns) + 2.3, 0.5 * len(rows) + 2.1))
        for number, (part, counts) in enumerate(differing.items()):
            for row, column in np.ndindex(*shape):
                left = column - 0.475 + number * width
                count = int(counts[row][column])
                color = OKABE_ITO[1] if count else OKABE_ITO[2]
                axes.add_patch(Rectangle((left, row - 0.42), width * 0.92, 0.84, facecolor=color))
                axes.text(left + width * 0.46, row, f"{count:,}", ha="center", va="center", color="white", fontsize=7)
            for column in range(len(columns)):
                axes.text(column - 0.46 + (number + 0.3) * width, -0.5, part, rotation=40, fontsize=7)
        axes.set(xlim=(-0.55, len(columns) - 0.45), ylim=(len(rows) - 0.45, -0.55))
        axes.set_title(title, pad=26)
        _label_matrix(axes, rows, columns)
        patches = [Patch(color=OKABE_ITO[2], label="bit-equal"), Patch(color=OKABE_ITO[1], label="not equal")]
        figure.legend(handles=patches, loc="outside lower right", ncols=2)
    return figure


def magnitude_matrix(
    rows: Sequence[str], columns: Sequence[str], values: np.ndarray, *, title: str = "", label: str = ""
) -> Figure:
    """Draw one number for every pair of a row and a column: its power of ten as a color, exact zeros in white.

    Args:
        rows, columns: labels downwards and to the right.
        values: shape (rows, columns).
        title: title of the figure.
        label: what the number is.

    Raises:
        ValueError: `values` has another shape, or one is negative or not finite.

    Example:
        >>> figure = magnitude_matrix(["a"], ["a", "b"], np.array([[0.0, 2e-7]]))
        >>> [text.get_text() for text in figure.axes[0].texts]
        ['0', '2e-07']
        >>> plt.close(figure)
    """
    values = np.asarray(values, dtype=np.float64)
    if values.shape != (len(rows), len(columns)) or not (np.isfinite(values) & (values >= 0)).all():
        raise ValueError(
            f"values must be finite, at least 0 and of shape {(len(rows), len(columns))}, got shape {values.shape}"
        )
    powers = np.log10(values, where=values > 0, out=np.full(values.shape, np.nan))
    there = powers[np.isfinite(powers)]
    # Whole powers of ten, so that small differences look small.
    low, high = (np.floor(there.min()), np.ceil(there.max())) if there.size else (0.0, 0.0)
    high = max(high, low + 1)
    with style():
        figure, axes = plt.subplots(figsize=(1.05 * len(columns) + 2.9, 0.55 * len(rows) + 1.6))
        picture = axes.imshow(powers, cmap="cividis_r", aspect="auto", vmin=low, vmax=high)
        for (row, column), value in np.ndenumerate(values):
            color = "white" if value and powers[row, column] > (low + high) / 2 else "black"
            axes.text(column, row, f"{value:.0e}" if value else "0", ha="center", va="center", color=color, fontsize=8)
        axes.set_title(title)
        _label_matrix(axes, rows, columns)
        if there.size:
            figure.colorbar(picture, ax=axes, label=f"{label} (power of ten)", shrink=0.8)
    return figure


def _label_matrix(axes: Axes, rows: Sequence[str], columns: Sequence[str]) -> None:
    axes.set_xticks(range(len(columns)), [label.replace(" ", "\n", 1) for label in columns])
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set(xlabel="loaded by", ylabel="saved by")
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)


def timeline(
    undisturbed: Mapping[str, Sequence[float]],
    attempts: Sequence[tuple[Sequence[int], Mapping[str, Sequence[float]]]],
    ends: Sequence[str],
    *,
    saved: Sequence[int] = (),
    title: str = "",
) -> Figure:
    """Lay a run that was broken off and resumed over an undisturbed one, and show what each attempt did.

    Args:
        undisturbed: what was measured, to one value for each step from 1.
        attempts: of each attempt its steps, ascending, and the same measurements at these.
        ends: how each attempt ended, in a few words.
        saved: steps after which there is a checkpoint.
        title: title of the figure.

    Raises:
        ValueError: no measurement, an attempt that lacks one or has another number of values than steps, or not one end
            for each attempt.

    Example:
        >>> attempts = [([1, 2], {"loss": [3, 2]}), ([2, 3], {"loss": [2, 1]})]
        >>> figure = timeline({"loss": [3, 2, 1]}, attempts, ["killed", "done"])
        >>> len(figure.axes), figure.axes[-1].get_xlabel()
        (2, 'optimizer step (dotted: a checkpoint)')
        >>> plt.close(figure)
    """
    _check_timeline(undisturbed, attempts, ends)
    colors = [color for color in OKABE_ITO if color != LIVE_COLOR]
    heights = [2.0] * len(undisturbed) + [0.35 * len(attempts) + 0.3]
    with style():
        figure, panels = plt.subplots(
            len(heights), 1, figsize=(8.8, sum(heights) + 0.9), sharex=True, height_ratios=heights
        )
        for axes, (name, values) in zip(panels, undisturbed.items(), strict=False):
            axes.plot(range(1, len(values) + 1), values, color="0.8", linewidth=6, label="undisturbed")
            for number, (steps, measured) in enumerate(attempts):
                color = colors[number % len(colors)]
                axes.plot(steps, measured[name], color=color, linewidth=1.4, label=f"attempt {number + 1}")
                if number < len(attempts) - 1 and len(steps):
                    axes.plot(steps[-1], measured[name][-1], "X", color=color, markersize=9, markeredgecolor="white")
            axes.set_ylabel(name)
        _draw_attempts(panels[-1], [steps for steps, _ in attempts], ends, saved, colors)
        panels[0].set_title(title)
        panels[0].set_xlim(0, max(map(len, undisturbed.values())) + 1)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(attempts) + 1)
    return figure


def _check_timeline(
    undisturbed: Mapping[str, Sequence[float]],
    attempts: Sequence[tuple[Sequence[int], Mapping[str, Sequence[float]]]],
    ends: Sequence[str],
) -> None:
    if not undisturbed:
        raise ValueError("undisturbed must hold at least one measurement, got none")
    if len(ends) != len(attempts):
        raise ValueError(f"ends: expected one for each of the {len(attempts)} attempts, got {len(ends)}")
    for number, (steps, measured) in enumerate(attempts, start=1):
        wrong = [name for name in undisturbed if len(measured.get(name, ())) != len(steps)]
        if wrong:
            raise ValueError(
                f"attempt {number}: expected {len(steps)} values, one for each step, of {', '.join(wrong)}"
            )


def _draw_attempts(
    axes: Axes, attempts: Sequence[Sequence[int]], ends: Sequence[str], saved: Sequence[int], colors: Sequence[str]
) -> None:
    """A bar for each attempt from its first step to its last, and a line for each checkpoint."""
    for step in saved:
        axes.axvline(step + 0.5, color="0.6", linewidth=1, linestyle=":", zorder=0)
    for number, (steps, end) in enumerate(zip(attempts, ends, strict=True)):
        if steps:
            axes.barh(
                number, steps[-1] - steps[0] + 1, left=steps[0] - 0.5, height=0.7, color=colors[number % len(colors)]
            )
        first, last = (steps[0] - 0.5, steps[-1] + 0.5) if steps else (0.0, 0.0)
        inside, early = last - first > 0.35 * axes.get_xlim()[1], first < 0.5 * axes.get_xlim()[1]
        axes.annotate(
            end,
            (first if inside or not early else last, number),
            xytext=(4 if inside or early else -4, 0),
            textcoords="offset points",
            ha="left" if inside or early else "right",
            va="center",
            fontsize=8,
            color="white" if inside else "black",
        )
    axes.set_yticks(range(len(attempts)), [str(number + 1) for number in range(len(attempts))])
    axes.set(xlabel="optimizer step (dotted: a checkpoint)", ylabel="attempt", ylim=(len(attempts) - 0.4, -0.6))
    axes.grid(False)
