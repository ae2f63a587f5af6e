"""Real faults: processes killed while they save, full and read-only disks, files that are not what they were."""

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from processes import kill_what_stays
from torch import nn
from trainings import Training, differences, small_model

from fsdp_ema_lib import offline, safe_reading, storage
from fsdp_ema_lib.checkpoint_manager import CheckpointManager
from fsdp_ema_lib.directory_lock import LOCK_FILE
from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.lab import training_job
from fsdp_ema_lib.lab.training import TrainingConfig
from fsdp_ema_lib.storage import DamagedCheckpointError, UnsafeCheckpointError

KILLS = 20  # spread over all that a rank does in the directory while it saves
VICTIMS = ("rank 0", "rank 1", "all")
WORLD_SIZE = 2
JOB_TIMEOUT_S = 60


# ---------------------------------------------------------------- killed while saving


def die_at(point: int | None, folder: str, everyone: list[int], how: int) -> Callable[[], int]:
    """Kill processes at the n-th time from now that this one opens, renames, makes or removes something in `folder`.

    Returns:
        A function that tells how often it has done so.
    """
    seen = 0
    kinds = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.listdir", "os.scandir")

    def hook(event: str, arguments: tuple) -> None:
        nonlocal seen
        if event not in kinds or not isinstance(arguments[0], str | bytes | os.PathLike):
            return
        # A directory that is taken down names its files relative to itself.
        if os.fsdecode(arguments[0]).startswith(folder) or (event == "os.remove" and arguments[1] != -1):
            if seen == point:
                for pid in everyone:
                    with suppress(ProcessLookupError):
                        os.kill(pid, how)
            seen += 1

    sys.addaudithook(hook)
    return lambda: seen


def job(rank: int, folder: str, aside: str, point: int | None, victim: str, asynchronous: bool, how: int) -> None:
    """One rank: save, note what must come back, then save again and be killed on the way."""
    sys.stderr = sys.stdout = open(f"{aside}/log{rank}", "w", buffering=1)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{aside}/rendezvous",
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=30),
    )
    if how == signal.SIGTERM:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    training = Training("fsdp2_nested").train(1)
    # keep=1: the second save also removes the first.
    checkpoints = CheckpointManager(folder, keep=1, async_save=asynchronous, write_timeout=timedelta(seconds=30))
    pids: list = [None] * WORLD_SIZE
    dist.all_gather_object(pids, os.getpid())
    for step in (1, 2):
        torch.save(training.full_state(), f"{aside}/expected{step}.{rank}")
        if step == 2 and victim in (f"rank {rank}", "all"):
            # Of "all", whoever comes to its point first takes the other along.
            others = [pid for pid in pids if pid != os.getpid()] if victim == "all" else []
            seen = die_at(point, folder, [*others, os.getpid()], how)
        checkpoints.save(step, **training.parts(), extra={"at": step})
        checkpoints.wait()
        training.train(1)
    checkpoints.close()
    if point is None:
        Path(f"{aside}/seen{rank}").write_text(str(seen()))


