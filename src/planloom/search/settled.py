"""The tables of one problem without junctions that no plan has.

A plan names no junctions: each is in the layout that takes the least seconds with the strategies around it
(`figures.with_best_junctions`). Elimination chooses their layouts freely; where memory has a price it would rather take
smaller ones, and its bound would be one on plans that there are not. So pairs of a strategy and a layout are forbidden
if with no strategies of the others around the junction the layout takes the least seconds; and where the table of all
strategies around a junction is small, everything is forbidden but the layout that does (`junction_tables`).

A `SettledProblem` has all of this: what elimination makes of it are choices that plans have.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from planloom.search.conversions import Array
from planloom.search.elimination import SegmentTables, Table
from planloom.search.network import ChainSegment, JunctionPlaces, Network
from planloom.search.tables import Costs, PairTables, Tables, UnaryTables

_MOST_NUMBERS = 2_000_000
"""Junctions whose table of all strategies around them would be larger stay free."""
_MOST_JOINT = 20_000
"""Junctions whose table of all strategies around them is larger are bound by pairs only. With 1,500 the four around a
layer's norm were, and the bound of Llama-3-405B on 1,024 devices was 0.4 % lower. [Empirical] 2026-11-18."""
_EQUAL = 1e-9
"""Layouts that differ by less, in shares of the least seconds, are all allowed."""


Joint = Sequence[tuple[tuple[int, ...], Array]]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class SettledProblem:
    """One problem without junctions that no plan has; it is problem 0 of its tables.

    `joint`: for every segment tables to be added there; `chain`: the segments with variables that live on as long as
    these tables need them.
    """

    tables: Tables
    joint: dict[int, list[tuple[tuple[int, ...], Array]]]
    chain: tuple[ChainSegment, ...]
    sizes: dict[int, int]

    @staticmethod
    def of(tables: Tables, g: int) -> "SettledProblem":
        own = settled_tables(tables, g)
        joint = junction_tables(own)
        return SettledProblem(
            tables=own,
            joint=joint,
            chain=tuple(_living(own.network, joint)),
            sizes={v.number: own.num_choices(v.key) for v in own.network.variables},
        )

    def costs(self, prices: Array, kept: Array, *, recompute: bool) -> Costs:
        """The sums J of the problem, once for every price of memory with so many micro-batches kept."""
        count = len(prices)
        costs = self.tables.costs(prices, kept, np.zeros(count, dtype=np.intp), recompute=recompute)
        segments = []
        for at, (segment, living) in enumerate(zip(costs.segments, self.chain, strict=True)):
            joint = tuple(
                Table(own, np.broadcast_to(numbers, (count, *numbers.shape[1:])))
                for own, numbers in self.joint.get(at, [])
            )
            segments.append(
                replace(
                    segment,
                    tables=(*segment.tables, *joint),
                    alternative=(*segment.alternative, *joint) if segment.alternative else (),
                    lives_on=living.lives_on,
                    last_touched=living.last_touched,
                    kind=(segment.kind, self.kind(at)),
                )
            )
        return replace(costs, segments=tuple(segments))

    def kind(self, at: int) -> object:
        """Equal for segments with equal tables, joint ones included, and variables that live on alike."""
        segment, first = self.chain[at], self.chain[at].variables[0].number
        near = tuple(tuple(v - first for v in own) for own, _ in self.joint.get(at, []))
        return segment.kind, near, segment.lives_on

    def structure(self, segment: ChainSegment) -> SegmentTables:
        """A segment's variables and edges, without numbers."""
        nothing = np.zeros(1)
        ends = [tuple(sorted((edge.source, edge.target))) for edge in segment.edges]
        return SegmentTables(
            first=segment.variables[0].number,
            tables=tuple(Table(own, nothing) for own in [*((v.number,) for v in segment.variables), *ends]),
            lives_on=segment.lives_on,
            last_touched=segment.last_touched,
            kind=segment.kind,
        )


def _living(network: Network, joint: dict[int, list[tuple[tuple[int, ...], Array]]]) -> list[ChainSegment]:
    """The chain with variables that live on as long as tables of junctions need them."""
    last = {variable.number: variable.segment for variable in network.variables}
    for edge in network.edges:
        at = max(network.variables[edge.source].segment, network.variables[edge.target].segment)
        last[edge.source], last[edge.target] = max(last[edge.source], at), max(last[edge.target], at)
    for at, tables in joint.items():
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


