"""What is on disk: nothing in it is executed, nothing reaches out of it, no memory is taken that it cannot fill."""

import copy
import io
import math
import os
import pickle
import pickletools
import random
import resource
import shutil
import struct
import time
import zipfile
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import mutated
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from trainings import differences, small_model
from typer.testing import CliRunner

from fsdp_ema_lib import offline, safe_reading, storage
from fsdp_ema_lib.checkpoint import load_checkpoint, save_checkpoint
from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.lab import offline_cli
from fsdp_ema_lib.safe_reading import (
    _OPCODES,
    METADATA,
    _tiled,
    find_tensor,
    packed_as_by_torch,
    read_metadata,
    scan_pickle,
)
from fsdp_ema_lib.sharded_view import interval_boxes
from fsdp_ema_lib.storage import DamagedCheckpointError, UnsafeCheckpointError


class Attack:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2])
    path = tmp_path / "saved"
    save_checkpoint(path, model=model, optimizer=optimizer, scheduler=scheduler, step=3)
    return path


def relabel(path):
    """Make the manifest agree with the files again: the attacker can write that too."""
    manifest = storage.read_manifest(path)
    files = [file for file in path.iterdir() if file.name != storage.MANIFEST and file.is_file()]
    manifest["files"] = storage.seal(files, {})
    (path / storage.MANIFEST).unlink()
    storage.write_manifest(path, manifest)


def change_metadata(path, change):
    metadata = pickle.loads((path / METADATA).read_bytes())
    metadata = change(metadata) or metadata
    (path / METADATA).write_bytes(pickle.dumps(metadata))
    relabel(path)


def load_all(path):
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2])
    return load_checkpoint(path, model=model, optimizer=optimizer, scheduler=scheduler)


# ---------------------------------------------------------------- nothing is executed


@pytest.mark.parametrize("where", ["whole", "planner_data", "entry", "class attribute"])
def test_a_pickle_planted_in_the_metadata_is_refused_by_name_and_does_not_run(saved, tmp_path, where):
    marker = tmp_path / "ran"

    def change(metadata):
        if where == "whole":
            return Attack(marker)
        if where == "planner_data":
            metadata.planner_data = Attack(marker)
        elif where == "entry":
            metadata.state_dict_metadata["model.0.weight"] = Attack(marker)
        else:
            metadata.storage_data[next(iter(metadata.storage_data))].relative_path = Attack(marker)

    change_metadata(saved, change)
    with pytest.raises(
        UnsafeCheckpointError, match=r"\.metadata: refused (posix|nt)\.system, which no checkpoint needs"
    ):
        load_all(saved)
    assert not marker.exists()


def test_a_planted_pickle_does_run_in_torchs_own_reader(saved, tmp_path):
    """What the others are held against: without this the attack itself would be untested."""
    marker = tmp_path / "ran"
    change_metadata(saved, lambda metadata: setattr(metadata, "planner_data", Attack(marker)))
    dcp.FileSystemReader(saved).read_metadata()
    assert marker.exists()


def test_metadata_cannot_change_classes_of_torch(saved):
    """BUILD sets attributes of what find_class returned: it must not be a class that others use."""
    hostile = (
        b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n(N}\x8c\x05cornyK\x01s\x86b."
        # Metadata, (None, {"corny": 1}), BUILD
    ).replace(b"(N}", b"N}")
    (saved / METADATA).write_bytes(hostile)
    relabel(saved)
    with pytest.raises(DamagedCheckpointError):
        load_all(saved)
    assert not hasattr(Metadata, "corny")


def replace_entry(path, name, content: bytes):
    """Put other bytes in place of an entry, at the end of its file."""
    metadata = pickle.loads((path / METADATA).read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn == name)
    info = metadata.storage_data[index]
    file = path / info.relative_path
    info.offset, info.length = file.stat().st_size, len(content)
    with open(file, "ab") as stream:
        stream.write(content)
    (path / METADATA).write_bytes(pickle.dumps(metadata))
    relabel(path)


def torch_saved(value) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


