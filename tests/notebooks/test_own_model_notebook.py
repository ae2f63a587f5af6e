"""Notebook 06 on other models than its own: the second example, and a reader's package that Python has to find."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_ema_lib.lab.notebooks import inspect_notebook
from fsdp_ema_lib.lab.runs import LOG_FILE, run_notebook

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "06_your_own_model.ipynb"
EXAMPLES = "fsdp_ema_lib.lab.examples_of_models"
WORK = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def build():
    return nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def batches(train, seed):
    x = torch.randn(128, 3, generator=torch.Generator().manual_seed(int(train)))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=16, shuffle=train)


def loss(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()
"""
MINE = {"model": "my_pkg.work:build", "data": "my_pkg.work:batches", "loss": "my_pkg.work:loss"}
SHORT = {"steps": 40, "eval_every": 4, "sharding": "none"}


@pytest.fixture
def code(tmp_path):
    """The folder that a reader's package lies in."""
    package = tmp_path / "code" / "my_pkg"
    package.mkdir(parents=True)
    (package / "work.py").write_text(WORK)
    return package.parent


def run(folder, **parameters):
    return run_notebook(inspect_notebook(NOTEBOOK), parameters, folder, timeout=280.0)


def test_a_readers_own_package_is_studied(code, tmp_path):
    result = run(tmp_path / "out", **SHORT, **MINE, code_dir=str(code))
    assert result.passed, f"{result.error}\n{(tmp_path / 'out' / LOG_FILE).read_text()[-4000:]}"
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["claims"]["training lowered the held-out loss"] and not metrics["at_defaults"]
    assert metrics["values"]["held_out_loss"]["live"] < metrics["values"]["held_out_loss_untrained"]
    assert "FigureWarning" not in (tmp_path / "out" / NOTEBOOK.name).read_text()


@pytest.mark.slow
def test_an_import_path_that_leads_nowhere_ends_the_run_with_what_to_do(tmp_path):
    result = run(tmp_path / "out", **MINE)
    assert not result.passed
    assert "model=my_pkg.work:build: there is no module my_pkg on Python's path" in result.error
    assert "code_dir" in result.error


@pytest.mark.parametrize("way", ["PYTHONPATH", "the folder of the notebook"])
def test_python_finds_the_package_by_itself(code, way, monkeypatch):
    # A kernel starts in the folder of its notebook with "" on its path, as `python -c` does.
    if way == "PYTHONPATH":
        monkeypatch.setenv("PYTHONPATH", str(code), prepend=":")
    program = f"from fsdp_ema_lib.lab.own_model import load_hooks; print(load_hooks(**{MINE}).model())"
    cwd = code if way != "PYTHONPATH" else code.parent
    done = subprocess.run([sys.executable, "-c", program], cwd=cwd, capture_output=True, text=True)
    assert "BatchNorm1d" in done.stdout, done.stderr


@pytest.mark.slow
def test_plain_papermill_runs_the_vision_transformer(tmp_path):
    given = {"model": f"{EXAMPLES}:vit", "data": f"{EXAMPLES}:digits", "loss": f"{EXAMPLES}:class_loss"}
    given |= {"steps": 24, "eval_every": 4, "eval_batches": 2, "output_dir": str(tmp_path / "out")}
    command = ["papermill", NOTEBOOK.name, str(tmp_path / "x.ipynb"), "-k", "python3", "--no-progress-bar"]
    command += [part for name, value in given.items() for part in ("-p", name, str(value))]
    done = subprocess.run([sys.executable, "-m", *command], cwd=NOTEBOOK.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["values"]["held_out_loss_untrained"] == pytest.approx(2.3, rel=0.1)  # ten classes, nothing known
    assert not metrics["at_defaults"]
