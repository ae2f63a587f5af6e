"""Local tensors as torch.distributed.checkpoint sees them: pieces of a full tensor, nothing gathered."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Piece(NamedTuple):
    """One hyper-rectangle of a full tensor, and the view of the local tensor that holds its values."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    view: torch.Tensor

    def of(self, full: Any) -> torch.Tensor:
        """The same hyper-rectangle of `full`: a tensor, or anything that slices like one."""
        return full[tuple(slice(o, o + s) for o, s in zip(self.offsets, self.sizes, strict=True))]


def interval_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut the elements `start` to `stop` of a row-major tensor into hyper-rectangles, in order.

    Args:
        shape: the full tensor's shape, at least one dimension.
        start: first element, counted row-major from 0.
        stop: one past the last element.

    Returns:
        (offsets, sizes) of each rectangle; there are at most 2 * len(shape) - 1.

    Example:
        >>> list(interval_boxes((3, 4), 2, 9))
        [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if start >= stop:
        return
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    inner = math.prod(shape[1:])
    first_whole, last_whole = -(-start // inner), stop // inner
    if first_whole > last_whole:  # the interval lies inside one row
        yield from _inside_row(shape, start // inner, start % inner, stop - start // inner * inner)
        return
    if start % inner:
        yield from _inside_row(shape, first_whole - 1, start % inner, inner)
    if first_whole < last_whole:
        yield (first_whole, *[0] * (len(shape) - 1)), (last_whole - first_whole, *shape[1:])
    if stop % inner:
        yield from _inside_row(shape, last_whole, 0, stop % inner)


def _inside_row(
    shape: Sequence[int], row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, sizes in interval_boxes(shape[1:], start, stop):
        yield (row, *offsets), (1, *sizes)


class ShardedView(torch.Tensor):
    """A tensor of the full shape of which this rank holds some pieces.

    It exists for torch.distributed.checkpoint, which asks it for the pieces to write or to fill. It can be cloned and
    moved to another dtype or device; arithmetic on it raises, because the other elements are on other ranks.

    Args:
        local: this rank's values.
        shape: shape of the full tensor.
        pieces: where the values of `local` stand in the full tensor; the views alias `local`.
    """

    local: torch.Tensor
    pieces: list[Piece]

    @staticmethod
    def __new__(cls, local: torch.Tensor, shape: Sequence[int], pieces: list[Piece]) -> "ShardedView":
        self = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=local.dtype, device=local.device)
        self.local = local
        self.pieces = pieces
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedView(shape={tuple(self.shape)}, local_numel={self.local.numel()}, dtype={self.dtype})"

    def with_local(self, local: torch.Tensor) -> "ShardedView":
        """The same pieces over another local tensor of the same shape."""
        if local is self.local:
            return self
        flat = local.view(-1)
        base = self.local.storage_offset()
        pieces = [
            Piece(p.offsets, p.sizes, flat.as_strided(p.view.shape, p.view.stride(), p.view.storage_offset() - base))
            for p in self.pieces
        ]
        return ShardedView(local, self.shape, pieces)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first = args[0]
        if func in _SHAPE_KEEPING:
            return first.with_local(func(first.local, *args[1:], **kwargs))
        if func is torch.ops.aten.copy_.default and isinstance(args[1], ShardedView):
            first.local.copy_(args[1].local, *args[2:], **kwargs)
            return first
        raise NotImplementedError(
            f"{func}: this rank holds {first.local.numel() if isinstance(first, ShardedView) else 'some'} elements of "
            f"a sharded tensor; gather it (EMA_FSDP.full_state_dict) before doing arithmetic on it"
        )

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(piece.offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)),
                    properties=TensorProperties.create_from_tensor(self.local),
                    size=self.size(),
                ),
            )
            for piece in self.pieces
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for piece in self.pieces:
            if torch.Size(piece.offsets) == index.offset:
                return piece.view
        raise ValueError(f"{index.fqn}: this rank holds no piece at {tuple(index.offset or ())}")


_SHAPE_KEEPING = {
    torch.ops.aten.detach.default,
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.zeros_like.default,
}
