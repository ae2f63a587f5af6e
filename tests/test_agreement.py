"""One verdict for all ranks."""

import pytest
import torch.distributed as dist

from fsdp_ema_lib.agreement import from_rank_zero, raise_together
from fsdp_ema_lib.storage import DamagedCheckpointError


class ForeignError(ConnectionError):
    """Of a module that other ranks need not have, and not made of one text."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(f"{host} at {port}")


def undecodable() -> Exception:
    try:
        b"\xff".decode()
    except UnicodeDecodeError as problem:
        return problem
    raise AssertionError("it is not UTF-8")


ERRORS = {
    "plain": ValueError("the disk is wet"),
    "own": DamagedCheckpointError("the disk is wet"),
    "foreign": ForeignError("node7", 80),
    "undecodable": undecodable(),
}


def worker_verdict(failing: dict[int, str]) -> tuple[str, str, str]:
    error = ERRORS[failing[dist.get_rank()]] if dist.get_rank() in failing else None
    try:
        raise_together(error)
    except Exception as problem:
        return type(problem).__name__, str(problem), type(problem.__cause__).__name__
    return "none", "", ""


def test_all_ranks_raise_what_one_raised(ranks):
    assert ranks(3, worker_verdict, failing={1: "plain"}) == [
        ("ValueError", "rank 1: the disk is wet", "NoneType"),
        ("ValueError", "the disk is wet", "NoneType"),
        ("ValueError", "rank 1: the disk is wet", "NoneType"),
    ]
    assert ranks(3, worker_verdict, failing={}) == [("none", "", "")] * 3


@pytest.mark.parametrize(
    ("name", "kind"),
    [("own", "DamagedCheckpointError"), ("foreign", "ConnectionError"), ("undecodable", "UnicodeError")],
)
def test_an_error_keeps_the_nearest_type_that_every_rank_has(ranks, name, kind):
    own, other = ranks(2, worker_verdict, failing={0: name})
    assert own == (type(ERRORS[name]).__name__, str(ERRORS[name]), "NoneType")
    assert other == (kind, f"rank 0: {ERRORS[name]}", "NoneType")


def test_where_all_ranks_say_the_same_each_raises_its_own(ranks):
    replies = ranks(2, worker_verdict, failing={0: "plain", 1: "plain"})
    assert replies == [("ValueError", "the disk is wet", "NoneType")] * 2


def test_where_ranks_raise_different_errors_all_raise_the_lowest_ranks(ranks):
    replies = ranks(3, worker_verdict, failing={1: "own", 2: "foreign"})
    assert [kind for kind, _, _ in replies] == ["DamagedCheckpointError"] * 3
    assert replies[2] == ("DamagedCheckpointError", "rank 1: the disk is wet", "ForeignError")


def worker_from_zero() -> int:
    return from_rank_zero(dist.get_rank() + 10)


def test_rank_zero_is_believed(ranks):
    assert ranks(2, worker_from_zero) == [10, 10]
