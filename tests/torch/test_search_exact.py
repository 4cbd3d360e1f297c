"""The search's optimum is that of a mixed-integer program, for whole small models; under a limit its bound is below."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from planloom.search import BlockPin, Wishes
from planloom.search.solutions import Solver
from planloom.search.tables import Tables
from tests.torch.integer_program import IntegerProgram
from tests.torch.searches import planner, solutions, solvers

UNLIMITED = 1e15
FURTHEST = 0.02
"""How far solution and bound are apart under a limit, at most (issue 6)."""
SHARES = (0.9, 0.75, 0.6, 0.45)
CASES = [
    ("gpt", "two-by-two", Wishes(dp=2, tp=2, pp=1, micro=2)),
    ("gpt", "flat", Wishes(dp=1, tp=4, pp=1, micro=1)),
    ("llama", "two-by-two", Wishes(dp=2, tp=2, pp=1, micro=1)),
    ("zoo/gshard_moe", "two-by-two", Wishes(dp=2, tp=2, pp=1, micro=1)),
    ("gpt", "two-by-two", Wishes(dp=1, tp=2, pp=2, micro=4)),
]
LIMITED_CASES = [CASES[0], CASES[2], CASES[3]]
LARGE_CASES = [
    ("llama", "flat", Wishes(dp=1, tp=4, pp=1, micro=1)),
    ("gpt", "flat", Wishes(dp=1, tp=2, tp2=2, pp=1, micro=1)),
    ("gpt-deep", "three-levels", Wishes(dp=2, tp=2, tp2=2, pp=1, micro=1, pins=(
        BlockPin(pattern="*", dim="batch", axis="dp"),))),
    ("zoo/gshard_moe", "three-levels", Wishes(dp=2, tp=4, pp=1, micro=1)),
]  # fmt: skip


def case_solver(model: str, cluster_name: str, wishes: Wishes, limit_bytes: float = UNLIMITED) -> Solver:
    (solver,) = solvers(planner(model, cluster_name), replace(wishes, schedule="1f1b"), limit_bytes)
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


def require_the_limited_optimum(model: str, cluster_name: str, wishes: Wishes, shares: Sequence[float]) -> None:
    """Solution and bound lie on both sides of the best plan (HiGHS), and no further apart than is asked for."""
    (free,) = solutions(case_solver(model, cluster_name, wishes))[:1]
    for share in shares:
        limit = share * free.estimate.num_bytes
        solver = case_solver(model, cluster_name, wishes, limit)
        assert not any(segment.is_repeated for segment in solver.tables.network.chain), "HiGHS knows no recomputation"
        best = program_of(solver.tables, 0, limited=True).least(limit)
        known = solver.solve([0], below=np.inf)
        solution = solver.refined(0, known[0] if known else None)
        if not np.isfinite(best):
            assert solution is None
            assert solver.bounds[0] == np.inf, "that nothing fits is proven"
            continue
        assert solution is not None, "something that fits is found"
        seconds, bound = solution.estimate.step_seconds, solver.bounds[0]
        print(f"{model}, {share:.0%} of memory: {seconds / best - 1:.2%} above the best, gap {1 - bound / seconds:.2%}")
        assert solution.estimate.num_bytes <= limit
        assert bound <= seconds
        assert best * (1 - 1e-9) <= seconds, "HiGHS chooses junctions freely, so its plans are no slower"
        assert bound <= seconds * (1 + 1e-9)
        assert seconds <= best / (1 - FURTHEST)
        assert bound >= (1 - FURTHEST) * seconds


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("model", "cluster_name", "wishes"), LIMITED_CASES, ids=str)
def test_under_a_limit_the_gap_is_proven(model: str, cluster_name: str, wishes: Wishes, share: float) -> None:
    require_the_limited_optimum(model, cluster_name, wishes, [share])


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_two_stages_under_a_limit(model: str, share: float) -> None:
    """The bound stays below what is found, and knows no less than one without stages."""
    wishes = Wishes(dp=1, tp=2, pp=2, micro=4)
    (free,) = solutions(case_solver(model, "two-by-two", wishes))[:1]
    solver = case_solver(model, "two-by-two", wishes, share * free.estimate.num_bytes)
    known = solver.solve([0], below=np.inf)
    before = float(solver.bounds[0])
    solution = solver.refined(0, known[0] if known else None)
    assert solver.bounds[0] >= before
    if solution is not None:
        assert solver.bounds[0] <= solution.estimate.step_seconds * (1 + 1e-12)
        assert solution.estimate.num_bytes <= share * free.estimate.num_bytes


def test_stages_that_fit_but_are_uneven_are_not_the_last_word() -> None:
    """What is fastest without a limit fits into 4 % less by a cut that loses 1.7 %; other choices lose 0.2 %."""
    wishes = Wishes(dp=1, tp=2, pp=2, micro=4)
    (free,) = solutions(case_solver("llama", "two-by-two", wishes))[:1]
    solver = case_solver("llama", "two-by-two", wishes, 0.96 * free.estimate.num_bytes)
    (found,) = solver.solve([0], below=np.inf)
    assert found.estimate.num_bytes <= 0.96 * free.estimate.num_bytes
    assert found.estimate.step_seconds <= 1.005 * free.estimate.step_seconds


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("share", SHARES)
def test_tightened_bounds_stay_below_what_is_found(num_stages: int, share: float) -> None:
    wishes = Wishes(pp=num_stages, schedule="1f1b")
    for free in solvers(planner("gpt", "two-by-two"), wishes, UNLIMITED):
        limit = share * min(solution.estimate.num_bytes for solution in solutions(free))
        (solver,) = [
            own for own in solvers(planner("gpt", "two-by-two"), wishes, limit) if own.tables.shape == free.tables.shape
        ]
        before = solver.bounds.copy()
        solver.tighten(range(len(before)), below=np.inf)
        tightened = solver.bounds.copy()
        assert (tightened >= before).all()
        assert (tightened > before).any(), "memory binds everywhere"
        for solution in solutions(solver):
            g = solver.tables.candidates.index(solution.candidate)
            assert tightened[g] <= solution.estimate.step_seconds * (1 + 1e-12)
