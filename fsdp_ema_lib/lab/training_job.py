"""The training as a program that may be killed at any moment: `python -m fsdp_ema_lib.lab.training`, under torchrun."""

from __future__ import annotations

import json
import math
import os
import random
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Annotated, Any, Literal, Self

import numpy as np
import torch
import torch.distributed as dist
import typer
from torch.distributed.elastic.multiprocessing.errors import record
from torch.optim.lr_scheduler import LambdaLR

from fsdp_ema_lib.agreement import from_rank_zero
from fsdp_ema_lib.checkpoint_manager import CheckpointManager
from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.lab.digits import load_digits
from fsdp_ema_lib.lab.training import WRAPPERS, History, TrainingConfig, build_model, make_optimizer, train
from fsdp_ema_lib.process_group import distributed_job, is_main_process
from fsdp_ema_lib.wrapping import STRATEGIES

Status = Literal["running", "stopped", "finished"]
SCHEDULES = ("constant", "cosine")
STATUS_FILE = "training.json"
BAD_USAGE = 2
STOPPED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Job:
    """A training with its checkpoints; an impossible value is refused here, before anything is started.

    Attributes:
        training: what is trained; `eval_every` is the number of steps between checkpoints.
        checkpoints: directory of the checkpoints, on a file system that all ranks see.
        resume: "auto" goes on from the newest whole checkpoint, or starts where there is none; "never" starts, and
            refuses a directory that holds checkpoints; a number goes on from the checkpoint of that step.
        keep: how many checkpoints stay.
        async_save: write checkpoints in the background.
        decays: of the averages, each from 0 to 1; an average is called "decay_0_99".
        schedule: of the learning rate, "constant" or "cosine" (down to zero at the last step).
        warmup: steps over which the learning rate first rises, at least 0.
        device: "auto", "cpu" or "cuda".

    Raises:
        ValueError: one of the values is out of its range; all of them are named.

    Example:
        >>> Job(TrainingConfig(steps=100), Path("run"), decays=(0.9,)).average_names()
        {'decay_0_9': 0.9}
    """

    training: TrainingConfig
    checkpoints: Path
    resume: str = "auto"
    keep: int = 3
    async_save: bool = True
    decays: tuple[float, ...] = (0.99, 0.999)
    schedule: str = "constant"
    warmup: int = 0
    device: str = "auto"

    def __post_init__(self) -> None:
        faults = []
        if not (self.resume in ("auto", "never") or (self.resume.isascii() and self.resume.isdigit())):
            faults.append(f'resume must be "auto", "never" or the number of a step, got {self.resume!r}')
        if self.keep < 1:
            faults.append(f"keep must be at least 1, got {self.keep}")
        if self.schedule not in SCHEDULES:
            faults.append(f"schedule must be one of {', '.join(map(repr, SCHEDULES))}, got {self.schedule!r}")
        if self.warmup < 0:
            faults.append(f"warmup must be at least 0 steps, got {self.warmup}")
        if any(not 0 <= decay < 1 for decay in self.decays) or len(set(self.decays)) < len(self.decays):
            faults.append(f"decays must be different numbers from 0 to below 1, got {list(self.decays)}")
        if faults:
            raise ValueError("Job: " + "; ".join(faults))

    def average_names(self) -> dict[str, float]:
        """The name of each average, with its decay."""
        return {f"decay_{decay}".replace(".", "_").replace("+", ""): decay for decay in self.decays}

    def settings(self) -> dict[str, Any]:
        """What decides about the numbers that come out: a run that goes on must have the same."""
        names = ("batch_size", "learning_rate", "seed", "hidden", "blocks", "mixed_precision")
        found = {name: getattr(self.training, name) for name in names}
        found |= {"decays": list(self.decays), "schedule": self.schedule, "warmup": self.warmup}
        return found | ({"steps": self.training.steps} if self.schedule == "cosine" else {})


