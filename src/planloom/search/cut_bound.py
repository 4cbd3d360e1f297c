"""A lower bound on pipelines that knows where they may be cut.

A stage begins and ends at certain places, and the step waits for the slowest: where a layer can be cut into a few
pieces only, stages cannot be made even. With r = 1 / (m + p - 1) and a price ρ_s of the memory of stage s, a stage of
the blocks between two places, whatever their strategies, has

    μ_s + r σ_s ≥ g_s = Σ [μ + r σ + ρ_s (stored + k_s saved)] at its least - ρ_s (limit_s - least peak)

and a step takes at least  Σ g_s + (m - 1) max g_s,  since  max σ ≥ r Σ σ_s + r (m - 1) σ_s.  The least sums are found
by elimination over the blocks of the stage alone, with whatever is around it free. Among equal layers they depend on
where in its layers a stage begins and ends and how many lie between; so all stages' are found together, as rows, with
the best of several ρ for each. The least over all cuts is a shortest path over the places, stage by stage, for a row
of limits T of the pace: where no stage takes longer than T_i, but some longer than T_(i-1),  step ≥ Σ g_s + (m - 1)
T_(i-1).

Where a stage begins or ends outside the run of equal layers, or both in one layer, what it has there is not counted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planloom.search.conversions import Array
from planloom.search.elimination import SegmentTables, Table, largest_table, moved, one_more, summed
from planloom.search.network import ChainSegment
from planloom.search.one_stage import least_peak
from planloom.search.settled import SettledProblem

_PRICES = (0.0, 1.0)
"""Of memory, in shares of those that were given."""
_MOST_NUMBERS = 4_000_000
"""In the largest table, all rows together."""
_PACES = 48
"""Limits of the pace."""
_ROUNDS = 2
"""So many times the least possible pace is looked for between two of them."""
Rows = NDArray[np.intp]


@dataclass(frozen=True, eq=False, slots=True)
class _Runs:
    """Least sums g: `inner[s, i, d, j]` of a stage from place i of a layer to place j of the d-th layer after it,
    `first[d, j]` of the first stage with d layers and up to place j of the next, `last[i, d]` of the last stage from
    place i of a layer, d layers from that one to the last."""

    inner: Array
    first: Array
    last: Array


class CutBound:
    """Of a settled problem whose chain has a run of equal layers. `prices`: ρ of every stage."""

    def __init__(
        self,
        problem: SettledProblem,
        places: Sequence[int],
        *,
        prices: Array,
        kept: Array,
        limits: Array,
        num_micro: int,
        recompute: bool,
    ) -> None:
        self.problem, self.tables, self.recompute = problem, problem.tables, recompute
        self.num_stages, self.num_micro = len(limits), num_micro
        self._known: dict[object, tuple[list[Array], list[Array]]] = {}
        self.share = 1.0 / (num_micro + self.num_stages - 1)
        self.low, self.high = _longest_run(problem)
        """The run of equal segments: the first, and the one after the last."""
        layer = problem.chain[self.low]
        start, stop = layer.variables[0].block, layer.variables[-1].block
        self.offsets = [0, *(place - start for place in sorted(places) if start < place <= stop)]
        scaled = np.array(_PRICES)[None, :] * prices[:, None]
        weighed = np.stack([scaled.reshape(-1), (scaled * kept[:, None]).reshape(-1)])
        (self.price, self.held), self.row_of = np.unique(weighed, axis=1, return_inverse=True)
        """One row for all stages and prices that weigh alike; and for each of them its row."""
        self.row_of = self.row_of.reshape(scaled.shape)
        self.charged = scaled * (limits - least_peak(problem.tables, 0))[:, None]
        width = largest_table([problem.structure(layer)], problem.sizes)
        self.is_possible = (
            self.high - self.low > 2 and start in places
            and width * len(self.price) * len(self.offsets) <= _MOST_NUMBERS
        )  # fmt: skip

    def seconds(self, known_seconds: float) -> float:
        """The bound, up to what is known; zero where there is no such bound."""
        if not self.is_possible:
            return 0.0
        longest = known_seconds / self.num_micro  # no stage of a faster plan takes more at a micro-batch
        runs = self._runs(longest)
        path = _Path(runs, self.high - self.low)
        free = float(path.least(np.array([longest]))[0])
        if not np.isfinite(free):
            return known_seconds
        low, high = 0.0, longest
        for _ in range(_ROUNDS):
            paces = np.linspace(low, high, _PACES)
            first = int(np.flatnonzero(np.isfinite(path.least(paces)))[0])
            low, high = float(paces[max(0, first - 1)]), float(paces[first])
        # Below `low` nothing is possible; with a pace above the last one all is slower than what is known.
        last = max(high, min(longest, (known_seconds - free) / max(1, self.num_micro - 1)))
        paces = np.linspace(low, last, _PACES)
        sums = path.least(paces[1:])
        slowest = (self.num_micro - 1) * paces[:-1]
        beyond = free + (self.num_micro - 1) * last
        return min(known_seconds, beyond, float((sums + slowest).min()))

    # -- least sums of stages

    def _runs(self, longest: float) -> _Runs:
        num_layers = self.high - self.low
        inner, last = list[Array](), list[Array]()
        everything = np.repeat(np.arange(len(self.price)), len(self.offsets))
        message = self._begun()
        for d in range(1, num_layers + 1):
            inner.append(np.stack([self._best(own) for own in self._closed(message, d, everything)], axis=-1))
            last.append(self._ended(message, d))
            if float(inner[-1][:, :, 0].min()) > longest:
                break  # and longer stages are slower
            if d < num_layers:
                message = self._step(self.low + d, message, everything)
        return _Runs(inner=np.stack(inner, axis=2), first=self._first_stage(longest), last=np.stack(last, axis=1))

    def _closed(self, message: Sequence[Table], d: int, rows: Rows) -> list[Array]:
        """Least sums up to every place of layer d of the run; behind its last layer there is but one place."""
        found = [_least(message)]
        for offset in self.offsets[1:]:
            if self.low + d < self.high:
                found.append(_least(self._step(self.low + d, message, rows, stop=offset)))
            else:
                found.append(np.full_like(found[0], np.inf))
        return found

    def _begun(self) -> Sequence[Table]:
        """A layer from each of its places on: rows by stage, price and place."""
        rows = np.repeat(np.arange(len(self.price)), len(self.offsets))
        return self._step(self.low, (), rows, start=np.tile(np.array(self.offsets), len(self.price)))

    def _ended(self, message: Sequence[Table], d: int) -> Array:
        """What the last stage takes with d layers, by the place where it begins: all that follows is its own."""
        chain, count = self.problem.chain, len(self.offsets)
        rows = np.repeat(self.row_of[-1], count)
        at_rows = (self.row_of[-1][:, None] * count + np.arange(count)).reshape(-1)
        own: Sequence[Table] = [Table(table.variables, table.numbers[at_rows]) for table in message]
        shift = chain[self.high - 1].variables[0].number - chain[self.low + d - 1].variables[0].number
        own = moved(own, shift, chain[self.low].variables[0].number)
        for at in range(self.high, len(chain)):
            own = self._step(at, own, rows)
        least = _least(own).reshape(-1, count)
        found: Array = np.maximum(0.0, (least - self.charged[-1][:, None]).max(axis=0))
        return found

    def _first_stage(self, longest: float) -> Array:
        rows = self.row_of[0]
        message: Sequence[Table] = ()
        for at in range(self.low):
            message = self._step(at, message, rows)
        found: list[list[float]] = []
        for d in range(self.high - self.low + 1):
            closed = self._closed(message, d, rows)
            found.append([max(0.0, float((own - self.charged[0]).max())) for own in closed])
            if found[-1][0] > longest:
                break
            if self.low + d < self.high:
                message = self._step(self.low + d, message, rows)
        return np.array(found)

    def _best(self, least: Array) -> Array:
        """Of rows by weights and place the best price of every stage: (stage, place)."""
        own = least.reshape(len(self.price), len(self.offsets))[self.row_of]
        found: Array = np.maximum(0.0, (own - self.charged[:, :, None]).max(axis=1))
        return found

    def _step(
        self,
        at: int,
        message: Sequence[Table],
        rows: Rows,
        *,
        start: Rows | None = None,
        stop: int | None = None,
    ) -> Sequence[Table]:
        """One segment more: its blocks from `start` on, or before `stop`, counted from its first."""
        segment = self.problem.chain[at]
        first = segment.variables[0].block

        def counted(numbers: Array, block: int) -> Array:
            """Blocks that are not of the stage cost nothing."""
            own = numbers[rows]
            if stop is not None and block - first >= stop:
                return np.zeros_like(own)
            if start is not None:
                is_in = (block - first >= start).reshape((-1,) + (1,) * (own.ndim - 1))
                return np.where(is_in, own, 0.0)
            return own

        kept, again = self._numbers(segment)
        tables = self._tables(segment, at, kept, counted)
        is_alternative = self.recompute and segment.is_repeated
        step = SegmentTables(
            first=segment.variables[0].number,
            tables=tables,
            lives_on=segment.lives_on,
            last_touched=segment.last_touched,
            kind=segment.kind,
            alternative=self._tables(segment, at, again, counted) if is_alternative else (),
        )
        return one_more(step, message, self.problem.sizes)

    def _tables(
        self,
        segment: ChainSegment,
        at: int,
        numbers: Sequence[Array],
        counted: Callable[[Array, int], Array],
    ) -> tuple[Table, ...]:
        blocks = [v.block for v in segment.variables]
        found = [
            Table((v.number,), counted(own, block))
            for v, own, block in zip(segment.variables, numbers, blocks, strict=False)
        ]
        for edge, own in zip(segment.edges, numbers[len(blocks) :], strict=True):
            pair = counted(own, self.tables.network.variables[edge.target].block)
            is_ordered = edge.source < edge.target
            ends = (edge.source, edge.target) if is_ordered else (edge.target, edge.source)
            found.append(Table(ends, pair if is_ordered else pair.swapaxes(1, 2)))
        return (*found, *(Table(*own) for own in self.problem.joint.get(at, [])))

    def _numbers(self, segment: ChainSegment) -> tuple[list[Array], list[Array]]:
        """What variables, then edges, add by stage and price: kept, and recomputed."""
        if segment.kind not in self._known:
            kept, again = list[Array](), list[Array]()
            price, held = self.price[:, None], self.held[:, None]
            for v in segment.variables:
                unary = self.tables.unary[v.key]
                cost = unary.forward[0] + unary.backward[0] + np.zeros_like(price)
                if unary.parameters is not None:
                    own = unary.parameters
                    ways = own.micro_seconds[:, 0] + self.share * own.step_seconds[:, 0]
                    cost = cost + (ways + price[:, None] * own.stored_bytes[:, 0]).min(axis=1)
                kept.append(cost + held * unary.saved_bytes[0])
                again.append(cost + unary.forward[0] + held * unary.leaving_bytes[0])
            for edge in segment.edges:
                pair, rows = self.tables.pairs[edge.key], np.zeros((len(self.price), 1, 1))
                kept.append(pair.forward[0] + pair.backward[0] + rows)
                again.append(2 * pair.forward[0] + pair.backward[0] + rows)
            self._known[segment.kind] = kept, again
        return self._known[segment.kind]


class _Path:
    """The cheapest cuts: paths over the places of the run, stage by stage."""

    def __init__(self, runs: _Runs, num_layers: int) -> None:
        self.runs, self.num_layers = runs, num_layers

    def least(self, paces: Array) -> Array:
        """The least Σ g_s for every limit of the pace; infinite where some stage must take longer."""
        runs, num_places = self.runs, self.runs.inner.shape[1]

        def within(seconds: float) -> Array:
            found: Array = np.where(seconds <= paces, seconds, np.inf)
            return found

        at = np.full((len(paces), self.num_layers + 1, num_places), np.inf)
        for d, row in enumerate(runs.first[: self.num_layers + 1]):
            for j, seconds in enumerate(row):
                at[:, d, j] = within(seconds)
        at[:, 0, 0] = 0.0  # cut before the run
        for stage in runs.inner[1:-1]:
            reached = np.minimum.accumulate(at, axis=2)  # begins and ends in one layer
            for i, d, j in np.ndindex(stage.shape):
                if stage[i, d, j] <= paces[-1]:
                    own = at[:, : self.num_layers - d, i] + within(float(stage[i, d, j]))[:, None]
                    np.minimum(reached[:, d + 1 :, j], own, out=reached[:, d + 1 :, j])
            at = reached
        found: Array = at[:, self.num_layers, 0].copy()  # cut behind the run
        for i, d in np.ndindex(runs.last.shape):
            found = np.minimum(found, at[:, self.num_layers - d - 1, i] + within(float(runs.last[i, d])))
        return found


def _least(message: Sequence[Table]) -> Array:
    """Of every row, whatever comes after."""
    whole = summed(message)
    found: Array = whole.numbers.reshape(len(whole.numbers), -1).min(axis=1)
    return found


def _longest_run(problem: SettledProblem) -> tuple[int, int]:
    """The longest run of segments that are equal."""
    kinds = [problem.kind(at) for at in range(len(problem.chain))]
    best, start = (0, 1), 0
    for at in range(1, len(kinds) + 1):
        if at == len(kinds) or kinds[at] != kinds[start]:
            best = max(best, (start, at), key=lambda own: own[1] - own[0])
            start = at
    return best
