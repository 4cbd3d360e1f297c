"""Attention in the turns of a ring on real processes: it trains like one device."""

import pytest
import torch

from tests.dist.cases import reference, require_equal, train
from tests.dist.workers import Pool
from tests.torch.test_context import context_plan

CASES = [
    ("llama", "cp=2"),
    pytest.param("zoo/gpt2", "cp=2,zero3", marks=pytest.mark.slow),
    ("llama", "cp=4,micro=2"),
    pytest.param("llama-deep", "cp=2,dp=2,zero1,recompute", marks=pytest.mark.slow),
    pytest.param("zoo/gpt_oss", "cp=2,tp=2", marks=pytest.mark.slow),
    pytest.param("gpt-deep", "cp=2,pp=2,micro=4", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "options"), CASES)
def test_gradients_and_parameters_in_float64(pools: dict[int, Pool], model: str, options: str) -> None:
    plan = context_plan(model, options)
    results = pools[len(plan.devices)].run(train, model, plan, torch.float64, "sgd", 3)
    require_equal(results, reference(model, torch.float64, "sgd", 3))


def test_loss_in_float32(pools: dict[int, Pool]) -> None:
    expected = reference("llama", torch.float32, "sgd", 2)
    for result in pools[4].run(train, "llama", context_plan("llama", "cp=4", torch.float32), torch.float32, "sgd", 2):
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)
