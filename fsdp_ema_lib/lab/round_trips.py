"""What one layout saves and another loads, on real ranks: are weights, average and optimizer equal bit for bit?"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from fsdp_ema_lib.checkpoint import load_checkpoint, save_checkpoint
from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.lab.cluster import ranks
from fsdp_ema_lib.lab.digits import load_digits
from fsdp_ema_lib.lab.flow import VelocityField
from fsdp_ema_lib.lab.shard_map import SIMPLE, TWO_DIMENSIONAL, spread
from fsdp_ema_lib.lab.training import TrainingConfig, make_optimizer, train
from fsdp_ema_lib.layout import Layout

#: What is compared in each cell.
PARTS = ("model", "EMA", "AdamW")
WAYS = ("plain", *SIMPLE, *(way for way in TWO_DIMENSIONAL if not way.startswith("tensor parallel")))

State = dict[str, dict[str, Tensor]]


@dataclass(frozen=True)
class RoundTrip:
    """One cell: what `source` saved, loaded by `target`.

    Attributes:
        source, target: the layouts, as given to `round_trips`.
        differing: of each of `PARTS` how many bytes differ from what was saved, once it is loaded.
        before: the same just before the load: the comparison can see a difference.
        total: how many bytes were compared, of each part.
        apart: ||target - source|| / ||source|| of the weights, after both have trained on for the same further steps.
    """

    source: str
    target: str
    differing: dict[str, int]
    before: dict[str, int]
    total: dict[str, int]
    apart: float

    @property
    def equal(self) -> bool:
        """Whether every bit came back."""
        return not any(self.differing.values())


@dataclass(frozen=True)
class _Plan:
    layouts: tuple[str, ...]
    folder: str
    config: TrainingConfig
    more: int
    decay: float
    timeout_s: float


def round_trips(
    layouts: Sequence[str],
    *,
    steps: int = 10,
    more: int = 3,
    hidden: int = 50,
    decay: float = 0.9,
    seed: int = 0,
    batch_size: int = 48,
    timeout_s: float = 240.0,
) -> list[RoundTrip]:
    """Train a small model under every layout, save it, load it under every layout, and compare bit for bit.

    As many processes are started as the largest layout has ranks, once; layouts of fewer ranks run on the first of
    them, as jobs of that size. What was saved and what was loaded is gathered by torch itself
    (`get_model_state_dict`, `get_optimizer_state_dict`), not by the library that is on trial.

    Args:
        layouts: each one of `WAYS` and a number of ranks, such as "plain 1", "FSDP2 full 2", "FSDP1 hybrid_full 4".
        steps: optimizer steps before the save, at least 1.
        more: optimizer steps that source and target go on for, at least 1.
        hidden: width of the model, even. The default divides evenly by no number of ranks above 2.
        decay: of the average.
        seed: of the sources; the targets start from other weights and have trained on.
        batch_size: images per step over all ranks, a multiple of every number of ranks.
        timeout_s: seconds for all of it.

    Returns:
        One cell for every pair of layouts: sources in the given order, and for each the targets in that order.

    Raises:
        ValueError: a layout that there is not, or twice. Otherwise as `cluster.ranks`; these end an earlier set.
    """
    layouts = tuple(layouts)
    _check_layouts(layouts)
    config = TrainingConfig(steps=steps, hidden=hidden, seed=seed, batch_size=batch_size, blocks=1, eval_every=steps)
    with tempfile.TemporaryDirectory(prefix="round-trips-") as folder:
        plan = _Plan(layouts, folder, config, more, decay, timeout_s)
        with ranks(max(map(ranks_of, layouts)), device="cpu", limit_s=timeout_s, quiet=True) as processes:
            cells = processes.run(all_round_trips, plan)[0]
    by_pair = {(cell.source, cell.target): cell for cell in cells}
    return [by_pair[source, target] for source in layouts for target in layouts]


def ranks_of(layout: str) -> int:
    """The number of ranks of a layout.

    Example:
        >>> ranks_of("FSDP1 hybrid_full 4")
        4
    """
    return int(layout.rpartition(" ")[2])


def _check_layouts(layouts: Sequence[str]) -> None:
    if not layouts or len(set(layouts)) < len(layouts):
        raise ValueError(f"layouts: expected different ones, at least one, got {list(layouts)}")
    for layout in layouts:
        way, _, size = layout.rpartition(" ")
        if way not in WAYS or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f'layouts: expected a way and a number of ranks, such as "FSDP2 full 2", got {layout!r}; '
                f"the ways are {', '.join(WAYS)}"
            )
        if (way == "plain" and size != "1") or ("hybrid" in way and (int(size) < 4 or int(size) % 2)):
            need = "1 rank" if way == "plain" else "an even number of at least 4 ranks"
            raise ValueError(f"layouts: {way} needs {need}, got {layout!r}")


# ---------------------------------------------------------------- on the ranks


def all_round_trips(plan: _Plan) -> list[RoundTrip]:
    """All saves, then all loads, on each process. Every process of the group must call; the first returns the cells."""
    processes = dist.get_world_size()
    number = dist.get_rank()
    dist.destroy_process_group()
    cells: list[RoundTrip] = []
    for phase, work in enumerate((_save_all, _load_all)):
        for size in sorted(set(map(ranks_of, plan.layouts))):
            if number < size:
                with _job(number, size, Path(plan.folder, f"meet-{phase}-{size}"), plan.timeout_s):
                    cells += work(plan, [layout for layout in plan.layouts if ranks_of(layout) == size])
    _join(number, processes, Path(plan.folder, "meet-at-the-end"), plan.timeout_s)
    return cells


@contextmanager
def _job(rank: int, size: int, meeting: Path, timeout_s: float) -> Iterator[None]:
    """A default group of the first so many processes. Processes that are not among them need not call."""
    _join(rank, size, meeting, timeout_s)
    yield
    dist.barrier()
    dist.destroy_process_group()


def _join(rank: int, size: int, meeting: Path, timeout_s: float) -> None:
    store = dist.FileStore(str(meeting), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))


_FULL = StateDictOptions(full_state_dict=True)


class _Training:
    """Model, optimizer and average under one layout; the data of a step are the same for all of them."""

    def __init__(self, layout: str, plan: _Plan, seed: int) -> None:
        self.config = plan.config
        torch.manual_seed(seed)
        plain = VelocityField(self.config.hidden, self.config.blocks)
        self.model = spread(plain, layout.rpartition(" ")[0], min_num_params=2 * self.config.hidden**2)
        self.optimizer = make_optimizer(self.model, self.config)
        self.ema = EMA_FSDP(self.model, plan.decay)

    def train(self, first_step: int, last_step: int) -> None:
        config = replace(self.config, steps=last_step, eval_every=last_step)
        train(
            self.model,
            load_digits().train,
            config,
            emas={"EMA": self.ema},
            optimizer=self.optimizer,
            first_step=first_step,
            progress=False,
        )

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "ema": self.ema}

    def full(self) -> State:
        """Everything in full, gathered by torch. Collective."""
        moments = get_optimizer_state_dict(self.model, self.optimizer, options=_FULL)["state"]
        with self.ema.swapped_into(self.model):  # exact: the weights are fp32 as the average is
            average = self.weights()
        return {
            "model": self.weights(),
            "EMA": average | {"num_updates": torch.tensor(self.ema.num_updates)},
            "AdamW": _copied({f"{name}.{key}": t for name, state in moments.items() for key, t in state.items()}),
        }

    def weights(self) -> dict[str, Tensor]:
        """What is in the model, in full, gathered by torch. Collective."""
        return _copied(get_model_state_dict(self.model, options=_FULL))


def _copied(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: torch.as_tensor(tensor).detach().clone() for name, tensor in tensors.items()}


def _save_all(plan: _Plan, layouts: Sequence[str]) -> list[RoundTrip]:
    """Save each layout's training, what it was in full, and its weights some steps later."""
    steps = plan.config.steps
    for layout in layouts:
        training = _Training(layout, plan, plan.config.seed)
        training.train(1, steps)
        save_checkpoint(Path(plan.folder, layout), **training.parts(), step=steps)
        saved = training.full()
        training.train(steps + 1, steps + plan.more)
        later = training.weights()
        if dist.get_rank() == 0:
            torch.save({"saved": saved, "later": later}, Path(plan.folder, f"{layout}.pt"))
    return []