def settled_tables(tables: Tables, g: int) -> Tables:
    """Problem g alone, as problem 0."""
    found, one = copy(tables), slice(g, g + 1)
    found.candidates = (tables.candidates[g],)
    found.num_micro, found.weights = tables.num_micro[one], tables.weights[one]
    found.unary = {key: _only(unary, one) for key, unary in tables.unary.items()}
    found.pairs = {
        key: PairTables(forward=pair.forward[one], backward=pair.backward[one]) for key, pair in tables.pairs.items()
    }
    for places in tables.network.places_of_junctions:
        for (key, ends_here, _), mask in zip(places.edges, _masks(found, places), strict=True):
            allowed = mask if ends_here else mask.T
            forward = np.where(allowed[None], found.pairs[key].forward, np.inf)
            found.pairs[key] = replace(found.pairs[key], forward=forward)
    return found


def junction_tables(tables: Tables) -> dict[int, list[tuple[tuple[int, ...], Array]]]:
    """For every segment tables to be added there, of problem 0: zero where a junction is in the layout that takes the
    least seconds, infinite elsewhere."""
    network = tables.network
    found: dict[int, list[tuple[tuple[int, ...], Array]]] = {}
    for places in network.places_of_junctions:
        numbers = _pairs_of(tables, places)
        if prod(len(own) for own in numbers) * numbers[0].shape[1] > _MOST_JOINT:
            continue
        total = _added(numbers)
        joint = np.where(total == total.min(axis=-1, keepdims=True), 0.0, np.inf)
        for at, junction in enumerate(places.numbers.tolist()):
            around = [int(others[at]) for _, _, others in places.edges]
            if len({*around, junction}) <= len(around):
                continue  # one block reads it twice
            order = np.argsort([*around, junction])
            variables = tuple(int(v) for v in np.sort([*around, junction]))
            segment = max(network.variables[v].segment for v in variables)
            found.setdefault(segment, []).append((variables, joint.transpose(order)[None]))
    return found


def _added(numbers: list[Array]) -> Array:
    """A table over all that are around a junction, and its layouts."""
    count = len(numbers)
    total = np.zeros((1,) * count + (numbers[0].shape[1],))
    for i, rows in enumerate(numbers):
        total = total + rows.reshape((*(len(rows) if other == i else 1 for other in range(count)), -1))
    return total


def _pairs_of(tables: Tables, places: JunctionPlaces) -> list[Array]:
    """For every edge of a junction the seconds of (strategies of its other end, layouts), of problem 0."""
    numbers: list[Array] = []
    for key, ends_here, _ in places.edges:
        pair = tables.pairs[key].forward[0] + tables.pairs[key].backward[0]
        numbers.append(pair if ends_here else pair.T)
    return numbers


def _only(unary: UnaryTables, one: slice) -> UnaryTables:
    parameters = unary.parameters
    if parameters is not None:
        stored = ("micro_seconds", "step_seconds", "stored_bytes", "working_bytes")
        parameters = replace(parameters, **{name: getattr(parameters, name)[:, one] for name in stored})
    names = ("forward", "backward", "saved_bytes", "leaving_bytes", "peak_bytes")
    return replace(unary, parameters=parameters, **{name: getattr(unary, name)[one] for name in names})


def _masks(tables: Tables, places: JunctionPlaces) -> list[NDArray[np.bool_]]:
    """For every edge of a junction (strategies of its other end, layouts): which pairs may be."""
    numbers = _pairs_of(tables, places)
    distinct = [np.unique(own, axis=0, return_inverse=True) for own in numbers]
    count = len(distinct)
    if prod(len(rows) for rows, _ in distinct) * numbers[0].shape[1] > _MOST_NUMBERS:
        return [np.ones(own.shape, dtype=bool) for own in numbers]
    total = _added([rows for rows, _ in distinct])
    least = total.min(axis=-1, keepdims=True)
    allowed = total <= np.where(np.isfinite(least), least * (1 + _EQUAL), -np.inf)
    return [
        np.asarray(allowed.any(axis=tuple(other for other in range(count) if other != i)))[where.reshape(-1)]
        for i, (_, where) in enumerate(distinct)
    ]
