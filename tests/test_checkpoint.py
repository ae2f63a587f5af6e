"""Checkpoints of one directory: bit-equal resume, resharding, strict and kind errors."""

import itertools
import json
import os
import random
import re
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from trainings import FEATURES, Training, differences, small_model
from zoo import FOUR_RANKS_ONLY, LAYOUTS

from fsdp_ema_lib import checkpoint, checkpoint_state, storage
from fsdp_ema_lib.checkpoint import fsdp_state_dict, load_checkpoint, save_checkpoint
from fsdp_ema_lib.ema import EMA_FSDP

RESUMED = ("plain", "ddp", "fsdp1_full", "fsdp1_no_shard", "fsdp1_no_mesh", "fsdp1_flat", "fsdp2", "fsdp2_nested")


def layouts_for(world_size: int) -> list[str]:
    return [name for name in LAYOUTS if world_size == 4 or name not in FOUR_RANKS_ONLY]


def worker_resume(layouts: list[str], dtype: torch.dtype, folder: str) -> dict[str, list[str]]:
    """Save in mid-training, go on; then load into another training and go on from there."""
    problems = {}
    for layout in layouts:
        path = f"{folder}/{layout}"
        first = Training(layout, dtype).train(3)
        save_checkpoint(path, **first.parts(), step=3, extra={"epoch": 1})
        saved = first.local_state()
        first.train(4)
        other = Training(layout, dtype, seed=1).train(1)
        found = load_checkpoint(path, **other.parts())
        lines = differences(other.local_state(), saved)
        other.train(4)
        lines += [f"after going on: {line}" for line in differences(other.local_state(), first.local_state())]
        if found != {"step": 3, "extra": {"epoch": 1}}:
            lines.append(f"returned {found}")
        fresh = Training(layout, dtype, seed=2)  # an optimizer without any state yet
        load_checkpoint(path, **fresh.parts())
        lines += [f"into a fresh one: {line}" for line in differences(fresh.local_state(), saved)]
        if lines:
            problems[layout] = lines
    return problems


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_resumed_training_is_bit_equal_to_an_undisturbed_one(ranks, tmp_path, world_size, dtype):
    layouts = [name for name in RESUMED if not (world_size == 1 and name == "fsdp1_no_mesh")]
    for rank, problems in enumerate(
        ranks(world_size, worker_resume, layouts=layouts, dtype=dtype, folder=str(tmp_path))
    ):
        assert problems == {}, f"rank {rank}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_layout_resumes_bit_equal(ranks, tmp_path, world_size, dtype):
    for layout in layouts_for(world_size):
        results = ranks(world_size, worker_resume, layouts=[layout], dtype=dtype, folder=str(tmp_path))
        assert all(problems == {} for problems in results), results


# ---------------------------------------------------------------- resharding


def worker_save(layouts: list[str], folder: str, features: tuple[str, ...]) -> None:
    for layout in layouts:
        training = Training(layout, features=features, groups=1).train(3)
        save_checkpoint(f"{folder}/{layout}", **training.parts(), step=3)
        if full := training.full_state():
            torch.save(full, f"{folder}/{layout}.expected")


def worker_reshard(sources: list[str], target: str, folder: str, features: tuple[str, ...]) -> dict[str, list[str]]:
    """Load every source into the target; on rank 0, where what is gathered then differs, by source."""
    found = {}
    training = Training(target, seed=1, features=features, groups=1).train(1)
    for source in sources:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*no random state for this one")
            load_checkpoint(f"{folder}/{source}", **training.parts())
        if full := training.full_state():
            found[source] = differences(full, torch.load(f"{folder}/{source}.expected", weights_only=True))
    return found


