"""Layouts: every way of sharding, the same names, exact gather, exact pieces, torch's checkpoint format."""

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from memory import MIB, peak_rise
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from zoo import LAYOUTS, Zoo, allowed_features, full_live_weights, pairs, product

from fsdp_ema_lib import full_state
from fsdp_ema_lib import layout as layout_room
from fsdp_ema_lib.layout import Layout
from fsdp_ema_lib.sharded_view import interval_boxes


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_interval_boxes_cover_exactly_the_interval_in_order(shape, data):
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    full = torch.arange(numel).view(shape)
    boxes = list(interval_boxes(shape, start, stop))
    read = [full[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].reshape(-1) for box in boxes]
    assert torch.cat([torch.empty(0, dtype=torch.int64), *read]).tolist() == list(range(start, stop))
    assert len(boxes) <= 2 * len(shape) - 1


def worker_gather(layout: str, features: tuple[str, ...], dtype: torch.dtype) -> dict[str, object]:
    plain = Zoo(features, dtype)
    names = list(plain.state_dict())
    model = LAYOUTS[layout](plain)
    found = Layout(model)
    expected = full_live_weights(model)
    gathered = {name: full.clone() for name, full in found.stream(found.live())}
    wrong = []
    for name, full in gathered.items():
        if not torch.equal(full, expected[name]) or full.dtype != expected[name].dtype:
            wrong.append(name)
    unfilled = []
    for name, shard in (found.shards | found.buffers).items():
        local = torch.full_like(shard.live(), 7 if shard.dtype == torch.int64 else math.nan)
        shard.fill(local, expected[name])
        if not torch.equal(local, shard.live()):
            unfilled.append(name)
    return {
        "same_names": list(found.primary) == names,
        "wrong": wrong,
        "unfilled": unfilled,
        "gathered": sorted(gathered),
        "all": sorted(found.shards | found.buffers),
        "current": found.is_current(),
    }


def check_gather(ranks, world_size, layout, features, dtype):
    results = ranks(world_size, worker_gather, layout=layout, features=features, dtype=dtype)
    for rank, result in enumerate(results):
        assert result["same_names"], f"rank {rank}"
        assert result["wrong"] == [], f"rank {rank}"
        assert result["unfilled"] == [], f"rank {rank}"
        assert result["gathered"] == (result["all"] if rank == 0 else []), f"rank {rank}"
        assert result["current"], f"rank {rank}"


# One cell a layout: the exports and loads in test_ema.py go through the same code for every pair.
DIAGONAL = [cell for number, cell in enumerate(pairs()) if number % 4 == number // 4 % 4]


@pytest.mark.parametrize(("layout", "world_size", "dtype"), DIAGONAL, ids=str)
def test_gather_and_fill_are_exact(ranks, cells, layout, world_size, dtype):
    check_gather(ranks, world_size, layout, allowed_features(layout), dtype)
    cells.add("gather and fill", layout, world_size, dtype)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("layout", "world_size", "dtype"), product(), ids=str)
def test_gather_and_fill_are_exact_in_the_full_product(ranks, cells, layout, world_size, dtype):
    for feature in allowed_features(layout):
        check_gather(ranks, world_size, layout, (feature,), dtype)
    cells.add("gather and fill, each feature alone", layout, world_size, dtype)


