"""The command line's view of runs: `fsdp-ema run` and `fsdp-ema sweep`."""

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from fsdp_ema_lib.lab.notebooks import (
    NotebookError,
    NotebookInfo,
    all_notebooks,
    find_notebook,
    inspect_notebook,
    load_yaml,
    parse_assignment,
    ranks_assignment,
    repo_root,
)
from fsdp_ema_lib.lab.runs import LOG_FILE, RunResult, prepare
from fsdp_ema_lib.lab.sweeps import Job, finished, parse_values, plan_sweep, run_jobs, why_again

FAILED, BAD_USAGE, INTERRUPTED = 1, 2, 130
_COLORS = {"passed": "green", "failed": "red", "timed out": "red", "interrupted": "yellow", "unfinished": "yellow"}

Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Folder that gets one folder per notebook.", show_default="outputs/"),
]
File = Annotated[Path | None, typer.Option("--file", "-f", help="YAML file with a map of parameters; -p goes before.")]
Jobs = Annotated[int, typer.Option("--jobs", "-j", metavar="N", help="Runs at a time; they share the CPU cores.")]
Timeout = Annotated[float, typer.Option(help="Seconds that one run may take.")]
CellTimeout = Annotated[float, typer.Option(help="Seconds that one cell may take.")]
RANKS = "Ranks that a notebook starts: the same as -p ranks=, world_size= or world_sizes=, whichever it takes."


def register(app: typer.Typer) -> None:
    """Add the two commands to an application."""
    for command in (run, sweep):
        app.command()(command)


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
    file: File = None,
    device: Annotated[str | None, typer.Option(help="The same as -p device=...")] = None,
    ranks: Annotated[str | None, typer.Option(metavar="N", help=RANKS)] = None,
    jobs: Jobs = 1,
    output: Output = None,
    timeout: Timeout = 1800.0,
    cell_timeout: CellTimeout = 600.0,
) -> None:
    """Run notebooks headless, each in a process of its own.

    Parameters go to every notebook that is named, and each must know them: otherwise nothing is started.
    Exit status: 0 all passed, 1 one failed, 2 wrong usage, 130 interrupted.
    """
    limits = {"timeout": timeout, "cell_timeout": cell_timeout}
    try:
        infos = [inspect_notebook(path) for path in _chosen(names)]
        given = _read_file(file) if file else {}
        planned = [
            Job(info, values, run_folder(info, output), info.stem)
            for info, values in _values(infos, given, parameter or [], device, ranks, limits)
        ]
        results, interrupted = _run(planned, jobs, limits)
    except NotebookError as error:
        raise refuse(error) from error
    rows = [([label], result, shown_path(result.folder)) for label, result in results.items()]
    wide_console().print(_summary(["notebook"], rows, "results in"))
    _exit(results, len(planned), interrupted)


def sweep(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Number (04), name or path of the notebook.")],
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            "--parameter",
            "-p",
            metavar="NAME=VALUES",
            help="Values between commas, or for numbers a range as in Python: 0:4 is 0, 1, 2, 3. Repeatable.",
        ),
    ] = None,
    paired: Annotated[
        bool, typer.Option("--paired", help="First values together, second values together, ..., not each with each.")
    ] = False,
    file: File = None,
    device: Annotated[str | None, typer.Option(metavar="VALUES", help="The same as -p device=...")] = None,
    ranks: Annotated[str | None, typer.Option(metavar="VALUES", help=RANKS + " 1,2,4 sweeps over it.")] = None,
    jobs: Jobs = 1,
    again: Annotated[bool, typer.Option("--again", help="Run finished combinations anew, too.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder that gets sweeps/NOTEBOOK/PARAMETERS/.", show_default="outputs/"),
    ] = None,
    timeout: Timeout = 1800.0,
    cell_timeout: CellTimeout = 600.0,
) -> None:
    """Run a notebook for every combination of parameter values, each in a process and a folder of its own.

    The same command again runs only what is not finished: what failed, was interrupted or never started, and what was
    run with other code in the notebook's cells or another library. Code of your own that a notebook imports is not
    looked at: --again after a change there. `fsdp-ema report` shows the results on one page.
    Exit status: 0 all passed, 1 one failed, 2 wrong usage, 130 interrupted.

    Example: fsdp-ema sweep 04 -p decay=0.9,0.99,0.999 -p seed=0:4 -p steps=300 -j 2
    """
    limits = {"timeout": timeout, "cell_timeout": cell_timeout}
    try:
        info = inspect_notebook(find_notebook(name))
        prepare(info, {}, **limits)
        axes = _axes(info, _read_file(file) if file else {}, parameter or [], device, ranks)
        folder = _outputs(info, output) / "sweeps" / info.stem
        planned = plan_sweep(info, axes, folder, paired=paired)
        kept = {} if again else {job.label: result for job in planned if (result := finished(job))}
        left = [job for job in planned if job.label not in kept]
        console = wide_console()
        console.print(_opening(info, planned, left, again), highlight=False)
        results, interrupted = _run(left, jobs, limits)
    except NotebookError as error:
        raise refuse(error) from error
    swept = [name for name in planned[0].parameters if len({repr(job.parameters[name]) for job in planned}) > 1]
    rows = [
        ([str(job.parameters[name]) for name in swept], result, "kept" if job.label in kept else "")
        for job in planned
        if (result := results.get(job.label) or kept.get(job.label))
    ]
    console.print(_summary(swept, rows, ""))
    console.print(f"results in {shown_path(folder)}", markup=False, highlight=False)
    if interrupted:
        console.print("the same command again finishes the rest")
    _exit(results, len(left), interrupted)


