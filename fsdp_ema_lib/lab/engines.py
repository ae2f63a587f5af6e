"""ipyparallel engines for `cluster`: a local cluster and its end, or those of a profile, which stay."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ipyparallel
from IPython.core.profiledir import ProfileDir, ProfileDirError
from IPython.paths import get_ipython_dir
from traitlets.config import Config

from fsdp_ema_lib.lab import engine_side
from fsdp_ema_lib.lab.kernel_host import MARK, end_marked, marked_environment

_GUARD = Path(__file__).with_name("cluster_guard.py")
_LOG_TAIL = 4000
# An engine is known to the controller from the second heartbeat on, and by default these are 3 s apart. It is given up
# after as many seconds without one as by default.
_HEARTBEAT = ["--HeartMonitor.period=500", "--HeartMonitor.max_heartmonitor_misses=60"]

# ipyparallel tells a notebook about each step; what the user must know comes as an exception.
_silent = logging.getLogger(f"{__name__}.ipyparallel")
_silent.setLevel(logging.CRITICAL + 1)


class LocalEngines:
    """A controller and engines on loopback, in a private folder.

    All their processes carry a mark in the environment, and a guard outside the kernel ends what carries it as soon as
    a pipe from the kernel closes. So there is one way to the end, whether the kernel asks for it, exits or is killed.

    Attributes:
        folder: theirs alone, mode 0700.
        client: ipyparallel's, after `start`.
        lost: set when a process has died that nobody asked to.
        death: of that process the id, how it ended, and where it was.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.client: Any = None
        self.lost, self.death = threading.Event(), (-1, "", "")
        self._ending = False
        self._launchers: list[Any] = []
        self._mark = uuid.uuid4().hex
        self.folder = Path(tempfile.mkdtemp(prefix="fsdp-ema-ranks-"))
        command = [sys.executable, str(_GUARD), self._mark, str(self.folder)]
        # A session of its own: an interrupt of the kernel is not for the guard.
        self._guard = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ranks", daemon=True)
        self._thread.start()

    def start(self, limit_s: float) -> list[int]:
        """The ids of the engines, in the order of the ranks."""
        self.client = self._do(self._start())
        try:
            self.client.wait_for_engines(self.count, timeout=limit_s, interactive=False)
        except ipyparallel.error.EngineError:
            pass  # one that ended at once: `lost` says more
        if self.lost.is_set():
            raise RuntimeError(f"an engine died{self.death[1]} at its start. {self.death[2]}")
        return sorted(self.client.ids)

    async def _start(self) -> Any:
        cluster = ipyparallel.Cluster(
            profile_dir=str(self.folder / "profile"),
            cluster_id="",
            controller_ip="127.0.0.1",
            controller_args=_HEARTBEAT,
            delay=0.0,
            load_profile=False,
            shutdown_atexit=False,
            config=Config(),
            log=_silent,
        )
        await cluster.start_controller(environment=self._environment())
        self._watch(cluster.controller)
        engine_set = cluster.engines[await cluster.start_engines(self.count, environment=self._environment())]
        for launcher in list(engine_set.launchers.values()):
            self._watch(launcher)
        return await cluster.connect_client()

    def _watch(self, launcher: Any) -> None:
        self._launchers.append(launcher)
        launcher.on_stop(lambda data: self._ended(launcher, data))

    def _environment(self) -> dict[str, str]:
        loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        interfaces = {name: loopback[0] for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if loopback}
        return {
            **{name: value for name, value in interfaces.items() if name not in os.environ},
            MARK: marked_environment(self._mark)[MARK],
            "MPLBACKEND": "Agg",  # the kernel's own wants the kernel
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(os.path.abspath(place) for place in sys.path),
        }

    def _do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:  # an interrupt, too: start nothing more
            future.cancel()
            raise

    def _ended(self, launcher: Any, data: dict[str, Any]) -> None:
        """Called in the loop's thread when one of the processes has ended."""
        if self._ending:
            return
        self._ending = True
        code = data.get("exit_code")
        how = f" ({signal.Signals(-code).name})" if isinstance(code, int) and code < 0 else f" (exit code {code})"
        log = launcher.get_output()[-_LOG_TAIL:] if code and code > 0 else ""
        self.death = (launcher.pid, how, self._stack(launcher.pid) or log)
        self.lost.set()
        self._guard.stdin.close()

    def stack_file(self, pid: int) -> str:
        """Where `engine_side.write_stacks_to` should write for this process."""
        return str(self.folder / f"stack-{pid}")

    def _stack(self, pid: int) -> str:
        file = Path(self.stack_file(pid))
        text = file.read_text(errors="replace") if file.is_file() else ""
        first, *stacks = text.partition("\nExtension modules:")[0].strip().split("\n\n")
        # After a crash: of the thread that crashed, if it runs Python, and of the main thread, which comes last.
        wanted = [stack for i, stack in enumerate(stacks, 1) if stack.startswith("Current") or i == len(stacks)]
        return "\n\n".join(part[:_LOG_TAIL] for part in [first, *wanted])

    def where(self, pids: Sequence[int]) -> list[str]:
        """The Python stack of each of these engines, now; at most two seconds are spent on it."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and not all(self._stack(pid) for pid in pids):
            time.sleep(0.05)
        return [self._stack(pid) or "still starting" for pid in pids]

    def interrupt(self) -> None:
        """Nothing to do: `end` ends them, whatever they are doing."""

    def end(self) -> None:
        """End all processes and remove the folder."""
        self._ending = True
        try:
            # Whatever `start` was starting when it was interrupted has been started after this, and can be ended.
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result()
            if self.client is not None:
                self.client.close(linger=0)
        finally:
            self._guard.stdin.close()
        if self._guard.wait() != 0:  # somebody ended the guard itself
            end_marked(self._mark)
            shutil.rmtree(self.folder, ignore_errors=True)
        for launcher in self._launchers:
            asyncio.run_coroutine_threadsafe(launcher.join(timeout=5), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class AttachedEngines:
    """The engines of a cluster that runs in an ipyparallel profile. They are used and left running."""

    folder = None

    def __init__(self, profile: str, cluster_id: str, count: int | None) -> None:
        self.profile, self.count = profile, count
        self.lost, self.death = threading.Event(), (-1, "", "")
        name = f"profile {profile!r}" + (f", cluster {cluster_id!r}" if cluster_id else "")
        option = f" --cluster-id={cluster_id}" if cluster_id else ""
        try:
            folder = ProfileDir.find_profile_dir_by_name(get_ipython_dir(), profile).security_dir
            file = Path(folder) / ("-".join(filter(None, ("ipcontroller", cluster_id, "client"))) + ".json")
            self.client = ipyparallel.Client(str(file.resolve(strict=True)), profile=profile)
        # TimeoutError, which is an OSError: the file of a controller that is gone.
        except (ProfileDirError, OSError) as error:
            raise RuntimeError(
                f"{name}: no cluster is running there ({error}). "
                f"Start one: ipcluster start --profile={profile}{option} -n {count or 4}"
            ) from None
        self._ids = sorted(self.client.ids)
        if len(self._ids) < (count or 1):
            self.client.close()
            raise ValueError(
                f"{name}: {count or 'at least 1'} ranks were asked for, but {len(self._ids)} engines are there. "
                "Start more, or wait until all have registered."
            )
        self._ids = self._ids[:count]

    def start(self, limit_s: float) -> list[int]:
        """The ids of the engines, in the order of the ranks."""
        return self._ids

    def where(self, pids: Sequence[int]) -> list[str]:
        """Unknown: they may be on other machines."""
        return []

    def _alive(self) -> list[int]:
        return [engine for engine in self._ids if engine in self.client.ids]

    def interrupt(self) -> None:
        """Interrupt what they are doing, as far as it is Python."""
        if self._alive():
            self.client.send_signal("SIGINT", targets=self._alive(), block=False)

    def end(self) -> None:
        """Take them out of the group. One that is stuck does so when it comes free."""
        if self._alive():
            self.client[self._alive()].apply_async(engine_side.leave).wait(5.0)
        self.client.close()
