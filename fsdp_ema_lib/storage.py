"""Directories on disk: private, checksummed, whole or absent."""

import io
import json
import os
import pickle
import re
import shutil
import stat
import threading
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
_OWN_SUM = "manifest_crc32"
THREADS = 4
_MANIFEST_BYTES = 256 << 20
_BLOCK_BYTES, _PIECE_BYTES = 1 << 20, 1 << 26
_UNPUBLISHED, _DISCARDED = ".unpublished-", ".discarded-"
_STEP = re.compile(r"step_(\d{8,})")
_LEFTOVER = re.compile(rf"\.?.+({re.escape(_UNPUBLISHED)}|{re.escape(_DISCARDED)})[0-9a-f]{{32}}")


class UnsafeCheckpointError(pickle.UnpicklingError):
    """A checkpoint holds something that is no tensor, number or name, or reaches out of its own directory."""


class DamagedCheckpointError(ValueError):
    """A checkpoint is not what was saved: a file is missing, cut short or changed."""


# ---------------------------------------------------------------- whole or absent


def unpublished_name(path: Path) -> Path:
    """A fresh name beside `path`, for a directory that becomes `path` once it is whole."""
    return path.parent / f"{path.name}{_UNPUBLISHED}{uuid.uuid4().hex}"


def step_name(step: int) -> str:
    """The name of the directory that holds the checkpoint of a step."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The step of which a directory of this name holds the checkpoint; None for any other name.

    Example:
        >>> step_of(step_name(70)), step_of("step_7"), step_of("step_0000000070")
        (70, None, None)
    """
    found = _STEP.fullmatch(name)
    # A name that a person wrote may have the digits of a step and yet not be the step's name.
    return int(found[1]) if found and step_name(int(found[1])) == name else None


def is_leftover(name: str) -> bool:
    """Whether a directory of this name was left by a save or a removal that did not end.

    Example:
        >>> is_leftover("step_00000010.unpublished-" + "0" * 32), is_leftover("step_00000010.unpublished-mine")
        (True, False)
    """
    return _LEFTOVER.fullmatch(name) is not None


def publish(unpublished: Path, path: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest last, flush it and the directories to disk, then give the directory its name in one step.

    The files that the manifest names must be on disk already (`seal`).

    Raises:
        FileExistsError: `path` exists; what is there stays as it is.
    """
    write_manifest(unpublished, {"format_version": FORMAT_VERSION, **manifest})
    sync(unpublished)
    refuse_existing(path)
    os.rename(unpublished, path)
    sync(path.parent)


def write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Write a manifest, which must not exist, with a checksum of its own, and flush it to disk."""
    with io.BufferedWriter(open_private(directory / MANIFEST)) as stream:
        stream.write(json.dumps({**manifest, _OWN_SUM: _own_sum(manifest)}, indent=1).encode())
        stream.flush()
        os.fsync(stream.fileno())


def _own_sum(manifest: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(manifest, sort_keys=True).encode()):08x}"


def refuse_existing(path: Path) -> None:
    """Raise FileExistsError if there is anything under this name."""
    if os.path.lexists(path):
        raise FileExistsError(f"{path} exists; a checkpoint is never written over. Choose another name or remove it.")


def discard(path: Path) -> None:
    """Remove an unpublished or a published directory; a published one loses its name first, in one step."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path if is_leftover(path.name) else set_aside(path))


def set_aside(path: Path) -> Path:
    """Take its name from a published directory, in one step; returns the name of what is now a leftover."""
    gone = path.parent / f"{path.name}{_DISCARDED}{uuid.uuid4().hex}"
    os.rename(path, gone)
    return gone


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name for a file that replaces `path` in one step when the block ends without an error.

    Raises:
        FileExistsError: `path` is a directory, a device or a pipe, before the block.
    """
    if os.path.lexists(path) and not stat.S_ISREG(mode := os.lstat(path).st_mode) and not stat.S_ISLNK(mode):
        # As root, an export to /dev/null would put a file in its place.
        raise FileExistsError(
            f"{path} is a directory, a device or a pipe, which no file replaces. Choose another name."
        )
    temporary = path.parent / f".{path.name}{_UNPUBLISHED}{uuid.uuid4().hex}"
    try:
        yield temporary
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def make_private(path: Path) -> None:
    """Make a directory that only its owner can enter."""
    path.mkdir(mode=0o700)


def open_private(path: str | os.PathLike[str]) -> io.FileIO:
    """Open a new file for writing bytes that only its owner can read; it must not exist."""
    return io.FileIO(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))


