"""All ranks come together within a short time, or all raise and name those that did not come."""

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store


class Meeting:
    """A barrier over the store of the default group: it sends nothing, names the missing, and can be used again.

    A collective would make a rank that comes too late wait for partners that have given up, and a barrier that failed
    leaves its group unusable. Here the first rank that knows the outcome writes it down, and all abide by that.

    Args:
        name: of the place; the same on every rank, and new: torchrun's store outlives the workers that it restarts,
            and what they said must not be heard again.
        timeout: how long to wait for the others.
    """

    def __init__(self, name: str, timeout: timedelta) -> None:
        self.name = f"fsdp_ema_lib/{name}"
        self.timeout = timeout
        self.round = 0

    def enter(self, what: str, rank: int, world_size: int) -> None:
        """Wait until every rank of the default group has entered.

        Raises:
            TimeoutError: some did not, named; on every rank, also on one that comes later.
        """
        if world_size == 1:
            return
        self.round += 1
        place = f"{self.name}/{self.round}"
        store = _get_default_store()
        everyone = [f"{place}/{other}" for other in range(world_size)]
        store.set(everyone[rank], "here")
        verdict = "all"
        try:
            store.wait(everyone, self.timeout)
        except (dist.DistStoreError, RuntimeError, ValueError):
            missing = [str(other) for other in range(world_size) if not store.check([everyone[other]])]
            verdict = ", ".join(missing) or "none"
        if self.round > 2:  # long over for all who passed the last one
            store.delete_key(f"{self.name}/{self.round - 2}/{rank}")
        verdict = store.compare_set(f"{place}/verdict", "", verdict).decode()
        if verdict not in ("all", "none"):
            raise TimeoutError(
                f"{what}: rank {verdict} did not come within {self.timeout.total_seconds():.0f} s. Every rank must "
                f"call it; look there for the error, or for a branch that only some ranks take."
            )
