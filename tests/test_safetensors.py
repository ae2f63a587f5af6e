"""Full weights out and in: streamed safetensors, Hugging Face's layout, slices alone, common .pt files."""

import json
import os
import re
import shutil
import struct

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import mutated
from safetensors.torch import load_file, save_file
from torch import nn
from trainings import Training, differences, small_model
from zoo import Zoo, full_live_weights

from fsdp_ema_lib.checkpoint import fsdp_state_dict
from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.layout import Layout
from fsdp_ema_lib.safetensors_io import INDEX, SINGLE, export_safetensors, import_pt, import_safetensors, write_stream
from fsdp_ema_lib.storage import DamagedCheckpointError, UnsafeCheckpointError

FEATURES = ("tied", "frozen", "buffers", "tiny")
LAYOUTS_TO_TRY = ["plain", "ddp", "fsdp1_nested", "fsdp1_no_shard", "fsdp1_flat", "fsdp2_nested"]


def worker_export(layouts: list[str], dtype: torch.dtype, folder: str) -> dict[str, dict]:
    expected = {}
    for layout in layouts:
        training = Training(layout, dtype).train(2)
        export_safetensors(f"{folder}/{layout}.safetensors", training.ema, training.model)
        export_safetensors(
            f"{folder}/{layout}", training.ema, training.model, export_dtype=torch.bfloat16, max_shard_size=300
        )
        expected[layout] = training.ema.full_state_dict(training.model)
    return expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_exports_load_strictly_into_the_plain_model(ranks, tmp_path, world_size, dtype):
    expected = ranks(world_size, worker_export, layouts=LAYOUTS_TO_TRY, dtype=dtype, folder=str(tmp_path))[0]
    for layout, full in expected.items():
        written = load_file(tmp_path / f"{layout}.safetensors")
        assert differences(written, full) == [], layout
        plain = Zoo(FEATURES, dtype)
        plain.load_state_dict(written, strict=True)
        assert torch.equal(plain.pair[1].weight, plain.pair[0].weight)
        check_sharded(tmp_path / layout, full)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"{layout}.safetensors" for layout in expected} | set(expected)


def check_sharded(folder, full):
    """Hugging Face's layout, in bf16 but for the buffers, and no file above the size."""
    index = json.loads((folder / INDEX).read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values()))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors" and len(files) > 1
    found = {}
    for file in files:
        part = load_file(folder / file)
        assert len(part) == 1 or sum(t.nbytes for t in part.values()) <= 300
        assert all(index["weight_map"][name] == file for name in part)
        found |= part
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    buffers = ("norm.running_mean", "norm.num_batches")
    expected = {name: t if name in buffers else t.to(torch.bfloat16) for name, t in full.items()}
    assert differences(found, expected) == []


def test_one_file_is_enough_where_everything_fits(tmp_path):
    model = small_model()
    export_safetensors(tmp_path / "out", EMA_FSDP(model), model, max_shard_size="1MB")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [SINGLE]
    with pytest.raises(FileExistsError, match="out exists"):
        export_safetensors(tmp_path / "out", EMA_FSDP(model), model, max_shard_size="1MB")
    with pytest.raises(ValueError, match="max_shard_size must be a positive number of bytes.*got '5 parsecs'"):
        export_safetensors(tmp_path / "b", EMA_FSDP(model), model, max_shard_size="5 parsecs")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_an_export_replaces_no_pipe_device_or_directory(tmp_path, make):
    model = small_model()
    make(tmp_path / "a")
    before = os.lstat(tmp_path / "a")
    with pytest.raises(FileExistsError, match="a is a directory, a device or a pipe, which no file replaces"):
        export_safetensors(tmp_path / "a", EMA_FSDP(model), model)
    after = os.lstat(tmp_path / "a")
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def worker_failed_export(folder: str) -> list[str]:
    texts = []
    model = Zoo(())
    ema = EMA_FSDP(model)
    for path, size in ((f"{folder}/missing/a.safetensors", None), (f"{folder}/file/a", 100)):
        try:
            export_safetensors(path, ema, model, max_shard_size=size)
        except OSError as problem:
            texts.append(f"{type(problem).__name__}: {problem}")
    export_safetensors(f"{folder}/a.safetensors", ema, model)  # nobody waits for anybody
    return texts


