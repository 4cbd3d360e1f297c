"""Context parallel: attention in the turns of a ring is equal to one device, whatever else a plan splits."""

import pytest
import torch

from planloom.blocks.rings import why_no_ring
from planloom.capture import batch_spec
from planloom.errors import LayoutError, PlanError
from planloom.plan import Plan
from planloom.plan.families import parse_recipe
from planloom.program import Backward, Forward, Program, build_program, collectives_in
from tests.dist.cases import captured
from tests.models import build
from tests.torch.equality import require_equal_to_one_device

PLANS: list[tuple[str, str]] = [
    ("llama", "cp=2"),
    ("llama", "cp=4"),
    ("gpt", "cp=4"),
    ("zoo/gpt2", "cp=2"),
    ("zoo/gpt2", "cp=4,tp=2"),
    ("llama", "cp=2,tp=2,dp=2"),
    ("llama", "cp=2,tp=4"),
    ("llama", "cp=2,micro=2"),
    ("llama", "cp=2,dp=2,zero1"),
    ("zoo/gpt2", "cp=2,zero3"),
    ("llama-deep", "cp=2,zero3,recompute,micro=2"),
    ("llama-deep", "cp=2,pp=2,micro=4"),
    ("zoo/gpt_oss", "cp=4"),
    ("zoo/gpt_oss", "cp=2,tp=2,zero3"),
    ("zoo/qwen3", "cp=2"),
    ("zoo/bert", "cp=2"),
]


def context_plan(model: str, options: str, dtype: torch.dtype = torch.float64) -> Plan:
    blocks, batch = captured(model, dtype), build(model, dtype)[1]
    return parse_recipe(f"context:{options}").draft(blocks, batch=batch_spec(batch)).plan(options)


@pytest.mark.parametrize(("model", "options"), PLANS)
def test_equal_to_one_device(model: str, options: str) -> None:
    require_equal_to_one_device(model, context_plan(model, options))


# -- the turns


def rotations(program: Program) -> int:
    bodies = [stage.bodies[call.body] for stage in program.stages for call in stage.calls]
    steps = [step for body in bodies for i in body for c in collectives_in(i) for step in c.steps]
    return sum(step.kind == "rotate" for step in steps)


@pytest.mark.parametrize("count", [2, 4])
def test_keys_and_values_go_round_and_their_cotangents_come_home(count: int) -> None:
    """Twice with the keys, once with their cotangents; each turn once forward and once backward."""
    plan = context_plan("llama", f"cp={count}")
    program = build_program(captured("llama", torch.float64), plan)
    num_layers = 2
    assert rotations(program) == num_layers * 6 * (count - 1)
    turns = [run.index for run in program.runs if run.turn is not None]
    assert len(turns) == num_layers * (count + 1)
    (stage,) = program.stages
    for kind in (Forward, Backward):
        found = [i.run for call in stage.calls for i in stage.bodies[call.body] if isinstance(i, kind)]
        assert sorted(run for run in found if run in turns) == sorted(turns)


def test_grouped_queries_stay_grouped() -> None:
    """What goes round are the keys and values of their few heads."""
    blocks = captured("llama", torch.float64)
    ring = next(block.ring for block in blocks.blocks if block.ring is not None)
    query, keys = (blocks.graph.tensors[name].shape for name in (ring.query, ring.keys))
    assert query[1] == 2 * keys[1]


# -- what cannot go round


def test_a_mask_is_refused_and_the_block_named() -> None:
    """T5 adds a bias by position to its scores."""
    with pytest.raises(PlanError, match="cannot go round a ring") as caught:
        context_plan("zoo/t5", "cp=2")
    assert "attention" in str(caught.value)


def test_an_uneven_sequence_is_refused() -> None:
    """A picture of 16 patches and a token for its class."""
    plan = context_plan("zoo/vit", "cp=2")
    with pytest.raises(LayoutError, match="not even"):
        build_program(captured("zoo/vit", torch.float64), plan)


def test_a_model_without_attention_has_nothing_to_go_round() -> None:
    with pytest.raises(PlanError, match="no attention"):
        context_plan("zoo/mamba2", "cp=2")


def test_why_not() -> None:
    blocks = captured("zoo/t5", torch.float64)
    reasons = {why_no_ring(blocks.graph, block.ops) for block in blocks.blocks}
    assert "it has a mask that is neither causal nor a window" in reasons
    assert "it is not attention as one operator" in reasons
    assert all((block.ring is None) or not why_no_ring(blocks.graph, block.ops) for block in blocks.blocks)
