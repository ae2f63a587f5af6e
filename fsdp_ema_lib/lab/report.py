"""One page over all runs in a folder: tables that sort and filter, plots, thumbnails, failures.

The page holds everything that it shows, and loads nothing: it opens offline. It links to the executed notebooks, which
`notebook_html` writes as pages beside them. What notebooks print or write is untrusted text here: Jinja2 escapes it,
and the page's content security policy lets nothing be loaded.
"""

import base64
import io
import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import itables.options
import matplotlib
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure
from PIL import Image

from fsdp_ema_lib.lab.notebook_html import TEMPLATES, write_html
from fsdp_ema_lib.lab.notebooks import NotebookError, inspect_notebook, write_whole
from fsdp_ema_lib.lab.runs import LOG_FILE, RESULT_FILE, RunResult, load_result
from fsdp_ema_lib.lab.sweep_plots import MOST_LINES, means, metric_by_parameter

REPORT_FILE = "report.html"
THUMBNAIL = (300, 200)  # pixels, at most
MOST_PLOTS = 24  # of one notebook
LOG_TAIL = 4000  # characters of the log that are shown where there is no traceback
# Averaged over rather than told apart: runs that differ in it alone are repetitions.
REPETITION = "seed"


@dataclass(frozen=True)
class Run:
    """One run as the page shows it.

    Args:
        result: its record.
        name: its folder, relative to the folder of all.
        numbers: every finite number among its metrics, by name and, for a map of numbers, by its key.
        figures: its PNG files, by name.
    """

    result: RunResult
    name: str
    numbers: dict[str, dict[str, float]]
    figures: list[Path]


def write_report(
    folder: str | Path, output: str | Path | None = None, on_progress: Callable[[int, int], None] | None = None
) -> Path:
    """Write one HTML page over all runs below a folder, and each executed notebook as a page beside itself.

    Args:
        folder: searched for runs, at any depth.
        output: the page; `report.html` in `folder` by default. Its links lead to the runs as seen from there.
        on_progress: called with (notebooks written, notebooks in all).

    Returns:
        The absolute path of the page.

    Raises:
        NotebookError: there is no such folder, or no run in it.
        OSError: the page cannot be written.
    """
    folder = Path(folder).resolve()
    output = folder / REPORT_FILE if output is None else Path(output).resolve()
    runs = collect(folder)
    pages: dict[str, Path | None] = {}
    for number, run in enumerate(runs, start=1):
        pages[run.name] = _page_of(run)
        if on_progress is not None:
            on_progress(number, len(runs))
    links = {name: _link(page, output.parent) for name, page in pages.items() if page is not None}
    text = _render(folder, runs, links, output.parent)
    return write_whole(output, text)


def collect(folder: Path) -> list[Run]:
    """Read every run below a folder, in the order of notebooks and parameters.

    Raises:
        NotebookError: there is no such folder, or no run in it.
    """
    if not folder.is_dir():
        raise NotebookError(f"{folder}: no such folder")
    runs = []
    for path in sorted(folder.rglob(RESULT_FILE)):
        result = load_result(path.parent)
        if result is not None:
            name = path.parent.relative_to(folder).as_posix()
            numbers = numbers_of(result.metrics.get("values"))
            runs.append(Run(result, name, numbers, sorted(path.parent.glob("*.png"))))
    if not runs:
        raise NotebookError(f"{folder}: no run in it. Run notebooks first: fsdp-ema run, or fsdp-ema sweep")
    return sorted(runs, key=lambda run: (run.result.notebook, run.name.count("/"), _sortable(_ordered(run.result))))


def numbers_of(values: Any) -> dict[str, dict[str, float]]:
    """Pick the numbers out of a run's metrics: those by themselves, and those of maps of numbers.

    Example:
        >>> numbers_of({"loss": 0.5, "best": "live", "frechet": {"live": 9, "EMA": 4.0}, "curve": [1, 2]})
        {'loss': {'': 0.5}, 'frechet': {'live': 9.0, 'EMA': 4.0}}
    """
    found = {}
    for name, value in values.items() if isinstance(values, Mapping) else ():
        items = value if isinstance(value, Mapping) else {"": value}
        if numbers := {str(key): float(item) for key, item in items.items() if _is_number(item)}:
            found[str(name)] = numbers
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _ordered(result: RunResult) -> dict[str, Any]:
    """All parameters, those that were given first, in the order in which they were."""
    return {**result.parameters, **result.settings}


