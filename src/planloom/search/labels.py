"""The best plan of one stage under a limit of memory: labels on the way back of elimination, with a proof.

Wanted is the least number of seconds of all choices with  Σ bytes + max peak ≤ limit.  For prices λ_j of memory
(0, the best ones of Lagrange's dual, and one at which only memory counts) elimination leaves a *record* for every
variable: the tables from which it follows once all later ones are chosen. A label is a choice of the variables from the
last on. Choosing otherwise than the record says costs a *regret*, and

    J_j + Σ regrets_j - λ_j · (limit - peak)

is a lower bound on every way to complete the label, exact for this price. A label is dropped where

- one of its bounds is not below the best solution known;
- another label with the same choices of all variables that matter further on has no more seconds, bytes and peak;
- a junction is not in the layout that takes the least seconds with its neighbours: plans have no such (`figures`);
- there are too many: then the least bound of those dropped is what is proven.

So what comes out is the optimum, or a solution and a bound on all others. If no label is left and none was dropped for
number, nothing fits, and that is proven.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planloom.search.conversions import Array
from planloom.search.elimination import Indices, Record, Step, eliminate
from planloom.search.figures import Choice
from planloom.search.network import Key, Variable
from planloom.search.tables import Tables

_NEIGHBOURS = 24
"""With so many others of its state, next in seconds, a label is compared."""
_ROUNDING = 1e-11


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelResult:
    """The best choice and its seconds, None if none better than what was known was found; no plan is faster than
    `bound_seconds`."""

    choice: Choice | None
    seconds: float = np.inf
    bound_seconds: float


@dataclass(eq=False, slots=True)
class _Labels:
    """Columns, one number a label. `bounds`: J and regrets, one row a price; `picked`: choices that still matter."""

    bounds: Array
    held_bytes: Array
    peak_bytes: Array
    segment_peak: Array
    segment_saved: Array
    again: NDArray[np.bool_]
    """Is the segment that is being chosen recomputed?"""
    picked: dict[int, Indices] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return len(self.held_bytes)

    @property
    def peak(self) -> Array:
        """So far."""
        return np.maximum(self.peak_bytes, self.segment_peak + np.where(self.again, self.segment_saved, 0.0))

    def taken(self, at: Indices) -> "_Labels":
        return _Labels(
            self.bounds[:, at], self.held_bytes[at], self.peak_bytes[at], self.segment_peak[at],
            self.segment_saved[at], self.again[at], {number: own[at] for number, own in self.picked.items()},
        )  # fmt: skip


@dataclass(frozen=True, eq=False, slots=True)
class _Ways:
    """The ways to store a block's parameters, for every price: (prices, ways, strategies) of regret; which are worth
    looking at: (ways, strategies)."""

    regrets: Array
    stored_bytes: Array
    working_bytes: Array
    is_useful: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Choosing:
    """One operation: in segment `segment` choose between recomputing and not (`record` -1), or the variable of a
    record. `reads`: the variables that must be known; `checks`: junctions that can be checked then."""

    segment: int
    record: int
    variable: int
    reads: tuple[int, ...]
    checks: tuple[int, ...] = ()


class LabelSearch:
    """One problem of one stage, its plans with a peak in a range. `prices` of memory, ascending, the first zero."""

    def __init__(
        self,
        tables: Tables,
        g: int,
        *,
        limit_bytes: float,
        peaks: tuple[float, float],
        prices: Sequence[float],
        recompute: bool = True,
    ) -> None:
        assert tables.shape.num_stages == 1, "labels are of one stage"
        assert prices[0] == 0.0, "the first row is of seconds"
        self.tables, self.g, self.limit_bytes, self.prices = tables, g, limit_bytes, np.array(prices)
        count = len(prices)
        self.least_peak, self.most_peak = peaks
        costs = tables.costs(
            self.prices, np.ones(count), np.full(count, g), recompute=recompute, most_peak=np.full(count, peaks[1])
        )
        self.totals, self.steps = eliminate(costs.segments, costs.sizes)
        self._ways: dict[Key, _Ways | None] = {}
        self._operations, self._last_uses = self._planned()

    def search(self, *, below: float, most: int) -> LabelResult:
        """The best choice faster than `below`, with at most so many labels at a time."""
        self._below, self._most, self._dropped = below * (1 - _ROUNDING), most, np.inf
        self._history: list[tuple[Indices, str, int, Indices]] = []
        zero = np.zeros(1)
        labels = _Labels(self.totals[:, None].copy(), zero, zero, zero, zero, np.zeros(1, dtype=bool))
        for number, operation in enumerate(self._operations):
            if operation.record < 0:
                labels = self._segment_begins(labels, operation)
            else:
                labels = self._chosen(labels, operation)
            for own in [v for v in labels.picked if self._last_uses[v] <= number]:
                del labels.picked[own]
            labels = self._undominated(labels)
            if not labels.count:
                return LabelResult(choice=None, bound_seconds=float(min(self._dropped, below)))
        fits = np.flatnonzero(labels.held_bytes + labels.peak <= self.limit_bytes)
        if not len(fits):
            return LabelResult(choice=None, bound_seconds=float(min(self._dropped, below)))
        seconds = labels.bounds[0]
        best = int(fits[seconds[fits].argmin()])
        least = float(seconds[best])
        return LabelResult(choice=self._choice(best), seconds=least, bound_seconds=min(self._dropped, least))

    # -- what is needed when

    def _planned(self) -> tuple[list[_Choosing], dict[int, int]]:
        """All operations in the order of the way back; for every variable the last one that needs it."""
        chain = self.tables.network.chain
        around: dict[int, set[int]] = {}
        for places in self.tables.network.places_of_junctions:
            for _, _, others in places.edges:
                for junction, other in zip(places.numbers.tolist(), others.tolist(), strict=True):
                    around.setdefault(junction, {junction}).add(other)
        found, chosen, unchecked = list[_Choosing](), set[int](), dict(around)
        for at in reversed(range(len(self.steps))):
            step, segment = self.steps[at], chain[at]
            ends = tuple(step.moved(v) for v in step.taken.variables) if step.taken is not None else ()
            living = tuple(v.number for v, lives in zip(segment.variables, segment.lives_on, strict=True) if lives)
            found.append(_Choosing(at, -1, -1, tuple({*ends, *living})))
            for i in reversed(range(len(step.records[0]))):
                same = [records[i] for records in step.records]
                assert len({record.variable for record in same}) == 1, "alternatives are eliminated in the same order"
                variable = step.moved(same[0].variable)
                reads = {step.moved(v) for record in same for table in record.tables for v in table.variables}
                chosen.add(variable)
                checks = tuple(junction for junction, group in unchecked.items() if group <= chosen)
                for junction in checks:
                    reads |= unchecked.pop(junction)
                found.append(_Choosing(at, i, variable, tuple(reads), checks))
        uses: dict[int, int] = {}
        for number, operation in enumerate(found):
            uses.update(dict.fromkeys(operation.reads, number))
        return found, uses

    # -- operations

    def _segment_begins(self, labels: _Labels, operation: _Choosing) -> _Labels:
        """The segment before is done; recompute this one, or not; what lives on of it is chosen, and counts now."""
        step, network = self.steps[operation.segment], self.tables.network
        labels.peak_bytes = labels.peak
        zero = np.zeros(labels.count)
        labels.segment_peak, labels.segment_saved, labels.again = zero, zero, np.zeros(labels.count, dtype=bool)
        if step.taken is not None:
            ends = [labels.picked[step.moved(v)] for v in step.taken.variables]
            rows = np.arange(len(self.prices))[:, None]
            both = np.stack([left[(rows, *(end[None, :] for end in ends))] for left in step.taken.left], axis=2)
            labels, picked = self._extended(labels, both - both.min(axis=2, keepdims=True), "again", operation.segment)
            labels.again = picked.astype(bool)
        for variable in (network.variables[number] for number in operation.reads):
            if variable.segment == operation.segment:
                labels = self._counted(labels, variable)
        return labels

    def _chosen(self, labels: _Labels, operation: _Choosing) -> _Labels:
        step = self.steps[operation.segment]
        records = [records[operation.record] for records in step.records]
        found = [self._totals_of(labels, step, record) for record in records]
        totals = found[0] if len(found) == 1 else np.where(labels.again[None, :, None], found[1], found[0])
        regrets = totals - totals.min(axis=2, keepdims=True)
        labels, picked = self._extended(labels, regrets, "choice", operation.variable)
        labels.picked[operation.variable] = picked
        variable = self.tables.network.variables[operation.variable]
        if variable.segment == operation.segment:
            labels = self._counted(labels, variable)
        for junction in operation.checks:
            labels = self._checked(labels, junction)
        return labels

    def _totals_of(self, labels: _Labels, step: Step, record: Record) -> Array:
        """(prices, labels, choices): what a record's variable adds, with all that follows from it."""
        rows, total = np.arange(len(self.prices))[:, None], None
        for table in record.tables:
            numbers = np.moveaxis(table.numbers, 1 + table.variables.index(record.variable), -1)
            others = [labels.picked[step.moved(v)][None, :] for v in table.variables if v != record.variable]
            own = numbers[(rows, *others)] if others else numbers[:, None, :]
            total = own if total is None else total + own
        assert total is not None
        return np.broadcast_to(total, (len(self.prices), labels.count, total.shape[2]))

    def _counted(self, labels: _Labels, variable: Variable) -> _Labels:
        """Bytes of a variable whose choice and segment are known; ways to store its parameters."""
        unary, g, picked = self.tables.unary[variable.key], self.g, labels.picked[variable.number]
        saved, leaving = unary.saved_bytes[g][picked], unary.leaving_bytes[g][picked]
        labels.held_bytes = labels.held_bytes + np.where(labels.again, leaving, saved)
        labels.segment_saved = labels.segment_saved + saved
        peak = unary.peak_bytes[g][picked]
        ways = self._ways_of(variable.key)
        if ways is None:
            labels.segment_peak = np.maximum(labels.segment_peak, peak)
            return labels
        regrets = np.where(ways.is_useful[:, picked].T[None], ways.regrets[:, :, picked].swapaxes(1, 2), np.inf)
        stored, working = ways.stored_bytes[:, picked].T, ways.working_bytes[:, picked].T
        whole = np.maximum(labels.segment_peak[:, None], peak[:, None] + working)
        labels, _ = self._extended(labels, regrets, "way", variable.number, held=stored, segment_peak=whole)
        return labels

    def _ways_of(self, key: Key) -> _Ways | None:
        if key not in self._ways:
            own = self.tables.unary[key].parameters
            self._ways[key] = None
            if own is not None:
                g = self.g
                seconds = self.tables.weights[g] * own.micro_seconds[:, g] + own.step_seconds[:, g]
                stored, working = own.stored_bytes[:, g], own.working_bytes[:, g]
                # As in the tables: what has too large a peak is no way, nor the cheapest one.
                seconds = np.where(working > self.most_peak - self.tables.unary[key].peak_bytes[g], np.inf, seconds)
                costs = seconds[None] + self.prices[:, None, None] * stored[None]
                with np.errstate(invalid="ignore"):
                    regrets = np.where(np.isfinite(costs), costs - costs.min(axis=1, keepdims=True), np.inf)
                self._ways[key] = _Ways(regrets, stored, working, _useful(seconds, stored, working))
        return self._ways[key]

    def _checked(self, labels: _Labels, junction: int) -> _Labels:
        """Only labels with the junction in the layout that takes the least seconds (as `with_best_junctions`)."""
        network, tables, g = self.tables.network, self.tables, self.g
        places = next(own for own in network.places_of_junctions if junction in own.numbers)
        at = int(np.flatnonzero(places.numbers == junction)[0])
        total = np.zeros((labels.count, tables.num_choices(places.key)))
        for key, ends_here, others in places.edges:
            pair = tables.pairs[key].forward[g] + tables.pairs[key].backward[g]
            other = labels.picked[int(others[at])]
            total += pair[other] if ends_here else pair[:, other].T
        right = np.flatnonzero(total.argmin(axis=1) == labels.picked[junction])
        return self._kept(labels.taken(right), right, "same", 0, right)

    # -- labels

    def _extended(
        self,
        labels: _Labels,
        regrets: Array,
        what: str,
        number: int,
        *,
        held: Array | None = None,
        segment_peak: Array | None = None,
    ) -> tuple[_Labels, Indices]:
        """Labels times choices; `regrets`: (prices, labels, choices), infinite where there is none. With them what a
        choice adds to the bytes held, and the segment's peak with it, (labels, choices)."""
        with np.errstate(invalid="ignore"):
            bounds = labels.bounds[:, :, None] + regrets
        peak = labels.peak[:, None]
        if segment_peak is not None:
            peak = np.maximum(peak, segment_peak + np.where(labels.again, labels.segment_saved, 0.0)[:, None])
        lower = self._lower(bounds, np.broadcast_to(peak, bounds.shape[1:]))
        parents, picked = np.nonzero(lower < self._below)
        found = labels.taken(parents)
        found.bounds = bounds[:, parents, picked]
        if held is not None and segment_peak is not None:
            found.held_bytes = found.held_bytes + held[parents, picked]
            found.segment_peak = segment_peak[parents, picked]
        fewer = self._fewest(lower[parents, picked])
        self._history.append((parents[fewer], what, number, picked[fewer]))
        return found.taken(fewer), picked[fewer]

    def _lower(self, bounds: Array, peak: Array) -> Array:
        """The best of the bounds of all prices; infinite where one is (or is none: ∞ - ∞)."""
        room = self.limit_bytes - np.maximum(peak, self.least_peak)
        prices = self.prices.reshape((-1,) + (1,) * room.ndim)
        lower = (bounds - prices * room[None]).max(axis=0)
        return np.where(np.isnan(lower) | (peak > self.most_peak), np.inf, lower)

    def _fewest(self, lower: Array) -> Indices:
        """All, or the most promising so many; what is dropped bounds what is proven."""
        if len(lower) <= self._most:
            return np.arange(len(lower))
        order = np.argsort(lower, kind="stable")
        self._dropped = min(self._dropped, float(lower[order[self._most]]))
        return np.sort(order[: self._most])

    def _kept(self, labels: _Labels, parents: Indices, what: str, number: int, picked: Indices) -> _Labels:
        self._history.append((parents, what, number, picked))
        return labels

    def _undominated(self, labels: _Labels) -> _Labels:
        """Without labels that another of the same state is no worse than in anything."""
        if labels.count < 2:
            return labels
        state = np.zeros(labels.count, dtype=np.int64)
        for own in (*labels.picked.values(), labels.again.astype(np.intp)):
            _, state = np.unique(state * (int(own.max()) + 1) + own, return_inverse=True)
        saved = np.where(labels.again, labels.segment_saved, 0.0)
        order = np.lexsort((labels.held_bytes, labels.bounds[0], state))
        columns = [own[order] for own in (labels.held_bytes, labels.peak_bytes, labels.segment_peak, saved)]
        state, seconds = state[order], labels.bounds[0][order]
        is_kept = np.ones(labels.count, dtype=bool)
        for back in range(1, min(_NEIGHBOURS, labels.count - 1) + 1):
            worse = (state[back:] == state[:-back]) & (seconds[:-back] <= seconds[back:])
            for column in columns:
                worse &= column[:-back] <= column[back:]
            is_kept[back:] &= ~worse
        left = np.sort(order[is_kept])
        return self._kept(labels.taken(left), left, "same", 0, left)

    def _choice(self, label: int) -> Choice:
        network = self.tables.network
        variables = np.zeros(len(network.variables), dtype=np.intp)
        storage = np.full(len(network.variables), -1, dtype=np.intp)
        recomputed = np.zeros(len(network.chain), dtype=bool)
        for parents, what, number, picked in reversed(self._history):
            if what == "choice":
                variables[number] = picked[label]
            elif what == "way":
                storage[number] = picked[label]
            elif what == "again":
                recomputed[number] = bool(picked[label])
            label = int(parents[label])
        return Choice(variables=variables, storage=storage, recomputed=recomputed)


def _useful(*figures: Array) -> NDArray[np.bool_]:
    """Which ways (first dim) no other is better than in one figure and no worse in all, the first of equal ones."""
    count = len(figures[0])
    found = np.isfinite(figures[0])
    for way in range(count):
        for other in range(count):
            if other != way:
                no_worse = np.logical_and.reduce([own[other] <= own[way] for own in figures])
                equal = np.logical_and.reduce([own[other] == own[way] for own in figures])
                found[way] &= ~(no_worse & (~equal | (other < way)))
    return found
