"""Solve a batch of problems: the best strategies of every one, under the limit of memory, with a lower bound.

Without a limit elimination is exact. Where its solution does not fit, memory gets a price λ: the solution for a price is
the best of all that hold no more than it does, and its J less λ times the room is a lower bound on every solution that
fits (Lagrange). A row of prices gives every block options from fast to small, and `stages` packs them into stages: each
takes the fastest with which it gets along, and the next one for the last of its layers, so memory is filled up layer by
layer. Prices around those that were taken give finer options, once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from planloom.search.conversions import Array
from planloom.search.elimination import Indices, minimize
from planloom.search.figures import Choice, block_figures, exchange_seconds, with_best_junctions
from planloom.search.space import Candidate
from planloom.search.stages import Estimate, Packing, estimate_stages, kept_micro_batches, pack_stages
from planloom.search.tables import Costs, Tables

_FIRST_PRICE, _FACTOR, _NUM_PRICES = 2.0**-9, 2.0, 14
"""Prices, from a share of the one at which all memory costs as much as the step."""
_ROOMS = (1.0, 0.99, 0.97, 0.93)
"""Shares of the room that are tried where options meet and hold more between them than each by itself."""
_ROUNDS, _FINER = 2, 4
"""Rounds of finer prices between two that were taken, and how many of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """One problem, solved: an estimate, and a lower bound on all plans of its candidate."""

    candidate: Candidate
    choice: Choice
    first_blocks: tuple[int, ...]
    estimate: Estimate
    bound_seconds: float


