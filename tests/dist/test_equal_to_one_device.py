"""Every plan trains like one device: gradients, parameters and losses, on real processes."""

import pytest
import torch

from planloom.plan import parse_named
from tests.dist.cases import LEARNING_RATE, reference, require_equal, train
from tests.dist.workers import Pool

TWO = [
    "dp=2",
    "tp=2",
    "tp=2,vocab",
    "tp=2,sequence",
    "tp=2,sequence,vocab",
    "tp2=2",
    "dp=2,zero1",
    "dp=2,zero3",
    "dp=2,micro=2",
    "dp=2,zero3,micro=2",
    "pp=2,micro=4,gpipe",
    "pp=2,micro=4,1f1b",
]
FOUR = [
    "dp=4",
    "tp=4,vocab",
    "dp=2,tp=2,vocab",
    "tp=2,tp2=2",
    "tp=2,tp2=2,vocab",
    "tp=4,sequence,vocab",
    "dp=2,tp=2,sequence,vocab,zero1",
    "dp=4,zero1",
    "dp=4,zero3",
    "dp=2,tp=2,zero3,micro=2",
    "pp=2,tp=2,micro=4,1f1b",
    "pp=2,tp=2,vocab,sequence,micro=4,gpipe",
    "pp=2,dp=2,zero1,micro=2,1f1b",
    "pp=2,dp=2,zero3,micro=4,1f1b",
]
CASES = [(model, plan) for model in ("gpt", "llama") for plan in TWO + FOUR]
OFTEN = ("dp=2,tp=2,vocab", "tp=2,tp2=2,vocab", "dp=4,zero3", "pp=2,tp=2,micro=4,1f1b")
FEWER = [
    pytest.param(model, plan, marks=() if plan in TWO[::2] or plan in OFTEN else pytest.mark.slow)
    for model, plan in CASES
]
"""All cases; those that `make test` leaves to `make test-all` are marked."""


def world_of(plan: str) -> int:
    return parse_named(plan).num_devices


@pytest.mark.parametrize(("model", "plan"), CASES)
def test_gradients_and_sgd_in_float64(pools: dict[int, Pool], model: str, plan: str) -> None:
    expected = reference(model, torch.float64, "sgd", 4)
    results = pools[world_of(plan)].run(train, model, plan, torch.float64, "sgd", 4)
    require_equal(results, expected)


@pytest.mark.parametrize(("model", "plan"), FEWER)
def test_adamw_in_float64(pools: dict[int, Pool], model: str, plan: str) -> None:
    expected = reference(model, torch.float64, "adamw", 4)
    for result in pools[world_of(plan)].run(train, model, plan, torch.float64, "adamw", 4):
        for name, parameter in result["parameters"].items():
            error = float((parameter - expected["parameters"][name]).abs().max())
            assert error <= 1e-6 * LEARNING_RATE, name


@pytest.mark.parametrize(("model", "plan"), FEWER)
def test_loss_in_float32(pools: dict[int, Pool], model: str, plan: str) -> None:
    expected = reference(model, torch.float32, "sgd", 2)
    for result in pools[world_of(plan)].run(train, model, plan, torch.float32, "sgd", 2):
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("plan", ["dp=2,tp=2,tp2=2,vocab,micro=2", "pp=2,dp=2,tp=2,sequence,vocab,zero1,micro=4,1f1b"])
def test_three_space_axes_on_eight_processes(pools: dict[int, Pool], model: str, plan: str) -> None:
    expected = reference(model, torch.float64, "sgd", 4)
    require_equal(pools[8].run(train, model, plan, torch.float64, "sgd", 4), expected)
