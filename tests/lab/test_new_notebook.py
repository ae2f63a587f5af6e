import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fsdp_ema_lib.lab.cli import app
from fsdp_ema_lib.lab.new_notebook import new_notebook
from fsdp_ema_lib.lab.notebooks import NotebookError, hygiene, inspect_notebook
from fsdp_ema_lib.lab.runs import LOG_FILE, run_notebook

ROOT = Path(__file__).parents[2]


def test_a_new_notebook_is_in_order_and_runs_as_it_is(tmp_path, monkeypatch, no_orphans):
    (tmp_path / "pyproject.toml").touch()
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(app, ["new", "Batch size and-decay", "-q", "Does a large batch need an average?"])
    assert outcome.exit_code == 0, outcome.output
    path = tmp_path / "notebooks" / "01_batch_size_and_decay.ipynb"
    assert "notebooks/01_batch_size_and_decay.ipynb" in outcome.stdout and "fsdp-ema run 01" in outcome.stdout
    assert hygiene(path) == []
    info = inspect_notebook(path)
    assert info.title == "Batch size and decay" and info.question == "Does a large batch need an average?"
    for check in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *check, "--config", str(ROOT / "pyproject.toml"), "--no-cache", path]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    result = run_notebook(info, {}, tmp_path / "outputs" / path.stem, timeout=100.0)
    assert result.passed, (Path(result.folder) / LOG_FILE).read_text()
    assert result.metrics["at_defaults"] and result.claims and all(result.claims.values())
    assert (Path(result.folder) / "jitter.png").stat().st_size > 1000


def test_the_next_free_number_is_taken_and_nothing_is_overwritten(tmp_path):
    for name in ("01_a", "03_b", "notes"):
        (tmp_path / f"{name}.ipynb").touch()
    assert [new_notebook(name, folder=tmp_path).name[:2] for name in ("x", "y", "z")] == ["02", "04", "05"]
    with pytest.raises(NotebookError, match="02_x.ipynb is there already"):
        new_notebook("X", folder=tmp_path)
    assert "What does long runs change?" in new_notebook("long_runs", folder=tmp_path).read_text()


@pytest.mark.parametrize("name", ["", "07_x", "../x", "x.ipynb", "größe", "a/b"])
def test_a_name_that_is_no_words_is_refused(tmp_path, name):
    with pytest.raises(NotebookError, match="expected words of the letters a to z and digits"):
        new_notebook(name, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("question", ["", "No question", "First this. Then that?", "Two?\nlines?"])
def test_a_question_that_is_none_is_refused(tmp_path, question):
    with pytest.raises(NotebookError, match="one sentence that ends with a question mark"):
        new_notebook("x", question=question, folder=tmp_path)


def test_numbers_end_at_99_and_a_file_is_no_folder(tmp_path):
    for number in range(1, 100):
        (tmp_path / f"{number:02d}_x{number}.ipynb").touch()
    with pytest.raises(NotebookError, match="01 to 99 are all taken"):
        new_notebook("x", folder=tmp_path)
    with pytest.raises(NotebookError, match="cannot be written"):
        new_notebook("x", folder=tmp_path / "01_x1.ipynb")
