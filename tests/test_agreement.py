"""One verdict for all ranks."""

import torch.distributed as dist

from fsdp_ema_lib.agreement import from_rank_zero, raise_together
from fsdp_ema_lib.storage import DamagedCheckpointError


def worker_verdict(kind: type[Exception] | None, failing: int) -> tuple[str, str]:
    error = kind("the disk is wet") if kind is not None and dist.get_rank() == failing else None
    try:
        raise_together(error)
    except Exception as problem:
        return type(problem).__name__, str(problem)
    return "none", ""


def test_all_ranks_raise_what_one_raised(ranks):
    assert ranks(3, worker_verdict, kind=ValueError, failing=1) == [
        ("ValueError", "rank 1: the disk is wet"),
        ("ValueError", "the disk is wet"),
        ("ValueError", "rank 1: the disk is wet"),
    ]
    assert ranks(3, worker_verdict, kind=None, failing=0) == [("none", "")] * 3


def test_other_ranks_raise_the_nearest_builtin_of_an_error_of_our_own(ranks):
    own, other = ranks(2, worker_verdict, kind=DamagedCheckpointError, failing=0)
    assert own == ("DamagedCheckpointError", "the disk is wet")
    base = next(cls for cls in DamagedCheckpointError.__mro__ if cls.__module__ == "builtins")
    assert base is not Exception and other == (base.__name__, "rank 0: the disk is wet")


def worker_from_zero() -> int:
    return from_rank_zero(dist.get_rank() + 10)


def test_rank_zero_is_believed(ranks):
    assert ranks(2, worker_from_zero) == [10, 10]
