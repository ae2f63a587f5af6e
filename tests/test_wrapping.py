"""Sharding by name: it trains like the plain model, splits what it says, and says what it cannot do."""

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_ema_lib.names import normalize_generator_fsdp_key
from fsdp_ema_lib.process_group import distributed_job
from fsdp_ema_lib.wrapping import STRATEGIES, effective_no_shard, fsdp2_wrap, fsdp_wrap, wrap_units

WRAPS = {"fsdp1": fsdp_wrap, "fsdp2": fsdp2_wrap}
both = pytest.mark.parametrize("wrap", WRAPS)


class Net(nn.Module):
    """Uneven sizes, two nested levels, a frozen layer, a tied weight, floating, integer and boolean buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 7, bias=False)
        self.body = nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Sequential(nn.Linear(11, 13), nn.Linear(13, 7)))
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.rand(1))
        self.register_buffer("shift", torch.rand(7))
        self.register_buffer("seen", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.body(self.embed(x)) + self.shift.to(x.dtype))
        return hidden @ self.head.weight * self.scale


def full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter whole, by canonical name, gathered by torch's own means."""
    if isinstance(model, FSDP):
        with FSDP.summon_full_params(model, writeback=False):
            return {normalize_generator_fsdp_key(n): p.detach().clone() for n, p in model.named_parameters()}
    if isinstance(model, FSDPModule):
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()
        return {n: p.detach().full_tensor().clone() for n, p in model.named_parameters()}
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def local_numel(model: nn.Module) -> int:
    return sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in model.parameters())


def train(model: nn.Module, batches: list[torch.Tensor]) -> list[float]:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    losses = []
    for x in batches:
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def said(caught: list[warnings.WarningMessage]) -> list[str]:
    ours = [w for w in caught if "sharding_strategy=" in str(w.message)]
    assert all(w.filename == __file__ for w in ours), "a warning must point at the line that called"
    return [str(w.message) for w in ours]


def wrapped(wrap: str, model: nn.Module, **kwargs) -> tuple[nn.Module, list[str]]:
    arguments = {"mixed_precision": False, "min_num_params": 100} | kwargs
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = WRAPS[wrap](model, **arguments)
    return model, said(caught)


def mesh_of(shape: tuple[int, ...] | None):
    names = ("replicate", "shard") if shape and len(shape) == 2 else None
    return init_device_mesh("cpu", shape, mesh_dim_names=names) if shape else None


def worker_train(wrap: str, strategy: str, mesh_shape: tuple[int, ...] | None) -> dict:
    plain = Net()
    model, messages = wrapped(wrap, copy.deepcopy(plain), sharding_strategy=strategy, mesh=mesh_of(mesh_shape))
    held, total = local_numel(model), sum(p.numel() for p in plain.parameters())
    world_size, rank = dist.get_world_size(), dist.get_rank()
    batches = [torch.randn(4 * world_size, 5) for _ in range(3)]
    train(plain, batches)  # the global batch: the mean of the ranks' gradients
    train(model, [batch.chunk(world_size)[rank] for batch in batches])
    whole = effective_no_shard(model)
    after, expected = full_weights(model), full_weights(plain)
    return {
        "names": sorted(after) == sorted(expected),
        "error": max((after[n] - expected[n]).norm().item() / (expected[n].norm().item() or 1) for n in expected),
        "moved": (expected["scale"] - Net().scale).abs().item() > 0,
        "held": held / total,
        "no_shard": whole,
        "messages": messages,
    }


