import json
import math
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import nbformat
import psutil
import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

import fsdp_ema_lib
from fsdp_ema_lib.lab.kernel_host import MARK
from fsdp_ema_lib.lab.notebooks import NotebookError, inspect_notebook
from fsdp_ema_lib.lab.runs import LOG_FILE, RESULT_FILE, Stop, hidden_errors, load_result, run_notebook

# Deaf to everything but SIGKILL, as a kernel stuck in a library call is, so that it clears nothing up.
DEAF = """\
import signal, tempfile
tempfile.mkdtemp()
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
while True:
    signal.pause()
"""


def run(path: Path, folder: Path, parameters: dict | None = None, **limits):
    return run_notebook(inspect_notebook(path), parameters or {}, folder, **{"timeout": 100.0, **limits})


def printed(executed: Path) -> str:
    cells = [cell for cell in nbformat.read(executed, as_version=4).cells if cell.cell_type == "code"]
    return "".join(output.text for cell in cells for output in cell.outputs if output.output_type == "stream")


def test_a_good_run_gets_typed_parameters_and_leaves_results_and_no_process(make_notebook, tmp_path, no_orphans):
    path = make_notebook(
        "import json, os, pathlib, subprocess, sys",
        "given = [steps, rate, flag, decays, label]",
        'print(json.dumps([given, output_dir, os.environ.get("MPLBACKEND"), sys.executable]))',
        # Its own session, as kernels and cluster engines have one.
        'subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)',
        'metrics = {"claims": {"it ran": True, "it flew": False}}',
        'pathlib.Path(output_dir, "metrics.json").write_text(json.dumps(metrics))',
    )
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata.kernelspec.name = "no-such-kernel"
    nbformat.write(notebook, path)
    folder = path.parents[1] / "outputs" / "{braces}" / "09_small"
    folder.mkdir(parents=True)
    (folder / "mine.png").touch()
    progress = []
    given = {"steps": 7, "rate": 2, "flag": False, "decays": [1, 0.5], "label": 'it\'s "so"'}
    result = run(path, folder, given, on_progress=lambda done, total: progress.append((done, total)))

    assert result.passed, (result.error, (folder / LOG_FILE).read_text())
    typed = {**given, "rate": 2.0, "decays": [1.0, 0.5]}
    values, output_dir, backend, python = json.loads(printed(folder / "09_small.ipynb").splitlines()[0])
    assert values == list(typed.values())
    assert type(values[1]) is float and type(values[3][0]) is float
    assert output_dir == "outputs/{braces}/09_small"
    assert backend is None or backend.startswith("module://matplotlib_inline")
    assert Path(python).samefile(sys.executable)
    assert progress == [(done, 9) for done in range(1, 10)]
    assert result.claims == {"it ran": True, "it flew": False}
    assert result.parameters == typed
    assert load_result(folder) == result
    assert result.settings == {"device": "auto", **typed}
    assert result.versions == {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fsdp_ema_lib": fsdp_ema_lib.__version__,
    }
    assert result.commit == "", "not in a repository"
    assert 0 < result.seconds < 100
    assert (folder / "mine.png").exists(), "no run had been here before, so this belongs to someone"


@pytest.mark.parametrize(
    ("code", "limits", "status", "error"),
    [
        (["1 / 0", "print('not reached')"], {}, "failed", "In [3]: ZeroDivisionError: division by zero"),
        (["import os; os._exit(0)"], {}, "failed", "the kernel died"),
        (["import sys; sys.exit(0)", "assert False"], {}, "failed", "cell 5 did not run"),
        (["while True: pass"], {"cell_timeout": 1.0}, "failed", "longer than the limit of 1 s for one cell"),
        ([DEAF], {"timeout": 7.0}, "timed out", "longer than the limit of 7 s"),
        (
            ["from ipywidgets import interact", "interact(lambda rate: rate / 0, rate=(0.0, 1.0))"],
            {},
            "failed",
            "hidden in a widget: ZeroDivisionError",
        ),
    ],
    ids=["raises", "dies", "exits with 0", "cell hangs", "kernel is deaf", "error in a widget"],
)
def test_what_goes_wrong_is_said_and_ended(make_notebook, tmp_path, no_orphans, code, limits, status, error):
    folder = tmp_path / "results"
    result = run(make_notebook(*code), folder, **limits)
    assert result.status == status
    assert error in result.error
    assert json.loads((folder / RESULT_FILE).read_text())["status"] == status
    assert (error.split(": ")[-1] in result.traceback) == ("Error" in error or "did not run" in error), result.traceback
    assert "\x1b" not in result.traceback
    assert (folder / LOG_FILE).is_file()