def _sortable(settings: Mapping[str, Any]) -> list[tuple[bool, float, str]]:
    """A key that puts numbers in their order, whatever the other values are."""
    return [
        (not _is_number(value), float(value) if _is_number(value) else 0.0, str(value)) for value in settings.values()
    ]


def _page_of(run: Run) -> Path | None:
    """The executed notebook as a page, written anew if it is older than the notebook; None if it cannot be read."""
    executed = Path(run.result.folder) / f"{run.result.notebook}.ipynb"
    page = executed.with_suffix(".html")
    try:
        if page.is_file() and page.stat().st_mtime_ns >= executed.stat().st_mtime_ns:
            return page
        return write_html(executed, page)
    except (NotebookError, FileNotFoundError):  # cut short by a full disk, or never written
        return None


def _link(path: Path, start: Path) -> str:
    return quote(Path(os.path.relpath(path, start)).as_posix())


# --- the page -----------------------------------------------------------------------------------------------------


def _render(folder: Path, runs: list[Run], links: Mapping[str, str], start: Path) -> str:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    bundle = Path(itables.options.dt_bundle)
    sections = [_section(stem, list(group), links, start) for stem, group in itertools.groupby(runs, _notebook)]
    return environment.get_template("report.html.j2").render(
        folder=folder.name,
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        counts=Counter(run.result.status for run in runs),
        seconds=_duration(sum(run.result.seconds for run in runs)),
        versions=sorted({_versions(run.result) for run in runs}),
        commits=sorted({_commit(run.result) for run in runs}),
        runs=[_row(run, links) for run in runs],
        failures=[_failure(run, links) for run in runs if not run.result.passed],
        sections=sections,
        bundle=base64.b64encode(bundle.read_bytes()).decode(),
        css=bundle.with_suffix(".css").read_text(encoding="utf-8"),
    )


def _notebook(run: Run) -> str:
    return run.result.notebook


def _row(run: Run, links: Mapping[str, str]) -> dict[str, Any]:
    result = run.result
    return {
        "name": run.name,
        "link": links.get(run.name, ""),
        "notebook": result.notebook,
        "status": result.status,
        "held": sum(map(bool, result.claims.values())),
        "claims": len(result.claims),
        "broken": [claim for claim, holds in result.claims.items() if not holds],
        "parameters": _assignments(result.parameters),
        "seconds": result.seconds,
        "finished": result.finished[:19].replace("T", " "),
        "commit": _commit(result),
        "versions": _versions(result),
    }


def _failure(run: Run, links: Mapping[str, str]) -> dict[str, Any]:
    result, tail = run.result, ""
    log = Path(result.folder) / LOG_FILE
    if result.status in ("failed", "timed out") and log.is_file():
        tail = log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:].strip()
    return {**_row(run, links), "error": result.error, "traceback": result.traceback or tail}


def _section(stem: str, runs: list[Run], links: Mapping[str, str], start: Path) -> dict[str, Any]:
    """What the page says of one notebook."""
    varied = _varied(runs)
    passed = [run for run in runs if run.result.passed]
    title, question = _opening(runs)
    plots, left_out = _plots(passed, varied)
    columns = _columns(passed)
    return {
        "stem": stem,
        "title": title,
        "question": question,
        "count": len(runs),
        "varied": varied,
        "columns": [_label(name, key) for name, key in columns],
        "rows": [
            {
                **_row(run, links),
                "settings": [_shown(run.result.settings.get(name)) for name in varied],
                "numbers": [run.numbers.get(name, {}).get(key) for name, key in columns],
            }
            for run in runs
        ],
        "plots": plots,
        "left_out": left_out,
        "figures": _gallery(runs, varied, start),
    }


def _opening(runs: Iterable[Run]) -> tuple[str, str]:
    """Title and question, from the first executed notebook that can be read."""
    for run in runs:
        try:
            info = inspect_notebook(Path(run.result.folder) / f"{run.result.notebook}.ipynb")
        except NotebookError:
            continue
        return info.title, info.question
    return "", ""


def _varied(runs: Sequence[Run]) -> list[str]:
    """Parameters that differ between the runs."""
    names = dict.fromkeys(name for run in runs for name in _ordered(run.result))
    return [name for name in names if len({_shown(run.result.settings.get(name)) for run in runs}) > 1]


