"""Checkpoints looked at, checked, exported and compared by one process, without the model's code.

At most one tensor is in memory at a time (two when checkpoints are compared).
"""

import math
import os
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from fsdp_ema_lib import storage
from fsdp_ema_lib.full_state import check_export_dtype
from fsdp_ema_lib.safe_reading import find_tensor, read_box, read_metadata, read_object, refuse_other_than_listed
from fsdp_ema_lib.safetensors_io import write_stream
from fsdp_ema_lib.storage import DamagedCheckpointError


@dataclass(frozen=True)
class Saved:
    """A checkpoint opened without a model.

    Attributes:
        path: its directory.
        manifest: what was written about it.
        metadata: of its entries.
    """

    path: Path
    manifest: dict[str, Any]
    metadata: Metadata

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Entry name -> what it is, of everything that is a tensor, in order of name."""
        entries = sorted(self.metadata.state_dict_metadata.items())
        return {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}

    def read(self, name: str) -> Tensor:
        """One full tensor, put together from its pieces.

        Raises:
            KeyError: no such entry. DamagedCheckpointError, UnsafeCheckpointError: as when loading.
        """
        entry = self.tensors()[name]
        full = torch.empty(entry.size, dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            index = MetadataIndex(name, chunk.offsets)
            info = self.metadata.storage_data[index]
            where = f"{self.path / info.relative_path}, {name}"
            descriptor = storage.open_inside(self.path, info.relative_path)
            try:
                stored = find_tensor(descriptor, info, where)
                refuse_other_than_listed(stored, self.metadata, index, where)
                box = full[tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))]
                read_box(descriptor, stored, [0] * len(chunk.sizes), chunk.sizes, box, where)
            finally:
                os.close(descriptor)
        return full

    def objects(self) -> list[str]:
        """The names of the entries that are no tensors, in order."""
        return sorted(self.metadata.state_dict_metadata.keys() - self.tensors().keys())

    def read_object(self, name: str) -> Any:
        """One entry that is no tensor: numbers, names, containers and tensors.

        Raises:
            KeyError: no such entry. DamagedCheckpointError, UnsafeCheckpointError: as when loading.
        """
        info = self.metadata.storage_data[MetadataIndex(name)]
        descriptor = storage.open_inside(self.path, info.relative_path)
        try:
            return read_object(descriptor, info, f"{self.path / info.relative_path}, {name}", "cpu")
        finally:
            os.close(descriptor)


def open_saved(path: str | Path) -> Saved:
    """Open a checkpoint, or the newest one in a directory of them. Checks sizes, not checksums.

    Raises:
        FileNotFoundError: there is none. DamagedCheckpointError, UnsafeCheckpointError: as when loading.
    """
    path = newest(Path(path))
    manifest = storage.read_manifest(path)
    storage.check_sizes(path, manifest)
    return Saved(path, manifest, read_metadata(path))


def newest(path: Path) -> Path:
    """The path itself if it is a checkpoint, else the newest checkpoint that a `CheckpointManager` keeps in it.

    Raises:
        FileNotFoundError: there is none.
    """
    if (path / storage.MANIFEST).exists():
        return path
    steps = {storage.step_of(entry.name): entry for entry in path.iterdir()} if path.is_dir() else {}
    whole = {step: entry for step, entry in steps.items() if step is not None and (entry / storage.MANIFEST).exists()}
    if not whole:
        raise FileNotFoundError(f"{path}: no whole checkpoint here (no {storage.MANIFEST}, no step_... directory)")
    return whole[max(whole)]


def inspect(path: str | Path) -> dict[str, Any]:
    """What is inside a checkpoint, as plain JSON: step, ranks, versions, sharding, and every entry with shape and size.

    Raises:
        As `open_saved`.
    """
    saved = open_saved(path)
    entries = [
        {
            "name": name,
            "shape": list(entry.size),
            "dtype": str(entry.properties.dtype).removeprefix("torch."),
            "bytes": math.prod(entry.size) * entry.properties.dtype.itemsize,
            "pieces": len(entry.chunks),
        }
        for name, entry in saved.tensors().items()
    ]
    known = ("step", "extra", "world_size", "torch", "fsdp_ema_lib", "saved_at", "format_version", "emas")
    found = {key: saved.manifest.get(key) for key in known}
    found["path"] = str(saved.path)
    found["sharding"] = saved.manifest["model"].get("sharding", {})
    found["optimizer"] = saved.manifest["optimizer"].get("class")
    found["bytes_on_disk"] = sum(facts["size"] for facts in saved.manifest["files"].values())
    found["objects"] = saved.objects()
    found["entries"] = entries
    return found


def verify(path: str | Path) -> dict[str, Any]:
    """Compare sizes and checksums with the manifest, and read the metadata.

    Returns:
        `path`; `files` and `bytes` whose checksums were compared; `unsealed`: how many files were saved without one
        (`checksums=False`), of which nothing but the size is known to be right.

    Raises:
        As `open_saved`; DamagedCheckpointError with every damaged file.
    """
    saved = open_saved(path)
    files = saved.manifest["files"]
    compared = storage.checksummed(saved.manifest, files)
    storage.check_sums(saved.path, saved.manifest, compared)
    return {
        "path": str(saved.path),
        "files": len(compared),
        "bytes": sum(files[name]["size"] for name in compared),
        "unsealed": len(files) - len(compared),
    }


def export(
    path: str | Path,
    output: str | Path,
    *,
    ema: str | None = "0",
    dtype: torch.dtype | None = None,
    max_shard_size: int | None = None,
) -> dict[str, Any]:
    """Write the weights of a checkpoint as safetensors that the plain model loads with `strict=True`.

    Args:
        path: the checkpoint, or a directory of them.
        output: as for `export_safetensors`.
        ema: name of the average to export; None for the live weights.
        dtype: floating dtype of the parameters; None keeps theirs.
        max_shard_size: as for `export_safetensors`, in bytes.

    Returns:
        `path`, `output` and the number of `tensors` written.

    Raises:
        As `open_saved`. KeyError: no such average, with those that there are. ValueError: the checkpoint holds no
        model. TypeError: `dtype` is not floating.
    """
    check_export_dtype(dtype)
    saved = open_saved(path)
    model = saved.manifest["model"]
    names = model.get("names")
    if not names:
        raise ValueError(f"{saved.path}: the checkpoint holds no model")
    if ema is not None and ema not in saved.manifest["emas"]:
        there = ", ".join(map(repr, saved.manifest["emas"])) or "none"
        raise KeyError(f"{saved.path}: no average {ema!r} in it, there are: {there}")
    tensors = saved.tensors()
    sources: dict[str, str] = {}
    for name in names:
        primary = model["tied"].get(name, name)
        average = f"ema.{ema}.shadow.{primary}"
        source = average if average in tensors else f"model.{primary}"
        if source in tensors:  # a module's extra state is no tensor
            sources[name] = source
    buffers = set(model["buffers"])

    def exported(name: str) -> torch.dtype:
        own = tensors[sources[name]].properties.dtype
        castable = own.is_floating_point and model["tied"].get(name, name) not in buffers
        return dtype if dtype is not None and castable else own

    entries = {name: (exported(name), tuple(tensors[source].size)) for name, source in sources.items()}
    stream = ((name, saved.read(source).to(exported(name))) for name, source in sources.items())
    described = saved.manifest["emas"][ema] if ema is not None else {}
    text = {"step": str(saved.manifest["step"])}
    if described:
        text["num_updates"] = str(described["num_updates"])
    write_stream(Path(output), entries, stream, max_shard_size, text)
    return {"path": str(saved.path), "output": str(output), "tensors": len(sources)}


def diff(first: str | Path, second: str | Path) -> dict[str, Any]:
    """Where two checkpoints differ, whatever layouts saved them.

    Compared are all entries, the step, `extra`, and what the manifest has of the optimizer; not when, where and by
    which versions they were saved.

    Returns:
        `only_first`, `only_second`: names of entries; `differing`: for each entry, or part of the manifest, that is not
        bit-equal its `name` and either both shapes and dtypes, the number of `elements` that differ and the largest
        `difference`, or `first` and `second`, the first difference as text; `equal`: how many entries are.

    Raises:
        As `open_saved`.
    """
    a, b = open_saved(first), open_saved(second)
    mine, theirs = (saved.metadata.state_dict_metadata.keys() for saved in (a, b))
    differing = list(_differences(a, b, sorted(mine & theirs)))
    equal = len(mine & theirs) - len(differing)
    return {
        "first": str(a.path),
        "second": str(b.path),
        "only_first": sorted(mine - theirs),
        "only_second": sorted(theirs - mine),
        "differing": list(_differences_of_objects(_described(a), _described(b))) + differing,
        "equal": equal,
    }


def _described(saved: Saved) -> dict[str, Any]:
    """What the manifest says about the training's state, whatever saved it."""
    optimizer = saved.manifest["optimizer"]
    return {
        "step": saved.manifest["step"],
        "extra": saved.manifest["extra"],
        "optimizer class": optimizer.get("class"),
        "optimizer settings": {n: g["settings"] for g in optimizer.get("groups", ()) for n in g["parameters"]},
        "optimizer values": optimizer.get("values", {}),
    }


