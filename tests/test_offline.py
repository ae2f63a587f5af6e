"""Checkpoints without their model: what is inside, whether it is sound, exports, differences; the command line."""

import json

import pytest
import torch
import typer
from safetensors.torch import load_file
from trainings import FEATURES, Training, differences, small_model
from typer.testing import CliRunner
from zoo import Zoo

from fsdp_ema_lib import offline
from fsdp_ema_lib.checkpoint import fsdp_state_dict, save_checkpoint
from fsdp_ema_lib.checkpoint_manager import CheckpointManager
from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.lab import offline_cli
from fsdp_ema_lib.storage import DamagedCheckpointError


def worker_save(folder: str) -> list[dict]:
    found = []
    for layout in ("fsdp1_nested", "fsdp2_nested"):
        training = Training(layout).train(2)
        with CheckpointManager(f"{folder}/{layout}") as checkpoints:
            checkpoints.save(1, **training.parts())
            checkpoints.save(2, **training.parts(), extra={"run": "a"})
        found.append((training.ema.full_state_dict(training.model), fsdp_state_dict(training.model)))
    return found


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """Directories of checkpoints by 2 ranks, and what they hold in full: (average, live)."""
    folder = tmp_path_factory.mktemp("saved")
    states = ranks(2, worker_save, folder=str(folder))[0]
    return folder, dict(zip(("fsdp1_nested", "fsdp2_nested"), states, strict=True))


@pytest.mark.parametrize("layout", ["fsdp1_nested", "fsdp2_nested"])
def test_an_export_without_the_model_equals_the_one_with_it(saved, tmp_path, layout):
    folder, states = saved
    average, live = states[layout]
    assert offline.export(folder / layout, tmp_path / "ema.safetensors")["tensors"] == len(average)
    assert differences(load_file(tmp_path / "ema.safetensors"), average) == []
    offline.export(folder / layout / "step_00000001", tmp_path / "live.safetensors", ema=None)
    assert differences(load_file(tmp_path / "live.safetensors"), live) == []
    Zoo(FEATURES).load_state_dict(load_file(tmp_path / "live.safetensors"), strict=True)
    offline.export(folder / layout, tmp_path / "half", dtype=torch.bfloat16, max_shard_size=400)
    parts = {}
    for file in (tmp_path / "half").glob("*.safetensors"):
        parts |= load_file(file)
    buffers = ("norm.running_mean", "norm.num_batches")
    assert differences(parts, {n: t if n in buffers else t.bfloat16() for n, t in average.items()}) == []


def test_two_layouts_of_one_training_differ_in_nothing_but_what_they_computed(saved):
    folder, _ = saved
    later = offline.diff(folder / "fsdp2_nested", folder / "fsdp2_nested" / "step_00000001")
    assert (later["only_first"], later["only_second"]) == ([], []) and later["equal"] > 50
    assert later["differing"] == [
        {"name": "step", "first": "2", "second": "1"},
        {"name": "extra", "first": "['run'] is there", "second": "['run'] is missing"},
    ]
    across = offline.diff(folder / "fsdp1_nested", folder / "fsdp2_nested")
    assert (across["only_first"], across["only_second"]) == ([], [])
    tensors = offline.open_saved(folder / "fsdp2_nested").tensors()
    assert [found["name"] for found in across["differing"] if found["name"] not in tensors] == []


def changed(change):
    """A training whose state `change` changed after its last step."""
    training = Training("plain", features=()).train(1)
    change(training)
    return training


class Sampler:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: None, []),
        (
            lambda t: t.optimizer.param_groups[0].update(lr=0.5),
            [("optimizer settings", "['inner.weight']['lr'] = 0.02", "['inner.weight']['lr'] = 0.5")],
        ),
        (
            lambda t: t.scheduler.load_state_dict({"last_epoch": 7}),
            [("scheduler", "['last_epoch'] = 1", "['last_epoch'] = 7")],
        ),
        (lambda t: setattr(t, "extra", {"run": -0.0}), [("extra", "['run'] = 0.0", "['run'] = -0.0")]),
        (lambda t: setattr(t, "extra", {"run": 0}), [("extra", "['run'] = 0.0", "['run'] = 0")]),
        (lambda t: setattr(t, "step", 4), [("step", "3", "4")]),
        (
            lambda t: setattr(t, "sampler", {"order": torch.tensor([0.0, 2.0])}),
            [("sampler.rank0", "['order'] = tensor([0., 1.])", "['order'] = tensor([0., 2.])")],
        ),
    ],
    ids=["nothing", "lr", "scheduler", "sign of zero", "int for float", "step", "sampler"],
)
def test_what_is_no_tensor_is_compared_too(tmp_path, run, change, expected):
    for name, made in (("a", changed(lambda t: None)), ("b", changed(change))):
        sampler = getattr(made, "sampler", {"order": torch.tensor([0.0, 1.0]), "nan": float("nan")})
        sampler.setdefault("nan", float("nan"))
        extra = getattr(made, "extra", {"run": 0.0})
        save_checkpoint(
            tmp_path / name, **made.parts(), sampler=Sampler(sampler), step=getattr(made, "step", 3), extra=extra
        )
    found = offline.diff(tmp_path / "a", tmp_path / "b")
    assert [tuple(entry.values()) for entry in found["differing"]] == expected
    assert (found["only_first"], found["only_second"]) == ([], [])
    told = run("diff", tmp_path / "a", tmp_path / "b")
    assert told.exit_code == bool(expected)
    assert all(f"{name}: {first} and {second}" in told.stdout for name, first, second in expected)


