"""Whether an average follows its weights: how far it is, whether it still moves, what is not finite."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp_ema_lib import averaging
from fsdp_ema_lib.layout import Layout, Shard
from fsdp_ema_lib.process_group import comm_device


@dataclass(frozen=True)
class Health:
    """What `EMA_FSDP.health` measured, by parameter name; printing it gives a table.

    Attributes:
        distance: norm(average - live) / norm(live); 0 where both are zero, nan or inf where values are not finite.
        stalled: share of the elements, in [0, 1], that differ from the live weights and that the next update would
            leave as they are, because it would round away.
        nonfinite: number of live elements that are NaN or infinite.
    """

    distance: dict[str, float]
    stalled: dict[str, float]
    nonfinite: dict[str, int]

    def __str__(self) -> str:
        width = max(len(name) for name in self.distance)
        lines = [f"{'':<{width}}  distance  stalled  not finite"]
        for name, distance in self.distance.items():
            lines.append(f"{name:<{width}}  {distance:8.2e}  {self.stalled[name]:7.1%}  {self.nonfinite[name]:10d}")
        return "\n".join(lines)


@torch.no_grad()
def measure(layout: Layout, shadow: Mapping[str, Tensor], low: Mapping[str, Tensor], decay: float) -> Health:
    """Compare averages with the live weights. Collective over the groups that the parameters are sharded over.

    Args:
        layout: of the model.
        shadow: name -> this rank's average, the same names on every rank.
        low: the low-order parts, where there are some.
        decay: of the next update.
    """
    rows: dict[tuple[dist.ProcessGroup, ...], dict[str, Tensor]] = defaultdict(dict)
    for name, average in shadow.items():
        shard = layout.get(name)
        assert shard is not None, name
        groups = shard.split_over()
        # A CPU-offloaded shard's group may reduce on a GPU alone; parts of a model may be on several.
        device = comm_device(groups[0]) if groups else next(iter(shadow.values())).device
        rows[groups][name] = _sums(shard, average, low.get(name), decay).to(device, non_blocking=True)
    tables: list[Tensor] = []
    for groups, by_name in rows.items():
        table = torch.stack(list(by_name.values()))
        for group in groups:
            dist.all_reduce(table, group=group)
        tables.append(table if not tables else table.to(tables[0].device))
    names = [name for by_name in rows.values() for name in by_name]
    sums = dict(zip(names, torch.cat(tables).tolist(), strict=True))  # the one read from the device
    return Health(
        distance={name: _ratio(math.sqrt(sums[name][0]), math.sqrt(sums[name][1])) for name in shadow},
        stalled={name: _ratio(sums[name][2], sums[name][4]) for name in shadow},
        nonfinite={name: int(sums[name][3]) for name in shadow},
    )


def _sums(shard: Shard, average: Tensor, low: Tensor | None, decay: float) -> Tensor:
    """Of this rank's part, in float64: squared distance, squared norm, stalled, non-finite and all elements."""
    live = shard.live()
    wide = torch.complex128 if live.is_complex() else torch.float64
    exact = average.to(wide) if low is None else average.to(wide) + low.to(wide)
    next_average, next_low = average.clone(), None if low is None else low.clone()
    batches = averaging.plan([next_average], [live], [] if next_low is None else [next_low])
    averaging.average(batches, decay)
    still = next_average == average
    if low is not None and next_low is not None:
        still &= next_low == low
    sums = [
        (exact - live.to(wide)).abs().square().sum(),
        live.to(wide).abs().square().sum(),
        (still & (exact != live.to(wide))).sum(),
        live.isfinite().logical_not().sum(),
        torch.tensor(live.numel(), device=live.device),
    ]
    return torch.stack([value.to(torch.float64) for value in sums])


def _ratio(part: float, whole: float) -> float:
    if whole == 0.0:
        return 0.0 if part == 0.0 else math.inf
    return part / whole
