"""Full tensors on their way out of a sharded model and back in, one at a time."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_ema_lib.agreement import agree, from_rank_zero, raise_together
from fsdp_ema_lib.layout import Layout, Shard
from fsdp_ema_lib.names import is_predictive_aux_key, normalize_generator_fsdp_key, normalize_generator_fsdp_state_dict
from fsdp_ema_lib.process_group import comm_device, is_main_process

Entry = tuple[torch.dtype, tuple[int, ...]]


def entries(layout: Layout, locals_: Mapping[str, Tensor], export_dtype: torch.dtype | None) -> dict[str, Entry]:
    """Name -> (dtype, full shape) of everything that `stream` yields for these local tensors. Local.

    Args:
        layout: of the model.
        locals_: primary name -> this rank's local tensor; what is not in it is left out.
        export_dtype: floating dtype for parameters, None for their own. Buffers keep theirs.
    """
    found: dict[str, Entry] = {}
    for name, primary in layout.primary.items():
        shard = layout.get(primary)
        if shard is not None and primary in locals_:
            found[name] = _exported_dtype(layout, primary, locals_[primary].dtype, export_dtype), tuple(shard.shape)
    return found


def stream(
    layout: Layout, locals_: Mapping[str, Tensor], export_dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Gather local tensors one FSDP1 unit or one DTensor at a time: (name, full tensor) on rank 0, nothing elsewhere.

    Collective: every rank must iterate to the end. A tied tensor comes once under each of its names. What is yielded
    may be a view of its unit: copy or write it before going on. Not under a `no_grad` decorator, which on a generator
    keeps what was yielded last while the next unit is gathered.

    Args:
        layout: of the model.
        locals_: primary name -> this rank's local tensor, the same names on every rank.
        export_dtype: floating dtype for parameters, None for their own. Buffers keep theirs.
    """
    names: dict[str, list[str]] = defaultdict(list)
    for name, primary in layout.primary.items():
        names[primary].append(name)
    for primary, full in layout.stream(locals_):
        tensor = full.to(_exported_dtype(layout, primary, full.dtype, export_dtype))
        del full  # a name that outlives its turn would keep a unit alive while the next one is gathered
        for name in names[primary]:
            yield name, tensor
        del tensor


def collect(layout: Layout, locals_: Mapping[str, Tensor], export_dtype: torch.dtype | None) -> dict[str, Any]:
    """Everything that `stream` yields, as one dict on rank 0's CPU; {} elsewhere.

    Collective. In the order of the plain model's state dict; tied names share one tensor.
    """
    gathered: dict[str, Any] = dict(layout.extra_state)
    for name, tensor in stream(layout, locals_, export_dtype):
        primary = layout.primary[name]
        gathered[name] = gathered[primary] if primary in gathered else tensor.to("cpu", copy=True)
        del tensor
    return {name: gathered[name] for name in layout.primary if name in gathered} if is_main_process() else {}


def refuse_parts_elsewhere(layout: Layout) -> None:
    """Raise ValueError on every rank unless rank 0's model has all names of every rank's. Collective.

    Gathers end on rank 0, over the groups that it belongs to: a pipeline stage that it has no part of would be missing.
    """
    if agree(list(layout.primary)):
        return
    at_zero = set(from_rank_zero(list(layout.primary)))
    away = [name for name in layout.primary if name not in at_zero]
    error = None
    if away:
        error = ValueError(
            f"rank 0 has no part of {', '.join(away[:3])}{' ...' if len(away) > 3 else ''}, which other ranks hold (a "
            f"pipeline stage of their own): one rank cannot gather them all. Save with torch.distributed.checkpoint or "
            f"CheckpointManager, and export the checkpoint with `fsdp-ema export`."
        )
    raise_together(error)


def check_export_dtype(export_dtype: torch.dtype | None) -> None:
    """Raise TypeError unless it is None or a floating dtype."""
    if export_dtype is not None and not (isinstance(export_dtype, torch.dtype) and export_dtype.is_floating_point):
        raise TypeError(f"export_dtype must be a floating torch.dtype or None, got {export_dtype!r}")


