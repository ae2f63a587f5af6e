import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from processes import command, kill_what_stays

from fsdp_ema_lib.lab import killed_run
from fsdp_ema_lib.lab.killed_run import Kill, run_with_kills
from fsdp_ema_lib.lab.round_trips import differing_bytes
from fsdp_ema_lib.lab.training import TrainingConfig

CONFIG = TrainingConfig(steps=7, hidden=32, wrapper="fsdp2")


@pytest.fixture(scope="module", autouse=True)
def one_server():
    """All tests of this file fork their ranks from one server, which takes seconds to start."""
    with pytest.MonkeyPatch.context() as patch:
        end = killed_run._end_server
        patch.setattr(killed_run, "_end_server", lambda with_tracker: None)
        yield end
    end(with_tracker=False)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Killed in step 4, and in the save after step 6; what is on disk is that after steps 2 and 4."""
    kills = [Kill(1, 4, "training"), Kill(0, 6, "saving")]
    return run_with_kills(tmp_path_factory.mktemp("killed"), CONFIG, kills, save_every=2)


def test_the_kills_are_real_and_the_run_goes_on_from_the_newest_whole_checkpoint(run):
    assert [attempt.steps for attempt in run.attempts] == [[1, 2, 3], [3, 4, 5, 6], [5, 6, 7]]
    assert [attempt.resumed_at for attempt in run.attempts] == [0, 2, 4]
    assert [attempt.exit_codes[victim] for attempt, victim in zip(run.attempts, (1, 0, 0), strict=True)] == [
        -signal.SIGKILL
    ] * 2 + [0]
    assert run.attempts[2].exit_codes == [0, 0]


def test_a_kill_in_a_save_leaves_what_is_not_a_checkpoint_and_is_cleared(run):
    found = run.attempts[2].found
    assert [name for name in found if name.startswith("step_00000006.unpublished-")] and "step_00000006" not in found
    left = {path.name for path in run.checkpoints.iterdir()}
    assert left == {".lock", "step_00000002", "step_00000004", "step_00000006"}


def test_a_killed_run_makes_the_steps_of_an_undisturbed_one_bit_for_bit(run, tmp_path):
    undisturbed = run_with_kills(tmp_path, CONFIG, save_every=100)
    [whole] = undisturbed.attempts
    for attempt in run.attempts:
        steps = slice(attempt.steps[0] - 1, attempt.steps[-1])
        assert (attempt.losses, attempt.distances) == (whole.losses[steps], whole.distances[steps])
    assert [differing_bytes(*pair) for pair in zip(run.final, undisturbed.final, strict=True)] == [0, 0]
    assert all(torch.equal(state["num_updates"], torch.tensor(CONFIG.steps)) for state in run.final)


@pytest.mark.parametrize(
    ("kill", "text"),
    [
        (Kill(2, 1, "training"), "rank 2 killed in step 1: there are ranks 0 to 1"),
        (Kill(0, 8, "training"), "rank 0 killed in step 8: there are steps 1 to 7"),
        (Kill(0, 3, "saving"), "rank 0 killed in the save after step 3: there is a save only after .* multiple of 2"),
    ],
)
def test_a_kill_that_cannot_come_is_refused_before_anything_starts(tmp_path, kill, text):
    with pytest.raises(ValueError, match=text):
        run_with_kills(tmp_path, CONFIG, [kill], save_every=2)
    assert list(tmp_path.iterdir()) == []


def test_an_attempt_that_ends_otherwise_is_an_error_with_the_log(tmp_path):
    """The second kill never comes: its step is done when the attempt begins."""
    config = TrainingConfig(steps=3, hidden=32, wrapper="none")
    with pytest.raises(RuntimeError, match=r"attempt 2: expected rank 0 killed in step 1, got exit codes \[0\]"):
        run_with_kills(tmp_path, config, [Kill(0, 3, "training"), Kill(0, 1, "training")], ranks=1, save_every=2)


ENDLESS = """
import sys
from fsdp_ema_lib.lab.killed_run import run_with_kills
from fsdp_ema_lib.lab.training import TrainingConfig

if __name__ == "__main__":
    run_with_kills(sys.argv[1], TrainingConfig(steps=10**6, hidden=32, wrapper="fsdp2"), save_every=10**6)
"""


@pytest.mark.slow
def test_the_ranks_end_with_a_caller_that_is_killed(tmp_path):
    records = tmp_path / "attempt1.jsonl"
    (tmp_path / "program.py").write_text(ENDLESS)
    caller = psutil.Popen([sys.executable, str(tmp_path / "program.py"), str(tmp_path)])
    try:
        deadline = time.monotonic() + 120
        while not (records.is_file() and records.read_text().count("step") > 3):
            assert time.monotonic() < deadline and caller.poll() is None, "the training did not start"
            time.sleep(0.1)
        started = caller.children(recursive=True)
        assert len(started) == 4, "two ranks, the server, and Python's resource tracker"
    finally:
        caller.kill()
        caller.wait()
    assert kill_what_stays(started, 20) == []


def test_no_server_is_left(run, one_server):
    assert [process.pid for process in servers()] != [], "the server of the tests above"
    one_server(with_tracker=False)
    assert servers() == []


ALONE = """
import sys
from multiprocessing import resource_tracker
import psutil
from fsdp_ema_lib.lab.killed_run import run_with_kills
from fsdp_ema_lib.lab.training import TrainingConfig

if __name__ == "__main__":
    for number in (1, 2):
        run_with_kills(f"{sys.argv[1]}/{number}", TrainingConfig(steps=1, hidden=32, wrapper="none"), ranks=1)
        print([child.cmdline() for child in psutil.Process().children(recursive=True)])
        resource_tracker.ensure_running()
"""


def test_no_process_is_left_but_a_tracker_that_was_there_before(tmp_path):
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
    (tmp_path / "program.py").write_text(ALONE)
    program = [sys.executable, str(tmp_path / "program.py"), str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    alone, beside_a_tracker = done.stdout.splitlines()
    assert alone == "[]"
    assert beside_a_tracker.count("resource_tracker") == 1 and "forkserver" not in beside_a_tracker


def servers():
    """The fork server and what it has started; other tests of this session have ranks of their own."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "forkserver" in command(child)]
