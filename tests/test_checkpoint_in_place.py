"""A load reads into what is in use: no room for a second state, and nothing changes before all of it could be read."""

import errno
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from memory import peak_rise
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from trainings import Training, differences, small_model

from fsdp_ema_lib import safe_reading
from fsdp_ema_lib.checkpoint import load_checkpoint, save_checkpoint
from fsdp_ema_lib.checkpoint_manager import CheckpointManager
from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.ema_state import local_of
from fsdp_ema_lib.layout import Layout
from fsdp_ema_lib.storage import DamagedCheckpointError

LAYOUTS = ("ddp", "fsdp1_full", "fsdp1_flat", "fsdp2_nested")


def addresses(training: Training) -> dict[str, int]:
    """Where each tensor of the optimizer's and the average's state lies."""
    states = training.optimizer.state.values()
    moments = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]
    found = {f"state {number}": local_of(tensor).data_ptr() for number, tensor in enumerate(moments)}
    return found | {name: tensor.data_ptr() for name, tensor in training.ema.shadow.items()}


def worker_addresses(layouts: list[str], folder: str) -> dict[str, list[str]]:
    problems = {}
    for layout in layouts:
        first = Training(layout).train(3)
        save_checkpoint(f"{folder}/{layout}", **first.parts())
        other = Training(layout, seed=1).train(1)
        before = addresses(other)
        load_checkpoint(f"{folder}/{layout}", **other.parts())
        lines = differences(other.local_state(), first.local_state())
        lines += [f"{name} lies elsewhere" for name, place in addresses(other).items() if place != before[name]]
        if lines:
            problems[layout] = lines
    return problems


def test_averages_and_moments_stay_where_they_are(ranks, tmp_path):
    for rank, problems in enumerate(ranks(2, worker_addresses, layouts=list(LAYOUTS), folder=str(tmp_path))):
        assert problems == {}, f"rank {rank}"


def test_a_load_takes_room_for_no_second_state(tmp_path):
    model = nn.Sequential(*(nn.Linear(1448, 1448, bias=False) for _ in range(4)))  # 8 MiB each
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    parts = {"model": model, "optimizer": optimizer, "ema": EMA_FSDP(model)}
    save_checkpoint(tmp_path / "a", **parts)
    assert peak_rise(lambda: load_checkpoint(tmp_path / "a", **parts)) < 16  # MiB, of 128


# ---------------------------------------------------------------- what cannot be read


