"""The command line's view of checkpoints: `fsdp-ema inspect`, `verify`, `export` and `diff`."""

import json
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from fsdp_ema_lib import offline
from fsdp_ema_lib.safetensors_io import parse_size

DIFFERENT = FAILED = 1
BAD_USAGE = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}

Checkpoint = Annotated[Path, typer.Argument(help="A checkpoint, or a directory of them (the newest is taken).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def register(app: typer.Typer) -> None:
    """Add the four commands to an application."""
    for command in (inspect, verify, export, diff):
        app.command()(command)


def inspect(checkpoint: Checkpoint, as_json: Json = False) -> None:
    """Show what a checkpoint holds: step, ranks, versions, and every entry with its shape and size."""
    found = _found(lambda: offline.inspect(checkpoint), as_json)
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    saved_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["saved_at"]))
    typer.echo(f"{found['path']}: step {found['step']}, saved {saved_at} by {found['world_size']} ranks")
    typer.echo(f"torch {found['torch']}, fsdp_ema_lib {found['fsdp_ema_lib']}, format {found['format_version']}")
    typer.echo(f"parameters: {', '.join(f'{n} {kind}' for kind, n in found['sharding'].items()) or 'none'}")
    typer.echo(f"optimizer: {found['optimizer'] or 'none'}")
    for name, average in found["emas"].items():
        typer.echo(f"average {name}: {average['num_updates']} updates, decay {average['decay']}")
    typer.echo(f"extra: {json.dumps(found['extra'])}; other objects: {', '.join(found['objects']) or 'none'}")
    table = Table("entry", "shape", "dtype", "bytes", "pieces", box=None)
    for entry in found["entries"]:
        shape = " x ".join(map(str, entry["shape"])) or "scalar"
        table.add_row(entry["name"], shape, entry["dtype"], f"{entry['bytes']:,}", str(entry["pieces"]))
    Console(width=160).print(table, highlight=False)
    typer.echo(f"{found['bytes_on_disk']:,} bytes on disk")


def verify(checkpoint: Checkpoint, as_json: Json = False) -> None:
    """Compare every file with its checksum; exit code 1 where one is damaged."""
    found = _found(lambda: offline.verify(checkpoint), as_json)
    if found["unsealed"]:
        told = (
            f"sizes are right, but {found['unsealed']} files were saved without checksums: their contents are unchecked"
        )
    else:
        told = f"sound, {found['files']} files, {found['bytes']:,} bytes"
    _say(found, as_json, f"{found['path']}: {told}")


def export(
    checkpoint: Checkpoint,
    output: Annotated[Path, typer.Argument(help="A file; with --max-shard-size a new directory.")],
    ema: Annotated[str, typer.Option(help="Name of the average; none for the live weights.")] = "0",
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)}; as saved by default.")] = None,
    max_shard_size: Annotated[str | None, typer.Option(help="Largest file, such as 5GB.")] = None,
    as_json: Json = False,
) -> None:
    """Write the weights as safetensors, without the model's code."""
    if dtype is not None and dtype not in DTYPES:
        raise typer.BadParameter(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    found = _found(
        lambda: offline.export(
            checkpoint,
            output,
            ema=None if ema == "none" else ema,
            dtype=DTYPES[dtype] if dtype is not None else None,
            max_shard_size=parse_size(max_shard_size) if max_shard_size is not None else None,
        ),
        as_json,
    )
    _say(found, as_json, f"{found['output']}: {found['tensors']} tensors of {found['path']}")


def diff(first: Checkpoint, second: Checkpoint, as_json: Json = False) -> None:
    """Compare two checkpoints bit for bit, whatever sharding they were saved with; exit code 1 where they differ."""
    found = _found(lambda: offline.diff(first, second), as_json)
    lines = [f"only in {found['first']}: {name}" for name in found["only_first"]]
    lines += [f"only in {found['second']}: {name}" for name in found["only_second"]]
    for entry in found["differing"]:
        if "elements" in entry:
            what = f"{entry['elements']} elements differ, by at most {entry['difference']:.3g}"
        else:
            what = f"{entry['first']} and {entry['second']}"
        lines.append(f"{entry['name']}: {what}")
    _say(found, as_json, "\n".join([*lines, f"{found['equal']} entries are bit-equal"]))
    if lines:
        raise typer.Exit(DIFFERENT)


def _found(look: Callable[[], dict[str, Any]], as_json: bool) -> dict[str, Any]:
    try:
        return look()
    except (OSError, ValueError, TypeError, KeyError, pickle.UnpicklingError) as problem:
        text = str(problem.args[0]) if isinstance(problem, KeyError) else str(problem)
        typer.echo(json.dumps({"error": text}) if as_json else f"error: {text}", err=not as_json)
        raise typer.Exit(FAILED) from problem


def _say(found: dict[str, Any], as_json: bool, text: str) -> None:
    typer.echo(json.dumps(found, indent=1) if as_json else text)