def worker_uneven_tensor_parallel() -> list[str]:
    """7 rows over 2 tensor-parallel ranks, then each part over 2 data-parallel ones."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Zoo(("tiny",))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"inner": ColwiseParallel(), "outer": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    layout = Layout(model)
    placements = {type(p).__name__ for s in layout.shards.values() for p in s.registered.placements}
    problems = [] if "_StridedShard" in placements else [f"only {placements}: the case is not the one meant"]
    for name, shard in layout.shards.items():
        local = torch.full_like(shard.live(), math.nan)
        shard.fill(local, expected[name])
        if not torch.equal(local, shard.live()):
            problems.append(f"{name}: the slice is wrong")
    gathered = {name: full.clone() for name, full in layout.stream(layout.live())}
    return problems + [name for name in gathered if not torch.equal(gathered[name], expected[name])]


def test_uneven_tensor_parallel_shards_are_exact(ranks):
    for rank, problems in enumerate(ranks(4, worker_uneven_tensor_parallel)):
        assert problems == [], f"rank {rank}"


def block(rows: int, columns: int) -> nn.Linear:
    linear = nn.Linear(columns, rows, bias=False)
    linear.weight.data = torch.arange(float(rows * columns)).view(rows, columns)
    return linear


def worker_messages(message_bytes: int) -> dict[str, list[str]]:
    """Gather blocks of 7, 2 and 6 rows to each rank in turn, in messages of so many bytes; what was wrong."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    models = {"FSDP1": nn.Module(), "FSDP2": nn.Module(), "columns": nn.Module()}
    expected = {}
    for name, rows in (("uneven", 7), ("some_empty", 2), ("even", 6)):
        expected[f"{name}.weight"] = block(rows, 12).weight.detach()
        models["FSDP1"].add_module(
            name,
            FullyShardedDataParallel(
                block(rows, 12), device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=True
            ),
        )
        models["FSDP2"].add_module(name, fully_shard(block(rows, 12), mesh=mesh))
        models["columns"].add_module(
            name, fully_shard(block(rows, 12), mesh=mesh, shard_placement_fn=lambda param: Shard(1))
        )
    before, layout_room._MESSAGE_BYTES = layout_room._MESSAGE_BYTES, message_bytes
    problems = {}
    try:
        for kind, model in models.items():
            layout = Layout(model)
            for dst in range(world):
                found = {name: full.clone() for name, full in layout.stream(layout.live(), dst)}
                wanted = expected if dist.get_rank() == dst else {}
                wrong = [n for n in wanted if n not in found or not torch.equal(found[n], wanted[n])]
                if wrong or found.keys() != wanted.keys():
                    problems[f"{kind} to {dst}"] = wrong or sorted(found)
    finally:
        layout_room._MESSAGE_BYTES = before
    return problems


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("message_bytes", [1, 100, 1 << 20])
def test_gathers_in_messages_of_any_size_are_exact(ranks, world_size, message_bytes):
    for rank, problems in enumerate(ranks(world_size, worker_messages, message_bytes=message_bytes)):
        assert problems == {}, f"rank {rank}"


def worker_peak(sharding: str) -> tuple[float, int]:
    """Bytes by which the peak rises over a gather of three units, and the bytes of a unit."""
    world, size = dist.get_world_size(), 3240  # 40 MiB: glibc keeps what it gets back in blocks of less than 32
    model = nn.Sequential(*(nn.utils.skip_init(nn.Linear, size, size, bias=False) for _ in range(3)))
    for param in model.parameters():
        nn.init.ones_(param)
    for name, unit in list(model.named_children()):
        if sharding == "FSDP1":
            model.add_module(
                name,
                FullyShardedDataParallel(
                    unit,
                    device_mesh=init_device_mesh("cpu", (world,)),
                    device_id=torch.device("cpu"),
                    use_orig_params=True,
                ),
            )
        else:
            placement = Shard(1) if sharding == "FSDP2 by columns" else None
            fully_shard(unit, shard_placement_fn=lambda param, placement=placement: placement)
    layout = Layout(model)

    def gather() -> None:
        for _, tensor in full_state.stream(layout, layout.live(), None):
            del tensor

    return peak_rise(gather) * MIB, size * size * 4


@pytest.mark.parametrize("sharding", ["FSDP1", "FSDP2", "FSDP2 by columns"])
def test_a_gather_holds_one_unit_and_little_more(ranks, sharding):
    for rank, (rise, unit) in enumerate(ranks(2, worker_peak, sharding=sharding)):
        assert rise < (unit if rank == 0 else unit / 2) + 2 * layout_room._MESSAGE_BYTES, f"rank {rank}"
