"""The exponential moving average of a model's weights, each rank keeping that of its own shard."""

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fsdp_ema_lib import averaging, ema_state, full_state, health
from fsdp_ema_lib.agreement import from_rank_zero, raise_together, refuse_disagreement
from fsdp_ema_lib.decay import Constant, Schedule, as_schedule, decay_at, decay_on_device, runs_on_device
from fsdp_ema_lib.layout import Layout, Shard
from fsdp_ema_lib.process_group import is_main_process
from fsdp_ema_lib.tracking import Coverage, Selection

Model = nn.Module | Sequence[nn.Module]
PRECISIONS = ("fp32", "fp64", "compensated")
NONFINITE = ("propagate", "skip")


class EMA_FSDP:
    """Exponential moving average of a model's trainable weights, kept in fp32 by each rank for its own shard.

    Works on plain modules, DDP, FSDP1 and FSDP2 alike; parameters have the names that they have in the plain model.
    Tracked are the trainable floating-point and complex parameters. One that becomes trainable later is tracked from
    the next update on, starting from its weights at that moment. Exports take everything else from the live model.

    Args:
        module: the model, already wrapped and on its device, or a list of model parts. Every rank of a sharded model
            must build its EMA, and the ranks compare what they track; under DDP a single rank may build one.
        decay: weight of the old average at each update, in [0, 1), or a schedule from `fsdp_ema_lib.decay`, or any
            callable from the number of the update (1 for the first) to a decay in [0, 1].
        include: name patterns (`fnmatch`); if given, only parameters that match one are tracked.
        exclude: name patterns of parameters that are not tracked.
        buffers: "copy" (exports carry the live buffers), "leave_out" (they have none), or name patterns of
            floating-point buffers to average; the others are copied.
        precision: "fp32"; "fp64" for fp64 averages; "compensated" keeps beside the fp32 average what rounding took from
            it (another 4 bytes per element), so that decays beyond 0.99999 still move. fp64 parameters always have fp64
            averages.
        start_after: for so many updates the average is the live weights; the schedule counts from there.
        update_every: only every so many calls of `update` touch the average, with the product of the decays of the
            steps between, so that half-life in steps does not change. `num_updates` counts every call.
        nonfinite: "propagate" averages NaN and infinity like any number; "skip" leaves the average of an element
            untouched while its live value is not finite, and counts it in `num_skipped`.
        compile: fuse the update with torch.compile: faster, after compiling once for as long as a minute. On a CPU it
            needs a C++ compiler. Compensated, skipping and capturable updates are not compiled.
        capturable: keep the count on the device and compute the decay there, so that `update` can be captured in a CUDA
            graph and replayed. Needs `update_every=1` and a number or a schedule from `fsdp_ema_lib.decay`. Reading
            `num_updates` then waits for the device. Capture anew after `reset`, a changed setting or a replaced
            parameter: a graph goes on with what it has captured.

    Attributes:
        shadow: name -> this rank's local average; fp32 (fp64 for fp64 parameters), of the local shard's shape.
        num_updates: calls of `update` since construction or `reset`.

    Raises:
        TypeError: a parameter has no values that can be averaged (meta device, ZeRO-3, lazy, sparse), named.
        ValueError: an argument outside its range, a pattern that matches nothing, no trainable floating-point
            parameter, or ranks that disagree about the parameters.

    Example:
        >>> model = nn.Linear(3, 2)
        >>> ema = EMA_FSDP(model, decay=0.999)
        >>> ema.update(model)      # after each optimizer step
        >>> ema.num_updates, sorted(ema.shadow)
        (1, ['bias', 'weight'])
    """

    def __init__(
        self,
        module: Model,
        decay: float | Schedule = 0.999,
        *,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        buffers: str | Sequence[str] = "copy",
        precision: str = "fp32",
        start_after: int = 0,
        update_every: int = 1,
        nonfinite: str = "propagate",
        compile: bool = False,
        capturable: bool = False,
    ) -> None:
        self._count = 0
        self._device_count: Tensor | None = None
        self.decay = decay
        self.start_after = _check_count(start_after, "start_after", 0)
        self.update_every = _check_count(update_every, "update_every", 1)
        self.precision = _check_choice(precision, "precision", PRECISIONS)
        self.nonfinite = _check_choice(nonfinite, "nonfinite", NONFINITE)
        self._compile = bool(compile)
        self._capturable = bool(capturable)
        if capturable:
            decay_on_device(self._schedule, torch.ones((), dtype=torch.int64))
            if self.update_every > 1:
                raise ValueError(
                    f"update_every must be 1 with capturable=True, got {update_every}: a captured update does the same "
                    f"work at every replay"
                )
        self._selection = Selection(include, exclude, buffers)
        self._swapped = False
        self._hook: RemovableHandle | None = None
        self._low: dict[str, Tensor] = {}
        self.shadow: dict[str, Tensor] = {}
        self._waiting: list[str] = []
        self._compiling = 0
        self._layout = Layout(module)
        error: Exception | None = None
        try:
            self._selection.refuse_idle_patterns(self._layout)
            tracked = self._selection.coverage(self._layout).tracked
            if not tracked:
                raise ValueError(_nothing_to_track(self._layout, self._selection))
        except ValueError as problem:
            error = problem
        raise_together(error, self._layout.groups())
        refuse_disagreement(_identity(self._layout, tracked), self._layout.groups())
        with _ordinary_tensors():
            for name in tracked:
                self._start(name)
            if capturable:
                self._count_on(next(iter(self.shadow.values())).device)
            self._plan()

    @property
    def decay(self) -> float | Schedule:
        """The decay as it was given: a number, a schedule or a callable. Assigning one is checked."""
        return self._decay

    @decay.setter
    def decay(self, value: float | Schedule) -> None:
        schedule = as_schedule(value)
        if self._device_count is not None:
            decay_on_device(schedule, self._device_count + 1)
        self._schedule, self._decay = schedule, value

    @property
    def num_updates(self) -> int:
        """Calls of `update` since construction or `reset`.

        With `capturable=True`, and after fused optimizer steps under a GradScaler, which the device may skip, reading
        it waits for the device.
        """
        return self._count if self._device_count is None else int(self._device_count)

    @num_updates.setter
    def num_updates(self, value: int) -> None:
        self._count = _check_count(value, "num_updates", 0)
        if self._device_count is not None:
            self._device_count.fill_(value)

    def _count_on(self, device: torch.device) -> None:
        self._device_count = torch.full((), self._count, dtype=torch.int64, device=device)

    @property
    def num_skipped(self) -> int:
        """Elements whose average was left untouched so far because the live value was not finite, on this rank.

        Reading it waits for the device. It is counted with `nonfinite="skip"` alone.
        """
        return int(self._skipped)

    def coverage(self) -> Coverage:
        """What is averaged, what exports copy from the live model, what they leave out, and why. Local.

        A parameter that was averaged and is frozen now goes on being averaged.
        """
        return self._selection.coverage(self._bind(self._layout.modules), averaged=self.shadow)

    @torch.no_grad()
    def update(self, module: Model) -> None:
        """Move the average towards the live weights. Local: no collective, no host synchronization.

        Call it once after each optimizer step (not after each micro-batch of an accumulated one).

        Args:
            module: the model that the EMA was built for, or another of the same names and local shapes.

        Raises:
            ValueError: the names or shapes differ, or the schedule's decay is outside [0, 1]; nothing changed.
            RuntimeError: FSDP1 holds the parameters unsharded at this moment, or the average is swapped into the model.
        """
        self._update(module, None)

    def _update(self, module: Model, happened: Tensor | None) -> None:
        """One update; `happened`, a 0-dim bool on the device of the count, may say there that it is none."""
        self._refuse_while_swapped("update")
        skipped = self._skipped if self.nonfinite == "skip" else None
        if self._device_count is not None:
            self._bind_to_update(module)
            averaging.average(self._batches, self._decay_on_device(happened), skipped=skipped)
            self._device_count += 1 if happened is None else happened
            return
        step = self._count + 1
        if step % self.update_every == 0:
            decay = self._decay_over(step - self.update_every + 1, step)
            self._bind_to_update(module)
            averaging.average(self._batches, decay, skipped=skipped)
        self._count = step

    def _decay_on_device(self, happened: Tensor | None) -> Tensor:
        """The decay of the next update; 1 where it does not happen."""
        assert self._device_count is not None
        step = self._device_count + 1 - self.start_after
        decay = torch.where(step < 1, 0.0, decay_on_device(self._schedule, step.clamp(min=1)))
        return decay if happened is None else torch.where(happened, decay, 1.0)

    def _decay_over(self, first: int, last: int) -> float:
        """The product of the decays of the steps `first` to `last`; 0 up to `start_after`."""
        if first <= self.start_after:
            return 0.0
        steps = range(first - self.start_after, last - self.start_after + 1)
        return math.prod(decay_at(self._schedule, step) for step in steps)

    def attach(self, optimizer: torch.optim.Optimizer, module: Model | None = None) -> None:
        """Update by itself after each real step of `optimizer`, until `detach`.

        Micro-batches of an accumulated step do not count, nor do steps that a GradScaler skips. A fused optimizer takes
        such a step and lets the device skip it: its `found_inf` then gates the update, on the device and without a host
        synchronization, but with one if `update_every` is above 1 or the decay is a plain callable.

        Args:
            optimizer: one that steps parameters of the model.
            module: the model; None for the one that the EMA was built for.

        Raises:
            RuntimeError: already attached. ValueError: the optimizer holds none of the tracked parameters.
        """
        if self._hook is not None:
            raise RuntimeError("attach: this EMA is attached to an optimizer already; call detach() first")
        module = self._layout.modules if module is None else module
        layout = self._bind(module)
        stepped = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if not any(id(self._shard(name).registered) in stepped for name in self.shadow if name in layout.shards):
            raise ValueError(
                "optimizer: it holds none of the parameters that this EMA tracks, so the average would never move. "
                "Build the optimizer from the wrapped model's parameters."
            )

        def after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            self._after_step(optimizer, module)

        self._hook = optimizer.register_step_post_hook(after_step)

    def detach(self) -> None:
        """Undo `attach`; nothing happens if it was not attached."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, module: Model) -> None:
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None:
            self._update(module, None)
            return
        if self.update_every > 1 or not runs_on_device(self._schedule):
            if not bool(found_inf):
                self._update(module, None)
            return
        if self._device_count is None:
            with _ordinary_tensors():
                self._count_on(found_inf.device)
                self._plan()  # a decay on the device needs room
        self._update(module, found_inf == 0)

    @torch.no_grad()
    def health(self, module: Model) -> health.Health:
        """How far the average is from the live weights, and whether it still moves.

        Every rank of a sharded model must call: sums are reduced over the ranks that share a parameter. Everything is
        computed on the device, and read once.

        Raises:
            ValueError, RuntimeError: as for `update`, on every rank.
        """
        self._refuse_while_swapped("health")
        error: Exception | None = None
        last = (self.num_updates // self.update_every + 1) * self.update_every
        decay = 1.0
        try:
            decay = self._decay_over(last - self.update_every + 1, last)
            self._bind(module)
        except (TypeError, ValueError, RuntimeError) as problem:
            error = problem
        raise_together(error, self._layout.groups())
        return health.measure(self._layout, self.shadow, self._low, decay)

    def reset(self, module: Model) -> None:
        """Start again from the live weights, with a count of zero: for weights that were loaded after it was built.

        Tracks what is trainable now. Every rank of a sharded model must call, as for building an EMA.

        Raises:
            TypeError, ValueError: as when building an EMA. RuntimeError: inside `swapped_into`. Nothing changed.
        """
        self._refuse_while_swapped("reset")
        hook = self._hook
        fresh = EMA_FSDP(
            module,
            self._decay,
            include=self._selection.include,
            exclude=self._selection.exclude,
            buffers=self._selection.buffers,
            precision=self.precision,
            start_after=self.start_after,
            update_every=self.update_every,
            nonfinite=self.nonfinite,
            compile=self._compile,
            capturable=self._capturable,
        )
        self.__dict__.update(fresh.__dict__)
        self._hook = hook

    @contextmanager
    def swapped_into(self, module: Model) -> Iterator[None]:
        """Put the average into the model for the length of a `with` block, then restore the live weights bit for bit.

        Local, no collective; every rank must enter before any runs a forward. The average is rounded to the live dtype.
        Averaged buffers are swapped too, all others stay live. The live weights come back also after an error.

        Raises:
            ValueError: as for `update`. RuntimeError: as for `update`, or entered twice.
        """
        self._refuse_while_swapped("swapped_into")
        layout = self._bind(module)
        backup: dict[str, Tensor] = {}
        self._swapped = True
        try:
            _copy_into(layout, self.shadow, backup)
            yield
        finally:
            _copy_into(layout, backup)
            self._swapped = False

    def copy_to(self, module: Model) -> None:
        """Write the average into the model for good, rounded to the live dtype. Local; every rank must call.

        Raises:
            ValueError, RuntimeError: as for `swapped_into`.
        """
        self._refuse_while_swapped("copy_to")
        _copy_into(self._bind(module), self.shadow)

    @property
    def is_swapped(self) -> bool:
        """Whether the average is in a model at this moment, inside a `swapped_into` block."""
        return self._swapped

    def state_dict(self) -> dict[str, Any]:
        """The average, the count and the settings, ready for torch.distributed.checkpoint. Local, nothing is copied.

        Tensors alone: `shadow` (name -> this rank's shard, in a form that knows its place in the full tensor, so that
        ranks never look like replicas of each other), `low` (the same for the low-order parts, with
        `precision="compensated"`), `num_updates` and `num_skipped` (int64) and `config` (JSON in uint8). Names and
        full shapes do not depend on how the model is sharded: `dcp.load` moves the state to another layout or world
        size. For a plain dictionary of full tensors use `full_state_dict`. `fits` holds one zero, under a name
        made of the precision and of what is averaged: `dcp.load`, which fills these very tensors, finds no such name in
        a state that does not fit, and fails before it has changed one.

        Raises:
            RuntimeError: FSDP1 holds the parameters unsharded at this moment.
        """
        self._bind(self._layout.modules)
        state: dict[str, Any] = {"shadow": self._views(self.shadow)}
        if self._low:
            state["low"] = self._views(self._low)
        state["num_updates"] = torch.tensor(self.num_updates, dtype=torch.int64)
        state["num_skipped"] = self._skipped.to("cpu", copy=True)
        state["config"] = ema_state.encode(
            ema_state.Config.of(self._schedule, self.start_after, self.update_every, self.precision)
        )
        state[ema_state.FITS] = {ema_state.fits_name(self.precision, self._tracked()): torch.zeros(1)}
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, on a model that is sharded the same way.

        To load a state from another layout or world size, let `torch.distributed.checkpoint.load` fill `state_dict()`
        first (it does so by itself for an object with these two methods). Every rank of a sharded model must call; all
        succeed or all raise. A plain function as decay is not in the state: the one given here stays.

        Raises:
            ValueError: the state is of another model, another shard or a later version; every difference is listed and
                nothing changed. (`dcp.load` reports it before, as a missing key `fits`.)
            TypeError: with `capturable=True`, the saved schedule is none that a device can compute.
        """
        error: Exception | None = None
        config: ema_state.Config | None = None
        try:
            config = ema_state.check(state_dict, self.state_dict())
            self._refuse_uncapturable(config)
        except (TypeError, ValueError, RuntimeError) as problem:
            error = problem
        raise_together(error, self._layout.groups())
        assert config is not None
        for mine, saved in ((self.shadow, "shadow"), (self._low, "low")):
            for name, average in mine.items():
                local = ema_state.local_of(state_dict[saved][name])
                if local.data_ptr() != average.data_ptr():
                    average.copy_(local)
        self.num_updates = int(state_dict["num_updates"])
        self._skipped.fill_(int(state_dict["num_skipped"]))
        self.start_after, self.update_every = config.start_after, config.update_every
        if (schedule := config.schedule()) is not None and schedule != self._schedule:
            self.decay = schedule.decay if isinstance(schedule, Constant) else schedule

    def full_state_dict(self, module: Model, *, export_dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Gather the whole averaged model: what the plain model loads with `strict=True`.

        Collective: every rank must call; where nothing is sharded (a plain model, DDP) rank 0 alone may. Gathers one
        FSDP1 unit or one DTensor at a time, and never touches the live weights. Tied parameters come under each of
        their names; what is not averaged comes from the live model.

        Args:
            module: the model that the EMA was built for.
            export_dtype: floating dtype of the exported parameters; None keeps the average's own (fp32) and that of the
                parameters that are not averaged. Buffers keep theirs.

        Returns:
            On rank 0, name -> tensor on the CPU, in the order of the plain model's `state_dict()`; elsewhere {}.

        Raises:
            TypeError: `export_dtype` is not floating. ValueError, RuntimeError: as for `update`; and ValueError where
                rank 0 lacks parameters that other ranks have (pipeline stages). On every rank.
        """
        return full_state.collect(*self._export(module, export_dtype))

    def stream_full(self, module: Model, *, export_dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `full_state_dict` one after another: at most one FSDP1 unit or DTensor is gathered at a time.

        Collective: every rank must iterate to the end, whatever it does with the tensors.

        Returns:
            (name, full tensor) on rank 0, in the order in which units are gathered; nothing elsewhere. A tensor may be
            a view of its unit: copy or write it before going on.

        Raises:
            As `full_state_dict`.
        """
        return full_state.stream(*self._export(module, export_dtype))

    def full_entries(
        self, module: Model, *, export_dtype: torch.dtype | None = None
    ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Names, dtypes and full shapes of what `stream_full` will yield. Collective for its checks, gathers nothing.

        Raises:
            As `full_state_dict`.
        """
        return full_state.entries(*self._export(module, export_dtype))

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

        Collective: every rank must call. Rank 0's dict rules, the others may pass {}. One tensor at a time is
        broadcast, and each rank keeps its own slice. All ranks succeed, or all raise and nothing changed.

        Args:
            full_sd: name -> full tensor; wrapper prefixes are stripped. Entries for what is not averaged may be there,
                and are not used; of a tied parameter either name does.
            module: the model that the EMA was built for.
            allow_missing_aux: let auxiliary parameters (`is_predictive_aux_key`) be missing; they start from the live
                weights.
            expected_shapes: name -> shape that every tensor of the dict must have.

        Raises:
            ValueError: missing, unexpected or mis-shaped entries: all of them in one error.
            TypeError: an entry is no floating-point tensor, or one that the average's dtype cannot hold.
        """
        error: Exception | None = None
        found: dict[str, Tensor] = {}
        try:
            self._bind(module)
            if is_main_process():
                found = full_state.match(self._layout, self.shadow, full_sd, allow_missing_aux, expected_shapes)
        except (TypeError, ValueError, RuntimeError) as problem:
            error = problem
        raise_together(error)
        names = from_rank_zero(list(found))
        staged = {n: full_state.receive(self._shard(n), self.shadow[n], found.get(n)) for n in names}
        for name, average in self.shadow.items():
            average.copy_(staged[name] if name in staged else self._shard(name).live())
        for low in self._low.values():
            low.zero_()

    def _export(
        self, module: Model, export_dtype: torch.dtype | None
    ) -> tuple[Layout, dict[str, Tensor], torch.dtype | None]:
        """What an export streams, or the same error on every rank."""
        error: Exception | None = None
        layout = self._layout
        try:
            full_state.check_export_dtype(export_dtype)
            self._bind(module)
            layout = Layout(module)  # a new walk: buffers may have been replaced since the last one
        except (TypeError, ValueError, RuntimeError) as problem:
            error = problem
        if self._layout.is_split():
            raise_together(error)
            full_state.refuse_parts_elsewhere(layout)
        elif error is not None:
            raise error
        left_out = self._selection.coverage(layout).left_out
        live = {name: tensor for name, tensor in layout.live().items() if name not in left_out}
        return layout, live | self.shadow, export_dtype

    def _bind(self, module: Model) -> Layout:
        """The layout of `module` as it is now, and batches that read its values; walks only where something changed."""
        if self._is_bound_to(module) and self._layout.is_current():
            return self._layout
        with _ordinary_tensors():
            layout = Layout(module)
            self._refuse_other_model(layout)
            self._layout = layout
            self._waiting = [name for name in self._selection.coverage(layout).tracked if name not in self.shadow]
            self._plan()
        return layout

    def _is_bound_to(self, module: Model) -> bool:
        known = self._layout.modules
        parts = [module] if isinstance(module, nn.Module) else module
        # A list may have got another stage since the last call, and a new list may hold the same ones.
        return isinstance(parts, list | tuple) and len(parts) == len(known) and all(map(operator.is_, parts, known))

    def _bind_to_update(self, module: Model) -> None:
        """Bind, and start the averages of parameters that became trainable: only training says what is averaged."""
        self._bind(module)
        if self._waiting:
            with _ordinary_tensors():
                for name in self._waiting:
                    self._start(name)
                self._waiting = []
                self._plan()

    def _refuse_other_model(self, layout: Layout) -> None:
        known, here = self._layout.shards | self._layout.buffers, layout.shards | layout.buffers
        lines = [
            f"{name}: in the model that the EMA was built for, not in this one" for name in known if name not in here
        ]
        lines += [
            f"{name}: in this model, not in the one that the EMA was built for" for name in here if name not in known
        ]
        for name, average in self.shadow.items():
            if name in here and (text := self._misfit(known[name], here[name], average)) is not None:
                lines.append(f"{name}: {text}")
        if lines:
            hint = "Pass that model, or build a new EMA (reset starts again from a changed model's weights)."
            raise ValueError("\n".join(["this is not the model that the EMA was built for:", *lines, hint]))

    def _misfit(self, known: Shard, here: Shard, average: Tensor) -> str | None:
        live = here.live()
        if here.shape != known.shape:
            return f"the average is of {tuple(known.shape)}, this model has {tuple(here.shape)}"
        if live.shape != average.shape:
            return f"this rank averages a shard of {tuple(average.shape)}, this model holds {tuple(live.shape)} here"
        if live.device != average.device:
            return f"the average is on {average.device}, the parameter on {live.device}; build the EMA after moving it"
        if self._shadow_dtype(live.dtype) != average.dtype:
            return f"the average is {average.dtype}, a parameter of {live.dtype} needs {self._shadow_dtype(live.dtype)}"
        return None

    def _start(self, name: str) -> None:
        """Start one average from the live values."""
        live = self._shard(name).live()
        self.shadow[name] = live.to(dtype=self._shadow_dtype(live.dtype), copy=True)
        if self.precision == "compensated" and self.shadow[name].dtype in (torch.float32, torch.complex64):
            self._low[name] = torch.zeros_like(self.shadow[name])

    def _shadow_dtype(self, live: torch.dtype) -> torch.dtype:
        return torch.promote_types(live, torch.float64 if self.precision == "fp64" else torch.float32)

    def _plan(self) -> None:
        self._layout.watch(
            [*self._layout.shards.values(), *(self._layout.buffers[n] for n in self._averaged_buffers())]
        )
        plain = [name for name in self.shadow if name not in self._low]
        self._batches: list[averaging.Batch] = []
        for names, low in ((plain, []), (list(self._low), list(self._low.values()))):
            shadow, live = [self.shadow[n] for n in names], [self._shard(n).live() for n in names]
            roomy = self.nonfinite == "skip" or self._device_count is not None
            self._batches += averaging.plan(shadow, live, low, roomy=roomy, compiled=self._compile)
        if (count := averaging.count_compiled(self._batches)) != self._compiling:
            self._compiling = count
            averaging.announce_compiling(count)
        if not hasattr(self, "_skipped"):
            self._skipped = torch.zeros((), dtype=torch.int64, device=next(iter(self.shadow.values())).device)

    def _averaged_buffers(self) -> list[str]:
        return [name for name in self.shadow if name in self._layout.buffers]

    def _shard(self, name: str) -> Shard:
        shard = self._layout.get(name)
        assert shard is not None, name
        return shard

    def _views(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._shard(name).view(tensor) for name, tensor in tensors.items()}

    def _tracked(self) -> list[tuple[str, tuple[int, ...], str]]:
        return sorted((name, tuple(self._shard(name).shape), str(t.dtype)) for name, t in self.shadow.items())

    def _refuse_uncapturable(self, config: ema_state.Config) -> None:
        """Raise where a saved state cannot be gone on with on the device, which keeps this count."""
        if self._device_count is None:
            return
        if config.update_every > 1:
            raise ValueError(
                f"update_every: the EMA state was saved with {config.update_every}, and an EMA that counts on the "
                f"device (capturable=True, or after fused steps under a GradScaler) needs 1; load it into a new EMA "
                f"with capturable=False"
            )
        if (schedule := config.schedule()) is not None:
            decay_on_device(schedule, self._device_count + 1)

    def _refuse_while_swapped(self, what: str) -> None:
        if self._swapped:
            raise RuntimeError(
                f"{what}: the average is in the model at this moment (inside swapped_into), and the live weights are "
                f"put back when the block ends. Call it outside the block."
            )


@contextmanager
def _ordinary_tensors() -> Iterator[None]:
    """Let what is made here be updated later, also where the caller is in inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@torch.no_grad()
def _copy_into(layout: Layout, values: Mapping[str, Tensor], backup: dict[str, Tensor] | None = None) -> None:
    """Write local values into the model, noting in `backup` what was there before each is written."""
    layout.before_write()
    for name, value in values.items():
        shard = layout.get(name)
        assert shard is not None, name
        live = shard.live()
        if backup is not None:
            backup[name] = live.clone()
        live.copy_(value)


def _identity(layout: Layout, tracked: Sequence[str]) -> list[str]:
    """What all ranks must agree on, a line for each parameter."""
    names = set(tracked)
    return [
        f"{name}: shape {tuple(s.shape)}, {s.dtype}, {'tracked' if name in names else 'not tracked'}"
        for name, s in layout.shards.items()
        if s.split_over()
    ]


def _check_count(value: Any, what: str, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be a whole number of updates, got {value!r}")
    if value < least:
        raise ValueError(f"{what} must be at least {least}, got {value}")
    return value


def _check_choice(value: Any, what: str, choices: Sequence[str]) -> str:
    if value not in choices:
        raise ValueError(f"{what} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return str(value)


def _nothing_to_track(layout: Layout, selection: Selection) -> str:
    if not layout.shards:
        return "module has no parameters: an EMA needs at least one trainable floating-point parameter."
    reasons = [f"{name} ({why})" for name, why in selection.coverage(layout).copied.items() if name in layout.shards]
    more = f" and {len(reasons) - 5} more" if len(reasons) > 5 else ""
    return (
        f"module has no trainable floating-point parameter that can be tracked, it has {', '.join(reasons[:5])}{more}. "
        f"Call requires_grad_(True) on what shall be averaged before you build the EMA, or widen the patterns."
    )
