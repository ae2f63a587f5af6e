"""Where each parameter's values live: the only room that knows FSDP1 flat parameters and DTensors."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Shard as BlockShard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from fsdp_ema_lib.names import WRAPPER_SEGMENTS
from fsdp_ema_lib.process_group import comm_device
from fsdp_ema_lib.sharded_view import Piece, ShardedView, interval_boxes

_MESSAGE_BYTES = 16 << 20


@dataclass(eq=False)
class Shard(ABC):
    """One parameter, and this rank's part of it."""

    name: str
    shape: torch.Size
    owner: nn.Module
    key: str
    aliases: list[str] = field(default_factory=list)

    @property
    @abstractmethod
    def registered(self) -> Tensor:
        """The object that the module holds under `key`."""

    @abstractmethod
    def live(self) -> Tensor:
        """This rank's live values: an alias of the parameter's storage, without autograd."""

    @abstractmethod
    def pieces(self, local: Tensor) -> list[Piece]:
        """Where the elements of `local`, which has the shape of `live()`, stand in the full tensor."""

    @abstractmethod
    def view(self, local: Tensor) -> Tensor:
        """`local` in the form in which torch.distributed.checkpoint saves and loads it without a gather."""

    @abstractmethod
    def split_over(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups whose ranks hold different parts of this parameter; replicas are not counted."""

    @property
    def requires_grad(self) -> bool:
        return self.registered.requires_grad

    @property
    def dtype(self) -> torch.dtype:
        return self.registered.dtype

    def fill(self, local: Tensor, full: Any) -> None:
        """Copy this rank's part of `full`, a tensor of the full shape or something that slices like one, to `local`."""
        for piece in self.pieces(local):
            piece.view.copy_(piece.of(full))


class Unit(ABC):
    """Parameters that are gathered together; every rank of their group goes through the units in the same order."""

    shards: list[Any]

    @abstractmethod
    def gather(self, locals_: Mapping[str, Tensor], dst: int) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) for the names in `locals_`, on global rank `dst`; other ranks take part, get nothing."""

    def refuse_bad_moment(self) -> None:  # noqa: B027 - most kinds can be read at any moment
        """Raise where the parameters cannot be read now."""

    def before_write(self) -> None:  # noqa: B027 - most kinds need no preparation
        """Make sure that what is written to the local values is what the next forward uses."""

    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups over which these parameters are sharded; none where every rank holds them whole."""
        return []


@dataclass(eq=False)
class PlainShard(Shard):
    """A parameter that is whole on this rank: plain modules, DDP, FSDP1 NO_SHARD, whatever FSDP was told to ignore."""

    @property
    def registered(self) -> Tensor:
        tensor = getattr(self.owner, self.key)
        assert isinstance(tensor, Tensor)
        return tensor

    def live(self) -> Tensor:
        return self.registered.detach()

    def pieces(self, local: Tensor) -> list[Piece]:
        return [Piece((0,) * local.dim(), tuple(local.shape), local)]

    def view(self, local: Tensor) -> Tensor:
        return local

    def split_over(self) -> tuple[dist.ProcessGroup, ...]:
        return ()


class PlainUnit(Unit):
    """Everything that every rank holds whole."""

    def __init__(self) -> None:
        self.shards: list[PlainShard] = []

    def gather(self, locals_: Mapping[str, Tensor], dst: int) -> Iterator[tuple[str, Tensor]]:
        if _rank() == dst:
            yield from ((s.name, locals_[s.name]) for s in self.shards if s.name in locals_)


@dataclass(eq=False)
class MeshShard(Shard):
    """A DTensor: FSDP2, HSDP, tensor parallel, and their products."""

    @property
    def registered(self) -> DTensor:
        tensor = getattr(self.owner, self.key)
        assert isinstance(tensor, DTensor)
        return tensor

    def live(self) -> Tensor:
        return self.registered._local_tensor.detach()

    def pieces(self, local: Tensor) -> list[Piece]:
        param = self.registered
        if param.device_mesh.get_coordinate() is None:
            return []
        sizes, offsets = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
        return [Piece(tuple(offsets), tuple(sizes), local)] if math.prod(sizes) else []

    def view(self, local: Tensor) -> DTensor:
        param = self.registered
        # Not from_local: it moves a CPU-offloaded shard to the mesh's device, and a load would then fill a copy.
        meta = TensorMeta(param.shape, param.stride(), local.dtype)
        return DTensor(local, DTensorSpec(param.device_mesh, param.placements, meta), requires_grad=False)

    def split_over(self) -> tuple[dist.ProcessGroup, ...]:
        param = self.registered
        # Not is_shard(): it is false for the strided shards of tensor parallel times FSDP2.
        dims = [dim for dim, placement in enumerate(param.placements) if not placement.is_replicate()]
        return tuple(param.device_mesh.get_group(dim) for dim in dims)


