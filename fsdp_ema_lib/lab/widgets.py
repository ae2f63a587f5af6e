"""What the explorers share: controls over a picture that follows them, and a place where errors are shown and found."""

from __future__ import annotations

import contextlib
import io
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ipywidgets
import traitlets
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

CONTROL_WIDTH = "440px"


class ErrorBox(ipywidgets.Output):
    """Shows the error of a callback with its traceback, and keeps it in the widget state, where headless runs look.

    The front end itself would keep the old picture and say nothing.

    Example:
        >>> box = ErrorBox()
        >>> with contextlib.suppress(ZeroDivisionError), box.showing():
        ...     1 / 0
        >>> box.text
        'ZeroDivisionError: division by zero'
    """

    def show(self, error: BaseException) -> None:
        """Show this error in place of what was shown before."""
        self.outputs = (
            {
                "output_type": "error",
                "ename": type(error).__name__,
                "evalue": str(error),
                "traceback": "".join(traceback.format_exception(error)).splitlines(),
            },
        )

    def clear(self) -> None:
        """Show nothing."""
        self.outputs = ()

    @contextlib.contextmanager
    def showing(self) -> Iterator[None]:
        """Show what goes wrong inside the block, and raise it."""
        try:
            yield
        except Exception as error:
            self.show(error)
            raise

    @property
    def text(self) -> str:
        """The error in one line; empty if there is none."""
        return "; ".join(f"{output['ename']}: {output['evalue']}" for output in self.outputs)


class Explorer(ipywidgets.VBox):
    """Controls over a picture that is drawn anew when one of them changes, and an `ErrorBox` below.

    In the page the picture is an `img` of the class `NAME-picture`, and all of it lies in one of the class `NAME`.

    Args:
        name: what it is, in words joined by hyphens.
        controls: name to widget with a `value` and a description, in the order in which they stand.
        draw: gets the controls' values by name and returns the picture as PNG.
        alt: what the picture shows, for those who cannot see it.
        adjust: called with the name of the control that changed, before drawing, to bring the others in line with it.
            What it changes counts as the same move: the picture is drawn once.

    Raises:
        ValueError: a control has no description (it is named). Besides whatever `draw` raises for the first picture.

    Example:
        >>> from matplotlib.figure import Figure
        >>> size = ipywidgets.IntSlider(2, 1, 3, description="size")
        >>> explorer = Explorer("sizes", {"size": size}, lambda size: png(Figure((size, size))), alt="an empty square")
        >>> before = bytes(explorer.picture.value)
        >>> explorer.controls["size"].value = 3
        >>> bytes(explorer.picture.value) == before
        False
    """

    def __init__(
        self,
        name: str,
        controls: Mapping[str, Any],
        draw: Callable[..., bytes],
        *,
        alt: str,
        adjust: Callable[[str], None] = lambda changed: None,
    ) -> None:
        nameless = [key for key, control in controls.items() if not control.description]
        if nameless:
            raise ValueError(f"every control needs a description, these have none: {', '.join(nameless)}")
        self.controls = dict(controls)
        self.picture = picture(name, alt)
        self.errors = ErrorBox()
        self._draw, self._adjust, self._adjusting = draw, adjust, False
        super().__init__([panel(self.controls.values()), self.picture, self.errors])
        self.add_class(name)
        self.redraw()
        for key, control in self.controls.items():
            control.observe(lambda change, key=key: self._changed(key), names="value")

    def redraw(self) -> None:
        """Draw the picture for the controls as they stand; what goes wrong is shown until it goes well, and raised."""
        with self.errors.showing():
            self.picture.value = self._draw(**{key: control.value for key, control in self.controls.items()})
        self.errors.clear()

    def _changed(self, key: str) -> None:
        if self._adjusting:
            return
        self._adjusting = True
        try:
            with self.errors.showing():
                self._adjust(key)
        finally:
            self._adjusting = False
        self.redraw()


class Picture(ipywidgets.Image):
    """An image that can have a tooltip: the front end stops at one on a widget that has no description."""

    description = traitlets.Unicode("").tag(sync=True)


def picture(name: str, alt: str) -> Picture:
    """An empty PNG of the class `NAME-picture` that is never wider than the page; `alt` says what it will show."""
    image = Picture(format="png", tooltip=alt, layout=ipywidgets.Layout(max_width="100%"))
    # Else the front end stretches it to the height of its neighbors.
    image.layout.object_fit, image.layout.align_self = "contain", "flex-start"
    return image.add_class(f"{name}-picture")


def panel(controls: Any) -> ipywidgets.Box:
    """Controls side by side, as many as the page has room for, with their descriptions in line."""
    for control in controls:
        control.style.description_width = "120px"
        control.layout.width = CONTROL_WIDTH
    return ipywidgets.Box(list(controls), layout=ipywidgets.Layout(display="flex", flex_flow="row wrap"))


def png(figure: Figure) -> bytes:
    """A figure as PNG for the screen, whatever backend is in use."""
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, pil_kwargs={"compress_level": 1})
    return buffer.getvalue()
