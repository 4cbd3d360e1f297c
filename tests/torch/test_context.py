"""Context parallel: attention in the turns of a ring is equal to one device, whatever else a plan splits."""

import pytest
import torch

from planloom.blocks.rings import why_no_ring
from planloom.capture import batch_spec
from planloom.errors import PlanError
from planloom.plan import Plan
from planloom.plan.families import parse_recipe
from planloom.program import Backward, Forward, Program, collectives_in
from tests.dist.cases import captured
from tests.models import build
from tests.torch.equality import require_equal_to_one_device

PLANS = [
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
