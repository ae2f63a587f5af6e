"""Start and end torch.distributed, the same way in a notebook and under torchrun.

One call serves both. In a plain process it makes a group of one, which finds itself through a file that no other
process can reach; under `torchrun` it joins the group that torchrun describes in the environment:

    >>> with distributed_job(device="cpu") as device:
    ...     print(device, is_main_process(), comm_device())
    cpu True cpu
"""

import atexit
import os
import shutil
import stat
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fsdp_ema_lib import agent_store, gloo_threads

BACKENDS = ("gloo", "nccl", "cpu:gloo,cuda:nccl")
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class _Job:
    """The group that this module started, and what has to go when it ends."""

    pid: int
    group: "weakref.ref[dist.ProcessGroup]"
    device: torch.device
    folder: Path | None

    def is_running(self) -> bool:
        return dist.is_initialized() and dist.group.WORLD is self.group()


@dataclass(frozen=True)
class _Place:
    """Where torchrun put this process."""

    rank: int
    world_size: int
    local_rank: int


_job: _Job | None = None
# What sys.excepthook was before torch put its own over it, and torch's.
_excepthooks: tuple[Any, Any] | None = None


def launch_distributed_job(
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout: timedelta = timedelta(minutes=30),
) -> torch.device:
    """Start torch.distributed if it is not running, and say on which device this process works.

    Without torchrun's variables in the environment (an address alone, MASTER_ADDR or MASTER_PORT, is not enough) the
    process becomes rank 0 of a group of one. The rendezvous is a file in a fresh directory that only this user can
    enter, never a port and never a name that can be guessed; gloo itself still listens on a socket of its own while the
    group lives (`GLOO_SOCKET_IFNAME=lo` keeps that one off the network). Leave the file alone while the group lives:
    `torch.distributed.new_group` needs it.

    Under torchrun every rank must call this, with the same arguments. When torchrun restarts its workers, on one node
    or several, nothing of the killed ones reaches the new group.

    Calling it again is harmless: the running group stays, and its device is returned. That holds for a group that other
    code started, too; such a group is used but never ended by `shutdown`.

    Args:
        backend: "gloo", "nccl" or "cpu:gloo,cuda:nccl" (for a model on CUDA with parameters offloaded to the CPU).
            None takes nccl on CUDA and gloo on the CPU.
        device: "cpu", "cuda", or one device such as "cuda:1". None and "auto" take CUDA where there is CUDA, else the
            CPU; on a running group they ask for nothing. "cuda" means number LOCAL_RANK under torchrun and the current
            CUDA device otherwise. A CUDA device is made the current one before the group starts.
        timeout: how long a collective, or joining the group, may wait for another rank. Positive.

    Returns:
        The device to put this rank's model on.

    Raises:
        ValueError: an unknown backend or device, NCCL on the CPU, a timeout that is not positive, or one of torchrun's
            variables with a value that cannot be right (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_PORT, MASTER_ADDR).
        TypeError: `timeout` is no timedelta.
        RuntimeError: torchrun's variables are only half set, CUDA is asked for and missing, a group with another
            backend or device is running, the directory for temporary files gives no privacy, or this process was
            forked from one with a running group. Nothing is left behind, and the call can be tried again.
        TimeoutError: under torchrun, some ranks did not call this within `timeout`, named.

    Example:
        >>> launch_distributed_job(device="cpu")
        device(type='cpu')
        >>> launch_distributed_job()  # the cell is run again
        device(type='cpu')
        >>> shutdown()
    """
    global _job
    backend, wanted = _check_backend(backend), _check_device(device)
    _check_timeout(timeout)
    _check_not_forked()
    if dist.is_initialized():
        return _device_of_running_group(backend, wanted)
    shutdown()  # the files of a group that was ended behind our back
    place = _read_torchrun_variables()
    here = _choose_device(wanted, place)
    backend = backend or ("nccl" if here.type == "cuda" else "gloo")
    _check_fit(backend, here)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    folder = None
    try:
        if place is None:
            folder = _private_folder()
        _init_process_group(backend, here, timeout, folder, place)
        world: Any = dist.group.WORLD
        _job = _Job(os.getpid(), weakref.ref(world), here, folder)
    except BaseException:  # an interrupt, too, must leave nothing behind
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
        finally:
            _remove(folder)
        raise
    return here


