"""Layouts: every way of sharding, the same names, exact gather, exact pieces, torch's checkpoint format."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from zoo import LAYOUTS, Zoo, allowed_features, full_live_weights, pairs, product

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
