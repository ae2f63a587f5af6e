"""Which rank holds what, for one strategy and one number of ranks at a time: controls over `plots.rank_grid`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ipywidgets
from matplotlib.figure import Figure

from fsdp_ema_lib.lab.plots import rank_grid, style
from fsdp_ema_lib.lab.shard_map import ShardMap
from fsdp_ema_lib.lab.widgets import Explorer, png

#: (way, number of ranks) to what `map_shards` found.
Maps = Mapping[tuple[str, int], ShardMap]
ALL = "all"


def shard_figure(found: ShardMap, *, rank: int | None = None) -> Figure:
    """Draw who holds which element under one layout, and say how much each rank holds and sends.

    pyplot does not know the figure: name it on the last line of a cell to show it.

    Args:
        found: from `map_shards`.
        rank: color this rank's elements alone; None for all ranks.

    Raises:
        ValueError: there is no such rank.
    """
    ranks = len(found.boxes)
    if rank is not None and not 0 <= rank < ranks:
        raise ValueError(f"rank must be from 0 to {ranks - 1}, got {rank}")
    holders = {name: array.copy() for name, array in found.holders().items()}
    if rank is not None:
        for array in holders.values():
            array[[other for other in range(ranks) if other != rank]] = False
    sent = {operation: found.total(operation) for operation in ("update", "full_state_dict")}
    title = (
        f"Elements per rank: {_row(found.elements())}\n"
        f"Collectives and messages per rank: {_row(sent['update'])} in an update, "
        f"{_row(sent['full_state_dict'])} in a full export"
    )
    with style():
        figure = Figure()
    return rank_grid({f"{found.way}\n{ranks} rank{'s' * (ranks > 1)}": holders}, title=title, figure=figure)


def _row(counts: list[int]) -> str:
    """One number where all ranks agree."""
    return str(counts[0]) if len(set(counts)) == 1 else ", ".join(map(str, counts))


def shard_explorer(maps: Maps, *, way: str | None = None, ranks: int | None = None) -> Explorer:
    """Choose a number of ranks, a strategy and a rank, and see who holds which element of each parameter.

    Args:
        maps: what was seen on real ranks, at least one layout.
        way: the strategy to start with; by default the first that there is for `ranks`.
        ranks: the number of ranks to start with; by default the largest.

    Returns:
        The explorer; its `controls` are "ranks", "strategy" and "rank".

    Raises:
        ValueError: no map, or none for this way and number of ranks, with those that there are.
    """
    if not maps:
        raise ValueError("maps: expected at least one layout, as from map_shards; got none")
    ranks = max(count for _, count in maps) if ranks is None else ranks
    way = next((name for name, count in maps if count == ranks), "any") if way is None else way
    if (way, ranks) not in maps:
        there = ", ".join(f"{name} on {count}" for name, count in maps)
        raise ValueError(f"maps: none of {way} on {ranks} ranks; there are {there}")
    controls: dict[str, Any] = {
        "ranks": ipywidgets.Dropdown(
            options=sorted({count for _, count in maps}), value=ranks, description="number of ranks"
        ),
        "strategy": ipywidgets.Dropdown(options=_ways(maps, ranks), value=way, description="strategy"),
        "rank": ipywidgets.Dropdown(options=_ranks(ranks), value=ALL, description="rank shown"),
    }

    def adjust(changed: str) -> None:
        if changed == "ranks":
            count = controls["ranks"].value
            for name, options in (("strategy", _ways(maps, count)), ("rank", _ranks(count))):
                kept = controls[name].value
                controls[name].options = options
                controls[name].value = kept if kept in options else options[0]

    def draw(ranks: int, strategy: str, rank: str | int) -> bytes:
        return png(shard_figure(maps[strategy, ranks], rank=None if rank == ALL else int(rank)))

    alt = "Every element of every parameter in the color of the rank that holds it"
    return Explorer("shard-explorer", controls, draw, alt=alt, adjust=adjust)


def _ways(maps: Maps, ranks: int) -> list[str]:
    return [way for way, count in maps if count == ranks]


def _ranks(ranks: int) -> list[str]:
    return [ALL, *map(str, range(ranks))]