def sync(path: Path) -> None:
    """Wait until a file or a directory is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------- checksums


def joined_crc32(first: int, second: int, length: int) -> int:
    """The CRC-32 of two pieces of data one after the other, from the CRC-32 of each: zlib's `crc32_combine`.

    Args:
        first, second: of the pieces.
        length: bytes of the second piece.

    Example:
        >>> joined_crc32(zlib.crc32(b"half of "), zlib.crc32(b"it"), 2) == zlib.crc32(b"half of it")
        True
    """
    return _product(_shift(length), first) ^ second


def _product(left: int, right: int) -> int:
    """Of two polynomials over GF(2), modulo that of CRC-32; the highest bit stands for x ** 0."""
    product, bit = 0, 1 << 31
    while left:
        if left & bit:
            product ^= right
            left ^= bit
        bit >>= 1
        right = (right >> 1) ^ (0xEDB88320 if right & 1 else 0)
    return product


@cache
def _shift(length: int) -> int:
    """x ** (8 * length), by repeated squaring: what as many bytes that follow do to a CRC-32."""
    result, square = 1 << 31, 1 << 23
    while length:
        if length & 1:
            result = _product(square, result)
        square, length = _product(square, square), length >> 1
    return result


def seal(paths: Iterable[Path], sums: Mapping[str, str] | None) -> dict[str, dict[str, Any]]:
    """Flush files to disk; returns name -> {"size": bytes, "crc32": hexadecimal} for the manifest.

    Args:
        paths: the files.
        sums: name -> checksum, where it became known while the file was written; the other files are read for it. None
            for no checksums.
    """
    paths = list(paths)
    in_threads([partial(sync, path) for path in paths])
    facts: dict[str, dict[str, Any]] = {path.name: {"size": path.stat().st_size} for path in paths}
    if sums is not None:
        for path in paths:
            known = sums.get(path.name) or _crc32s(path.parent, [path.name])[path.name]
            facts[path.name]["crc32"] = known
    return facts


def check_sizes(path: Path, manifest: Mapping[str, Any]) -> None:
    """Compare the size of every file with the manifest.

    Raises:
        DamagedCheckpointError: naming every file that is missing, of another size, or not in the manifest.
    """
    faults = []
    for name, facts in manifest["files"].items():
        try:
            descriptor = open_inside(path, name)
        except FileNotFoundError:
            faults.append(f"{path / name}: missing")
            continue
        size = os.fstat(descriptor).st_size
        os.close(descriptor)
        if size != facts["size"]:
            faults.append(f"{path / name}: {size} bytes, the manifest says {facts['size']}")
    known = {MANIFEST, *manifest["files"]}
    faults += [f"{path / name}: not in the manifest" for name in sorted(os.listdir(path)) if name not in known]
    _raise_damaged(faults)


def check_sums(path: Path, manifest: Mapping[str, Any], names: Iterable[str] | None = None) -> None:
    """Compare checksums with the manifest, with several threads.

    Args:
        path: the checkpoint.
        manifest: as `read_manifest` returns it.
        names: of the files to check; None for all. Those that were saved without a checksum are passed over, with a
            warning.

    Raises:
        DamagedCheckpointError: naming every file that differs.
    """
    names = list(manifest["files"] if names is None else names)
    wanted = checksummed(manifest, names)
    if len(wanted) < len(names):
        warnings.warn(
            f"{path}: {len(names) - len(wanted)} files were saved without a checksum (checksums=False): their sizes "
            f"alone are compared, and a flipped bit loads as if it were right",
            stacklevel=3,
        )
    _raise_damaged(
        f"{path / name}: its checksum is {crc}, the manifest says {manifest['files'][name]['crc32']}"
        for name, crc in _crc32s(path, wanted).items()
        if crc != manifest["files"][name]["crc32"]
    )


def checksummed(manifest: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Those of the files for which the manifest has a checksum."""
    return [name for name in names if "crc32" in manifest["files"][name]]


def _raise_damaged(faults: Iterable[str]) -> None:
    faults = list(faults)
    if faults:
        raise DamagedCheckpointError(
            "\n".join(["the checkpoint is damaged:", *faults, "Load an earlier one (fall_back=True does)."])
        )


