"""Profiles of models with experts and dropout: every run of a plan can be measured alone."""

import pytest
import torch

from planloom.capture import batch_spec, tensors_of
from planloom.plan import named_plan, parse_named
from planloom.profile.measure import is_measured, measure_programs, missing_runs
from planloom.program import build_program
from tests.dist.cases import captured
from tests.models import build


@pytest.mark.parametrize(
    ("model", "plan"),
    [("zoo/mixtral", "dp=2,experts"), ("zoo/mixtral", "dp=2,tp=2,experts"), ("zoo/gpt2+dropout", "dp=2,tp=2")],
)
def test_every_run_is_measured(model: str, plan: str) -> None:
    blocks = captured(model, torch.float64)
    built, batch = build(model, torch.float64)
    program = build_program(blocks, named_plan(blocks, parse_named(plan), batch=batch_spec(batch)))
    held = {**dict(built.named_parameters()), **dict(built.named_buffers())}
    buffers = {name: held[name].detach() for name in blocks.graph.buffers}
    seen: list[tuple[int, int]] = []
    measured = measure_programs(
        blocks, [program], tensors_of(batch), buffers, {}, progress=lambda done, total: seen.append((done, total))
    )
    prices = {key: seconds for key, (seconds, _) in measured.items()}
    assert all(seconds > 0 for seconds in prices.values())
    assert not missing_runs(blocks, [program], prices)
    assert seen[-1][0] == seen[-1][1] > 0
    assert is_measured(blocks, [program], {**prices, "collective/all_reduce/2/4096": 1.0})
