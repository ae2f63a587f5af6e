"""EMA_FSDP in use: swapping, optimizers, awkward moments, wrappers, model parts, states."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from zoo import FOUR_RANKS_ONLY, LAYOUTS, SAME_DATA, Reference, Zoo, full_live_weights, parts_of, relative_error, train

from fsdp_ema_lib.decay import Constant, PowerFunction, Warmup
from fsdp_ema_lib.ema import EMA_FSDP

SHARDABLE = ("tied", "frozen", "buffers", "tiny")
DECAY = 0.9


def raised(call: Callable[[], object]) -> str:
    try:
        call()
    except (TypeError, ValueError, RuntimeError) as problem:
        return f"{type(problem).__name__}: {problem}"
    return "no error"


# ---------------------------------------------------------------- the average in the model


def worker_swap(layout: str, dtype: torch.dtype) -> list[str]:
    torch.manual_seed(0)
    problems = []
    model = LAYOUTS[layout](Zoo(SHARDABLE, dtype))
    ema = EMA_FSDP(model, DECAY)
    for _ in train(model, 3, same_data=True):  # buffers are per rank, and the export has rank 0's
        ema.update(model)
    x = torch.randn(4, 5).to(dtype)
    model.eval()

    def evaluate() -> torch.Tensor:
        with torch.no_grad():
            return model(x)

    evaluate()  # leaves an FSDP root unsharded: the swap must reach the next forward all the same
    live = full_live_weights(model)
    averaged = Zoo(SHARDABLE, dtype).eval()
    averaged.load_state_dict({k: v.to(live[k].dtype) for k, v in _everywhere(ema.full_state_dict(model)).items()})
    with CommDebugMode() as counted, ema.swapped_into(model):
        pass
    if counted.get_total_counts():
        problems.append("the swap communicated")
    with ema.swapped_into(model):
        inside = full_live_weights(model)
        for name, value in averaged.state_dict().items():
            if not torch.equal(inside[name], value):
                problems.append(f"{name}: the average is not in the model")
        with torch.no_grad():
            expected = averaged(x)
        coarse = dtype is torch.bfloat16 or layout.endswith("mixed")
        if not torch.allclose(evaluate().float(), expected.float(), atol=3e-2 if coarse else 1e-5):
            problems.append("the forward did not use the average")
        for what, call in {
            "update": lambda: ema.update(model),
            "reset": lambda: ema.reset(model),
            "health": lambda: ema.health(model),
            "swapped_into": lambda: ema.swapped_into(model).__enter__(),
            "copy_to": lambda: ema.copy_to(model),
        }.items():
            if not raised(call).startswith(f"RuntimeError: {what}: the average is in the model at this moment"):
                problems.append(f"{what} inside: {raised(call)}")
    problems += _changed(live, full_live_weights(model), "after the block")
    try:
        with ema.swapped_into(model):
            evaluate()
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        problems += _changed(live, full_live_weights(model), "after an interrupt in the block")
    before = evaluate()
    with ema.swapped_into(model):
        evaluate()
    if not torch.equal(before, evaluate()):
        problems.append("the forward after the block is not the one before it")
    ema.update(model)
    ema.copy_to(model)
    final = _everywhere(ema.full_state_dict(model))
    for name, value in full_live_weights(model).items():
        if not torch.equal(value, final[name].to(value.dtype)):
            problems.append(f"{name}: copy_to did not write the average")
    return problems


def _everywhere(full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    message = [full]
    dist.broadcast_object_list(message)
    return message[0]


def _changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], when: str) -> list[str]:
    return [f"{name}: not restored {when}" for name in before if not torch.equal(before[name], after[name])]


@pytest.mark.parametrize("layout", [n for n in LAYOUTS if n not in ("fsdp1_ignored", "tp")])
def test_the_average_swaps_in_and_the_live_weights_come_back(ranks, layout):
    for rank, problems in enumerate(ranks(_least_ranks(layout), worker_swap, layout=layout, dtype=torch.float32)):
        assert problems == [], f"rank {rank}"


def _least_ranks(layout: str) -> int:
    return 4 if layout in FOUR_RANKS_ONLY else 2


@pytest.mark.parametrize("layout", ["ddp", "fsdp1_full", "fsdp2"])
def test_a_bf16_model_comes_back_bit_for_bit(ranks, layout):
    for rank, problems in enumerate(ranks(2, worker_swap, layout=layout, dtype=torch.bfloat16)):
        assert problems == [], f"rank {rank}"


def worker_swap_before_the_first_forward(layout: str) -> list[str]:
    torch.manual_seed(0)
    model = LAYOUTS[layout](Zoo(SHARDABLE))
    ema = EMA_FSDP(model, DECAY)
    for average in ema.shadow.values():
        average.add_(1.0)
    wanted = _everywhere(ema.full_state_dict(model))
    live = full_live_weights(model)
    with ema.swapped_into(model):
        inside = full_live_weights(model)
    problems = [f"{name}: not swapped" for name in ema.shadow if not torch.equal(inside[name], wanted[name])]
    problems += _changed(live, full_live_weights(model), "before any forward")
    ema.copy_to(model)
    copied = full_live_weights(model)
    return problems + [f"{name}: not copied" for name in ema.shadow if not torch.equal(copied[name], wanted[name])]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_average_swaps_in_before_the_first_forward(ranks, layout):
    for rank, problems in enumerate(ranks(_least_ranks(layout), worker_swap_before_the_first_forward, layout=layout)):
        assert problems == [], f"rank {rank}"


def test_an_error_in_the_middle_of_the_swap_undoes_it(monkeypatch):
    model = Zoo()
    ema = EMA_FSDP(model, DECAY)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    live = {name: value.clone() for name, value in model.state_dict().items()}
    broken = ema._layout.shards["down.weight"]
    monkeypatch.setattr(broken, "live", lambda: (_ for _ in ()).throw(RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"), ema.swapped_into(model):
        raise AssertionError("the block must not run")
    assert all(torch.equal(live[name], value) for name, value in model.state_dict().items())
    monkeypatch.undo()
    ema.update(model)


# ---------------------------------------------------------------- optimizers


def test_attach_counts_real_steps_only():
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema, by_hand = EMA_FSDP(model, DECAY), EMA_FSDP(model, DECAY)
    ema.attach(optimizer)
    for _ in range(3):
        for _ in range(4):  # accumulated micro-batches
            model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        by_hand.update(model)
    assert ema.num_updates == 3
    assert torch.equal(ema.shadow["weight"], by_hand.shadow["weight"])
    assert raised(lambda: ema.attach(optimizer)).startswith("RuntimeError: attach: this EMA is attached")
    ema.detach(), ema.detach()
    optimizer.step()
    assert ema.num_updates == 3
    stranger = torch.optim.SGD(nn.Linear(3, 2).parameters(), lr=0.1)
    assert "it holds none of the parameters that this EMA tracks" in raised(lambda: ema.attach(stranger))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("decay", "every"), [(DECAY, 1), (Warmup(DECAY), 1), (DECAY, 2), (lambda n: DECAY ** (1 / n), 1)]
)
def test_steps_that_a_grad_scaler_skips_do_not_count(fused, decay, every):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    ema, by_hand = (EMA_FSDP(model, decay, update_every=every) for _ in range(2))
    ema.attach(optimizer)
    for step in range(6):
        loss = model(torch.randn(5, 3)).square().mean() * (float("inf") if step in (1, 4) else 1.0)
        scaler.scale(loss).backward()
        before = model.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before, model.weight) == (step in (1, 4))
        if step not in (1, 4):
            by_hand.update(model)
    assert ema.num_updates == by_hand.num_updates == 4
    # A gated update multiplies the difference by one before it is added: the same up to rounding.
    torch.testing.assert_close(ema.shadow["weight"], by_hand.shadow["weight"], rtol=1e-6, atol=1e-7)


# ---------------------------------------------------------------- count and decay on the device


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("settings", [{}, {"precision": "compensated"}, {"nonfinite": "skip"}], ids=str)
@pytest.mark.parametrize("decay", [DECAY, Warmup(0.99), PowerFunction(3.0)], ids=str)
def test_a_capturable_average_follows_the_same_formula(device, settings, decay):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    model = nn.Linear(30, 20, device=device)
    host, there = (EMA_FSDP(model, decay, start_after=2, capturable=c, **settings) for c in (False, True))
    for step in range(1, 9):
        with torch.no_grad():
            model.weight.normal_()
        host.update(model), there.update(model)
        assert there.num_updates == step
    torch.testing.assert_close(there.shadow["weight"], host.shadow["weight"], rtol=1e-6, atol=1e-6)
    again = EMA_FSDP(model, decay, capturable=True, **settings)
    again.load_state_dict(there.state_dict())
    assert again.num_updates == 8 and again.start_after == 2
    with torch.no_grad():
        model.weight.normal_()
    again.update(model), there.update(model)
    assert torch.equal(again.shadow["weight"], there.shadow["weight"])


def test_what_cannot_be_captured_is_refused_and_nothing_changes():
    model = nn.Linear(3, 2)
    assert raised(lambda: EMA_FSDP(model, DECAY, capturable=True, update_every=2)) == (
        "ValueError: update_every must be 1 with capturable=True, got 2: a captured update does the same work at every "
        "replay"
    )
    assert "is a plain callable, which only the host can evaluate" in raised(
        lambda: EMA_FSDP(model, lambda n: 0.5, capturable=True)
    )
    ema = EMA_FSDP(model, DECAY, capturable=True)
    assert "is a plain callable" in raised(lambda: setattr(ema, "decay", lambda n: 0.5))
    assert ema.decay == DECAY


@pytest.fixture
def no_host_sync():
    """CUDA raises where the host would wait for it."""
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "settings",
    [{}, {"nonfinite": "skip"}, {"precision": "compensated"}, {"capturable": True}, {"update_every": 3}],
    ids=str,
)
def test_an_update_on_cuda_never_waits_for_the_device(no_host_sync, dtype, settings):
    model = nn.Linear(300, 200, device="cuda", dtype=dtype)
    ema = EMA_FSDP(model, Warmup(0.99), **settings)
    for _ in range(6):
        ema.update(model)


@pytest.mark.gpu
@pytest.mark.parametrize("decay", [DECAY, PowerFunction(3.0)], ids=str)
def test_fused_steps_under_a_grad_scaler_never_wait_for_the_device(no_host_sync, decay):
    model = nn.Linear(30, 20, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    ema = EMA_FSDP(model, decay)
    ema.attach(optimizer)
    optimizer.grad_scale, optimizer.found_inf = None, torch.zeros((), device="cuda")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    for skipped in (False, True, False):
        optimizer.found_inf.fill_(float(skipped))
        optimizer.step()
    torch.cuda.set_sync_debug_mode("default")
    assert ema.num_updates == 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("decay", [DECAY, Warmup(0.99), PowerFunction(3.0)], ids=str)
def test_a_captured_update_replays_with_the_right_count_and_decay(decay, dtype):
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    model = nn.Linear(300, 200, device="cuda", dtype=dtype)
    by_hand, ema = EMA_FSDP(model, decay), EMA_FSDP(model, decay, capturable=True)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm up, as capturing demands
        ema.update(model)
    torch.cuda.current_stream().wait_stream(side)
    ema.reset(model)
    with torch.cuda.graph(graph):
        ema.update(model)
    for step in range(1, 8):
        with torch.no_grad():
            model.weight.normal_()
        graph.replay()
        by_hand.update(model)
        assert ema.num_updates == step
    torch.testing.assert_close(ema.shadow["weight"], by_hand.shadow["weight"], rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- the right moment


def worker_moments() -> dict[str, str]:
    texts = {}
    x = torch.randn(4, 5)

    model = fully_shard(Zoo(SHARDABLE))
    ema = EMA_FSDP(model, DECAY)
    reference = Reference(full_live_weights(model))
    for _ in train(model, 2):
        model(x)  # with gradients and without a backward: the root stays unsharded
        ema.update(model)
        reference.update(full_live_weights(model), DECAY)
    full = _everywhere(ema.full_state_dict(model))
    worst = max(relative_error(full[name], reference.average[name]) for name in ema.shadow)
    texts["fsdp2 unsharded"] = "right" if worst < 1e-6 else f"error {worst}"
    model(x)
    texts["fsdp2 built unsharded"] = "right" if set(EMA_FSDP(model).shadow) == set(ema.shadow) else "wrong names"

    sharded = LAYOUTS["fsdp1_full"](Zoo(SHARDABLE))
    ema = EMA_FSDP(sharded, DECAY)
    with FullyShardedDataParallel.summon_full_params(sharded):
        texts["fsdp1 update in summon"] = raised(lambda: ema.update(sharded))
        texts["fsdp1 built in summon"] = raised(lambda: EMA_FSDP(sharded))
        texts["fsdp1 swap in summon"] = raised(lambda: ema.swapped_into(sharded).__enter__())
    texts["fsdp1 after summon"] = raised(lambda: ema.update(sharded))

    half = LAYOUTS["fsdp1_grad_op"](Zoo(SHARDABLE))
    ema = EMA_FSDP(half, DECAY)
    reference = Reference(full_live_weights(half))
    for _ in train(half, 1):
        live = full_live_weights(half)
    loss = half(x).sum()
    ema.update(half)  # the modules hold unsharded views now
    reference.update(live, DECAY)
    loss.backward()
    full = _everywhere(ema.full_state_dict(half))
    worst = max(relative_error(full[name], reference.average[name]) for name in ema.shadow)
    texts["fsdp1 between forward and backward"] = "right" if worst < 1e-6 else f"error {worst}"
    return texts


def test_awkward_moments_are_handled_or_refused_by_name(ranks):
    for rank, texts in enumerate(ranks(2, worker_moments)):
        assert texts["fsdp2 unsharded"] == "right", f"rank {rank}"
        assert texts["fsdp2 built unsharded"] == "right", f"rank {rank}"
        for key in ("fsdp1 update in summon", "fsdp1 built in summon", "fsdp1 swap in summon"):
            expected = r"RuntimeError: the root module: FSDP1 holds .*inner.* unsharded .*leave summon_full_params"
            assert re.match(expected, texts[key]), f"rank {rank}, {key}: {texts[key]}"
        assert texts["fsdp1 between forward and backward"] == "right", f"rank {rank}"
        assert texts["fsdp1 after summon"] == "no error", f"rank {rank}"


def test_replaced_parameters_are_followed():
    model = Zoo(("buffers",))
    ema = EMA_FSDP(model, DECAY)
    reference = Reference(model.state_dict())

    def step() -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.5)
        ema.update(model)
        reference.update(model.state_dict(), DECAY)

    step()
    model.inner.weight = nn.Parameter(torch.randn(7, 5))
    step()
    model.outer = nn.Linear(7, 5)
    assert ema.num_updates == 2
    step()
    model.load_state_dict({k: v.clone() + 1 for k, v in model.state_dict().items()}, assign=True)
    step()
    model.up.weight.data = torch.randn(12, 5)
    step()
    model.to(torch.bfloat16)  # the average stays fp32
    step()
    for name, average in ema.shadow.items():
        assert average.dtype is torch.float32
        assert relative_error(average, reference.average[name]) < 1e-6, name
    model.to(torch.float64)
    assert "a parameter of torch.float64 needs torch.float64" in raised(lambda: ema.update(model))
    model.to(torch.float32)
    model.inner = nn.Linear(5, 8)
    assert "inner.weight: the average is of (7, 5), this model has (8, 5)" in raised(lambda: ema.update(model))
    del model.inner
    assert "inner.weight: in the model that the EMA was built for, not in this one" in raised(lambda: ema.update(model))


def worker_unfrozen(layout: str) -> list[str]:
    model = LAYOUTS[layout](Zoo(("frozen",)))
    ema = EMA_FSDP(model, DECAY)
    reference = Reference(full_live_weights(model))
    for _ in train(model, 2, same_data=True):
        ema.update(model)
        reference.update(full_live_weights(model), DECAY)
    next(m for n, m in model.named_modules() if n.endswith("frozen")).requires_grad_(True)
    for step in train(model, 3, same_data=True, seed=1):
        ema.update(model)
        live = full_live_weights(model)
        reference.update(live, DECAY)
        if step == 0:  # tracking starts at the weights of the first update that sees it trainable
            reference.average |= {n: v.double() for n, v in live.items() if n.startswith("frozen")}
    full = _everywhere(ema.full_state_dict(model))
    wrong = [n for n in ema.shadow if relative_error(full[n], reference.average[n]) > 1e-6]
    return wrong + ([] if "frozen.weight" in ema.shadow else ["frozen.weight is not tracked"])


@pytest.mark.parametrize("layout", ["plain", "fsdp1_full", "fsdp2"])
def test_a_parameter_that_becomes_trainable_is_tracked_from_then_on(ranks, layout):
    for rank, wrong in enumerate(ranks(2, worker_unfrozen, layout=layout)):
        assert wrong == [], f"rank {rank}"


def test_reset_starts_again_from_the_live_weights_with_the_same_settings():
    model = Zoo(("buffers",))
    schedule = PowerFunction(3.0)
    ema = EMA_FSDP(model, schedule, exclude=["up.*"], update_every=2, precision="compensated", nonfinite="skip")
    for _ in train(model, 4):
        ema.update(model)
    ema.reset(model)
    assert ema.num_updates == 0 and ema.decay == schedule
    assert (ema.update_every, ema.precision, ema.nonfinite) == (2, "compensated", "skip")
    assert "up.weight" not in ema.shadow
    assert all(torch.equal(average, model.state_dict()[name]) for name, average in ema.shadow.items())


# ---------------------------------------------------------------- wrappers and model parts


def _checkpointed(model: Zoo) -> Zoo:
    model.inner = checkpoint_wrapper(model.inner)
    model.outer = checkpoint_wrapper(model.outer)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "checkpoint, then fsdp1": lambda model: LAYOUTS["fsdp1_full"](_checkpointed(model)),
    "checkpoint, then fsdp2": lambda model: LAYOUTS["fsdp2_nested"](_checkpointed(model)),
    "fsdp1, then compile": lambda model: torch.compile(LAYOUTS["fsdp1_nested"](model), backend="eager"),
    "compile, then fsdp1": lambda model: LAYOUTS["fsdp1_full"](torch.compile(model, backend="eager")),
    "checkpoint, compile, ddp": lambda model: LAYOUTS["ddp"](torch.compile(_checkpointed(model), backend="eager")),
    "fsdp2, then compile": lambda model: torch.compile(LAYOUTS["fsdp2"](model), backend="eager"),
}


def worker_wrapped(wrapper: str) -> list[str]:
    inner = Zoo(("tied", "buffers"))
    expected = [name for name, _ in inner.named_parameters()]
    model = WRAPPERS[wrapper](inner)
    ema = EMA_FSDP(model, DECAY)
    reference = Reference(full_live_weights(model))
    for _ in train(model, 3):
        ema.update(model)
        reference.update(full_live_weights(model), DECAY)
    full = _everywhere(ema.full_state_dict(model))
    problems = [] if list(ema.shadow) == expected else [f"names: {list(ema.shadow)}"]
    problems += [n for n in ema.shadow if relative_error(full[n], reference.average[n]) > 1e-6]
    Zoo(("tied", "buffers")).load_state_dict(full, strict=True)
    return problems


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_change_no_name_and_no_value(ranks, wrapper):
    for rank, problems in enumerate(ranks(2, worker_wrapped, wrapper=wrapper)):
        assert problems == [], f"rank {rank}"


def test_an_average_built_before_compiling_follows_the_compiled_model():
    model = Zoo()
    ema = EMA_FSDP(model, DECAY)
    compiled = torch.compile(_checkpointed(model), backend="eager")
    reference = Reference(full_live_weights(model))
    for _ in train(compiled, 2):
        ema.update(compiled)
        reference.update(full_live_weights(model), DECAY)
    assert all(relative_error(ema.shadow[name], reference.average[name]) < 1e-6 for name in ema.shadow)


def test_a_child_called_module_keeps_its_name():
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    ema = EMA_FSDP(model)
    assert list(ema.shadow) == ["module.weight", "module.bias"]
    ema.load_full_state_dict(ema.full_state_dict(model), model)


def worker_parts() -> list[str]:
    model = LAYOUTS["fsdp2_nested"](Zoo(("frozen",)))
    parts = parts_of(model)
    ema = EMA_FSDP(parts, DECAY)
    reference = Reference(full_live_weights(model))
    for _ in train(model, 3):
        model.reshard()
        ema.update(parts)
        reference.update(full_live_weights(model), DECAY)
    full = _everywhere(ema.full_state_dict(parts))
    problems = [n for n in ema.shadow if relative_error(full[n], reference.average[n]) > 1e-6]
    Zoo(("frozen",)).load_state_dict(full, strict=True)
    return problems


def test_a_list_of_model_parts_is_one_model(ranks):
    for rank, problems in enumerate(ranks(2, worker_parts)):
        assert problems == [], f"rank {rank}"
    with pytest.raises(ValueError, match="weight: two parameters or buffers get this canonical name"):
        EMA_FSDP([nn.Linear(2, 2), nn.Linear(2, 2)])


def worker_disagreeing(how: str) -> str:
    rank = dist.get_rank()
    model = LAYOUTS["fsdp2" if how == "frozen" else "fsdp1_full"](Zoo(("frozen",)))
    if how == "frozen" and rank == 1:
        model.inner.bias.requires_grad_(False)
    exclude = ["up.*"] if how == "exclude" and rank == 1 else ["zzz"] if how == "pattern" and rank == 1 else []
    return raised(lambda: EMA_FSDP(model, DECAY, exclude=exclude))


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (
            "frozen",
            r"rank 0 has inner.bias: shape \(7,\), torch.float32, tracked\n  rank 1 has inner.bias: .* not tracked",
        ),
        ("exclude", r"rank 0 has up.weight: .* tracked\n  rank 1 has up.weight: .* not tracked"),
        ("pattern", r"exclude: the pattern 'zzz' matches no parameter"),
    ],
)
def test_ranks_that_disagree_are_told_so_on_every_rank(ranks, how, text):
    for rank, found in enumerate(ranks(2, worker_disagreeing, how=how)):
        assert re.search(f"ValueError: (?s:.*){text}", found), f"rank {rank}: {found}"


# ---------------------------------------------------------------- states


def worker_save(layout: str, folder: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = LAYOUTS[layout](Zoo(SHARDABLE))
    ema = EMA_FSDP(model, Warmup(DECAY), precision="compensated", update_every=2)
    for _ in train(model, 4, same_data=layout in SAME_DATA):
        ema.update(model)
    dcp.save({"ema": ema}, checkpoint_id=folder)
    return ema.full_state_dict(model)


def worker_load(layout: str, folder: str) -> tuple[dict[str, torch.Tensor], list[object]]:
    torch.manual_seed(1)
    model = LAYOUTS[layout](Zoo(SHARDABLE))
    ema = EMA_FSDP(model, 0.5, precision="compensated")
    dcp.load({"ema": ema}, checkpoint_id=folder)
    full = ema.full_state_dict(model)
    return {n: full[n] for n in ema.shadow if full}, [ema.num_updates, ema.decay, ema.update_every]


# Every source and every destination once, and each pair of kinds.
TRANSFERS = [
    (("fsdp1_full", 2), ("fsdp2", 3)),
    (("fsdp2", 3), ("fsdp1_full", 2)),
    (("fsdp1_full", 3), ("plain", 1)),
    (("plain", 1), ("fsdp1_nested", 2)),
    (("fsdp2", 2), ("ddp", 2)),
    (("ddp", 2), ("fsdp2_nested", 3)),
    (("fsdp1_flat", 2), ("fsdp1_full", 3)),
    (("fsdp1_no_shard", 2), ("fsdp1_flat", 2)),
    (("fsdp1_nested", 3), ("fsdp1_no_shard", 2)),
]


@pytest.mark.parametrize(("source", "destination"), TRANSFERS, ids=lambda cell: f"{cell[0]}x{cell[1]}")
def test_any_state_loads_into_any_layout_at_any_world_size(ranks, tmp_path, source, destination):
    saved = ranks(source[1], worker_save, layout=source[0], folder=str(tmp_path / "state"))[0]
    results = ranks(destination[1], worker_load, layout=destination[0], folder=str(tmp_path / "state"))
    for rank, (_, settings) in enumerate(results):
        assert settings == [4, Warmup(DECAY), 2], f"rank {rank}"
    loaded = results[0][0]
    assert len(loaded) > 10
    for name, value in loaded.items():
        assert torch.equal(value, saved[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("destination", ["fsdp1_hybrid_full", "hsdp", "tp_fsdp2", "fsdp2", "fsdp1_full", "plain"])
@pytest.mark.parametrize("source", ["fsdp1_hybrid_full", "fsdp1_hybrid_zero2", "hsdp", "tp_fsdp2", "fsdp2", "ddp"])
def test_states_move_between_the_layouts_of_four_ranks(ranks, tmp_path, source, destination):
    saved = ranks(4, worker_save, layout=source, folder=str(tmp_path / "state"))[0]
    loaded = ranks(4, worker_load, layout=destination, folder=str(tmp_path / "state"))[0][0]
    assert len(loaded) > 10
    assert [name for name, value in loaded.items() if not torch.equal(value, saved[name])] == []


def worker_wrong_states() -> dict[str, str]:
    model = LAYOUTS["fsdp1_full"](Zoo(SHARDABLE))
    ema = EMA_FSDP(model, DECAY)
    for _ in train(model, 2):
        ema.update(model)
    good, before = ema.state_dict(), {name: value.clone() for name, value in ema.shadow.items()}
    tracked_before = EMA_FSDP(model, 0.5)

    def state(**changes: object) -> dict[str, object]:
        return good | changes

    def shadow(**changes: object) -> dict[str, object]:
        return state(shadow=dict(good["shadow"]) | changes)

    def config(**changes: object) -> dict[str, object]:
        import json

        settings = json.loads(bytes(good["config"].tolist())) | changes
        return state(config=torch.tensor(list(json.dumps(settings).encode().ljust(2048)), dtype=torch.uint8))

    view = good["shadow"]["inner.weight"]
    one = dist.get_rank() == 1
    texts = {
        "empty": raised(lambda: ema.load_state_dict({})),
        "full tensors": raised(lambda: ema.load_state_dict({"inner.weight": torch.zeros(7, 5)})),
        "later version": raised(lambda: ema.load_state_dict(config(version=99))),
        "damaged": raised(lambda: ema.load_state_dict(state(config=torch.zeros(2048, dtype=torch.uint8)))),
        "unknown schedule": raised(lambda: ema.load_state_dict(config(decay={"kind": "magic"}))),
        "precision": raised(lambda: ema.load_state_dict(config(precision="fp64"))),
        "count": raised(lambda: ema.load_state_dict(state(num_updates=torch.tensor(-1)))),
        "skipped": raised(lambda: ema.load_state_dict(state(num_skipped=torch.zeros(2)))),
        "interval": raised(lambda: ema.load_state_dict(config(update_every=0))),
        "shape": raised(lambda: ema.load_state_dict(shadow(**{"inner.weight": torch.zeros(3)}))),
        "dtype": raised(lambda: ema.load_state_dict(shadow(**{"inner.weight": view.to(torch.float64)}))),
        "names": raised(lambda: ema.load_state_dict(shadow(nobody=torch.zeros(1)))),
        "place": raised(lambda: ema.load_state_dict(shadow(**{"inner.weight": torch.zeros(7, 5)}))),
        "one rank only": raised(lambda: ema.load_state_dict({} if one else good)),
    }
    texts["unchanged"] = str(all(torch.equal(before[name], ema.shadow[name]) for name in before))
    tracked_before.load_state_dict(good)
    texts["good"] = str(
        all(torch.equal(before[name], tracked_before.shadow[name]) for name in before)
        and tracked_before.decay == DECAY
        and tracked_before.num_updates == 2
    )
    return texts


def test_wrong_states_are_refused_and_nothing_changes(ranks):
    expected = {
        "empty": "ValueError: .*the EMA state lacks shadow, num_updates, num_skipped, config .it has nothing",
        "full tensors": "it has inner.weight.*for full tensors use load_full_state_dict",
        "later version": "ValueError: .*version 99, this library reads up to 1: update fsdp_ema_lib",
        "damaged": "DamagedCheckpointError: .*config: the settings in the EMA state are damaged",
        "unknown schedule": "ValueError: .*unknown schedule kind 'magic': expected one of constant, warmup",
        "precision": "ValueError: .*precision: the EMA state was saved with 'fp64', this EMA has 'fp32'",
        "count": "DamagedCheckpointError: .*num_updates: the EMA state holds -1, a whole number of at least 0",
        "skipped": "DamagedCheckpointError: .*num_skipped: the EMA state holds .*, a tensor of one number was expected",
        "interval": "DamagedCheckpointError: .*update_every: the EMA state holds 0, a whole number of at least 1",
        "shape": r"ValueError: .*inner.weight: the state holds \(3,\), this model has \(7, 5\)",
        "dtype": "ValueError: .*inner.weight: the state holds torch.float64, this average is torch.float32",
        "names": "ValueError: .*nobody: in the state, but not tracked here",
        "place": "inner.weight: the state holds all of the full tensor.*let torch.distributed.checkpoint.load reshard",
        "one rank only": "ValueError: .*the EMA state lacks",
    }
    for rank, texts in enumerate(ranks(2, worker_wrong_states)):
        for key, pattern in expected.items():
            assert re.search(f"(?s){pattern}", texts[key]), f"rank {rank}, {key}: {texts[key]}"
        assert (texts["unchanged"], texts["good"]) == ("True", "True"), f"rank {rank}"


def test_a_plain_function_stays_the_decay_when_a_state_is_loaded():
    model = nn.Linear(2, 2)
    function = lambda n: 1 / n  # noqa: E731
    ema, other = EMA_FSDP(model, function), EMA_FSDP(model, function)
    ema.update(model)
    other.load_state_dict(ema.state_dict())
    assert other.decay is function and other.num_updates == 1
    third = EMA_FSDP(model, 0.5)
    third.load_state_dict(EMA_FSDP(model, Constant(0.7)).state_dict())
    assert third.decay == 0.7


def test_plain_states_are_tensors_that_load_without_unpickling(tmp_path):
    model = nn.Linear(2, 2)
    ema = EMA_FSDP(model, PowerFunction(2.0))
    ema.update(model)
    torch.save(ema.state_dict(), tmp_path / "ema.pt")
    other = EMA_FSDP(model, 0.5)
    other.load_state_dict(torch.load(tmp_path / "ema.pt", weights_only=True))
    assert other.decay == PowerFunction(2.0) and other.num_updates == 1