# --- what was asked for -------------------------------------------------------------------------------------------


def _chosen(names: list[str] | None) -> list[Path]:
    if not names:
        return all_notebooks()
    # Twice the same notebook would write to the same folder.
    chosen = list(dict.fromkeys(find_notebook(name) for name in names))
    stems = [path.stem for path in chosen]
    if twice := [str(path) for path in chosen if stems.count(path.stem) > 1]:
        raise NotebookError(
            f"notebooks of the same name would share a folder of results: {', '.join(twice)}. "
            "Run them one by one with different --output, or rename all but one."
        )
    return chosen


def _outputs(info: NotebookInfo, output: Path | None) -> Path:
    return (output if output is not None else repo_root(info.path.parent) / "outputs").resolve()


def run_folder(info: NotebookInfo, output: Path | None) -> Path:
    """Where `fsdp-ema run` puts the results of a notebook."""
    return _outputs(info, output) / info.stem


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotebookError(f"-f {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise NotebookError(f"-f {path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise NotebookError(f"-f {path}: expected a map of parameter names to values, found {type(values).__name__}")
    return values


def _values(
    infos: list[NotebookInfo],
    from_file: Mapping[str, Any],
    assignments: list[str],
    device: str | None,
    ranks: str | None,
    limits: Mapping[str, float],
) -> list[tuple[NotebookInfo, dict[str, Any]]]:
    """Each notebook with its checked parameters; one error for all that refuse theirs."""
    found, complaints = [], []
    for info in infos:
        try:
            typed = dict(parse_assignment(info, text) for text in assignments)
            for option, text in _shorthands(info, device, [ranks] if ranks is not None else []).items():
                name, value = parse_assignment(info, text)
                if typed.setdefault(name, value) != value:
                    raise NotebookError(f"{option} and -p {name}={typed[name]} contradict each other")
            found.append((info, prepare(info, {**from_file, **typed}, **limits)))
        except NotebookError as error:
            complaints.append(str(error))
    if complaints:
        raise NotebookError("\n".join(dict.fromkeys(complaints)))
    return found


def _axes(
    info: NotebookInfo, from_file: Mapping[str, Any], assignments: list[str], device: str | None, ranks: str | None
) -> dict[str, list[Any]]:
    """Values by parameter: those of a file are fixed, those typed are swept over."""
    axes = {name: [value] for name, value in from_file.items()}
    counts = [count.strip() for count in ranks.split(",")] if ranks is not None else []
    shorthands = _shorthands(info, device, counts)
    typed: dict[str, str] = {}
    for option, text in {**{f"-p {text}": text for text in assignments}, **shorthands}.items():
        name, values = parse_values(info, text)
        if name in typed:
            raise NotebookError(f"{typed[name]} and {option}: {name} is given twice; put its values into one")
        typed[name], axes[name] = option, values
    if "output_dir" in axes:
        raise NotebookError("output_dir: the runner sets it, to a folder for each combination; use --output instead")
    return axes


def _shorthands(info: NotebookInfo, device: str | None, counts: Sequence[str]) -> dict[str, str]:
    """The assignments that --device and --ranks stand for, by what was typed."""
    texts = {}
    if device is not None:
        texts[f"--device {device}"] = f"device={device}"
    if counts:
        texts[f"--ranks {','.join(counts)}"] = ranks_assignment(info, counts)
    return texts


# --- running ------------------------------------------------------------------------------------------------------


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


def _run(jobs: list[Job], workers: int, limits: Mapping[str, float]) -> tuple[dict[str, RunResult], bool]:
    """Run the jobs and show how they come along; what ended, by label, and whether an interrupt ended the rest."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=wide_console(), disable=not animated()) as bars:
        display = _Display(bars, len(jobs))
        try:
            with _signals_as_interrupts():
                run_jobs(jobs, display, workers=workers, **limits)
        except KeyboardInterrupt:
            return display.results, True
    return display.results, False


class _Display:
    """Tells how the jobs come along: bars in a terminal, elsewhere one line for each that ended."""

    def __init__(self, bars: Progress, count: int) -> None:
        self.bars, self.count = bars, count
        self.results: dict[str, RunResult] = {}
        self._tasks: dict[str, TaskID] = {}
        self._all = bars.add_task("all", total=count, visible=count > 1)

    def started(self, job: Job) -> None:
        self._tasks[job.label] = self.bars.add_task(escape(job.label), total=None)

    def progressed(self, job: Job, done: int, total: int) -> None:
        self.bars.update(self._tasks[job.label], completed=done, total=total)

    def ended(self, job: Job, result: RunResult) -> None:
        self.results[job.label] = result
        self.bars.remove_task(self._tasks.pop(job.label))
        self.bars.advance(self._all)
        place = f" ({len(self.results)} of {self.count})" if self.count > 1 else ""
        line = f"{escape(job.label)} {colored(result.status)} after {result.seconds:.1f} s{place}"
        if not result.passed and result.status != "interrupted":
            see = Path(result.folder) / LOG_FILE
            line += f"\n  {escape(result.error)}" + (f"\n  see {escape(str(see))}" if see.is_file() else "")
        self.bars.console.print(line, highlight=False, soft_wrap=True)


def _opening(info: NotebookInfo, planned: list[Job], left: list[Job], again: bool) -> str:
    text = f"{escape(info.stem)}: {len(planned)} runs"
    if kept := len(planned) - len(left):
        text += f", {kept} finished before and kept"
    reasons = [] if again else [reason for job in left if (reason := why_again(job))]
    for reason in dict.fromkeys(reasons):
        text += f", {reasons.count(reason)} again because of changes in {reason}"
    return text


# --- showing ------------------------------------------------------------------------------------------------------


def wide_console() -> Console:
    """Standard output; where that is no terminal, wide enough that a row of a table stays one line in a log."""
    return Console(width=None if sys.stdout.isatty() else 140)


def colored(status: str) -> str:
    """A status in the markup of rich."""
    return f"[{_COLORS.get(status, 'red')}]{escape(status)}[/]"


def refuse(error: NotebookError) -> typer.Exit:
    """Say what cannot be done; returns the exit to raise."""
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(BAD_USAGE)


def animated() -> bool:
    """Whether bars may move: in a terminal where a person watches."""
    return sys.stdout.isatty() and not os.environ.get("CI")


def shown_path(path: str | Path) -> str:
    """A path as short as it can be said: from the current directory, where it lies there."""
    path = Path(path)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _summary(columns: list[str], rows: list[tuple[list[str], RunResult, str]], last: str) -> Table:
    """One row for each run: what is particular to it, how it ended, and a remark."""
    table = Table(*map(escape, columns), "result", "seconds", "claims that hold", last)
    table.columns[len(columns) + 1].justify = "right"
    for own, result, remark in rows:
        claims = result.claims
        held = f"{sum(map(bool, claims.values()))} of {len(claims)}" if claims else "-"
        table.add_row(*map(escape, own), colored(result.status), f"{result.seconds:.1f}", held, escape(remark))
    return table


def _exit(results: Mapping[str, RunResult], count: int, interrupted: bool) -> None:
    if interrupted:
        ended = sum(result.status != "interrupted" for result in results.values())
        typer.echo(f"interrupted; {count - ended} of {count} runs did not finish")
        raise typer.Exit(INTERRUPTED)
    if not all(result.passed for result in results.values()):
        raise typer.Exit(FAILED)
