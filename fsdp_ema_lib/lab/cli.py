"""The command line: `fsdp-ema list` and `fsdp-ema run`."""

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from fsdp_ema_lib.lab import offline_cli
from fsdp_ema_lib.lab.notebooks import (
    NotebookError,
    NotebookInfo,
    all_notebooks,
    find_notebook,
    inspect_notebook,
    parse_assignment,
    repo_root,
)
from fsdp_ema_lib.lab.runs import LOG_FILE, RunResult, load_result, prepare, run_notebook

FAILED, BAD_USAGE, INTERRUPTED = 1, 2, 130
_COLORS = {"passed": "green", "failed": "red", "timed out": "red", "interrupted": "yellow"}

app = typer.Typer(
    help="List and run the notebooks of fsdp_ema_lib; look into, check, export and compare checkpoints.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
offline_cli.register(app)

Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Folder that gets one folder per notebook.", show_default="outputs/"),
]


def _console() -> Console:
    # Not a terminal: wide enough that a row of the table stays one line in a log.
    return Console(width=None if sys.stdout.isatty() else 140)


def _animated() -> bool:
    return sys.stdout.isatty() and not os.environ.get("CI")


def _refuse(error: NotebookError) -> typer.Exit:
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(BAD_USAGE)


def _folder(info: NotebookInfo, output: Path | None) -> Path:
    return (output if output is not None else repo_root(info.path.parent) / "outputs") / info.stem


@app.command("list")
def list_notebooks(output: Output = None) -> None:
    """Show every notebook: its question, its parameters with their defaults, and how its last run ended."""
    try:
        infos = [inspect_notebook(path) for path in all_notebooks()]
    except NotebookError as error:
        raise _refuse(error) from error
    console = _console()
    for info in infos:
        console.print(f"[bold]{info.number}  {escape(info.title)}[/bold]  [dim]{escape(info.stem)}[/dim]")
        console.print(f"    {escape(info.question)}", highlight=False)
        takes = escape(info.takes.rstrip("."))
        console.print(f"    takes {takes}; last run: {_last(info, output)}", highlight=False)
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for parameter in (info.parameters or {}).values():
            table.add_row(
                "     ", parameter.name, escape(repr(parameter.default)), f"[dim]{escape(parameter.help)}[/dim]"
            )
        console.print(table)
        console.print()


def _last(info: NotebookInfo, output: Path | None) -> str:
    result = load_result(_folder(info, output))
    if result is None:
        return "never"
    return f"{_colored(result.status)} after {result.seconds:.1f} s, {result.finished}"


@app.command()
def run(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME ...]", help="Number (02), name or path of each notebook; all of them if none is given."
        ),
    ] = None,
    parameter: Annotated[
        list[str] | None, typer.Option("--parameter", "-p", metavar="NAME=VALUE", help="Set a parameter; repeatable.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="YAML file with a map of parameters; -p goes before it.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="The same as -p device=...")] = None,
    output: Output = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one notebook may take.")] = 1800.0,
    cell_timeout: Annotated[float, typer.Option(help="Seconds that one cell may take.")] = 600.0,
) -> None:
    """Run notebooks headless, one after another, each in a process of its own.

    Parameters go to every notebook that is named, and each must know them: otherwise nothing is started.
    Exit status: 0 all passed, 1 one failed, 2 wrong usage, 130 interrupted.
    """
    limits = {"timeout": timeout, "cell_timeout": cell_timeout}
    try:
        infos = [inspect_notebook(path) for path in _chosen(names)]
        jobs = _jobs(infos, _read_file(file) if file else {}, parameter or [], device, limits)
    except NotebookError as error:
        raise _refuse(error) from error
    results: list[RunResult] = []
    console, interrupted = _console(), False
    try:
        with _signals_as_interrupts(), _bars(console) as bars:
            for info, given in jobs:
                results.append(_run_one(bars, info, given, _folder(info, output), limits))
    except KeyboardInterrupt:
        interrupted = True
    except NotebookError as error:
        raise _refuse(error) from error
    console.print(_summary(results))
    if interrupted:
        console.print(f"interrupted; {len(jobs) - len(results)} of {len(jobs)} notebooks did not finish")
        raise typer.Exit(INTERRUPTED)
    if not all(result.passed for result in results):
        raise typer.Exit(FAILED)


def _chosen(names: list[str] | None) -> list[Path]:
    if not names:
        return all_notebooks()
    # Twice the same notebook would write to the same folder.
    return list(dict.fromkeys(find_notebook(name) for name in names))


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotebookError(f"-f {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise NotebookError(f"-f {path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise NotebookError(f"-f {path}: expected a map of parameter names to values, found {type(values).__name__}")
    return values


def _jobs(
    infos: list[NotebookInfo],
    from_file: Mapping[str, Any],
    assignments: list[str],
    device: str | None,
    limits: Mapping[str, float],
) -> list[tuple[NotebookInfo, dict[str, Any]]]:
    """Each notebook with its checked parameters; one error for all that refuse theirs."""
    jobs, complaints = [], []
    for info in infos:
        try:
            typed = dict(parse_assignment(info, text) for text in assignments)
            if device is not None and typed.setdefault("device", device) != device:
                raise NotebookError(f"--device {device} and -p device={typed['device']} contradict each other")
            jobs.append((info, prepare(info, {**from_file, **typed}, **limits)))
        except NotebookError as error:
            complaints.append(str(error))
    if complaints:
        raise NotebookError("\n".join(dict.fromkeys(complaints)))
    return jobs


@contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """Let a closed terminal or a polite kill end the run as Ctrl-C does, so that no kernel stays behind.

    Ctrl-C is among them because a shell starts its background jobs with that signal ignored.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _bars(console: Console) -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, disable=not _animated())


def _run_one(
    bars: Progress, info: NotebookInfo, given: dict[str, Any], folder: Path, limits: Mapping[str, float]
) -> RunResult:
    task = bars.add_task(info.stem, total=None)
    if not _animated():
        bars.console.print(f"{info.stem} ...")
    result = run_notebook(
        info, given, folder, **limits, on_progress=lambda done, total: bars.update(task, completed=done, total=total)
    )
    bars.stop_task(task)
    bars.update(task, description=f"{info.stem} {_colored(result.status)}")
    if not _animated():
        bars.console.print(f"{info.stem} {_colored(result.status)} after {result.seconds:.1f} s", highlight=False)
    if not result.passed:
        bars.console.print(f"  {result.error}\n  see {folder / LOG_FILE}", markup=False, highlight=False)
    return result


def _colored(status: str) -> str:
    return f"[{_COLORS[status]}]{status}[/]"


def _summary(results: list[RunResult]) -> Table:
    table = Table("notebook", "result", "seconds", "claims that hold", "results in")
    table.columns[2].justify = "right"
    for result in results:
        claims = result.claims
        held = f"{sum(claims.values())} of {len(claims)}" if claims else "-"
        place = Path(result.folder)
        place = place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place
        table.add_row(result.notebook, _colored(result.status), f"{result.seconds:.1f}", held, escape(str(place)))
    return table


if __name__ == "__main__":
    app()
