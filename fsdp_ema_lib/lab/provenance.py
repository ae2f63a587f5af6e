"""What a run stood on: digests of the notebook, the library and the parameters, versions, and the commit."""

import hashlib
import json
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import fsdp_ema_lib
from fsdp_ema_lib.lab.notebooks import NotebookInfo, read_notebook, repo_root

PACKAGE = "fsdp_ema_lib"


def digests(info: NotebookInfo, settings: Mapping[str, Any]) -> dict[str, str]:
    """Digest what decides the outcome of a run; a run need not be repeated while all three are the same.

    A module of the reader's own, named by an import path among the parameters, is not looked into.

    Args:
        info: from `inspect_notebook`.
        settings: the values of all parameters, as `settings_of` returns them.

    Returns:
        SHA-256 under `notebook`, `library` and `parameters`. Of the notebook its code cells count, not its prose: a
        corrected sentence does not cost a night of runs. Of the library every Python file of the package counts.

    Raises:
        NotebookError: the notebook cannot be read.
    """
    code = [
        [cell.source, sorted(cell.metadata.get("tags", []))]
        for cell in read_notebook(info.path).cells
        if cell.cell_type == "code"
    ]
    return {
        "notebook": _sha256(code),
        "library": library_digest(library_folder(repo_root(info.path.parent))),
        "parameters": _sha256(dict(settings)),
    }


def settings_of(info: NotebookInfo, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values of all parameters of a run: what was given, and the notebook's defaults for the rest.

    `output_dir` is left out: where results go is not what they are.
    """
    known = info.parameters or {}
    return {name: given.get(name, known[name].default) for name in known if name != "output_dir"}


def library_folder(cwd: Path) -> Path:
    """Find the source of the library that a kernel started in `cwd` imports: a kernel looks there first."""
    local = cwd / PACKAGE
    return local if (local / "__init__.py").is_file() else Path(fsdp_ema_lib.__file__).parent


def library_digest(folder: Path) -> str:
    """SHA-256 over the names and contents of all Python files below a folder."""
    files = sorted(path for path in folder.rglob("*.py") if path.is_file())
    return _sha256([[path.relative_to(folder).as_posix(), path.read_text(encoding="utf-8")] for path in files])


def versions() -> dict[str, str]:
    """Versions of Python, torch and the library."""
    return {"python": platform.python_version(), "torch": str(torch.__version__), PACKAGE: fsdp_ema_lib.__version__}


def commit(folder: str | Path) -> str:
    """Hash of the git commit that a folder is at, with `-dirty` behind it if files differ from it.

    Empty outside a repository, before its first commit, and where there is no git.
    """
    try:
        head = _git(folder, "rev-parse", "--verify", "HEAD").strip()
        return f"{head}-dirty" if _git(folder, "status", "--porcelain") else head
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(folder: str | Path, *arguments: str) -> str:
    # No optional locks: several runs ask at once, and none may stand in the way of someone's own git.
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()
