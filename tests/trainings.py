"""Small trainings whose whole state can be compared bit for bit: what checkpoint tests save, load and go on with."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from zoo import LAYOUTS, SAME_DATA, Zoo, full_live_weights

from fsdp_ema_lib.ema import EMA_FSDP
from fsdp_ema_lib.layout import FlatShard, Layout

FEATURES = ("tied", "frozen", "buffers", "tiny")


class Training:
    """Model, AdamW in two groups, scheduler and average; the data comes from the global random state."""

    def __init__(
        self, layout: str, dtype: torch.dtype = torch.float32, seed: int = 0, features=FEATURES, groups: int = 2
    ) -> None:
        torch.manual_seed(seed)
        self.layout = layout
        self.model = LAYOUTS[layout](Zoo(features, dtype))
        params = [p for p in self.model.parameters() if p.requires_grad]
        flat = any(getattr(p, "_is_flat_param", False) for p in params)
        half = len(params) if flat or groups == 1 else len(params) // 2
        groups = [{"params": params[:half], "lr": 0.02}, {"params": params[half:], "lr": 0.01, "betas": (0.8, 0.95)}]
        self.optimizer = torch.optim.AdamW([g for g in groups if g["params"]], weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5], gamma=0.5)
        self.ema = EMA_FSDP(self.model, decay=0.9)
        self.dtype = dtype
        rank = dist.get_rank() if dist.is_initialized() and layout not in SAME_DATA else 0
        torch.manual_seed(100 * seed + rank)

    def train(self, steps: int) -> "Training":
        for _ in range(steps):
            x = torch.randn(6, 5)
            loss = (self.model(x.to(self.dtype)).float() - x.sum(dim=1, keepdim=True)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.ema.update(self.model)
        return self

    def parts(self) -> dict:
        return {"model": self.model, "optimizer": self.optimizer, "ema": self.ema, "scheduler": self.scheduler}

    def local_state(self) -> dict[str, Tensor]:
        """Everything of this rank, for bit comparison with another run of the same layout."""
        found = {f"model.{n}": v.clone() for n, v in Layout(self.model).live().items()}
        found |= {f"ema.{n}": v.clone() for n, v in self.ema.shadow.items()}
        found["ema.num_updates"] = torch.tensor(self.ema.num_updates)
        for number, param in enumerate(p for group in self.optimizer.param_groups for p in group["params"]):
            for key, value in self.optimizer.state.get(param, {}).items():
                local = value._local_tensor if isinstance(value, DTensor) else value
                if local.numel():  # state of nothing is no state
                    found[f"optimizer.{number}.{key}"] = local.clone() if isinstance(local, Tensor) else local
        for number, group in enumerate(self.optimizer.param_groups):
            found[f"lr.{number}"] = torch.tensor(group["lr"], dtype=torch.float64)
            found[f"beta.{number}"] = torch.tensor(group["betas"], dtype=torch.float64)
        found["scheduler"] = torch.tensor(self.scheduler.last_epoch)
        found["rng"] = torch.get_rng_state()
        return found

    def full_state(self) -> dict[str, Tensor]:
        """Live weights, averages and AdamW's state in full, on rank 0, for comparison across layouts."""
        found = {f"live.{n}": v for n, v in full_live_weights(self.model).items()}
        found |= {f"ema.{n}": v for n, v in self.ema.full_state_dict(self.model).items()}
        layout = Layout(self.model)
        for key in ("exp_avg", "exp_avg_sq"):
            locals_ = {}
            for name, shard in layout.shards.items():
                state = self.optimizer.state.get(shard.registered, {}).get(key)
                if not shard.requires_grad:
                    continue
                if state is None:  # no element of it here
                    state = torch.zeros_like(shard.live())
                local = state._local_tensor if isinstance(state, DTensor) else state
                if isinstance(shard, FlatShard) and shard.unit.flat is shard.registered:
                    local = shard.unit.slice(local, shard.index)
                locals_[name] = local
            found |= {f"{key}.{name}": full.clone() for name, full in layout.stream(locals_)}
        return found if (not dist.is_initialized() or dist.get_rank() == 0) else {}


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names whose bits differ, or that only one side has."""
    lines = [f"{name}: only on one side" for name in found.keys() ^ expected.keys()]
    for name in found.keys() & expected.keys():
        a, b = found[name], expected[name]
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
        if not same:
            lines.append(f"{name}: {a.flatten()[:3]} {b.flatten()[:3]} {a.dtype} {tuple(a.shape)}")
    return sorted(lines)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