def shutdown() -> None:
    """End the group that `launch_distributed_job` started, and remove its rendezvous file and directory.

    Under torchrun every rank calls it, after its last collective. Of gloo it waits for no other rank, only for this
    rank's own threads, for at most two seconds a group. Calling it without a group, or again, does nothing.
    A group that other code started is left to that code, and so is everything in a forked child. It runs by itself
    when the interpreter exits, also after an exception or an interrupt; only NCCL groups of several ranks are then left
    to the end of the process, because NCCL may wait for work that a failed rank will never do. A process that is
    killed by a signal leaves its directory: private, and of a name that no later start takes.

    Example:
        >>> shutdown()
        >>> shutdown()
    """
    global _job
    if _job is None or _job.pid != os.getpid():
        return
    # In this order an interrupt at any point leaves something that a second call completes.
    try:
        if _job.is_running():
            gloo_threads.let_go()
            dist.destroy_process_group()
    finally:
        _remove(_job.folder)
    _job = None


@contextmanager
def distributed_job(
    backend: str | None = None,
    device: str | torch.device | None = None,
    timeout: timedelta = timedelta(minutes=30),
) -> Iterator[torch.device]:
    """Run a block inside a distributed job, and end the job with the block, whatever way the block ends.

    Inside a job that is already running it starts nothing and ends nothing. Under torchrun every rank must enter it.
    When the block raises on one of several NCCL ranks, the group is left to the end of the process (see `shutdown`), so
    that the error comes out and torchrun can stop the others.

    Args:
        backend: as for `launch_distributed_job`.
        device: as for `launch_distributed_job`.
        timeout: as for `launch_distributed_job`.

    Yields:
        The device to put this rank's model on.

    Raises:
        ValueError, TypeError, RuntimeError: as `launch_distributed_job`.

    Example:
        >>> with distributed_job(device="cpu") as device:
        ...     torch.ones(2, device=device)
        tensor([1., 1.])
        >>> dist.is_initialized()
        False
    """
    was_running = dist.is_initialized()
    here = launch_distributed_job(backend, device, timeout)
    try:
        yield here
    except BaseException:
        if not was_running:
            _shutdown_without_waiting()
        raise
    if not was_running:
        shutdown()


def barrier() -> None:
    """Wait until every rank is here; without a group, go on at once.

    Every rank of the default group must call it.

    Raises:
        RuntimeError: from torch, when a rank does not come within the timeout of the group.

    Example:
        >>> barrier()
    """
    if not dist.is_initialized():
        return
    here = comm_device()
    # Left to itself NCCL guesses the device from the global rank, which is wrong under CUDA_VISIBLE_DEVICES and hangs.
    dist.barrier(device_ids=[here.index] if here.type == "cuda" else None)


def is_main_process() -> bool:
    """Tell whether this is the one process that prints and writes: rank 0, or a process without a group.

    Under torchrun ask only after `launch_distributed_job`; before it every process is the main one.

    Example:
        >>> is_main_process()
        True
    """
    return not dist.is_initialized() or dist.get_rank() == 0


def comm_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Say on which device the tensors of a collective must lie: the current CUDA device for NCCL, else the CPU.

    Args:
        group: a group that this rank belongs to; None means the default group. Each rank asks for itself.

    Raises:
        RuntimeError: no group is running.
        ValueError: from torch, when this rank does not belong to the group.

    Example:
        >>> with distributed_job(device="cpu"):
        ...     comm_device()
        device(type='cpu')
    """
    if not dist.is_initialized():
        raise RuntimeError("comm_device: no process group is running. Call launch_distributed_job() first.")
    if "nccl" in _names(dist.get_backend_config(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _init_process_group(
    backend: str, device: torch.device, timeout: timedelta, folder: Path | None, place: _Place | None
) -> None:
    """Start the default group, through a file in `folder`, or through torchrun's variables where there is none."""
    global _excepthooks
    # Each init puts a hook that prints "[rank0]:" over the last one; a restart must not pile them up.
    if _excepthooks is not None and sys.excepthook is _excepthooks[1]:
        sys.excepthook = _excepthooks[0]
    before = sys.excepthook
    # Only NCCL makes use of a bound device, and torch refuses to bind the CPU.
    bound = device if "nccl" in _names(backend) else None
    meeting_point: dict[str, Any] = {}  # torch reads torchrun's variables
    if folder is not None:
        # The store rather than a file:// URL, in which a "?" or "#" of the path would not belong to the path.
        store = dist.FileStore(str(folder / "rendezvous"), 1)  # type: ignore[attr-defined]
        meeting_point = {"store": store, "rank": 0, "world_size": 1}
    elif place is not None and agent_store.is_shared():
        store = agent_store.fresh_store(place.rank, place.world_size, timeout)
        meeting_point = {"store": store, "rank": place.rank, "world_size": place.world_size}
    dist.init_process_group(backend, timeout=timeout, device_id=bound, **meeting_point)
    _excepthooks = (before, sys.excepthook)


