"""Real ranks inside a notebook: ipyparallel engines joined into one process group, ended with the kernel or before."""

from __future__ import annotations

import atexit
import concurrent.futures
import importlib
import pickle
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from IPython import get_ipython

from fsdp_ema_lib.lab import engine_side

if TYPE_CHECKING:
    from fsdp_ema_lib.lab.engines import AttachedEngines, LocalEngines

# What ranks get to come to an end once one has failed; most of them wait for it in a collective.
GRACE_S = 5.0
# What engines get to appear, to import torch and to find each other.
START_S = 120.0
_POLL_S = 0.1
_AGAIN = "Run the cell with ranks(...) again for fresh ones."

_current: Ranks | None = None


class RankError(RuntimeError):
    """A rank failed or died. The text has the traceback of the one that did so first; IPython shows it in color.

    Attributes:
        rank: which one.
        error: name of the exception class on the rank, or "died".
    """

    def __init__(self, headline: str, traceback: str, note: str, *, rank: int, error: str) -> None:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", traceback)
        super().__init__("\n".join(part for part in (headline, plain, note) if part))
        self.rank, self.error = rank, error
        self._lines = [part for part in (headline, traceback, note) if part]

    def _render_traceback_(self) -> list[str]:
        return self._lines


@dataclass(frozen=True)
class Place:
    """Where a rank works."""

    rank: int
    host: str
    pid: int
    device: str


def ranks(
    n: int | None = None,
    *,
    device: str = "auto",
    profile: str | None = None,
    cluster_id: str = "",
    port: int = 0,
    address: str | None = None,
    timeout_s: float = 1800.0,
    limit_s: float | None = None,
    quiet: bool = False,
) -> Ranks:
    """Start `n` ranks on this machine, or make ranks of the engines of an ipyparallel cluster that is running.

    Each rank is an ipyparallel engine: a process of its own with one torch thread, `MPLBACKEND=Agg`, no variable of
    torchrun, and the default process group running: NCCL with a GPU to itself on CUDA, else gloo. Local ranks listen on
    loopback only and meet through a file in a directory that only this user can enter. They have the kernel's working
    directory and import path. Starting takes some seconds, in which each imports torch.

    Use the ranks in a `with` block or keep them for the next cells:

        r = ranks(2)                         one cell

        %%px                                 the next: runs on each rank; `rank`, `world_size` and `device` are there
        model = build(device)

        r.run(evaluate, steps=10)            a function of this notebook, called on each rank: a list of results
        r["loss"]                            a variable of each rank: a list
        r.stop()

    One kernel has one set of ranks: starting another, as when the cell is run again, ends the one before. All are ended
    when the block or the kernel ends (killed and restarted kernels, too), when a rank dies, when a call or cell is
    interrupted or takes longer than `limit_s`, and when a rank fails while others do not come to an end, because a
    collective waits for it. When every rank comes to an end, well or with an error, they all live on.

    On several machines: start a cluster with ipyparallel's launchers (SSH, Slurm, MPI and others), then attach to it.

        ipython profile create --parallel big           then, in profile_big/ipcluster_config.py:
                                                        c.Cluster.engine_launcher_class = "slurm"
        ipcluster start --profile=big -n 16 --ip='*'
        r = ranks(profile="big")                        in the notebook

    This library must be importable on every machine, with the same versions. The ranks meet at a TCP store on rank 0's
    host, which must be reachable from the others. `stop` and the end of the kernel take the engines out of the group
    and leave them running, for they belong to the profile; `ipcluster stop --profile=big` ends them. Ranks that are
    stuck there get an interrupt, and no more.

    Args:
        n: number of ranks, at least 1. With `profile`, None takes all of its engines.
        device: "cpu", "cuda", or "auto" for CUDA where there is CUDA.
        profile: name of an ipyparallel profile in which a cluster is running.
        cluster_id: which cluster of the profile, if `ipcluster start` was given one.
        port: with `profile`, the port of the store on rank 0's host; 0 takes a free one.
        address: with `profile`, how the other ranks reach rank 0's host; None takes its host name.
        timeout_s: seconds that a collective may wait for another rank.
        limit_s: seconds that one call or cell may take; None for no limit. Can be changed later: `r.limit_s = 60`.
        quiet: say nothing at the start, and do not show what ranks print in `run`.

    Returns:
        The ranks.

    Raises:
        ModuleNotFoundError: ipyparallel is missing.
        ValueError: a number is out of range, or there are more ranks than engines or GPUs. Ranks that run are kept.
        RuntimeError: CUDA is asked for and missing, no cluster runs in the profile, or an engine did not start.
        OSError: `port` cannot be used.
        TimeoutError: the engines do not answer.
        RankError: a rank could not join the group.

    Example:
        >>> import torch.distributed as dist
        >>> with ranks(2, device="cpu", quiet=True) as r:
        ...     r.run(lambda a: a + dist.get_rank(), 10)
        [10, 11]
    """
    global _current
    _check_numbers(n, profile, port, address, timeout_s, limit_s)
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f'device: expected "auto", "cpu" or "cuda", got {device!r}')
    engines_room = _with_ipyparallel()
    if profile is None:
        device = _check_devices_here(n, device)
        engines = engines_room.LocalEngines(n)
    else:
        engines = engines_room.AttachedEngines(profile, cluster_id, n)
    if _current is not None:
        _current.stop("a later ranks(...) took their place")
    started = time.perf_counter()
    _current = Ranks(engines, device, port, address, timeout_s, limit_s, quiet)
    if not quiet:
        print(f"{_current.describe()}, ready after {time.perf_counter() - started:.1f} s")
    return _current


