"""What a checkpoint holds of a running training, and how it goes back: sharded, local, nothing gathered."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata

from fsdp_ema_lib import ema_state, optimizer_state
from fsdp_ema_lib.checkpoint_entries import Contents, Restore, flat
from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.layout import Layout
from fsdp_ema_lib.random_states import check_random_state, random_state, set_random_state
from fsdp_ema_lib.storage import DamagedCheckpointError

Model = nn.Module | Sequence[nn.Module]
Averages = EMA_FSDP | Sequence[EMA_FSDP] | Mapping[str, EMA_FSDP]


class Stateful(Protocol):
    """A learning-rate scheduler, a sampler or a data loader that can be asked for its position."""

    def state_dict(self) -> dict[str, Any]:
        """Numbers, names and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take a state back."""
        ...


@dataclass
class Parts:
    """What is saved, or asked for, together.

    Attributes:
        model: as wrapped, or a list of model parts.
        optimizer: of the model.
        emas: averages by name.
        scheduler: the same on every rank; rank 0's is saved.
        sampler: each rank has its own.
        random: whether the random states are part of it.
    """

    model: Model | None = None
    optimizer: torch.optim.Optimizer | None = None
    emas: dict[str, EMA_FSDP] = field(default_factory=dict)
    scheduler: Stateful | None = None
    sampler: Stateful | None = None
    random: bool = True

    def refuse_while_swapped(self) -> None:
        """Raise RuntimeError if an average is in the model at this moment."""
        for name, average in self.emas.items():
            if average.is_swapped:
                raise RuntimeError(
                    f"ema {name!r} is swapped into the model at this moment (inside swapped_into), and the live "
                    f"weights are elsewhere. Save and load outside the block."
                )


def by_name(ema: Averages | None) -> dict[str, EMA_FSDP]:
    """Averages under the names that a checkpoint gives them: one alone is "0", a list "0", "1", ...

    Raises:
        TypeError: not an average, a list or a mapping of them. ValueError: a name with other than letters, digits,
            `_` and `-`.
    """
    if ema is None:
        return {}
    if isinstance(ema, EMA_FSDP):
        ema = [ema]
    named = dict(ema) if isinstance(ema, Mapping) else {str(i): average for i, average in enumerate(ema)}
    for name, average in named.items():
        if not isinstance(average, EMA_FSDP):
            raise TypeError(f"ema must be an EMA_FSDP, a list or a mapping of them, got {type(average).__name__}")
        if not (isinstance(name, str) and re.fullmatch(r"[\w-]+", name)):
            raise ValueError(f"ema: an average's name must be letters, digits, _ and -, got {name!r}")
    return named


# ---------------------------------------------------------------- saving


@torch.no_grad()
def contents(parts: Parts) -> Contents:
    """Everything that this rank saves; the tensors alias the live ones. Local.

    Raises:
        TypeError: a part holds something that a load would refuse, named. RuntimeError: an average is swapped into the
            model. ValueError: an optimizer of another model.
    """
    parts.refuse_while_swapped()
    found = Contents()
    rank = _rank()
    layout = None if parts.model is None else Layout(parts.model)
    if layout is not None:
        _save_model(layout, found)
    if parts.optimizer is not None:
        if layout is None:
            raise ValueError("optimizer: it can only be saved together with its model, which gives the names")
        optimizer_state.save(layout, parts.optimizer, found)
    for name, average in parts.emas.items():
        state = average.state_dict()
        for key, value in flat(ema_state.lasting(state)):
            found.entries[f"ema.{name}.{key}"] = value
            bare = key.partition(".")[2] or key
            if bare == "num_skipped" or (layout is not None and bare in layout.buffers):
                found.buffers.append(f"ema.{name}.{key}")
        config = ema_state.decode(state["config"])
        found.described["emas"][name] = {"num_updates": average.num_updates, "decay": config.decay}
    if parts.scheduler is not None and rank == 0:
        found.entries["scheduler"] = parts.scheduler.state_dict()
        found.described["classes"]["scheduler"] = type(parts.scheduler).__name__
    if parts.sampler is not None:
        found.entries[f"sampler.rank{rank}"] = parts.sampler.state_dict()
        found.described["classes"]["sampler"] = type(parts.sampler).__name__
    if parts.random:
        found.entries |= {f"rng.rank{rank}.{key}": value for key, value in random_state().items()}
    return found


def _save_model(layout: Layout, found: Contents) -> None:
    for name, shard in (layout.shards | layout.buffers).items():
        found.entries[f"model.{name}"] = shard.view(shard.live())
    buffers = [name for name, shard in layout.buffers.items() if not shard.split_over()]
    found.buffers += [f"model.{name}" for name in buffers]
    for name, value in layout.extra_state.items():
        found.entries[f"model.{name}"] = value
    found.described["model"] = {
        "names": list(layout.primary),
        "tied": {name: primary for name, primary in layout.primary.items() if name != primary},
        "buffers": list(layout.buffers),
        "sharding": dict(Counter(_KINDS.get(type(shard).__name__, "plain") for shard in layout.shards.values())),
    }


_KINDS = {"MeshShard": "DTensor", "FlatShard": "FSDP1"}


def merged(described: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all ranks say about their parts, as one description. Ranks may hold different model parts."""
    first = described[0]
    model: dict[str, Any] = dict(first["model"])
    optimizer: dict[str, Any] = dict(first["optimizer"])
    for other in described[1:]:
        if other["model"]:
            model["names"] = list(dict.fromkeys([*model["names"], *other["model"]["names"]]))
            model["buffers"] = list(dict.fromkeys([*model["buffers"], *other["model"]["buffers"]]))
            model["tied"] = other["model"]["tied"] | model["tied"]
        if other["optimizer"]:
            optimizer["values"] = other["optimizer"]["values"] | optimizer["values"]
            mine, theirs = optimizer["groups"], other["optimizer"]["groups"]
            for group, more in zip(mine, theirs, strict=False):
                for what in ("parameters", "keys"):
                    group[what] = list(dict.fromkeys([*group[what], *more[what]]))
            optimizer["groups"] = mine + theirs[len(mine) :]
    classes = {what: name for one in reversed(described) for what, name in one["classes"].items()}
    return {"model": model, "optimizer": optimizer, "emas": dict(first["emas"]), "classes": classes}