def worker_cannot_read(layout: str, folder: str, every: int) -> tuple[list[str], int, int]:
    """Let one rank's disk fail at every so many of its reads, and see what a load leaves.

    Returns:
        What is wrong, and how many loads failed before and after the first change.
    """
    first = Training(layout).train(2)
    save_checkpoint(folder, **first.parts())
    other = Training(layout, seed=1).train(1)
    before, problems, number, mixed, failing = other.local_state(), [], 0, 0, dist.get_rank() == 1
    read_bytes = safe_reading.read_bytes
    while True:
        left = iter(range(number, -1, -1))

        def reading(*arguments, left=left):
            if failing and next(left, None) == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read_bytes(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(safe_reading, "read_bytes", reading)
            try:
                load_checkpoint(folder, **other.parts())
            except DamagedCheckpointError as problem:
                text = str(problem)
            else:
                return problems, number // every - mixed, mixed
        if "the disk cannot read it back" not in text:
            problems.append(f"read {number}: {text}")
        if "a mixture of what they were and of the checkpoint" in text:
            load_checkpoint(folder, **other.parts())
            problems += differences(other.local_state(), first.local_state())
            other = Training(layout, seed=1).train(1)
            before = other.local_state()
            mixed += 1
        else:
            problems += [f"read {number}: {line}" for line in differences(other.local_state(), before)]
        number += every


@pytest.mark.parametrize(
    ("layout", "every"),
    [
        ("fsdp1_full", 11),
        ("fsdp2_nested", 11),
        *(pytest.param(layout, 1, marks=pytest.mark.slow) for layout in LAYOUTS),
    ],
)
def test_a_disk_that_fails_at_any_read_leaves_all_as_it_was_or_says_that_it_does_not(ranks, tmp_path, layout, every):
    for problems, before, after in ranks(2, worker_cannot_read, layout=layout, folder=str(tmp_path / "a"), every=every):
        assert problems == []
        assert before > 20 // every and after > 20 // every


class CutsShort:
    """A scheduler whose `load_state_dict`, called between the two readings of a file, leaves its first bytes alone."""

    def __init__(self, file: Path | None = None) -> None:
        self.file = file

    def state_dict(self) -> dict[str, int]:
        return {"position": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.file is not None and self.file.exists():
            os.truncate(self.file, 64)


def worker_cut_short(folder: str) -> list:
    model = fully_shard(small_model())
    with CheckpointManager(folder) as checkpoints:
        states = []
        for step in (1, 2):
            with torch.no_grad():
                model[0].weight.add_(step)
            states.append({name: local_of(value).clone() for name, value in model.state_dict().items()})
            checkpoints.save(step, model=model, scheduler=CutsShort())
        file = checkpoints.path_of(2) / "__1_0.distcp" if dist.get_rank() == 1 else None
        other = fully_shard(small_model())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = checkpoints.load(model=other, scheduler=CutsShort(file), fall_back=True)
        said = [str(warning.message) for warning in caught if "going back" in str(warning.message)]
        now = {name: local_of(value) for name, value in other.state_dict().items()}
        return [found["step"], differences(now, states[0]), said]


def test_a_file_that_is_cut_off_between_the_two_readings_is_named_and_passed_over(tmp_path):
    model = small_model()
    with CheckpointManager(tmp_path) as checkpoints:
        for step in (1, 2):
            with torch.no_grad():
                model[0].weight.fill_(step)
            checkpoints.save(step, model=model, ema=EMA_FSDP(model), scheduler=CutsShort())
        file = checkpoints.path_of(2) / "__0_0.distcp"
        other = small_model()
        whole = file.read_bytes()
        with pytest.raises(DamagedCheckpointError, match="the file ends at byte") as caught:
            checkpoints.load(model=other, ema=EMA_FSDP(other), scheduler=CutsShort(file))
        assert str(file) in str(caught.value)
        assert "Model, optimizer and averages are a mixture of what they were and of the checkpoint" in str(
            caught.value
        )
        file.write_bytes(whole)
        with pytest.warns(UserWarning, match="going back to step 1"):
            found = checkpoints.load(model=other, ema=EMA_FSDP(other), scheduler=CutsShort(file), fall_back=True)
    assert found["step"] == 1
    assert torch.equal(other[0].weight, torch.ones(3, 4))


def test_ranks_pass_over_together_what_one_of_them_cannot_read_again(ranks, tmp_path):
    for step, lines, said in ranks(2, worker_cut_short, folder=str(tmp_path)):
        assert step == 1 and lines == []
        assert len(said) == 1 and "__1_0.distcp" in said[0]


# ---------------------------------------------------------------- tensors in use of every kind


def test_an_expanded_tensor_is_refused_by_name_before_anything_changes(tmp_path):
    model = small_model()
    model.register_buffer("scale", torch.ones(5))
    save_checkpoint(tmp_path / "a", model=model)
    model.scale = torch.zeros(1).expand(5)
    with torch.no_grad():
        model[0].weight.zero_()
    with pytest.raises(ValueError, match=r"model.scale: several of its elements share one place.*clone\(\) it"):
        load_checkpoint(tmp_path / "a", model=model)
    assert not model[0].weight.any()


def test_a_buffer_that_conjugates_or_negates_on_the_fly_is_filled(tmp_path):
    values = torch.randn(5, dtype=torch.complex64)
    model = small_model()
    model.register_buffer("turned", values.clone())
    model.register_buffer("part", values.imag.clone())
    save_checkpoint(tmp_path / "a", model=model)
    model.turned = torch.zeros(5, dtype=torch.complex64).conj()
    model.part = torch.zeros(5, dtype=torch.complex64).conj().imag
    assert model.turned.is_conj() and model.part.is_neg()
    load_checkpoint(tmp_path / "a", model=model)
    assert torch.equal(model.turned, values) and torch.equal(model.part, values.imag)


@pytest.mark.parametrize("inside", [True, False])
def test_what_was_made_in_inference_mode_is_filled(tmp_path, inside):
    model = small_model()
    model.register_buffer("columns", torch.arange(6.0).view(2, 3))
    save_checkpoint(tmp_path / "a", model=model)
    with torch.inference_mode():
        other = small_model()
        other.register_buffer("columns", torch.zeros(3, 2).T)  # in another order than in the file
        other[0].weight.zero_()
    with torch.inference_mode(inside):
        load_checkpoint(tmp_path / "a", model=other)
    assert differences(other.state_dict(), model.state_dict()) == []


def worker_partly_stepped(folder: str) -> list[bool]:
    """Load what was saved where one layer had no state, into an optimizer that has one for both in one tensor."""
    saved = small_model()
    optimizer = torch.optim.AdamW(saved.parameters())
    saved[0](torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        torch.save(optimizer.state[saved[0].weight]["exp_avg"], f"{folder}.expected")
    save_checkpoint(folder, model=saved, optimizer=optimizer)
    mesh = init_device_mesh("cpu", (1,))
    model = FullyShardedDataParallel(small_model(), device_mesh=mesh, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    load_checkpoint(folder, model=model, optimizer=optimizer)
    (flat,) = optimizer.state
    moments = {s.name: s.unit.slice(optimizer.state[flat]["exp_avg"], s.index) for s in Layout(model).shards.values()}
    expected = torch.load(f"{folder}.expected", weights_only=True)
    return [torch.equal(moments["0.weight"].view(3, 4), expected), not moments["1.weight"].any()]


def test_a_parameter_without_a_state_gets_none_from_before_in_a_flat_one(ranks, tmp_path):
    assert ranks(1, worker_partly_stepped, folder=str(tmp_path / "a")) == [[True, True]]


def test_any_error_while_values_are_put_in_place_says_that_they_are_a_mixture(tmp_path, monkeypatch):
    model = small_model()
    save_checkpoint(tmp_path / "a", model=model)
    fill = safe_reading._fill

    def out_of_memory(descriptor, **what):
        if what["item"].dest_index.fqn == "model.1.bias":
            raise torch.OutOfMemoryError("no room for the last")
        fill(descriptor, **what)

    monkeypatch.setattr(safe_reading, "_fill", out_of_memory)
    with pytest.raises(RuntimeError, match=r"no room for the last\nAll could be read.*are a mixture"):
        load_checkpoint(tmp_path / "a", model=small_model())


def test_a_backward_of_a_forward_from_before_the_load_is_refused(tmp_path):
    model = small_model()
    save_checkpoint(tmp_path / "a", model=model)
    loss = model(torch.ones(2, 4)).square().sum()
    load_checkpoint(tmp_path / "a", model=model)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_training_is_filled_on_its_device(tmp_path, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs CUDA")

    def training(seed: int) -> dict:
        torch.manual_seed(seed)
        model = small_model().to(device)
        model.register_buffer("columns", torch.randn(3, 2, device=device).T)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(2, 4, device=device)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer, "ema": EMA_FSDP(model)}

    def tensors(parts: dict) -> dict[str, torch.Tensor]:
        moments = {f"{n}.{k}": v for n, state in enumerate(parts["optimizer"].state.values()) for k, v in state.items()}
        return parts["model"].state_dict() | {f"ema.{n}": v for n, v in parts["ema"].shadow.items()} | moments

    saved, other = training(1), training(2)
    save_checkpoint(tmp_path / "a", **saved)
    places = {name: tensor.data_ptr() for name, tensor in tensors(other).items() if not name.endswith("step")}
    load_checkpoint(tmp_path / "a", **other)
    found = tensors(other)
    assert differences(found, tensors(saved)) == []
    assert {name: found[name].data_ptr() for name in places} == places
