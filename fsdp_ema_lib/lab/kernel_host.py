"""The process that hosts one notebook's kernel, and the end of everything it started.

`runs.run_notebook` starts this file as a script, not as a module of the package: importing the package would load torch
into a process that only passes messages. The job comes as one line of JSON on standard input, progress goes out as
lines of JSON on the file descriptor that the job names, and the exit status is the verdict. When standard input closes,
the process that asked for the run is gone, and this one takes its kernel down with it.
"""

import json
import math
import os
import re
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import psutil

MARK = "FSDP_EMA_RUN"
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def marked_environment(mark: str) -> dict[str, str]:
    """Copy of this process's environment that marks whatever inherits it as part of the run `mark`.

    A run inside a run keeps the outer mark too, so that ending the outer one ends both.
    """
    environment = {**os.environ, MARK: f"{os.environ.get(MARK, '')}:{mark}"}
    # A kernel's own backend, inherited by way of a terminal in JupyterLab, would stop plain Python processes.
    environment.pop("MPLBACKEND", None)
    # The kernel that belongs to this interpreter, not one of that name in the user's home.
    environment["JUPYTER_PREFER_ENV_PATH"] = "1"
    return environment


def marked_processes(mark: str) -> list[psutil.Process]:
    """Processes that carry the mark in their environment, other than this one.

    Kernels and cluster engines start sessions of their own and outlive their parents, so neither a process group nor a
    walk down the tree of children finds them all.
    """
    return [
        process
        for process in psutil.process_iter(["environ"])
        if process.pid != os.getpid() and mark in (process.info["environ"] or {}).get(MARK, "")
    ]


def end_marked(mark: str) -> None:
    """End all processes of a run: ask them, and two seconds later kill those that did not listen."""
    alive = marked_processes(mark)
    while alive:
        _signal(alive, signal.SIGTERM)
        stubborn = _wait_for_end(alive, 2.0)
        _signal(stubborn, signal.SIGKILL)
        _wait_for_end(stubborn, 5.0)
        # What they started meanwhile. A process that even SIGKILL does not end now (in a driver's call) is left.
        alive = [process for process in marked_processes(mark) if process not in stubborn]


def _wait_for_end(processes: list[psutil.Process], limit_s: float) -> list[psutil.Process]:
    """Those that are still running after `limit_s`; earlier, as soon as there are none."""
    deadline = time.monotonic() + limit_s
    while (running := [p for p in processes if is_running(p)]) and time.monotonic() < deadline:
        psutil.wait_procs(running, timeout=0.05)
    return running


def is_running(process: psutil.Process) -> bool:
    """Whether it has not ended. psutil counts one that its parent has not asked after yet, which may take long."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _die_with_the_caller(mark: str, temporary: str) -> None:
    """Wait for the end of standard input, which comes when the caller is gone, killed included; do what it would."""
    # Not through sys.stdin: the interpreter aborts at its end when a thread holds the lock of that object.
    while os.read(0, 4096):
        pass
    end_marked(mark)
    shutil.rmtree(temporary, ignore_errors=True)
    os._exit(1)


def _execute(job: dict[str, Any], report: Callable[..., None]) -> None:
    """Run the notebook, reporting each cell; raises what went wrong."""
    # Most of the time that importing papermill takes, and used by nothing here: see `light_nbformat`.
    sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]
    from papermill.engines import NBClientEngine, papermill_engines
    from papermill.execute import execute_notebook

    class ReportingEngine(NBClientEngine):
        @classmethod
        def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **options: Any) -> Any:
            report(total=len(nb_man.nb.cells))
            cell_complete = nb_man.cell_complete

            def complete_and_report(cell: Any, cell_index: int | None = None, **rest: Any) -> None:
                cell_complete(cell, cell_index=cell_index, **rest)
                report(done=(cell_index or 0) + 1)

            nb_man.cell_complete = complete_and_report
            return super().execute_managed_notebook(nb_man, kernel_name, **options)

    papermill_engines.register("reporting", ReportingEngine)
    notebook = execute_notebook(
        # papermill reads braces in paths as templates.
        job["notebook"].replace("{", "{{").replace("}", "}}"),
        job["executed"].replace("{", "{{").replace("}", "}}"),
        parameters=job["parameters"],
        engine_name="reporting",
        kernel_name="python3",
        language="python",
        progress_bar=False,
        cwd=job["cwd"],
        execution_timeout=math.ceil(job["cell_timeout"]),  # nbclient takes whole seconds
    )
    # papermill counts exit(0) in a cell as success and skips the rest.
    for number, cell in enumerate(notebook.cells, start=1):
        if cell.cell_type == "code" and cell.source.strip() and cell.execution_count is None:
            raise RuntimeError(f"cell {number} did not run: an earlier cell ended the kernel")


def _brief(error: BaseException, job: dict[str, Any]) -> str:
    """One line for the summary; the traceback is in the log."""
    name = type(error).__name__
    if name == "PapermillExecutionError":
        return f"In [{error.exec_count}]: {error.ename}: {error.evalue}"  # type: ignore[attr-defined]
    if name == "CellTimeoutError":
        return f"a cell ran longer than the limit of {job['cell_timeout']:g} s for one cell"
    if name == "DeadKernelError":
        return "the kernel died"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename or job['executed']}"
    return f"{name}: {error}"


def _traceback(error: BaseException) -> str:
    """The traceback of the cell that failed, else of what went wrong outside the cells, without colours."""
    if type(error).__name__ in ("CellTimeoutError", "DeadKernelError"):
        return str(error)  # where papermill noticed it tells nothing
    lines = getattr(error, "traceback", None) or traceback.format_exception(error)
    return ANSI.sub("", "\n".join(line.rstrip("\n") for line in lines))


def _run(job: dict[str, Any]) -> int:
    with open(job["progress"], "w", buffering=1, encoding="utf-8") as progress:

        def report(**event: Any) -> None:
            print(json.dumps(event), file=progress)

        try:
            _execute(job, report)
        except Exception as error:
            # Before the log: the disk that the log is on may be what is full.
            report(error=_brief(error, job), traceback=_traceback(error))
            traceback.print_exc()
            return 1
    return 0


def main() -> int:
    """Run the job on standard input; the exit status is 0 only if every cell ran without an error."""
    with open(0, "rb", buffering=0, closefd=False) as unbuffered:
        job = json.loads(unbuffered.readline())
    mark = os.environ[MARK].rsplit(":", 1)[-1]
    watch = threading.Thread(target=_die_with_the_caller, args=(mark, job["temporary"]), daemon=True)
    watch.start()
    try:
        return _run(job)
    finally:
        if select.select([0], [], [], 0)[0]:
            # Closed: the caller was killed. The other thread clears up, then ends this process; it may still be at it.
            watch.join()


if __name__ == "__main__":
    sys.exit(main())
