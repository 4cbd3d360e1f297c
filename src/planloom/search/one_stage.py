"""One stage under a limit of memory: Lagrange's bound for ranges of the peak, then labels where it is not close enough.

A plan holds  Σ bytes + peak ≤ limit,  the peak being that of the largest block. The sum has a price, a maximum has
none: so plans are told apart by the range in which their peak lies. In a range (low, high] all choices with a
larger peak are forbidden, and for a price λ

    seconds ≥ J(λ) - λ · (limit - low),    J with these choices only,

which is concave in λ: the best price is found by looking closer around the best so far, for all ranges at once. In
ranges whose bound is not close enough to the best solution known, labels look for better ones (`labels`).
"""

from itertools import pairwise

import numpy as np

from planloom.search.conversions import Array
from planloom.search.elimination import minimize
from planloom.search.labels import LabelResult, LabelSearch
from planloom.search.tables import Tables

TOLERANCE = 0.01
"""Of the best solution: a bound that is no further below is close enough."""
_NUM_RANGES, _RANGE = 8, 1 / 32
"""Ranges of the peak, from the least on, and their width in shares of the limit; the last one is what remains."""
_PRICES = tuple(2.0**power for power in (*range(-12, 7), 20))
"""In shares of the price at which all memory costs as much as the step; at the last one only memory counts."""
_ROUNDS, _FINER = 3, 4
_DEARER = (1, 2, 4)
"""The prices of labels, in shares of the best one: at dear ones what would not fit is found out early."""
_MORE = 1.001
_LABELS = ((64, TOLERANCE), (2000, TOLERANCE), (20_000, 2 * TOLERANCE))
"""How many labels are kept at a time, and for bounds that are how far off: few for a first solution, more until the
bound is close; most, which took 38 s for GPT-OSS-120B (2026-11-19), only where it is not even twice as far."""


def best_of_one_stage(
    tables: Tables, g: int, limit_bytes: float, *, recompute: bool, known_seconds: float
) -> LabelResult:
    """The best choice if it is faster than what is known, and a bound on all that fit."""
    ranges = _peak_ranges(tables, g, limit_bytes)
    if not ranges:
        return LabelResult(choice=None, bound_seconds=np.inf)
    duals = _Duals(tables, g, limit_bytes, ranges, recompute=recompute)
    slowest = _slowest_seconds(tables, g)
    # A bound above the slowest plan of all says that nothing fits.
    bounds, best, choice = np.where(duals.bounds > slowest, np.inf, duals.bounds), min(known_seconds, slowest), None
    searches: dict[int, LabelSearch] = {}
    for most, tolerance in _LABELS:
        for i in np.argsort(bounds).tolist():
            if bounds[i] >= (1 - tolerance) * best or not np.isfinite(bounds[i]):
                continue
            if i not in searches:
                searches[i] = LabelSearch(
                    tables, g, limit_bytes=limit_bytes, peaks=ranges[i], prices=duals.label_prices(i),
                    recompute=recompute,
                )  # fmt: skip
            found = searches[i].search(below=best, most=most)
            bounds[i] = max(bounds[i], found.bound_seconds)
            if found.choice is not None:
                choice, best = found.choice, found.seconds
    bound = float(bounds.min())
    nothing_fits = choice is None and not np.isfinite(known_seconds) and bound >= slowest
    return LabelResult(choice=choice, seconds=best, bound_seconds=np.inf if nothing_fits else min(best, bound))