def test_an_export_that_cannot_be_written_raises_on_all_ranks_and_leaves_nothing(ranks, tmp_path):
    (tmp_path / "file").write_text("x")
    for texts in ranks(2, worker_failed_export, folder=str(tmp_path)):
        assert [re.search(r"No such file|Not a directory", text)[0] for text in texts] == [
            "No such file",
            "Not a directory",
        ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "file"]


# ---------------------------------------------------------------- import


def worker_import(layouts: list[str], folder: str) -> dict[str, list[str]]:
    """Fill models and averages from files; what differs from the file, by layout."""
    problems = {}
    expected = torch.load(f"{folder}/full.pt", weights_only=True)
    for layout in layouts:
        lines = []
        for number, source in enumerate((f"{folder}/single.safetensors", f"{folder}/sharded")):
            training = Training(layout, seed=number + 1).train(1)
            count = training.ema.num_updates
            live = {name: t.clone() for name, t in Layout(training.model).live().items()}
            import_safetensors(source, training.model, ema=training.ema)
            if any(not torch.equal(t, live[name]) for name, t in Layout(training.model).live().items()):
                lines.append("an import into the average changed the live weights")
            if training.ema.num_updates != count:
                lines.append("the count changed")
            lines += compare(training.ema.full_state_dict(training.model), expected, tracked=True)
            import_safetensors(source, training.model)
            lines += compare(fsdp_state_dict(training.model), expected)
            training.train(1)  # what was written is what the next forward uses, and nothing is broken
        training = Training(layout, seed=4).train(1)
        import_pt(f"{folder}/both.pt", training.model, ema=training.ema)
        lines += compare(training.ema.full_state_dict(training.model), expected, tracked=True)
        import_pt(f"{folder}/both.pt", training.model)
        doubled = {n: 2 * t if t.is_floating_point() else t for n, t in expected.items()}
        lines += compare(fsdp_state_dict(training.model), doubled)
        if lines:
            problems[layout] = lines
    return problems


def compare(found: dict, expected: dict, tracked: bool = False) -> list[str]:
    if dist.is_initialized() and dist.get_rank():
        return []
    if tracked:  # the rest of an exported average is the live model's
        names = [name for name, _ in Zoo(FEATURES).named_parameters() if not name.startswith("frozen")]
        found, expected = ({name: state[name] for name in names} for state in (found, expected))
    return differences(found, expected)


@pytest.mark.parametrize("world_size", [1, 2])
def test_each_rank_fills_its_slices_from_files(ranks, tmp_path, world_size):
    torch.manual_seed(7)
    full = {
        name: t if t.dtype == torch.int64 else torch.randn_like(t) for name, t in Zoo(FEATURES).state_dict().items()
    }
    full["pair.1.weight"] = full["pair.0.weight"].clone()
    torch.save(full, tmp_path / "full.pt")
    save_file(full, tmp_path / "single.safetensors")
    (tmp_path / "sharded").mkdir()
    halves = [dict(list(full.items())[::2]), dict(list(full.items())[1::2])]
    for number, half in enumerate(halves):
        save_file(half, tmp_path / "sharded" / f"part{number}.safetensors")
    places = {name: f"part{number}.safetensors" for number, half in enumerate(halves) for name in half}
    (tmp_path / "sharded" / INDEX).write_text(json.dumps({"weight_map": places}))
    wrapped = {f"module._fsdp_wrapped_module.{name}": t for name, t in full.items()}
    live = {f"_orig_mod.{name}": 2 * t if t.is_floating_point() else t for name, t in full.items()}
    torch.save({"generator": live, "generator_ema": wrapped, "critic": {}, "step": 3}, tmp_path / "both.pt")
    for problems in ranks(world_size, worker_import, layouts=LAYOUTS_TO_TRY, folder=str(tmp_path)):
        assert problems == {}


