"""The study of averages against live weights on the reader's own model, data and loss, named by import path.

The protocol: three callables, each named as `package.module:name`.

- `model() -> nn.Module`: build the plain model, on the CPU. It is called with the same random state on every rank.
- `data(train: bool, seed: int) -> iterable of batches`: training data once through, in an order that depends on `seed`
  alone, or held-out data. What is held out must not depend on `seed`. A batch is a tensor, or tensors in tuples, lists
  and dicts.
- `loss(model, batch) -> scalar tensor`: the loss of one batch, which is on the device already. It calls the model
  itself, not methods of it: sharded weights are gathered only there.

The house takes care of the device, of seeds, of sharding, of the averages and of dealing batches to ranks.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm.auto import tqdm

from fsdp_ema_lib.decay import Schedule, Warmup
from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.lab.digits import seeded_generator
from fsdp_ema_lib.lab.notebooks import repo_root
from fsdp_ema_lib.lab.threads import cpu_threads
from fsdp_ema_lib.lab.training import History, evaluate_all, mean_over_ranks, show_progress
from fsdp_ema_lib.random_states import random_state, set_random_state
from fsdp_ema_lib.wrapping import fsdp2_wrap, fsdp_wrap

Sharding = Literal["none", "fsdp1", "fsdp2"]
SHARDINGS: tuple[Sharding, ...] = ("none", "fsdp1", "fsdp2")
_CALLED = {"model": ((), {}), "data": ((), {"train": True, "seed": 0}), "loss": (("the model", "a batch"), {})}
_SIGNATURE = {"model": "model()", "data": "data(train: bool, seed: int)", "loss": "loss(model, batch)"}


# --- the reader's code -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hooks:
    """The reader's three callables; see the protocol at the top of this room.

    Attributes:
        model, data, loss: what the import paths stand for.
        paths: "model", "data" and "loss" to the import path, for messages.
    """

    model: Callable[[], nn.Module]
    data: Callable[..., Iterable[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    paths: Mapping[str, str]

    def named(self, role: str) -> str:
        """The role and the import path behind it, as errors call them."""
        return f"{role}={self.paths[role]}"


def load_hooks(model: str, data: str, loss: str, *, code_dir: str | Path = "") -> Hooks:
    """Import the reader's model builder, data and loss.

    Args:
        model: import path `package.module:name` of the builder; `name` may be dotted (`Net.small`).
        data: import path of the data.
        loss: import path of the loss.
        code_dir: folder that holds the package, absolute or relative to the repository root; it is put first on
            `sys.path`. "" for what Python finds by itself.

    Raises:
        ValueError: an import path that is not of the form `package.module:name`.
        FileNotFoundError: `code_dir` is no folder.
        ImportError: a module does not exist, or importing it failed.
        AttributeError: the module has no such name.
        TypeError: what the name stands for cannot be called as the protocol says.

    Example:
        >>> examples = "fsdp_ema_lib.lab.examples_of_models"
        >>> hooks = load_hooks(f"{examples}:gpt2", f"{examples}:text", f"{examples}:next_byte_loss")
        >>> hooks.named("loss")
        'loss=fsdp_ema_lib.lab.examples_of_models:next_byte_loss'
    """
    if str(code_dir):
        _put_on_path(code_dir)
    paths = {"model": model, "data": data, "loss": loss}
    return Hooks(**{role: _load(role, path) for role, path in paths.items()}, paths=paths)


def _put_on_path(code_dir: str | Path) -> None:
    folder = repo_root() / Path(code_dir).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"code_dir: {folder} is no folder; name the one that holds your package")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()  # the package may be younger than the last look into the folder


def _load(role: str, path: str) -> Any:
    module_name, colon, name = path.partition(":")
    parts = [*module_name.split("."), *name.split(".")]
    if not colon or not all(part.isidentifier() for part in parts):
        raise ValueError(f"{role}={path}: expected package.module:name, such as {role}=my_pkg.models:{role}")
    found: Any = _import(role, path, module_name)
    for part in name.split("."):
        if not hasattr(found, part):
            close = difflib.get_close_matches(part, [known for known in dir(found) if not known.startswith("_")])
            meant = f"; did you mean {' or '.join(close)}?" if close else ""
            raise AttributeError(f"{role}={path}: {getattr(found, '__name__', found)} has no {part}{meant}")
        found = getattr(found, part)
    _check_callable(role, path, found)
    return found


def _import(role: str, path: str, module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and (module_name + ".").startswith(missing + "."):
            raise ImportError(
                f"{role}={path}: there is no module {missing} on Python's path. Name the folder that holds it by "
                "code_dir, put that folder on PYTHONPATH, or install the package into this environment."
            ) from None
        raise ImportError(
            f"{role}={path}: importing {module_name} failed with {type(error).__name__}: {error}"
        ) from error


def _check_callable(role: str, path: str, found: Any) -> None:
    expected = f"expected a callable {_SIGNATURE[role]}"
    if not callable(found):
        raise TypeError(f"{role}={path}: {expected}, found {type(found).__name__}")
    try:
        signature = inspect.signature(found)
    except ValueError:  # some builtins have none
        return
    positional, keywords = _CALLED[role]
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        name = path.partition(":")[2]
        raise TypeError(f"{role}={path}: {expected}, found {name}{signature}: {error}") from None


# --- the study -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StudyConfig:
    """How the study trains; an impossible value is refused here, before anything is built.

    Attributes:
        steps: optimizer steps, at least 1.
        learning_rate: of AdamW, constant, positive.
        seed: initial weights, order of the data, and whatever model and loss draw at random; at least 0.
        sharding: "fsdp1", "fsdp2", or "none" for the plain model on one rank.
        eval_every: steps between evaluations, at least 1; the last step is always evaluated.
        eval_batches: held-out batches per evaluation, at least 1: the first so many, or all if there are fewer.
        threads: CPU threads of each rank, at least 1.

    Raises:
        ValueError: one of the values is out of its range; all of them are named.

    Example:
        >>> StudyConfig(steps=100).sharding
        'fsdp2'
    """

    steps: int = 400
    learning_rate: float = 1e-3
    seed: int = 0
    sharding: Sharding = "fsdp2"
    eval_every: int = 20
    eval_batches: int = 16
    threads: int = 1

    def __post_init__(self) -> None:
        least = {"steps": 1, "seed": 0, "eval_every": 1, "eval_batches": 1, "threads": 1}
        faults = [
            f"{name} must be a whole number of at least {bound}, got {getattr(self, name)!r}"
            for name, bound in least.items()
            if type(getattr(self, name)) is not int or getattr(self, name) < bound
        ]
        if not isinstance(self.learning_rate, int | float) or not 0 < self.learning_rate < math.inf:
            faults.append(f"learning_rate must be a positive number, got {self.learning_rate!r}")
        if self.sharding not in SHARDINGS:
            faults.append(f"sharding must be one of {', '.join(map(repr, SHARDINGS))}, got {self.sharding!r}")
        if faults:
            raise ValueError("StudyConfig: " + "; ".join(faults))


def build_model(hooks: Hooks, config: StudyConfig, device: torch.device | str = "cpu") -> nn.Module:
    """Build the reader's model from the seed, move it to the device and shard it. Every rank must call.

    A submodule with a tenth of the parameters, or 50 million, becomes a sharded unit of its own.

    Args:
        hooks: the reader's code.
        config: the study.
        device: where this rank's weights live: what `launch_distributed_job` returned.

    Raises:
        TypeError: the builder returned something else than a module.
        ValueError: nothing in the module is trainable, it has tensors without values, or `sharding` is "none" on
            several ranks, whose models would drift apart.
        RuntimeError: sharding "fsdp1" or "fsdp2" without a process group.
    """
    world_size = _world_size()
    if config.sharding == "none" and world_size > 1:
        raise ValueError(
            f'sharding "none" does not exchange gradients and needs a single rank, this job has {world_size}: '
            'use "fsdp1" or "fsdp2"'
        )
    with _Randomness("weights", config.seed).active():
        model = hooks.model()
    _check_model(hooks, model)
    model.to(device)
    if config.sharding == "none":
        return model
    wrap = fsdp_wrap if config.sharding == "fsdp1" else fsdp2_wrap
    return wrap(
        model,
        # With one rank there is nothing to shard; saying so spares the warning that "full" would bring.
        sharding_strategy="full" if world_size > 1 else "no_shard",
        mixed_precision=False,
        min_num_params=max(1, min(50_000_000, sum(p.numel() for p in model.parameters()) // 10)),
    )


def _check_model(hooks: Hooks, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{hooks.named('model')}: expected it to return a torch.nn.Module, found {_describe(model)}")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if on_meta := [name for name, tensor in tensors.items() if tensor.is_meta]:
        raise ValueError(
            f"{hooks.named('model')}: tensors on the meta device have no values: {', '.join(on_meta)}. Build the model "
            "on the CPU."
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise ValueError(f"{hooks.named('model')}: expected a parameter that requires a gradient, found none")


def averages(model: nn.Module, decay: float, others: Sequence[float] = (0.9, 0.999)) -> dict[str, EMA_FSDP]:
    """Build the reader's average of a model, and those to compare it with. Every rank must call.

    Besides one average per decay there is the longest with a warm-up, which forgets the initial weights in time.

    Args:
        model: what `build_model` returned.
        decay: the reader's.
        others: the decays beside it, each in [0, 1).

    Returns:
        "EMA 0.99" and so on to the averages, shortest memory first.

    Example:
        >>> list(averages(nn.Linear(2, 1), 0.99))
        ['EMA 0.9', 'EMA 0.99', 'EMA 0.999', 'EMA 0.999, warm-up']
    """
    decays = sorted({decay, *others})
    schedules: dict[str, float | Schedule] = {name_of(value): value for value in decays}
    schedules[f"{name_of(decays[-1])}, warm-up"] = Warmup(decays[-1])
    return {name: EMA_FSDP(model, value) for name, value in schedules.items()}


def name_of(decay: float) -> str:
    """What the average with this decay is called, in as many digits as it takes: "EMA 0.99"."""
    return f"EMA {float(decay)!r}"


@dataclass
class Study:
    """What came of a study; the same on every rank.

    Attributes:
        history: losses of the steps, and per evaluation and set of weights "loss" (mean over the held-out batches) and
            "distance_to_live".
        untrained: held-out loss of the initial weights.
        batches: held-out batches that were evaluated.
    """

    history: History
    untrained: float
    batches: int


def study(
    model: nn.Module,
    hooks: Hooks,
    config: StudyConfig,
    emas: Mapping[str, EMA_FSDP],
    *,
    progress: bool | None = None,
) -> Study:
    """Train the reader's model, update every average after each step, judge live and averaged weights on held-out data.

    Every rank must call. Each rank trains on every n-th batch of n ranks; a round that is not complete at the end of a
    pass is left out. Every rank evaluates the same held-out batches, in eval mode, under the same random numbers for
    all weights and all evaluations, so that a loss that draws noise compares them fairly.

    Args:
        model: what `build_model` returned.
        hooks: the reader's code.
        config: the study.
        emas: name to average of `model`, as from `averages`; "live" is taken.
        progress: show a progress bar on rank 0; by default in a terminal or notebook, and not where `CI` is set.

    Raises:
        TypeError, ValueError: data or loss returned something else than the protocol says; there is no average, or one
            is called "live".
        FloatingPointError: a loss was NaN or infinite; found at the next evaluation, on every rank.
    """
    if not emas:
        raise ValueError("emas: expected at least one average to study, got none")
    if "live" in emas:
        raise ValueError('emas: the name "live" stands for the trained weights; call the average something else')
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=config.learning_rate)
    held_out = _held_out(hooks, config)

    def evaluate(weights: nn.Module) -> dict[str, float]:
        return {"loss": _held_out_loss(weights, hooks, held_out, device)}

    history, pending, started = History(), [], time.perf_counter()
    training = _Randomness("training", config.seed, _rank())
    steps, quiet = range(1, config.steps + 1), not show_progress(progress)
    with cpu_threads(config.threads), training.active(), _mode(model, train=True):
        untrained = evaluate(model)["loss"]
        data = _training_batches(hooks, config.seed)
        with tqdm(steps, desc="training", unit="step", disable=quiet) as bar:
            for step, batch in zip(bar, data, strict=False):
                optimizer.zero_grad()
                loss = _loss(hooks, model, _to(batch, device))
                loss.backward()
                optimizer.step()
                for ema in emas.values():
                    ema.update(model)
                pending.append(loss.detach())
                if step % config.eval_every == 0 or step == config.steps:
                    history.losses += mean_over_ranks(pending, step)
                    pending.clear()
                    history.records += evaluate_all(model, emas, evaluate, step)
                    bar.set_postfix(loss=f"{history.losses[-1]:.3f}", refresh=False)
    history.seconds = time.perf_counter() - started
    return Study(history, untrained, len(held_out))


def jitter(values: Sequence[float]) -> float:
    """How noisy a curve is: the standard deviation of white noise that would make it as rough, in the curve's unit.

    From the second differences, which leave out whatever is straight: of independent noise they have the variance
    6 sigma^2 (J. von Neumann, 1941, does the same with first differences).

    Args:
        values: at least three, at equal distances.

    Raises:
        ValueError: fewer than three values.

    Example:
        >>> jitter([3.0, 2.0, 1.0, 0.0])
        0.0
    """
    if len(values) < 3:
        raise ValueError(f"values: the noise of a curve shows in at least 3 of its values, got {len(values)}")
    return float(np.sqrt(np.mean(np.square(np.diff(np.asarray(values, dtype=np.float64), n=2))) / 6))


# --- data ------------------------------------------------------------------------------------------------------------


def _training_batches(hooks: Hooks, seed: int) -> Iterator[Any]:
    """This rank's batches of one pass after another, without end."""
    rank, world_size = _rank(), _world_size()
    for epoch in count():
        # The same on every rank: a loader that shuffles by the global generators must give all ranks one order.
        batches = _Randomness("data", seed, epoch).over(partial(_call_data, hooks, True))
        rounds = 0
        while len(dealt := list(islice(batches, world_size))) == world_size:
            rounds += 1
            yield dealt[rank]
        if rounds == 0:
            raise ValueError(
                f"{hooks.named('data')}: expected at least {world_size} training batches, one for each rank, found "
                f"{len(dealt)} with train=True"
            )


