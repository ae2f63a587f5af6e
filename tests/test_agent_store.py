"""agent_store.py: the ranks of one start find each other in a store that earlier starts have used."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fsdp_ema_lib.agent_store import agree_on_start, fresh_store
from fsdp_ema_lib.process_group import launch_distributed_job

LIMIT = timedelta(seconds=30)


@pytest.fixture
def agent():
    """What torchrun's agent keeps while its workers come and go."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def connect(agent):
    return dist.TCPStore("127.0.0.1", agent.port, is_master=False, timeout=LIMIT)


def start(agent, world_size, order=None, limit=LIMIT):
    """The name that each rank of one start gets; `order` gives the ranks that come, each when the last is waiting."""
    order = range(world_size) if order is None else order
    with ThreadPoolExecutor(world_size) as pool:
        found = {}
        for rank in order:
            found[rank] = pool.submit(agree_on_start, connect(agent), rank, world_size, limit)
        return {rank: future.result() for rank, future in found.items()}


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("backwards", [False, True])
def test_all_ranks_of_a_start_get_one_name_and_each_start_another(agent, world_size, backwards):
    order = list(range(world_size))[:: -1 if backwards else 1]
    names = [set(start(agent, world_size, order).values()) for _ in range(3)]
    assert [len(name) for name in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3


@pytest.mark.parametrize(
    "left", [["hello 1 dead"], ["hello 1 dead", "hello 2 dead2"], ["here 1 old", "here 2 old", "hello 1 dead"]]
)
def test_what_a_killed_start_left_is_not_taken_for_the_living(agent, left):
    store = connect(agent)
    for message in left:
        store.queue_push("fsdp_ema_lib/arrivals", message)
    names = start(agent, 3, order=[0, 1, 2])
    assert len(set(names.values())) == 1
    names = start(agent, 3, order=[2, 1, 0])
    assert len(set(names.values())) == 1


def test_a_start_that_was_killed_half_way_does_not_disturb_the_next(agent):
    """Ranks 0 and 1 came, rank 2 did not: all are killed, here by their limit, and started again."""
    with pytest.raises(TimeoutError):
        start(agent, 3, order=[1, 0], limit=timedelta(seconds=0.5))
    assert len(set(start(agent, 3, order=[2, 0, 1]).values())) == 1


def test_who_does_not_come_is_named(agent):
    with pytest.raises(
        TimeoutError, match="rank 0: rank 1, 3 did not start within 1 s. Every rank that torchrun starts"
    ):
        start(agent, 4, order=[2, 0], limit=timedelta(seconds=1))
    with pytest.raises(TimeoutError, match="rank 2: rank 0 did not start within 1 s"):
        start(agent, 4, order=[2], limit=timedelta(seconds=1))


def test_a_value_of_an_earlier_start_is_not_seen(agent, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    for value in (b"first", b"second"):
        stores = [None, None]

        def come(rank, stores=stores):
            stores[rank] = fresh_store(rank, 2, LIMIT)

        ranks = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert not stores[1].check(["address"])
        stores[0].set("address", value)
        assert stores[1].get("address") == value


def rank_that_is_killed(rank: int, port: int, replies) -> None:
    """One rank as torchrun's agent starts it; it ends as if it were killed."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    if rank == 0:
        time.sleep(0.2)  # rank 1 looks for rank 0's address, and there is only what an earlier rank 0 left
    try:
        launch_distributed_job("gloo", "cpu", timedelta(seconds=10))
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        replies.put(total.item())
    except Exception as problem:
        replies.put(repr(problem))
    os._exit(1)


def test_restarted_ranks_do_not_meet_the_dead_ones(agent, processes):
    """With torch's own keys four starts of ten fail: two hang, two stop in gloo's connectFullMesh."""
    for number in range(6):
        replies = processes.SimpleQueue()
        ranks = [processes.Process(target=rank_that_is_killed, args=(rank, agent.port, replies)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        assert [replies.get() for _ in ranks] == [3.0, 3.0], f"start {number}"
        for rank in ranks:
            rank.join()
