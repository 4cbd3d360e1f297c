"""Solve a batch of problems: the best strategies of every one, under the limit of memory, with a lower bound.

Without a limit elimination is exact. Where its solution does not fit, memory gets a price λ: the solution for a price is
the best of all that hold no more than it does, and its J less λ times the room is a lower bound on every solution that
fits (Lagrange). λ is raised until the solution fits, then bisected.

Stages differ in how many micro-batches they keep, so one price for all is too dear for the later ones. `refine` gives every
stage of a solution its own price, the lowest at which it fits, and cuts anew with what that saves.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planloom.search.conversions import Array
from planloom.search.elimination import Indices, minimize
from planloom.search.figures import Choice, block_figures, exchange_seconds
from planloom.search.space import Candidate
from planloom.search.stages import Estimate, cut_into_stages, estimate_stages, kept_micro_batches
from planloom.search.tables import Tables

_RISES = 12
_CLOSE_ENOUGH = 1.1
_FIRST_PRICE = 2.0**-8
"""Of the price at which all memory costs as much as the step."""
_RISE = 4.0
_REFINEMENTS, _ROUNDS = 8, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """One problem, solved: an estimate, and a lower bound on all plans of its candidate."""

    candidate: Candidate
    choice: Choice
    first_blocks: tuple[int, ...]
    estimate: Estimate
    bound_seconds: float


@dataclass(eq=False, slots=True)
class _Pricing:
    """The search for the best price of memory of one problem: rising until it fits and the step no longer gets shorter,
    then closer and closer around the best. (Beyond the least that fits, stages may become more even.)"""

    price: float
    num_left: int = _RISES
    factor: float = _RISE
    best: Solution | None = None
    best_price: float = 0.0
    around: list[float] = field(default_factory=list)

    def learn(self, solution: Solution | None) -> None:
        """What the last price has shown; the next one."""
        self.num_left -= 1
        is_better = solution is not None and (
            self.best is None or solution.estimate.step_seconds < self.best.estimate.step_seconds
        )
        if is_better:
            self.best, self.best_price = solution, self.price
        if self.best is None or (is_better and self.factor == _RISE and not self.around):
            self.price *= _RISE
            return
        if not self.around:
            if self.factor < _CLOSE_ENOUGH or self.factor == _RISE and self.num_left < 0:
                self.num_left = 0
                return
            self.factor = self.factor**0.5
            self.num_left = max(self.num_left, 2)
            self.around = [self.best_price * self.factor, self.best_price / self.factor]
        self.price = self.around.pop()


class Solver:
    """Solutions of the problems of one batch of tables; `limit_bytes`: what a device has for blocks."""

    def __init__(self, tables: Tables, places: Sequence[int], *, limit_bytes: float) -> None:
        self.tables, self.places, self.limit_bytes = tables, places, limit_bytes
        self.num_stages = tables.shape.num_stages
        self.kept = np.minimum(self.num_stages, tables.num_micro).astype(float)
        everything = np.arange(len(tables.candidates))
        totals, self._chosen, self._options = self._minimized(np.zeros(len(everything)), self.kept, everything)
        self._totals = totals
        self.bounds = totals / self.num_stages
        """A lower bound on the step of every problem."""

    def solve(self, problems: Sequence[int], *, below: float) -> list[Solution]:
        """Of these problems those that fit into memory and may be faster than `below`."""
        found, left = [], []
        for g in problems:
            if self.bounds[g] >= below:
                continue
            solution = self._solution(g, self._chosen[:, g], _column(self._options, g))
            if solution is None:
                left.append(g)
            else:
                found.append(solution)
        return [*found, *self._under_limit(left, below)]

    def _minimized(self, prices: Array, kept: Array, problems: Indices) -> tuple[Array, Indices, Indices]:
        """Sums, and for every variable and problem the choice; for every variable and problem how it is stored."""
        costs = self.tables.costs(prices, kept, problems)
        totals, chosen = minimize(costs.segments, costs.sizes)
        picked = np.stack([chosen[v] for v in range(len(chosen))])
        return totals, picked, costs.options_of(picked)

    def _under_limit(self, problems: Sequence[int], below: float) -> list[Solution]:
        """Raise the price of memory until the solution fits, then lower it as long as it does."""
        scale = _FIRST_PRICE / (self.num_stages * self.limit_bytes)
        pricing = {g: _Pricing(float(self._totals[g]) * scale) for g in problems}
        while True:
            active = [g for g, own in pricing.items() if own.num_left > 0]
            if not active:
                break
            prices = np.array([pricing[g].price for g in active])
            at = np.array(active)
            sums, chosen, options = self._minimized(prices, self.kept[at], at)
            for i, g in enumerate(active):
                self._tighten(g, float(sums[i]), float(prices[i]))
                solution = self._solution(g, chosen[:, i], options[:, i]) if self.bounds[g] < below else None
                pricing[g].learn(solution)
                if self.bounds[g] >= below:
                    pricing[g].num_left = 0
        return [own.best for own in pricing.values() if own.best is not None]

    def _tighten(self, g: int, total: float, price: float) -> None:
        """Lagrange's bound, for every cut: stage s at the price λ · k / k_s, with k_s micro-batches kept there and k in
        the first; then what is saved costs λ · k everywhere, as was counted, and what is stored λ at least."""
        num_micro = self.tables.candidates[g].num_micro
        shares = sum(self.kept[g] / k for k in kept_micro_batches(self.num_stages, num_micro))
        bound = (total - price * self.limit_bytes * shares) / self.num_stages
        self.bounds[g] = max(self.bounds[g], bound)

    def _solution(self, g: int, chosen: Indices, options: Indices) -> Solution | None:
        """Problem g with these choices; None if it does not fit."""
        choice = Choice(variables=chosen, storage=options)
        figures = block_figures(self.tables, g, choice)
        num_micro = self.tables.candidates[g].num_micro
        first = cut_into_stages(figures, self.places, self.num_stages, num_micro, self.limit_bytes)
        if first is None:
            return None
        exchange = exchange_seconds(self.tables, g, choice, first)
        return Solution(
            candidate=self.tables.candidates[g],
            choice=choice,
            first_blocks=first,
            estimate=estimate_stages(figures, first, num_micro, exchange),
            bound_seconds=float(self.bounds[g]),
        )

    # -- a price for every stage

    def refine(self, solution: Solution) -> Solution:
        """The same problem with a price of memory for every stage."""
        if self.num_stages == 1:
            return solution
        g = self.tables.candidates.index(solution.candidate)
        best = solution
        for _ in range(_ROUNDS):
            found = self._with_own_prices(g, best)
            if found is None or found.estimate.step_seconds >= best.estimate.step_seconds:
                break
            best = found
        return best

    def _with_own_prices(self, g: int, solution: Solution) -> Solution | None:
        """For a given cut the lowest price of every stage at which it fits, all bisected at once; then a new cut."""
        tables, num_micro = self.tables, solution.candidate.num_micro
        stage_of = np.searchsorted(np.array(solution.first_blocks), np.arange(len(tables.network.blocks.blocks)), "right") - 1
        kept = np.array(kept_micro_batches(self.num_stages, num_micro), dtype=float)
        low, high = np.zeros(self.num_stages), np.full(self.num_stages, np.inf)
        price = np.zeros(self.num_stages)
        scale = float(self._totals[g]) * _FIRST_PRICE / (self.num_stages * self.limit_bytes)
        best: Solution | None = None
        for _ in range(_REFINEMENTS + _RISES):
            costs = tables.costs(price[:, None], kept[:, None], np.array([g]), stage_of=stage_of)
            _, chosen = minimize(costs.segments, costs.sizes)
            picked = np.stack([chosen[v] for v in range(len(chosen))])
            choice = Choice(variables=picked[:, 0], storage=costs.options_of(picked)[:, 0])
            figures = block_figures(tables, g, choice)
            exchange = exchange_seconds(tables, g, choice, solution.first_blocks)
            held = estimate_stages(figures, solution.first_blocks, num_micro, exchange)
            fits = np.array([stage.num_bytes <= self.limit_bytes for stage in held.stages])
            if fits.all():
                found = self._solution(g, choice.variables, choice.storage)
                if found is not None and (best is None or found.estimate.step_seconds < best.estimate.step_seconds):
                    best = found
            high, low = np.where(fits, np.minimum(high, price), high), np.where(fits, low, np.maximum(low, price))
            rising = np.isinf(high)
            middle = np.where(rising, 0.0, low + np.where(rising, 0.0, high)) / 2
            price = np.where(rising, np.maximum(price * _RISE, scale), np.where(high == 0, 0.0, middle))
            if not rising.any() and np.all(high - low <= 0.05 * np.maximum(high, 1e-300)):
                break
        return best


def _column(options: NDArray[np.intp], g: int) -> Indices:
    return options[:, g]