def worker_slices(path: str) -> list:
    from torch.distributed.fsdp import fully_shard

    import fsdp_ema_lib.safetensors_io as module

    asked = []
    original = module._Lazy.__getitem__

    def watched(self, index):
        found = original(self, index)
        asked.append((self.name, tuple(found.shape)))
        return found

    module._Lazy.__getitem__ = watched
    try:
        model = fully_shard(nn.Linear(4, 10))
        import_safetensors(path, model)
    finally:
        module._Lazy.__getitem__ = original
    return sorted(asked)


def test_a_rank_reads_its_own_rows_alone(ranks, tmp_path):
    path = tmp_path / "a.safetensors"
    save_file({"weight": torch.arange(40.0).view(10, 4), "bias": torch.zeros(10)}, path)
    assert ranks(2, worker_slices, path=str(path)) == [[("bias", (5,)), ("weight", (5, 4))]] * 2


def test_everything_that_does_not_fit_is_in_one_error_and_nothing_changes(tmp_path):
    path = tmp_path / "a.safetensors"
    wrong = {"0.weight": torch.zeros(2, 2), "0.bias": torch.zeros(3, dtype=torch.float64), "x": torch.zeros(1)}
    save_file(wrong | {"1.weight": torch.zeros(2, 3)}, path)
    model = small_model()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with pytest.raises(ValueError) as caught:
        import_safetensors(path, model)
    for line in (
        "x: in the file, not in this model",
        "0.weight: the file holds (2, 2), this model has (3, 4)",
        "0.bias: the file holds torch.float64, which torch.float32 cannot hold exactly; pass cast=True to round",
        "1.bias: missing in the file; this model has (2,)",
        "Nothing was changed.",
    ):
        assert line in str(caught.value)
    assert differences(dict(model.state_dict()), before) == []
    save_file({"1.weight": torch.ones(2, 3, dtype=torch.float64), "x": torch.zeros(1)}, path)
    import_safetensors(path, model, allow_missing=["0.*", "1.bias"], allow_unexpected=["x"], cast=True)
    assert torch.equal(model[1].weight, torch.ones(2, 3)) and torch.equal(model[0].weight, before["0.weight"])


def header(entries: dict, data: bytes = b"", length: int | None = None) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        header({}, length=1 << 50),
        header({"weight": {"dtype": "F32", "shape": [1 << 20, 1 << 20], "data_offsets": [0, 1 << 42]}}),
        header({"weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 4]}}, b"1234"),
        header({"weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}, b"1234"),
        b"PK\3\4 something else",
    ],
    ids=["empty", "endless header", "terabytes", "overlap", "cut", "other"],
)
def test_hostile_headers_are_refused_by_file(tmp_path, content):
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match="a.safetensors: not a readable safetensors file"):
        import_safetensors(tmp_path / "a.safetensors", nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["../out.safetensors", "/etc/hostname", "..", "", "a\0b"])
def test_an_index_that_climbs_is_refused(tmp_path, name):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / INDEX).write_text(json.dumps({"weight_map": {"weight": name}}))
    save_file({"weight": torch.zeros(2, 2)}, tmp_path / "out.safetensors")
    with pytest.raises(UnsafeCheckpointError, match="refused .* for weight, which is not a file of its directory"):
        import_safetensors(tmp_path / "in", nn.Linear(2, 2))


