"""EMA_FSDP where the model, the state or the caller's mode is not what it was when the average was built."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from zoo import LAYOUTS, Zoo, train

from fsdp_ema_lib.checkpoint import load_checkpoint, save_checkpoint
from fsdp_ema_lib.decay import HalfLifeSamples, Warmup, decay_at
from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.offline import export

DECAY = 0.9


def raised(call: Callable[[], object]) -> str:
    try:
        call()
    except (CheckpointException, Exception) as problem:
        return f"{type(problem).__name__}: {problem}"
    return "no error"


# ---------------------------------------------------------------- states that do not fit, through DCP

SAVED: dict[str, dict[str, object]] = {
    "compensated": {"precision": "compensated"},
    "fp64": {"precision": "fp64"},
    "more tracked": {},
    "fewer tracked": {"exclude": ["outer.*"]},
}


def worker_dcp_refuses(layout: str, folder: str) -> list[str]:
    model = LAYOUTS[layout](Zoo())
    problems = []
    for what, settings in SAVED.items():
        saved = EMA_FSDP(model, DECAY, **settings)
        for _ in train(model, 1):
            saved.update(model)
        dcp.save({"ema": saved}, checkpoint_id=f"{folder}/{what}")
        here = EMA_FSDP(model, 0.5, exclude=["inner.*"] if what == "more tracked" else [])
        for average in here.shadow.values():
            average.add_(1.0)
        before = {name: average.clone() for name, average in here.shadow.items()}
        text = raised(lambda: dcp.load({"ema": here}, checkpoint_id=f"{folder}/{what}"))  # noqa: B023
        if not re.search(
            r"(?s)CheckpointException.*Missing key in checkpoint state_dict: ema\.(fits|shadow|low)", text
        ):
            problems.append(f"{what}: {text}")
        problems += [f"{what}, {n}: changed" for n, a in here.shadow.items() if not torch.equal(a, before[n])]
        if (here.num_updates, here.decay) != (0, 0.5):
            problems.append(f"{what}: count or decay changed")
    return problems


@pytest.mark.parametrize("layout", ["fsdp1_full", "fsdp2"])
def test_dcp_refuses_a_state_that_does_not_fit_before_it_changes_the_average(ranks, tmp_path, layout):
    for rank, problems in enumerate(ranks(2, worker_dcp_refuses, layout=layout, folder=str(tmp_path))):
        assert problems == [], f"rank {rank}"


def worker_after_a_forward(layout: str, folder: str) -> list[str]:
    """A forward without a backward leaves the root of FSDP2 unsharded."""
    model = LAYOUTS[layout](Zoo())
    ema = EMA_FSDP(model, DECAY)
    for _ in train(model, 1):
        ema.update(model)
    x = torch.randn(2, 5)
    calls: dict[str, Callable[[], object]] = {
        "state_dict": ema.state_dict,
        "coverage": ema.coverage,
        "load_state_dict": lambda: ema.load_state_dict(state),
        "dcp.save": lambda: dcp.save({"ema": ema}, checkpoint_id=folder),
        "dcp.load": lambda: dcp.load({"ema": ema}, checkpoint_id=folder),
    }
    state = ema.state_dict()
    before = {name: average.clone() for name, average in ema.shadow.items()}
    problems = []
    for what, call in calls.items():
        with torch.no_grad():
            model(x)
        if (text := raised(call)) != "no error":
            problems.append(f"{what}: {text}")
    return problems + [name for name, average in ema.shadow.items() if not torch.equal(average, before[name])]


@pytest.mark.parametrize(("layout", "world_size"), [("fsdp2", 2), ("fsdp2_nested", 2), ("fsdp2_reshard_int", 4)])
def test_a_state_is_saved_and_loaded_right_after_an_evaluation(ranks, tmp_path, layout, world_size):
    results = ranks(world_size, worker_after_a_forward, layout=layout, folder=str(tmp_path))
    for rank, problems in enumerate(results):
        assert problems == [], f"rank {rank}"


def test_a_state_that_a_device_cannot_go_on_with_is_refused_before_anything_changes():
    model = nn.Linear(2, 2)
    ema = EMA_FSDP(model, DECAY, capturable=True)
    before = ema.shadow["weight"].clone()
    for other, text in (
        (EMA_FSDP(nn.Linear(2, 2), DECAY, update_every=4), "update_every: the EMA state was saved with 4"),
        (EMA_FSDP(nn.Linear(2, 2), DECAY), None),
    ):
        state = other.state_dict()
        if text is None:
            ema.load_state_dict(state)
            assert torch.equal(ema.shadow["weight"], other.shadow["weight"])
            continue
        with pytest.raises(ValueError, match=text):
            ema.load_state_dict(state)
        assert torch.equal(ema.shadow["weight"], before)


def test_a_count_that_a_scaler_moved_to_the_device_refuses_an_interval_too():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    ema = EMA_FSDP(model, DECAY)
    ema.attach(optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.grad_scale, optimizer.found_inf = None, torch.zeros(())  # as a GradScaler sets them
    optimizer.step()
    before = ema.shadow["weight"].clone()
    with pytest.raises(ValueError, match="update_every: .* counts on the device .* needs 1"):
        ema.load_state_dict(EMA_FSDP(nn.Linear(2, 2), DECAY, update_every=4).state_dict())
    assert torch.equal(ema.shadow["weight"], before) and ema.num_updates == 1


@pytest.mark.parametrize("schedule", [Warmup(np.float32(0.99)), HalfLifeSamples(np.int64(1000), np.int64(10))], ids=str)
def test_a_schedule_of_numpy_numbers_is_saved_and_comes_back(schedule):
    model = nn.Linear(2, 2)
    ema, again = EMA_FSDP(model, schedule), EMA_FSDP(model, 0.5)
    again.load_state_dict(ema.state_dict())
    assert decay_at(again.decay, 5) == decay_at(schedule, 5)


# ---------------------------------------------------------------- a changed model


def test_another_stage_in_the_same_list_is_noticed():
    parts = [nn.ModuleDict({"a": nn.Linear(2, 2)}), nn.ModuleDict({"b": nn.Linear(2, 2)})]
    ema = EMA_FSDP(parts, 0.0)
    parts[1] = nn.ModuleDict({"b": nn.Linear(2, 2)})
    ema.update(parts)
    assert torch.equal(ema.shadow["b.weight"], parts[1]["b"].weight)
    parts[1] = nn.ModuleDict({"c": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match="c.weight: in this model, not in the one that the EMA was built for"):
        ema.update(parts)


def test_a_new_list_of_the_same_parts_is_no_reason_to_walk_the_model():
    parts = [nn.ModuleDict({"a": nn.Linear(2, 2)}), nn.ModuleDict({"b": nn.Linear(2, 2)})]
    ema = EMA_FSDP(parts, DECAY)
    layout = ema._layout
    ema.update(list(parts))
    ema.update(tuple(parts))
    assert ema._layout is layout


def _lora(model: nn.Sequential) -> None:
    model[0].lora = nn.Linear(3, 3)


def _bias(model: nn.Sequential) -> None:
    model[1].bias = nn.Parameter(torch.zeros(3))


@pytest.mark.parametrize(("change", "name"), [(_lora, "0.lora.weight"), (_bias, "1.bias")])
def test_a_parameter_that_was_added_where_none_was_is_noticed(change, name):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
    ema = EMA_FSDP(model, DECAY)
    change(model)
    with pytest.raises(ValueError, match=f"{re.escape(name)}: in this model, not in the one"):
        ema.update(model)
    ema.reset(model)
    assert name in ema.shadow


def test_writing_the_average_into_another_model_does_not_change_what_is_averaged():
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    training, evaluated = build(), build()
    training[0].requires_grad_(False)
    ema = EMA_FSDP(training, DECAY)
    ema.copy_to(evaluated)
    with ema.swapped_into(evaluated):
        pass
    ema.health(evaluated)
    ema.full_state_dict(evaluated)
    ema.update(training)
    assert sorted(ema.shadow) == ["1.bias", "1.weight"]
    assert torch.equal(ema.full_state_dict(training)["0.weight"], training[0].weight)
    training[0].requires_grad_(True)
    ema.full_state_dict(training)  # sees the unfrozen parameter, but does not start its average
    ema.update(training)
    assert sorted(ema.shadow) == ["0.bias", "0.weight", "1.bias", "1.weight"]


def test_coverage_says_that_a_parameter_frozen_later_is_still_averaged():
    model = nn.Linear(2, 2)
    ema = EMA_FSDP(model, DECAY)
    model.bias.requires_grad_(False)
    assert ema.coverage().tracked == ["weight", "bias"] and ema.coverage().copied == {}


SETTINGS: dict[str, dict[str, object]] = {
    "bf16": {},
    "skip": {"nonfinite": "skip"},
    "compensated": {"precision": "compensated"},
    "capturable": {"capturable": True},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_what_is_built_or_bound_in_inference_mode_can_be_updated(lone_rank, settings):
    with torch.inference_mode():
        built_inside = EMA_FSDP(nn.Linear(4, 4).bfloat16(), DECAY, **settings)
    model = fully_shard(nn.Linear(4, 4).bfloat16())
    ema = EMA_FSDP(model, DECAY, **settings)
    for name, average in ema.shadow.items():
        assert not average.is_inference(), name
    model(torch.randn(2, 4).bfloat16())  # the first forward of FSDP2 cannot be in inference mode
    with torch.inference_mode():
        model(torch.randn(2, 4).bfloat16())
        with ema.swapped_into(model):
            pass
        ema.state_dict()
    ema.update(model)
    assert ema.num_updates == 1
    assert not any(average.is_inference() for average in built_inside.shadow.values())


# ---------------------------------------------------------------- decays of zero, values that are not finite


@pytest.mark.parametrize("precision", ["fp32", "compensated"])
@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
def test_a_decay_of_zero_gives_the_live_weights_to_the_bit(precision, nonfinite):
    model = nn.Linear(1, 2, bias=False)
    nn.init.constant_(model.weight, 1000.0)
    ema = EMA_FSDP(model, DECAY, start_after=1, precision=precision, nonfinite=nonfinite)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.2345e-5], [float("nan") if nonfinite == "skip" else 3.0]]))
    ema.update(model)
    assert torch.equal(ema.shadow["weight"], torch.tensor([[1.2345e-5], [1000.0 if nonfinite == "skip" else 3.0]]))
    assert ema.num_skipped == (1 if nonfinite == "skip" else 0)


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_complex_element_is_skipped_as_a_whole_and_counted_once(decay):
    model = nn.Module()
    model.real, model.phase = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    ema = EMA_FSDP(model, decay, nonfinite="skip")
    nan = float("nan")
    with torch.no_grad():
        model.real.copy_(torch.tensor([1.0, nan, 2.0]))
        model.phase.copy_(torch.tensor([complex(nan, 4), complex(2, 6), complex(nan, nan), complex(1, float("inf"))]))
    ema.update(model)
    assert torch.equal(ema.shadow["real"], (1 - decay) * torch.tensor([1.0, 0.0, 2.0]))
    assert torch.equal(ema.shadow["phase"], (1 - decay) * torch.tensor([0, 2 + 6j, 0, 0], dtype=torch.complex64))
    assert ema.num_skipped == 4 == sum(ema.health(model).nonfinite.values())


def test_a_finite_value_beside_an_average_that_is_not_is_not_counted_as_skipped():
    model = nn.Linear(1, 1, bias=False)
    ema = EMA_FSDP(model, DECAY, nonfinite="skip")
    ema.shadow["weight"].fill_(float("nan"))
    ema.update(model)
    assert ema.num_skipped == 0


def test_health_looks_at_the_interval_of_the_updates():
    model = nn.Linear(8, 8)
    settings = {"decay": 1 - 1e-8, "update_every": 100_000}
    ema = EMA_FSDP(model, **settings)
    with torch.no_grad():
        model.weight.mul_(1.5)
    assert ema.health(model).stalled["weight"] == 0.0
    assert EMA_FSDP(model, 1 - 1e-8).health(model).stalled["weight"] == 0.0, "nothing differs yet"
    eager = EMA_FSDP(model, 1 - 1e-9)
    with torch.no_grad():
        model.weight.mul_(1.5)
    assert eager.health(model).stalled["weight"] == 1.0


# ---------------------------------------------------------------- ranks that hold different things


def worker_health_of_another_model() -> str:
    model = LAYOUTS["fsdp2"](Zoo())
    ema = EMA_FSDP(model, DECAY)
    other = LAYOUTS["fsdp2"](nn.Sequential(nn.Linear(4, 4)))
    return raised(lambda: ema.health(other if dist.get_rank() == 1 else model))


def test_a_wrong_model_on_one_rank_is_an_error_of_health_on_all(ranks):
    for rank, text in enumerate(ranks(2, worker_health_of_another_model)):
        assert re.search("ValueError: .*this is not the model that the EMA was built for", text), f"rank {rank}: {text}"


def worker_one_rank_of_ddp() -> list[str]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Zoo())
    if dist.get_rank() != 0:
        return []
    ema = EMA_FSDP(model, DECAY)
    return list(ema.full_state_dict(model))


def test_under_ddp_one_rank_may_average_and_export_alone(ranks):
    assert ranks(2, worker_one_rank_of_ddp)[0] == list(Zoo().state_dict())


def worker_stages(folder: str) -> tuple[str, list[str]]:
    """Two pipeline stages of two ranks each."""
    rank = dist.get_rank()
    meshes = [torch.distributed.device_mesh.DeviceMesh("cpu", ranks) for ranks in ([0, 1], [2, 3])]
    stage = nn.ModuleDict({f"stage{rank // 2}": fully_shard(nn.Linear(4, 4), mesh=meshes[rank // 2])})
    ema = EMA_FSDP([stage], DECAY)
    with torch.no_grad():
        for param in stage.parameters():
            param.add_(1.0)
    ema.update([stage])
    text = raised(lambda: ema.full_state_dict([stage]))
    dcp.save({"ema": ema}, checkpoint_id=folder)
    again = EMA_FSDP([stage], 0.5)
    dcp.load({"ema": again}, checkpoint_id=folder)
    managed = EMA_FSDP([stage], 0.5)
    save_checkpoint(f"{folder}/managed", model=[stage], ema=ema, step=1)
    load_checkpoint(f"{folder}/managed", model=[stage], ema=managed)
    return text, [
        name
        for name, average in ema.shadow.items()
        if not torch.equal(average, again.shadow[name]) or not torch.equal(average, managed.shadow[name])
    ]


def test_stages_on_other_ranks_are_saved_and_loaded_but_no_single_rank_gathers_them(ranks, tmp_path):
    for rank, (text, unequal) in enumerate(ranks(4, worker_stages, folder=str(tmp_path))):
        assert re.search("ValueError: .*rank 0 has no part of stage1.weight.*fsdp-ema export", text), (
            f"rank {rank}: {text}"
        )
        assert unequal == [], f"rank {rank}"
    export(tmp_path / "managed", tmp_path / "ema.safetensors")
    assert sorted(load_file(tmp_path / "ema.safetensors")) == [
        f"stage{n}.{what}" for n in (0, 1) for what in ("bias", "weight")
    ]
