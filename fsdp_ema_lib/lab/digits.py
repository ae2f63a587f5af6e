"""Real data that needs no download: the 1797 handwritten digits that scikit-learn carries, 8x8 pixels each."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits as _sklearn_digits
from torch import Tensor

IMAGE_SIZE = 8
NUM_CLASSES = 10
_NUM_IMAGES = 1797


@dataclass(frozen=True)
class Split:
    """Images with their labels.

    Attributes:
        images: shape (n, 8, 8), float32, from -1 (paper) to 1 (ink), on the CPU.
        labels: shape (n,), int64, 0 to 9, on the CPU.
    """

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Digits:
    """The digits in two disjoint parts: `train` to fit on, `held_out` to measure against."""

    train: Split
    held_out: Split


def load_digits(*, held_out: int = 597, seed: int = 0) -> Digits:
    """Load the digits and deal them into a training and a held-out part.

    The data: E. Alpaydin and C. Kaynak (1998), "Optical Recognition of Handwritten Digits", UCI Machine
    Learning Repository, as scikit-learn ships it. Any rank may call; the same seed deals the same split everywhere.

    Args:
        held_out: number of images held out, 1 to 1796.
        seed: which images are held out, at least 0.

    Raises:
        ValueError: `held_out` leaves one of the parts empty, or `seed` is negative.

    Example:
        >>> digits = load_digits(held_out=500)
        >>> digits.train.images.shape, digits.held_out.labels.shape
        (torch.Size([1297, 8, 8]), torch.Size([500]))
    """
    if not 1 <= held_out < _NUM_IMAGES:
        raise ValueError(f"held_out must be from 1 to {_NUM_IMAGES - 1} images, got {held_out}")
    raw = _sklearn_digits()
    images = torch.from_numpy(raw.images).float() / 8 - 1  # pixels count ink from 0 to 16
    labels = torch.from_numpy(raw.target).long()
    order = torch.randperm(len(labels), generator=seeded_generator("split", seed))
    kept_out, kept = order[:held_out], order[held_out:]
    return Digits(train=Split(images[kept], labels[kept]), held_out=Split(images[kept_out], labels[kept_out]))


def batches(
    split: Split,
    batch_size: int,
    *,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    first_step: int = 1,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's part of the batch of every step, without end, each image once per pass over the data.

    A batch is a function of the seed and the step alone: a run that resumes at step k sees what an uninterrupted one
    would have seen, and the ranks' parts put together are the batch that a single process would draw.

    Args:
        split: the images to draw from.
        batch_size: images per step over all ranks, a multiple of `world_size`, at most `len(split)`.
        seed: the order of the images, at least 0; every rank passes the same.
        rank: this process, from 0.
        world_size: number of processes.
        first_step: the step to begin with, from 1.

    Yields:
        Images, shape (batch_size / world_size, 8, 8), and labels, shape (batch_size / world_size,).

    Raises:
        ValueError: an argument is out of its range; raised by the call, before the first batch is drawn.

    Example:
        >>> train = load_digits().train
        >>> images, labels = next(batches(train, 64, rank=1, world_size=2))
        >>> images.shape
        torch.Size([32, 8, 8])
    """
    if not 1 <= batch_size <= len(split):
        raise ValueError(f"batch_size must be from 1 to the {len(split)} images there are, got {batch_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be from 0 to world_size - 1 = {world_size - 1}, got {rank}")
    if first_step < 1:
        raise ValueError(f"first_step counts from 1, got {first_step}")
    mine = rank_slice(batch_size, rank=rank, world_size=world_size)
    seeded_generator("batches", seed)  # a bad seed is refused here, not at the first draw
    return _batches(split, batch_size, seed, mine, first_step)


def _batches(split: Split, batch_size: int, seed: int, mine: slice, first_step: int) -> Iterator[tuple[Tensor, Tensor]]:
    size = len(split)
    epoch, start = divmod((first_step - 1) * batch_size, size)
    order = _epoch_order(size, seed, epoch)
    while True:
        chosen = order[start : start + batch_size]
        start += batch_size
        if start >= size:  # the batch ends in the next pass over the data, or exactly with this one
            epoch, start = epoch + 1, start - size
            order = _epoch_order(size, seed, epoch)
            chosen = torch.cat([chosen, order[:start]])
        yield split.images[chosen[mine]], split.labels[chosen[mine]]


def _epoch_order(size: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(size, generator=seeded_generator("batches", seed, epoch))


def rank_slice(batch_size: int, *, rank: int, world_size: int) -> slice:
    """The positions of a batch over all ranks that belong to one rank.

    Raises:
        ValueError: `batch_size` is not a multiple of `world_size`.

    Example:
        >>> rank_slice(64, rank=1, world_size=4)
        slice(16, 32, None)
    """
    if batch_size % world_size:
        raise ValueError(
            f"batch_size counts the images of all ranks and must be a multiple of the world size {world_size}, "
            f"got {batch_size}"
        )
    part = batch_size // world_size
    return slice(rank * part, (rank + 1) * part)


def seeded_generator(purpose: str, *numbers: int) -> torch.Generator:
    """A CPU random generator that depends on what it is for and on every number given, such as a seed and a step.

    Other purposes and nearby numbers give unrelated streams; the global random state is not touched.

    Args:
        purpose: what is drawn, so that two uses of one seed do not share their numbers.
        numbers: one or more integers, at least 0, the seed first.

    Raises:
        ValueError: a number is negative.

    Example:
        >>> draw = lambda seed, step: torch.rand(1, generator=seeded_generator("noise", seed, step))
        >>> bool(draw(0, 7) == draw(0, 7)), bool(draw(0, 7) == draw(0, 8))
        (True, False)
    """
    if any(number < 0 for number in numbers):
        found = numbers[0] if len(numbers) == 1 else numbers
        raise ValueError(f"the seed of the {purpose} must be at least 0, got {found}")
    digest = hashlib.sha256(repr((purpose, *map(int, numbers))).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
