"""Placements: parallelism matrices that lay axes over the levels of a machine (P2).

A matrix has a row an axis and a column a level. The product of a row is the axis's size, the product of a column the
level's count; entry (i, j) is how much of axis i varies at level j. Each entry above one becomes a digit of the axis.
Within one level the digits of several axes are nested in the order of the axes, the first outermost.

Axes that mean the same to whoever asks (two data-parallel axes, say) are *interchangeable*: where their sizes are
equal, exchanging their rows gives a placement that is as good. Of every such set of placements folding keeps the one
whose rows do not increase from one of these axes to the next, so the first of them lies outermost.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from math import gcd, isqrt, prod

from planloom.errors import LayoutError
from planloom.layout.mesh import Axis, Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One parallelism matrix: `matrix[axis][level]`."""

    axes: tuple[str, ...]
    matrix: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        rows = (f"{name} {'×'.join(map(str, row))}" for name, row in zip(self.axes, self.matrix, strict=True))
        return ", ".join(rows)


def enumerate_placements(
    levels: Sequence[int], axes: Mapping[str, int], *, interchangeable: Sequence[Sequence[str]] = ()
) -> tuple[Placement, ...]:
    """Every parallelism matrix for these level counts and axis sizes, each once.

    `interchangeable`: sets of axes; of placements that differ by an exchange of rows of equal size within a set alone,
    one is kept.
    """
    _require_counts("a level", dict(enumerate(levels)))
    _require_counts("axis", axes)
    if prod(levels) != prod(axes.values()):
        raise LayoutError(
            "the axes do not fill the machine",
            given=f"levels {tuple(levels)} = {prod(levels)} devices, axes {dict(axes)} = {prod(axes.values())}",
            required="the same product",
            todo="change an axis size or the number of devices",
        )
    names, sizes = tuple(axes), tuple(axes.values())
    alike = _pairs_to_order(axes, interchangeable)
    matrices = (
        tuple(zip(*columns, strict=True)) if columns else tuple(() for _ in names)
        for columns in _columns(tuple(levels), sizes)
    )
    return tuple(
        Placement(axes=names, matrix=matrix)
        for matrix in matrices
        if all(matrix[first] >= matrix[second] for first, second in alike)
    )


def _require_counts(noun: str, counts: Mapping[int, int] | Mapping[str, int]) -> None:
    for name, count in counts.items():
        if count < 1:
            raise LayoutError(
                f"{noun} has no members", given=f"{name}: {count}", required="a whole number from 1, for each"
            )


def _pairs_to_order(axes: Mapping[str, int], interchangeable: Sequence[Sequence[str]]) -> list[tuple[int, int]]:
    """The pairs of axes, by their places, whose rows must not increase: neighbours of equal size in one set."""
    names, seen = tuple(axes), set[str]()
    pairs = []
    for group in interchangeable:
        for name in group:
            if name not in axes or name in seen:
                raise LayoutError(
                    f"axis {name!r} " + ("is interchangeable twice" if name in seen else "does not exist"),
                    given=f"interchangeable {', '.join(group)}",
                    required=f"some of the axes {', '.join(names)}, each once",
                )
            seen.add(name)
        places = sorted(names.index(name) for name in group)
        for size in {axes[name] for name in group}:
            equal = [place for place in places if axes[names[place]] == size]
            pairs += list(pairwise(equal))
    return pairs


@cache
def _columns(levels: tuple[int, ...], remaining: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """All ways to fill the levels, innermost decided last, with what each axis still needs."""
    if not levels:
        return ((),) if all(n == 1 for n in remaining) else ()
    return tuple(
        (column, *rest)
        for column in _factorizations(levels[0], remaining)
        for rest in _columns(levels[1:], tuple(n // c for n, c in zip(remaining, column, strict=True)))
    )


def _factorizations(count: int, limits: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Ordered factorizations of `count` in which entry i divides limits[i]."""
    if not limits:
        if count == 1:
            yield ()
        return
    for entry in _divisors(gcd(count, limits[0])):
        for rest in _factorizations(count // entry, limits[1:]):
            yield (entry, *rest)


@cache
def _divisors(number: int) -> tuple[int, ...]:
    low = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return tuple(sorted({*low, *(number // divisor for divisor in low)}))


def mesh_of(placement: Placement, *, devices: Sequence[int] | None = None) -> Mesh:
    """The mesh of a placement on devices numbered with the outermost level major (0, 1, 2, … if not given)."""
    num_levels = len(placement.matrix[0]) if placement.matrix else 0
    axes = tuple(Axis(name=n, sizes=row) for n, row in zip(placement.axes, placement.matrix, strict=True))
    order = []
    for point in product(*(range(size) for row in placement.matrix for size in row)):
        coordinate = iter(point)
        digit = {(i, j): next(coordinate) for i in range(len(axes)) for j in range(num_levels)}
        number = 0
        for j in range(num_levels):
            for i, row in enumerate(placement.matrix):
                number = number * row[j] + digit[i, j]
        order.append(number)
    if devices is not None and len(devices) != len(order):
        raise LayoutError(
            "a placement does not fill the devices given",
            given=f"{len(devices)} devices for {placement}",
            required=f"{len(order)} devices",
        )
    return Mesh(axes=axes, devices=tuple(order if devices is None else (devices[n] for n in order)))
