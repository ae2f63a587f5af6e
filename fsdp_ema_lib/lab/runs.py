"""Run notebooks headless: each in a process of its own that can be ended, with a verdict that can be trusted.

papermill alone returns quietly where it should not: it only warns about an unknown parameter, its output says that all
is well after a timeout or a dead kernel, and an error inside a widget never surfaces. `run_notebook` closes these gaps.
"""

import contextlib
import getpass
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fsdp_ema_lib.directory_lock import DirectoryLock
from fsdp_ema_lib.lab import kernel_host, provenance
from fsdp_ema_lib.lab.notebooks import (
    METRICS_FILE,
    NotebookError,
    NotebookInfo,
    check_parameters,
    read_notebook,
    repo_root,
    write_whole,
)

RESULT_FILE = "result.json"
LOG_FILE = "run.log"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
STATUSES = ("passed", "failed", "timed out", "interrupted", "unfinished")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class RunResult:
    """What came of one run.

    Args:
        notebook: stem of the notebook.
        status: `passed`, `failed`, `timed out`, `interrupted`, or `unfinished` for a run that still goes on, or was
            killed before it could say how it ended.
        seconds: from the start of the process to its end.
        error: one line, empty if it passed.
        folder: where the executed notebook, figures, metrics and log are.
        parameters: what was passed, the runner's own `output_dir` left out.
        finished: when this was written; UTC, ISO 8601.
        traceback: of the cell that failed, empty if none did.
        settings: values of all parameters, the notebook's defaults among them.
        digests: of notebook, library and parameters; see `provenance.digests`.
        versions: of Python, torch and the library.
        commit: of the repository that the notebook lies in, with `-dirty` behind it; empty outside one.
    """

    notebook: str
    status: str
    seconds: float
    error: str
    folder: str
    parameters: dict[str, Any]
    finished: str
    traceback: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str = ""

    @property
    def passed(self) -> bool:
        """Whether every cell ran without an error, seen or hidden."""
        return self.status == "passed"

    @property
    def metrics(self) -> dict[str, Any]:
        """The `metrics.json` of this run, empty if it wrote none that can be read."""
        metrics = _read_json(Path(self.folder) / METRICS_FILE)
        return metrics if isinstance(metrics, dict) else {}

    @property
    def claims(self) -> dict[str, bool]:
        """The claims in the metrics of this run, empty if there are none."""
        claims = self.metrics.get("claims")
        return claims if isinstance(claims, dict) else {}


class Stop:
    """Tells runs in other threads to end: `set` it, and each ends what it started and returns as interrupted.

    Example:
        >>> with Stop() as stop:
        ...     stop.set()
        ...     stop.is_set
        True
    """

    def __init__(self) -> None:
        # The end of a pipe, which a run's selector can wait for together with its progress.
        self._reader, self._writer = os.pipe()
        self.is_set = False

    def fileno(self) -> int:
        """The descriptor that becomes readable when this is set."""
        return self._reader

    def set(self) -> None:
        """End the runs; a second call does nothing."""
        if not self.is_set:
            self.is_set = True
            os.close(self._writer)

    def __enter__(self) -> "Stop":
        return self

    def __exit__(self, *error: object) -> None:
        self.set()
        os.close(self._reader)


@dataclass(frozen=True)
class _Outcome:
    status: str
    error: str = ""
    traceback: str = ""


