"""Variants beside the proven space: each kind is taken where it wins, is equal to one device, and keeps the pins."""

import json
import sys
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from planloom.cli import main
from planloom.cluster import Cluster, cluster_from_yaml
from planloom.cost import Price, Prices
from planloom.errors import PlanError
from planloom.plan import edit
from planloom.program import build_program
from planloom.search import Best, BlockPin, NothingFitsError, Planner, Wishes, estimate_plan, find_best
from planloom.search.space import VARIANTS
from planloom.search.variants import Ground
from planloom.search.written_variants import propose_recycled
from planloom.simulate import simulate
from tests.dist.cases import captured
from tests.torch.equality import require_equal_to_one_device
from tests.torch.searches import DEVICE, spec

TENSOR_PARALLEL = (
    BlockPin(pattern="layers.*", dim="heads", axis="tp"),
    BlockPin(pattern="layers.*.up*", dim="out", axis="tp"),
    BlockPin(pattern="layers.*.down*", dim="in", axis="tp"),
)
"""Without them the axis would split the batch, where links are slow."""


class CertainPrices(Prices):
    """Runs as if they were measured closely."""

    def run(self, *given: Any, **named: Any) -> Price:
        return replace(super().run(*given, **named), uncertainty=0.02)

    def step(self, *given: Any, **named: Any) -> Price:
        return replace(super().step(*given, **named), uncertainty=0.02)


@cache
def flat(num_devices: int, bandwidth: str) -> Cluster:
    level = f"  - {{name: device, count: {num_devices}, link: {{bandwidth: {bandwidth}, latency: 20 us}}}}\n"
    return cluster_from_yaml("name: flat\nlibrary: gloo\nlevels:\n" + level + DEVICE, name="flat")


def best_of(model: str, machine: Cluster, *, certain: bool = False, **wishes: Any) -> Best:
    """In float64, so that what is found can be run against one device; what holds for every search is asked here."""
    blocks = captured(model, torch.float64)
    planner = Planner(blocks, machine, fused=False)
    prices = (CertainPrices if certain else Prices)(blocks=blocks, cluster=machine)
    best = find_best(planner, prices, spec(model), Wishes(**wishes))
    assert [own.step_seconds for own in best.finalists] == sorted(own.step_seconds for own in best.finalists)
    for own in best.finalists:
        assert own.memory_bytes <= planner.device_bytes(Wishes(**wishes))
        if own.variant:
            assert own.estimate is None
        else:
            assert estimate_plan(own.plan, planner.network, planner.works, machine) == own.estimate
    taken = [trial.step_seconds for trial in best.trials.tried if trial.outcome == "wins"]
    assert all(own.step_seconds in taken for own in best.finalists if own.variant)
    return best


def proven_step(best: Best) -> float:
    return min(own.step_seconds for own in best.finalists if not own.variant)


def test_chunks_are_taken_over_a_slow_link_and_not_over_a_fast_one() -> None:
    pinned: dict[str, Any] = {"tp": 2, "pp": 1, "dp": 1, "micro": 1, "pins": TENSOR_PARALLEL, "variants": ("chunks",)}
    slow = best_of("gpt-wide", flat(2, "20 MB/s"), certain=True, **pinned)
    assert slow.winner.variant == "chunks"
    assert slow.winner.step_seconds < 0.98 * proven_step(slow)
    (axis,) = slow.winner.plan.times
    assert axis.order == "runs"
    require_equal_to_one_device("gpt-wide", slow.winner.plan)
    fast = best_of("gpt-wide", flat(2, "20 GB/s"), certain=True, **pinned)
    assert not fast.winner.variant
    assert not fast.trials.tried
    assert "a device waits" in fast.trials.left_out["chunks"]


def test_chunks_are_not_taken_where_prices_are_more_uncertain_than_the_gain() -> None:
    pinned: dict[str, Any] = {"tp": 2, "pp": 1, "dp": 1, "micro": 1, "pins": TENSOR_PARALLEL, "variants": ("chunks",)}
    best = best_of("gpt-wide", flat(2, "20 MB/s"), **pinned)
    assert not best.winner.variant
    assert best.winner.timeline.summary is not None
    assert best.winner.timeline.summary.uncertainty > 0.2
    assert all(trial.outcome in ("gains too little", "slower", "refused") for trial in best.trials.tried)


def test_co_shard_is_proposed_where_nothing_else_fits() -> None:
    machine, pinned = flat(2, "20 MB/s"), {"tp": 2, "dp": 1, "pp": 1, "memory_bytes": 4 << 20}
    best = best_of("gpt-long", machine, **pinned)
    assert [own.variant for own in best.finalists] == ["co-shard"]
    assert not best.certificate.has_plans
    (axis,) = best.winner.plan.times
    assert axis.order == "pieces"
    assert axis.recompute
    require_equal_to_one_device("gpt-long", best.winner.plan)
    with pytest.raises(NothingFitsError, match="no plan fits into memory"):
        best_of("gpt-long", machine, variants=(), **pinned)
    with pytest.raises(NothingFitsError, match="no plan fits into memory"):
        best_of("gpt-long", machine, recompute=False, **pinned)


def test_a_ring_is_taken_where_heads_do_not_divide() -> None:
    best = best_of("gpt-three-heads", flat(2, "100 MB/s"))
    assert best.winner.variant == "rings"
    assert best.winner.step_seconds < 0.99 * proven_step(best)
    require_equal_to_one_device("gpt-three-heads", best.winner.plan)


