"""How a model becomes sharded: one set of arguments and strategy names for FSDP1 and for FSDP2."""

import os
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import CustomPolicy, size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from fsdp_ema_lib.process_group import comm_device

STRATEGIES: tuple[str, ...] = ("full", "hybrid_full", "hybrid_zero2", "no_shard")

_HYBRID = ("hybrid_full", "hybrid_zero2")
_FSDP1_STRATEGIES = {
    "full": ShardingStrategy.FULL_SHARD,
    "hybrid_full": ShardingStrategy.HYBRID_SHARD,
    "hybrid_zero2": ShardingStrategy._HYBRID_SHARD_ZERO2,
    "no_shard": ShardingStrategy.NO_SHARD,
}
# None leaves it to torch: every unit is resharded after its forward except the root, which backward needs at once.
_RESHARD_AFTER_FORWARD = {"full": None, "hybrid_full": None, "hybrid_zero2": False, "no_shard": False}


def fsdp_wrap(
    module: nn.Module,
    *,
    sharding_strategy: str,
    mixed_precision: bool,
    sync_module_states: bool = False,
    mesh: DeviceMesh | None = None,
    min_num_params: int = 50_000_000,
) -> FSDP:
    """Shard a model with FSDP1 (`FullyShardedDataParallel`), on CPU or CUDA. Every rank of the mesh must call.

    Submodules that hold at least `min_num_params` parameters become units of their own (torch's size-based policy);
    a submodule that shares parameters with its surroundings stays in the unit around it, so that ties survive.

    Args:
        module: the plain model, with real (not meta) tensors; it is changed in place and lives inside the result.
        sharding_strategy: `full` (parameters, gradients and optimizer state are split over all ranks),
            `hybrid_full` (split inside each row of a 2-D mesh, replicated across the rows), `hybrid_zero2` (the same,
            but parameters stay gathered between forward and backward) or `no_shard` (every rank holds everything).
        mixed_precision: compute in bf16, reduce gradients and keep buffers in fp32. Inputs are not cast: give the
            model bf16 inputs.
        sync_module_states: give every rank the parameters and buffers of the mesh's first rank before sharding.
        mesh: 1-D for `full` and `no_shard`, 2-D (replicate, shard) with dimension names for the hybrids. Without one,
            all ranks of the job are used; hybrids shard inside each node (LOCAL_WORLD_SIZE ranks) and replicate
            across nodes.
        min_num_params: elements, at least 1.

    Returns:
        The FSDP module, with `use_orig_params=True` and a device mesh.

    Raises:
        ValueError: unknown strategy; a mesh of the wrong shape, or one that this rank is not part of; a module that is
            already sharded or has meta tensors; `sync_module_states` and models that differ between the ranks.
        RuntimeError: there is no process group.

    Warns:
        UserWarning: the ranks cannot do what the strategy says (a hybrid on one node, anything at world size 1).

    Example:
        >>> from fsdp_ema_lib.process_group import distributed_job
        >>> with distributed_job(device="cpu"):
        ...     model = fsdp_wrap(nn.Linear(4, 2), sharding_strategy="no_shard", mixed_precision=False)
        ...     model(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """
    mesh = _prepare(module, sharding_strategy, sync_module_states, mesh, min_num_params)
    if mesh.size(mesh.ndim - 1) == 1 or sharding_strategy == "no_shard":
        # torch itself turns every strategy into NO_SHARD when the shard group has one rank, and then reduces gradients
        # over that one rank alone: the replicas of an (n, 1) mesh would drift apart. So NO_SHARD over dimension 0.
        mesh = mesh if mesh.ndim == 1 else DeviceMesh.from_group(mesh.get_group(0), mesh.device_type)
        strategy = ShardingStrategy.NO_SHARD
    else:
        strategy = _FSDP1_STRATEGIES[sharding_strategy]
    precision = MixedPrecision(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        buffer_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    units = set(wrap_units(module, min_num_params))
    return FSDP(
        module,
        auto_wrap_policy=CustomPolicy(lambda submodule: submodule in units),
        sharding_strategy=strategy,
        mixed_precision=precision if mixed_precision else None,
        device_id=_device_of(mesh),
        device_mesh=mesh,
        limit_all_gathers=True,
        use_orig_params=True,
    )


def fsdp2_wrap(
    module: nn.Module,
    *,
    sharding_strategy: str,
    mixed_precision: bool,
    sync_module_states: bool = False,
    mesh: DeviceMesh | None = None,
    min_num_params: int = 50_000_000,
) -> nn.Module:
    """Shard a model with FSDP2 (`fully_shard`), on CPU or CUDA. Every rank of the mesh must call.

    The twin of `fsdp_wrap`: the same arguments, the same strategies, the same units. `no_shard` is a mesh of
    (world size, 1), and `hybrid_zero2` keeps parameters gathered after the forward.

    Args:
        module: the plain model, with real (not meta) tensors; it is changed in place.
        sharding_strategy: see `fsdp_wrap`.
        mixed_precision: compute in bf16, reduce gradients in fp32, floating-point buffers become fp32. Inputs are not
            cast: give the model bf16 inputs. Batch normalization keeps fp32 parameters, as it does in FSDP1.
        sync_module_states: give every rank the parameters and buffers of the mesh's first rank before sharding.
        mesh: see `fsdp_wrap`.
        min_num_params: elements, at least 1.

    Returns:
        `module` itself, its parameters now DTensors.

    Raises:
        ValueError, RuntimeError: as `fsdp_wrap`.

    Warns:
        UserWarning: as `fsdp_wrap`.

    Example:
        >>> from fsdp_ema_lib.process_group import distributed_job
        >>> with distributed_job(device="cpu"):
        ...     model = fsdp2_wrap(nn.Linear(4, 2), sharding_strategy="no_shard", mixed_precision=False)
        ...     model(torch.ones(3, 4)).shape
        torch.Size([3, 2])
    """
    mesh = _prepare(module, sharding_strategy, sync_module_states, mesh, min_num_params)
    if sharding_strategy == "no_shard":
        mesh = _as_column(mesh)
    full_precision = MixedPrecisionPolicy(cast_forward_inputs=False)
    precision = full_precision
    batch_norms: set[nn.Module] = set()
    if mixed_precision:
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        batch_norms.update(m for m in module.modules() if isinstance(m, _BatchNorm) and m is not module)
        _make_buffers_fp32(module)
    units = set(wrap_units(module, min_num_params)) | batch_norms
    children_first = [submodule for submodule in reversed(list(module.modules())) if submodule in units]
    for unit in [*children_first, module]:
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=_RESHARD_AFTER_FORWARD[sharding_strategy],
            mp_policy=full_precision if unit in batch_norms else precision,
        )
    return module