def run_notebook(
    info: NotebookInfo,
    parameters: Mapping[str, Any],
    folder: str | Path,
    *,
    cell_timeout: float = 600.0,
    timeout: float = 1800.0,
    on_progress: Progress | None = None,
    stop: Stop | None = None,
    environment: Mapping[str, str] | None = None,
) -> RunResult:
    """Execute a notebook in a process of its own and wait for it.

    What it puts into the directory for temporary files is removed with it, whatever way it ends: `TMPDIR` is one of the
    run's own.

    Args:
        info: from `inspect_notebook`.
        parameters: by name. `output_dir` is set by the runner, to `folder`.
        folder: gets the executed notebook under its own name, `run.log`, `result.json` and whatever the notebook
            writes. What an earlier run left there is removed first.
        cell_timeout: seconds that one cell may take, > 0.
        timeout: seconds that the whole run may take, > 0. Unlike the limit for a cell this one also ends a kernel that
            ignores interrupts.
        on_progress: called with (cells done, cells in all) after each cell.
        stop: ends the run from another thread.
        environment: variables that the kernel gets on top of this process's.

    Returns:
        The result, which also lies in `folder` as `result.json`. A notebook that fails is a result, not an exception;
        so is a full disk.

    Raises:
        NotebookError: no such notebook, an unknown parameter, a value of the wrong type, a limit that is not positive,
            or a folder that cannot be one or that another run writes to. Nothing was started.
        KeyboardInterrupt: as it came, after the run was ended and recorded as interrupted.
    """
    values = prepare(info, parameters, cell_timeout=cell_timeout, timeout=timeout)
    folder = Path(folder).resolve()
    check_folder(info, folder)
    lock = _claim(folder)
    try:
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
        record = _begin(info, values, folder)
        started = time.monotonic()
        # The record until there is a better one: an interrupt may come at any moment.
        outcome = _Outcome("interrupted", "ended before it was done")
        try:
            _clear(info, folder)
            _write(record)
            # A kernel that is killed clears nothing up. A short name: the paths of sockets are limited to 108 bytes.
            with tempfile.TemporaryDirectory(prefix="fsdp-ema-", ignore_cleanup_errors=True) as temporary:
                job["temporary"] = temporary
                outcome = _run_job(
                    job,
                    folder / LOG_FILE,
                    started + timeout,
                    on_progress or (lambda done, total: None),
                    stop,
                    {**_places(temporary), **(environment or {})},
                )
            if outcome.status == "passed":
                outcome = _with_hidden_errors(outcome, executed)
            if outcome.status == "timed out":
                outcome = _Outcome("timed out", f"ran longer than the limit of {timeout:g} s")
        except OSError as error:
            outcome = _Outcome("failed", f"{error.strerror}: {error.filename or folder}")
        finally:
            result = _finish(record, outcome, time.monotonic() - started)
        return result
    finally:
        lock.release()


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
    """Read what the last run left in a folder; None if there was none, or what it left cannot be read."""
    record = _read_json(Path(folder) / RESULT_FILE)
    if not isinstance(record, dict):
        return None
    known = {item.name for item in fields(RunResult)}
    try:
        return RunResult(**{name: value for name, value in record.items() if name in known}, folder=str(folder))
    except TypeError:  # something is missing
        return None


def hidden_errors(executed: str | Path) -> list[str]:
    """Errors that an executed notebook caught in its `Output` widgets, where papermill does not look."""
    return [f"{output['ename']}: {output['evalue']}" for output in _hidden(executed)]


