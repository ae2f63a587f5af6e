"""Layouts: every way of sharding, the same names, exact gather, exact pieces, torch's checkpoint format."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from zoo import LAYOUTS, Zoo, full_live_weights

from fsdp_ema_lib.layout import Layout
from fsdp_ema_lib.sharded_view import interval_boxes

SHARDABLE = ("tied", "frozen", "buffers", "tiny")


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


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("layout", ["ddp", "fsdp1_full", "fsdp1_no_shard", "fsdp1_flat", "fsdp2", "fsdp2_nested"])
def test_gather_and_fill_are_exact(ranks, layout, world_size):
    check_gather(ranks, world_size, layout, SHARDABLE, torch.float32)
