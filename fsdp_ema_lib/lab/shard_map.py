"""Which rank holds which elements of each parameter, and what an average's operations send, seen on real ranks."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.lab.cluster import ranks
from fsdp_ema_lib.layout import FlatUnit, Layout, Unit
from fsdp_ema_lib.wrapping import fsdp2_wrap, fsdp_wrap

#: Ways to spread the model over all ranks of a job; the second half needs two rows of at least two ranks.
SIMPLE = ("FSDP1 full", "FSDP2 full", "FSDP1 no_shard", "FSDP2 no_shard", "DDP")
TWO_DIMENSIONAL = (
    "FSDP1 hybrid_full",
    "FSDP2 hybrid_full",
    "FSDP1 hybrid_zero2",
    "FSDP2 hybrid_zero2",
    "tensor parallel x FSDP2",
)
OPERATIONS = ("forward and backward", "update", "swapped_into", "full_state_dict")

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class ShardMap:
    """One model, spread in one way over the ranks of one job.

    Attributes:
        way: one of `SIMPLE` or `TWO_DIMENSIONAL`.
        shapes: canonical parameter name to full shape.
        boxes: of each rank, name to the (offsets, sizes) of the hyper-rectangles that the layout says it holds.
        held: of each rank, name to the row-major numbers of the elements that are in its memory, read off the values.
        collectives: operation to what each rank issued: collective to count, and "send" and "recv" for messages.
        gathers: predicted for a full copy of the model on rank 0: how many messages each rank sends or gets (one from
            each other rank of rank 0's copy, for each FSDP1 unit, and for each DTensor of which that rank has a part),
            and in how many collectives it takes part (for a DTensor that is split over several dimensions of its mesh,
            one for each of them).
    """

    way: str
    shapes: dict[str, tuple[int, ...]]
    boxes: list[dict[str, list[Box]]]
    held: list[dict[str, list[int]]]
    collectives: dict[str, list[dict[str, int]]]
    gathers: list[int]

    def holders(self) -> dict[str, np.ndarray]:
        """For each parameter a boolean array of shape (ranks, *parameter): does the rank hold the element?

        By the layout's boxes; `misplaced` says whether these are true.
        """
        found = {name: np.zeros((len(self.boxes), *shape), dtype=bool) for name, shape in self.shapes.items()}
        for rank, boxes_by_name in enumerate(self.boxes):
            for name, boxes in boxes_by_name.items():
                for box in boxes:
                    found[name][rank][_slices(*box)] = True
        return found

    def misplaced(self) -> list[str]:
        """Where the layout's boxes are not the elements that are in memory: "rank 1: inner.weight" and so on."""
        faults = []
        for name, holders in self.holders().items():
            for rank, held in enumerate(self.held):
                if np.flatnonzero(holders[rank]).tolist() != sorted(held[name]):
                    faults.append(f"rank {rank}: {name}")
        return faults

    def elements(self) -> list[int]:
        """How many elements each rank has in memory."""
        return [sum(map(len, held.values())) for held in self.held]

    def total(self, operation: str) -> list[int]:
        """How many collectives each rank issued and how many messages it sent or got in one of `OPERATIONS`."""
        return [sum(counts.values()) for counts in self.collectives[operation]]

    def rows_cut(self) -> list[str]:
        """The matrices in which some row is not whole on one rank."""
        return [
            name
            for name, holders in self.holders().items()
            if len(self.shapes[name]) > 1 and (holders != holders[..., :1]).any()
        ]


def map_shards(world_size: int, *, min_num_params: int = 50_000_000, timeout_s: float = 120.0) -> dict[str, ShardMap]:
    """Spread `small_model` over real ranks in every way that this many can, and look where everything is.

    Args:
        world_size: number of ranks, at least 1; those of `TWO_DIMENSIONAL` need an even number of at least 4.
        min_num_params: submodules with so many parameters become units of their own, as in `fsdp_wrap`.
        timeout_s: seconds that the ranks get for it, once they have started.

    Returns:
        way to map.

    Raises:
        As `ranks` and `Ranks.run`. Ranks that the kernel has running are ended by this.

    Example:
        >>> found = map_shards(2)["FSDP2 full"]
        >>> found.elements(), found.misplaced(), found.total("update")
        ([48, 37], [], [0, 0])
        >>> found.gathers, found.total("full_state_dict")  # four more, for errors and for the names
        ([6, 6], [10, 10])
    """
    ways = SIMPLE + (TWO_DIMENSIONAL if world_size >= 4 and world_size % 2 == 0 else ())
    with ranks(world_size, device="cpu", limit_s=timeout_s, quiet=True) as r:
        seen = r.run(look_at, ways, min_num_params)
    return {way: _assemble(way, [rank[way] for rank in seen]) for way in ways}


def small_model() -> nn.Module:
    """85 parameters of both kinds of shape, few enough to be drawn one by one, each equal to its number in its tensor.

    Some do not divide evenly: 5 and 3 rows over 2 or 4 ranks.
    """
    layers = OrderedDict(norm=nn.LayerNorm(5), inner=nn.Linear(5, 8), act=nn.Tanh(), outer=nn.Linear(8, 3))
    model = nn.Sequential(layers)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view_as(parameter))
    return model