def _private_folder() -> Path:
    """Make a directory under an unguessable name that only this user can enter, and see that it is so."""
    folder = Path(tempfile.mkdtemp(prefix="fsdp-ema-"))
    # lstat: a link put in the directory's place must not answer for what it points to.
    found = os.lstat(folder)
    private = stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o700 and found.st_uid == os.geteuid()
    if not private:
        folder.rmdir()
        raise RuntimeError(
            f"{folder}: expected a directory of user {os.geteuid()} with mode 0700, found mode "
            f"{stat.S_IMODE(found.st_mode):04o} of user {found.st_uid}. "
            "Set TMPDIR to a directory on a file system that keeps permissions."
        )
    return folder


def _remove(folder: Path | None) -> None:
    if folder is not None and folder.exists():
        shutil.rmtree(folder)


def _shutdown_without_waiting() -> None:
    """Shut down, except where that could wait for ever for ranks that failed or are stuck."""
    # destroy_process_group waits for NCCL work in flight. If a peer has failed that work never ends: this rank would
    # hang without showing its error, and torchrun, which waits for it, would hang with it.
    several = _job is not None and _job.is_running() and dist.get_world_size() > 1
    if not (several and "nccl" in _names(dist.get_backend_config())):
        shutdown()


atexit.register(_shutdown_without_waiting)


def _read_torchrun_variables() -> _Place | None:
    """Read what torchrun says about this process; None if it says nothing."""
    found = {name: os.environ[name] for name in TORCHRUN_VARIABLES if name in os.environ}
    # An address alone is nobody's word about this process: some machines export one to every shell.
    if found.keys() <= {"MASTER_ADDR", "MASTER_PORT"}:
        return None
    missing = [name for name in TORCHRUN_VARIABLES if name not in found]
    if missing:
        raise RuntimeError(
            f"{', '.join(missing)}: not set, but {', '.join(found)} {'are' if len(found) > 1 else 'is'}. "
            "Start several processes with torchrun, which sets all five of "
            f"{', '.join(TORCHRUN_VARIABLES)}; for a single process unset {', '.join(found)}."
        )
    whole = {name: _whole_number(name, found[name]) for name in TORCHRUN_VARIABLES if name != "MASTER_ADDR"}
    world_size = whole["WORLD_SIZE"]
    if not found["MASTER_ADDR"].strip():
        raise ValueError("MASTER_ADDR is empty; expected the host name or address of rank 0. torchrun sets it.")
    _check_range("MASTER_PORT", whole["MASTER_PORT"], 1, 65535, "a TCP port")
    _check_range("WORLD_SIZE", world_size, 1, None, "the number of ranks")
    _check_range("RANK", whole["RANK"], 0, world_size - 1, f"below WORLD_SIZE, which is {world_size}")
    _check_range("LOCAL_RANK", whole["LOCAL_RANK"], 0, world_size - 1, f"below WORLD_SIZE, which is {world_size}")
    return _Place(whole["RANK"], world_size, whole["LOCAL_RANK"])


def _whole_number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"{name} is {text!r}; expected a whole number. torchrun sets it; do not set it by hand."
        ) from None


def _check_range(name: str, value: int, low: int, high: int | None, what: str) -> None:
    if value < low or (high is not None and value > high):
        span = f"{low} to {high}" if high is not None else f"at least {low}"
        raise ValueError(f"{name} is {value}; expected {span} ({what}). torchrun sets it; do not set it by hand.")


