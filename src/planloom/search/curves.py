"""Seconds of collectives along one axis of a mesh, for whole arrays of sizes at once.

An axis has a digit for every level that it lies on. A collective over it goes by the cheapest of the programs that a
reduction over digits has in P2's space and that keep the pieces in place: flat over all digits, or level by level,

    all-reduce       reduce-scatter inside, all-reduce outside, all-gather inside
    reduce-scatter   inside, then outside
    all-gather       outside, then inside

What a step costs `collective.pricing` says, from the geometry of its groups. It depends on the strides of the axis
alone, so axes that lie alike in many placements are looked at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from planloom.cluster import Cluster
from planloom.collective import StepCost, StepKind
from planloom.collective.geometry import Stride, Terrain
from planloom.collective.pricing import geometry_cost, groups_cost
from planloom.layout import Digit, Placement

Array = NDArray[np.float64]
Curve = Callable[[Array], Array]
"""Bytes of a device's array before a collective → seconds."""
_VOLUME_RATE = 1e9
"""Bytes per second where only volume counts: any number would do."""


@dataclass(frozen=True, eq=False, slots=True)
class AxisCurves:
    """The collectives along one axis; `speed`: bytes per second of a large all-gather, to tell fast axes from slow."""

    size: int
    all_reduce: Curve
    reduce_scatter: Curve
    all_gather: Curve
    all_to_all: Curve

    @property
    def speed(self) -> float:
        large = np.array([float(64 << 20)])
        return float(large[0] / self.all_gather(large)[0])


def axis_curves(cluster: Cluster, placement: Placement, *, by_volume: bool = False) -> tuple[AxisCurves, ...]:
    """The curves of every axis of a placement, the stages' own first; `by_volume`: by the bytes that a device sends."""
    if by_volume:
        return tuple(_volumes(prod(row)) for row in placement.matrix)
    return tuple(_curves(cluster, strides) for strides in _strides(placement))


@lru_cache(maxsize=64)
def _volumes(size: int) -> AxisCurves:
    """Bytes that a device sends, at a rate that is the same for all axes."""

    def curve(share: float) -> Curve:
        return lambda num_bytes: num_bytes * (share / _VOLUME_RATE)

    rest = (size - 1) / size
    return AxisCurves(size, curve(2 * rest), curve(rest), curve(size - 1.0), curve(rest))


AxisStrides = tuple[tuple[int, int, int], ...]
"""(level, size, stride) for every digit above one."""


def _strides(placement: Placement) -> list[AxisStrides]:
    found: list[list[tuple[int, int, int]]] = [[] for _ in placement.axes]
    for level in range(len(placement.matrix[0])):
        column = [row[level] for row in placement.matrix]
        for i, size in enumerate(column):
            if size > 1:
                found[i].append((level, size, prod(column[i + 1 :])))
    return [tuple(strides) for strides in found]


@lru_cache(maxsize=4096)
def _curves(cluster: Cluster, strides: AxisStrides) -> AxisCurves:
    """Outermost digit first. All other devices of the cluster do the same meanwhile, along the same axis."""
    digits = [Digit(axis="own", index=i, size=size) for i, (_, size, _) in enumerate(strides)]
    everything = _all_strides(cluster, strides, digits)
    terrain = Terrain(cluster, (0,) * len(cluster.levels), everything)
    is_torus = any(level.link.shape == "torus" for level in cluster.levels)
    whole = prod(size for _, size, _ in strides)

    def flat(kind: StepKind, some: Sequence[Digit]) -> Curve:
        if is_torus:  # has no geometry: its messages are routed one by one, as in `collective.pricing`
            return _of_cost(groups_cost(cluster, kind, _groups(cluster, everything, some)))
        return _of_cost(geometry_cost(cluster, kind, terrain.geometry(tuple(some))))

    def reduce_scatter(some: Sequence[Digit]) -> Curve:
        one = flat("reduce_scatter", some)
        if len(some) == 1:
            return one
        inside, outside, count = flat("reduce_scatter", some[-1:]), reduce_scatter(some[:-1]), some[-1].size
        return lambda b: np.minimum(one(b), inside(b) + outside(b / count))

    def all_gather(some: Sequence[Digit]) -> Curve:
        one = flat("all_gather", some)
        if len(some) == 1:
            return one
        inside, outside = flat("all_gather", some[-1:]), all_gather(some[:-1])
        count = prod(digit.size for digit in some[:-1])
        return lambda b: np.minimum(one(b), outside(b) + inside(b * count))

    def all_reduce(some: Sequence[Digit]) -> Curve:
        one = flat("all_reduce", some)
        if len(some) == 1:
            return one
        scatter, gather = flat("reduce_scatter", some[-1:]), flat("all_gather", some[-1:])
        outside, count = all_reduce(some[:-1]), some[-1].size
        return lambda b: np.minimum(one(b), scatter(b) + outside(b / count) + gather(b / count))

    if not digits:
        return AxisCurves(1, np.zeros_like, np.zeros_like, np.zeros_like, np.zeros_like)
    return AxisCurves(whole, all_reduce(digits), reduce_scatter(digits), all_gather(digits), flat("all_to_all", digits))


def _groups(cluster: Cluster, strides: Sequence[Stride], over: Sequence[Digit]) -> tuple[tuple[int, ...], ...]:
    """The groups of devices that differ in some digits only."""
    inside, outside = np.zeros(1, dtype=np.intp), np.zeros(1, dtype=np.intp)
    for own in strides:
        moves = np.arange(own.size) * (own.stride * prod(cluster.level_counts[own.level + 1 :]))
        if own.digit in over:
            inside = np.add.outer(inside, moves).reshape(-1)
        else:
            outside = np.add.outer(outside, moves).reshape(-1)
    return tuple(tuple(int(device) for device in row) for row in np.add.outer(outside, inside))


def _all_strides(cluster: Cluster, own: AxisStrides, digits: Sequence[Digit]) -> tuple[Stride, ...]:
    """The axis's strides, and digits that stand for all other devices."""
    found = [
        Stride(digit=digit, level=level, size=size, stride=stride)
        for digit, (level, size, stride) in zip(digits, own, strict=True)
    ]
    at = {level: (size, stride) for level, size, stride in own}
    for level, count in enumerate(cluster.level_counts):
        size, stride = at.get(level, (1, 1))
        for index, (part, step) in enumerate(((stride, 1), (count // size // stride, size * stride))):
            if part > 1:
                digit = Digit(axis=f"other {level}", index=index, size=part)
                found.append(Stride(digit=digit, level=level, size=part, stride=step))
    return tuple(found)


def _of_cost(cost: StepCost) -> Curve:
    """A step's cost as a function of arrays; see `CostLine.seconds` and `StepCost.line`."""
    lines = [(x.latency_seconds, x.own_seconds_per_byte, x.total_seconds_per_byte) for x in cost.lines]

    def one(line: tuple[float, float, float], num_bytes: Array) -> Array:
        latency, own, total = line
        return np.maximum(latency + own * num_bytes, total * num_bytes)

    limit = cost.rings_from_bytes
    if limit is not None:
        rings = next(line for line, x in zip(lines, cost.lines, strict=True) if x.algorithm == "rings")
        direct = next(line for line, x in zip(lines, cost.lines, strict=True) if x.algorithm != "rings")
        return lambda num_bytes: np.where(num_bytes >= limit, one(rings, num_bytes), one(direct, num_bytes))
    if len(lines) == 1:
        return lambda num_bytes: one(lines[0], num_bytes)
    return lambda num_bytes: np.minimum.reduce([one(line, num_bytes) for line in lines])
