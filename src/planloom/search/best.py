"""The best plan for a model on a cluster: search, finalists, and what to say if nothing fits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from planloom.cluster import format_bytes
from planloom.cost import Prices
from planloom.errors import PlanError
from planloom.search.figures import block_figures
from planloom.search.finalists import Finalist, simulate_finalists
from planloom.search.finished import estimate_plan
from planloom.search.measured import estimate_sources, learned_ratios
from planloom.search.planner import Certificate, Planner, promising_first
from planloom.search.solutions import Solver
from planloom.search.space import Candidate, Shape, Wishes
from planloom.search.stages import Packing, pack_stages
from planloom.search.work import Measured
from planloom.simulate import simulate

BatchSpec = Mapping[str, tuple[tuple[int, ...], str]]
Progress = Callable[[str, int, int], None]
NUM_FINALISTS = 4
_DEAR = 1e6
"""A price of memory at which nothing but memory counts."""
_ROUNDS = 6
"""Searches at most, where each has something more measured. What is not measured yet is often modelled too fast, so
that every search finds plans with something unmeasured; in the end the best that are measured stand."""
_BISECTIONS, _ROUNDING = 24, 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The finalists by simulated step, fastest first; the certificate of the search; and what dropped out, and why."""

    finalists: tuple[Finalist, ...]
    certificate: Certificate
    refused: tuple[tuple[str, str], ...] = ()
    num_rounds: int = 1
    """How often it was searched: again, where something more was measured."""
    sources: Mapping[str, int] = field(default_factory=dict)
    """Of the winner's estimate: how many blocks have a measured, an interpolated and a modelled price."""
    measured: Measured = field(default_factory=Measured)
    """What the estimates were priced with, besides the model."""

    @property
    def winner(self) -> Finalist:
        return self.finalists[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """The plan that needs the least memory: its shape, and the bytes of its fullest stage by part."""

    shape: Shape
    num_micro: int
    num_bytes: float
    stage: int
    stored_bytes: float
    saved_bytes: float
    peak_bytes: float
    given_bytes: float

    @property
    def words(self) -> str:
        parts = {
            "parameters, gradients and optimizer": self.stored_bytes,
            "saved activations": self.saved_bytes,
            "temporaries": self.peak_bytes,
            "the batch": self.given_bytes,
        }
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
        return f"{self.shape}, {self.num_micro} micro-batches: stage {self.stage} holds {listed}"


def find_best(
    planner: Planner,
    prices: Prices,
    batch: BatchSpec,
    wishes: Wishes | None = None,
    *,
    num_finalists: int = NUM_FINALISTS,
    progress: Progress | None = None,
) -> Best:
    """Search, then simulate the best; an error says what binds if nothing fits."""
    wishes = wishes or Wishes()
    found = planner.search(wishes, num_wanted=2 * num_finalists, progress=progress)
    if not found.ranked:
        raise nothing_fits(planner, wishes)

    def simulated(done: int, total: int) -> None:
        if progress is not None:
            progress("simulating finalists", done, total)

    finalists = simulate_finalists(
        planner, found, prices, batch, wishes, num_finalists=num_finalists, progress=simulated
    )
    if not finalists.fitting:
        raise nothing_fits(planner, wishes, reasons=tuple(f"{shape} {why}" for shape, why in finalists.refused))
    return Best(finalists=finalists.fitting, certificate=found.certificate, refused=finalists.refused)


def find_best_measured(
    planner: Planner,
    prices: Prices,
    batch: BatchSpec,
    wishes: Wishes | None = None,
    *,
    measure: Callable[[Sequence[Finalist]], Prices] | None = None,
    num_finalists: int = NUM_FINALISTS,
    progress: Progress | None = None,
) -> Best:
    """Search with what is known, have measured what the finalists use, and search again until nothing new is learned.

    `measure(finalists)` measures what is not known of them and gives prices from all that is known then; without it,
    what a profile knows of the finalists' runs is learned. After `_ROUNDS` the last search stands. The finalists of all
    rounds are ranked once more with all that is known: those with nothing unmeasured first, if measuring was wanted.
    """
    pool: list[Finalist] = []
    planner, known = planner.with_measured(Measured(figures=prices.measured)), prices
    for number in range(1, _ROUNDS + 1):
        best = find_best(planner, known, batch, wishes, num_finalists=num_finalists, progress=progress)
        pool += [own for own in best.finalists if all(own.plan != other.plan for other in pool)]
        known = measure(best.finalists) if measure is not None else prices
        ratios = learned_ratios(planner.works, [finalist.program for finalist in pool], known)
        learned = Measured(figures=known.measured, ratios=ratios)
        if learned == planner.works.measured or number == _ROUNDS:
            break
        planner = planner.with_measured(learned)
    if number > 1:
        pool = _ranked_again(planner, pool, known, must_be_measured=measure is not None)
        best = replace(best, finalists=tuple(pool[:num_finalists]))
    sources = estimate_sources(best.winner.plan, planner.network, planner.works)
    return replace(best, num_rounds=number, sources=sources, measured=planner.works.measured)


def _ranked_again(
    planner: Planner, pool: Sequence[Finalist], prices: Prices, *, must_be_measured: bool
) -> list[Finalist]:
    """Finalists of several rounds, with the estimates and the simulated steps that go with what is known now."""
    found = [
        replace(
            own,
            timeline=simulate(own.program, prices, with_events=False),
            estimate=estimate_plan(own.plan, planner.network, planner.works, planner.cluster),
        )
        for own in pool
    ]

    def rank(own: Finalist) -> tuple[bool, float, str, str]:
        is_open = must_be_measured and not all(prices.is_measured(own.program, run) for run in own.program.runs)
        return is_open, own.step_seconds, own.plan.name, own.placement

    return sorted(found, key=rank)


def nothing_fits(planner: Planner, wishes: Wishes, reasons: tuple[str, ...] = ()) -> PlanError:
    """What binds, and the least memory that would do."""
    least = least_memory(planner, wishes)
    if least is None:
        return PlanError(
            "no plan divides the model and the batch",
            given="; ".join(dict.fromkeys(reasons)) or f"{planner.cluster.num_devices} devices, batch {planner.batch}",
            required="degrees that divide the batch, and dims of the model",
            todo="change the global batch, the number of devices or what is pinned",
        )
    limit = planner.device_bytes(wishes)
    if reasons:
        return PlanError(
            "no plan fits into memory: some do by the estimate, but none does when simulated",
            given="; ".join(dict.fromkeys(reasons)),
            required=f"at most {format_bytes(limit)} on each of {planner.cluster.num_devices} devices",
            todo="use more devices, or a smaller global batch",
        )
    fewer = "allow recomputation (no --no-recompute), " if not wishes.recompute else ""
    return PlanError(
        "no plan fits into memory",
        given=f"{format_bytes(limit)} usable on each of {planner.cluster.num_devices} devices; the smallest plan is "
        + least.words,
        required=f"{format_bytes(least.num_bytes)} on each",
        todo=f"{fewer}use more devices (planloom fit says how many), or a smaller global batch",
    )


def least_memory(planner: Planner, wishes: Wishes, *, enough: float = 0.0) -> LeastMemory | None:
    """The plan that needs the least memory, by the estimate, or the first that needs no more than `enough` bytes.

    Of the space only shapes with one free axis are looked at: a second one splits no tensor further than a larger first
    one could. None if nothing divides.
    """
    space = planner.space(wishes)
    few = [shape for shape in space.shapes if sum(kind == "free" for kind in shape.kinds) <= 1] or space.shapes
    best: LeastMemory | None = None
    for shape in promising_first(few, planner.cluster, planner.batch):
        for num_micro in reversed(space.micro_batches):
            placement = space.placements(planner.cluster, shape)[0]
            candidate = Candidate(shape=shape, placement=placement, num_micro=num_micro)
            found = _least_of(planner, candidate, wishes)
            if found is not None:
                best = found if best is None or found.num_bytes < best.num_bytes else best
                break
        if best is not None and best.num_bytes <= enough:
            break
    return best


def _least_of(planner: Planner, candidate: Candidate, wishes: Wishes) -> LeastMemory | None:
    tables = planner.tables([candidate], wishes)
    if not tables.is_possible:
        return None
    limit = planner.limit_bytes(wishes)
    solver = Solver(tables, planner.places, limit_bytes=max(limit, 1.0), recompute=wishes.recompute)
    if not np.isfinite(solver.bounds[0]):
        return None
    choice = solver.smallest(0, _DEAR)
    figures = block_figures(tables, 0, choice)
    num_stages = candidate.shape.num_stages
    everything = figures.stored_bytes.sum() + num_stages * figures.saved_bytes.sum() + figures.peak_bytes.max()

    def packed(num_bytes: float) -> Packing | None:
        return pack_stages([figures], planner.places, candidate.num_micro, [num_bytes] * num_stages)

    low, high = 0.0, float(everything) * (1 + _ROUNDING)
    packing = packed(high)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        found = packed(middle)
        low, high = (low, middle) if found is not None else (middle, high)
        packing = found or packing
    if packing is None:
        return None
    estimate = solver.estimate(0, choice, packing.first_blocks)
    fullest = max(range(len(estimate.stages)), key=lambda s: estimate.stages[s].num_bytes)
    stage, given = estimate.stages[fullest], planner.device_bytes(wishes) - limit
    return LeastMemory(
        shape=candidate.shape,
        num_micro=candidate.num_micro,
        num_bytes=stage.num_bytes + given,
        stage=fullest,
        stored_bytes=stage.stored_bytes,
        saved_bytes=stage.kept_micro * stage.saved_bytes,
        peak_bytes=stage.peak_bytes,
        given_bytes=given,
    )