@both
@pytest.mark.parametrize(
    ("world_size", "strategy", "mesh_shape", "share", "message"),
    [
        (2, "full", None, 0.5, None),
        (3, "full", (3,), 1 / 3, None),
        (2, "no_shard", None, 1.0, None),
        (3, "no_shard", (3,), 1.0, None),
        (4, "hybrid_full", (2, 2), 0.5, None),
        (4, "hybrid_zero2", (2, 2), 0.5, None),
        (2, "hybrid_full", None, 0.5, "with a single group of 2 ranks: there is nothing to replicate over"),
        (2, "hybrid_zero2", (1, 2), 0.5, "the model is sharded over all 2 ranks and held once, as full"),
        (2, "hybrid_full", (2, 1), 1.0, "with 2 groups of one rank: there is nothing to shard over"),
        (2, "hybrid_zero2", (2, 1), 1.0, "each of the 2 ranks holds the whole model, as no_shard"),
        (1, "full", None, 1.0, "at world size 1: there is nothing to shard over"),
        (1, "hybrid_full", None, 1.0, "this rank holds the whole model, as no_shard"),
        (1, "hybrid_zero2", (1, 1), 1.0, "at world size 1"),
        (1, "no_shard", None, 1.0, None),
    ],
)
def test_trains_like_the_plain_model_on_the_global_batch(ranks, wrap, world_size, strategy, mesh_shape, share, message):
    results = ranks(world_size, worker_train, wrap=wrap, strategy=strategy, mesh_shape=mesh_shape)
    for rank, result in enumerate(results):
        assert result["names"], f"rank {rank}"
        assert result["moved"], f"rank {rank}"
        assert result["error"] < 2e-6, f"rank {rank}: {result['error']}"
        assert result["no_shard"] is (share == 1.0), f"rank {rank}"
        assert len(result["messages"]) == (message is not None), f"rank {rank}: {result['messages']}"
        if message:
            assert result["messages"][0].startswith(f"sharding_strategy={strategy!r} ")
            assert message in result["messages"][0]
    # Uneven rows and padding move the share of one rank, not the mean over a shard group.
    assert sum(r["held"] for r in results) / world_size == pytest.approx(share, abs=0.02)


def worker_nodes(wrap: str, local_world_size: str) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", local_world_size)
        try:
            model, messages = wrapped(wrap, Net(), sharding_strategy="hybrid_full")
        except ValueError as error:
            return {"error": str(error)}
    if wrap == "fsdp2":
        mesh = next(iter(model.parameters())).device_mesh
        groups = mesh.get_group(0), mesh.get_group(1)
    else:
        groups = model._inter_node_pg, model.process_group
    return {"groups": [dist.get_process_group_ranks(group) for group in groups], "messages": messages}


@both
def test_hybrid_without_a_mesh_shards_inside_a_node(ranks, wrap):
    results = ranks(4, worker_nodes, wrap=wrap, local_world_size="2")
    assert [r["groups"] for r in results] == [
        [[0, 2], [0, 1]],
        [[1, 3], [0, 1]],
        [[0, 2], [2, 3]],
        [[1, 3], [2, 3]],
    ]
    assert all(r["messages"] == [] for r in results)


@pytest.mark.parametrize("value", ["3", "0", "two"])
def test_a_node_size_that_does_not_divide_the_world_is_named(ranks, value):
    for result in ranks(4, worker_nodes, wrap="fsdp2", local_world_size=value):
        assert "LOCAL_WORLD_SIZE must be a divisor of the world size 4" in result["error"]
        assert f"got {value!r}" in result["error"]


