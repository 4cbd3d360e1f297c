"""Interlaced pipelines train like one device, on real processes: collectives and exchanges between overlapping groups."""

from typing import Any

import pytest
import torch

from tests.dist.cases import reference, require_equal, train
from tests.dist.workers import Pool
from tests.shared_plans import interlaced_plan

CASES = [
    ("gpt", {"pp": 2, "micro": 4}),
    pytest.param("zoo/t5", {"pp": 2, "micro": 2}, marks=pytest.mark.slow),
    ("zoo/t5", {"pp": 4, "micro": 4}),
    pytest.param("zoo/mbart", {"pp": 4, "micro": 2}, marks=pytest.mark.slow),
    pytest.param("zoo/gpt2", {"pp": 2, "dp": 2, "micro": 2, "zero": "zero1"}, marks=pytest.mark.slow),
    pytest.param("zoo/gpt2", {"pp": 4, "micro": 4}, marks=pytest.mark.slow),
    pytest.param("zoo/mbart", {"pp": 2, "tp": 2, "micro": 4}, marks=pytest.mark.slow),
    pytest.param("zoo/t5", {"pp": 4, "tp": 2, "micro": 4}, marks=pytest.mark.slow),
    pytest.param("gpt-deep", {"pp": 4, "dp": 2, "micro": 4}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "sizes"), CASES)
def test_gradients_and_parameters_in_float64(pools: dict[int, Pool], model: str, sizes: dict[str, Any]) -> None:
    plan = interlaced_plan(model, **sizes)
    results = pools[len(plan.devices)].run(train, model, plan, torch.float64, "sgd", 3)
    require_equal(results, reference(model, torch.float64, "sgd", 3))
