"""process_group.py: starting and ending torch.distributed, alone, under torchrun, and when things go wrong."""

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fsdp_ema_lib import process_group
from fsdp_ema_lib.process_group import (
    TORCHRUN_VARIABLES,
    barrier,
    comm_device,
    distributed_job,
    is_main_process,
    launch_distributed_job,
    shutdown,
)

REPOSITORY = Path(__file__).resolve().parents[1]
CHILD_TIMEOUT_S = 120


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty directory for temporary files, no torchrun; at the end nothing may be left in it or running."""
    folder = tmp_path / "tmp a%20b?c#d"  # none of this may confuse the rendezvous
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    for name in TORCHRUN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield folder
    shutdown()
    assert not dist.is_initialized()
    assert list(folder.iterdir()) == []


@pytest.fixture
def torchrun_environment(home: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What torchrun sets for rank 1 of 4; each test bends one of them."""
    values = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def child_environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES}
    return kept | {"TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command that has children of its own: when it takes too long, they end with it."""
    child = subprocess.Popen(
        command,
        env=child_environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = child.communicate(timeout=CHILD_TIMEOUT_S)
    except BaseException:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        raise
    return subprocess.CompletedProcess(command, child.returncode, output, errors)


# --- a group of one ---


def test_group_of_one_works_and_its_file_lies_in_a_private_directory(home):
    assert launch_distributed_job(device="cpu") == torch.device("cpu")
    assert (dist.get_backend(), dist.get_rank(), dist.get_world_size()) == ("gloo", 0, 1)
    assert is_main_process() and comm_device() == torch.device("cpu")

    (folder,) = home.iterdir()
    found = folder.lstat()
    assert stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o700 and found.st_uid == os.geteuid()
    assert [path.name for path in folder.iterdir()] == ["rendezvous"]

    value = torch.full((3,), 2.5)
    dist.all_reduce(value)
    barrier()
    assert value.tolist() == [2.5] * 3
    dist.barrier(dist.new_group([0]))  # a subgroup goes through the same file


def test_device_defaults_to_what_the_machine_has(home):
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    for asked in (None, "auto"):
        assert launch_distributed_job(device=asked).type == expected
        assert dist.get_backend() == {"cuda": "nccl", "cpu": "gloo"}[expected]
        shutdown()


def test_second_call_is_harmless(home):
    first = launch_distributed_job(device="cpu")
    group, files = dist.group.WORLD, list(home.iterdir())
    for again in (
        launch_distributed_job(),
        launch_distributed_job(device="auto"),
        launch_distributed_job("gloo"),
        launch_distributed_job("gloo", torch.device("cpu")),
    ):
        assert again == first
    assert dist.group.WORLD is group and list(home.iterdir()) == files


@pytest.mark.parametrize(
    "backend, device, asked",
    [
        ("nccl", None, "backend nccl and device any"),
        (None, "cuda:1", "backend any and device cuda:1"),
        ("cpu:gloo,cuda:nccl", "cpu", "backend cpu:gloo,cuda:nccl and device cpu"),
    ],
)
def test_second_call_that_asks_for_something_else_names_both(home, backend, device, asked):
    launch_distributed_job(device="cpu")
    with pytest.raises(RuntimeError) as error:
        launch_distributed_job(backend, device)
    assert str(error.value) == (
        f"launch_distributed_job: asked for {asked}, but a process group with backend gloo and device cpu is running. "
        "Call shutdown() first, or leave out what differs."
    )
    assert dist.is_initialized()


def test_start_stop_start(home):
    seen = set()
    for round_ in range(5):
        launch_distributed_job(device="cpu")
        seen |= {path.name for path in home.iterdir()}
        value = torch.tensor([float(round_)])
        dist.all_reduce(value)
        assert value.item() == round_
        shutdown()
        assert not dist.is_initialized() and list(home.iterdir()) == []
        shutdown()
    assert len(seen) == 5, "every start makes a directory of its own"


def test_without_a_group():
    assert is_main_process()
    barrier()
    shutdown()
    with pytest.raises(RuntimeError, match=r"no process group is running\. Call launch_distributed_job\(\) first"):
        comm_device()


# --- the context manager ---


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_context_manager_ends_the_job_however_the_block_ends(home, error):
    with pytest.raises(error), distributed_job(device="cpu"):
        assert len(list(home.iterdir())) == 1
        raise error
    assert not dist.is_initialized() and list(home.iterdir()) == []


def test_context_manager_leaves_the_job_that_it_found(home):
    launch_distributed_job(device="cpu")
    group = dist.group.WORLD
    with distributed_job() as device:
        assert device == torch.device("cpu")
    with pytest.raises(ValueError), distributed_job():
        raise ValueError
    assert dist.group.WORLD is group


# --- groups that others start or end ---


def test_group_of_other_code_is_used_and_left_to_it(home):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert launch_distributed_job() == torch.device("cpu")
    assert launch_distributed_job("gloo", "cpu") == torch.device("cpu")
    with distributed_job():
        pass
    with pytest.raises(
        RuntimeError, match="backend nccl .* backend gloo .* It was started by other code: end it there"
    ):
        launch_distributed_job("nccl")
    shutdown()
    assert dist.group.WORLD is group and list(home.iterdir()) == []
    dist.destroy_process_group()


def test_group_that_other_code_ended_is_cleared_away(home):
    launch_distributed_job(device="cpu")
    (old,) = home.iterdir()
    dist.destroy_process_group()
    launch_distributed_job(device="cpu")
    (new,) = home.iterdir()
    assert new != old
    dist.destroy_process_group()
    shutdown()
    assert list(home.iterdir()) == []


def test_shutdown_leaves_a_group_that_replaced_ours(home):
    launch_distributed_job(device="cpu")
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    shutdown()
    assert dist.is_initialized() and list(home.iterdir()) == []
    dist.destroy_process_group()


# --- bad input ---


@pytest.mark.parametrize(
    "arguments, kind, message",
    [
        (
            {"backend": "mpi"},
            ValueError,
            "backend: expected one of gloo, nccl, cpu:gloo,cuda:nccl, or None .* got 'mpi'",
        ),
        (
            {"backend": "nccl", "device": "cpu"},
            ValueError,
            "backend: nccl needs CUDA, and this process works on the CPU",
        ),
        (
            {"device": "gpu"},
            ValueError,
            """device: expected "auto", "cpu", "cuda" or one such as "cuda:1", got 'gpu'""",
        ),
        ({"device": "meta"}, ValueError, "device: expected .* got 'meta'"),
        ({"timeout": 30}, TypeError, r"timeout: expected a datetime.timedelta such as timedelta\(minutes=30\), got 30"),
        ({"timeout": timedelta(0)}, ValueError, "timeout: expected a positive time, got 0:00:00"),
    ],
)
def test_bad_argument_is_named_and_nothing_started(home, arguments, kind, message):
    with pytest.raises(kind, match=message):
        launch_distributed_job(**arguments)
    assert not dist.is_initialized()


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_cuda_without_cuda(home):
    with pytest.raises(
        RuntimeError, match=r'device: cuda was asked for, but torch sees no CUDA device\. Use device="cpu"'
    ):
        launch_distributed_job(device="cuda")


@pytest.mark.parametrize("missing", TORCHRUN_VARIABLES)
def test_half_set_torchrun_variables_name_the_missing_one(torchrun_environment, missing):
    torchrun_environment.delenv(missing)
    with pytest.raises(RuntimeError) as error:
        launch_distributed_job(device="cpu")
    others = ", ".join(name for name in TORCHRUN_VARIABLES if name != missing)
    assert str(error.value) == (
        f"{missing}: not set, but {others} are. Start several processes with torchrun, which sets all five of RANK, "
        f"WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT; for a single process unset {others}."
    )
    assert not dist.is_initialized()


@pytest.mark.parametrize("exported", [["MASTER_ADDR"], ["MASTER_PORT"], ["MASTER_ADDR", "MASTER_PORT"]])
def test_an_address_without_a_rank_is_no_torchrun(home, monkeypatch, exported):
    """Some machines export one to every shell."""
    for name in exported:
        monkeypatch.setenv(name, "no address")
    assert launch_distributed_job(device="cpu") == torch.device("cpu")
    assert dist.get_world_size() == 1 and [file.name for file in home.glob("*/*")] == ["rendezvous"]


def test_all_missing_variables_are_named_at_once(home, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(RuntimeError, match="^WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: not set, but RANK is. "):
        launch_distributed_job(device="cpu")


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("RANK", "4", r"RANK is 4; expected 0 to 3 \(below WORLD_SIZE, which is 4\)\. torchrun sets it"),
        ("RANK", "-1", "RANK is -1; expected 0 to 3"),
        ("RANK", "one", "RANK is 'one'; expected a whole number"),
        ("RANK", "", "RANK is ''; expected a whole number"),
        ("WORLD_SIZE", "0", r"WORLD_SIZE is 0; expected at least 1 \(the number of ranks\)"),
        ("WORLD_SIZE", "2.0", "WORLD_SIZE is '2.0'; expected a whole number"),
        ("LOCAL_RANK", "4", r"LOCAL_RANK is 4; expected 0 to 3 \(below WORLD_SIZE, which is 4\)"),
        ("MASTER_PORT", "70000", r"MASTER_PORT is 70000; expected 1 to 65535 \(a TCP port\)"),
        ("MASTER_ADDR", " ", "MASTER_ADDR is empty; expected the host name or address of rank 0"),
    ],
)
def test_impossible_torchrun_variable_is_named(torchrun_environment, name, value, message):
    torchrun_environment.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{message}"):
        launch_distributed_job(device="cpu")
    assert not dist.is_initialized()


def test_local_rank_beyond_the_devices(torchrun_environment):
    torchrun_environment.setattr(torch.cuda, "is_available", lambda: True)
    torchrun_environment.setattr(torch.cuda, "device_count", lambda: 1)
    for device in (None, "cuda"):
        with pytest.raises(ValueError) as error:
            launch_distributed_job(device=device)
        assert str(error.value) == (
            "LOCAL_RANK is 1, but this process sees CUDA devices 0 to 0. Start at most 1 processes here "
            "(--nproc-per-node 1) or widen CUDA_VISIBLE_DEVICES; where every rank is shown one device of its own, "
            'pass device="cuda:0".'
        )
    with pytest.raises(ValueError, match="device: cuda:3 was asked for, but the CUDA devices here are 0 to 0"):
        launch_distributed_job(device="cuda:3")


# --- a start that fails ---


def test_failed_start_leaves_nothing_and_can_be_tried_again(home, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    with pytest.raises(RuntimeError, match="no-such-interface"):
        launch_distributed_job(device="cpu")
    assert not dist.is_initialized() and list(home.iterdir()) == []
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    launch_distributed_job(device="cpu")
    assert dist.get_world_size() == 1


def test_interrupt_at_the_end_of_the_start_leaves_nothing(home, monkeypatch):
    real = dist.init_process_group

    def interrupted(*args, **kwargs):
        real(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(dist, "init_process_group", interrupted)
    with pytest.raises(KeyboardInterrupt):
        launch_distributed_job(device="cpu")
    assert not dist.is_initialized() and list(home.iterdir()) == []


def test_interrupt_during_shutdown_is_completed_by_the_next(home, monkeypatch):
    launch_distributed_job(device="cpu")

    def interrupted(folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(process_group, "_remove", interrupted)
        with pytest.raises(KeyboardInterrupt):
            shutdown()
    assert len(list(home.iterdir())) == 1
    shutdown()
    assert list(home.iterdir()) == []


def test_directory_without_privacy_is_refused(home, monkeypatch):
    before = os.umask(0o100)  # mkdtemp cannot give the mode that it asks for
    try:
        with pytest.raises(RuntimeError, match=r"mode 0700, found mode 0600 of user \d+\. Set TMPDIR to a directory"):
            launch_distributed_job(device="cpu")
    finally:
        os.umask(before)
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(RuntimeError, match=f"a directory of user {owner + 1} .* of user {owner}"):
        launch_distributed_job(device="cpu")
    assert not dist.is_initialized() and list(home.iterdir()) == []


# --- ends of real processes ---

CHILD = """
import sys, time
from fsdp_ema_lib.process_group import distributed_job, launch_distributed_job, shutdown
import torch.distributed as dist

def wait_for_the_signal():
    print("ready", dist.get_rank(), dist.get_world_size(), flush=True)
    time.sleep(600)  # killed in the end, whatever happens

match sys.argv[1]:
    case "falls off the end":
        launch_distributed_job(device="cpu")
    case "sys.exit":
        launch_distributed_job(device="cpu")
        sys.exit(3)
    case "exception":
        for _ in range(3):
            launch_distributed_job(device="cpu")
            shutdown()
        launch_distributed_job(device="cpu")
        raise ValueError("on purpose")
    case "interrupt":
        launch_distributed_job(device="cpu")
        wait_for_the_signal()
    case "interrupt in the context manager" | "kill":
        with distributed_job(device="cpu"):
            wait_for_the_signal()
"""


def start_child(script: Path, case: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(script), case],
        env=child_environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_whatever_ends_the_process_nothing_is_left_but_by_a_kill(tmp_path):
    script, folder = tmp_path / "child.py", tmp_path / "tmp"
    script.write_text(CHILD)
    folder.mkdir()
    signals = {
        "interrupt": signal.SIGINT,
        "interrupt in the context manager": signal.SIGINT,
        "kill": signal.SIGKILL,
    }
    children = {
        case: start_child(script, case, folder) for case in ("falls off the end", "sys.exit", "exception", *signals)
    }
    try:
        for case in signals:
            assert children[case].stdout.readline() == "ready 0 1\n", case  # at the same time, and they did not meet
        codes = {}
        for case in ("falls off the end", "sys.exit", "exception"):
            _, errors = children[case].communicate(timeout=CHILD_TIMEOUT_S)
            codes[case] = children[case].returncode
            if case == "exception":
                assert errors.count("[rank0]: ValueError: on purpose") == 1
                assert "[rank0]: [rank0]:" not in errors, "starts pile up torch's prefix"
        assert codes == {"falls off the end": 0, "sys.exit": 3, "exception": 1}
        rooms = list(folder.iterdir())
        assert len(rooms) == len(signals), "each of those still running has a directory of its own, the others none"
        for case, number in signals.items():
            children[case].send_signal(number)
            children[case].communicate(timeout=CHILD_TIMEOUT_S)
            assert children[case].returncode == -number, case
    finally:
        for child in children.values():
            child.kill()
            child.wait()
    (left,) = folder.iterdir()
    assert stat.S_IMODE(left.lstat().st_mode) == 0o700


FORKING = """
import atexit, os
import torch, torch.distributed as dist
from fsdp_ema_lib.process_group import launch_distributed_job, shutdown

launch_distributed_job(device="cpu")
(folder,) = os.listdir(os.environ["TMPDIR"])
child = os.fork()
if child == 0:
    shutdown()
    try:
        launch_distributed_job()
    except RuntimeError as error:
        print(error, flush=True)
    atexit._run_exitfuncs()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert os.listdir(os.environ["TMPDIR"]) == [folder]
dist.barrier(dist.new_group([0]))
print("the parent goes on")
"""


def test_forked_child_leaves_the_group_of_its_parent_alone(tmp_path):
    script, folder = tmp_path / "forking.py", tmp_path / "tmp"
    script.write_text(FORKING)
    folder.mkdir()
    done = run([sys.executable, str(script)], folder)
    assert done.returncode == 0, done.stderr
    message, last = done.stdout.splitlines()
    assert "was forked from process" in message and 'multiprocessing\'s "spawn", or call shutdown() before' in message
    assert last == "the parent goes on"
    assert list(folder.iterdir()) == []


# --- torchrun ---

RANK_SCRIPT = """
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from fsdp_ema_lib.process_group import barrier, comm_device, distributed_job, is_main_process, launch_distributed_job

out, fail = Path(sys.argv[1]), sys.argv[2] == "fail"
with distributed_job(device="cpu") as device:
    rank = dist.get_rank()
    if fail and rank == 1:
        raise ValueError("rank 1 fails on purpose")
    if rank == 1:
        time.sleep(0.5)
        (out / "written by rank 1 before the barrier").touch()
    barrier()
    seen = (out / "written by rank 1 before the barrier").exists()
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    try:
        launch_distributed_job("nccl")
    except RuntimeError as error:
        refusal = str(error)
    report = dict(
        rank=rank, world_size=dist.get_world_size(), backend=dist.get_backend(), device=str(device), seen=seen,
        again=str(launch_distributed_job()), total=total.item(), main=is_main_process(), comm=str(comm_device()),
        refusal=refusal, files=os.listdir(os.environ["TMPDIR"]),
    )
    (out / f"rank{rank}.json").write_text(json.dumps(report))
assert not dist.is_initialized()
"""


def run_two_ranks(tmp_path: Path, how: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    script, folder = tmp_path / "rank_script.py", tmp_path / "tmp"
    script.write_text(RANK_SCRIPT)
    folder.mkdir()
    # A rendezvous directory of torchrun's own lies elsewhere: what shows up in TMPDIR comes from the ranks.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    logs = ["--log-dir", str(tmp_path / "logs")]
    return run([*launcher, *logs, str(script), str(tmp_path), how], folder), folder


def test_the_same_call_under_torchrun(tmp_path):
    done, folder = run_two_ranks(tmp_path, "work")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        report = json.loads((tmp_path / f"rank{rank}.json").read_text())
        refusal = report.pop("refusal")
        assert "asked for backend nccl and device any, but a process group with backend gloo and device cpu" in refusal
        assert report == {
            "rank": rank,
            "world_size": 2,
            "backend": "gloo",
            "device": "cpu",
            "seen": True,
            "again": "cpu",
            "total": 3.0,
            "main": rank == 0,
            "comm": "cpu",
            "files": [],
        }
    assert list(folder.iterdir()) == []


def test_a_failing_rank_ends_the_whole_torchrun_job_with_its_own_error(tmp_path):
    done, folder = run_two_ranks(tmp_path, "fail")
    assert done.returncode != 0
    assert "ValueError: rank 1 fails on purpose" in done.stderr
    assert list(folder.iterdir()) == []


# --- CUDA ---


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("backend", [None, "cpu:gloo,cuda:nccl", "gloo"])
def test_group_of_one_on_cuda(home, backend):
    for _ in range(2):
        device = launch_distributed_job(backend)
        assert device == torch.device("cuda", torch.cuda.current_device())
        assert dist.get_backend() == (backend or "nccl")
        assert launch_distributed_job(backend, "cuda") == launch_distributed_job(device=device) == device
        assert comm_device() == (torch.device("cpu") if backend == "gloo" else device)
        barrier()
        value = torch.full((3,), 2.0, device=comm_device())
        dist.all_reduce(value)
        assert value.tolist() == [2.0] * 3
        with pytest.raises(RuntimeError, match=f"device cpu, but a process group with backend .* and device {device}"):
            launch_distributed_job(device="cpu")
        shutdown()