def _load_all(plan: _Plan, layouts: Sequence[str]) -> list[RoundTrip]:
    """Load every checkpoint into each of the layouts; rank 0's cells count."""
    steps, cells = plan.config.steps, []
    for target in layouts:
        training = _Training(target, plan, plan.config.seed + 1)
        training.train(1, 1)
        for source in plan.layouts:
            truth = torch.load(Path(plan.folder, f"{source}.pt"), weights_only=True)
            before = _compared(training.full(), truth["saved"])
            with warnings.catch_warnings():
                # Ranks that the source did not have keep their random states, which this training does not use.
                warnings.filterwarnings("ignore", ".*no random state for this one")
                load_checkpoint(Path(plan.folder, source), **training.parts())
            differing = _compared(training.full(), truth["saved"])
            training.train(steps + 1, steps + plan.more)
            apart = relative_difference(training.weights(), truth["later"])
            total = {part: _bytes(truth["saved"][part]) for part in PARTS}
            cells.append(RoundTrip(source, target, differing, before, total, apart))
    return cells


def _compared(found: State, expected: State) -> dict[str, int]:
    return {part: differing_bytes(found[part], expected[part]) for part in PARTS}


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


# ---------------------------------------------------------------- comparing


def local_state(model: nn.Module, optimizer: torch.optim.Optimizer, ema: EMA_FSDP) -> dict[str, Tensor]:
    """Copies, on the CPU, of every number in this rank's memory: live weights, average, optimizer state. Local.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> sorted(local_state(model, torch.optim.SGD(model.parameters(), lr=0.1), EMA_FSDP(model, 0.9)))
        ['average.bias', 'average.weight', 'live.bias', 'live.weight', 'num_updates']
    """
    found = {f"live.{name}": tensor for name, tensor in Layout(model).live().items()}
    found |= {f"average.{name}": tensor for name, tensor in ema.shadow.items()}
    found["num_updates"] = torch.tensor(ema.num_updates)
    for number, entries in enumerate(optimizer.state.values()):
        for name, value in entries.items():
            found[f"optimizer.{number}.{name}"] = value.to_local() if isinstance(value, DTensor) else value
    return {name: tensor.detach().cpu().clone() for name, tensor in found.items()}