def test_differences_are_counted_and_measured(tmp_path):
    model = small_model()
    save_checkpoint(tmp_path / "a", model=model, ema=EMA_FSDP(model))
    with torch.no_grad():
        model[0].weight[0, 0] += 0.5
        model[1].bias[1] = -model[1].bias[1]
    model[1].add_module("more", torch.nn.Linear(1, 1))
    save_checkpoint(tmp_path / "b", model=model.to(torch.float64))
    found = offline.diff(tmp_path / "a", tmp_path / "b")
    assert found["only_second"] == ["model.1.more.bias", "model.1.more.weight"]
    assert "ema.0.num_updates" in found["only_first"]
    assert {"name": "model.0.bias", "first": ([3], "float32"), "second": ([3], "float64")} in found["differing"]
    save_checkpoint(tmp_path / "c", model=model.to(torch.float32))
    found = offline.diff(tmp_path / "a", tmp_path / "c")["differing"]
    weight = next(entry for entry in found if entry["name"] == "model.0.weight")
    assert weight["elements"] == 1 and weight["difference"] == pytest.approx(0.5, rel=1e-6)
    assert [entry["name"] for entry in found if entry["name"].startswith("model.")] == [
        "model.0.weight",
        "model.1.bias",
    ]


def test_what_cannot_be_exported_is_said(tmp_path):
    model = small_model()
    save_checkpoint(tmp_path / "a", model=model, ema={"slow": EMA_FSDP(model)})
    with pytest.raises(KeyError, match="no average '0' in it, there are: 'slow'"):
        offline.export(tmp_path / "a", tmp_path / "x")
    with pytest.raises(TypeError, match="export_dtype must be a floating"):
        offline.export(tmp_path / "a", tmp_path / "x", ema="slow", dtype=torch.int32)
    with pytest.raises(FileNotFoundError, match="no whole checkpoint here"):
        offline.inspect(tmp_path)
    assert not (tmp_path / "x").exists()


# ---------------------------------------------------------------- command line


@pytest.fixture
def run():
    app = typer.Typer()
    offline_cli.register(app)

    def call(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return call


def test_inspect_shows_what_is_inside(saved, run):
    folder, _ = saved
    found = json.loads(run("inspect", folder / "fsdp2_nested", "--json").stdout)
    assert (found["step"], found["extra"], found["world_size"], found["optimizer"]) == (2, {"run": "a"}, 2, "AdamW")
    assert found["sharding"] == {"DTensor": 14} and found["emas"]["0"]["num_updates"] == 2
    entry = next(entry for entry in found["entries"] if entry["name"] == "ema.0.shadow.inner.weight")
    assert entry == {**entry, "shape": [7, 5], "dtype": "float32", "bytes": 140, "pieces": 2}
    text = run("inspect", folder / "fsdp2_nested").stdout
    assert "step 2" in text and "ema.0.shadow.inner.weight" in text and "7 x 5" in text and "2 ranks" in text


def test_verify_says_which_file_is_damaged_and_exits_one(tmp_path, run):
    path = tmp_path / "a"
    save_checkpoint(path, model=small_model())
    good = run("verify", path)
    assert good.exit_code == 0 and "sound, 2 files" in good.stdout
    data = bytearray((path / "__0_0.distcp").read_bytes())
    data[100] ^= 1
    (path / "__0_0.distcp").write_bytes(data)
    bad = run("verify", path)
    assert bad.exit_code == 1 and "__0_0.distcp: its checksum is" in bad.output
    found = run("verify", path, "--json")
    assert found.exit_code == 1 and "__0_0.distcp" in json.loads(found.stdout)["error"]
    with pytest.raises(DamagedCheckpointError):
        offline.verify(path)


def test_what_was_saved_without_checksums_is_not_called_sound(tmp_path, run):
    with CheckpointManager(tmp_path, checksums=False) as checkpoints:
        checkpoints.save(1, model=small_model())
        path = checkpoints.path_of(1)
        found = offline.verify(path)
        assert (found["files"], found["bytes"], found["unsealed"]) == (0, 0, 2)
        told = run("verify", path)
        assert told.exit_code == 0 and "2 files were saved without checksums" in told.stdout
        assert "sound" not in told.stdout
        with pytest.warns(UserWarning, match=r"2 files were saved without a checksum.*sizes alone are compared"):
            checkpoints.load(model=small_model(), verify=True)
        with pytest.warns(UserWarning, match="saved without a checksum"):
            checkpoints.verify()


def test_export_and_diff_on_the_command_line(saved, tmp_path, run):
    folder, states = saved
    done = run("export", folder / "fsdp2_nested", tmp_path / "a.safetensors", "--dtype", "bf16", "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["tensors"] == len(states["fsdp2_nested"][0])
    assert load_file(tmp_path / "a.safetensors")["inner.weight"].dtype == torch.bfloat16
    live = run("export", folder / "fsdp2_nested", tmp_path / "b.safetensors", "--ema", "none")
    assert live.exit_code == 0, live.output
    assert differences(load_file(tmp_path / "b.safetensors"), states["fsdp2_nested"][1]) == []
    assert run("export", folder / "fsdp2_nested", tmp_path / "c", "--dtype", "int3").exit_code == 2
    missing = run("export", folder / "fsdp2_nested", tmp_path / "c", "--ema", "7")
    assert missing.exit_code == 1 and "no average '7' in it" in missing.output
    same = run("diff", folder / "fsdp2_nested", folder / "fsdp2_nested" / "step_00000002")
    assert same.exit_code == 0 and "bit-equal" in same.stdout
    other = run("diff", folder / "fsdp1_nested", folder / "fsdp2_nested", "--json")
    assert other.exit_code == (1 if json.loads(other.stdout)["differing"] else 0)
    nowhere = run("inspect", tmp_path / "nowhere")
    assert nowhere.exit_code == 1 and "no whole checkpoint here" in nowhere.output
