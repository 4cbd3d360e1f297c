"""A lower bound on every pipeline under limits of memory, stage by stage.

With u_s = 1 + (m - 1) w_s, Σ w_s = Σ v_s = 1 and prices λ_s of the memory of stage s, every cut and choice that
fits has

    step ≥ Σ_s [u_s μ_s + v_s σ_s + λ_s (stored_s + k_s saved_s + peak_s - limit_s)]

since a maximum is no less than a mean. What a block adds depends on its stage only. So every segment (a layer)
takes the stage that is cheapest for it; the first one stage 0, the last one the last stage. That forgets the order
of stages, which makes no difference where layers are equal. A segment in which cut s lies, between the stages s and
s + 1, has the blocks before some place in the one and those behind it in the other. There are p - 1 cuts: cut s
costs θ_s where it lies inside a segment, and Σ θ_s is taken off the sum. At every cut something is sent: no less than
what the place and the layout with the fewest bytes take.

A segment in which several cuts lie has all of some stage t inside it. That stage falls short of the pace, by which the
sum above is too small: with P ≤ max μ_s, known from the least work of all blocks, its blocks count with u_t = 1 and
without a price of memory, and  (m - 1) w_t P + λ_t limit_t  is added. So has every block of such a segment the cheapest
of all stages, or what it costs in t, and the least that is added for any t comes on top.

Where device groups have v stages each (`schedules`), weights and prices are those of groups, u_g = 1/v + (m - 1/v) w_g,
every stage is a choice by itself, and the space has no plans with a stage inside a segment.

The bound is concave in θ. With θ_s just so large that no segment is better off where it is cut, every cut costs the
bound what only one segment gains by it. Where blocks cost what they cost in other stages, θ_s is small, and where
the price of memory changes from s to s + 1, large: one θ for all cuts would cost as much as the dearest at each.

The peak of a stage is no less than a mean over some of its blocks. A stage with so many layers that it takes longer
than the step known, by their fastest choices, is no better than that: so no stage has the largest block of a layer
more than n times, and each of them has the share 1/n of the peak's price.

Every w, v, λ and θ ≥ 0 gives a bound (`elimination.least_over_rows`, stages as rows). Good ones are the dual solution
of a linear program: stages filled with fractions of layers, each in one of several options.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from scipy.optimize import linprog

from planloom.search.conversions import Array
from planloom.search.elimination import (
    Indices,
    SegmentTables,
    Table,
    gains_of_rows,
    largest_table,
    least_over_rows,
)
from planloom.search.network import ChainSegment, Key, Variable
from planloom.search.settled import Joint, SettledProblem
from planloom.search.stages import BlockFigures
from planloom.search.strategies import boundary_states, split_of
from planloom.search.tables import Tables

_SCALE = 0.7
"""Of θ so large that no segment gains by being cut where all that follows is free. [Empirical] Llama-3-405B on 1,024
devices: 0.5 to 1.0 differ by 0.05 % of the bound. 2026-11-18."""
_MOST_NUMBERS = 2_000_000
"""In the largest table of a segment, all rows together; where there would be more, a segment that is cut has every
block in the cheaper of two stages, wherever the cut is."""
_DEAR = 10.0
"""What a device's whole memory once more would cost, in shares of the step."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Multipliers:
    """Of every group: weights of its pace and of what it does once a step, and the price of its memory."""

    pace: Array
    step: Array
    price: Array
    peak_keys: dict[Key, Key]
    """For every kind of segment that repeats the key of its block with the largest peak."""
    cuts: Array | None = None
    """θ, if it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundAt:
    """A bound, and the prices θ of cuts that gave it."""

    seconds: float
    cuts: Array


class PipelineBound:
    """Of one problem; `known_seconds`: of a solution, infinite if there is none."""

    def __init__(
        self,
        problem: SettledProblem,
        places: Sequence[int],
        limits: Sequence[float],
        *,
        known_seconds: float,
        recompute: bool,
    ) -> None:
        self.problem, self.tables, self.limits, self.recompute = problem, problem.tables, np.array(limits), recompute
        candidate = self.tables.candidates[0]
        self.num_groups, self.num_stages, self.num_micro = len(limits), candidate.num_stages, candidate.num_micro
        self.group_of = np.arange(self.num_stages) % self.num_groups
        self.latency, self.stages_per_group = candidate.schedule.latency, candidate.schedule.stages_per_group
        self.kept = np.array(candidate.kept, dtype=float)
        self.known_seconds = known_seconds
        self.places = sorted(places)
        chain = problem.chain
        least_seconds = {segment.kind: self._least_seconds(segment) for segment in chain}
        self.least_pace = sum(least_seconds[segment.kind] for segment in chain) / self.num_groups
        """No plan's slowest group takes less."""
        self.exchange_seconds = least_exchange_seconds(self.tables, 0, places)

    # -- a bound for multipliers

    def at(self, found: Multipliers) -> BoundAt:
        """With the best prices of cuts, if they are not known."""
        chain, p = self.problem.chain, self.num_stages
        rows = _Rows(self, found, found.peak_keys, self._most_layers())
        segments = [rows.segment(at) for at in range(len(chain))]
        num_places = [len(rows.cuts(segment)) for segment in chain]
        charged = float((found.price * self.limits).sum())

        def extra(cuts: Array) -> list[Array]:
            """What every row of a segment pays for cuts; the first is in the first stage, the last in the last."""
            priced = {
                count: np.concatenate([np.zeros(p), np.tile(cuts, count), [rows.short_seconds]])
                for count in set(num_places)
            }
            own = [priced[count] for count in num_places]
            own[0], own[-1] = own[0].copy(), own[-1].copy()
            own[0][1:p] = own[-1][: p - 1] = np.inf
            return own

        def bound(cuts: Array) -> BoundAt:
            total = least_over_rows(segments, self.problem.sizes, extra(cuts))
            seconds = total - float(cuts.sum()) - charged + self.exchange_seconds
            return BoundAt(seconds=min(seconds, self.known_seconds), cuts=cuts)

        if found.cuts is not None:
            return bound(found.cuts)
        gains = gains_of_rows(segments, self.problem.sizes, extra(np.full(p - 1, np.inf)))
        prices = np.zeros(p - 1)
        for own, count in zip(segments, num_places, strict=True):
            gained = gains[own.kind][p : p + (p - 1) * count].reshape(count, p - 1)
            prices = np.maximum(prices, gained.max(axis=0))
        return bound(_SCALE * prices)

    def _most_layers(self) -> float:
        """How often a group has the largest block of a layer at most: between two in a stage lies a whole layer."""
        chain = self.problem.chain
        repeated = [segment for segment in chain if segment.is_repeated]
        if not np.isfinite(self.known_seconds) or self.num_micro < 2 or not repeated:
            return float(len(chain))
        kinds = {segment.kind: self._least_seconds(segment) for segment in chain}
        everything, least = sum(kinds[own.kind] for own in chain), min(kinds[own.kind] for own in repeated)
        # Σ μ_s is everything at least.
        pace = (self.known_seconds - self.latency * everything) / (self.num_micro - self.latency)
        most = pace / least + self.stages_per_group if least > 0 else float(len(chain))
        return min(float(len(chain)), max(1.0, most))

    def _least_seconds(self, segment: ChainSegment) -> float:
        own = [self.tables.unary[v.key] for v in segment.variables]
        return sum(float((unary.forward[0] + unary.backward[0]).min()) for unary in own)

    def _peak_keys(self, options: Sequence[BlockFigures]) -> dict[Key, Key]:
        """For every kind of segment that repeats the key of its block with the largest peak."""
        found = dict[Key, Key]()
        mean = np.mean([own.peak_bytes for own in options], axis=0)
        for segment in self.problem.chain:
            if segment.kind not in found and segment.is_repeated:
                blocks = [v for v in segment.variables if not v.tensor]
                found[segment.kind] = max(blocks, key=lambda v: mean[v.block]).key
        return found

    # -- multipliers

    def price_of_seconds(self, found: Multipliers) -> Array:
        """Of every stage the price of its memory in its own seconds a micro-batch."""
        rate = self.latency + (self.num_micro - self.latency) * found.pace
        prices: Array = (found.price / rate)[self.group_of]
        return prices

    def multipliers(self, options: Sequence[BlockFigures]) -> Multipliers | None:
        """The dual of the linear program: fractions of segments in stages, by options."""
        p, kinds = self.num_groups, self._kinds()
        sums = [[_segment_sums(own, blocks) for own in options] for _, _, blocks in kinds]
        peak = float(np.median([own.peak_bytes.max() for own in options]))
        columns: list[tuple[int, int, Array]] = []
        for kind, (count, stages, _) in enumerate(kinds):
            for s in stages:
                for own in sums[kind]:
                    columns.append((kind, s, own / count))
        n = len(columns)
        cost, rows, limits = np.zeros(n + 2 + p), np.zeros((3 * p, n + 2 + p)), np.zeros(3 * p)
        equal, counts = np.zeros((len(kinds), n + 2 + p)), np.array([float(count) for count, _, _ in kinds])
        for i, (kind, s, (micro, step, stored, saved)) in enumerate(columns):
            cost[i], equal[kind, i], group = self.latency * micro, 1.0, self.group_of[s]
            rows[group, i], rows[p + group, i] = micro, step
            rows[2 * p + group, i] = (stored + self.kept[s] * saved) / self.limits[group]
        cost[n], cost[n + 1] = self.num_micro - self.latency, 1.0
        rows[:p, n], rows[p : 2 * p, n + 1] = -1.0, -1.0
        # More memory is dear, not impossible: so there are prices even where these options do not fit.
        cost[n + 2 :] = _DEAR * self.num_micro * max(float(own.micro_seconds.sum()) for own in options) / p
        rows[2 * p :, n + 2 :] = -np.eye(p)
        limits[2 * p :] = np.maximum(0.0, 1 - peak / self.limits)
        found = linprog(cost, A_ub=rows, b_ub=limits, A_eq=equal, b_eq=counts, method="highs")
        if not found.success:
            return None
        duals = np.maximum(0.0, -found.ineqlin.marginals)
        return Multipliers(
            pace=_normalized(duals[:p]),
            step=_normalized(duals[p : 2 * p]),
            price=duals[2 * p :] / self.limits,
            peak_keys=self._peak_keys(options),
        )

    def _kinds(self) -> list[tuple[int, range, Indices]]:
        """How many segments, the stages in which they may be, and their blocks, by runs of equal ones."""
        chain, segments, p = self.problem.chain, self.tables.network.segment_of_block, self.num_stages
        found = []
        for _, group in groupby(range(len(chain)), key=lambda at: (chain[at].kind, at == 0, at == len(chain) - 1)):
            own = list(group)
            stages = range(1) if own[0] == 0 else range(p - 1, p) if own[-1] == len(chain) - 1 else range(p)
            found.append((len(own), stages, np.flatnonzero((segments >= own[0]) & (segments <= own[-1]))))
        return found