def test_what_torch_compiles_outlives_a_run_while_other_temporary_files_do_not(
    make_notebook, tmp_path, no_orphans, monkeypatch
):
    """`no_orphans` sees to the latter."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    code = "import json, os, tempfile\ntempfile.mkdtemp()\nfrom torch._inductor.runtime import cache_dir_utils as c"
    path = make_notebook(code, "print(json.dumps([tempfile.gettempdir(), c.cache_dir()]))")
    result = run(path, tmp_path / "results")
    assert result.passed, result.error
    own, cache = json.loads(printed(tmp_path / "results" / path.name))
    assert Path(own).parent == Path(tempfile.gettempdir())
    assert cache == default_cache_dir()
    os.rmdir(cache)


def test_a_killed_runner_takes_the_kernel_with_it(make_notebook, tmp_path, no_orphans):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    path = make_notebook(f"import os, pathlib; pathlib.Path({str(fifo)!r}).write_text(str(os.getpid()))", DEAF)
    code = (
        "import sys; from fsdp_ema_lib.lab.runs import run_notebook; "
        "from fsdp_ema_lib.lab.notebooks import inspect_notebook; "
        "run_notebook(inspect_notebook(sys.argv[1]), {}, sys.argv[2])"
    )
    runner = subprocess.Popen([sys.executable, "-c", code, str(path), str(tmp_path / "results")])
    kernel = psutil.Process(int(fifo.read_text()))  # blocks until the kernel is there
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    assert psutil.wait_procs([kernel], timeout=20)[1] == []
    assert load_result(tmp_path / "results").status == "unfinished", "nobody was left to say how it ended"


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_without_a_runner_clears_up_even_where_the_kernel_ends_first(tmp_path, fails):
    (tmp_path / "temporary").mkdir()
    script = f"""
import select, sys, time
from fsdp_ema_lib.lab import kernel_host

def execute(job, report):
    select.select([0], [], [])  # until the runner is gone
    if {fails}:
        raise RuntimeError("the kernel died")

kernel_host._execute = execute
kernel_host.end_marked = lambda mark: time.sleep(0.5)
sys.exit(kernel_host.main())
"""
    reader, writer = os.pipe()
    os.close(reader)
    job = {"progress": writer, "temporary": str(tmp_path / "temporary")}
    host = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=(writer,),
        env=os.environ | {MARK: "x:y"},
    )
    os.close(writer)
    _, said = host.communicate((json.dumps(job) + "\n").encode(), timeout=60)
    assert host.returncode == 1, said
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("parameters", "limits", "error"),
    [
        ({"no_such": 1}, {}, r"has no parameter no_such. It takes:\n.*steps = 400  # how many"),
        ({"steps": "many"}, {}, r"steps: expected a whole number, like 400, found 'many' \(str\)"),
        ({"output_dir": "x"}, {}, "output_dir: the runner sets it"),
        ({}, {"timeout": 0.0}, "timeout: expected a number of seconds above 0, got 0"),
        ({}, {"cell_timeout": math.nan}, "cell_timeout: expected a number of seconds above 0, got nan"),
    ],
)
def test_refused_before_anything_starts(make_notebook, tmp_path, no_orphans, parameters, limits, error):
    folder = tmp_path / "results"
    with pytest.raises(NotebookError, match=f"(?s){error}"):
        run(make_notebook("raise SystemExit"), folder, parameters, **limits)
    assert not folder.exists()


def test_parameters_for_a_notebook_without_a_parameters_cell_are_refused(make_notebook, tmp_path):
    path = make_notebook("1", parameters=None)
    with pytest.raises(NotebookError, match="no cell is tagged parameters, so steps would be ignored"):
        run(path, tmp_path / "results", {"steps": 1})


def test_a_folder_that_is_a_file_or_holds_the_notebook_is_refused(make_notebook, tmp_path):
    path = make_notebook("1")
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotebookError, match="cannot be a folder"):
            run(path, folder)
    before = path.read_bytes()
    with pytest.raises(NotebookError, match="holds the notebook itself"):
        run(path, path.parent)
    assert path.read_bytes() == before


def test_a_notebook_that_is_gone_is_named(make_notebook, tmp_path):
    path = make_notebook("1")
    info = inspect_notebook(path)
    executed = tmp_path / "results" / path.name
    executed.parent.mkdir()
    path.rename(executed)  # what an earlier run left lies there still
    with pytest.raises(NotebookError, match=f"{path}: no such notebook"):
        run_notebook(info, {}, executed.parent)
    assert executed.exists()


def test_two_runners_do_not_write_to_one_folder(make_notebook, tmp_path):
    path, folder = make_notebook("1"), tmp_path / "results"
    folder.mkdir()
    hold = "import sys, pathlib; from fsdp_ema_lib.directory_lock import DirectoryLock as L; "
    hold += "lock = L(pathlib.Path(sys.argv[1])); print('held', flush=True); input()"
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(NotebookError, match=f"results: in use by another job .*pid {holder.pid}"):
        run(path, folder)
    holder.communicate("\n")


def test_a_run_in_another_thread_can_be_stopped(make_notebook, tmp_path, no_orphans):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    path = make_notebook(f"import pathlib; pathlib.Path({str(fifo)!r}).write_text('here')", DEAF)
    results = []
    with Stop() as stop:
        thread = threading.Thread(target=lambda: results.append(run(path, tmp_path / "results", stop=stop)))
        thread.start()
        assert fifo.read_text() == "here"
        stop.set()
        thread.join(timeout=30)
    assert [result.status for result in results] == ["interrupted"]
    assert load_result(tmp_path / "results").status == "interrupted"


STUCK_RANKS = """\
from fsdp_ema_lib.lab.cluster import ranks
def stuck(fifo):
    import signal
    import torch.distributed as dist
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    dist.barrier()
    if dist.get_rank() == 0:
        open(fifo, "w").write("here")
    while True:
        signal.pause()
