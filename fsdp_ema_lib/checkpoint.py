"""Model, optimizer, averages, counters and random states, saved and restored together in one directory."""

import errno
import importlib.metadata
import io
import sys
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.serialization import get_crc32_options

from fsdp_ema_lib import checkpoint_state, full_state, storage
from fsdp_ema_lib.agreement import raise_together
from fsdp_ema_lib.checkpoint_entries import Contents, Restore, plain_json
from fsdp_ema_lib.checkpoint_state import Averages, Model, Parts, Stateful, by_name
from fsdp_ema_lib.ema_state import local_of
from fsdp_ema_lib.layout import Layout
from fsdp_ema_lib.safe_reading import (
    ENTRIES,
    METADATA,
    SafeLoadPlanner,
    SafeReader,
    read_metadata,
    refuse_unreadable_object,
)
from fsdp_ema_lib.safetensors_io import export_safetensors as export_safetensors
from fsdp_ema_lib.storage import DamagedCheckpointError, UnsafeCheckpointError

T = TypeVar("T")
Group = dist.ProcessGroup | None


def save_checkpoint(
    path: str | Path,
    *,
    model: Model,
    optimizer: torch.optim.Optimizer | None = None,
    ema: Averages | None = None,
    scheduler: Stateful | None = None,
    sampler: Stateful | None = None,
    step: int = 0,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Save everything that training needs to go on bit for bit; each rank writes its own shards.

    Collective: every rank must call. The directory appears under its name when it is whole and on disk. For a series of
    checkpoints, with removal of old ones and recovery, use `CheckpointManager`.

    Args:
        path: a directory that does not exist yet, the same on every rank, on a file system that all of them see.
        model: as wrapped, or a list of model parts.
        optimizer: the optimizer of `model`.
        ema: an average, or several in a list or by name.
        scheduler: has `state_dict` and `load_state_dict`; rank 0's state is saved.
        sampler: the same, but each rank's own state is saved.
        step: number of optimizer steps done.
        extra: anything that JSON can hold; rank 0's counts.

    Raises:
        FileExistsError: `path` exists. TypeError: something that a load would refuse, named. RuntimeError: an average
        is swapped into the model. OSError: from writing. On every rank, and nothing is left under `path`; unless only
        the last flush of all failed, that of its new name, when the whole checkpoint is there.

    Example:
        >>> import tempfile
        >>> from torch import nn
        >>> model = nn.Linear(3, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(f"{folder}/first", model=model, step=7, extra={"run": "a"})
        ...     load_checkpoint(f"{folder}/first", model=model)
        {'step': 7, 'extra': {'run': 'a'}}
    """
    path = Path(path)
    contents = Contents()
    parts = Parts(model, optimizer, scheduler=scheduler, sampler=sampler)
    with together(None):
        check_step(step)
        parts.emas = by_name(ema)
        if rank_of(None) == 0:
            storage.refuse_existing(path)
        contents = collect(parts)
        extra = plain_json(dict(extra or {}), "extra")
    write(path, from_zero(storage.unpublished_name(path), None), contents, describe(contents, step, extra, None), None)


def load_checkpoint(
    path: str | Path,
    *,
    model: Model | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    ema: Averages | None = None,
    scheduler: Stateful | None = None,
    sampler: Stateful | None = None,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    verify: bool = False,
) -> dict[str, Any]:
    """Restore what `save_checkpoint` saved, into any layout and world size. Nothing from the files is executed.

    Collective: every rank must call. What is not asked for is not read: a model alone, or an average alone, can be
    loaded; the random states are restored together with an optimizer.

    Args:
        path: the directory.
        model, optimizer, ema, scheduler, sampler: as for `save_checkpoint`; what to restore.
        allow_missing: name patterns (`fnmatch`) of parameters that may be missing in the checkpoint, and keep their
            values.
        allow_unexpected: name patterns of parameters that the checkpoint may have and the model not.
        verify: compare checksums first. Sizes are always compared.

    Returns:
        `step` and `extra` as they were saved.

    Raises:
        FileNotFoundError: no whole checkpoint at `path`.
        ValueError: entries missing, unexpected, of another shape, dtype or class: all in one error, nothing changed.
            Or a scheduler or sampler that did not take its state, when only it may have changed.
        DamagedCheckpointError (a ValueError): a file is not what was saved, named. Nothing was changed, unless it says
            so: where a file that could be read before the first change cannot be read any more.
        UnsafeCheckpointError: the checkpoint would run code or reaches out of its directory. All on every rank.
    """
    parts = Parts(model, optimizer, scheduler=scheduler, sampler=sampler, random=optimizer is not None)
    with together(None):
        parts.emas = by_name(ema)
    opened = open_checkpoint(Path(path), None, verify)
    restore = match(opened, parts, allow_missing, allow_unexpected, None)
    reader = rehearse(opened, restore, None)
    fill(opened, restore, reader, None)
    return finish(opened, restore, None)


def fsdp_state_dict(module: Model) -> dict[str, Any]:
    """Gather the live weights and buffers: what the plain model loads with `strict=True`.

    Collective: every rank must call. Gathers one FSDP1 unit or one DTensor at a time.

    Returns:
        On rank 0, name -> tensor on the CPU in its own dtype, tied parameters under each name; elsewhere {}.

    Raises:
        TypeError, ValueError, RuntimeError: as for `EMA_FSDP`, on every rank.

    Example:
        >>> from torch import nn
        >>> sorted(fsdp_state_dict(nn.Linear(3, 2)))
        ['bias', 'weight']
    """
    layout: Layout | None = None
    with together(None):
        layout = Layout(module)
    assert layout is not None
    return full_state.collect(layout, layout.live(), None)


# ---------------------------------------------------------------- saving


def check_step(step: Any) -> None:
    """Raise TypeError or ValueError for what is no number of steps."""
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"step must be a whole number of optimizer steps, got {step!r}")
    if step < 0:
        raise ValueError(f"step must be at least 0, got {step}")


def collect(parts: Parts) -> Contents:
    """What this rank saves, refused now if a load would refuse it. Local.

    Raises:
        TypeError, ValueError, RuntimeError: as `checkpoint_state.contents`.
    """
    contents = checkpoint_state.contents(parts)
    for name, value in contents.entries.items():
        if not isinstance(value, Tensor):
            refuse_unreadable_object(value, name)
        elif type(local := local_of(value)) not in (Tensor, nn.Parameter):
            raise TypeError(
                f"{name} cannot be saved, because no load would accept it: its values are a {type(local).__name__}, a "
                f"plain tensor was expected"
            )
    return contents


def describe(contents: Contents, step: int, extra: Mapping[str, Any] | None, group: Group) -> dict[str, Any]:
    """Settle what all ranks have, and return the manifest but for the files. Collective over the group."""
    digests: dict[str, int] = {}
    with together(group):
        digests = contents.digests()
    contents.settle_buffers(gathered(digests, group), rank_of(group))
    described = gathered(contents.described, group)
    return {
        "step": step,
        "extra": dict(extra or {}),
        "world_size": len(described),
        "torch": torch.__version__,
        "fsdp_ema_lib": _library_version(),
        "saved_at": time.time(),
        **checkpoint_state.merged(described),
    }


def write(
    path: Path,
    unpublished: Path,
    contents: Contents,
    manifest: Mapping[str, Any],
    group: Group,
    checksums: bool = True,
) -> None:
    """Write one checkpoint under a name of its own, then publish it. Collective over the group, and over it alone.

    Raises:
        OSError, RuntimeError: from writing, on every rank; what was written and not published is removed.
    """
    rank = rank_of(group)
    with busy_with(unpublished), _removed_after_error(unpublished, rank):
        with together(group):
            if rank == 0:
                make_directory(path.parent)
                storage.make_private(unpublished)
        files: dict[str, Any] = {}
        with together(group):
            writer = _PrivateWriter(unpublished, checksums)
            with _quiet_without_a_group():
                save(
                    {ENTRIES: contents.entries},
                    storage_writer=writer,
                    planner=_FlatSavePlanner(),
                    process_group=group,
                )
            mine = sorted(unpublished.glob(f"__{rank}_*"))
            mine += [unpublished / METADATA] * (rank == 0)
            files = storage.seal(mine, writer.sums if checksums else None)
        everyone = gathered(files, group)
        with together(group):
            if rank == 0:
                listed = {name: facts for files in everyone for name, facts in files.items()}
                storage.publish(unpublished, path, {**manifest, "files": listed})


_busy: set[str] = set()


@contextmanager
def busy_with(path: Path) -> Iterator[None]:
    """While this process writes or removes a directory, whose name is one of its kind, `is_busy` knows it."""
    _busy.add(path.name)
    try:
        yield
    finally:
        _busy.discard(path.name)


def is_busy(name: str) -> bool:
    """Whether a directory of this name is no leftover, because another manager of this process is at it."""
    return name in _busy


def make_directory(directory: Path, mode: int = 0o777) -> None:
    """Make a directory and its parents where they are missing, and flush each new name to disk."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    if not missing:
        return
    directory.mkdir(mode, parents=True, exist_ok=True)
    for path in missing:
        storage.sync(path.parent)


@contextmanager
def _removed_after_error(unpublished: Path, rank: int) -> Iterator[None]:
    try:
        yield
    except Exception:
        if rank == 0:
            storage.discard(unpublished)
        raise


@contextmanager
def together(group: Group) -> Iterator[None]:
    """One verdict at the end of the block for all ranks of the group, whatever any of them raised in it."""
    error: Exception | None = None
    try:
        yield
    except (CheckpointException, Exception) as problem:
        error = _translated(problem)
    raise_together(error, (group,))


class _Stream(io.BufferedWriter):
    """Computes a checksum on the way, and remembers why a write failed: torch.save only says that the file is short.

    torch.save has itself computed the CRC-32 of each record of a tensor's values, and writes it right behind them. To
    take it from there halves the time that checksums cost.
    """

    error: OSError | None = None
    checksum: "_Checksum | None" = None

    def write(self, data: Any) -> int:
        try:
            if self.checksum is not None:
                self.checksum.add(memoryview(data).cast("B"))
            return super().write(data)
        except OSError as problem:
            self.error = problem
            raise


class _Checksum:
    """The CRC-32 of what is written; of a large piece the one that a zip file has in the data descriptor behind it."""

    def __init__(self) -> None:
        self.value: int | None = 0
        self.waiting = 0  # bytes of a large piece of which the checksum is still to come
        self.large = _LARGE if get_crc32_options() else sys.maxsize

    def add(self, data: memoryview) -> None:
        if self.value is None:
            return
        if self.waiting:
            if data[:4] != _DATA_DESCRIPTOR or len(data) < 8:
                self.value = None
                return
            self.value = storage.joined_crc32(self.value, int.from_bytes(data[4:8], "little"), self.waiting)
            self.waiting = 0
        if len(data) >= self.large and data[:4] != _WHOLE_ZIP:  # what is no tensor comes as a zip file in one piece
            self.waiting = len(data)
        else:
            self.value = zlib.crc32(data, self.value)

    @property
    def known(self) -> bool:
        """Whether every piece was accounted for; else the file has to be read."""
        return self.value is not None and not self.waiting


_LARGE = 1 << 16
_WHOLE_ZIP, _DATA_DESCRIPTOR = b"PK\3\4", b"PK\7\x08"


class _PrivateFiles(FileSystem):
    """Files that only their owner can read, and their checksums."""

    def __init__(self, checksums: bool) -> None:
        self.checksums = checksums
        self.sums: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        assert mode == "wb"
        with _Stream(storage.open_private(path)) as stream:
            checksum = stream.checksum = _Checksum() if self.checksums else None
            try:
                yield stream
                if checksum is not None and checksum.known:
                    self.sums[Path(path).name] = f"{checksum.value:08x}"
            except Exception:
                if stream.error is not None:
                    raise stream.error from None
                raise


class _FlatSavePlanner(DefaultSavePlanner):
    """Saves the flat dict under the key `ENTRIES`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict[ENTRIES], storage_meta, is_coordinator)


class _PrivateWriter(FileSystemWriter):
    def __init__(self, path: Path, checksums: bool) -> None:
        super().__init__(path, sync_files=False)  # `seal` flushes
        self.fs: _PrivateFiles = _PrivateFiles(checksums)

    @property
    def sums(self) -> dict[str, str]:
        """Name -> checksum of every file written so far of which it is known."""
        # The metadata are written under a name that they lose at once.
        return {name.removesuffix(".tmp"): crc for name, crc in self.fs.sums.items()}


# ---------------------------------------------------------------- loading


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose manifest, sizes and metadata have been found sound."""

    path: Path
    manifest: dict[str, Any]
    metadata: Metadata


def open_checkpoint(path: Path, group: Group, verify: bool) -> Opened:
    """Read and check everything but the tensors. Collective over the group; with `verify` the ranks share the files.

    Raises:
        FileNotFoundError, DamagedCheckpointError, UnsafeCheckpointError: as `load_checkpoint`.
    """
    opened: Opened | None = None
    with together(group), _unreadable_is_damaged(path):
        manifest = storage.read_manifest(path)
        storage.check_sizes(path, manifest)
        if verify:
            storage.check_sums(path, manifest, sorted(manifest["files"])[rank_of(group) :: world_of(group)])
    with together(group), _unreadable_is_damaged(path):
        opened = Opened(path, manifest, read_metadata(path))
    assert opened is not None
    return opened


def match(
    opened: Opened, parts: Parts, allow_missing: Sequence[str], allow_unexpected: Sequence[str], group: Group
) -> Restore:
    """Find every way in which a checkpoint does not fit. Collective over the group; changes nothing.

    Raises:
        ValueError: with all of them.
    """
    restore: Restore | None = None
    unexpected_here: list[str] = []
    with together(group):
        restore = checkpoint_state.prepare(parts, opened.metadata, opened.manifest, allow_missing, allow_unexpected)
        unexpected_here = [*restore.unexpected(checkpoint_state.sections(parts)), *restore.strays]
    assert restore is not None
    # Ranks may hold different parts of a model: unexpected is what none of them expects.
    unexpected = gathered(unexpected_here, group)
    by_none = [line for line in unexpected[0] if all(line in lines for lines in unexpected)]
    with together(group):
        if lines := restore.faults + by_none:
            raise ValueError(
                "\n".join(
                    [
                        f"{opened.path} does not fit:",
                        *lines,
                        "Nothing was changed. Load it into what it was saved from, or name what may differ with "
                        "allow_missing=[...] or allow_unexpected=[...].",
                    ]
                )
            )
    return restore


def rehearse(opened: Opened, restore: Restore, group: Group) -> SafeReader:
    """Read this rank's part of every entry, and keep what is not in use yet. Collective over the group.

    Returns:
        What `fill` reads the values with that belong into tensors in use, which are not changed yet.

    Raises:
        OSError, DamagedCheckpointError, UnsafeCheckpointError: from reading, on every rank.
    """
    reader = SafeReader(opened.path, opened.metadata, restore.in_place)
    with together(group), _unreadable_is_damaged(opened.path), _quiet_without_a_group():
        load(
            {ENTRIES: restore.entries},
            storage_reader=reader,
            planner=SafeLoadPlanner(),
            process_group=group,
        )
    with together(group):
        for check in restore.checks:
            check()
    return reader


def fill(opened: Opened, restore: Restore, reader: SafeReader, group: Group) -> None:
    """Let scheduler and sampler take their states, then read what is in use. Collective over the group.

    Raises:
        ValueError: a scheduler or a sampler did not take its state; model, optimizer and averages are unchanged.
        DamagedCheckpointError, OSError: what `rehearse` could read cannot be read any more; they are not.
    """
    with together(group):
        for take in restore.takers:
            take()
    with together(group), _half_is_said(), _unreadable_is_damaged(opened.path):
        reader.fill_in_place()


def finish(opened: Opened, restore: Restore, group: Group) -> dict[str, Any]:
    """Put back what is no tensor in use. Collective over the group; nothing is read any more."""
    with together(group):
        for step in restore.steps:
            step()
    for note in restore.notes:
        warnings.warn(note, stacklevel=3)
    return {"step": opened.manifest["step"], "extra": opened.manifest["extra"]}


@contextmanager
def _half_is_said() -> Iterator[None]:
    """Add to any error that what is in use is changed in part, and keep the types that tell damage from the rest."""
    try:
        yield
    except Exception as problem:
        kept = isinstance(problem, OSError | DamagedCheckpointError | UnsafeCheckpointError)
        error = (type(problem) if kept else RuntimeError)(
            f"{problem}\nAll could be read a moment before; this came when it was put in place. Model, optimizer and "
            f"averages are a mixture of what they were and of the checkpoint: load one again, or build them anew, "
            f"before you go on."
        )
        if isinstance(problem, OSError) and isinstance(error, OSError):
            error.errno = problem.errno
        raise error from problem


@contextmanager
def _unreadable_is_damaged(path: Path) -> Iterator[None]:
    """What a disk cannot give back is as lost as what it gives back changed; any other OSError is no damage."""
    try:
        yield
    except (CheckpointException, OSError) as problem:
        error = _translated(problem)
        if isinstance(error, OSError) and error.errno == errno.EIO:
            raise DamagedCheckpointError(f"{path}: the disk cannot read it back ({error})") from problem
        raise


# ---------------------------------------------------------------- small helpers


@contextmanager
def _quiet_without_a_group() -> Iterator[None]:
    """One process without a group is a normal way to use this: torch's warning about it would be noise."""
    if dist.is_initialized():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _translated(problem: BaseException) -> Exception:
    """An ordinary exception in place of torch's CheckpointException, which `except Exception` would let through."""
    if not isinstance(problem, CheckpointException):
        assert isinstance(problem, Exception)
        return problem
    causes = {rank: failure[0] for rank, failure in problem.failures.items()}
    first = next(iter(causes.values()))
    text = "; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items())
    for kind in (UnsafeCheckpointError, DamagedCheckpointError, FileNotFoundError):
        if isinstance(first, kind):
            return kind(text)
    if isinstance(first, OSError):
        error = OSError(text)
        error.errno = first.errno
        return error
    return RuntimeError(f"the checkpoint could not be written or read: {text}")


def _library_version() -> str:
    try:
        return importlib.metadata.version("fsdp-ema-lib")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def rank_of(group: Group) -> int:
    """This process's rank in the group; 0 without torch.distributed."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def world_of(group: Group) -> int:
    """The number of ranks in the group; 1 without torch.distributed."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def gathered(value: T, group: Group) -> list[T]:
    """Every rank's value, in rank order; collective over the group. The value must be picklable and not large."""
    values: list[T] = [value] * world_of(group)
    if dist.is_initialized():
        dist.all_gather_object(values, value, group=group)
    return values


def from_zero(value: T, group: Group) -> T:
    """The value of the group's first rank; collective over the group."""
    return gathered(value, group)[0]