class Odd(Net):
    """States that a broadcast can trip over: other dtypes, a transposed buffer, an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("brief", torch.randn(3).to(torch.bfloat16))
        self.register_buffer("waves", torch.randn(2, dtype=torch.complex64))
        self.register_buffer("transposed", torch.randn(3, 4).t())
        self.register_buffer("empty", torch.zeros(0, 3))


def worker_sync(wrap: str, strategy: str, mesh_shape: tuple[int, ...] | None) -> dict:
    torch.manual_seed(100 + dist.get_rank())
    plain = Odd()
    plain.seen += dist.get_rank()
    plain.mask ^= dist.get_rank() % 2 == 1
    before = {n: t.detach().clone() for n, t in [*plain.named_parameters(), *plain.named_buffers()]}
    model, _ = wrapped(wrap, plain, sharding_strategy=strategy, sync_module_states=True, mesh=mesh_of(mesh_shape))
    tied = model.get_parameter("embed.weight") is model.get_parameter("head.weight") if wrap == "fsdp2" else True
    after = full_weights(model) | {
        normalize_generator_fsdp_key(n): b.detach().clone() for n, b in model.named_buffers()
    }
    return {"before": before, "after": after, "tied": tied}


@both
@pytest.mark.parametrize(
    ("world_size", "strategy", "mesh_shape"),
    [(2, "full", None), (2, "no_shard", None), (3, "full", None), (4, "hybrid_full", (2, 2))],
)
def test_sync_module_states_gives_every_rank_the_first_ranks_values(ranks, wrap, world_size, strategy, mesh_shape):
    results = ranks(world_size, worker_sync, wrap=wrap, strategy=strategy, mesh_shape=mesh_shape)
    first = results[0]["before"]
    assert not torch.equal(first["shift"], results[1]["before"]["shift"])  # the ranks did differ
    for rank, result in enumerate(results):
        assert result["tied"], f"rank {rank}"
        assert result["after"].keys() == first.keys()
        for name, value in first.items():
            assert torch.equal(result["after"][name], value), f"rank {rank}: {name}"


def worker_sync_mismatch(wrap: str, mesh_shape: tuple[int, ...]) -> str:
    model = Net()
    last = dist.get_rank() == dist.get_world_size() - 1
    if last:
        model.body[0] = nn.Linear(7, 12)
        model.register_buffer("extra", torch.zeros(1))
    strategy = "full" if len(mesh_shape) == 1 else "hybrid_full"
    try:
        wrapped(wrap, model, sharding_strategy=strategy, sync_module_states=True, mesh=mesh_of(mesh_shape))
    except ValueError as error:
        assert not isinstance(model, FSDPModule)
        assert all(type(p) is nn.Parameter for p in model.parameters())
        return str(error)
    return "no error"


@both
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_sync_of_different_models_raises_on_every_rank(ranks, wrap, mesh_shape):
    world_size = 2 * (len(mesh_shape))
    for text in ranks(world_size, worker_sync_mismatch, wrap=wrap, mesh_shape=mesh_shape):
        last = world_size - 1
        assert "needs the same model on every rank" in text
        assert f"body.0.weight: the first rank has (11, 7) torch.float32, rank {last} has (12, 7) torch.float32" in text
        assert f"extra: the first rank has nothing, rank {last} has (1,) torch.float32" in text
        assert "embed.weight" not in text


class Recorder(nn.Module):
    """Remembers what its forward saw."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("shift", torch.rand(8, dtype=torch.float64))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.linear(x))
        self.seen = {"input": x.dtype, "weight": self.linear.weight.dtype, "norm": self.norm.weight.dtype}
        self.seen |= {"output": y.dtype, "shift": self.shift.dtype, "mean": self.norm.running_mean.dtype}
        return y + self.shift.to(y.dtype)


def worker_mixed(wrap: str, strategy: str) -> dict:
    torch.manual_seed(0)
    recorder = Recorder()
    model, _ = wrapped(wrap, recorder, sharding_strategy=strategy, mixed_precision=True, min_num_params=10_000)
    model(torch.randn(6, 8, dtype=torch.bfloat16)).float().square().sum().backward()
    params = dict(model.named_parameters())
    return {
        "seen": recorder.seen,
        "kept": {p.dtype for p in params.values()},
        "grads": {p.grad.dtype for p in params.values() if p.grad is not None},
        "running": recorder.norm.running_mean.abs().sum().item(),
    }