def wrap_units(module: nn.Module, min_num_params: int) -> list[nn.Module]:
    """Choose the submodules that are sharded as units of their own, children before parents, the root not among them.

    torch's `size_based_auto_wrap_policy` decides by the number of parameters not yet in a smaller unit. A submodule is
    left in the unit around it if it cannot be gathered on its own: it has no forward (parameter containers), it is
    used at two places of the model, or one of its parameters also belongs to a module outside it.

    Args:
        module: the plain model.
        min_num_params: elements, at least 1.

    Example:
        >>> model = nn.Sequential(nn.Linear(10, 10), nn.Linear(2, 2))
        >>> wrap_units(model, min_num_params=100)
        [Linear(in_features=10, out_features=10, bias=True)]
    """
    separable = _separable_modules(module)
    units: list[nn.Module] = []

    def wants(submodule: nn.Module, numel: int, recurse: bool) -> bool:
        return size_based_auto_wrap_policy(submodule, recurse, numel, min_num_params=min_num_params)

    def collect(submodule: nn.Module) -> int:
        """Add the units inside (and perhaps at) `submodule`; return how many elements they hold."""
        numel = sum(p.numel() for p in submodule.parameters())
        if not wants(submodule, numel, recurse=True):
            return 0
        inside = sum(collect(child) for child in submodule.children())
        if submodule is module or submodule not in separable or not wants(submodule, numel - inside, recurse=False):
            return inside
        units.append(submodule)
        return numel

    collect(module)
    return units


def effective_no_shard(module: nn.Module) -> bool:
    """Tell whether this rank holds every parameter whole: no communication is needed to read the full weights.

    True for plain and DDP modules, for FSDP1 when all its units use NO_SHARD (torch's choice at world size 1), and for
    DTensors (FSDP2, tensor parallel) that are split over mesh dimensions of size 1 alone. Any rank may call it.

    Args:
        module: any model; FSDP2 modules may be gathered or resharded at the moment of the call.

    Example:
        >>> effective_no_shard(nn.Linear(4, 2))
        True
    """
    fsdp1_units = [m for m in module.modules() if isinstance(m, FSDP)]
    if any(unit.sharding_strategy != ShardingStrategy.NO_SHARD for unit in fsdp1_units):
        return False
    return not any(_is_split(tensor) for tensor in _dtensors(module))


