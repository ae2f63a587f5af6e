"""A directory of checkpoints: newest, retention, leftovers, locks, asynchronous saves."""

import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from trainings import Training, differences, small_model

from fsdp_ema_lib import checkpoint, checkpoint_entries, checkpoint_manager, storage
from fsdp_ema_lib.checkpoint_manager import CheckpointManager
from fsdp_ema_lib.directory_lock import LOCK_FILE
from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.storage import DamagedCheckpointError


def names(path):
    return sorted(p.name for p in path.iterdir() if p.name != LOCK_FILE)


def flip_a_bit(file, position=None):
    data = bytearray(file.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 1
    file.write_bytes(data)


def test_newest_wins_and_only_so_many_are_kept(tmp_path):
    model = small_model()
    with CheckpointManager(tmp_path, keep=2) as checkpoints:
        assert (checkpoints.latest(), checkpoints.steps()) == (None, [])
        with pytest.raises(FileNotFoundError, match="no checkpoint here"):
            checkpoints.load(model=model)
        for step in (5, 10, 100_000_000):
            path = checkpoints.save(step, model=model, extra={"at": step})
        assert path.name == "step_100000000"
        assert (checkpoints.latest(), checkpoints.steps()) == (100_000_000, [10, 100_000_000])
        assert checkpoints.load(model=model) == {"step": 100_000_000, "extra": {"at": 100_000_000}}
        assert checkpoints.load(10, model=model)["step"] == 10
        with pytest.raises(FileNotFoundError, match=r"no whole checkpoint of step 5; there are \[10, 100000000\]"):
            checkpoints.load(5, model=model)
        with pytest.raises(FileExistsError, match="step_00000010 exists; a checkpoint is never written over"):
            checkpoints.save(10, model=model)
        checkpoints.verify(), checkpoints.verify(10)


def test_leftovers_are_cleared_and_strangers_never_touched(tmp_path):
    model = small_model()
    ours = ["step_00000003.unpublished-" + "a" * 32, "step_00000002.discarded-" + "0" * 32]
    strangers = ["step_00000003.unpublished-mine", "notes", "best.unpublished-" + "a" * 32, "step_1", "step_00000000"]
    for name in ours + strangers:
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ("step_00000009.unpublished-" + "b" * 32)).symlink_to(tmp_path / "elsewhere")
    with CheckpointManager(tmp_path, keep=1) as checkpoints:
        assert checkpoints.latest() is None
        for step in (7, 8):
            checkpoints.save(step, model=model)
    left = names(tmp_path)
    assert set(strangers) <= set(left) and "elsewhere" in left
    assert not set(ours) & set(left)
    assert "step_00000008" in left and "step_00000007" not in left
    assert all((tmp_path / name / "file").exists() for name in strangers)


def test_a_damaged_newest_is_named_or_passed_over_loudly_and_replaced(tmp_path):
    model = small_model()
    with CheckpointManager(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, model=model, extra={"at": step})
        data = next((tmp_path / "step_00000003").glob("*.distcp"))
        flip_a_bit(data)
        with pytest.raises(
            DamagedCheckpointError, match=r"(?s)step_00000003/__0_0.distcp: its checksum is .*fall_back"
        ):
            checkpoints.load(model=model, verify=True)
        with pytest.raises(DamagedCheckpointError, match="step_00000003/__0_0.distcp: its checksum"):
            checkpoints.verify()
        os.truncate(tmp_path / "step_00000002" / storage.MANIFEST, 40)
        with pytest.warns(UserWarning, match="step") as seen:
            found = checkpoints.load(model=model, verify=True, fall_back=True)
        assert found["step"] == 1
        texts = [str(w.message) for w in seen]
        assert "the checkpoint of step 3 is damaged, going back to step 2" in texts[0] and "__0_0.distcp" in texts[0]
        assert "the checkpoint of step 2 is damaged, going back to step 1" in texts[1] and "manifest.json" in texts[1]
    with CheckpointManager(tmp_path) as checkpoints:
        with pytest.warns(UserWarning, match="replacing the damaged checkpoint of step 3"):
            checkpoints.save(3, model=model, extra={"at": "again"})
        assert checkpoints.load(model=model, verify=True)["extra"] == {"at": "again"}


