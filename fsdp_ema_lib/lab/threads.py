"""Threads: how many torch uses for a stretch of work, and a thread of its own for work that a person steers."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch


@contextlib.contextmanager
def cpu_threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads inside the block, and as many as before after it.

    Matrices of a few hundred rows gain little from a second thread. Where other processes want the same cores they lose
    much: threads meet at the end of every operation, and each meeting waits for the slowest. A training step took ten
    times as long with two threads as with one on two cores that seven processes shared.

    Args:
        count: threads per operation, at least 1.

    Raises:
        ValueError: `count` is below 1.

    Example:
        >>> with cpu_threads(1):
        ...     torch.get_num_threads()
        1
    """
    if count < 1:
        raise ValueError(f"count must be at least 1 thread, got {count}")
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Worker:
    """Work in a thread of its own, which can be paused, resumed and stopped between its steps.

    An interrupt (Ctrl-C, the kernel's stop button) reaches the main thread alone, so the work goes on. When the process
    ends, a kernel that restarts included, the work is stopped between two steps first.

    Attributes:
        state: "ready", "running", "paused", "stopping", and at the end "stopped", "finished" or "failed".
        error: what the work raised; None if nothing.

    Args:
        work: called in the thread with this worker. Between its steps it calls `keep_going`, and returns when that says
            False.
        name: of the thread.
        on_change: called after every change of state, in the thread that caused it; it must not wait for this worker.

    Example:
        >>> def count(worker):
        ...     steps = 0
        ...     while steps < 3 and worker.keep_going():
        ...         steps += 1
        ...     return steps
        >>> worker = Worker(count, name="counting")
        >>> worker.start()
        >>> worker.result(timeout=60), worker.state
        (3, 'finished')
    """

    def __init__(
        self, work: Callable[[Worker], Any], *, name: str, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self.state = "ready"
        self.error: BaseException | None = None
        self._work, self._on_change = work, on_change
        self._wanted = "run"
        self._returned: Any = None
        self._condition = threading.Condition()
        # A daemon, because the interpreter joins other threads before it asks anyone to stop them.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def alive(self) -> bool:
        """Whether the thread has been started and not ended."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin the work.

        Raises:
            RuntimeError: it was begun before; a new worker is needed to do it again.
        """
        if self.state != "ready":
            raise RuntimeError(f"{self._thread.name}: it was started before (now {self.state}); make a new Worker")
        atexit.register(self._stop_at_exit)
        self._set("running")
        self._thread.start()

    def pause(self) -> None:
        """Let the work wait at the end of its step, until `resume` or `stop`; nothing happens if it is not running."""
        self._want("pause")

    def resume(self) -> None:
        """Go on after `pause`; nothing happens if it is not paused."""
        self._want("run")

    def stop(self) -> None:
        """Let the work end after its step, paused or not. Does not wait: `result` does."""
        self._want("stop")
        if self.alive:
            self._set("stopping", unless=("stopped", "finished", "failed"))

    def keep_going(self) -> bool:
        """For the work, between two steps: waits while paused; False if it is to end."""
        with self._condition:
            while self._wanted == "pause":
                if self.state != "paused":
                    self._move("paused")
                self._condition.wait()
            if self.state == "paused" and self._wanted == "run":
                self._move("running")
            return self._wanted != "stop"

    def wait_for(self, *states: str, timeout: float | None = None) -> str:
        """Wait until it is in one of these states, and return which. An interrupt ends the waiting alone.

        Raises:
            TimeoutError: it was not, for `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._condition:
            while self.state not in states:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(
                        f"{self._thread.name}: still {self.state} after {timeout:g} s, not {' or '.join(states)}"
                    )
                # In short pieces: an interrupt that comes just before a wait begins is noticed only after it.
                self._condition.wait(0.5 if left is None else min(left, 0.5))
            return self.state

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end; returns what the work returned, raises what it raised. An interrupt ends the waiting alone.

        Raises:
            TimeoutError: it did not end within `timeout` seconds. RuntimeError: it was never started.
        """
        if self.state == "ready":
            raise RuntimeError(f"{self._thread.name}: it was not started")
        self.wait_for("stopped", "finished", "failed", timeout=timeout)
        self._thread.join()
        if self.error is not None:
            raise self.error
        return self._returned

    def _run(self) -> None:
        try:
            self._returned = self._work(self)
        except BaseException as error:
            self.error = error
        atexit.unregister(self._stop_at_exit)
        ended = "stopped" if self._wanted == "stop" else "finished"
        self._set("failed" if self.error is not None else ended)

    def _want(self, wanted: str) -> None:
        with self._condition:
            if self._wanted != "stop":
                self._wanted = wanted
                self._condition.notify_all()

    def _set(self, state: str, unless: tuple[str, ...] = ()) -> None:
        with self._condition:
            if self.state not in unless:
                self._move(state)

    def _move(self, state: str) -> None:
        self.state = state
        self._condition.notify_all()
        self._on_change()

    def _stop_at_exit(self) -> None:
        self.stop()
        # The end of the interpreter under a running thread crashes. A step that takes longer is left to that.
        self._thread.join(timeout=30.0)
