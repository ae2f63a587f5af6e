"""Copies of the notebooks in a folder of their own, opened one after another in one JupyterLab."""

import contextlib
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import nbformat
from processes import kill_what_stays

from browser.chromium import chromium_page
from browser.lab_page import LabPage, Notebook
from browser.lab_server import ROOT, LabServer, lab_server

FAILURES = ROOT / "outputs" / "browser-failures"
END_LIMIT_S = 15.0


class Workplace:
    """A server, a page with its JupyterLab, and the folder that it shows.

    Args:
        root: looks like this repository: `notebooks/` as committed, for `at_default_parameters` to compare with, and
            `opened/` for the copies that are opened.
        server: that shows it.
        page: that it is shown on.
    """

    def __init__(self, root: Path, server: LabServer, page: LabPage) -> None:
        self.root, self.server, self.page = root, server, page

    @contextlib.contextmanager
    def open(self, stem: str, parameters: Mapping[str, Any] | None = None) -> Iterator[Notebook]:
        """Open a copy of a notebook with these parameters; at the end no process of it may be left."""
        path = self.root / "opened" / f"{stem}.ipynb"
        write_copy(self.root / "notebooks" / path.name, path, parameters or {})
        with self.open_file(path) as notebook:
            yield notebook

    @contextlib.contextmanager
    def open_file(self, path: Path) -> Iterator[Notebook]:
        """Open a file under `root`; at the end no process of it may be left."""
        notebook = self.page.open(path.relative_to(self.root).as_posix())
        try:
            yield notebook
        except Exception:
            self.page.screenshot(FAILURES / f"{path.stem}.png")
            raise
        finally:
            # A menu or a dialog that a failed test left open would swallow the next one's clicks.
            self.page.wait(self.page.page.keyboard.press("Escape"))
            notebook.close()
            self._assert_nothing_left(path.stem)

    def _assert_nothing_left(self, stem: str) -> None:
        # A rank that is killed with its kernel is gone a moment after it, not at once.
        left = kill_what_stays(self.server.started(), END_LIMIT_S)
        assert not left, f"{stem} left behind: {left}"


@contextlib.contextmanager
def workplace(folder: Path) -> Iterator[Workplace]:
    """Start JupyterLab on copies of the notebooks under `folder`, and Chromium on it; both are gone afterwards.

    Raises:
        NoBrowser: there is no Chromium, or no Playwright.
    """
    root, private = folder / "repo", folder / "private"
    for name in ("notebooks", "opened", "outputs"):
        (root / name).mkdir(parents=True)
    private.mkdir()
    (root / "pyproject.toml").touch()
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy(path, root / "notebooks")
    with chromium_page() as (page, wait), lab_server(root, private) as server:
        yield Workplace(root, server, LabPage(page, wait, server.url, server.token))


def write_copy(source: Path, target: Path, parameters: Mapping[str, Any]) -> None:
    """Copy a notebook, with other values in its parameters cell, as a person would type them there."""
    notebook = nbformat.read(source, as_version=4)
    cell = next(cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    for name, value in parameters.items():
        cell.source, count = re.subn(
            rf"(?m)^{name} = [^#\n]*", lambda _, n=name, v=value: f"{n} = {v!r}  ", cell.source
        )
        assert count == 1, f"{source.name}: {count} lines give a value to the parameter {name}"
    nbformat.write(notebook, target)
