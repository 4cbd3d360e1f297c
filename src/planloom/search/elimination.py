"""Exact minimization of a sum of tables over pairs of variables, for a whole batch of problems at once.

A problem is  min over x of  Σ_v unary_v[x_v] + Σ_(u,v) pair_uv[x_u, x_v],  with variables in segments, one after
another. Variables are eliminated segment by segment, each time the one whose table is smallest:

    message[x_N] = min over x_v of the sum of all tables that have v,   N the other variables in them,

and what is left of a segment is its *message*: tables over the variables that later segments touch. This is exact, and
costs the size of the largest table, which the treewidth of the block graph decides (two to three in transformers).

Equal segments in a row have equal tables, so each maps a message to the next by the same function. That function is
linear in the algebra of (min, +): once a message differs from the one before by a constant, all further ones do, and
every further equal segment has the same minimizers. So depth is nearly free. (Ties apart, a period above one would be
possible; then segments are simply eliminated one by one.) Problems of a batch settle at different depths: those that
have settled leave the others to themselves.

A segment may have an *alternative*: other tables over the same variables (its activations are recomputed, say). Then
both are eliminated, and for every value of what lives on the smaller one counts.

All tables have a leading axis: the problems of the batch, alike in structure, different in numbers.
"""

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.intp]

_STEADY = 1e-12
"""Messages that differ from a constant by less than this share of it differ by rounding."""
_PARTED = 8
"""Settled problems are parted from the others when they are one in so many."""
_LARGE = 1 << 15
"""Sums of so many numbers are made choice by choice: a quarter of a megabyte."""


