"""Solve a batch of problems: the best strategies of every one, under the limit of memory, with a lower bound.

Without a limit elimination is exact. Where its solution does not fit, memory gets a price λ: the solution for a price
is the best of all that hold no more than it does, and its J less λ times the room is a lower bound on every solution
that fits (Lagrange). A row of prices gives every block options from fast to small, and `stages` packs them into
stages: each takes the fastest with which it gets along, and the next one for the last of its layers, so memory is
filled up layer by layer. Prices around those that were taken give finer options, once more.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from planloom.search.conversions import Array
from planloom.search.cut_bound import CutBound
from planloom.search.elimination import Indices, largest_table, minimize
from planloom.search.figures import Choice, block_figures, exchange_seconds, with_best_junctions
from planloom.search.filling import Filler
from planloom.search.one_stage import TOLERANCE, best_of_one_stage
from planloom.search.pipeline_bound import Multipliers, PipelineBound
from planloom.search.settled import SettledProblem
from planloom.search.space import Candidate
from planloom.search.stages import Estimate, Packing, estimate_stages, pack_stages
from planloom.search.tables import Costs, Tables

_PRICES = tuple(2.0**power for power in (-9, -7, -6, -5, -4, -3, -2, 0, 2, 5, 20))
"""Prices of memory, in shares of the one at which all of it costs as much as the step; the last is `least_memory`'s,
so that what is said to be enough is found."""
_BOUND_PRICES = tuple(2.0**power for power in (-7, -6, -5, -4, -3, -2))
"""In the same shares, those of `tighten`: they shut out most problems of Llama-3-70B on 128 devices. [Empirical]
2026-11-18."""
_CLOSE = 1.03
"""Problems whose first solution is further from the best are not worth finer prices."""
_EVEN = 1.001
"""Stages that cost no more than this are as even as they would be with any memory."""
_MAX_NUMBERS = 1_000_000
"""In the largest table of problems that are solved at once: 8 MB, about what a processor's cache holds."""
_ROOMS = (1.0, 0.99, 0.97, 0.93)
"""Shares of the room that are tried where options meet and hold more between them than each by itself."""
_FILLINGS, _MORE_ROOM = 8, 1.05
"""How often stages are filled, each time with less room by so many times what they were too large."""
_AROUND = (0.5, 0.8, 1.0, 1.25, 2.0)
"""Multiples of a stage's price of memory for which stages are filled with options."""
_ROUNDS, _FINER = 1, 4
"""Rounds of finer prices between two that were taken, and how many of them."""
_MOST_STAGES = 64
"""Longer pipelines keep Lagrange's bound: with a price for every stage 256 stages of Llama-3-405B took 75 s, and
nothing was raised. [Empirical] 2 cores, 2026-11-18."""


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
        self.schedule, self.num_groups = tables.schedule, tables.shape.num_stages
        self.num_stages = self.schedule.num_stages(self.num_groups)
        self.limits = np.full(self.num_groups, float(limit_bytes))
        """The same, device group by device group."""
        self.kept = np.array([float(max(own.kept)) for own in tables.candidates])
        """Micro-batches that the stage keeps that keeps most."""
        one = tables.costs(np.zeros(1), np.zeros(1), np.array([0]), recompute=recompute)
        self._portion = max(1, _MAX_NUMBERS // largest_table(one.segments, one.sizes))
        self._segment_starts = [segment.variables[0].block for segment in tables.network.chain]
        self._multipliers: Multipliers | None = None
        self._known: dict[tuple[int, float], tuple[float, Choice]] = {}
        """Of problems and prices of memory what is best, and its J: no limit changes them."""
        self._prepared: dict[int, tuple[SettledProblem, tuple[Choice, ...]]] = {}
        """Problems without junctions that no plan has, with what is best at a row of prices."""
        everything = np.arange(len(tables.candidates))
        self._totals = self._least(everything, np.zeros(len(everything)))
        """J of every problem where memory costs nothing."""
        self.bounds = self._totals / self.num_groups
        """A lower bound on the step of every problem."""

    def solve(self, problems: Sequence[int], *, below: float) -> list[Solution]:
        """Of these problems those that fit into memory and may be faster than `below`."""
        found, left = dict[int, Solution](), dict[int, Choice]()
        worthwhile = np.array([g for g in problems if self.bounds[g] < below], dtype=np.intp)
        if not len(worthwhile):
            return []
        free = self._minimized(np.zeros(len(worthwhile)), self.kept[worthwhile], worthwhile, recompute=False)
        for i, g in enumerate(int(g) for g in worthwhile):
            solution = self._fitted(g, [free.choice(i)])[1]
            if solution is not None:
                found[g] = solution
            if solution is None or self._is_bent(g, free.choice(i), solution):
                left[g] = free.choice(i)
        for g, solution in self._under_limit(left, below).items():
            if _is_faster(solution, found.get(g)):
                found[g] = solution
        return list(found.values())

    def _is_bent(self, g: int, choice: Choice, solution: Solution) -> bool:
        """Does the limit of memory make the stages of what is fastest without it less even than they could be?"""
        if self.num_stages == 1:
            return False
        figures = [block_figures(self.tables, g, self._settled(g, choice))]
        num_micro, limits = self.tables.candidates[g].num_micro, [np.inf] * self.num_stages
        even = pack_stages(figures, self.places, num_micro, limits, schedule=self.schedule)
        assert even is not None, "what fits under a limit fits without it"
        without = self.estimate(g, self._settled(g, choice), even.first_blocks)
        return solution.estimate.step_seconds > _EVEN * without.step_seconds

    def tighten(self, problems: Sequence[int], *, below: float) -> None:
        """Lagrange's bounds of many problems at once, which cost far less than their solutions: up to `below` each, or
        as high as rising prices of memory bring them. A bound is concave in the price: one that no longer rises has
        been at its highest, and where memory does not bind the first price shows it."""
        left = np.array([g for g in problems if self.bounds[g] < below], dtype=np.intp)
        reached = self._totals[left] / self.num_groups
        for price in _BOUND_PRICES:
            if not len(left):
                return
            prices = price * self._totals[left] / (self.num_groups * self.limit_bytes)
            totals = self._least(left, prices)
            found = np.array([self._tighten(int(g), t, p) for g, t, p in zip(left, totals, prices, strict=True)])
            is_open = (found > reached) & (self.bounds[left] < below)
            left, reached = left[is_open], found[is_open]

    def again(self, solution: Solution, limits: Sequence[float], *, fills: bool = False) -> Solution | None:
        """The same problem with other limits, device group by device group; `fills`: stages are filled, too."""
        other = copy(self)
        other.limits, other.bounds = np.array(limits), self.bounds.copy()
        g = self.tables.candidates.index(solution.candidate)
        found = other.solve([g], below=np.inf)
        if not found:
            return None
        return other.filled(g, found[0]) if fills else found[0]

    def refined(
        self, g: int, solution: Solution | None, *, below: float = np.inf, enough: float = np.inf
    ) -> Solution | None:
        """A better solution of a problem, and a bound that is close to it, or to `below`; None if there is none. A
        bound of `enough` need not be improved."""
        if not np.isfinite(self._totals[g]):
            return solution
        known = min(below, solution.estimate.step_seconds) if solution is not None else below
        if self.num_stages > _MOST_STAGES:
            return solution
        problem = SettledProblem.of(self.tables, g)
        if self.num_stages > 1:
            bound = PipelineBound(
                problem, self.places, self.limits.tolist(), known_seconds=known, recompute=self.recompute
            )
            self.bounds[g] = max(self.bounds[g], self._pipeline_bound(g, bound, known, enough))
        else:
            found = best_of_one_stage(
                problem.tables, 0, float(self.limits[0]), recompute=self.recompute, known_seconds=known
            )
            self.bounds[g] = max(self.bounds[g], found.bound_seconds)
            if found.choice is not None:
                everything = Packing(first_blocks=(0,), options=(0,) * len(self.tables.network.blocks.blocks))
                solution = self._solution(g, [found.choice], everything)
        if solution is None:
            return None
        return replace(solution, bound_seconds=min(float(self.bounds[g]), solution.estimate.step_seconds))

    def filled(self, g: int, solution: Solution | None) -> Solution | None:
        """A better solution of a problem with several stages, filled segment by segment; or the one that there is."""
        if not 1 < self.num_stages <= _MOST_STAGES or not np.isfinite(self._totals[g]):
            return solution
        problem, known = self._prepared_problem(g)
        bound = PipelineBound(
            problem, self.places, self.limits.tolist(), known_seconds=np.inf, recompute=self.recompute
        )
        options = list(known)
        multipliers = bound.multipliers([block_figures(self.tables, g, choice) for choice in options])
        if multipliers is not None:
            weight = float(self.tables.weights[g])
            prices = weight * bound.price_of_seconds(multipliers)
            rows = {(float(p * share), float(k)) for p, k in zip(prices, bound.kept, strict=True) for share in _AROUND}
            options += self._options(g, problem, sorted(rows))
        return self._filled_with(g, options, solution)

    def _filled_with(self, g: int, options: Sequence[Choice], solution: Solution | None) -> Solution | None:
        """Stages that turn out too large, as what lies between different options needs room too, get less of it."""
        figures = [block_figures(self.tables, g, choice) for choice in options]
        limits = np.array(self._stage_limits(g))
        for _ in range(_FILLINGS):
            packing = Filler(
                figures, self.places, self._segment_starts, weight=float(self.tables.weights[g]),
                kept=self.tables.candidates[g].kept, limits=limits.tolist(),
            ).packing()  # fmt: skip
            if packing is None:
                break
            choice = self._settled(g, self._merged(options, packing))
            held = self.estimate(g, choice, packing.first_blocks).group_bytes
            excess = np.maximum(0.0, np.array(held) - self.limits)
            if not excess.any():
                found = self._solution(g, options, packing)
                return found if found is not None and _is_faster(found, solution) else solution
            limits = limits - _MORE_ROOM * np.tile(excess, self.schedule.stages_per_group)
        return solution

    def _prepared_problem(self, g: int) -> tuple[SettledProblem, tuple[Choice, ...]]:
        if g not in self._prepared:
            problem = SettledProblem.of(self.tables, g)
            self._prepared[g] = problem, tuple(self._options(g, problem, self._rows(g)))
        return self._prepared[g]

    def _rows(self, g: int) -> list[tuple[float, float]]:
        """Prices of memory, each with the micro-batches that a stage keeps: those of the first stage, of one in the
        middle and of the last."""
        counts = sorted({float(k) for k in self.tables.candidates[g].kept})
        scale = float(self._totals[g]) / (self.num_groups * self.limit_bytes)
        rows = [(scale * price, k) for k in {counts[0], counts[len(counts) // 2], counts[-1]} for price in _PRICES]
        return [*rows, (0.0, counts[0])]

    def _options(self, g: int, problem: SettledProblem, rows: Sequence[tuple[float, float]]) -> list[Choice]:
        """What is best at prices of memory among choices that plans have."""
        prices, kept = (np.array(own) for own in zip(*rows, strict=True))
        found = _Minimized.of(problem.costs(prices, kept, recompute=self.recompute))
        choices = _distinct({float(i): self._settled(g, found.choice(i)) for i in range(len(rows))})
        return list(choices.values())

    def _pipeline_bound(self, g: int, bound: PipelineBound, known: float, enough: float) -> float:
        """With multipliers that were good for another problem of the batch, or else with its own."""
        best = bound.at(self._multipliers).seconds if self._multipliers is not None else 0.0
        if best >= min(enough, (1 - TOLERANCE) * known):
            return best
        options = self._options(g, bound.problem, self._rows(g))
        multipliers = bound.multipliers([block_figures(self.tables, g, choice) for choice in options])
        if multipliers is None:
            return best
        found = bound.at(multipliers)
        self._multipliers = replace(multipliers, cuts=found.cuts)
        best = max(best, found.seconds)
        is_enough = best >= min(enough, (1 - TOLERANCE) * known)
        if is_enough or not np.isfinite(known) or self.schedule.stages_per_group > 1:
            return best
        cuts = CutBound(
            bound.problem, self.places, prices=bound.price_of_seconds(multipliers),
            kept=bound.kept, limits=self.limits, num_micro=bound.num_micro, recompute=self.recompute,
        )  # fmt: skip
        exchange = bound.exchange_seconds
        return max(best, cuts.seconds(known - exchange) + exchange)

    def smallest(self, g: int, price: float) -> Choice:
        """The solution for one price of memory, in shares of that at which all memory costs as much as the step."""
        scale = float(self._totals[g]) / (self.num_groups * self.limit_bytes)
        (choice,) = self._at_prices({g: [price * scale]})[g].values()
        return self._settled(g, choice)

    def estimate(self, g: int, choice: Choice, first_blocks: Sequence[int]) -> Estimate:
        """Of a choice and a cut."""
        figures = block_figures(self.tables, g, choice)
        exchange = exchange_seconds(self.tables, g, choice, first_blocks)
        num_micro = self.tables.candidates[g].num_micro
        return estimate_stages(figures, first_blocks, num_micro, exchange, self.schedule)

    def _stage_limits(self, g: int) -> list[float]:
        """What each stage may hold. Stages of one group share its memory: half of it evenly, half by the micro-batches
        that they keep."""
        kept, count = np.array(self.tables.candidates[g].kept, dtype=float), self.schedule.stages_per_group
        together = np.tile(kept.reshape(count, self.num_groups).sum(axis=0), count)
        shares = (1 / count + kept / together) / 2 if count > 1 else np.ones(len(kept))
        found: list[float] = (np.tile(self.limits, count) * shares).tolist()
        return found

    def _least(self, problems: Indices, prices: Array) -> Array:
        """The least J of problems, each at a price of memory."""
        portions = []
        for start in range(0, len(problems), self._portion):
            own, at = problems[start : start + self._portion], prices[start : start + self._portion]
            costs = self.tables.costs(at, self.kept[own], own, recompute=self.recompute and bool(at.any()))
            portions.append(minimize(costs.segments, costs.sizes, with_choices=False).totals)
        return np.concatenate(portions)

    def _minimized(self, prices: Array, kept: Array, problems: Indices, *, recompute: bool) -> "_Minimized":
        """Problems in portions whose tables are not too large."""
        size = self._portion
        portions = []
        for start in range(0, len(problems), size):
            own = slice(start, start + size)
            costs = self.tables.costs(prices[own], kept[own], problems[own], recompute=recompute)
            portions.append(_Minimized.of(costs))
        return _Minimized.joined(portions)

    def _under_limit(self, problems: Mapping[int, Choice], below: float) -> dict[int, Solution]:
        """Options for a row of prices of memory, packed into stages; finer prices for those that come close.

        `problems`: with what is chosen where memory costs nothing.
        """
        if not problems:
            return {}
        rows = {}
        for g in problems:
            scale = float(self._totals[g]) / (self.num_groups * self.limit_bytes)
            rows[g] = [scale * price for price in _PRICES]
        found = {}
        options = self._at_prices(rows)
        for g in problems:
            if self.bounds[g] < below:
                solution = self._packed(g, {0.0: problems[g], **options[g]}, below)
                if solution is not None:
                    found[g] = solution
        return found

    def _packed(self, g: int, options: dict[float, Choice], below: float) -> Solution | None:
        best: Solution | None = None
        for _ in range(1 + _ROUNDS):
            options = _distinct(options)
            ordered = sorted(options)
            packing, solution = self._fitted(g, [options[price] for price in ordered])
            if packing is None:
                return best
            if solution is not None and _is_faster(solution, best):
                best = solution
            if best is not None and best.estimate.step_seconds > _CLOSE * below:
                return best
            taken = {ordered[i] for i in packing.options}
            around = [(low, high) for low, high in pairwise(ordered) if low in taken or high in taken]
            finer = [low + (high - low) * i / _FINER for low, high in around for i in range(1, _FINER)]
            options = {price: options[price] for price in taken.union(*around)} | self._at_prices({g: finer})[g]
        return best

    def _at_prices(self, prices: Mapping[int, Sequence[float]]) -> dict[int, dict[float, Choice]]:
        """The solutions of problems for several prices of memory each."""
        missing = [(g, price) for g, row in prices.items() for price in row if (g, price) not in self._known]
        if missing:
            at, flat = np.array([g for g, _ in missing], dtype=np.intp), np.array([price for _, price in missing])
            found = self._minimized(flat, self.kept[at], at, recompute=self.recompute)
            self._known.update({own: (float(found.totals[i]), found.choice(i)) for i, own in enumerate(missing)})
        options: dict[int, dict[float, Choice]] = {g: {} for g in prices}
        for g, row in prices.items():
            for price in row:
                total, options[g][price] = self._known[g, price]
                self._tighten(g, total, price)
        return options

    def _fitted(self, g: int, options: Sequence[Choice]) -> tuple[Packing | None, Solution | None]:
        """The best packing; with less room than there is, if what lies between different options needs some."""
        figures = [block_figures(self.tables, g, self._settled(g, choice)) for choice in options]
        num_micro = self.tables.candidates[g].num_micro
        found: Packing | None = None
        for switches in (self._segment_starts, None):  # None: a segment that is cut may have two options
            for share in _ROOMS if len(options) > 1 else _ROOMS[:1]:
                limits = [share * limit for limit in self._stage_limits(g)]
                packing = pack_stages(figures, self.places, num_micro, limits, switches, self.schedule)
                if packing is None:
                    break
                found, solution = packing, self._solution(g, options, packing)
                if solution is not None:
                    return found, solution
        return found, None

    def _settled(self, g: int, choice: Choice) -> Choice:
        return replace(choice, variables=with_best_junctions(self.tables, g, choice.variables))

    def _tighten(self, g: int, total: float, price: float) -> float:
        """Lagrange's bound, for every cut: group s at the price λ · k / k_s, with k_s micro-batches kept there, by its
        stage that keeps fewest, and k at most anywhere; then what is saved costs λ · k everywhere, as was counted, and
        what is stored λ at least."""
        kept = self.tables.candidates[g].kept
        fewest = [min(kept[group :: self.num_groups]) for group in range(self.num_groups)]
        shares = sum(self.kept[g] / k for k in fewest)
        bound = float(total - price * self.limit_bytes * shares) / self.num_groups
        self.bounds[g] = max(self.bounds[g], bound)
        return bound

    def _solution(self, g: int, options: Sequence[Choice], packing: Packing) -> Solution | None:
        """Problem g with every block's option; None if what lies between different options makes it too large."""
        choice = self._settled(g, self._merged(options, packing))
        estimate = self.estimate(g, choice, packing.first_blocks)
        if any(held > limit for held, limit in zip(estimate.group_bytes, self.limits, strict=True)):
            return None
        return Solution(
            candidate=self.tables.candidates[g],
            choice=choice,
            first_blocks=packing.first_blocks,
            estimate=estimate,
            bound_seconds=float(self.bounds[g]),
        )

    def _merged(self, options: Sequence[Choice], packing: Packing) -> Choice:
        """Every block with the choices of its option; a segment is recomputed if the option of any of its blocks says
        so."""
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


def _is_faster(solution: Solution, other: Solution | None) -> bool:
    return other is None or solution.estimate.step_seconds < other.estimate.step_seconds


def _distinct(options: Mapping[float, Choice]) -> dict[float, Choice]:
    """Equal choices once, at their lowest price."""
    found: dict[tuple[bytes, ...], float] = {}
    for price in sorted(options):
        own = options[price]
        found.setdefault((own.variables.tobytes(), own.storage.tobytes(), own.recomputed.tobytes()), price)
    return {price: options[price] for price in found.values()}


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

    @staticmethod
    def joined(portions: "Sequence[_Minimized]") -> "_Minimized":
        if len(portions) == 1:
            return portions[0]
        names = ("totals", "variables", "storage", "recomputed")
        return _Minimized(*(np.concatenate([getattr(own, name) for own in portions], axis=-1) for name in names))

    def choice(self, i: int) -> Choice:
        return Choice(
            variables=self.variables[:, i], storage=self.storage[:, i], recomputed=self.recomputed[:, i].astype(bool)
        )
