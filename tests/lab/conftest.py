"""Small notebooks, and the processes that running them must not leave behind."""

import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from processes import kill_what_stays

from fsdp_ema_lib.lab.kernel_host import MARK, marked_processes

PARAMETERS = """\
output_dir = "outputs/09_small"  # where the results go
device = "auto"  # auto, cpu or cuda
steps = 400  # how many
rate = 0.5  # how fast
flag = True  # whether
decays = [0.9, 0.99]  # which
label = "a"  # what it is called
"""
OPENING = "# 09 · Small\n\nDoes a small\nnotebook run? It does.\n\n**Needs:** nothing.\n\n**Takes:** a second."
MakeNotebook = Callable[..., Path]


@pytest.fixture
def make_notebook(tmp_path: Path) -> MakeNotebook:
    """Write a notebook of the given code cells; it is in order as far as they are."""
    folder = tmp_path / "repo" / "notebooks"
    folder.mkdir(parents=True)
    (folder.parent / "pyproject.toml").touch()

    def make(*code: str, name: str = "09_small", parameters: str | None = PARAMETERS, opening: str = OPENING) -> Path:
        cells = [new_markdown_cell(opening, id="opening")]
        if parameters is not None:
            cells.append(new_code_cell(parameters, id="parameters", metadata={"tags": ["parameters"]}))
        cells += [new_code_cell(source, id=f"step-{number}") for number, source in enumerate(code, start=1)]
        metadata = {
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
            "language_info": {"name": "python"},
        }
        path = folder / f"{name}.ipynb"
        nbformat.write(new_notebook(cells=cells, metadata=metadata), path)
        return path

    return make


@pytest.fixture
def no_orphans(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail the test if a process that it started, however indirectly, or a temporary file of one is left at its end."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    with tempfile.TemporaryDirectory() as temporary:  # not in tmp_path, too long a path for a socket
        monkeypatch.setenv("TMPDIR", temporary)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield
        # A process that was killed with its parent is gone a moment after it, not at once.
        left = kill_what_stays(marked_processes(mark), 10)
        assert not left, f"left behind: {left}"
        assert os.listdir(temporary) == []
