"""Reads checkpoints of torch.distributed.checkpoint without executing anything from them.

Metadata is unpickled into stand-ins that exist for that one reading, and torch's own objects are built from them after
every field was checked. Tensors are taken from their files as bytes, of the size that the file really has.
"""

import io
import math
import os
import pickle
import pickletools
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from fsdp_ema_lib.storage import DamagedCheckpointError, UnsafeCheckpointError, in_threads, open_inside

METADATA = ".metadata"
# torch.distributed.checkpoint logs every key of the dict that it gets: it gets this one, over all entries.
ENTRIES = "entries"
_METADATA_BYTES = 1 << 30
_PICKLE_BYTES = 1 << 24  # of the pickle inside one entry: a byte of it can make an object of 64
_BYTES_ENTRY = 1 << 32
_SCRATCH_BYTES = 1 << 20

_DCP = "torch.distributed.checkpoint."
_RECORDS = frozenset(
    {
        (f"{_DCP}filesystem", "_StorageInfo"),
        (f"{_DCP}metadata", "BytesStorageMetadata"),
        (f"{_DCP}metadata", "ChunkStorageMetadata"),
        (f"{_DCP}metadata", "Metadata"),
        (f"{_DCP}metadata", "MetadataIndex"),
        (f"{_DCP}metadata", "StorageMeta"),
        (f"{_DCP}metadata", "TensorProperties"),
        (f"{_DCP}metadata", "TensorStorageMetadata"),
    }
)
_VALUES = frozenset(
    {
        (f"{_DCP}metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("pathlib._local", "PosixPath"),
    }
)
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
_COMPLEX_OR_ITS_PARTS = (torch.complex128, torch.complex64, torch.float64, torch.float32)
# Opcodes that build plain data, call what find_class let pass, and refer back. The others either never stand in a
# checkpoint or make room for as many bytes as they say (BYTEARRAY8).
_OPCODES = frozenset(
    """PROTO FRAME STOP MARK MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE INT BININT BININT1
    BININT2 LONG1 LONG4 BINFLOAT SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES SHORT_BINSTRING
    BINSTRING EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM SETITEMS EMPTY_SET
    ADDITEMS GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD BINPERSID POP POP_MARK DUP""".split()
)
_CODES = {ord(code.code): code for code in pickletools.opcodes}
_STOP = ord(".")
# Opcode -> its bytes and those of its argument; 0 where the argument says how many, or where it is looked at.
_STEPS = [0] * 256
for _byte, _code in _CODES.items():
    if _code.name in _OPCODES - {"STOP", "STACK_GLOBAL", "LONG_BINPUT"}:
        _STEPS[_byte] = 1 + max(-1, 0 if _code.arg is None else _code.arg.n)
_COUNT_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
# What torch.save needs for numbers, names, containers and tensors; `weights_only=True` decides again.
_ENTRY_GLOBALS = frozenset(
    {
        ("collections", "OrderedDict"),
        ("collections", "Counter"),
        ("collections", "defaultdict"),
        ("builtins", "dict"),
        ("builtins", "set"),
        ("builtins", "complex"),
        ("__builtin__", "set"),
        ("__builtin__", "complex"),
        ("torch", "Size"),
        ("torch", "device"),
        ("torch.storage", "UntypedStorage"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("torch._utils", "_rebuild_tensor_v3"),
        ("torch._utils", "_rebuild_parameter"),
        *(("torch", name) for name in _STORAGES),
    }
)


def scan_pickle(data: bytes, where: str, allowed: Collection[tuple[str, str]] | None) -> None:
    """Look through a pickle without executing it.

    Args:
        data: the pickle.
        where: what it is, for the error.
        allowed: (module, name) of the globals that it may name, beside torch's dtypes; None where `find_class` decides.

    Raises:
        UnsafeCheckpointError: it names another global, has an opcode that no checkpoint needs, or would reserve memory
            that its own size does not justify. DamagedCheckpointError: it is no pickle.
    """
    try:
        at = 0
        while data[at] != _STOP:
            # The metadata of a large model has millions of opcodes: those that need no look are stepped over at once.
            at += _STEPS[data[at]] or _looked_at(data, at, where, allowed)
    except UnsafeCheckpointError:
        raise
    except Exception as problem:
        raise DamagedCheckpointError(f"{where}: not a readable pickle ({problem!r})") from problem


def _looked_at(data: bytes, at: int, where: str, allowed: Collection[tuple[str, str]] | None) -> int:
    """The bytes that an opcode takes with its argument, unless it is refused."""
    code = _CODES.get(data[at])
    if code is None or code.name not in _OPCODES:
        name = f"{data[at]:#04x}" if code is None else code.name
        raise UnsafeCheckpointError(f"{where}: refused the pickle opcode {name}, which no checkpoint needs")
    if code.name == "STACK_GLOBAL":
        if allowed is not None:
            raise UnsafeCheckpointError(f"{where}: refused a pickle that hides the names of its classes")
        return 1
    if code.name == "LONG_BINPUT":
        if (slots := int.from_bytes(data[at + 1 : at + 5], "little")) > len(data):
            raise UnsafeCheckpointError(f"{where}: refused a pickle that would reserve {slots} memo slots")
        return 5
    if code.arg is not None and code.arg.n in _COUNT_BYTES:
        start = at + 1 + _COUNT_BYTES[code.arg.n]
        return start + int.from_bytes(data[at + 1 : start], "little") - at
    end = data.index(b"\n", at)
    if code.name == "GLOBAL":
        module, end = data[at + 1 : end].decode(), data.index(b"\n", end + 1)
        name = data[at + 2 + len(module.encode()) : end].decode()
        if allowed is not None and (module, name) not in allowed and not _is_dtype(module, name):
            raise refused_global(where, module, name)
    return end + 1 - at


def refused_global(where: str, module: str, name: str) -> UnsafeCheckpointError:
    """The error for a class or function that a file names and that nothing of ours needs."""
    return UnsafeCheckpointError(
        f"{where}: refused {module}.{name}, which no checkpoint needs; nothing of it was run. "
        f"Do not open this checkpoint with other tools."
    )


def _is_dtype(module: str, name: str) -> bool:
    return module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)


# ---------------------------------------------------------------- metadata


class _Record:
    """Stands in for an instance of one of torch's metadata classes while its pickle is read."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.__dict__["state"] = state


class _MetadataUnpickler(pickle.Unpickler):
    """Builds stand-ins alone: a hostile pickle can set attributes of what it gets, and must not get torch's classes."""

    def __init__(self, stream: Any, where: str) -> None:
        super().__init__(stream)
        self.where = where
        self.found: dict[tuple[str, str], Any] = {}

    def find_class(self, module: str, name: str) -> Any:
        key = (module, name)
        if _is_dtype(module, name):
            return getattr(torch, name)
        if key in _RECORDS:
            return self.found.setdefault(key, type(name, (_Record,), {}))
        if key in _VALUES:
            return self.found.setdefault(key, lambda *values: values[0] if len(values) == 1 else values)
        if key == ("collections", "OrderedDict"):
            return dict
        raise refused_global(self.where, module, name)


def read_metadata(directory: Path) -> Metadata:
    """The metadata of a checkpoint, every field checked: names, types, sizes, and that the files can hold them.

    Raises:
        UnsafeCheckpointError: it would run code, reaches out of the directory or claims more than the files hold.
        DamagedCheckpointError: it is not readable. FileNotFoundError: there is none.
    """
    where = str(directory / METADATA)
    with os.fdopen(open_inside(directory, METADATA), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > _METADATA_BYTES:
            raise UnsafeCheckpointError(f"{where}: refused, {size} bytes is more than metadata has ({_METADATA_BYTES})")
        data = stream.read()
    scan_pickle(data, where, None)
    try:
        root = _MetadataUnpickler(io.BytesIO(data), where).load()
        return _checked_metadata(root, directory)
    except (UnsafeCheckpointError, DamagedCheckpointError):
        raise
    except Exception as problem:  # whatever unpickling a damaged file raises
        raise DamagedCheckpointError(f"{where}: not readable ({problem!r}). Load an earlier checkpoint.") from problem


def _fields(record: Any, name: str) -> dict[str, Any]:
    if not isinstance(record, _Record) or type(record).__name__ != name or not isinstance(record.state, dict | None):
        raise DamagedCheckpointError(f"{name} was expected, found {type(record).__name__}")
    return record.state or {}


def _checked_metadata(root: Any, directory: Path) -> Metadata:
    fields = _fields(root, "Metadata")
    entries: dict[str, Any] = {}
    for name, entry in fields["state_dict_metadata"].items():
        if not isinstance(name, str):
            raise DamagedCheckpointError(f"{directory / METADATA}: an entry is named {name!r}")
        entries[name] = _checked_entry(name, entry)
    held: dict[MetadataIndex, _StorageInfo] = {}
    sizes: dict[str, int] = {}
    for index, info in fields["storage_data"].items():
        key = _fields(index, "MetadataIndex")
        offset = key.get("offset")
        held[MetadataIndex(_text(key["fqn"]), None if offset is None else _sizes(offset))] = _checked_place(
            info, directory, sizes
        )
    _refuse_what_no_file_holds(entries, held, directory)
    return Metadata(entries, {}, held, StorageMeta(), None)


def _checked_entry(name: str, entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(entry).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(entry, "TensorStorageMetadata")
    dtype = fields["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise DamagedCheckpointError(f"{name}: {dtype!r} is no dtype")
    shape = _sizes(fields["size"])
    chunks = []
    for chunk in fields["chunks"]:
        box = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _sizes(box["offsets"]), _sizes(box["sizes"])
        inside = len(offsets) == len(sizes) == len(shape)
        if not inside or any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            raise DamagedCheckpointError(f"{name}: a piece at {offsets} of {sizes} lies outside {shape}")
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    covered = sum(math.prod(chunk.sizes) for chunk in chunks)
    if covered != math.prod(shape):
        raise DamagedCheckpointError(f"{name}: its pieces hold {covered} of {math.prod(shape)} elements")
    if not _tiled(shape, [(chunk.offsets, chunk.sizes) for chunk in chunks]):
        raise DamagedCheckpointError(f"{name}: its pieces overlap, so that they leave a part of {shape} open")
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), chunks)


def _tiled(shape: Sequence[int], boxes: Sequence[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether boxes (offsets, sizes) inside a shape hold each of its elements exactly once.

    The number of boxes over an element is a sum of steps, up at the start of each box and down at its end. It is one
    everywhere if and only if the steps are those of the whole shape: taken along one dimension after the other, the
    boxes' steps minus the whole's cancel out. No pair of boxes is compared.
    """
    filled = [(offsets, sizes) for offsets, sizes in boxes if 0 not in sizes]
    cut = [n for n in range(len(shape)) if any(sizes[n] != shape[n] for _, sizes in filled)]
    # What is left of a box, dimension by dimension -> how often, minus the whole.
    left: Counter[tuple[Any, ...]] = Counter(tuple((o[n], o[n] + s[n]) for n in cut) for o, s in filled)
    if 0 not in shape:
        left[tuple((0, shape[n]) for n in cut)] -= 1
    most = (1 << 20) + 16 * len(left)
    for _ in cut:
        steps: Counter[tuple[Any, ...]] = Counter()
        for ((start, end), *rest), count in left.items():
            steps[(*rest, start)] += count
            steps[(*rest, end)] -= count
        left = Counter({key: count for key, count in steps.items() if count})
        if len(left) > most:  # edges of pieces that lie side by side cancel: no layout leaves so many
            return False
    return not any(left.values())


def _checked_place(info: Any, directory: Path, sizes: dict[str, int]) -> _StorageInfo:
    fields = _fields(info, "_StorageInfo")
    name, offset, length = fields["relative_path"], _count(fields["offset"]), _count(fields["length"])
    if fields.get("transform_descriptors"):
        raise UnsafeCheckpointError(f"{directory / METADATA}: refused an entry that passes through a stream transform")
    if name not in sizes:
        descriptor = open_inside(directory, name)
        sizes[name] = os.fstat(descriptor).st_size
        os.close(descriptor)
    if offset + length > sizes[name]:
        raise DamagedCheckpointError(
            f"{directory / name}: an entry is said to end at byte {offset + length}, the file has {sizes[name]}"
        )
    return _StorageInfo(name, offset, length)


def _refuse_what_no_file_holds(
    entries: dict[str, Any], held: dict[MetadataIndex, _StorageInfo], directory: Path
) -> None:
    for name, entry in entries.items():
        if isinstance(entry, BytesStorageMetadata):
            needed = [(MetadataIndex(name), 0)]
        else:
            itemsize = entry.properties.dtype.itemsize
            needed = [(MetadataIndex(name, c.offsets), itemsize * math.prod(c.sizes)) for c in entry.chunks]
        for index, least in needed:
            if index not in held:
                raise DamagedCheckpointError(
                    f"{directory / METADATA}: {name} is listed, but no file is said to hold it"
                )
            if held[index].length < least:
                raise UnsafeCheckpointError(
                    f"{directory / METADATA}: refused {name}, which claims {least} bytes of the "
                    f"{held[index].length} that {held[index].relative_path} has for it"
                )
    # Else a million entries could each claim the one gigabyte that there is.
    places = sorted(held.items(), key=lambda item: (item[1].relative_path, item[1].offset, item[1].length))
    for (first, one), (second, other) in pairwise(places):
        if one.relative_path == other.relative_path and one.offset + one.length > other.offset:
            raise UnsafeCheckpointError(
                f"{directory / METADATA}: refused {first.fqn} and {second.fqn}, which claim the same bytes of "
                f"{one.relative_path}"
            )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise DamagedCheckpointError(f"a name was expected, found {value!r}")
    return value


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise DamagedCheckpointError(f"a count was expected, found {value!r}")
    return value


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or len(values) > 64:
        raise DamagedCheckpointError(f"a shape was expected, found {values!r}")
    return tuple(_count(value) for value in values)


# ---------------------------------------------------------------- entries


@dataclass(frozen=True)
class StoredTensor:
    """Where the values of a saved tensor lie in its file.

    Attributes:
        start: byte of the file at which its storage begins; nbytes: of the storage.
        offset, shape, stride: of the tensor in the storage, in elements.
        conjugated, negated: whether what is stored still has to be.
    """

    dtype: torch.dtype
    start: int
    nbytes: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    conjugated: bool
    negated: bool


class _Window(io.RawIOBase):
    """Some bytes of an open file, as a file."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        self.descriptor, self.start, self.length, self.position = descriptor, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.length}[whence]
        if base + offset < 0:
            raise ValueError("seek before the start")
        self.position = base + offset
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self.length - self.position))
        data = os.pread(self.descriptor, count, self.start + self.position)
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


class _TensorUnpickler(pickle.Unpickler):
    """Reads the one tensor of an entry as numbers: which storage, which shape."""

    def __init__(self, data: bytes, where: str) -> None:
        super().__init__(io.BytesIO(data))
        self.where = where

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return torch.uint8
        if _is_dtype(module, name):
            return getattr(torch, name)
        if (module, name) in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")):
            return lambda *fields: fields
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        raise refused_global(self.where, module, name)

    def persistent_load(self, pid: Any) -> Any:
        return pid


def packed_as_by_torch(archive: zipfile.ZipFile, size: int, where: str) -> dict[str, zipfile.ZipInfo]:
    """The records of a zip file that torch.save wrote, by the part of their names that torch looks for.

    Torch reads them with a library of its own, by names without regard to case, at places counted from the first byte:
    where the two could see different records, the file is refused.

    Args:
        archive: the zip file.
        size: its bytes.
        where: what it is, for the error.

    Raises:
        UnsafeCheckpointError: a record is compressed, the records claim more than the file has, or it is laid out as
            torch.save never does.
    """
    records = archive.infolist()
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED or record.flag_bits & 1 or record.file_size > size:
            raise UnsafeCheckpointError(
                f"{where}: refused {record.filename.partition('/')[2]}, which is compressed or claims "
                f"{record.file_size} bytes of the {size} there are"
            )
    claimed = sum(record.file_size for record in records)
    if claimed > size:
        raise UnsafeCheckpointError(f"{where}: refused records that claim {claimed} bytes of the {size} there are")
    folders = {record.filename.partition("/")[0] for record in records}
    distinct = {record.filename.lower() for record in records}
    first = min((record.header_offset for record in records), default=0)
    if len(folders) > 1 or len(distinct) < len(records) or first != 0 or archive.comment:
        raise UnsafeCheckpointError(
            f"{where}: refused a zip file with doubled names, several folders or bytes outside its records, which "
            f"torch.save does not write"
        )
    return {record.filename.partition("/")[2]: record for record in records}


def _locator(stream: io.BufferedIOBase, length: int, where: str) -> Callable[[str], tuple[int, int]]:
    """A function from a record of the zip file that torch.save made of one entry to its (start, size)."""
    try:
        archive = zipfile.ZipFile(stream)
        records = packed_as_by_torch(archive, length, where)
    except UnsafeCheckpointError:
        raise
    except Exception as problem:
        raise DamagedCheckpointError(f"{where}: not a readable entry ({problem})") from problem

    def locate(name: str) -> tuple[int, int]:
        record = records.get(name)
        if record is None:
            raise DamagedCheckpointError(f"{where}: the entry has no {name}")
        stream.seek(record.header_offset)
        head = stream.read(30)
        if len(head) < 30 or head[:4] != b"PK\3\4":
            raise DamagedCheckpointError(f"{where}: {name} does not start where the entry says")
        skip = 30 + int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
        start = record.header_offset + skip
        if start + record.file_size > length:
            raise UnsafeCheckpointError(
                f"{where}: refused {name}, which claims {record.file_size} bytes and reaches beyond its file"
            )
        return start, record.file_size

    return locate


def _pickled(stream: io.BufferedIOBase, locate: Callable[[str], tuple[int, int]], where: str) -> bytes:
    """The pickle of an entry."""
    start, size = locate("data.pkl")
    if size > _PICKLE_BYTES:
        raise UnsafeCheckpointError(
            f"{where}: refused {size} bytes of names and single numbers, at most {_PICKLE_BYTES} are read; a long list "
            f"of numbers belongs into a tensor"
        )
    stream.seek(start)
    return stream.read(size)


def _opened(descriptor: int, info: _StorageInfo) -> io.BufferedReader:
    return io.BufferedReader(_Window(descriptor, info.offset, info.length), 4096)


def find_tensor(descriptor: int, info: _StorageInfo, where: str) -> StoredTensor:
    """Find the values of a saved tensor in its file. Reads a few thousand bytes.

    Raises:
        UnsafeCheckpointError, DamagedCheckpointError: the entry is no single tensor that lies inside it.
    """
    stream = _opened(descriptor, info)
    locate = _locator(stream, info.length, where)
    data = _pickled(stream, locate, where)
    scan_pickle(data, where, None)
    try:
        storage, offset, shape, stride, *rest = _TensorUnpickler(data, where).load()
        kind, dtype, key, _, _ = storage
        if kind != "storage" or not isinstance(key, str):
            raise TypeError("no storage")
        dtype = next((value for value in rest if isinstance(value, torch.dtype)), dtype)
        # A view that conjugates or negates says so behind its values, which are those from before.
        pending = {name for value in rest if isinstance(value, dict) for name, on in value.items() if on}
        if not pending <= {"conj", "neg"} or (pending and dtype not in _COMPLEX_OR_ITS_PARTS):
            raise TypeError(f"marked as {', '.join(map(repr, pending))}")
    except UnsafeCheckpointError:
        raise
    except Exception as problem:
        raise DamagedCheckpointError(f"{where}: not a readable tensor ({problem!r})") from problem
    start, size = locate("byteorder")
    stream.seek(start)
    if stream.read(min(size, 16)) != b"little":
        raise DamagedCheckpointError(f"{where}: the values are not in little-endian order")
    start, nbytes = locate(f"data/{key}")
    offset, shape, stride = _count(offset), _sizes(shape), _sizes(stride)
    end = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1 if math.prod(shape) else 0
    if end * dtype.itemsize > nbytes:
        raise UnsafeCheckpointError(
            f"{where}: refused a tensor of {shape} that claims {end * dtype.itemsize} bytes of the {nbytes} there are"
        )
    return StoredTensor(dtype, info.offset + start, nbytes, offset, shape, stride, "conj" in pending, "neg" in pending)


def read_box(
    descriptor: int, stored: StoredTensor, offsets: Sequence[int], sizes: Sequence[int], target: Tensor, where: str
) -> None:
    """Copy a hyper-rectangle of a stored tensor to `target`, reading only the bytes between its first and last."""
    if math.prod(sizes) == 0:
        return
    position, count = _span(stored, offsets, sizes)
    dense = [n for n in range(len(sizes)) if sizes[n] > 1]
    same_order = all(target.stride(n) == stored.stride[n] for n in dense) and count == math.prod(sizes)
    as_stored = target.device.type == "cpu" and target.dtype == stored.dtype and not _is_pending(target)
    in_place = same_order and as_stored
    values = target.as_strided((count,), (1,)) if in_place else torch.empty(count, dtype=stored.dtype)
    read_bytes(descriptor, position, values, where)
    if stored.conjugated:
        values.conj_physical_()
    if stored.negated:
        values.neg_()
    if not in_place:
        target.copy_(values.as_strided(tuple(sizes), stored.stride))


def _span(stored: StoredTensor, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
    """Where in the file a hyper-rectangle with elements begins, and how many elements there are up to its last."""
    first = stored.offset + sum(o * s for o, s in zip(offsets, stored.stride, strict=True))
    count = sum((n - 1) * s for n, s in zip(sizes, stored.stride, strict=True)) + 1
    return stored.start + first * stored.dtype.itemsize, count


def _is_pending(tensor: Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg()


def rehearse_box(
    descriptor: int, stored: StoredTensor, offsets: Sequence[int], sizes: Sequence[int], where: str
) -> None:
    """Read what `read_box` would, and keep nothing of it: raises what it would, for what a disk cannot give back."""
    if math.prod(sizes) == 0:
        return
    position, count = _span(stored, offsets, sizes)
    end = position + count * stored.dtype.itemsize
    scratch = torch.empty(min(end - position, _SCRATCH_BYTES), dtype=torch.uint8)
    while position < end:
        read_bytes(descriptor, position, scratch[: end - position], where)
        position += len(scratch)


def read_bytes(descriptor: int, position: int, into: Tensor, where: str) -> None:
    """Fill a contiguous one-dimensional tensor on the CPU from a file."""
    buffer: memoryview = into.view(torch.uint8).numpy().data
    while len(buffer):
        count = os.preadv(descriptor, [buffer[: 1 << 30]], position)
        if count == 0:
            raise DamagedCheckpointError(f"{where}: the file ends at byte {position}, more was expected")
        buffer, position = buffer[count:], position + count


def read_object(descriptor: int, info: _StorageInfo, where: str, map_location: str | None = None) -> Any:
    """The numbers, names, containers and tensors of a byte entry.

    Args:
        descriptor: of the open file.
        info: where in it the entry is.
        where: what it is, for the error.
        map_location: device of the tensors; None for those that they were saved from.

    Raises:
        UnsafeCheckpointError: it holds anything else, naming the class. DamagedCheckpointError: it is not readable.
    """
    return _object(_opened(descriptor, info), info.length, where, map_location)


def _object(stream: io.BufferedIOBase, length: int, where: str, map_location: str | None) -> Any:
    if length > _BYTES_ENTRY:
        raise UnsafeCheckpointError(f"{where}: refused a byte entry of {length} bytes, at most {_BYTES_ENTRY} are read")
    scan_pickle(_pickled(stream, _locator(stream, length, where), where), where, _ENTRY_GLOBALS)
    stream.seek(0)
    return load_weights_only(stream, where, map_location=map_location)


def refuse_unreadable_object(value: Any, where: str) -> None:
    """Raise TypeError if `read_object` would refuse this value once it is saved."""
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        _object(stream, stream.tell(), where, "cpu")
    except Exception as problem:
        raise TypeError(f"{where} cannot be saved, because no load would accept it: {problem}") from problem


def load_weights_only(source: Any, where: str, **options: Any) -> Any:
    """`torch.load(weights_only=True)` with errors of ours."""
    try:
        return torch.load(source, weights_only=True, **options)
    except pickle.UnpicklingError as problem:
        raise UnsafeCheckpointError(f"{where}: refused ({problem}); nothing of it was run") from problem
    except Exception as problem:
        raise DamagedCheckpointError(f"{where}: not readable ({problem!r})") from problem


# ---------------------------------------------------------------- torch.distributed.checkpoint's border


class SafeReader(FileSystemReader):
    """Gives torch.distributed.checkpoint the entries of a checkpoint.

    Args:
        path: the checkpoint.
        metadata: what `read_metadata` returned for it.
        in_place: names of tensors whose values are in use: of them all is looked at and read, and nothing changed
            before `fill_in_place`.
    """

    def __init__(self, path: Path, metadata: Metadata, in_place: Collection[str] = ()) -> None:
        super().__init__(path)
        self.metadata = metadata
        self._in_place = in_place
        self._left: list[tuple[str, StoredTensor, ReadItem, Tensor, str]] = []

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert isinstance(planner, SafeLoadPlanner)
        per_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            per_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in per_file.items():
            in_order = sorted(items, key=lambda item: self.storage_data[item.storage_index].offset)
            with self._opened(name) as descriptor:
                in_threads([partial(self._read, descriptor, name, item, planner) for item in in_order])
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        descriptor = open_inside(Path(self.path), name)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _read(self, descriptor: int, name: str, item: ReadItem, planner: "SafeLoadPlanner") -> None:
        info = self.storage_data[item.storage_index]
        where = f"{Path(self.path) / name}, {item.storage_index.fqn}"
        if item.type == LoadItemType.BYTE_IO:
            planner.state_dict[item.dest_index.fqn] = read_object(descriptor, info, where)
            return
        stored = find_tensor(descriptor, info, where)
        refuse_other_than_listed(stored, self.metadata, item.storage_index, where)
        target = planner.resolve_tensor(item).detach()
        if item.dest_index.fqn in self._in_place:
            rehearse_box(descriptor, stored, item.storage_offsets, item.lengths, where)
            self._left.append((name, stored, item, target, where))
        else:
            read_box(descriptor, stored, item.storage_offsets, item.lengths, target, where)

    def fill_in_place(self) -> None:
        """Read the tensors that are in use, once everything else has been found right. Local.

        Raises:
            OSError, DamagedCheckpointError: a file cannot be read any more, and some of the tensors have been filled.
        """
        for device in {target.device for *_, target, _ in self._left if target.is_cuda}:
            torch.cuda.synchronize(device)  # the threads know nothing of the stream that may still read them
        per_file: dict[str, list[Callable[[int], None]]] = {}
        for name, stored, item, target, where in sorted(self._left, key=lambda left: (left[0], left[1].start)):
            per_file.setdefault(name, []).append(partial(_fill, stored=stored, item=item, target=target, where=where))
        for name, fills in per_file.items():
            with self._opened(name) as descriptor:
                in_threads([partial(fill, descriptor) for fill in fills])


def _fill(descriptor: int, *, stored: StoredTensor, item: ReadItem, target: Tensor, where: str) -> None:
    # A thread of its own has no mode of the caller's, and what was made in inference mode is written in it alone.
    with torch.inference_mode(target.is_inference()):
        read_box(descriptor, stored, item.storage_offsets, item.lengths, target, where)
    if not target.is_inference():
        # Autograd does not see bytes change: a backward of a forward from before would go on with the new values.
        torch.autograd.graph.increment_version(target)


def refuse_other_than_listed(stored: StoredTensor, metadata: Metadata, index: MetadataIndex, where: str) -> None:
    """Raise DamagedCheckpointError if a stored tensor has not the shape and dtype that the metadata says."""
    listed = metadata.state_dict_metadata[index.fqn]
    assert isinstance(listed, TensorStorageMetadata)
    shape = next(chunk.sizes for chunk in listed.chunks if chunk.offsets == index.offset)
    if stored.shape != tuple(shape) or stored.dtype != listed.properties.dtype:
        raise DamagedCheckpointError(
            f"{where}: the file holds {stored.shape} of {stored.dtype}, the metadata says {tuple(shape)} of "
            f"{listed.properties.dtype}"
        )


class SafeLoadPlanner(DefaultLoadPlanner):
    """Fills the flat dict under the key `ENTRIES`; `read_object` reads the byte entries, torch's unpickling none."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict[ENTRIES], metadata, is_coordinator)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("byte entries are read by SafeReader")
