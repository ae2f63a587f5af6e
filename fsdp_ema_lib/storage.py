"""Directories and files on disk: whole or absent, and read without executing anything from them."""

import io
import json
import os
import pickle
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
_UNPUBLISHED = ".unpublished-"

# Everything that the metadata of a checkpoint is made of; torch dtypes come on top.
_METADATA_GLOBALS = frozenset(
    {
        ("collections", "OrderedDict"),
        ("pathlib", "Path"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        ("pathlib._local", "PosixPath"),
        ("torch", "Size"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "Metadata"),
        ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
        ("torch.distributed.checkpoint.metadata", "StorageMeta"),
        ("torch.distributed.checkpoint.metadata", "TensorProperties"),
        ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.serialization", "_get_layout"),
    }
)


class UnsafeCheckpointError(pickle.UnpicklingError):
    """A checkpoint holds something that is no tensor, number or name, and that would run code if it were opened."""


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, stream: Any, path: Path) -> None:
        super().__init__(stream)
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _METADATA_GLOBALS or (
            module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)
        ):
            return super().find_class(module, name)
        raise UnsafeCheckpointError(
            f"{self.path}: refused {module}.{name}, which no checkpoint metadata needs; nothing of it was run. "
            f"Do not open this checkpoint with other tools."
        )


class SafeReader(FileSystemReader):
    """Reads a checkpoint of torch.distributed.checkpoint; its metadata can name known classes only."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        with open(path, "rb") as stream:
            metadata: Metadata = _MetadataUnpickler(stream, path).load()
        metadata.storage_meta = getattr(metadata, "storage_meta", None) or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class SafeLoadPlanner(DefaultLoadPlanner):
    """Fills a state dict; what is not a tensor is read with `weights_only=True`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        checked = torch.load(value, weights_only=True)
        plain = io.BytesIO()
        torch.save(checked, plain)  # the base class unpickles without a check: hand it what has passed one
        plain.seek(0)
        super().load_bytes(read_item, plain)


def unpublished_name(path: Path) -> Path:
    """A fresh name beside `path`, for a directory that becomes `path` once it is whole."""
    return path.parent / f"{path.name}{_UNPUBLISHED}{uuid.uuid4().hex}"


def publish(unpublished: Path, path: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest last, flush everything to disk, then give the directory its name in one step.

    Raises:
        FileExistsError: `path` exists; what is there stays as it is.
    """
    with open(unpublished / MANIFEST, "w") as stream:
        json.dump({"format_version": FORMAT_VERSION, **manifest}, stream, indent=1)
    for file in unpublished.iterdir():
        _sync(file)
    _sync(unpublished)
    if path.exists():
        raise FileExistsError(f"{path} exists; a checkpoint is never written over. Choose another name or remove it.")
    os.rename(unpublished, path)
    _sync(path.parent)


def discard(unpublished: Path) -> None:
    """Remove a directory that was not published."""
    if _UNPUBLISHED in unpublished.name and unpublished.is_dir():
        shutil.rmtree(unpublished)


def read_manifest(path: Path) -> dict[str, Any]:
    """What `publish` wrote.

    Raises:
        FileNotFoundError: there is no whole checkpoint at `path`.
        ValueError: the manifest is damaged, or of a later version.
    """
    if not (path / MANIFEST).is_file():
        raise FileNotFoundError(
            f"{path}: no {MANIFEST}, so there is no whole checkpoint here (it is written last). Load an earlier one."
        )
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        version = int(manifest["format_version"])
    except (ValueError, KeyError, TypeError) as problem:
        raise ValueError(f"{path / MANIFEST}: damaged ({problem!r}). Load an earlier checkpoint.") from problem
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{path}: the checkpoint has format {version}, this library reads up to {FORMAT_VERSION}: "
            f"update fsdp_ema_lib."
        )
    return manifest


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        raw = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
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
        os.close(self.file)
        try:
            with safe_open(self.path, framework="pt") as written:
                assert set(written.keys()) == set(self.entries)
        except SafetensorError as problem:
            raise RuntimeError(
                f"{self.path}: the file just written does not open ({problem}); the disk may be full"
            ) from problem


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name for a file that replaces `path` in one step when the block ends without an error."""
    temporary = path.parent / f".{path.name}{_UNPUBLISHED}{uuid.uuid4().hex}"
    try:
        yield temporary
        os.replace(temporary, path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
