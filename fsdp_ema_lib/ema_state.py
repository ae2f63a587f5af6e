"""The saved form of an average: its settings as JSON in a tensor, and the checks before a state is taken over."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_ema_lib.decay import Schedule, from_config, to_config
from fsdp_ema_lib.sharded_view import ShardedView
from fsdp_ema_lib.storage import DamagedCheckpointError

VERSION = 1
# The settings travel in a tensor of this fixed size: any checkpoint reader can hold them, and none has to unpickle
# them.
CONFIG_BYTES = 2048
# The entry of a state whose name says what it fits (`fits_name`).
FITS = "fits"


@dataclass(frozen=True)
class Config:
    """The settings of an average that a checkpoint carries.

    Attributes:
        version: of this format.
        decay: the schedule as `decay.to_config` describes it.
        start_after, update_every, precision: as `EMA_FSDP` takes them.
    """

    version: int
    decay: dict[str, Any]
    start_after: int
    update_every: int
    precision: str

    @classmethod
    def of(cls, schedule: Schedule, start_after: int, update_every: int, precision: str) -> "Config":
        """The settings of an average, in this version."""
        return cls(VERSION, to_config(schedule), start_after, update_every, precision)

    def schedule(self) -> Schedule | None:
        """The saved schedule; None for a plain function, which is code, and code is not saved."""
        return None if self.decay.get("kind") == "callable" else from_config(self.decay)


def fits_name(precision: str, tracked: Sequence[tuple[str, tuple[int, ...], str]]) -> str:
    """What a state has to be saved with to be loaded here: version, precision, a digest of (name, shape, dtype)s."""
    digest = sha256(json.dumps(list(tracked)).encode()).hexdigest()[:16]
    return f"version {VERSION}, precision {precision}, {len(tracked)} tracked parameters {digest}"


def encode(config: Config) -> Tensor:
    """The settings as JSON in a uint8 tensor of `CONFIG_BYTES` elements.

    Raises:
        ValueError: they do not fit.
    """
    text = json.dumps(asdict(config)).encode()
    if len(text) > CONFIG_BYTES:
        raise ValueError(f"the EMA's settings take {len(text)} bytes as JSON, at most {CONFIG_BYTES} fit: {config}")
    return torch.tensor(list(text.ljust(CONFIG_BYTES)), dtype=torch.uint8)


def decode(tensor: Tensor) -> Config:
    """What `encode` wrote.

    Raises:
        DamagedCheckpointError: not readable. ValueError: of a later version.
    """
    try:
        settings = json.loads(bytes(tensor.tolist()))
        version = int(settings["version"])
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        raise DamagedCheckpointError(f"config: the settings in the EMA state are damaged ({problem!r})") from problem
    if version > VERSION:
        raise ValueError(
            f"config: the EMA state has version {version}, this library reads up to {VERSION}: update fsdp_ema_lib"
        )
    try:
        config = Config(**settings)
    except TypeError as problem:
        raise DamagedCheckpointError(f"config: the settings in the EMA state are damaged ({problem})") from problem
    for what, least in (("start_after", 0), ("update_every", 1)):
        _check_count(getattr(config, what), what, least)
    return config


def check(saved: Mapping[str, Any], here: Mapping[str, Any]) -> Config:
    """Raise unless a saved state fits this rank's own; returns its settings. Changes nothing.

    Args:
        saved: what is to be loaded.
        here: `EMA_FSDP.state_dict()` of the average that loads it.

    Raises:
        ValueError: with every difference.
    """
    missing = [key for key in lasting(here) if key not in saved]
    if missing:
        raise ValueError(
            f"the EMA state lacks {', '.join(missing)} (it has {', '.join(map(str, saved)) or 'nothing'}). Pass what "
            f"EMA_FSDP.state_dict() returned for the same precision; for full tensors use load_full_state_dict."
        )
    config, mine = decode(saved["config"]), decode(here["config"])
    if config.precision != mine.precision:
        raise ValueError(
            f"precision: the EMA state was saved with {config.precision!r}, this EMA has {mine.precision!r}; "
            f"build it with precision={config.precision!r}"
        )
    lines = _differences(saved["shadow"], here["shadow"]) + _differences(saved.get("low", {}), here.get("low", {}))
    if lines:
        raise ValueError("\n".join(["the EMA state does not fit this model:", *lines]))
    for what in ("num_updates", "num_skipped"):
        _check_count(_scalar(saved[what], what), what, 0)
    config.schedule()  # raises where it is damaged
    return config


def lasting(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state without `FITS`, for a reader that compares precision and names one by one before it changes anything."""
    return {key: value for key, value in state.items() if key != FITS}


def local_of(tensor: Tensor) -> Tensor:
    """This rank's values of a tensor in checkpoint form."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor
    return tensor.local if isinstance(tensor, ShardedView) else tensor


def _scalar(value: Any, what: str) -> Any:
    if not (isinstance(value, Tensor) and value.numel() == 1):
        raise DamagedCheckpointError(f"{what}: the EMA state holds {value!r}, a tensor of one number was expected")
    return value.item()


def _check_count(value: Any, what: str, least: int) -> None:
    if type(value) is not int or value < least:
        raise DamagedCheckpointError(
            f"{what}: the EMA state holds {value!r}, a whole number of at least {least} was expected"
        )


def _differences(saved: Mapping[str, Any], here: Mapping[str, Tensor]) -> list[str]:
    lines = [f"{name}: missing in the state" for name in here if name not in saved]
    lines += [f"{name}: in the state, but not tracked here" for name in saved if name not in here]
    for name, mine in here.items():
        if name in saved and (text := _difference(saved[name], mine)) is not None:
            lines.append(f"{name}: {text}")
    return lines


def _difference(saved: Any, mine: Tensor) -> str | None:
    if not isinstance(saved, Tensor):
        return f"the state holds {type(saved).__name__}, a tensor was expected"
    if saved.shape != mine.shape:
        return f"the state holds {tuple(saved.shape)}, this model has {tuple(mine.shape)}"
    if saved.dtype != mine.dtype:
        return f"the state holds {saved.dtype}, this average is {mine.dtype}"
    if _place(saved) != _place(mine):
        return (
            f"the state holds {_place(saved)} of the full tensor, this rank has {_place(mine)}; "
            f"let torch.distributed.checkpoint.load reshard it"
        )
    return None


def _place(tensor: Tensor) -> str:
    """Which part of the full tensor this is, in words."""
    if isinstance(tensor, ShardedView):
        return f"elements {[(piece.offsets, piece.sizes) for piece in tensor.pieces]}"
    if isinstance(tensor, DTensor):
        return f"shard {tensor.placements} over mesh {tuple(tensor.device_mesh.shape)}"
    return "all"
