"""Pools of real gloo ranks that live for the whole test session."""

import faulthandler
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

JOB_TIMEOUT_S = 120.0
# After one rank failed the others often wait in a collective that it will never join.
GRACE_AFTER_FAILURE_S = 3.0
# Each gloo group has threads that wake up a hundred times a second as long as it lives. Jobs make many groups, and
# thousands of such threads leave little time for anything else; torch's caches keep groups alive that were destroyed.
JOBS_OF_A_POOL = 50


def _rank_main(rank: int, world_size: int, folder: str, connection: Connection) -> None:
    log = open(Path(folder) / f"rank{rank}.log", "w", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=JOB_TIMEOUT_S),
    )
    while (job := connection.recv()) is not None:
        worker, kwargs, timeout = job
        torch.manual_seed(0)
        # The stacks of a hung rank go to its log before the parent kills it.
        faulthandler.dump_traceback_later(max(timeout - 2.0, 0.5), file=log)
        try:
            reply = (True, worker(**kwargs))
        except BaseException:  # a CheckpointException is no Exception
            reply = (False, traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        try:
            connection.send(reply)
        except Exception:
            connection.send((False, f"the result of rank {rank} cannot be sent:\n{traceback.format_exc()}"))
    dist.destroy_process_group()


class RankPool:
    """`world_size` gloo ranks that run one worker function after another."""

    def __init__(self, world_size: int, folder: Path) -> None:
        self.folder = tempfile.mkdtemp(prefix=f"{world_size}-ranks-", dir=folder)
        context = multiprocessing.get_context("spawn")
        self.jobs = 0
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(rank, world_size, self.folder, theirs), daemon=True, name=f"rank{rank}"
            )
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def run(self, worker: Callable[..., Any], timeout: float, kwargs: dict[str, Any]) -> list[Any]:
        self.jobs += 1
        for connection in self.connections:
            connection.send((worker, kwargs, timeout))
        replies: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(replies) < len(self.connections) and (left := deadline - time.monotonic()) > 0:
            pending = [c for rank, c in enumerate(self.connections) if rank not in replies]
            for connection in wait(pending, timeout=left):
                rank = self.connections.index(connection)
                try:
                    replies[rank] = connection.recv()
                except EOFError:
                    self.processes[rank].join()
                    replies[rank] = (False, f"the process died, exit code {self.processes[rank].exitcode}")
                if not replies[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE_S)
        failed = {rank: reply for rank, (good, reply) in sorted(replies.items()) if not good}
        if failed or len(replies) < len(self.connections):
            silent = [rank for rank in range(len(self.connections)) if rank not in replies]
            report = self._report(failed, silent, timeout)
            self.close(kill=True)
            raise AssertionError(report)
        return [replies[rank][1] for rank in range(len(self.connections))]

    def _report(self, failed: dict[int, str], silent: list[int], timeout: float) -> str:
        parts = [f"--- rank {rank} failed ---\n{text}\n{self._log(rank)}" for rank, text in failed.items()]
        for rank in silent:
            parts.append(f"--- rank {rank} gave no answer (limit {timeout:.0f} s) ---\n{self._log(rank)}")
        return "\n".join(parts)

    def _log(self, rank: int) -> str:
        return (Path(self.folder) / f"rank{rank}.log").read_text()[-4000:]

    def close(self, kill: bool = False) -> None:
        for connection, process in zip(self.connections, self.processes, strict=True):
            if kill:
                process.kill()
            elif process.is_alive():
                connection.send(None)
        for connection, process in zip(self.connections, self.processes, strict=True):
            process.join(timeout=20)
            if process.is_alive():
                process.kill()
                process.join()
            connection.close()
        shutil.rmtree(self.folder)


class RankPools:
    """One pool per world size, started at first use, replaced after a failure and after `JOBS_OF_A_POOL`.

    Args:
        folder: for logs and meeting points, of pytest's making: what a run that is killed leaves there, a later clears.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pools: dict[int, RankPool] = {}

    def __call__(
        self, world_size: int, worker: Callable[..., Any], *, timeout: float = JOB_TIMEOUT_S, **kwargs: Any
    ) -> list[Any]:
        """Run `worker(**kwargs)` on every rank; returns the results in rank order, or raises with each traceback."""
        if world_size in self.pools and self.pools[world_size].jobs == JOBS_OF_A_POOL:
            self.pools.pop(world_size).close()
        if world_size not in self.pools:
            self.pools[world_size] = RankPool(world_size, self.folder)
        try:
            return self.pools[world_size].run(worker, timeout, kwargs)
        except AssertionError:
            del self.pools[world_size]
            raise

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()
        self.pools.clear()


if sys.platform == "darwin":  # gloo finds no interface on machines without a resolvable host name
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0")