class Ranks:
    """What `ranks` returns.

    Attributes:
        places: where each rank works.
        limit_s: seconds that one call or cell may take, or None.
        quiet: whether `run` hides what ranks print.
        view: ipyparallel's DirectView of the ranks, for whatever is not here.
    """

    def __init__(
        self,
        engines: LocalEngines | AttachedEngines,
        device: str,
        port: int,
        address: str | None,
        timeout_s: float,
        limit_s: float | None,
        quiet: bool,
    ) -> None:
        self._engines, self._ended = engines, ""
        self.limit_s, self.quiet = limit_s, quiet
        self._ids: list[int] = []
        self.places: list[Place] = []
        atexit.register(self.stop)
        try:
            self._ids = engines.start(START_S)
            self.view = engines.client.direct_view(self._ids)
            self.view.block = True
            arrived = self._ask(engine_side.arrive)
            self.places = _assign(arrived, device)
            if engines.folder is not None:
                self._ask(engine_side.write_stacks_to, [(engines.stack_file(place.pid),) for place in self.places])
            meet = self._meeting_place(port, address)
            self._ask(
                engine_side.join,
                [(place.rank, len(self), meet, place.device, timeout_s) for place in self.places],
            )
        except BaseException:
            self.stop("they could not be started")
            raise
        self._activate_magics()

    def __len__(self) -> int:
        return len(self._ids)

    def __repr__(self) -> str:
        return f"<{self.describe()}{': ' + self._ended if self._ended else ''}>"

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def describe(self) -> str:
        """One line: how many, on what, where."""
        hosts = sorted({place.host for place in self.places})
        kind = "cuda (nccl)" if self.places[0].device.startswith("cuda") else "cpu (gloo)"
        where = "this machine" if self._engines.folder is not None else ", ".join(hosts)
        return f"{len(self)} rank{'s' * (len(self) > 1)} on {kind}, {where}"

    @property
    def running(self) -> bool:
        """Whether the ranks can be used."""
        return not self._ended and not self._engines.lost.is_set()

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank, and return the results by rank.

        Arguments, results and a function that is defined in a notebook travel by value (cloudpickle). Names that such
        a function finds neither in itself nor in the notebook are looked up among what `%%px` made on the rank.

        Raises:
            RankError: a rank failed or died.
            TimeoutError: some ranks were not done in `limit_s`; the text says where each of them was.
            RuntimeError: the ranks have ended.
        """
        self.check_running()
        packed = engine_side.pack(function, args, kwargs)
        name = getattr(function, "__qualname__", repr(function))
        result = self.view.apply_async(engine_side.call, packed)
        return [pickle.loads(data) for data in self.finish(result, name, show=not self.quiet)]

    def __getitem__(self, name: str) -> list[Any]:
        """The variable `name` of each rank, as `%%px` sees it."""
        self.check_running()
        return self.finish(self.view.pull(name, block=False), f"r[{name!r}]", show=False)

    def __setitem__(self, name: str, value: Any) -> None:
        """Give every rank a variable `name`, for `%%px`."""
        self.check_running()
        self.finish(self.view.push({name: value}, block=False), f"r[{name!r}]", show=False)

    def stop(self, why: str = "they were stopped") -> None:
        """End the ranks; those of a profile only leave their group. Calling it again does nothing."""
        if self._ended:
            return
        self._ended = why
        atexit.unregister(self.stop)
        self._engines.end()

    def check_running(self) -> None:
        """Raise what tells the user that the ranks are gone, if they are."""
        if not self._ended and self._engines.lost.is_set():
            raise self._death("before this call")
        if self._ended:
            raise RuntimeError(f"these {len(self)} ranks have ended: {self._ended}. {_AGAIN}")

    def finish(
        self,
        result: Any,
        label: str,
        *,
        engines: Sequence[int] | None = None,
        show: bool,
        progress_after: float = -1.0,
    ) -> list[Any]:
        """Wait for an AsyncResult of ipyparallel on these ranks as `run` does, and return the results by rank.

        Args:
            result: of `r.view`, or of `%%px --noblock`.
            label: what errors call it.
            engines: ids of the engines that it runs on, None for all of them.
            show: whether what ranks print appears as it comes.
            progress_after: seconds until a progress bar appears, negative for never.
        """
        numbers = [self._ids.index(engine) for engine in (engines or self._ids)]
        try:
            with _streaming(result) if show else nullcontext():
                late = self._wait(result, label, numbers, self.limit_s, progress_after)
                if show:
                    result.wait_for_output(1)
        except (KeyboardInterrupt, TimeoutError, RankError) as error:
            self._engines.interrupt()
            self.stop(f"{label} {'was interrupted' if isinstance(error, KeyboardInterrupt) else 'came to no end'}")
            raise
        failures = _failures(result, numbers)
        if not failures:
            return result.get()
        if any(failure.ename == "EngineError" for _, failure in failures):
            raise self._death(f"in {label}", failures)
        printed = "" if show else _printed(result, numbers, failures[0][0])
        raise self._failure(label, failures, late, printed)

    def _ask(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """Call one of `engine_side` on every rank, with the arguments of the rank."""
        view = self._engines.client.direct_view
        each = arguments or [()] * len(self._ids)
        results = [view(engine).apply_async(function, *own) for engine, own in zip(self._ids, each, strict=True)]
        result = type(results[0]).join(*results)
        label = f"ranks({len(self)}): {function.__name__}"
        numbers = list(range(len(self._ids)))
        late = self._wait(result, label, numbers, START_S, -1.0)
        failures = _failures(result, numbers)
        if failures:
            raise self._failure(label, failures, late)
        values = result.get()
        return values if isinstance(values, list) else [values]

    def _meeting_place(self, port: int, address: str | None) -> str | tuple[str, int]:
        if self._engines.folder is not None:
            return str(self._engines.folder / "rendezvous")
        first = self._engines.client.direct_view(self._ids[0])
        opened = first.apply_async(engine_side.open_store, port, len(self)).get(START_S)
        if not isinstance(opened, int):
            raise OSError(
                f"port: {port} cannot be used on {self.places[0].host}, the host of rank 0: {opened.splitlines()[0]} "
                "Name another one, or 0 for any that is free."
            )
        several = len({place.host for place in self.places}) > 1
        return (address or (self.places[0].host if several else "127.0.0.1")), opened

    def _wait(
        self, result: Any, label: str, numbers: Sequence[int], limit_s: float | None, progress_after: float
    ) -> list[int]:
        """Until all are done, or some have failed and the others are late: those. Raises when it takes too long."""
        of = dict(zip(result.split(), numbers, strict=True))
        pending, started, failed_at = set(of), time.monotonic(), None
        with _progress_bar(label, len(of), progress_after) as show_done:
            while pending:
                done, pending = concurrent.futures.wait(pending, _POLL_S, concurrent.futures.FIRST_COMPLETED)
                now = time.monotonic()
                show_done(len(of) - len(pending), now - started)
                if self._engines.lost.is_set():
                    raise self._death(f"in {label}")
                if failed_at is None and any(part.exception() is not None for part in done):
                    failed_at = now
                late = sorted(of[part] for part in pending)
                if late and failed_at is not None and now - failed_at > GRACE_S:
                    return late
                if late and limit_s is not None and now - started > limit_s:
                    raise TimeoutError(self._too_long(label, late, limit_s))
        return []

    def _too_long(self, label: str, late: Sequence[int], limit_s: float) -> str:
        names = f"rank {', '.join(map(str, late))} of {len(self)}"
        where = self._engines.where([place.pid for place in self.places if place.rank in late])
        stacks = "".join(f"\n--- rank {rank} ---\n{text}" for rank, text in zip(late, where, strict=False))
        return f"{label}: {names} not done after {limit_s:g} s. Does every rank call every collective? {_AGAIN}{stacks}"

    def _death(self, when: str, failures: Sequence[tuple[int, Any]] = ()) -> RankError:
        """A rank is gone, and so is the group. Ends the others."""
        # ipyparallel's word that an engine is gone can be faster than the end of its process.
        local = self._engines.folder is not None
        if local:
            self._engines.lost.wait(GRACE_S)
        pid, how, stack = self._engines.death
        known = [place.rank for place in self.places if place.pid == pid]
        known += [rank for rank, failure in failures if failure.ename == "EngineError"]
        who = f"rank {known[0]} of {len(self)}" if known else f"the controller or an engine of ranks({len(self)})"
        ended = f"{who} died{how} {when}"
        self._engines.interrupt()
        self.stop(ended)
        return RankError(ended, stack, f"All ranks were ended. {_AGAIN}", rank=known[0] if known else -1, error="died")

    def _failure(
        self, label: str, failures: Sequence[tuple[int, Any]], late: Sequence[int], printed: str = ""
    ) -> RankError:
        rank, first = failures[0]
        notes = [f"rank {other} failed, too: {error.ename}: {error.evalue}" for other, error in failures[1:]]
        if printed:
            notes.append(f"--- printed by rank {rank} ---\n{printed}")
        if late:
            names = ", ".join(map(str, late))
            notes.append(f"rank {names} still waited {GRACE_S:g} s later, so all ranks were ended. {_AGAIN}")
            self._engines.interrupt()
            self.stop(f"{label} failed on rank {rank} while rank {names} waited")
        headline = f"{label}: rank {rank} of {len(self)} failed: {first.ename}: {first.evalue}".rstrip()
        return RankError(headline, _own_frames(first.traceback or ""), "\n".join(notes), rank=rank, error=first.ename)

    def _activate_magics(self) -> None:
        shell = get_ipython()
        if shell is not None:
            from fsdp_ema_lib.lab.rank_magics import RankMagics

            # A view of their own: `%pxconfig --targets` is not to change where `run` runs.
            view = self._engines.client.direct_view(self._ids)
            view.block = True
            shell.magics_manager.register(RankMagics(shell, view, self))


def _failures(result: Any, numbers: Sequence[int]) -> list[tuple[int, Any]]:
    """(rank, error) of the ranks that are done and failed, the earliest first: later ones mostly lost their partner."""
    failed = []
    for rank, part in zip(numbers, result.split(), strict=True):
        if part.done() and (error := part.exception()) is not None:
            at = part.metadata["completed"] or part.metadata["received"]
            failed.append((at.timestamp(), rank, error))
    return [(rank, error) for _, rank, error in sorted(failed, key=lambda failure: failure[:2])]


def _printed(result: Any, numbers: Sequence[int], rank: int) -> str:
    part = result.split()[numbers.index(rank)]
    part.wait_for_output(1)
    return (part.metadata["stdout"] + part.metadata["stderr"])[-4000:]


def _own_frames(traceback: str) -> str:
    """Without the frames of ipyparallel and of `engine_side.call`, which stand before the user's own."""
    start, mark, own = traceback.partition("skipping hidden 1 frame")
    head = re.match(r"(?s).*?Traceback \(most recent call last\)[^\n]*\n", start)
    return head[0] + own.partition("\n")[2].lstrip("\n") if mark and head else traceback