@pytest.mark.parametrize("by", ["manager", "function"])
def test_each_directory_that_is_made_is_flushed_into_its_parent(tmp_path, monkeypatch, by):
    flushed, sync = [], storage.sync
    monkeypatch.setattr(storage, "sync", lambda path: (flushed.append(path), sync(path)))
    if by == "manager":
        CheckpointManager(tmp_path / "a" / "b" / "c").close()
    else:
        checkpoint.save_checkpoint(tmp_path / "a" / "b" / "c" / "first", model=small_model())
    assert {tmp_path, tmp_path / "a", tmp_path / "a" / "b"} <= set(flushed)
    assert tmp_path.parent not in flushed
    flushed.clear()
    CheckpointManager(tmp_path / "a" / "b" / "c").close()
    assert flushed == []


def test_where_only_the_last_flush_fails_the_checkpoint_is_whole(tmp_path, monkeypatch):
    model, sync = small_model(), storage.sync

    def failing(path):
        if path == tmp_path:
            raise OSError(5, "Input/output error")
        sync(path)

    with CheckpointManager(tmp_path) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(storage, "sync", failing)
            with pytest.raises(OSError, match="Input/output error"):
                checkpoints.save(1, model=model)
        checkpoints.verify(1)
        assert names(tmp_path) == ["step_00000001"]


def test_retention_counts_sound_checkpoints_alone(tmp_path):
    model = small_model()
    with CheckpointManager(tmp_path, keep=2) as checkpoints:
        checkpoints.save(1, model=model), checkpoints.save(2, model=model)
        os.truncate(next((tmp_path / "step_00000002").glob("*.distcp")), 100)
        checkpoints.save(3, model=model)
        assert checkpoints.steps() == [1, 2, 3], "two sound ones are left"
        checkpoints.save(4, model=model)
        assert checkpoints.steps() == [3, 4]


def test_what_a_load_found_damaged_drives_out_nothing_and_is_set_aside(tmp_path):
    """A flipped bit leaves the size right: counted, the damaged one would drive out all that is sound."""
    model = small_model()
    with CheckpointManager(tmp_path, keep=1) as checkpoints:
        checkpoints.save(5, model=model)
        shutil.copytree(tmp_path / "step_00000005", tmp_path / "aside")
        checkpoints.save(10, model=model)
        shutil.move(tmp_path / "aside", tmp_path / "step_00000005")
    flip_a_bit(tmp_path / "step_00000010" / "__0_0.distcp")
    with CheckpointManager(tmp_path, keep=1) as checkpoints:
        with pytest.warns(UserWarning, match="step 10 is damaged, going back to step 5"):
            checkpoints.load(model=model, verify=True, fall_back=True)
        with pytest.warns(UserWarning, match=r"set aside: 10 \(now step_00000010.abandoned-"):
            checkpoints.save(7, model=model)
        assert checkpoints.steps() == [7]
        checkpoints.save(10, model=model)
        assert checkpoints.steps() == [10]
        checkpoints.verify(10)


def test_damaged_checkpoints_that_nothing_could_be_loaded_from_do_not_count(tmp_path):
    model = small_model()
    with CheckpointManager(tmp_path, keep=1) as checkpoints:
        checkpoints.save(10, model=model)
        flip_a_bit(tmp_path / "step_00000010" / "__0_0.distcp")
        shutil.copytree(tmp_path / "step_00000010", tmp_path / "step_00000005")
        with pytest.warns(UserWarning, match="step 10 is damaged"), pytest.raises(DamagedCheckpointError):
            checkpoints.load(model=model, verify=True, fall_back=True)
        with pytest.warns(UserWarning, match="saving step 1 without a load before, while the newest .* of step 10"):
            checkpoints.save(1, model=model)
        checkpoints.load(1, model=model, verify=True)


