"""What a metric does as a parameter changes: the figures of the report."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullFormatter, NullLocator

from fsdp_ema_lib.lab import plots

MOST_LINES = 7  # the palette has as many colours that can be told apart
MOST_TICKS = 10


def metric_by_parameter(
    lines: Mapping[str, Sequence[tuple[Any, float]]], *, parameter: str, metric: str, averaged: bool
) -> Figure:
    """Draw the values of a metric over a parameter: runs as points, their mean as a line.

    Numbers stand on the scale, linear, logarithmic or logit, on which they are spread most evenly, so that decays such
    as 0.9, 0.99 and 0.999 do not crowd; other values stand side by side.

    Args:
        lines: (parameter, metric) of every run, by what is to be told apart; up to `MOST_LINES`. The parameter's values
            are all numbers or all text.
        parameter: its name.
        metric: its name.
        averaged: say in the title that the line is a mean over runs.

    Raises:
        ValueError: no line, or more than there are colours.

    Example:
        >>> runs = {"average": [(0.9, 4.0), (0.9, 5.0), (0.99, 3.0)], "live": [(0.9, 9.0), (0.99, 9.0)]}
        >>> figure = metric_by_parameter(runs, parameter="decay", metric="frechet distance", averaged=True)
        >>> figure.axes[0].get_xscale()
        'linear'
    """
    if not 1 <= len(lines) <= MOST_LINES:
        raise ValueError(f"lines: expected 1 to {MOST_LINES}, got {len(lines)}")
    values = {x for points in lines.values() for x, _ in points}
    numeric = not any(isinstance(x, str) for x in values)
    ordered = sorted(values)
    place = {x: x if numeric else number for number, x in enumerate(ordered)}
    figure = Figure()
    with plots.style():
        figure.set_size_inches(5.4, 3.3)
        figure.set_layout_engine("constrained")
        axes = figure.subplots()
        colors = plots.series_colors(list(lines))
        for name, points in lines.items():
            middle = means(points)
            axes.plot([place[x] for x in middle], list(middle.values()), "-", color=colors[name], label=_plain(name))
            xs, ys = zip(*((place[x], y) for x, y in points), strict=True)
            axes.plot(xs, ys, "o", color=colors[name], alpha=0.55, markersize=4.5)
        _scale_x(axes, ordered, numeric)
        everything = [y for points in lines.values() for _, y in points]
        if min(everything) > 0 and max(everything) / min(everything) > 5:
            plots.plain_log_axis(axes)
        axes.set(xlabel=_plain(parameter), ylabel=_plain(metric))
        what = "line: mean over runs, points: runs" if averaged else "each point is one run"
        axes.set_title(f"{_plain(metric)} by {_plain(parameter)}\n", fontweight="bold", fontsize=10)
        axes.text(0, 1.02, what, transform=axes.transAxes, fontsize=8.5, color="0.35")
        if len(lines) > 1:
            figure.legend(loc="outside lower left", ncols=2, fontsize=8.5)
    return figure


def means(points: Sequence[tuple[Any, float]]) -> dict[Any, float]:
    """Mean of the metric at each value of the parameter, in their order.

    Example:
        >>> means([(0.99, 3.0), (0.9, 4.0), (0.9, 5.0)])
        {0.9: 4.5, 0.99: 3.0}
    """
    found: dict[Any, list[float]] = {}
    for x, y in sorted(points, key=lambda point: point[0]):
        found.setdefault(x, []).append(y)
    return {x: fmean(ys) for x, ys in found.items()}


def _scale_x(axes: Any, ordered: Sequence[Any], numeric: bool) -> None:
    if numeric:
        scale = even_scale(ordered)
        axes.set_xscale(scale)
        if len(ordered) <= MOST_TICKS:
            axes.xaxis.set_major_locator(FixedLocator(ordered))
            axes.xaxis.set_major_formatter(FixedFormatter([f"{x:g}" for x in ordered]))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.margins(x=0.08)
        return
    labels = [_plain(str(x)) for x in ordered]
    axes.set_xticks(range(len(ordered)), labels, rotation=30 if sum(map(len, labels)) > 50 else 0)
    axes.set_xlim(-0.5, len(ordered) - 0.5)


def even_scale(values: Sequence[float]) -> str:
    """Name the axis scale of matplotlib on which sorted numbers are spread most evenly.

    Example:
        >>> [even_scale(values) for values in ([1, 2, 3], [1, 10, 100], [0.9, 0.99, 0.999], [0, 1, 1000])]
        ['linear', 'log', 'logit', 'linear']
    """
    scales = {"linear": list(values)}
    if values[0] > 0:
        scales["log"] = [math.log(x) for x in values]
        if values[-1] < 1:
            scales["logit"] = [math.log(x / (1 - x)) for x in values]

    def crowding(name: str) -> float:
        gaps = [after - before for before, after in zip(scales[name], scales[name][1:], strict=False)]
        return max(gaps) / min(gaps) if gaps else 1.0

    # Rounded, so that the plainest of equals wins.
    return min(scales, key=lambda name: round(crowding(name), 2))


def _plain(text: str) -> str:
    """Text in which matplotlib sees no formula."""
    return text.replace("$", r"\$")
