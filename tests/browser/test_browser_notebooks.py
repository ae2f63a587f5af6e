"""Every notebook, opened and run in JupyterLab, and each of its explorers moved by mouse and by keyboard."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from notebooks.test_notebooks import NOTEBOOKS, SHORT

from browser.lab_page import Explorer, Notebook
from browser.workplace import Workplace

pytestmark = pytest.mark.browser
# A choice of one is none.
MORE = {"05_where_the_shards_are": {"world_sizes": [1, 2]}}
LARGEST_SCREENSHOT = 150 * 1024  # bytes; the README shows them


@dataclass(frozen=True)
class Expected:
    """What is known of an explorer. Its controls are found on the page.

    Args:
        name: of its screenshots.
        pose: brings it to what the second screenshot shows, from whatever it was moved to.
        in_order: controls that can only be moved in a certain order.
        play: moves those, and says what must come of it.
        after: ends what `pose` began.
    """

    name: str
    pose: Callable[[Explorer], None]
    in_order: frozenset[str] = frozenset()
    play: Callable[[Explorer], None] = lambda explorer: None
    after: Callable[[Explorer], None] = lambda explorer: None


def pose_decay(explorer: Explorer) -> None:
    for dropdown, option in (("schedule", "half-life"), ("precision", "bf16, no EMA_FSDP")):
        explorer.choose(explorer.control(f"dropdown {dropdown}"), option)
        explorer.settle()
    for slider, where in (("update every", 0.0), ("half-life", 0.6)):
        explorer.drag(explorer.control(f"slider {slider}"), where)
        explorer.settle()


def press(explorer: Explorer, button: str, state: str, how: str) -> None:
    getattr(explorer, how)(explorer.control(f"button {button}"))
    explorer.until_text(rf"\b{state}, step")


def play_training(explorer: Explorer) -> None:
    """Every button by mouse and by keyboard; an interrupt does not reach the training; its thread ends."""
    threads = explorer.notebook.threads()
    for how in ("mouse", "keyboard"):
        press(explorer, "Start", "running", how)
        explorer.picture_after(explorer.notebook.interrupt, "a training, its kernel interrupted")
        press(explorer, "Pause", "paused", how)
        assert explorer.notebook.ask("print(monitor.state)") == "paused\n"
        explorer.picture_after(lambda how=how: press(explorer, "Resume", "running", how), "a training that goes on")
        press(explorer, "Stop", "stopped", how)
    assert explorer.notebook.threads() == threads


def pose_training(explorer: Explorer) -> None:
    for slider, where in (("steps", 0.5), ("decay", 0.6)):
        explorer.drag(explorer.control(f"slider {slider}"), where)
        explorer.settle()
    press(explorer, "Start", "running", "mouse")
    explorer.until_text(r"running, step ([3-9]\d\d|\d{4})", limit_s=90.0)
    press(explorer, "Pause", "paused", "mouse")
    explorer.settle()


def stop_training(explorer: Explorer) -> None:
    press(explorer, "Stop", "stopped", "mouse")


def pose_checkpoints(explorer: Explorer) -> None:
    explorer.mouse(explorer.control("list parameters"))


def pose_shards(explorer: Explorer) -> None:
    counts = explorer.control("dropdown number of ranks")
    explorer.choose(counts, counts.options[-1])
    explorer.settle()
    strategies = explorer.control("dropdown strategy")
    explorer.choose(strategies, next(way for way in strategies.options if way.startswith("FSDP2")))


BUTTONS = frozenset(f"button {name}" for name in ("Start", "Pause", "Resume", "Stop"))
EXPLORERS: dict[str, list[Expected]] = {
    "02_ema_decay_curves": [Expected("decay_explorer", pose_decay)],
    "03_checkpoint_round_trips": [Expected("checkpoint_browser", pose_checkpoints)],
    "04_ema_vs_live": [Expected("training_monitor", pose_training, BUTTONS, play_training, stop_training)],
    "05_where_the_shards_are": [Expected("shard_explorer", pose_shards)],
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
    with lab.open(request.param, {**SHORT.get(request.param, {}), **MORE.get(request.param, {})}) as notebook:
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
    folder = pytestconfig.getoption("--save-screenshots", default=None) or tmp_path
    for explorer, row in zip(explorers, expected, strict=True):
        assert in_order(explorer)
        assert explorer.pictures(), explorer.text()
        shots = [folder / f"{row.name}_{number}.png" for number in (1, 2)]
        explorer.screenshot(shots[0])
        print(f"{row.name}: {', '.join(move_everything(explorer, row))}")
        row.play(explorer)
        explorer.picture_after(lambda e=explorer, pose=row.pose: pose(e), f"{row.name}: its pose")
        explorer.screenshot(shots[1])
        row.after(explorer)
        assert in_order(explorer)
        for path in shots:
            assert path.stat().st_size < LARGEST_SCREENSHOT, f"{path.name} has {path.stat().st_size} bytes"


def in_order(explorer: Explorer) -> bool:
    """No error is shown, and every slider says what the kernel holds."""
    assert (explorer.complaints(), explorer.out_of_step()) == ([], {})
    return True


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
    while fresh := [c.name for c in explorer.controls() if c.name not in row.in_order and c.name not in moved]:
        name = fresh[0]
        moved.append(name)
        for move in (explorer.mouse, explorer.keyboard):
            explorer.picture_after(lambda m=move, n=name: m(explorer.control(n)), f"{name}, by {move.__name__}")
            assert in_order(explorer), f"after {name}, by {move.__name__}"
