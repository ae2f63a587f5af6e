"""What keeps a figure from being read: axes without a label, text cut off, legends over data, labels that collide.

`plots.save` asks both questions of every figure, so every run of a notebook checks all that it saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import PathCollection
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.path import Path
from matplotlib.text import Text
from matplotlib.transforms import Bbox

# Rounding and anti-aliasing: what touches by so little (pixels) still looks apart.
_TOLERANCE = 1.5


class FigureWarning(UserWarning):
    """Something in a saved figure cannot be read well; the text names the file, the panel and the fault."""


def unlabelled(figure: Figure) -> list[str]:
    """Name the axes that do not say what they show; empty if all do.

    An axis is labelled by its own label, by that of an axis it is shared with, or by the figure's common label. Nothing
    is asked of axes that are switched off (pictures, image grids) or of an axis without ticks: there is nothing to read
    off them. A color bar needs one label, along it.

    Args:
        figure: any figure; it is not changed.

    Example:
        >>> from matplotlib import pyplot as plt
        >>> figure, axes = plt.subplots()
        >>> unlabelled(figure)
        ['panel 1: no label on the x axis', 'panel 1: no label on the y axis']
        >>> _ = axes.set(xlabel="step", ylabel="loss")
        >>> unlabelled(figure)
        []
        >>> plt.close(figure)
    """
    complaints = []
    for name, axes in _panels(figure):
        if axes.get_label() == "<colorbar>":
            if not axes.get_xlabel().strip() and not axes.get_ylabel().strip():
                complaints.append(f"{name}: no label on the color bar")
            continue
        complaints += [f"{name}: no label on the {side} axis" for side in "xy" if not _is_labelled(axes, side)]
    return complaints


def hard_to_read(figure: Figure) -> list[str]:
    """Name what a reader of the drawn figure cannot make out; empty if there is nothing.

    Looked for are text and panels that are cut off by the edge, legends that lie over lines, points, bars or images,
    tick labels that run into their neighbours, and titles that run into each other. These depend on the data as much as
    on the code.

    Args:
        figure: any figure; it is laid out, which settles its sizes as drawing it does.

    Example:
        >>> from matplotlib import pyplot as plt
        >>> figure, axes = plt.subplots()
        >>> _ = axes.plot([0, 1], [0, 1], label="a line from corner to corner")
        >>> _ = axes.legend(loc="upper right")
        >>> hard_to_read(figure)
        ['panel 1: the legend lies over a line']
        >>> plt.close(figure)
    """
    figure.draw_without_rendering()
    panels = list(_panels(figure))
    complaints = _cut_off(figure)
    for name, axes in panels:
        if (found := _under_legend(axes)) is not None:
            complaints.append(f"{name}: the legend lies over {found}")
        complaints += [
            f"{name}: tick labels of the {side} axis run into each other"
            for side in "xy"
            if _collide(_tick_labels(getattr(axes, f"{side}axis")))
        ]
    titles = [(title.get_text(), _box(title)) for axes in figure.axes for title in _titles(axes)]
    for (one, box), (other, other_box) in combinations(titles, 2):
        if _overlap(box, other_box):
            complaints.append(f"the titles {one!r} and {other!r} run into each other")
    return complaints


def _panels(figure: Figure) -> Iterator[tuple[str, Axes]]:
    for number, axes in enumerate(figure.axes, start=1):
        if axes.get_visible() and axes.axison:
            title = next((title.get_text() for title in _titles(axes)), "")
            yield f"panel {number}" + (f" ({title})" if title else ""), axes


def _titles(axes: Axes) -> Iterator[Text]:
    for title in axes.get_children():
        if isinstance(title, Text) and title not in axes.texts and title.get_visible() and title.get_text().strip():
            yield title


def _is_labelled(axes: Axes, side: str) -> bool:
    axis: Axis = getattr(axes, f"{side}axis")
    if not axis.get_visible() or len(axis.get_majorticklocs()) + len(axis.get_minorticklocs()) == 0:
        return True
    shared = getattr(axes, f"get_shared_{side}_axes")().get_siblings(axes)
    if any(getattr(sibling, f"{side}axis").get_label_text().strip() for sibling in shared):
        return True
    owners = {axes.get_figure(), axes.get_figure(root=True)}
    return any(getattr(owner, f"get_sup{side}label")().strip() for owner in owners)


def _cut_off(figure: Figure) -> list[str]:
    room = figure.bbox.padded(_TOLERANCE)
    parts = [(f"panel {number}", axes) for number, axes in enumerate(figure.axes, start=1) if axes.get_visible()]
    parts += [("a legend of the figure", legend) for legend in figure.legends]
    parts += [(f"the text {text.get_text()!r}", text) for text in figure.texts if text.get_text().strip()]
    complaints = []
    for name, artist in parts:
        box = artist.get_tightbbox()
        if box is not None and not (room.contains(box.x0, box.y0) and room.contains(box.x1, box.y1)):
            complaints.append(f"{name} is cut off by the edge of the figure")
    return complaints


def _under_legend(axes: Axes) -> str | None:
    """What kind of data lies under the legend of the axes, if any."""
    legend = axes.get_legend()
    if legend is None or not legend.get_visible():
        return None
    # Without its padding, which may well be crossed: only what is written and drawn in it must stay free.
    box = legend.get_window_extent().padded(-legend.borderpad * legend.get_texts()[0].get_fontsize())
    if any(line.get_visible() and _crosses(line, box) for line in axes.lines):
        return "a line"
    for collection in axes.collections:
        if isinstance(collection, PathCollection) and collection.get_visible():
            points = collection.get_offset_transform().transform(collection.get_offsets())
            if np.any([box.contains(x, y) for x, y in points]):
                return "points"
    bars = [bar for container in axes.containers if isinstance(container, BarContainer) for bar in container]
    if any(_overlap(box, bar.get_window_extent()) for bar in bars):
        return "a bar"
    if any(_overlap(box, image.get_window_extent()) for image in axes.images):
        return "an image"
    return None


def _crosses(line: Line2D, box: Bbox) -> bool:
    vertices = line.get_transform().transform_path(line.get_path()).vertices
    gaps = ~np.isfinite(vertices).all(axis=1)
    # Run by run: `intersects_bbox` takes the path over a gap for a segment.
    runs = np.ma.clump_unmasked(np.ma.array(gaps, mask=gaps)) if len(gaps) else []
    return any(Path(vertices[run]).intersects_bbox(box, filled=False) for run in runs)


def _tick_labels(axis: Axis) -> list[Bbox]:
    """Where the labels of the ticks in view are; turned ones are left out, since their boxes say little."""
    low, high = sorted(axis.get_view_interval())
    labels = [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    upright = [label for label in labels if label.get_rotation() % 90 == 0]
    return [_box(label) for label in upright if label.get_visible() and label.get_text().strip()]


def _collide(boxes: list[Bbox]) -> bool:
    return any(_overlap(one, other) for one, other in combinations(boxes, 2))


def _overlap(one: Bbox, other: Bbox) -> bool:
    shared = Bbox.intersection(one, other)
    return shared is not None and min(shared.width, shared.height) > _TOLERANCE


def _box(text: Text) -> Bbox:
    return text.get_window_extent()