class _Duals:
    """Lagrange's bounds of all ranges of the peak, and the prices that give them."""

    def __init__(
        self, tables: Tables, g: int, limit_bytes: float, ranges: list[tuple[float, float]], *, recompute: bool
    ) -> None:
        self._tables, self._g, self._recompute, self._ranges = tables, g, recompute, ranges
        self._rooms = [limit_bytes - low for low, _ in ranges]
        self._known: list[dict[float, float]] = [{} for _ in ranges]
        """For every range prices and J."""
        self._look([[0.0]] * len(ranges))
        least = min(known[0.0] for known in self._known)
        self._scale = least / limit_bytes if np.isfinite(least) else 0.0
        if self._scale > 0:
            self._look([[self._scale * price for price in _PRICES]] * len(ranges))
            for _ in range(_ROUNDS):
                self._look([self._finer(i) for i in range(len(ranges))])
        self.bounds: Array = np.array([max(self._bounds(i).values()) for i in range(len(ranges))])

    def label_prices(self, i: int) -> list[float]:
        """Zero, the best price and dearer ones, and one at which only memory counts."""
        bounds = self._bounds(i)
        best = max(bounds, key=lambda price: bounds[price])
        return sorted({0.0, *(best * times for times in _DEARER), _PRICES[-1] * self._scale})

    def _bounds(self, i: int) -> dict[float, float]:
        return {price: total - price * self._rooms[i] for price, total in self._known[i].items()}

    def _finer(self, i: int) -> list[float]:
        bounds = self._bounds(i)
        ordered = sorted(bounds)
        best = max(range(len(ordered)), key=lambda at: bounds[ordered[at]])
        around = ordered[max(0, best - 1) : best + 2]
        return [low + (high - low) * part / _FINER for low, high in pairwise(around) for part in range(1, _FINER)]

    def _look(self, prices: list[list[float]]) -> None:
        rows = [(i, price) for i, own in enumerate(prices) for price in own if price not in self._known[i]]
        if not rows:
            return
        flat, count = np.array([price for _, price in rows]), len(rows)
        costs = self._tables.costs(
            flat, np.ones(count), np.full(count, self._g), recompute=self._recompute,
            most_peak=np.array([self._ranges[i][1] for i, _ in rows]),
        )  # fmt: skip
        totals = minimize(costs.segments, costs.sizes, with_choices=False).totals
        for (i, price), total in zip(rows, totals.tolist(), strict=True):
            self._known[i][price] = total


def _slowest_seconds(tables: Tables, g: int) -> float:
    """No plan takes longer: of everything the slowest choice, recomputed, and a little more."""
    total, network = 0.0, tables.network
    for key, numbers, _ in network.places_of_keys:
        unary = tables.unary[key]
        own = tables.weights[g] * (2 * unary.forward[g] + unary.backward[g])
        if unary.parameters is not None:
            ways = tables.weights[g] * unary.parameters.micro_seconds[:, g] + unary.parameters.step_seconds[:, g]
            own = own + np.where(np.isfinite(ways), ways, 0.0).max(axis=0)
        total += len(numbers) * float(own[np.isfinite(own)].max(initial=0.0))
    for key, sources, _, _ in network.places_of_edges:
        own = tables.weights[g] * (2 * tables.pairs[key].forward[g] + tables.pairs[key].backward[g])
        total += len(sources) * float(own[np.isfinite(own)].max(initial=0.0))
    return total * _MORE


def _peak_ranges(tables: Tables, g: int, limit_bytes: float) -> list[tuple[float, float]]:
    """Ranges that hold all peaks below the limit; none if there is no such peak."""
    least = least_peak(tables, g)
    if least >= limit_bytes:
        return []
    edges = [least + i * _RANGE * limit_bytes for i in range(1, _NUM_RANGES)]
    inside = [edge for edge in edges if edge < limit_bytes]
    # The first range holds the least peak itself.
    return list(pairwise([least, *inside, limit_bytes]))


def least_peak(tables: Tables, g: int) -> float:
    """No plan has a smaller peak: of every block the choice with the least."""
    found = 0.0
    for unary in tables.unary.values():
        peak = unary.peak_bytes[g]
        if unary.parameters is not None:
            own = unary.parameters
            is_possible = np.isfinite(own.micro_seconds[:, g])
            peak = peak + np.where(is_possible, own.working_bytes[:, g], np.inf).min(axis=0)
        found = max(found, float(peak[np.isfinite(unary.forward[g])].min(initial=np.inf)))
    return found
