"""The pool itself: a failing rank is named with its traceback, a hanging one does not hang the session."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pool import RankPools


def worker_sum() -> float:
    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    return total.item()


def worker_one_fails() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one is unwell")
    dist.barrier()


def worker_one_hangs() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def worker_one_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def test_results_come_back_in_rank_order(ranks):
    assert ranks(2, worker_sum) == [3.0, 3.0]


def test_a_run_that_is_killed_leaves_its_files_where_pytest_clears_them(ranks, tmp_path_factory):
    ranks(2, worker_sum)
    assert tmp_path_factory.getbasetemp() in Path(ranks.pools[2].folder).parents


@pytest.mark.slow
@pytest.mark.parametrize(
    ("worker", "text"),
    [
        (worker_one_fails, "rank 1 failed.*rank one is unwell"),
        (worker_one_hangs, "rank 0 gave no answer.*worker_one_hangs"),
        (worker_one_dies, "rank 1 failed.*exit code 7"),
    ],
)
def test_a_rank_that_fails_hangs_or_dies_is_named_and_the_pool_recovers(ranks, worker, text):
    with pytest.raises(AssertionError, match=f"(?s){text}"):
        ranks(2, worker, timeout=3.0)
    assert ranks(2, worker_sum) == [3.0, 3.0]


@pytest.mark.slow
def test_a_pool_is_replaced_after_so_many_jobs(ranks, monkeypatch):
    monkeypatch.setattr("pool.JOBS_OF_A_POOL", 2)
    pool = RankPools(ranks.folder)
    pids = [pool(1, os.getpid)[0] for _ in range(4)]
    pool.close()
    assert pids[0] == pids[1] != pids[2] == pids[3]
