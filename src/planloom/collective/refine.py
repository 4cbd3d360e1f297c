"""A change of layout, digit by digit: where each digit is, where it must go, and the sub-factors that this needs.

A digit is in one of five places, each with a letter:

    P  partial      every device holds a contribution
    R  replicated   every device holds the same
    M  master       only coordinate 0 holds it
    A  split        where the source splits it
    B  split        where the target splits it; or, for a digit that goes from partial to replicated, a sub-factor of
                    its own for the time between a reduce-scatter and an all-gather

Factor f is refined into the digits of its source and target splits, major to minor, the temporary ones, and the rest.
This needs one of the two splits to begin with the other. Where they do not, as from (a, b) to (b, a), no common
refinement exists, and the change has to go through a third layout (`waypoints`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from planloom.layout import Digit, Layout, Mesh

Letter = Literal["P", "R", "M", "A", "B"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MovedDigit:
    """A digit whose place changes; `along` is its dim at A, `into` its dim at B (-1: it has none)."""

    digit: Digit
    source: Letter
    target: Letter
    along: int = -1
    into: int = -1

    @property
    def gathered_dim(self) -> int:
        """The dim along which its pieces are put together: a temporary split is undone where it was made."""
        return self.along if self.source == "A" else self.into


@dataclass(frozen=True, slots=True, kw_only=True)
class Refinement:
    """The sub-factors of every factor, the digits that move, and the dims of a local array in the source layout."""

    factors: tuple[tuple[int, ...], ...]
    moved: tuple[MovedDigit, ...]
    masters: tuple[Digit, ...]
    """Digits that are and stay at their master."""
    local_sizes: tuple[int, ...]


def is_refinable(source: Layout, target: Layout) -> bool:
    """Whether the source and target splits of every factor begin alike."""
    return all(s[: len(t)] == t[: len(s)] for s, t in zip(source.splits, target.splits, strict=True))


def refine(source: Layout, target: Layout, mesh: Mesh, sizes: tuple[int, ...]) -> Refinement:
    """The refinement of a change between two layouts whose splits begin alike."""
    before, after = letters_of(source), letters_of(target)
    temporary = [d for d in mesh.digits if before.get(d) == ("P", -1) and after.get(d, ("R", -1)) == ("R", -1)]
    factors: list[tuple[int, ...]] = []
    split_dims: dict[tuple[Digit, int], int] = {}  # (digit, factor) → dim
    temporary_dims: dict[Digit, int] = {}
    local_sizes: list[int] = []
    for factor, (s, t) in enumerate(zip(source.splits, target.splits, strict=True)):
        split = max(s, t, key=len)
        rest = sizes[factor] // prod(d.size for d in split)
        hosted = _fitting([d for d in temporary if d not in temporary_dims], rest)
        for digit in split:
            split_dims[digit, factor] = len(local_sizes)
            local_sizes.append(1 if digit in s else digit.size)
        for digit in hosted:
            temporary_dims[digit] = len(local_sizes)
            local_sizes.append(digit.size)
        rest //= prod(d.size for d in hosted)
        local_sizes.append(rest)
        factors.append((*(d.size for d in (*split, *hosted)), rest))
    moved = []
    for digit in mesh.digits:
        (was, here), (will, there) = before.get(digit, ("R", -1)), after.get(digit, ("R", -1))
        if (was, here) == (will, there):
            continue
        moved.append(
            MovedDigit(
                digit=digit,
                source="A" if was == "B" else was,
                target=will,
                along=split_dims.get((digit, here), -1),
                into=split_dims[digit, there] if will == "B" else temporary_dims.get(digit, -1),
            )
        )
    return Refinement(
        factors=tuple(factors),
        moved=tuple(moved),
        masters=tuple(digit for digit in source.master if digit in target.master),
        local_sizes=tuple(local_sizes),
    )


def letters_of(layout: Layout) -> dict[Digit, tuple[Letter, int]]:
    """The letter of every digit that is not replicated, and the factor that it splits."""
    letters: dict[Digit, tuple[Letter, int]] = {}
    for factor, split in enumerate(layout.splits):
        letters |= dict.fromkeys(split, ("B", factor))
    letters |= dict.fromkeys(layout.partial, ("P", -1))
    letters |= dict.fromkeys(layout.master, ("M", -1))
    return letters


def _fitting(digits: list[Digit], size: int) -> list[Digit]:
    """The digits, in order, whose product divides a size; those that do not fit are left out."""
    fitting: list[Digit] = []
    for digit in digits:
        if size % (digit.size * prod(d.size for d in fitting)) == 0:
            fitting.append(digit)
    return fitting


def waypoints(source: Layout, target: Layout, sizes: tuple[int, ...]) -> Iterator[Layout]:
    """Layouts from which and to which a change is refinable, where the change itself is not.

    The digits in conflict are replicated, or wait in another factor; sums are combined before or after.
    """
    common: list[tuple[Digit, ...]] = []
    waiting: list[Digit] = []
    for s, t in zip(source.splits, target.splits, strict=True):
        length = next((i for i, (a, b) in enumerate(zip(s, t, strict=False)) if a != b), min(len(s), len(t)))
        common.append(s if s[: len(t)] == t[: len(s)] else s[:length])
        waiting += s[len(common[-1]) :]
    replicated = _with_splits(source, tuple(common))
    yield replicated
    if source.partial != target.partial:
        kept = tuple(digit for digit in source.partial if digit in target.partial)
        yield Layout(splits=replicated.splits, partial=kept, combine=source.combine, master=source.master)
    for host, split in enumerate(common):
        splits = tuple((*split, *waiting) if i == host else c for i, c in enumerate(common))
        through = _with_splits(source, splits)
        fits = sizes[host] % prod(d.size for d in splits[host]) == 0
        if fits and is_refinable(source, through) and is_refinable(through, target):
            yield through


def _with_splits(layout: Layout, splits: tuple[tuple[Digit, ...], ...]) -> Layout:
    return Layout(splits=splits, partial=layout.partial, combine=layout.combine, master=layout.master)