def look_at(ways: Sequence[str], min_num_params: int) -> dict[str, dict[str, Any]]:
    """What one rank sees of each way, as plain data. Every rank must call."""
    return {way: _look_at(way, min_num_params) for way in ways}


def _look_at(way: str, min_num_params: int) -> dict[str, Any]:
    model = spread(small_model(), way, min_num_params)
    layout = Layout(model)
    live = {name: shard.live() for name, shard in layout.shards.items()}
    return {
        "shapes": {name: tuple(shard.shape) for name, shard in layout.shards.items()},
        "boxes": {
            name: [(piece.offsets, piece.sizes) for piece in shard.pieces(live[name])]
            for name, shard in layout.shards.items()
        },
        "held": {name: tensor.flatten().int().tolist() for name, tensor in live.items()},
        "gathers": sum(_gathers(unit) for unit in layout.units),
        "collectives": _count_collectives(model),
    }


def _gathers(unit: Unit) -> int:
    """How many messages this rank sends or gets, or collectives it takes part in, while rank 0 gathers the unit."""
    if isinstance(unit, FlatUnit):
        return _messages([1] * unit.group.size(), dist.get_process_group_ranks(unit.group)) if unit.sharded else 0
    return sum(_gathers_of(shard.registered) for shard in unit.shards if isinstance(shard.registered, DTensor))


def _gathers_of(tensor: DTensor) -> int:
    mesh = tensor.device_mesh
    split = [dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(split) != 1:
        return sum(mesh.size(dim) > 1 for dim in split)
    rows, group = tensor.shape[tensor.placements[split[0]].dim], mesh.get_group(split[0])
    each = -(-rows // group.size())
    parts = [min(each, max(0, rows - number * each)) for number in range(group.size())]
    return _messages(parts, dist.get_process_group_ranks(group))


def _messages(parts: Sequence[int], ranks: Sequence[int]) -> int:
    """One from each other rank that has a part, if rank 0 is among them: all of them on rank 0, elsewhere its own."""
    if 0 not in ranks:
        return 0
    sent = {rank: int(part > 0) for rank, part in zip(ranks, parts, strict=True) if rank != 0}
    return sum(sent.values()) if dist.get_rank() == 0 else sent[dist.get_rank()]


def spread(model: nn.Module, way: str, min_num_params: int) -> nn.Module:
    """Spread a model over all ranks in one of the ways, or leave it "plain". Every rank must call.

    Args:
        model: a plain one; for the tensor parallel way it has linear layers `inner` and `outer`.
        way: one of `SIMPLE`, on four ranks or more also of `TWO_DIMENSIONAL`, or "plain".
        min_num_params: as in `fsdp_wrap`.
    """
    if way == "plain":
        return model
    if way == "DDP":
        return DistributedDataParallel(model)
    if way == "tensor parallel x FSDP2":
        mesh = _two_rows("data", "tensor")
        parallelize_module(model, mesh["tensor"], {"inner": ColwiseParallel(), "outer": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["data"])
    version, strategy = way.split()
    wrap = {"FSDP1": fsdp_wrap, "FSDP2": fsdp2_wrap}[version]
    return wrap(
        model,
        # With one rank there is nothing to shard; saying so spares the warning that "full" would bring.
        sharding_strategy="no_shard" if dist.get_world_size() == 1 else strategy,
        mixed_precision=False,
        mesh=_two_rows("replicate", "shard") if "hybrid" in strategy else None,
        min_num_params=min_num_params,
    )


def _two_rows(rows: str, columns: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=(rows, columns))


class _CountMessages(TorchDispatchMode):
    """Counts what `CommDebugMode` does not: messages from one rank to one other."""

    def __init__(self, counted: Counter[str]) -> None:
        super().__init__()
        self.counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.overloadpacket)
        if name in ("c10d.send", "c10d.recv_", "c10d.recv_any_source_"):
            self.counted[name.removeprefix("c10d.").rstrip("_")] += 1
        return func(*args, **(kwargs or {}))


def _count_collectives(model: nn.Module) -> dict[str, dict[str, int]]:
    """Operation to collective, "send" or "recv" to count, on this rank."""
    ema = EMA_FSDP(model, decay=0.9)
    inputs = torch.ones(2, 5)
    work: dict[str, tuple[Callable[[], Any], AbstractContextManager[Any]]] = {
        "forward and backward": (lambda: model(inputs).sum().backward(), nullcontext()),
        "update": (lambda: ema.update(model), nullcontext()),
        "swapped_into": (lambda: None, ema.swapped_into(model)),
        "full_state_dict": (lambda: ema.full_state_dict(model), nullcontext()),
    }
    counts: dict[str, dict[str, int]] = {}
    for operation, (call, inside) in work.items():
        counted: Counter[str] = Counter()
        with CommDebugMode() as counter, _CountMessages(counted):
            with inside:
                call()
        for collective, count in counter.get_comm_counts().items():
            counted[str(collective).removeprefix("c10d.").rstrip("_")] += count
        counts[operation] = dict(counted)
    return counts


def _assemble(way: str, seen: Sequence[Mapping[str, Any]]) -> ShardMap:
    collectives = {operation: [rank["collectives"][operation] for rank in seen] for operation in OPERATIONS}
    boxes, held, gathers = ([rank[key] for rank in seen] for key in ("boxes", "held", "gathers"))
    return ShardMap(way, seen[0]["shapes"], boxes, held, collectives, gathers)


def _slices(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
