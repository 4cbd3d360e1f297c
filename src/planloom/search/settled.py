"""The tables of one problem without junctions that no plan has.

A plan names no junctions: each is in the layout that takes the least seconds with the strategies around it
(`figures.with_best_junctions`). Elimination chooses their layouts freely; where memory has a price it would rather take
smaller ones, and its bound would be one on plans that there are not. So pairs of a strategy and a layout are forbidden
if with no strategies of the others around the junction the layout takes the least seconds; and where the table of all
strategies around a junction is small, everything is forbidden but the layout that does (`junction_tables`).
"""

from copy import copy
from dataclasses import replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from planloom.search.conversions import Array
from planloom.search.network import JunctionPlaces
from planloom.search.tables import PairTables, Tables, UnaryTables

_MOST_NUMBERS = 2_000_000
"""Junctions whose table of all strategies around them would be larger stay free."""
_MOST_JOINT = 1500
"""Junctions whose table of all strategies around them is larger are bound by pairs only."""
_EQUAL = 1e-9
"""Layouts that differ by less, in shares of the least seconds, are all allowed."""


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
