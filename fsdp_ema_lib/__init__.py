"""Exponential moving averages of sharded PyTorch models: exact, local, the same under every way of sharding.

Example:
    >>> from torch import nn
    >>> model = nn.Linear(3, 2)
    >>> ema = EMA_FSDP(model, decay=0.999)
    >>> ema.update(model)  # after each optimizer step
    >>> sorted(ema.full_state_dict(model))
    ['bias', 'weight']
"""

from fsdp_ema_lib.checkpoint import fsdp_state_dict, load_checkpoint, save_checkpoint
from fsdp_ema_lib.checkpoint_manager import CheckpointManager
from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.names import (
    is_predictive_aux_key,
    normalize_generator_fsdp_key,
    normalize_generator_fsdp_state_dict,
)
from fsdp_ema_lib.process_group import barrier, distributed_job, is_main_process, launch_distributed_job, shutdown
from fsdp_ema_lib.safetensors_io import export_safetensors, import_pt, import_safetensors
from fsdp_ema_lib.storage import DamagedCheckpointError, UnsafeCheckpointError
from fsdp_ema_lib.wrapping import effective_no_shard, fsdp2_wrap, fsdp_wrap

__version__ = "0.1.0"

__all__ = [
    "EMA_FSDP",
    "CheckpointManager",
    "DamagedCheckpointError",
    "UnsafeCheckpointError",
    "barrier",
    "distributed_job",
    "effective_no_shard",
    "export_safetensors",
    "fsdp2_wrap",
    "fsdp_state_dict",
    "fsdp_wrap",
    "import_pt",
    "import_safetensors",
    "is_main_process",
    "is_predictive_aux_key",
    "launch_distributed_job",
    "load_checkpoint",
    "normalize_generator_fsdp_key",
    "normalize_generator_fsdp_state_dict",
    "save_checkpoint",
    "shutdown",
]