def match(
    layout: Layout,
    averages: Mapping[str, Tensor],
    full_sd: Mapping[str, Any],
    allow_missing_aux: bool,
    expected_shapes: Mapping[str, Sequence[int]] | None,
) -> dict[str, Tensor]:
    """Find the full tensor of each average in a state dict, or raise with every fault of the dict at once. Local.

    Args:
        layout: of the model.
        averages: primary name -> local average; what is to be found.
        full_sd: any names that `normalize_generator_fsdp_state_dict` understands -> full tensors. Entries of the model
            that are not averaged are allowed; of a tied parameter one name is enough, and two must be equal.
        allow_missing_aux: auxiliary parameters may be missing.
        expected_shapes: a shape for every entry of the dict, or None.

    Raises:
        ValueError: missing, unexpected or mis-shaped entries.
        TypeError: an entry that is no tensor, or whose values the average's dtype cannot hold.
    """
    given = _canonical(full_sd, layout)
    faults = [f"{name}: not a parameter or buffer of this model" for name in given if name not in layout.primary]
    wrong_types: list[str] = []
    found: dict[str, Tensor] = {}
    for name, average in averages.items():
        shard = _known(layout, name)
        tied = [alias for alias in (name, *shard.aliases) if alias in given]
        if not tied:
            if not (allow_missing_aux and is_predictive_aux_key(name)):
                faults.append(f"{name}: missing; this model has {tuple(shard.shape)}")
            continue
        found[name] = given[tied[0]]
        for alias in tied:
            value = given[alias]
            if (text := _type_fault(value, average.dtype)) is not None:
                wrong_types.append(f"{alias}: {text}")
            elif value.shape != shard.shape:
                faults.append(f"{alias}: the dict holds {tuple(value.shape)}, this model has {tuple(shard.shape)}")
            elif alias != tied[0] and not _same_values(value, found[name]):
                faults.append(f"{alias}: differs from {tied[0]}, but both are one tied parameter of this model")
    if expected_shapes is not None:
        faults += _unexpected_shapes(given, normalize_generator_fsdp_state_dict(expected_shapes))
    if faults or wrong_types:
        hint = "Load it into the model that it was saved from"
        hint += "." if allow_missing_aux else ", or pass allow_missing_aux=True if only auxiliary heads are missing."
        kind = ValueError if faults else TypeError
        raise kind("\n".join(["the full state does not fit this model:", *faults, *wrong_types, hint]))
    return found


def receive(shard: Shard, like: Tensor, full: Tensor | None) -> Tensor:
    """This rank's slice of a full tensor that rank 0 has, as a new local tensor of `like`'s dtype. Collective."""
    local = torch.empty_like(like)
    if not dist.is_initialized():
        assert full is not None
        shard.fill(local, full.to(like.dtype))
        return local
    if full is None:
        buffer = torch.empty(shard.shape, dtype=like.dtype, device=comm_device())
    else:
        buffer = full.to(device=comm_device(), dtype=like.dtype).contiguous()
    dist.broadcast(buffer, src=0)
    shard.fill(local, buffer)
    return local


def _exported_dtype(layout: Layout, primary: str, dtype: torch.dtype, export_dtype: torch.dtype | None) -> torch.dtype:
    castable = export_dtype is not None and dtype.is_floating_point and primary in layout.shards
    return export_dtype if castable and export_dtype is not None else dtype


def _known(layout: Layout, name: str) -> Shard:
    shard = layout.get(name)
    assert shard is not None, name
    return shard


def _canonical(full_sd: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """The dict under canonical names; a leading `module.` goes unless this model itself has such names."""
    if any(name.startswith("module.") for name in layout.primary):
        return {normalize_generator_fsdp_key(name): value for name, value in full_sd.items()}
    return normalize_generator_fsdp_state_dict(full_sd)


def _type_fault(value: Any, dtype: torch.dtype) -> str | None:
    if not isinstance(value, Tensor):
        return f"a tensor was expected, the dict holds {type(value).__name__}"
    numeric = value.dtype.is_floating_point or value.dtype.is_complex
    if not numeric or torch.promote_types(value.dtype, dtype) != dtype:
        return f"the dict holds {value.dtype}, which the average's {dtype} cannot hold exactly; convert it first"
    return None


def _same_values(value: Tensor, other: Any) -> bool:
    same = isinstance(other, Tensor) and other.shape == value.shape
    return same and torch.allclose(value.to(other.dtype), other, rtol=0.0, atol=0.0, equal_nan=True)


def _unexpected_shapes(given: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> Iterator[str]:
    for name, value in given.items():
        if name not in shapes:
            yield f"{name}: expected_shapes has no shape for it"
        elif isinstance(value, Tensor) and tuple(value.shape) != tuple(shapes[name]):
            yield f"{name}: the dict holds {tuple(value.shape)}, expected_shapes says {tuple(shapes[name])}"