def _held_out(hooks: Hooks, config: StudyConfig) -> list[Any]:
    """The held-out batches, the same for every seed of the study."""
    batches = _Randomness("held out", 0).over(partial(_call_data, hooks, False))
    held_out = list(islice(batches, config.eval_batches))
    if not held_out:
        raise ValueError(f"{hooks.named('data')}: expected at least one held-out batch with train=False, found none")
    return held_out


def _call_data(hooks: Hooks, train: bool, seed: int) -> Iterator[Any]:
    batches = hooks.data(train=train, seed=seed)
    if not isinstance(batches, Iterable):
        raise TypeError(
            f"{hooks.named('data')}: expected it to return an iterable of batches for train={train}, found "
            f"{_describe(batches)}"
        )
    return iter(batches)


def _to(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on the device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: _to(part, device) for name, part in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_to(part, device) for part in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_to(part, device) for part in batch)
    return batch


# --- loss ------------------------------------------------------------------------------------------------------------


def _loss(hooks: Hooks, model: nn.Module, batch: Any) -> Tensor:
    loss = hooks.loss(model, batch)
    expected = f"{hooks.named('loss')}: expected it to return a scalar floating-point tensor, found {_describe(loss)}"
    if not isinstance(loss, Tensor):
        raise TypeError(f"{expected}. Return the tensor itself, before .item() or float().")
    if loss.numel() != 1 or not loss.is_floating_point():
        raise ValueError(f"{expected}. Take the mean over the batch.")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise ValueError(
            f"{hooks.named('loss')}: expected a loss that depends on trainable weights, found one without a gradient. "
            "Is there a detach() or no_grad() on its way?"
        )
    return loss.reshape(())