def in_threads(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """The results of all jobs, or the error of the first that failed.

    Plain threads: an executor takes no more jobs once the interpreter has begun to end, when the last save is written.
    """
    results: list[Any] = [None] * len(jobs)
    errors: dict[int, Exception] = {}
    left = iter(range(len(jobs)))
    guard = threading.Lock()

    def work() -> None:
        while True:
            with guard:
                number = next(left, None)
            if number is None:
                return
            try:
                results[number] = jobs[number]()
            except Exception as problem:
                errors[number] = problem

    helpers = [threading.Thread(target=work) for _ in range(min(THREADS, len(jobs)) - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[min(errors)]
    return results


def _crc32s(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Name -> checksum of files, read in pieces by several threads."""
    pieces = [(name, start) for name in names for start in range(0, _size(directory, name) or 1, _PIECE_BYTES)]
    found = in_threads([partial(_crc32, directory, *piece) for piece in pieces])
    sums: dict[str, int] = {}
    for (name, _), (crc, length) in zip(pieces, found, strict=True):
        sums[name] = joined_crc32(sums.get(name, 0), crc, length)
    return {name: f"{crc:08x}" for name, crc in sums.items()}


def _size(directory: Path, name: str) -> int:
    with os.fdopen(open_inside(directory, name), "rb", buffering=0) as stream:
        return os.fstat(stream.fileno()).st_size


def _crc32(directory: Path, name: str, start: int) -> tuple[int, int]:
    """The checksum of one piece of a file, and its length."""
    crc, length = 0, 0
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    with os.fdopen(open_inside(directory, name), "rb", buffering=0) as stream:
        stream.seek(start)
        while count := stream.readinto(buffer[: _PIECE_BYTES - length]):
            crc, length = zlib.crc32(buffer[:count], crc), length + count
    return crc, length


# ---------------------------------------------------------------- reading


def open_inside(directory: Path, name: str) -> int:
    """A descriptor of a regular file that lies in this directory itself.

    Raises:
        UnsafeCheckpointError: the name climbs out of the directory, or the file is a symlink or no regular file.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise UnsafeCheckpointError(f"{directory}: refused the file name {name!r}, which is not a plain one")
    path = directory / name
    try:
        return open_regular(path, os.O_NOFOLLOW)
    except OSError:
        if path.is_symlink():
            raise UnsafeCheckpointError(
                f"{path}: refused a symlink to {os.readlink(path)}; a checkpoint's files lie in its own directory"
            ) from None
        raise


def open_regular(path: Path, flags: int = 0) -> int:
    """A descriptor for reading a regular file, never of a device or a pipe, which might not end.

    Raises:
        UnsafeCheckpointError: it is none.
    """
    # Non-blocking: to open a planted named pipe would otherwise wait for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnsafeCheckpointError(f"{path}: refused, it is not a regular file")
    return descriptor


def read_manifest(path: Path) -> dict[str, Any]:
    """What `publish` wrote.

    Raises:
        FileNotFoundError: there is no whole checkpoint at `path`.
        DamagedCheckpointError: the manifest is damaged. ValueError: it is of a later version.
        UnsafeCheckpointError: it is a symlink, or too large to be one.
    """
    if not os.path.lexists(path / MANIFEST):
        raise FileNotFoundError(
            f"{path}: no {MANIFEST}, so there is no whole checkpoint here (it is written last). Load an earlier one."
        )
    with os.fdopen(open_inside(path, MANIFEST), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > _MANIFEST_BYTES:
            raise UnsafeCheckpointError(
                f"{path / MANIFEST}: refused, {size} bytes is more than a manifest has ({_MANIFEST_BYTES})"
            )
        text = stream.read()
    try:
        manifest = json.loads(text)
        version = _whole(manifest["format_version"])
        if version <= FORMAT_VERSION:
            if manifest.pop(_OWN_SUM) != _own_sum(manifest):
                raise ValueError("its own checksum differs")
            _check_manifest(manifest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        raise DamagedCheckpointError(
            f"{path / MANIFEST}: damaged ({problem!r}). Load an earlier checkpoint."
        ) from problem
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{path}: the checkpoint has format {version}, this library reads up to {FORMAT_VERSION}: "
            f"update fsdp_ema_lib."
        )
    return dict(manifest)


def _check_manifest(manifest: Any) -> None:
    """Raise one of the errors that `read_manifest` translates unless everything that is read of it later is there."""
    if _whole(manifest["world_size"]) < 1:
        raise ValueError("world_size is not positive")
    _whole(manifest["step"])
    if not 0 <= manifest["saved_at"] < 1 << 40:
        raise ValueError(f"saved_at is no time: {manifest['saved_at']!r}")
    for name, facts in manifest["files"].items():
        _whole(facts["size"])
        _instance(facts.get("crc32", ""), str, f"the checksum of {name}")
    for section in ("extra", "model", "optimizer", "emas"):
        _instance(manifest[section], dict, section)
    if model := manifest["model"]:
        for part in ("names", "buffers"):
            _instances(_instance(model[part], list, part), str, part)
        _instances(_instance(model["tied"], dict, "tied").values(), str, "tied")
        for count in _instance(model["sharding"], dict, "sharding").values():
            _whole(count)
    if optimizer := manifest["optimizer"]:
        _instance(optimizer["class"], str, "class")
        _instance(optimizer["values"], dict, "values")
        for group in _instance(optimizer["groups"], list, "groups"):
            for part, names in (("parameters", group["parameters"]), ("keys", group.get("keys", []))):
                _instances(_instance(names, list, part), str, part)
            # Settings are put into the group: they must not replace what it steps.
            if "params" in _instance(group["settings"], dict, "settings"):
                raise ValueError("params are no setting")
    _instances(_instance(manifest.get("classes", {}), dict, "classes").values(), str, "classes")
    for average in manifest["emas"].values():
        _whole(average["num_updates"])
        _instance(average["decay"], dict, "decay")


def _instance(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{what}: {kind.__name__} was expected, found {type(value).__name__}")
    return value


def _instances(values: Iterable[Any], kind: type, what: str) -> None:
    for value in values:
        _instance(value, kind, what)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError(f"{value!r} is no count")
    return value
