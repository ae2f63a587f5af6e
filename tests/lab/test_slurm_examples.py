"""examples/slurm: the scripts, run with stand-ins for srun and scontrol that make two nodes of this machine."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from processes import kill_what_stays
from torch.distributed.run import get_args_parser

from fsdp_ema_lib import offline
from fsdp_ema_lib.lab.training import TrainingConfig
from fsdp_ema_lib.lab.training_job import Job, run_job

FOLDER = Path(__file__).parents[2] / "examples" / "slurm"
SCRIPTS = sorted(FOLDER.glob("*.sbatch"))
MULTI, SINGLE = FOLDER / "multi_node.sbatch", FOLDER / "single_node.sbatch"

# Starts the command once for each node and waits; SIGTERM, as Slurm sends it to a job step, goes to each of them.
SRUN = """
import os, signal, subprocess, sys
command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
steps = [subprocess.Popen(command) for _ in range(int(os.environ["SLURM_JOB_NUM_NODES"]))]
signal.signal(signal.SIGTERM, lambda *_: [step.send_signal(signal.SIGTERM) for step in steps])
open(os.environ["SRUN_PID_FILE"], "w").write(str(os.getpid()))
sys.exit(max(abs(step.wait()) for step in steps))
"""
SCONTROL = """
import os, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print("localhost\\n" * int(os.environ["SLURM_JOB_NUM_NODES"]), end="")
else:
    open(os.environ["SCONTROL_LOG"], "a").write(" ".join(sys.argv[1:]) + "\\n")
"""
# In place of Python: notes its arguments, leaves a status as a training would, and ends as it is told.
FAKE_PYTHON = """
import json, os, sys
from pathlib import Path
Path(os.environ["ARGUMENTS_FILE"]).write_text(json.dumps(sys.argv[1:]))
if os.environ["LEAVES"]:
    Path(os.environ["CHECKPOINTS"], "training.json").write_text(json.dumps({"status": os.environ["LEAVES"], "step": 4}))
sys.exit(int(os.environ["CODE"]))
"""


@pytest.fixture
def slurm(tmp_path):
    """The environment of a job on two nodes, and the place of everything."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, source in {"srun": SRUN, "scontrol": SCONTROL, "python": FAKE_PYTHON}.items():
        (tools / name).write_text(f"#!{sys.executable}\n{source}")
        (tools / name).chmod(0o755)
    return os.environ | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_CPUS_PER_TASK": "1",
        "SRUN_PID_FILE": str(tmp_path / "srun.pid"),
        "SCONTROL_LOG": str(tmp_path / "scontrol.log"),
        "ARGUMENTS_FILE": str(tmp_path / "arguments"),
        "CHECKPOINTS": str(tmp_path / "checkpoints"),
        "PYTHON": str(tools / "python"),
    }


