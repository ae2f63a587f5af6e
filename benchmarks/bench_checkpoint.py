"""What checkpoints cost, against torch.distributed.checkpoint and a memory copy: python benchmarks/bench_checkpoint.py

Each ratio is of medians of runs that took turns. Memory is the rise of a rank's peak resident set over what it had.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from fsdp_ema_lib import checkpoint_state
from fsdp_ema_lib.checkpoint_entries import staged
from fsdp_ema_lib.checkpoint_manager import CheckpointManager
from fsdp_ema_lib.checkpoint_state import Parts
from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.ema_state import local_of
from fsdp_ema_lib.safetensors_io import export_safetensors

MIB = 1 << 20


def build(kind: str, blocks: int, width: int) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(blocks)))
    if kind == "FSDP2":
        for block in model:
            fully_shard(block)
        return fully_shard(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    options = {"device_mesh": mesh, "device_id": torch.device("cpu"), "use_orig_params": True}
    for name, block in list(model.named_children()):
        model.add_module(name, FullyShardedDataParallel(block, **options))
    return FullyShardedDataParallel(model, **options)


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def peak_rise(work: Callable[[], Any]) -> float:
    """MiB by which the peak rises over the present."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    work()
    return (resident("VmHWM") - before) / MIB


def interleaved(works: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Median seconds of each, taking turns in changing order; the first turn is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats + 1):
        order = list(works)[turn % len(works) :] + list(works)[: turn % len(works)]
        for name in order:
            took = works[name]()
            if turn:
                seconds[name].append(took)
    return {name: statistics.median(times) for name, times in seconds.items()}


def timed(work: Callable[[], Any]) -> float:
    dist.barrier()
    began = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - began


def measure_export(kind: str, folder: Path, megabytes: int) -> dict[str, float]:
    blocks, width = 16, round((megabytes * MIB / 4 / 16) ** 0.5)
    model = build(kind, blocks, width)
    ema = EMA_FSDP(model)
    rise = peak_rise(lambda: export_safetensors(folder / "full.safetensors", ema, model))
    dist.barrier()
    return {"peak_rise_mib": rise, "largest_unit_mib": width * width * 4 / MIB, "model_mib": megabytes}


def measure_times(kind: str, folder: Path, megabytes: int, repeats: int) -> dict[str, float]:
    model = build(kind, 8, round((megabytes * MIB / 4 / 8) ** 0.5))
    ema = EMA_FSDP(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    entries = checkpoint_state.contents(Parts(model, optimizer, {"0": ema}, random=False)).entries
    state = {"model": model, "optimizer": optimizer, "ema": ema}
    managers = {
        "sealed": CheckpointManager(folder / "sealed", keep=1),
        "unsealed": CheckpointManager(folder / "unsealed", keep=1, checksums=False),
        "async": CheckpointManager(folder / "async", keep=1, async_save=True),
    }
    steps = iter(range(10**6))

    def plain_save() -> None:
        save({"all": entries}, storage_writer=FileSystemWriter(folder / "plain", sync_files=True))

    def plain_load() -> None:
        load({"all": entries}, storage_reader=FileSystemReader(folder / "plain"))

    def fresh_plain() -> float:
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "plain", ignore_errors=True)
        return timed(plain_save)

    def ours(name: str) -> float:
        step = next(steps)
        return timed(lambda: managers[name].save(step, **state))

    def blocking() -> float:
        managers["async"].wait()
        return ours("async")

    def copied() -> float:
        return timed(lambda: [local_of(entry).clone() for entry in entries.values() if isinstance(entry, torch.Tensor)])

    buffers: dict[str, torch.Tensor] = {}
    saves = interleaved(
        {"dcp.save": fresh_plain, "unsealed": lambda: ours("unsealed"), "sealed": lambda: ours("sealed")}, repeats
    )
    loads = interleaved(
        {
            "dcp.load": lambda: timed(plain_load),
            "load": lambda: timed(lambda: managers["sealed"].load(**state)),
            "verified": lambda: timed(lambda: managers["sealed"].load(**state, verify=True)),
        },
        repeats,
    )
    blocks = interleaved(
        {"copy": copied, "staging": lambda: timed(lambda: staged(entries, buffers)), "async": blocking}, repeats
    )
    for manager in managers.values():
        manager.close()
    return saves | loads | blocks


def rank_main(rank: int, folder: str, options: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=options.ranks)
    for kind in ("FSDP1", "FSDP2"):
        for what, measure in (
            ("export", lambda place, kind=kind: measure_export(kind, place, options.export_mib)),
            ("times", lambda place, kind=kind: measure_times(kind, place, options.times_mib, options.repeats)),
        ):
            place = Path(folder) / f"{kind}-{what}"
            place.mkdir(exist_ok=True)
            found = measure(place)
            dist.barrier()
            if rank == 0:
                results.put((kind, what, found))
                shutil.rmtree(place)
            dist.barrier()
    dist.destroy_process_group()


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """The limits and what was measured, in Markdown."""
    rows = ["| what | limit | FSDP1 | FSDP2 |", "| --- | --- | --- | --- |"]

    def row(what: str, limit: str, value: Callable[[str], str]) -> None:
        rows.append(f"| {what} | {limit} | {value('FSDP1')} | {value('FSDP2')} |")

    def ratio(above: str, below: str) -> Callable[[str], str]:
        return lambda kind: f"{found[kind]['times'][above] / found[kind]['times'][below]:.2f}"

    unit = found["FSDP1"]["export"]["largest_unit_mib"]
    model = found["FSDP1"]["export"]["model_mib"]
    rise = "peak_rise_mib"
    row(
        f"export of {model:.0f} MiB: peak rise on rank 0, MiB",
        f"{unit + 128:.0f}",
        lambda kind: f"{found[kind]['export'][rise]:.0f}",
    )
    row("save without checksums / dcp.save", "1.3", ratio("unsealed", "dcp.save"))
    row("save with checksums / without", "1.3", ratio("sealed", "unsealed"))
    row("load / dcp.load", "1.3", ratio("load", "dcp.load"))
    row("verified load / load", "-", ratio("verified", "load"))
    row("async save, blocked / memory copy", "1.3", ratio("async", "copy"))
    row("dcp.save, s", "-", lambda kind: f"{found[kind]['times']['dcp.save']:.2f}")
    row("dcp.load, s", "-", lambda kind: f"{found[kind]['times']['dcp.load']:.2f}")
    row("memory copy, s", "-", lambda kind: f"{found[kind]['times']['copy']:.3f}")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--export-mib", type=int, default=1024, help="size of the exported fp32 model")
    parser.add_argument(
        "--times-mib", type=int, default=128, help="size of the saved fp32 model; the state is 4 times it"
    )
    parser.add_argument("--folder", help="where to write; a temporary directory by default")
    parser.add_argument("--json", help="also write the numbers here")
    options = parser.parse_args()
    found: dict[str, dict[str, dict[str, float]]] = {"FSDP1": {}, "FSDP2": {}}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(rank_main, (folder, options, results), nprocs=options.ranks)
        while not results.empty():
            kind, what, numbers = results.get()
            found[kind][what] = numbers
    print(table(found))
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