@pytest.mark.parametrize("entry", ["scheduler", "model.0.weight"])
def test_a_pickle_planted_in_an_entry_is_refused_by_name_and_does_not_run(saved, tmp_path, entry):
    marker = tmp_path / "ran"
    replace_entry(saved, entry, torch_saved({"last_epoch": Attack(marker)}))
    with pytest.raises(UnsafeCheckpointError, match=rf"distcp, {entry}: refused posix.?system"):
        load_all(saved)
    assert not marker.exists()


def test_a_pickle_that_hides_its_names_or_its_size_is_refused(saved):
    pickled = pickle.dumps(random.Random(1).getstate)  # a bound method
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", "little")
    replace_entry(saved, "scheduler", stream.getvalue())
    with pytest.raises(UnsafeCheckpointError, match="scheduler: refused a pickle that hides the names of its classes"):
        load_all(saved)


def judged_slowly(data: bytes, allowed: set[tuple[str, str]] | None) -> str:
    """What `scan_pickle` owes, opcode by opcode through the standard library."""
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name not in _OPCODES or (opcode.name == "LONG_BINPUT" and argument > len(data)):
                return "unsafe"
            if allowed is not None and opcode.name == "STACK_GLOBAL":
                return "unsafe"
            if allowed is not None and opcode.name == "GLOBAL" and tuple(argument.split(" ", 1)) not in allowed:
                return "unsafe"
    except Exception:
        return "damaged"
    return "sound"


def judged(data: bytes, allowed: set[tuple[str, str]] | None) -> str:
    try:
        scan_pickle(data, "here", allowed)
    except UnsafeCheckpointError:
        return "unsafe"
    except DamagedCheckpointError:
        return "damaged"
    return "sound"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=300) | st.binary(max_size=300),
    lambda inner: (
        st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner) | st.sets(st.integers())
    ),
    max_leaves=20,
)


@given(VALUES, st.integers(2, 5))
def test_pickles_of_plain_values_pass_the_scan(value, protocol):
    data = pickle.dumps(value, protocol)
    assert judged(data, {("__builtin__", "set"), ("_codecs", "encode")}) == judged_slowly(
        data, {("__builtin__", "set"), ("_codecs", "encode")}
    )
    assert judged(data, None) == "sound"


@given(VALUES, st.integers(2, 5), st.integers(0), st.binary(min_size=1, max_size=9), st.booleans())
def test_whatever_the_scan_lets_pass_the_standard_library_reads_alike(value, protocol, at, planted, strict):
    data = bytearray(pickle.dumps(value, protocol))
    at %= len(data)
    data[at : at + len(planted)] = planted
    allowed = set() if strict else None
    slowly = judged_slowly(bytes(data), allowed)
    # The standard library also decodes the arguments: what it cannot read, no unpickler can.
    assert judged(bytes(data), allowed) == slowly or slowly == "damaged"


# ---------------------------------------------------------------- nothing reaches out


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "sub/file", "..", "", "a\0b", 7])
def test_names_that_climb_are_refused(saved, name):
    (saved.parent / "secret").write_bytes(b"x" * 10_000)

    def change(metadata):
        for info in metadata.storage_data.values():
            info.relative_path = name

    change_metadata(saved, change)
    with pytest.raises(UnsafeCheckpointError, match="refused the file name"):
        load_all(saved)


@pytest.mark.parametrize("name", ["__0_0.distcp", METADATA, storage.MANIFEST])
def test_symlinks_are_refused(saved, name):
    outside = saved.parent / "outside"
    shutil.move(saved / name, outside)
    (saved / name).symlink_to(outside)
    with pytest.raises(UnsafeCheckpointError, match=rf"{name}: refused a symlink to .*outside"):
        load_all(saved)


def test_a_named_pipe_does_not_make_the_reader_wait(saved):
    (saved / METADATA).unlink()
    os.mkfifo(saved / METADATA)
    with pytest.raises(UnsafeCheckpointError, match="it is not a regular file"):
        load_all(saved)


# ---------------------------------------------------------------- no memory is taken


