"""What the README prints does what it says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    "launcher", [[], ["-m", "torch.distributed.run", "--nproc-per-node", "2"]], ids=["python", "torchrun"]
)
def test_the_training_loop_runs_as_printed(tmp_path, launcher):
    script = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, *launcher, "train.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    weights = torch.load(tmp_path / "ema.pt", weights_only=True)
    torch.nn.Linear(8, 1).load_state_dict(weights, strict=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ema.pt", "train.py"]


def test_every_notebook_is_in_the_table_with_its_question():
    from fsdp_ema_lib.lab.notebooks import inspect_notebook

    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = inspect_notebook(path)
        row = next((line for line in README.splitlines() if line.startswith(f"| {path.stem[:2]} ")), None)
        assert row is not None, path.stem
        assert notebook.question in row, path.stem


def test_every_public_name_in_the_readme_exists():
    import fsdp_ema_lib

    for name in ("EMA_FSDP", "fsdp_wrap", "fsdp2_wrap", "launch_distributed_job", "distributed_job", "save_checkpoint"):
        assert name in README and hasattr(fsdp_ema_lib, name), name


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
