"""Run notebooks headless: each in a process of its own that can be ended, with a verdict that can be trusted.

papermill alone returns quietly where it should not: it only warns about an unknown parameter, its output says that all
is well after a timeout or a dead kernel, and an error inside a widget never surfaces. `run_notebook` closes these gaps.
"""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fsdp_ema_lib.lab import kernel_host
from fsdp_ema_lib.lab.notebooks import (
    METRICS_FILE,
    NotebookError,
    NotebookInfo,
    check_parameters,
    read_notebook,
    repo_root,
)

RESULT_FILE = "result.json"
LOG_FILE = "run.log"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class RunResult:
    """What came of one run.

    Args:
        notebook: stem of the notebook.
        status: `passed`, `failed`, `timed out` or `interrupted`.
        seconds: from the start of the process to its end.
        error: one line, empty if it passed; the traceback is in the log.
        folder: where the executed notebook, figures, metrics and log are.
        parameters: what was passed, the runner's own `output_dir` left out.
        finished: UTC, ISO 8601.
    """

    notebook: str
    status: str
    seconds: float
    error: str
    folder: str
    parameters: dict[str, Any]
    finished: str

    @property
    def passed(self) -> bool:
        """Whether every cell ran without an error, seen or hidden."""
        return self.status == "passed"

    @property
    def claims(self) -> dict[str, bool]:
        """The claims in the `metrics.json` of this run, empty if it wrote none."""
        path = Path(self.folder) / METRICS_FILE
        return json.loads(path.read_text(encoding="utf-8"))["claims"] if path.is_file() else {}