class StopSignal:
    """SIGTERM as a wish that all ranks grant together, at the end of a step.

    Pre-emption and time limits begin with SIGTERM, which reaches the ranks at different moments, and torchrun passes
    its own on to the workers. It may come more than once. Within the block the signal is noted, and `asked` tells
    whether any rank has noted one. Every rank must enter the block, and call `asked` as often as the others.

    Example:
        >>> with StopSignal() as stop:
        ...     before = stop.asked()
        ...     os.kill(os.getpid(), signal.SIGTERM)
        ...     before, stop.asked()
        (False, True)
    """

    def __init__(self) -> None:
        self._noted = False
        self._group: dist.ProcessGroup | None = None
        #: Whether `asked` has said yes: the same on every rank.
        self.granted = False

    def __enter__(self) -> Self:
        if dist.is_initialized() and dist.get_world_size() > 1:
            # On the CPU, whatever the model trains on: asking must not wait for a GPU.
            self._group = dist.new_group(backend="gloo")
        self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True

    def asked(self) -> bool:
        """Whether a rank has been told to stop. Collective: all ranks get the same answer."""
        wish = torch.tensor(int(self._noted), dtype=torch.int32)
        if self._group is not None:
            dist.all_reduce(wish, dist.ReduceOp.MAX, group=self._group)
        self.granted = bool(wish)
        return self.granted

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGTERM, self._before)
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)


def run_job(job: Job) -> Status:
    """Train until the last step or until SIGTERM, saving on the way; go on from a checkpoint if there is one.

    Every rank must call. Killed at any moment and called again with the same job and number of ranks, it ends with the
    same bits in weights, optimizer state, averages, schedule and random states as without the kill. The file
    `training.json` beside the checkpoints says how far it is: "running" (or killed), "stopped" by SIGTERM with all that
    was trained saved, or "finished".

    Args:
        job: what to do; the same on every rank.

    Returns:
        "finished", or "stopped" after SIGTERM to any of the ranks.

    Raises:
        ValueError: the checkpoint is of a training with other settings, named, or beyond the last step.
        FileExistsError, FileNotFoundError: `resume` and the directory contradict each other.
        RuntimeError: another job saves to the directory. Also what `train` and `CheckpointManager` raise.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     training = TrainingConfig(steps=4, eval_every=2, hidden=16, blocks=1, wrapper="none")
        ...     run_job(Job(training, Path(folder)))
        no checkpoint in ...: starting at step 1 of 4, on 1 rank
        step 2: loss ..., being saved
        step 4: loss ..., being saved
        finished at step 4; checkpoints of steps [2, 4] in ...
        'finished'
    """
    with distributed_job(device=job.device) as device, StopSignal() as stop:
        _seed_global_generators(job.training.seed)
        model = build_model(job.training, device)
        optimizer = make_optimizer(model, job.training)
        parts = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": make_scheduler(optimizer, job),
            "ema": {name: EMA_FSDP(model, decay) for name, decay in job.average_names().items()},
        }
        with CheckpointManager(job.checkpoints, keep=job.keep, async_save=job.async_save) as checkpoints:
            done = _resume(job, checkpoints, parts)
            _note_status(job, "running", done)
            if done < job.training.steps:
                done = _go_on(job, checkpoints, parts, stop, done)
        # Only now is the last checkpoint on disk.
        status: Status = "stopped" if stop.granted and done < job.training.steps else "finished"
        _note_status(job, status, done)
        _say(f"{status} at step {done}; checkpoints of steps {checkpoints.steps()} in {job.checkpoints}")
    return status


