"""The arithmetic of one update, against float64."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_ema_lib import averaging
from fsdp_ema_lib.averaging import average, plan

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)


def shadow_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def tensors(shapes, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, dtype=torch.promote_types(dtype, torch.float32), generator=generator).to(dtype)
        for shape in shapes
    ]


def wide(tensor):
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


@settings(deadline=None, max_examples=60)
@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=4),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3),
    decay=st.floats(0, 1),
    roomy=st.booleans(),
    low=st.booleans(),
    permuted=st.booleans(),
)
def test_an_update_equals_the_formula(shapes, dtypes, decay, roomy, low, permuted):
    live, shadow = [], []
    for number, dtype in enumerate(dtypes):
        live += tensors(shapes, dtype, seed=number)
        shadow += tensors(shapes, shadow_dtype(dtype), seed=number + 100)
    if permuted:  # strides that differ between the two
        live = [t.mT.contiguous().mT if t.dim() > 1 else t for t in live]
    lows = [torch.zeros_like(t) for t in shadow] if low else []
    expected = [decay * wide(s) + (1 - decay) * wide(t) for s, t in zip(shadow, live, strict=True)]
    average(plan(shadow, live, lows, roomy=roomy), torch.tensor(decay, dtype=torch.float64) if roomy else decay)
    for found, wanted in zip(shadow, expected, strict=True):
        torch.testing.assert_close(wide(found), wanted, rtol=3e-6, atol=3e-6)


@settings(deadline=None, max_examples=40)
@given(dtype=st.sampled_from(DTYPES), decay=st.floats(0, 1), roomy=st.booleans(), low=st.booleans())
def test_equal_weights_are_a_fixed_point_to_the_bit(dtype, decay, roomy, low):
    live = tensors([(33,), (4, 5)], dtype, seed=1)
    shadow = [t.to(shadow_dtype(dtype)) for t in live]
    before = [t.clone() for t in shadow]
    lows = [torch.zeros_like(t) for t in shadow] if low else []
    batches = plan(shadow, live, lows, roomy=roomy)
    for _ in range(3):
        average(batches, decay, skipped=torch.zeros((), dtype=torch.int64) if roomy else None)
    assert all(torch.equal(a, b) for a, b in zip(shadow, before, strict=True))
    assert all(not bool(t.any()) for t in lows)


@pytest.mark.parametrize("numel", [1, 255, 256, 257, 1000, 4096])
def test_pieces_at_the_edge_of_the_scratch_cover_every_element(monkeypatch, numel):
    monkeypatch.setattr(averaging, "CPU_SCRATCH_BYTES", 1024)  # 256 fp32 elements
    live = [*tensors([(numel,), (3,), (numel, 2)], torch.bfloat16, seed=2), torch.randn(2, numel, 3).bfloat16().mT]
    shadow = [torch.zeros(t.shape) for t in live]
    batches = plan(shadow, live)
    average(batches, 0.5)
    for found, current in zip(shadow, live, strict=True):
        assert torch.equal(found, 0.5 * current.float())
    places = [place for batch in batches for place in batch.scratch]
    assert sum(place.numel() for place in places) == sum(t.numel() for t in live)
    assert len({batch.room.untyped_storage().data_ptr() for batch in batches}) == 1, "one scratch serves them all"


def test_updates_allocate_nothing_of_the_size_of_a_tensor():
    live, shadow = [torch.randn(1 << 20).bfloat16()], [torch.zeros(1 << 20)]
    batches = plan(shadow, live)
    with torch.profiler.profile(profile_memory=True) as profile:
        average(batches, 0.9)
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in profile.events())
    assert allocated < 4096, f"{allocated} bytes"


def test_a_decay_of_one_on_the_device_lets_nothing_through():
    live, shadow = tensors([(100,)], torch.float32, 3), tensors([(100,)], torch.float32, 4)
    before = shadow[0].clone()
    average(plan(shadow, live, roomy=True), torch.ones((), dtype=torch.float64))
    assert torch.equal(shadow[0], before)


MANY = [(3, 5), (7,), (averaging.CPU_GRAIN_ELEMENTS,)] * averaging.MANY_TENSORS


def test_many_small_tensors_are_averaged_by_several_threads_to_the_same_bits(monkeypatch):
    monkeypatch.setattr(averaging.torch, "get_num_threads", lambda: 3)
    live, shadow = tensors(MANY, torch.float32, 8), tensors(MANY, torch.float32, 9)
    alone = [torch.lerp(s, t, 1 - 0.9) for s, t in zip(shadow, live, strict=True)]
    batches = plan(shadow, live)
    assert [batch.elsewhere for batch in batches] == [False, True, True, False]
    assert sum(len(batch.shadow) for batch in batches) == len(MANY)
    average(batches, 0.9)
    assert all(torch.equal(a, b) for a, b in zip(alone, shadow, strict=True))


@pytest.mark.parametrize("shapes", [[(64, 64), (64,)], [(64, 64)] * 3 + [(2,)], [(2,)]], ids=str)
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_every_thread_gets_about_as_much_to_do(monkeypatch, shapes, threads):
    monkeypatch.setattr(averaging.torch, "get_num_threads", lambda: threads)
    shadow = tensors(shapes * averaging.MANY_TENSORS, torch.float32, 9)
    batches = plan(shadow, shadow)
    assert [id(t) for batch in batches for t in batch.shadow] == [id(t) for t in shadow]
    costs = [sum(t.numel() + averaging.CPU_CALL_ELEMENTS for t in batch.shadow) for batch in batches]
    assert len(costs) == threads
    assert max(costs) < 1.02 * min(costs)


def test_more_threads_than_tensors_to_share():
    shares = averaging._shares([(torch.zeros(n),) for n in (30000, 1, 1)], 16)
    assert [len(share) for share in shares] == [1, 1, 1]


def test_an_error_in_another_thread_is_raised(monkeypatch):
    monkeypatch.setattr(averaging.torch, "get_num_threads", lambda: 2)
    live, shadow = tensors(MANY, torch.float32, 8), tensors(MANY, torch.float32, 9)
    batches = plan(shadow, live)
    next(batch for batch in batches if batch.elsewhere).live[0] = torch.zeros(2)
    with pytest.raises(RuntimeError, match="must match the size"):
        average(batches, 0.9)


def test_a_forked_child_averages_with_threads_of_its_own():
    script = """
