"""From a plan to a verified program: the phases as one list."""

from planloom.blocks import BlockGraph
from planloom.cluster import cluster_from_yaml
from planloom.collective import DigitsPrice, seconds_price, volume_price
from planloom.plan import Plan, require_model, require_plan
from planloom.program.materialize import materialize
from planloom.program.runs import form_runs
from planloom.program.schedule import find_ways
from planloom.program.transform import split_blocks
from planloom.program.values import Program


def build_program(blocks: BlockGraph, plan: Plan, *, price: DigitsPrice | None = None) -> Program:
    """Transform, schedule and materialize a plan.

    `price` chooses between collective programs; without it the plan's own cluster does, so that everyone who builds
    the program of a plan builds the same one.
    """
    require_model(plan, blocks.graph)
    require_plan(plan, blocks)
    splits = split_blocks(blocks, plan)  # transform
    runs = form_runs(splits)
    ways = find_ways(plan)  # schedule
    return materialize(splits, runs, ways, price or plan_price(plan))  # materialize


def plan_price(plan: Plan) -> DigitsPrice:
    """Seconds on the cluster that a plan was made for; bytes moved if it names none."""
    if not plan.cluster:
        return volume_price
    return seconds_price(cluster_from_yaml(plan.cluster, name=f"of plan {plan.name!r}"))