ranks(2, device="cpu").run(stuck, "{fifo}")
"""


@pytest.mark.slow
def test_a_run_that_ends_with_stuck_ranks_leaves_nothing(make_notebook, tmp_path, no_orphans, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))  # that may stay
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    path, results = make_notebook(STUCK_RANKS.format(fifo=fifo)), []
    with Stop() as stop:
        thread = threading.Thread(target=lambda: results.append(run(path, tmp_path / "results", stop=stop)))
        thread.start()
        assert fifo.read_text() == "here"
        stop.set()
        thread.join(timeout=30)
    assert [result.status for result in results] == ["interrupted"]


def test_a_full_disk_is_said_in_a_line(make_notebook, tmp_path, no_orphans):
    # A limit for the size of a file meets a write as a full disk does, and children inherit it.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        result = run(make_notebook("print('x' * 50_000)"), tmp_path / "results")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.status == "failed"
    assert result.error == f"File too large: {tmp_path}/results/09_small.ipynb"
    assert load_result(tmp_path / "results") == result


def test_a_disk_too_full_for_the_verdict_fails_the_run(make_notebook, tmp_path, no_orphans):
    path, limits = make_notebook("1"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        result = run(path, tmp_path / "results")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.status == "failed"
    assert result.error.count("File too large") == 2 and "its result could not be recorded" in result.error
    assert load_result(tmp_path / "results") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"notebook": "09_small"}', '{"status": "passed", "more": 1}'])
def test_a_damaged_record_is_no_verdict(tmp_path, text):
    (tmp_path / RESULT_FILE).write_text(text)
    assert load_result(tmp_path) is None


def test_what_an_earlier_run_left_does_not_pass_for_the_result_of_this_one(make_notebook, tmp_path, no_orphans):
    folder = tmp_path / "results"
    folder.mkdir()
    stale = [folder / name for name in (RESULT_FILE, "metrics.json", "curve.png", "curve.svg", "09_small.html")]
    for path in stale:
        path.write_text('{"claims": {"it ran": true}}')
    assert run(make_notebook("1 / 0"), folder).claims == {}
    assert [path.name for path in stale if path.exists()] == [RESULT_FILE]
    assert not load_result(folder).passed


def test_hidden_errors_of_a_healthy_notebook_are_none(make_notebook):
    assert hidden_errors(make_notebook("1")) == []
