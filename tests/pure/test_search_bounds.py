"""Bounds of pipelines with layers: no plan is below them, whatever its strategies, cuts and limits of memory; and what
fills the stages of a layered model is within a few percent of them."""

from itertools import pairwise

import numpy as np
import pytest

from planloom.cluster import load_cluster
from planloom.search import Planner, Wishes
from planloom.search.cut_bound import CutBound
from planloom.search.figures import Choice, block_figures, exchange_seconds, with_best_junctions
from planloom.search.filling import Filler
from planloom.search.pipeline_bound import Multipliers, PipelineBound
from planloom.search.schedules import Schedule
from planloom.search.settled import SettledProblem
from planloom.search.solutions import Solver
from planloom.search.space import Candidate
from planloom.search.stages import BlockFigures, Estimate, estimate_stages
from tests.pure.layered_graph import layered_blocks
from tests.pure.test_search_stages import changed, figures, mixed

UNLIMITED = 1e15
NUM_MICRO = 8
FURTHEST = 0.03
"""[Empirical] Of twelve layers of five blocks in two stages."""
SHAPES = ["pp=2,tp=4", "pp=2,dp=2,tp=2", "pp=4,tp=2", "pp=8"]
PLANNER = Planner(
    layered_blocks(12, batch=1 << 12, wide=1 << 11, hidden=1 << 13),
    load_cluster("dgx-h100", num_outer=1),
    fused=False,
)


def solver(shape: str, limit_bytes: float = UNLIMITED) -> Solver:
    space = PLANNER.space(Wishes())
    own = next(s for s in space.shapes if str(s) == shape)
    candidate = Candidate(shape=own, placement=space.placements(PLANNER.cluster, own)[0], num_micro=NUM_MICRO)
    return Solver(PLANNER.tables([candidate], Wishes()), PLANNER.places, limit_bytes=limit_bytes)


def some_plan(own: Solver, rng: np.random.Generator) -> tuple[Estimate, BlockFigures]:
    """The fastest plan with other strategies, storage and recomputation here and there, and with any cuts."""
    (best,) = own.solve([0], below=np.inf)
    tables, network = own.tables, own.tables.network
    variables, storage = best.choice.variables.copy(), best.choice.storage.copy()
    share = rng.choice([0.0, 0.1, 0.5])
    for variable in network.variables:
        if rng.random() < share and not variable.tensor:
            unary = tables.unary[variable.key]
            picked = int(rng.choice(np.flatnonzero(np.isfinite(unary.forward[0]))))
            variables[variable.number] = picked
            if unary.parameters is not None:
                possible = np.isfinite(unary.parameters.micro_seconds[:, 0, picked])
                storage[variable.number] = int(rng.choice(np.flatnonzero(possible)))
    repeated = np.array([segment.is_repeated for segment in network.chain])
    choice = Choice(
        variables=with_best_junctions(tables, 0, variables),
        storage=storage,
        recomputed=repeated & (rng.random(len(repeated)) < rng.choice([0.0, 0.5, 1.0])),
    )
    even = np.array(best.first_blocks[1:]) + rng.integers(-3, 4, len(best.first_blocks) - 1)
    anywhere = rng.choice(PLANNER.places, len(even), replace=False)
    cut = sorted({int(at) for at in (even if rng.random() < 0.7 else anywhere)})
    if len(cut) < len(even) or cut[0] < 1:
        cut = list(best.first_blocks[1:])
    first_blocks = (0, *cut)
    found = block_figures(tables, 0, choice)
    return estimate_stages(found, first_blocks, NUM_MICRO, exchange_seconds(tables, 0, choice, first_blocks)), found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_below_the_bounds(seed: int, shape: str) -> None:
    rng = np.random.default_rng(seed)
    own = solver(shape)
    problem, num_stages = SettledProblem.of(own.tables, 0), own.num_stages
    for _ in range(4):
        estimate, found = some_plan(own, rng)
        limits = [stage.num_bytes for stage in estimate.stages]  # the plan fits, and nothing is left
        step = estimate.step_seconds
        for known in (1.5 * step, 1.001 * step):
            bound = PipelineBound(problem, PLANNER.places, limits, known_seconds=known, recompute=True)
            dual = bound.multipliers([found])
            assert dual is not None
            scale = step / sum(limits)
            others = Multipliers(
                pace=rng.dirichlet(np.ones(num_stages)),
                step=rng.dirichlet(np.ones(num_stages)),
                price=scale * rng.choice([0.0, 0.1, 1.0], num_stages) * rng.random(num_stages),
                peak_keys=dual.peak_keys,
            )
            for multipliers in (dual, others):
                assert bound.at(multipliers).seconds <= step * (1 + 1e-9)
                cuts = CutBound(
                    problem,
                    PLANNER.places,
                    prices=multipliers.price / (1 + (NUM_MICRO - 1) * multipliers.pace),
                    kept=bound.kept,
                    limits=np.array(limits),
                    num_micro=NUM_MICRO,
                    recompute=True,
                )
                assert cuts.is_possible
                assert cuts.seconds(known - bound.exchange_seconds) + bound.exchange_seconds <= step * (1 + 1e-9)