@pytest.fixture
def little_memory():
    """An error instead of a machine that swaps, should a reader believe what a file claims."""
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def claim_huge(metadata):
    entry = metadata.state_dict_metadata["model.0.weight"]
    entry.size = torch.Size([1 << 20, 1 << 20])
    entry.chunks[0].sizes = entry.size


def claim_beyond_file(metadata):
    for info in metadata.storage_data.values():
        info.length = 1 << 40


def claim_negative(metadata):
    for info in metadata.storage_data.values():
        info.offset = -(1 << 40)


def claim_outside(metadata):
    metadata.state_dict_metadata["model.0.weight"].chunks[0].sizes = torch.Size([30, 40])


def claim_gap(metadata):
    metadata.state_dict_metadata["model.0.weight"].chunks[0].sizes = torch.Size([1, 4])


def claim_twice(metadata):
    entry = metadata.state_dict_metadata["model.0.bias"]
    first, second, _ = cut = [ChunkStorageMetadata(torch.Size([n]), torch.Size([1])) for n in range(3)]
    entry.chunks = [first, second, second]
    for chunk in cut:
        place = metadata.storage_data[MetadataIndex("model.0.bias", torch.Size([0]))]
        metadata.storage_data[MetadataIndex("model.0.bias", chunk.offsets)] = copy.copy(place)


def claim_same_bytes(metadata):
    places = metadata.storage_data
    for index in [index for index in places if index.fqn == "model.1.bias"]:
        places[index] = next(place for other, place in places.items() if other.fqn == "model.0.bias")


def claim_nowhere(metadata):
    metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if k.fqn != "model.0.weight"}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (claim_huge, UnsafeCheckpointError, "refused model.0.weight, which claims 4398046511104 bytes of the"),
        (claim_beyond_file, DamagedCheckpointError, "an entry is said to end at byte 1099511627776, the file has"),
        (claim_negative, DamagedCheckpointError, "a count was expected, found -1099511627776"),
        (
            claim_outside,
            DamagedCheckpointError,
            r"model.0.weight: a piece at \(0, 0\) of \(30, 40\) lies outside \(3, 4",
        ),
        (claim_gap, DamagedCheckpointError, "model.0.weight: its pieces hold 4 of 12 elements"),
        (claim_twice, DamagedCheckpointError, r"model.0.bias: its pieces overlap, so that .* part of \(3,\) open"),
        (claim_same_bytes, UnsafeCheckpointError, "refused model.[01].bias and model.[01].bias, which claim the same"),
        (claim_nowhere, DamagedCheckpointError, "model.0.weight is listed, but no file is said to hold it"),
    ],
)
def test_sizes_that_the_files_cannot_hold_are_refused(saved, little_memory, change, error, text):
    change_metadata(saved, change)
    with pytest.raises(error, match=text):
        load_all(saved)


