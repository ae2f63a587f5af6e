"""One verdict for all ranks: where one raises, all raise, so that none waits in a collective that never comes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import zip_longest
from typing import TypeVar

import torch.distributed as dist

from fsdp_ema_lib.process_group import comm_device

T = TypeVar("T")

_LIBRARY = __name__.split(".")[0]


def raise_together(error: Exception | None, groups: Iterable[dist.ProcessGroup | None] = (None,)) -> None:
    """Raise on every rank of the groups if any of them has an error; collective over each group in turn.

    All raise what the lowest failing rank raised, so that an `except` decides alike on every rank: that rank, and any
    that failed with the same words, its own error; the others one of the same type, or of the nearest type that is
    built in or of this library, with the rank in front of the text.

    Args:
        error: this rank's error, or None.
        groups: process groups, the same order on each of their ranks; None stands for the default group. Over the rows
            and then the columns of a mesh, an error reaches every rank of the mesh.

    Example:
        >>> raise_together(None)
    """
    if not dist.is_initialized():
        if error is not None:
            raise error
        return
    mine = verdict = None if error is None else _Verdict(dist.get_rank(), _shared_type(error), str(error))
    for group in groups:
        verdict = min((said for said in _gathered(verdict, group) if said), key=lambda said: said.rank, default=None)
    if verdict is None:
        return
    if error is not None and mine is not None and (mine.kind, mine.text) == (verdict.kind, verdict.text):
        raise error
    raise verdict.kind(f"rank {verdict.rank}: {verdict.text}") from error


@dataclass(frozen=True)
class _Verdict:
    rank: int
    kind: type[Exception]
    text: str


def _shared_type(error: Exception) -> type[Exception]:
    """The first class of the error that every rank has and that is made of one text."""
    for cls in type(error).__mro__:
        if cls.__module__.split(".")[0] in ("builtins", _LIBRARY) and _is_made_of_a_text(cls):
            return cls
    raise AssertionError("every error is an Exception")


def _is_made_of_a_text(cls: type) -> bool:
    """False for such as UnicodeDecodeError, which takes five arguments."""
    try:
        return str(cls("text")) in ("text", "'text'")
    except TypeError:
        return False


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
    for group in groups:
        if not agree(lines, group):
            error = error or _difference(_gathered(list(lines), group), group)
    raise_together(error, groups)


def agree(lines: Sequence[str], group: dist.ProcessGroup | None = None) -> bool:
    """Whether all ranks of the group say the same; collective over it. Digests are compared, however long the lines.

    Example:
        >>> from fsdp_ema_lib.process_group import distributed_job
        >>> with distributed_job(device="cpu"):
        ...     agree(["weight", "bias"])
        True
    """
    digest = sha256("\n".join(lines).encode()).hexdigest()
    return len(set(_gathered(digest, group))) == 1


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