def check_resharding(ranks, tmp_path, sources, targets, features=FEATURES):
    """`sources` and `targets`: world size -> layouts."""
    for world_size, layouts in sources.items():
        folder = tmp_path / str(world_size)
        folder.mkdir()
        ranks(world_size, worker_save, layouts=layouts, folder=str(folder), features=features)
    for from_world, to_world in itertools.product(sources, targets):
        for target in targets[to_world]:
            folder = str(tmp_path / str(from_world))
            found = ranks(
                to_world, worker_reshard, sources=sources[from_world], target=target, folder=folder, features=features
            )[0]
            assert len(found) == len(sources[from_world])
            for source, lines in found.items():
                assert lines == [], f"{source} on {from_world} -> {target} on {to_world}"


def test_what_one_layout_saved_loads_bit_equal_under_another(ranks, tmp_path):
    layouts = ["plain", "ddp", "fsdp1_nested", "fsdp1_no_mesh", "fsdp1_flat", "fsdp2_nested"]
    check_resharding(ranks, tmp_path, {1: ["plain"], 2: layouts}, {1: ["plain", "ddp"], 2: layouts})


def test_hybrid_layouts_of_four_ranks_load_on_two(ranks, tmp_path):
    check_resharding(ranks, tmp_path, {4: ["fsdp1_hybrid_full", "hsdp", "fsdp2_nested"]}, {2: ["fsdp1_full", "fsdp2"]})