@st.composite
def boxes_in_a_shape(draw):
    """Boxes that cut a shape: each again and again in two, or by the flat index as FSDP1 does."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=7)))
    if draw(st.booleans()) and shape and math.prod(shape):
        cuts = sorted({0, math.prod(shape), *draw(st.lists(st.integers(0, math.prod(shape)), max_size=6))})
        return shape, [box for start, end in pairwise(cuts) for box in interval_boxes(shape, start, end)]
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 12)) if shape else 0):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[dim]))
        boxes.append((offsets, (*sizes[:dim], at, *sizes[dim + 1 :])))
        boxes.append(
            (
                (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :]),
                (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :]),
            )
        )
    return shape, boxes


@given(boxes_in_a_shape(), st.randoms())
def test_pieces_that_cover_each_element_once_pass_and_no_others(cut, random):
    shape, boxes = cut
    assert _tiled(shape, boxes)
    moved = [
        (tuple(random.randint(0, n - s) for n, s in zip(shape, sizes, strict=True)), sizes)
        if random.random() < 0.3
        else (offsets, sizes)
        for offsets, sizes in boxes
    ]
    covered = torch.zeros(shape, dtype=torch.int32)
    for offsets, sizes in moved:
        covered[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    assert _tiled(shape, moved) == bool((covered == 1).all())


def test_many_pieces_are_compared_in_little_time():
    grid = [((x, y), (1, 1)) for x in range(300) for y in range(300)]
    start = time.perf_counter()
    assert _tiled((300, 300), grid)
    assert not _tiled((300, 300), [*grid[:-1], grid[0]])
    assert time.perf_counter() - start < 10  # 0.5 s; pair by pair it would be an hour


@pytest.mark.parametrize(
    "bomb",
    [
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x.",  # BYTEARRAY8
        b"\x80\x02]r" + struct.pack("<I", (1 << 32) - 2) + b".",  # LONG_BINPUT: as many memo slots
        b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b"x.",  # BINUNICODE8
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 40) + b"N.",  # FRAME
    ],
    ids=["bytearray", "memo", "text", "frame"],
)
def test_pickles_that_claim_terabytes_are_refused(saved, little_memory, bomb):
    (saved / METADATA).write_bytes(bomb)
    relabel(saved)
    with pytest.raises((UnsafeCheckpointError, DamagedCheckpointError), match="metadata"):
        load_all(saved)


def rezipped(value, compression=zipfile.ZIP_STORED, change=lambda name, data: data) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(torch_saved(value))) as source, zipfile.ZipFile(stream, "w", compression) as target:
        for name in source.namelist():
            target.writestr(name, change(name, source.read(name)))
    return stream.getvalue()


def test_entries_that_unpack_to_more_than_they_are_are_refused(saved, little_memory):
    replace_entry(saved, "model.0.weight", rezipped(torch.zeros(3, 4), zipfile.ZIP_DEFLATED))
    with pytest.raises(UnsafeCheckpointError, match="model.0.weight: refused data.pkl, which is compressed or claims"):
        load_all(saved)
    replace_entry(saved, "scheduler", rezipped({"a": torch.zeros(1 << 20)}, zipfile.ZIP_DEFLATED))
    with pytest.raises(UnsafeCheckpointError, match="model.0.weight|scheduler: refused data.pkl, which is compressed"):
        load_all(saved)


def deflated_but_for_the_pickle(value) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(torch_saved(value))) as source, zipfile.ZipFile(stream, "w") as target:
        for name in source.namelist():
            plain = name.endswith("data.pkl")
            target.writestr(name, source.read(name), zipfile.ZIP_STORED if plain else zipfile.ZIP_DEFLATED)
    return stream.getvalue()


def claimed_again_and_again(value) -> bytes:
    """Many names for the values of one record."""
    content = rezipped(value)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        record = next(record for record in archive.infolist() if record.filename.endswith("data/0"))
        start = archive.start_dir
        whole = len(archive.infolist())
    end = bytearray(content[-22:])
    listed = content[start:-22]
    at = listed.index(record.filename.encode()) - 46
    one = listed[at : at + 46 + len(record.filename)]
    listed += b"".join(one[:46] + record.filename.replace("/0", f"/{n}").encode() for n in range(1, 10))
    struct.pack_into("<HHL", end, 8, whole + 9, whole + 9, len(listed))
    return content[:start] + listed + bytes(end)


def seen_otherwise_by_torch(value) -> bytes:
    """Python finds the directory of records by counting back from the end, torch from the first byte on."""
    content = rezipped(value)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        start = archive.start_dir
    return content[:start] + content[start:-22] + content[start:]


def doubled(value) -> bytes:
    stream = io.BytesIO(rezipped(value))
    with zipfile.ZipFile(stream, "a") as archive:
        archive.writestr("archive/DATA.PKL", archive.read("archive/data.pkl"))
    return stream.getvalue()


@pytest.mark.parametrize("entry", ["model.0.weight", "scheduler"])
@pytest.mark.parametrize(
    ("pack", "text"),
    [
        (deflated_but_for_the_pickle, "which is compressed or claims"),
        (claimed_again_and_again, r"refused records that claim \d+ bytes of the \d+ there are"),
        (seen_otherwise_by_torch, "refused a zip file with"),
        (doubled, "refused a zip file with doubled names"),
    ],
)
def test_every_record_of_an_entry_is_what_it_seems(saved, little_memory, entry, pack, text):
    value = torch.zeros(1 << 20)
    replace_entry(saved, entry, pack(value if entry == "model.0.weight" else {"a": value}))
    with pytest.raises(UnsafeCheckpointError, match=rf"{entry}: .*{text}"):
        load_all(saved)


class Position:
    """A sampler or scheduler with a given state."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_what_is_too_long_to_be_read_is_refused_when_it_is_saved(tmp_path, monkeypatch):
    model = small_model()
    monkeypatch.setattr(safe_reading, "_PICKLE_BYTES", 1000)
    with pytest.raises(
        TypeError, match="sampler.rank0 cannot be saved.*at most 1000 are read; .* belongs into a tensor"
    ):
        save_checkpoint(tmp_path / "a", model=model, sampler=Position({"order": list(range(1000))}))
    assert list(tmp_path.iterdir()) == []
    order = torch.randperm(10_000)
    save_checkpoint(tmp_path / "a", model=model, sampler=Position({"order": order}))
    found = Position(None)
    load_checkpoint(tmp_path / "a", model=model, sampler=found)
    assert torch.equal(found.state["order"], order)
    monkeypatch.setattr(safe_reading, "_BYTES_ENTRY", 1000)
    with pytest.raises(UnsafeCheckpointError, match="sampler.rank0: refused a byte entry of"):
        load_checkpoint(tmp_path / "a", model=model, sampler=found)
    with pytest.raises(TypeError, match="sampler.rank0 cannot be saved.*refused a byte entry of"):
        save_checkpoint(tmp_path / "b", model=model, sampler=Position({"order": order}))


