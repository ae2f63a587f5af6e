"""Two sets of weights on disk, whoever saved them, compared layer by layer: histograms of their difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ipywidgets
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from fsdp_ema_lib import storage
from fsdp_ema_lib.lab.plots import LIVE_COLOR, OKABE_ITO, plain_log_axis, style
from fsdp_ema_lib.lab.widgets import Explorer, png
from fsdp_ema_lib.offline import Saved, open_saved
from fsdp_ema_lib.safetensors_io import open_tensors

BINS = 41  # odd, so that zero has one of its own
PANELS = 12  # parameters in one figure at most
_UNREADABLE = "unreadable"
_CHUNK = 1 << 20  # elements that are compared at once, in float64

#: Opens one set of weights: name to something with `shape`, of which `[()]` reads all.
Opener = Callable[[], AbstractContextManager[Mapping[str, Any]]]


@dataclass(frozen=True)
class _Entry:
    """A tensor in a checkpoint, put together when it is asked for."""

    saved: Saved
    key: str
    shape: torch.Size

    def __getitem__(self, index: Any) -> Tensor:
        return self.saved.read(self.key)[index]


def find_weights(*paths: str | Path) -> dict[str, Opener]:
    """What there is to compare: each live model and each average in checkpoints, and the weights in exported files.

    Reads manifests alone. What cannot be read is among the results, and says why when it is opened.

    Args:
        paths: directories of a `CheckpointManager`, single checkpoints, safetensors files or directories in Hugging
            Face's layout, `.pt` files.

    Returns:
        Label to a function that opens it, in the order given, checkpoints by step.

    Raises:
        ValueError: no path. FileNotFoundError: a path at which there is nothing to read, named.
    """
    if not paths:
        raise ValueError("paths: name at least one checkpoint or exported file")
    found: dict[str, Opener] = {}
    for path in map(Path, paths):
        checkpoints = _checkpoints(path)
        for whole in checkpoints:
            for what, opener in _sets_of(whole).items():
                # A second directory may hold the same steps, and a third with the name of the second.
                short = f"{whole.name}, {what}", f"{whole.parent.name}/{whole.name}, {what}"
                found[next((label for label in short if label not in found), f"{whole}, {what}")] = opener
        if not checkpoints:
            if not path.exists() or (path.is_dir() and not list(path.glob("model.safetensors*"))):
                raise FileNotFoundError(f"{path}: no checkpoint and no exported weights here")
            found[path.name if path.name not in found else str(path)] = partial(open_tensors, path)
    return found


def _checkpoints(path: Path) -> list[Path]:
    if (path / storage.MANIFEST).exists():
        return [path]
    steps = [entry for entry in path.iterdir() if storage.step_of(entry.name) is not None] if path.is_dir() else []
    return sorted(entry for entry in steps if (entry / storage.MANIFEST).exists())


def _sets_of(path: Path) -> dict[str, Opener]:
    try:
        averages = list(storage.read_manifest(path)["emas"])
    except (OSError, ValueError, storage.UnsafeCheckpointError):
        # Whoever opens it is told what is wrong with it.
        return {_UNREADABLE: partial(_open_checkpoint, path, "model.")}
    names = {"live": "model.", **{f"average {name}": f"ema.{name}.shadow." for name in averages}}
    return {what: partial(_open_checkpoint, path, prefix) for what, prefix in names.items()}


@contextmanager
def _open_checkpoint(path: Path, prefix: str) -> Iterator[Mapping[str, Any]]:
    saved = open_saved(path)
    yield {
        key.removeprefix(prefix): _Entry(saved, key, entry.size)
        for key, entry in saved.tensors().items()
        if key.startswith(prefix)
    }


@dataclass(frozen=True)
class Difference:
    """One parameter of the second set minus that of the first.

    Attributes:
        elements: how many.
        unequal: how many of them are not equal.
        not_finite: how many differences are infinite or NaN; they are left out of all that follows.
        largest: the largest absolute difference.
        relative: ||second - first|| / ||first||; infinite if the first is all zero and the second is not.
        counts: elements in each of `BINS` equal bins from -largest to largest; all in the middle one if largest is 0.
    """

    elements: int
    unequal: int
    not_finite: int
    largest: float
    relative: float
    counts: np.ndarray


def compare(first: Opener, second: Opener, names: Sequence[str]) -> dict[str, Difference]:
    """Compare some parameters of two sets of weights; two tensors are in memory at a time, and a chunk of float64.

    Args:
        first, second: from `find_weights`.
        names: parameters that both have, in the order wanted.

    Raises:
        ValueError: a parameter that one of them lacks, or has in another shape; all such are named.
        DamagedCheckpointError, UnsafeCheckpointError: from reading.
    """
    with ExitStack() as stack:
        mine, theirs = (stack.enter_context(opener()) for opener in (first, second))
        faults = [fault for name in names if (fault := _misfit(name, mine, theirs))]
        if faults:
            raise ValueError("these cannot be compared: " + "; ".join(faults))
        return {name: difference(mine[name][()], theirs[name][()]) for name in names}


def comparable(first: Opener, second: Opener) -> list[str]:
    """Names that both sets have in the same shape, in the order of the first."""
    with first() as mine, second() as theirs:
        return [name for name in mine if _misfit(name, mine, theirs) is None]


def _misfit(name: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    if lacking := [which for which, there in (("first", mine), ("second", theirs)) if name not in there]:
        return f"{name} is not in the {' and the '.join(lacking)}"
    shapes = tuple(mine[name].shape), tuple(theirs[name].shape)
    return None if shapes[0] == shapes[1] else f"{name} is {shapes[0]} in the first and {shapes[1]} in the second"


def difference(first: Tensor, second: Tensor) -> Difference:
    """Second minus first, in float64, chunk by chunk.

    Example:
        >>> found = difference(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
        >>> found.unequal, found.largest, found.relative
        (1, 0.5, 0.1)
    """
    chunks = partial(_chunks, first, second)
    largest = squares = size = 0.0
    unequal = lost = elements = 0
    for a, b in chunks():
        apart = b - a
        finite = apart.isfinite()
        elements += apart.numel()
        unequal += int((a != b).sum())
        lost += int((~finite).sum())
        kept = apart[finite]
        largest = max(largest, float(kept.abs().max()) if kept.numel() else 0.0)
        squares += float(kept.square().sum())
        size += float(a[finite].square().sum())
    counts = np.zeros(BINS, dtype=np.int64)
    for a, b in chunks():
        apart = b - a
        counts += np.histogram(apart[apart.isfinite()], bins=BINS, range=(-(largest or 1.0), largest or 1.0))[0]
    relative = math.sqrt(squares / size) if size else (math.inf if squares else 0.0)
    return Difference(elements, unequal, lost, largest, relative, counts)


def _chunks(first: Tensor, second: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    flat = [(torch.view_as_real(t) if t.is_complex() else t).reshape(-1) for t in (first, second)]
    for pair in zip(*(t.split(_CHUNK) for t in flat), strict=True):
        a, b = (t.double() for t in pair)
        yield a, b


def difference_figure(differences: Mapping[str, Difference], *, title: str = "") -> Figure:
    """Draw the histogram of each parameter's difference, in the order given, on a logarithmic count.

    The figure is no pyplot figure: a notebook shows it where a cell ends with it.

    Args:
        differences: from `compare`, 1 to 12.
        title: over all of it.

    Raises:
        ValueError: none, or more than 12.

    Example:
        >>> pair = torch.zeros(4), torch.tensor([0.0, 0.0, 0.1, -0.1])
        >>> figure = difference_figure({"bias": difference(*pair)})
        >>> figure.axes[0].get_title(loc="left")
        'bias\\nlargest 0.1, relative inf'
    """
    if not 1 <= len(differences) <= PANELS:
        raise ValueError(f"differences: there is room for 1 to {PANELS} parameters, got {len(differences)}")
    across = min(len(differences), 3)
    down = -(-len(differences) // across)
    with style():
        figure = Figure(figsize=(9.6, 2.3 * down + 0.6))
        panels = figure.subplots(down, across, squeeze=False)
        for axes in panels.flat[len(differences) :]:
            axes.set_axis_off()
        for axes, (name, found) in zip(panels.flat, differences.items(), strict=False):
            _draw_difference(axes, name, found)
        figure.suptitle(title, x=0.01, ha="left")
    return figure


def _draw_difference(axes: Axes, name: str, found: Difference) -> None:
    span = found.largest or 1.0
    edges = np.linspace(-span, span, BINS + 1)
    axes.stairs(found.counts, edges, fill=True, color=OKABE_ITO[0], baseline=0.5)
    axes.axvline(0, color=LIVE_COLOR, linewidth=0.8, linestyle=":")
    plain_log_axis(axes, subs=(1,))
    axes.set_ylim(0.5, max(2.0 * found.counts.max(), 2.0))
    short = name if len(name) <= 36 else "..." + name[-33:]
    told = f"largest {found.largest:.2g}, relative {found.relative:.2g}" if found.unequal else "equal in every element"
    if found.not_finite:
        told += f", {found.not_finite} not finite"
    axes.set_title(f"{short}\n{told}", fontsize=9)
    axes.set_xlabel("second - first", fontsize=9)
    axes.set_ylabel("elements", fontsize=9)
    axes.set_xticks([-span, 0, span], [f"{-span:.2g}", "0", f"{span:.2g}"])


def checkpoint_browser(
    *paths: str | Path,
    first: str | None = None,
    second: str | None = None,
    parameters: Sequence[str] | None = None,
) -> Explorer:
    """Pick two sets of weights on disk and some of their parameters, and see how they differ.

    Nothing is read but what is compared, one parameter at a time, and nothing in a file is run.

    Args:
        paths: as for `find_weights`.
        first, second: labels to start with; by default the first and the last that can be read.
        parameters: names to start with; by default the first six.

    Returns:
        The explorer; its `controls` are "first", "second" and "parameters".

    Raises:
        As `find_weights`. ValueError: an unknown label or parameter, with those that there are. And as `compare`.

    Example:
        >>> import tempfile
        >>> from torch import nn
        >>> from fsdp_ema_lib import EMA_FSDP, CheckpointManager
        >>> model = nn.Linear(3, 2)
        >>> ema = EMA_FSDP(model)
        >>> with tempfile.TemporaryDirectory() as folder, CheckpointManager(folder) as checkpoints:
        ...     path = checkpoints.save(10, model=model, ema=ema)
        ...     browser = checkpoint_browser(folder)
        >>> browser.controls["first"].options, browser.controls["parameters"].value
        (('step_00000010, live', 'step_00000010, average 0'), ('bias', 'weight'))
    """
    found = find_weights(*paths)
    labels = list(found)
    readable = [label for label in labels if not label.endswith(_UNREADABLE)] or labels
    first, second = (readable[0] if first is None else first), (readable[-1] if second is None else second)
    for what, label in (("first", first), ("second", second)):
        _refuse_unknown(what, [label], labels)
    names = comparable(found[first], found[second])
    chosen = names[:6] if parameters is None else list(parameters)
    _refuse_unknown("parameters", chosen, names)
    layout = ipywidgets.Layout(height="150px")
    controls = {
        "first": ipywidgets.Dropdown(options=labels, value=first, description="first"),
        "second": ipywidgets.Dropdown(options=labels, value=second, description="second"),
        "parameters": ipywidgets.SelectMultiple(options=names, value=chosen, description="parameters", layout=layout),
    }

    def adjust(changed: str) -> None:
        if changed == "parameters":
            return
        box = controls["parameters"]
        names, kept = comparable(found[controls["first"].value], found[controls["second"].value]), box.value
        if names != list(box.options):
            box.options = names
            box.value = [name for name in kept if name in names] or names[:6]

    def draw(first: str, second: str, parameters: Sequence[str]) -> bytes:
        if not parameters:
            raise ValueError(
                f"parameters: choose at least one of the {len(controls['parameters'].options)} that both sets have"
            )
        shown = parameters[:PANELS]
        more = f"; the first {PANELS} of {len(parameters)} parameters" if len(parameters) > PANELS else ""
        differences = compare(found[first], found[second], shown)
        return png(difference_figure(differences, title=f"{second}  minus  {first}{more}"))

    alt = "Histograms of the difference of two sets of weights, one for each chosen parameter"
    return Explorer("checkpoint-browser", controls, draw, alt=alt, adjust=adjust)


def _refuse_unknown(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    if unknown := [name for name in given if name not in known]:
        raise ValueError(f"{what}: {', '.join(map(repr, unknown))} not found; there are {', '.join(map(repr, known))}")
