"""Seconds of one step on a cluster.

A step runs all its groups at once, those of the replicas along other axes included. For an algorithm (a ring, a tree,
or direct messages) and a level l that the groups cross (`traffic`),

    own_l      bytes that one group puts on the most loaded wire of the level
    total_l    bytes that all groups together put on the most loaded wire

grow in proportion to the array, and with B_l the bandwidth times the efficiency of this collective there,

    seconds = max( latency + max_l own_l / B_l,   max_l total_l / B_l )
    latency = sum over the crossed levels of hops · hop latency, and what starting costs there and inside

so a group alone pays its latency, and where many groups fill a link they hide each other's. (The published tables of
V100 decide for this form against the sum of both: docs/decisions/0007.) Of the algorithms that the cluster's library
has for a collective the fastest counts, size by size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from planloom.cluster import Cluster, Link
from planloom.collective.geometry import Geometry, Terrain, geometry_of_groups, terrain_of
from planloom.collective.steps import LOCAL_KINDS, Step, StepKind
from planloom.collective.traffic import ALGORITHMS, Algorithm, LevelTraffic, level_traffic, num_messages, routed_traffic
from planloom.layout import Digit, Mesh

SizePrice = Callable[[float], float]
"""Bytes of a device's array before a step → its price."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostLine:
    """Seconds of a collective by one algorithm, in the bytes of a device's array before it."""

    algorithm: Algorithm
    latency_seconds: float
    own_seconds_per_byte: float
    total_seconds_per_byte: float
    busy_seconds_per_byte: tuple[tuple[int, float], ...]
    """How long each crossed level's most loaded wire is busy."""
    num_messages: int
    """That the host of a device starts."""

    def seconds(self, num_bytes: float) -> float:
        alone = self.latency_seconds + self.own_seconds_per_byte * num_bytes
        return max(alone, self.total_seconds_per_byte * num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of a step, for any size: the fastest of its lines; with `rings_from_bytes`, rings from there on."""

    lines: tuple[CostLine, ...]
    rings_from_bytes: float | None = None

    def line(self, num_bytes: float) -> CostLine:
        if self.rings_from_bytes is not None:
            uses_rings = num_bytes >= self.rings_from_bytes
            return next(line for line in self.lines if (line.algorithm == "rings") == uses_rings)
        return min(self.lines, key=lambda line: line.seconds(num_bytes))

    def seconds(self, num_bytes: float) -> float:
        return self.line(num_bytes).seconds(num_bytes)


RINGS_FROM_BYTES = 64 << 10
"""The size of a whole array from which `planloom.execute` lays rings on gloo, and below which it sends directly."""


def rings_from_bytes(library: str, kind: StepKind, group_size: int) -> float | None:
    """The size of an array before a step from which it is carried out by rings; None if the library decides."""
    if "rings" not in ALGORITHMS[library][kind]:
        return None
    return RINGS_FROM_BYTES / (group_size if kind == "all_gather" else 1)


def step_cost(cluster: Cluster, step: Step) -> StepCost:
    """The cost of a step that communicates."""
    return groups_cost(cluster, step.kind, step.groups)


def digits_cost(
    cluster: Cluster, mesh: Mesh, kind: StepKind, digits: tuple[Digit, ...], masters: tuple[Digit, ...] = ()
) -> StepCost:
    """The cost of a step over digits of a mesh; equal to that of its groups, which are not looked at where possible."""
    return _digits_cost(cluster, mesh, terrain_of(cluster, mesh), kind, digits, masters)


def _digits_cost(
    cluster: Cluster,
    mesh: Mesh,
    terrain: Terrain | None,
    kind: StepKind,
    digits: tuple[Digit, ...],
    masters: tuple[Digit, ...],
) -> StepCost:
    if terrain is None or _has_torus(cluster):
        return groups_cost(cluster, kind, master_groups(mesh, digits, masters))
    return geometry_cost(cluster, kind, terrain.geometry(digits, masters))


@lru_cache(maxsize=64)
def seconds_price(cluster: Cluster) -> Callable[[Mesh, StepKind, tuple[Digit, ...], tuple[Digit, ...]], SizePrice]:
    """Seconds of any step on a cluster: what `synthesis` takes as its price. Local steps read and write their array."""
    device = cluster.device
    terrains: list[tuple[Mesh, Terrain | None]] = []  # of the last mesh: a mesh of many devices is slow to hash

    def price(mesh: Mesh, kind: StepKind, digits: tuple[Digit, ...], masters: tuple[Digit, ...]) -> SizePrice:
        if kind in LOCAL_KINDS:
            return lambda num_bytes: device.launch_seconds + 2 * num_bytes / device.memory_bytes_per_second
        if not terrains or terrains[0][0] is not mesh:
            terrains[:] = [(mesh, terrain_of(cluster, mesh))]
        return _digits_cost(cluster, mesh, terrains[0][1], kind, digits, masters).seconds

    return price


@lru_cache(maxsize=4096)
def master_groups(mesh: Mesh, digits: tuple[Digit, ...], masters: tuple[Digit, ...]) -> tuple[tuple[int, ...], ...]:
    """The groups over digits of the devices at coordinate 0 of `masters`."""
    groups = mesh.groups(digits)
    if not masters:
        return groups
    kept = []
    for group in groups:
        coordinates = mesh.coordinates(group[0])
        if all(coordinates[digit] == 0 for digit in masters):
            kept.append(group)
    return tuple(kept)


@lru_cache(maxsize=4096)
def groups_cost(cluster: Cluster, kind: StepKind, groups: tuple[tuple[int, ...], ...]) -> StepCost:
    """The cost of a collective on groups of devices, all at once."""
    geometry = geometry_of_groups(cluster, groups)
    if geometry is not None and not _has_torus(cluster):
        return geometry_cost(cluster, kind, geometry)
    algorithms = ALGORITHMS[cluster.library][kind]
    found = {a: routed_traffic(cluster, kind, a, groups, geometry) for a in algorithms}
    return cost_of_traffic(cluster, kind, len(groups[0]), found)


@lru_cache(maxsize=16384)
def geometry_cost(cluster: Cluster, kind: StepKind, geometry: Geometry) -> StepCost:
    algorithms = ALGORITHMS[cluster.library][kind]
    found = {a: level_traffic(cluster, kind, a, geometry) for a in algorithms}
    return cost_of_traffic(cluster, kind, geometry.group_size, found)


def _has_torus(cluster: Cluster) -> bool:
    return any(level.link.shape == "torus" for level in cluster.levels)


def cost_of_traffic(
    cluster: Cluster, kind: StepKind, group_size: int, traffic: Mapping[Algorithm, tuple[LevelTraffic, ...]]
) -> StepCost:
    """The cost of a step from what it does at every level, by every algorithm."""
    lines = tuple(_line(cluster, kind, group_size, algorithm, levels) for algorithm, levels in traffic.items())
    return StepCost(lines=lines, rings_from_bytes=rings_from_bytes(cluster.library, kind, group_size))


def _line(
    cluster: Cluster, kind: StepKind, group_size: int, algorithm: Algorithm, levels: tuple[LevelTraffic, ...]
) -> CostLine:
    rates = [_seconds_per_byte(cluster.levels[at.level].link, kind, at) for at in levels]
    latency = sum(cluster.levels[at.level].link.hop_of(kind) * at.num_hops for at in levels)
    if levels:  # it starts at the outermost level that it crosses, and at all inside
        inside = cluster.levels[levels[0].level :]
        latency += sum(level.link.start_seconds.get(kind, 0.0) for level in inside)
    return CostLine(
        algorithm=algorithm,
        latency_seconds=latency,
        own_seconds_per_byte=max((at.own_bytes * rate for at, rate in zip(levels, rates, strict=True)), default=0.0),
        total_seconds_per_byte=max(
            (at.total_bytes * rate for at, rate in zip(levels, rates, strict=True)), default=0.0
        ),
        num_messages=num_messages(cluster.library, kind, algorithm, group_size),
        busy_seconds_per_byte=tuple((at.level, at.total_bytes * rate) for at, rate in zip(levels, rates, strict=True)),
    )


def _seconds_per_byte(link: Link, kind: StepKind, at: LevelTraffic) -> float:
    crowding = 1 + link.flow.get(kind, 0.0) * (at.num_flows - 1)
    return crowding / (link.bandwidth_bytes_per_second * link.efficiency_of(kind, at.members))
