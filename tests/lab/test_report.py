import itertools
import json
import os
import re
import resource
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
from browser.chromium import NoBrowser, chromium_page
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from pages import Page
from PIL import Image
from typer.testing import CliRunner

from fsdp_ema_lib.lab import report, sweep_plots
from fsdp_ema_lib.lab.cli import app
from fsdp_ema_lib.lab.report import collect, numbers_of, thumbnail, write_report
from fsdp_ema_lib.lab.runs import RESULT_FILE
from fsdp_ema_lib.lab.sweep_plots import even_scale, metric_by_parameter

EVIL = "</script><script>alert(1)</script><img src=https://example.org/x onerror=alert(1)>$x$"


def leave_run(folder: Path, notebook: str = "04_x", status: str = "passed", values: object = None, **settings) -> Path:
    """Write what a run leaves in its folder."""
    folder.mkdir(parents=True)
    record = {
        "notebook": notebook,
        "status": status,
        "seconds": 61.25,
        "error": "" if status == "passed" else f"In [3]: ValueError: {EVIL}",
        "parameters": settings,
        "finished": "2030-01-02T03:04:05+00:00",
        "traceback": "" if status == "passed" else f"Traceback\nValueError: {EVIL}",
        # A notebook has its parameters in another order than the one they were given in.
        "settings": {"steps": 300, **dict(reversed(settings.items()))},
        "digests": {},
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "commit": "0123456789abcdef-dirty",
    }
    (folder / RESULT_FILE).write_text(json.dumps(record))
    if values is not None:
        claims = {"it is good": True, f"it is {EVIL}": False}
        (folder / "metrics.json").write_text(json.dumps({"claims": claims, "values": values, "at_defaults": False}))
    Image.new("RGB", (600, 400), "white").save(folder / "frechet.png")
    opening = new_markdown_cell("# 04 · A title\n\nIs it better? Yes.\n\n**Takes:** a minute.")
    output = new_output("stream", text=EVIL)
    nbformat.write(
        new_notebook(cells=[opening, new_code_cell("print(1)", outputs=[output])]), folder / f"{notebook}.ipynb"
    )
    return folder


def sweep(folder: Path) -> None:
    """Three decays with two seeds each, of which one failed."""
    for decay, seed in itertools.product((0.9, 0.99, 0.999), (0, 1)):
        failed = (decay, seed) == (0.99, 1)
        values = {
            "distance": {"average": 4 + decay + seed, "live": 9 + seed},
            "loss_last": 0.5 - seed,
            "same": 1,
            EVIL: decay,
        }
        leave_run(
            folder / f"decay={decay},seed={seed}",
            status="failed" if failed else "passed",
            values=None if failed else values,
            decay=decay,
            seed=seed,
        )


@pytest.fixture
def outputs(tmp_path) -> Path:
    folder = tmp_path / "outputs"
    sweep(folder / "sweeps" / "04_x")
    leave_run(folder / "05_y", notebook="05_y", values={"speed": 12345.678}, label=EVIL)
    return folder


def test_the_page_holds_every_run_and_loads_nothing_from_elsewhere(outputs):
    page = Page(write_report(outputs).read_text())
    assert page.from_elsewhere == []
    assert page.tags.count("script") == 2, "the bundle of itables and what starts it, and nothing that a run wrote"
    assert page.tags.count("table") == 3
    for decay, seed in itertools.product((0.9, 0.99, 0.999), (0, 1)):
        linked = unquote(page.links[f"decay={decay}, seed={seed}"])
        assert linked == f"sweeps/04_x/decay={decay},seed={seed}/04_x.html"
        assert (outputs / linked).is_file()
    assert unquote(page.links[f"label={EVIL}"]) == "05_y/05_y.html"
    for text in ("A title", "Is it better?", "7runs", "1failed", "6passed", "0123456789-dirty", "2030-01-02 03:04:05"):
        assert text in page.text, text
    assert f"ValueError: {EVIL}" in page.text, "the traceback, as text"
    assert f"label={EVIL}" in page.text
    assert "1.235e+04" in page.text


@pytest.mark.browser
def test_the_tables_come_alive_in_a_browser_without_a_network(outputs):
    asked_for = []
    try:
        with chromium_page() as (page, wait):
            page.on("request", lambda request: asked_for.append(request.url))
            wait(page.context.set_offline(True))
            wait(page.goto(write_report(outputs).as_uri()))
            wait(page.wait_for_selector('[data-ready="true"]', state="attached"))  # the script came to its end
            shown = wait(page.content())
    except NoBrowser as missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(missing))
    assert [url for url in asked_for if url.startswith("http")] == []
    text = Page(shown).text
    assert "Showing 1 to 7 of 7 entries" in text and "Showing 1 to 6 of 6 entries" in text
    assert shown.count('placeholder="folder"') == 1, "a field to filter by"


