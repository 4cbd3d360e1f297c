"""Pools of worker processes that share one GPU."""

from collections.abc import Iterator

import pytest

from tests.dist.workers import Pool, Pools


@pytest.fixture(scope="session")
def gpu_pools() -> Iterator[dict[int, Pool]]:
    pools = Pools()
    yield pools
    pools.close()
