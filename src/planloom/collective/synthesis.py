"""The cheapest programs of collectives from one layout to another: shortest paths over letters, one a digit.

The nodes are the places of the digits that move (`refine`), at most five to the power of their number, and the edges
single steps over any set of them:

    all_reduce  P → R    reduce_scatter  P → B    reduce  P → M    all_gather  A, B → R    gather   A, B → M
    all_to_all  A → B    broadcast       M → R    scatter M → B    slice       R → B       mask     R → P

A digit at M leaves only the devices at its coordinate 0 in the steps over other digits. There is no limit on the length
of a program. The price of a step is an argument: bytes moved, or seconds on a cluster; it is asked once for every kind
and set of digits. Dijkstra's algorithm stops at the goal; for the k best it may come to a node k times, and a program
never comes to a node twice.
"""

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, count
from math import inf, prod
from typing import NamedTuple

from planloom.collective.pricing import SizePrice, master_groups
from planloom.collective.refine import Letter, MovedDigit, Refinement, is_refinable, refine, waypoints
from planloom.collective.steps import CUTTING_KINDS, JOINING_KINDS, CollectiveProgram, Step, StepKind
from planloom.errors import LayoutError
from planloom.layout import Combine, Digit, Layout, Mesh

DigitsPrice = Callable[[Mesh, StepKind, tuple[Digit, ...], tuple[Digit, ...]], SizePrice]
"""(mesh, kind, digits of the groups, master digits) → the price of such a step for every size; inf: it cannot be."""

# A step that sends nothing still has a tiny price, so that no program holds more of them than it needs.
_LOCAL_PRICE = 1e-9

# Of programs with equal prices the shorter one comes first.
_TIE = 1e-9