def make_scheduler(optimizer: torch.optim.Optimizer, job: Job) -> LambdaLR:
    """The job's learning rate over the steps: a linear rise, then constant or half a cosine down to zero.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> scheduler = make_scheduler(optimizer, Job(TrainingConfig(steps=4), Path("run"), schedule="cosine"))
        >>> for _ in range(2):
        ...     optimizer.step()
        ...     scheduler.step()
        >>> round(optimizer.param_groups[0]["lr"], 3)
        0.5
    """

    def factor(step: int) -> float:
        if step < job.warmup:
            return (step + 1) / job.warmup
        if job.schedule == "constant":
            return 1.0
        left = max(job.training.steps - job.warmup, 1)
        return 0.5 * (1 + math.cos(math.pi * min((step - job.warmup) / left, 1.0)))

    return LambdaLR(optimizer, factor)


def _seed_global_generators(seed: int) -> None:
    """The training does not draw from them, but they are saved, and two runs from one seed shall save the same."""
    rank = dist.get_rank()
    random.seed(f"{seed}/{rank}")
    np.random.seed((seed + rank) % 2**32)
    torch.manual_seed(seed + rank)


def _resume(job: Job, checkpoints: CheckpointManager, parts: Mapping[str, Any]) -> int:
    """Load what there is to load, say so, and return the number of steps done. Collective."""
    steps = from_rank_zero(checkpoints.steps())
    world_size = dist.get_world_size()
    ranks = f"{world_size} rank{'s' * (world_size > 1)}"
    if job.resume == "never" and steps:
        raise FileExistsError(
            f"--resume never: {job.checkpoints} holds checkpoints of steps {steps}; choose another directory, or "
            f"--resume auto to go on from the newest"
        )
    if job.resume == "never" or (job.resume == "auto" and not steps):
        _say(f"no checkpoint in {job.checkpoints}: starting at step 1 of {job.training.steps}, on {ranks}")
        return 0
    automatic = job.resume == "auto"
    wanted = "latest" if automatic else int(job.resume)
    found = checkpoints.load(wanted, **parts, verify=True, fall_back=automatic)
    step, extra = found["step"], found["extra"]
    _refuse_other_settings(job, checkpoints.path_of(step), step, extra)
    older = f", not from the newest ({steps[-1]})" if step != steps[-1] else ""
    by = extra["world_size"]
    _say(
        f"going on after step {step} of {job.training.steps} from {checkpoints.path_of(step)}{older}, saved by {by} "
        f"rank{'s' * (by > 1)} at loss {extra['loss']:.4f}, on {ranks}"
    )
    if by != world_size:
        _say("on another number of ranks sums are rounded differently: the weights will drift from the old ones' path")
    return step


def _refuse_other_settings(job: Job, path: Path, step: int, extra: Mapping[str, Any]) -> None:
    saved, mine = extra.get("settings", {}), job.settings()
    lines = [
        f"{name}: {saved.get(name)!r} there, {mine[name]!r} here" for name in mine if saved.get(name) != mine[name]
    ]
    if lines:
        raise ValueError(
            f"{path} is of a training with other settings, and this one would not be its continuation:\n"
            + "\n".join(lines)
            + "\nPass the same settings, or another directory."
        )
    if step > job.training.steps:
        raise ValueError(
            f"{path} is beyond the last step, {job.training.steps}: raise --steps, or name an earlier step"
        )


def _go_on(job: Job, checkpoints: CheckpointManager, parts: Mapping[str, Any], stop: StopSignal, done: int) -> int:
    """Train and save; returns the step that was reached, which is on disk once the manager is closed."""
    config = job.training

    def after_step(step: int, history: History) -> None:
        nonlocal done
        if step % config.eval_every == 0 or step == config.steps or stop.granted:
            extra = {"settings": job.settings(), "loss": history.losses[-1], "world_size": dist.get_world_size()}
            checkpoints.save(step, **parts, extra=extra)
            done = step
            written = "being saved" if job.async_save else "saved"
            _say(f"step {step}: loss {history.losses[-1]:.4f}, {written}")

    train(
        parts["model"],
        load_digits().train,
        config,
        emas=parts["ema"],
        optimizer=parts["optimizer"],
        scheduler=parts["scheduler"],
        first_step=done + 1,
        should_stop=stop.asked,
        after_step=after_step,
    )
    return done


