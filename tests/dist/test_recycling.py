"""3F1B on real processes: an Evoformer of three passes trains like one device."""

import pytest
import torch

from planloom.plan import find_named
from tests.dist.cases import reference, require_equal, train
from tests.dist.workers import Pool

PLANS = [
    "3f1b:pp=2,micro=4",
    "3f1b:pp=4,micro=8",
    pytest.param("3f1b:pp=2,dp=2,micro=2,zero1,recompute", marks=pytest.mark.slow),
    pytest.param("3f1b:pp=2,tp=2,micro=4", marks=pytest.mark.slow),
    pytest.param("3f1b:pp=4,dp=2,micro=4,zero1", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("text", PLANS)
def test_gradients_and_parameters_in_float64(pools: dict[int, Pool], text: str) -> None:
    results = pools[find_named(text).num_devices].run(train, "recycled", text, torch.float64, "sgd", 2)
    require_equal(results, reference("recycled", torch.float64, "sgd", 2))
