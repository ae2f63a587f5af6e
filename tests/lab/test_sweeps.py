import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from typer.testing import CliRunner

from fsdp_ema_lib.lab import sweeps
from fsdp_ema_lib.lab.cli import app
from fsdp_ema_lib.lab.notebooks import NotebookError, inspect_notebook
from fsdp_ema_lib.lab.runs import RESULT_FILE, load_result
from fsdp_ema_lib.lab.sweeps import Job, cell_name, combinations, parse_values, plan_sweep

PARAMETERS = """\
output_dir = ""  # where
decay = 0.5  # how slow
seed = 0  # of chance
label = "a"  # what it is called
sizes = [1, 2]  # how many each
flag = True  # whether
"""


@pytest.fixture
def make(make_notebook, monkeypatch):
    """Write the only notebook of a repository that is the current directory."""

    def write(*code: str, parameters: str | None = PARAMETERS) -> Path:
        path = make_notebook(*code, name="01_first", parameters=parameters)
        monkeypatch.chdir(path.parents[1])
        return path

    return write


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["sweep", *arguments], catch_exceptions=False)


def statuses(root: Path) -> dict[str, str]:
    found = root.glob(f"outputs/sweeps/01_first/*/{RESULT_FILE}")
    return {path.parent.name: json.loads(path.read_text())["status"] for path in found}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("decay=0.9,0.99, 1e-3", [0.9, 0.99, "1e-3"]),
        ("seed=0:4", [0, 1, 2, 3]),
        ("seed=10:0:-5,7", [10, 5, 7]),
        ("decay=1:3", [1, 2]),
        ("label=a,b:c,0:4", ["a", "b:c", "0:4"]),
        ("label='a,b',\"c\",it's", ["a,b", "c", "it's"]),
        ("label=on,12", ["on", "12"]),
        ("sizes=[1, 2]", [[1, 2]]),
        ("sizes=[1, 2],[4]", [[1, 2], [4]]),
        ("flag=true,false", [True, False]),
    ],
)
def test_values_are_read_as_python_and_yaml_read_them(make, text, values):
    assert parse_values(inspect_notebook(make()), text) == (text.partition("=")[0], values)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("seed", "-p seed: expected name=value,value,... or name=first:end"),
        ("seed=", "-p seed=: a value is missing"),
        ("seed=1,,2", "-p seed=1,,2: a value is missing"),
        ("seed=4:4", "-p seed=4:4: an empty range: from 4, and 4 is not among it"),
        ("seed=0:4:0", "-p seed=0:4:0: the step of a range cannot be 0"),
        ("sizes=[1, 2", "-p sizes=[1, 2: the value is not YAML"),
    ],
)
def test_values_that_cannot_be_read_are_refused(make, text, error):
    with pytest.raises(NotebookError) as caught:
        parse_values(inspect_notebook(make()), text)
    assert error in str(caught.value)


def test_a_combination_given_twice_is_one():
    assert combinations({"seed": [0, 1, 0], "decay": [0.5]}) == [{"seed": 0, "decay": 0.5}, {"seed": 1, "decay": 0.5}]


def test_pairs_that_do_not_match_are_refused():
    with pytest.raises(NotebookError, match="as many values of each parameter, found: seed has 2, decay has 3"):
        combinations({"seed": [0, 1], "decay": [0.1, 0.2, 0.3], "steps": [1]}, paired=True)


def test_folders_do_not_depend_on_the_order_of_what_is_typed(make, tmp_path):
    info = inspect_notebook(make())
    there = plan_sweep(info, {"seed": [0, 1], "decay": [1, "1e-3"]}, tmp_path)
    back = plan_sweep(info, {"decay": ["1e-3", 1], "seed": [1, 0]}, tmp_path)
    names = {"decay=1.0,seed=0", "decay=1.0,seed=1", "decay=0.001,seed=0", "decay=0.001,seed=1"}
    assert {job.folder.name for job in there} == {job.folder.name for job in back} == names
    assert [job.parameters["seed"] for job in there] == [0, 0, 1, 1], "what was typed first varies slowest"
    assert [job.parameters["seed"] for job in back] == [1, 0, 1, 0]
    assert {type(job.parameters["decay"]) for job in there} == {float}


def test_names_of_folders_stay_apart_short_and_plain():
    names = [cell_name({"label": value}) for value in ("a/b", "a b", "a_b", "../x", "x" * 300, "x" * 301)]
    assert len(set(names)) == len(names)
    assert all(len(name) < 140 and "/" not in name and name.startswith("label=") for name in names)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["-p", "no_such=1,2"], "01_first has no parameter no_such. It takes:\n"),
        (["-p", "seed=1,many"], "01_first: seed: expected a whole number, like 0, found 'many' (str)"),
        (["-p", "seed=0:4", "-p", "seed=9"], "-p seed=0:4 and -p seed=9: seed is given twice"),
        (["-p", "seed=0:4", "-p", "decay=0.1,0.2", "--paired"], "found: seed has 4, decay has 2"),
        (["-p", "output_dir=a,b"], "use --output instead"),
        (["-p", "seed=0,1", "--ranks", "2"], "--ranks: 01_first has no parameter ranks, world_size or world_sizes"),
        (["-p", "seed=0,1", "--device", "cpu"], "01_first has no parameter device"),
        (["-p", "seed=0,1", "-o", "pyproject.toml"], "pyproject.toml is a file; choose another output folder"),
        (["-p", "seed=0,1", "-j", "0"], "--jobs: expected at least 1, got 0"),
        (["-p", "seed=0,1", "--timeout", "0"], "timeout: expected a number of seconds above 0"),
        ([], "nothing to sweep over"),
    ],
)
def test_wrong_usage_exits_with_2_and_starts_nothing(make, arguments, error):
    root = make("1").parents[1]
    outcome = invoke("1", *arguments)
    assert outcome.exit_code == 2
    assert error in outcome.stderr
    assert not (root / "outputs").exists()


