"""What checkpoints cost, against torch.distributed.checkpoint and a memory copy, all sides interleaved in one run.

    python benchmarks/bench_checkpoint.py --repeats 11 --out outputs/bench

Both sides save the same entries, flushed to disk, to a directory that does not exist yet; what they wrote is removed
outside of the measured time. A ratio is the median over the turns of the ratio within a turn. Memory is the rise of a
rank's peak resident set over what it had. Processor time is rank 0's.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from memory import MIB, peak_rise
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from fsdp_ema_lib import checkpoint_state, gloo_threads
from fsdp_ema_lib.checkpoint_entries import staged
from fsdp_ema_lib.checkpoint_manager import CheckpointManager
from fsdp_ema_lib.checkpoint_state import Parts
from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.ema_state import local_of
from fsdp_ema_lib.safetensors_io import export_safetensors

KINDS = ("FSDP1", "FSDP2")

# What a run has to reach. Export: MiB above the largest unit. Times: (what, against what) -> largest ratio. Cold means
# from a disk, as on another machine than the one that wrote. Of a file still in memory the checksum is most of a load.
EXPORT_TARGET = 128
TARGETS = {
    ("save, no checksums", "dcp.save"): 1.3,
    ("save", "save, no checksums"): 1.3,
    ("load", "dcp.load"): 1.3,
    ("load, cold", "dcp.load, cold"): 1.3,
    ("verified load, cold", "load, cold"): 1.3,
    ("async save, blocked", "memory copy"): 1.3,
}
# Shown without a limit.
ALSO = (("save", "dcp.save"), ("verified load", "load"))


class Cost(NamedTuple):
    """Seconds by the clock, and of rank 0's processor time."""

    wall: float
    cpu: float


def build(kind: str, blocks: int, mebibytes: int) -> nn.Module:
    width = round((mebibytes * MIB / 4 / blocks) ** 0.5)
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


def measure_export(kind: str, folder: Path, mebibytes: int, blocks: int) -> dict[str, float]:
    """The rise on every rank, and the limit."""
    model = build(kind, blocks, mebibytes)
    ema = EMA_FSDP(model)
    rise = peak_rise(lambda: export_safetensors(folder / "full.safetensors", ema, model))
    rises: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(rises, rise)
    unit = mebibytes / blocks
    return {"unit": unit, "limit": unit + EXPORT_TARGET} | {f"rank {rank}": rise for rank, rise in enumerate(rises)}


def timed(work: Callable[[], Any]) -> Cost:
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    dist.barrier()
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def interleaved(works: dict[str, Callable[[], Cost]], repeats: int) -> dict[str, list[Cost]]:
    """What each cost at each turn, forwards at one turn and backwards at the next; the first two do not count."""
    costs: dict[str, list[Cost]] = {name: [] for name in works}
    for turn in range(repeats + 2):
        for name in list(works)[:: 1 if turn % 2 else -1]:
            cost = works[name]()
            if turn > 1:
                costs[name].append(cost)
    return costs


