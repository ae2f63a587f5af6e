"""The entries of a checkpoint: what is saved under which name, and what a load asks for."""

import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from fsdp_ema_lib.ema_state import local_of
from fsdp_ema_lib.sharded_view import ShardedView


@dataclass
class Contents:
    """What one rank saves.

    Attributes:
        entries: entry name -> tensor in checkpoint form, or an object that `weights_only=True` reads back.
        described: what the manifest says about it, plain JSON.
        buffers: entries that every rank has whole and may have otherwise: nothing keeps buffers in step across ranks.
    """

    entries: dict[str, Any] = field(default_factory=dict)
    described: dict[str, Any] = field(default_factory=lambda: {"model": {}, "optimizer": {}, "emas": {}, "classes": {}})
    buffers: list[str] = field(default_factory=list)

    def digests(self) -> dict[str, int]:
        """Checksums of the buffers."""
        return {name: _digest(self.entries[name]) for name in self.buffers}

    def settle_buffers(self, digests: Sequence[Mapping[str, int]], rank: int) -> None:
        """Leave each buffer to the first rank that has it; where this rank's values differ, save them beside.

        Args:
            digests: what `digests` returns on each rank.
            rank: this one.
        """
        for name in self.buffers:
            first = next(number for number, found in enumerate(digests) if name in found)
            if first == rank:
                continue
            value = self.entries.pop(name)
            if digests[first][name] != digests[rank][name]:
                self.entries[of_rank(rank, name)] = value


@dataclass
class Restore:
    """A load in preparation: what it fills, and what to do once all is filled.

    Attributes:
        entries: entry name -> what is to be filled, in checkpoint form.
        in_place: those of the entries that are filled last of all, because their values are in use.
        checks: run once the others are filled, before anything is changed; they raise.
        takers: run next: the `load_state_dict` of objects of the caller's, which may raise whatever it likes.
        steps: run once all entries are filled; change the rest.
        faults: every way in which the checkpoint does not fit.
        strays: what the checkpoint holds and this rank did not ask for: a fault where no rank did.
    """

    metadata: Metadata
    manifest: Mapping[str, Any]
    rank: int
    world_size: int
    allow_missing: Sequence[str] = ()
    allow_unexpected: Sequence[str] = ()
    entries: dict[str, Any] = field(default_factory=dict)
    in_place: set[str] = field(default_factory=set)
    checks: list[Callable[[], None]] = field(default_factory=list)
    takers: list[Callable[[], None]] = field(default_factory=list)
    steps: list[Callable[[], None]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    known: set[str] = field(default_factory=set)

    def saved(self, entry: str) -> Any:
        """What the checkpoint says about an entry; None if it has none."""
        return self.metadata.state_dict_metadata.get(entry)

    def own(self, entry: str) -> str:
        """Where this rank's values of an entry are: under a name of its own if they differed from the others' ones."""
        mine = of_rank(self.rank, entry)
        same_world = self.world_size == self.manifest["world_size"]
        return mine if same_world and self.saved(mine) is not None else entry

    def may_miss(self, name: str) -> bool:
        """Whether a parameter of this name may be missing."""
        return any(fnmatchcase(name, pattern) for pattern in self.allow_missing)

    def may_be_left(self, name: str) -> bool:
        """Whether the checkpoint may have a parameter of this name that is not asked for."""
        return any(fnmatchcase(name, pattern) for pattern in self.allow_unexpected)

    def fits(self, entry: str, name: str, shape: torch.Size, dtype: torch.dtype) -> bool:
        """Whether the checkpoint holds a tensor of this entry, shape and dtype; notes the fault if it may not miss it.

        Args:
            entry: its name in the checkpoint.
            name: of the parameter, for patterns.
            shape: of the full tensor.
            dtype: as it must be: a cast would not give back what was saved.
        """
        self.known.add(entry)
        saved = self.saved(self.own(entry))
        if saved is None:
            if not self.may_miss(name):
                self.faults.append(f"{entry}: missing in the checkpoint; {tuple(shape)} was expected")
            return False
        if not isinstance(saved, TensorStorageMetadata):
            self.faults.append(f"{entry}: the checkpoint holds no tensor, {tuple(shape)} was expected")
        elif saved.size != shape:
            self.faults.append(f"{entry}: the checkpoint holds {tuple(saved.size)}, {tuple(shape)} was expected")
        elif saved.properties.dtype != dtype:
            self.faults.append(f"{entry}: the checkpoint holds {saved.properties.dtype}, {dtype} was expected")
        else:
            return True
        return False

    def want(self, entry: str, name: str, current: Tensor) -> Tensor | None:
        """Ask for a tensor like `current`, which every rank has whole.

        Args:
            entry, name: as for `fits`.
            current: this rank's values now.

        Returns:
            A tensor on the CPU that will be filled; None if it does not fit.
        """
        if not self.fits(entry, name, current.shape, current.dtype):
            return None
        filled = torch.empty_like(current, device="cpu", requires_grad=False)
        self.entries[self.own(entry)] = filled
        return filled

    def want_in_place(self, entry: str, view: Tensor) -> None:
        """Ask for values of an entry that fits, to be read into those that are in use.

        Args:
            entry: its name in the checkpoint.
            view: the values in use, in checkpoint form.
        """
        local = local_of(view)
        if any(n > 1 and stride == 0 for n, stride in zip(local.shape, local.stride(), strict=True)):
            self.faults.append(
                f"{entry}: several of its elements share one place in memory here (an expanded tensor), so that they "
                f"cannot be filled; clone() it"
            )
            return
        self.entries[self.own(entry)] = view
        self.in_place.add(self.own(entry))

    def want_object(self, entry: str, fault: str | None) -> bool:
        """Ask for something that is no tensor; `fault` is what to say if it is missing, None if it may be."""
        self.known.add(entry)
        if self.saved(entry) is None:
            if fault is not None:
                self.faults.append(fault)
            return False
        self.entries[entry] = None
        return True

    def unexpected(self, sections: Sequence[str]) -> Iterator[str]:
        """Entries of the sections that this rank did not ask for."""
        for entry in self.metadata.state_dict_metadata:
            section = next((section for section in sections if entry.startswith(section)), None)
            if section is None or entry in self.known:
                continue
            name = entry[len(section) :].removeprefix("shadow.").removeprefix("low.")
            if not self.may_be_left(name):
                yield f"{entry}: in the checkpoint, not expected here"


def flat(state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The entries of a state dict of at most two levels, with dotted names."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", one) for inner, one in value.items())
        else:
            yield key, value