def test_a_notebook_without_parameters_cannot_be_swept(make):
    make("1", parameters=None)
    outcome = invoke("1", "-p", "seed=0,1")
    assert outcome.exit_code == 2
    assert "01_first: no cell is tagged parameters, so seed would be ignored" in outcome.stderr


def test_a_failure_does_not_stop_the_rest_and_only_what_is_left_runs_again(make, no_orphans):
    path = make(
        "import pathlib",
        "with open('ran.txt', 'a') as file: file.write(f'{seed} ')",
        "assert seed != 1 or pathlib.Path('mended').exists()",
    )
    root = path.parents[1]
    first = invoke("1", "-p", "seed=0:3", "-p", "decay=0.9", "-j", "2")
    assert first.exit_code == 1, first.output
    names = [f"decay=0.9,seed={seed}" for seed in range(3)]
    assert statuses(root) == dict(zip(names, ["passed", "failed", "passed"], strict=True))
    assert f"{names[1]} failed after" in first.stdout and "AssertionError" in first.stdout
    assert sorted((root / "ran.txt").read_text().split()) == ["0", "1", "2"]
    assert "Traceback" in load_result(root / "outputs/sweeps/01_first" / names[1]).traceback

    (root / "mended").touch()
    second = invoke("1", "-p", "seed=0:3", "-p", "decay=0.9")
    assert second.exit_code == 0, second.output
    assert "3 runs, 2 finished before and kept" in second.stdout and second.stdout.count("kept") == 3
    assert (root / "ran.txt").read_text().split()[3:] == ["1"]

    notebook = nbformat.read(path, as_version=4)
    notebook.cells[2].source = "import pathlib  # changed"
    nbformat.write(notebook, path)
    third = invoke("1", "-p", "seed=2", "-p", "decay=0.9")
    assert "1 again because of changes in notebook" in third.stdout
    assert (root / "ran.txt").read_text().split()[4:] == ["2"]


def test_an_interrupted_sweep_is_taken_up_where_it_was(make, no_orphans, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    root = make(
        "import pathlib, time",
        "with open('ran.txt', 'a') as file: file.write(f'{seed} ')",
        f"if seed == 1 and not pathlib.Path('go').exists():\n    pathlib.Path({str(fifo)!r}).write_text('here')\n"
        "    while True: time.sleep(1)",
    ).parents[1]
    sweep = subprocess.Popen(
        [sys.executable, "-m", "fsdp_ema_lib.lab.cli", "sweep", "1", "-p", "seed=0:3"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert fifo.read_text() == "here"  # blocks until the second run is in its cell
    sweep.send_signal(signal.SIGINT)
    printed, _ = sweep.communicate(timeout=30)
    assert sweep.returncode == 130, printed
    assert "interrupted; 2 of 3 runs did not finish" in printed
    assert statuses(root) == {"seed=0": "passed", "seed=1": "interrupted"}

    (root / "go").touch()
    outcome = invoke("1", "-p", "seed=0:3")
    assert outcome.exit_code == 0, outcome.output
    assert (root / "ran.txt").read_text().split() == ["0", "1", "1", "2"]
    assert set(statuses(root).values()) == {"passed"}


def test_a_notebook_that_vanishes_fails_and_the_others_run(make, make_notebook, tmp_path, monkeypatch):
    make()
    infos = [inspect_notebook(make_notebook("1", name=f"0{number}_x")) for number in (2, 3)]
    jobs = [Job(info, {}, tmp_path / info.stem, info.stem) for info in infos]
    ended = {}

    class Watcher:
        def started(self, job):
            infos[0].path.unlink(missing_ok=True)

        def progressed(self, job, done, total): ...

        def ended(self, job, result):
            ended[job.label] = result

    sweeps.run_jobs(jobs, Watcher())
    assert ended["02_x"].status == "failed" and "02_x.ipynb: no such notebook" in ended["02_x"].error
    assert ended["03_x"].passed


def test_workers_share_cores_and_take_turns_on_gpus(make, make_notebook, tmp_path, monkeypatch):
    ranked = make_notebook("1", name="02_x", parameters='output_dir = ""  # where\nranks = 2  # how many')
    alone, together = (Job(inspect_notebook(path), {}, tmp_path, "x") for path in (make(), ranked))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-x")
    assert sweeps._environment(alone, 0, 1) == {}
    devices = [sweeps._environment(alone, slot, 3)["CUDA_VISIBLE_DEVICES"] for slot in range(3)]
    assert devices == ["4", "GPU-x", "4"]
    assert sweeps._environment(together, 0, 16) == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert sweeps._environment(alone, 1, 2) == {}
