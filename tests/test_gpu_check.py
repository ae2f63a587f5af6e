"""scripts/gpu_check.py, as far as it goes without a GPU: what it asks for, what it unpacks, what it refuses."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from IPython.core.inputtransformer2 import TransformerManager

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "gpu_check.py"


@pytest.fixture
def gpu_check(tmp_path, monkeypatch):
    """The script as a module, with a place of its own for what it unpacks."""
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SITE", tmp_path / "site")
    return module


def write_wheel(folder: Path, name: str) -> None:
    about = f"{name}-9.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-9.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


def test_without_cuda_it_says_so_and_fails():
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and done.stdout == ""
    said = f"torch {torch.__version__} of {sys.executable} finds no CUDA device here: nothing was checked.\n"
    assert done.stderr == said


@pytest.mark.parametrize(
    ("version", "too_old"), [("2.10.1", True), ("2.9.0+cu128", True), ("2.11.0a0+nv", False), ("3.0.0", False)]
)
def test_a_torch_that_is_too_old_is_named(gpu_check, monkeypatch, version, too_old):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ("is too old, 2.11 is needed" in gpu_check.torch_complaint()) == too_old


def test_only_what_is_missing_is_taken_from_the_wheels(gpu_check, monkeypatch, tmp_path):
    assert gpu_check.lacking() == []
    real, have = gpu_check.installed, gpu_check.installed()
    gone = {"safetensors", "psutil", "pyyaml", "playwright", "jupyterlab"}
    monkeypatch.setattr(gpu_check, "installed", lambda **where: real(**where) if where else have - gone)
    assert gpu_check.lacking() == ["psutil", "pyyaml", "safetensors"]
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("numpy", "PyYAML", "psutil"):
        write_wheel(wheels, name)
    gpu_check.install(wheels)
    assert sorted(path.name for path in gpu_check.SITE.glob("*.py")) == ["PyYAML.py", "psutil.py"]
    assert gpu_check.lacking() == ["safetensors"]


def test_the_gpu_tests_are_found_by_their_mark(gpu_check):
    found = {Path(path).relative_to(ROOT).as_posix() for path in gpu_check.gpu_tests()}
    assert {"tests/test_wrapping.py", "tests/lab/test_cluster.py"} <= found
    assert "tests/test_decay.py" not in found and not any("browser" in path for path in found)


@pytest.mark.slow
def test_neither_the_command_line_nor_a_notebook_nor_a_gpu_test_imports_what_is_not_asked_for(gpu_check):
    """Modules have the names of their packages here, but for the hyphen."""
    imports = []
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "code":
                tree = ast.parse(TransformerManager().transform_cell("".join(cell["source"])))
                imports += [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert len(imports) > 20
    hidden = [name.replace("-", "_") for name in gpu_check.NOT_NEEDED | {"playwright", "hypothesis", "xdist"}]
    program = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({hidden}))
sys.path += ["tests", "benchmarks"]
import fsdp_ema_lib.lab.cli
for statement in {list(map(ast.unparse, imports))}:
    exec(statement)
for path in {gpu_check.gpu_tests()}:
    runpy.run_path(path)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
