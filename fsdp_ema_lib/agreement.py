"""One verdict for all ranks: where one raises, all raise, so that none waits in a collective that never comes."""

import builtins
from collections.abc import Iterable

import torch.distributed as dist


def raise_together(error: Exception | None, groups: Iterable[dist.ProcessGroup | None] = (None,)) -> None:
    """Raise on every rank of the groups if any of them has an error; collective over each group in turn.

    Args:
        error: this rank's error, or None. A rank that has one raises that one; the others raise the lowest failing
            rank's, of the same built-in type, with the rank in front of the text.
        groups: process groups, the same order on each of their ranks; None stands for the default group. Over the rows
            and then the columns of a mesh, an error reaches every rank of the mesh.

    Example:
        >>> raise_together(None)
    """
    verdict = None if error is None else (type(error).__name__, str(error))
    if dist.is_initialized():
        for group in groups:
            verdict = _first_verdict(verdict, group)
    if error is not None:
        raise error
    if verdict is not None:
        kind, text = verdict
        raise getattr(builtins, kind, RuntimeError)(text)


def _first_verdict(verdict: tuple[str, str] | None, group: dist.ProcessGroup | None) -> tuple[str, str] | None:
    verdicts: list[tuple[str, str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(verdicts, verdict, group=group)
    if verdict is not None:
        return verdict
    members = range(len(verdicts)) if group is None else dist.get_process_group_ranks(group)
    for rank, other in zip(members, verdicts, strict=True):
        if other is not None:
            kind, text = other
            return kind, text if text.startswith("rank ") else f"rank {rank}: {text}"
    return None
