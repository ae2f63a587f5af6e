"""gloo_threads.py: a gloo group's threads let go of tensors before Python ends."""

import os
import threading
import time
import weakref
from threading import get_ident

import pytest
import torch
import torch.distributed as dist

from fsdp_ema_lib import gloo_threads
from fsdp_ema_lib.process_group import TORCHRUN_VARIABLES, launch_distributed_job, shutdown


def late_collective(group: dist.ProcessGroup) -> tuple[threading.Event, "weakref.ref[torch.Tensor]"]:
    """A gate that keeps one of the group's threads in a collective that is over, and the tensor of that."""
    here, gate = get_ident(), threading.Event()
    told: list[int] = [here]
    while here in told:  # it was over before anybody could ask to be told
        told.clear()
        tensor = torch.empty(0)  # ranks may differ in how often they come by
        work = dist.all_reduce(tensor, group=group, async_op=True)
        gone = weakref.ref(tensor)
        del tensor
        work.get_future().add_done_callback(lambda _: told.append(get_ident()) or get_ident() == here or gate.wait())
    return gate, gone


def wait_for_a_late_thread() -> None:
    group = dist.new_group()
    gate, gone = late_collective(group)
    opener = threading.Timer(0.3, gate.set)
    opener.start()
    gloo_threads.let_go([group])
    assert gate.is_set()
    assert gone() is None
    opener.join()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_thread_that_is_late_is_waited_for(ranks, world_size):
    ranks(world_size, wait_for_a_late_thread)


def test_shutdown_waits_for_all_groups_that_something_still_holds(monkeypatch):
    for name in TORCHRUN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    launch_distributed_job(device="cpu")
    held = [dist.group.WORLD, dist.new_group()]
    late = [late_collective(group) for group in held]
    openers = [threading.Timer(0.3, gate.set) for gate, _ in late]
    for opener in openers:
        opener.start()
    shutdown()
    assert all(gate.is_set() and gone() is None for gate, gone in late)
    for opener in openers:
        opener.join()


def other_work_than_the_others() -> tuple[float, float]:
    """Seconds that it takes with one thread, and then with both, in a collective that the other rank never joins."""
    taken = []
    for stuck in (1, 2):
        group = dist.new_group()
        if dist.get_rank() == 0:
            for _ in range(stuck):
                dist.all_reduce(torch.ones(1), group=group, async_op=True)
            start = time.monotonic()
            gloo_threads.let_go([group])
            taken.append(time.monotonic() - start)
        dist.barrier()
        if dist.get_rank() == 1:
            for _ in range(stuck):
                dist.all_reduce(torch.ones(1), group=group)
        dist.barrier()
    return tuple(taken)


def test_a_collective_that_waits_for_another_rank_is_left_alone(ranks):
    (one, both), _ = ranks(2, other_work_than_the_others)
    assert gloo_threads._PATIENCE_S <= one < 3 * gloo_threads._PATIENCE_S
    assert gloo_threads._PATIENCE_S <= both < 3 * gloo_threads._PATIENCE_S


def rank_whose_partner_dies(rank: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    dist.barrier()
    if rank == 1:
        os._exit(0)
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(1))
    gloo_threads.let_go()
    gloo_threads.let_go()


def test_a_group_that_a_lost_rank_has_broken(tmp_path):
    torch.multiprocessing.spawn(rank_whose_partner_dies, args=(str(tmp_path / "rendezvous"),), nprocs=2)


@pytest.mark.parametrize("debug", ["OFF", "DETAIL"])
def test_a_wrapped_group_is_passed_over(monkeypatch, debug):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", debug)
    dist.set_debug_level_from_env()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert len(list(gloo_threads._gloo_backends([dist.group.WORLD]))) == (debug == "OFF")
        gloo_threads.let_go()
    finally:
        dist.destroy_process_group()
        monkeypatch.undo()
        dist.set_debug_level_from_env()


def test_without_groups_there_is_nothing_to_do():
    gloo_threads.let_go()