def differing_bytes(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> int:
    """How many bytes differ over all tensors of two states.

    Raises:
        ValueError: a name, shape or dtype differs; all that do are named.

    Example:
        >>> differing_bytes({"a": torch.tensor([0.0, 1.0])}, {"a": torch.tensor([-0.0, 1.0])})
        1
    """
    kinds = [
        {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()} for state in (found, expected)
    ]
    if odd := sorted(name for name in kinds[0].keys() | kinds[1].keys() if kinds[0].get(name) != kinds[1].get(name)):
        lines = [f"{name}: found {kinds[0].get(name)}, expected {kinds[1].get(name)}" for name in odd]
        raise ValueError("the two states cannot be compared:\n" + "\n".join(lines))
    return sum(int((_as_bytes(tensor) != _as_bytes(expected[name])).sum()) for name, tensor in found.items())


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def relative_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """||found - expected|| / ||expected|| over all tensors together, in float64.

    Example:
        >>> relative_difference({"a": torch.tensor([3.0, 5.0])}, {"a": torch.tensor([3.0, 4.0])})
        0.2
    """
    apart = sum(float((tensor.double() - expected[name].double()).square().sum()) for name, tensor in found.items())
    return (apart / sum(float(tensor.double().square().sum()) for tensor in expected.values())) ** 0.5