def _prepare(
    module: nn.Module, sharding_strategy: str, sync_module_states: bool, mesh: DeviceMesh | None, min_num_params: int
) -> DeviceMesh:
    """Check everything before anything is changed; return the mesh that the strategy needs, states in step."""
    if sharding_strategy not in STRATEGIES:
        raise ValueError(f"sharding_strategy must be one of {', '.join(STRATEGIES)}; got {sharding_strategy!r}")
    if min_num_params < 1:
        raise ValueError(f"min_num_params must be at least 1 element, got {min_num_params}")
    if not dist.is_initialized():
        raise RuntimeError(
            "sharding needs a process group and there is none: call launch_distributed_job() first "
            "(one process joins a group of one; under torchrun all ranks join)"
        )
    _check_module(module)
    if mesh is None:
        mesh = _default_mesh(sharding_strategy)
    else:
        _check_mesh(mesh, sharding_strategy)
    _warn_if_degenerate(mesh, sharding_strategy)
    if sync_module_states:
        _check_same_tensors(module, mesh)
        _broadcast_from_first(module, mesh)
    return mesh


def _check_module(module: nn.Module) -> None:
    if any(isinstance(m, FSDP | FSDPModule) for m in module.modules()):
        raise ValueError(
            "the module is already sharded (by FSDP1 or FSDP2) and cannot be sharded again: "
            "pass a freshly built, plain module (in a notebook, run the cell that builds the model first)"
        )
    on_meta = [name for name, tensor in _named_states(module) if tensor.is_meta]
    if on_meta:
        raise ValueError(
            f"tensors on the meta device have no values to shard: {', '.join(on_meta)}. "
            "Build the module on a real device, or call module.to_empty(device=...) and initialize it, before sharding"
        )