def test_a_sampler_of_many_samples_saves_and_loads(tmp_path):
    """An order of nine million, as 72 MB of tensor."""
    order = torch.arange(9_000_000)
    save_checkpoint(tmp_path / "a", model=small_model(), sampler=Position({"order": order}))
    found = Position(None)
    load_checkpoint(tmp_path / "a", model=small_model(), sampler=found)
    assert torch.equal(found.state["order"], order)


def test_a_scheduler_is_saved_where_torch_computes_no_checksums(tmp_path):
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        save_checkpoint(tmp_path / "a", model=small_model(), scheduler=Position({"epoch": 3}))
    finally:
        torch.serialization.set_crc32_options(before)
    found = Position(None)
    load_checkpoint(tmp_path / "a", model=small_model(), scheduler=found, verify=True)
    assert found.state == {"epoch": 3}


def test_a_tensor_larger_than_its_storage_or_other_than_listed_is_refused(saved):
    def shorter(name, data):
        return data[:-4] if name.endswith("data/0") else data

    replace_entry(saved, "model.0.weight", rezipped(torch.zeros(3, 4), change=shorter))
    with pytest.raises(
        UnsafeCheckpointError, match=r"refused a tensor of \(3, 4\) that claims 48 bytes of the 44 there"
    ):
        load_all(saved)
    replace_entry(saved, "model.0.weight", torch_saved(torch.zeros(4, 3)))
    with pytest.raises(
        DamagedCheckpointError, match=r"the file holds \(4, 3\) of torch.float32, the metadata says \(3, 4"
    ):
        load_all(saved)


def test_a_manifest_that_is_too_large_or_too_deep_is_refused(saved):
    (saved / storage.MANIFEST).write_text("[" * 200_000)
    with pytest.raises(DamagedCheckpointError, match="manifest.json: damaged"):
        load_all(saved)
    os.truncate(saved / storage.MANIFEST, 1 << 30)
    with pytest.raises(UnsafeCheckpointError, match="refused, 1073741824 bytes is more than a manifest has"):
        load_all(saved)


# ---------------------------------------------------------------- every kind of tensor