def with_steps(folder, *steps):
    model = small_model()
    with CheckpointManager(folder, keep=None) as checkpoints:
        for step in steps:
            checkpoints.save(step, model=model, extra={"branch": "first"})
    return model


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_going_on_from_an_older_step_sets_the_newer_ones_aside(tmp_path, asynchronous):
    model = with_steps(tmp_path, 10, 20, 30)
    with CheckpointManager(tmp_path, keep=2, async_save=asynchronous) as checkpoints:
        checkpoints.load(10, model=model)
        with pytest.warns(UserWarning, match=r"went on from step 10 and saves step 12.* aside: 20 .*, 30 ") as seen:
            path = checkpoints.save(12, model=model, extra={"branch": "second"})
        checkpoints.wait()
        assert len(seen) == 1 and path.is_dir() and checkpoints.steps() == [10, 12]
        assert checkpoints.load(model=model) == {"step": 12, "extra": {"branch": "second"}}
        abandoned = {path.name.partition("-")[0]: path for path in tmp_path.glob("*.abandoned-*")}
        assert set(abandoned) == {"step_00000020.abandoned", "step_00000030.abandoned"}
        assert checkpoint.load_checkpoint(abandoned["step_00000030.abandoned"], model=model)["step"] == 30
        for step, left in ((20, 2), (30, 2), (40, 1), (50, 0)):  # each goes once there are two of later steps
            checkpoints.save(step, model=model)
            checkpoints.wait()
            assert len(list(tmp_path.glob("*.abandoned-????????????????????????????????"))) == left, f"after {step}"
        assert checkpoints.steps() == [40, 50]
    assert names(tmp_path) == ["step_00000040", "step_00000050"]


def test_a_branch_that_comes_to_a_step_of_the_old_one_saves_it(tmp_path):
    model = with_steps(tmp_path, 10, 20, 30)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.load(10, model=model)
        with pytest.warns(UserWarning, match="set aside: 20 .*, 30 "):
            checkpoints.save(20, model=model, extra={"branch": "second"})
        assert checkpoints.load(model=model) == {"step": 20, "extra": {"branch": "second"}}


def test_a_look_at_an_older_step_sets_nothing_aside(tmp_path):
    model = with_steps(tmp_path, 10, 20, 30)
    with CheckpointManager(tmp_path, keep=None) as checkpoints, warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints.load(10, model=model)
        checkpoints.save(40, model=model)
        assert checkpoints.steps() == [10, 20, 30, 40]


def test_the_checkpoint_just_saved_is_never_retired(tmp_path):
    model = with_steps(tmp_path, 20, 30)
    with CheckpointManager(tmp_path, keep=1) as checkpoints:
        with pytest.warns(UserWarning, match="saving step 12 without a load before, while the newest .* of step 30"):
            path = checkpoints.save(12, model=model)
        assert path.is_dir() and checkpoints.steps() == [12, 30]


def test_a_name_that_is_almost_a_steps_is_a_strangers(tmp_path):
    model = with_steps(tmp_path, 20)
    for name in ("step_000000020", "step_\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661"):
        shutil.copytree(tmp_path / "step_00000020", tmp_path / name)
    with CheckpointManager(tmp_path, keep=1) as checkpoints:
        assert checkpoints.steps() == [20]
        checkpoints.save(30, model=model)
        assert checkpoints.steps() == [30]
    assert len(names(tmp_path)) == 3


def test_files_are_private_and_of_the_stricter_umask(tmp_path):
    model = small_model()
    for umask, directory_mode, file_mode in ((0o022, 0o700, 0o600), (0o277, 0o500, 0o400)):
        if umask == 0o277 and os.geteuid() != 0:
            continue  # nobody but root could write into it
        before = os.umask(umask)
        try:
            with CheckpointManager(tmp_path / str(umask)) as checkpoints:
                path = checkpoints.save(1, model=model)
        finally:
            os.umask(before)
        assert path.stat().st_mode & 0o777 == directory_mode
        assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {file_mode}
        assert {file.name for file in path.iterdir()} == {".metadata", "__0_0.distcp", "manifest.json"}


