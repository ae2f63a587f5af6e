"""Every notebook, opened and run in JupyterLab, and each of its explorers moved by mouse and by keyboard."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from matplotlib.image import imread
from notebooks.test_notebooks import NOTEBOOKS, SHORT

from browser.lab_page import Explorer, Notebook
from browser.workplace import Workplace

pytestmark = pytest.mark.browser
LARGEST_SCREENSHOT = 150 * 1024  # bytes; the README shows them


@dataclass(frozen=True)
class Expected:
    """What is known of an explorer. Its controls are found on the page.

    Args:
        name: of its screenshots.
        pose: brings it from how it starts to what the second screenshot shows.
        still: controls that change no figure, each with the reason.
    """

    name: str
    pose: Callable[[Explorer], None]
    still: dict[str, str] = field(default_factory=dict)


def drag_decay(explorer: Explorer) -> None:
    explorer.mouse(explorer.control("slider decay"))


EXPLORERS: dict[str, list[Expected]] = {
    "02_ema_decay_curves": [Expected("decay_explorer", pose=drag_decay)],
}


@dataclass(frozen=True)
class Ran:
    stem: str
    notebook: Notebook
    verdict: str
    results: Path


@pytest.fixture(scope="module", params=[path.stem for path in NOTEBOOKS])
def ran(lab: Workplace, request: pytest.FixtureRequest) -> Iterator[Ran]:
    """A notebook that was opened and run as a whole, and is still open."""
    with lab.open(request.param, SHORT.get(request.param)) as notebook:
        yield Ran(request.param, notebook, notebook.run_all(), lab.root / "outputs" / request.param)


def test_all_cells_run_without_an_error(ran):
    assert (ran.verdict, ran.notebook.errors()) == ("done", [])
    last = ran.notebook.code_cells()[-1]
    said = "".join(output.get("text", "") for output in last["outputs"])
    assert last["count"] is not None and "holds" in said
    metrics = json.loads((ran.results / "metrics.json").read_text())
    if ran.stem not in SHORT:
        assert metrics["at_defaults"] and all(metrics["claims"].values()) and "FAILS" not in said


def test_every_figure_is_on_the_page_and_no_log_is_endless(ran):
    drawn = {cell: len(ran.notebook.pictures(cell)) for cell in ran.notebook.cells_with("image/png")}
    assert drawn and set(drawn.values()) == {1}
    assert ran.notebook.long_logs() == []


def test_each_control_changes_the_figure_by_mouse_and_by_keyboard(ran, tmp_path, pytestconfig):
    explorers, expected = ran.notebook.explorers(), EXPLORERS.get(ran.stem, [])
    assert len(explorers) == len(expected), f"explorers in cells {[e.cell for e in explorers]}, rows: {expected}"
    for explorer, row in zip(explorers, expected, strict=True):
        assert explorer.complaints() == []
        assert explorer.pictures(), explorer.text()
        take_screenshots(explorer, row, pytestconfig.getoption("--save-screenshots", default=None) or tmp_path)
        moved = move_everything(explorer, row)
        print(f"{row.name}: {', '.join(moved)}")
        assert set(row.still) <= set(moved), "a reason for a control that is not there"


def take_screenshots(explorer: Explorer, row: Expected, folder: Path) -> None:
    first, second = (folder / f"{row.name}_{number}.png" for number in (1, 2))
    explorer.screenshot(first)
    explorer.picture_after(lambda: row.pose(explorer), f"{row.name}: its pose")
    explorer.screenshot(second)
    for path in (first, second):
        assert path.stat().st_size < LARGEST_SCREENSHOT, f"{path.name} has {path.stat().st_size} bytes"
    assert (imread(first).shape != imread(second).shape) or (imread(first) != imread(second)).any()


def move_everything(explorer: Explorer, row: Expected) -> list[str]:
    """Every control there is, those included that only some option of a dropdown brings; returns their names."""
    moved: list[str] = []
    move_fresh(explorer, row, moved)
    for dropdown in [control for control in explorer.controls() if control.kind == "dropdown"]:
        for _ in dropdown.options:
            explorer.mouse(explorer.control(dropdown.name))
            explorer.settle()
            move_fresh(explorer, row, moved)
    return moved


def move_fresh(explorer: Explorer, row: Expected, moved: list[str]) -> None:
    """Move all controls that are there and not yet in `moved`, twice each, and add them."""
    while fresh := [control.name for control in explorer.controls() if control.name not in moved]:
        name = fresh[0]
        moved.append(name)
        for move in (explorer.mouse, explorer.keyboard):
            if name in row.still:
                move(explorer.control(name))
                explorer.settle()
            else:
                explorer.picture_after(lambda m=move, n=name: m(explorer.control(n)), f"{name}, by {move.__name__}")
            assert explorer.complaints() == [], f"after {name}, by {move.__name__}"
