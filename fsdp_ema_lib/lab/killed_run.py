"""A training on real ranks that is killed on purpose and goes on from its checkpoints, and the record of its steps."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import start_processes
from tqdm.auto import tqdm

from fsdp_ema_lib.checkpoint_manager import CheckpointManager
from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.lab.digits import load_digits
from fsdp_ema_lib.lab.round_trips import local_state
from fsdp_ema_lib.lab.training import History, TrainingConfig, build_model, make_optimizer, train
from fsdp_ema_lib.process_group import TORCHRUN_VARIABLES

# What survivors get to find out that a rank is gone, and to end by themselves.
_GRACE_S = 30.0
_LOG_TAIL = 3000


@dataclass(frozen=True)
class Kill:
    """SIGKILL, sent by a rank to itself.

    Attributes:
        rank: who dies.
        step: in which step, or in the save after which step.
        moment: "training": in the middle of the forward, other ranks waiting for it. "saving": when rank 0 is about to
            write the manifest, all else being on disk, or another rank its shards.
    """

    rank: int
    step: int
    moment: Literal["training", "saving"]

    def __str__(self) -> str:
        return f"rank {self.rank} killed {'in the save after' if self.moment == 'saving' else 'in'} step {self.step}"


@dataclass
class Attempt:
    """From one start of the ranks to their end.

    Attributes:
        resumed_at: step of the checkpoint that was loaded, 0 where there was none.
        found: what lay in the directory of checkpoints at the start.
        steps, losses, distances: of every step that was completed: its number, its loss (mean over the ranks), and
            afterwards the average's relative distance to the live weights.
        exit_codes: of each rank; -9 is SIGKILL.
        seconds: wall time, the start of the processes included.
    """

    resumed_at: int = 0
    found: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)
    exit_codes: list[int] = field(default_factory=list)
    seconds: float = 0.0


@dataclass
class Run:
    """A training from its first step to its last, in one attempt or several.

    Attributes:
        checkpoints: the directory that they lie in.
        attempts: in order; the last one reached the last step.
        final: of each rank, everything in its memory at the end, as `local_state`.
    """

    checkpoints: Path
    attempts: list[Attempt]
    final: list[dict[str, Tensor]]


@dataclass(frozen=True)
class _Job:
    folder: Path
    config: TrainingConfig
    ranks: int
    decay: float
    save_every: int
    async_save: bool
    timeout_s: float
    attempt: int
    kill: Kill | None

    def file(self, kind: str) -> Path:
        return self.folder / f"attempt{self.attempt}.{kind}"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def records(self) -> Path:
        return self.file("jsonl")


def run_with_kills(
    folder: str | Path,
    config: TrainingConfig,
    kills: Sequence[Kill] = (),
    *,
    ranks: int = 2,
    decay: float = 0.99,
    save_every: int = 10,
    async_save: bool = False,
    timeout_s: float = 120.0,
) -> Run:
    """Train on several ranks with a `CheckpointManager`; after each kill start again from what lies on disk.

    Every rank is a process of its own, on the CPU with one thread. A new attempt knows nothing of the one before but
    the directory. When the call returns or raises, all processes are gone.

    Args:
        folder: an empty one; gets `checkpoints` and the records.
        config: the run; wrapper "none" only with one rank.
        kills: the n-th strikes the n-th attempt.
        ranks: number of ranks, at least 1.
        decay: of the average.
        save_every: steps between checkpoints, all of which are kept; at least 1.
        async_save: as in `CheckpointManager`.
        timeout_s: seconds for one attempt, start included.

    Raises:
        ValueError: a kill that cannot come: unknown rank, a step beyond the last, or a save that is not made.
        RuntimeError: an attempt ended in another way than by its kill, or the last one not at its end; with the log.
        TimeoutError: an attempt took too long; with the logs.
    """
    folder = Path(folder)
    _check_kills(kills, config, ranks, save_every)
    attempts = []
    tracker_is_new = resource_tracker._resource_tracker._fd is None  # type: ignore[attr-defined]
    # Ranks are forked from a server that has imported all this, torch among it, once: that is most of their start.
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    try:
        for number, kill in enumerate([*kills, None], start=1):
            job = _Job(folder, config, ranks, decay, save_every, async_save, timeout_s, number, kill)
            attempts.append(_attempt(job))
    finally:
        _end_server(with_tracker=tracker_is_new)
    final = [torch.load(folder / f"final{rank}.pt", weights_only=True) for rank in range(ranks)]
    return Run(job.checkpoints, attempts, final)


def _end_server(with_tracker: bool) -> None:
    """Left alone, Python's fork server and its resource tracker would stay until this process ends.

    A kernel that ends would even wait for the tracker, which is deaf to SIGTERM, until it is killed before it has
    cleared up. One that was there before is left: it may know of the resources of others.
    """
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    if with_tracker:
        resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


def _check_kills(kills: Sequence[Kill], config: TrainingConfig, ranks: int, save_every: int) -> None:
    for kill in kills:
        if not 0 <= kill.rank < ranks:
            raise ValueError(f"{kill}: there are ranks 0 to {ranks - 1}")
        if not 1 <= kill.step <= config.steps:
            raise ValueError(f"{kill}: there are steps 1 to {config.steps}")
        if kill.moment == "saving" and kill.step % save_every:
            raise ValueError(f"{kill}: there is a save only after every step that is a multiple of {save_every}")


def _attempt(job: _Job) -> Attempt:
    started = time.monotonic()
    context = start_processes(_rank_main, (job,), job.ranks, join=False, daemon=True, start_method="forkserver")
    processes = context.processes
    try:
        deadline = started + job.timeout_s
        while running := [process.sentinel for process in processes if process.is_alive()]:
            if not wait(running, timeout=max(deadline - time.monotonic(), 0)):
                raise TimeoutError(f"attempt {job.attempt}: not done after {job.timeout_s:g} s\n{_logs(job)}")
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
    if (job.kill is None and any(codes)) or (job.kill is not None and codes[job.kill.rank] != -signal.SIGKILL):
        expected = "all ranks at the end" if job.kill is None else str(job.kill)
        raise RuntimeError(f"attempt {job.attempt}: expected {expected}, got exit codes {codes}\n{_logs(job)}")
    return _read(job, codes, time.monotonic() - started)


def _read(job: _Job, codes: list[int], seconds: float) -> Attempt:
    attempt = Attempt(exit_codes=codes, seconds=seconds)
    first, *steps = map(json.loads, job.records.read_text().splitlines())
    attempt.resumed_at, attempt.found = first["resumed_at"], first["found"]
    for line in steps:
        attempt.steps.append(line["step"])
        attempt.losses.append(line["loss"])
        attempt.distances.append(line["distance"])
    return attempt


def _logs(job: _Job) -> str:
    logs = [(rank, job.file(f"rank{rank}.log")) for rank in range(job.ranks)]
    return "\n".join(
        f"--- rank {rank} ---\n{file.read_text(errors='replace')[-_LOG_TAIL:]}" for rank, file in logs if file.is_file()
    )


# ---------------------------------------------------------------- on the ranks


def _rank_main(rank: int, job: _Job) -> None:
    log = job.file(f"rank{rank}.log").open("w", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    # The server that this is forked from lives as long as a rank does, so nothing else would end it.
    threading.Thread(target=_end_with_the_caller, daemon=True).start()
    try:
        # A kernel's own backend would want the kernel.
        os.environ["MPLBACKEND"] = "Agg"
        for variable in (*TORCHRUN_VARIABLES, "LOCAL_WORLD_SIZE"):
            os.environ.pop(variable, None)
        # Its own lock is a semaphore with a name, which would outlive a process that is killed.
        tqdm.set_lock(threading.RLock())
        store = dist.FileStore(str(job.file("meeting")), job.ranks)
        limit = timedelta(seconds=job.timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=job.ranks, timeout=limit)
        _train(rank, job)
        dist.destroy_process_group()
    except BaseException:  # torch's CheckpointException is no Exception
        traceback.print_exc()
        sys.stdout.flush()
        # Not sys.exit: the end of an interpreter with a broken group may wait for ranks that are dead.
        os._exit(1)


def _end_with_the_caller() -> None:
    caller = multiprocessing.parent_process()
    assert caller is not None
    caller.join()
    os._exit(1)


def _train(rank: int, job: _Job) -> None:
    """Load the newest checkpoint if there is one, and go on to the last step."""
    config, kill = replace(job.config, eval_every=1), job.kill if job.kill and job.kill.rank == rank else None
    model = build_model(config)
    optimizer = make_optimizer(model, config)
    ema = EMA_FSDP(model, job.decay)
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "ema": ema}
    found = sorted(path.name for path in job.checkpoints.iterdir()) if job.checkpoints.is_dir() else []
    with (
        CheckpointManager(job.checkpoints, keep=None, async_save=job.async_save) as checkpoints,
        job.records.open("a", buffering=1) as records,
    ):

        def record(**values: Any) -> None:
            if rank == 0:
                print(json.dumps(values), file=records)

        resumed_at = checkpoints.load(**parts, verify=True)["step"] if checkpoints.steps() else 0
        record(resumed_at=resumed_at, found=found)
        if kill and kill.moment == "training":
            forwards = itertools.count(resumed_at + 1)
            model.norm.register_forward_pre_hook(lambda *_: _die() if next(forwards) == kill.step else None)

        def after_step(step: int, history: History) -> None:
            record(step=step, loss=history.losses[-1], distance=history.records[-1]["distance_to_live"])
            if step % job.save_every == 0:
                if kill and (kill.step, kill.moment) == (step, "saving"):
                    _before_opening("manifest.json" if rank == 0 else ".distcp", _die)
                checkpoints.save(step, **parts)

        if resumed_at < config.steps:
            train(
                model,
                load_digits().train,
                config,
                emas={"EMA": ema},
                optimizer=optimizer,
                first_step=resumed_at + 1,
                progress=False,
                after_step=after_step,
            )
    torch.save(local_state(model, optimizer, ema), job.folder / f"final{rank}.pt")


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _before_opening(ending: str, act: Callable[[], None]) -> None:
    """Call `act` just before this process opens a file with this ending in a checkpoint that is not published yet."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | os.PathLike):
            path = os.fspath(arguments[0])
            if isinstance(path, str) and ".unpublished-" in path and path.endswith(ending):
                act()

    sys.addaudithook(hook)
