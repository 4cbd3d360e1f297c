"""P2's own space of all-reduce programs, spanned step by step: a yardstick for the oracle and for the search.

Over digits (d_0, …, d_m-1), outermost first, device and chunk numbers run from 0 to the product of the digits; device i
starts with contribution i to all chunks, and the goal is every contribution to every chunk on every device. The reading
of the space that gives P2's counts:

- A step is (collective, run of digits, master). All groups over the run take part, or with `master` those whose digits
  finer than the run are zero, whatever their coarser digits; the master form of a run that ends with the finest digit
  is the plain form and counts once. Steps over different runs are different steps, whatever their effect.
- After reduce the members of a group other than its first hold nothing. reduce_scatter gives member i of n the i-th
  n-th part, in order, of the chunks that each holds, and n divides their number.
- all_gather needs equal numbers of chunks and disjoint chunks, not equal contributions. For broadcast a receiver is a
  subset of the root if each of its chunks has a subset of the contributions that the root has for it.
- A step after which any of its groups holds what it held before is refused, and so groups of devices that hold nothing.
- A program ends with the first step that reaches the goal.
"""

from collections.abc import Iterator
from functools import cache
from itertools import combinations, product
from math import prod
from typing import NamedTuple

from planloom.collective.steps import StepKind


class SpaceStep(NamedTuple):
    """A step of P2's space: a collective over a run of digits, named by their positions, outermost first."""

    kind: StepKind
    run: tuple[int, ...]
    master: bool


SPACE_KINDS: tuple[StepKind, ...] = ("all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast")

_Row = tuple[int, ...]
"""A device: a mask of contributions a chunk; 0 for a chunk that it does not hold."""
_Matrix = tuple[_Row, ...]


def space_groups(digits: tuple[int, ...], run: tuple[int, ...], *, master: bool) -> tuple[tuple[int, ...], ...]:
    """The groups of devices of a step, each in the order of the run's digits."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, point in enumerate(product(*map(range, digits))):
        if not (master and any(point[run[-1] + 1 :])):
            groups.setdefault(point[: run[0]] + point[run[-1] + 1 :], []).append(device)
    return tuple(map(tuple, groups.values()))


class _Space:
    """The states that programs pass through; what follows a state and how many ways lead to the goal are kept."""

    def __init__(self, digits: tuple[int, ...]) -> None:
        self.num_devices = prod(digits)
        self.start: _Matrix = tuple((1 << i,) * self.num_devices for i in range(self.num_devices))
        self.goal: _Matrix = (((1 << self.num_devices) - 1,) * self.num_devices,) * self.num_devices
        self.steps = [
            (SpaceStep(kind, run, master), space_groups(digits, run, master=master))
            for run in (tuple(range(*ends)) for ends in combinations(range(len(digits) + 1), 2))
            for master in ((False, True) if run[-1] + 1 < len(digits) else (False,))
            for kind in SPACE_KINDS
        ]
        self.next = cache(self._next)
        self.num_ways = cache(self._num_ways)

    def _next(self, state: _Matrix) -> tuple[tuple[SpaceStep, _Matrix], ...]:
        """Every step that is allowed in a state, and the state after it."""
        if state == self.goal:
            return ()
        result = []
        for step, groups in self.steps:
            after = list(state)
            for group in groups:
                before = [state[device] for device in group]
                rows = _rows_after(step.kind, before)
                if rows is None or rows == before:
                    break
                for device, row in zip(group, rows, strict=True):
                    after[device] = row
            else:
                result.append((step, tuple(after)))
        return tuple(result)

    def _num_ways(self, state: _Matrix, length: int) -> int:
        """The number of sequences of exactly this many steps that end at the goal."""
        if length == 0:
            return int(state == self.goal)
        return sum(self.num_ways(after, length - 1) for _, after in self.next(state))

    def ways(self, state: _Matrix, length: int) -> Iterator[tuple[SpaceStep, ...]]:
        if length == 0:
            yield ()
            return
        for step, after in self.next(state):
            if self.num_ways(after, length - 1):
                for rest in self.ways(after, length - 1):
                    yield (step, *rest)


def _rows_after(kind: StepKind, rows: list[_Row]) -> list[_Row] | None:
    """What a group holds after a collective; None where a rule forbids it."""
    num_members, nothing = len(rows), (0,) * len(rows[0])
    held = [[chunk for chunk, mask in enumerate(row) if mask] for row in rows]
    if kind == "broadcast":
        root = rows[0]
        subset = all(not mask & ~whole for row in rows for mask, whole in zip(row, root, strict=True))
        return [root] * num_members if subset else None
    counts = [sum(mask.bit_count() for mask in masks) for masks in zip(*rows, strict=True)]
    union = list(nothing)
    for row in rows:
        union = [mask | more for mask, more in zip(union, row, strict=True)]
    if kind == "all_gather":
        equal = len(set(map(len, held))) == 1
        disjoint = sum(map(len, held)) == sum(mask > 0 for mask in union)
        return [tuple(union)] * num_members if equal and disjoint else None
    disjoint = all(mask.bit_count() == count for mask, count in zip(union, counts, strict=True))
    if any(chunks != held[0] for chunks in held) or not disjoint:
        return None
    if kind == "all_reduce":
        return [tuple(union)] * num_members
    if kind == "reduce":
        return [tuple(union), *[nothing] * (num_members - 1)]
    length, rest = divmod(len(held[0]), num_members)
    parts = [set(held[0][i * length : (i + 1) * length]) for i in range(num_members)]
    scattered = [tuple(mask if chunk in part else 0 for chunk, mask in enumerate(union)) for part in parts]
    return None if rest else scattered


def count_programs(digits: tuple[int, ...], max_length: int) -> tuple[int, ...]:
    """The number of programs of P2's space for an all-reduce over these digits, of each length from 1 on."""
    space = _Space(digits)
    return tuple(space.num_ways(space.start, length) for length in range(1, max_length + 1))


def enumerate_programs(digits: tuple[int, ...], max_length: int) -> Iterator[tuple[SpaceStep, ...]]:
    """The programs that `count_programs` counts, shortest first."""
    space = _Space(digits)
    for length in range(1, max_length + 1):
        yield from space.ways(space.start, length)
