"""An optimizer's state under the names of the parameters that it steps, whatever holds them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from fsdp_ema_lib.checkpoint_entries import Contents, Restore, plain_json
from fsdp_ema_lib.ema_state import local_of
from fsdp_ema_lib.layout import FlatShard, Layout, Shard


@dataclass
class Held:
    """A tensor that an optimizer steps, and the named parameters in it: one, or many in an FSDP1 flat parameter."""

    param: Tensor
    shards: list[Shard]

    def cut(self, shard: Shard, state: Tensor) -> Tensor:
        """The part of a state tensor that belongs to one of the parameters."""
        local = local_of(state)
        if isinstance(shard, FlatShard) and shard.unit.flat is self.param:
            return shard.unit.slice(local, shard.index)
        return local

    def fits(self, state: Any) -> bool:
        """Whether a state tensor has an element for each element of the parameter."""
        return isinstance(state, Tensor) and local_of(state).shape == local_of(self.param).shape

    def zeros(self, dtype: torch.dtype) -> Tensor:
        """A new state tensor in the form of the parameter."""
        local = torch.zeros_like(local_of(self.param), dtype=dtype, requires_grad=False)
        return self.shards[0].view(local) if isinstance(self.param, DTensor) else local


def held_by(layout: Layout, optimizer: torch.optim.Optimizer) -> list[list[Held]]:
    """What each parameter group of an optimizer holds.

    Raises:
        ValueError: a parameter that is not the model's, by its place in the optimizer.
    """
    owners: dict[int, list[Shard]] = defaultdict(list)
    for shard in layout.shards.values():
        owners[id(shard.registered)].append(shard)
    strangers, groups = [], []
    for number, group in enumerate(optimizer.param_groups):
        held = []
        for place, param in enumerate(group["params"]):
            if id(param) in owners:
                held.append(Held(param, owners[id(param)]))
            else:
                strangers.append(f"param_groups[{number}]['params'][{place}], of shape {tuple(param.shape)}")
        groups.append(held)
    if strangers:
        raise ValueError(
            "optimizer: these parameters are not the model's:\n"
            + "\n".join(strangers)
            + "\nBuild the optimizer from the parameters of the wrapped model, after wrapping it."
        )
    return groups


def save(layout: Layout, optimizer: torch.optim.Optimizer, found: Contents) -> None:
    """Add an optimizer's state and settings to what is saved.

    Raises:
        TypeError: something that cannot be saved, named. ValueError: an optimizer of another model.
    """
    groups, values = [], {}
    for group, held in zip(optimizer.param_groups, held_by(layout, optimizer), strict=True):
        settings = {
            key: _plain_setting(value, f"optimizer: param_groups' {key!r}")
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        keys: dict[str, None] = {}
        for one in held:
            for key, state in optimizer.state.get(one.param, {}).items():
                keys[key] = None
                for shard in one.shards:
                    if not one.fits(state) and shard.split_over() and not shard.live().numel():
                        # FSDP1 never steps a parameter of which this rank has no element: its count would be stale.
                        continue
                    where = f"{shard.name}.{key}"
                    entry = _state_entry(one, shard, state, key, f"optimizer: {shard.name}: the state {key!r}")
                    if isinstance(entry, Tensor):
                        found.entries[f"optimizer.{where}"] = entry
                    else:
                        values[where] = entry
        names = [s.name for one in held for s in one.shards]
        groups.append({"parameters": names, "keys": list(keys), "settings": settings})
    found.described["optimizer"] = {"class": type(optimizer).__name__, "groups": groups, "values": values}


def _state_entry(held: Held, shard: Shard, state: Any, key: Any, where: str) -> Any:
    if not isinstance(key, str) or "." in key:
        raise TypeError(f"{where}: a name without dots was expected")
    if held.fits(state):
        return shard.view(held.cut(shard, state).detach())
    if isinstance(state, Tensor):
        if state.numel() > 1 and shard.split_over():
            raise TypeError(
                f"{where} has shape {tuple(state.shape)}, the sharded parameter {tuple(shard.shape)}: which part of it "
                f"belongs to which rank is not known, so it cannot be saved"
            )
        return state.detach()
    return plain_json(state, where)


def _plain_setting(value: Any, where: str) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else plain_json(value, where)


def want(restore: Restore, layout: Layout, optimizer: torch.optim.Optimizer) -> None:
    """Ask for an optimizer's state and settings; what does not fit goes to `restore.faults`."""
    described = restore.manifest["optimizer"]
    if not described:
        restore.faults.append("optimizer: the checkpoint holds none")
        return
    if described["class"] != type(optimizer).__name__:
        restore.faults.append(
            f"optimizer: the checkpoint holds the state of {described['class']}, this is {type(optimizer).__name__}"
        )
        return
    keys: dict[str, dict[str, Any]] = defaultdict(dict)
    for entry, saved in restore.metadata.state_dict_metadata.items():
        if entry.startswith("optimizer."):
            name, _, key = entry[len("optimizer.") :].rpartition(".")
            keys[name][key] = saved
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    for where, value in described["values"].items():
        name, _, key = where.rpartition(".")
        values[name][key] = value
    groups = held_by(layout, optimizer)
    here = {shard.name for held in groups for one in held for shard in one.shards}
    saved_names = (name for group in described["groups"] for name in group["parameters"])
    restore.strays += [
        f"optimizer: {name}: in the checkpoint, but this optimizer does not hold it"
        for name in saved_names
        if name not in here and not restore.may_be_left(name)
    ]
    for number, held in enumerate(groups):
        _want_settings(restore, described["groups"], optimizer, number, [s.name for one in held for s in one.shards])
        names = {s.name for one in held for s in one.shards}
        complete = {key for name in names for key in (*keys[name], *values[name])}
        # An entry that is lost for all parameters is known from what the save wrote down; earlier ones did not.
        complete |= {key for g in described["groups"] if names & {*g["parameters"]} for key in g.get("keys", ())}
        for one in held:
            _want_held(restore, optimizer, number, one, keys, values, complete)