def measure_times(kind: str, folder: Path, mebibytes: int, repeats: int) -> dict[str, list[Cost]]:
    model = build(kind, 8, mebibytes)
    ema = EMA_FSDP(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    entries = checkpoint_state.contents(Parts(model, optimizer, {"0": ema}, random=False)).entries
    state = {"model": model, "optimizer": optimizer, "ema": ema}
    managers = {
        "save": CheckpointManager(folder / "sealed", keep=None),
        "save, no checksums": CheckpointManager(folder / "unsealed", keep=None, checksums=False),
        "async save, blocked": CheckpointManager(folder / "async", keep=None, async_save=True),
    }
    steps = iter(range(1, 10**6))

    def fresh(work: Callable[[], Any], *written: Path) -> Cost:
        """The cost of a save that finds no older files and a disk that has nothing else to write."""
        if dist.get_rank() == 0:
            os.sync()
        cost = timed(work)
        if dist.get_rank() == 0:
            for path in written:
                shutil.rmtree(path)
        dist.barrier()
        return cost

    def cold(work: Callable[[], Any], path: Path) -> Cost:
        """The cost of a load of files of which nothing is in memory."""
        if dist.get_rank() == 0:
            os.sync()  # what is not written yet stays
            for file in path.rglob("*"):
                if file.is_file():
                    with file.open("rb") as opened:
                        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        dist.barrier()
        return timed(work)

    def plain_save(path: Path) -> None:
        save({"all": entries}, storage_writer=FileSystemWriter(path))

    def ours(name: str) -> Cost:
        step = next(steps)
        return fresh(lambda: managers[name].save(step, **state), managers[name].path_of(step))

    def blocking() -> Cost:
        step, manager = next(steps), managers["async save, blocked"]
        cost = timed(lambda: manager.save(step, **state))
        manager.wait()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(manager.path_of(step))
        return cost

    found = interleaved(
        {
            "dcp.save": lambda: fresh(lambda: plain_save(folder / "plain"), folder / "plain"),
            "save, no checksums": lambda: ours("save, no checksums"),
            "save": lambda: ours("save"),
        },
        repeats,
    )
    plain_save(folder / "plain")
    managers["save"].save(0, **state)
    loads: dict[str, tuple[Callable[[], Any], Path]] = {
        "dcp.load": (
            lambda: load({"all": entries}, storage_reader=FileSystemReader(folder / "plain")),
            folder / "plain",
        ),
        "load": (lambda: managers["save"].load(**state), folder / "sealed"),
        "verified load": (lambda: managers["save"].load(**state, verify=True), folder / "sealed"),
    }
    found |= interleaved({name: lambda work=work: timed(work) for name, (work, _) in loads.items()}, repeats)
    found |= interleaved(
        {f"{name}, cold": lambda work=work, path=path: cold(work, path) for name, (work, path) in loads.items()},
        repeats,
    )
    buffers: dict[str, torch.Tensor] = {}
    tensors = [local_of(entry) for entry in entries.values() if isinstance(entry, torch.Tensor)]
    found |= interleaved(
        {
            "memory copy": lambda: timed(lambda: [tensor.clone() for tensor in tensors]),
            "staging": lambda: timed(lambda: staged(entries, buffers)),
            "async save, blocked": blocking,
        },
        repeats,
    )
    for manager in managers.values():
        manager.close()
    return found


def rank_main(rank: int, folder: str, kind: str, part: str, options: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=options.ranks)
    jobs: dict[str, Callable[[Path], Any]] = {
        f"export in {blocks} units": lambda place, blocks=blocks: measure_export(
            kind, place, options.export_mib, blocks
        )
        for blocks in (16, 4)
    }
    if part == "times":
        jobs = {"times": lambda place: measure_times(kind, place, options.times_mib, options.repeats)}
    for what, measure in jobs.items():
        place = Path(folder) / what
        place.mkdir(exist_ok=True)
        found = measure(place)
        dist.barrier()
        if rank == 0:
            results.put((kind, what, found))
            shutil.rmtree(place)
        dist.barrier()
    gloo_threads.let_go()
    dist.destroy_process_group()


def ratio(times: dict[str, list[Cost]], what: str, against: str, clock: str = "wall") -> float:
    pairs = zip(times[what], times[against], strict=True)
    return statistics.median(getattr(above, clock) / getattr(below, clock) for above, below in pairs)


def rows(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """What was measured -> kind -> number; a row of a target is judged by `missed`."""
    table: dict[str, dict[str, float]] = {}
    for kind, measured in found.items():
        for what, numbers in measured.items():
            if what != "times":
                for rank in (key for key in numbers if key.startswith("rank")):
                    table.setdefault(f"{what} of {numbers['unit']:.0f} MiB: peak rise on {rank}, MiB", {})[kind] = (
                        numbers[rank]
                    )
                continue
            for above, below in TARGETS:
                table.setdefault(f"{above} / {below}", {})[kind] = ratio(numbers, above, below)
                table.setdefault(f"the same in processor time: {above}", {})[kind] = ratio(numbers, above, below, "cpu")
            for above, below in ALSO:
                table.setdefault(f"{above} / {below}", {})[kind] = ratio(numbers, above, below)
            for name, costs in numbers.items():
                table.setdefault(f"{name}, s", {})[kind] = statistics.median(cost.wall for cost in costs)
    return table


def missed(found: dict[str, dict[str, Any]]) -> list[str]:
    """Each target that was not reached, in words."""
    lines = []
    for kind, measured in found.items():
        for what, numbers in measured.items():
            if what != "times":
                if numbers["rank 0"] > numbers["limit"]:
                    lines.append(f"{kind}, {what}: rose by {numbers['rank 0']:.0f} MiB, limit {numbers['limit']:.0f}")
                continue
            for (above, below), most in TARGETS.items():
                if (value := ratio(numbers, above, below)) > most:
                    lines.append(f"{kind}: {above} took {value:.2f} x {below}, at most {most} was to be reached")
    return lines


def limit_of(row: str, found: dict[str, dict[str, Any]]) -> str:
    targets = {f"{above} / {below}": str(most) for (above, below), most in TARGETS.items()}
    exports = {what: numbers for measured in found.values() for what, numbers in measured.items() if what != "times"}
    return targets.get(row) or next(
        (f"{n['limit']:.0f}" for what, n in exports.items() if row.startswith(what) and "rank 0" in row), "-"
    )


def print_table(found: dict[str, dict[str, Any]]) -> None:
    print("| what | limit | " + " | ".join(found) + " |")
    print("| --- | --- |" + " --- |" * len(found))
    for row, values in rows(found).items():
        print(f"| {row} | {limit_of(row, found)} | " + " | ".join(f"{values[kind]:.3g}" for kind in found) + " |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--export-mib", type=int, default=1024, help="size of the exported fp32 model")
    parser.add_argument(
        "--times-mib", type=int, default=256, help="size of the saved fp32 model; the state is 4 times it"
    )
    parser.add_argument("--only", nargs="+", choices=("export", "times"), default=["export", "times"])
    parser.add_argument("--folder", help="where to write; the place decides what a flush costs (default: temporary)")
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"))
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}
    results = mp.get_context("spawn").SimpleQueue()
    # Each in processes of its own: in what others left free and in pieces, the allocator finds each unit another place.
    for kind, part in product(KINDS, options.only):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            mp.spawn(rank_main, (folder, kind, part, options, results), nprocs=options.ranks)
        while not results.empty():
            kind, what, numbers = results.get()
            found[kind][what] = numbers
    print_table(found)
    options.out.mkdir(parents=True, exist_ok=True)
    machine = {"torch": torch.__version__, "processors": os.cpu_count(), "machine": platform.platform()}
    text = json.dumps({"machine": machine, "rows": rows(found), "measured": found}, indent=1)
    (options.out / "checkpoint.json").write_text(text)
    lines = missed(found)
    print("\n".join(lines) or "every target was reached", file=sys.stderr if lines else sys.stdout)
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