def sharded(folder):
    """A directory with an index and one shard."""
    folder.mkdir(parents=True)
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, folder / "a.safetensors")
    places = dict.fromkeys(("weight", "bias"), "a.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.mark.parametrize("name", ["a.safetensors", INDEX])
def test_symlinks_out_of_a_directory_are_refused_and_those_inside_are_followed(tmp_path, name):
    folder = sharded(tmp_path / "in")
    shutil.move(folder / name, tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(UnsafeCheckpointError, match=rf"{name}: refused a symlink to .*{name}, out of its directory"):
        import_safetensors(folder, nn.Linear(2, 2))
    shutil.move(tmp_path / name, folder / "elsewhere")
    (folder / name).unlink()
    (folder / name).symlink_to("elsewhere")
    model = nn.Linear(2, 2)
    import_safetensors(folder, model)
    assert bool((model.weight == 1).all())


@pytest.mark.parametrize("named", ["directory", "index", "shard"])
def test_the_layout_of_hugging_faces_cache_is_followed(tmp_path, named):
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", sharded(tmp_path / "models--a--b" / "snapshots" / "0123")
    blobs.mkdir()
    for number, file in enumerate(list(snapshot.iterdir())):
        shutil.move(file, blobs / str(number))
        file.symlink_to(f"../../blobs/{number}")
    model = nn.Linear(2, 2)
    import_safetensors(
        {"directory": snapshot, "index": snapshot / INDEX, "shard": snapshot / "a.safetensors"}[named], model
    )
    assert bool((model.weight == 1).all())


@pytest.mark.parametrize("name", ["a.safetensors", INDEX, SINGLE])
@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_pipes_and_devices_are_refused_without_waiting(tmp_path, name, kind):
    folder = sharded(tmp_path / "in")
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/zero")
    for path in (folder, folder / name):
        with pytest.raises(UnsafeCheckpointError, match=rf"{name}: refused"):
            import_safetensors(path, nn.Linear(2, 2))


def test_pt_files_that_are_pipes_or_devices_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "a.pt")
    (tmp_path / "b.pt").symlink_to("/dev/zero")
    for name in ("a.pt", "b.pt"):
        with pytest.raises(UnsafeCheckpointError, match=f"{name}: refused, it is not a regular file"):
            import_pt(tmp_path / name, nn.Linear(2, 2))


def test_an_index_that_does_not_end_is_not_read_to_its_end(tmp_path):
    folder = sharded(tmp_path / "in")
    os.truncate(folder / INDEX, 1 << 40)
    with pytest.raises(UnsafeCheckpointError, match="index.json: refused, more than 67108864 bytes are no index"):
        import_safetensors(folder, nn.Linear(2, 2))


def test_a_conjugated_parameter_is_exported_as_it_is(tmp_path):
    value = torch.randn(3, 2, dtype=torch.complex64).conj()
    write_stream(tmp_path / "a", {"weight": (value.dtype, (3, 2))}, iter([("weight", value)]), None, {})
    assert torch.equal(load_file(tmp_path / "a")["weight"], value)


def test_bad_indices_and_missing_files_are_named(tmp_path):
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(DamagedCheckpointError, match="index.json: not a readable index"):
        import_safetensors(tmp_path, nn.Linear(2, 2))
    save_file({"bias": torch.zeros(2)}, tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"weight": "a.safetensors"}}))
    with pytest.raises(DamagedCheckpointError, match="the index says that it holds weight, but it does not"):
        import_safetensors(tmp_path, nn.Linear(2, 2))
    with pytest.raises(FileNotFoundError, match="nowhere: no such file; expected a safetensors file"):
        import_safetensors(tmp_path / "nowhere", nn.Linear(2, 2))


class Attack:
    def __reduce__(self):
        return os.system, ("touch /tmp/never",)


def worker_bad_pt(folder: str) -> list[str]:
    found = []
    for name in sorted(os.listdir(folder)):
        model = nn.Linear(2, 2)
        try:
            import_pt(f"{folder}/{name}", model)
        except (DamagedCheckpointError, ValueError, TypeError) as problem:
            found.append(f"{type(problem).__name__}: {problem}")
    return found


