import ctypes
import os
import re
import signal
import socket
import stat
import sys
import tempfile
import threading
import time
import uuid

import ipyparallel
import psutil
import pytest
import torch
import torch.distributed as dist
from jupyter_client import KernelManager
from processes import command, kill_what_stays
from torch.distributed.checkpoint.api import CheckpointException
from traitlets.config import Config

from fsdp_ema_lib.lab import cluster
from fsdp_ema_lib.lab.cluster import RankError, ranks
from fsdp_ema_lib.lab.kernel_host import MARK, marked_processes


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A folder for temporary files and a mark for processes: what is left when all tests are done."""
    folder, mark = tmp_path_factory.mktemp("temporary"), uuid.uuid4().hex
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, mark)
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        # What a kernel under torchrun would hand down.
        patch.setenv("MPLBACKEND", "module://no_such_backend")
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            patch.setenv(name, "7")
        yield mark, folder
        if cluster._current is not None:
            cluster._current.stop()
        assert_nothing_left((mark, folder))


def assert_nothing_left(watched):
    mark, folder = watched
    # One that was killed together with its parent is gone a moment after it.
    assert kill_what_stays(marked_processes(mark), 20) == []
    assert [path.name for path in folder.iterdir() if path.name.startswith("fsdp-ema-ranks-")] == []


def left_of(pids):
    """A second interrupt, for the output of a second rank, may strike while the kernel waits for their end."""
    return psutil.wait_procs([process for process in psutil.process_iter() if process.pid in pids], timeout=20)[1]


@pytest.fixture
def two(watched):
    """Two ranks, those of the test before if it left them running."""
    if cluster._current is None or not cluster._current.running:
        ranks(2, device="cpu", quiet=True)
    return cluster._current


def worker_sum(numbers, *, factor):
    total = torch.tensor(numbers[dist.get_rank()])
    dist.all_reduce(total)
    settings = {name: os.environ.get(name) for name in ("MPLBACKEND", "RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")}
    return dist.get_rank(), total.item() * factor, os.getpid(), torch.get_num_threads(), settings


def test_results_come_by_rank_from_processes_of_their_own(two):
    results = two.run(worker_sum, [3, 4], factor=10)
    assert [(rank, total) for rank, total, *_ in results] == [(0, 70), (1, 70)]
    assert [pid for _, _, pid, *_ in results] == [place.pid for place in two.places]
    assert len({os.getpid(), *(place.pid for place in two.places)}) == 3
    for _, _, _, threads, settings in results:
        assert threads == 1
        assert settings == {"MPLBACKEND": "Agg", "RANK": None, "LOCAL_WORLD_SIZE": None, "MASTER_PORT": None}


def test_ranks_listen_on_loopback_only_and_meet_in_a_private_folder(two, watched):
    (folder,) = watched[1].glob("fsdp-ema-ranks-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / "rendezvous").is_file()
    listening = [
        (process.pid, connection.laddr.ip)
        for process in marked_processes(watched[0])
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert {pid for pid, _ in listening} >= {place.pid for place in two.places}, "gloo listens in every rank"
    assert {address for _, address in listening} <= {"127.0.0.1", "::1"}


def test_what_a_notebook_defines_travels_with_what_it_refers_to(two):
    space = {"__name__": "__main__", "torch": torch, "offset": 5}
    exec("class Found:\n    def __init__(self, value):\n        self.value = value", space)
    exec("def helper(a):\n    return a + offset + from_px", space)
    exec("def outer(a, *, scale=1):\n    return Found(torch.tensor(helper(a) * scale))", space)
    two["from_px"] = 100
    found = two.run(space["outer"], 1, scale=2)
    assert [(type(one), one.value.item()) for one in found] == [(space["Found"], 212)] * 2
    assert two.run(lambda: offset_of_closure) == [7, 7]


offset_of_closure = 7


def test_variables_are_read_and_set_by_rank(two):
    two["shared"] = {"a": [1, 2]}
    assert two["shared"] == [{"a": [1, 2]}] * 2
    assert two["rank"] == [0, 1] and two["world_size"] == [2, 2]
    assert two["device"] == [torch.device("cpu")] * 2
    assert len(two) == 2
    assert repr(two) == "<2 ranks on cpu (gloo), this machine>"
    with pytest.raises(RankError, match="(?s)^r.'missing'.: rank . of 2 failed: NameError: name 'missing'"):
        two["missing"]


def worker_speak():
    print(f"I am {dist.get_rank()}")


def test_what_a_rank_prints_appears_with_its_number_unless_quiet(two, capsys, monkeypatch):
    two.run(worker_speak)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(two, "quiet", False)
    two.run(worker_speak)
    assert sorted(capsys.readouterr().out.split("\n")) == ["", "I am 0", "I am 1", "[stdout:0] ", "[stdout:1] "]


def worker_all_fail():
    print("seen on the way")
    time.sleep(0.5 * (1 - dist.get_rank()))  # rank 1 is the first
    raise CheckpointException(f"on rank {dist.get_rank()}", {})


def test_when_all_fail_the_first_traceback_is_raised_and_the_ranks_live_on(two):
    with pytest.raises(RankError) as caught:
        two.run(worker_all_fail)
    error = caught.value
    text = str(error)
    assert (error.rank, error.error) == (1, "CheckpointException")
    assert text.startswith("worker_all_fail: rank 1 of 2 failed: CheckpointException: CheckpointException ranks:")
    assert "raise CheckpointException(f" in text, "the line is not shown"
    assert "do_apply" not in text and "engine_side" not in text, "frames that are not the user's"
    assert "rank 0 failed, too: CheckpointException" in text and "seen on the way" in text
    assert "\x1b" not in text
    assert error._render_traceback_()[0] == text.splitlines()[0]
    assert two.run(dist.get_rank) == [0, 1]


def test_a_result_that_cannot_travel_names_its_rank(two):
    with pytest.raises(RankError, match="(?s)allocate_lock: rank . of 2 failed: TypeError: .*pickle"):
        two.run(threading.Lock)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({}, ValueError, "n: say how many ranks to start"),
        ({"n": 0}, ValueError, "n: expected a whole number of ranks, at least 1, got 0"),
        ({"n": True}, ValueError, "at least 1, got True"),
        ({"n": 2, "device": "tpu"}, ValueError, 'device: expected "auto", "cpu" or "cuda", got \'tpu\''),
        ({"n": 2, "timeout_s": 0}, ValueError, "timeout_s: expected a positive number of seconds, got 0"),
        ({"n": 2, "limit_s": -1}, ValueError, "limit_s: expected a positive number of seconds, got -1"),
        ({"n": 2, "port": 1234}, ValueError, r"port, address: only for ranks\(profile=...\)"),
        ({"n": 2, "port": 70000, "profile": "x"}, ValueError, "port: expected 0 to 65535, got 70000"),
        (
            {"n": 3, "profile": "nowhere"},
            RuntimeError,
            "(?s)profile 'nowhere': no cluster is running there .*ipcluster start --profile=nowhere -n 3",
        ),
    ],
)
def test_what_cannot_be_is_refused(two, arguments, error, text, tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    with pytest.raises(error, match=text):
        ranks(**arguments)
    assert two.running, "a refusal changes nothing"


@pytest.mark.parametrize(
    ("count", "device", "error", "text"),
    [
        (0, "cuda", RuntimeError, "cuda.* was asked for, but torch sees no GPU here"),
        (
            1,
            "cuda",
            ValueError,
            "n: 2 ranks were asked for, but torch sees 1 GPU here, .*ranks.1., or ranks.2, device=",
        ),
        (1, "auto", ValueError, "n: 2 ranks were asked for, but torch sees 1 GPU here"),
    ],
)
def test_more_ranks_than_gpus_are_refused(count, device, error, text, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(error, match=text):
        ranks(2, device=device)


def arrivals(*gpus_by_host):
    return [{"host": host, "pid": pid, "gpus": gpus} for pid, (host, gpus) in enumerate(gpus_by_host)]


def test_each_rank_gets_a_gpu_that_no_other_has():
    all_seen = arrivals(("a", ["u", "v"]), ("a", ["u", "v"]), ("b", ["w"]))
    assert [place.device for place in cluster._assign(all_seen, "auto")] == ["cuda:0", "cuda:1", "cuda:0"]
    one_each = arrivals(("a", ["u"]), ("a", ["v"]))  # as Slurm shows them
    assert [place.device for place in cluster._assign(one_each, "cuda")] == ["cuda:0", "cuda:0"]
    with pytest.raises(ValueError, match="3 ranks on a, but rank 2 finds no GPU of its own among the 2 that it sees"):
        cluster._assign(arrivals(*[("a", ["u", "v"])] * 3), "auto")
    mixed = arrivals(("a", ["u"]), ("b", []))
    assert [place.device for place in cluster._assign(mixed, "auto")] == ["cpu", "cpu"]
    with pytest.raises(RuntimeError, match="no GPU is seen by rank 1 on b"):
        cluster._assign(mixed, "cuda")


def test_without_ipyparallel_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "fsdp_ema_lib.lab.engines", raising=False)
    monkeypatch.setitem(sys.modules, "ipyparallel", None)
    with pytest.raises(ModuleNotFoundError, match=r"ranks needs ipyparallel, .* pip install 'fsdp-ema-lib\[lab\]'"):
        ranks(2, device="cpu")


# From here on each test ends the ranks.


def worker_one_fails(rank):
    if dist.get_rank() == rank:
        raise KeyError("the cause")
    dist.barrier()  # never comes to an end


def test_one_failure_ends_the_ranks_that_wait_for_it(two, watched, monkeypatch):
    monkeypatch.setattr(cluster, "GRACE_S", 1.0)
    with pytest.raises(RankError, match="(?s)^worker_one_fails: rank 1 of 2 failed: KeyError: 'the cause'") as caught:
        two.run(worker_one_fails, 1)
    assert "rank 0 still waited 1 s later, so all ranks were ended" in str(caught.value)
    assert not two.running
    with pytest.raises(RuntimeError, match="these 2 ranks have ended: .* while rank 0 waited. Run the cell"):
        two.run(dist.get_rank)
    assert_nothing_left(watched)


def worker_die(rank, number):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), number)
    dist.barrier()


def test_a_rank_that_is_killed_in_mid_call_ends_all_and_is_named(two, watched):
    with pytest.raises(RankError, match="^rank 1 of 2 died .SIGKILL. in worker_die\n.*All ranks were ended") as caught:
        two.run(worker_die, 1, signal.SIGKILL)
    assert (caught.value.rank, caught.value.error) == (1, "died")
    assert_nothing_left(watched)


@pytest.mark.gpu
def test_on_cuda_every_rank_works_on_a_gpu_of_its_own(watched):
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    count = min(2, torch.cuda.device_count())
    with ranks(count, quiet=True) as r:
        assert [place.device for place in r.places] == [f"cuda:{number}" for number in range(count)]
        assert r.run(worker_sum_on_gpu) == [("nccl", count * (count + 1) / 2)] * count
    assert_nothing_left(watched)


def worker_sum_on_gpu():
    total = torch.tensor([dist.get_rank() + 1.0], device="cuda")
    dist.all_reduce(total)
    return dist.get_backend(), total.item()


@pytest.mark.slow
def test_a_crash_shows_where_it_happened(two, watched):
    with pytest.raises(RankError, match="(?s)^rank 0 of 2 died .SIGABRT. in worker_die\n.*in worker_die"):
        two.run(worker_die, 0, signal.SIGABRT)
    assert_nothing_left(watched)


def worker_crash_outside_python(rank):
    if dist.get_rank() == rank:
        libc, thread = ctypes.CDLL(None), ctypes.c_ulong()
        libc.pthread_create(ctypes.byref(thread), None, ctypes.c_void_p(0), None)  # a thread that starts at address 0
        threading.Event().wait(60.0)
    dist.barrier()


@pytest.mark.slow
def test_a_crash_in_a_thread_without_python_shows_where_the_call_was(two, watched):
    with pytest.raises(RankError, match="(?s)^rank 1 of 2 died .SIGSEGV. in worker_crash_outside_python\n") as caught:
        two.run(worker_crash_outside_python, 1)
    text = str(caught.value)
    assert "Segmentation fault" in text and "in worker_crash_outside_python\n" in text
    assert text.count("hread 0x") == 1 and "Extension modules" not in text
    assert_nothing_left(watched)


@pytest.mark.slow
def test_a_rank_that_dies_between_calls_ends_all(two, watched):
    os.kill(two.places[0].pid, signal.SIGKILL)
    assert_nothing_left(watched)
    with pytest.raises(RankError, match="^rank 0 of 2 died .SIGKILL. before this call"):
        two.run(dist.get_rank)
    with pytest.raises(RuntimeError, match="have ended: rank 0 of 2 died"):
        two.run(dist.get_rank)


def worker_hang():
    threading.Event().wait()


def test_a_hang_is_found_at_the_limit_and_says_where_it_was(two, watched):
    two.run(worker_sum, [1, 1], factor=1)  # imports this file there, which may take longer than the limit
    two.limit_s = 1.0
    where = "(?s)worker_hang: rank 0, 1 of 2 not done after 1 s.*--- rank 0 ---.*in worker_hang.*--- rank 1 ---"
    with pytest.raises(TimeoutError, match=where):
        two.run(worker_hang)
    assert_nothing_left(watched)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.05, 0.3, 1.0, 2.0, 3.0, 5.0])
def test_an_interrupted_start_leaves_nothing(watched, delay):
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        ranks(2, device="cpu", quiet=True)
        threading.Event().wait(30)
    if cluster._current is not None:
        cluster._current.stop()
    assert_nothing_left(watched)


@pytest.fixture
def watched_kernel(tmp_path, monkeypatch):
    """What `watched` is, of the kernel alone."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield mark, tmp_path
    assert_nothing_left((mark, tmp_path))


