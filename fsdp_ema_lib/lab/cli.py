"""The command line: `fsdp-ema` with all its commands; those that run notebooks or read checkpoints have own rooms."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from fsdp_ema_lib.lab import offline_cli, runs_cli
from fsdp_ema_lib.lab.new_notebook import new_notebook
from fsdp_ema_lib.lab.notebooks import NotebookError, NotebookInfo, all_notebooks, inspect_notebook, repo_root
from fsdp_ema_lib.lab.runs import load_result
from fsdp_ema_lib.lab.runs_cli import FAILED, Output, animated, colored, refuse, run_folder, shown_path, wide_console

app = typer.Typer(
    help="List, run and sweep the notebooks of fsdp_ema_lib; look into, check, export and compare checkpoints.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
runs_cli.register(app)
offline_cli.register(app)


@app.command("list")
def list_notebooks(output: Output = None) -> None:
    """Show every notebook: its question, its parameters with their defaults, and how its last run ended."""
    try:
        infos = [inspect_notebook(path) for path in all_notebooks()]
    except NotebookError as error:
        raise refuse(error) from error
    console = wide_console()
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
    result = load_result(run_folder(info, output))
    if result is None:
        return "never"
    return f"{colored(result.status)} after {result.seconds:.1f} s, {result.finished}"


@app.command()
def report(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder with runs, at any depth.", show_default="outputs/")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page.", show_default="FOLDER/report.html")
    ] = None,
) -> None:
    """Write one HTML page over all runs: tables, plots by parameter, thumbnails, failures; it opens offline.

    The executed notebooks are written as pages beside themselves, and the page links to them.
    """
    # nbconvert takes its time to import.
    from fsdp_ema_lib.lab.report import write_report

    try:
        with Progress(console=wide_console(), disable=not animated(), transient=True) as bars:
            task = bars.add_task("notebooks", total=None)
            page = write_report(
                folder if folder is not None else repo_root() / "outputs",
                output,
                lambda done, total: bars.update(task, completed=done, total=total),
            )
    except NotebookError as error:
        raise refuse(error) from error
    except OSError as error:
        typer.echo(f"error: the report cannot be written: {error.strerror}: {error.filename}", err=True)
        raise typer.Exit(FAILED) from error
    typer.echo(shown_path(page))


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What it shows, such as batch_size.")],
    question: Annotated[str | None, typer.Option("--question", "-q", help="The question that it answers.")] = None,
) -> None:
    """Start a notebook from the house's template, under the next free number; it is in order and runs as it is."""
    try:
        path = new_notebook(name, question=question)
    except NotebookError as error:
        raise refuse(error) from error
    typer.echo(f"{shown_path(path)}\nrun it with: fsdp-ema run {path.stem[:2]}")


if __name__ == "__main__":
    app()