def _default_mesh(sharding_strategy: str) -> DeviceMesh:
    """All ranks of the job: in one row, or for hybrids one row per node."""
    device_type, world_size = comm_device().type, dist.get_world_size()
    if sharding_strategy not in _HYBRID:
        return init_device_mesh(device_type, (world_size,))
    per_node = _ranks_per_node(world_size)
    return init_device_mesh(device_type, (world_size // per_node, per_node), mesh_dim_names=("replicate", "shard"))


def _ranks_per_node(world_size: int) -> int:
    """From torchrun's LOCAL_WORLD_SIZE; without torchrun all ranks are taken to be on one node."""
    text = os.environ.get("LOCAL_WORLD_SIZE", str(world_size))
    if not text.isdecimal() or int(text) < 1 or world_size % int(text):
        raise ValueError(
            f"LOCAL_WORLD_SIZE must be a divisor of the world size {world_size} to lay a hybrid strategy out by nodes, "
            f"got {text!r}: start the same number of ranks on every node, or pass mesh=(replicate, shard) yourself"
        )
    return int(text)


def _check_mesh(mesh: DeviceMesh, sharding_strategy: str) -> None:
    ndim = 2 if sharding_strategy in _HYBRID else 1
    if mesh.ndim != ndim:
        shape = "(replicate, shard)" if ndim == 2 else "(ranks,)"
        raise ValueError(
            f"sharding_strategy={sharding_strategy!r} needs a {ndim}-D mesh {shape}, "
            f"got a {mesh.ndim}-D mesh of shape {tuple(mesh.shape)}"
        )
    if ndim == 2 and mesh.mesh_dim_names is None:
        raise ValueError(
            "a 2-D mesh must have dimension names: "
            f"init_device_mesh({mesh.device_type!r}, {tuple(mesh.shape)}, mesh_dim_names=('replicate', 'shard'))"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"rank {dist.get_rank()} is not part of the mesh (ranks {mesh.mesh.flatten().tolist()}): "
            "call this only on the ranks of the mesh"
        )


def _warn_if_degenerate(mesh: DeviceMesh, sharding_strategy: str) -> None:
    said = f"sharding_strategy={sharding_strategy!r}"
    if mesh.size() == 1:
        if sharding_strategy != "no_shard":
            _warn(
                f"{said} at world size 1: there is nothing to shard over; this rank holds the whole model, as no_shard"
            )
        return
    if sharding_strategy not in _HYBRID:
        return
    replicas, shards = mesh.shape
    if replicas == 1:
        _warn(
            f"{said} with a single group of {shards} ranks: there is nothing to replicate over; "
            f"the model is sharded over all {shards} ranks and held once, as full"
        )
    elif shards == 1:
        _warn(
            f"{said} with {replicas} groups of one rank: there is nothing to shard over; "
            f"each of the {replicas} ranks holds the whole model, as no_shard"
        )


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=5)  # the line that called fsdp_wrap or fsdp2_wrap


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _as_column(mesh: DeviceMesh) -> DeviceMesh:
    """The ranks of a 1-D mesh as (n, 1): replicated over all of them, sharded over one. No collective."""
    # Local synchronization: the ranks of another mesh of the same job need not be here at this moment.
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    everyone = mesh.get_group(0)
    ranks = torch.tensor(dist.get_process_group_ranks(everyone), dtype=torch.int).unsqueeze(1)
    return DeviceMesh.from_group([everyone, alone], mesh.device_type, mesh=ranks, mesh_dim_names=("replicate", "shard"))


def _make_buffers_fp32(module: nn.Module) -> None:
    """FSDP1 casts floating-point buffers to `buffer_dtype`; `fully_shard` leaves them alone."""
    for buffer in module.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.float()


def _separable_modules(root: nn.Module) -> set[nn.Module]:
    """The modules that stand at one place, have a forward, and share no parameter with a module outside them."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in root.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    paths = list(root.named_modules(remove_duplicate=False))
    places = Counter(submodule for _, submodule in paths)
    return {
        submodule
        for path, submodule in paths
        if places[submodule] == 1
        and type(submodule).forward is not nn.Module.forward
        and all(name.startswith(f"{path}.") for p in submodule.parameters() for name in names[p])
    }


def _named_states(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _check_same_tensors(module: nn.Module, mesh: DeviceMesh) -> None:
    """Collective over the mesh: raise on every rank if the models differ from the first rank's in names or shapes."""
    mine = {name: f"{tuple(t.shape)} {t.dtype}" for name, t in _named_states(module)}
    box = [mine]
    for dim in range(mesh.ndim):
        dist.broadcast_object_list(box, group_src=0, group=mesh.get_group(dim))
    first, rank = box[0], dist.get_rank()
    complaints = [
        f"{name}: the first rank has {first.get(name, 'nothing')}, rank {rank} has {mine.get(name, 'nothing')}"
        for name in sorted(first.keys() | mine.keys())
        if first.get(name) != mine.get(name)
    ]
    for dim in range(mesh.ndim):
        group = mesh.get_group(dim)
        from_all: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(from_all, complaints, group=group)
        complaints = [line for lines in from_all for line in lines]
    if complaints:
        raise ValueError(
            "sync_module_states needs the same model on every rank:\n  "
            + "\n  ".join(complaints)
            + "\nBuild the module from the same configuration on every rank."
        )


@torch.no_grad()
def _broadcast_from_first(module: nn.Module, mesh: DeviceMesh) -> None:
    """Collective over the mesh: copy the first rank's parameters and buffers to all, one tensor at a time."""
    # torch's own sync_module_states refuses CPU tensors, and fully_shard has none. Down the first column, then along
    # each row: after the first pass the head of every row holds the values of the mesh's first rank.
    for _, tensor in _named_states(module):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        staged = local.detach().to(_device_of(mesh)).contiguous()
        if staged.numel() == 0:
            continue
        as_bytes = staged.reshape(-1).view(torch.uint8)  # gloo does not know every dtype
        for dim in range(mesh.ndim):
            dist.broadcast(as_bytes, group_src=0, group=mesh.get_group(dim))
        local.copy_(staged)


def _dtensors(module: nn.Module) -> Iterator[DTensor]:
    for tensor in module.parameters():
        if isinstance(tensor, DTensor):
            yield tensor
    # A forward may have left an FSDP2 unit gathered: its registered parameters are then plain, whole tensors.
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            for group in _fsdp2_groups(unit):
                for fsdp_param in group.fsdp_params:
                    yield fsdp_param.sharded_param


def _fsdp2_groups(unit: FSDPModule) -> list[Any]:
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []  # torch 2.11


def _is_split(tensor: DTensor) -> bool:
    sizes = tensor.device_mesh.shape
    return any(
        size > 1 and not placement.is_replicate() for size, placement in zip(sizes, tensor.placements, strict=True)
    )