def test_pt_files_that_are_damaged_or_hold_other_tensors_raise_on_every_rank(ranks, tmp_path):
    torch.save({"weight": torch.zeros(2, 2), "bias": torch.zeros(2)}, tmp_path / "a.pt")
    content = bytearray((tmp_path / "a.pt").read_bytes())
    content[content.rindex(b"PK\1\2")] ^= 1  # in the central directory
    (tmp_path / "a.pt").write_bytes(content)
    torch.save({0: torch.zeros(2, 2)}, tmp_path / "b.pt")
    others = {
        "sparse": torch.zeros(2, 2).to_sparse(),
        "nowhere": torch.zeros(2, 2, device="meta"),
    }
    for name, tensor in others.items():
        torch.save({"weight": tensor, "bias": torch.zeros(2)}, tmp_path / f"c_{name}.pt")
    for texts in ranks(2, worker_bad_pt, folder=str(tmp_path)):
        assert re.match(r"DamagedCheckpointError: .*a.pt: its list of records is not readable \(BadZipFile", texts[0])
        assert texts[1] == "TypeError: a parameter name must be a string, got 0 (int)"
        assert len(texts) == 2 + len(others)
        assert all("weight: the file holds a sparse, nested or quantized tensor" in text for text in texts[2:])


def test_pt_files_are_opened_without_running_anything(tmp_path):
    model = nn.Linear(2, 2)
    torch.save({"generator": model.state_dict(), "args": Attack()}, tmp_path / "a.pt")
    with pytest.raises(UnsafeCheckpointError, match="(?s)a.pt: refused .*posix.system.*nothing of it was run"):
        import_pt(tmp_path / "a.pt", model)
    torch.save(model.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsafeCheckpointError, match="not a zip file as torch.save has written since"):
        import_pt(tmp_path / "old.pt", model)
    torch.save({"critic": {"weight": torch.zeros(2, 2)}, "step": 3}, tmp_path / "b.pt")
    with pytest.raises(KeyError, match=r"holds no dictionary of weights ; it has \['critic'\]"):
        import_pt(tmp_path / "b.pt", model)
    with pytest.raises(ValueError, match="bias: missing in the file"):
        import_pt(tmp_path / "b.pt", model, key="critic")
    torch.save([1], tmp_path / "c.pt")
    with pytest.raises(ValueError, match="a dictionary was expected, found list"):
        import_pt(tmp_path / "c.pt", model)
    torch.save({"weight": torch.ones(2, 2), "bias": torch.zeros(2)}, tmp_path / "d.pt")
    import_pt(tmp_path / "d.pt", model)
    assert torch.equal(model.weight, torch.ones(2, 2))
    assert full_live_weights(model)["bias"].abs().sum() == 0


# ---------------------------------------------------------------- mutations


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A directory with an index and two shards, a .pt file, and what is in them."""
    folder = tmp_path_factory.mktemp("fuzz")
    torch.manual_seed(3)
    state = {name: tensor.clone() for name, tensor in small_model().state_dict().items()}
    entries = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    write_stream(folder / "hf", entries, iter(state.items()), 60, {})
    (folder / "pt").mkdir()
    torch.save({"generator": state, "step": 3, "args": {"lr": 0.5, "names": ["a", None]}}, folder / "pt" / "a.pt")
    return {kind: {file.name: file.read_bytes() for file in (folder / kind).iterdir()} for kind in ("hf", "pt")}, state


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), kind=st.sampled_from(["hf", "pt"]))
def test_any_mutation_of_a_file_gives_tensors_of_the_right_kind_or_a_clean_error(written, tmp_path, data, kind):
    files, state = written[0][kind], written[1]
    name = data.draw(st.sampled_from(sorted(files)))
    content = mutated(data, files[name], sorted(files.values()))
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    for file, original in files.items():
        (tmp_path / file).write_bytes(content if file == name else original)
    model = small_model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    try:
        (import_safetensors(tmp_path, model) if kind == "hf" else import_pt(tmp_path / "a.pt", model))
    except (ValueError, KeyError, UnsafeCheckpointError, OSError):
        assert differences(dict(model.state_dict()), before) == []
        return
    assert {key: value.shape for key, value in model.state_dict().items()} == {k: v.shape for k, v in state.items()}
