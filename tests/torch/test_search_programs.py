"""What a search finds is proven and equal to one device: with plenty of memory, and with so little that it saves."""

import pytest

from planloom.cost import Prices
from planloom.errors import PlanError
from planloom.plan import Plan
from planloom.search import Best, Finalist, Planner, Wishes, estimate_plan, find_best, least_memory
from planloom.search.space import VARIANTS
from tests.torch.equality import require_equal_to_one_device
from tests.torch.searches import planner, spec


def best_of(model: str, cluster_name: str, wishes: Wishes, num_finalists: int) -> Best:
    own = planner(model, cluster_name)
    return find_best(
        own, Prices(blocks=own.blocks, cluster=own.cluster), spec(model), wishes, num_finalists=num_finalists
    )


def require_estimate(own: Planner, finalist: Finalist) -> None:
    """What is reported is what the plan alone gives; a variant reports none."""
    if finalist.variant:
        assert finalist.estimate is None
    else:
        assert estimate_plan(finalist.plan, own.network, own.works, own.cluster) == finalist.estimate


def words(plan: Plan) -> set[str]:
    """What a plan uses."""
    kinds: set[str] = {storage.kind for storage in plan.storage.values()}
    return kinds | {"recompute" for _ in plan.recompute[:1]} | {"pipeline" for _ in plan.meshes[1:2]}


def require_all_equal(
    model: str, cluster_name: str, share: float, num_finalists: int, *, variants: tuple[str, ...] = (), **pinned: int
) -> set[str]:
    """All finalists of a search with memory between what the smallest plan needs and what the fastest one fills, at
    this share of the way; returns what they use."""
    own, used = planner(model, cluster_name), set[str]()
    free = best_of(model, cluster_name, Wishes(variants=variants, **pinned), num_finalists)
    best, limit = free, own.device_bytes(Wishes())
    if share < 1:
        least, most = least_memory(own, Wishes(**pinned)), free.winner.memory_bytes
        assert least is not None
        limit = int(least.num_bytes + share * (most - least.num_bytes))
        wishes = Wishes(memory_bytes=limit, variants=variants, **pinned)
        best = best_of(model, cluster_name, wishes, num_finalists)
        print(
            f"{model} on {cluster_name}: the least {least.num_bytes:,.0f}, the fastest {most:,}, limit {limit:,} bytes"
        )
    for finalist in best.finalists:
        assert finalist.memory_bytes <= limit
        require_estimate(own, finalist)
        require_equal_to_one_device(model, finalist.plan)
        used |= words(finalist.plan)
    return used


@pytest.mark.parametrize(
    ("model", "cluster_name", "share", "pinned", "expected"),
    [
        ("gpt", "two-by-two", 1.0, {}, set()),
        ("llama", "three-levels", 1.0, {"tp": 2, "tp2": 2}, set()),
        ("gpt", "two-by-two", 0.8, {"dp": 4}, {"zero1"}),
        ("gpt-deep", "flat", 0.8, {"pp": 2, "micro": 4, "dp": 2}, {"pipeline"}),
        ("zoo/gshard_moe", "two-by-two", 0.5, {"dp": 2, "tp": 2, "micro": 1}, set()),
    ],
)
def test_finalists_are_equal_to_one_device(
    model: str, cluster_name: str, share: float, pinned: dict[str, int], expected: set[str]
) -> None:
    used = require_all_equal(model, cluster_name, share, 2, **pinned)
    assert expected <= used, used


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.7, 0.4, 0.1])
@pytest.mark.parametrize("cluster_name", ["flat", "two-by-two", "three-levels"])
@pytest.mark.parametrize("model", ["gpt", "llama", "gpt-deep", "llama-deep", "zoo/gshard_moe", "zoo/mixtral"])
def test_finalists_of_many_searches(model: str, cluster_name: str, share: float) -> None:
    try:
        require_all_equal(model, cluster_name, share, 4, variants=VARIANTS)
    except PlanError as error:
        if share == 1.0 or "fits into memory" not in error.what:
            raise
        pytest.skip(f"nothing fits: {error.given}")


def test_zero1_takes_the_place_of_what_is_scattered_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found with an estimate that hides all that is gathered, and so prefers ZeRO-3 where the simulator does not."""
    monkeypatch.setattr("planloom.search.parameters._HIDDEN", 1e6)
    own, wishes = planner("gpt-deep", "flat"), Wishes(dp=4, tp=1, pp=1, micro=2, variants=())
    with monkeypatch.context() as without:
        without.setattr("planloom.search.finalists._with_zero1", lambda *_: None)
        before = best_of("gpt-deep", "flat", wishes, 2).winner
    best = best_of("gpt-deep", "flat", wishes, 2)
    assert {"zero2", "zero3"} & words(before.plan)
    assert not {"zero2", "zero3"} & words(best.winner.plan)
    assert best.winner.step_seconds < before.step_seconds
    require_estimate(own, best.winner)
    require_equal_to_one_device("gpt-deep", best.winner.plan)


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved", "gpipe"])
def test_plans_of_other_schedules_are_equal_to_one_device(schedule: str) -> None:
    own, wishes = planner("gpt-deep", "two-by-two"), Wishes(schedule=schedule, pp=2, micro=4, variants=())
    best = best_of("gpt-deep", "two-by-two", wishes, 2)
    for finalist in best.finalists:
        assert finalist.plan.schedule == schedule
        require_estimate(own, finalist)
        require_equal_to_one_device("gpt-deep", finalist.plan)
