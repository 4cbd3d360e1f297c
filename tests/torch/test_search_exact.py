"""The search's optimum is that of a mixed-integer program, for whole small models; under a limit its bound is below."""

import numpy as np
import pytest

from planloom.search import BlockPin, Wishes
from planloom.search.solutions import Solver
from planloom.search.tables import Tables
from tests.torch.integer_program import IntegerProgram
from tests.torch.searches import planner, solutions, solvers

UNLIMITED = 1e15
FURTHEST = 0.05
"""[Empirical] How far solution and bound are from the best plan of a two-layer model under a limit, at most. In deeper
models memory is filled layer by layer, and less is left: issue 6 asks for 0.02 of real cases."""
CASES = [
    ("gpt", "two-by-two", Wishes(dp=2, tp=2, pp=1, micro=2)),
    ("gpt", "flat", Wishes(dp=1, tp=4, pp=1, micro=1)),
    ("llama", "two-by-two", Wishes(dp=2, tp=2, pp=1, micro=1)),
    ("zoo/gshard_moe", "two-by-two", Wishes(dp=2, tp=2, pp=1, micro=1)),
    ("gpt", "two-by-two", Wishes(dp=1, tp=2, pp=2, micro=4)),
]
LARGE_CASES = [
    ("llama", "flat", Wishes(dp=1, tp=4, pp=1, micro=1)),
    ("gpt", "flat", Wishes(dp=1, tp=2, tp2=2, pp=1, micro=1)),
    ("gpt-deep", "three-levels", Wishes(dp=2, tp=2, tp2=2, pp=1, micro=1, pins=(
        BlockPin(pattern="*", dim="batch", axis="dp"),))),
    ("zoo/gshard_moe", "three-levels", Wishes(dp=2, tp=4, pp=1, micro=1)),
]  # fmt: skip


def case_solver(model: str, cluster_name: str, wishes: Wishes, limit_bytes: float = UNLIMITED) -> Solver:
    (solver,) = solvers(planner(model, cluster_name), wishes, limit_bytes)
    return solver


def program_of(tables: Tables, g: int, *, limited: bool = False) -> IntegerProgram:
    """Seconds of one problem, from its tables; with its bytes if it is limited.

    Every number counts as in `search.tables`: (m + p - 1) micro-batches, and what comes once a step. How parameters are
    stored is a variable of its own, tied to the block's strategy; without a limit the fastest way counts.
    """
    found, weight = IntegerProgram(), float(tables.weights[g])
    for variable in tables.network.variables:
        own, number = tables.unary[variable.key], variable.number
        found.unary[number] = weight * (own.forward[g] + own.backward[g])
        found.num_bytes[number], found.peaks[number] = own.saved_bytes[g], own.peak_bytes[g]
        if own.parameters is not None:
            parameters = own.parameters
            ways = weight * parameters.micro_seconds[:, g] + parameters.step_seconds[:, g]
            if not limited:
                found.unary[number] = found.unary[number] + ways.min(axis=0)
                continue
            stored = -1 - number
            options, strategies = ways.shape
            found.unary[stored] = ways.reshape(-1)
            found.num_bytes[stored] = parameters.stored_bytes[:, g].reshape(-1)
            found.peaks[stored] = (own.peak_bytes[g] + parameters.working_bytes[:, g]).reshape(-1)
            is_tied = np.arange(strategies)[:, None] == np.tile(np.arange(strategies), options)[None, :]
            found.pairs.append((number, stored, np.where(is_tied, 0.0, np.inf)))
    for edge in tables.network.edges:
        pair = weight * (tables.pairs[edge.key].forward[g] + tables.pairs[edge.key].backward[g])
        found.pairs.append((edge.source, edge.target, pair))
    return found


def require_the_optimum(model: str, cluster_name: str, wishes: Wishes) -> None:
    solver = case_solver(model, cluster_name, wishes)
    best = program_of(solver.tables, 0).least() / solver.num_stages
    assert solver.bounds[0] == pytest.approx(best, rel=1e-9)
    if solver.num_stages == 1:
        (solution,) = solver.solve([0], below=np.inf)
        assert solution.estimate.step_seconds == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize(("model", "cluster_name", "wishes"), CASES, ids=str)
def test_the_optimum_is_that_of_an_integer_program(model: str, cluster_name: str, wishes: Wishes) -> None:
    require_the_optimum(model, cluster_name, wishes)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "cluster_name", "wishes"), LARGE_CASES, ids=str)
def test_the_optimum_over_two_free_axes(model: str, cluster_name: str, wishes: Wishes) -> None:
    require_the_optimum(model, cluster_name, wishes)


@pytest.mark.parametrize(("model", "cluster_name", "wishes"), CASES[:2], ids=str)
def test_under_a_limit_the_bound_is_below_the_best_plan(model: str, cluster_name: str, wishes: Wishes) -> None:
    (free,) = solutions(case_solver(model, cluster_name, wishes))[:1]
    gaps = []
    for share in (0.9, 0.6):
        limit = share * free.estimate.num_bytes
        solver = case_solver(model, cluster_name, wishes, limit)
        best = program_of(solver.tables, 0, limited=True).least(limit)
        found = solver.solve([0], below=np.inf)
        assert solver.bounds[0] <= best * (1 + 1e-9)
        if not np.isfinite(best):
            assert not found
            continue
        for solution in found:
            assert solution.estimate.num_bytes <= limit
            assert best * (1 - 1e-9) <= solution.estimate.step_seconds
        gaps.append((share, [s.estimate.step_seconds / best - 1 for s in found], 1 - solver.bounds[0] / best))
    for share, above, below in gaps:
        print(
            f"{model}, {share:.0%} of memory: {[f'{own:.2%}' for own in above]} above the best; bound {below:.2%} below"
        )
        assert above, "something that fits is found"
        assert max(above) <= FURTHEST
        assert below <= FURTHEST
