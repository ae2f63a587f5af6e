"""What a person does in JupyterLab - open, run, look, move a control, interrupt, restart - as calls of a test."""

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from browser.chromium import Waiter

if TYPE_CHECKING:
    from playwright.async_api import Locator, Page

PAGE_JS = Path(__file__).with_name("page.js")
RUN_LIMIT_S = 240.0
STEP_LIMIT_S = 60.0  # for whatever takes a second on an idle machine; other tests may run beside these
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# Prints, for a widget and all that is in it: how many there are, and what the sliders should say.
WIDGET_TREE = """
import json
from ipywidgets import Widget
state = Widget.get_manager_state()["state"]
def family(name):
    yield state[name]["state"]
    for child in state[name]["state"].get("children", ()):
        yield from family(child.removeprefix("IPY_MODEL_"))
tree = list(family(root))
sliders = {w["description"]: format(w["value"], w["readout_format"]) for w in tree if w.get("readout_format")}
lists = [w for w in tree if w["_model_name"] == "SelectionSliderModel"]
sliders |= {w["description"]: w["_options_labels"][w["index"]] for w in lists}
print(json.dumps({"widgets": len(tree), "sliders": sliders}))
"""
THREADS = """
import json, threading
started = [thread for thread in threading.enumerate() if not type(thread).__module__.startswith("zmq.")]
print(json.dumps(sorted(thread.name for thread in started)))
"""
MOST_LINES = 60  # of text under one cell; more is a log that nobody reads


