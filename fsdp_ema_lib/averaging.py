"""The arithmetic of one update over lists of local tensors: the hot path, nothing else."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Live values of a narrower dtype are widened piece by piece through one scratch of this many bytes.
CPU_SCRATCH_BYTES = 1 << 20  # stays in the cache between the widening and the average
GPU_SCRATCH_BYTES = 32 << 20  # few launches, and still far below the memory of a large tensor


@dataclass(frozen=True)
class Batch:
    """Tensors that one fused call averages: the shadows, the live values, and where narrower live values are widened."""

    shadow: list[Tensor]
    live: list[Tensor]
    scratch: list[Tensor] | None


def plan(shadow: Sequence[Tensor], live: Sequence[Tensor]) -> list[Batch]:
    """Sort pairs of tensors into batches for `average`; done once, not per update.

    Args:
        shadow: the averages; fp32, fp64 or complex.
        live: the live values, each of its shadow's shape and device; any dtype that converts to the shadow's exactly.

    Returns:
        Batches that alias the given tensors. Tensors without elements are left out.
    """
    pairs: dict[tuple[torch.device, torch.dtype, torch.dtype], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for average_, current in zip(shadow, live, strict=True):
        if average_.numel():
            pairs[average_.device, average_.dtype, current.dtype].append((average_, current))
    batches: list[Batch] = []
    for (device, shadow_dtype, live_dtype), members in pairs.items():
        if shadow_dtype == live_dtype:
            batches.append(Batch([s for s, _ in members], [c for _, c in members], None))
        else:
            batches.extend(_widening_batches(members, device, shadow_dtype))
    return batches


def _widening_batches(
    members: Sequence[tuple[Tensor, Tensor]], device: torch.device, dtype: torch.dtype
) -> list[Batch]:
    size = (CPU_SCRATCH_BYTES if device.type == "cpu" else GPU_SCRATCH_BYTES) // dtype.itemsize
    scratch = torch.empty(size, dtype=dtype, device=device)
    batches: list[Batch] = []
    room = 0
    for average_, current in members:
        for shadow_piece, live_piece in _flat_pieces(average_, current, size):
            numel = shadow_piece.numel()
            if numel > room:
                batches.append(Batch([], [], []))
                room = size
            batch = batches[-1]
            assert batch.scratch is not None
            batch.scratch.append(scratch[size - room : size - room + numel].view(shadow_piece.shape))
            batch.shadow.append(shadow_piece)
            batch.live.append(live_piece)
            room -= numel
    return batches


def _flat_pieces(average_: Tensor, current: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """Aligned one-dimensional views of both tensors, at most `size` elements each."""
    if average_.stride() == current.stride() and _is_dense(average_):
        flat_shadow = average_.as_strided((average_.numel(),), (1,))
        flat_live = current.as_strided((current.numel(),), (1,))
        return list(zip(flat_shadow.split(size), flat_live.split(size), strict=True))
    if average_.numel() <= size:
        return [(average_, current)]
    return [
        piece
        for shadow_row, live_row in zip(average_.unbind(0), current.unbind(0), strict=True)
        for piece in _flat_pieces(shadow_row, live_row, size)
    ]


def _is_dense(tensor: Tensor) -> bool:
    return tensor.numel() == 1 + sum(s * (n - 1) for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def average(batches: Sequence[Batch], decay: float) -> None:
    """One update in place: shadow <- shadow + (1 - decay) * (live - shadow). No allocation, no synchronization.

    Where live and shadow are equal, the shadow does not change by a bit, whatever the decay.

    Args:
        batches: from `plan`.
        decay: weight of the old average, in [0, 1].

    Example:
        >>> shadow, live = torch.zeros(2), torch.ones(2)
        >>> average(plan([shadow], [live]), decay=0.75)
        >>> shadow
        tensor([0.2500, 0.2500])
    """
    weight = 1.0 - decay
    for batch in batches:
        if batch.scratch is None:
            torch._foreach_lerp_(batch.shadow, batch.live, weight)
        else:
            torch._foreach_copy_(batch.scratch, batch.live)
            torch._foreach_lerp_(batch.shadow, batch.scratch, weight)