def requeued(slurm) -> list[str]:
    log = Path(slurm["SCONTROL_LOG"])
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_script_is_bash_and_its_header_is_read_by_slurm(script):
    subprocess.run(["bash", "-n", script], check=True)
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    commands = [number for number, line in enumerate(lines) if line.strip() and not line.startswith("#")]
    headers = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert headers and max(headers) < min(commands), "Slurm reads no option after the first command"
    for number in headers:
        assert re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", lines[number]), lines[number]
    options = {lines[number].removeprefix("#SBATCH --").partition("=")[0] for number in headers}
    assert {"nodes", "requeue", "signal", "open-mode"} <= options


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    ("leaves", "code", "back"),
    [("finished", 0, False), ("stopped", 1, True), ("running", 1, False), ("", 2, False)],
)
def test_only_a_job_that_was_stopped_goes_back_into_the_queue(slurm, script, leaves, code, back):
    folder = Path(slurm["CHECKPOINTS"])
    folder.mkdir()
    (folder / "training.json").write_text('{"status": "stopped"}')  # of the start before
    slurm |= {"SLURM_JOB_NUM_NODES": "1", "LEAVES": leaves, "CODE": str(code)}
    done = subprocess.run(["bash", script], env=slurm, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert requeued(slurm) == [f"requeue {slurm['SLURM_JOB_ID']}"] * back


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_torchrun_and_the_training_understand_the_line(slurm, script):
    slurm |= {"LEAVES": "", "CODE": "0", "SLURM_RESTART_COUNT": "3", "PROCESSES_PER_NODE": "4"}
    subprocess.run(["bash", script, "--steps", "7"], env=slurm, check=True)
    module, launcher, *arguments = json.loads(Path(slurm["ARGUMENTS_FILE"]).read_text())
    assert (module, launcher) == ("-m", "torch.distributed.run")
    found = get_args_parser().parse_args(arguments)
    assert found.module and found.training_script == "fsdp_ema_lib.lab.training"
    assert found.training_script_args == ["--checkpoints", slurm["CHECKPOINTS"], "--resume", "auto", "--steps", "7"]
    assert (found.nproc_per_node, found.max_restarts) == ("4", 3)
    if script == MULTI:
        port = 20000 + int(slurm["SLURM_JOB_ID"]) % 10000
        assert (found.nnodes, found.rdzv_backend, found.rdzv_endpoint) == ("2", "c10d", f"localhost:{port}")
        assert found.rdzv_id == f"{slurm['SLURM_JOB_ID']}.3"
    else:
        assert found.standalone


# --- the real thing ------------------------------------------------------------------------------

STEPS, EVERY = 300, 30
ARGUMENTS = f"--steps {STEPS} --save-every {EVERY} --hidden 32 --blocks 2 --batch-size 16 --device cpu".split()


def worker_undisturbed(folder: str) -> str:
    training = TrainingConfig(steps=STEPS, eval_every=EVERY, hidden=32, blocks=2, batch_size=16)
    return run_job(Job(training, Path(folder)))


def run_script(script, slurm, until: str | None = None) -> tuple[int, str]:
    """Run it to its end, or send its job step SIGTERM as soon as a file of that pattern is there."""
    log = Path(slurm["CHECKPOINTS"]).parent / "log"
    with open(log, "w") as stream:
        job = subprocess.Popen(
            ["bash", script, *ARGUMENTS], env=slurm, stdout=stream, stderr=stream, start_new_session=True
        )
        try:
            deadline = time.monotonic() + 150
            while until and not list(Path(slurm["CHECKPOINTS"]).glob(until)):
                assert job.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.02)
            if until:
                os.kill(int(Path(slurm["SRUN_PID_FILE"]).read_text()), signal.SIGTERM)
            job.wait(timeout=150)
        finally:
            children = psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []
            kill_what_stays(children, 0)
            job.kill()
            job.wait()
    return job.returncode, log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("script", "nodes"), [(MULTI, 2), (SINGLE, 1)], ids=["two nodes", "one node"])
def test_a_preempted_job_saves_is_requeued_and_ends_with_the_same_bits(slurm, ranks, tmp_path, script, nodes):
    slurm |= {"PYTHON": sys.executable, "SLURM_JOB_NUM_NODES": str(nodes), "PROCESSES_PER_NODE": str(2 // nodes)}
    code, told = run_script(script, slurm, until="step_????????/manifest.json")
    assert code != 0 and requeued(slurm) == [f"requeue {slurm['SLURM_JOB_ID']}"], told
    stopped = json.loads(Path(slurm["CHECKPOINTS"], "training.json").read_text())
    assert stopped["status"] == "stopped" and EVERY <= stopped["step"] < STEPS
    code, told = run_script(script, slurm | {"SLURM_RESTART_COUNT": "1"})
    assert code == 0 and len(requeued(slurm)) == 1, told
    assert f"going on after step {stopped['step']} of {STEPS}" in told and "on 2 ranks" in told
    ranks(2, worker_undisturbed, folder=str(tmp_path / "undisturbed"))
    found = offline.diff(slurm["CHECKPOINTS"], tmp_path / "undisturbed")
    assert [found[kind] for kind in ("only_first", "only_second", "differing")] == [[], [], []]