class MeshUnit(Unit):
    """DTensors of one device mesh; gathered one parameter at a time."""

    def __init__(self) -> None:
        self.shards: list[MeshShard] = []

    def gather(self, locals_: Mapping[str, Tensor], dst: int) -> Iterator[tuple[str, Tensor]]:
        for shard in self.shards:
            if shard.name in locals_:
                yield from self._gather_one(shard, locals_[shard.name], dst)

    def _gather_one(self, shard: MeshShard, local: Tensor, dst: int) -> Iterator[tuple[str, Tensor]]:
        mesh, placements = shard.registered.device_mesh, shard.registered.placements
        # CPU-offloaded shards of a GPU mesh have no communication of their own.
        local = local.to(_mesh_device(shard.registered))
        split = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
        if len(split) != 1 or not isinstance(cut := placements[split[0]], BlockShard):
            full = shard.view(local).full_tensor()
            if _rank() == dst:
                yield shard.name, full
            return
        line = _line(mesh, split[0])
        if dst not in line:
            return
        full = torch.empty(shard.shape if _rank() == dst else 0, dtype=local.dtype, device=local.device)
        parts: dict[int, Tensor] = {}
        if _rank() == dst:
            for number, rank in enumerate(line):
                length, start = cut.local_shard_size_and_offset(shard.shape[cut.dim], len(line), number)
                parts[rank] = full.narrow(cut.dim, start, length)
        _bring_together(local, parts, dst, mesh.get_group(split[0]))
        if parts:
            yield shard.name, full

    def groups(self) -> list[dist.ProcessGroup]:
        return list(self.shards[0].registered.device_mesh.get_all_groups())

    def refuse_bad_moment(self) -> None:
        for shard in self.shards:
            mesh = shard.registered.device_mesh
            if any(p.is_partial() for p in shard.registered.placements):
                raise TypeError(
                    f"{shard.name}: a DTensor with partial placements on {mesh} has no values of its own yet"
                )


@dataclass(eq=False)
class FlatShard(Shard):
    """A slice of an FSDP1 flat parameter: a run of the parameter's elements in storage order."""

    unit: "FlatUnit" = field(kw_only=True)
    index: int = field(kw_only=True)

    @property
    def registered(self) -> Tensor:
        flat = self.unit.flat
        tensor: Tensor = flat._params[self.index] if flat._params is not None else flat
        return tensor

    def live(self) -> Tensor:
        if self.unit.flat._params is not None:
            return self.unit.flat._params[self.index].detach()
        return self.unit.slice(self.unit.flat.detach(), self.index)

    def pieces(self, local: Tensor) -> list[Piece]:
        if not self.unit.sharded:
            return [Piece((0,) * len(self.shape), tuple(self.shape), local)]
        info = self.unit.flat._shard_param_infos[self.index]
        if not info.in_shard:
            return []
        # A channels_last parameter was flattened in storage order, so its boxes are cut in that order of dimensions.
        order = self.unit.storage_order(self.index)
        back = [order.index(dim) for dim in range(len(order))]
        stored_shape = [self.shape[dim] for dim in order]
        pieces, cursor = [], 0
        for offsets, sizes in interval_boxes(stored_shape, info.intra_param_start_idx, info.intra_param_end_idx + 1):
            numel = math.prod(sizes)
            view = local[cursor : cursor + numel].view(sizes).permute(back)
            pieces.append(Piece(tuple(offsets[d] for d in back), tuple(sizes[d] for d in back), view))
            cursor += numel
        return pieces

    def view(self, local: Tensor) -> Tensor:
        return ShardedView(local, self.shape, self.pieces(local)) if self.unit.sharded else local

    def split_over(self) -> tuple[dist.ProcessGroup, ...]:
        return (self.unit.group,) if self.unit.sharded else ()


