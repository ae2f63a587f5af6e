import pickle
import subprocess

import pytest
import torch
from torch import nn

from fsdp_ema_lib.checkpoint_manager import CheckpointManager
from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.lab.damage import FAULTS, READINGS, TRACE, as_markdown, plant_a_pickle, read_damaged


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "ema": EMA_FSDP(model, 0.9)}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder, training = tmp_path_factory.mktemp("checkpoints"), parts()
    with CheckpointManager(folder) as checkpoints:
        for step in (1, 2):
            training["model"](torch.randn(8, 40)).square().mean().backward()
            training["optimizer"].step()
            training["ema"].update(training["model"])
            checkpoints.save(step, **training)
    return folder


@pytest.fixture(scope="module")
def report(directory):
    return read_damaged(directory, FAULTS, parts)


def test_without_damage_every_reading_is_right(report):
    assert {(reading.step, reading.differing, reading.text) for reading in report["none"].values()} == {(2, 0, "")}


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("one bit of a tensor flipped", "DamagedCheckpointError", "step_00000002/__0_0.distcp: its checksum is"),
        ("one bit of the manifest flipped", "DamagedCheckpointError", "step_00000002/manifest.json: damaged"),
        ("a tensor file cut short by a byte", "DamagedCheckpointError", "bytes, the manifest says"),
        ("a tensor file missing", "DamagedCheckpointError", "step_00000002/__0_0.distcp: missing"),
        ("a tensor file swapped with the older step's", "DamagedCheckpointError", "its checksum is"),
        ("a tensor file replaced by a link", "UnsafeCheckpointError", "refused a symlink to step_00000001/__0_0"),
        ("a pickle planted in the metadata, the manifest made to fit", "UnsafeCheckpointError", "posix.system"),
    ],
)
def test_damage_is_named_and_the_older_step_is_found(report, fault, error, text):
    strict, lenient = (report[fault][reading] for reading in list(READINGS)[1:])
    assert (strict.step, strict.error, strict.differing) == (None, error, 0) and text in strict.text
    assert (lenient.step, lenient.error, lenient.differing) == (1, "", 0)
    assert "the checkpoint of step 2 is damaged, going back to step 1" in lenient.text


def test_sizes_alone_do_not_see_a_flipped_bit_or_a_swapped_file(report):
    unseen = {fault: readings["load()"].differing for fault, readings in report.items() if readings["load()"].differing}
    assert unseen["one bit of a tensor flipped"] == 1
    assert unseen["a tensor file swapped with the older step's"] > 1000
    assert len(unseen) == 2


def test_without_a_manifest_there_is_no_checkpoint(report):
    assert {reading.step for reading in report["the manifest missing"].values()} == {1}


def test_no_reading_leaves_anything_behind(report):
    assert [fault for fault, readings in report.items() for reading in readings.values() if reading.appeared] == []


def test_the_planted_pickle_is_live(directory, tmp_path):
    """Otherwise its refusal would show nothing."""
    for step in ("step_00000001", "step_00000002"):
        subprocess.run(["cp", "-r", str(directory / step), str(tmp_path / step)], check=True)
    plant_a_pickle(tmp_path / "step_00000002", tmp_path / "step_00000001")
    assert not (tmp_path / TRACE).exists()
    pickle.loads((tmp_path / "step_00000002" / ".metadata").read_bytes())
    assert (tmp_path / TRACE).exists()


def test_the_original_is_as_it_was(directory, report):
    with CheckpointManager(directory, read_only=True) as checkpoints:
        for step in (1, 2):
            checkpoints.verify(step)
    assert not (directory / TRACE).exists()


def test_the_table_has_a_row_for_each_fault_and_a_column_for_each_reading(report):
    lines = as_markdown(report).splitlines()
    assert len(lines) == 2 + len(FAULTS) and all(line.count(" | ") >= len(READINGS) for line in lines)
    assert "step 2 loaded, **1 byte wrong, not noticed**" in lines[3]


def test_a_single_checkpoint_is_not_enough(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, **parts())
    with pytest.raises(ValueError, match="at least two checkpoints are needed, there are 1"):
        read_damaged(tmp_path, FAULTS, parts)
