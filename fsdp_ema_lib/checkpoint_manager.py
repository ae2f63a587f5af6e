"""A directory of checkpoints: which are whole, which is the newest, which may go."""

import logging
import re
import threading
import uuid
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_ema_lib import checkpoint, checkpoint_entries, storage
from fsdp_ema_lib.checkpoint_entries import Contents, plain_json
from fsdp_ema_lib.checkpoint_state import Averages, Model, Parts, Stateful, by_name
from fsdp_ema_lib.directory_lock import DirectoryLock
from fsdp_ema_lib.meeting import Meeting
from fsdp_ema_lib.storage import DamagedCheckpointError, UnsafeCheckpointError

log = logging.getLogger(__name__)
# What a load of a damaged checkpoint raises, on every rank. Too many open files, no permission, no memory or a lost
# rank say nothing about the checkpoint, and would be met again at the older ones.
_DAMAGE = (DamagedCheckpointError, UnsafeCheckpointError, FileNotFoundError)
# A whole checkpoint of a branch that training went back from; ours to remove, like a retired one.
_ABANDONED = re.compile(r"step_([0-9]{8,})\.abandoned-[0-9a-f]{32}")


class CheckpointManager:
    """Saves a training into a directory, one sub-directory a step, and finds the newest whole one again.

    A checkpoint is whole or absent: it is written under another name, flushed to disk, and gets its own name in one
    step. Whatever a killed save left is cleared by the next. Each rank writes and reads its own shards alone; a load
    may run on another number of ranks and under another way of sharding.

    Every rank must build it and call `save`, `load`, `wait` and `close`; `latest`, `steps`, `path_of` and `verify` are
    local.

    Args:
        directory: made if it is missing; on a file system that all ranks see.
        keep: whole checkpoints to keep, the newest ones and the one just saved; None keeps all. Nothing but
            checkpoints is ever removed.
        async_save: `save` returns once the state is copied, and a thread writes the copy. An error in it is raised by
            the next call of `save`, `load`, `wait` or `close`. Without one it is only printed at exit, when Python lets
            nothing change the exit status any more: end with `close`, or use `with`.
        checksums: store a checksum of every file (sizes are always stored).
        enter_timeout: how long a rank waits in `save` and in `load` for the others to call it too.
        write_timeout: how long a rank waits for the others to write.
        read_only: loads only, beside a job that saves; takes no lock and changes nothing.

    Raises:
        RuntimeError: another job saves to this directory, by host, process id and time. ValueError: `keep` below 1.

    Example:
        >>> import tempfile
        >>> from torch import nn
        >>> model = nn.Linear(3, 2)
        >>> with tempfile.TemporaryDirectory() as folder, CheckpointManager(folder, keep=2) as checkpoints:
        ...     for step in (10, 20, 30):
        ...         _ = checkpoints.save(step, model=model, extra={"run": "a"})
        ...     checkpoints.steps(), checkpoints.load(model=model)
        ([20, 30], {'step': 30, 'extra': {'run': 'a'}})
    """

    def __init__(
        self,
        directory: str | Path,
        keep: int | None = 3,
        *,
        async_save: bool = False,
        checksums: bool = True,
        enter_timeout: timedelta = timedelta(minutes=2),
        write_timeout: timedelta = timedelta(hours=2),
        read_only: bool = False,
    ) -> None:
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ValueError(f"keep must be at least 1, or None to keep all, got {keep!r}")
        self.directory = Path(directory)
        self.keep = keep
        self.async_save = async_save
        self.checksums = checksums
        self.read_only = read_only
        self._closed = False
        self._lock: DirectoryLock | None = None
        self._damaged: set[int] = set()  # found by a load; their sizes may be right
        self._loaded: int | None = None  # where training goes on from, until it saves
        self._buffers: dict[str, Tensor] = {}
        self._background = _Background()
        self._removals: list[threading.Thread] = []
        self._at_exit = weakref.finalize(self, _Background.report, self._background)
        # Of its own: what a thread writes must never meet what training sends, and a slow disk is no dead rank.
        shared = dist.is_initialized() and dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo", timeout=write_timeout) if shared else None
        place = checkpoint.from_zero(uuid.uuid4().hex, self._group)
        # Apart, so that a rank that saves never takes one that loads for its partner.
        self._saving, self._loading = (Meeting(f"{place}/{what}", enter_timeout) for what in ("save", "load"))
        with checkpoint.together(self._group):
            if not read_only and self._rank() == 0:
                checkpoint.make_directory(self.directory, 0o700)
                self._lock = DirectoryLock(self.directory)

    # ------------------------------------------------------------ what there is

    def steps(self) -> list[int]:
        """The steps of which there is a whole checkpoint, in order. Local."""
        if not self.directory.is_dir():
            return []
        found = ((storage.step_of(path.name), path) for path in self.directory.iterdir())
        return sorted(
            step
            for step, path in found
            if step is not None and not path.is_symlink() and (path / storage.MANIFEST).exists()
        )

    def latest(self) -> int | None:
        """The newest step of which there is a whole checkpoint on disk; None if there is none. Local."""
        steps = self.steps()
        if steps and not self.read_only:
            storage.sync(self.directory)  # a name seen is a name kept
        return steps[-1] if steps else None

    def path_of(self, step: int) -> Path:
        """The directory of a step, whether it exists or not."""
        return self.directory / storage.step_name(step)

    def verify(self, step: int | None = None) -> None:
        """Compare sizes and checksums of one checkpoint (the newest by default) with its manifest. Local.

        Raises:
            FileNotFoundError: there is none. DamagedCheckpointError: naming every damaged file.
        """
        step = self.latest() if step is None else step
        if step is None:
            raise FileNotFoundError(f"{self.directory}: no checkpoint here")
        path = self.path_of(step)
        manifest = storage.read_manifest(path)
        storage.check_sizes(path, manifest)
        storage.check_sums(path, manifest)

    # ------------------------------------------------------------ saving

    def save(
        self,
        step: int,
        *,
        model: Model,
        optimizer: torch.optim.Optimizer | None = None,
        ema: Averages | None = None,
        scheduler: Stateful | None = None,
        sampler: Stateful | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Path:
        """Save everything that training needs to go on bit for bit. Collective; arguments as for `save_checkpoint`.

        Where training went on from an older checkpoint than the newest, the first save that those newer ones would
        outlive sets them aside: they become `step_....abandoned-...`, with a warning that names them.

        Returns:
            The checkpoint's directory; with `async_save` it appears later.

        Raises:
            FileExistsError: there is a sound checkpoint of this step (a damaged one is replaced).
            TimeoutError: a rank did not call `save` in time, named. TypeError: something that a load would refuse,
            named. RuntimeError: an average is swapped into the model; the manager is closed or read-only. OSError:
            from writing. On every rank, and nothing is left of this save; unless only what comes after the rename
            failed (the flush of the new name, retention), when the whole checkpoint is there. Also what an asynchronous
            save before this one raised; this one is then not begun.
        """
        self._refuse_unless_open("save")
        self.wait()
        self._saving.enter(f"save(step={step})", self._rank(), self._world())
        contents = Contents()
        parts = Parts(model, optimizer, scheduler=scheduler, sampler=sampler)
        with checkpoint.together(self._group):
            checkpoint.check_step(step)
            parts.emas = by_name(ema)
            contents = checkpoint.collect(parts)
            extra = plain_json(dict(extra or {}), "extra")
            if self._rank() == 0:
                self._prepare(step)
        path = self.path_of(step)
        unpublished, first = checkpoint.from_zero((storage.unpublished_name(path), step), self._group)
        with checkpoint.together(self._group):
            if first != step:
                raise ValueError(f"step is {step} on rank {self._rank()} and {first} on rank 0")
        manifest = checkpoint.describe(contents, step, extra, self._group)
        if self.async_save:
            with checkpoint.together(self._group):
                contents = Contents(checkpoint_entries.staged(contents.entries, self._buffers), contents.described)
        self._loaded = None
        write = partial(checkpoint.write, path, unpublished, contents, manifest, self._group, self.checksums)
        if self.async_save:
            self._background.start(step, partial(self._write, step, write))
        else:
            self._write(step, write)
        return path

    def wait(self) -> None:
        """Wait for the asynchronous save, if there is one; raises what it raised."""
        self._background.wait()

    def _write(self, step: int, write: Callable[[], None]) -> None:
        write()
        with checkpoint.together(self._group):
            if self._rank() == 0:
                self._retire(step)

    def _prepare(self, step: int) -> None:
        """Clear the way: what killed saves left, what training went back from, a damaged checkpoint of this step."""
        self._await_removals()
        for path in self.directory.iterdir():
            if checkpoint.is_busy(path.name):
                continue
            if storage.step_of(path.name.partition(".")[0]) is not None and storage.is_leftover(path.name):
                log.info("removing %s, which a save or a removal that was killed left", path)
                storage.discard(path)
        self._set_aside_abandoned(step)
        path = self.path_of(step)
        if step in self.steps():
            try:
                self.verify(step)
            except (DamagedCheckpointError, UnsafeCheckpointError) as problem:
                warnings.warn(f"replacing the damaged checkpoint of step {step}: {problem}", stacklevel=3)
                storage.discard(path)
                self._damaged.discard(step)
        storage.refuse_existing(path)

    def _set_aside_abandoned(self, step: int) -> None:
        """Take their names from the checkpoints that training has gone back from, if they would outlive this save.

        Otherwise `latest` would lead back to them, and they would stand in the way of the same step.
        """
        steps = self.steps()
        if self._loaded is None:
            if steps and step < steps[-1]:
                warnings.warn(
                    f"{self.directory}: saving step {step} without a load before, while the newest checkpoint is that "
                    f"of step {steps[-1]}, from which a load will go on. Start anew in another directory.",
                    stacklevel=4,
                )
            return
        if not self._loaded < step <= steps[-1]:
            return
        abandoned = {old: _abandoned_name(self.path_of(old)) for old in steps if old > self._loaded}
        told = ", ".join(f"{old} (now {path.name})" for old, path in abandoned.items())
        warnings.warn(
            f"{self.directory}: training went on from step {self._loaded} and saves step {step}, so that the newer "
            f"checkpoints are set aside: {told}. Their names can be given back by hand, until "
            f"{'retention removes them' if self.keep else 'somebody removes them'}.",
            stacklevel=4,
        )
        for old, path in abandoned.items():
            self.path_of(old).rename(path)
            self._damaged.discard(old)
        storage.sync(self.directory)

    def _retire(self, saved: int) -> None:
        """Remove what is older than the newest `keep` sound checkpoints, but never the one just saved."""
        if self.keep is None:
            return
        sound = [step for step in self.steps() if step not in self._damaged and self._has_its_sizes(step)]
        if len(sound) <= self.keep:
            return
        held = [(step, self.path_of(step)) for step in self.steps() if step != saved]
        aside = ((_ABANDONED.fullmatch(path.name), path) for path in self.directory.iterdir() if not path.is_symlink())
        held += [(int(found[1]), path) for found, path in aside if found]
        for step, path in held:
            if step < sound[-self.keep]:
                # It has lost its name at once; to free what it held can take as long as a save.
                try:
                    gone = storage.set_aside(path)
                except OSError as problem:
                    raise OSError(f"step {saved} is saved, but {path} could not be retired: {problem}") from problem
                self._removals.append(threading.Thread(target=_remove, args=(gone,), name=f"removal of {gone}"))
                self._removals[-1].start()

    def _await_removals(self) -> None:
        while self._removals:
            self._removals.pop().join()

    def _has_its_sizes(self, step: int) -> bool:
        try:
            storage.check_sizes(self.path_of(step), storage.read_manifest(self.path_of(step)))
        except (OSError, ValueError, UnsafeCheckpointError):
            return False
        return True

    # ------------------------------------------------------------ loading

    def load(
        self,
        step: int | str = "latest",
        *,
        model: Model | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        ema: Averages | None = None,
        scheduler: Stateful | None = None,
        sampler: Stateful | None = None,
        allow_missing: Sequence[str] = (),
        allow_unexpected: Sequence[str] = (),
        verify: bool = False,
        fall_back: bool = False,
    ) -> dict[str, Any]:
        """Restore a checkpoint. Collective; other arguments and errors as for `load_checkpoint`.

        Args:
            step: which one; "latest" for the newest whole one.
            fall_back: with "latest", go on to the next older one, with a warning, where one is damaged.

        Returns:
            `step` and `extra` as they were saved.

        Raises:
            TimeoutError: a rank did not call `load` in time, named. RuntimeError: the manager is closed.
        """
        if self._closed:
            raise RuntimeError(f"load: the manager of {self.directory} is closed")
        self.wait()
        self._loading.enter(f"load(step={step!r})", self._rank(), self._world())
        parts = Parts(model, optimizer, scheduler=scheduler, sampler=sampler, random=optimizer is not None)
        steps: list[int] = []
        with checkpoint.together(self._group):
            parts.emas = by_name(ema)
            # What rank 0 sees counts: on a network file system others may see a new name later.
            steps = self._candidates(step) if self._rank() == 0 else []
        steps = checkpoint.from_zero(steps, self._group)
        for number, candidate in enumerate(steps):
            try:
                opened = checkpoint.open_checkpoint(self.path_of(candidate), self._group, verify)
                if (step_inside := opened.manifest["step"]) != candidate:
                    where = opened.path / storage.MANIFEST
                    raise DamagedCheckpointError(f"{where}: it is the manifest of step {step_inside}")
            except _DAMAGE as problem:
                self._fall_back(fall_back, steps[number:], problem)
                continue
            restore = checkpoint.match(opened, parts, allow_missing, allow_unexpected, self._group)
            try:
                reader = checkpoint.rehearse(opened, restore, self._group)
                log.info("loading step %d from %s", candidate, opened.path)
                checkpoint.fill(opened, restore, reader, self._group)
            except _DAMAGE as problem:
                self._fall_back(fall_back, steps[number:], problem)
                continue
            found = checkpoint.finish(opened, restore, self._group)
            self._loaded = candidate
            return found
        raise AssertionError("the oldest candidate is loaded, or raises")

    def _fall_back(self, allowed: bool, steps: Sequence[int], problem: Exception) -> None:
        """Say loudly that an older checkpoint comes next, or raise the problem with this one."""
        if not allowed or len(steps) == 1:
            raise problem
        self._damaged.add(steps[0])
        warnings.warn(
            f"the checkpoint of step {steps[0]} is damaged, going back to step {steps[1]}: {problem}", stacklevel=3
        )

    def _candidates(self, step: int | str) -> list[int]:
        if step != "latest":
            if not isinstance(step, int):
                raise TypeError(f'step must be a number or "latest", got {step!r}')
            if step not in self.steps():
                raise FileNotFoundError(
                    f"{self.directory}: no whole checkpoint of step {step}; there are {self.steps() or 'none'}"
                )
            return [step]
        if not self.steps():
            raise FileNotFoundError(f"{self.directory}: no checkpoint here")
        return self.steps()[::-1]

    # ------------------------------------------------------------ ending

    def close(self) -> None:
        """Wait for the asynchronous save, raise what it raised, and let the directory go; again does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        finally:
            self._await_removals()
            self._at_exit.detach()
            self._buffers.clear()
            if self._lock is not None:
                self._lock.release()
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._group = None

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refuse_unless_open(self, what: str) -> None:
        if self._closed or self.read_only:
            state = "closed" if self._closed else "read-only"
            raise RuntimeError(f"{what}: the manager of {self.directory} is {state}")

    def _rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    def _world(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1


class _Background:
    """At most one save at a time in a thread, and its error until someone has seen it."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def start(self, step: int, job: Callable[[], None]) -> None:
        # Not a daemon: the interpreter waits for it at exit, so that a save that has begun ends.
        self.thread = threading.Thread(target=self._run, args=(step, job), name=f"save of step {step}")
        self.thread.start()

    def _run(self, step: int, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as problem:
            problem.add_note(f"in the asynchronous save of step {step}")
            self.error = problem

    def wait(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        error, self.error = self.error, None
        if error is not None:
            raise error

    def report(self) -> None:
        """Raise at exit, or when the manager goes, what nobody has asked for; the interpreter prints it."""
        self.wait()


def _remove(gone: Path) -> None:
    with checkpoint.busy_with(gone):
        storage.discard(gone)


def _abandoned_name(path: Path) -> Path:
    return path.parent / f"{path.name}.abandoned-{uuid.uuid4().hex}"