@pytest.fixture
def kernel(watched_kernel, monkeypatch):
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    monkeypatch.delenv("MPLBACKEND", raising=False)
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.blocking_client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    yield Kernel(manager, client)
    client.stop_channels()
    manager.shutdown_kernel(now=True)


class Kernel:
    """A kernel that runs cells and remembers what they showed."""

    def __init__(self, manager, client):
        self.manager, self.client = manager, client

    def run(self, code, on_output=None):
        """(all that was shown as text, the error's name or None)."""
        shown = []

        def hook(message):
            content = message["content"]
            text = content.get("text") or content.get("data", {}).get("text/plain")
            if text:
                shown.append(text)
            if message["msg_type"] == "error":
                shown.append("\n".join(content["traceback"]))
            if on_output is not None and text:
                on_output(text)

        reply = self.client.execute_interactive(code, timeout=120, output_hook=hook, allow_stdin=False)
        return "\n".join(shown), reply["content"].get("ename")


def pids_of(text):
    return [int(number) for number in re.findall(r"pid=(\d+)", text)]


def test_in_a_kernel_cells_run_on_ranks_and_end_with_it(kernel, watched_kernel):
    first, error = kernel.run("from fsdp_ema_lib.lab.cluster import ranks\nr = ranks(1, device='cpu')\nr.places")
    assert error is None, first
    assert re.search(r"1 rank on cpu .gloo., this machine, ready after \d+.\d s", first)
    shown, error = kernel.run("r = ranks(2, device='cpu')\nprint(r.places)")
    assert error is None, shown
    assert left_of(pids_of(first)) == [], "the first ranks are still there"
    engines = pids_of(shown)
    assert len(engines) == 2

    shown, error = kernel.run("%%px\nimport os\nprint(f'rank {rank} of {world_size}')\nown = os.getpid()\nown + rank")
    assert error is None
    assert all(line in shown for line in ("[stdout:0] rank 0 of 2", "[stdout:1] rank 1 of 2")), shown
    assert f"Out[1:1]: {engines[1] + 1}" in re.sub(r"\x1b\[[0-9;]*m", "", shown).replace("\n", " "), shown
    shown, error = kernel.run("def two_more(a):\n    return a + own + 2\nr['own'], r.run(two_more, 1)")
    assert shown == f"({engines}, {[pid + 3 for pid in engines]})"

    shown, error = kernel.run("%%px --targets all\ncalls = 1\nprint(f'all: {rank}')")
    assert error is None and "all: 0" in shown and "all: 1" in shown, shown
    shown, error = kernel.run("%%px --targets 1\nprint(f'one: {rank}')")
    assert error is None and "one: 1" in shown and "one: 0" not in shown, shown
    for targets in ("7", "[0,7]", "-1", "[]"):
        shown, error = kernel.run(f"%%px --targets {targets}\ncalls = 2")
        assert error == "ValueError" and f"--targets: expected ranks, which are 0, 1, got {targets[:2]}" in shown, shown
    assert kernel.run("%pxconfig --targets 0\nr['calls']") == ("[1, 1]", None), "a refused cell ran, or not on all"
    kernel.run("%pxconfig --targets all")

    shown, error = kernel.run("%%px\nif rank == 1:\n    1 / 0")
    assert error == "RankError"
    assert "%%px: rank 1 of 2 failed: ZeroDivisionError" in shown and "1 / 0" in re.sub(r"\x1b\[[0-9;]*m", "", shown)
    shown, error = kernel.run("def fails():\n    x = []\n    return x[3]\nr.run(fails)")
    assert error == "RankError" and "x[3]" in re.sub(r"\x1b\[[0-9;]*m", "", shown), "the source is not shown"

    # A killed kernel cannot clear up.
    kernel.manager.signal_kernel(signal.SIGKILL)
    assert_nothing_left(watched_kernel)