@dataclass(frozen=True, eq=False, slots=True)
class Table:
    """A summand over `variables` (numbers, ascending): its numbers have the shape (problems, *domain sizes)."""

    variables: tuple[int, ...]
    numbers: Array


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class SegmentTables:
    """A segment: its first variable, and the tables that have one of its variables and none of later segments.

    `kind`: equal for segments whose tables are equal, variables counted from `first`.
    """

    first: int
    tables: tuple[Table, ...]
    lives_on: tuple[bool, ...]
    """Which of its variables do later segments touch?"""
    last_touched: tuple[int, ...]
    """Variables of earlier segments that no later segment touches."""
    kind: object
    alternative: tuple[Table, ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class Record:
    """How an eliminated variable follows from others: it minimizes the sum of these tables."""

    variable: int
    tables: tuple[Table, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Taken:
    """What is left of two alternatives, by the variables that live on; and which of them is smaller."""

    variables: tuple[int, ...]
    left: tuple[Array, Array]
    numbers: Indices


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """The elimination of one segment: records in the order in which they were made, for each of its alternatives."""

    records: tuple[tuple[Record, ...], ...]
    taken: Taken | None = None
    shift: int = 0
    """To be added to the variables of the records, where the step of an earlier, equal segment stands for this one."""
    relative_from: int = 0
    """Variables below are the same in all equal segments: what all of them read."""
    rows: Indices | None = None
    """Where the problems at hand are in the records' tables; None: they are all that there are."""

    def moved(self, variable: int) -> int:
        return variable + self.shift if variable >= self.relative_from else variable


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Minimum:
    """The minimum of every problem; for every variable the minimizer in each; for every segment which alternative."""

    totals: Array
    variables: dict[int, Indices]
    alternatives: tuple[Indices, ...]


def minimize(segments: Sequence[SegmentTables], sizes: Mapping[int, int], *, with_choices: bool = True) -> Minimum:
    """Exact, for every problem of the batch; without choices only the minima."""
    parts = _eliminations(segments, sizes, apart=True)
    problems = np.concatenate([part.problems for part in parts])
    order = np.argsort(problems)
    totals = np.concatenate([part.total for part in parts])[order]
    if not with_choices:
        return Minimum(totals=totals, variables={}, alternatives=())
    found = [_backtracked(part.steps, len(part.total)) for part in parts]
    return Minimum(
        totals=totals,
        variables={v: np.concatenate([own[v] for own, _ in found])[order] for v in found[0][0]},
        alternatives=tuple(np.concatenate(own)[order] for own in zip(*(own for _, own in found), strict=True)),
    )


def eliminate(segments: Sequence[SegmentTables], sizes: Mapping[int, int]) -> tuple[Array, list[Step]]:
    """The minimum of every problem, and how all variables follow, segment by segment, in all problems alike."""
    (whole,) = _eliminations(segments, sizes, apart=False)
    return whole.total, whole.steps


@dataclass(eq=False, slots=True, kw_only=True)
class _Elimination:
    """Some problems of a batch, eliminated up to segment `at`."""

    problems: Indices
    total: Array
    message: tuple[Table, ...] = ()
    steps: list[Step] = field(default_factory=list)
    at: int = 0
    settled: NDArray[np.bool_]
    """Which problems' messages only grow by the constant?"""
    constant: Array
    is_whole: bool = True
    own: dict[int, Array] = field(default_factory=dict)
    """Numbers of these problems, by the id of those of the batch, which outlive this."""

    def tables_of(self, tables: Sequence[Table]) -> tuple[Table, ...]:
        if self.is_whole:
            return tuple(tables)
        for table in tables:
            if id(table.numbers) not in self.own:
                self.own[id(table.numbers)] = table.numbers[self.problems]
        return tuple(Table(table.variables, self.own[id(table.numbers)]) for table in tables)

    def taken(self, rows: Indices) -> "_Elimination":
        """Some of the problems, for themselves."""
        everything = np.arange(len(self.problems))
        steps = [replace(own, rows=(everything if own.rows is None else own.rows)[rows]) for own in self.steps]
        return _Elimination(
            problems=self.problems[rows], total=self.total[rows], at=self.at, steps=steps, is_whole=False,
            message=tuple(Table(table.variables, table.numbers[rows]) for table in self.message),
            settled=self.settled[rows], constant=self.constant[rows],
        )  # fmt: skip


def _eliminations(segments: Sequence[SegmentTables], sizes: Mapping[int, int], *, apart: bool) -> list[_Elimination]:
    """All segments eliminated; `apart`: problems that have settled are not kept with those that have not."""
    count = segments[0].tables[0].numbers.shape[0]
    whole = _Elimination(
        problems=np.arange(count), total=np.zeros(count), settled=np.zeros(count, dtype=bool), constant=np.zeros(count)
    )
    waiting, done = [whole], list[_Elimination]()
    while waiting:
        own = waiting.pop()
        while own.at < len(segments):
            _advance(own, segments, sizes)
            if apart and _is_worth_parting(own.settled):
                waiting.append(own.taken(np.flatnonzero(own.settled)))
                own = own.taken(np.flatnonzero(~own.settled))
        assert not own.message, "variables are left over"
        done.append(own)
    return done


def _is_worth_parting(settled: NDArray[np.bool_]) -> bool:
    """Taking some numbers out costs little, but not nothing."""
    return not settled.all() and int(settled.sum()) * _PARTED >= len(settled)


def _advance(own: _Elimination, segments: Sequence[SegmentTables], sizes: Mapping[int, int]) -> None:
    """One segment more."""
    segment = segments[own.at]
    before = segments[own.at - 1] if own.at else None
    own.at += 1
    if before is not None and segment.kind == before.kind and own.settled.all():
        own.total = own.total + own.constant
        shift = segment.first - before.first
        own.steps.append(replace(own.steps[-1], shift=own.steps[-1].shift + shift))
        own.message = tuple(_shifted(table, shift, before.first) for table in own.message)
        return
    step, left = _step(
        replace(segment, tables=own.tables_of(segment.tables), alternative=own.tables_of(segment.alternative)),
        own.message, sizes,
    )  # fmt: skip
    message, lowest = _normalized(left, len(own.problems))
    own.total = own.total + lowest
    own.settled, own.constant = np.zeros(len(own.problems), dtype=bool), lowest
    if before is not None and segment.kind == before.kind:
        own.settled = _is_constant(own.message, message, segment.first - before.first, before.first, lowest)
    own.steps.append(replace(step, relative_from=before.first if before is not None else 0))
    own.message = message


def least_over_rows(segments: Sequence[SegmentTables], sizes: Mapping[int, int], extra: Sequence[Array]) -> float:
    """The least sum where every segment takes its numbers from one row of the batch, each from its own.

    `extra[s]`: what each row costs segment s besides; infinite where it may not be taken.
    """
    total, message, constant = np.zeros(1), tuple[Table, ...](), None
    for at, segment in enumerate(segments):
        before = segments[at - 1] if at else None
        is_equal = before is not None and segment.kind == before.kind and np.array_equal(extra[at], extra[at - 1])
        if constant is not None and before is not None and is_equal:
            total = total + constant
            message = tuple(_shifted(table, segment.first - before.first, before.first) for table in message)
            continue
        constant = None
        _, left = _step(segment, message, sizes)
        whole = summed(left)
        rows = whole.numbers + extra[at].reshape((-1,) + (1,) * len(whole.variables))
        normalized, lowest = _normalized([Table(whole.variables, rows.min(axis=0, keepdims=True))], 1)
        total = total + lowest
        if before is not None and is_equal:
            is_settled = _is_constant(message, normalized, segment.first - before.first, before.first, lowest)
            constant = lowest if is_settled.all() else None
        message = normalized
    return float(total[0])


def gains_of_rows(
    segments: Sequence[SegmentTables], sizes: Mapping[int, int], extra: Sequence[Array]
) -> dict[object, Array]:
    """For every kind of segment what each row would gain over those that `extra` allows, if what follows were free:
    told of the last of several equal segments."""
    found: dict[object, Array] = {}
    message, is_settled = tuple[Table, ...](), False
    for at, segment in enumerate(segments):
        before = segments[at - 1] if at else None
        is_equal = before is not None and segment.kind == before.kind and np.array_equal(extra[at], extra[at - 1])
        if is_settled and is_equal and before is not None:
            message = moved(message, segment.first - before.first, before.first)
            continue
        _, left = _step(segment, message, sizes)
        whole = summed(left)
        rows = whole.numbers + extra[at].reshape((-1,) + (1,) * len(whole.variables))
        own = rows.min(axis=0, keepdims=True)
        place, flat = int(own.argmin()), whole.numbers.reshape(len(rows), -1)
        least = own.reshape(-1)[place]
        is_possible = np.isfinite(least)
        found[segment.kind] = np.maximum(0.0, least - flat[:, place]) if is_possible else np.zeros(len(rows))
        normalized, lowest = _normalized([Table(whole.variables, own)], 1)
        is_settled = False
        if is_equal and before is not None:
            shift = segment.first - before.first
            is_settled = bool(_is_constant(message, normalized, shift, before.first, lowest).all())
        message = normalized
    return found


def one_more(segment: SegmentTables, message: Sequence[Table], sizes: Mapping[int, int]) -> Sequence[Table]:
    """What is left after a segment more: of one that comes first, with an empty message, what is before it is free."""
    return _step(segment, message, sizes)[1]


def moved(message: Sequence[Table], shift: int, first: int) -> tuple[Table, ...]:
    """The same message after another of several equal segments; variables below `first` stay."""
    return tuple(_shifted(table, shift, first) for table in message)


def largest_table(segments: Sequence[SegmentTables], sizes: Mapping[int, int]) -> int:
    """How many numbers the largest table has that elimination makes for one problem."""
    largest, message = 1, list[frozenset[int]]()
    for segment in segments:
        tables = [*message, *(frozenset(table.variables) for table in segment.tables)]
        waiting = _waiting(segment)
        while waiting:
            own = {v: frozenset().union(*(t for t in tables if v in t)) for v in waiting}
            variable = min(waiting, key=lambda v: (_volume(own[v], sizes), v))
            largest = max(largest, _volume(own[variable], sizes))
            tables = [t for t in tables if variable not in t] + [own[variable] - {variable}]
            waiting.discard(variable)
        message = [t for t in tables if t]
        if segment.alternative:
            message = [frozenset().union(*message)] if message else []
            largest = max(largest, *(_volume(t, sizes) for t in message), 1)
    return largest


def _waiting(segment: SegmentTables) -> set[int]:
    """The variables that nothing later touches."""
    return {segment.first + i for i, lives in enumerate(segment.lives_on) if not lives} | set(segment.last_touched)


def _step(segment: SegmentTables, message: Sequence[Table], sizes: Mapping[int, int]) -> tuple[Step, Sequence[Table]]:
    """Eliminate a segment; with an alternative, both, and keep the smaller of what is left of them."""
    records, left = _eliminated(segment, [*message, *segment.tables], sizes)
    if not segment.alternative:
        return Step((records,)), left
    others, also_left = _eliminated(segment, [*message, *segment.alternative], sizes)
    one, two = summed(left), summed(also_left)
    taken = Taken(one.variables, (one.numbers, two.numbers), (two.numbers < one.numbers).astype(np.intp))
    return Step((records, others), taken), [Table(one.variables, np.minimum(one.numbers, two.numbers))]


def _eliminated(
    segment: SegmentTables, tables: Sequence[Table], sizes: Mapping[int, int]
) -> tuple[tuple[Record, ...], list[Table]]:
    """Eliminate all variables that nothing later touches."""
    left, records = list(tables), []
    first, waiting = segment.first, _waiting(segment)
    structure = tuple(tuple(v - first for v in table.variables) for table in left)
    around = sorted({v for table in structure for v in table})
    order = _order(structure, frozenset(v - first for v in waiting), tuple((v, sizes[v + first]) for v in around))
    for variable in (v + first for v in order):
        own = tuple(t for t in left if variable in t.variables)
        left = [t for t in left if variable not in t.variables]
        records.append(Record(variable, own))
        left.append(_least_over(variable, own, sizes))
    return tuple(records), left


def _least_over(variable: int, tables: Sequence[Table], sizes: Mapping[int, int]) -> Table:
    """The least sum of tables that all have a variable, over its choices.

    A large sum is never there as a whole: choice by choice, what is added up and compared stays in the cache. The same
    numbers are added in the same order, so the result is the same to the last bit.
    """
    variables = sorted({v for table in tables for v in table.variables})
    others, count = tuple(v for v in variables if v != variable), sizes[variable]
    problems = max(table.numbers.shape[0] for table in tables)
    if len(tables) < 2 or count < 2 or problems * _volume(variables, sizes) < _LARGE:
        whole = summed(tables)
        return Table(others, whole.numbers.min(axis=1 + whole.variables.index(variable)))
    spread = []
    for table in sorted(tables, key=lambda t: t.numbers.size):
        apart = np.moveaxis(table.numbers, 1 + table.variables.index(variable), 0)
        shape = (count, apart.shape[1], *(sizes[v] if v in table.variables else 1 for v in others))
        spread.append(np.ascontiguousarray(apart).reshape(shape))
    least = np.empty(np.broadcast_shapes(*(own.shape[1:] for own in spread)))
    total = np.empty_like(least)
    for choice in range(count):
        into = total if choice else least
        first = spread[0][choice]
        for own in spread[1:-1]:
            first = first + own[choice]
        np.add(first, spread[-1][choice], out=into)
        if choice:
            np.minimum(least, total, out=least)
    return Table(others, least)


@lru_cache(maxsize=65536)
def _order(
    structure: tuple[tuple[int, ...], ...], waiting: frozenset[int], sizes: tuple[tuple[int, int], ...]
) -> tuple[int, ...]:
    """In which order to eliminate: always the variable whose table is smallest."""
    size_of, tables, left = dict(sizes), [frozenset(table) for table in structure], set(waiting)
    order = []
    while left:
        around = {v: frozenset().union(*(t for t in tables if v in t)) for v in left}
        variable = min(left, key=lambda v: (_volume(around[v], size_of), v))
        tables = [t for t in tables if variable not in t] + [around[variable] - {variable}]
        order.append(variable)
        left.discard(variable)
    return tuple(order)


def _volume(variables: Iterable[int], sizes: Mapping[int, int]) -> int:
    volume = 1
    for variable in variables:
        volume *= sizes[variable]
    return volume


def summed(tables: Sequence[Table]) -> Table:
    """One table with the variables of all."""
    variables = tuple(sorted({v for table in tables for v in table.variables}))
    if len(tables) == 1:
        return tables[0]
    # Small tables first, so that few additions are as large as the result.
    total: Array | None = None
    for table in sorted(tables, key=lambda t: t.numbers.size):
        shape = [table.numbers.shape[0]] + [1] * len(variables)
        for axis, variable in enumerate(table.variables):
            shape[1 + variables.index(variable)] = table.numbers.shape[1 + axis]
        spread = table.numbers.reshape(shape)
        total = spread if total is None else total + spread
    assert total is not None
    return Table(variables, total)


def _normalized(tables: Sequence[Table], num_problems: int) -> tuple[tuple[Table, ...], Array]:
    """The tables with one a set of variables, each with least zero; and the sum of what was taken away."""
    by_variables: dict[tuple[int, ...], list[Table]] = {}
    for table in tables:
        by_variables.setdefault(table.variables, []).append(table)
    taken = np.zeros(num_problems)
    left = []
    for variables, own in sorted(by_variables.items()):
        table = summed(own)
        least = table.numbers.reshape(num_problems, -1).min(axis=1)
        taken = taken + least
        if variables:
            finite = np.where(np.isfinite(least), least, 0.0)  # of a problem without solution all is infinite
            left.append(Table(variables, table.numbers - finite.reshape((-1,) + (1,) * len(variables))))
    return tuple(left), taken


def _shifted(table: Table, shift: int, first: int) -> Table:
    return Table(tuple(v + shift if v >= first else v for v in table.variables), table.numbers)


def _is_constant(
    before: Sequence[Table], after: Sequence[Table], shift: int, first: int, lowest: Array
) -> NDArray[np.bool_]:
    """For every problem: are the messages equal, so that one more equal segment adds as much again?"""
    moved = [_shifted(table, shift, first) for table in before]
    if [t.variables for t in moved] != [t.variables for t in after]:
        return np.zeros(len(lowest), dtype=bool)
    found = np.ones(len(lowest), dtype=bool)
    for one, two in zip(moved, after, strict=True):
        scale = np.where(np.isfinite(lowest), np.abs(lowest), 0.0).reshape((-1,) + (1,) * len(one.variables))
        with np.errstate(invalid="ignore"):
            close = (one.numbers == two.numbers) | (np.abs(one.numbers - two.numbers) <= _STEADY * scale)
        found &= close.reshape(len(found), -1).all(axis=1)
    return found


def _backtracked(steps: Sequence[Step], num_problems: int) -> tuple[dict[int, Indices], tuple[Indices, ...]]:
    """For every variable its choice in every problem, and for every segment the alternative. Segments that one step
    stands for, and that find the same choices around them, choose the same."""
    chosen: dict[int, Indices] = {}
    alternatives = []
    known: dict[tuple[object, ...], tuple[Indices, dict[int, Indices]]] = {}
    reads: dict[int, tuple[int, ...]] = {}
    for step in reversed(steps):
        made = id(step.records)
        if made not in reads:
            reads[made] = _read_from_outside(step)
        around = {v: chosen[step.moved(v)] for v in reads[made]}
        key = (made, *(own.tobytes() for own in around.values()))
        if key not in known:
            known[key] = _chosen_in(step, around, num_problems)
        taken, found = known[key]
        alternatives.append(taken)
        chosen.update((step.moved(variable), own) for variable, own in found.items())
    return chosen, tuple(reversed(alternatives))


def _read_from_outside(step: Step) -> tuple[int, ...]:
    """What a step must know: variables that it does not eliminate."""
    used = {v for records in step.records for record in records for table in record.tables for v in table.variables}
    used.update(step.taken.variables if step.taken is not None else ())
    return tuple(sorted(used - {record.variable for record in step.records[0]}))


def _chosen_in(step: Step, around: Mapping[int, Indices], num_problems: int) -> tuple[Indices, dict[int, Indices]]:
    """Which alternative of a segment is taken, and its variables' choices, from those around them."""
    if step.taken is None:
        return np.zeros(num_problems, dtype=np.intp), _followed(step, 0, around)
    rows = np.arange(num_problems) if step.rows is None else step.rows
    taken: Indices = step.taken.numbers[(rows, *(around[v] for v in step.taken.variables))]
    which = sorted(set(taken.tolist()))
    found = [_followed(step, own, around) for own in which]
    if len(found) == 1:
        return taken, found[0]
    return taken, {v: np.where(taken == which[0], own, found[1][v]) for v, own in found[0].items()}


def _followed(step: Step, alternative: int, around: Mapping[int, Indices]) -> dict[int, Indices]:
    """The variables that the records of one alternative eliminate."""
    found: dict[int, Indices] = {}
    known = ChainMap(found, around)  # type: ignore[arg-type]
    for record in reversed(step.records[alternative]):
        found[record.variable] = _looked_up(record, known, step.rows)
    return found


def _looked_up(record: Record, chosen: Mapping[int, Indices], rows: Indices | None) -> Indices:
    """The minimizer of an eliminated variable, where all others of its tables are chosen; `rows`: of the tables."""
    total: Array | None = None
    for table in record.tables:
        numbers = table.numbers
        if len(table.variables) > 1:
            at = np.arange(numbers.shape[0]) if rows is None else rows
            ends = [slice(None) if v == record.variable else chosen[v] for v in table.variables]
            own = numbers[(at, *ends)]  # (problems, choices), wherever the slice is
        else:
            own = numbers if rows is None else numbers[rows]
        total = own if total is None else total + own
    assert total is not None
    found: Indices = total.argmin(axis=1)
    return found