def _check_backend(backend: str | None) -> str | None:
    if backend is None or backend in BACKENDS:
        return backend
    raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, or None to choose by device, got {backend!r}")


def _check_device(device: str | torch.device | None) -> torch.device | None:
    """The device that is asked for; None if any will do."""
    if device is None or device == "auto":
        return None
    expected = f'device: expected "auto", "cpu", "cuda" or one such as "cuda:1", got {str(device)!r}'
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(expected) from error
    if wanted.type not in ("cpu", "cuda"):
        raise ValueError(expected)
    return torch.device("cpu") if wanted.type == "cpu" else wanted


def _check_timeout(timeout: timedelta) -> None:
    if not isinstance(timeout, timedelta):
        raise TypeError(f"timeout: expected a datetime.timedelta such as timedelta(minutes=30), got {timeout!r}")
    if timeout <= timedelta(0):
        raise ValueError(f"timeout: expected a positive time, got {timeout}")


def _check_not_forked() -> None:
    if _job is not None and _job.pid != os.getpid():
        raise RuntimeError(
            f"process {os.getpid()} was forked from process {_job.pid} while its process group was running, and the "
            "threads of that group did not come along. Start ranks with torchrun or with multiprocessing's "
            '"spawn", or call shutdown() before the fork.'
        )


def _check_fit(backend: str, device: torch.device) -> None:
    if device.type == "cpu" and "nccl" in _names(backend):
        raise ValueError(
            f"backend: {backend} needs CUDA, and this process works on the CPU. "
            'Use backend="gloo" or None, or a device with CUDA.'
        )


def _choose_device(wanted: torch.device | None, place: _Place | None) -> torch.device:
    """The device for a new group, with its number."""
    has_cuda = torch.cuda.is_available()
    if wanted is None:
        wanted = torch.device("cuda" if has_cuda else "cpu")
    if wanted.type == "cpu":
        return wanted
    if not has_cuda:
        raise RuntimeError(
            f"device: {wanted} was asked for, but torch sees no CUDA device. "
            'Use device="cpu" or "auto", or check the driver, CUDA_VISIBLE_DEVICES and that torch is a CUDA build.'
        )
    count = torch.cuda.device_count()
    if wanted.index is not None:
        if wanted.index >= count:
            raise ValueError(f"device: {wanted} was asked for, but the CUDA devices here are 0 to {count - 1}")
        return wanted
    if place is None:
        return torch.device("cuda", torch.cuda.current_device())
    if place.local_rank >= count:
        raise ValueError(
            f"LOCAL_RANK is {place.local_rank}, but this process sees CUDA devices 0 to {count - 1}. "
            f"Start at most {count} processes here (--nproc-per-node {count}) or widen CUDA_VISIBLE_DEVICES; "
            'where every rank is shown one device of its own, pass device="cuda:0".'
        )
    return torch.device("cuda", place.local_rank)


def _device_of_running_group(backend: str | None, wanted: torch.device | None) -> torch.device:
    """The device of the group that is running, unless it differs from what is asked for."""
    ours = _job is not None and _job.is_running()
    running = _names(dist.get_backend_config())
    here = _job.device if _job is not None and ours else comm_device()
    if not ours and wanted is not None and wanted.type == "cuda" and running == {"gloo"}:
        here = wanted  # gloo carries CUDA tensors as well, and which device this rank uses only its starter knows
    same_device = wanted is None or (wanted.type == here.type and wanted.index in (None, here.index))
    if same_device and (backend is None or _names(backend) == running):
        return here
    remedy = (
        "Call shutdown() first, or leave out what differs."
        if ours
        else "It was started by other code: end it there, or leave out what differs."
    )
    raise RuntimeError(
        f"launch_distributed_job: asked for backend {backend or 'any'} and device {wanted or 'any'}, but a process "
        f"group with backend {dist.get_backend()} and device {here} is running. {remedy}"
    )


def _names(backend: str) -> set[str]:
    """Names in a backend string: {"gloo", "nccl"} for "cpu:gloo,cuda:nccl"."""
    return {part.rpartition(":")[2] for part in str(backend).split(",")}