@both
@pytest.mark.parametrize("strategy", ["full", "no_shard"])
def test_mixed_precision_computes_in_bf16_and_keeps_fp32(ranks, wrap, strategy):
    for result in ranks(2, worker_mixed, wrap=wrap, strategy=strategy):
        assert result["seen"]["input"] == result["seen"]["weight"] == result["seen"]["output"] == torch.bfloat16
        assert result["seen"]["norm"] == result["seen"]["mean"] == result["seen"]["shift"] == torch.float32
        assert result["kept"] == result["grads"] == {torch.float32}
        assert result["running"] > 0


def worker_mixed_reduction(wrap: str) -> float:
    """The gradient of one weight, equal to the mean of the ranks' factors: 1 and 1 + 2^-9 in fp32, not in bf16."""
    model, _ = wrapped(wrap, nn.Linear(4, 4, bias=False), sharding_strategy="full", mixed_precision=True)
    x = torch.ones(1, 4, dtype=torch.bfloat16)
    y = model(x)
    # Each rank's gradient is a bf16 number; their mean 1.00390625 is not.
    y.backward(torch.full_like(y, 1.0 if dist.get_rank() == 0 else 1.0078125))
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    return next(g.flatten()[0].item() for g in grads if g is not None and g.numel())


@both
def test_mixed_precision_reduces_gradients_in_fp32(ranks, wrap):
    assert ranks(2, worker_mixed_reduction, wrap=wrap) == [1.00390625] * 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.named = nn.ModuleDict({"a": nn.Linear(16, 16), "b": nn.Linear(2, 2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.named["a"](self.blocks[0](self.mlp(self.attn(x, x, x)[0])))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(30, 30), nn.Sequential(nn.Linear(20, 20), nn.Linear(5, 5)))
        self.second = nn.Sequential(*[nn.Linear(9, 9) for _ in range(6)])
        self.norm = nn.BatchNorm1d(30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first[0](x))


def fsdp1_units(model: nn.Module) -> set[str]:
    return {normalize_generator_fsdp_key(f"{n}.x") for n, m in model.named_modules() if isinstance(m, FSDP) and n}


@pytest.mark.parametrize("model", [Attention, Nested, lambda: nn.Sequential(Nested(), Attention())])
@pytest.mark.parametrize("min_num_params", [1, 30, 90, 280, 500, 900, 1500, 5000, 50_000_000])
def test_fsdp1_and_fsdp2_make_the_units_that_torchs_size_policy_makes(lone_rank, model, min_num_params):
    policy = partial(size_based_auto_wrap_policy, min_num_params=min_num_params)
    expected = fsdp1_units(FSDP(model(), auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=True))
    one, _ = wrapped("fsdp1", model(), sharding_strategy="full", min_num_params=min_num_params)
    two, _ = wrapped("fsdp2", model(), sharding_strategy="full", min_num_params=min_num_params)
    assert fsdp1_units(one) == expected
    assert {f"{n}.x" for n, m in two.named_modules() if isinstance(m, FSDPModule) and n} == expected
    assert isinstance(two, FSDPModule)


def names_of(units: list[nn.Module], model: nn.Module) -> list[str]:
    names = {m: n for n, m in model.named_modules()}
    return [names[unit] for unit in units]


def test_units_come_children_first():
    model = Nested()
    assert names_of(wrap_units(model, 30), model)[:3] == ["first.0", "first.1.0", "first.1.1"]
    big = nn.Sequential(nn.Sequential(nn.Linear(10, 10), nn.Linear(9, 9)), nn.Linear(1, 1))
    big[0].extra = nn.Parameter(torch.zeros(200))
    assert names_of(wrap_units(big, 90), big) == ["0.0", "0.1", "0"]


def test_a_tie_inside_a_submodule_keeps_only_its_ends_in_the_unit_around_them():
    model = Nested()
    model.second[0].weight = model.second[1].weight
    expected = ["first.0", "first.1.0", "second.2", "second.3", "second.4", "second.5", "second"]
    assert names_of(wrap_units(model, 80), model) == expected


def test_a_tie_across_the_model_ends_in_the_root_unit():
    model = nn.Sequential(nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)), nn.Sequential(nn.Linear(9, 9)))
    assert names_of(wrap_units(model, 80), model) == ["0.0", "0.1", "1.0"]
    model[1][0].weight = model[0][0].weight
    assert names_of(wrap_units(model, 80), model) == ["0.1"]


