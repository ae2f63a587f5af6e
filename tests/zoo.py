"""The models and the ways of sharding that the tests run over, and the float64 reference that they are held against."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

FEATURES = ("tied", "frozen", "buffers", "tiny", "channels_last", "transposed", "scalar", "complex", "integer")
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


class Standardize(nn.Module):
    """Subtracts a running mean: a float buffer, an integer buffer and one that is not saved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("num_batches", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.running_mean.lerp_(x.mean(dim=0).to(self.running_mean.dtype), 0.1)
                self.num_batches += 1
        return (x - self.running_mean.to(x.dtype)) * self.weight


class Holder(nn.Module):
    """One parameter of another dtype, which FSDP2 wants in a unit of its own."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value, requires_grad=value.is_complex())

    def forward(self) -> Tensor:
        return (self.value * self.value.conj()).real


class Zoo(nn.Module):
    """A small model with the kinds of parameter that sharding gets wrong."""

    def __init__(self, features: tuple[str, ...] = (), dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)  # 7 rows: uneven over 2, 3 and 4 ranks
        self.outer = nn.Linear(7, 5)
        self.up = nn.Linear(5, 12)  # even: what tensor parallel layouts split
        self.down = nn.Linear(12, 5)
        if "tied" in features:
            self.pair = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5, bias=False)])
            self.pair[1].weight = self.pair[0].weight
        if "frozen" in features:
            self.frozen = nn.Linear(5, 5).requires_grad_(False)
        if "buffers" in features:
            self.norm = Standardize(5)
        if "tiny" in features:
            self.tiny = nn.Parameter(torch.ones(1))  # no element on all ranks but one
        if "channels_last" in features:
            self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        if "transposed" in features:
            self.transposed = nn.Parameter(torch.randn(5, 6).t())
        if "scalar" in features:
            self.scalar = nn.Parameter(torch.tensor(1.0))
        self.to(dtype)
        if "complex" in features:
            self.phase = Holder(torch.randn(5, dtype=torch.complex64))
        if "integer" in features:
            self.table = Holder(torch.arange(5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.outer(torch.tanh(self.inner(x))) + self.down(torch.relu(self.up(x)))
        if hasattr(self, "pair"):
            y = y + self.pair[0](x) + self.pair[1](y)
        if hasattr(self, "frozen"):
            y = y + self.frozen(x)
        if hasattr(self, "norm"):
            y = self.norm(y)
        if hasattr(self, "tiny"):
            y = y * self.tiny
        if hasattr(self, "conv"):
            images = x.repeat(1, 15).view(-1, 3, 5, 5).contiguous(memory_format=torch.channels_last)
            y = y + self.conv(images).mean(dim=(1, 2, 3)).unsqueeze(1)
        if hasattr(self, "transposed"):
            y = y + (x @ self.transposed.t()).mean(dim=1, keepdim=True)
        if hasattr(self, "scalar"):
            y = y * self.scalar
        if hasattr(self, "phase"):
            y = y + self.phase().to(y.dtype)
        if hasattr(self, "table"):
            y = y + self.table().to(y.dtype)
        return y


def _fsdp1(model: nn.Module, strategy: ShardingStrategy, **options: object) -> nn.Module:
    hybrid = strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2) if hybrid else (world,))
    settings = {"use_orig_params": True, "device_id": torch.device("cpu"), "device_mesh": mesh} | options
    return FullyShardedDataParallel(model, sharding_strategy=strategy, **settings)


def _fsdp1_nested(model: nn.Module, **options: object) -> nn.Module:
    model.outer = _fsdp1(model.outer, ShardingStrategy.FULL_SHARD, **options)
    if hasattr(model, "frozen"):
        model.frozen = _fsdp1(model.frozen, ShardingStrategy.FULL_SHARD, **options)
    return _fsdp1(model, ShardingStrategy.FULL_SHARD, **options)


def _fsdp2_nested(model: nn.Module, **options: object) -> nn.Module:
    for name in ("phase", "table"):
        if hasattr(model, name):
            fully_shard(getattr(model, name), **options)
    fully_shard(model.outer, **options)
    fully_shard(model.down, **options)
    return fully_shard(model, **options)


def _mesh(*shape: int) -> object:
    names = ("replicate", "shard") if len(shape) == 2 else ("shard",)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _tensor_parallel(model: nn.Module, mesh: object) -> nn.Module:
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _tp_fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    return fully_shard(_tensor_parallel(model, mesh["tp"]), mesh=mesh["dp"])


BF16_COMPUTE = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LAYOUTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": DistributedDataParallel,
    "fsdp1_full": lambda model: _fsdp1(model, ShardingStrategy.FULL_SHARD),
    "fsdp1_grad_op": lambda model: _fsdp1(model, ShardingStrategy.SHARD_GRAD_OP),
    "fsdp1_no_shard": lambda model: _fsdp1(model, ShardingStrategy.NO_SHARD),
    "fsdp1_hybrid_full": lambda model: _fsdp1(model, ShardingStrategy.HYBRID_SHARD),
    "fsdp1_hybrid_zero2": lambda model: _fsdp1(model, ShardingStrategy._HYBRID_SHARD_ZERO2),
    "fsdp1_nested": _fsdp1_nested,
    "fsdp1_no_mesh": lambda model: _fsdp1(model, ShardingStrategy.FULL_SHARD, device_mesh=None),
    "fsdp1_ignored": lambda model: _fsdp1(model, ShardingStrategy.FULL_SHARD, ignored_modules=[model.outer]),
    "fsdp1_flat": lambda model: _fsdp1_nested(model, use_orig_params=False),
    "fsdp1_mixed": lambda model: _fsdp1(model, ShardingStrategy.FULL_SHARD, mixed_precision=BF16_COMPUTE),
    "fsdp2": fully_shard,
    "fsdp2_nested": _fsdp2_nested,
    "fsdp2_zero2": lambda model: _fsdp2_nested(model, reshard_after_forward=False),
    "fsdp2_reshard_int": lambda model: _fsdp2_nested(model, reshard_after_forward=2),
    "fsdp2_no_shard": lambda model: fully_shard(model, mesh=_mesh(dist.get_world_size(), 1)),
    "fsdp2_mixed": lambda model: fully_shard(
        model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ),
    "fsdp2_offload": lambda model: fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "hsdp": lambda model: _fsdp2_nested(model, mesh=_mesh(2, dist.get_world_size() // 2)),
    "tp": lambda model: _tensor_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),))),
    "tp_fsdp2": _tp_fsdp2,
}
_NESTED_FSDP2 = frozenset({"fsdp2_nested", "fsdp2_zero2", "fsdp2_reshard_int", "hsdp"})


def allowed_features(layout: str) -> tuple[str, ...]:
    """The kinds of parameter that torch itself lets this layout have."""
    refused: frozenset[str] = frozenset()
    if layout.startswith("fsdp1"):
        refused = frozenset(
            {"scalar", "complex", "integer"}
        )  # complex and integer: not beside fp32 in one flat parameter
    elif layout not in ("plain", "ddp", "tp"):
        refused = frozenset({"scalar", "channels_last", "transposed"})
        if layout not in _NESTED_FSDP2:
            refused |= {"complex"}  # a unit of its own would be needed
    return tuple(feature for feature in FEATURES if feature not in refused)


# These need a 2 x 2 mesh.
FOUR_RANKS_ONLY = frozenset({"fsdp1_hybrid_full", "fsdp1_hybrid_zero2", "fsdp2_reshard_int", "hsdp", "tp_fsdp2"})


def worlds_of(layout: str) -> tuple[int, ...]:
    """The world sizes at which a layout is tested."""
    if layout in FOUR_RANKS_ONLY:
        return (4,)
    return (1,) if layout == "plain" else (1, 2, 3, 4)


def pairs() -> list[tuple[str, int, torch.dtype]]:
    """(layout, world size, dtype): every value of each axis with every value of each other one."""
    cells = []
    for number, layout in enumerate(LAYOUTS):
        worlds = worlds_of(layout)
        for shift, dtype in enumerate(DTYPES):
            cells.append((layout, worlds[(number + shift) % len(worlds)], dtype))
    return cells


def product() -> list[tuple[str, int, torch.dtype]]:
    """Every (layout, world size, dtype)."""
    return [(layout, world, dtype) for layout in LAYOUTS for world in worlds_of(layout) for dtype in DTYPES]


def parts_of(model: nn.Module) -> list[nn.Module]:
    """The model as pipeline stages on one rank: each child is a part, names keep their place in the whole."""
    return [nn.ModuleDict({name: child}) for name, child in model.named_children()]


def full_live_weights(model: nn.Module) -> dict[str, Tensor]:
    """The live weights on every rank by torch's own gather: independent of the code under test."""
    options = StateDictOptions(full_state_dict=True)
    return {
        # torch keeps the name of a compiled child of an FSDP1 root.
        name.replace("_orig_mod.", ""): value.detach().clone()
        for name, value in get_model_state_dict(model, options=options).items()
        if isinstance(value, Tensor)
    }


class Reference:
    """The average in float64 on the full, unsharded tensors."""

    def __init__(self, live: dict[str, Tensor]) -> None:
        self.average = {name: _wide(value) for name, value in live.items()}

    def update(self, live: dict[str, Tensor], decay: float) -> None:
        for name, value in live.items():
            self.average[name] = decay * self.average[name] + (1 - decay) * _wide(value)


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the error over the norm of the expectation, in float64."""
    difference = torch.linalg.vector_norm(_wide(found) - _wide(expected))
    return float(difference / torch.linalg.vector_norm(_wide(expected)).clamp_min(1e-30))


# Parameters that no wrapper keeps in step across ranks: every rank must see the same data.
SAME_DATA = frozenset({"plain", "fsdp1_ignored", "tp", "tp_fsdp2"})


def train(model: nn.Module, steps: int, lr: float = 0.01, seed: int = 0, same_data: bool = False) -> Iterator[int]:
    """Plain SGD on random data, different on every rank unless told otherwise; yields after each step."""
    rank = dist.get_rank() if dist.is_initialized() and not same_data else 0
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    for step in range(steps):
        x = torch.randn(6, 5, generator=generator)
        y = model(x.to(_input_dtype(model)))
        loss = (y.float() - x.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield step


def _input_dtype(model: nn.Module) -> torch.dtype:
    dtypes = [p.dtype for p in model.parameters() if p.dtype.is_floating_point]
    return dtypes[0]


def local_of(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
