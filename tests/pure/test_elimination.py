"""Elimination against brute force: random chains of segments with skips, a variable that all read, and alternatives."""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planloom.search.elimination import Minimum, SegmentTables, Table, largest_table, minimize, summed

NUM_PROBLEMS = 3
INNER = ((0, 1), (1, 2), (0, 2), (2, 3))
"""The edges of a segment: a chain of four variables with a skip."""


@dataclass(frozen=True)
class Chain:
    """Variable 0, which every segment reads, then segments of four variables each; `sizes`: choices of each."""

    segments: tuple[SegmentTables, ...]
    sizes: dict[int, int]

    @property
    def tables(self) -> list[Table]:
        return [table for segment in self.segments for table in segment.tables]


def chain(seed: int, num_segments: int, *, integers: bool = False, alternatives: bool = False) -> Chain:
    """Equal segments, whose last two variables the next one reads. Integers make ties; infinities forbid choices."""
    rng = np.random.default_rng(seed)
    counts = [int(n) for n in rng.integers(1, 4, size=4)]

    def numbers(*shape: int) -> np.ndarray:
        if integers:
            return rng.integers(0, 3, size=(NUM_PROBLEMS, *shape)).astype(float)
        found = rng.random((NUM_PROBLEMS, *shape))
        return np.where((rng.random(found.shape) < 0.05) & (np.arange(shape[-1]) > 0), np.inf, found)

    def segment_numbers() -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
        inner = [numbers(counts[a], counts[b]) for a, b in INNER]
        outer = [numbers(2, counts[1]), numbers(counts[3], counts[0]), numbers(counts[2], counts[0])]
        return [numbers(count) for count in counts], inner, outer

    def tables(first: int, own: tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]) -> tuple[Table, ...]:
        unary, inner, (shared, last, skip) = own
        found = [Table((first + i,), numbers) for i, numbers in enumerate(unary)]
        found += [Table((first + a, first + b), pair) for (a, b), pair in zip(INNER, inner, strict=True)]
        found.append(Table((0, first + 1), shared))
        if first > 1:
            found += [Table((first - 1, first), last), Table((first - 2, first), skip)]
        return tuple(found)

    kept, other = segment_numbers(), segment_numbers()
    segments = [SegmentTables(first=0, tables=(Table((0,), numbers(2)),), lives_on=(True,), last_touched=(), kind="in")]
    sizes = {0: 2}
    for s in range(num_segments):
        first, is_last = 1 + 4 * s, s == num_segments - 1
        sizes |= {first + i: count for i, count in enumerate(counts)}
        segments.append(
            SegmentTables(
                first=first,
                tables=tables(first, kept),
                lives_on=(False, False, not is_last, not is_last),
                last_touched=(*((first - 1, first - 2) if s else ()), *((0,) if is_last else ())),
                kind=("first" if s == 0 else "last" if is_last else "middle"),
                alternative=tables(first, other) if alternatives else (),
            )
        )
    return Chain(tuple(segments), sizes)


def value(tables: list[Table], variables: dict[int, np.ndarray], g: int) -> float:
    return float(sum(t.numbers[(g, *(variables[v][g] for v in t.variables))] for t in tables))


def least(tables: list[Table], sizes: dict[int, int]) -> np.ndarray:
    """By trying everything: one array over all variables at once."""
    total = np.zeros((NUM_PROBLEMS, *(sizes[v] for v in sorted(sizes))))
    for table in tables:
        shape = [sizes[v] if v in table.variables else 1 for v in sorted(sizes)]
        total += table.numbers.reshape(NUM_PROBLEMS, *shape)
    found: np.ndarray = total.reshape(NUM_PROBLEMS, -1).min(axis=1)
    return found


def taken_tables(own: Chain, found: Minimum, g: int) -> list[Table]:
    pairs = zip(own.segments, found.alternatives, strict=True)
    return [table for segment, taken in pairs for table in (segment.alternative if taken[g] else segment.tables)]


@given(seed=st.integers(0, 10**6), integers=st.booleans())
def test_the_minimum_is_that_of_brute_force(seed: int, integers: bool) -> None:
    own = chain(seed, 2, integers=integers)
    found = minimize(own.segments, own.sizes)
    assert found.totals == pytest.approx(least(own.tables, own.sizes), rel=1e-12, abs=1e-12)
    for g in range(NUM_PROBLEMS):
        assert value(own.tables, found.variables, g) == pytest.approx(found.totals[g], rel=1e-12, abs=1e-12)