def test_parameters_in_another_memory_order_load_bit_equal(ranks, tmp_path):
    """FSDP1 cuts channels_last parameters in storage order; fully_shard takes none."""
    layouts = {1: ["plain"], 2: ["ddp", "fsdp1_full"]}
    check_resharding(ranks, tmp_path, layouts, layouts, features=("channels_last", "transposed"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("to_world", [1, 2, 3, 4])
@pytest.mark.parametrize("from_world", [1, 2, 3, 4])
def test_every_layout_loads_what_any_other_saved(ranks, tmp_path, from_world, to_world):
    sources, targets = ({n: layouts_for(n)} for n in (from_world, to_world))
    check_resharding(ranks, tmp_path, sources, targets)


# ---------------------------------------------------------------- what is saved


def worker_random_states(folder: str) -> list[str]:
    rank = dist.get_rank()
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(10 + rank)
    random.gauss(0, 1), np.random.randn()  # half of a pair is kept back
    save_checkpoint(folder, model=model, optimizer=optimizer)

    def draw():
        return [float(torch.rand(())), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]

    expected = draw()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(99)
    load_checkpoint(folder, model=model, optimizer=optimizer)
    found = draw()
    return [f"{a} != {b}" for a, b in zip(found, expected, strict=True) if a != b] + (
        [] if rank == 0 or found != draw() else ["constant"]
    )


def test_every_rank_gets_its_own_random_states_back(ranks, tmp_path):
    assert ranks(2, worker_random_states, folder=str(tmp_path / "saved")) == [[], []]


def test_more_ranks_than_were_saved_keep_their_random_states_and_say_so(tmp_path, ranks):
    training = Training("plain").train(1)
    save_checkpoint(tmp_path / "one", **training.parts())
    texts = ranks(2, worker_warnings, folder=str(tmp_path / "one"))
    assert texts[0] == []
    assert len(texts[1]) == 1 and "rank 1: the checkpoint was saved by 1 ranks and has no random state" in texts[1][0]


def worker_warnings(folder: str) -> list[str]:
    training = Training("ddp", seed=1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        load_checkpoint(folder, **training.parts())
    return [str(w.message) for w in seen if "random state" in str(w.message)]


def test_settings_of_each_group_and_several_averages_come_back(tmp_path):
    model = small_model()
    averages = {"slow": EMA_FSDP(model, 0.99), "fast": EMA_FSDP(model, 0.5, precision="compensated")}
    optimizer = torch.optim.AdamW(
        [
            {"params": model[0].parameters(), "lr": 0.1},
            {"params": model[1].parameters(), "lr": 0.2, "betas": (0.1, 0.2)},
        ]
    )
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    for average in averages.values():
        average.update(model)
    save_checkpoint(tmp_path / "a", model=model, optimizer=optimizer, ema=averages, step=5, extra={"x": [1, None, "ü"]})
    other = small_model()
    loaded = {"fast": EMA_FSDP(other, 0.1, precision="compensated"), "slow": EMA_FSDP(other, 0.1)}
    groups = [{"params": [*other[1].parameters()]}, {"params": [*other[0].parameters()]}]  # in another order
    again = torch.optim.AdamW(groups, lr=1.0)
    found = load_checkpoint(tmp_path / "a", model=other, optimizer=again, ema=loaded)
    assert found == {"step": 5, "extra": {"x": [1, None, "ü"]}}
    assert [(g["lr"], g["betas"]) for g in again.param_groups] == [(0.2, (0.1, 0.2)), (0.1, (0.9, 0.999))]
    assert torch.equal(again.state[other[1].bias]["exp_avg"], optimizer.state[model[1].bias]["exp_avg"])
    for name in averages:
        assert (loaded[name].decay, loaded[name].num_updates) == (averages[name].decay, 1)
        assert all(torch.equal(loaded[name].shadow[n], v) for n, v in averages[name].shadow.items())
    alone = {"fast": EMA_FSDP(small_model(), 0.3, precision="compensated")}
    load_checkpoint(tmp_path / "a", ema=alone)  # one average alone, without a model
    assert torch.equal(alone["fast"].shadow["0.weight"], averages["fast"].shadow["0.weight"])
    third = small_model()
    load_checkpoint(tmp_path / "a", model=third)  # the model alone
    assert torch.equal(third[0].weight, model[0].weight)


class Position:
    """A sampler that is somewhere."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class WithExtraState(nn.Linear):
    note = "first"

    def get_extra_state(self):
        return {"note": self.note, "seen": {1, 2}}

    def set_extra_state(self, state):
        self.note = state["note"]


def worker_positions(folder: str) -> list:
    sampler, model = Position(10 + dist.get_rank()), nn.Sequential(WithExtraState(2, 2))
    model[0].note = "saved"
    save_checkpoint(folder, model=model, sampler=sampler)
    other, again = Position(0), nn.Sequential(WithExtraState(2, 2))
    load_checkpoint(folder, model=again, sampler=other)
    return [other.at, again[0].note]


def test_each_rank_gets_its_sampler_back_and_modules_their_extra_state(ranks, tmp_path):
    assert ranks(2, worker_positions, folder=str(tmp_path / "a")) == [[10, "saved"], [11, "saved"]]
    with pytest.raises(
        ValueError, match=r"sampler: each of 2 ranks saved its own position, which 1 ranks cannot share"
    ):
        load_checkpoint(tmp_path / "a", sampler=Position(0))


def test_parameters_without_state_stay_without_and_half_a_state_is_refused(tmp_path):
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model[0](torch.randn(2, 4)).sum().backward()  # the second layer is not used
    optimizer.step()
    save_checkpoint(tmp_path / "a", model=model, optimizer=optimizer)
    other = small_model()
    again = torch.optim.AdamW(other.parameters())
    load_checkpoint(tmp_path / "a", model=other, optimizer=again)
    assert set(again.state) == {other[0].weight, other[0].bias}
    del optimizer.state[model[0].weight]["exp_avg_sq"]
    save_checkpoint(tmp_path / "b", model=model, optimizer=optimizer)
    with pytest.raises(
        ValueError, match=r"optimizer: 0.weight: the checkpoint holds its exp_avg, step, but not its exp_"
    ):
        load_checkpoint(tmp_path / "b", model=other, optimizer=again)


# ---------------------------------------------------------------- errors


def saved_small(tmp_path):
    model = small_model()
    ema = EMA_FSDP(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    path = tmp_path / "saved"
    save_checkpoint(path, model=model, optimizer=optimizer, ema=ema, step=1)
    return path, model


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.add_module("0", nn.Linear(4, 5))
        self.add_module("1", nn.Linear(3, 2).to(torch.bfloat16))
        self.aux_head = nn.Linear(2, 2)


def test_everything_that_does_not_fit_is_in_one_error_and_nothing_changes(tmp_path):
    path, _ = saved_small(tmp_path)
    other = Other()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    random_state = torch.get_rng_state()
    with pytest.raises(ValueError) as caught:
        load_checkpoint(path, model=other)
    for line in (
        r"model.0.weight: the checkpoint holds \(3, 4\), \(5, 4\) was expected",
        r"model.0.bias: the checkpoint holds \(3,\), \(5,\) was expected",
        r"model.1.weight: the checkpoint holds torch.float32, torch.bfloat16 was expected",
        r"model.aux_head.weight: missing in the checkpoint; \(2, 2\) was expected",
        r"Nothing was changed.*allow_missing=\[...\]",
    ):
        assert re.search(line, str(caught.value)), f"{line} not in {caught.value}"
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())
    assert torch.equal(random_state, torch.get_rng_state())


def test_missing_and_unexpected_entries_are_allowed_by_pattern(tmp_path):
    path, model = saved_small(tmp_path)
    wider = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 2))
    ema, optimizer = EMA_FSDP(wider), torch.optim.AdamW(wider.parameters())
    kept = ema.shadow["2.weight"].clone()
    with pytest.raises(ValueError, match="ema.0.shadow.2.weight: missing"):
        load_checkpoint(path, model=wider, ema=ema, optimizer=optimizer)
    load_checkpoint(path, model=wider, ema=ema, optimizer=optimizer, allow_missing=["2.*"])
    assert torch.equal(wider[1].weight, model[1].weight) and torch.equal(ema.shadow["2.weight"], kept)
    assert torch.equal(ema.shadow["1.weight"], model[1].weight.float()) is False  # one step lies between
    narrow = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(ValueError, match="model.1.bias: in the checkpoint, not expected here"):
        load_checkpoint(path, model=narrow)
    load_checkpoint(path, model=narrow, ema=EMA_FSDP(narrow), allow_unexpected=["1.*"])
    assert torch.equal(narrow[0].weight, model[0].weight)


def test_a_scheduler_of_another_class_is_listed_with_the_rest_and_nothing_changes(tmp_path):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    save_checkpoint(tmp_path / "a", model=model, optimizer=optimizer, scheduler=scheduler, sampler=Position(1))
    other = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 2))
    again = torch.optim.SGD(other[:2].parameters(), 0.2)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ValueError) as caught:
        load_checkpoint(
            tmp_path / "a",
            model=other,
            optimizer=again,
            scheduler=torch.optim.lr_scheduler.LambdaLR(again, lambda step: 1.0),
            sampler=Bad(1),
        )
    for line in (
        "scheduler: the checkpoint holds the state of StepLR, this is LambdaLR",
        "sampler: the checkpoint holds the state of Position, this is Bad",
        "model.2.weight: missing in the checkpoint",
    ):
        assert line in str(caught.value)
    assert all(torch.equal(before[name], value) for name, value in other.state_dict().items())


class Refusing(Position):
    def load_state_dict(self, state):
        raise KeyError("nothing that I know")


def worker_refuses(folder: str) -> list:
    training = Training("ddp").train(1)
    save_checkpoint(folder, **training.parts(), sampler=Refusing(0))
    other = Training("ddp", seed=1).train(2)
    kind = Refusing if dist.get_rank() == 1 else type("Refusing", (Position,), {})
    before = other.local_state()
    try:
        load_checkpoint(folder, model=other.model, optimizer=other.optimizer, ema=other.ema, sampler=kind(0))
    except ValueError as problem:
        return [str(problem), differences(other.local_state(), before)]
    return ["no error"]


def test_where_one_rank_cannot_take_a_state_no_rank_changes_its_model(ranks, tmp_path):
    for text, changed in ranks(2, worker_refuses, folder=str(tmp_path / "a")):
        assert "sampler: Refusing did not take its state from the checkpoint (KeyError('nothing that I know'))" in text
        assert changed == []


def test_parameters_that_only_the_saved_optimizer_held_are_named(tmp_path):
    path, model = saved_small(tmp_path)
    part = torch.optim.AdamW(model[0].parameters())
    with pytest.raises(ValueError, match="optimizer: 1.weight: in the checkpoint, but this optimizer") as caught:
        load_checkpoint(path, model=model, optimizer=part)
    assert "optimizer: 1.bias: in the checkpoint" in str(caught.value) and "0." not in str(caught.value)
    assert not part.state
    load_checkpoint(path, model=model, optimizer=part, allow_unexpected=["1.*"])
    assert set(part.state) == set(model[0].parameters())


def test_a_part_of_the_state_that_is_lost_for_all_parameters_is_named(tmp_path, monkeypatch):
    path, model = saved_small(tmp_path)
    read = checkpoint.read_metadata

    def without(path):
        metadata = read(path)
        for name in [name for name in metadata.state_dict_metadata if name.endswith(".exp_avg_sq")]:
            del metadata.state_dict_metadata[name]
        return metadata

    monkeypatch.setattr(checkpoint, "read_metadata", without)
    with pytest.raises(ValueError, match=r"optimizer: 0.bias: the checkpoint holds its .*, but not its exp_avg_sq"):
        load_checkpoint(path, model=model, optimizer=torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("entry", ["python", "python_gauss", "numpy", "numpy_gauss", "torch"])
def test_a_damaged_random_state_is_found_before_anything_changes(tmp_path, monkeypatch, entry):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = checkpoint_state.random_state()
    damaged = state | {entry: torch.full_like(state[entry], -1 if entry in ("python", "numpy") else 255)}
    monkeypatch.setattr(checkpoint_state, "random_state", lambda: damaged)
    save_checkpoint(tmp_path / "a", model=model, optimizer=optimizer)
    monkeypatch.undo()
    with torch.no_grad():
        model[0].weight.zero_()
    if entry.endswith("gauss"):  # any number is one
        load_checkpoint(tmp_path / "a", model=model, optimizer=optimizer)
        return
    with pytest.raises(storage.DamagedCheckpointError, match=r"rng.rank0: no state of a random generator: .*Er"):
        load_checkpoint(tmp_path / "a", model=model, optimizer=optimizer)
    assert not model[0].weight.any()


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda m: {"extra": {"a": object()}}, TypeError, "extra is dict, only tensors and plain"),
        (lambda m: {"scheduler": Bad(lambda: 1)}, TypeError, "scheduler cannot be saved, because no load would accept"),
        (lambda m: {"scheduler": Bad(os.system)}, TypeError, "scheduler cannot be saved.*refused posix.system"),
        (lambda m: {"sampler": Bad(random.Random(1))}, TypeError, "sampler.rank0 cannot be saved.*random.Random"),
        (lambda m: {"ema": {"a.b": EMA_FSDP(m)}}, ValueError, "name must be letters, digits, _ and -, got 'a.b'"),
        (lambda m: {"ema": 3}, TypeError, "'int' object is not iterable"),
        (
            lambda m: {"optimizer": torch.optim.SGD(small_model().parameters(), 0.1)},
            ValueError,
            r"these parameters are not the model's:\nparam_groups\[0\]\['params'\]\[0\], of shape \(3, 4\)",
        ),
    ],
)
def test_a_save_refuses_what_a_load_would_refuse(tmp_path, make, error, text):
    model = small_model()
    with pytest.raises(error, match=text):
        save_checkpoint(tmp_path / "a", **({"model": model} | make(model)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("step", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_step_that_is_no_count_is_refused_before_anything_is_written(tmp_path, step, error):
    with pytest.raises(error, match=f"step must be .*, got {step}"):
        save_checkpoint(tmp_path / "a", model=small_model(), step=step)
    assert list(tmp_path.iterdir()) == []


class Labelled(torch.Tensor):
    """A tensor with a class of its own, which a load would have to import."""


def test_a_tensor_of_another_class_is_refused_by_name(tmp_path):
    model = small_model()
    model.register_buffer("scale", torch.ones(2).as_subclass(Labelled))
    with pytest.raises(TypeError, match="model.scale cannot be saved, .* its values are a Labelled, a plain tensor"):
        save_checkpoint(tmp_path / "a", model=model)
    assert list(tmp_path.iterdir()) == []


class Bad:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        raise AssertionError("never reached")


def test_nothing_is_saved_or_loaded_while_an_average_is_in_the_model(tmp_path):
    path, model = saved_small(tmp_path)
    ema = EMA_FSDP(model)
    with ema.swapped_into(model):
        with pytest.raises(RuntimeError, match="ema '0' is swapped into the model at this moment"):
            save_checkpoint(tmp_path / "b", model=model, ema=ema)
        with pytest.raises(RuntimeError, match="ema '0' is swapped into the model at this moment"):
            load_checkpoint(path, model=model, ema=ema)
    assert not (tmp_path / "b").exists()


def worker_errors(folder: str) -> list[str]:
    """Errors that only one rank meets reach every rank."""
    texts = []
    model = small_model()
    rank = dist.get_rank()
    save_checkpoint(f"{folder}/a", model=model)
    for attempt in (
        lambda: save_checkpoint(f"{folder}/a", model=model),
        lambda: save_checkpoint(f"{folder}/b", model=model, scheduler=Bad(len) if rank == 0 else None),
        lambda: load_checkpoint(f"{folder}/missing", model=model),
        lambda: load_checkpoint(f"{folder}/a", model=model if rank == 0 else Other()),
    ):
        try:
            attempt()
            texts.append("no error")
        except Exception as problem:
            texts.append(f"{type(problem).__name__}: {problem}")
    return texts


def test_errors_of_one_rank_are_raised_on_all(ranks, tmp_path):
    expected = [
        "FileExistsError: .*/a exists; a checkpoint is never written over",
        "TypeError: .*scheduler cannot be saved",
        "FileNotFoundError: .*/missing: no manifest.json, so there is no whole checkpoint here",
        "ValueError: .*model.aux_head.weight: missing in the checkpoint",
    ]
    for rank, texts in enumerate(ranks(2, worker_errors, folder=str(tmp_path))):
        for text, pattern in zip(texts, expected, strict=True):
            assert re.match(f"(?s){pattern}", text), f"rank {rank}: {text}"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_later_format_is_refused_by_its_number(tmp_path):
    path, model = saved_small(tmp_path)
    manifest = json.loads((path / storage.MANIFEST).read_text())
    (path / storage.MANIFEST).write_text(json.dumps(manifest | {"format_version": 99}))
    with pytest.raises(ValueError, match="has format 99, this library reads up to 1: update"):
        load_checkpoint(path, model=model)


def worker_full(layout: str) -> list[str]:
    training = Training(layout).train(1)
    full = fsdp_state_dict(training.model)
    from zoo import full_live_weights

    expected = full_live_weights(training.model)
    return [n for n in full if n in expected and not torch.equal(full[n], expected[n])] + [str(len(full))]


@pytest.mark.parametrize("layout", ["plain", "fsdp1_nested", "fsdp2_nested"])
def test_full_live_weights_come_to_rank_zero(ranks, layout):
    results = ranks(2, worker_full, layout=layout)
    assert [int(result[-1]) > 0 for result in results] == [True, False]
    assert all(len(result) == 1 for result in results)