@pytest.mark.slow
def test_an_interrupted_cell_ends_the_ranks(kernel, watched_kernel):
    shown, error = kernel.run("from fsdp_ema_lib.lab.cluster import ranks\nr = ranks(2, device='cpu')\nr.places")
    assert error is None, shown
    hang = "%%px\nimport threading\nprint('waiting')\nthreading.Event().wait()"
    _, error = kernel.run(hang, on_output=lambda text: kernel.manager.interrupt_kernel())
    assert error == "KeyboardInterrupt"
    assert left_of(pids_of(shown)) == []
    shown, error = kernel.run("%px rank")
    assert error == "RuntimeError" and "these 2 ranks have ended: %%px was interrupted. Run the cell" in shown


@pytest.mark.slow
@pytest.mark.parametrize("end", ["exit", "restart", "del"])
def test_a_kernel_that_ends_in_order_ends_its_ranks(kernel, watched_kernel, end):
    shown, error = kernel.run("from fsdp_ema_lib.lab.cluster import ranks\nr = ranks(2, device='cpu')")
    assert error is None, shown
    if end == "exit":
        kernel.client.shutdown()
    elif end == "restart":
        kernel.manager.restart_kernel()
    else:
        kernel.run("r.stop()")
    # The kernel itself may go on.
    theirs = [
        process
        for process in marked_processes(watched_kernel[0])
        if any(name in command(process) for name in ("ipyparallel", "cluster_guard"))
    ]
    assert kill_what_stays(theirs, 20) == []
    assert [path.name for path in watched_kernel[1].iterdir() if path.name.startswith("fsdp-ema-ranks-")] == []