class FlatUnit(Unit):
    """One FSDP1 flat parameter, read through the metadata that FSDP1 keeps on it."""

    def __init__(self, handle: Any, where: str) -> None:
        self.handle = handle
        self.where = where
        self.flat = handle.flat_param
        self.sharded: bool = handle.uses_sharded_strategy
        self.group = handle.process_group
        self.shards: list[FlatShard] = []
        if any(extension is not None for extension in self.flat._param_extensions):
            raise TypeError(
                f"{where}: FSDP1 over tensor-parallel DTensors is not supported; use fully_shard (FSDP2), which is."
            )
        if self.sharded:
            for index in range(len(self.flat._fqns)):
                self.storage_order(index)

    def slice(self, flat: Tensor, index: int) -> Tensor:
        """Parameter `index` within this rank's part of the flat parameter."""
        if not self.sharded:
            return self.split(flat)[index]
        info = self.flat._shard_param_infos[index]
        return flat[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard] if info.in_shard else flat[:0]

    def split(self, flat: Tensor) -> list[Tensor]:
        """All parameters of the unit, in their own shapes, as views of the unsharded flat parameter."""
        meta = self.flat
        parts = flat[: sum(meta._numels_with_padding)].split(list(meta._numels_with_padding))
        whole = [part for part, padding in zip(parts, meta._is_padding_mask, strict=True) if not padding]
        return [
            part.view(shape) if contiguous else part.as_strided(shape, stride, part.storage_offset())
            for part, shape, stride, contiguous in zip(
                whole, meta._shapes, meta._strides, meta._contiguities, strict=True
            )
        ]

    def storage_order(self, index: int) -> list[int]:
        """The dimensions of parameter `index`, the slowest in memory first."""
        shape, stride = self.flat._shapes[index], self.flat._strides[index]
        dims = range(len(shape))
        if self.flat._contiguities[index]:
            return list(dims)
        order = sorted(dims, key=lambda dim: (-stride[dim], dim))
        expected = 1
        for dim in reversed(order):
            if shape[dim] > 1 and stride[dim] != expected:
                raise TypeError(
                    f"{self.where}.{self.flat._fqns[index]}: strides {tuple(stride)} leave holes or overlap in shape "
                    f"{tuple(shape)}; FSDP1 cannot flatten that without loss. Make it contiguous before wrapping."
                )
            expected *= shape[dim]
        return order

    def gather(self, locals_: Mapping[str, Tensor], dst: int) -> Iterator[tuple[str, Tensor]]:
        wanted = [shard for shard in self.shards if shard.name in locals_]
        if not wanted:
            return
        if not self.sharded:
            if _rank() == dst:
                yield from ((shard.name, locals_[shard.name]) for shard in wanted)
            return
        members = dist.get_process_group_ranks(self.group)
        if dst not in members:
            return
        # One buffer for the whole unit: the widest dtype in it holds every narrower one exactly.
        dtype = locals_[wanted[0].name].dtype
        for shard in wanted:
            dtype = torch.promote_types(dtype, locals_[shard.name].dtype)
        size, device = self.flat._sharded_size.numel(), comm_device(self.group)
        full = torch.empty(len(members) * size if _rank() == dst else 0, dtype=dtype, device=device)
        parts = dict(zip(members, full.split(size), strict=True)) if _rank() == dst else {}
        mine = parts[dst] if parts else torch.zeros(size, dtype=dtype, device=device)
        for shard in wanted:
            self.slice(mine, shard.index).copy_(locals_[shard.name])
        _bring_together(mine, parts, dst, self.group)
        if parts:
            whole = self.split(full)
            yield from ((shard.name, whole[shard.index].to(locals_[shard.name].dtype)) for shard in wanted)

    def before_write(self) -> None:
        # FSDP1 keeps a root's all-gathered parameters after a forward without backward; it would use them again.
        # Before the first forward it has gathered none, and lacks the attributes that reshard reads.
        if self.sharded and hasattr(self.flat, "_local_shard"):
            self.handle.reshard(True)

    def groups(self) -> list[dist.ProcessGroup]:
        return [self.group] if self.sharded else []

    def refuse_bad_moment(self) -> None:
        names = ", ".join(self.flat._fqns[:3]) + (", ..." if len(self.flat._fqns) > 3 else "")
        if self.handle._training_state != HandleTrainingState.IDLE:
            raise RuntimeError(
                f"{self.where}: FSDP1 holds {names} unsharded ({self.handle._training_state.name}); "
                f"leave summon_full_params, forward and backward before you call this."
            )


