"""The arithmetic of one update over lists of local tensors: the hot path, nothing else."""

import logging
import os
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger("fsdp_ema_lib")

# Where an update needs room (live values of another dtype, compensation, a check for non-finite values) it works piece
# by piece in one scratch of this many bytes.
CPU_SCRATCH_BYTES = 1 << 20  # stays in the cache from one step of the arithmetic to the next
GPU_SCRATCH_BYTES = 32 << 20  # few launches, and still small beside a model
# torch spreads an operation on a CPU over threads from so many elements on (its GRAIN_SIZE). Smaller tensors leave all
# cores but one idle. From so many of them on it paid to deal them out, whatever their size (16x16 to 128x128, 2 cores).
CPU_GRAIN_ELEMENTS = 32768
CPU_CALL_ELEMENTS = 1500  # as many more elements take as long as a tensor does by itself (1.1 µs of 4.1 for 64x64)
MANY_TENSORS = 400


@dataclass(frozen=True)
class Batch:
    """Tensors that one fused call averages.

    Attributes:
        shadow: the averages, changed in place.
        live: the live values.
        low: the low-order parts of the averages (`precision="compensated"`), or none.
        scratch: a place for each tensor of the batch, or none where the update needs no room.
        room: the stretch of the scratch that these places fill.
        paired: whether the last dimension holds the parts of complex numbers.
        weight: 0-dim fp64 tensor for the compiled update to read the weight of the live values from, or none.
        elsewhere: whether another thread averages it, while the caller's averages the others.
    """

    shadow: list[Tensor] = field(default_factory=list)
    live: list[Tensor] = field(default_factory=list)
    low: list[Tensor] = field(default_factory=list)
    scratch: list[Tensor] = field(default_factory=list)
    room: Tensor | None = None
    paired: bool = False
    weight: Tensor | None = None
    elsewhere: bool = False


def plan(
    shadow: Sequence[Tensor],
    live: Sequence[Tensor],
    low: Sequence[Tensor] = (),
    *,
    roomy: bool = False,
    compiled: bool = False,
) -> list[Batch]:
    """Sort tensors into batches for `average`; done once, not per update.

    Args:
        shadow: the averages; fp32, fp64 or complex.
        live: the live values, each of its shadow's shape and device; any dtype that converts to the shadow's exactly.
        low: the low-order parts of the averages, or nothing.
        roomy: give every batch a scratch: `average` needs one for `skipped` and for a decay on the device.
        compiled: let torch.compile fuse the update of the tensors that need no room; it widens live values on the fly.

    Returns:
        Batches that alias the given tensors. Tensors without elements are left out.
    """
    groups: dict[tuple[torch.device, torch.dtype, bool, bool], list[tuple[Tensor, ...]]] = defaultdict(list)
    for members in zip(shadow, live, *([low] if low else []), strict=True):
        if members[0].numel():
            real = tuple(torch.view_as_real(t) if t.is_complex() else t for t in members)
            needs_room = roomy or bool(low) or (real[0].dtype != real[1].dtype and not compiled)
            groups[real[0].device, real[0].dtype, needs_room, needs_room and members[0].is_complex()].append(real)
    batches: list[Batch] = []
    for (device, dtype, needs_room, paired), tensors in groups.items():
        if needs_room:
            batches.extend(_batches_with_room(tensors, device, dtype, paired))
        else:
            if compiled:
                batches.append(_batch_in_place(tensors, weight=torch.zeros((), dtype=torch.float64)))
            else:
                batches.extend(_batches_in_place(tensors, device))
    return batches


def _batches_in_place(tensors: Sequence[tuple[Tensor, ...]], device: torch.device) -> list[Batch]:
    small = [members for members in tensors if members[0].numel() < CPU_GRAIN_ELEMENTS]
    if device.type != "cpu" or len(small) < MANY_TENSORS or (hands := torch.get_num_threads()) == 1:
        return [_batch_in_place(tensors)]
    large = [members for members in tensors if members[0].numel() >= CPU_GRAIN_ELEMENTS]
    batches = [_batch_in_place(share, elsewhere=hand > 0) for hand, share in enumerate(_shares(small, hands))]
    return [*batches, _batch_in_place(large)] if large else batches


