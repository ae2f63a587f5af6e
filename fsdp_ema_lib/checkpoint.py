"""Model, optimizer, averages, counters and random states, saved and restored together."""

import json
import random
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from fsdp_ema_lib import full_state
from fsdp_ema_lib.agreement import from_rank_zero, raise_together
from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.layout import Layout
from fsdp_ema_lib.process_group import is_main_process
from fsdp_ema_lib.sharded_view import ShardedView
from fsdp_ema_lib.storage import (
    SafeLoadPlanner,
    SafeReader,
    SafetensorsWriter,
    discard,
    publish,
    read_manifest,
    replacing,
    unpublished_name,
)

# Flattened, the optimizer's state has one entry per parameter, and loads into FSDP1 with and without a mesh.
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def fsdp_state_dict(module: nn.Module) -> dict[str, Any]:
    """Gather the live weights and buffers: what the plain model loads with `strict=True`.

    Collective: every rank must call. Gathers one FSDP1 unit or one DTensor at a time.

    Returns:
        On rank 0, name -> tensor on the CPU in its own dtype, tied parameters under each name; elsewhere {}.

    Raises:
        TypeError, ValueError, RuntimeError: as for `EMA_FSDP`, on every rank.

    Example:
        >>> sorted(fsdp_state_dict(nn.Linear(3, 2)))
        ['bias', 'weight']
    """
    layout = _layout_everywhere(module)
    return full_state.collect(layout, layout.live(), None)


def export_safetensors(
    path: str | Path, ema: EMA_FSDP, model: nn.Module, *, export_dtype: torch.dtype | None = None
) -> None:
    """Write the whole averaged model to one safetensors file that the plain model loads with `strict=True`.

    Collective: every rank must call; rank 0 writes as it gathers, one FSDP1 unit or one DTensor at a time, and the file
    appears under its name when it is whole. Tied parameters are written under each of their names.

    Args:
        path: the file, on rank 0's machine; replaced if it exists. Its directory must exist.
        ema: the average.
        model: the model that `ema` was built for; frozen parameters and buffers come from it.
        export_dtype: floating dtype of the parameters; None keeps the average's own.

    Raises:
        TypeError: a dtype that safetensors cannot hold, or `export_dtype` is not floating. OSError: from writing. On
            every rank.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import load_file
        >>> model = nn.Linear(3, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export_safetensors(f"{folder}/ema.safetensors", EMA_FSDP(model), model)
        ...     model.load_state_dict(load_file(f"{folder}/ema.safetensors"), strict=True)
        <All keys matched successfully>
    """
    path = Path(path)
    entries = ema.full_entries(model, export_dtype=export_dtype)
    if not is_main_process():
        for _ in ema.stream_full(model, export_dtype=export_dtype):
            raise AssertionError("only rank 0 gets tensors")
        raise_together(None)
        return
    error: Exception | None = None
    stream = ema.stream_full(model, export_dtype=export_dtype)
    try:
        with replacing(path) as temporary:
            writer = SafetensorsWriter(temporary, entries, {"num_updates": str(ema.num_updates)})
            for name, tensor in stream:
                writer.write(name, tensor)
            writer.close()
    except (OSError, TypeError, RuntimeError) as problem:
        error = problem
        for _ in stream:  # the other ranks go through every gather, so this one must too
            continue
    raise_together(error)