class _Rows:
    """Tables of segments: one row a stage; for every place in the segment where it may be cut one row for every two
    neighbours; and one for several cuts."""

    def __init__(self, bound: PipelineBound, found: Multipliers, peak_keys: dict[Key, Key], most: float) -> None:
        self.problem, self.tables, self.recompute = bound.problem, bound.tables, bound.recompute
        groups = bound.group_of
        self.pace = (bound.latency + (bound.num_micro - bound.latency) * found.pace)[groups]
        self.step, self.price = found.step[groups], found.price[groups]
        self.held = self.price * bound.kept
        self.peak_keys, self.peak_price = peak_keys, self.price / most
        self.kinds: dict[object, SegmentTables] = {}
        short = (bound.num_micro - 1) * found.pace * bound.least_pace + found.price * bound.limits
        has_one = bound.stages_per_group == 1
        self.short_seconds = float(short[1:-1].min(initial=np.inf)) if has_one else np.inf
        """What is added where a stage lies inside a segment; infinite where no plan has such."""
        self._places, self._cuts = bound.places, dict[int, tuple[int, ...]]()

    def cuts(self, segment: ChainSegment) -> tuple[int, ...]:
        """The places inside a segment, counted from its first block: cuts whose row tells where they are. (0: a row for
        cuts anywhere, where all places would be too many rows.)"""
        start, stop = segment.variables[0].block, segment.variables[-1].block
        if start not in self._cuts:
            own = self._places[bisect_right(self._places, start) : bisect_right(self._places, stop)]
            width = largest_table([self.problem.structure(segment)], self.problem.sizes)
            is_large = len(own) * len(self.pace) * width > _MOST_NUMBERS
            self._cuts[start] = (0,) if is_large or not own else tuple(place - start for place in own)
        return self._cuts[start]

    def segment(self, at: int) -> SegmentTables:
        segment, joint = self.problem.chain[at], self.problem.joint.get(at, [])
        first = segment.variables[0].number
        kind = (self.problem.kind(at), self.cuts(segment))
        if kind in self.kinds:
            known = self.kinds[kind]
            return replace(
                known, first=first, last_touched=segment.last_touched,
                tables=_moved(known.tables, segment, joint), alternative=_moved(known.alternative, segment, joint),
            )  # fmt: skip
        own = [self._unary(v, segment) for v in segment.variables]
        is_alternative = self.recompute and segment.is_repeated
        found = SegmentTables(
            first=first,
            tables=self._tables(segment, [kept for kept, _ in own], joint, again=False),
            lives_on=segment.lives_on,
            last_touched=segment.last_touched,
            kind=kind,
            alternative=self._tables(segment, [again for _, again in own], joint, again=True) if is_alternative else (),
        )
        self.kinds[kind] = found
        return found

    def _tables(
        self, segment: ChainSegment, numbers: Sequence[Array], joint: Joint, *, again: bool
    ) -> tuple[Table, ...]:
        found = [Table((v.number,), own) for v, own in zip(segment.variables, numbers, strict=True)]
        for edge in segment.edges:
            own = self.tables.pairs[edge.key]
            seconds = (2.0 if again else 1.0) * own.forward[0] + own.backward[0]
            # An edge counts with the block that it leads to, as in `figures.block_figures`.
            target = self.tables.network.variables[edge.target].block
            pair = self._of_rows(self.pace[:, None, None] * seconds[None], seconds, target, segment)
            is_ordered = edge.source < edge.target
            ends = (edge.source, edge.target) if is_ordered else (edge.target, edge.source)
            found.append(Table(ends, pair if is_ordered else pair.swapaxes(1, 2)))
        return (*found, *(Table(*own) for own in joint))

    def _of_rows(self, of_stages: Array, in_short: Array, block: int, segment: ChainSegment) -> Array:
        """From a block's numbers in every stage, and in one inside a segment, those in all rows."""
        start = segment.variables[0].block
        lower, upper = of_stages[:-1], of_stages[1:]
        cut = [
            np.minimum(lower, upper) if not place else lower if block - start < place else upper
            for place in self.cuts(segment)
        ]
        several = np.minimum(of_stages.min(axis=0, keepdims=True), in_short[None])
        return np.concatenate([of_stages, *cut, several])

    def _unary(self, variable: Variable, segment: ChainSegment) -> tuple[Array, Array]:
        """What a variable adds, by row and choice: kept, and recomputed."""
        key, unary = variable.key, self.tables.unary[variable.key]
        has_peak = self.peak_keys.get(segment.kind) == key
        peak_price = self.peak_price if has_peak else np.zeros_like(self.peak_price)
        # Of stages, and in the last row of one inside a segment.
        pace, step, price, held, peak_price, room_price = (
            np.append(own, last)[:, None]
            for own, last in (
                (self.pace, 1.0), (self.step, 0.0), (self.price, 0.0), (self.held, 0.0), (peak_price, 0.0),
                (self.peak_price, 0.0),
            )
        )  # fmt: skip
        forward = pace * unary.forward[0][None]
        cost = forward + pace * unary.backward[0][None] + peak_price * unary.peak_bytes[0][None]
        if unary.parameters is not None:
            own = unary.parameters
            ways = pace[:, None] * own.micro_seconds[:, 0][None] + step[:, None] * own.step_seconds[:, 0][None]
            ways = ways + price[:, None] * own.stored_bytes[:, 0][None]
            cost = cost + (ways + peak_price[:, None] * own.working_bytes[:, 0][None]).min(axis=1)
        kept = cost + held * unary.saved_bytes[0][None]
        again = cost + forward + held * unary.leaving_bytes[0][None] + room_price * unary.saved_bytes[0][None]
        return tuple(self._of_rows(own[:-1], own[-1], variable.block, segment) for own in (kept, again))  # type: ignore[return-value]


