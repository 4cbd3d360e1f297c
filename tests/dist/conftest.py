"""Pools of worker processes, started once a session."""

from collections.abc import Iterator

import pytest

from tests.dist.workers import Pool, Pools


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Pool]]:
    started = Pools()
    yield started
    started.close()