class LabPage:
    """A page with JupyterLab in it."""

    def __init__(self, page: "Page", wait: Waiter, url: str, token: str) -> None:
        self.page, self.wait = page, wait
        wait(page.add_init_script(path=PAGE_JS))
        wait(page.goto(f"{url}lab?token={token}&reset", wait_until="commit"), STEP_LIMIT_S)
        self.until("window.jupyterapp?.restored.then(() => true)", "JupyterLab to start", limit_s=90.0)

    def js(self, expression: str, argument: Any = None, limit_s: float = STEP_LIMIT_S) -> Any:
        """Value of a JavaScript expression, or of a function of one argument."""
        return self.wait(self.page.evaluate(expression, argument), limit_s)

    def until(
        self, expression: str, what: str, argument: Any = None, limit_s: float = STEP_LIMIT_S, every_s: float = 0.1
    ) -> Any:
        """Wait until a JavaScript expression is true and return it; TimeoutError says what did not come."""
        from playwright.async_api import TimeoutError as NotInTime

        waiting = self.page.wait_for_function(expression, arg=argument, timeout=1000 * limit_s, polling=1000 * every_s)
        try:
            return self.wait(_value(waiting), limit_s + 5)
        except NotInTime:
            raise TimeoutError(f"waited {limit_s:g} s for {what}") from None

    def open(self, path: str) -> "Notebook":
        """Open a notebook, by its path under the server's root, and wait until its kernel rests."""
        self.js("path => house.open(path)", path)
        self.until("path => house.kernelStatus(path) === 'idle'", f"the kernel of {path}", path, limit_s=60.0)
        return Notebook(self, path)

    def choose(self, menu: str, entry: str) -> None:
        """Click an entry of a menu of the menu bar."""
        self.wait(self.page.click(f".lm-MenuBar-item:has-text('{menu}')"), STEP_LIMIT_S)
        self.wait(self.page.click(f".lm-Menu-itemLabel:text-is('{entry}')"), STEP_LIMIT_S)

    def screenshot(self, path: Path) -> None:
        """The whole page, as it is."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.wait(self.page.screenshot(path=path), STEP_LIMIT_S)


async def _value(waiting: Any) -> Any:
    return await (await waiting).json_value()


class Notebook:
    """A notebook that is open in a `LabPage`."""

    def __init__(self, lab: LabPage, path: str) -> None:
        self.lab, self.path = lab, path

    def run_all(self, limit_s: float = RUN_LIMIT_S) -> str:
        """Click Run > Run All Cells and wait for the verdict."""
        self.start()
        return self.verdict(limit_s)

    def start(self) -> None:
        """Click Run > Run All Cells. Counts and outputs of an earlier run go first: they would pass for this one's."""
        self.lab.js("path => jupyterapp.shell.activateById(house.panels[path].id)", self.path)
        self.lab.js("() => jupyterapp.commands.execute('notebook:clear-all-cell-outputs')")
        self.lab.choose("Run", "Run All Cells")

    def verdict(self, limit_s: float = STEP_LIMIT_S) -> str:
        """Wait for the end of a run: 'done', 'error' (an output holds one) or 'dead' (the kernel is)."""
        # Seldom: each time the page goes through all that is in the notebook.
        return self.lab.until("path => house.verdict(path)", f"{self.path} to run", self.path, limit_s, every_s=0.5)

    def interrupt(self) -> None:
        """Click the square in the toolbar."""
        self._toolbar("notebook:interrupt-kernel")

    def restart(self) -> None:
        """Click the round arrow in the toolbar, say yes, and wait for the new kernel."""
        self.lab.js("path => house.watchRestart(path)", self.path)
        self._toolbar("notebook:restart-kernel")
        self.lab.wait(self.lab.page.click(".jp-Dialog .jp-mod-accept"), STEP_LIMIT_S)
        self.lab.js("() => house.restarted", limit_s=60.0)

    def _toolbar(self, command: str) -> None:
        self.lab.wait(self.lab.page.click(f".jp-NotebookPanel:visible [data-command='{command}']"), STEP_LIMIT_S)

    def until_cell(self, test: str, what: str, limit_s: float = STEP_LIMIT_S) -> dict[str, Any]:
        """Wait for a cell for which a JavaScript condition on `cell` holds."""
        expression = f"path => house.state(path).find(cell => {test})"
        return self.lab.until(expression, what, self.path, limit_s)

    def ask(self, code: str) -> str:
        """What Python code prints in the notebook's kernel, no cell involved."""
        return self.lab.js("([path, code]) => house.ask(path, code)", [self.path, code])

    def threads(self) -> list[str]:
        """Threads of the notebook's kernel, by name. zmq starts one of its own with the first large message."""
        return json.loads(self.ask(THREADS))

    def set_source(self, cell: str, source: str) -> None:
        """Replace the text of a cell."""
        self.lab.js("([path, id, source]) => house.setSource(path, id, source)", [self.path, cell, source])

    def cells(self) -> list[dict[str, Any]]:
        """Cells of the model: id, type, source, count, outputs (data by kind; of a picture its length alone)."""
        return self.lab.js("path => house.state(path)", self.path)

    def code_cells(self) -> list[dict[str, Any]]:
        """Code cells that hold something to run."""
        return [cell for cell in self.cells() if cell["type"] == "code" and cell["source"].strip()]

    def errors(self) -> list[str]:
        """Every error output, with the name of its cell."""
        return [
            f"cell {cell['id']}: {output['ename']}: {output['evalue']}"
            for cell in self.cells()
            for output in cell["outputs"]
            if output["output_type"] == "error"
        ]

    def long_logs(self) -> list[str]:
        """Cells under which there is more text than anyone reads."""
        texts = {
            cell["id"]: "".join(output.get("text", "") for output in cell["outputs"]).count("\n")
            for cell in self.cells()
        }
        return [f"cell {name}: {lines} lines" for name, lines in texts.items() if lines > MOST_LINES]

    def cells_with(self, kind: str) -> list[str]:
        """Ids of the cells with an output of a MIME kind."""
        return [c["id"] for c in self.cells() if any(kind in output.get("kinds", ()) for output in c["outputs"])]

    def reveal(self, cell: str) -> None:
        """Scroll to a cell."""
        self.lab.js("([path, id]) => house.reveal(path, id)", [self.path, cell])

    def pictures(self, cell: str) -> list[str]:
        """Scroll to a cell and wait until its pictures are drawn; one fingerprint for each."""
        self.reveal(cell)
        drawn = "([path, id]) => house.pictures(path, id).then(prints => prints?.length ? prints : null)"
        return self.lab.until(drawn, f"the pictures of cell {cell}", [self.path, cell])

    def explorers(self) -> list["Explorer"]:
        """Cells whose widgets have at least one control, in the order of the notebook."""
        found = []
        for cell in self.cells_with(WIDGET_VIEW):
            self.reveal(cell)
            explorer = Explorer(self, cell)
            # Views come to the page one by one; the kernel knows how many there will be.
            views = explorer.kernel_side()["widgets"]
            shown = "([path, id, views]) => house.views(path, id) >= views"
            self.lab.until(shown, f"the {views} widgets of cell {cell}", [self.path, cell, views])
            if explorer.controls():
                found.append(explorer)
        return found

    def close(self) -> None:
        """Close without saving, and end the kernel."""
        self.lab.js("path => house.close(path)", self.path)


