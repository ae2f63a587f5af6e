"""Damage done to checkpoints on purpose, and what the reader says about it."""

from __future__ import annotations

import itertools
import os
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fsdp_ema_lib import storage
from fsdp_ema_lib.checkpoint_manager import CheckpointManager
from fsdp_ema_lib.lab.round_trips import differing_bytes, local_state
from fsdp_ema_lib.safe_reading import METADATA, read_metadata

#: Damages the first checkpoint; the second one is an older step of the same training.
Fault = Callable[[Path, Path], None]
#: Fresh arguments for `load`: model, optimizer, ema.
Parts = Callable[[], dict[str, Any]]

#: What planted code leaves beside the checkpoints where it runs.
TRACE = "the planted code ran"
#: Ways to read: what is shown -> arguments for `CheckpointManager.load`.
READINGS: dict[str, dict[str, bool]] = {
    "load()": {},
    "load(verify=True)": {"verify": True},
    "load(verify=True, fall_back=True)": {"verify": True, "fall_back": True},
}


@dataclass(frozen=True)
class Reading:
    """What came of one load.

    Attributes:
        step: which checkpoint was loaded, None after an error.
        error: class of the error, or "".
        text: what the error said, or the warnings, without the path of the directory; or "".
        differing: bytes of weights, average and optimizer that are not what was saved in that step; after an error,
            that are not what they were before the load.
        appeared: files that the load left in the directory.
    """

    step: int | None
    error: str
    text: str
    differing: int
    appeared: list[str]

    def __str__(self) -> str:
        if self.error:
            return f"**{self.error}**: {self.text}"
        count = f"{self.differing:,} byte{'s' * (self.differing > 1)}"
        bits = f"**{count} wrong, not noticed**" if self.differing else "every bit right"
        return f"step {self.step} loaded, {bits}" + (f"; warning: {self.text.partition(': ')[0]}" if self.text else "")


def read_damaged(
    directory: str | Path, faults: Mapping[str, Fault | None], parts: Parts
) -> dict[str, dict[str, Reading]]:
    """Damage a copy of a directory of checkpoints in each way, and read it in each of `READINGS`.

    Args:
        directory: at least two checkpoints; it is only read. The newest is damaged, the one before is the older one.
        faults: what it is called -> what does it; None for no damage.
        parts: makes a new model, optimizer and average, the same ones at each call.

    Returns:
        fault -> reading -> what came of it.

    Raises:
        ValueError: fewer than two checkpoints.
    """
    older, newest = _last_two(Path(directory))
    expected = {step: _sound(Path(directory), step, parts) for step in (older, newest)}
    report: dict[str, dict[str, Reading]] = {}
    for name, fault in faults.items():
        report[name] = {}
        for reading, options in READINGS.items():
            with tempfile.TemporaryDirectory(prefix="damaged-") as folder:
                copies = [Path(folder, storage.step_name(step)) for step in (newest, older)]
                for copy in copies:
                    shutil.copytree(Path(directory, copy.name), copy)
                if fault is not None:
                    fault(*copies)
                report[name][reading] = _read(Path(folder), options, parts(), expected)
    return report


def _last_two(directory: Path) -> tuple[int, int]:
    with CheckpointManager(directory, read_only=True) as checkpoints:
        steps = checkpoints.steps()
    if len(steps) < 2:
        raise ValueError(f"{directory}: at least two checkpoints are needed, there are {len(steps)}")
    return steps[-2], steps[-1]


def _sound(directory: Path, step: int, parts: Parts) -> dict[str, Tensor]:
    fresh = parts()
    with CheckpointManager(directory, read_only=True) as checkpoints:
        checkpoints.load(step, **fresh, verify=True)
    return local_state(**fresh)


