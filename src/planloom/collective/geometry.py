"""How the groups of a step lie on a cluster: all that their price depends on.

A group is *regular* if its devices are a product of positions, one set a level. Level l is *crossed* if the group has
more than one position there. Then, with m_i the positions at level i:

    members   m_l
    inner     devices of the group in one member of the level: the product of m_i for i > l
    outer     how often the level is entered: the product of m_i for i < l
    wires     the sets of positions that groups have in one parent member, and how many groups have each

All groups of a step are alike up to translation, those of the replicas along other axes included; the number of groups
through one uplink is what `wires` counts. A group that is no product has no geometry, and its messages are routed one
by one (`pricing`).

There are two ways to a geometry, with equal results: from the groups of a step, device by device, and from digits,
without looking at devices, which costs the same for four devices and for a hundred thousand.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np

from planloom.cluster import Cluster
from planloom.layout import Digit, Mesh

Wires = tuple[tuple[tuple[int, ...], int], ...]
"""(positions, number of groups), sorted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """What a step does at one level."""

    level: int
    members: int
    inner: int
    outer: int
    wires: tuple[Wires, ...]
    """One entry a kind of parent member; usually all are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The crossings of a step's groups, outermost first."""

    group_size: int
    crossings: tuple[Crossing, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stride:
    """A part of a digit that lies within one level: its coordinates move the position there by `stride`."""

    digit: Digit
    level: int
    size: int
    stride: int


class Terrain:
    """A mesh on a cluster whose digits move device numbers by constant strides."""

    def __init__(self, cluster: Cluster, base: tuple[int, ...], strides: tuple[Stride, ...]) -> None:
        self.cluster, self.base, self.strides = cluster, base, strides

    def geometry(self, digits: Sequence[Digit], masters: Sequence[Digit] = ()) -> Geometry:
        """The geometry of groups that vary over `digits`, among the devices at coordinate 0 of `masters`."""
        at = [[s for s in self.strides if s.level == level] for level in range(len(self.base))]
        counts = [prod(s.size for s in strides if s.digit in digits) for strides in at]
        free = [[s for s in strides if s.digit not in digits and s.digit not in masters] for strides in at]
        crossings = []
        for level, strides in enumerate(at):
            if counts[level] == 1:
                continue
            moves = _offsets([s for s in strides if s.digit in digits])
            multiplicity = prod(s.size for inner in free[level + 1 :] for s in inner)
            wires = tuple(
                sorted(
                    (tuple(sorted(self.base[level] + start + move for move in moves)), multiplicity)
                    for start in _offsets(free[level])
                )
            )
            crossings.append(
                Crossing(
                    level=level,
                    members=counts[level],
                    inner=prod(counts[level + 1 :]),
                    outer=prod(counts[:level]),
                    wires=(wires,),
                )
            )
        return Geometry(group_size=prod(counts), crossings=tuple(crossings))


def _offsets(strides: Sequence[Stride]) -> list[int]:
    points = product(*(range(s.size) for s in strides))
    return [sum(c * s.stride for c, s in zip(point, strides, strict=True)) for point in points]


@lru_cache(maxsize=1024)
def terrain_of(cluster: Cluster, mesh: Mesh) -> Terrain | None:
    """The terrain of a mesh; None if its devices do not lie at constant strides, level by level."""
    digits = mesh.digits
    steps = [prod(e.size for e in digits[i + 1 :]) for i in range(len(digits))]
    first = mesh.devices[0]
    moves = [mesh.devices[step] - first for step in steps]
    numbers = np.array([first])
    for digit, move in zip(digits, moves, strict=True):
        numbers = np.add.outer(numbers, np.arange(digit.size) * move).reshape(-1)
    if any(move <= 0 for move in moves) or not np.array_equal(numbers, np.array(mesh.devices)):
        return None
    weights = [prod(cluster.level_counts[level + 1 :]) for level in range(len(cluster.levels))]
    strides: list[Stride] = []
    for digit, move in zip(digits, moves, strict=True):
        parts = _levels_of(digit, move, cluster.level_counts, weights)
        if parts is None:
            return None
        strides += parts
    base = cluster.coordinates(first)
    reach = [
        base[level] + sum((s.size - 1) * s.stride for s in strides if s.level == level) for level in range(len(base))
    ]
    if any(position >= count for position, count in zip(reach, cluster.level_counts, strict=True)):
        return None
    return Terrain(cluster, base, tuple(strides))


def _levels_of(digit: Digit, move: int, counts: tuple[int, ...], weights: list[int]) -> list[Stride] | None:
    """A digit's parts, level by level: a digit may reach over several levels, the inner one filled first."""
    parts, size = [], digit.size
    while size > 1:
        level = next((i for i, weight in enumerate(weights) if weight <= move), None)
        if level is None or move % weights[level]:
            return None
        stride = move // weights[level]
        fits = min(size, counts[level] // stride)
        if fits < 2 or size % fits or (fits < size and counts[level] % stride):
            return None
        parts.append(Stride(digit=digit, level=level, size=fits, stride=stride))
        size, move = size // fits, move * fits
    return parts


@lru_cache(maxsize=4096)
def geometry_of_groups(cluster: Cluster, groups: tuple[tuple[int, ...], ...]) -> Geometry | None:
    """The geometry of a step's groups; None if they are not regular and alike."""
    num_levels = len(cluster.levels)
    shapes: set[tuple[int, ...]] = set()
    parents: list[dict[tuple[int, ...], Counter[tuple[int, ...]]]] = [{} for _ in range(num_levels)]
    for group in groups:
        coordinates = [cluster.coordinates(device) for device in group]
        positions = [tuple(sorted({c[level] for c in coordinates})) for level in range(num_levels)]
        shape = tuple(map(len, positions))
        if prod(shape) != len(group) or len(set(coordinates)) != len(group):
            return None
        shapes.add(shape)
        for level in range(num_levels):
            for prefix in {c[:level] for c in coordinates} if shape[level] > 1 else ():
                parents[level].setdefault(prefix, Counter())[positions[level]] += 1
    if len(shapes) != 1:
        return None
    (shape,) = shapes
    return Geometry(
        group_size=prod(shape),
        crossings=tuple(
            Crossing(
                level=level,
                members=shape[level],
                inner=prod(shape[level + 1 :]),
                outer=prod(shape[:level]),
                wires=_distinct(parents[level].values()),
            )
            for level in range(num_levels)
            if shape[level] > 1
        ),
    )


def _distinct(parents: Iterable[Counter[tuple[int, ...]]]) -> tuple[Wires, ...]:
    return tuple(sorted({tuple(sorted(counts.items())) for counts in parents}))