# ---------------------------------------------------------------- loading


def sections(parts: Parts) -> list[str]:
    """The prefixes of the entries that a load asks for."""
    found = [f"ema.{name}." for name in parts.emas]
    return found + (["model."] if parts.model is not None else [])


def prepare(
    parts: Parts,
    metadata: Metadata,
    manifest: Mapping[str, Any],
    allow_missing: Sequence[str],
    allow_unexpected: Sequence[str],
) -> Restore:
    """Compare a checkpoint with what it is to be loaded into. Local; changes nothing, raises for bad arguments alone.

    Raises:
        RuntimeError: an average is swapped into the model. ValueError: an optimizer without its model.
    """
    parts.refuse_while_swapped()
    restore = Restore(metadata, manifest, _rank(), _world(), allow_missing, allow_unexpected)
    layout = None if parts.model is None else Layout(parts.model)
    for name, average in parts.emas.items():
        _want_ema(restore, name, average)
    if layout is not None:
        _want_model(restore, layout)
    if parts.optimizer is not None:
        if layout is None:
            raise ValueError("optimizer: it can only be loaded together with its model, which gives the names")
        optimizer_state.want(restore, layout, parts.optimizer)
    if parts.scheduler is not None:
        _want_stateful(restore, parts.scheduler, "scheduler", "scheduler")
    if parts.sampler is not None:
        _want_sampler(restore, parts.sampler)
    if parts.random:
        _want_random(restore)
    return restore