def test_the_notebooks_beside_the_page_load_nothing_and_are_written_once(outputs):
    write_report(outputs)
    pages = sorted(outputs.rglob("0?_?.html"))
    assert len(pages) == 7
    for path in pages:
        page = Page(path.read_text())
        assert page.from_elsewhere == [] and "script" not in page.tags
        assert EVIL in page.text
    pages[0].write_text("kept")
    os.utime(pages[1], ns=(0, 0))
    pages[1].write_text("old")
    os.utime(pages[1], ns=(0, 0))
    write_report(outputs)
    assert pages[0].read_text() == "kept" and pages[1].read_text() != "old"


def test_metrics_are_plotted_by_parameter_as_means_over_seeds(outputs, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        report, "metric_by_parameter", lambda *a, **k: drawn.append((a, k)) or metric_by_parameter(*a, **k)
    )
    text = write_report(outputs).read_text()
    plots = {keywords["metric"]: (lines, keywords) for (lines,), keywords in drawn}
    assert set(plots) == {"distance", "loss last", EVIL.replace("_", " ")}, "what is the same everywhere is not plotted"
    lines, keywords = plots["distance"]
    assert keywords == {"parameter": "decay", "metric": "distance", "averaged": True}
    # The run with decay 0.99 and seed 1 failed, so it has no point.
    assert lines["average"] == [(0.9, 4.9), (0.9, 5.9), (0.99, 4.99), (0.999, 4.999), (0.999, 5.999)]
    assert list(lines) == ["average", "live"]
    assert len(re.findall(r'<img src="data:image/svg\+xml', text)) == 3


def test_several_varied_parameters_give_a_line_for_each_combination(tmp_path, monkeypatch):
    for decay, rate in itertools.product((0.9, 0.99), (0.1, 0.2)):
        values = {"distance": {"average": decay + rate, "live": rate}}
        leave_run(tmp_path / f"{decay}-{rate}", values=values, decay=decay, rate=rate)
    found = report._plots(collect(tmp_path), ["decay", "rate"])[0]
    assert [plot["alt"] for plot in found] == [
        "distance: average by decay",
        "distance: average by rate",
        "distance: live by rate",
    ], "the live weights do not depend on the decay"


def test_the_line_of_a_plot_is_the_mean_and_the_points_are_the_runs():
    runs = {"average": [(0.9, 4.0), (0.9, 6.0), (0.99, 3.0), (0.999, 5.0)]}
    axes = metric_by_parameter(runs, parameter="decay", metric="$d$", averaged=True).axes[0]
    line, points = axes.get_lines()
    assert line.get_xydata().tolist() == [[0.9, 5.0], [0.99, 3.0], [0.999, 5.0]]
    assert points.get_xydata().tolist() == [[0.9, 4.0], [0.9, 6.0], [0.99, 3.0], [0.999, 5.0]]
    assert axes.get_xscale() == "logit"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0.9", "0.99", "0.999"]
    assert axes.get_ylabel() == r"\$d\$" and axes.get_xlabel() == "decay"


def test_a_metric_over_a_wide_range_has_plain_numbers_on_a_logarithmic_axis():
    wide = metric_by_parameter({"": [(0, 5.0), (1, 40.0)]}, parameter="x", metric="y", averaged=False).axes[0]
    assert wide.get_yscale() == "log" and wide.yaxis.get_major_formatter()(20.0) == "20"
    narrow = metric_by_parameter({"": [(0, 0.0), (1, 40.0)]}, parameter="x", metric="y", averaged=False).axes[0]
    assert narrow.get_yscale() == "linear"


def test_text_values_stand_side_by_side():
    runs = {"": [("fsdp2", 1.0), ("ddp", 2.0), ("fsdp2", 3.0)]}
    axes = metric_by_parameter(runs, parameter="wrapper", metric="m", averaged=False).axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["ddp", "fsdp2"]
    assert axes.get_lines()[0].get_xydata().tolist() == [[0.0, 2.0], [1.0, 2.0]]


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([0, 1, 2, 3], "linear"),
        ([1, 2, 4, 8], "log"),
        ([1e-4, 1e-3, 1e-2], "log"),
        ([0.9, 0.99, 0.999, 0.9999], "logit"),
        ([-1, 0, 5], "linear"),
        ([7], "linear"),
    ],
)
def test_numbers_stand_where_they_are_spread_evenly(values, scale):
    assert even_scale(values) == scale