def _want_settings(
    restore: Restore,
    saved_groups: Sequence[Mapping[str, Any]],
    optimizer: torch.optim.Optimizer,
    number: int,
    names: Sequence[str],
) -> None:
    """Find the settings of a parameter group by the names of its parameters, which may be grouped otherwise now."""
    of_name = {name: group["settings"] for group in saved_groups for name in group["parameters"]}
    found: list[dict[str, Any]] = []
    for name in names:
        settings = of_name.get(name)
        if settings is None:
            if not restore.may_miss(name):
                restore.faults.append(f"optimizer: {name}: the saved optimizer did not hold it")
        elif settings not in found:
            found.append(settings)
    if len(found) > 1:
        differing = sorted(key for key in found[0] if any(other.get(key) != found[0][key] for other in found[1:]))
        restore.faults.append(
            f"optimizer: param_groups[{number}] joins parameters that were saved with different "
            f"{', '.join(differing)}; group them as they were"
        )
        return

    def put() -> None:
        group = optimizer.param_groups[number]
        for key, value in found[0].items() if found else ():
            current = group.get(key)
            if isinstance(current, Tensor):
                current.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value

    restore.steps.append(put)


def _want_held(
    restore: Restore,
    optimizer: torch.optim.Optimizer,
    number: int,
    held: Held,
    keys: Mapping[str, Mapping[str, Any]],
    values: Mapping[str, Mapping[str, Any]],
    complete: set[str],
) -> None:
    """Ask for the state of one tensor that the optimizer steps; wholly absent is fine, half-present is not."""
    split: dict[str, list[Shard]] = defaultdict(list)
    state: dict[str, Any] = {}
    for shard in held.shards:
        present = {*keys[shard.name], *values[shard.name]}
        if present and present != complete:
            restore.faults.append(
                f"optimizer: {shard.name}: the checkpoint holds its {', '.join(sorted(present))}, but not its "
                f"{', '.join(sorted(complete - present))}"
            )
        state.update(values[shard.name])
        for key, saved in keys[shard.name].items():
            if not isinstance(saved, TensorStorageMetadata):
                restore.faults.append(f"optimizer.{shard.name}.{key}: the checkpoint holds no tensor")
            elif saved.size == shard.shape:
                split[key].append(shard)
            elif saved.size.numel() > 1 and shard.split_over():
                restore.faults.append(
                    f"optimizer.{shard.name}.{key}: the checkpoint holds {tuple(saved.size)}, the parameter is "
                    f"{tuple(shard.shape)} and sharded"
                )
            else:
                state[key] = torch.empty(saved.size, dtype=saved.properties.dtype)
                restore.entries[f"optimizer.{shard.name}.{key}"] = state[key]
    single = [key for key, value in state.items() if isinstance(value, Tensor)]
    current = optimizer.state.get(held.param, {})
    for key, shards in split.items():
        state[key] = _want_state(restore, held, key, shards, current.get(key))

    def put() -> None:
        group = optimizer.param_groups[number]
        if group.get("capturable") or group.get("fused"):
            state.update({key: state[key].to(held.param.device) for key in single})
        never_stepped = not isinstance(held.param, DTensor) and not held.param.numel()
        if state and not (never_stepped and any(shard.split_over() for shard in held.shards)):
            optimizer.state[held.param] = state
        else:
            optimizer.state.pop(held.param, None)

    restore.steps.append(put)


def _want_state(restore: Restore, held: Held, key: str, shards: Sequence[Shard], current: Any) -> Tensor:
    """Ask for a state tensor with an element for each of the parameter's: the current one, or else a new one."""
    saved = restore.saved(f"optimizer.{shards[0].name}.{key}")
    # A new one is zero where nothing was saved: between the parameters of a flat one, and at one never stepped.
    in_use = held.fits(current) and current.dtype == saved.properties.dtype and len(shards) == len(held.shards)
    whole: Tensor = current if in_use else held.zeros(saved.properties.dtype)
    for shard in shards:
        view = shard.view(held.cut(shard, whole).detach())
        if in_use:
            restore.want_in_place(f"optimizer.{shard.name}.{key}", view)
        else:
            restore.entries[f"optimizer.{shard.name}.{key}"] = view
    return whole