def test_a_module_used_at_two_places_is_no_unit_but_the_one_around_both_is():
    shared = nn.Sequential(nn.Linear(9, 9))
    model = nn.Sequential(nn.Sequential(nn.Sequential(shared), nn.Sequential(shared), nn.Linear(9, 9)), nn.Linear(2, 2))
    assert names_of(wrap_units(model, 80), model) == ["0.2", "0"]


def test_a_container_of_parameters_is_no_unit():
    model = nn.Sequential(nn.Linear(2, 2))
    model.bag = nn.ParameterList([torch.zeros(500), torch.zeros(500)])
    assert wrap_units(model, 80) == []


def worker_tied_units(wrap: str) -> float:
    """Tied layers large enough to be units of their own, trained; the largest difference to the plain model."""
    plain = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12))
    plain[2].weight = plain[0].weight
    model, _ = wrapped(wrap, copy.deepcopy(plain), sharding_strategy="full")
    batches = [torch.randn(8, 12) for _ in range(3)]
    train(plain, batches)
    train(model, [batch.chunk(2)[dist.get_rank()] for batch in batches])
    after, expected = full_weights(model), full_weights(plain)
    assert after.keys() == expected.keys()
    return max((after[n] - expected[n]).abs().max().item() for n in expected)


@both
def test_weights_tied_across_would_be_units_stay_tied_in_training(ranks, wrap):
    assert max(ranks(2, worker_tied_units, wrap=wrap)) < 1e-6


def worker_effective_no_shard() -> dict[str, bool]:
    line, grid = mesh_of((2,)), mesh_of((1, 2))
    gathered = fully_shard(nn.Linear(4, 4), mesh=line)
    gathered(torch.ones(1, 4))  # the root stays gathered: its parameters are plain tensors now
    assert not any(isinstance(p, DTensor) for p in gathered.parameters())
    column = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    partly = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(partly[1], mesh=line)
    parallel = nn.Linear(4, 4)
    parallel.weight = nn.Parameter(distribute_tensor(parallel.weight.detach(), line, [Shard(1)]))
    copied = nn.Linear(4, 4)
    copied.weight = nn.Parameter(distribute_tensor(copied.weight.detach(), line, [Replicate()]))
    return {
        "ddp": effective_no_shard(DistributedDataParallel(nn.Linear(4, 4))),
        "fsdp1 inside": effective_no_shard(nn.Sequential(wrapped("fsdp1", Net(), sharding_strategy="full")[0])),
        "fsdp2 gathered": effective_no_shard(gathered),
        "fsdp2 in part": effective_no_shard(partly),
        "fsdp2 over (1, 2)": effective_no_shard(fully_shard(nn.Linear(4, 4), mesh=grid)),
        "fsdp2 over (2, 1)": effective_no_shard(fully_shard(nn.Linear(4, 4), mesh=column)),
        "tensor parallel": effective_no_shard(parallel),
        "replicated": effective_no_shard(copied),
    }


def test_effective_no_shard(ranks):
    assert effective_no_shard(Net())
    expected = {
        "ddp": True,
        "fsdp1 inside": False,
        "fsdp2 gathered": False,
        "fsdp2 in part": False,
        "fsdp2 over (1, 2)": False,
        "fsdp2 over (2, 1)": True,
        "tensor parallel": False,
        "replicated": True,
    }
    assert ranks(2, worker_effective_no_shard) == [expected, expected]