def _shares(tensors: Sequence[tuple[Tensor, ...]], hands: int) -> list[list[tuple[Tensor, ...]]]:
    """Deal tensors out in stretches that take about equally long; one by one, a hand might get all the biases."""
    costs = [members[0].numel() + CPU_CALL_ELEMENTS for members in tensors]
    whole = sum(costs)
    shares: list[list[tuple[Tensor, ...]]] = [[] for _ in range(hands)]
    for members, cost, done in zip(tensors, costs, accumulate(costs), strict=True):
        shares[(2 * done - cost) * hands // (2 * whole)].append(members)
    return [share for share in shares if share]


def _batch_in_place(tensors: Sequence[tuple[Tensor, ...]], **settings: Any) -> Batch:
    return Batch([shadow for shadow, _ in tensors], [live for _, live in tensors], **settings)


def _batches_with_room(
    tensors: Sequence[tuple[Tensor, ...]], device: torch.device, dtype: torch.dtype, paired: bool
) -> list[Batch]:
    size = (CPU_SCRATCH_BYTES if device.type == "cpu" else GPU_SCRATCH_BYTES) // dtype.itemsize
    scratch = torch.empty(min(size, sum(t[0].numel() for t in tensors)), dtype=dtype, device=device)
    batches: list[list[tuple[Tensor, ...]]] = [[]]
    used = 0
    for members in tensors:
        for pieces in _flat_pieces(members, size):
            if used + pieces[0].numel() > scratch.numel():
                batches.append([])
                used = 0
            place = scratch[used : used + pieces[0].numel()].view(pieces[0].shape)
            batches[-1].append((place, *pieces))
            used += place.numel()
    return [_batch(rows, scratch, paired) for rows in batches]


def _batch(rows: Sequence[tuple[Tensor, ...]], scratch: Tensor, paired: bool) -> Batch:
    places, shadow, live, *low = (list(column) for column in zip(*rows, strict=True))
    room = scratch[: sum(place.numel() for place in places)]
    return Batch(shadow, live, low[0] if low else [], places, room, paired)


def _flat_pieces(members: tuple[Tensor, ...], size: int) -> list[tuple[Tensor, ...]]:
    """Views of the same elements of each tensor, at most `size` elements a piece."""
    first = members[0]
    if all(t.stride() == first.stride() for t in members) and _is_dense(first):
        flat = [t.as_strided((t.numel(),), (1,)).split(size) for t in members]
        return list(zip(*flat, strict=True))
    if first.numel() <= size:
        return [members]
    rows = zip(*(t.unbind(0) for t in members), strict=True)
    return [pieces for row in rows for pieces in _flat_pieces(row, size)]


def _is_dense(tensor: Tensor) -> bool:
    return tensor.numel() == 1 + sum(s * (n - 1) for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def average(batches: Sequence[Batch], decay: float | Tensor, *, skipped: Tensor | None = None) -> None:
    """One update in place: shadow <- shadow + (1 - decay) * (live - shadow). No full-size temporary, no sync.

    Where live and shadow are equal, the shadow does not change by a bit, whatever the decay. A decay of 0 copies the
    live values; one that is a tensor leaves them within a rounding.

    Args:
        batches: from `plan`; with room if `skipped` is given or the decay is a tensor.
        decay: weight of the old average, in [0, 1]; a 0-dim fp64 tensor stays on its device, unread by the host.
        skipped: 0-dim int64 tensor. If given, elements whose live value is not finite (of a complex one: a part of it)
            keep their average, and are added to this count.

    Example:
        >>> shadow, live = torch.zeros(2), torch.ones(2)
        >>> average(plan([shadow], [live]), decay=0.75)
        >>> shadow
        tensor([0.2500, 0.2500])
    """
    weight = 1.0 - decay
    others = [_helpers().submit(_average_batch, batch, weight, skipped) for batch in batches if batch.elsewhere]
    for batch in batches:
        if not batch.elsewhere:
            _average_batch(batch, weight, skipped)
    for other in others:
        other.result()


@cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="fsdp_ema_lib update")


# A forked child has none of its parent's threads, and would wait for them for ever.
os.register_at_fork(after_in_child=_helpers.cache_clear)


def _average_batch(batch: Batch, weight: float | Tensor, skipped: Tensor | None) -> None:
    if isinstance(weight, float) and weight == 1.0:
        _take_over(batch, skipped)
    elif batch.low or skipped is not None or isinstance(weight, Tensor):
        _average_by_difference(batch, weight, skipped)
    elif batch.weight is not None:
        _average_compiled(batch, weight)
    elif batch.scratch:
        torch._foreach_copy_(batch.scratch, batch.live)
        torch._foreach_lerp_(batch.shadow, batch.scratch, weight)
    else:
        torch._foreach_lerp_(batch.shadow, batch.live, weight)


def _average_compiled(batch: Batch, weight: float) -> None:
    assert batch.weight is not None
    batch.weight.fill_(weight)
    try:
        _compiled()(batch.shadow, batch.live, batch.weight)
    except torch._dynamo.exc.BackendCompilerFailed as problem:
        raise RuntimeError(
            f"compile=True: the update could not be compiled, and nothing was changed: {problem.inner_exception}\n"
            f"On a CPU it needs a C++ compiler (install g++, or name one in the environment variable CXX). Without one "
            f"build the EMA with compile=False."
        ) from problem


@cache
def _compiled() -> Any:
    return torch.compile(_lerp_all, fullgraph=True, dynamic=False)


def _lerp_all(shadow: list[Tensor], live: list[Tensor], weight: Tensor) -> None:
    for average_, current in zip(shadow, live, strict=True):
        average_.add_(weight.to(average_.dtype) * (current.to(average_.dtype) - average_))


def count_compiled(batches: Sequence[Batch]) -> int:
    """How many tensors the compiled update averages."""
    return sum(len(batch.shadow) for batch in batches if batch.weight is not None)


def announce_compiling(count: int) -> None:
    """Say that the next update will take long: compiling may take half a minute for a hundred and fifty tensors."""
    _log.warning("compile=True: compiling the update of %d tensors; this takes a while, once", count)


def _take_over(batch: Batch, skipped: Tensor | None) -> None:
    """The live values as they are: adding the difference of two numbers far apart would round it."""
    if skipped is None:
        torch._foreach_copy_(batch.shadow, batch.live)
        if batch.low:
            torch._foreach_zero_(batch.low)
        return
    torch._foreach_copy_(batch.scratch, batch.live)
    bad = _mark_nonfinite(batch, skipped).split([place.numel() for place in batch.scratch])
    for number, (shadow, place) in enumerate(zip(batch.shadow, batch.scratch, strict=True)):
        untouched = bad[number].view(place.shape)
        shadow.copy_(torch.where(untouched, shadow, place))
        if batch.low:
            batch.low[number].mul_(untouched)


def _average_by_difference(batch: Batch, weight: float | Tensor, skipped: Tensor | None) -> None:
    change = batch.scratch
    torch._foreach_copy_(change, batch.live)
    bad = None if skipped is None else _mark_nonfinite(batch, skipped)
    torch._foreach_sub_(change, batch.shadow)
    if batch.low:
        torch._foreach_sub_(change, batch.low)
    if bad is not None:
        assert batch.room is not None
        # Adding -0.0 changes no bit of any number; adding 0.0 would turn -0.0 into 0.0.
        batch.room.masked_fill_(bad, -0.0)
    if isinstance(weight, Tensor):
        torch._foreach_mul_(change, weight.to(change[0]))
        weight = 1.0
    if not batch.low:
        torch._foreach_add_(batch.shadow, change, alpha=weight)
        return
    # Kahan and Babuska: what rounding takes from the sum stays in `low`, and joins the next change.
    torch._foreach_add_(batch.low, change, alpha=weight)
    torch._foreach_copy_(change, batch.shadow)
    torch._foreach_add_(batch.shadow, batch.low)
    torch._foreach_sub_(change, batch.shadow)
    torch._foreach_add_(batch.low, change)


def _mark_nonfinite(batch: Batch, skipped: Tensor) -> Tensor:
    """Which places of the room, filled with live values, belong to an element that is not finite; counts these."""
    assert batch.room is not None
    bad = batch.room.isfinite().logical_not_()
    if batch.paired:
        elements = bad.view(-1, 2).any(dim=1)
        bad = elements.repeat_interleave(2)
    else:
        elements = bad
    skipped.add_(elements.sum().to(skipped.device, non_blocking=True))
    return bad