def test_tensors_of_every_dtype_and_order_come_back(tmp_path):
    torch.manual_seed(0)
    tensors = {
        str(dtype): (torch.rand(3, 5, dtype=torch.float64) * 100).to(dtype)
        for dtype in (
            torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
            torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.float8_e4m3fn,
            torch.float8_e5m2,
        )
    }  # fmt: skip
    tensors |= {
        "complex": torch.randn(4, dtype=torch.complex64),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        "transposed": torch.randn(6, 4).t(),
        "conjugated": torch.randn(4, 3, dtype=torch.complex64).conj(),
        "conjugated and transposed": torch.randn(4, 3, dtype=torch.complex64).t().conj(),
        "negated": torch.randn(5, dtype=torch.complex128).conj().imag,
    }
    assert tensors["conjugated"].is_conj() and tensors["negated"].is_neg()
    model = nn.Module()
    for name, tensor in tensors.items():
        model.register_buffer(name.replace(".", "_"), tensor)
    model.weight = nn.Parameter(torch.zeros(1))
    save_checkpoint(tmp_path / "a", model=model)
    other = nn.Module()
    for name, tensor in tensors.items():
        other.register_buffer(name.replace(".", "_"), torch.zeros_like(tensor))
    other.weight = nn.Parameter(torch.zeros(1))
    load_checkpoint(tmp_path / "a", model=other)
    for name, buffer in model.named_buffers():
        loaded = other.get_buffer(name)
        assert loaded.dtype == buffer.dtype and loaded.stride() == torch.empty_like(buffer).stride(), name
        buffer = buffer.resolve_conj().resolve_neg()
        same = loaded.contiguous().view(-1).view(torch.uint8) == buffer.contiguous().view(-1).view(torch.uint8)
        assert bool(same.all()), name
        assert torch.equal(offline.open_saved(tmp_path / "a").read(f"model.{name}"), buffer), name


def test_where_a_tensor_lies_in_its_file_is_found_exactly(saved):
    metadata = read_metadata(saved)
    for index, info in metadata.storage_data.items():
        if not index.fqn.startswith("model."):
            continue
        raw = (saved / info.relative_path).read_bytes()
        expected = torch.load(io.BytesIO(raw[info.offset : info.offset + info.length]), weights_only=True)
        descriptor = storage.open_inside(saved, info.relative_path)
        stored = find_tensor(descriptor, info, "here")
        os.close(descriptor)
        found = torch.frombuffer(bytearray(raw[stored.start : stored.start + stored.nbytes]), dtype=stored.dtype)
        assert torch.equal(found.as_strided(stored.shape, stored.stride, stored.offset), expected)


def test_an_entry_whose_records_start_before_it_is_refused():
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", b"0")
    with zipfile.ZipFile(io.BytesIO(stream.getvalue()[3:])) as archive:
        assert archive.infolist()[0].header_offset == -3
        with pytest.raises(UnsafeCheckpointError, match="here: refused a zip file with .*bytes outside its records"):
            packed_as_by_torch(archive, 1000, "here")


# ---------------------------------------------------------------- mutations


@pytest.fixture(scope="module")
def real_checkpoint(tmp_path_factory):
    """A checkpoint, its files, and what it holds."""
    torch.manual_seed(0)
    model = small_model()
    path = tmp_path_factory.mktemp("fuzz") / "saved"
    save_checkpoint(path, model=model, step=3, extra={"a": 1})
    return path, {file.name: file.read_bytes() for file in path.iterdir()}, model.state_dict()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mutation_gives_the_right_data_or_a_clean_error(real_checkpoint, data):
    """With checksums: whatever is changed, cut, doubled or swapped in any file."""
    check_mutation(real_checkpoint, data, verify=True)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mutation_without_checksums_gives_a_clean_error_or_tensors_of_the_right_kind(real_checkpoint, data):
    check_mutation(real_checkpoint, data, verify=False)


def check_mutation(real_checkpoint, data, verify):
    path, files, expected = real_checkpoint
    name = data.draw(st.sampled_from(sorted(files)))
    content = mutated(data, files[name], list(files.values()))
    for file, original in files.items():
        (path / file).write_bytes(content if file == name else original)
    if not verify and name != storage.MANIFEST:
        relabel(path)  # so that the mutation reaches the readers behind the sizes
    model = small_model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    try:
        found = load_checkpoint(path, model=model, verify=verify)
    except (ValueError, UnsafeCheckpointError, OSError):
        after = model.state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before), "an error, and yet something changed"
        return
    assert {key: value.shape for key, value in model.state_dict().items()} == {k: v.shape for k, v in expected.items()}
    if verify and name != storage.MANIFEST:
        assert found == {"step": 3, "extra": {"a": 1}}
        assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