_State = tuple[Letter, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A step before its groups are written out."""

    kind: StepKind
    digits: tuple[MovedDigit, ...]
    masters: tuple[Digit, ...]
    num_bytes: float
    """Of a device's array before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthesized:
    """Moves from one layout to another, and their price; `program` writes out their groups."""

    moves: tuple[Move, ...]
    price: float
    factors: tuple[tuple[int, ...], ...]
    """The sub-factors of every factor of the tensor."""
    local_sizes: tuple[int, ...]
    """The dims of a local array before the first step."""
    combine: Combine

    def program(self, mesh: Mesh) -> CollectiveProgram:
        return CollectiveProgram(factors=self.factors, steps=tuple(self._step(mesh, move) for move in self.moves))

    def _step(self, mesh: Mesh, move: Move) -> Step:
        digits = tuple(m.digit for m in move.digits)
        return Step(
            kind=move.kind,
            groups=master_groups(mesh, digits, move.masters),
            shape=tuple(d.size for d in digits),
            along=tuple(m.gathered_dim for m in move.digits) if move.kind in JOINING_KINDS else (),
            into=tuple(m.into for m in move.digits) if move.kind in CUTTING_KINDS else (),
            combine=self.combine,
        )


class _Path(NamedTuple):
    before: "_Path | None"
    kind: StepKind
    chosen: tuple[int, ...]
    masters: tuple[int, ...]
    num_bytes: float


def volume_price(mesh: Mesh, kind: StepKind, digits: tuple[Digit, ...], masters: tuple[Digit, ...] = ()) -> SizePrice:
    """Bytes that a device sends, with rings, plus one for the start."""
    n = prod(d.size for d in digits)
    match kind:
        case "slice" | "mask":
            return lambda num_bytes: _LOCAL_PRICE
        case "all_reduce":
            return lambda num_bytes: 1 + 2 * num_bytes * (n - 1) / n
        case "all_gather" | "gather":
            return lambda num_bytes: 1 + num_bytes * (n - 1)
        case "reduce" | "broadcast" | "rotate":
            return lambda num_bytes: 1 + num_bytes
        case "reduce_scatter" | "all_to_all" | "scatter":
            return lambda num_bytes: 1 + num_bytes * (n - 1) / n


def change_layout(
    source: Layout,
    target: Layout,
    mesh: Mesh,
    sizes: tuple[int, ...],
    price: DigitsPrice = volume_price,
    item_bytes: int = 4,
) -> tuple[Synthesized, ...]:
    """The cheapest way from one layout of a tensor to another: one program, or several one after another."""
    return _change(_canonical(source), _canonical(target), mesh, sizes, price, item_bytes)


@lru_cache(maxsize=4096)
def _change(
    source: Layout, target: Layout, mesh: Mesh, sizes: tuple[int, ...], price: DigitsPrice, item_bytes: int
) -> tuple[Synthesized, ...]:
    if is_refinable(source, target):
        (best,) = synthesize(source, target, mesh, sizes, price=price, item_bytes=item_bytes)
        return (best,) if best.moves else ()
    ways = [
        (
            *_change(source, through, mesh, sizes, price, item_bytes),
            *_change(through, target, mesh, sizes, price, item_bytes),
        )
        for through in waypoints(source, target, sizes)
    ]
    return min(ways, key=lambda way: sum(part.price for part in way))


def synthesize(
    source: Layout,
    target: Layout,
    mesh: Mesh,
    sizes: tuple[int, ...],
    *,
    price: DigitsPrice = volume_price,
    item_bytes: int = 4,
    num_best: int = 1,
    detours: bool = True,
) -> tuple[Synthesized, ...]:
    """The `num_best` cheapest programs, cheapest first; fewer if there are no more.

    `detours=False` leaves out programs that reduce to a master and scatter from it where a reduce-scatter would do, or
    gather and broadcast where an all-gather would: more bytes, and better only where measured figures are odd.
    """
    source, target = _canonical(source), _canonical(target)
    source.local_sizes(sizes), target.local_sizes(sizes)  # refuse what is not even
    if source.partial and target.partial and source.combine != target.combine:
        raise LayoutError("a partial maximum cannot become a partial sum", given=str(source), required=str(target))
    if not is_refinable(source, target):
        raise LayoutError(
            "no single program connects two layouts",
            given=str(source),
            required=f"{target}, with splits of a factor that begin alike",
            todo="go through a third layout: change_layout does",
        )
    refinement = refine(source, target, mesh, sizes)
    combine = source.combine if source.partial else target.combine
    search = _Search(refinement, mesh, price, item_bytes, combine, detours)
    found = tuple(search.run(num_best))
    if not found:
        raise LayoutError("no program of collectives connects two layouts", given=str(source), required=str(target))
    return found


def _canonical(layout: Layout) -> Layout:
    combine = layout.combine if layout.partial else "sum"
    partial, master = tuple(sorted(layout.partial)), tuple(sorted(layout.master))
    return Layout(splits=layout.splits, partial=partial, combine=combine, master=master)


_EDGES: tuple[tuple[StepKind, tuple[Letter, ...], Letter], ...] = (
    ("all_reduce", ("P",), "R"),
    ("reduce_scatter", ("P",), "B"),
    ("reduce", ("P",), "M"),
    ("all_gather", ("A", "B"), "R"),
    ("gather", ("A", "B"), "M"),
    ("all_to_all", ("A",), "B"),
    ("broadcast", ("M",), "R"),
    ("scatter", ("M",), "B"),
    ("slice", ("R",), "B"),
    ("mask", ("R",), "P"),
)


def _leads_on(kind: StepKind, moved: MovedDigit, after: Letter, combine: Combine) -> bool:
    """Whether a digit's way to its target can lead through `after` by this step."""
    if after == "B" and moved.into < 0:
        return False
    match kind:
        case "slice":
            return moved.target == "B"
        case "mask":
            return moved.target == "P" and combine == "sum"
        case "all_gather" | "all_reduce" | "broadcast":
            return moved.target != "M"
        case _:
            return moved.target != "P"


def _is_detour(kind: StepKind, moved: MovedDigit) -> bool:
    return (kind == "scatter" and moved.source != "M") or (kind == "gather" and moved.target != "M")


class _Search:
    def __init__(
        self,
        refinement: Refinement,
        mesh: Mesh,
        price: DigitsPrice,
        item_bytes: int,
        combine: Combine,
        detours: bool,
    ) -> None:
        self.refinement, self.mesh, self.price_of, self.combine = refinement, mesh, price, combine
        self.moved = refinement.moved
        split = prod(m.digit.size for m in self.moved if m.source == "A")
        self.whole_bytes = float(item_bytes * prod(refinement.local_sizes) * split)
        self.prices: dict[tuple[StepKind, tuple[int, ...], tuple[int, ...]], SizePrice] = {}
        self.usable = {
            (kind, i)
            for kind, _, after in _EDGES
            for i, moved in enumerate(self.moved)
            if _leads_on(kind, moved, after, combine) and (detours or not _is_detour(kind, moved))
        }

    def run(self, num_best: int) -> Iterator[Synthesized]:
        start: _State = tuple(m.source for m in self.moved)
        goal: _State = tuple(m.target for m in self.moved)
        ticket = count()
        queue: list[tuple[float, float, int, _State, _Path | None, frozenset[_State]]] = [
            (0.0, 0.0, next(ticket), start, None, frozenset((start,)))
        ]
        times_seen: dict[_State, int] = {}
        while queue:
            rank, price, _, state, path, states = heapq.heappop(queue)
            if times_seen.get(state, 0) >= num_best:
                continue
            times_seen[state] = times_seen.get(state, 0) + 1
            if state == goal:
                yield self._synthesized(path, price)
                if times_seen[goal] >= num_best:
                    return
                continue
            num_bytes = self._num_bytes(state)
            for kind, chosen, after, masters in self._edges(state):
                if times_seen.get(after, 0) >= num_best or after in states:
                    continue
                step = self._price(kind, chosen, masters)(num_bytes)
                if step == inf:  # a step that cannot be
                    continue
                longer = _Path(path, kind, chosen, masters, num_bytes)
                on_path = states | {after} if num_best > 1 else states
                ranked = max(rank, price + step) * (1 + _TIE)
                heapq.heappush(queue, (ranked, price + step, next(ticket), after, longer, on_path))

    def _num_bytes(self, state: _State) -> float:
        return self.whole_bytes / prod(
            m.digit.size for m, letter in zip(self.moved, state, strict=True) if letter in ("A", "B")
        )

    def _edges(self, state: _State) -> Iterator[tuple[StepKind, tuple[int, ...], _State, tuple[int, ...]]]:
        masters = tuple(i for i, letter in enumerate(state) if letter == "M")
        for kind, before, letter in _EDGES:
            able = [i for i, here in enumerate(state) if here in before and (kind, i) in self.usable and here != letter]
            if kind in ("all_gather", "gather"):  # what is at its goal stays
                able = [i for i in able if state[i] != self.moved[i].target]
            for length in range(1, len(able) + 1):
                for chosen in combinations(able, length):
                    after = list(state)
                    for i in chosen:
                        after[i] = letter
                    yield kind, chosen, tuple(after), tuple(i for i in masters if i not in chosen)

    def _price(self, kind: StepKind, chosen: tuple[int, ...], masters: tuple[int, ...]) -> SizePrice:
        key = (kind, chosen, masters)
        if key not in self.prices:
            digits = tuple(self.moved[i].digit for i in chosen)
            self.prices[key] = self.price_of(self.mesh, kind, digits, self._masters(masters))
        return self.prices[key]

    def _masters(self, moved: tuple[int, ...]) -> tuple[Digit, ...]:
        return (*self.refinement.masters, *(self.moved[i].digit for i in moved))

    def _synthesized(self, path: _Path | None, price: float) -> Synthesized:
        moves: list[Move] = []
        while path is not None:
            moves.append(
                Move(
                    kind=path.kind,
                    digits=tuple(self.moved[i] for i in path.chosen),
                    masters=self._masters(path.masters),
                    num_bytes=path.num_bytes,
                )
            )
            path = path.before
        return Synthesized(
            moves=tuple(reversed(moves)),
            price=price,
            factors=self.refinement.factors,
            local_sizes=self.refinement.local_sizes,
            combine=self.combine,
        )