def run_job(
    processes, folder: Path, aside: Path, point: int | None, victim: str, asynchronous: bool, how: int
) -> list[int]:
    """Exit codes of the ranks; none of them may hang."""
    aside.mkdir()
    ranks = [
        processes.Process(target=job, args=(rank, str(folder), str(aside), point, victim, asynchronous, how))
        for rank in range(WORLD_SIZE)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(JOB_TIMEOUT_S)
    hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for process in ranks:
        process.kill()
        process.join()
    logs = "\n".join((aside / f"log{rank}").read_text()[-3000:] for rank in range(WORLD_SIZE))
    assert hung == [], f"ranks {hung} still wait for the dead\n{logs}"
    return [process.exitcode for process in ranks]


def check_that_it_healed(folder: Path, aside: Path) -> int:
    """The newest checkpoint is sound and bit-equal to what was saved; the next save clears the rest."""
    with pytest.warns(UserWarning) if is_owned(folder) else no_warning():
        checkpoints = CheckpointManager(folder, keep=5)
    with checkpoints:
        newest, steps = checkpoints.latest(), checkpoints.steps()
        assert steps in ([1], [1, 2], [2])
        training = Training("plain", seed=5)
        found = checkpoints.load(**training.parts(), verify=True)
        assert found == {"step": newest, "extra": {"at": newest}}
        expected = torch.load(aside / f"expected{newest}.0", weights_only=True)
        assert differences(training.full_state(), expected) == []
        checkpoints.save(3, **training.parts())
    names = {path.name for path in folder.iterdir()}
    assert names == {LOCK_FILE} | {f"step_{step:08d}" for step in [*steps, 3]}
    return newest


def is_owned(folder: Path) -> bool:
    return (folder / LOCK_FILE).read_text() != ""


@contextmanager
def no_warning():
    yield


def check_kill(processes, tmp_path, point, victim, asynchronous, how=signal.SIGKILL):
    folder, aside = tmp_path / "checkpoints", tmp_path / "aside"
    codes = run_job(processes, folder, aside, point, victim, asynchronous, how)
    newest = check_that_it_healed(folder, aside)
    if how == signal.SIGKILL:
        assert -signal.SIGKILL in (codes if victim == "all" else [codes[VICTIMS.index(victim)]]), "nobody was killed"
        survivors = [code for code in codes if code != -signal.SIGKILL]
        # Who is left notices, unless the other died after all was on disk.
        assert all(code != 0 for code in survivors) or newest == 2, codes


@pytest.fixture(scope="module")
def points(processes, tmp_path_factory) -> dict[str, list[int]]:
    """For each victim, points from the first to the last of what the second save does in the directory."""
    path = tmp_path_factory.mktemp("undisturbed")
    codes = run_job(processes, path / "checkpoints", path / "aside", None, "all", False, signal.SIGKILL)
    assert codes == [0] * WORLD_SIZE
    seen = [int((path / "aside" / f"seen{rank}").read_text()) for rank in range(WORLD_SIZE)]
    assert seen[0] > KILLS and seen[1] > 3, "otherwise the kills below would test nothing"
    counts = dict(zip(VICTIMS, [*seen, seen[0]], strict=True))
    return {victim: [n * (count - 1) // (KILLS - 1) for n in range(KILLS)] for victim, count in counts.items()}


@pytest.mark.parametrize("number", range(KILLS))
def test_a_kill_at_any_point_leaves_the_previous_checkpoint_and_heals(processes, tmp_path, points, number):
    victim = VICTIMS[number % 3]
    check_kill(processes, tmp_path, points[victim][number], victim, asynchronous=number % 2 == 1)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("number", range(KILLS))
def test_every_kill_leaves_the_previous_checkpoint_and_heals(processes, tmp_path, points, number, victim, asynchronous):
    check_kill(processes, tmp_path, points[victim][number], victim, asynchronous)


@pytest.mark.parametrize(("point", "asynchronous"), [(1, False), (5, True), (8, False)])
def test_a_terminated_job_aborts_cleanly(processes, tmp_path, point, asynchronous):
    check_kill(processes, tmp_path, point, "all", asynchronous, signal.SIGTERM)


def test_the_points_lie_before_the_save_within_it_and_in_the_removal_of_the_last(processes, tmp_path, points):
    """Otherwise the kills above would test nothing."""
    found = []
    for point in (points["rank 0"][number] for number in (0, KILLS // 3, KILLS - 1)):
        folder, aside = tmp_path / f"c{point}", tmp_path / f"a{point}"
        codes = run_job(processes, folder, aside, point, "rank 0", False, signal.SIGKILL)
        assert codes[0] == -signal.SIGKILL, f"point {point} was never reached"
        left = [path.name.partition("-")[0] for path in folder.iterdir() if storage.is_leftover(path.name)]
        found.append((CheckpointManager(folder, read_only=True).steps(), left))
    assert found == [([1], []), ([1], ["step_00000002.unpublished"]), ([2], ["step_00000001.discarded"])]


# ---------------------------------------------------------------- disks


@contextmanager
def mounted(path: Path, *arguments: str):
    """A mounted file system, or None where this process may not mount."""
    path.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *arguments, str(path)], capture_output=True) if shutil.which("mount") else None
    if done is None or done.returncode:
        yield None
        return
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@contextmanager
def file_size_limit(limit: int):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def worker_full_disk(folder: str, limit: int | None) -> list:
    small, large = nn.Linear(10, 10), nn.Linear(1000, 600)
    texts = []
    with CheckpointManager(folder) as checkpoints:
        checkpoints.save(1, model=small)
        with file_size_limit(limit) if limit else no_warning():
            try:
                checkpoints.save(2, model=large, ema=EMA_FSDP(large))
            except OSError as problem:
                texts.append(str(problem))
        found = checkpoints.load(model=nn.Linear(10, 10), verify=True)["step"]
        checkpoints.save(3, model=small)
    return [texts, found]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_full_disk_is_said_on_every_rank_and_leaves_nothing(ranks, tmp_path, world_size):
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=2m", "none") as disk:
        folder = (disk or tmp_path) / "checkpoints"
        results = ranks(world_size, worker_full_disk, folder=str(folder), limit=None if disk else 1 << 20)
        for rank, (texts, found) in enumerate(results):
            assert len(texts) == 1 and re.search("No space left on device|File too large", texts[0]), f"rank {rank}"
            assert found == 1
        assert {path.name for path in folder.iterdir()} == {LOCK_FILE, "step_00000001", "step_00000003"}


@pytest.mark.parametrize("limit", [100, 3000, 20_000])
def test_a_limit_on_file_sizes_stops_any_file_and_leaves_nothing(tmp_path, limit):
    model = nn.Linear(100, 100)
    with CheckpointManager(tmp_path) as checkpoints:
        with file_size_limit(limit), pytest.raises(OSError, match="File too large"):
            checkpoints.save(1, model=model, extra={"long": "x" * 1000})
        assert {path.name for path in tmp_path.iterdir()} == {LOCK_FILE}
        checkpoints.save(1, model=model)


def test_a_read_only_disk_is_read_and_refuses_a_save(tmp_path):
    (tmp_path / "source").mkdir()
    with CheckpointManager(tmp_path / "source") as checkpoints:
        checkpoints.save(1, model=small_model())
    with mounted(tmp_path / "disk", "--bind", str(tmp_path / "source")) as disk:
        if disk is None:
            pytest.skip("this process may not mount")
        subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)
        with CheckpointManager(disk, read_only=True) as checkpoints:
            assert checkpoints.load(model=small_model(), verify=True)["step"] == 1
        with pytest.raises(OSError, match="Read-only file system"):
            CheckpointManager(disk)


# ---------------------------------------------------------------- files that are not what they were


@pytest.fixture
def two(tmp_path):
    """A manager with steps 1 and 2, of equal size."""
    model = small_model()
    with CheckpointManager(tmp_path) as checkpoints:
        for step in (1, 2):
            with torch.no_grad():
                model[0].weight.add_(1)
            checkpoints.save(step, model=model, extra={"at": step})
        yield checkpoints


FILES = ("__0_0.distcp", ".metadata", storage.MANIFEST)


def truncate(path, name):
    os.truncate(path / name, (path / name).stat().st_size // 2)


def lengthen(path, name):
    with open(path / name, "ab") as stream:
        stream.write(b"{" * 10)


def flip(path, name):
    data = bytearray((path / name).read_bytes())
    data[len(data) // 3] ^= 4
    (path / name).write_bytes(data)


def remove(path, name):
    (path / name).unlink()


def swap(path, name):
    shutil.copyfile(path.parent / "step_00000001" / name, path / name)


def empty(path, name):
    os.truncate(path / name, 0)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [truncate, lengthen, flip, remove, swap, empty])
def test_damage_to_any_file_is_named_with_its_step_and_passed_over(two, tmp_path, name, damage):
    path = tmp_path / "step_00000002"
    damage(path, name)
    named = r"__0_0\.distcp" if (name, damage) == (storage.MANIFEST, swap) else re.escape(name)
    error = FileNotFoundError if (name, damage) == (storage.MANIFEST, remove) else DamagedCheckpointError
    with pytest.raises(error, match=rf"(?s)step_00000002.*({named})|no whole checkpoint of step 2"):
        two.load(2, model=small_model(), verify=True)
    if damage is remove and name == storage.MANIFEST:
        assert two.steps() == [1], "without a manifest there is no checkpoint"
        assert two.load(model=small_model())["step"] == 1
        return
    with pytest.warns(UserWarning, match="the checkpoint of step 2 is damaged, going back to step 1"):
        assert two.load(model=small_model(), verify=True, fall_back=True) == {"step": 1, "extra": {"at": 1}}


def test_a_whole_checkpoint_under_the_name_of_another_is_found(two, tmp_path):
    storage.discard(tmp_path / "step_00000002")
    shutil.copytree(tmp_path / "step_00000001", tmp_path / "step_00000002")
    with pytest.raises(DamagedCheckpointError, match="step_00000002/manifest.json: it is the manifest of step 1"):
        two.load(model=small_model())


def test_an_additional_file_and_an_empty_directory_are_no_checkpoint(two, tmp_path):
    (tmp_path / "step_00000002" / "planted").write_text("x")
    with pytest.raises(DamagedCheckpointError, match="step_00000002/planted: not in the manifest"):
        two.load(model=small_model())
    (tmp_path / "step_00000003").mkdir()
    assert two.steps() == [1, 2]
    with pytest.raises(FileExistsError, match="step_00000003 exists"):
        two.save(3, model=small_model())


def test_the_damage_of_every_checkpoint_is_the_last_ones_error(two, tmp_path):
    for step in (1, 2):
        truncate(tmp_path / f"step_0000000{step}", ".metadata")
    with (
        pytest.warns(UserWarning, match="going back to step 1"),
        pytest.raises(DamagedCheckpointError, match="00001/.met"),
    ):
        two.load(model=small_model(), fall_back=True)


def test_a_mismatch_is_no_damage_and_does_not_fall_back(two):
    with pytest.raises(ValueError, match="step_00000002 does not fit") as caught:
        two.load(model=nn.Linear(2, 2), fall_back=True)
    assert not isinstance(caught.value, DamagedCheckpointError | UnsafeCheckpointError)


def worker_reading_fails(folder: str, number: int, places: list[str]) -> list[str]:
    """What a load with fall_back says where one rank cannot open what it needs of step 2."""
    texts = []
    for place in places:
        with CheckpointManager(folder, read_only=True) as checkpoints, pytest.MonkeyPatch.context() as patch:
            open_inside = safe_reading.open_inside

            def failing(directory, name, place=place, open_inside=open_inside):
                if name.endswith(place) and directory.name == "step_00000002":
                    raise OSError(number, os.strerror(number), str(directory / name))
                return open_inside(directory, name)

            if not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1:
                patch.setattr(safe_reading, "open_inside", failing)
                patch.setattr(storage, "open_inside", failing)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    texts.append(f"loaded {checkpoints.load(model=small_model(), fall_back=True)['step']}")
                except OSError as problem:
                    texts.append(str(problem))
    return texts


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ESTALE, errno.EACCES])
def test_only_what_the_disk_cannot_read_is_damage(two, tmp_path, ranks, number, world_size):
    for texts in ranks(world_size, worker_reading_fails, folder=str(tmp_path), number=number, places=list(FILES)):
        assert len(texts) == 3
        for name, text in zip(FILES, texts, strict=True):
            if number == errno.EIO:
                assert text == "loaded 1", name
            else:
                assert os.strerror(number) in text, name


# ---------------------------------------------------------------- torchrun


STEPS, EVERY = 300, 30
PUBLISHED = "step_????????/manifest.json"  # under its own name
TRAINING = TrainingConfig(steps=STEPS, eval_every=EVERY, hidden=32, blocks=2, batch_size=16)


def start_torchrun(folder: Path, max_restarts: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [f"--max-restarts={max_restarts}", "--monitor-interval=0.2", "-m", "fsdp_ema_lib.lab.training"]
    command += f"--checkpoints {folder} --steps {STEPS} --save-every {EVERY} --hidden 32 --blocks 2".split()
    command += "--batch-size 16 --resume auto --device cpu".split()
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=TORCHRUN_ENV)


TORCHRUN_ENV = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def await_checkpoint(folder: Path, torchrun: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not list(folder.glob(PUBLISHED)):
        assert torchrun.poll() is None, torchrun.communicate()[0]
        assert time.monotonic() < deadline, "no checkpoint within two minutes"
        time.sleep(0.01)


def end_of(torchrun: subprocess.Popen) -> str:
    """What the job wrote; it must end, and take its processes along."""
    workers = psutil.Process(torchrun.pid).children(recursive=True)
    try:
        told = torchrun.communicate(timeout=150)[0]
    finally:
        torchrun.kill()
        left = kill_what_stays(workers, 10)
    assert not left, f"left behind: {left}"
    return told


def rank_of_job(torchrun: subprocess.Popen, rank: int) -> psutil.Process:
    workers = psutil.Process(torchrun.pid).children()
    return next(process for process in workers if process.environ().get("RANK") == str(rank))


def worker_undisturbed(folder: str) -> str:
    return training_job.run_job(training_job.Job(TRAINING, Path(folder)))


@pytest.fixture(scope="module")
def undisturbed(ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert ranks(2, worker_undisturbed, folder=str(folder)) == ["finished"] * 2
    return folder


def assert_ends_like(folder: Path, undisturbed: Path) -> None:
    assert json.loads((folder / "training.json").read_text())["status"] == "finished"
    found = offline.diff(folder, undisturbed)
    assert [found[kind] for kind in ("only_first", "only_second", "differing")] == [[], [], []]
    assert found["equal"] > 50  # weights, moments, averages, random states of two ranks


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_torchrun_restarts_a_job_with_a_killed_rank_and_it_ends_bit_equal(tmp_path, undisturbed, victim):
    torchrun = start_torchrun(tmp_path, max_restarts=1)  # a second failure would not go unseen
    await_checkpoint(tmp_path, torchrun)
    rank_of_job(torchrun, victim).kill()
    told = end_of(torchrun)
    assert torchrun.returncode == 0, told
    assert f"no checkpoint in {tmp_path}: starting at step 1" in told
    assert re.search(rf"going on after step \d+ of {STEPS} from", told), told
    assert_ends_like(tmp_path, undisturbed)


@pytest.mark.slow
def test_torchrun_that_is_terminated_saves_and_goes_on_when_it_is_started_again(tmp_path, undisturbed):
    torchrun = start_torchrun(tmp_path, max_restarts=0)
    await_checkpoint(tmp_path, torchrun)
    torchrun.terminate()
    told = end_of(torchrun)
    assert torchrun.returncode != 0, told
    stopped = json.loads((tmp_path / "training.json").read_text())
    assert stopped["status"] == "stopped" and (tmp_path / f"step_{stopped['step']:08d}").exists(), told
    again = start_torchrun(tmp_path, max_restarts=0)
    told = end_of(again)
    assert again.returncode == 0 and f"going on after step {stopped['step']} of {STEPS}" in told, told
    assert_ends_like(tmp_path, undisturbed)


def test_the_manifest_says_what_the_checkpoint_is(two, tmp_path):
    manifest = json.loads((tmp_path / "step_00000002" / storage.MANIFEST).read_text())
    assert manifest["format_version"] == 1 and manifest["step"] == 2 and manifest["world_size"] == 1
    assert manifest["torch"] == torch.__version__ and manifest["model"]["sharding"] == {"plain": 4}
    files = {file.name: file.stat().st_size for file in (tmp_path / "step_00000002").iterdir()}
    assert {name: facts["size"] for name, facts in manifest["files"].items()} == {
        name: size for name, size in files.items() if name != storage.MANIFEST
    }