@both
def test_unknown_strategy_lists_the_four(lone_rank, wrap):
    with pytest.raises(ValueError, match=r"one of full, hybrid_full, hybrid_zero2, no_shard; got 'FULL_SHARD'"):
        wrapped(wrap, Net(), sharding_strategy="FULL_SHARD")


@both
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_a_process_group_the_error_says_how_to_get_one(wrap, strategy):
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"call launch_distributed_job\(\) first"):
        wrapped(wrap, Net(), sharding_strategy=strategy)


@both
@pytest.mark.parametrize(
    ("strategy", "shape", "text"),
    [
        ("full", (1, 1), r"'full' needs a 1-D mesh \(ranks,\), got a 2-D mesh of shape \(1, 1\)"),
        ("no_shard", (1, 1), r"'no_shard' needs a 1-D mesh"),
        ("hybrid_full", (1,), r"'hybrid_full' needs a 2-D mesh \(replicate, shard\), got a 1-D mesh of shape \(1,\)"),
        ("hybrid_zero2", (1,), r"'hybrid_zero2' needs a 2-D mesh"),
    ],
)
def test_mesh_of_the_wrong_number_of_dimensions(lone_rank, wrap, strategy, shape, text):
    with pytest.raises(ValueError, match=text):
        wrapped(wrap, Net(), sharding_strategy=strategy, mesh=mesh_of(shape))


@both
def test_2d_mesh_without_names(lone_rank, wrap):
    with pytest.raises(ValueError, match=r"dimension names: init_device_mesh\('cpu', \(1, 1\), mesh_dim_names="):
        wrapped(wrap, Net(), sharding_strategy="hybrid_full", mesh=init_device_mesh("cpu", (1, 1)))


def worker_part_of_the_world(wrap: str) -> str:
    mesh = DeviceMesh("cpu", [0, 2])  # collective over the world
    try:
        model, _ = wrapped(wrap, Net(), sharding_strategy="no_shard", sync_module_states=True, mesh=mesh)
    except ValueError as error:
        return str(error)
    return f"trained to {train(model, [torch.ones(2, 5)])[0]:.4f}"


@both
def test_a_rank_outside_the_mesh_is_refused_and_the_others_need_it_not(ranks, wrap):
    inside_0, outside, inside_2 = ranks(3, worker_part_of_the_world, wrap=wrap)
    assert outside.startswith("rank 1 is not part of the mesh (ranks [0, 2])")
    assert inside_0 == inside_2
    assert inside_0.startswith("trained to ")


@both
def test_meta_tensors_are_named(lone_rank, wrap):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match=r"meta device .*: 0.weight, 0.bias, 1.weight.*1.running_mean.*to_empty"):
        wrapped(wrap, model, sharding_strategy="full")


@both
@pytest.mark.parametrize("first", WRAPS)
def test_sharding_twice_is_refused(lone_rank, wrap, first):
    model, _ = wrapped(first, Net(), sharding_strategy="no_shard")
    with pytest.raises(ValueError, match=r"already sharded .* pass a freshly built, plain module"):
        wrapped(wrap, model, sharding_strategy="no_shard")


@both
def test_min_num_params_below_one(lone_rank, wrap):
    with pytest.raises(ValueError, match=r"min_num_params must be at least 1 element, got 0"):
        wrapped(wrap, Net(), sharding_strategy="full", min_num_params=0)


@pytest.mark.gpu
@both
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_cuda_model_is_moved_synced_and_trained(wrap, strategy):
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    with distributed_job(device="cuda"):
        model, messages = wrapped(
            wrap, Net(), sharding_strategy=strategy, mixed_precision=True, sync_module_states=True
        )
        assert {p.device.type for p in model.parameters()} == {b.device.type for b in model.buffers()} == {"cuda"}
        losses = train(model, [torch.ones(4, 5, device="cuda", dtype=torch.bfloat16)] * 5)
        assert losses[-1] < losses[0]
        assert effective_no_shard(model)
        assert len(messages) == (strategy != "no_shard")
