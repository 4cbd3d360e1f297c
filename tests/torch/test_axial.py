"""Dynamic axial parallel: equal to one device, alone and in 3F1B; conversions are all-to-alls, as many as published."""

from collections import Counter
from math import prod

import pytest
import torch

from planloom.capture import batch_spec
from planloom.errors import PlanError
from planloom.plan import find_named, named_plan
from planloom.program import Program, build_program
from planloom.program.values import collectives_in
from tests.dist.cases import captured
from tests.models import build
from tests.torch.equality import require_equal_to_one_device

LAYER = "blocks.2."
"""An interior block of the last pass of four."""


def program_of(text: str, model: str = "recycled") -> Program:
    blocks, spec = captured(model, torch.float64), batch_spec(build(model, torch.float64)[1])
    return build_program(blocks, named_plan(blocks, find_named(text), batch=spec))


@pytest.mark.parametrize(
    "text",
    [
        "dap:dap=4",
        "3f1b:pp=2,dap=2,micro=4",
        pytest.param("3f1b:pp=2,dap=2,dp=2,micro=2,zero1,recompute", marks=pytest.mark.slow),
        pytest.param("dap:dap=2,dp=2,micro=2,recompute", marks=pytest.mark.slow),
    ],
)
def test_it_is_equal_to_one_device(text: str) -> None:
    blocks, spec = captured("recycled", torch.float64), batch_spec(build("recycled", torch.float64)[1])
    require_equal_to_one_device("recycled", named_plan(blocks, find_named(text), batch=spec))


def communication(program: Program, phase: str, *, third: bool) -> Counter[tuple[str, str]]:
    """(kind, what) of the collectives on activations of one block; `third`: those of the last pass."""
    blocks = captured("recycled", torch.float64)
    graph, found = blocks.graph, Counter[tuple[str, str]]()
    for instruction in program.stages[0].bodies[phase]:
        for collective in collectives_in(instruction):
            block = blocks.blocks[blocks.producer[collective.tensor]] if collective.tensor in blocks.producer else None
            if block is None or not block.name.startswith(LAYER):
                continue
            number = int(block.name.partition("#")[2] or 1)
            passes = (number + 1) // 2 if ":statistics" in block.name or ":matmul" in block.name else number
            if (passes == 3) != third:
                continue
            shape = graph.tensors[collective.tensor].shape
            what = (
                "statistics"
                if shape[-1] == 1
                else "bias"
                if block.name.partition("#")[0].endswith(".bias")
                else "whole"
            )
            found.update((step.kind, what) for step in collective.steps if not step.is_local)
            assert prod(shape) > 0
    return found


def test_rows_become_columns_by_all_to_alls_as_often_as_published() -> None:
    """FastFold turns m twice and z four times a block (`MSAStack`, `PairCore`, `Evoformer` of hpcaitech/FastFold), and
    gathers three biases, one side of the outer product, one of each triangle multiplication.

    Here a sum of a norm's statistics is turned with what it is of, and a triangle's gate with what it gates: both sides
    of that product are gathered, where FastFold gathers it itself.
    """
    program = program_of("dap:dap=2")
    forward = communication(program, "forward", third=True)
    assert forward == {
        ("all_to_all", "whole"): 6,
        ("all_to_all", "statistics"): 8,
        ("all_gather", "bias"): 3,
        ("all_gather", "whole"): 1 + 2 * 2,
    }
    backward = communication(program, "backward", third=True)
    assert sum(count for (kind, _), count in backward.items() if kind == "all_to_all") == 14
    assert sum(count for (kind, _), count in backward.items() if kind == "reduce_scatter") == 8
    assert not {kind for kind, _ in backward} - {"all_to_all", "reduce_scatter"}


def test_passes_without_gradients_communicate_forward_alone() -> None:
    program = program_of("dap:dap=2")
    assert communication(program, "forward", third=False)["all_to_all", "whole"] == 2 * 6
    assert not communication(program, "backward", third=False)


def test_models_without_rows_and_columns_are_refused() -> None:
    with pytest.raises(PlanError, match="no operation of this model can be split along rows or columns"):
        program_of("dap:dap=2", "gpt")


def test_an_axis_that_does_not_divide_is_refused() -> None:
    with pytest.raises(PlanError, match="can be split along rows or columns"):
        program_of("dap:dap=16")
