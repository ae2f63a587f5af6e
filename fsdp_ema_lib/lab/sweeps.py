"""Many runs: the cells of a sweep, which of them are finished already, and several at a time.

A sweep has one folder for each combination of values. A combination whose last run passed is not run again as long as
the code of the notebook, the library and the parameters are what they were (`provenance.digests`). Whatever stops a
sweep, what is finished stays, and the same command finishes the rest.
"""

import hashlib
import itertools
import os
import queue
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch

from fsdp_ema_lib.lab import provenance
from fsdp_ema_lib.lab.notebooks import (
    RANK_PARAMETERS,
    NotebookError,
    NotebookInfo,
    check_parameters,
    parse_assignment,
)
from fsdp_ema_lib.lab.runs import RunResult, Stop, check_folder, load_result, run_notebook

LONGEST_NAME = 120  # characters of a folder's name; file systems take 255 bytes
_RANGE = re.compile(r"([+-]?\d+):([+-]?\d+)(?::([+-]?\d+))?")


@dataclass(frozen=True)
class Job:
    """One run to be done.

    Args:
        info: the notebook.
        parameters: checked, as `check_parameters` returns them.
        folder: where its results go.
        label: what to call it.
    """

    info: NotebookInfo
    parameters: dict[str, Any]
    folder: Path
    label: str


def parse_values(info: NotebookInfo, text: str) -> tuple[str, list[Any]]:
    """Turn `name=values` as typed on a command line into a name and the values to sweep over.

    Values stand between commas, those inside brackets, braces and quotes left alone. For a parameter that is a number,
    `0:4` and `0:10:2` are ranges of whole numbers as in Python: the end is not among them.

    Args:
        info: the notebook that the parameter belongs to.
        text: as it stands behind `-p`.

    Raises:
        NotebookError: no `=`, no value, a value that YAML cannot read, or a range without a number in it.

    Example:
        >>> from fsdp_ema_lib.lab.notebooks import find_notebook, inspect_notebook
        >>> info = inspect_notebook(find_notebook("05"))
        >>> parse_values(info, "timeout=60,240")
        ('timeout', [60, 240])
        >>> parse_values(info, "timeout=0:3")
        ('timeout', [0, 1, 2])
        >>> parse_values(info, "world_sizes=[1, 2],[4]")
        ('world_sizes', [[1, 2], [4]])
    """
    name, equals, raw = (part.strip() for part in text.partition("="))
    if not equals or not name.isidentifier():
        raise NotebookError(f"-p {text}: expected name=value,value,... or name=first:end")
    parameter = (info.parameters or {}).get(name)
    number = parameter is not None and type(parameter.default) in (int, float)
    values = []
    for piece in _split(raw):
        if not piece:
            raise NotebookError(f"-p {text}: a value is missing; write '' for an empty text")
        if number and (found := _RANGE.fullmatch(piece)):
            values += _range(text, *found.groups())
        else:
            values.append(parse_assignment(info, f"{name}={piece}")[1])
    return name, values


def _range(text: str, first: str, end: str, step: str | None) -> list[int]:
    if step is not None and int(step) == 0:
        raise NotebookError(f"-p {text}: the step of a range cannot be 0")
    values = list(range(int(first), int(end), int(step or 1)))
    if not values:
        raise NotebookError(f"-p {text}: an empty range: from {first}, and {end} is not among it")
    return values


def _split(raw: str) -> list[str]:
    """Parts of a text between the commas that stand outside brackets, braces and quotes."""
    parts, depth, quote = [""], 0, ""
    for character in raw:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and not parts[-1].strip(" [{("):
            # An apostrophe inside a word is a letter.
            quote = character
        depth += (character in "[{(") - (character in ")}]") if not quote else 0
        if character == "," and depth <= 0 and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def combinations(axes: Mapping[str, Sequence[Any]], *, paired: bool = False) -> list[dict[str, Any]]:
    """Combine the values of several parameters.

    Args:
        axes: values by parameter name, at least one each.
        paired: the first value of each with the first of the others, and so on, instead of each with each. A single
            value goes with all.

    Returns:
        Every combination once, the last name varying fastest.

    Raises:
        NotebookError: `paired`, and the numbers of values differ.

    Example:
        >>> combinations({"decay": [0.9, 0.99], "seed": [0, 1]})
        [{'decay': 0.9, 'seed': 0}, {'decay': 0.9, 'seed': 1}, {'decay': 0.99, 'seed': 0}, {'decay': 0.99, 'seed': 1}]
        >>> combinations({"decay": [0.9, 0.99], "seed": [0, 1], "steps": [300]}, paired=True)
        [{'decay': 0.9, 'seed': 0, 'steps': 300}, {'decay': 0.99, 'seed': 1, 'steps': 300}]
    """
    if paired:
        lengths = {name: len(values) for name, values in axes.items() if len(values) > 1}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name} has {length}" for name, length in lengths.items())
            raise NotebookError(f"--paired: expected as many values of each parameter, found: {found}")
        count = max(lengths.values(), default=1)
        rows: Iterable[tuple[Any, ...]] = zip(
            *(values if len(values) > 1 else list(values) * count for values in axes.values()), strict=True
        )
    else:
        rows = itertools.product(*axes.values())
    unique: list[dict[str, Any]] = []
    for row in rows:
        if (combination := dict(zip(axes, row, strict=True))) not in unique:
            unique.append(combination)
    return unique