def test_arguments_and_states_are_checked(tmp_path):
    model = small_model()
    with pytest.raises(ValueError, match="keep must be at least 1, or None to keep all, got 0"):
        CheckpointManager(tmp_path, keep=0)
    checkpoints = CheckpointManager(tmp_path)
    with pytest.raises(TypeError, match="step must be a whole number of optimizer steps, got 1.5"):
        checkpoints.save(1.5, model=model)
    with pytest.raises(ValueError, match="step must be at least 0, got -1"):
        checkpoints.save(-1, model=model)
    with pytest.raises(TypeError, match="step must be a number or \"latest\", got 'newest'"):
        checkpoints.load("newest", model=model)
    checkpoints.close(), checkpoints.close()
    with pytest.raises(RuntimeError, match="save: the manager of .* is closed"):
        checkpoints.save(1, model=model)
    with pytest.raises(RuntimeError, match="load: the manager of .* is closed"):
        checkpoints.load(model=model)
    with pytest.raises(RuntimeError, match="save: the manager of .* is read-only"):
        CheckpointManager(tmp_path, read_only=True).save(1, model=model)


# ---------------------------------------------------------------- locks

HOLD = """
import sys, time
from fsdp_ema_lib.checkpoint_manager import CheckpointManager
checkpoints = CheckpointManager(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


def held_by_another_process(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_job_is_refused_by_name_and_a_dead_ones_place_is_taken(tmp_path):
    process = held_by_another_process(tmp_path)
    try:
        with pytest.raises(
            RuntimeError, match=rf"in use by another job \(host .*, pid {process.pid}, holding it since"
        ):
            CheckpointManager(tmp_path)
        CheckpointManager(tmp_path, read_only=True).close()
    finally:
        process.kill()
        process.wait()
    with pytest.warns(UserWarning, match=rf"taking over from a job that ended without closing \(.*pid {process.pid},"):
        checkpoints = CheckpointManager(tmp_path)
    again = CheckpointManager(tmp_path)  # a notebook cell that is run twice
    checkpoints.close()
    assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
    again.close()
    assert (tmp_path / LOCK_FILE).read_text() == ""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CheckpointManager(tmp_path).close()


def test_without_locks_of_the_file_system_the_owner_is_judged_by_what_it_wrote(tmp_path, monkeypatch):
    import fcntl

    def no_locks(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    process = held_by_another_process(tmp_path)
    owner = json.loads((tmp_path / LOCK_FILE).read_text())
    try:
        with pytest.raises(RuntimeError, match=f"pid {process.pid}"):
            CheckpointManager(tmp_path)
    finally:
        process.kill()
        process.wait()
    for changed in ({}, {"pid": os.getpid(), "ticks": "1"}):  # gone; its number belongs to a later process
        (tmp_path / LOCK_FILE).write_text(json.dumps(owner | changed))
        with pytest.warns(UserWarning, match="taking over"):
            CheckpointManager(tmp_path).close()
    (tmp_path / LOCK_FILE).write_text(json.dumps(owner | {"host": "elsewhere"}))
    with pytest.raises(RuntimeError, match="in use by another job .host elsewhere"):
        CheckpointManager(tmp_path)


# ---------------------------------------------------------------- asynchronous saves


def worker_async(layout: str, folder: str) -> list[str]:
    """What is saved is the state at the call, whatever training does while it is written."""
    training = Training(layout).train(2)
    with CheckpointManager(folder, async_save=True) as checkpoints:
        expected = {}
        for step in (2, 4, 6):
            checkpoints.save(step, **training.parts(), extra={"at": step})
            expected[step] = training.local_state()
            training.train(2)
        checkpoints.wait()
        problems = []
        for step in (2, 4, 6):
            other = Training(layout, seed=3)
            found = checkpoints.load(step, **other.parts(), verify=True)
            problems += [f"{step}: {line}" for line in differences(other.local_state(), expected[step])]
            if found["extra"] != {"at": step}:
                problems.append(str(found))
    return problems


@pytest.mark.parametrize("layout", ["ddp", "fsdp1_full", "fsdp2_nested"])
def test_an_asynchronous_save_holds_the_state_at_the_call(ranks, tmp_path, layout):
    assert ranks(2, worker_async, layout=layout, folder=str(tmp_path)) == [[], []]


def test_training_goes_on_while_a_save_is_written_and_the_next_waits(tmp_path, monkeypatch):
    model = small_model()
    let_go, begun, at_once = threading.Event(), [], []
    original = checkpoint.write

    def slow(*args, **kwargs):
        begun.append(threading.current_thread().name)
        at_once.append(sum(thread.name.startswith("save of step") for thread in threading.enumerate()))
        assert let_go.wait(30)
        original(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "write", slow)
    with CheckpointManager(tmp_path, async_save=True) as checkpoints:
        checkpoints.save(1, model=model)
        saved = model[0].weight.detach().clone()
        with torch.no_grad():
            model[0].weight.add_(1)  # the writer has not begun yet
        assert checkpoints.latest() is None, "not on disk yet"
        threading.Timer(0.2, let_go.set).start()
        checkpoints.save(2, model=model)
        assert checkpoints.steps()[:1] == [1], "the second waited for the first"
    assert begun == ["save of step 1", "save of step 2"] and at_once == [1, 1]
    other = small_model()
    CheckpointManager(tmp_path).load(1, model=other)
    assert torch.equal(other[0].weight, saved)


def test_two_managers_of_one_directory_leave_each_others_saves_alone(tmp_path, monkeypatch):
    model, begun, let_go = small_model(), threading.Event(), threading.Event()
    seal = storage.seal

    def slow(paths, sums):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert let_go.wait(30)
        return seal(paths, sums)

    monkeypatch.setattr(storage, "seal", slow)
    with CheckpointManager(tmp_path, async_save=True) as first, CheckpointManager(tmp_path) as second:
        first.save(1, model=model)
        assert begun.wait(30)
        second.save(2, model=model)
        let_go.set()
        first.wait()
        assert second.steps() == [1, 2]
        first.verify(1)
    assert names(tmp_path) == ["step_00000001", "step_00000002"]


class Sampled:
    """A sampler whose state is handed out itself, not a copy, and is of every kind that can be saved."""

    def __init__(self) -> None:
        self.state = {
            "drawn": {1, 2},
            "order": torch.arange(3),
            "by_rank": {0: [1]},
            "counts": Counter(a=1),
            "pair": ([1], 2),
        }

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_an_asynchronous_save_holds_objects_as_they_were_at_the_call(tmp_path, monkeypatch):
    let_go = threading.Event()
    original = checkpoint.write

    def slow(*args, **kwargs):
        assert let_go.wait(30)
        original(*args, **kwargs)

    monkeypatch.setattr(checkpoint, "write", slow)
    sampler, loaded = Sampled(), Sampled()
    with CheckpointManager(tmp_path, async_save=True) as checkpoints:
        checkpoints.save(1, model=small_model(), sampler=sampler)
        sampler.state["drawn"].add(3)
        sampler.state["order"].add_(1)
        sampler.state["by_rank"][0].append(2)
        sampler.state["counts"]["a"] += 1
        sampler.state["pair"][0].append(2)
        let_go.set()
        checkpoints.load(sampler=loaded)
    assert loaded.state.pop("order").tolist() == [0, 1, 2]
    assert loaded.state == {"drawn": {1, 2}, "by_rank": {0: [1]}, "counts": Counter(a=1), "pair": ([1], 2)}


@pytest.mark.parametrize("seen_by", ["save", "wait", "close", "load"])
def test_an_error_in_the_background_surfaces_at_the_next_call(tmp_path, monkeypatch, seen_by):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    model = small_model()
    checkpoints = CheckpointManager(tmp_path, async_save=True)
    monkeypatch.setattr(checkpoint, "write", full)
    checkpoints.save(1, model=model)
    calls = {
        "save": lambda: checkpoints.save(2, model=model),
        "wait": checkpoints.wait,
        "close": checkpoints.close,
        "load": lambda: checkpoints.load(model=model),
    }
    with pytest.raises(OSError, match="No space left on device") as caught:
        calls[seen_by]()
    assert "in the asynchronous save of step 1" in caught.value.__notes__
    checkpoints.wait()  # said once
    checkpoints.close()


AT_EXIT = """
import sys
from torch import nn
from fsdp_ema_lib import checkpoint
from fsdp_ema_lib.checkpoint_manager import CheckpointManager
if sys.argv[2] == "fail":
    def full(*_, **__):
        raise OSError(28, "No space left on device")
    checkpoint.write = full