def save_checkpoint(
    path: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    ema: EMA_FSDP | Mapping[str, EMA_FSDP] | None = None,
    step: int = 0,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Save everything that training needs to go on bit for bit; each rank writes its own shards.

    Collective: every rank must call. The directory appears under its name when it is whole and on disk.

    Args:
        path: a directory that does not exist yet, the same on every rank, on a file system that all of them see.
        model: as wrapped.
        optimizer: the optimizer of `model`.
        ema: an average, or several by name.
        step: number of optimizer steps done.
        extra: anything that JSON can hold; rank 0's counts.

    Raises:
        FileExistsError: `path` exists. TypeError: `extra` is not JSON. OSError, RuntimeError: from writing. On every
        rank, and nothing is left under `path`.
    """
    path = Path(path)
    error: Exception | None = None
    manifest: dict[str, Any] = {}
    temporary = from_rank_zero(unpublished_name(path))
    try:
        if is_main_process():
            manifest = _manifest(path, step, extra, _by_name(ema))
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
    except (OSError, TypeError, ValueError) as problem:
        error = problem
    raise_together(error)
    try:
        state = _gather_state(model, optimizer, ema) | {"rng": {f"rank{_rank()}": _random_state()}}
        save(state, storage_writer=FileSystemWriter(temporary, sync_files=True))
        if is_main_process():
            publish(temporary, path, manifest)
    except (CheckpointException, OSError, RuntimeError, ValueError) as problem:
        error = _translated(problem)
    if error is not None and is_main_process():
        discard(temporary)
    raise_together(error)


def load_checkpoint(
    path: str | Path,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    ema: EMA_FSDP | Mapping[str, EMA_FSDP] | None = None,
) -> dict[str, Any]:
    """Restore what `save_checkpoint` saved, into any layout and world size. Nothing from the files is executed.

    Collective: every rank must call. What is not asked for is not read: a model alone, or an average alone, can be
        loaded.

    Returns:
        `step` and `extra` as they were saved.

    Raises:
        FileNotFoundError: no whole checkpoint at `path`.
        ValueError: entries missing in the checkpoint, of another shape or dtype: all in one error, nothing changed.
        UnsafeCheckpointError: the checkpoint would run code. All on every rank.
    """
    path = Path(path)
    error: Exception | None = None
    manifest: dict[str, Any] = {}
    try:
        manifest = read_manifest(path)
        state = _gather_state(model, optimizer, ema)
        if _rank() < manifest["world_size"]:
            state["rng"] = {f"rank{_rank()}": _random_state()}
        state = _detached(state)
        _refuse_differences(state, SafeReader(path).read_metadata())
    except (OSError, ValueError, RuntimeError, TypeError, KeyError) as problem:
        error = problem
    except Exception as problem:  # whatever unpickling a damaged file raises
        error = ValueError(f"{path}: the metadata is not readable ({problem!r}). Load an earlier checkpoint.")
    raise_together(error)
    try:
        load(state, storage_reader=SafeReader(path), planner=SafeLoadPlanner())
    except CheckpointException as problem:
        raise _translated(problem) from problem
    _apply(state, model, optimizer, ema, manifest)
    return {"step": manifest["step"], "extra": manifest["extra"]}


def _layout_everywhere(module: nn.Module) -> Layout:
    """The layout, or the same error on every rank."""
    error: Exception | None = None
    layout: Layout | None = None
    try:
        layout = Layout(module)
    except (TypeError, ValueError, RuntimeError) as problem:
        error = problem
    raise_together(error)
    assert layout is not None
    return layout


def _by_name(ema: EMA_FSDP | Mapping[str, EMA_FSDP] | None) -> dict[str, EMA_FSDP]:
    if ema is None:
        return {}
    return {"0": ema} if isinstance(ema, EMA_FSDP) else dict(ema)


def _manifest(path: Path, step: int, extra: Mapping[str, Any] | None, emas: Mapping[str, EMA_FSDP]) -> dict[str, Any]:
    if path.exists():
        raise FileExistsError(f"{path} exists; a checkpoint is never written over. Choose another name or remove it.")
    manifest = {
        "step": step,
        "extra": dict(extra or {}),
        "world_size": dist.get_world_size() if dist.is_initialized() else 1,
        "torch": torch.__version__,
        "emas": {name: average.num_updates for name, average in emas.items()},
    }
    try:
        json.dumps(manifest)
    except TypeError as problem:
        raise TypeError(f"extra must be plain JSON: {problem}") from problem
    return manifest


def _gather_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, ema: EMA_FSDP | Mapping[str, EMA_FSDP] | None
) -> dict[str, Any]:
    """Sharded state of everything, in the form that torch.distributed.checkpoint saves and fills."""
    state: dict[str, Any] = {"model": get_model_state_dict(model, options=_OPTIONS)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer, options=_OPTIONS)
    if ema is not None:
        state["ema"] = {name: average.state_dict() for name, average in _by_name(ema).items()}
    return state


def _apply(
    state: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    ema: EMA_FSDP | Mapping[str, EMA_FSDP] | None,
    manifest: Mapping[str, Any],
) -> None:
    for name, average in _by_name(ema).items():  # first: it alone can still refuse what it got
        average.load_state_dict(state["ema"][name])
    set_model_state_dict(model, state["model"], options=_OPTIONS)
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=_OPTIONS)
    if "rng" in state:
        _set_random_state(state["rng"][f"rank{_rank()}"])
    elif is_main_process() or _rank() >= manifest["world_size"]:
        warnings.warn(
            f"rank {_rank()}: the checkpoint was saved by {manifest['world_size']} ranks and has no random state for "
            f"this one, which keeps its own.",
            stacklevel=3,
        )


def _detached(state: Any) -> Any:
    """The same state over tensors of its own, so that a load that fails half-way has changed nothing."""
    if isinstance(state, dict):
        return {key: _detached(value) for key, value in state.items()}
    if isinstance(state, DTensor | ShardedView) or type(state) in (Tensor, nn.Parameter):
        return state.detach().clone()
    return state


def _refuse_differences(state: Mapping[str, Any], metadata: Metadata, prefix: str = "") -> None:
    lines = list(_differences(state, metadata, ""))
    if lines:
        raise ValueError("the checkpoint does not fit:\n" + "\n".join(lines) + "\nNothing was changed.")


def _differences(state: Mapping[str, Any], metadata: Metadata, prefix: str) -> Any:
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _differences(value, metadata, f"{name}.")
            continue
        saved = metadata.state_dict_metadata.get(name)
        if saved is None:
            yield f"{name}: missing in the checkpoint"
        elif isinstance(value, Tensor) and isinstance(saved, TensorStorageMetadata):
            if saved.size != value.size():
                yield f"{name}: the checkpoint holds {tuple(saved.size)}, {tuple(value.size())} was expected"
            elif saved.properties.dtype != value.dtype:
                yield f"{name}: the checkpoint holds {saved.properties.dtype}, {value.dtype} was expected"


def _random_state() -> dict[str, Tensor]:
    version, words, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor(float("nan") if gauss is None else gauss, dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        assert kind == "MT19937"
        state["numpy"] = torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64)
        state["numpy_gauss"] = torch.tensor(cached, dtype=torch.float64)
    return state


def _set_random_state(state: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(state["torch"])
    version, *words = state["python"].tolist()
    gauss = float(state["python_gauss"])
    random.setstate((version, tuple(words), None if gauss != gauss else gauss))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        *keys, position, has_gauss = state["numpy"].tolist()
        sys.modules["numpy"].random.set_state(("MT19937", keys, position, has_gauss, float(state["numpy_gauss"])))


def _translated(problem: BaseException) -> Exception:
    """An ordinary exception in place of torch's CheckpointException, which `except Exception` would let through."""
    if not isinstance(problem, CheckpointException):
        assert isinstance(problem, Exception)
        return problem
    causes = {rank: failure[0] for rank, failure in problem.failures.items()}
    kind = type(next(iter(causes.values())))
    text = "; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items())
    if issubclass(kind, OSError):
        return OSError(text)
    return RuntimeError(f"the checkpoint could not be written or read: {text}")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