@contextmanager
def _streaming(result: Any) -> Iterator[None]:
    """Show what ranks print as it comes; of errors one line each, because one traceback follows as an exception."""
    from ipyparallel.error import CompositeError

    shown = CompositeError.tb_limit
    CompositeError.tb_limit = 0
    try:
        with result.stream_output():
            yield
    finally:
        CompositeError.tb_limit = shown


@contextmanager
def _progress_bar(label: str, total: int, after_s: float) -> Iterator[Callable[[int, float], None]]:
    """A function that is told the number of ranks that are done and the seconds, and shows a bar when it is time."""
    from ipyparallel.util import progress

    bars: list[Any] = []

    def show(done: int, elapsed_s: float) -> None:
        if not bars and 0 <= after_s <= elapsed_s:
            bars.append(progress(total=total, desc=label, unit="rank"))
        for bar in bars:
            bar.update(done - bar.n)

    try:
        yield show
    finally:
        for bar in bars:
            bar.close()


def _assign(arrived: Sequence[Mapping[str, Any]], device: str) -> list[Place]:
    """To each rank a GPU that no other has; the CPU, if that is asked for or some rank sees no GPU."""
    missing = [f"rank {rank} on {here['host']}" for rank, here in enumerate(arrived) if not here["gpus"]]
    if device == "cuda" and missing:
        raise RuntimeError(f'device: "cuda" was asked for, but no GPU is seen by {", ".join(missing)}.')
    on_gpu = device != "cpu" and not missing
    places, taken = [], set()
    for rank, here in enumerate(arrived):
        own = "cpu"
        if on_gpu:
            free = [gpu for gpu in here["gpus"] if gpu not in taken]
            if not free:
                sharing, gpus = sum(other["host"] == here["host"] for other in arrived), len(here["gpus"])
                raise ValueError(
                    f"{sharing} ranks on {here['host']}, but rank {rank} finds no GPU of its own among the {gpus} that "
                    'it sees. Use fewer ranks, or device="cpu".'
                )
            taken.add(free[0])
            own = f"cuda:{here['gpus'].index(free[0])}"
        places.append(Place(rank, here["host"], here["pid"], own))
    return places