import os, torch
from fsdp_ema_lib.averaging import MANY_TENSORS, average, plan
torch.set_num_threads(2)
live, shadow = [torch.ones(4)] * 2 * MANY_TENSORS, [torch.zeros(4) for _ in range(2 * MANY_TENSORS)]
batches = plan(shadow, live)
assert any(batch.elsewhere for batch in batches)
average(batches, 0.5)
if (child := os.fork()) == 0:
    average(batches, 0.5)
    print(shadow[0][0].item(), shadow[-1][0].item(), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "0.75 0.75\n", done.stderr


def test_compiled_updates_follow_the_formula_and_a_changing_decay():
    shapes = [(37, 11), (5,), (64,)]
    live = (
        tensors(shapes, torch.bfloat16, 5) + tensors(shapes, torch.float32, 6) + tensors(shapes[:1], torch.float64, 7)
    )
    shadow = [t.to(shadow_dtype(t.dtype)) * 2 for t in live]
    expected = [wide(t).clone() for t in shadow]
    batches = plan(shadow, live, compiled=True)
    for decay in (0.9, 0.99, 0.5, 0.999):
        average(batches, decay)
        expected = [decay * e + (1 - decay) * wide(t) for e, t in zip(expected, live, strict=True)]
    for found, wanted in zip(shadow, expected, strict=True):
        torch.testing.assert_close(wide(found), wanted, rtol=1e-6, atol=1e-6)


def test_a_missing_compiler_is_named_and_nothing_changes(tmp_path):
    script = """
import torch
from torch import nn
from fsdp_ema_lib import EMA_FSDP
model = nn.Linear(40, 30)
ema = EMA_FSDP(model, 0.5, compile=True)
with torch.no_grad():
    model.weight.add_(1)
before = ema.shadow["weight"].clone()
try:
    ema.update(model)
except RuntimeError as problem:
    print(problem)
print("unchanged", torch.equal(before, ema.shadow["weight"]), ema.num_updates)
"""
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TMPDIR": str(tmp_path), "HOME": str(tmp_path)}
    env = os.environ | caches | {"CXX": "/nowhere/c++", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert "On a CPU it needs a C++ compiler (install g++, or name one in the environment variable CXX)" in done.stdout
    assert "unchanged True 0" in done.stdout, done.stderr
    assert "compiling the update of 2 tensors" in done.stderr