def _read(
    folder: Path, options: Mapping[str, bool], fresh: dict[str, Any], expected: Mapping[int, Mapping[str, Tensor]]
) -> Reading:
    step, error, text = None, "", ""
    before, files = local_state(**fresh), _files(folder)
    with warnings.catch_warnings(record=True) as said, CheckpointManager(folder, read_only=True) as checkpoints:
        warnings.simplefilter("always")
        try:
            step = checkpoints.load(**fresh, **options)["step"]
            text = "; ".join(str(warning.message) for warning in said)
        except (ValueError, OSError, RuntimeError, pickle.UnpicklingError) as problem:
            error, text = type(problem).__name__, str(problem)
    differing = differing_bytes(local_state(**fresh), before if step is None else expected[step])
    return Reading(step, error, text.replace(f"{folder}/", ""), differing, sorted(_files(folder) - files))


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def as_markdown(report: Mapping[str, Mapping[str, Reading]]) -> str:
    """The report of `read_damaged` as a table: a row for each fault, a column for each way to read.

    What says the same as its neighbor on the left says "the same".

    Example:
        >>> print(as_markdown({"none": {"load()": Reading(5, "", "", 0, [])}}))
        | damage | `load()` |
        | :-- | :-- |
        | none | step 5 loaded, every bit right |
    """
    columns = list(next(iter(report.values())))
    lines = [
        "| damage | " + " | ".join(f"`{column}`" for column in columns) + " |",
        "| :-- " * (len(columns) + 1) + "|",
    ]
    for fault, readings in report.items():
        cells = [str(readings[column]).replace("|", "\\|").replace("\n", "<br>") for column in columns]
        shorter = cells[:1] + ["the same" if one == left else one for left, one in itertools.pairwise(cells)]
        lines.append(f"| {fault} | " + " | ".join(shorter) + " |")
    return "\n".join(lines)


# ---------------------------------------------------------------- faults


def flip_a_bit(newest: Path, older: Path) -> None:
    """One bit, in the middle of the largest shard of a weight."""
    places = read_metadata(newest).storage_data.items()
    place = max((place for index, place in places if index.fqn.startswith("model.")), key=lambda place: place.length)
    with open(newest / place.relative_path, "r+b") as file:
        file.seek(place.offset + place.length // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def flip_a_bit_of_the_manifest(newest: Path, older: Path) -> None:
    """One bit, in the middle."""
    data = bytearray((newest / storage.MANIFEST).read_bytes())
    data[len(data) // 2] ^= 1
    (newest / storage.MANIFEST).write_bytes(data)


def cut_short(newest: Path, older: Path) -> None:
    """A file of tensors loses its last byte."""
    file = _tensors(newest)
    os.truncate(file, file.stat().st_size - 1)


def remove(newest: Path, older: Path) -> None:
    """A file of tensors is gone."""
    _tensors(newest).unlink()


def remove_the_manifest(newest: Path, older: Path) -> None:
    """What makes a directory a checkpoint is gone."""
    (newest / storage.MANIFEST).unlink()


def swap(newest: Path, older: Path) -> None:
    """A file of tensors is that of the older step: right in size and form."""
    shutil.copyfile(_tensors(older), _tensors(newest))


def link_outside(newest: Path, older: Path) -> None:
    """A file of tensors is a link to one that lies elsewhere."""
    file = _tensors(newest)
    file.unlink()
    file.symlink_to(_tensors(older))


def plant_a_pickle(newest: Path, older: Path) -> None:
    """A pickle that runs a shell command where it is opened, and a manifest that fits it."""
    (newest / METADATA).write_bytes(pickle.dumps(_Trap(newest.parent / TRACE)))
    manifest = storage.read_manifest(newest)
    manifest["files"] |= storage.seal([newest / METADATA], sums={})
    (newest / storage.MANIFEST).unlink()
    storage.write_manifest(newest, manifest)


class _Trap:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.trace}'",)


def _tensors(checkpoint: Path) -> Path:
    """The last rank's file."""
    return sorted(checkpoint.glob("__*.distcp"))[-1]


FAULTS: dict[str, Fault | None] = {
    "none": None,
    "one bit of a tensor flipped": flip_a_bit,
    "one bit of the manifest flipped": flip_a_bit_of_the_manifest,
    "a tensor file cut short by a byte": cut_short,
    "a tensor file missing": remove,
    "a tensor file swapped with the older step's": swap,
    "a tensor file replaced by a link": link_outside,
    "the manifest missing": remove_the_manifest,
    "a pickle planted in the metadata, the manifest made to fit": plant_a_pickle,
}