def run_notebook(
    info: NotebookInfo,
    parameters: Mapping[str, Any],
    folder: str | Path,
    *,
    cell_timeout: float = 600.0,
    timeout: float = 1800.0,
    on_progress: Progress | None = None,
) -> RunResult:
    """Execute a notebook in a process of its own and wait for it.

    Args:
        info: from `inspect_notebook`.
        parameters: by name. `output_dir` is set by the runner, to `folder`.
        folder: gets the executed notebook under its own name, `run.log`, `result.json` and whatever the notebook
            writes. What an earlier run left there is removed first.
        cell_timeout: seconds that one cell may take, > 0.
        timeout: seconds that the whole run may take, > 0. Unlike the limit for a cell this one also ends a kernel that
            ignores interrupts.
        on_progress: called with (cells done, cells in all) after each cell.

    Returns:
        The result, which also lies in `folder` as `result.json`. A notebook that fails is a result, not an exception.

    Raises:
        NotebookError: an unknown parameter, a value of the wrong type, a limit that is not positive, or a folder that
            cannot be one. Nothing was started.
        KeyboardInterrupt: as it came, after the run was ended and recorded as interrupted.
    """
    values = prepare(info, parameters, cell_timeout=cell_timeout, timeout=timeout)
    folder = _fresh_folder(info, Path(folder).resolve())
    executed = folder / f"{info.stem}.ipynb"
    cwd = repo_root(info.path.parent)
    sent = dict(values)
    if "output_dir" in (info.parameters or {}):
        # Relative where it can be: for the usual folder the same value as the notebook's own default.
        sent["output_dir"] = str(folder.relative_to(cwd) if folder.is_relative_to(cwd) else folder)
    job = {
        "notebook": str(info.path),
        "executed": str(executed),
        "parameters": sent,
        "cwd": str(cwd),
        "cell_timeout": cell_timeout,
    }
    started = time.monotonic()
    # The record until there is a better one: a runner that is killed cannot write that it was.
    outcome = ("interrupted", "ended before it was done")
    try:
        outcome = _run_job(job, folder / LOG_FILE, started + timeout, on_progress or (lambda done, total: None))
        if outcome[0] == "passed" and (hidden := hidden_errors(executed)):
            outcome = ("failed", "an error hidden in a widget: " + "; ".join(hidden))
        if outcome[0] == "timed out":
            outcome = ("timed out", f"ran longer than the limit of {timeout:g} s")
    finally:
        result = RunResult(
            notebook=info.stem,
            status=outcome[0],
            seconds=round(time.monotonic() - started, 2),
            error=outcome[1],
            folder=str(folder),
            parameters=values,
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        record = {name: value for name, value in asdict(result).items() if name != "folder"}
        (folder / RESULT_FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return result


def prepare(
    info: NotebookInfo, parameters: Mapping[str, Any], *, cell_timeout: float, timeout: float
) -> dict[str, Any]:
    """Check all that `run_notebook` refuses without starting anything; returns the values in their right types.

    Raises:
        NotebookError: as `run_notebook` does.
    """
    for name, limit in (("cell_timeout", cell_timeout), ("timeout", timeout)):
        if not limit > 0:
            raise NotebookError(f"{name}: expected a number of seconds above 0, got {limit}")
    if "output_dir" in parameters:
        raise NotebookError(
            "output_dir: the runner sets it, to a folder named after the notebook; use --output instead"
        )
    return check_parameters(info, parameters)


def load_result(folder: str | Path) -> RunResult | None:
    """Read what the last run left in a folder; None if there was none."""
    path = Path(folder) / RESULT_FILE
    if not path.is_file():
        return None
    return RunResult(**json.loads(path.read_text(encoding="utf-8")), folder=str(folder))


def hidden_errors(executed: str | Path) -> list[str]:
    """Errors that an executed notebook caught in its `Output` widgets, where papermill does not look."""
    widgets = read_notebook(executed).metadata.get("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    outputs = [output for widget in widgets.values() for output in widget.get("state", {}).get("outputs", ())]
    return [f"{output['ename']}: {output['evalue']}" for output in outputs if output.get("output_type") == "error"]


def _fresh_folder(info: NotebookInfo, folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotebookError(f"{folder} cannot be a folder, because it or one above it is a file") from error
    if (folder / f"{info.stem}.ipynb").exists() and (folder / f"{info.stem}.ipynb").samefile(info.path):
        raise NotebookError(f"{folder} holds the notebook itself; choose another output folder")
    if (folder / RESULT_FILE).is_file():
        # Left by an earlier run. Its figures and metrics must not pass for those of this one.
        stale = [folder / name for name in (RESULT_FILE, LOG_FILE, METRICS_FILE, f"{info.stem}.ipynb")]
        for path in (*stale, *folder.glob("*.png")):
            path.unlink(missing_ok=True)
    return folder


def _run_job(job: dict[str, Any], log: Path, deadline: float, on_progress: Progress) -> tuple[str, str]:
    """Status and error of one job; ends everything that it started, whatever happens."""
    mark = uuid.uuid4().hex
    reader, writer = os.pipe()
    with open(log, "wb") as log_file:
        host = subprocess.Popen(
            # -P: else the folder of the script would stand before the installed packages.
            [sys.executable, "-P", kernel_host.__file__],
            stdin=subprocess.PIPE,
            bufsize=0,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            pass_fds=(writer,),
            env=kernel_host.marked_environment(mark),
            # Ctrl-C in a terminal reaches this process alone, which then ends the run in order.
            start_new_session=True,
        )
    os.close(writer)
    error, total = "", 0
    try:
        # A host that died at once closes the pipe, and its exit status tells.
        with contextlib.suppress(BrokenPipeError):
            host.stdin.write((json.dumps({**job, "progress": writer}) + "\n").encode())
        for event in _events(reader, deadline):
            total, error = event.get("total", total), event.get("error", error)
            if "done" in event:
                on_progress(event["done"], total)
        host.wait(max(0.0, deadline - time.monotonic()))
    except (TimeoutError, subprocess.TimeoutExpired):
        return "timed out", ""
    finally:
        os.close(reader)
        kernel_host.end_marked(mark)
        host.stdin.close()
        host.wait()
    if host.returncode == 0:
        return "passed", ""
    return "failed", error or f"the process that ran it ended with status {host.returncode}"


def _events(reader: int, deadline: float) -> Iterator[dict[str, Any]]:
    """Lines of JSON from a pipe until it is closed; TimeoutError at the deadline."""
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            chunk = os.read(reader, 65536)
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            yield from map(json.loads, lines)