def over(view: Tensor, local: Tensor) -> Tensor:
    """The same place in the full tensor, over another local tensor."""
    if isinstance(view, DTensor):
        return DTensor(local, view._spec, requires_grad=False)
    return view.with_local(local) if isinstance(view, ShardedView) else local


def staged(entries: Mapping[str, Any], buffers: dict[str, Tensor]) -> dict[str, Any]:
    """Copies of everything, tensors on the CPU in buffers that are used again: a save writes while training goes on.

    Args:
        entries: as in `Contents`.
        buffers: entry name -> buffer; kept by the caller from one save to the next.
    """
    copies: dict[str, Any] = {}
    moved = False
    for name, value in entries.items():
        if not isinstance(value, Tensor):
            copies[name] = _as_saved(value)
            continue
        local = local_of(value)
        buffer = buffers.get(name)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty_like(local, device="cpu", pin_memory=local.is_cuda, requires_grad=False)
            buffers[name] = buffer
        buffer.copy_(local, non_blocking=local.is_cuda)
        moved |= local.is_cuda
        copies[name] = over(value, buffer)
    if moved:
        torch.cuda.synchronize()
    return copies


def _as_saved(value: Any) -> Any:
    """A copy by way of the bytes that a save writes: whatever a load accepts can be copied so."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def plain_json(value: Any, where: str) -> Any:
    """The value as JSON gives it back; TypeError, naming where it stands, if JSON cannot hold it."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as problem:
        raise TypeError(
            f"{where} is {type(value).__name__}, only tensors and plain numbers, names and lists of them can be saved"
        ) from problem


def of_rank(rank: int, entry: str) -> str:
    """The name of an entry for values that one rank alone has."""
    return f"rank{rank}.{entry}"


def _digest(tensor: Tensor) -> int:
    # Of a view that conjugates or negates, torch shows no bytes.
    plain = local_of(tensor).detach().cpu().resolve_conj().resolve_neg()
    values = plain.contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(values.numpy().data)