def test_a_plot_of_too_many_lines_is_refused():
    with pytest.raises(ValueError, match="expected 1 to 7, got 8"):
        metric_by_parameter({str(n): [(0, 1.0)] for n in range(8)}, parameter="x", metric="y", averaged=False)
    assert len(set(sweep_plots.plots.series_colors([str(n) for n in range(7)]).values())) == 7


def test_damaged_leftovers_do_not_stop_the_report(tmp_path):
    run = leave_run(tmp_path / "a", status="unfinished", decay=0.9)
    (run / "04_x.ipynb").write_text('{"cells": [')
    (run / "frechet.png").write_bytes(b"\x89PNG cut short")
    (run / "metrics.json").write_text("[1")
    broken = leave_run(tmp_path / "b")
    (broken / RESULT_FILE).write_text("")
    page = Page(write_report(tmp_path).read_text())
    assert "1unfinished" in page.text and "a file that cannot be read" in page.text
    assert "decay=0.9" in page.text and "decay=0.9" not in page.links, "there is no notebook to show"
    assert thumbnail(run / "frechet.png") == ""


def test_thumbnails_are_small_and_keep_their_shape(tmp_path):
    Image.new("RGBA", (1200, 400)).save(tmp_path / "wide.png")
    data = thumbnail(tmp_path / "wide.png")
    assert data.startswith("data:image/webp;base64,") and len(data) < 5000


def test_numbers_are_picked_out_of_any_metrics():
    values = {"a": True, "b": 1, "c": {"x": 2.5, "y": "z", "n": None}, "d": {}, "e": [1], "f": float("nan")}
    assert numbers_of(values) == {"b": {"": 1.0}, "c": {"x": 2.5}}
    assert numbers_of(None) == numbers_of([1]) == {}


def test_runs_are_in_the_order_of_the_parameters_that_were_given(tmp_path):
    for decay, seed in ((0.99, 2), (0.9, 10), (0.9, 2)):
        leave_run(tmp_path / f"{decay}-{seed}", decay=decay, seed=seed)
    assert [run.name for run in collect(tmp_path)] == ["0.9-2", "0.9-10", "0.99-2"]


def test_a_log_stands_in_for_a_traceback_where_something_went_wrong(tmp_path):
    for status in ("timed out", "interrupted"):
        run = leave_run(tmp_path / status, status=status)
        record = json.loads((run / RESULT_FILE).read_text())
        (run / RESULT_FILE).write_text(json.dumps({**record, "traceback": ""}))
        (run / "run.log").write_text(f"the log of what {status}")
    text = Page(write_report(tmp_path).read_text()).text
    assert "the log of what timed out" in text and "the log of what interrupted" not in text


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["missing"], 2, "missing: no such folder"),
        (["."], 2, "no run in it. Run notebooks first: fsdp-ema run, or fsdp-ema sweep"),
        (["runs", "-o", "file/page.html"], 1, "the report cannot be written: Not a directory"),
    ],
)
def test_a_report_that_cannot_be_made_says_so(tmp_path, monkeypatch, arguments, code, error):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    if "runs" in arguments:
        leave_run(tmp_path / "runs" / "a")
    outcome = CliRunner().invoke(app, ["report", *arguments], catch_exceptions=False)
    assert outcome.exit_code == code
    assert error in outcome.stderr and "Traceback" not in outcome.output


def test_a_disk_too_full_for_the_report_leaves_the_old_one(tmp_path):
    leave_run(tmp_path / "a")
    page = write_report(tmp_path)
    before, limits = page.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700_000, limits[1]))
    try:
        outcome = CliRunner().invoke(app, ["report", str(tmp_path)], catch_exceptions=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert outcome.exit_code == 1
    assert f"error: the report cannot be written: File too large: {page}" in outcome.stderr
    assert page.read_bytes() == before and [path.name for path in tmp_path.iterdir() if path.is_file()] == [page.name]


def test_the_command_writes_the_page_and_says_where(outputs, monkeypatch):
    monkeypatch.chdir(outputs.parent)
    (outputs.parent / "pyproject.toml").touch()
    outcome = CliRunner().invoke(app, ["report"], catch_exceptions=False)
    assert outcome.exit_code == 0 and outcome.stdout.strip() == "outputs/report.html"
    elsewhere = CliRunner().invoke(app, ["report", "outputs/sweeps", "-o", "page.html"], catch_exceptions=False)
    assert elsewhere.stdout.strip() == "page.html"
    page = Page((outputs.parent / "page.html").read_text())
    assert (outputs.parent / unquote(page.links["decay=0.9, seed=0"])).is_file()
