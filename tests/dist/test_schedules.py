"""Every schedule trains like one device, on real processes: virtual stages, split backwards, copies of stages."""

import pytest
import torch

from planloom.capture import batch_spec
from planloom.layout import Mesh
from planloom.plan import Plan, draft, parse_named
from planloom.plan.orders import Call, Orders, backward, forward, input_gradient, weight_gradient
from tests.dist.cases import captured, infer, reference, require_equal, train
from tests.dist.workers import Pool
from tests.models import build

TWO = [
    ("gpt", "pp=2,micro=4,interleaved"),
    ("llama", "pp=2,micro=4,looped"),
    ("gpt", "pp=2,micro=4,zb-h1"),
    ("llama", "pp=2,micro=4,zb-v"),
    ("gpt", "pp=2,micro=4,dualpipe-v"),
    ("llama", "pp=2,micro=4,chimera"),
]
FOUR = [
    ("gpt-deep", "pp=4,micro=4,interleaved"),
    ("gpt-deep", "pp=4,micro=8,zb-h1"),
    ("llama-deep", "pp=4,micro=4,chimera"),
    ("gpt", "pp=2,dp=2,zero2,micro=4,zb-h1"),
    ("llama", "pp=2,tp=2,vocab,micro=4,zb-v"),
    pytest.param("llama-deep", "pp=4,micro=8,looped", marks=pytest.mark.slow),
    pytest.param("llama-deep", "pp=4,micro=8,zb-v", marks=pytest.mark.slow),
    pytest.param("gpt-deep", "pp=4,micro=8,dualpipe-v", marks=pytest.mark.slow),
    pytest.param("gpt-deep", "pp=2,dp=2,zero3,micro=4,looped", marks=pytest.mark.slow),
    pytest.param("llama-deep", "pp=2,dp=2,zero1,micro=4,interleaved,chunks=3,recompute", marks=pytest.mark.slow),
    pytest.param("gpt-deep", "pp=2,tp=2,sequence,vocab,micro=4,zb-h1,recompute", marks=pytest.mark.slow),
    pytest.param("gpt-deep", "pp=2,dp=2,micro=4,chimera", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model", "plan"), TWO + FOUR)
def test_gradients_and_parameters_in_float64(pools: dict[int, Pool], model: str, plan: str) -> None:
    results = pools[parse_named(plan).num_devices].run(train, model, plan, torch.float64, "sgd", 3)
    require_equal(results, reference(model, torch.float64, "sgd", 3))


@pytest.mark.parametrize(("model", "plan"), TWO[2:4])
def test_loss_in_float32(pools: dict[int, Pool], model: str, plan: str) -> None:
    expected = reference(model, torch.float32, "sgd", 2)
    for result in pools[2].run(train, model, plan, torch.float32, "sgd", 2):
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5)


def own_schedule(num_stages: int, num_micro: int) -> Orders:
    """GPipe, last micro-batch first on the way back, weight-gradients of the first half at the very end."""
    orders = []
    for stage in range(num_stages):
        calls: list[Call] = [forward(stage, m) for m in range(num_micro)]
        late = range(num_micro // 2)
        for m in reversed(range(num_micro)):
            calls.append(input_gradient(stage, m) if m in late else backward(stage, m))
        orders.append((*calls, *(weight_gradient(stage, m) for m in late)))
    return tuple(orders)


def own_plan() -> Plan:
    blocks, (_, batch) = captured("gpt", torch.float64), build("gpt", torch.float64)
    half = len(blocks.blocks) // 2
    written = draft(blocks, Mesh.of([1]), batch=batch_spec(batch))
    for block in blocks.blocks[half:]:
        written = written.assign(block.name, stage=1, mesh=Mesh.of([0]))
    return written.order(own_schedule, micro_batches=4, max_held=4).plan("own")


def test_a_schedule_of_the_users_own(pools: dict[int, Pool]) -> None:
    plan = own_plan()
    assert plan.schedule == "own_schedule"
    results = pools[2].run(train, "gpt", plan, torch.float64, "sgd", 3)
    require_equal(results, reference("gpt", torch.float64, "sgd", 3))


@pytest.mark.parametrize("plan", ["pp=2,micro=4,inference", "dp=2,micro=2,inference"])
def test_inference_computes_the_loss_and_changes_nothing(pools: dict[int, Pool], plan: str) -> None:
    expected = reference("gpt", torch.float64, "sgd", 1)
    model, _ = build("gpt", torch.float64)
    before = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for result in pools[2].run(infer, "gpt", plan, 2):
        assert result["losses"] == pytest.approx(expected["losses"] * 2, rel=1e-12)
        assert "there are no gradients" in result["refusal"]
        assert all(torch.equal(value, before[name]) for name, value in result["parameters"].items())