@torch.no_grad()  # not inference_mode: FSDP2 would leave inference tensors in the weights that the next step trains
def _held_out_loss(model: nn.Module, hooks: Hooks, held_out: Sequence[Any], device: torch.device) -> float:
    """Mean over the batches of the loss of the weights in the model, the same on every rank."""
    with _Randomness("evaluation", 0).active(), _mode(model, train=False):
        losses = [_loss(hooks, model, _to(batch, device)).double() for batch in held_out]
    return float(torch.stack(losses).mean())


@contextlib.contextmanager
def _mode(model: nn.Module, *, train: bool) -> Iterator[None]:
    before = {module: module.training for module in model.modules()}
    model.train(train)
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


# --- randomness ------------------------------------------------------------------------------------------------------


class _Randomness:
    """A state of all global random generators for one purpose, which neither disturbs nor sees the others."""

    def __init__(self, purpose: str, *numbers: int) -> None:
        # 31 bits: NumPy's generator takes no more.
        self.seed = seeded_generator(purpose, *numbers).initial_seed() % 2**31
        self._state: Mapping[str, Tensor] | None = None

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """What is drawn in the block goes on where the last such block ended."""
        outside = random_state()
        if self._state is None:
            random.seed(self.seed)
            np.random.seed(self.seed)
            torch.manual_seed(self.seed)
        else:
            set_random_state(self._state)
        try:
            yield
        finally:
            self._state = random_state()
            set_random_state(outside)

    def over(self, make: Callable[[int], Iterator[Any]]) -> Iterator[Any]:
        """The items of `make(seed)`, each drawn with this randomness active."""
        end = object()
        with self.active():
            items = make(self.seed)
        while True:
            with self.active():
                item = next(items, end)
            if item is end:
                return
            yield item


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return "None" if value is None else f"{type(value).__name__} {value!r:.60}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
