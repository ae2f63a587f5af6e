import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fsdp_ema_lib.lab.cli import app
from fsdp_ema_lib.lab.runs import RESULT_FILE


@pytest.fixture
def checkout(make_notebook, monkeypatch) -> Path:
    """A repository of two notebooks, of which only the first knows `steps`; the current directory."""
    first = make_notebook(
        "assert steps > 0", name="01_first", parameters='output_dir = ""  # where\nsteps = 4  # how many'
    )
    make_notebook("1", name="02_second", parameters='output_dir = ""  # where\ndevice = "auto"  # on what')
    root = first.parents[1]
    monkeypatch.chdir(root)
    return root


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def test_run_keeps_results_prints_a_summary_and_exits_with_1_when_one_failed(checkout, no_orphans):
    (checkout / "given.yml").write_text("steps: 3\n")
    outcome = invoke("run", "1", "-f", "given.yml", "-p", "steps=0", "--output", "results", "--timeout", "100")
    assert outcome.exit_code == 1
    assert "01_first failed after" in outcome.stdout
    assert "In [3]: AssertionError" in outcome.stdout and "run.log" in outcome.stdout
    assert "results/01_first" in outcome.stdout.splitlines()[-2], "the row of the summary table"
    record = json.loads((checkout / "results" / "01_first" / RESULT_FILE).read_text())
    assert record["parameters"] == {"steps": 0}, "what is typed goes before what is in the file"

    listed = invoke("list", "--output", "results").stdout
    assert "01  Small  01_first" in listed and "Does a small notebook run?" in listed
    assert "steps" in listed and "how many" in listed
    assert listed.count("last run: failed after") == 1 and listed.count("last run: never") == 1


def test_an_interrupt_keeps_finished_runs_and_leaves_no_kernel(checkout, no_orphans, tmp_path, make_notebook):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    make_notebook(
        f"import pathlib, tempfile; tempfile.mkdtemp(); pathlib.Path({str(fifo)!r}).write_text('here')",
        "while True: pass",
        name="02_second",
    )
    runner = subprocess.Popen(
        [sys.executable, "-m", "fsdp_ema_lib.lab.cli", "run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert fifo.read_text() == "here"  # blocks until the second notebook is in its cell
    runner.send_signal(signal.SIGINT)
    printed, _ = runner.communicate(timeout=30)
    assert runner.returncode == 130, printed
    assert "interrupted; 1 of 2 runs did not finish" in printed
    statuses = {
        path.parent.name: json.loads(path.read_text())["status"] for path in checkout.glob(f"outputs/*/{RESULT_FILE}")
    }
    assert statuses == {"01_first": "passed", "02_second": "interrupted"}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["run", "1", "-p", "no_such=1"],
            "01_first has no parameter no_such. It takes:\n  output_dir = ''  # where\n  steps",
        ),
        (["run", "-p", "steps=1"], "02_second has no parameter steps"),
        (["run", "--device", "cpu"], "01_first has no parameter device"),
        (["run", "2", "--device", "cpu", "-p", "device=cuda"], "--device cpu and -p device=cuda contradict each other"),
        (["run", "2", "--ranks", "2"], "--ranks: 02_second has no parameter ranks, world_size or world_sizes"),
        (["run", "missing.ipynb"], "missing.ipynb: no such notebook"),
        (["run", "1", "-j", "0"], "--jobs: expected at least 1, got 0"),
        (["run", "3"], "3: no such notebook. Give the number, the name or the path of one:\n  01_first\n  02_second"),
        (["run", "1", "-p", "steps=many"], "01_first: steps: expected a whole number, like 4, found 'many' (str)"),
        (["run", "1", "-p", "output_dir=x"], "use --output instead"),
        (["run", "1", "--timeout", "0"], "timeout: expected a number of seconds above 0"),
        (["run", "1", "-f", "missing.yml"], "-f missing.yml: No such file or directory"),
        (["run", "1", "-f", "list.yml"], "-f list.yml: expected a map of parameter names to values, found list"),
        (["run", "1", "-f", "broken.yml"], "-f broken.yml: not YAML"),
        (["run", "1", "-f", "range.yml"], "steps: expected a whole number, like 4, found '1:4' (str); ranges of whole"),
        (["run", "1", "copy/01_first.ipynb"], "share a folder of results: {root}/notebooks/01_first.ipynb, {root}"),
        (["run", "1", "--output", "list.yml"], "list.yml/01_first cannot be a folder"),
    ],
)
def test_wrong_usage_exits_with_2_and_starts_nothing(checkout, no_orphans, arguments, error):
    (checkout / "list.yml").write_text("- 1\n")
    (checkout / "broken.yml").write_text("a: [")
    (checkout / "range.yml").write_text("steps: 1:4")
    shutil.copytree(checkout / "notebooks", checkout / "copy")
    outcome = invoke(*arguments)
    assert outcome.exit_code == 2
    assert error.replace("{root}", str(checkout)) in outcome.stderr
    assert not (checkout / "outputs").exists()
    assert outcome.stdout == ""


def test_ranks_and_device_reach_the_parameters_that_stand_for_them(checkout, make_notebook, no_orphans):
    parameters = 'output_dir = ""  # where\nworld_sizes = [1, 2]  # ranks\ndevice = "auto"  # on what'
    make_notebook("assert (world_sizes, device) == ([3], 'cpu')", name="02_second", parameters=parameters)
    outcome = invoke("run", "2", "--ranks", "3", "--device", "cpu")
    assert outcome.exit_code == 0, outcome.output
    record = json.loads((checkout / "outputs" / "02_second" / RESULT_FILE).read_text())
    assert record["parameters"] == {"world_sizes": [3], "device": "cpu"}


def test_all_notebooks_that_refuse_are_named_at_once(checkout):
    refused = invoke("run", "-p", "other=1").stderr
    assert "01_first has no parameter other" in refused and "02_second has no parameter other" in refused
