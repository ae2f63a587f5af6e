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
        self._told = False

    def enter(self, what: str, rank: int, world_size: int) -> None:
        """Wait until every rank of the default group has entered.

        Args:
            what: what the ranks meet for, for the error; the same on every rank.
            rank, world_size: in the default group.

        Raises:
            TimeoutError: some did not, named; on every rank, also on one that comes later for the same.
        """
        if world_size == 1:
            return
        store = _get_default_store()
        missed = ""
        # Rounds that ended without this rank: the others are further, and it must not count on its own.
        while store.check([f"{self.name}/{self.round}/verdict"]):
            missed = store.get(f"{self.name}/{self.round}/verdict").decode()
            self.round += 1
        # Late for what the others gave up, or past it and here for the next? Twice in a row it is not told the former:
        # two loads have the same name.
        self._told = missed.startswith(f"{what}: ") and not self._told
        if self._told:
            raise TimeoutError(missed)
        place = f"{self.name}/{self.round}"
        everyone = [f"{place}/{other}" for other in range(world_size)]
        store.set(everyone[rank], "here")
        verdict = _ALL
        try:
            store.wait(everyone, self.timeout)
        except (dist.DistStoreError, RuntimeError, ValueError):
            missing = [str(other) for other in range(world_size) if not store.check([everyone[other]])]
            if missing:
                verdict = (
                    f"{what}: rank {', '.join(missing)} did not come within {self.timeout.total_seconds():.0f} s. "
                    f"Every rank must call it; look there for the error, or for a branch that only some ranks take."
                )
        if self.round > 1:  # long over for all who passed the last one
            store.delete_key(f"{self.name}/{self.round - 2}/{rank}")
        self.round += 1
        verdict = store.compare_set(f"{place}/verdict", "", verdict).decode()
        if verdict != _ALL:
            raise TimeoutError(verdict)


_ALL = "all"
