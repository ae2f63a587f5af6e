"""What a user installs: names and versions said in one place are said the same way in the others."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
CONDA_NAMES = {"pytorch": "torch", "bleach-with-css": "bleach", "playwright-python": "playwright"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CORE = ["torch", "safetensors"]
OF_THE_LAB = ["matplotlib", "ipywidgets", "papermill", "ipyparallel", "sklearn", "typer", "rich", "numpy", "IPython"]
OF_THE_LAB += ["itables", "transformers", "playwright"]


def pip_requirements(*lists: str) -> dict[str, SpecifierSet]:
    lines = [*PROJECT["dependencies"], *(line for name in lists for line in PROJECT["optional-dependencies"][name])]
    return {canonicalize_name(Requirement(line).name): Requirement(line).specifier for line in lines}


def conda_requirements() -> dict[str, SpecifierSet]:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    lines = [line for line in environment["dependencies"] if isinstance(line, str)]
    pairs = [line.partition(" ")[::2] for line in lines]
    return {canonicalize_name(CONDA_NAMES.get(name, name)): SpecifierSet(versions) for name, versions in pairs}


def pins() -> dict[str, Version]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines), "exact pins and nothing else"
    return {canonicalize_name(line.split("==")[0]): Version(line.split("==")[1]) for line in lines}


def test_conda_and_pip_users_get_the_same():
    conda = conda_requirements()
    assert conda.pop("python") == SpecifierSet(PROJECT["requires-python"])
    del conda["pip"]
    assert conda == pip_requirements("lab", "test")


def test_the_core_needs_torch_and_safetensors_alone():
    assert list(pip_requirements()) == CORE


def test_every_requirement_is_pinned_within_its_range():
    pinned = pins()
    for name, versions in pip_requirements("lab", "test", "bench").items():
        assert pinned[name] in versions, f"{name}: {pinned[name]} is not {versions}"
    assert pinned["torch"] == Version("2.13.0")


def test_python_versions_are_the_same_everywhere():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import check_python
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    supported = SpecifierSet(PROJECT["requires-python"])
    for minor in range(8, 17):
        refused = check_python.complaint((3, minor), True)
        assert (not refused) == (f"3.{minor}" in supported), f"3.{minor}: {refused!r}"
        assert not refused or f"is Python 3.{minor}" in refused
        listed = f"Programming Language :: Python :: 3.{minor}" in PROJECT["classifiers"]
        assert listed == (f"3.{minor}" in supported)
    assert "apt-get install python3.12-venv" in check_python.complaint((3, 12), False)


@pytest.mark.parametrize(("user", "options"), [(0, ["--allow-root"]), (1000, []), (10, [])])
def test_jupyterlab_starts_as_root_too(tmp_path, user, options):
    (tmp_path / "id").write_text(f"#!/bin/sh\necho {user}\n")
    (tmp_path / "id").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make test`
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    make = ["make", "--dry-run", "--old-file=.venv/.installed", "lab"]
    done = subprocess.run(make, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [".venv/bin/jupyter", "lab", "--notebook-dir=notebooks", *options]


def test_the_core_asks_for_torch_safetensors_and_the_standard_library_alone():
    allowed = {*CORE, *sys.stdlib_module_names}
    for path in (ROOT / "fsdp_ema_lib").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"fsdp_ema_lib.{node.module or ''}" if node.level else node.module]
            for name in names:
                room = name.startswith("fsdp_ema_lib") and not name.startswith("fsdp_ema_lib.lab")
                assert room or name.split(".")[0] in allowed, f"{path.name} imports {name}"


def test_everything_that_the_lab_imports_is_asked_for():
    asked, homes = pip_requirements("lab"), packages_distributions()
    own = {"fsdp_ema_lib", "kernel_host", *sys.stdlib_module_names}  # a script imports the latter from beside it
    for path in (ROOT / "fsdp_ema_lib" / "lab").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in {name.split(".")[0] for name in names} - own:
                assert set(map(canonicalize_name, homes[name])) & set(asked), f"{path.name} imports {name}"


def test_importing_the_core_imports_nothing_of_the_lab():
    # Hidden, not counted: torch itself loads numpy where there is one.
    code = f"""
import sys
for name in {OF_THE_LAB!r}:
    sys.modules[name] = None
import fsdp_ema_lib
for name in fsdp_ema_lib.__all__:
    getattr(fsdp_ema_lib, name)
loaded = [name for name in sys.modules if name.startswith("fsdp_ema_lib.lab")]
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


PUBLIC = """
EMA_FSDP barrier fsdp_state_dict fsdp_wrap is_main_process is_predictive_aux_key launch_distributed_job
normalize_generator_fsdp_key normalize_generator_fsdp_state_dict
""".split()


@pytest.mark.parametrize("name", PUBLIC)
def test_the_names_that_users_type_are_public_and_documented(name):
    import fsdp_ema_lib

    assert name in fsdp_ema_lib.__all__
    assert getattr(fsdp_ema_lib, name).__doc__


def test_everything_public_is_named_once_and_documented():
    import fsdp_ema_lib

    assert sorted(set(fsdp_ema_lib.__all__)) == sorted(fsdp_ema_lib.__all__), "a name twice"
    bare = [name for name in fsdp_ema_lib.__all__ if callable(o := getattr(fsdp_ema_lib, name)) and not o.__doc__]
    assert not bare


def test_the_typed_marker_ships():
    assert (ROOT / "fsdp_ema_lib" / "py.typed").is_file()