def test_an_interlaced_pipeline_is_taken_for_a_large_vocabulary() -> None:
    best = best_of("gpt-words", flat(2, "100 MB/s"), pp=2, micro=8)
    assert best.winner.variant == "interlaced"
    assert best.winner.plan.num_micro_batches == 8
    assert len(best.winner.plan.roles) == 2
    assert len(best.winner.plan.groups) == 3
    require_equal_to_one_device("gpt-words", best.winner.plan)


def test_another_schedule_is_taken_where_it_is_faster_and_none_where_one_is_pinned() -> None:
    pinned: dict[str, Any] = {"pp": 2, "micro": 8, "dp": 1}
    best = best_of("gpt-deep", flat(2, "1 GB/s"), variants=("schedules",), **pinned)
    tried = {trial.name.rpartition(",")[2]: trial for trial in best.trials.tried}
    assert set(tried) == {"chimera", "zb-v", "dualpipe-v"}
    assert best.winner.variant == "schedules"
    assert best.winner.plan.schedule in tried
    require_equal_to_one_device("gpt-deep", best.winner.plan)
    again = best_of("gpt-deep", flat(2, "1 GB/s"), schedule="1f1b", **pinned)
    assert {own.plan.schedule for own in again.finalists} == {"1f1b"}
    assert again.trials.left_out["schedules"] == "the schedule is pinned"


def test_a_model_that_recycles_is_tried_with_its_own_schedule() -> None:
    """Made without a search, which takes long for this model."""
    machine = flat(2, "1 GB/s")
    planner = Planner(captured("recycled", torch.float64), machine, fused=False)
    wishes = Wishes(pp=2, dp=1, micro=4)
    ground = Ground(
        planner=planner, wishes=wishes, batch=spec("recycled"), finalists=(), with_more_memory=tuple, num_shapes=2
    )
    (variant,) = propose_recycled(ground).variants
    plan = variant.ways[0]().plan(variant.name)
    assert (plan.schedule, plan.num_micro_batches, len(plan.roles)) == ("3f1b", 4, 2)
    require_equal_to_one_device("recycled", plan)


@pytest.mark.slow
def test_the_schedule_of_a_model_that_recycles_is_taken() -> None:
    best = best_of("recycled", flat(2, "1 GB/s"), pp=2, dp=1, tp=1, micro=8)
    assert best.winner.variant == "3f1b"
    require_equal_to_one_device("recycled", best.winner.plan)


def test_without_variants_the_proven_space_alone_is_searched() -> None:
    with_all = best_of("gpt-three-heads", flat(2, "100 MB/s"))
    without = best_of("gpt-three-heads", flat(2, "100 MB/s"), variants=())
    assert not without.trials.tried
    assert all(own.estimate is not None for own in without.finalists)
    assert proven_step(with_all) == without.winner.step_seconds
    assert with_all.certificate.best_seconds == without.certificate.best_seconds


def test_what_is_pinned_holds_for_variants() -> None:
    pins = (BlockPin(pattern="layers.*.up*", dim="out", axis="tp"),)
    best = best_of("gpt-three-heads", flat(2, "100 MB/s"), pins=pins, storage="zero1", tp=2)
    ring = next(trial for trial in best.trials.tried if trial.kind == "rings")
    assert ring.outcome == "refused"
    assert ring.why == "would not keep what is pinned"
    replicated = best_of("gpt-three-heads", flat(2, "100 MB/s"), storage="replicated", recompute=False)
    assert replicated.winner.variant == "rings"
    assert not replicated.winner.plan.storage
    assert not replicated.winner.plan.recompute


def test_unknown_variants_are_refused_with_those_there_are() -> None:
    with pytest.raises(PlanError, match="rings"):
        Wishes(variants=("ring",))


def test_a_plan_of_variants_has_no_estimate_and_says_so() -> None:
    best = best_of("gpt-three-heads", flat(2, "100 MB/s"), variants=("rings",))
    planner = Planner(captured("gpt-three-heads", torch.float64), flat(2, "100 MB/s"), fused=False)
    with pytest.raises(PlanError, match="has no estimate"):
        estimate_plan(best.winner.plan, planner.network, planner.works, planner.cluster)


def test_a_finished_plan_is_a_starting_point_to_edit() -> None:
    blocks, machine = captured("gpt-three-heads", torch.float64), flat(2, "100 MB/s")
    best = best_of("gpt-three-heads", machine, variants=())
    again = edit(blocks, best.winner.plan).plan(best.winner.plan.name)
    assert replace(again, cluster=best.winner.plan.cluster) == best.winner.plan
    prices = Prices(blocks=blocks, cluster=machine)
    assert simulate(build_program(blocks, best.winner.plan), prices).step_seconds == best.winner.step_seconds


def test_the_command_says_what_was_tried(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan gpt2?batch=8&seq=64&n_layer=2 --cluster two-by-two --pp 2 --dp 2 --micro 4 --variants schedules,rings"

    def told(*more: str) -> str:
        monkeypatch.setattr(sys, "argv", ["planloom", *words.split(), *more])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        return capsys.readouterr().out

    document = json.loads(told("--json"))
    variants = document["variants"]
    assert variants["num_tried"] == len(variants["tried"]) > 0
    assert {trial["kind"] for trial in variants["tried"]} | set(variants["left_out"]) == {"schedules", "rings"}
    assert (document["estimate_seconds"] is None) == (document["variant"] is not None)
    assert "tried beside it, without a proof" in " ".join(told().split())
    assert set(VARIANTS) > {"schedules", "rings"}
