"""Train the digits' flow under FSDP with any number of averages, and measure all of them on the way."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm.auto import tqdm

from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.lab.digits import Split, batches, rank_slice
from fsdp_ema_lib.lab.flow import VelocityField, draw_noise_and_times, flow_matching_loss
from fsdp_ema_lib.lab.threads import cpu_threads
from fsdp_ema_lib.layout import Layout
from fsdp_ema_lib.process_group import comm_device, is_main_process
from fsdp_ema_lib.wrapping import STRATEGIES, fsdp2_wrap, fsdp_wrap

Wrapper = Literal["fsdp1", "fsdp2", "none"]
WRAPPERS: tuple[Wrapper, ...] = ("fsdp1", "fsdp2", "none")

#: Called by every rank with the weights to judge already in the model; returns named numbers, the same on every rank.
Evaluate = Callable[[nn.Module], Mapping[str, float]]
#: Called by every rank with the step that has just ended and what was measured so far.
AfterStep = Callable[[int, "History"], None]


@dataclass(frozen=True)
class TrainingConfig:
    """What a training run is made of; an impossible value is refused here, before anything is built.

    Attributes:
        steps: optimizer steps, at least 1.
        batch_size: images per step over all ranks; a multiple of the world size.
        learning_rate: of AdamW, constant, positive.
        seed: initial weights, order of the images, noise; at least 0. The global random state plays no part.
        wrapper: "fsdp1", "fsdp2", or "none" for the plain model on one rank.
        sharding: "full", "hybrid_full", "hybrid_zero2" or "no_shard", as in `fsdp_wrap`; a single rank shards nothing.
        eval_every: steps between evaluations, at least 1; the last step is always evaluated.
        hidden: width of the model, a positive even number.
        blocks: residual blocks of the model, at least 1.
        mixed_precision: compute in bf16 (not with wrapper "none").
        threads: CPU threads of each rank, at least 1. More than one seldom pays for a model this small, is far slower
            on a busy machine, and makes the last digits depend on the number.

    Raises:
        ValueError: one of the values is out of its range; all of them are named.

    Example:
        >>> TrainingConfig(steps=100).wrapper
        'fsdp2'
    """

    steps: int = 1500
    batch_size: int = 64
    learning_rate: float = 2e-3
    seed: int = 0
    wrapper: Wrapper = "fsdp2"
    eval_every: int = 250
    hidden: int = 512
    blocks: int = 3
    mixed_precision: bool = False
    threads: int = 1
    sharding: str = "full"

    def __post_init__(self) -> None:
        least = {"steps": 1, "batch_size": 1, "seed": 0, "eval_every": 1, "hidden": 2, "blocks": 1, "threads": 1}
        faults = [
            f"{name} must be a whole number of at least {bound}, got {getattr(self, name)!r}"
            for name, bound in least.items()
            if not _is_integer(getattr(self, name)) or getattr(self, name) < bound
        ]
        if _is_integer(self.hidden) and self.hidden % 2:
            faults.append(f"hidden must be even, got {self.hidden}")
        if not isinstance(self.learning_rate, int | float) or not 0 < self.learning_rate < math.inf:
            faults.append(f"learning_rate must be a positive number, got {self.learning_rate!r}")
        if self.wrapper not in WRAPPERS:
            faults.append(f"wrapper must be one of {', '.join(map(repr, WRAPPERS))}, got {self.wrapper!r}")
        elif self.wrapper == "none" and self.mixed_precision:
            faults.append('mixed_precision needs wrapper "fsdp1" or "fsdp2", which keep the weights in fp32')
        if self.sharding not in STRATEGIES:
            faults.append(f"sharding must be one of {', '.join(map(repr, STRATEGIES))}, got {self.sharding!r}")
        if faults:
            raise ValueError("TrainingConfig: " + "; ".join(faults))


@dataclass
class History:
    """What a training run measured; the same on every rank.

    Attributes:
        losses: mean loss over the ranks of every step.
        records: one dict per evaluation and set of weights: "step", "weights" ("live" or the average's name), the
            numbers that `evaluate` returned, and for an average "distance_to_live" (see `relative_distance`).
        seconds: wall time of the whole run, evaluations included.
    """

    losses: list[float] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = field(default=0.0, compare=False)

    def series(self, metric: str) -> tuple[list[int], dict[str, list[float]]]:
        """The evaluated steps, and of every set of weights that has `metric` its values at those steps.

        Raises:
            ValueError: no record has `metric`; those there are, are listed.

        Example:
            >>> history = History(records=[{"step": 5, "weights": "live", "frechet": 9.0}])
            >>> history.series("frechet")
            ([5], {'live': [9.0]})
        """
        found = [record for record in self.records if metric in record]
        if not found:
            known = sorted({key for record in self.records for key in record} - {"step", "weights"})
            raise ValueError(f"no record has {metric!r}; measured were: {', '.join(known) or 'nothing'}")
        values: dict[str, list[float]] = {}
        for record in found:
            values.setdefault(record["weights"], []).append(record[metric])
        return sorted({record["step"] for record in found}), values


def build_model(config: TrainingConfig, device: torch.device | str = "cpu") -> nn.Module:
    """Build the velocity field from the seed and shard it as the configuration says. Every rank must call.

    Each residual block is a sharded unit of its own, the rest is the root's.

    Args:
        config: the run.
        device: where this rank's weights live: what `launch_distributed_job` returned.

    Returns:
        The model, ready to train; with wrapper "none" the plain `VelocityField`.

    Raises:
        ValueError: wrapper "none" on several ranks, whose models would drift apart.
        RuntimeError: wrapper "fsdp1" or "fsdp2" without a process group.

    Example:
        >>> model = build_model(TrainingConfig(wrapper="none", hidden=32))
        >>> type(model).__name__
        'VelocityField'
    """
    world_size = _world_size()
    if config.wrapper == "none" and world_size > 1:
        raise ValueError(
            f'wrapper "none" does not exchange gradients and needs a single rank, this job has {world_size}: '
            'use "fsdp1" or "fsdp2"'
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = VelocityField(config.hidden, config.blocks)
    model.to(device)
    if config.wrapper == "none":
        return model
    wrap = fsdp_wrap if config.wrapper == "fsdp1" else fsdp2_wrap
    return wrap(
        model,
        # With one rank there is nothing to shard; saying so spares the warning that the others would bring.
        sharding_strategy=config.sharding if world_size > 1 else "no_shard",
        mixed_precision=config.mixed_precision,
        min_num_params=2 * config.hidden**2,
    )


def make_optimizer(model: nn.Module, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW at the configuration's constant learning rate over the model's local shards."""
    return torch.optim.AdamW(model.parameters(), lr=config.learning_rate)


def train(
    model: nn.Module,
    split: Split,
    config: TrainingConfig,
    *,
    emas: Mapping[str, EMA_FSDP] | None = None,
    evaluate: Evaluate | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    first_step: int = 1,
    progress: bool | None = None,
    should_stop: Callable[[], bool] | None = None,
    after_step: AfterStep | None = None,
) -> History:
    """Train the model, update every average after each step, evaluate live and averaged weights. Every rank must call.

    Two runs with the same arguments on the same machine give the same numbers. The batch and the noise of a step depend
    on seed and step alone, so a run on several ranks follows the run on one up to rounding, and a run restored at step
    k (model, optimizer, averages) goes on with `first_step=k + 1` as if it had never stopped.

    Args:
        model: what `build_model` returned.
        split: the training images.
        config: the run.
        emas: name to average of `model`; "live" is taken.
        evaluate: judges the weights that are in the model; called every `config.eval_every` steps and after the last
            one, once for the live weights and once inside each average's `swapped_into`.
        optimizer: default `make_optimizer(model, config)`.
        scheduler: of the learning rate, stepped after each step of the optimizer; none by default.
        first_step: the step to begin with, from 1 to `config.steps`.
        progress: show a progress bar on rank 0; by default in a terminal or notebook, and not where `CI` is set.
        should_stop: asked after each step; where it says yes, on all ranks alike, that step is the last.
        after_step: called after each step and the evaluation that falls on it.

    Returns:
        Losses and evaluations of the steps that were run.

    Raises:
        ValueError: an average is called "live", `first_step` or the batch size is out of range.
        FloatingPointError: a loss was NaN or infinite; found at the next evaluation, on every rank.

    Example:
        >>> from fsdp_ema_lib.lab.digits import load_digits
        >>> config = TrainingConfig(steps=3, wrapper="none", hidden=32)
        >>> model = build_model(config)
        >>> history = train(model, load_digits().train, config, emas={"EMA": EMA_FSDP(model, 0.9)}, progress=False)
        >>> len(history.losses)
        3
    """
    emas = dict(emas or {})
    _check_run(emas, config, first_step)
    optimizer = make_optimizer(model, config) if optimizer is None else optimizer
    device = next(model.parameters()).device
    rank, world_size = _rank(), _world_size()
    mine = rank_slice(config.batch_size, rank=rank, world_size=world_size)
    data = batches(split, config.batch_size, seed=config.seed, rank=rank, world_size=world_size, first_step=first_step)
    history, pending, started = History(), [], time.perf_counter()
    steps = range(first_step, config.steps + 1)
    quiet = not show_progress(progress)
    with cpu_threads(config.threads), tqdm(steps, desc="training", unit="step", disable=quiet) as bar:
        for step, (images, labels) in zip(bar, data, strict=False):
            noise, times = draw_noise_and_times(config.batch_size, seed=config.seed, step=step)
            parts = (part.to(device) for part in (images, labels, noise[mine], times[mine]))
            optimizer.zero_grad()
            loss = flow_matching_loss(model, *parts)
            loss.backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            for ema in emas.values():
                ema.update(model)
            pending.append(loss.detach())
            stopping = should_stop is not None and should_stop()
            if step % config.eval_every == 0 or step == config.steps or stopping:
                history.losses += mean_over_ranks(pending, step)
                pending.clear()
                history.records += evaluate_all(model, emas, evaluate, step)
                bar.set_postfix(loss=f"{history.losses[-1]:.3f}", refresh=False)
            if after_step is not None:
                after_step(step, history)
            if stopping:
                break
    history.seconds = time.perf_counter() - started
    return history


@torch.no_grad()
def relative_distance(ema: EMA_FSDP, model: nn.Module) -> float:
    """How far the average is from the live weights: ||average - live|| / ||live|| over all tracked parameters.

    Collective: every rank must call, between a step and the next forward; every rank gets the same number. Sums are in
    float64. Where the weights are replicated each element counts once per replica in both norms, which cancels.

    Args:
        ema: an average of `model`.
        model: the live weights.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> ema = EMA_FSDP(model, 0.9)
        >>> with torch.no_grad():
        ...     for parameter in model.parameters():
        ...         _ = parameter.mul_(2)
        >>> round(relative_distance(ema, model), 6)
        0.5
    """
    shards = Layout(model).shards
    squares = []
    for name, average in ema.shadow.items():
        live = shards[name].live().double()
        squares.append(torch.stack([(average.double() - live).square().sum(), live.square().sum()]))
    sums = torch.stack(squares).sum(0)
    if _world_size() > 1:
        sums = sums.to(comm_device())
        dist.all_reduce(sums)
    apart, size = sums.tolist()
    return math.sqrt(apart / size)


def _check_run(emas: Mapping[str, EMA_FSDP], config: TrainingConfig, first_step: int) -> None:
    if "live" in emas:
        raise ValueError('emas: the name "live" stands for the trained weights; call the average something else')
    if not 1 <= first_step <= config.steps:
        raise ValueError(f"first_step must be from 1 to steps = {config.steps}, got {first_step}")


def mean_over_ranks(losses: list[Tensor], last_step: int) -> list[float]:
    """Collective: each step's loss averaged over the ranks; one synchronization for all steps since the last call."""
    means = torch.stack(losses).double()
    if _world_size() > 1:
        means = means.to(comm_device())
        dist.all_reduce(means)
        means /= _world_size()
    values = means.tolist()
    for step, value in enumerate(values, start=last_step - len(values) + 1):
        if not math.isfinite(value):
            raise FloatingPointError(f"the loss became {value} at step {step}: training diverged, lower learning_rate")
    return values


def evaluate_all(
    model: nn.Module, emas: Mapping[str, EMA_FSDP], evaluate: Evaluate | None, step: int
) -> list[dict[str, Any]]:
    """Collective: one record for the live weights and one for every average."""
    # Distances first: they read the shards, and a forward may leave units gathered.
    distances = {name: {"distance_to_live": relative_distance(ema, model)} for name, ema in emas.items()}
    live: Mapping[str, float] = evaluate(model) if evaluate else {}
    records: list[dict[str, Any]] = [{"step": step, "weights": "live", **live}]
    for name, ema in emas.items():
        averaged: Mapping[str, float] = {}
        if evaluate:
            with ema.swapped_into(model):
                averaged = evaluate(model)
        records.append({"step": step, "weights": name, **averaged, **distances[name]})
    return records


def show_progress(progress: bool | None) -> bool:
    """Whether this rank shows a progress bar; see `train`."""
    if not is_main_process():
        return False
    if progress is not None:
        return progress
    return not os.environ.get("CI") and (sys.stderr.isatty() or "ipykernel" in sys.modules)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


if __name__ == "__main__":
    from fsdp_ema_lib.lab.training_job import main

    main()
