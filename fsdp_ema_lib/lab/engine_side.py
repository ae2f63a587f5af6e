"""What an ipyparallel engine does to become one rank of a group; the kernel's side is in `cluster`."""

from __future__ import annotations

import faulthandler
import linecache
import os
import pickle
import signal
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist
from IPython import get_ipython

from fsdp_ema_lib.process_group import TORCHRUN_VARIABLES

# What torchrun sets besides, and what would take this rank for one of torchrun's.
_MORE_VARIABLES = ("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")

_store: dist.Store | None = None
_stack_file: Any = None


def arrive() -> dict[str, Any]:
    """Make this engine fit to be a rank, and say where it is and which GPUs it sees."""
    leave()
    inherited = [name for name in os.environ if name.startswith("TORCHELASTIC_")]
    for variable in (*TORCHRUN_VARIABLES, *_MORE_VARIABLES, *inherited):
        os.environ.pop(variable, None)
    os.environ["MPLBACKEND"] = "Agg"
    torch.set_num_threads(1)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [str(torch.cuda.get_device_properties(number).uuid) for number in range(count)]
    return {"host": socket.gethostname(), "pid": os.getpid(), "gpus": gpus}


def open_store(port: int, world_size: int) -> int | str:
    """On rank 0: start the TCP store at which the ranks meet. The port it listens on, or what is in the way."""
    global _store
    try:
        store = dist.TCPStore("127.0.0.1", port, world_size, is_master=True, wait_for_workers=False)
    except dist.DistNetworkError as error:
        return str(error)
    _store = store
    return store.port


def join(rank: int, world_size: int, meet: str | tuple[str, int], device: str, timeout_s: float) -> None:
    """Join the group: through the file that `meet` names, or through the TCP store at (host, port)."""
    limit = timedelta(seconds=timeout_s)
    if isinstance(meet, str):
        store = dist.FileStore(meet, world_size)
    else:
        store = _store or dist.TCPStore(*meet, world_size, is_master=False, timeout=limit)
    here = torch.device(device)
    on_gpu = here.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(here)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=limit,
        device_id=here if on_gpu else None,
    )
    get_ipython().user_ns.update(rank=rank, world_size=world_size, device=here)


def leave() -> None:
    """Leave the group, if there is one."""
    global _store
    if dist.is_initialized():
        dist.destroy_process_group()
    _store = None


def write_stacks_to(path: str) -> None:
    """Where this rank stands goes to a file when it crashes, and on SIGUSR1."""
    global _stack_file
    # Standard error would not do: a kernel reads its own through a pipe, and what is in it is lost in a crash.
    _stack_file = open(path, "w")
    # Of all threads: one that runs no Python, such as gloo's, has no stack to show when it crashes; the main thread's
    # says at least during what.
    faulthandler.enable(file=_stack_file, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=_stack_file, all_threads=False)


def pack(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """On the kernel's side: a call as bytes. What a notebook defines goes by value, with its source for tracebacks."""
    code = getattr(function, "__code__", None)
    source = (code.co_filename, linecache.getlines(code.co_filename)) if code else None
    return cloudpickle.dumps((function, args, kwargs, source))


def call(packed: bytes) -> bytes:
    """Call what `pack` packed, and pack the result."""
    __tracebackhide__ = True  # IPython leaves this frame out of the traceback
    function, args, kwargs, source = pickle.loads(packed)
    if source is not None and function.__code__.co_filename != source[0]:  # it came by value, without its file
        function.__code__ = function.__code__.replace(co_filename=source[0])
        linecache.cache[source[0]] = (sum(map(len, source[1])), None, source[1], source[0])
    space = getattr(function, "__globals__", {})
    if space.get("__name__") == "__main__":  # of a notebook: it sees what %%px made here, too
        for name, value in get_ipython().user_ns.items():
            space.setdefault(name, value)
    return cloudpickle.dumps(function(*args, **kwargs))
