"""Models nobody here wrote train like one device on real processes; with dropout, too."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from planloom.blocks import find_segments
from planloom.capture import batch_spec, tensors_of
from planloom.execute import Interpreter
from planloom.plan import named_plan, parse_named
from tests.dist.cases import LEARNING_RATE, captured, reference, require_equal, train
from tests.dist.workers import Pool
from tests.models import build

PLANS = ["dp=2", "tp=2,vocab", "tp=2,sequence,vocab", "dp=2,zero1", "dp=2,tp=2,vocab", "dp=4,zero3"]
IN_TIME = ["dp=2,zero3,micro=2", "pp=2,tp=2,micro=2,1f1b"]
OF_EXPERTS = ["tp=2,tp2=2", "dp=2,experts", "dp=4,experts", "dp=2,tp=2,experts,vocab", "dp=2,experts,zero1,micro=2"]
MODELS = ("gpt2", "mixtral", "t5", "bert", "vit", "swin")
FAST = {
    ("gpt2", "dp=2,tp=2,vocab"),
    ("mixtral", "dp=2,experts"),
    ("mixtral", "dp=2,tp=2,experts,vocab"),
    ("t5", "dp=2"),
}


def plans_of(model: str) -> list[str]:
    return [*PLANS, *IN_TIME, *(OF_EXPERTS if model in ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss") else [])]


CASES = [
    pytest.param(model, plan, marks=() if (model, plan) in FAST else pytest.mark.slow)
    for model in (*MODELS, "qwen3_moe", "deepseek_v3", "gpt_oss")
    for plan in (plans_of(model) if model in MODELS else OF_EXPERTS)
]


@pytest.mark.parametrize(("model", "plan"), CASES)
def test_gradients_and_sgd_in_float64(pools: dict[int, Pool], model: str, plan: str) -> None:
    name = f"zoo/{model}"
    results = pools[parse_named(plan).num_devices].run(train, name, plan, torch.float64, "sgd", 3)
    require_equal(results, reference(name, torch.float64, "sgd", 3))


def interpreted(name: str, num_steps: int) -> dict[str, Any]:
    """One device with the masks of our own dropout, which eager PyTorch does not draw."""
    model, batch = build(name, torch.float64)
    graph = captured(name, torch.float64).graph
    held = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    interpreter = Interpreter(graph, {n: held[n].detach() for n in graph.buffers}, torch.device("cpu"))
    parameters = {n: held[n].detach().clone().requires_grad_() for n in graph.parameters}
    optimizer = torch.optim.SGD(list(parameters.values()), lr=LEARNING_RATE)
    losses, gradients = [], {}
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = interpreter(parameters, tensors_of(batch), step=step)
        loss.backward()
        if step == 0:
            gradients = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "gradients": gradients, "parameters": {n: p.detach() for n, p in parameters.items()}}


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        pytest.param(model, plan, marks=() if plan == "dp=2,tp=2,vocab" else pytest.mark.slow)
        for model in ("gpt2", "bert")
        for plan in (*PLANS, *IN_TIME)
    ],
)
def test_dropout_is_the_same_on_any_plan(pools: dict[int, Pool], model: str, plan: str) -> None:
    name = f"zoo/{model}+dropout"
    expected = interpreted(name, 3)
    assert captured(name, torch.float64).graph.random
    assert len(set(expected["losses"])) == 3
    results = pools[parse_named(plan).num_devices].run(train, name, plan, torch.float64, "sgd", 3)
    require_equal(results, expected)


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("zoo/gpt2+dropout", "dp=2,zero2,micro=2"),
        pytest.param("zoo/gpt2+dropout", "pp=2,tp=2,micro=2,1f1b", marks=pytest.mark.slow),
        pytest.param("zoo/bert+dropout", "tp=2,sequence,vocab", marks=pytest.mark.slow),
        pytest.param("zoo/mixtral", "dp=2,tp=2,experts,vocab", marks=pytest.mark.slow),
        pytest.param("zoo/qwen3_moe", "dp=2,experts,zero1,micro=2", marks=pytest.mark.slow),
    ],
)
def test_every_segment_is_recomputed(pools: dict[int, Pool], name: str, spec: str) -> None:
    """Dropout draws the same numbers again, rows of experts go the same ways."""
    blocks, named = captured(name, torch.float64), parse_named(spec)
    plan = named_plan(blocks, named, batch=batch_spec(build(name, torch.float64)[1]))
    plan = replace(plan, recompute=tuple(range(len(find_segments(blocks)))))
    expected = interpreted(name, 3) if blocks.graph.random else reference(name, torch.float64, "sgd", 3)
    require_equal(pools[named.num_devices].run(train, name, plan, torch.float64, "sgd", 3), expected)