def least_exchange_seconds(tables: Tables, g: int, places: Sequence[int]) -> float:
    """No pipeline sends less at its cuts: each at the place, and in the layouts, with the fewest seconds."""
    network, graph = tables.network, tables.graph
    num_cuts, known = tables.candidates[g].num_stages - 1, dict[object, float]()
    if not num_cuts:
        return 0.0
    found = []
    for place in places:
        total = 0.0
        for tensor in network.crossing(place):
            producer = network.blocks.blocks[network.blocks.producer[tensor]]
            variable = network.variables[network.of_block[producer.index]]
            key = (variable.key, producer.outputs.index(tensor))
            if key not in known:
                rows = boundary_states(graph, producer, tables.strategies[variable.key], tensor)
                split = split_of(rows, tables.shape.sizes, len(graph.tensors[tensor].sizes)).max()
                num_bytes = float(tables.whole_bytes(tensor, producer)[g] / split)
                ways = 2 if graph.is_differentiable(tensor) else 1
                known[key] = ways * tables.send_seconds(g, num_bytes)
            total += known[key]
        found.append(total)
    return num_cuts * min(found)


def _moved(tables: Sequence[Table], segment: ChainSegment, joint: Joint) -> tuple[Table, ...]:
    """The tables of an equal segment; those of its edges may read what all of them read."""
    edges = [(min(e.source, e.target), max(e.source, e.target)) for e in segment.edges]
    numbers = [*((v.number,) for v in segment.variables), *edges, *(own for own, _ in joint)] if tables else []
    return tuple(Table(own, table.numbers) for own, table in zip(numbers, tables, strict=True))


def _normalized(weights: Array) -> Array:
    total = weights.sum()
    return weights / total if total > 0 else np.full(len(weights), 1 / len(weights))


def _segment_sums(own: BlockFigures, at: Indices) -> Array:
    return np.array(
        [own.micro_seconds[at].sum(), own.step_seconds[at].sum(), own.stored_bytes[at].sum(), own.saved_bytes[at].sum()]
    )
