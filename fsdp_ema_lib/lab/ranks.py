"""Several real ranks inside one notebook cell: processes of their own, started for one call and gone after it."""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes
from torch.multiprocessing.spawn import ProcessContext, ProcessException

from fsdp_ema_lib.process_group import TORCHRUN_VARIABLES

# What the other ranks get to end by themselves once one has failed; most of them wait for it in a collective.
_GRACE_S = 1.0
_LOG_TAIL = 4000


@dataclass(frozen=True)
class _Job:
    """What every rank is told."""

    module: str
    name: str
    kwargs: dict[str, Any]
    world_size: int
    folder: Path
    timeout_s: float
    deadline: float  # in time.time()

    def file(self, rank: int, kind: str) -> Path:
        return self.folder / f"rank{rank}.{kind}"


def run_on_ranks(
    function: Callable[..., Any], world_size: int, *, timeout_s: float = 120.0, **kwargs: Any
) -> list[Any]:
    """Call `function(**kwargs)` on every rank of a new gloo group and return the results in the order of the ranks.

    Each rank is a process of its own, on the CPU with one thread, and finds the default group initialized. The ranks
    meet through a file in a private directory. When the call returns or raises, processes and directory are gone.
    Starting takes some seconds, because every rank imports torch anew: measure many things in one call.

    Args:
        function: of a module that can be imported. One defined in a notebook or in another function cannot be found by
            a new process.
        world_size: number of ranks, at least 1.
        timeout_s: seconds until all ranks must be done, start included; then they are killed.
        kwargs: for `function`, the same on every rank. They and the results travel by pickle.

    Returns:
        What each rank returned, rank 0 first. What ranks print is shown only if something goes wrong.

    Raises:
        ValueError: `function` cannot be imported, or a number is out of range.
        RuntimeError: a rank failed; the text holds the traceback of the one that failed first.
        TimeoutError: a rank was not done in time; the text says where each of them was.

    Example:
        >>> run_on_ranks(dist.get_rank, 2)
        [0, 1]
    """
    _check(function, world_size, timeout_s)
    with tempfile.TemporaryDirectory(prefix="fsdp-ema-ranks-") as folder:
        deadline = time.time() + timeout_s
        names = (function.__module__, function.__qualname__)
        job = _Job(*names, kwargs, world_size, Path(folder), timeout_s, deadline)
        ranks = start_processes(_rank_main, (job,), world_size, join=False, daemon=True, start_method="spawn")
        try:
            _wait(ranks, job)
        except ProcessException:
            raise RuntimeError(_failure(job, ranks)) from None
        finally:
            _kill(ranks)
        return [pickle.loads(job.file(rank, "result").read_bytes()) for rank in range(world_size)]


def _check(function: Callable[..., Any], world_size: int, timeout_s: float) -> None:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module in (None, "__main__") or "<" in name or not name:
        raise ValueError(
            f"function must be one that a new process can import, got {function!r} of {module or 'no module'}. "
            "Move it to the top level of a module."
        )
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1 rank, got {world_size}")
    if not timeout_s > 0:
        raise ValueError(f"timeout_s must be a positive number of seconds, got {timeout_s}")


def _wait(ranks: ProcessContext, job: _Job) -> None:
    """Until all ranks ended well; ProcessException where one did not, TimeoutError where it takes too long."""
    while not ranks.join(timeout=max(job.deadline - time.time(), 0), grace_period=_GRACE_S):
        if time.time() >= job.deadline:
            raise TimeoutError(_too_long(job))


def _kill(ranks: ProcessContext) -> None:
    for process in ranks.processes:
        if process.is_alive():
            process.kill()
        process.join()
        process.close()


def _failure(job: _Job, ranks: ProcessContext) -> str:
    """The first failure. What other ranks raised after it is mostly that they lost their partner."""
    errors = {rank: file for rank in range(job.world_size) if (file := job.file(rank, "error")).is_file()}
    for rank, process in enumerate(ranks.processes):
        # A rank without a Python error that nobody asked to go: it crashed, or the system killed it.
        if rank not in errors and process.exitcode not in (0, None, -signal.SIGTERM):
            how = signal.Signals(-process.exitcode).name if process.exitcode < 0 else f"exit code {process.exitcode}"
            return f"{job.name}: rank {rank} of {job.world_size} died ({how}):\n{_log(job, rank)}"
    _, rank, text = min(pickle.loads(file.read_bytes()) for file in errors.values())
    return f"{job.name}: rank {rank} of {job.world_size} failed:\n{text}{_log(job, rank)}"


def _too_long(job: _Job) -> str:
    late = [rank for rank in range(job.world_size) if not job.file(rank, "result").is_file()]
    where = "\n".join(f"--- rank {rank} ---\n{_log(job, rank) or 'still starting'}" for rank in late)
    return (
        f"{job.name}: rank {', '.join(map(str, late))} of {job.world_size} not done after {job.timeout_s:g} s. "
        f"Does every rank call every collective?\n{where}"
    )


def _log(job: _Job, rank: int) -> str:
    file = job.file(rank, "log")
    return file.read_text(errors="replace")[-_LOG_TAIL:] if file.is_file() else ""


def _rank_main(rank: int, job: _Job) -> None:
    """What a rank's process does. The function is imported here, after the environment is right."""
    log = job.file(rank, "log").open("w", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        # A kernel's own backend would want the kernel.
        os.environ["MPLBACKEND"] = "Agg"
        for variable in (*TORCHRUN_VARIABLES, "LOCAL_WORLD_SIZE"):
            os.environ.pop(variable, None)
        # Where the rank stands goes to its log when it crashes, and just before it is killed.
        faulthandler.enable(file=log)
        faulthandler.dump_traceback_later(max(job.deadline - time.time() - 0.5, 0.01), file=log)
        result = _call_in_group(rank, job)
        faulthandler.cancel_dump_traceback_later()
        job.file(rank, "result").write_bytes(pickle.dumps(result))
        dist.destroy_process_group()
    except BaseException:  # torch's CheckpointException is no Exception
        record = (time.time(), rank, traceback.format_exc())
        unfinished = job.file(rank, "unfinished")
        unfinished.write_bytes(pickle.dumps(record))
        unfinished.rename(job.file(rank, "error"))
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: the end of an interpreter with a broken group may wait for ranks that wait for this one.
        os._exit(1)


def _call_in_group(rank: int, job: _Job) -> Any:
    torch.set_num_threads(1)
    function: Any = importlib.import_module(job.module)
    for part in job.name.split("."):
        function = getattr(function, part)
    store = dist.FileStore(str(job.folder / "rendezvous"), job.world_size)
    limit = timedelta(seconds=job.timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world_size, timeout=limit)
    return function(**job.kwargs)
