"""Solutions of a tiny model against all of its plans: strategies, storage and cuts, all tried."""

from itertools import combinations, pairwise

import numpy as np
import pytest

from planloom.blocks import find_blocks
from planloom.cluster import load_cluster
from planloom.search import Planner, Wishes
from planloom.search.schedules import Schedule
from planloom.search.solutions import Solver
from planloom.search.space import Candidate
from planloom.search.tables import Tables
from tests.pure.tiny_graph import tiny_graph

UNLIMITED = 1e15
SHAPES = ["tp=4", "tp=2,tp2=2", "dp=2,tp=2", "dp=4", "pp=2,tp=2", "pp=2,dp=2", "pp=4"]
FURTHEST = 0.1
"""[Empirical] How far a solution under a limit is from the best plan of this model at most. Memory is filled layer by
layer, and here four blocks are all there is: of the real cases issue 6 asks for 0.02."""


def planner() -> Planner:
    blocks = find_blocks(tiny_graph(batch=16, sequence=(), hidden=1 << 16))
    return Planner(blocks, load_cluster("two-by-two"), fused=False)


PLANNER = planner()


def solver(shape: str, num_micro: int, limit_bytes: float = UNLIMITED) -> Solver:
    space = PLANNER.space(Wishes())
    own = next(s for s in space.shapes if str(s) == shape)
    placements = space.placements(PLANNER.cluster, own)
    candidates = [Candidate(shape=own, placement=placement, num_micro=num_micro) for placement in placements]
    return Solver(PLANNER.tables(candidates, Wishes()), PLANNER.places, limit_bytes=limit_bytes)


class Everything:
    """All plans of one problem: arrays with a dim for every block, over its strategies and ways to store."""

    def __init__(self, tables: Tables, g: int) -> None:
        self.tables, self.g = tables, g
        network = tables.network
        self.count = len(network.variables)
        assert not any(variable.tensor for variable in network.variables), "no junctions here"
        self.choices = [self._pairs(variable.key) for variable in network.variables]

    def _pairs(self, key: object) -> tuple[np.ndarray, np.ndarray]:
        """(strategy, way to store), the latter -1 where there is nothing to store."""
        own = self.tables.unary[key]
        ways = np.arange(len(self.tables.options)) if own.parameters is not None else np.array([-1])
        strategies = np.arange(self.tables.num_choices(key))
        return np.repeat(strategies, len(ways)), np.tile(ways, len(strategies))

    def figures(self) -> dict[str, list[np.ndarray]]:
        """For every block what it adds; an edge counts with the block that it leads to."""
        found: dict[str, list[np.ndarray]] = {name: [] for name in ("micro", "step", "stored", "saved", "peak")}
        for i, variable in enumerate(self.tables.network.variables):
            own, (picked, ways), g = self.tables.unary[variable.key], self.choices[i], self.g
            row = {"micro": own.forward[g, picked] + own.backward[g, picked], "step": 0 * picked, "stored": 0 * picked}
            row |= {"saved": own.saved_bytes[g, picked], "peak": own.peak_bytes[g, picked]}
            if own.parameters is not None:
                parameters = own.parameters
                row["micro"] = row["micro"] + parameters.micro_seconds[ways, g, picked]
                row["step"] = parameters.step_seconds[ways, g, picked]
                row["stored"] = parameters.stored_bytes[ways, g, picked]
                row["peak"] = row["peak"] + parameters.working_bytes[ways, g, picked]
            shape = tuple(-1 if other == i else 1 for other in range(self.count))
            for name, numbers in row.items():
                found[name].append(numbers.reshape(shape))
        for edge in self.tables.network.edges:
            pair, (source, target) = self.tables.pairs[edge.key], (self.choices[edge.source], self.choices[edge.target])
            numbers = (pair.forward[self.g] + pair.backward[self.g])[np.ix_(source[0], target[0])]
            assert edge.source < edge.target
            shape = tuple(len(self.choices[i][0]) if i in (edge.source, edge.target) else 1 for i in range(self.count))
            found["micro"][edge.target] = found["micro"][edge.target] + numbers.reshape(shape)
        return found

    def best(self, limit_bytes: float) -> float:
        """The least step of all plans that fit; exchanges between stages left out."""
        figures, num_micro = self.figures(), int(self.tables.num_micro[self.g])
        num_stages = self.tables.shape.num_stages
        kept, least = Schedule().kept(num_stages, num_micro), np.inf
        for cut in combinations(PLANNER.places, num_stages - 1):
            edges = [0, *cut, self.count]
            stages = [range(low, high) for low, high in pairwise(edges)]
            micro = [sum(figures["micro"][i] for i in own) for own in stages]
            step = [sum(figures["step"][i] for i in own) for own in stages]
            slowest, last = micro[0], step[0]
            for s in range(1, num_stages):
                slowest, last = np.maximum(slowest, micro[s]), np.maximum(last, step[s])
            seconds = sum(micro) + last + ((num_micro - 1) * slowest if num_micro > 1 else 0.0)  # 0 · ∞ is no number
            for s, own in enumerate(stages):
                peak = figures["peak"][own[0]]
                for i in own[1:]:
                    peak = np.maximum(peak, figures["peak"][i])
                held = sum(figures["stored"][i] + kept[s] * figures["saved"][i] for i in own) + peak
                seconds = np.where(held <= limit_bytes, seconds, np.inf)
            least = min(least, float(seconds.min()))
        return least


@pytest.mark.parametrize("num_micro", [1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_without_a_limit_the_solution_is_the_best_plan(shape: str, num_micro: int) -> None:
    own = solver(shape, num_micro)
    assert own.tables.is_possible
    found = own.solve(range(len(own.bounds)), below=np.inf)
    for g, bound in enumerate(own.bounds):
        best = Everything(own.tables, g).best(np.inf)
        if own.num_stages == 1:
            assert bound == pytest.approx(best, rel=1e-12)
            assert found[g].estimate.step_seconds == pytest.approx(best, rel=1e-12)
        else:  # the bound divides blocks evenly, the solution cuts at blocks
            assert bound <= best * (1 + 1e-12)
            assert found[g].estimate.step_seconds - found[g].estimate.exchange_seconds >= best * (1 - 1e-12)


@pytest.mark.parametrize("num_micro", [1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_under_limits_the_bound_is_one_and_the_solution_fits(shape: str, num_micro: int) -> None:
    gaps, num_missed = [], 0
    free = solver(shape, num_micro).solve([0], below=np.inf)[0].estimate.num_bytes
    for share in (0.95, 0.85, 0.75, 0.65, 0.55, 0.45, 0.35):
        own = solver(shape, num_micro, share * free)
        best = Everything(own.tables, 0).best(share * free)
        found = own.solve([0], below=np.inf)
        refined = own.refined(0, found[0] if found else None)
        found = [refined] if refined is not None else []
        assert own.bounds[0] <= best * (1 + 1e-12), "also where nothing fits"
        if not np.isfinite(best):
            assert not found
        for solution in found:
            seconds = solution.estimate.step_seconds - solution.estimate.exchange_seconds
            assert solution.estimate.num_bytes <= share * free
            assert best * (1 - 1e-12) <= seconds
            gaps.append(seconds / best - 1)
        num_missed += int(np.isfinite(best) and not found)
    print(f"{shape}, {num_micro} micro-batches: {[f'{gap:.1%}' for gap in gaps]} above the best, {num_missed} missed")
    assert max(gaps, default=0.0) <= FURTHEST
    assert num_missed <= 1, "a stage counts the peak of all blocks, so a plan that just fits may not be found"
