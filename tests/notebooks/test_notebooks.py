"""Every notebook in order and able to run, headless, as `fsdp-ema run` runs it."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fsdp_ema_lib.lab.notebooks import functions_defined, hygiene, inspect_notebook, read_notebook
from fsdp_ema_lib.lab.runs import LOG_FILE, run_notebook

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# What makes a run short; a notebook that is not named here runs with its defaults.
SHORT: dict[str, dict[str, Any]] = {
    "02_ema_decay_curves": {"settling": 2000},
    "03_checkpoint_round_trips": {
        "two_ranks": ["FSDP2 full"],
        "three_ranks": [],
        "four_ranks": [],
        "steps": 20,
        "hidden": 64,
        "run_steps": 12,
        "save_every": 3,
        "killed_in_step": 5,
        "killed_in_save": 9,
    },
    "04_ema_vs_live": {"steps": 60, "eval_every": 30, "samples": 100},
    "05_where_the_shards_are": {"world_sizes": [2]},
    "06_your_own_model": {"steps": 24, "eval_every": 4, "eval_batches": 2},
}

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def run_and_check(path: Path, folder: Path, parameters: dict[str, Any], limit_s: float = 280.0) -> dict[str, Any]:
    result = run_notebook(inspect_notebook(path), parameters, folder, timeout=limit_s)
    assert result.passed, f"{result.error}\n{(folder / LOG_FILE).read_text()[-4000:]}"
    check_figures(folder, read_notebook(folder / path.name))
    return json.loads((folder / "metrics.json").read_text())


def check_figures(folder: Path, executed: Any) -> None:
    """Every figure went through `plots.save`, which refuses one without labels, and none is hard to read."""
    outputs = [output for cell in executed.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = sum("image/png" in output.get("data", {}) for output in outputs)
    saved = [path for path in folder.glob("*.png") if path.stat().st_size > 1000]
    assert saved, "no figure was saved"
    assert shown <= len(saved), f"{shown} figures are shown, and only {len(saved)} were saved by plots.save"
    warned = [output.text for output in outputs if output.get("name") == "stderr" and "FigureWarning" in output.text]
    assert not warned, "".join(warned)


def test_notebooks_are_numbered_from_one_without_a_gap():
    assert [path.stem[:2] for path in NOTEBOOKS] == [f"{number:02d}" for number in range(1, len(NOTEBOOKS) + 1)]
    assert NOTEBOOKS


@every_notebook
def test_in_order(path):
    assert hygiene(path) == []


def test_no_function_is_defined_in_two_notebooks():
    counts = Counter(name for path in NOTEBOOKS for name in functions_defined(path))
    assert [name for name, count in counts.items() if count > 1] == []


@every_notebook
def test_runs(path, tmp_path):
    short = SHORT.get(path.stem, {})
    metrics = run_and_check(path, tmp_path / path.stem, short)
    assert metrics["at_defaults"] == (not short), "at_defaults says what was run"
    if not short:
        assert all(metrics["claims"].values())


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("stem", sorted(SHORT))
def test_claims_hold_at_the_default_parameters(stem, tmp_path):
    metrics = run_and_check(ROOT / "notebooks" / f"{stem}.ipynb", tmp_path / stem, {}, limit_s=900.0)
    assert metrics["at_defaults"] and all(metrics["claims"].values()), metrics["claims"]


def test_plain_papermill_runs_one_too(tmp_path):
    command = [
        "papermill",
        "02_ema_decay_curves.ipynb",
        str(tmp_path / "x.ipynb"),
        "-k",
        "python3",
        "--no-progress-bar",
    ]
    command += ["-p", "output_dir", str(tmp_path / "results"), "-p", "settling", "2000"]
    # From the folder that JupyterLab starts its kernels in.
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT / "notebooks", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "results" / "metrics.json").is_file()
