"""What starting costs: importing the library beside importing torch, and a run of a sweep beyond its cells.

    python benchmarks/bench_start.py --pairs 11 --runs 12 --out outputs/bench

Both imports take turns, each in a fresh interpreter; the ratio is the median over the pairs. The sweep is of a notebook
whose cells do nothing, so that its whole time is what the runs lose to starting and ending.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook

IMPORT_LIMIT = 1.15
RUN_LIMIT_S = 5.0
TORCH = "import torch, torch.distributed.fsdp, torch.distributed.tensor"
LIBRARY = "import fsdp_ema_lib"


def import_seconds(statement: str) -> float:
    code = f"import time; start = time.perf_counter(); {statement}; print(time.perf_counter() - start)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return float(done.stdout)


def import_ratios(pairs: int) -> list[float]:
    import_seconds(LIBRARY)  # the first one reads the disk and writes byte code
    return [import_seconds(LIBRARY) / import_seconds(TORCH) for _ in range(pairs)]


def seconds_per_run(runs: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        notebook = Path(folder) / "01_nothing.ipynb"
        parameters = new_code_cell("seed = 0  # number of the run", metadata={"tags": ["parameters"]})
        nbformat.write(new_notebook(cells=[parameters, new_code_cell("seed + 1")]), notebook)
        command = [sys.executable, "-m", "fsdp_ema_lib.lab.cli", "sweep", str(notebook), "-p", f"seed=0:{runs}"]
        start = time.monotonic()
        subprocess.run([*command, "-o", folder], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return (time.monotonic() - start) / runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=11, help="pairs of imports")
    parser.add_argument("--runs", type=int, default=12, help="runs of the sweep")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"), help="folder for start.json")
    options = parser.parse_args()
    ratios = import_ratios(options.pairs)
    ratio, per_run = statistics.median(ratios), seconds_per_run(options.runs)
    print("| what starting costs | measured | at most |\n| --- | --- | --- |")
    print(f"| import fsdp_ema_lib / import torch with FSDP and DTensor | {ratio:.2f} | {IMPORT_LIMIT} |")
    print(f"| a run of a sweep beyond its cells, s | {per_run:.1f} | {RUN_LIMIT_S:g} |")
    options.out.mkdir(parents=True, exist_ok=True)
    result = {"machine": platform.platform(), "import_ratios": ratios, "seconds_per_run": per_run}
    (options.out / "start.json").write_text(json.dumps(result, indent=1) + "\n")
    missed = ratio > IMPORT_LIMIT or per_run > RUN_LIMIT_S
    print("a target was missed" if missed else "every target was reached")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
