"""Measured prices inside the search: what is measured of the finalists changes what is chosen, and adds up again."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from planloom.cost import Prices
from planloom.cost.keys import run_fingerprint, run_key
from planloom.program import Program, Run
from planloom.search import Finalist, Planner, Wishes, estimate_plan, find_best_measured
from planloom.search.measured import learned_ratios, run_members
from planloom.search.work import Measured, WorkPrices, single_run
from tests.torch.searches import planner, spec


class FakeLab:
    """Measures every run of finalists as a multiple of what is modelled: `slow` of the runs that it says are slow."""

    def __init__(self, own: Planner, *, slow_axis: str, factor: float) -> None:
        self.planner, self.slow_axis, self.factor = own, slow_axis, factor
        self.modelled = Prices(blocks=own.blocks, cluster=own.cluster)
        self.figures: dict[str, float] = {}
        self.num_calls = 0

    def __call__(self, finalists: Sequence[Finalist]) -> Prices:
        self.num_calls += 1
        for finalist in finalists:
            for run in finalist.program.runs:
                self._measure(finalist.program, run)
        return replace(self.modelled, measured=dict(self.figures))

    def _measure(self, program: Program, run: Run) -> None:
        axes = {digit.axis for part in run.blocks for _, digits in part.splits for digit in digits}
        factor = self.factor if self.slow_axis in axes else 1.0
        fingerprint = run_fingerprint(self.planner.blocks, program, run)
        for phase in ("forward", "backward"):
            seconds = self.modelled.run(program, run, phase).seconds  # type: ignore[arg-type]
            self.figures.setdefault(run_key(fingerprint, phase), factor * seconds)  # type: ignore[arg-type]


def works_with(own: Planner, measured: Measured) -> WorkPrices:
    return WorkPrices(own.blocks, own.cluster.device, fused=False, measured=measured)


@pytest.mark.parametrize(("model", "cluster_name"), [("gpt", "two-by-two"), ("llama", "flat")])
def test_searching_and_measuring_end_with_all_finalists_measured_and_equal_estimates(
    model: str, cluster_name: str
) -> None:
    own = planner(model, cluster_name)
    lab = FakeLab(own, slow_axis="tp", factor=2.0)
    prices = Prices(blocks=own.blocks, cluster=own.cluster)
    best = find_best_measured(own, prices, spec(model), Wishes(pp=1, micro=1), measure=lab)
    known = replace(prices, measured=lab.figures)
    works = works_with(own, best.measured)
    for finalist in best.finalists:
        assert all(known.is_measured(finalist.program, run) for run in finalist.program.runs)
        if finalist.variant:
            assert finalist.estimate is None
        else:
            assert estimate_plan(finalist.plan, own.network, works, own.cluster) == finalist.estimate
    assert best.num_rounds == lab.num_calls > 1
    steps = [finalist.step_seconds for finalist in best.finalists]
    assert steps == sorted(steps)
    assert sum(best.sources.values()) == len(own.blocks.blocks)
    assert best.sources["measured"] + best.sources["interpolated"] > 0


def test_what_is_measured_changes_what_is_chosen() -> None:
    own = planner("gpt", "two-by-two")
    prices = Prices(blocks=own.blocks, cluster=own.cluster)
    wishes = Wishes(pp=1, micro=1, variants=())
    modelled = find_best_measured(own, prices, spec("gpt"), wishes)
    assert (modelled.num_rounds, modelled.sources["modelled"]) == (1, len(own.blocks.blocks))
    axis = max(axis.name for axis in modelled.winner.plan.meshes[0].axes)
    slow = FakeLab(own, slow_axis=axis, factor=50.0)
    best = find_best_measured(own, prices, spec("gpt"), wishes, measure=slow)
    assert best.winner.plan.strategies != modelled.winner.plan.strategies
    assert best.winner.step_seconds < 50 * modelled.winner.step_seconds


def test_the_ratios_of_a_run_add_up_to_what_it_took() -> None:
    own = planner("gpt", "two-by-two")
    prices = Prices(blocks=own.blocks, cluster=own.cluster)
    best = find_best_measured(own, prices, spec("gpt"), Wishes(pp=1, variants=()))
    program = best.winner.program
    run = max(program.runs, key=lambda r: len(r.blocks))
    assert len(run.blocks) > 1
    fingerprint = run_fingerprint(own.blocks, program, run)
    took = {run_key(fingerprint, "forward"): 0.25, run_key(fingerprint, "backward"): 0.5}
    known = replace(prices, measured=took)
    ratios = learned_ratios(own.works, [program], known)
    assert set(ratios) == set(run_members(own.works, program, run))
    works = works_with(own, Measured(figures=took, ratios=ratios))
    members = run_members(works, program, run)
    blocks = [own.blocks.blocks[part.block] for part in run.blocks]
    priced = [works.work(block, pieces) for block, (_, pieces) in zip(blocks, members, strict=True)]
    assert {work.source for work in priced} == {"interpolated"}
    assert sum(work.forward_seconds for work in priced) == pytest.approx(0.25)
    assert sum(work.backward_seconds for work in priced) == pytest.approx(0.5)


def test_a_block_that_was_measured_by_itself_has_that_price_and_others_have_not() -> None:
    own = planner("gpt", "two-by-two")
    block = next(b for b in own.blocks.blocks if b.parameters and len(b.dims) > 1)
    pieces = (2, *(1 for _ in block.dims[1:]))
    run = single_run(own.blocks, block, pieces)
    alone = Program(plan_name="", num_micro_batches=1, stages=(), runs=(run,))
    fingerprint = run_fingerprint(own.blocks, alone, run)
    figures = {run_key(fingerprint, "forward"): 0.125, run_key(fingerprint, "backward"): 0.375}
    works = works_with(own, Measured(figures=figures))
    work = works.work(block, pieces)
    assert (work.forward_seconds, work.backward_seconds, work.source) == (0.125, 0.375, "measured")
    whole = (1,) * len(block.dims)
    assert works.work(block, whole) == own.works.work(block, whole)