@dataclass(frozen=True)
class Control:
    """Something that a person can move.

    Args:
        name: kind and label, unique within the explorer.
        kind: slider, dropdown, list, checkbox, radio, number, text, button or tab.
        selector: that finds it on the page now.
        value: as the page says it.
        readout: the number beside a slider.
        options: labels to choose from.
        chosen: those of them that are.
        active: pressed, checked or on top.
    """

    name: str
    kind: str
    selector: str
    value: str
    readout: str
    options: list[str]
    chosen: list[str]
    active: bool


def _same(one: str, other: str) -> bool:
    """Whether two texts say the same number: JavaScript writes 1e+3 where Python writes 1e+03."""
    try:
        return one == other or float(one) == float(other)
    except ValueError:
        return False


class Explorer:
    """The widgets under one cell."""

    def __init__(self, notebook: Notebook, cell: str) -> None:
        self.notebook, self.cell, self.lab = notebook, cell, notebook.lab
        self._where = [notebook.path, cell]

    def controls(self) -> list[Control]:
        """Everything that can be moved now, found on the page and not from a list."""
        return [Control(**found) for found in self._ask("controls")]

    def control(self, name: str) -> Control:
        """The control of that name as it is now; AssertionError lists those there are."""
        found = {control.name: control for control in self.controls()}
        assert name in found, f"no control {name!r}, there are: {', '.join(found)}"
        return found[name]

    def pictures(self) -> list[str]:
        """A fingerprint of each picture; there is at least one, if not in the moment in which it is replaced."""
        drawn = "([path, id]) => house.pictures(path, id).then(prints => prints?.length ? prints : null)"
        return self.lab.until(drawn, f"the pictures of cell {self.cell}", self._where)

    def text(self) -> str:
        """Everything that is written on it."""
        return self._ask("text")

    def complaints(self) -> list[str]:
        """Errors that it shows."""
        return re.findall(r"\b\w*(?:Error|Exception|Warning)\b:.*|.*javascript error.*", self.text())

    def kernel_side(self) -> dict[str, Any]:
        """What the kernel knows: the number of widgets, and what each slider should say, by its description."""
        [root] = self._ask("widgetRoots")
        return json.loads(self.notebook.ask(f"exec({WIDGET_TREE!r}, {{'root': {root!r}}})"))

    def out_of_step(self, limit_s: float = 10.0) -> dict[str, tuple[str, str]]:
        """Sliders that say something else than the kernel holds, and go on doing so: description to both numbers."""
        deadline = time.monotonic() + limit_s
        while (apart := self._apart()) and time.monotonic() < deadline:
            self.settle()
        return apart

    def _apart(self) -> dict[str, tuple[str, str]]:
        page = {c.name.removeprefix("slider "): c.readout for c in self.controls() if c.readout}
        kernel = self.kernel_side()["sliders"]
        return {
            name: (said, kernel.get(name, "")) for name, said in page.items() if not _same(said, kernel.get(name, ""))
        }

    def picture_after(self, act: Callable[[], None], what: str, limit_s: float = STEP_LIMIT_S) -> list[str]:
        """Do something and wait until the picture is another one; AssertionError says after what it stayed."""
        before = self.pictures()
        act()
        changed = "([path, id, before]) => house.picturesChanged(path, id, before)"
        try:
            self.lab.until(changed, "another picture", [*self._where, before], limit_s, every_s=0.2)
        except TimeoutError:
            raise AssertionError(f"{what}: the picture stayed as it was for {limit_s:g} s") from None
        self.settle()
        return self.pictures()

    def settle(self) -> None:
        """Wait until the kernel has handled every move so far.

        It handles messages one after another, ours last. While one is under way the page holds the next one back, hence
        the second time.
        """
        for _ in range(2):
            self.notebook.ask("")

    def mouse(self, control: Control) -> None:
        """Move a control with the mouse: a handle to the other half of its track, the next option, a click."""
        target = self._locate(control)
        if control.kind == "slider":
            self.drag(control, 0.25 if self._fraction(target) > 0.5 else 0.75)
        elif control.kind == "dropdown":
            # The list of options is a window of the system's, which a page cannot see.
            self.choose(control, control.options[self._next_option(control)])
        elif control.kind == "list":
            self.lab.wait(target.locator("option").nth(self._next_option(control)).click())
        elif control.kind in ("number", "text"):
            self.lab.wait(target.click(click_count=3))
            self.lab.wait(self.lab.page.keyboard.type(str(float(control.value or 0) + 1).removesuffix(".0")))
            self.lab.wait(target.press("Tab"))
        else:
            self.lab.wait(target.click())

    def keyboard(self, control: Control) -> None:
        """Move a control with keys alone, once it has the focus."""
        target = self._locate(control)
        if control.kind in ("slider", "dropdown", "list", "number", "text"):
            last = control.options and control.chosen == control.options[-1:]
            fraction = self._fraction(target) if control.kind == "slider" else 0.0
            self.lab.wait(
                target.press("ArrowUp" if last else "ArrowLeft" if fraction > 0.5 else self._forward(control))
            )
        elif control.kind == "radio":
            self.lab.wait(target.press("ArrowDown"))
        elif control.kind == "tab":
            self.lab.wait(target.press("Enter"))
        else:
            self.lab.wait(target.press("Space"))

    @staticmethod
    def _forward(control: Control) -> str:
        return {"slider": "ArrowRight", "dropdown": "ArrowDown", "list": "ArrowDown"}.get(control.kind, "ArrowUp")

    @staticmethod
    def _next_option(control: Control) -> int:
        return (control.options.index(control.chosen[-1]) + 1) % len(control.options) if control.chosen else 0

    def _locate(self, control: Control) -> "Locator":
        target = self.lab.page.locator(control.selector)
        self.lab.wait(target.scroll_into_view_if_needed(timeout=1000 * STEP_LIMIT_S), STEP_LIMIT_S)
        return target

    def _fraction(self, handle: "Locator") -> float:
        """Where on its track a slider's handle is: 0 at the left or the bottom, 1 at the other end."""
        knob, track = self._boxes(handle)
        if track["width"] > track["height"]:
            return (knob["x"] + knob["width"] / 2 - track["x"]) / track["width"]
        return 1 - (knob["y"] + knob["height"] / 2 - track["y"]) / track["height"]

    def _boxes(self, handle: "Locator") -> tuple[dict[str, float], dict[str, float]]:
        track = handle.locator("xpath=ancestor::*[contains(@class, 'noUi-target')]")
        return self.lab.wait(handle.bounding_box()), self.lab.wait(track.bounding_box())

    def drag(self, control: Control, where: float) -> None:
        """Drag a slider's handle to a place on its track, 0 to 1."""
        knob, track = self._boxes(self._locate(control))
        x, y = track["x"] + track["width"] / 2, track["y"] + track["height"] / 2
        if track["width"] > track["height"]:
            x = track["x"] + where * track["width"]
        else:
            y = track["y"] + (1 - where) * track["height"]
        mouse = self.lab.page.mouse
        self.lab.wait(mouse.move(knob["x"] + knob["width"] / 2, knob["y"] + knob["height"] / 2))
        self.lab.wait(mouse.down())
        self.lab.wait(mouse.move(x, y, steps=4))
        self.lab.wait(mouse.up())

    def choose(self, control: Control, option: str) -> None:
        """Choose an option of a dropdown."""
        self.lab.wait(self._locate(control).select_option(label=option))

    def until_text(self, pattern: str, limit_s: float = STEP_LIMIT_S) -> None:
        """Wait until what is written on it fits a (JavaScript) regular expression."""
        test = "([path, id, pattern]) => new RegExp(pattern).test(house.text(path, id))"
        self.lab.until(test, f"{pattern!r} in cell {self.cell}", [*self._where, pattern], limit_s)

    def next_picture_ms(self, press: Callable[[], None]) -> float:
        """Milliseconds from the key press that `press` makes to the new picture on the screen, by the page's clock."""
        self._ask("watchNextPicture")
        press()
        return self.lab.js("() => house.nextPicture")

    def screenshot(self, path: Path) -> None:
        """The widgets alone."""
        self.notebook.reveal(self.cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lab.wait(self.lab.page.mouse.move(0, 0))
        area = self.lab.page.locator(f".jp-Notebook [data-house^='{self.cell}-']").first
        outermost = area.locator("xpath=ancestor::*[contains(@class, 'jupyter-widgets')][last()]")
        self.pictures()
        self.lab.wait(outermost.screenshot(path=path), STEP_LIMIT_S)

    def _ask(self, what: str) -> Any:
        return self.lab.js(f"([path, id]) => house.{what}(path, id)", self._where)
