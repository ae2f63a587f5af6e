"""Under torchrun: a store that knows nothing of the job's earlier starts."""

import os
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# Messages that arrive one after another, from ranks of this start and, first, from those of starts that were killed.
_QUEUE = "fsdp_ema_lib/arrivals"


def is_shared() -> bool:
    """Whether torchrun's agent keeps the store of its workers, and keeps it when it restarts them."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def fresh_store(rank: int, world_size: int, timeout: timedelta) -> Any:
    """Connect to the agent's store, and set apart a part of it that no earlier start of the job has seen.

    Every rank must call. When torchrun restarts its workers, the store still holds what the killed ones wrote, under
    the keys that the new ones use: whoever comes first reads the address of a dead rank, and then hangs or fails in
    gloo's connectFullMesh (torch 2.13). The count of restarts does not tell the starts apart: each node's agent
    counts its own. So the ranks agree on a name that is new, by messages that nobody but the living can answer.

    Args:
        rank: this process.
        world_size: number of ranks.
        timeout: how long to wait for the other ranks; also the timeout of the store that is returned.

    Raises:
        TimeoutError: some ranks did not come, named.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    start = agree_on_start(store, rank, world_size, timeout)
    store.set_timeout(timeout)
    return dist.PrefixStore(f"fsdp_ema_lib/{start}", store)  # type: ignore[attr-defined]


def agree_on_start(store: Any, rank: int, world_size: int, timeout: timedelta) -> str:
    """A name for this start of the job, the same on every rank and never used before. Every rank must call.

    Rank 0 makes the name. The others send it a key that they have just made, and find the name there: what an earlier
    rank 0 wrote lies under other keys.
    """
    mine = uuid.uuid4().hex
    if rank == 0:
        _await_the_others(store, mine, world_size, timeout)
        return mine
    store.queue_push(_QUEUE, f"hello {rank} {mine}")
    try:
        store.wait([f"{_QUEUE}/{mine}"], timeout)
    except dist.DistStoreError as problem:
        raise TimeoutError(_absent("rank 0", rank, timeout)) from problem
    start: str = store.get(f"{_QUEUE}/{mine}").decode()
    store.queue_push(_QUEUE, f"here {rank} {start}")
    return start


def _await_the_others(store: Any, mine: str, world_size: int, timeout: timedelta) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    absent = set(range(1, world_size))
    while absent:
        store.set_timeout(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
        try:
            word, rank, name = store.queue_pop(_QUEUE).decode().split()
        except dist.DistStoreError as problem:
            who = f"rank {', '.join(map(str, sorted(absent)))}"
            raise TimeoutError(_absent(who, 0, timeout)) from problem
        if word == "hello":  # where a killed start left it, nobody reads the answer
            store.set(f"{_QUEUE}/{name}", mine)
        elif name == mine:
            absent.discard(int(rank))


def _absent(who: str, rank: int, timeout: timedelta) -> str:
    return (
        f"rank {rank}: {who} did not start within {timeout.total_seconds():.0f} s. Every rank that torchrun starts "
        f"must call launch_distributed_job; look there for the error."
    )
