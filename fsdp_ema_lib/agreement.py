"""One verdict for all ranks: where one raises, all raise, so that none waits in a collective that never comes."""

import builtins
from collections.abc import Iterable, Sequence
from hashlib import sha256
from itertools import zip_longest
from typing import TypeVar

import torch.distributed as dist

from fsdp_ema_lib.process_group import comm_device

T = TypeVar("T")


def raise_together(error: Exception | None, groups: Iterable[dist.ProcessGroup | None] = (None,)) -> None:
    """Raise on every rank of the groups if any of them has an error; collective over each group in turn.

    Args:
        error: this rank's error, or None. A rank that has one raises that one; the others raise the lowest failing
            rank's, of the nearest built-in type, with the rank in front of the text.
        groups: process groups, the same order on each of their ranks; None stands for the default group. Over the rows
            and then the columns of a mesh, an error reaches every rank of the mesh.

    Example:
        >>> raise_together(None)
    """
    verdict = None if error is None else (_builtin_type(error), str(error))
    if dist.is_initialized():
        for group in groups:
            verdict = _first_verdict(verdict, group)
    if error is not None:
        raise error
    if verdict is not None:
        kind, text = verdict
        raise getattr(builtins, kind)(text)


def _builtin_type(error: Exception) -> str:
    """The first built-in class that the error is one of: only such a name means the same on every rank."""
    return next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == "builtins")


def from_rank_zero(value: T) -> T:
    """Rank 0's `value` on every rank; collective over the default group. The value must be small and picklable.

    Example:
        >>> from_rank_zero(["weight", "bias"])
        ['weight', 'bias']
    """
    if not dist.is_initialized():
        return value
    message = [value]
    dist.broadcast_object_list(message, src=0, device=comm_device())
    return message[0]


def _first_verdict(verdict: tuple[str, str] | None, group: dist.ProcessGroup | None) -> tuple[str, str] | None:
    verdicts = _gathered(verdict, group)
    if verdict is not None:
        return verdict
    members = range(len(verdicts)) if group is None else dist.get_process_group_ranks(group)
    for rank, other in zip(members, verdicts, strict=True):
        if other is not None:
            kind, text = other
            return kind, text if text.startswith("rank ") else f"rank {rank}: {text}"
    return None


def refuse_disagreement(lines: Sequence[str], groups: Iterable[dist.ProcessGroup | None]) -> None:
    """Raise on every rank of the groups if their lines differ, naming the first difference; collective over each group.

    Args:
        lines: what this rank says, a line for each parameter.
        groups: as for `raise_together`.

    Raises:
        ValueError: the ranks disagree.
    """
    error: Exception | None = None
    groups = list(groups)
    digest = sha256("\n".join(lines).encode()).hexdigest()
    for group in groups:
        if len(set(_gathered(digest, group))) > 1:
            error = error or _difference(_gathered(list(lines), group), group)
    raise_together(error, groups)


def _difference(said: Sequence[Sequence[str]], group: dist.ProcessGroup | None) -> ValueError:
    members = list(range(len(said))) if group is None else dist.get_process_group_ranks(group)
    rows = list(zip_longest(*said, fillvalue="nothing more"))
    row = next(row for row in rows if len(set(row)) > 1)
    told = "\n".join(f"  rank {rank} has {line}" for rank, line in zip(members, row, strict=True))
    return ValueError(
        f"the ranks disagree about the parameters of the model:\n{told}\n"
        f"Build, freeze and select the same on every rank."
    )


def _gathered(value: T, group: dist.ProcessGroup | None) -> list[T]:
    values: list[T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
