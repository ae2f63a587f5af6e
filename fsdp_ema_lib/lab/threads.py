"""How many CPU threads torch uses for a stretch of work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads inside the block, and as many as before after it.

    Matrices of a few hundred rows gain little from a second thread. Where other processes want the same cores they lose
    much: threads meet at the end of every operation, and each meeting waits for the slowest. A training step took ten
    times as long with two threads as with one on two cores that seven processes shared.

    Args:
        count: threads per operation, at least 1.

    Raises:
        ValueError: `count` is below 1.

    Example:
        >>> with cpu_threads(1):
        ...     torch.get_num_threads()
        1
    """
    if count < 1:
        raise ValueError(f"count must be at least 1 thread, got {count}")
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
