"""The states of all random number generators of a process, as tensors."""

import random
import sys
from collections.abc import Mapping

import torch
from torch import Tensor


def random_state() -> dict[str, Tensor]:
    """The states of torch's, CUDA's (this rank's device), Python's and NumPy's random number generators, as tensors."""
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
        if kind == "MT19937":
            state["numpy"] = torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64)
            state["numpy_gauss"] = torch.tensor(cached, dtype=torch.float64)
    return state


def check_random_state(state: Mapping[str, Tensor]) -> None:
    """Raise what `set_random_state` would raise, without changing anything."""
    torch.Generator().set_state(state["torch"])
    random.Random().setstate(_python(state))
    if "cuda" in state:
        torch.Generator("cuda").set_state(state["cuda"])
    if "numpy" in state:
        sys.modules["numpy"].random.RandomState().set_state(_numpy(state))


def set_random_state(state: Mapping[str, Tensor]) -> None:
    """Put back what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(_python(state))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(_numpy(state))


def _python(state: Mapping[str, Tensor]) -> tuple[int, tuple[int, ...], float | None]:
    version, *words = state["python"].tolist()
    gauss = float(state["python_gauss"])
    return version, tuple(words), None if gauss != gauss else gauss


def _numpy(state: Mapping[str, Tensor]) -> tuple[str, list[int], int, int, float]:
    *keys, position, has_gauss = state["numpy"].tolist()
    return "MT19937", keys, position, has_gauss, float(state["numpy_gauss"])