def check_folder(info: NotebookInfo, folder: Path) -> None:
    """Refuse a folder that cannot take the results of a run; makes nothing.

    Raises:
        NotebookError: it, or one above it, is a file or cannot be written to; or the notebook itself lies there.
    """
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        raise NotebookError(f"{folder} cannot be a folder, because {existing} is a file; choose another output folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise NotebookError(f"{folder} cannot be written, because {existing} may not be; choose another output folder")
    if not info.path.is_file():
        raise NotebookError(f"{info.path}: no such notebook")
    if (folder / info.path.name).exists() and (folder / info.path.name).samefile(info.path):
        raise NotebookError(f"{folder} holds the notebook itself; choose another output folder")


def _claim(folder: Path) -> DirectoryLock:
    """Make the folder and keep other runners out of it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return DirectoryLock(folder)
    except RuntimeError as error:
        raise NotebookError(str(error)) from error
    except OSError as error:
        raise NotebookError(f"{folder} cannot be written: {error.strerror}") from error


def _begin(info: NotebookInfo, values: dict[str, Any], folder: Path) -> RunResult:
    """The record of a run that has not ended."""
    settings = provenance.settings_of(info, values)
    return RunResult(
        notebook=info.stem,
        status="unfinished",
        seconds=0.0,
        error="still runs, or was killed before it could say how it ended",
        folder=str(folder),
        parameters=values,
        finished=_now(),
        settings=settings,
        digests=provenance.digests(info, settings),
        versions=provenance.versions(),
        commit=provenance.commit(info.path.parent),
    )


def _clear(info: NotebookInfo, folder: Path) -> None:
    """Remove what an earlier run left: its figures and metrics must not pass for those of this one."""
    if (folder / RESULT_FILE).is_file():
        stale = [folder / name for name in (RESULT_FILE, LOG_FILE, METRICS_FILE, info.path.name, f"{info.stem}.html")]
        for path in (*stale, *folder.glob("*.png"), *folder.glob("*.svg")):
            path.unlink(missing_ok=True)


def _finish(record: RunResult, outcome: _Outcome, seconds: float) -> RunResult:
    result = replace(record, **asdict(outcome), seconds=round(seconds, 2), finished=_now())
    try:
        _write(result)
    except OSError as error:
        # On a full disk. The old record is in its place: unfinished, so the next sweep runs this again.
        complaint = f"its result could not be recorded: {error.strerror}: {error.filename}"
        result = replace(result, status="failed", error="; ".join(filter(None, (outcome.error, complaint))))
    return result


def _write(result: RunResult) -> None:
    record = {name: value for name, value in asdict(result).items() if name != "folder"}
    write_whole(Path(result.folder) / RESULT_FILE, json.dumps(record, indent=2) + "\n")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _hidden(executed: str | Path) -> list[dict[str, Any]]:
    widgets = read_notebook(executed).metadata.get("widgets", {}).get(WIDGET_STATE, {}).get("state", {})
    outputs = [output for widget in widgets.values() for output in widget.get("state", {}).get("outputs", ())]
    return [output for output in outputs if output.get("output_type") == "error"]


def _with_hidden_errors(outcome: _Outcome, executed: Path) -> _Outcome:
    if not (hidden := _hidden(executed)):
        return outcome
    lines = [line for output in hidden for line in output.get("traceback", ())]
    error = "an error hidden in a widget: " + "; ".join(hidden_errors(executed))
    return _Outcome("failed", error, kernel_host.ANSI.sub("", "\n".join(lines)))


def _places(temporary: str) -> dict[str, str]:
    """Variables that say where temporary files go."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid_{os.getuid()}"
    # Where torch.compile looks by itself: what one run compiled is there for the next, too.
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{user}")
    return {"TMPDIR": temporary, "TORCHINDUCTOR_CACHE_DIR": compiled}


def _run_job(
    job: dict[str, Any],
    log: Path,
    deadline: float,
    on_progress: Progress,
    stop: Stop | None,
    environment: Mapping[str, str],
) -> _Outcome:
    """Run one job; ends everything that it started, whatever happens."""
    mark = uuid.uuid4().hex
    reader, writer = os.pipe()
    try:
        with open(log, "wb") as log_file:
            host = subprocess.Popen(
                # -P: else the folder of the script would stand before the installed packages.
                [sys.executable, "-P", kernel_host.__file__],
                stdin=subprocess.PIPE,
                bufsize=0,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                pass_fds=(writer,),
                env={**kernel_host.marked_environment(mark), **environment},
                # Ctrl-C in a terminal reaches this process alone, which then ends the run in order.
                start_new_session=True,
            )
    except OSError:
        os.close(reader)
        raise
    finally:
        os.close(writer)
    error, traceback, total = "", "", 0
    try:
        # A host that died at once closes the pipe, and its exit status tells.
        with contextlib.suppress(BrokenPipeError):
            host.stdin.write((json.dumps({**job, "progress": writer}) + "\n").encode())
        for event in _events(reader, deadline, stop):
            total, error = event.get("total", total), event.get("error", error)
            traceback = event.get("traceback", traceback)
            if "done" in event:
                on_progress(event["done"], total)
        host.wait(max(0.0, deadline - time.monotonic()))
    except (TimeoutError, subprocess.TimeoutExpired):
        return _Outcome("timed out")
    except InterruptedError:
        return _Outcome("interrupted", "ended before it was done")
    finally:
        os.close(reader)
        kernel_host.end_marked(mark)
        host.stdin.close()
        host.wait()
    if host.returncode == 0:
        return _Outcome("passed")
    return _Outcome("failed", error or f"the process that ran it ended with status {host.returncode}", traceback)


def _events(reader: int, deadline: float, stop: Stop | None) -> Iterator[dict[str, Any]]:
    """Lines of JSON from a pipe until it is closed; TimeoutError at the deadline, InterruptedError when stopped."""
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        if stop is not None:
            selector.register(stop, selectors.EVENT_READ)
        while True:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError
            if stop is not None and stop.is_set:
                raise InterruptedError
            chunk = os.read(reader, 65536)
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            yield from map(json.loads, lines)
