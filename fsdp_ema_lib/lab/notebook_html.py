"""An executed notebook as one HTML page that opens offline and runs nothing.

nbconvert's own page loads MathJax, require.js and the widgets' code from the network, and hands on whatever HTML and
script the notebook's outputs hold. Here formulas are drawn by matplotlib, widgets are left out (their plain figures
stand beside them), HTML is cleaned, and a content security policy keeps the browser from loading or running anything.
"""

import base64
import copy
import html
import io
import re
from pathlib import Path
from typing import Any

import bleach
import matplotlib
import nbformat
from bleach.css_sanitizer import CSSSanitizer
from jinja2 import pass_context
from matplotlib.mathtext import math_to_image
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from traitlets.config import Config

from fsdp_ema_lib.lab.notebooks import read_notebook, write_whole

TEMPLATES = Path(__file__).with_name("templates")
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
INSTEAD_OF_A_WIDGET = "(A widget, which works in JupyterLab only.)"
# What is shown of an output that comes in several formats: the first of these.
_FORMATS = ["text/html", "text/markdown", "image/svg+xml", "image/png", "image/jpeg", "text/latex", "text/plain"]
_TAGS = set(bleach.ALLOWED_TAGS) | set(
    "br caption col colgroup dd del details div dl dt figcaption figure h1 h2 h3 h4 h5 h6 hr img p pre s small span "
    "sub summary sup table tbody td tfoot th thead tr u".split()
)
_ANYWHERE = {"class", "id", "style", "title", "colspan", "rowspan"}
_PROTOCOLS = {"http", "https", "mailto", "data"}
_STYLES = ["color", "font-weight", "height", "text-align", "vertical-align", "width"]
_CSS = CSSSanitizer(allowed_css_properties=_STYLES)


def write_html(executed: str | Path, target: str | Path) -> Path:
    """Write an executed notebook as one HTML page.

    Args:
        executed: the notebook; it stays as it is.
        target: the page; replaced as a whole.

    Raises:
        NotebookError: no readable notebook.
    """
    notebook = copy.deepcopy(read_notebook(executed))
    notebook.metadata.pop("widgets", None)
    notebook.metadata["title"] = Path(executed).stem
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if WIDGET_VIEW in output.get("data", {}):
                output.data = nbformat.NotebookNode({"text/plain": INSTEAD_OF_A_WIDGET})
    page, _ = OfflineExporter().from_notebook_node(notebook)
    return write_whole(Path(target), page)


class OfflineExporter(HTMLExporter):
    """nbconvert's HTML exporter with the template `offline`, cleaned HTML and formulas drawn by matplotlib."""

    def __init__(self) -> None:
        super().__init__(
            config=Config({"NbConvertBase": {"display_data_priority": _FORMATS}}),
            template_name="offline",
            extra_template_basedirs=[str(TEMPLATES)],
            sanitize_html=True,
            filters={"clean_html": clean},
        )

    @pass_context
    def markdown2html(self, context: Any, source: str) -> str:
        """Markdown to HTML; images attached to the cell are embedded, headings have no anchors."""
        attachments = context.get("cell", {}).get("attachments", {})
        return MarkdownWithMath(
            renderer=_Renderer(escape=False, attachments=attachments, exclude_anchor_links=True)
        ).render(source)


def clean(element: Any) -> str:
    """HTML without what could run or load something: only plain tags, and images that lie in the page itself.

    Example:
        >>> clean('<b>ok</b><script>alert(1)</script><img src="https://example.org/x.png" alt="x">')
        '<b>ok</b>&lt;script&gt;alert(1)&lt;/script&gt;<img alt="x">'
    """
    text = element.decode() if isinstance(element, bytes) else str(element)
    return bleach.clean(text, tags=_TAGS, attributes=_harmless, protocols=_PROTOCOLS, css_sanitizer=_CSS)


def _harmless(tag: str, name: str, value: str) -> bool:
    """Whether an attribute may stay: an image may be data and nothing else, a link anything but data."""
    data = value.strip().lower().startswith("data:")
    if (tag, name) in {("img", "src"), ("a", "href")}:
        return data == (tag == "img")
    return name in _ANYWHERE or (tag, name) == ("img", "alt")


class _Renderer(IPythonRenderer):
    """Markdown whose formulas are images."""

    def inline_math(self, body: str) -> str:
        return _drawn(body) or super().inline_math(body)

    def block_math(self, body: str) -> str:
        return f'<div style="text-align: center">{drawn}</div>' if (drawn := _drawn(body)) else super().block_math(body)


def _drawn(formula: str) -> str:
    """A formula as an image on the line of the text around it; empty where matplotlib cannot read its TeX."""
    picture = io.BytesIO()
    # What matplotlib spells otherwise.
    flat = re.sub(r"\\[lr]Vert\b", r"\\Vert", re.sub(r"\\sqrt (\w)", r"\\sqrt{\1}", " ".join(formula.split())))
    try:
        with matplotlib.rc_context({"svg.hashsalt": "formula", "mathtext.fontset": "cm"}):
            depth = math_to_image(f"${flat}$", picture, dpi=72, format="svg")
    except ValueError:
        return ""
    data = base64.b64encode(picture.getvalue()).decode()
    # 10 points in matplotlib's default size; the text around it is 14 pixels.
    return (
        f'<img src="data:image/svg+xml;base64,{data}" alt="{html.escape(formula)}" '
        f'style="vertical-align: -{depth * 1.4:.1f}px">'
    )
