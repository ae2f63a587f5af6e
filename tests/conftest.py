"""Fixtures that every test file may use."""

from collections.abc import Iterator

import pytest

from pool import RankPools


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """`ranks(world_size, worker, **kwargs)` runs a worker on real gloo ranks, returns its results by rank."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture
def lone_rank() -> Iterator[None]:
    """A gloo group of one in the test's own process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
