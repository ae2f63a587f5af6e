"""What the suite says without a browser, and what is left when it is broken off; no JupyterLab needed for the first."""

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import psutil
import pytest
from processes import command, kill_what_stays

from browser import chromium
from browser.chromium import NoBrowser, find_chromium
from browser.conftest import give_up
from browser.workplace import write_copy
from fsdp_ema_lib.lab.kernel_host import MARK, marked_processes
from fsdp_ema_lib.lab.notebooks import inspect_notebook

ROOT = Path(__file__).parents[2]


def test_chromium_is_taken_from_the_variable_then_from_the_path(monkeypatch, tmp_path):
    for name in ("first", "chromium"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CHROMIUM", raising=False)
    assert find_chromium() == tmp_path / "chromium"
    monkeypatch.setenv("CHROMIUM", str(tmp_path / "first"))
    assert find_chromium() == tmp_path / "first"
    monkeypatch.setenv("CHROMIUM", str(tmp_path / "none"))
    with pytest.raises(NoBrowser, match=r"CHROMIUM=\S+none is no program. To use the one on the PATH: unset CHROMIUM"):
        find_chromium()


@pytest.mark.parametrize(
    ("system", "user", "command"),
    [
        ("debian", 0, "apt-get install -y chromium"),
        ("debian", 1000, "sudo apt-get install -y chromium"),
        ("fedora", 1000, f"{sys.executable} -m playwright install --with-deps chromium"),
    ],
)
def test_without_chromium_one_command_is_named(monkeypatch, tmp_path, system, user, command):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setattr(chromium, "playwrights_own", lambda: False)
    monkeypatch.setattr("platform.freedesktop_os_release", lambda: {"ID": system})
    monkeypatch.setattr("os.geteuid", lambda: user)
    with pytest.raises(NoBrowser) as refusal:
        find_chromium()
    assert str(refusal.value) == f"Chromium is not installed. To get it: {command}"


def test_without_playwright_the_command_is_to_set_up(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NoBrowser, match="^Playwright is not installed. To get it: make setup$"):
        find_chromium()


@pytest.mark.parametrize("ci", ["1", "true"])
def test_where_ci_is_set_a_missing_browser_fails(monkeypatch, ci):
    monkeypatch.setenv("CI", ci)
    with pytest.raises(pytest.fail.Exception, match="get it"):
        give_up("get it")


@pytest.mark.parametrize("ci", ["", "0", "false"])
def test_elsewhere_a_missing_browser_skips(monkeypatch, ci):
    monkeypatch.setenv("CI", ci)
    with pytest.raises(pytest.skip.Exception, match="get it"):
        give_up("get it")


def test_a_copy_has_other_values_on_the_same_lines(tmp_path):
    source = ROOT / "notebooks" / "04_ema_vs_live.ipynb"
    write_copy(source, tmp_path / source.name, {"steps": 7})
    before, after = (inspect_notebook(path).parameters for path in (source, tmp_path / source.name))
    assert after["steps"].default == 7
    assert {**after, "steps": before["steps"]} == before | {}
    assert after["steps"].help == before["steps"].help
    with pytest.raises(AssertionError, match="0 lines give a value to the parameter stepz"):
        write_copy(source, tmp_path / source.name, {"stepz": 7})


def pytest_on(*arguments: str, **environment: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ci", "status", "told", "workers"),
    [("1", 1, "1 error", "0"), ("", 0, "1 skipped", "0"), ("", 0, "1 skipped", "1")],
)
def test_the_suite_itself_fails_or_skips_and_prints_the_command(tmp_path, ci, status, told, workers):
    nothing = {"PATH": str(tmp_path), "PLAYWRIGHT_BROWSERS_PATH": str(tmp_path), "CI": ci, "CHROMIUM": ""}
    run = pytest_on("tests/browser/test_browser_kernel.py", "-k", "executed", "-n", workers, **nothing)
    output, _ = run.communicate(timeout=120)
    assert run.returncode == status and told in output, output
    assert "Chromium is not installed. To get it: " in output


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_suite_is_broken_off(blow):
    try:
        find_chromium()
    except NoBrowser as missing:
        give_up(str(missing))
    mark = uuid.uuid4().hex
    # Not under tmp_path: Chromium's sockets lie here, and their paths may not be long.
    with tempfile.TemporaryDirectory(prefix="broken-off-") as folder:
        run = pytest_on("tests/browser/test_browser_kernel.py", "-k", "ranks", **{MARK: mark, "TMPDIR": folder})
        wait_for_ranks(run, mark)
        run.send_signal(blow)
        run.communicate(timeout=90)
        assert run.returncode != 0
        assert kill_what_stays([*marked_processes(mark), *naming(folder)], 30) == []


def wait_for_ranks(run: subprocess.Popen, mark: str) -> None:
    while run.poll() is None:
        if sum(command(process).endswith(" ipyparallel.engine") for process in marked_processes(mark)) >= 2:
            return
        try:
            run.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError(f"ended before the ranks were there:\n{run.stdout.read()}")


def naming(folder: str) -> list[psutil.Process]:
    """Processes with the folder in their command line: Chromium's children hide their environment, but not this."""
    return [p for p in psutil.process_iter(["cmdline"]) if folder in " ".join(p.info["cmdline"] or ())]
