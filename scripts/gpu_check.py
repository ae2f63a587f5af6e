"""Run the gpu-marked tests and every notebook on CUDA, under the Python that holds torch, without network or .venv.

Wheels of packages that this Python lacks can be carried along in a folder. They go into `.gpu-check/`, beside what the
machine has and never over it.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / ".gpu-check" / "site"
# Of the lab's packages, what no headless notebook imports.
NOT_NEEDED = {"bleach", "itables", "jinja2", "jupyterlab", "nbconvert"}
FOR_TESTS = {"pytest", "pytest-timeout"}


def torch_complaint() -> str:
    try:
        import torch
    except ImportError:
        return f"{sys.executable} has no torch. Name the Python that has: make gpu-check PYTHON=..."
    oldest = next(line.partition(">=")[2] for line in project()["dependencies"] if normalized(line) == "torch")
    if release(torch.__version__) < release(oldest):
        return f"torch {torch.__version__} of {sys.executable} is too old, {oldest} is needed: nothing was checked."
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} of {sys.executable} finds no CUDA device here: nothing was checked."
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    return ""


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def installed(**where: list[str]) -> set[str]:
    names = (distribution.metadata["Name"] for distribution in metadata.distributions(**where))
    return {normalized(name) for name in names if name}


def normalized(requirement: str) -> str:
    """The name that a requirement or a part of a file name begins with, as all write it."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]*\w", requirement)[0]).lower()


def install(wheels: Path) -> None:
    """Unpack the wheels of what is missing: a carried numpy over the machine's own could break its torch."""
    have = installed()
    missing = [wheel for wheel in sorted(wheels.glob("*.whl")) if normalized(wheel.name.split("-")[0]) not in have]
    if SITE.exists():
        shutil.rmtree(SITE)
    SITE.mkdir(parents=True)
    if missing:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(SITE)]
        subprocess.run([*pip, *map(str, missing)], check=True)


def lacking() -> list[str]:
    lines = [*project()["dependencies"], *project()["optional-dependencies"]["lab"]]
    needed = {normalized(line) for line in lines} - NOT_NEEDED | FOR_TESTS
    return sorted(needed - installed() - installed(path=[str(SITE)]))


def gpu_tests() -> list[str]:
    """Only files with the mark: what others import may be missing here."""
    return [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, help="folder of wheels for packages that this Python lacks")
    wheels = parser.parse_args().wheels
    if text := torch_complaint():
        sys.exit(text)
    if wheels is not None:
        if not any(wheels.glob("*.whl")):
            sys.exit(f"{wheels} holds no wheels")
        install(wheels)
    if names := lacking():
        sys.exit(f"{sys.executable} lacks {', '.join(names)}. Carry their wheels: make gpu-check WHEELS=folder")
    paths = [str(ROOT), str(SITE), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "JUPYTER_PATH": str(SITE / "share" / "jupyter"),
    }
    notebooks = ["run", "--device", "cuda", "--output", str(ROOT / "outputs" / "gpu")]
    checks = {
        "gpu tests": ["pytest", "-m", "gpu", *gpu_tests()],
        "notebooks": ["fsdp_ema_lib.lab.cli", *notebooks],
    }
    failed = []
    for name, command in checks.items():
        print(f"--- {name} ---", flush=True)
        if subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=environment).returncode != 0:
            failed.append(name)
    print(f"gpu-check: {' and '.join(failed)} failed" if failed else "gpu-check: all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