@given(seed=st.integers(0, 10**6))
def test_the_better_alternative_of_every_segment_is_taken(seed: int) -> None:
    own = chain(seed, 2, alternatives=True)
    found = minimize(own.segments, own.sizes)
    expected = []
    for taken in product((False, True), repeat=2):
        pairs = zip(own.segments[1:], taken, strict=True)
        tables = [t for segment, other in pairs for t in (segment.alternative if other else segment.tables)]
        expected.append(least([*own.segments[0].tables, *tables], own.sizes))
    assert found.totals == pytest.approx(np.min(expected, axis=0), rel=1e-12)
    for g in range(NUM_PROBLEMS):
        assert value(taken_tables(own, found, g), found.variables, g) == pytest.approx(found.totals[g], rel=1e-12)


@pytest.mark.parametrize("alternatives", [False, True])
@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_equal_segments_at_once_are_as_one_by_one(seed: int, integers: bool, alternatives: bool) -> None:
    own = chain(seed, 40, integers=integers, alternatives=alternatives)
    found = minimize(own.segments, own.sizes)
    each = [replace(segment, kind=number) for number, segment in enumerate(own.segments)]
    assert found.totals == pytest.approx(minimize(each, own.sizes).totals, rel=1e-12)
    for g in range(NUM_PROBLEMS):
        assert value(taken_tables(own, found, g), found.variables, g) == pytest.approx(found.totals[g], rel=1e-12)


@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("alternatives", [False, True])
def test_sums_made_choice_by_choice_are_the_same_to_the_bit(
    integers: bool, alternatives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(20):
        own = chain(seed, 4, integers=integers, alternatives=alternatives)
        as_a_whole = minimize(own.segments, own.sizes)
        monkeypatch.setattr("planloom.search.elimination._LARGE", 0)
        found = minimize(own.segments, own.sizes)
        monkeypatch.undo()
        assert np.array_equal(found.totals, as_a_whole.totals)
        assert np.array_equal(np.stack(found.alternatives), np.stack(as_a_whole.alternatives))
        assert all(np.array_equal(found.variables[v], picked) for v, picked in as_a_whole.variables.items())


def test_equal_segments_in_the_middle_have_equal_minimizers() -> None:
    own = chain(0, 400)
    found = minimize(own.segments, own.sizes)
    middle = [tuple(int(found.variables[1 + 4 * s + i][0]) for i in range(4)) for s in range(50, 350)]
    assert len(set(middle)) == 1


def test_a_problem_without_solution_is_infinite_and_leaves_the_others_alone() -> None:
    own = chain(3, 3)
    first = own.segments[1]
    unary = first.tables[0].numbers.copy()
    unary[1] = np.inf
    tables = (Table(first.tables[0].variables, unary), *first.tables[1:])
    found = minimize([own.segments[0], replace(first, tables=tables), *own.segments[2:]], own.sizes)
    expected = minimize(own.segments, own.sizes).totals
    assert found.totals[1] == np.inf
    assert found.totals[[0, 2]] == pytest.approx(expected[[0, 2]])


def test_sums_of_tables() -> None:
    rng = np.random.default_rng(0)
    one, two, three = rng.random((2, 3, 4)), rng.random((2, 4)), rng.random((2, 3, 5))
    found = summed([Table((1, 4), one), Table((4,), two), Table((1, 7), three)])
    assert found.variables == (1, 4, 7)
    assert found.numbers == pytest.approx(one[..., None] + two[:, None, :, None] + three[:, :, None, :])


def test_the_largest_table_of_a_chain() -> None:
    """Variables of 5, 7 and 11 choices in a row: the ends go first, the largest table is the dearer pair."""
    sizes = {0: 5, 1: 7, 2: 11}
    tables = (Table((0, 1), np.zeros((1, 5, 7))), Table((1, 2), np.zeros((1, 7, 11))))
    segment = SegmentTables(first=0, tables=tables, lives_on=(False,) * 3, last_touched=(), kind="only")
    assert largest_table([segment], sizes) == 7 * 11
    other = tuple(Table(t.variables, t.numbers) for t in tables)
    joined = SegmentTables(
        first=0, tables=tables, lives_on=(True, False, True), last_touched=(), kind="both", alternative=other
    )
    assert largest_table([joined], sizes) == 5 * 7 * 11, "the middle one's neighbours are together in one table"


@pytest.mark.parametrize("seed", range(5))
def test_no_table_is_larger_than_said(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    own = chain(seed, 5)
    seen = []
    module = minimize.__globals__

    def watched(tables: list[Table]) -> Table:
        whole = summed(tables)
        seen.append(whole.numbers[0].size)
        return whole

    monkeypatch.setitem(module, "summed", watched)
    minimize(own.segments, own.sizes)
    assert max(seen) == largest_table(own.segments, own.sizes)
