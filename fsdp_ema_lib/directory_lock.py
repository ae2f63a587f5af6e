"""One writer for each directory of checkpoints; a dead writer's place is free at once."""

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
import warnings
from pathlib import Path
from typing import Any

from fsdp_ema_lib.storage import UnsafeCheckpointError

LOCK_FILE = ".lock"
# File systems without locks: the owner is then judged by what the file says of it.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


class DirectoryLock:
    """Holds a directory for this process until `release`, or until the process ends, however it ends.

    The kernel keeps the lock (POSIX `lockf`, which NFSv4, Lustre with `-o flock` and the like share between hosts) and
    drops it with the process. The file beside it says who holds it.

    Args:
        directory: it must exist.

    Raises:
        RuntimeError: another process holds it, by host, process id and start time.
    """

    # A process does not stand in its own way: POSIX locks do not, and closing any second descriptor would drop the
    # lock, so that all holders within a process share one descriptor.
    _held: dict[str, tuple[int, int]] = {}

    def __init__(self, directory: Path) -> None:
        self.path = os.path.realpath(directory / LOCK_FILE)
        descriptor, count = self._held.get(self.path, (-1, 0))
        if count == 0:
            descriptor = _acquire(directory / LOCK_FILE)
        self._held[self.path] = descriptor, count + 1
        self._released = False

    def release(self) -> None:
        """Let the directory go; a second call does nothing."""
        if self._released:
            return
        self._released = True
        descriptor, count = self._held.pop(self.path)
        if count > 1:
            self._held[self.path] = descriptor, count - 1
            return
        # Emptied, not removed: a name that comes and goes would let two processes lock two files.
        os.ftruncate(descriptor, 0)
        os.close(descriptor)


def _acquire(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as problem:
        if problem.errno == errno.ELOOP:
            raise UnsafeCheckpointError(f"{path}: refused a symlink in place of the lock") from problem
        raise
    try:
        locked = _try_lock(descriptor)
        owner = _read_owner(descriptor)
        if locked is False or (locked is None and owner is not None and not _is_dead(owner)):
            raise RuntimeError(
                f"{path.parent}: in use by another job ({_describe(owner)}). Two jobs cannot save to one directory: "
                f"end that one, or choose another directory."
            )
        if owner is not None:
            warnings.warn(
                f"{path.parent}: taking over from a job that ended without closing ({_describe(owner)}).", stacklevel=4
            )
        me = {"host": socket.gethostname(), "pid": os.getpid(), "started": time.time(), "ticks": _ticks(os.getpid())}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(me).encode(), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _try_lock(descriptor: int) -> bool | None:
    """Whether the lock was free; None where the file system has no locks."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        if problem.errno in (errno.EACCES, errno.EAGAIN):
            return False
        if problem.errno in _NO_LOCKS:
            return None
        raise
    return True


def _read_owner(descriptor: int) -> dict[str, Any] | None:
    try:
        owner = json.loads(os.pread(descriptor, 4096, 0))
    except (ValueError, RecursionError):
        return None  # empty: released; or cut short: its writer died while writing
    return owner if isinstance(owner, dict) else None


def _is_dead(owner: dict[str, Any]) -> bool:
    """Whether the owner certainly ended; of another host nothing is certain."""
    if owner.get("host") != socket.gethostname() or not isinstance(owner.get("pid"), int):
        return False
    ticks = _ticks(owner["pid"])
    return ticks is None or (owner.get("ticks") is not None and ticks != owner["ticks"])


def _ticks(pid: int) -> str | None:
    """When a process of this host started, in the kernel's clock ticks; None if there is none."""
    with contextlib.suppress(OSError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if stat[0] in "ZX" else stat[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return "alive"
    return None if Path("/proc/self/stat").exists() else "alive"


def _describe(owner: dict[str, Any] | None) -> str:
    if owner is None:
        return "its lock file does not say who"
    started = owner.get("started")
    when = (
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started)) if isinstance(started, int | float) else "unknown"
    )
    return f"host {owner.get('host')}, pid {owner.get('pid')}, holding it since {when}"
