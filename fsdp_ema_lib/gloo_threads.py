"""The threads of gloo groups let go of what they hold before Python ends."""

import threading
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# A thread that does not come for so long is in a collective that waits for another rank.
_PATIENCE_S = 2.0
# What the threads executed last. It is the main thread that takes these apart, when Python ends.
_last_works: list[Any] = []


def let_go(groups: Iterable[dist.ProcessGroup] | None = None) -> None:
    """Wait until the threads of gloo groups hold no tensor of a collective that is over. Local.

    A thread that has executed a collective lets go of its tensors some time after the caller was told that it is over,
    and needs Python for that. If Python has begun to end by then, the whole process is aborted: "terminate called
    without an active exception", exit status -6 after a training that went well (torch 2.13, pytorch/pytorch#190489).
    To destroy the group is no help as long as a model holds it.

    Call it when nothing is to be sent any more. Each thread is given an empty collective, which sends nothing: a thread
    that has taken one up has let go of all before it, and of the empty ones it is never the last holder. Threads that
    are in a collective which waits for another rank are left to it after two seconds.

    Args:
        groups: of this rank, all of them by default; those of other backends are passed over. They are of no use
            afterwards, because ranks may differ in how many collectives they have counted.

    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> let_go()
        >>> dist.destroy_process_group()
    """
    for backend in _gloo_backends(dist.distributed_c10d._world.pg_map if groups is None else groups):
        try:
            _meet_every_thread(backend)
        except RuntimeError:  # no thread of it is free, or a lost rank has broken the group: nothing to wait for
            continue


def _gloo_backends(groups: Iterable[dist.ProcessGroup]) -> Iterator[Any]:
    for group in groups:
        backends = {id(found): found for found in map(group._get_backend, group._device_types)}
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL gloo is wrapped, and compares every collective with the other ranks.
        yield from (found for found in backends.values() if isinstance(found, dist.ProcessGroupGloo))


def _meet_every_thread(backend: Any) -> None:
    here, met, all_met = threading.get_ident(), set[int](), threading.Event()

    def note(_: Any) -> None:
        # Of a collective that was over before this was asked of it, the caller's thread is told.
        met.add(threading.get_ident())
        if len(met - {here}) == backend.options._threads:
            all_met.set()

    deadline = time.monotonic() + _PATIENCE_S
    while not all_met.is_set() and time.monotonic() < deadline:
        works = [backend.allreduce([torch.empty(0)]) for _ in range(4 * backend.options._threads)]
        _last_works.extend(works)
        for work in works:
            work.get_future().add_done_callback(note)
        for work in works:
            work.wait(timedelta(seconds=_PATIENCE_S))
        all_met.wait(0.001)
