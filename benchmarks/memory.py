"""How much memory a piece of work takes on top of what its process holds."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 1 << 20


def peak_rise(work: Callable[[], Any]) -> float:
    """MiB by which the peak of resident memory rises over the present while `work` runs."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # free memory that is still resident would hide a part of the rise
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    work()
    return (_resident("VmHWM") - before) / MIB


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