def plan_sweep(
    info: NotebookInfo, axes: Mapping[str, Sequence[Any]], folder: str | Path, *, paired: bool = False
) -> list[Job]:
    """Make the jobs of a sweep: one for each combination, each with a folder named after its parameters.

    The same parameters get the same folder whatever the order they were typed in and whatever else is swept over, which
    is what lets a sweep be taken up again, or grow.

    Args:
        info: the notebook.
        axes: values by parameter name, as `parse_values` returns them.
        folder: gets one folder for each combination.
        paired: see `combinations`.

    Raises:
        NotebookError: no parameter, an unknown one, a value of the wrong type, or numbers of values that do not pair.
    """
    if not axes:
        raise NotebookError("nothing to sweep over; give a parameter and its values, such as -p seed=0:4")
    check_parameters(info, {name: values[0] for name, values in axes.items()})
    typed = {name: [check_parameters(info, {name: value})[name] for value in values] for name, values in axes.items()}
    jobs = []
    for combination in combinations(typed, paired=paired):
        label = cell_name({name: combination[name] for name in info.parameters or {} if name in combination})
        jobs.append(Job(info, combination, Path(folder) / label, label))
    return jobs


def cell_name(parameters: Mapping[str, Any]) -> str:
    """Name the folder of one combination.

    Where a value has characters that do not belong into a file name, or the name gets long, a digest stands at the end.

    Example:
        >>> cell_name({"decay": 0.99, "seed": 0})
        'decay=0.99,seed=0'
        >>> cell_name({"model": "my_pkg.models:build"})
        'model=my_pkg.models_build-645f5781'
    """
    full = ",".join(f"{name}={value}" for name, value in parameters.items())
    name = re.sub(r"[^A-Za-z0-9_.,=+-]+", "_", full)
    if name == full and len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]}-{hashlib.sha256(full.encode()).hexdigest()[:8]}"


def finished(job: Job) -> RunResult | None:
    """The result that makes a job superfluous: it passed, and nothing that decides its outcome has changed since."""
    result = load_result(job.folder)
    if result is None or not result.passed or not (job.folder / job.info.path.name).is_file():
        return None
    settings = provenance.settings_of(job.info, job.parameters)
    return result if result.digests == provenance.digests(job.info, settings) else None


def why_again(job: Job) -> str:
    """What changed since a job passed, such as "library"; empty if it never passed or need not be run again."""
    result = load_result(job.folder)
    if result is None or not result.passed:
        return ""
    now = provenance.digests(job.info, provenance.settings_of(job.info, job.parameters))
    return " and ".join(part for part, digest in now.items() if result.digests.get(part) != digest)


class Watcher(Protocol):
    """What `run_jobs` tells of; called from the threads of the workers."""

    def started(self, job: Job) -> None:
        """A worker took up the job."""

    def progressed(self, job: Job, done: int, total: int) -> None:
        """So many of its cells are done."""

    def ended(self, job: Job, result: RunResult) -> None:
        """The job ended, passed or not."""


def run_jobs(
    jobs: Sequence[Job], watcher: Watcher, *, workers: int = 1, cell_timeout: float = 600.0, timeout: float = 1800.0
) -> None:
    """Run notebooks, several at a time, each in a process of its own. One that fails does not stop the others.

    With several workers each gets its share of the CPU cores as threads (unless `OMP_NUM_THREADS` is set), and, where
    there are several GPUs, they take turns on them; a notebook that starts ranks of its own sees all GPUs.

    Args:
        jobs: in the order in which they start.
        watcher: is told what happens.
        workers: runs at a time, at least 1.
        cell_timeout, timeout: seconds, as `run_notebook` takes them.

    Raises:
        NotebookError: fewer than one worker, or a folder that cannot be one; nothing was started.
        KeyboardInterrupt: as it came; the running ones were ended and recorded as interrupted.
    """
    if workers < 1:
        raise NotebookError(f"--jobs: expected at least 1, got {workers}")
    for job in jobs:
        check_folder(job.info, job.folder)
    slots: queue.SimpleQueue[int] = queue.SimpleQueue()
    for slot in range(workers):
        slots.put(slot)

    def work(job: Job, stop: Stop) -> None:
        slot = slots.get()
        try:
            watcher.started(job)
            try:
                result = run_notebook(
                    job.info,
                    job.parameters,
                    job.folder,
                    cell_timeout=cell_timeout,
                    timeout=timeout,
                    on_progress=lambda done, total: watcher.progressed(job, done, total),
                    stop=stop,
                    environment=_environment(job, slot, workers),
                )
            except NotebookError as error:  # removed, damaged or taken by another runner since it was checked
                result = _not_started(job, str(error))
            watcher.ended(job, result)
        finally:
            slots.put(slot)

    with Stop() as stop, ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work, job, stop) for job in jobs]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            stop.set()
            raise  # when the pool has waited for the running ones


def _not_started(job: Job, error: str) -> RunResult:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return RunResult(job.info.stem, "failed", 0.0, error, str(job.folder), job.parameters, now)


def _environment(job: Job, slot: int, workers: int) -> dict[str, str]:
    """Variables that keep workers out of each other's way."""
    if workers == 1:
        return {}
    environment = {}
    if "OMP_NUM_THREADS" not in os.environ:
        environment["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // workers))
    devices = _devices()
    if len(devices) > 1 and not set(RANK_PARAMETERS) & set(job.info.parameters or {}):
        environment["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    return environment


def _devices() -> list[str]:
    """Names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES takes them."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return [name.strip() for name in visible.split(",")]
    return [str(number) for number in range(torch.cuda.device_count())]
