"""The command line: `fsdp-ema` with all its commands; those that run notebooks or read checkpoints have own rooms."""

from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Table

from fsdp_ema_lib.lab import offline_cli, runs_cli
from fsdp_ema_lib.lab.notebooks import NotebookError, NotebookInfo, all_notebooks, inspect_notebook
from fsdp_ema_lib.lab.runs import load_result
from fsdp_ema_lib.lab.runs_cli import Output, colored, refuse, run_folder, wide_console

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


if __name__ == "__main__":
    app()