class Solver:
    """Solutions of the problems of one batch of tables; `limit_bytes`: what a device has for blocks."""

    def __init__(self, tables: Tables, places: Sequence[int], *, limit_bytes: float, recompute: bool = True) -> None:
        self.tables, self.places, self.limit_bytes, self.recompute = tables, places, limit_bytes, recompute
        self.num_stages = tables.shape.num_stages
        self.kept = np.minimum(self.num_stages, tables.num_micro).astype(float)
        everything = np.arange(len(tables.candidates))
        self._free = self._minimized(np.zeros(len(everything)), self.kept, everything, recompute=False)
        """Where memory costs nothing."""
        self.bounds = self._free.totals / self.num_stages
        """A lower bound on the step of every problem."""

    def solve(self, problems: Sequence[int], *, below: float) -> list[Solution]:
        """Of these problems those that fit into memory and may be faster than `below`."""
        found = []
        for g in problems:
            if self.bounds[g] < below:
                solution = self._fitted(g, [self._free.choice(g)])[1] or self._under_limit(g, below)
                if solution is not None:
                    found.append(solution)
        return found

    def _minimized(self, prices: Array, kept: Array, problems: Indices, *, recompute: bool) -> "_Minimized":
        costs = self.tables.costs(prices, kept, problems, recompute=recompute)
        return _Minimized.of(costs)

    def _under_limit(self, g: int, below: float) -> Solution | None:
        """Options for a row of prices of memory, packed into stages."""
        scale = float(self._free.totals[g]) / (self.num_stages * self.limit_bytes)
        prices = [scale * _FIRST_PRICE * _FACTOR**i for i in range(_NUM_PRICES)]
        options = {0.0: self._free.choice(g), **self._at_prices(g, prices)}
        best: Solution | None = None
        for _ in range(1 + _ROUNDS):
            if self.bounds[g] >= below:
                return best
            ordered = sorted(options)
            packing, solution = self._fitted(g, [options[price] for price in ordered])
            if packing is None:
                return best
            if solution is not None and (best is None or solution.estimate.step_seconds < best.estimate.step_seconds):
                best = solution
            taken = sorted({ordered[i] for i in packing.options})
            around = [(low, high) for low, high in pairwise(ordered) if low in taken or high in taken]
            finer = [low + (high - low) * i / _FINER for low, high in around for i in range(1, _FINER)]
            options = {price: own for price, own in options.items() if price in taken or price in sum(around, ())}
            options |= self._at_prices(g, finer)
        return best

    def _at_prices(self, g: int, prices: Sequence[float]) -> dict[float, Choice]:
        """The solutions of one problem for several prices of memory, different ones once each."""
        at = np.full(len(prices), g)
        found = self._minimized(np.array(prices), self.kept[at], at, recompute=self.recompute)
        for total, price in zip(found.totals, prices, strict=True):
            self._tighten(g, float(total), price)
        return {price: found.choice(i) for i, price in enumerate(prices)}

    def _fitted(self, g: int, options: Sequence[Choice]) -> tuple[Packing | None, Solution | None]:
        """The best packing; with less room than there is, if what lies between different options needs some."""
        figures = [block_figures(self.tables, g, self._settled(g, choice)) for choice in options]
        num_micro = self.tables.candidates[g].num_micro
        packing = None
        for share in _ROOMS if len(options) > 1 else _ROOMS[:1]:
            packing = pack_stages(figures, self.places, self.num_stages, num_micro, share * self.limit_bytes)
            solution = self._solution(g, options, packing) if packing is not None else None
            if packing is None or solution is not None:
                return packing, solution
        return packing, None

    def _settled(self, g: int, choice: Choice) -> Choice:
        return replace(choice, variables=with_best_junctions(self.tables, g, choice.variables))

    def _tighten(self, g: int, total: float, price: float) -> None:
        """Lagrange's bound, for every cut: stage s at the price λ · k / k_s, with k_s micro-batches kept there and k in
        the first; then what is saved costs λ · k everywhere, as was counted, and what is stored λ at least."""
        num_micro = self.tables.candidates[g].num_micro
        shares = sum(self.kept[g] / k for k in kept_micro_batches(self.num_stages, num_micro))
        bound = (total - price * self.limit_bytes * shares) / self.num_stages
        self.bounds[g] = max(self.bounds[g], bound)

    def _solution(self, g: int, options: Sequence[Choice], packing: Packing) -> Solution | None:
        """Problem g with every block's option; None if what lies between different options makes it too large."""
        choice = self._settled(g, self._merged(options, packing))
        figures = block_figures(self.tables, g, choice)
        exchange = exchange_seconds(self.tables, g, choice, packing.first_blocks)
        num_micro = self.tables.candidates[g].num_micro
        estimate = estimate_stages(figures, packing.first_blocks, num_micro, exchange)
        if estimate.num_bytes > self.limit_bytes:
            return None
        return Solution(
            candidate=self.tables.candidates[g],
            choice=choice,
            first_blocks=packing.first_blocks,
            estimate=estimate,
            bound_seconds=float(self.bounds[g]),
        )

    def _merged(self, options: Sequence[Choice], packing: Packing) -> Choice:
        """Every block with the choices of its option; a segment is recomputed if the option of any of its blocks says so."""
        network = self.tables.network
        of_variable = np.array(packing.options)[[v.block for v in network.variables]]
        at = np.arange(len(of_variable))
        segments = network.segment_of_block
        recomputed = np.zeros(len(network.chain), dtype=bool)
        flags = np.stack([o.recomputed for o in options])[np.array(packing.options), segments]
        np.logical_or.at(recomputed, segments, flags)
        return Choice(
            variables=np.stack([o.variables for o in options])[of_variable, at],
            storage=np.stack([o.storage for o in options])[of_variable, at],
            recomputed=recomputed,
        )


@dataclass(frozen=True, eq=False, slots=True)
class _Minimized:
    """Minima of several problems: sums; (variables, problems) → choices and ways to store; (segments, problems)."""

    totals: Array
    variables: Indices
    storage: Indices
    recomputed: Indices

    @staticmethod
    def of(costs: Costs) -> "_Minimized":
        found = minimize(costs.segments, costs.sizes)
        picked = np.stack([found.variables[v] for v in range(len(found.variables))])
        return _Minimized(found.totals, picked, costs.options_of(picked), np.stack(found.alternatives))

    def choice(self, i: int) -> Choice:
        return Choice(
            variables=self.variables[:, i], storage=self.storage[:, i], recomputed=self.recomputed[:, i].astype(bool)
        )