CheckpointManager.keep_alive = checkpoints = CheckpointManager(sys.argv[1], async_save=True)
checkpoints.save(1, model=nn.Linear(300, 300))
"""


def test_a_save_that_has_begun_ends_before_the_process_does_and_its_error_is_seen(tmp_path):
    good = subprocess.run([sys.executable, "-c", AT_EXIT, str(tmp_path), "pass"], capture_output=True, text=True)
    assert good.returncode == 0, good.stderr
    CheckpointManager(tmp_path, read_only=True).verify(1)
    bad = subprocess.run([sys.executable, "-c", AT_EXIT, str(tmp_path / "b"), "fail"], capture_output=True, text=True)
    assert "OSError: [Errno 28] No space left on device" in bad.stderr
    assert "in the asynchronous save of step 1" in bad.stderr
    assert bad.returncode == 0, "the documents say that it does not show here"


def test_memory_stays_flat_over_fifty_saves(tmp_path):
    model = torch.nn.Linear(1000, 1000)
    ema = EMA_FSDP(model)
    with CheckpointManager(tmp_path, keep=1, async_save=True, checksums=False) as checkpoints:

        def resident():
            with open("/proc/self/statm") as stream:
                return int(stream.read().split()[1]) * resource.getpagesize()

        for step in range(10):
            checkpoints.save(step, model=model, ema=ema)
        checkpoints.wait()
        before = resident()
        for step in range(10, 50):
            checkpoints.save(step, model=model, ema=ema)
        checkpoints.wait()
        grown = resident() - before
    assert grown < 8e6, f"{grown / 1e6:.1f} MB more; one state is 8 MB"


# ---------------------------------------------------------------- ranks that stay out


def worker_stays_out(folder: str) -> list:
    rank = dist.get_rank()
    checkpoints = CheckpointManager(folder, enter_timeout=timedelta(seconds=1))
    model = small_model()
    checkpoints.save(1, model=model)
    began = time.monotonic()
    texts = []
    if rank == 1:
        time.sleep(5)  # a file store looks only every second or two
    try:
        checkpoints.save(2, model=model)  # rank 1 comes too late
    except TimeoutError as problem:
        texts.append(str(problem))
    waited = time.monotonic() - began
    dist.barrier()
    checkpoints.save(3, model=model)  # and all go on
    steps = checkpoints.steps()
    checkpoints.close()
    return [texts, waited, steps]


def test_a_rank_that_does_not_come_is_named_within_the_timeout_and_all_can_go_on(ranks, tmp_path):
    for rank, (texts, waited, steps) in enumerate(ranks(2, worker_stays_out, folder=str(tmp_path))):
        assert len(texts) == 1 and texts[0].startswith("save(step=2): rank 1 did not come within 1 s"), texts
        assert waited < 9, f"rank {rank}"
        assert steps == [1, 3]


def worker_skips(folder: str) -> list:
    rank, model, told = dist.get_rank(), small_model(), []
    checkpoints = CheckpointManager(folder, enter_timeout=timedelta(seconds=1))
    calls = {"save": checkpoints.save, "load": lambda _, **kwargs: checkpoints.load(**kwargs)}
    for step, (what, skipped) in enumerate(
        [("save", False), ("save", True), ("save", False), ("load", True), ("load", False), ("load", False)]
    ):
        if not (skipped and rank == 1):
            try:
                calls[what](step, model=model)
                told.append("passed")
            except TimeoutError as problem:
                told.append(str(problem).partition(" did not")[0])
        dist.barrier()
    steps = checkpoints.steps()
    checkpoints.close()
    return [told, steps]


def test_a_rank_that_leaves_one_call_out_is_with_the_others_at_the_next(ranks, tmp_path):
    first, second = ranks(2, worker_skips, folder=str(tmp_path))
    named = "load(step='latest'): rank 1"
    # The second load has the name of the one that failed, and could be late for it: that is said, once.
    assert first == [["passed", "save(step=1): rank 1", "passed", named, named, "passed"], [0, 2]]
    assert second == [["passed", "passed", named, "passed"], [0, 2]]


def worker_disagree(folder: str) -> str:
    with CheckpointManager(folder) as checkpoints:
        try:
            checkpoints.save(dist.get_rank(), model=small_model())
        except ValueError as problem:
            return str(problem)
    return "no error"


def test_ranks_that_save_different_steps_are_told(ranks, tmp_path):
    for text in ranks(2, worker_disagree, folder=str(tmp_path)):
        assert "step is 1 on rank 1 and 0 on rank 0" in text


def worker_fall_back(folder: str) -> list:
    with CheckpointManager(folder) as checkpoints, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = checkpoints.load(model=small_model(), verify=True, fall_back=True)
    return [found["step"], sum("step 2 is damaged, going back to step 1" in str(w.message) for w in seen)]


def test_all_ranks_fall_back_together_where_one_finds_damage(ranks, tmp_path):
    model = small_model()
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, model=model), checkpoints.save(2, model=model)
    flip_a_bit(tmp_path / "step_00000002" / "__0_0.distcp")
    assert ranks(2, worker_fall_back, folder=str(tmp_path)) == [[1, 1], [1, 1]]


def test_what_was_found_is_logged(tmp_path, caplog):
    model = small_model()
    with CheckpointManager(tmp_path) as checkpoints, caplog.at_level(logging.INFO, "fsdp_ema_lib"):
        checkpoints.save(4, model=model)
        checkpoints.load(model=model)
    assert f"loading step 4 from {tmp_path / 'step_00000004'}" in caplog.text


# ---------------------------------------------------------------- errors of one rank


def fails(*_, **__):
    raise KeyError("of one rank")


def worker_errors_of_one_rank(folder: str) -> list[str]:
    """Whatever one rank alone meets on the way, all raise at once; the manager goes on."""
    rank, model, texts = dist.get_rank(), nn.BatchNorm1d(3), []
    managers = {
        kind: CheckpointManager(folder, keep=1, async_save=kind == "async", write_timeout=timedelta(seconds=20))
        for kind in ("sync", "async")
    }
    managers["sync"].save(0, model=model)  # for "retiring"
    faults = {
        "collecting": ("sync", 0, checkpoint_entries, "plain_json"),
        "comparing buffers": ("sync", 1, checkpoint_entries, "_digest"),
        "copying": ("async", 1, checkpoint_entries, "staged"),
        "retiring": ("sync", 0, storage, "set_aside"),
        "looking": ("sync", 0, CheckpointManager, "_candidates"),
    }
    for number, (what, (kind, failing, owner, name)) in enumerate(faults.items(), start=1):
        with pytest.MonkeyPatch.context() as patch:
            if rank == failing:
                patch.setattr(checkpoint_manager if name == "plain_json" else owner, name, fails)
            try:
                managers[kind].load(model=model) if what == "looking" else managers[kind].save(number, model=model)
                texts.append(f"{what}: no error")
            except KeyError as problem:
                texts.append(f"{what}: {problem}")
    try:
        managers["sync"].save(8, model=model, scheduler=object())  # which rank 0 alone asks for its state
    except AttributeError as problem:
        texts.append(str(problem))
    managers["sync"].save(9, model=model)
    found = managers["sync"].load(model=model)["step"], managers["sync"].steps()
    for manager in managers.values():
        manager.close()
    return [*texts, found]


def test_whatever_one_rank_raises_reaches_all_and_none_waits(ranks, tmp_path):
    for rank, (*texts, found) in enumerate(ranks(2, worker_errors_of_one_rank, folder=str(tmp_path), timeout=60)):
        whats = ("collecting", "comparing buffers", "copying", "retiring", "looking")
        assert len(texts) == 6, texts
        for text, what in zip(texts, whats, strict=False):
            assert text.startswith(f"{what}: ") and "of one rank" in text, f"rank {rank}: {text}"
        assert "'object' object has no attribute 'state_dict'" in texts[5], f"rank {rank}"
        assert found == (9, [9])


def test_a_checkpoint_that_cannot_be_retired_is_said_to_be_saved(tmp_path, monkeypatch):
    def busy(path):
        raise OSError(16, "Device or resource busy")

    model = small_model()
    with CheckpointManager(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, model=model)
        monkeypatch.setattr(storage, "set_aside", busy)
        with pytest.raises(OSError, match=r"step 2 is saved, but .*step_00000001 could not be retired: .*busy"):
            checkpoints.save(2, model=model)
        assert checkpoints.steps() == [1, 2]
