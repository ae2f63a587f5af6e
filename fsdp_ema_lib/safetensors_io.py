"""Full weights in safetensors files and common .pt checkpoints: streamed out, and read back slice by slice."""

import json
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fsdp_ema_lib import storage
from fsdp_ema_lib.agreement import raise_together
from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.ema_state import local_of
from fsdp_ema_lib.full_state import Entry
from fsdp_ema_lib.layout import Layout, Shard
from fsdp_ema_lib.names import normalize_generator_fsdp_key, normalize_generator_fsdp_state_dict
from fsdp_ema_lib.process_group import is_main_process
from fsdp_ema_lib.safe_reading import load_weights_only, packed_as_by_torch
from fsdp_ema_lib.storage import DamagedCheckpointError, UnsafeCheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_INDEX_BYTES = 64 << 20
# The dicts that training scripts of generative models put into one file, the one that is wanted most first.
_LIVE_KEYS = ("generator", "model", "state_dict", "module")
_EMA_KEYS = ("generator_ema", "ema", "model_ema", "ema_state_dict", *_LIVE_KEYS)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}

_SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class SafetensorsWriter:
    """Writes a safetensors file tensor by tensor, in any order: the library's own writer wants them all in memory.

    Args:
        path: the file; it must not exist.
        entries: name -> (dtype, shape) of every tensor that will be written.

    Raises:
        TypeError: a dtype that safetensors has no name for, with the names of its tensors.
    """

    def __init__(
        self, path: Path, entries: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
    ) -> None:
        self.path = path
        self.entries = dict(entries)
        self.missing = set(entries)
        bad = [f"{name} ({dtype})" for name, (dtype, _) in entries.items() if dtype not in _SAFETENSORS_DTYPES]
        if bad:
            raise TypeError(
                f"safetensors cannot hold {', '.join(bad)}; convert them with export_dtype or leave them out"
            )
        # Wide dtypes first, so that every tensor starts at a multiple of its element size.
        order = sorted(entries, key=lambda name: (-entries[name][0].itemsize, name))
        header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
        self.offsets: dict[str, int] = {}
        end = 0
        for name in order:
            dtype, shape = entries[name]
            begin, end = end, end + dtype.itemsize * torch.Size(shape).numel()
            header[name] = {"dtype": _SAFETENSORS_DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
            self.offsets[name] = begin
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.start = 8 + len(text)
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._write(0, len(text).to_bytes(8, "little") + text)
        os.truncate(path, self.start + end)

    def write(self, name: str, tensor: Tensor) -> None:
        """Put one tensor into its place. Its dtype and shape must be the announced ones."""
        announced = self.entries[name]
        if (tensor.dtype, tuple(tensor.shape)) != (announced[0], tuple(announced[1])):
            raise ValueError(f"{name}: announced as {announced}, got {(tensor.dtype, tuple(tensor.shape))}")
        raw = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        self._write(self.start + self.offsets[name], raw.numpy().data)
        self.missing.discard(name)

    def _write(self, offset: int, data: bytes | memoryview) -> None:
        while len(data):
            written = os.pwrite(self.file, data, offset)
            data, offset = data[written:], offset + written

    def close(self) -> None:
        """Flush to disk, and let the safetensors library read the header back."""
        if self.missing:
            raise ValueError(f"{self.path}: never written: {', '.join(sorted(self.missing))}")
        os.fsync(self.file)
        self.abandon()
        try:
            with safe_open(self.path, framework="pt") as written:
                names = set(written.keys())
        except SafetensorError as problem:
            raise RuntimeError(
                f"{self.path}: the file just written does not open ({problem}); the disk may be full"
            ) from problem
        assert names == set(self.entries)

    def abandon(self) -> None:
        """Close the file as it is; a second call does nothing."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


# ---------------------------------------------------------------- writing


def export_safetensors(
    path: str | Path,
    ema: EMA_FSDP,
    model: Any,
    *,
    export_dtype: torch.dtype | None = None,
    max_shard_size: int | str | None = None,
) -> None:
    """Write the whole averaged model as safetensors, which the plain model loads with `strict=True`.

    Collective: every rank must call; rank 0 writes as it gathers, one FSDP1 unit or one DTensor at a time, and the file
    or directory appears under its name when it is whole. Tied parameters are written under each of their names.

    Args:
        path: on rank 0's machine. Without `max_shard_size` a file, replaced if it exists; with it a directory in
            Hugging Face's layout, which must not exist: `model.safetensors` if everything fits into one file, else
            `model-00001-of-0000N.safetensors`, ... and `model.safetensors.index.json`.
        ema: the average.
        model: the model that `ema` was built for; frozen parameters and buffers come from it.
        export_dtype: floating dtype of the parameters; None keeps the average's own.
        max_shard_size: bytes of tensors in one file at most (a larger tensor gets a file of its own): a number, or text
            such as "5GB" or "512MiB".

    Raises:
        TypeError: a dtype that safetensors cannot hold, or `export_dtype` is not floating. ValueError: a bad
            `max_shard_size`. OSError: from writing. On every rank.

    Example:
        >>> import tempfile
        >>> from torch import nn
        >>> from safetensors.torch import load_file
        >>> model = nn.Linear(3, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export_safetensors(f"{folder}/ema.safetensors", EMA_FSDP(model), model)
        ...     model.load_state_dict(load_file(f"{folder}/ema.safetensors"), strict=True)
        <All keys matched successfully>
    """
    entries = ema.full_entries(model, export_dtype=export_dtype)
    stream = ema.stream_full(model, export_dtype=export_dtype)
    error: Exception | None = None
    if is_main_process():
        try:
            capacity = None if max_shard_size is None else parse_size(max_shard_size)
            write_stream(Path(path), entries, stream, capacity, {"num_updates": str(ema.num_updates)})
        except (OSError, TypeError, ValueError, RuntimeError) as problem:
            error = problem
    for _ in stream:  # to its end: the other ranks go through every gather, so all must
        continue
    raise_together(error)


def write_stream(
    path: Path,
    entries: Mapping[str, Entry],
    stream: Iterator[tuple[str, Tensor]],
    capacity: int | None,
    metadata: Mapping[str, str],
) -> None:
    """Write tensors as they come, to one file or (with a capacity) to a new directory in Hugging Face's layout. Local.

    Args:
        path: the file or directory.
        entries: name -> (dtype, shape) of everything in the stream; its order decides what shares a file.
        stream: (name, tensor), in any order.
        capacity: bytes in one file at most; None for one file.
        metadata: text for the header of each file.
    """
    if capacity is None:
        with storage.replacing(path) as temporary:
            _write_files({temporary: entries}, stream, metadata)
        return
    storage.refuse_existing(path)
    shards = plan_shards(entries, capacity)
    directory = storage.unpublished_name(path)
    directory.mkdir()
    try:
        names = [SINGLE] if len(shards) == 1 else [_shard_name(n + 1, len(shards)) for n in range(len(shards))]
        _write_files({directory / name: part for name, part in zip(names, shards, strict=True)}, stream, metadata)
        if len(shards) > 1:
            places = {key: name for name, part in zip(names, shards, strict=True) for key in part}
            total = sum(_nbytes(entry) for entry in entries.values())
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2)
            (directory / INDEX).write_text(text + "\n")
            storage.sync(directory / INDEX)
        storage.sync(directory)
        storage.refuse_existing(path)
        os.rename(directory, path)
        storage.sync(path.parent)
    finally:
        storage.discard(directory)


def _write_files(
    files: Mapping[Path, Mapping[str, Entry]], stream: Iterator[tuple[str, Tensor]], metadata: Mapping[str, str]
) -> None:
    place = {name: path for path, part in files.items() for name in part}
    open_writers: dict[Path, SafetensorsWriter] = {}
    with ExitStack() as stack:
        for name, tensor in stream:
            path = place[name]
            if path not in open_writers:
                open_writers[path] = SafetensorsWriter(path, files[path], metadata)
                stack.callback(open_writers[path].abandon)
            open_writers[path].write(name, tensor)
            del tensor  # it may keep a whole unit alive while the next one is gathered
        for path, part in files.items():  # a file without tensors
            if path not in open_writers:
                open_writers[path] = SafetensorsWriter(path, part, metadata)
                stack.callback(open_writers[path].abandon)
        for writer in open_writers.values():
            writer.close()


def plan_shards(entries: Mapping[str, Entry], capacity: int) -> list[dict[str, Entry]]:
    """Split entries, in order, into files of at most `capacity` bytes; a larger tensor gets a file of its own.

    Example:
        >>> entries = {"a": (torch.float32, (2,)), "b": (torch.float32, (2,)), "c": (torch.float32, (9,))}
        >>> [list(shard) for shard in plan_shards(entries, capacity=16)]
        [['a', 'b'], ['c']]
    """
    shards: list[dict[str, Entry]] = [{}]
    used = 0
    for name, entry in entries.items():
        if shards[-1] and used + _nbytes(entry) > capacity:
            shards.append({})
            used = 0
        shards[-1][name] = entry
        used += _nbytes(entry)
    return shards


def parse_size(size: int | str) -> int:
    """Bytes of a size given as a number or as text.

    Raises:
        ValueError: not a positive size.

    Example:
        >>> parse_size("5GB"), parse_size("512 MiB")
        (5000000000, 536870912)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or int(float(found[1]) * unit) < 1:
        raise ValueError(f"max_shard_size must be a positive number of bytes, or text such as '5GB', got {size!r}")
    return int(float(found[1]) * unit)


def _nbytes(entry: Entry) -> int:
    return entry[0].itemsize * math.prod(entry[1])


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


# ---------------------------------------------------------------- reading


class _Lazy:
    """A tensor in a file that is read where it is sliced."""

    def __init__(self, file: Any, name: str) -> None:
        self.file, self.name = file, name
        self.part = file.get_slice(name)
        self.shape = torch.Size(self.part.get_shape())
        self.dtype = _DTYPES.get(self.part.get_dtype())

    def __getitem__(self, index: Any) -> Tensor:
        # The library slices no scalars.
        found: Tensor = self.file.get_tensor(self.name) if index == () or 0 in self.shape else self.part[index]
        return found


_DTYPES = {code: dtype for dtype, code in _SAFETENSORS_DTYPES.items()}


@torch.no_grad()
def import_safetensors(
    path: str | Path,
    model: Any,
    *,
    ema: EMA_FSDP | None = None,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    cast: bool = False,
) -> None:
    """Fill a model, or its average, from safetensors files; each rank reads its own slices alone.

    Every rank must call; all succeed, or all raise and nothing changed.

    Args:
        path: a file, a directory in Hugging Face's layout, or its `model.safetensors.index.json`; every rank must see
            it. Wrapper prefixes in the names are stripped. What is named here may be a symlink; files that are found
            through a directory or an index may only be links to others of the same directory or, as in Hugging Face's
            cache, from below `snapshots` to the `blobs` beside it.
        model: as wrapped.
        ema: fill this average of `model` instead of the live weights; its update count stays. Entries of the file that
            are not averaged are not used.
        allow_missing: name patterns (`fnmatch`) of parameters that may be missing, and keep their values.
        allow_unexpected: name patterns of entries that the model does not have.
        cast: convert values that the model's dtype cannot hold exactly, instead of refusing them.

    Raises:
        ValueError: missing, unexpected or mis-shaped entries, dtypes that would lose bits: all in one error.
        DamagedCheckpointError (a ValueError): a file cannot be read. UnsafeCheckpointError: the index names a file
            outside its directory, a symlink leaves it, or a file is a pipe or a device. FileNotFoundError: no such
            file. All on every rank.
    """
    with ExitStack() as stack:
        _import(lambda: _open_safetensors(Path(path), stack), model, ema, allow_missing, allow_unexpected, cast)


@torch.no_grad()
def import_pt(
    path: str | Path,
    model: Any,
    *,
    ema: EMA_FSDP | None = None,
    key: str | None = None,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    cast: bool = False,
) -> None:
    """Fill a model, or its average, from a `.pt` file that holds a dictionary of tensors, by `weights_only=True`.

    Every rank must call; all succeed, or all raise and nothing changed. The file is mapped, not read: each rank takes
    its own slices alone.

    Args:
        path: the file: a state dict, or a dictionary of them, such as `{"generator": ..., "generator_ema": ...}`.
        model, ema, allow_missing, allow_unexpected, cast: as for `import_safetensors`.
        key: which dictionary; None takes "generator_ema", "ema", ... for an average and "generator", "model", ... for
            live weights, whichever is there first.

    Raises:
        As `import_safetensors`. KeyError: no dictionary of that key, with those that there are.
        UnsafeCheckpointError: the file would run code if it were opened, naming what.
    """
    _import(lambda: _open_pt(Path(path), key, ema is not None), model, ema, allow_missing, allow_unexpected, cast)


def _import(
    open_tensors: Callable[[], Mapping[str, Any]],
    model: Any,
    ema: EMA_FSDP | None,
    allow_missing: Sequence[str],
    allow_unexpected: Sequence[str],
    cast: bool,
) -> None:
    error: Exception | None = None
    filled: list[tuple[Tensor, Tensor]] = []
    layout: Layout | None = None
    try:
        layout = Layout(model)
        targets = layout.live() if ema is None else _averages(ema)
        found = _match(_canonical(open_tensors(), layout), targets, layout, allow_missing, allow_unexpected, cast)
        for name, source in found.items():
            shard = layout.get(name)
            assert shard is not None
            local = torch.empty_like(targets[name], device="cpu")
            shard.fill(local, source)
            filled.append((targets[name], local))
    except Exception as problem:  # whatever it is, no rank may be left waiting
        damaged = isinstance(problem, SafetensorError)
        error = DamagedCheckpointError(f"a safetensors file is not readable: {problem}") if damaged else problem
    raise_together(error)
    assert layout is not None
    if ema is None:
        layout.before_write()
    for target, local in filled:
        target.copy_(local)
    if ema is not None:
        for low in ema.state_dict().get("low", {}).values():
            local_of(low).zero_()


def _averages(ema: EMA_FSDP) -> dict[str, Tensor]:
    if ema.is_swapped:
        raise RuntimeError("ema: it is swapped into the model at this moment (inside swapped_into); import outside")
    return dict(ema.shadow)


def _canonical(given: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """Under canonical names; a leading `module.` goes unless this model itself has such names."""
    if any(name.startswith("module.") for name in layout.primary):
        return {normalize_generator_fsdp_key(name): value for name, value in given.items()}
    return normalize_generator_fsdp_state_dict(given)


def _match(
    given: Mapping[str, Any],
    targets: Mapping[str, Tensor],
    layout: Layout,
    allow_missing: Sequence[str],
    allow_unexpected: Sequence[str],
    cast: bool,
) -> dict[str, Any]:
    """The source of each target, or one error with everything that does not fit."""
    faults = [
        f"{name}: in the file, not in this model"
        for name in given
        if name not in layout.primary and not any(fnmatchcase(name, pattern) for pattern in allow_unexpected)
    ]
    found: dict[str, Any] = {}
    for name, target in targets.items():
        shard = layout.get(name)
        assert shard is not None
        source = next((given[alias] for alias in (name, *shard.aliases) if alias in given), None)
        if source is None:
            if not any(fnmatchcase(name, pattern) for pattern in allow_missing):
                faults.append(f"{name}: missing in the file; this model has {tuple(shard.shape)}")
        elif (fault := _misfit(source, shard, target.dtype, cast)) is not None:
            faults.append(f"{name}: {fault}")
        else:
            found[name] = source
    if faults:
        raise ValueError("\n".join(["the file does not fit this model:", *faults, "Nothing was changed."]))
    return found


def _misfit(source: Any, shard: Shard, dtype: torch.dtype, cast: bool) -> str | None:
    if not isinstance(source, _Lazy | Tensor):
        return f"the file holds {type(source).__name__}, a tensor was expected"
    if isinstance(source, Tensor) and (
        source.layout != torch.strided or source.is_nested or source.is_quantized or source.device.type != "cpu"
    ):
        return "the file holds a sparse, nested or quantized tensor or one without values, a dense one was expected"
    if source.shape != shard.shape:
        return f"the file holds {tuple(source.shape)}, this model has {tuple(shard.shape)}"
    if source.dtype is None:
        return "the file holds a dtype that torch does not know"
    if not cast and torch.promote_types(source.dtype, dtype) != dtype:
        return f"the file holds {source.dtype}, which {dtype} cannot hold exactly; pass cast=True to round"
    return None


@contextmanager
def open_tensors(path: str | Path) -> Iterator[Mapping[str, Any]]:
    """The full weights in a file, by name, read where they are sliced, for the length of a `with` block. Local.

    Args:
        path: as for `import_safetensors`, or a `.pt` file as for `import_pt`, of which it takes the average if there is
            one.

    Returns:
        name -> something with `shape` and `dtype` (None for one that torch does not know); `[()]` reads all of it.

    Raises:
        As `import_safetensors` and `import_pt`.

    Example:
        >>> import tempfile
        >>> from torch import nn
        >>> model = nn.Linear(3, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export_safetensors(f"{folder}/ema.safetensors", EMA_FSDP(model), model)
        ...     with open_tensors(f"{folder}/ema.safetensors") as tensors:
        ...         torch.equal(tensors["weight"][()], model.weight)
        True
    """
    path = Path(path)
    if path.suffix in (".pt", ".pth") and path.is_file():
        found = _open_pt(path, None, wants_ema=True)
        yield {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}
        return
    with ExitStack() as stack:
        yield _open_safetensors(path, stack)


def _open_safetensors(path: Path, stack: ExitStack) -> dict[str, _Lazy]:
    found: dict[str, _Lazy] = {}
    for file, names in _safetensors_files(path).items():
        try:
            opened = stack.enter_context(safe_open(file, framework="pt"))
        except SafetensorError as problem:
            raise DamagedCheckpointError(f"{file}: not a readable safetensors file ({problem})") from problem
        for name in opened.keys() if names is None else names:
            if name not in opened.keys():
                raise DamagedCheckpointError(f"{file}: the index says that it holds {name}, but it does not")
            found[name] = _Lazy(opened, name)
    return found


def _safetensors_files(path: Path) -> dict[Path, list[str] | None]:
    """File -> the names to read from it, None for all of them."""
    found_inside = path.is_dir()
    if found_inside:
        path = path / SINGLE if (path / SINGLE).exists() else path / INDEX
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; expected a safetensors file or a directory with {SINGLE}")
    if found_inside:
        _refuse_link_outside(path)
    with os.fdopen(storage.open_regular(path), "rb") as stream:
        if path.suffix != ".json":
            return {path: None}
        text = stream.read(_INDEX_BYTES + 1)
    if len(text) > _INDEX_BYTES:
        raise UnsafeCheckpointError(f"{path}: refused, more than {_INDEX_BYTES} bytes are no index")
    try:
        places = dict(json.loads(text)["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError) as problem:
        raise DamagedCheckpointError(f"{path}: not a readable index ({problem!r})") from problem
    files: dict[Path, list[str] | None] = {}
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", "..") or "\0" in file:
            raise UnsafeCheckpointError(f"{path}: refused {file!r} for {name}, which is not a file of its directory")
        names = files.setdefault(path.parent / file, [])
        assert names is not None
        names.append(name)
    for found in files:
        _refuse_link_outside(found)
        os.close(storage.open_regular(found))
    return files


def _refuse_link_outside(path: Path) -> None:
    """Raise UnsafeCheckpointError for a symlink out of its directory, except from a snapshot to its blobs."""
    if not path.is_symlink():
        return
    directory = path.parent.resolve()
    # Hugging Face's cache: <repository>/snapshots/<revision>/<file> is a link to <repository>/blobs/<hash>.
    allowed = [directory, *(above.parent / "blobs" for above in directory.parents if above.name == "snapshots")]
    if path.resolve().parent not in allowed:
        raise UnsafeCheckpointError(
            f"{path}: refused a symlink to {os.readlink(path)}, out of its directory; name the file itself to read it"
        )


def _open_pt(path: Path, key: str | None, wants_ema: bool) -> Mapping[str, Any]:
    with os.fdopen(storage.open_regular(path), "rb") as stream:
        if not zipfile.is_zipfile(stream):
            raise UnsafeCheckpointError(
                f"{path}: not a zip file as torch.save has written since torch 1.6; older ones are not opened. Load "
                f"and save it again where it came from."
            )
        try:
            packed_as_by_torch(zipfile.ZipFile(stream), os.fstat(stream.fileno()).st_size, str(path))
        except UnsafeCheckpointError:
            raise
        except Exception as problem:  # whatever a damaged directory of records raises
            raise DamagedCheckpointError(f"{path}: its list of records is not readable ({problem!r})") from problem
    # Mapped: nothing is read before it is sliced.
    content = load_weights_only(path, str(path), mmap=True, map_location="cpu")
    if not isinstance(content, Mapping):
        raise ValueError(f"{path}: a dictionary was expected, found {type(content).__name__}")
    dicts = [name for name, value in content.items() if isinstance(value, Mapping)]
    if key is None:
        if content and all(isinstance(value, Tensor) for value in content.values()):
            return content
        key = next((k for k in (_EMA_KEYS if wants_ema else _LIVE_KEYS) if k in dicts), None)
    if key not in dicts:
        raise KeyError(f"{path}: holds no dictionary of weights {'' if key is None else repr(key)}; it has {dicts}")
    chosen: Mapping[str, Any] = content[key]
    return chosen
