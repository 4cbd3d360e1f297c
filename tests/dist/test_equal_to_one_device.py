"""Every plan trains like one device: gradients, parameters and losses, on real processes."""

from dataclasses import replace

import pytest
import torch

from planloom.capture import batch_spec
from planloom.cluster import cluster_to_yaml, load_cluster
from planloom.layout import enumerate_placements
from planloom.plan import named_plan, parse_named
from planloom.program import build_program
from planloom.report.collectives import collectives_of
from tests.dist.cases import LEARNING_RATE, captured, reference, require_equal, train
from tests.dist.workers import Pool
from tests.models import build

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


FURTHER = [
    ("gpt", "dp=2,zero2,micro=2"),
    ("gpt-deep", "tp=2,sequence,vocab,recompute"),
    ("llama-deep", "dp=2,zero3,micro=2,recompute"),
    pytest.param("llama", "dp=4,zero2,micro=2", marks=pytest.mark.slow),
    pytest.param("gpt-deep", "pp=2,micro=4,gpipe,recompute", marks=pytest.mark.slow),
    pytest.param("llama-deep", "pp=2,dp=2,zero2,recompute,micro=4,1f1b", marks=pytest.mark.slow),
    pytest.param("gpt-deep", "dp=2,tp=2,vocab,zero1,recompute", marks=pytest.mark.slow),
    pytest.param("llama-deep", "tp=2,tp2=2,vocab,recompute", marks=pytest.mark.slow),
]
"""Layers that are recomputed, on models that are deep enough to have some that repeat, and ZeRO-2."""


def world_of(plan: str) -> int:
    return parse_named(plan).num_devices


@pytest.mark.parametrize(("model", "plan"), CASES)
def test_gradients_and_sgd_in_float64(pools: dict[int, Pool], model: str, plan: str) -> None:
    expected = reference(model, torch.float64, "sgd", 4)
    results = pools[world_of(plan)].run(train, model, plan, torch.float64, "sgd", 4)
    require_equal(results, expected)


@pytest.mark.parametrize(("model", "plan"), FURTHER)
def test_recomputed_layers_and_scattered_gradients(pools: dict[int, Pool], model: str, plan: str) -> None:
    results = pools[world_of(plan)].run(train, model, plan, torch.float64, "sgd", 3)
    require_equal(results, reference(model, torch.float64, "sgd", 3))


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


@pytest.mark.parametrize("spec", ["dp=4", pytest.param("dp=4,zero1", marks=pytest.mark.slow)])
def test_reductions_that_a_slow_network_makes_hierarchical(pools: dict[int, Pool], spec: str) -> None:
    """The plan's cluster has slow uplinks: gradients are reduced inside nodes, between them, and gathered inside."""
    blocks, cluster = captured("gpt", torch.float64), load_cluster("two-by-two")
    slow = replace(cluster.levels[0].link, bandwidth_bytes_per_second=1e3)
    cluster = replace(cluster, levels=(replace(cluster.levels[0], link=slow), cluster.levels[1]))
    (placement,) = enumerate_placements(cluster.level_counts, {"dp": 4})
    batch = batch_spec(build("gpt", torch.float64)[1])
    plan = named_plan(blocks, parse_named(spec), batch=batch, placement=placement)
    plan = replace(plan, cluster=cluster_to_yaml(cluster))
    words = collectives_of(cluster, build_program(blocks, plan))
    assert any(text.count("→") >= 1 for text in words), words
    results = pools[4].run(train, "gpt", plan, torch.float64, "sgd", 4)
    require_equal(results, reference("gpt", torch.float64, "sgd", 4))
