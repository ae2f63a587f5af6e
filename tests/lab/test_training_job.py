"""training_job.py: a training that is stopped, damaged, killed and started again ends with the same bits."""

import json
import math
import os
import re
import signal
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from fsdp_ema_lib import offline
from fsdp_ema_lib.checkpoint_manager import CheckpointManager
from fsdp_ema_lib.lab.training import TrainingConfig
from fsdp_ema_lib.lab.training_job import Job, StopSignal, app, run_job

SMALL = TrainingConfig(steps=12, eval_every=4, hidden=32, blocks=2, batch_size=16, wrapper="none")


def job(folder, resume="auto", training=SMALL, **more) -> Job:
    return Job(training, Path(folder), resume, **({"decays": (0.9, 0.99)} | more))


def status(folder) -> dict:
    found = json.loads((Path(folder) / "training.json").read_text())
    assert found.pop("pid") == os.getpid()
    return found


def assert_bit_equal(folder, other):
    found = offline.diff(folder, other)
    assert not found["differing"] and not found["only_first"] and not found["only_second"], found
    assert found["equal"] > 30  # weights, two moments, two averages, random states


def steps_in(folder) -> list[int]:
    """A manager, once built on one of several ranks, would wait for the others."""
    return sorted(
        int(path.parent.name.removeprefix("step_"))
        for path in Path(folder).glob("step_*/manifest.json")
        if path.parent.name[5:].isdigit()
    )


def signal_at_checkpoint(folder, step: int) -> threading.Thread:
    """SIGTERM to this process as soon as there is a checkpoint of that step or a later one."""

    def watch():
        deadline = time.monotonic() + 60
        while max(steps_in(folder), default=0) < step and time.monotonic() < deadline:
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


# --- going on ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [{"async_save": False}, {"schedule": "cosine", "warmup": 5, "keep": 1}],
    ids=["constant", "cosine with warm-up"],
)
def test_a_stopped_job_goes_on_to_the_same_bits(tmp_path, capsys, more):
    training = replace(SMALL, steps=200, eval_every=50)
    stopped, straight = tmp_path / "stopped", tmp_path / "straight"
    stopped.mkdir()
    thread = signal_at_checkpoint(stopped, 50)
    assert run_job(job(stopped, training=training, **more)) == "stopped"
    thread.join()
    at = status(stopped)["step"]
    assert status(stopped) == {"status": "stopped", "step": at, "steps": 200}
    assert 50 < at < 200 and steps_in(stopped)[-1] == at
    capsys.readouterr()
    assert run_job(job(stopped, training=training, **more)) == "finished"
    told = capsys.readouterr().out
    assert re.search(rf"going on after step {at} of 200 from .*step_{at:08d}, saved by 1 rank at loss \d", told)
    assert run_job(job(straight, training=training, **more)) == "finished"
    assert_bit_equal(stopped, straight)
    assert status(stopped) == {"status": "finished", "step": 200, "steps": 200}


def worker_stopped(folder: str, wrapper: str) -> list:
    training = replace(SMALL, steps=120, eval_every=30, wrapper=wrapper)
    if dist.get_rank() == 1:  # the signal reaches one rank alone
        signal_at_checkpoint(f"{folder}/stopped", 30)
    found = [run_job(job(f"{folder}/stopped", training=training))]
    dist.barrier()
    at = steps_in(f"{folder}/stopped")[-1]
    found += [run_job(job(f"{folder}/{name}", training=training)) for name in ("stopped", "straight")]
    return [*found, at]


@pytest.mark.parametrize("wrapper", [pytest.param("fsdp1", marks=pytest.mark.slow), "fsdp2"])
def test_two_ranks_stop_at_one_step_where_one_is_told_to(ranks, tmp_path, wrapper):
    results = ranks(2, worker_stopped, folder=str(tmp_path), wrapper=wrapper)
    assert results[0] == results[1]
    assert results[0][:3] == ["stopped", "finished", "finished"] and 30 < results[0][3] < 120
    assert_bit_equal(tmp_path / "stopped", tmp_path / "straight")


def test_a_job_that_is_finished_has_nothing_left_to_do(tmp_path, capsys):
    run_job(job(tmp_path))
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.distcp")}
    assert "step 12: loss" in (told := capsys.readouterr().out) and told.count(", being saved\n") == 3
    assert run_job(job(tmp_path)) == "finished"
    assert "going on after step 12 of 12" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.distcp")} == files


def test_damage_is_passed_over_loudly_and_the_job_ends_with_the_same_bits(tmp_path, capsys):
    damaged, straight = tmp_path / "damaged", tmp_path / "straight"
    for folder in (damaged, straight):
        run_job(job(folder))
    path = damaged / "step_00000012" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    capsys.readouterr()
    with pytest.warns(UserWarning) as seen:
        assert run_job(job(damaged)) == "finished"
    texts = [str(warning.message) for warning in seen]
    assert any("the checkpoint of step 12 is damaged, going back to step 8" in text for text in texts), texts
    assert any("checkpoints are set aside: 12 (now step_00000012.abandoned-" in text for text in texts), texts
    assert re.search(r"going on after step 8 of 12 .*, not from the newest \(12\)", capsys.readouterr().out)
    assert_bit_equal(damaged, straight)


def test_going_on_from_a_named_step_leads_to_the_end_again(tmp_path):
    run_job(job(tmp_path))
    with pytest.warns(UserWarning, match="went on from step 4 and saves step 8.* set aside: 8 .*, 12 "):
        assert run_job(job(tmp_path, resume="4")) == "finished"
    assert CheckpointManager(tmp_path, read_only=True).steps() == [4, 8, 12]


