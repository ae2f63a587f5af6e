"""What a person does to a kernel in JupyterLab - interrupt, restart, leave it alone - and what is left after it."""

import psutil
import pytest
from notebooks.test_notebooks import SHORT
from processes import command

from browser.workplace import Workplace
from fsdp_ema_lib.lab.notebooks import inspect_notebook
from fsdp_ema_lib.lab.runs import run_notebook

pytestmark = pytest.mark.browser
TRAINING, RANKS, WIDGET = "04_ema_vs_live", "05_where_the_shards_are", "02_ema_decay_curves"


def source_of(notebook, cell):
    return next(found["source"] for found in notebook.cells() if found["id"] == cell)


def test_a_training_that_was_interrupted_runs_again(lab: Workplace):
    with lab.open(TRAINING, SHORT[TRAINING] | {"steps": 1_000_000}) as notebook:
        notebook.start()
        notebook.until_cell("cell.id === 'train' && cell.outputs.length", "the training to begin", limit_s=120.0)
        notebook.interrupt()
        assert notebook.verdict() == "error"
        errors = notebook.errors()
        assert len(errors) == 1 and errors[0].startswith("cell train: KeyboardInterrupt")
        threads = notebook.threads()
        notebook.set_source("parameters", source_of(notebook, "parameters").replace("1000000", "60"))
        assert (notebook.run_all(), notebook.errors()) == ("done", [])
        assert notebook.threads() == threads


def test_restarting_the_kernel_ends_the_ranks_it_started(lab: Workplace):
    with lab.open(RANKS, SHORT[RANKS]) as notebook:
        [kernel] = [p for p in lab.server.started() if "ipykernel_launcher" in command(p)]
        notebook.start()
        notebook.until_cell("cell.id === 'setup' && house.kernelStatus(path) === 'busy'", "the ranks' cell to start")
        old = with_ranks(lab, kernel)
        notebook.restart()
        _, alive = psutil.wait_procs(old, timeout=15)
        assert alive == [], "left by the old kernel"
        assert (notebook.run_all(), notebook.errors()) == ("done", [])


def with_ranks(lab: Workplace, kernel: psutil.Process) -> list[psutil.Process]:
    """The kernel and its ranks, once it has two."""
    for _ in range(600):
        started = lab.server.started()
        if len(started) >= 3:
            assert kernel in started
            return started
        lab.page.wait(lab.page.page.wait_for_timeout(100))
    raise AssertionError(f"no two ranks after a minute: {started}")


def test_an_executed_copy_shows_its_figures_without_running(lab: Workplace):
    folder = lab.root / "outputs" / "kept"
    info = inspect_notebook(lab.root / "notebooks" / f"{WIDGET}.ipynb")
    assert run_notebook(info, SHORT[WIDGET], folder, timeout=120.0).passed
    with lab.open_file(folder / f"{WIDGET}.ipynb") as notebook:
        assert None not in [cell["count"] for cell in notebook.code_cells()]
        # JupyterLab draws widgets of other people's runs only once they are trusted: hence the plain twin of each.
        figures = notebook.cells_with("image/png")
        assert "explorer-figure" in figures and all(notebook.pictures(cell) for cell in figures)
        assert notebook.ask("print('folder' in globals())") == "False\n", "a cell has run"