def _columns(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Metrics to show in a table: all of a single run, of several those that differ between them."""
    names = dict.fromkeys((name, key) for run in runs for name, numbers in run.numbers.items() for key in numbers)
    if len(runs) < 2:
        return list(names)
    return [(name, key) for name, key in names if len({run.numbers.get(name, {}).get(key) for run in runs}) > 1]


def _gallery(runs: Sequence[Run], varied: Sequence[str], start: Path) -> list[dict[str, Any]]:
    """Thumbnails, figure by figure, so that the same figure of all runs stands side by side."""
    stems = dict.fromkeys(path.stem for run in runs for path in run.figures)
    return [
        {
            "name": stem.replace("_", " "),
            "thumbnails": [
                {
                    "link": _link(path, start),
                    "image": thumbnail(path),
                    "caption": _assignments({name: run.result.settings.get(name) for name in varied}) or run.name,
                    "status": run.result.status,
                }
                for run in runs
                for path in run.figures
                if path.stem == stem
            ],
        }
        for stem in stems
    ]


def thumbnail(path: Path) -> str:
    """A small copy of an image as a data URI; empty if it cannot be read, as after a run that was killed."""
    data = io.BytesIO()
    try:
        with Image.open(path) as image:
            small = image.convert("RGB")
            small.thumbnail(THUMBNAIL)
            small.save(data, "WEBP", quality=80)
    except (OSError, SyntaxError):
        return ""
    return "data:image/webp;base64," + base64.b64encode(data.getvalue()).decode()


# --- plots --------------------------------------------------------------------------------------------------------


def _plots(runs: Sequence[Run], varied: Sequence[str]) -> tuple[list[dict[str, str]], int]:
    """Every metric by every parameter that was varied, as images, and how many had no room."""
    parameters = [name for name in varied if name != REPETITION] or list(varied)
    wanted = [
        (parameter, metric, lines)
        for parameter in parameters
        for metric in dict.fromkeys(name for run in runs for name in run.numbers)
        for metric, lines in _lines(runs, parameter, [name for name in parameters if name != parameter], metric)
    ]
    averaged = REPETITION in varied and parameters != [REPETITION]
    drawn = [
        {
            "alt": f"{metric} by {parameter}",
            "image": _svg(metric_by_parameter(lines, parameter=parameter, metric=metric, averaged=averaged)),
        }
        for parameter, metric, lines in wanted[:MOST_PLOTS]
    ]
    return drawn, len(wanted) - len(drawn)


def _lines(
    runs: Sequence[Run], parameter: str, others: Sequence[str], metric: str
) -> list[tuple[str, dict[str, list[tuple[Any, float]]]]]:
    """Plots of one metric by one parameter: (what is measured, points by line).

    Where the runs differ in this parameter alone, the entries of a metric that is a map are the lines of one plot.
    Where they differ in others too, each combination of those is a line, and each entry has a plot of its own.
    """
    points: dict[tuple[str, str], list[tuple[Any, float]]] = {}
    for run in runs:
        settings = run.result.settings
        group = _assignments({name: settings.get(name) for name in others})
        for key, value in run.numbers.get(metric, {}).items():
            points.setdefault((key, group), []).append((_place(settings.get(parameter)), value))
    plots: dict[str, dict[str, list[tuple[Any, float]]]] = {}
    for (key, group), values in points.items():
        title = _label(metric, key) if others else _label(metric, "")
        plots.setdefault(title, {})[group if others else key] = _alike(values)
    # What only the seed moves lies at the same height everywhere: there is nothing to see.
    return [
        (title, dict(list(lines.items())[:MOST_LINES]))
        for title, lines in plots.items()
        if any(len(set(means(points).values())) > 1 for points in lines.values())
    ]


def _place(value: Any) -> Any:
    """A value as a place on an axis: numbers as they are, everything else as text."""
    return value if _is_number(value) else _shown(value)


def _alike(values: list[tuple[Any, float]]) -> list[tuple[Any, float]]:
    return values if all(_is_number(x) for x, _ in values) else [(str(x), y) for x, y in values]


def _svg(figure: Figure) -> str:
    data = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "report"}):
        figure.savefig(data, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(data.getvalue()).decode()


# --- words --------------------------------------------------------------------------------------------------------


def _label(name: str, key: str) -> str:
    return name.replace("_", " ") + (f": {key}" if key else "")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _assignments(parameters: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_shown(value)}" for name, value in parameters.items())


def _versions(result: RunResult) -> str:
    return ", ".join(f"{name} {version}" for name, version in result.versions.items()) or "unknown versions"


def _commit(result: RunResult) -> str:
    commit, _, dirty = result.commit.partition("-")
    return commit[:10] + (f"-{dirty}" if dirty else "")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