@pytest.fixture
def profile(watched, tmp_path, monkeypatch):
    """A cluster of two engines in the profile "here", as `ipcluster start` starts it."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    (tmp_path / "profile_here").mkdir()
    # An engine takes its time to end when it is asked to.
    config = Config({"LocalProcessLauncher": {"stop_seconds_until_kill": 1}})
    theirs = ipyparallel.Cluster(profile="here", cluster_id="", n=2, delay=0.0, config=config)
    client = theirs.start_and_connect_sync()
    yield client
    client.close()
    theirs.stop_cluster_sync()


def test_engines_of_a_profile_become_ranks_and_stay_when_those_end(profile):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port: {port} cannot be used on .*, the host of rank 0.*in use"):
            ranks(profile="here", port=port, quiet=True)
    with pytest.raises(ValueError, match="profile 'here': 3 ranks were asked for, but 2 engines are there"):
        ranks(3, profile="here")
    with ranks(profile="here", device="cpu", quiet=True) as r:
        pids = [place.pid for place in r.places]
        assert sorted(profile[:].apply_sync(os.getpid)) == sorted(pids)
        results = r.run(worker_sum, [3, 4], factor=1)
        assert [(rank, total) for rank, total, *_ in results] == [(0, 7), (1, 7)]
        with pytest.raises(RankError, match="rank 1 of 2 failed: ValueError"):
            r.run(worker_fails_alone, 1)
    assert profile[:].apply_sync(dist.is_initialized) == [False, False]
    with ranks(1, profile="here", device="cpu", quiet=True) as r:
        assert r.run(dist.get_world_size) == [1]
    r = ranks(profile="here", device="cpu", quiet=True)
    with pytest.raises(RankError, match="rank 1 of 2 died in worker_die"):
        r.run(worker_die, 1, signal.SIGKILL)
    assert not r.running and profile.ids == [0]


def worker_fails_alone(rank):
    if dist.get_rank() == rank:
        raise ValueError
