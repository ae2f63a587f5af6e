"""What every explorer owes, for the tests of each."""

import io

import ipywidgets
import matplotlib.pyplot as plt
import nbformat
import numpy as np
from ipywidgets.embed import dependency_state

from fsdp_ema_lib.lab.runs import WIDGET_STATE, hidden_errors


def move(control, value):
    """Set a control's value as the front end does: an error in a callback goes no further than the widget."""
    state = {"value": value}
    if isinstance(control, ipywidgets.Dropdown | ipywidgets.SelectionSlider):
        values = [option[1] if isinstance(option, tuple) else option for option in control.options]
        state = {"index": values.index(value)}
    control._handle_msg({"content": {"data": {"method": "update", "state": state}}, "buffers": []})


def press(button):
    """Press a button as the front end does."""
    button._handle_msg({"content": {"data": {"method": "custom", "content": {"event": "click"}}}, "buffers": []})


def errors_found_headless(explorer, folder):
    """What `runs.hidden_errors` reports of a notebook that was executed with this explorer in it."""
    state = {"state": dependency_state(explorer), "version_major": 2, "version_minor": 0}
    notebook = nbformat.v4.new_notebook(metadata={"widgets": {WIDGET_STATE: state}})
    nbformat.write(notebook, folder / "executed.ipynb")
    return hidden_errors(folder / "executed.ipynb")


def pixels(picture: ipywidgets.Image | bytes) -> np.ndarray:
    """The picture's pixels, shape (height, width, channels)."""
    return plt.imread(io.BytesIO(bytes(getattr(picture, "value", picture))))


def keyboard_controls(explorer):
    """Description to type of everything in the explorer that a person can operate."""
    found, todo = {}, [explorer]
    while todo:
        widget = todo.pop()
        todo += list(getattr(widget, "children", ()))
        # Other than a picture, a text or a bar of progress.
        if hasattr(widget, "disabled"):
            found[widget.description] = type(widget)
    return found
