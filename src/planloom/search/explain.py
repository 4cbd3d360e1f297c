"""Why a block has its strategy: what every other one would cost, everything else chosen anew."""

from dataclasses import dataclass, replace

import numpy as np

from planloom.plan import Plan
from planloom.search.elimination import SegmentTables, Table, minimize
from planloom.search.figures import block_figures
from planloom.search.finished import candidate_of, choice_of
from planloom.search.planner import Planner
from planloom.search.space import Wishes
from planloom.search.tables import Tables

Strategy = dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A strategy of a block, and by how many seconds the best step with it is longer than the best step of all.

    `compute_seconds`: of the block itself, a micro-batch.
    """

    strategy: Strategy
    lost_seconds: float
    compute_seconds: float
    is_chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShare:
    """A block in a plan: its strategy, how its parameters are stored, and what it takes of a micro-batch."""

    name: str
    strategy: Strategy
    storage: str
    count: int
    compute_seconds: float
    communication_seconds: float
    is_recomputed: bool


def explain_block(planner: Planner, plan: Plan, block: int) -> tuple[Alternative, ...]:
    """All strategies of a block on the plan's mesh, by what they lose, memory left aside."""
    tables = _tables(planner, plan)
    choice = choice_of(plan, tables)
    number = planner.network.of_block[block]
    key = planner.network.variables[number].key
    zero = np.zeros(1)
    costs = tables.costs(zero, zero, np.array([0]))
    totals = []
    for k in range(tables.num_choices(key)):
        segments = [_pinned(segment, number, k) for segment in costs.segments]
        totals.append(float(minimize(segments, costs.sizes).totals[0]) / tables.shape.num_stages)
    best = min(totals)
    unary = tables.unary[key]
    found = [
        Alternative(
            strategy=_strategy(tables, block, k),
            lost_seconds=total - best,
            compute_seconds=float(unary.forward[0, k] + unary.backward[0, k]),
            is_chosen=k == int(choice.variables[number]),
        )
        for k, total in enumerate(totals)
        if np.isfinite(total)
    ]
    return tuple(sorted(found, key=lambda own: own.lost_seconds))


def _pinned(segment: SegmentTables, number: int, k: int) -> SegmentTables:
    """The segment with one choice for a variable, if it is one of its own."""
    for i, table in enumerate(segment.tables):
        if table.variables == (number,):
            numbers = np.full_like(table.numbers, np.inf)
            numbers[:, k] = table.numbers[:, k]
            tables = (*segment.tables[:i], Table(table.variables, numbers), *segment.tables[i + 1 :])
            return replace(segment, tables=tables, kind=("pinned", k))
    return segment


def explain_plan(planner: Planner, plan: Plan) -> tuple[BlockShare, ...]:
    """Every distinct block of a plan: equal ones with equal strategies together, in order."""
    tables = _tables(planner, plan)
    choice = choice_of(plan, tables)
    figures = block_figures(tables, 0, choice)
    found: dict[object, list[int]] = {}
    segments = planner.network.segment_of_block
    for block in planner.blocks.blocks:
        key = planner.network.variables[planner.network.of_block[block.index]].key
        strategy = tuple(sorted(plan.strategies[block.index].items()))
        found.setdefault((key, strategy, bool(choice.recomputed[segments[block.index]])), []).append(block.index)
    shares = []
    for members in found.values():
        block = planner.blocks.blocks[members[0]]
        number = planner.network.of_block[block.index]
        unary = tables.unary[planner.network.variables[number].key]
        k = choice.variables[number]
        again = bool(choice.recomputed[segments[block.index]])
        compute = float(unary.forward[0, k] * (1 + again) + unary.backward[0, k])
        storage = [plan.storage[name] for name in block.parameters if name in plan.storage]
        shares.append(
            BlockShare(
                name=block.name,
                strategy=plan.strategies[block.index],
                storage=f"{storage[0].kind} over {storage[0].over}" if storage else "",
                count=len(members),
                compute_seconds=compute,
                communication_seconds=max(0.0, float(figures.micro_seconds[block.index]) - compute),
                is_recomputed=again,
            )
        )
    return tuple(shares)


def _tables(planner: Planner, plan: Plan) -> Tables:
    candidate = candidate_of(plan, planner.cluster)
    return Tables(planner.network, planner.works, planner.cluster, candidate.shape, [candidate], Wishes())


def _strategy(tables: Tables, block: int, k: int) -> Strategy:
    dims = tables.network.blocks.blocks[block].dims
    key = tables.network.variables[tables.network.of_block[block]].key
    found: Strategy = {}
    for name, d in zip(tables.shape.names, tables.strategies[key].dims[k], strict=True):
        if d >= 0:
            found[dims[d].name] = (*found.get(dims[d].name, ()), name)
    return found
