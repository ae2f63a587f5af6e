import os
import stat
import tempfile
import threading
import time
from multiprocessing import resource_tracker
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_ema_lib.lab.ranks import run_on_ranks


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    """Every test: no process and no file stays behind."""
    resource_tracker.ensure_running()  # multiprocessing's own helper lives as long as this process
    before = set(psutil.Process().children(recursive=True))
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield
    assert set(psutil.Process().children(recursive=True)) <= before
    assert list(folder.iterdir()) == []


def worker_sum(numbers):
    total = torch.tensor(numbers[dist.get_rank()])
    dist.all_reduce(total)
    settings = {name: os.environ.get(name) for name in ("MPLBACKEND", "RANK", "LOCAL_WORLD_SIZE")}
    (meeting_place,) = Path(tempfile.gettempdir()).iterdir()
    return dist.get_rank(), total.item(), os.getpid(), torch.get_num_threads(), settings, meeting_place.stat().st_mode


def test_results_come_in_the_order_of_the_ranks_from_processes_of_their_own(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "module://no_such_backend")
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "7")
    results = run_on_ranks(worker_sum, 2, numbers=[3, 4])
    assert [(rank, total) for rank, total, *_ in results] == [(0, 7), (1, 7)]
    assert len({pid for _, _, pid, *_ in results} | {os.getpid()}) == 3
    for _, _, _, threads, settings, mode in results:
        assert threads == 1
        assert stat.S_IMODE(mode) == 0o700, "others can enter the meeting place"
        assert settings == {"MPLBACKEND": "Agg", "RANK": None, "LOCAL_WORLD_SIZE": None}


def worker_fail(rank, kind):
    if dist.get_rank() == rank:
        print("seen on the way")
        if kind == "signal":
            os.abort()
        if kind == "checkpoint":
            raise CheckpointException("this is no Exception", {})
        raise KeyError("the cause")
    dist.barrier()  # never comes to an end


@pytest.mark.parametrize(
    ("rank", "kind", "text"),
    [
        (1, "error", "worker_fail: rank 1 of 2 failed:\n.*KeyError: 'the cause'.*seen on the way"),
        (0, "checkpoint", "worker_fail: rank 0 of 2 failed:\n.*CheckpointException"),
        (1, "signal", "worker_fail: rank 1 of 2 died .SIGABRT.:\n.*in worker_fail"),
    ],
)
def test_the_first_failure_is_raised_and_the_waiting_ranks_are_ended(rank, kind, text):
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=f"(?s)^{text}"):
        run_on_ranks(worker_fail, 2, timeout_s=100, rank=rank, kind=kind)
    assert time.monotonic() - started < 60, "it waited for the limit"


def worker_hang():
    threading.Event().wait()


def test_ranks_that_hang_are_killed_at_the_limit_and_say_where_they_were():
    where = "(?s)worker_hang: rank 0 of 1 not done after 20 s.*--- rank 0 ---.*in worker_hang"
    with pytest.raises(TimeoutError, match=where):
        run_on_ranks(worker_hang, 1, timeout_s=20)


def worker_unpicklable():
    return lambda: None


def test_a_result_that_cannot_travel_names_its_rank():
    with pytest.raises(RuntimeError, match="(?s)worker_unpicklable: rank 0 of 1 failed:.*pickle"):
        run_on_ranks(worker_unpicklable, 1)


def test_a_function_that_a_new_process_cannot_import_is_refused():
    def local():
        return 0

    with pytest.raises(ValueError, match="function must be one that a new process can import.*local.*top level"):
        run_on_ranks(local, 1)
    local.__module__, local.__qualname__ = "__main__", "local"  # as in a notebook
    with pytest.raises(ValueError, match="of __main__"):
        run_on_ranks(local, 1)


@pytest.mark.parametrize(
    ("world_size", "timeout_s", "text"),
    [(0, 1.0, "world_size must be at least 1 rank, got 0"), (1, 0.0, "timeout_s must be a positive number")],
)
def test_numbers_out_of_range_are_refused(world_size, timeout_s, text):
    with pytest.raises(ValueError, match=text):
        run_on_ranks(worker_hang, world_size, timeout_s=timeout_s)
