import base64
import io

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from pages import Page
from PIL import Image

from fsdp_ema_lib.lab.notebook_html import INSTEAD_OF_A_WIDGET, WIDGET_VIEW, clean, write_html
from fsdp_ema_lib.lab.notebooks import NotebookError

PROSE = r"""# 09 · A title

Half is gone after $\ln 0.5 / \ln d$ updates, at a distance $\lVert \bar\theta - \theta \rVert$.

$$\sqrt{\frac{1 - d}{1 + d}}$$

It costs $\nosuchmacro{1}$. ![far away](https://example.org/far.png) [a link](https://example.org/page)

| a | b |
| - | - |
| 1 | 2 |

<script>alert("prose")</script><img src="x" onerror="alert(1)">
"""


@pytest.fixture
def page(tmp_path) -> Page:
    """The page of a notebook that has everything in it that could do harm."""
    picture = io.BytesIO()
    Image.new("RGB", (8, 8)).save(picture, "PNG")
    png = base64.b64encode(picture.getvalue()).decode()
    outputs = [
        new_output("stream", text="<script>alert('stream')</script> \x1b[31mred\x1b[0m"),
        new_output("display_data", {"text/html": '<b>bold</b><script src="https://example.org/x.js"></script>'}),
        new_output("display_data", {"text/html": '<iframe src="https://example.org"></iframe>'}),
        new_output("display_data", {"application/javascript": "alert('js')", "text/plain": "plain instead"}),
        new_output("display_data", {WIDGET_VIEW: {"model_id": "1"}, "text/plain": "interactive(...)"}),
        new_output("display_data", {"image/png": png, "text/plain": "<Figure>"}),
        new_output("error", ename="ValueError", evalue="<i>no</i>", traceback=["\x1b[31mValueError\x1b[0m: <i>no</i>"]),
    ]
    cells = [new_markdown_cell(PROSE), new_code_cell("print('<b>code</b>')", outputs=outputs, execution_count=1)]
    state = {"application/vnd.jupyter.widget-state+json": {"state": {"1": {"secret": "x" * 1000}}}}
    notebook = new_notebook(cells=cells, metadata={"widgets": state, "language_info": {"name": "python"}})
    nbformat.write(notebook, tmp_path / "09_x.ipynb")
    before = (tmp_path / "09_x.ipynb").read_bytes()
    write_html(tmp_path / "09_x.ipynb", tmp_path / "09_x.html")
    assert (tmp_path / "09_x.ipynb").read_bytes() == before
    return Page((tmp_path / "09_x.html").read_text())


def test_a_page_loads_and_runs_nothing(page):
    assert page.from_elsewhere == []
    assert not {"script", "iframe", "link", "object", "embed"} & set(page.tags)
    assert page.links["a link"] == "https://example.org/page", "a link is followed by a reader only"


def test_a_page_shows_what_the_notebook_shows(page):
    assert {"h1", "table", "th", "b"} <= set(page.tags)
    for text in (
        "09 · A title",
        "<script>alert('stream')</script> red",
        "plain instead",
        INSTEAD_OF_A_WIDGET,
        "ValueError: <i>no</i>",
        "print('<b>code</b>')",
    ):
        assert text in page.text, text
    assert "interactive(...)" not in page.text and "xxxxx" not in page.text
    assert sum(load.startswith("data:image/png") for load in page.loads) >= 1


def test_formulas_are_drawn_and_what_cannot_be_drawn_stays_text(page):
    assert page.tags.count("img") >= 3 + 1 + 2, "three formulas, the figure, and two images without their source"
    assert r"\ln" not in page.text and r"\frac" not in page.text and r"\lVert" not in page.text
    assert r"$\nosuchmacro{1}$" in page.text


@pytest.mark.parametrize(
    ("dirty", "cleaned"),
    [
        ('<a href="javascript:alert(1)">x</a>', "<a>x</a>"),
        ('<a href="data:text/html,x">x</a>', "<a>x</a>"),
        ('<img src=" https://example.org/x.png">', "<img>"),
        ('<p style="background: url(https://example.org/x.png); color: red" onclick="x()">x</p>', None),
        (
            "<style>@import 'https://example.org/x.css'</style>",
            "&lt;style&gt;@import 'https://example.org/x.css'&lt;/style&gt;",
        ),
    ],
)
def test_html_that_could_do_harm_is_cleaned(dirty, cleaned):
    assert clean(dirty) == (cleaned or '<p style="color: red;">x</p>')


def test_a_damaged_notebook_is_named(tmp_path):
    (tmp_path / "x.ipynb").write_text('{"cells": [')
    with pytest.raises(NotebookError, match=r"x.ipynb: not a notebook"):
        write_html(tmp_path / "x.ipynb", tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()