def _want_model(restore: Restore, layout: Layout) -> None:
    layout.before_write()  # here already: it may give the values another place
    for name, shard in (layout.shards | layout.buffers).items():
        live = shard.live()
        if restore.fits(f"model.{name}", name, shard.shape, live.dtype):
            restore.want_in_place(f"model.{name}", shard.view(live))
    owners = [m for part in layout.modules for m in part.modules() if _has_extra_state(m)]
    extra = dict(zip(layout.extra_state, owners, strict=True))
    wanted = {}
    for name, owner in extra.items():
        entry = f"model.{name}"
        restore.known.add(entry)
        if isinstance(layout.extra_state[name], Tensor):
            if restore.want(entry, name, layout.extra_state[name]) is not None:
                wanted[entry] = owner
        elif restore.want_object(entry, None if restore.may_miss(name) else f"{entry}: missing in the checkpoint"):
            wanted[entry] = owner

    def put() -> None:
        for entry, owner in wanted.items():
            owner.set_extra_state(restore.entries[entry])

    restore.steps.append(put)


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _want_ema(restore: Restore, name: str, average: EMA_FSDP) -> None:
    here = average.state_dict()
    wanted: dict[str, Any] = {key: dict(value) if isinstance(value, Mapping) else value for key, value in here.items()}
    for key, current in flat(ema_state.lasting(here)):
        entry = f"ema.{name}.{key}"
        group, _, parameter = key.partition(".")
        if parameter:
            if restore.fits(entry, parameter, current.shape, current.dtype):
                restore.want_in_place(entry, current)
        elif (filled := restore.want(entry, key, current)) is not None:
            wanted[group] = filled

    def check() -> None:
        ema_state.check(wanted, here)

    restore.checks.append(check)
    restore.steps.append(lambda: average.load_state_dict(wanted))


def _want_stateful(restore: Restore, stateful: Stateful, entry: str, what: str) -> None:
    mine = type(stateful).__name__
    if not restore.want_object(entry, f"{what}: the checkpoint holds none"):
        return
    # Earlier checkpoints do not say it. The keys of a state may change with its place, or with torch's version.
    if (saved := restore.manifest.get("classes", {}).get(what, mine)) != mine:
        restore.faults.append(f"{what}: the checkpoint holds the state of {saved}, this is {mine}")

    def take() -> None:
        try:
            stateful.load_state_dict(restore.entries[entry])
        except Exception as problem:
            raise ValueError(
                f"{what}: {mine} did not take its state from the checkpoint ({problem!r}). Model, optimizer and "
                f"averages are unchanged. Build it as it was, or load without {what}=."
            ) from problem

    restore.takers.append(take)


def _want_sampler(restore: Restore, sampler: Stateful) -> None:
    world, saved_world = _world(), restore.manifest["world_size"]
    if world != saved_world:
        restore.faults.append(
            f"sampler: each of {saved_world} ranks saved its own position, which {world} ranks cannot share. Load "
            f"without sampler=, and set the position from `step`."
        )
        return
    _want_stateful(restore, sampler, f"sampler.rank{_rank()}", "sampler")


def _want_random(restore: Restore) -> None:
    prefix = f"rng.rank{_rank()}."
    here = random_state()
    if restore.saved(f"{prefix}torch") is None:
        restore.notes.append(
            f"rank {_rank()}: the checkpoint was saved by {restore.manifest['world_size']} ranks and has no random "
            f"state for this one, which keeps its own."
        )
        return
    found: dict[str, Tensor] = {}
    for key, current in here.items():
        if restore.saved(prefix + key) is not None:
            local = restore.want(prefix + key, key, current)
            if local is not None:
                found[key] = local
        elif key.startswith("python") or (key == "numpy_gauss" and restore.saved(f"{prefix}numpy") is not None):
            restore.faults.append(f"{prefix}{key}: missing in the checkpoint")

    def check() -> None:
        try:
            check_random_state(found)
        except Exception as problem:
            raise DamagedCheckpointError(f"{prefix[:-1]}: no state of a random generator: {problem!r}") from problem

    restore.checks.append(check)
    restore.steps.append(lambda: set_random_state(found))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