class Layout:
    """Every parameter and buffer of a model, under its canonical name, with the place where its values live.

    Args:
        module: a model, or a list of model parts whose names do not overlap. FSDP2 parameters that a forward left
            unsharded are resharded (no collective).

    Raises:
        TypeError: a parameter is on the meta device, not initialized, partitioned by DeepSpeed ZeRO-3 or not strided.
        ValueError: two parameters get the same canonical name.
        RuntimeError: FSDP1 holds its parameters unsharded at this moment.

    Example:
        >>> layout = Layout(nn.Linear(3, 2))
        >>> {name: tuple(shard.shape) for name, shard in layout.shards.items()}
        {'weight': (2, 3), 'bias': (2,)}
    """

    def __init__(self, module: nn.Module | Sequence[nn.Module]) -> None:
        parts = [module] if isinstance(module, nn.Module) else module
        if not isinstance(parts, list | tuple) or not all(isinstance(part, nn.Module) for part in parts) or not parts:
            raise TypeError(f"module must be an nn.Module or a list of them, got {module!r}")
        self.modules: tuple[nn.Module, ...] = tuple(parts)
        _reshard(self.modules)
        self.shards: dict[str, Shard] = {}
        self.buffers: dict[str, Shard] = {}
        self.extra_state: dict[str, Any] = {}
        # Name of every entry of the plain model's state dict, in its order -> name under which the value is kept here.
        self.primary: dict[str, str] = {}
        self.units: list[Unit] = []
        self._plain, self._meshes = PlainUnit(), {}  # type: ignore[var-annotated]
        self._flat = self._find_flat_units()
        self._seen: dict[int | tuple[int, int], str] = {}
        for part in self.modules:
            for prefix, owner in _walk(part, ""):
                self._add_parameters(prefix, owner)
                self._add_buffers(prefix, owner)
        for unit in self.units:
            unit.refuse_bad_moment()
        self.watch(self.shards.values())

    def _find_flat_units(self) -> dict[tuple[int, str], tuple[FlatUnit, int]]:
        """(owning module, attribute) -> the flat parameter that holds it and its number there."""
        found: dict[tuple[int, str], tuple[FlatUnit, int]] = {}
        for part in self.modules:
            for path, module in part.named_modules():
                handle = getattr(module, "_handle", None) if isinstance(module, FullyShardedDataParallel) else None
                if handle is None:
                    continue
                unit = FlatUnit(handle, path or "the root module")
                for index, info in enumerate(unit.flat._param_infos):
                    found[id(info.module), info.param_name] = (unit, index)
                for info in unit.flat._shared_param_infos:
                    found[id(info.module), info.param_name] = found[id(info.prim_module), info.prim_param_name]
        return found

    def _add_parameters(self, prefix: str, owner: nn.Module) -> None:
        keys = dict.fromkeys(key for key, param in owner._parameters.items() if param is not None)
        keys.update(dict.fromkeys(key for holder, key in self._flat if holder == id(owner)))
        for key in keys:
            if (flat := self._flat.get((id(owner), key))) is not None:
                self._add_flat(prefix + key, owner, key, *flat)
                continue
            param = owner._parameters[key]
            assert param is not None
            if getattr(param, "_is_flat_param", False):
                continue
            name = prefix + key
            _refuse_unreadable(name, param)
            if not self._register(name, id(param)):
                continue
            if isinstance(param, DTensor):
                self._add(MeshShard(name, param.shape, owner, key), self._mesh_unit(param), self.shards)
            else:
                self._add(PlainShard(name, param.shape, owner, key), self._plain, self.shards)

    def _add_flat(self, name: str, owner: nn.Module, key: str, unit: FlatUnit, index: int) -> None:
        _refuse_unreadable(name, unit.flat)
        if self._register(name, (id(unit), index)):
            self._add(FlatShard(name, unit.flat._shapes[index], owner, key, unit=unit, index=index), unit, self.shards)

    def _add_buffers(self, prefix: str, owner: nn.Module) -> None:
        for key, buffer in owner._buffers.items():
            if buffer is None or key in owner._non_persistent_buffers_set:
                continue
            name = prefix + key
            if not self._register(name, id(buffer)):
                continue
            if isinstance(buffer, DTensor):
                self._add(MeshShard(name, buffer.shape, owner, key), self._mesh_unit(buffer), self.buffers)
            else:
                self._add(PlainShard(name, buffer.shape, owner, key), self._plain, self.buffers)
        if type(owner).get_extra_state is not nn.Module.get_extra_state:
            name = prefix + "_extra_state"
            if self._register(name, id(owner)):
                self.extra_state[name] = owner.get_extra_state()

    def _register(self, name: str, identity: int | tuple[int, int]) -> bool:
        """Note the name; false if the same tensor was seen before under another name."""
        if name in self.primary:
            raise ValueError(
                f"{name}: two parameters or buffers get this canonical name once wrapper segments "
                f"({', '.join(sorted(WRAPPER_SEGMENTS))}, a DDP wrapper's module) are removed, or two model parts both "
                f"have it. Rename one of them."
            )
        first = self._seen.setdefault(identity, name)
        self.primary[name] = first
        if first != name and (shard := self.get(first)) is not None:
            shard.aliases.append(name)
        return first == name

    def get(self, name: str) -> Shard | None:
        """The parameter or buffer of this (primary) name."""
        return self.shards.get(name) or self.buffers.get(name)

    def _mesh_unit(self, param: DTensor) -> MeshUnit:
        key = id(param.device_mesh)
        return self._meshes.setdefault(key, MeshUnit())

    def _add(self, shard: Shard, unit: Unit, table: dict[str, Shard]) -> None:
        if unit not in self.units:
            self.units.append(unit)
        unit.shards.append(shard)
        table[shard.name] = shard

    def watch(self, shards: Iterable[Shard]) -> None:
        """Remember what `is_current` compares: registered objects and the addresses of their values."""
        # Keeping the tensors themselves makes identity safe: no new object can take a dead one's address.
        modules = list(dict.fromkeys(module for part in self.modules for module in part.modules()))
        self._tables = [table for m in modules for table in (m._modules, m._parameters)]
        self._sizes = list(map(len, self._tables))
        self._slots: list[tuple[dict[str, Any], str, object]] = [
            (m._modules, key, child) for m in modules for key, child in m._modules.items()
        ]
        # A module built with bias=False has an empty place for it, which may be filled later.
        self._slots += [(m._parameters, key, None) for m in modules for key, p in m._parameters.items() if p is None]
        tensors = []
        for shard in shards:
            tensor = shard.registered
            slots = next((d for d in _slots_of(shard.owner) if d.get(shard.key) is tensor), {shard.key: tensor})
            self._slots.append((slots, shard.key, tensor))
            tensors.append(tensor)
        self._frozen = [tensor for tensor in tensors if not tensor.requires_grad]
        self._meshed = [(t, t._local_tensor) for t in tensors if isinstance(t, DTensor)]
        self._local = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
        self._addresses = [tensor.data_ptr() for tensor in self._local]

    def is_current(self) -> bool:
        """Whether every watched parameter is the same object, at the same address, and none was unfrozen.

        Comparisons of cached objects and no walk through the modules. It notices a replaced parameter or module, one
        that was added or removed, `.data = ...`, `.to(...)`, an FSDP2 or FSDP1 parameter that is unsharded at this
        moment, and a parameter that became trainable.
        """
        if not all(slots.get(key) is known for slots, key, known in self._slots):
            return False
        if list(map(len, self._tables)) != self._sizes:
            return False
        if not all(tensor._local_tensor is local for tensor, local in self._meshed):
            return False
        return list(map(Tensor.data_ptr, self._local)) == self._addresses and not any(
            tensor.requires_grad for tensor in self._frozen
        )

    def live(self) -> dict[str, Tensor]:
        """This rank's live values of every parameter and buffer, by name: aliases, without autograd."""
        return {name: shard.live() for name, shard in (self.shards | self.buffers).items()}

    def before_write(self) -> None:
        """Call before writing to local values, so that the next forward uses what is written. Local."""
        _reshard(self.modules)
        for unit in self.units:
            unit.before_write()

    def groups(self) -> list[dist.ProcessGroup]:
        """Every process group over which some parameter is sharded, each once, in the same order on its ranks."""
        return list(dict.fromkeys(group for unit in self.units for group in unit.groups()))

    def is_split(self) -> bool:
        """Whether ranks hold different parts of some parameter; if not, each has the whole model."""
        return any(group.size() > 1 for shard in self.shards.values() for group in shard.split_over())

    def stream(self, locals_: Mapping[str, Tensor], dst: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Gather local tensors to full ones, unit by unit, on global rank `dst`.

        Every rank must iterate to the end: each unit is a collective over its own group. At most one FSDP1 unit, or one
        DTensor, is gathered at a time; a yielded tensor may be a view of that unit, so copy what you keep.

        Args:
            locals_: name -> this rank's local tensor, of the shape of `live()`; the same names on every rank.
            dst: global rank that gets the tensors.

        Returns:
            (name, full tensor) on rank `dst`, nothing elsewhere.
        """
        for unit in self.units:
            yield from unit.gather(locals_, dst)


def _bring_together(mine: Tensor, parts: Mapping[int, Tensor], dst: int, group: dist.ProcessGroup) -> None:
    """Bring what each rank of a group holds to its place in a full tensor on global rank `dst`.

    A gather would hold everything twice, in buffers of its own and in the full tensor. Here each message lands where it
    belongs; where that place is not contiguous, by way of one message's worth of scratch.

    Args:
        mine: this rank's part; on `dst` it may be its place already.
        parts: on `dst` global rank -> view of the full tensor, for every rank of the group; not read elsewhere.
    """
    if _rank() != dst:
        for message in _messages(mine):
            _transfer(dist.isend, message.contiguous(), dst, group)
        return
    for rank, part in parts.items():
        if rank == dst:
            part.copy_(mine)
            continue
        for place in _messages(part):
            landing = place if place.is_contiguous() else torch.empty(place.shape, dtype=part.dtype, device=part.device)
            _transfer(dist.irecv, landing, rank, group)
            if landing is not place:
                place.copy_(landing)


def _messages(part: Tensor) -> Iterator[Tensor]:
    """A part in blocks of rows of about `_MESSAGE_BYTES`: the same on the sender and the receiver."""
    if part.numel():
        yield from part.split(max(1, _MESSAGE_BYTES * len(part) // (part.numel() * part.itemsize)))


def _transfer(operation: Any, tensor: Tensor, peer: int, group: dist.ProcessGroup) -> None:
    # As a batch, which on NCCL uses the group's communicator; a single send would make one for each pair of ranks.
    for work in dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, group)]):
        work.wait()


def _slots_of(owner: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return owner._parameters, owner._buffers


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """(canonical prefix, module), in the order of `state_dict()`, a shared module once under each of its names."""
    yield prefix, module
    wrapped_by_ddp = isinstance(module, DistributedDataParallel | DataParallel)
    for key, child in module._modules.items():
        if child is not None:
            transparent = key in WRAPPER_SEGMENTS or (wrapped_by_ddp and key == "module")
            yield from _walk(child, prefix if transparent else f"{prefix}{key}.")


def _reshard(modules: Iterable[nn.Module]) -> None:
    for part in modules:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                # FSDP2 leaves a root unsharded after a forward without backward: the registered parameters are then
                # other objects, and what is written to them is lost at the next reshard.
                module.reshard()


def _refuse_unreadable(name: str, param: Tensor) -> None:
    if hasattr(param, "ds_id"):
        raise TypeError(
            f"{name}: DeepSpeed ZeRO-3 partitions this parameter (local shape {tuple(param.shape)}, full shape "
            f"{tuple(getattr(param, 'ds_shape', ()))}), so its average would be of nothing. Shard the model with "
            f"fsdp_wrap or fsdp2_wrap instead."
        )
    if is_lazy(param):
        raise TypeError(f"{name}: a lazy module has not created this parameter yet. Run one forward first.")
    if param.is_meta:
        raise TypeError(
            f"{name}: the parameter is on the meta device and has no values. Materialize the model first "
            f"(module.to_empty(device=...), then load or initialize its weights)."
        )
    if param.layout is not torch.strided:
        raise TypeError(f"{name}: a strided parameter was expected, this one has layout {param.layout}.")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _line(mesh: DeviceMesh, dim: int) -> list[int]:
    """The global ranks along one dimension of a mesh through this rank, in the mesh's order; [] for one outside it."""
    at: Sequence[Any] | None = mesh.get_coordinate()
    return [] if at is None else mesh.mesh[(*at[:dim], slice(None), *at[dim + 1 :])].tolist()


def _mesh_device(param: DTensor) -> torch.device:
    kind = param.device_mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
