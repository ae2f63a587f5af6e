"""EMA_FSDP against a float64 reference on the unsharded tensors, under every layout."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor.debug import CommDebugMode
from zoo import LAYOUTS, SAME_DATA, Reference, Zoo, full_live_weights, relative_error, train

from fsdp_ema_lib.ema import EMA_FSDP

SHARDABLE = ("tied", "frozen", "buffers", "tiny")
DECAY = 0.9
TOLERANCE = 1e-6


def worker_average(
    layout: str, features: tuple[str, ...], dtype: torch.dtype, folder: str, steps: int = 6
) -> dict[str, object]:
    """Train, average, export, save and load; what rank 0 reports is judged in the test's own process."""
    model = LAYOUTS[layout](Zoo(features, dtype))
    ema = EMA_FSDP(model, decay=DECAY)
    reference = Reference(full_live_weights(model))
    collectives = 0
    for _ in train(model, steps, same_data=layout in SAME_DATA):
        with CommDebugMode() as counted:
            ema.update(model)
        collectives += counted.get_total_counts()
        reference.update(full_live_weights(model), DECAY)
    before = full_live_weights(model)
    full = ema.full_state_dict(model)
    after = full_live_weights(model)

    dcp.save({"ema": ema}, checkpoint_id=folder)
    again = EMA_FSDP(LAYOUTS[layout](Zoo(features, dtype)), decay=0.5)
    dcp.load({"ema": again}, checkpoint_id=folder)
    reloaded = again.full_state_dict(again._module)

    third = EMA_FSDP(model, decay=DECAY)
    third.load_full_state_dict(full, model)
    return {
        "collectives": collectives,
        "moved": [name for name in before if not torch.equal(before[name], after[name])],
        "full": full,
        "reference": reference.average,
        "live": before,
        "trainable": [name for name, param in Zoo(features, dtype).named_parameters() if param.requires_grad],
        "reloaded": reloaded,
        "settings": (again.num_updates, again.decay),
        "unequal_after_full_load": [n for n in ema.shadow if not torch.equal(ema.shadow[n], third.shadow[n])],
        "shadow_dtypes": sorted({str(value.dtype) for value in ema.shadow.values()}),
    }


def check_average(ranks, tmp_path, world_size, layout, features, dtype):
    results = ranks(
        world_size, worker_average, layout=layout, features=features, dtype=dtype, folder=str(tmp_path / "state")
    )
    for rank, result in enumerate(results):
        assert result["collectives"] == 0, f"rank {rank}: update communicated"
        assert result["moved"] == [], f"rank {rank}: the export changed the live weights"
        assert result["settings"] == (6, DECAY), f"rank {rank}"
        assert result["unequal_after_full_load"] == [], f"rank {rank}"
        if rank > 0:
            assert result["full"] == {}, f"rank {rank}"
    head = results[0]
    plain = Zoo(features, dtype)
    full = head["full"]
    assert list(full) == list(plain.state_dict())
    plain.load_state_dict(full, strict=True)
    tracked = set(head["trainable"])
    for name in full:
        if name in tracked:
            error = relative_error(full[name], head["reference"][name])
            assert error <= TOLERANCE, f"{name}: {error}"
            assert torch.equal(full[name], head["reloaded"][name]), f"{name}: not the same bits after save and load"
        elif name != "pair.1.weight":
            assert torch.equal(full[name], head["live"][name]), name
    if "tied" in features:
        assert torch.equal(full["pair.1.weight"], full["pair.0.weight"])
    moved = [name for name in tracked if not torch.equal(full[name].to(dtype), head["live"][name])]
    assert moved, "the average equals the live weights: nothing was tested"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("layout", ["plain", "ddp", "fsdp1_full", "fsdp1_no_shard", "fsdp2"])
def test_average_equals_the_float64_reference(ranks, tmp_path, layout, world_size, dtype):
    check_average(ranks, tmp_path, world_size, layout, SHARDABLE, dtype)
