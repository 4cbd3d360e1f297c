"""A lower bound on every pipeline under limits of memory, stage by stage.

With u_s = 1 + (m - 1) w_s, Σ w_s = Σ v_s = 1 and prices λ_s of the memory of stage s, every cut and choice that
fits has

    step ≥ Σ_s [u_s μ_s + v_s σ_s + λ_s (stored_s + k_s saved_s + peak_s - limit_s)]

since a maximum is no less than a mean. What a block adds depends on its stage only. So every segment (a layer)
takes the stage that is cheapest for it; the first one stage 0, the last one the last stage. That forgets the order
of stages, which makes no difference where layers are equal. A segment in which one cut lies has every block in the
cheaper of the stages s and s + 1, for some s; one in which several lie in the cheapest of all. (To tell where in a
segment it is cut takes ten times as long and raises the bound by 0.1 to 0.6 %.) There are p - 1 cuts: each that lies
inside a segment costs θ, and (p - 1) θ is taken off the sum. The bound is concave in θ.

The peak of a stage is no less than a mean over some of its blocks. A stage with so many layers that it takes longer
than the step known, by their fastest choices, is no better than that: so no stage has the largest block of a layer
more than n times, and each of them has the share 1/n of the peak's price.

Every w, v, λ and θ gives a bound (`elimination.least_over_rows`, stages as rows). Good ones are the dual solution
of a linear program: stages filled with fractions of layers, each in one of several options.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from scipy.optimize import linprog

from planloom.search.conversions import Array
from planloom.search.elimination import Indices, SegmentTables, Table, least_over_rows
from planloom.search.network import ChainSegment, Key, Network
from planloom.search.settled import junction_tables
from planloom.search.stages import BlockFigures, kept_micro_batches
from planloom.search.tables import Tables

Joint = Sequence[tuple[tuple[int, ...], Array]]
_SEVERAL = 2
"""Segments with so many cuts or more have every block in the cheapest of all stages."""
_GOLDEN, _NARROWED = 0.6180339887498949, 5
"""By how much each trial narrows where the best θ lies, and how many trials there are."""
_DEAR = 10.0
"""What a device's whole memory once more would cost, in shares of the step."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Multipliers:
    """Of every stage: weights of its pace and of what it does once a step, and the price of its memory."""

    pace: Array
    step: Array
    price: Array
    peak_keys: dict[Key, Key]
    """For every kind of segment that repeats the key of its block with the largest peak."""
    cut: float | None = None
    """θ, if it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundAt:
    """A bound, and the price θ of a cut that gave it."""

    seconds: float
    cut: float


class PipelineBound:
    """Of one problem; `known_seconds`: of a solution, infinite if there is none."""

    def __init__(
        self,
        tables: Tables,
        g: int,
        limits: Sequence[float],
        *,
        known_seconds: float,
        recompute: bool,
    ) -> None:
        self.tables, self.g, self.limits, self.recompute = tables, g, np.array(limits), recompute
        self.num_stages, self.num_micro = len(limits), int(tables.num_micro[g])
        self.kept = np.array(kept_micro_batches(self.num_stages, self.num_micro), dtype=float)
        self.known_seconds = known_seconds
        self.joint = junction_tables(tables)
        self.chain = self._living(tables.network)
        self.sizes = {v.number: tables.num_choices(v.key) for v in tables.network.variables}

    def _living(self, network: Network) -> list[ChainSegment]:
        """The chain with variables that live on as long as junctions need them."""
        last = {variable.number: variable.segment for variable in network.variables}
        for edge in network.edges:
            at = max(network.variables[edge.source].segment, network.variables[edge.target].segment)
            last[edge.source], last[edge.target] = max(last[edge.source], at), max(last[edge.target], at)
        for at, tables in self.joint.items():
            last.update({v: max(last[v], at) for variables, _ in tables for v in variables})
        touched: dict[int, list[int]] = {}
        for variable in network.variables:
            if last[variable.number] > variable.segment:
                touched.setdefault(last[variable.number], []).append(variable.number)
        return [
            replace(
                segment,
                lives_on=tuple(last[v.number] > at for v in segment.variables),
                last_touched=tuple(touched.get(at, ())),
            )
            for at, segment in enumerate(network.chain)
        ]

    # -- a bound for multipliers

    def at(self, found: Multipliers) -> BoundAt:
        """With the best price of a cut, if it is not known."""
        chain, p = self.chain, self.num_stages
        rows = _Rows(self, found, found.peak_keys, self._most_layers())
        # Equal kinds have equal tables and variables that live on only where junctions are alike, too.
        segments = [rows.segment(segment, self.joint.get(at, [])) for at, segment in enumerate(chain)]
        num_cuts = np.concatenate([np.zeros(p), np.ones(p - 1), [float(_SEVERAL)]])
        allowed = [np.zeros(len(num_cuts)) for _ in chain]
        allowed[0][1:p] = allowed[-1][: p - 1] = np.inf
        charged = float((found.price * self.limits).sum())

        def bound(theta: float) -> BoundAt:
            total = least_over_rows(segments, self.sizes, [own + theta * num_cuts for own in allowed])
            return BoundAt(seconds=min(total - (p - 1) * theta - charged, self.known_seconds), cut=theta)

        if found.cut is not None:
            return bound(found.cut)
        uncut = [own + np.where(num_cuts > 0, np.inf, 0.0) for own in allowed]
        whole, free = (least_over_rows(segments, self.sizes, extra) for extra in (uncut, allowed))
        gain = whole - free if np.isfinite(whole) else free  # with fewer segments than stages some must be cut
        return _highest(bound, gain / len(chain))

    def _most_layers(self) -> float:
        """How often a stage has the largest block of a layer at most: between two of them lies a whole layer."""
        chain = self.tables.network.chain
        repeated = [segment for segment in chain if segment.is_repeated]
        if not np.isfinite(self.known_seconds) or self.num_micro < 2 or not repeated:
            return float(len(chain))
        kinds = {segment.kind: self._least_seconds(segment) for segment in chain}
        everything, least = sum(kinds[own.kind] for own in chain), min(kinds[own.kind] for own in repeated)
        pace = (self.known_seconds - everything) / (self.num_micro - 1)  # Σ μ_s is everything at least
        return min(float(len(chain)), max(1.0, pace / least + 1)) if least > 0 else float(len(chain))

    def _least_seconds(self, segment: ChainSegment) -> float:
        own = [self.tables.unary[v.key] for v in segment.variables]
        return sum(float((unary.forward[self.g] + unary.backward[self.g]).min()) for unary in own)

    def _peak_keys(self, options: Sequence[BlockFigures]) -> dict[Key, Key]:
        """For every kind of segment that repeats the key of its block with the largest peak."""
        network, found = self.tables.network, dict[Key, Key]()
        mean = np.mean([own.peak_bytes for own in options], axis=0)
        for segment in network.chain:
            if segment.kind not in found and segment.is_repeated:
                blocks = [v for v in segment.variables if not v.tensor]
                found[segment.kind] = max(blocks, key=lambda v: mean[v.block]).key
        return found

    # -- multipliers

    def multipliers(self, options: Sequence[BlockFigures]) -> Multipliers | None:
        """The dual of the linear program: fractions of segments in stages, by options."""
        p, kinds = self.num_stages, self._kinds()
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
            cost[i], equal[kind, i] = micro, 1.0
            rows[s, i], rows[p + s, i] = micro, step
            rows[2 * p + s, i] = (stored + self.kept[s] * saved) / self.limits[s]
        cost[n], cost[n + 1] = self.num_micro - 1, 1.0
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
        chain, segments, p = self.tables.network.chain, self.tables.network.segment_of_block, self.num_stages
        found = []
        for _, group in groupby(range(len(chain)), key=lambda at: (chain[at].kind, at == 0, at == len(chain) - 1)):
            own = list(group)
            stages = range(1) if own[0] == 0 else range(p - 1, p) if own[-1] == len(chain) - 1 else range(p)
            found.append((len(own), stages, np.flatnonzero((segments >= own[0]) & (segments <= own[-1]))))
        return found


class _Rows:
    """Tables of segments: one row a stage, one for every two neighbours, and one for several cuts."""

    def __init__(self, bound: PipelineBound, found: Multipliers, peak_keys: dict[Key, Key], most: float) -> None:
        self.tables, self.g, self.recompute = bound.tables, bound.g, bound.recompute
        self.pace = 1 + (bound.num_micro - 1) * found.pace
        self.step, self.price, self.held = found.step, found.price, found.price * bound.kept
        self.peak_keys, self.peak_price = peak_keys, found.price / most
        self.pairs: dict[Key, tuple[Array, Array]] = {}
        self.kinds: dict[Key, SegmentTables] = {}
        for key, pair in self.tables.pairs.items():
            kept = self.pace[:, None, None] * (pair.forward[self.g] + pair.backward[self.g])[None]
            again = kept + self.pace[:, None, None] * pair.forward[self.g][None]
            self.pairs[key] = (kept, again)

    def segment(self, segment: ChainSegment, joint: Joint) -> SegmentTables:
        first = segment.variables[0].number
        near = tuple(tuple(v - first for v in own) for own, _ in joint)
        kind = (segment.kind, near, segment.lives_on)
        if kind in self.kinds:
            known = self.kinds[kind]
            return replace(
                known, first=first, last_touched=segment.last_touched,
                tables=_moved(known.tables, segment, joint), alternative=_moved(known.alternative, segment, joint),
            )  # fmt: skip
        own = [self._unary(v.key, segment) for v in segment.variables]
        is_alternative = self.recompute and segment.is_repeated
        found = SegmentTables(
            first=first,
            tables=self._tables(segment, [kept for kept, _ in own], 0, joint),
            lives_on=segment.lives_on,
            last_touched=segment.last_touched,
            kind=kind,
            alternative=self._tables(segment, [again for _, again in own], 1, joint) if is_alternative else (),
        )
        self.kinds[kind] = found
        return found

    def _tables(self, segment: ChainSegment, numbers: Sequence[Array], which: int, joint: Joint) -> tuple[Table, ...]:
        found = [Table((v.number,), _rows(own)) for v, own in zip(segment.variables, numbers, strict=True)]
        for edge in segment.edges:
            pair, is_ordered = _rows(self.pairs[edge.key][which]), edge.source < edge.target
            ends = (edge.source, edge.target) if is_ordered else (edge.target, edge.source)
            found.append(Table(ends, pair if is_ordered else pair.swapaxes(1, 2)))
        return (*found, *(Table(*own) for own in joint))

    def _unary(self, key: Key, segment: ChainSegment) -> tuple[Array, Array]:
        """What a variable adds, by stage and choice: kept, and recomputed."""
        unary, g = self.tables.unary[key], self.g
        has_peak = self.peak_keys.get(segment.kind) == key
        peak_price = self.peak_price if has_peak else np.zeros_like(self.peak_price)
        forward = self.pace[:, None] * unary.forward[g][None]
        cost = forward + self.pace[:, None] * unary.backward[g][None] + peak_price[:, None] * unary.peak_bytes[g][None]
        if unary.parameters is not None:
            own = unary.parameters
            ways = self.pace[:, None, None] * own.micro_seconds[:, g][None]
            ways = ways + self.step[:, None, None] * own.step_seconds[:, g][None]
            ways = ways + self.price[:, None, None] * own.stored_bytes[:, g][None]
            cost = cost + (ways + peak_price[:, None, None] * own.working_bytes[:, g][None]).min(axis=1)
        kept = cost + self.held[:, None] * unary.saved_bytes[g][None]
        again = cost + forward + self.held[:, None] * unary.leaving_bytes[g][None]
        again = again + self.peak_price[:, None] * unary.saved_bytes[g][None]
        return kept, again


def _rows(of_stages: Array) -> Array:
    """From numbers of stages those of all rows."""
    neighbours = np.minimum(of_stages[:-1], of_stages[1:])
    return np.concatenate([of_stages, neighbours, of_stages.min(axis=0, keepdims=True)])


def _highest(bound: Callable[[float], BoundAt], most: float) -> BoundAt:
    """The best bound for prices of a cut between zero and `most`: the golden section of a concave function."""
    low, high = 0.0, most
    left, right = bound(high - _GOLDEN * (high - low)), bound(low + _GOLDEN * (high - low))
    best = max(left, right, key=lambda own: own.seconds)
    for _ in range(_NARROWED):
        if left.seconds < right.seconds:
            low, left = left.cut, right
            right = bound(low + _GOLDEN * (high - low))
        else:
            high, right = right.cut, left
            left = bound(high - _GOLDEN * (high - low))
        best = max(best, left, right, key=lambda own: own.seconds)
    return best


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
