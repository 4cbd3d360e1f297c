"""The best plan for a model on a cluster: search, then finalists; measured, and searched again."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planloom.cost import Prices
from planloom.search.finalists import Finalist, simulate_finalists
from planloom.search.finished import estimate_plan
from planloom.search.infeasible import nothing_fits
from planloom.search.measured import estimate_sources, learned_ratios
from planloom.search.planner import Certificate, Planner
from planloom.search.space import Wishes
from planloom.search.stages import Estimate
from planloom.search.trying import Trials, try_variants
from planloom.search.work import Measured
from planloom.simulate import simulate

BatchSpec = Mapping[str, tuple[tuple[int, ...], str]]
Progress = Callable[[str, int, int], None]
NUM_FINALISTS = 4
_ROUNDS = 6
"""Searches at most, where each has something more measured. What is not measured yet is often modelled too fast, so
that every search finds plans with something unmeasured; in the end the best that are measured stand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The finalists by simulated step, fastest first; the certificate of the search; and what dropped out, and why.

    A finalist without an estimate is a variant: it was tried beside the space that the certificate is about.
    """

    finalists: tuple[Finalist, ...]
    certificate: Certificate
    refused: tuple[tuple[str, str], ...] = ()
    num_rounds: int = 1
    """How often it was searched: again, where something more was measured."""
    sources: Mapping[str, int] = field(default_factory=dict)
    """How many blocks have a measured, an interpolated and a modelled price in the estimate of the fastest plan that
    has one."""
    measured: Measured = field(default_factory=Measured)
    """What the estimates were priced with, besides the model."""
    trials: Trials = field(default_factory=Trials)
    """What was tried beside the proven space."""

    @property
    def winner(self) -> Finalist:
        return self.finalists[0]


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

    def simulated(done: int, total: int) -> None:
        if progress is not None:
            progress("simulating finalists", done, total)

    started = _cpu_seconds()
    finalists = simulate_finalists(
        planner, found, prices, batch, wishes, num_finalists=num_finalists, progress=simulated
    )
    each_seconds = (_cpu_seconds() - started) / max(1, len(finalists.fitting))
    won, trials = try_variants(
        planner, finalists.fitting, prices, batch, wishes,
        seconds=found.certificate.search_seconds, each_seconds=each_seconds, progress=progress,
    )  # fmt: skip
    if not finalists.fitting and not won:
        raise nothing_fits(planner, wishes, finalists.refused, too_large=finalists.too_large, progress=progress)
    return Best(
        finalists=_with_variants(finalists.fitting, won, num_finalists),
        certificate=found.certificate,
        refused=finalists.refused,
        trials=trials,
    )


def _cpu_seconds() -> float:
    """Of this process and of those that it had: what others do on the machine does not change it."""
    return sum(os.times()[:4])


def _with_variants(fitting: Sequence[Finalist], won: Sequence[Finalist], num_finalists: int) -> tuple[Finalist, ...]:
    """Both by simulated step."""
    ordered = sorted([*fitting, *won], key=lambda own: (own.step_seconds, own.plan.name, own.placement))
    return _first(ordered, num_finalists)


def _first(ordered: Sequence[Finalist], count: int) -> tuple[Finalist, ...]:
    """So many; the first of the proven space is among them."""
    proven = [own for own in ordered if not own.variant][:1]
    kept = list(ordered[:count])
    return tuple([*kept[:-1], *proven] if proven and proven[0] not in kept else kept)


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
        new = [own for own in best.finalists if all(own.plan != other.plan for other in pool)]
        pool += [own for own in new if not own.variant]  # what variants gain is asked anew in every round
        known = measure(best.finalists) if measure is not None else prices
        ratios = learned_ratios(planner.works, [finalist.program for finalist in pool], known)
        learned = Measured(figures=known.measured, ratios=ratios)
        if learned == planner.works.measured or number == _ROUNDS:
            break
        planner = planner.with_measured(learned)
    if number > 1:
        pool += [own for own in best.finalists if own.variant]
        pool = _ranked_again(planner, pool, known, must_be_measured=measure is not None)
        best = replace(best, finalists=_first(pool, num_finalists))
    estimated = next((own for own in best.finalists if own.estimate is not None), None)
    sources = estimate_sources(estimated.plan, planner.network, planner.works) if estimated is not None else {}
    return replace(best, num_rounds=number, sources=sources, measured=planner.works.measured)


def _estimated(own: Finalist, planner: Planner) -> Estimate | None:
    """With the measurements of the last round; a variant has none."""
    return None if own.variant else estimate_plan(own.plan, planner.network, planner.works, planner.cluster)


def _ranked_again(
    planner: Planner, pool: Sequence[Finalist], prices: Prices, *, must_be_measured: bool
) -> list[Finalist]:
    """Finalists of several rounds, with the estimates and the simulated steps that go with what is known now."""
    found = [
        replace(
            own,
            timeline=simulate(own.program, prices, with_events=False),
            estimate=_estimated(own, planner),
        )
        for own in pool
    ]

    def rank(own: Finalist) -> tuple[bool, float, str, str]:
        is_open = must_be_measured and not all(prices.is_measured(own.program, run) for run in own.program.runs)
        return is_open, own.step_seconds, own.plan.name, own.placement

    return sorted(found, key=rank)
