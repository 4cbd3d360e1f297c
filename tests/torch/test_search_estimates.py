"""The estimate that a search reports equals the one recomputed from the finished plan: always, and exactly."""

from dataclasses import replace
from pathlib import Path

import pytest

from planloom.plan import Plan, load_plan, save_plan
from planloom.search import BlockPin, Planner, Wishes, estimate_plan
from planloom.search.finished import plan_of
from planloom.search.solutions import Solution, Solver
from tests.torch.searches import CLUSTERS, planner, solutions, solvers, spec

UNLIMITED = 1e15


def recomputed(own: Planner, plan: Plan) -> object:
    return estimate_plan(plan, own.network, own.works, own.cluster)


def require_equal_estimates(own: Planner, model: str, solver: Solver) -> list[tuple[Solution, Plan]]:
    found = []
    for solution in solutions(solver):
        plan = plan_of(solution, solver.tables, own.cluster, spec(model))
        assert recomputed(own, plan) == solution.estimate, plan.name
        assert solution.estimate.num_bytes <= solver.limit_bytes
        assert solution.bound_seconds <= solution.estimate.step_seconds * (1 + 1e-12)
        found.append((solution, plan))
    return found


def least_bytes(own: Planner) -> float:
    """About what the largest of all solutions without limit needs."""
    (solver,) = solvers(own, Wishes(dp=1, tp=own.cluster.num_devices, pp=1, micro=1), UNLIMITED)
    return max(solution.estimate.num_bytes for solution in solutions(solver))


@pytest.mark.parametrize(
    ("model", "cluster_name"), [("gpt", "two-by-two"), ("gpt-deep", "flat"), ("zoo/gshard_moe", "two-by-two")]
)
def test_of_every_solution(model: str, cluster_name: str) -> None:
    """Every shape; all memory, and so little that parameters are sharded and segments recomputed."""
    own = planner(model, cluster_name)
    whole = least_bytes(own)
    kinds: set[str] = set()
    for limit in (UNLIMITED, 0.7 * whole, 0.3 * whole):
        for solver in solvers(own, Wishes(), limit, max_problems=2):
            for solution, plan in require_equal_estimates(own, model, solver):
                kinds |= {storage.kind for storage in plan.storage.values()}
                kinds |= {"recompute"} if plan.recompute else set()
                kinds |= {"pipeline"} if solution.candidate.shape.num_stages > 1 else set()
    assert {"zero1", "zero3", "pipeline"} <= kinds
    assert "recompute" in kinds or not any(segment.is_repeated for segment in own.network.chain)


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved", "gpipe", "looped"])
def test_of_every_schedule(schedule: str) -> None:
    """All solutions, with all memory and with little, and those whose stages are filled segment by segment."""
    own, names = planner("gpt-deep", "two-by-two"), set[str]()
    whole = least_bytes(own)
    for limit in (UNLIMITED, 0.5 * whole):
        for solver in solvers(own, Wishes(schedule=schedule, pp=2), limit, max_problems=3):
            for solution, plan in require_equal_estimates(own, "gpt-deep", solver):
                names.add(plan.schedule)
                assert len(plan.groups) == 2
                assert not (schedule == "zb-h1" and "zero3" in {storage.kind for storage in plan.storage.values()})
                again = solver.filled(solver.tables.candidates.index(solution.candidate), solution)
                assert again is not None
                filled = plan_of(again, solver.tables, own.cluster, spec("gpt-deep"))
                assert recomputed(own, filled) == again.estimate
    assert names == {schedule}


@pytest.mark.parametrize(
    "wishes",
    [
        Wishes(storage="zero3"),
        Wishes(storage="zero1", recompute=False),
        Wishes(pins=(BlockPin(pattern="*", dim="batch", axis="tp"),)),
        Wishes(pins=(BlockPin(pattern="layers.1.up", dim="out", axis="tp"),)),
    ],
    ids=str,
)
def test_under_wishes(wishes: Wishes) -> None:
    own = planner("gpt-deep", "two-by-two")
    whole = least_bytes(own)
    count = 0
    for limit in (UNLIMITED, 0.7 * whole):
        for solver in solvers(own, wishes, limit, max_problems=1):
            for _, plan in require_equal_estimates(own, "gpt-deep", solver):
                count += 1
                assert {storage.kind for storage in plan.storage.values()} <= {wishes.storage or "zero1"} or (
                    wishes.storage is None
                )
                assert wishes.recompute or not plan.recompute
    assert count


def test_a_pin_concerns_the_layers_that_it_names_and_no_others() -> None:
    own = planner("gpt-deep", "two-by-two")
    pin = BlockPin(pattern="layers.2.up", dim="sequence", axis="tp")
    (solver,) = solvers(own, Wishes(tp=4, dp=1, pp=1, micro=1, pins=(pin,)), UNLIMITED, max_problems=1)
    ((_, plan),) = require_equal_estimates(own, "gpt-deep", solver)
    splits = {b.name: plan.strategies[b.index] for b in own.blocks.blocks if b.name.endswith(".up")}
    assert splits["layers.2.up"] == {"sequence": ("tp",)}
    assert splits["layers.1.up"] != splits["layers.2.up"]


def test_a_pin_says_nothing_of_blocks_that_lack_its_dim() -> None:
    own = planner("zoo/gshard_moe", "two-by-two")
    pin = BlockPin(pattern="*", dim="batch", axis="dp")
    with_dim = {b.index for b in own.blocks.blocks if any(dim.name == "batch" for dim in b.dims)}
    assert 0 < len(with_dim) < len(own.blocks.blocks)
    (solver,) = solvers(own, Wishes(tp=1, dp=4, pp=1, micro=1, pins=(pin,)), UNLIMITED, max_problems=1)
    ((_, plan),) = require_equal_estimates(own, "zoo/gshard_moe", solver)
    assert {index for index, split in enumerate(plan.strategies) if split.get("batch") == ("dp",)} == with_dim


@pytest.mark.parametrize("cluster_name", CLUSTERS)
def test_through_the_file(cluster_name: str, tmp_path: Path) -> None:
    own = planner("gpt", cluster_name)
    found = own.search(Wishes(), num_wanted=4)
    for number, ranked in enumerate(found.ranked):
        solver = own.solver(ranked.solution.candidate, ranked.limit_bytes, Wishes())
        plan = plan_of(ranked.solution, solver.tables, own.cluster, spec("gpt"))
        save_plan(plan, tmp_path / f"{number}.json")
        read = load_plan(tmp_path / f"{number}.json")
        assert recomputed(own, read) == ranked.solution.estimate
        assert recomputed(own, replace(read, name="other")) == ranked.solution.estimate


@pytest.mark.slow
@pytest.mark.parametrize("cluster_name", CLUSTERS)
@pytest.mark.parametrize(
    "model", ["gpt", "llama-deep", "gpt-deep", "zoo/gshard_moe", "zoo/gpt2", "zoo/mixtral", "zoo/t5"]
)
def test_of_every_solution_of_many_searches(model: str, cluster_name: str) -> None:
    own = planner(model, cluster_name)
    whole = least_bytes(own)
    for wishes in (Wishes(), Wishes(storage="zero2"), Wishes(recompute=False)):
        for limit in (UNLIMITED, whole, 0.7 * whole, 0.4 * whole):
            for solver in solvers(own, wishes, limit, max_problems=12):
                require_equal_estimates(own, model, solver)