CLEAN = (ValueError, UnsafeCheckpointError, OSError)


class Whole:
    """A training with everything that a checkpoint can hold, and how to tell whether it changed."""

    def __init__(self, steps: int) -> None:
        torch.manual_seed(steps)
        self.model = small_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 * steps)
        self.ema = EMA_FSDP(self.model)
        self.scheduler = Position({"epoch": steps, "milestones": [1, 2, 3], "name": "cosine"})
        self.sampler = Position({"order": torch.arange(5) + steps, "seen": {"a": 1.5 * steps, "b": (None, True)}})
        for _ in range(steps):
            self.model(torch.ones(2, 4)).sum().backward()
            self.optimizer.step()
            self.ema.update(self.model)

    def parts(self) -> dict:
        names = ("model", "optimizer", "ema", "scheduler", "sampler")
        return {name: getattr(self, name) for name in names}

    def tensors(self) -> dict[str, torch.Tensor]:
        found = dict(self.model.state_dict()) | {f"ema.{name}": t for name, t in self.ema.shadow.items()}
        for number, state in enumerate(self.optimizer.state.values()):
            found |= {f"optimizer.{number}.{key}": value for key, value in state.items()}
        return {name: tensor.clone() for name, tensor in found.items()}

    def objects(self) -> str:
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        return repr([groups, self.scheduler.state, self.sampler.state])

    def check_load(self, path: Path, **options) -> bool:
        """Load; whether it succeeded. If not, the error is a clean one and nothing changed."""
        before, objects = self.tensors(), self.objects()
        try:
            load_checkpoint(path, **self.parts(), **options)
        except CLEAN:
            assert differences(self.tensors(), before) == [] and self.objects() == objects
            return False
        return True


@pytest.fixture(scope="module")
def whole_checkpoint(tmp_path_factory):
    """A checkpoint of everything, its files, and the training that it was saved from."""
    training = Whole(2)
    path = tmp_path_factory.mktemp("fuzz") / "whole"
    save_checkpoint(path, **training.parts(), step=3, extra={"a": [1, {"b": None}]})
    return path, {file.name: file.read_bytes() for file in path.iterdir()}, training


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.just(10**30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=5,
)


def change_somewhere(data, tree) -> None:
    """Replace, remove or add something anywhere in nested lists and dicts."""
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    if keys and data.draw(st.booleans(), "deeper"):
        inner = tree[data.draw(st.sampled_from(keys))]
        if isinstance(inner, dict | list):
            change_somewhere(data, inner)
            return
    if keys and data.draw(st.booleans(), "there"):
        key = data.draw(st.sampled_from(keys))
        if data.draw(st.booleans(), "remove"):
            del tree[key]
        else:
            tree[key] = data.draw(JSON)
    elif isinstance(tree, dict):
        tree[data.draw(st.sampled_from(["params", "lr", "0.weight", "0.weight.step", "0", ""]))] = data.draw(JSON)
    else:
        tree.insert(0, data.draw(JSON))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_manifest_with_a_right_checksum_of_its_own_gives_the_right_data_or_a_clean_error(whole_checkpoint, data):
    path, files, training = whole_checkpoint
    for file, original in files.items():
        (path / file).write_bytes(original)
    manifest = storage.read_manifest(path)
    change_somewhere(data, manifest)
    (path / storage.MANIFEST).unlink()
    storage.write_manifest(path, manifest)
    loaded = Whole(1)
    if loaded.check_load(path):
        assert differences(loaded.tensors(), training.tensors()) == []
        assert loaded.optimizer.param_groups[0]["params"] == list(loaded.model.parameters())
    look_offline(path, (KeyError,))


