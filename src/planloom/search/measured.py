"""What measured runs say about single blocks.

The search prices blocks one by one; what is measured are runs, of several blocks each. Of a run r that was measured

    ratio_r = measured seconds of r / Σ over its blocks of modelled seconds of the block by itself,

and a block cut as it is there takes its modelled seconds times the mean ratio of the distinct runs that it was measured
in. So the blocks of a run add up to what the run took, its fusion included, wherever one run stands for each of them;
where a block was measured in several, or its neighbours in the run are split otherwise, it is an interpolation, and is
called so. A ratio is known only for blocks of plans that were built: the search is repeated with it (`best`).
"""

from collections.abc import Iterable, Mapping
from math import prod

from planloom.cost import Prices
from planloom.plan import Plan
from planloom.plan.checks import BATCH_DIM
from planloom.program import Program, Run
from planloom.search.network import Network
from planloom.search.work import Class, Pieces, WorkPrices


def learned_ratios(
    works: WorkPrices, programs: Iterable[Program], prices: Prices
) -> Mapping[Class, tuple[float, float]]:
    """For the blocks of all measured runs of some programs: measured over modelled seconds, forward and backward."""
    found: dict[Class, list[tuple[float, float]]] = {}
    seen = set[object]()
    for program in programs:
        for run in program.runs:
            members = run_members(works, program, run)
            if len(members) < 2 or members in seen or not prices.is_measured(program, run):
                continue
            seen.add(members)
            ratio = _ratio(works, program, run, prices)
            for member in dict.fromkeys(members):
                found.setdefault(member, []).append(ratio)
    return {member: _mean(ratios) for member, ratios in found.items()}


def run_members(works: WorkPrices, program: Program, run: Run) -> tuple[Class, ...]:
    """The blocks of a run: of which class, cut into how many pieces."""
    return tuple(
        (works.class_of(works.blocks.blocks[number]), pieces) for number, pieces in _pieces(works, program, run)
    )


def _pieces(works: WorkPrices, program: Program, run: Run) -> list[tuple[int, Pieces]]:
    found = []
    for part in run.blocks:
        splits = {name: prod(digit.size for digit in digits) for name, digits in part.splits}
        if part.timed_dim:
            splits[part.timed_dim] = splits.get(part.timed_dim, 1) * program.num_micro_batches
        dims = works.blocks.blocks[part.block].dims
        found.append((part.block, tuple(splits.get(dim.name, 1) for dim in dims)))
    return found


def _ratio(works: WorkPrices, program: Program, run: Run, prices: Prices) -> tuple[float, float]:
    alone = [works.modelled(works.blocks.blocks[number], cut) for number, cut in _pieces(works, program, run)]
    forward, backward = sum(own.forward_seconds for own in alone), sum(own.backward_seconds for own in alone)
    took = [prices.run(program, run, phase).seconds for phase in ("forward", "backward")]
    return took[0] / forward if forward else 1.0, took[1] / backward if backward else 1.0


def _mean(ratios: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(own[0] for own in ratios) / len(ratios), sum(own[1] for own in ratios) / len(ratios)


def estimate_sources(plan: Plan, network: Network, works: WorkPrices) -> dict[str, int]:
    """Where the prices of a plan's blocks come from in the estimate: how many of each source."""
    found = {"measured": 0, "interpolated": 0, "modelled": 0}
    sizes = [{axis.name: axis.size for axis in mesh.axes} for mesh in plan.meshes]
    for block in network.blocks.blocks:
        strategy, stage = plan.strategies[block.index], plan.stages[block.index]
        pieces = []
        for dim in block.dims:
            cut = prod(sizes[stage][axis] for axis in strategy.get(dim.name, ()))
            pieces.append(cut * (plan.num_micro_batches if dim.name == BATCH_DIM else 1))
        found[works.work(block, tuple(pieces)).source] += 1
    return found