def _check_devices_here(n: int, device: str) -> str:
    """The kind of device for `n` local ranks, before anything is started."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and count == 0:
        raise RuntimeError('device: "cuda" was asked for, but torch sees no GPU here. Use device="cpu" or "auto".')
    if device == "auto":
        device = "cuda" if count else "cpu"
    if device == "cuda" and n > count:
        raise ValueError(
            f"n: {n} ranks were asked for, but torch sees {count} GPU{'s' * (count > 1)} here, and each rank needs its "
            f'own. Use ranks({count}), or ranks({n}, device="cpu").'
        )
    return device


def _check_numbers(
    n: int | None, profile: str | None, port: int, address: str | None, timeout_s: float, limit_s: float | None
) -> None:
    if n is None and profile is None:
        raise ValueError("n: say how many ranks to start, as in ranks(2)")
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
        raise ValueError(f"n: expected a whole number of ranks, at least 1, got {n!r}")
    if profile is None and (port or address):
        raise ValueError("port, address: only for ranks(profile=...); local ranks meet through a file")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise ValueError(f"port: expected 0 to 65535, got {port!r}")
    for name, seconds in (("timeout_s", timeout_s), ("limit_s", limit_s)):
        if seconds is not None and not seconds > 0:
            raise ValueError(f"{name}: expected a positive number of seconds, got {seconds}")


def _with_ipyparallel() -> Any:
    """The room that needs ipyparallel."""
    try:
        return importlib.import_module("fsdp_ema_lib.lab.engines")
    except ModuleNotFoundError as error:
        if error.name != "ipyparallel":
            raise
        raise ModuleNotFoundError(
            "ranks needs ipyparallel, which is not installed here: pip install 'fsdp-ema-lib[lab]'", name="ipyparallel"
        ) from None