def look_offline(path: Path, more: tuple = ()) -> None:
    """Whatever a process without the model does: a result or a clean error, and a word about it."""
    output = path.parent / "exported"  # an export replaces whatever has the name
    for look in (offline.verify, lambda path: offline.diff(path, path), lambda path: offline.export(path, output)):
        try:
            look(path)
        except (*CLEAN, *more):
            continue
    app = typer.Typer()
    offline_cli.register(app)
    told = CliRunner().invoke(app, ["inspect", str(path)])
    assert told.exit_code in (0, 1) and (told.exception is None or isinstance(told.exception, SystemExit)), told


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_mutation_of_what_is_no_tensor_gives_a_clean_error_or_something_plain(whole_checkpoint, data):
    path, files, training = whole_checkpoint
    for file, original in files.items():
        (path / file).write_bytes(original)
    places = read_metadata(path).storage_data
    info = places[MetadataIndex(data.draw(st.sampled_from(["scheduler", "sampler.rank0"])))]
    content = bytearray(files[info.relative_path])
    part = slice(info.offset, info.offset + info.length)
    other = bytes(content[: info.length])  # of a tensor
    changed = mutated(data, bytes(content[part]), [other])
    content[part] = changed[: info.length].ljust(info.length, b"\0")
    (path / info.relative_path).write_bytes(content)
    assert Whole(1).check_load(path, verify=True) == (content == files[info.relative_path])
    relabel(path)
    loaded = Whole(1)
    if loaded.check_load(path):
        assert differences(loaded.tensors(), training.tensors()) == []
    look_offline(path)


# ---------------------------------------------------------------- checksums


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checksums_of_two_pieces_join(first, second):
    joined = storage.joined_crc32(zlib.crc32(first), zlib.crc32(second), len(second))
    assert joined == zlib.crc32(first + second)


@pytest.mark.parametrize("length", [1, 255, (1 << 20) + 3, 50_000_001])
def test_checksums_of_long_pieces_join(length):
    second = bytes(length)
    assert storage.joined_crc32(zlib.crc32(b"first"), zlib.crc32(second), length) == zlib.crc32(
        second, zlib.crc32(b"first")
    )


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 1000])
def test_checksums_of_files_read_in_pieces_are_those_of_the_whole(tmp_path, monkeypatch, size):
    monkeypatch.setattr(storage, "_PIECE_BYTES", 100)
    monkeypatch.setattr(storage, "_BLOCK_BYTES", 7)
    contents = {f"file{number}": random.Random(number).randbytes(size + number) for number in range(3)}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    assert storage._crc32s(tmp_path, contents) == {name: f"{zlib.crc32(c):08x}" for name, c in contents.items()}


class Long:
    """A scheduler with a state of more than 64 KiB, which is written in one piece that no checksum follows."""

    def state_dict(self):
        return {"milestones": list(range(50_000))}

    def load_state_dict(self, state):
        self.state = state


@pytest.mark.parametrize(
    ("scheduler", "torch_sums", "parameters", "read_again"),
    [
        (None, True, 1, []),
        (None, False, 1, []),  # torch.save is told to compute none
        (Long(), True, 1, []),
        (None, True, 500, [METADATA]),  # more than 64 KiB of names and places: nothing says their checksum
    ],
    ids=["from torch", "our own", "long state", "many names"],
)
def test_the_checksums_in_the_manifest_are_those_of_the_files(
    tmp_path, monkeypatch, scheduler, torch_sums, parameters, read_again
):
    read, original = [], storage._crc32s
    monkeypatch.setattr(storage, "_crc32s", lambda path, names: read.extend(names) or original(path, names))
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(torch_sums)
    try:
        model = nn.Sequential(nn.Linear(300, 200), *(nn.Linear(1, 1) for _ in range(parameters)))
        save_checkpoint(tmp_path / "a", model=model, scheduler=scheduler)
    finally:
        torch.serialization.set_crc32_options(before)
    assert read == read_again
    files = storage.read_manifest(tmp_path / "a")["files"]
    assert sorted(files) == [METADATA, "__0_0.distcp"]
    for name, facts in files.items():
        assert facts["crc32"] == f"{zlib.crc32((tmp_path / 'a' / name).read_bytes()):08x}", name
    load_checkpoint(tmp_path / "a", model=model, scheduler=scheduler, verify=True)