def test_without_a_limit_the_bound_of_cuts_is_the_best_cut() -> None:
    """Nothing but the cuts makes stages uneven: the solution without a limit of memory is proven by them."""
    gaps = []
    for shape in SHAPES[:3]:
        own = solver(shape)
        (solution,) = own.solve([0], below=np.inf)
        known, exchange = solution.estimate.step_seconds, solution.estimate.exchange_seconds
        cuts = CutBound(
            SettledProblem.of(own.tables, 0),
            PLANNER.places,
            prices=np.zeros(own.num_stages),
            kept=np.array(Schedule().kept(own.num_stages, NUM_MICRO), dtype=float),
            limits=own.limits,
            num_micro=NUM_MICRO,
            recompute=True,
        )
        gaps.append(1 - cuts.seconds(known) / (known - exchange))
        assert own.bounds[0] <= known
    assert max(gaps) <= 0.01


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_where_memory_binds_the_gap_is_small(shape: str) -> None:
    (free,) = solver(shape).solve([0], below=np.inf)
    own = solver(shape, 0.97 * free.estimate.num_bytes)
    known = own.solve([0], below=np.inf)
    solution = own.refined(0, own.filled(0, known[0] if known else None))
    assert solution is not None
    assert solution.estimate.num_bytes <= own.limit_bytes
    assert own.bounds[0] <= solution.estimate.step_seconds <= own.bounds[0] / (1 - FURTHEST)


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_filled_stages_fit_and_are_no_slower_than_any_with_one_option_each(seed: int, num_stages: int) -> None:
    """Three options, segments of two blocks, cut anywhere."""
    num_blocks, num_micro = 8, 4
    options = [figures(seed, num_blocks)]
    for other in (seed + 100, seed + 200):
        options.append(changed(options[-1], np.random.default_rng(other)))
    places, switches = tuple(range(1, num_blocks)), tuple(range(0, num_blocks, 2))
    kept, weight = Schedule().kept(num_stages, num_micro), float(num_micro + num_stages - 1)
    num_found = 0
    for limit in (2.5 / num_stages, 4 / num_stages, 8.0):
        filler = Filler(options, places, switches, weight=weight, kept=kept, limits=[limit] * num_stages)
        packing = filler.packing()
        if packing is None:
            continue
        num_found += 1
        stages = estimate_stages(mixed(options, packing.options), packing.first_blocks, num_micro, 0.0).stages
        assert all(stage.num_bytes <= limit * (1 + 1e-12) for stage in stages)
        for low, high in pairwise([*switches, num_blocks]):
            assert len(set(packing.options[low:high])) == 1, "a segment has one option"
        pace = max(stage.micro_seconds + stage.step_seconds / weight for stage in stages)
        for one in options:
            alone = Filler([one], places, switches, weight=weight, kept=kept, limits=[limit] * num_stages).packing()
            if alone is not None:
                others = estimate_stages(one, alone.first_blocks, num_micro, 0.0).stages
                assert pace <= 1.001 * max(stage.micro_seconds + stage.step_seconds / weight for stage in others)
    assert num_found
