"""The exponential moving average of a model's weights, each rank keeping that of its own shard."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp_ema_lib import averaging
from fsdp_ema_lib.agreement import raise_together
from fsdp_ema_lib.decay import Constant, Schedule, as_schedule, decay_at, from_config, to_config
from fsdp_ema_lib.layout import Layout, Shard, full_buffer
from fsdp_ema_lib.names import is_predictive_aux_key, normalize_generator_fsdp_key, normalize_generator_fsdp_state_dict
from fsdp_ema_lib.process_group import comm_device, is_main_process
from fsdp_ema_lib.sharded_view import ShardedView

STATE_VERSION = 1
# The settings travel as JSON in a tensor of this fixed size, so that loading a state unpickles nothing.
CONFIG_BYTES = 2048

Model = nn.Module | Sequence[nn.Module]


class EMA_FSDP:  # noqa: N801 - the name its users type
    """Exponential moving average of a model's trainable weights, kept in fp32 by each rank for its own shard.

    Works on plain modules, DDP, FSDP1 and FSDP2 alike; parameters have the names that they have in the plain model.
    Tracked are the trainable floating-point and complex parameters. A parameter that becomes trainable later is tracked
    from the next update on, starting from its weights at that moment. Frozen parameters and buffers are not averaged:
    exports take them from the live model.

    Args:
        module: the model, already wrapped and on its device, or a list of model parts. Every rank of a sharded model must
            build its EMA; under DDP a single rank may.
        decay: weight of the old average at each update, in [0, 1), or a schedule from `fsdp_ema_lib.decay`, or any
            callable from the number of the update (1 for the first) to a decay in [0, 1].

    Attributes:
        shadow: name -> this rank's local average; fp32 (fp64 for fp64 parameters), of the local shard's shape.
        num_updates: number of updates since construction or `reset`.

    Raises:
        TypeError: a parameter has no values that can be averaged (meta device, ZeRO-3, lazy, sparse), named.
        ValueError: `decay` outside its range, or no trainable floating-point parameter.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> ema = EMA_FSDP(model, decay=0.999)
        >>> ema.update(model)      # after each optimizer step
        >>> ema.num_updates, sorted(ema.shadow)
        (1, ['bias', 'weight'])
    """

    def __init__(self, module: Model, decay: float | Schedule | Callable[[int], float] = 0.999) -> None:
        self.decay = decay
        self.num_updates = 0
        self.shadow: dict[str, Tensor] = {}
        self._module = module
        self._layout = Layout(module)
        tracked = [shard for shard in self._layout.shards.values() if _is_trackable(shard)]
        if not tracked:
            raise ValueError(_nothing_to_track(self._layout))
        self.shadow = {shard.name: _shadow_of(shard.live()) for shard in tracked}
        self._plan_batches()

    @property
    def decay(self) -> float | Schedule | Callable[[int], float]:
        """The decay as it was given: a number, a schedule or a callable. Assigning one is checked."""
        return self._decay

    @decay.setter
    def decay(self, value: float | Schedule | Callable[[int], float]) -> None:
        self._schedule = as_schedule(value)
        self._decay = value

    @torch.no_grad()
    def update(self, module: Model) -> None:
        """Move the average towards the live weights. Local: no collective, no host synchronization, no allocation.

        Call it once after each optimizer step (not after each micro-batch of an accumulated one).

        Args:
            module: the model that the EMA was built for, or another of the same names and local shapes.

        Raises:
            ValueError: the names or shapes differ, or the schedule's decay is outside [0, 1]; nothing changed.
            RuntimeError: FSDP1 holds the parameters unsharded at this moment.
        """
        self._bind(module)
        decay = decay_at(self._schedule, self.num_updates + 1)
        averaging.average(self._batches, decay)
        self.num_updates += 1

    def reset(self, module: Model) -> None:
        """Start again from the live weights, with a count of zero: for weights that were loaded after the EMA was built.

        Local. Tracks what is trainable now.

        Raises:
            TypeError, ValueError: as when building an EMA; nothing changed.
        """
        fresh = EMA_FSDP(module, self._decay)
        self.__dict__.update(fresh.__dict__)

    @contextmanager
    def swapped_into(self, module: Model) -> Iterator[None]:
        """Put the average into the model for the length of a `with` block, then restore the live weights bit for bit.

        Local, no collective; every rank must enter before any runs a forward. The average is rounded to the live dtype.

        Raises:
            ValueError, RuntimeError: as for `update`.
        """
        layout = self._bind(module)
        backup: dict[str, Tensor] = {}
        try:
            with torch.no_grad():
                layout.before_write()
                for name, average in self.shadow.items():
                    live = layout.shards[name].live()
                    backup[name] = live.clone()
                    live.copy_(average)
            yield
        finally:
            with torch.no_grad():
                layout.before_write()
                for name, kept in backup.items():
                    layout.shards[name].live().copy_(kept)

    def state_dict(self) -> dict[str, Any]:
        """The average, the count and the schedule, ready for torch.distributed.checkpoint. Local, nothing is copied.

        Tensors alone: `shadow` (name -> this rank's shard, in a form that knows its place in the full tensor, so that
        ranks never look like replicas of each other), `num_updates` (int64) and `config` (JSON in uint8). The names and full
        shapes do not depend on how the model is sharded: `dcp.load` moves the state to another layout or world size.
        For a plain dictionary of full tensors use `full_state_dict`.
        """
        shards = self._layout.shards
        config = {
            "version": STATE_VERSION,
            "decay": to_config(self._schedule),
            "tracked": _digest(shards[name] for name in self.shadow),
        }
        return {
            "shadow": {name: shards[name].view(average) for name, average in self.shadow.items()},
            "num_updates": torch.tensor(self.num_updates, dtype=torch.int64),
            "config": _encode(config),
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, on a model that is sharded the same way.

        To load a state from another layout or world size, let `torch.distributed.checkpoint.load` fill `state_dict()` first (it does
        so by itself for an object with these two methods). Every rank of a sharded model must call; all succeed
        or all raise.

        Raises:
            ValueError: the state is of another model, another shard or a later version; every difference is listed and
                nothing changed.
            TypeError: an entry has another dtype than this EMA's.
        """
        error: Exception | None = None
        schedule: Schedule | None = None
        try:
            schedule = self._check_state(state_dict)
        except (TypeError, ValueError) as found:
            error = found
        raise_together(error, self._layout.groups())
        for name, average in self.shadow.items():
            saved = _local_of(state_dict["shadow"][name])
            if saved.data_ptr() != average.data_ptr():
                average.copy_(saved)
        self.num_updates = int(state_dict["num_updates"])
        if schedule is not None and schedule != self._schedule:
            self.decay = schedule.decay if isinstance(schedule, Constant) else schedule

    def _check_state(self, state_dict: Mapping[str, Any]) -> Schedule | None:
        """Raise unless the state fits; the schedule that it holds, None for a plain function, which is code and not saved."""
        missing = {"shadow", "num_updates", "config"} - set(state_dict)
        if missing:
            raise ValueError(
                f"the EMA state lacks {', '.join(sorted(missing))} (it has {', '.join(map(str, state_dict)) or 'nothing'}). "
                f"Pass what EMA_FSDP.state_dict() returned; for a dictionary of full tensors use load_full_state_dict."
            )
        config = _decode(state_dict["config"])
        if config["version"] > STATE_VERSION:
            raise ValueError(
                f"the EMA state has version {config['version']}, this library reads up to {STATE_VERSION}: "
                f"update fsdp_ema_lib."
            )
        differences = self._differences(state_dict["shadow"])
        if differences:
            raise ValueError("the EMA state does not fit this model:\n" + "\n".join(differences))
        if config["tracked"] != _digest(self._layout.shards[name] for name in self.shadow):
            raise ValueError(
                "the EMA state was saved while other parameters were tracked than are now (or of other shapes). "
                "Freeze and unfreeze the model as it was at the save, build the EMA, then load."
            )
        return None if config["decay"].get("kind") == "callable" else from_config(config["decay"])

    def _differences(self, saved: Mapping[str, Any]) -> list[str]:
        lines = [f"{name}: missing in the state" for name in self.shadow if name not in saved]
        lines += [f"{name}: in the state, but not tracked here" for name in saved if name not in self.shadow]
        for name, average in self.shadow.items():
            if name not in saved:
                continue
            here, there = self._layout.shards[name].view(average), saved[name]
            if not isinstance(there, Tensor):
                lines.append(f"{name}: the state holds {type(there).__name__}, a tensor was expected")
            elif here.shape != there.shape:
                lines.append(f"{name}: the state holds {tuple(there.shape)}, this model has {tuple(here.shape)}")
            elif here.dtype != there.dtype:
                lines.append(f"{name}: the state holds {there.dtype}, this average is {here.dtype}")
            elif _place(here) != _place(there):
                lines.append(
                    f"{name}: the state holds {_place(there)} of the full tensor, this rank has {_place(here)}; "
                    f"let torch.distributed.checkpoint.load reshard it"
                )
        return lines

    @torch.no_grad()
    def full_state_dict(self, module: Model, *, export_dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Gather the whole averaged model: what the plain model loads with `strict=True`.

        Collective: every rank must call. Gathers one FSDP1 unit or one DTensor at a time, and never touches the live weights.
        Tied parameters come under each of their names; frozen parameters and buffers come from the live model.

        Args:
            module: the model that the EMA was built for.
            export_dtype: floating dtype of the exported parameters; None keeps the average's own (fp32) and the frozen
                parameters'. Buffers keep theirs.

        Returns:
            On rank 0, name -> tensor on the CPU, in the order of the plain model's `state_dict()`; elsewhere {}.

        Raises:
            TypeError: `export_dtype` is not floating. ValueError, RuntimeError: as for `update`. On every rank.
        """
        error: Exception | None = None
        try:
            _check_export_dtype(export_dtype)
            self._bind(module)
        except (TypeError, ValueError, RuntimeError) as found:
            error = found
        raise_together(error)
        layout = Layout(module)  # a new walk: buffers may have been replaced since the last one
        return collect(layout, layout.live() | self.shadow, export_dtype)

    @torch.no_grad()
    def load_full_state_dict(
        self,
        full_sd: Mapping[str, Any],
        module: Model,
        *,
        allow_missing_aux: bool = False,
        expected_shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        """Set the average from full tensors, as `full_state_dict` returns them; the update count stays.

        Collective: every rank must call. Rank 0's dict rules, the others may pass {}. One tensor at a time is broadcast,
        and each rank keeps its own slice. All ranks succeed, or all raise and nothing changed.

        Args:
            full_sd: name -> full tensor; wrapper prefixes are stripped. Entries for frozen parameters and buffers may
                be there, and are not used; of a tied parameter either name does.
            module: the model that the EMA was built for.
            allow_missing_aux: let auxiliary parameters (`is_predictive_aux_key`) be missing; they start from the live
                weights.
            expected_shapes: name -> shape that every tensor of the dict must have.

        Raises:
            ValueError: missing, unexpected or mis-shaped entries: all of them in one error.
            TypeError: an entry is no floating-point tensor, or one that this average's dtype would round.
        """
        error: Exception | None = None
        found: dict[str, Tensor] = {}
        try:
            self._bind(module)
            if is_main_process():
                found = self._check_full(full_sd, allow_missing_aux, expected_shapes)
        except (TypeError, ValueError, RuntimeError) as problem:
            error = problem
        raise_together(error)
        names = _from_rank_zero(list(found))
        staged = {name: self._receive(name, found.get(name)) for name in names}
        for name, average in self.shadow.items():
            average.copy_(staged[name] if name in staged else self._layout.shards[name].live())

    def _check_full(
        self, full_sd: Mapping[str, Any], allow_missing_aux: bool, expected_shapes: Mapping[str, Sequence[int]] | None
    ) -> dict[str, Tensor]:
        """The tensors of the tracked parameters by primary name; raises with every fault of the dict."""
        layout = self._layout
        given = _canonical(full_sd, layout)
        faults = [f"{name}: not a parameter or buffer of this model" for name in given if name not in layout.primary]
        found: dict[str, Tensor] = {}
        type_faults: list[str] = []
        for name, average in self.shadow.items():
            shard = layout.shards[name]
            tied = [alias for alias in (name, *shard.aliases) if alias in given]
            if not tied:
                if not (allow_missing_aux and is_predictive_aux_key(name)):
                    faults.append(f"{name}: missing; this model has {tuple(shard.shape)}")
                continue
            found[name] = given[tied[0]]
            type_faults += [text for alias in tied if (text := _type_fault(alias, given[alias], average.dtype))]
            faults += [text for alias in tied if (text := _shape_fault(alias, given[alias], shard.shape))]
            if not type_faults and not faults:
                faults += [
                    f"{alias}: differs from {tied[0]}, but both are one tied parameter of this model"
                    for alias in tied[1:]
                    if not torch.equal(given[alias], given[tied[0]])
                ]
        if expected_shapes is not None:
            shapes = normalize_generator_fsdp_state_dict(expected_shapes)
            for name, value in given.items():
                if name not in shapes:
                    faults.append(f"{name}: expected_shapes has no shape for it")
                elif tuple(value.shape) != tuple(shapes[name]):
                    faults.append(f"{name}: the dict holds {tuple(value.shape)}, expected_shapes says {tuple(shapes[name])}")
        if faults or type_faults:
            hint = "Load it into the model that it was saved from"
            hint += "." if allow_missing_aux else ", or pass allow_missing_aux=True if only auxiliary heads are missing."
            kind = TypeError if type_faults and not faults else ValueError
            raise kind("the full EMA state does not fit this model:\n" + "\n".join(faults + type_faults) + "\n" + hint)
        return found

    def _receive(self, name: str, full: Tensor | None) -> Tensor:
        """This rank's slice of a tensor that rank 0 has."""
        shard, average = self._layout.shards[name], self.shadow[name]
        local = torch.empty_like(average)
        if not dist.is_initialized():
            assert full is not None
            shard.fill(local, full.to(average.dtype))
            return local
        device = comm_device()
        if full is None:
            buffer = torch.empty(shard.shape, dtype=average.dtype, device=device)
        else:
            buffer = full.to(device=device, dtype=average.dtype).contiguous()
        dist.broadcast(buffer, src=0)
        shard.fill(local, buffer)
        return local

    def _bind(self, module: Model) -> Layout:
        """The layout of `module` as it is now, and batches that read its values; a walk only where something changed."""
        if module is self._module and self._layout.is_current():
            return self._layout
        layout = Layout(module)
        self._refuse_other_model(layout)
        for name, shard in layout.shards.items():
            if name not in self.shadow and _is_trackable(shard):
                self.shadow[name] = _shadow_of(shard.live())  # it became trainable
        self._module, self._layout = module, layout
        self._plan_batches()
        return layout

    def _refuse_other_model(self, layout: Layout) -> None:
        lines = [f"{name}: tracked, but not in this model" for name in self.shadow if name not in layout.shards]
        lines += [
            f"{name}: in this model, but not in the one that the EMA was built for"
            for name in layout.shards
            if name not in self._layout.shards
        ]
        for name, average in self.shadow.items():
            if name not in layout.shards:
                continue
            shard, live = layout.shards[name], layout.shards[name].live()
            if shard.shape != self._layout.shards[name].shape:
                lines.append(
                    f"{name}: the average is of {tuple(self._layout.shards[name].shape)}, this model has {tuple(shard.shape)}"
                )
            elif live.shape != average.shape:
                lines.append(
                    f"{name}: this rank averages a shard of {tuple(average.shape)}, this model holds {tuple(live.shape)} here"
                )
            elif live.device != average.device:
                lines.append(f"{name}: the average is on {average.device}, the parameter on {live.device}")
            elif _shadow_dtype(live.dtype) != average.dtype:
                lines.append(f"{name}: the average is {average.dtype}, the parameter {live.dtype} would need {_shadow_dtype(live.dtype)}")
        if lines:
            raise ValueError(
                "this is not the model that the EMA was built for:\n"
                + "\n".join(lines)
                + "\nPass that model, or build a new EMA (reset starts again from a changed model's weights)."
            )

    def _plan_batches(self) -> None:
        live = [self._layout.shards[name].live() for name in self.shadow]
        self._batches = averaging.plan(list(self.shadow.values()), live)


@torch.no_grad()
def collect(layout: Layout, locals_: Mapping[str, Tensor], export_dtype: torch.dtype | None) -> dict[str, Any]:
    """Gather local tensors and the model's buffers into one full state dict on rank 0. Collective."""
    gathered: dict[str, Any] = {}
    for name, full in layout.stream(locals_):
        castable = export_dtype is not None and full.dtype.is_floating_point
        gathered[name] = full.to("cpu", dtype=export_dtype if castable else full.dtype, copy=True)
    for name, buffer in layout.buffers.items():
        gathered[name] = full_buffer(buffer).to("cpu", copy=True)
    gathered |= layout.extra_state
    if not is_main_process():
        return {}
    return {name: gathered[primary] for name, primary in layout.primary.items()}


def _is_trackable(shard: Shard) -> bool:
    return shard.requires_grad and (shard.dtype.is_floating_point or shard.dtype.is_complex)


def _shadow_dtype(live: torch.dtype) -> torch.dtype:
    return torch.promote_types(live, torch.float32)


def _shadow_of(live: Tensor) -> Tensor:
    return live.to(dtype=_shadow_dtype(live.dtype), copy=True)


def _nothing_to_track(layout: Layout) -> str:
    if not layout.shards:
        return "module has no parameters: an EMA needs at least one trainable floating-point parameter."
    listed = [f"{name} ({s.dtype}, requires_grad={s.requires_grad})" for name, s in layout.shards.items()]
    more = f" and {len(listed) - 5} more" if len(listed) > 5 else ""
    return (
        f"module has no trainable floating-point parameter, it has {', '.join(listed[:5])}{more}. "
        f"Call requires_grad_(True) on what shall be averaged before you build the EMA."
    )


def _check_export_dtype(export_dtype: torch.dtype | None) -> None:
    if export_dtype is not None and not (isinstance(export_dtype, torch.dtype) and export_dtype.is_floating_point):
        raise TypeError(f"export_dtype must be a floating torch.dtype or None, got {export_dtype!r}")


def _canonical(full_sd: Mapping[str, Any], layout: Layout) -> dict[str, Any]:
    """The dict under canonical names; a leading `module.` goes unless this model itself has such names."""
    if any(name.startswith("module.") for name in layout.primary):
        return {normalize_generator_fsdp_key(name): value for name, value in full_sd.items()}
    return normalize_generator_fsdp_state_dict(full_sd)


def _type_fault(name: str, value: Any, dtype: torch.dtype) -> str | None:
    if not isinstance(value, Tensor):
        return f"{name}: a tensor was expected, the dict holds {type(value).__name__}"
    if not (value.dtype.is_floating_point or value.dtype.is_complex) or torch.promote_types(value.dtype, dtype) != dtype:
        return f"{name}: the dict holds {value.dtype}, which this average's {dtype} cannot hold exactly; convert it first"
    return None


def _shape_fault(name: str, value: Any, shape: torch.Size) -> str | None:
    if isinstance(value, Tensor) and value.shape != shape:
        return f"{name}: the dict holds {tuple(value.shape)}, this model has {tuple(shape)}"
    return None


def _from_rank_zero(names: list[str]) -> list[str]:
    if not dist.is_initialized():
        return names
    message = [names]
    dist.broadcast_object_list(message, src=0, device=comm_device())
    return message[0]


def _digest(shards: Any) -> str:
    text = json.dumps(sorted((shard.name, list(shard.shape)) for shard in shards))
    return sha256(text.encode()).hexdigest()


def _encode(config: dict[str, Any]) -> Tensor:
    text = json.dumps(config).encode()
    if len(text) > CONFIG_BYTES:
        raise ValueError(f"the EMA's settings take {len(text)} bytes as JSON, at most {CONFIG_BYTES} fit: {config}")
    return torch.tensor(list(text.ljust(CONFIG_BYTES)), dtype=torch.uint8)


def _decode(config: Tensor) -> dict[str, Any]:
    try:
        settings = json.loads(bytes(config.tolist()))
        return {key: settings[key] for key in ("version", "decay", "tracked")}
    except (ValueError, KeyError, TypeError) as problem:
        raise ValueError(f"config: the EMA state's settings are not readable ({problem}); the state is damaged.") from problem


def _local_of(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return tensor.local if isinstance(tensor, ShardedView) else tensor


def _place(tensor: Tensor) -> str:
    """Which part of the full tensor a saved or tracked tensor holds, in words."""
    if isinstance(tensor, ShardedView):
        return f"elements {[(p.offsets, p.sizes) for p in tensor.pieces]}"
    if isinstance(tensor, DTensor):
        return f"shard {tensor.placements} of {tensor.device_mesh.shape} at {tensor.device_mesh.get_coordinate()}"
    return "all"