def _note_status(job: Job, status: Status, step: int) -> None:
    if not is_main_process():
        return
    text = json.dumps({"status": status, "step": step, "steps": job.training.steps, "pid": os.getpid()})
    aside = job.checkpoints / f"{STATUS_FILE}.new"
    aside.write_text(text + "\n")
    os.replace(aside, job.checkpoints / STATUS_FILE)


def _say(text: str) -> None:
    if is_main_process():
        print(text, flush=True)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_DEFAULT = TrainingConfig()


@app.command()
def command(
    checkpoints: Annotated[Path, typer.Option(help="Directory of the checkpoints, on a file system all ranks see.")],
    steps: Annotated[
        int, typer.Option(help="Optimizer steps in all, those before a resume included.")
    ] = _DEFAULT.steps,
    resume: Annotated[
        str, typer.Option(help="auto: from the newest whole checkpoint, if any; never; or the number of a step.")
    ] = "auto",
    save_every: Annotated[
        int, typer.Option(min=1, help="Steps between checkpoints; the last step is always saved.")
    ] = 100,
    keep: Annotated[int, typer.Option(help="Checkpoints to keep.")] = 3,
    async_save: Annotated[
        bool, typer.Option("--async/--no-async", help="Write checkpoints while training goes on.")
    ] = True,
    wrapper: Annotated[str, typer.Option(help=f"How the model is wrapped: {', '.join(WRAPPERS)}.")] = _DEFAULT.wrapper,
    sharding: Annotated[str, typer.Option(help=f"How it is sharded: {', '.join(STRATEGIES)}.")] = _DEFAULT.sharding,
    mixed_precision: Annotated[
        bool, typer.Option("--mixed-precision/--full-precision", help="Compute in bf16.")
    ] = _DEFAULT.mixed_precision,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the weights, the order of the images and the noise.")] = _DEFAULT.seed,
    decay: Annotated[
        list[float] | None, typer.Option(help="Decay of an average; repeat for several.", show_default="0.99 and 0.999")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Images a step over all ranks.")] = _DEFAULT.batch_size,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW, at its highest.")] = _DEFAULT.learning_rate,
    schedule: Annotated[str, typer.Option(help=f"Of the learning rate: {', '.join(SCHEDULES)}.")] = "constant",
    warmup: Annotated[int, typer.Option(help="Steps over which the learning rate rises first.")] = 0,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = _DEFAULT.hidden,
    blocks: Annotated[int, typer.Option(help="Residual blocks of the model.")] = _DEFAULT.blocks,
    threads: Annotated[int, typer.Option(help="CPU threads of each rank.")] = _DEFAULT.threads,
) -> None:
    """Train the flow on handwritten digits with averages of its weights; may be killed at any moment and started again.

    Start it with torchrun, on one node or several. SIGTERM ends it at the next step, with everything saved.
    Exit status: 0 at the last step, 143 after SIGTERM, 2 wrong usage.
    """
    try:
        training = replace(
            _DEFAULT,
            steps=steps,
            batch_size=batch_size,
            learning_rate=learning_rate,
            seed=seed,
            wrapper=wrapper,  # type: ignore[arg-type]
            sharding=sharding,
            eval_every=save_every,
            hidden=hidden,
            blocks=blocks,
            mixed_precision=mixed_precision,
            threads=threads,
        )
        decays = Job.decays if decay is None else tuple(decay)
        job = Job(training, checkpoints, resume, keep, async_save, decays, schedule, warmup, device)
    except ValueError as problem:
        if os.environ.get("RANK", "0") == "0":
            typer.echo(f"error: {problem}", err=True)
        raise typer.Exit(BAD_USAGE) from problem
    if run_job(job) == "stopped":
        raise typer.Exit(STOPPED)


@record  # torchrun then names the rank that failed first, with its traceback
def main() -> None:
    """Run the command line."""
    app()
