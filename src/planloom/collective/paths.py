"""The cheapest program of collectives from one layout to another: a shortest path over layouts.

The nodes are layouts of one tensor on one mesh, the edges single steps over a run of digits:

    all_reduce      partial digits          → replicated
    reduce_scatter  partial digits          → appended, minor, to a factor's digits
    all_gather      a factor's minor digits → replicated
    all_to_all      a factor's minor digits → appended to another factor's digits
    slice           replicated digits       → appended to a factor's digits (free)
    mask            replicated digits       → partial (free)

Only minor digits can be taken from a factor, because a box must stay a box. The price of a step is an argument: bytes
moved by default, seconds on a cluster when the caller knows one. Dijkstra's algorithm stops at the goal; a layout over
m digits has few neighbours, so paths over the usual one to four digits take well under a millisecond.
"""

import heapq
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import combinations, count, permutations
from math import prod

from planloom.collective.steps import Step, StepKind
from planloom.errors import LayoutError
from planloom.layout import Digit, Layout, Mesh

StepPrice = Callable[[Step, int], float]
"""(step, bytes of a device's array before it) → price."""

# A free step still has a tiny price, so that no program holds more of them than it needs.
_LOCAL_PRICE = 1e-9


def volume_price(step: Step, num_bytes: int) -> float:
    """Bytes that each device sends, with ring algorithms, plus one for the start."""
    n = step.group_size
    if step.is_local:
        return _LOCAL_PRICE
    if step.kind == "all_reduce":
        return 1 + 2 * num_bytes * (n - 1) / n
    if step.kind == "all_gather":
        return 1 + num_bytes * (n - 1)
    return 1 + num_bytes * (n - 1) / n


@lru_cache(maxsize=4096)
def change_layout(
    source: Layout,
    target: Layout,
    mesh: Mesh,
    sizes: tuple[int, ...],
    price: StepPrice = volume_price,
    item_bytes: int = 4,
) -> tuple[Step, ...]:
    """The cheapest program that turns `source` into `target` for a tensor with these factor sizes."""
    source, target = _canonical(source), _canonical(target)
    target.local_sizes(sizes)  # refuses what is not even
    if source.partial and target.partial and source.combine != target.combine:
        raise LayoutError("a partial maximum cannot become a partial sum", given=str(source), required=str(target))
    ticket = count()
    queue: list[tuple[float, int, Layout, tuple[Step, ...]]] = [(0.0, next(ticket), source, ())]
    done: set[Layout] = set()
    while queue:
        cost, _, layout, steps = heapq.heappop(queue)
        if layout == target:
            return steps
        if layout in done:
            continue
        done.add(layout)
        num_bytes = item_bytes * prod(layout.local_sizes(sizes))
        for step, after in _neighbours(layout, target, mesh, sizes):
            if after not in done:
                heapq.heappush(queue, (cost + price(step, num_bytes), next(ticket), after, (*steps, step)))
    raise LayoutError("no program of collectives connects two layouts", given=str(source), required=str(target))


def _canonical(layout: Layout) -> Layout:
    combine = layout.combine if layout.partial else "sum"
    return Layout(splits=layout.splits, partial=tuple(sorted(layout.partial)), combine=combine)


def _neighbours(layout: Layout, target: Layout, mesh: Mesh, sizes: tuple[int, ...]) -> Iterator[tuple[Step, Layout]]:
    """Every layout one step away. Digits that the goal does not move are never moved."""

    def after(splits: dict[int, tuple[Digit, ...]], partial: tuple[Digit, ...]) -> Layout:
        new = tuple(splits.get(i, split) for i, split in enumerate(layout.splits))
        return _canonical(Layout(splits=new, partial=partial, combine=layout.combine))

    def step(kind: StepKind, digits: tuple[Digit, ...], along: int = -1, into: int = -1) -> Step:
        return Step(kind=kind, groups=mesh.groups(digits), along=along, into=into, combine=layout.combine)

    def fits(factor: int, digits: tuple[Digit, ...]) -> bool:
        return sizes[factor] % prod(d.size for d in (*layout.splits[factor], *digits)) == 0

    factors = range(len(layout.splits))
    for digits in _selections(tuple(d for d in layout.partial if d not in target.partial)):
        rest = tuple(d for d in layout.partial if d not in digits)
        if tuple(sorted(digits)) == digits:
            yield step("all_reduce", digits), after({}, rest)
        if layout.combine == "sum":
            for into in factors:
                if fits(into, digits):
                    yield step("reduce_scatter", digits, into=into), after({into: layout.splits[into] + digits}, rest)
    for along in factors:
        split = layout.splits[along]
        for length in range(1, len(split) + 1):
            kept, digits = split[:-length], split[-length:]
            yield step("all_gather", digits, along=along), after({along: kept}, layout.partial)
            for into in factors:
                if into != along and fits(into, digits):
                    splits = {along: kept, into: layout.splits[into] + digits}
                    yield step("all_to_all", digits, along=along, into=into), after(splits, layout.partial)
    free = tuple(d for d in mesh.digits if d not in layout.split_digits and d not in layout.partial)
    for digit in free:
        if digit in target.partial and target.combine == "sum":
            combined = _canonical(
                Layout(splits=layout.splits, partial=(*layout.partial, digit), combine=target.combine)
            )
            yield step("mask", (digit,)), combined
        for into in factors:
            if digit in target.split_digits and fits(into, (digit,)):
                yield step("slice", (digit,), into=into), after({into: (*layout.splits[into], digit)}, layout.partial)


def _selections(digits: tuple[Digit, ...]) -> Iterator[tuple[Digit, ...]]:
    for length in range(1, len(digits) + 1):
        for chosen in combinations(digits, length):
            yield from permutations(chosen)