def test_one_step_can_be_named(tmp_path, capsys):
    run_job(job(tmp_path))
    shorter = replace(SMALL, steps=4)
    assert run_job(job(tmp_path, resume="4", training=shorter)) == "finished"
    assert "going on after step 4 of 4" in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match=r"no whole checkpoint of step 7; there are \[4, 8, 12\]"):
        run_job(job(tmp_path, resume="7"))


def test_another_number_of_ranks_is_told(ranks, tmp_path, capsys):
    ranks(2, worker_first_part, folder=str(tmp_path))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no random state")
        assert run_job(job(tmp_path)) == "finished"
    told = capsys.readouterr().out
    assert "going on after step 8 of 12" in told and "saved by 2 ranks" in told and "on 1 rank" in told
    assert "on another number of ranks sums are rounded differently" in told


def worker_first_part(folder: str) -> str:
    return run_job(job(folder, training=replace(SMALL, steps=8, wrapper="fsdp2")))


# --- refusals ------------------------------------------------------------------------------------


def test_a_job_with_other_settings_is_no_continuation(tmp_path):
    run_job(job(tmp_path))
    other = replace(SMALL, seed=3, learning_rate=0.5)
    with pytest.raises(ValueError) as caught:
        run_job(job(tmp_path, training=other, schedule="cosine"))
    for line in (
        "seed: 0 there, 3 here",
        "learning_rate: 0.002 there, 0.5 here",
        "schedule: 'constant' there, 'cosine'",
    ):
        assert line in str(caught.value)
    with pytest.raises(ValueError, match="step_00000012 is beyond the last step, 8: raise --steps"):
        run_job(job(tmp_path, training=replace(SMALL, steps=8)))
    more = replace(SMALL, steps=16, wrapper="fsdp2", eval_every=100)  # none of these changes the numbers up to here
    assert run_job(job(tmp_path, training=more, keep=1)) == "finished"
    assert steps_in(tmp_path) == [16]


def test_never_refuses_a_directory_with_checkpoints(tmp_path):
    run_job(job(tmp_path, resume="never"))
    with pytest.raises(
        FileExistsError, match=r"--resume never: .* holds checkpoints of steps \[4, 8, 12\]; choose anot"
    ):
        run_job(job(tmp_path, resume="never"))


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"resume": "sometimes"}, 'resume must be "auto", "never" or the number of a step, got \'sometimes\''),
        ({"keep": 0}, "keep must be at least 1, got 0"),
        ({"schedule": "steep"}, "schedule must be one of 'constant', 'cosine', got 'steep'"),
        ({"warmup": -1}, "warmup must be at least 0 steps, got -1"),
        ({"decays": (0.9, 1.0)}, r"decays must be different numbers from 0 to below 1, got \[0.9, 1.0\]"),
        ({"decays": (0.9, 0.9)}, "decays must be different numbers"),
        ({"keep": 0, "warmup": -1}, "keep must be .*; warmup must be"),
    ],
)
def test_an_impossible_job_is_refused(tmp_path, values, complaint):
    with pytest.raises(ValueError, match=complaint):
        job(tmp_path, **values)


# --- signals -------------------------------------------------------------------------------------


def test_a_signal_is_noted_within_the_block_alone():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal() as stop:
        assert stop.asked() is False
        for _ in range(3):  # more than one changes nothing
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.granted is False, "only `asked` grants it, with all ranks"
        assert stop.asked() is True and stop.granted is True
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_handler_is_put_back_after_an_error(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(FloatingPointError):
        run_job(job(tmp_path, training=replace(SMALL, learning_rate=1e30)))
    assert signal.getsignal(signal.SIGTERM) is before
    assert not dist.is_initialized()
    assert status(tmp_path) == {"status": "running", "step": 0, "steps": 12}
    assert steps_in(tmp_path) == [], "what has diverged is not saved"


# --- command line --------------------------------------------------------------------------------


def test_the_command_line_reaches_the_job(tmp_path):
    arguments = "--steps 6 --save-every 3 --keep 1 --no-async --wrapper none --hidden 32 --blocks 1 --batch-size 16"
    arguments += " --seed 5 --decay 0.5 --decay 0.25 --schedule cosine --warmup 2 --device cpu --learning-rate 0.01"
    done = CliRunner().invoke(app, ["--checkpoints", str(tmp_path), *arguments.split()])
    assert done.exit_code == 0, done.output
    manifest = offline.inspect(tmp_path)
    assert manifest["step"] == 6 and sorted(manifest["emas"]) == ["decay_0_25", "decay_0_5"]
    settings = manifest["extra"]["settings"]
    assert settings == {
        "batch_size": 16, "learning_rate": 0.01, "seed": 5, "hidden": 32, "blocks": 1, "mixed_precision": False,
        "decays": [0.5, 0.25], "schedule": "cosine", "warmup": 2, "steps": 6,
    }  # fmt: skip
    assert steps_in(tmp_path) == [6]


def test_wrong_usage_starts_nothing(tmp_path):
    done = CliRunner().invoke(app, ["--checkpoints", str(tmp_path / "new"), "--hidden", "33"])
    assert done.exit_code == 2 and "hidden must be even, got 33" in done.stderr
    assert not (tmp_path / "new").exists()
    assert CliRunner().invoke(app, ["--steps", "3"]).exit_code == 2  # no directory


def test_the_learning_rate_rises_and_falls_as_it_should(tmp_path):
    import torch

    from fsdp_ema_lib.lab.training_job import make_scheduler

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    scheduler = make_scheduler(optimizer, job(tmp_path, schedule="cosine", warmup=4))
    found = []
    for _ in range(12):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    expected = [0.5, 1.0, 1.5, 2.0] + [1 + math.cos(math.pi * k / 8) for k in range(8)]
    assert found == pytest.approx(expected, abs=1e-12)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)