def _differences(a: Saved, b: Saved, names: list[str]) -> Iterator[dict[str, Any]]:
    mine, theirs = a.tensors(), b.tensors()
    both = (("first", mine), ("second", theirs))
    for name in names:
        if name not in mine and name not in theirs:
            yield from _differences_of_objects({name: a.read_object(name)}, {name: b.read_object(name)})
            continue
        if name not in mine or name not in theirs:
            yield {"name": name, **{which: "a tensor" if name in found else "no tensor" for which, found in both}}
            continue
        kinds = [(list(e.size), str(e.properties.dtype).removeprefix("torch.")) for e in (mine[name], theirs[name])]
        if kinds[0] != kinds[1]:
            yield {"name": name, "first": kinds[0], "second": kinds[1]}
            continue
        x, y = a.read(name), b.read(name)
        unequal = (_bytes(x) != _bytes(y)).any(dim=1)
        if bool(unequal.any()):
            wide = torch.complex128 if x.is_complex() else torch.float64
            distance = (x.to(wide) - y.to(wide)).abs().max()
            yield {"name": name, "elements": int(unequal.sum()), "difference": float(distance)}


def _differences_of_objects(first: dict[str, Any], second: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name in first:
        try:
            found = _first_difference(first[name], second[name])
        except RecursionError as problem:
            raise DamagedCheckpointError(f"{name}: nested too deeply to be compared, or inside itself") from problem
        if found is not None:
            yield {"name": name, "first": found[0], "second": found[1]}


def _first_difference(x: Any, y: Any, at: str = "") -> tuple[str, str] | None:
    """Where two objects differ first, as text of both; None if they are bit-equal."""
    if isinstance(x, Mapping) and isinstance(y, Mapping):
        for key in {**x, **y}:
            if key not in x or key not in y:
                there, missing = f"{at}[{key!r}] is there", f"{at}[{key!r}] is missing"
                return (there, missing) if key in x else (missing, there)
            if (found := _first_difference(x[key], y[key], f"{at}[{key!r}]")) is not None:
                return found
        return None
    if isinstance(x, list | tuple) and type(x) is type(y) and len(x) == len(y):
        parts = (_first_difference(one, other, f"{at}[{n}]") for n, (one, other) in enumerate(zip(x, y, strict=True)))
        return next((found for found in parts if found is not None), None)
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        same = (x.dtype, x.shape) == (y.dtype, y.shape) and torch.equal(_bytes(x), _bytes(y))
    else:
        # 0.0 and -0.0 are equal, and a NaN is not even itself: their texts tell what their bits are.
        same = type(x) is type(y) and (repr(x) == repr(y) if isinstance(x, float | complex) else bool(x == y))
    if same:
        return None
    before = f"{at} = " if at else ""
    return before + reprlib.repr(x), before + reprlib.repr(y)


def _bytes(tensor: Tensor) -> Tensor:
    return (
        tensor.detach()
        .resolve_conj()
        .resolve_neg()
        .contiguous()
        .view(-1)
        .view(torch.uint8)
        .view(-1, tensor.dtype.itemsize)
    )
