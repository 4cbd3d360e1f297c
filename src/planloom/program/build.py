"""From a plan to a verified program: the phases as one list."""

from planloom.blocks import BlockGraph
from planloom.collective import volume_price
from planloom.collective.paths import StepPrice
from planloom.plan import Plan, require_model, require_plan
from planloom.program.materialize import materialize
from planloom.program.runs import form_runs
from planloom.program.schedule import schedule_calls
from planloom.program.transform import split_blocks
from planloom.program.values import Program


def build_program(blocks: BlockGraph, plan: Plan, *, price: StepPrice = volume_price) -> Program:
    """Transform, schedule and materialize a plan; `price` chooses between collective programs."""
    require_model(plan, blocks.graph)
    require_plan(plan, blocks)
    splits = split_blocks(blocks, plan)  # transform
    runs = form_runs(splits)
    calls = schedule_calls(plan)  # schedule
    return materialize(splits, runs, calls, price)  # materialize
