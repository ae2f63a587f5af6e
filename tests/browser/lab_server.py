"""One JupyterLab server with folders of its own, on loopback, which is gone afterwards, however that comes about."""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from fsdp_ema_lib.lab import kernel_host

ROOT = Path(__file__).parents[2]
START_LIMIT_S = 90.0
CONFIG = """\
import os, signal, threading

c.ServerApp.ip = "127.0.0.1"
c.ServerApp.port = 0
c.ServerApp.open_browser = False
c.ServerApp.allow_root = True
c.ServerApp.terminals_enabled = False
c.LabApp.expose_app_in_browser = True
c.LabApp.extension_manager = "readonly"  # the other one asks PyPI

def end_with_the_caller():
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)

# Standard input closes when the process that started this one is gone, killed included.
threading.Thread(target=end_with_the_caller, daemon=True).start()
"""
SETTINGS = {"notification": {"fetchNews": "false", "checkForUpdates": False}}


@dataclass(frozen=True)
class LabServer:
    """Where a running server is.

    Args:
        url: of its root, with a slash at the end.
        token: that lets one in.
        mark: in the environment of the server and of all that it starts, see `kernel_host`.
        process: the server's own.
        log: what it printed.
    """

    url: str
    token: str
    mark: str
    process: subprocess.Popen
    log: Path

    def started(self) -> list[psutil.Process]:
        """Kernels, ranks and whatever else the server's notebooks started and that is alive."""
        return [process for process in kernel_host.marked_processes(self.mark) if process.pid != self.process.pid]


@contextlib.contextmanager
def lab_server(root: Path, private: Path) -> Iterator[LabServer]:
    """Run a server on the notebooks under `root`; config, data, runtime, settings and workspaces lie in `private`.

    Its kernels import this checkout's library. At the end the server and everything it started are ended.

    Raises:
        RuntimeError: the server ended while starting, or did not answer in time; the text holds the end of its log.
    """
    token, mark, log = secrets.token_hex(24), uuid.uuid4().hex, private / "server.log"
    environment = _environment(private, mark) | {"JUPYTER_TOKEN": token}
    with log.open("wb") as log_file:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", str(root)],
            stdin=subprocess.PIPE,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            cwd=root,
            env=environment,
            start_new_session=True,  # a Ctrl-C in the terminal is pytest's to handle
        )
    try:
        yield LabServer(_url(process, private, log), token, mark, process, log)
    finally:
        kernel_host.end_marked(mark)
        process.wait()
        process.stdin.close()


def _environment(private: Path, mark: str) -> dict[str, str]:
    folders = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    for name in folders.values():
        (private / name).mkdir(parents=True)
    (private / "config" / "jupyter_lab_config.py").write_text(CONFIG)
    settings = private / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    for name, values in SETTINGS.items():
        (settings / f"{name}.jupyterlab-settings").write_text(json.dumps(values))
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = kernel_host.marked_environment(mark) | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment.pop("CI", None)  # what a person sees, progress bars included
    return environment | {variable: str(private / name) for variable, name in folders.items()}


def _url(process: subprocess.Popen, private: Path, log: Path) -> str:
    """Wait until the server has written down which port it found free, and listens there, which is a little later."""
    note, deadline = private / "runtime" / f"jpserver-{process.pid}.json", time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline and process.poll() is None:
        if note.is_file() and (text := note.read_text()).endswith("}") and _listens(port := json.loads(text)["port"]):
            return f"http://127.0.0.1:{port}/"
        time.sleep(0.05)
    what = "did not start in time" if process.poll() is None else f"ended with status {process.returncode}"
    raise RuntimeError(f"JupyterLab {what}:\n{log.read_text(errors='replace')[-4000:]}")


def _listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0
