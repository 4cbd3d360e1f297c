"""Seconds of one step on a cluster.

A step runs all its groups at once, those of the replicas along other axes included. For an algorithm (a ring, a tree,
or direct messages) and a level l that the groups cross,

    own_l      bytes that one group puts on the most loaded wire of the level
    total_l    bytes that all groups together put on the most loaded wire

grow in proportion to the array, and with B_l the bandwidth times the efficiency of this collective there,

    seconds = max( latency + max_l own_l / B_l,   max_l total_l / B_l )
    latency = sum over the crossed levels of hops · hop latency, and what starting costs there and inside

so a group alone pays its latency, and where many groups fill a link they hide each other's. (The published tables of
V100 decide for this form against the sum of both: docs/decisions/0007.) Of the algorithms that the cluster's library
has for a collective the fastest counts, size by size. With n devices in a group and b bytes in a device's array before
the step, a wire at level l carries for each group that passes it

    ring      the share: 2b(n-1)/n of an all-reduce, b(n-1)/n of a reduce-scatter, b(n-1) of an all-gather,
              b of a reduce or broadcast; once, since a ring in device order enters and leaves a member once
    rings     half of it in either direction: the same on a crossbar, half of it on a wire of a ring or torus
    tree      2b of an all-reduce, b where only two members meet (each is root of one half)
    direct    what its devices send to those beyond: inner · (m-1) · inner messages
    root      what the first device of a group receives or sends: (m-1) · inner messages
    binomial  b · ⌈log2 m⌉, from the root

NCCL lays several rings, one for each device of a member, so that members whose devices have uplinks of their own
(`shared: false`) use them all; gloo lays one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2
from typing import Literal

from planloom.cluster import Cluster, Link
from planloom.cluster.routes import Message, Wire, ring_hops, wire_loads
from planloom.collective.geometry import Crossing, Geometry, Terrain, Wires, geometry_of_groups, terrain_of
from planloom.collective.steps import LOCAL_KINDS, Step, StepKind
from planloom.layout import Digit, Mesh

SizePrice = Callable[[float], float]
"""Bytes of a device's array before a step → its price."""

Algorithm = Literal["ring", "rings", "tree", "direct", "root", "binomial"]

ALGORITHMS: dict[str, dict[StepKind, tuple[Algorithm, ...]]] = {
    "nccl": {
        "all_reduce": ("ring", "tree"),
        "reduce_scatter": ("ring",),
        "all_gather": ("ring",),
        "all_to_all": ("direct",),
        "reduce": ("ring",),
        "broadcast": ("ring",),
        "gather": ("root",),
        "scatter": ("root",),
    },
    "gloo": {  # as `planloom.execute.wire` uses it: reduce-scatter and all-gather are made of messages
        "all_reduce": ("ring",),
        "reduce_scatter": ("rings", "direct"),
        "all_gather": ("rings", "direct"),
        "all_to_all": ("direct",),
        "reduce": ("ring",),
        "broadcast": ("binomial",),
        "gather": ("root",),
        "scatter": ("root",),
    },
}
"""What a library does in a collective: NVIDIA/nccl src/graph/tuning.cc; pytorch/gloo gloo/*.cc."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostLine:
    """Seconds of a collective by one algorithm, in the bytes of a device's array before it."""

    algorithm: Algorithm
    latency_seconds: float
    own_seconds_per_byte: float
    total_seconds_per_byte: float
    busy_seconds_per_byte: tuple[tuple[int, float], ...]
    """How long each crossed level's most loaded wire is busy."""

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


RINGS_FROM_BYTES = 256 << 10
"""The size of a whole array from which `planloom.execute` lays rings on gloo, and below which it sends directly."""


def rings_from_bytes(library: str, kind: StepKind, group_size: int) -> float | None:
    """The size of an array before a step from which it is carried out by rings; None if the library decides."""
    if "rings" not in ALGORITHMS[library][kind]:
        return None
    return RINGS_FROM_BYTES / (group_size if kind == "all_gather" else 1)


def step_cost(cluster: Cluster, step: Step) -> StepCost:
    """The cost of a step that communicates."""
    return _cost_of_groups(cluster, step.kind, step.groups)


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
        return _cost_of_groups(cluster, kind, master_groups(mesh, digits, masters))
    return _cost_of_geometry(cluster, kind, terrain.geometry(digits, masters))


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
def _cost_of_groups(cluster: Cluster, kind: StepKind, groups: tuple[tuple[int, ...], ...]) -> StepCost:
    geometry = geometry_of_groups(cluster, groups)
    if geometry is not None and not _has_torus(cluster):
        return _cost_of_geometry(cluster, kind, geometry)
    lines = [_routed_line(cluster, kind, groups, geometry, a) for a in ALGORITHMS[cluster.library][kind]]
    return StepCost(lines=tuple(lines), rings_from_bytes=rings_from_bytes(cluster.library, kind, len(groups[0])))


@lru_cache(maxsize=16384)
def _cost_of_geometry(cluster: Cluster, kind: StepKind, geometry: Geometry) -> StepCost:
    lines = []
    for algorithm in ALGORITHMS[cluster.library][kind]:
        own, total = 0.0, 0.0
        busy = []
        for crossing in geometry.crossings:
            link = cluster.levels[crossing.level].link
            share = _share(kind, geometry.group_size)
            one, both, num_flows = _wire_bytes(cluster, link, crossing, algorithm, share)
            rate = _seconds_per_byte(link, kind, crossing.members, num_flows)
            own, total = max(own, one * rate), max(total, both * rate)
            busy.append((crossing.level, both * rate))
        lines.append(
            CostLine(
                algorithm=algorithm,
                latency_seconds=_latency(cluster, kind, algorithm, geometry),
                own_seconds_per_byte=own,
                total_seconds_per_byte=total,
                busy_seconds_per_byte=tuple(busy),
            )
        )
    switch = rings_from_bytes(cluster.library, kind, geometry.group_size)
    return StepCost(lines=tuple(lines), rings_from_bytes=switch)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """Bytes, for every byte of the array: around a ring, through a tree, in one direct message."""

    ring: float
    tree: float
    message: float


def _share(kind: StepKind, n: int) -> _Share:
    match kind:
        case "all_reduce":
            return _Share(ring=2 * (n - 1) / n, tree=2.0, message=2 / n)
        case "reduce_scatter" | "all_to_all" | "scatter":
            return _Share(ring=(n - 1) / n, tree=1.0, message=1 / n)
        case "all_gather" | "gather":
            return _Share(ring=n - 1, tree=n, message=1.0)
        case "reduce" | "broadcast":
            return _Share(ring=1.0, tree=1.0, message=1.0)
        case "slice" | "mask":
            raise ValueError(f"{kind} sends nothing")


def _seconds_per_byte(link: Link, kind: StepKind, members: int, num_flows: int) -> float:
    crowding = 1 + link.flow.get(kind, 0.0) * (num_flows - 1)
    return crowding / (link.bandwidth_bytes_per_second * link.efficiency_of(kind, members))


def _wire_bytes(
    cluster: Cluster, link: Link, crossing: Crossing, algorithm: Algorithm, share: _Share
) -> tuple[float, float, int]:
    """For every byte of the array: bytes of one group on its most loaded wire, of all groups, and flows there."""
    m, inner = crossing.members, crossing.inner
    own_uplinks = link.shape == "crossbar" and not link.shared
    match algorithm:
        case "ring" | "rings":
            edge, flows = share.ring, 1
            if own_uplinks and cluster.library == "nccl":
                edge /= inner
        case "tree":
            edge, flows = share.tree / (2 if m == 2 else 1), 1
            if own_uplinks and cluster.library == "nccl":
                edge /= inner
        case "binomial":
            edge, flows = share.ring * ceil(log2(m)), 1
        case "direct":
            flows = inner * (1 if own_uplinks else inner)
            edge = share.message * flows
        case "root":
            edge, flows = share.message * inner, inner
    if link.shape == "crossbar":
        if algorithm in ("direct", "root"):
            edge, flows = edge * (m - 1), flows * (m - 1)
        multiplicity = 1 if not link.shared else max(_through(wires) for wires in crossing.wires)
        return edge, edge * multiplicity, flows * multiplicity
    if algorithm == "rings":
        edge /= 2
    pattern = _PATTERNS.get(algorithm, _neighbours)
    count = cluster.levels[crossing.level].count
    one = max(
        max(_loads(link, count, [(positions, 1)], pattern).values())
        for wires in crossing.wires
        for positions, _ in wires
    )
    all_groups = max(max(_loads(link, count, wires, pattern).values()) for wires in crossing.wires)
    return edge * one, edge * all_groups, flows * all_groups


def _through(wires: Wires) -> int:
    """The most groups that pass one member's uplink."""
    passing: dict[int, int] = {}
    for positions, multiplicity in wires:
        for position in positions:
            passing[position] = passing.get(position, 0) + multiplicity
    return max(passing.values())


Pattern = Callable[[tuple[int, ...]], Iterable[tuple[int, int]]]


def _neighbours(positions: tuple[int, ...]) -> Iterable[tuple[int, int]]:
    return [(a, positions[(i + 1) % len(positions)]) for i, a in enumerate(positions)]


def _both_neighbours(positions: tuple[int, ...]) -> Iterable[tuple[int, int]]:
    return [*_neighbours(positions), *((b, a) for a, b in _neighbours(positions))]


def _all_pairs(positions: tuple[int, ...]) -> Iterable[tuple[int, int]]:
    return [(a, b) for a in positions for b in positions if a != b]


def _from_first(positions: tuple[int, ...]) -> Iterable[tuple[int, int]]:
    return [(positions[0], b) for b in positions[1:]]


_PATTERNS: dict[Algorithm, Pattern] = {"rings": _both_neighbours, "direct": _all_pairs, "root": _from_first}


def _loads(
    link: Link, count: int, wires: Iterable[tuple[tuple[int, ...], int]], pattern: Pattern
) -> dict[tuple[int, str], int]:
    """Unit messages on every wire of a ring, or of pairs, of members."""
    loads: dict[tuple[int, str], int] = {}
    for positions, multiplicity in wires:
        for a, b in pattern(positions):
            for wire in ring_hops(a, b, count) if link.shape == "ring" else [(a, f"to {b}")]:
                loads[wire] = loads.get(wire, 0) + multiplicity
    return loads


def _latency(cluster: Cluster, kind: StepKind, algorithm: Algorithm, geometry: Geometry) -> float:
    """Hops at every crossed level, and the start of the outermost crossed level and all inside it."""
    seconds = 0.0
    for crossing in geometry.crossings:
        hop = cluster.levels[crossing.level].link.hop_of(kind)
        seconds += hop * _num_hops(cluster, kind, algorithm, crossing)
    outermost = geometry.crossings[0].level if geometry.crossings else len(cluster.levels)
    return seconds + sum(level.link.start_seconds.get(kind, 0.0) for level in cluster.levels[outermost:])


def _num_hops(cluster: Cluster, kind: StepKind, algorithm: Algorithm, crossing: Crossing) -> int:
    both_ways = 2 if kind == "all_reduce" else 1
    match algorithm:
        case "ring" | "rings":
            return both_ways * crossing.outer * (crossing.members - 1)
        case "tree" | "binomial":
            return both_ways * ceil(log2(crossing.members))
        case "direct" | "root":  # NCCL starts its messages one after another, gloo all at once
            return (crossing.members - 1) * crossing.inner if cluster.library == "nccl" else 1


# -- groups without a geometry, and tori: every message is routed


def _has_torus(cluster: Cluster) -> bool:
    return any(level.link.shape == "torus" for level in cluster.levels)


def _routed_line(
    cluster: Cluster,
    kind: StepKind,
    groups: tuple[tuple[int, ...], ...],
    geometry: Geometry | None,
    algorithm: Algorithm,
) -> CostLine:
    one = _level_seconds(cluster, kind, _messages(kind, algorithm, groups[:1]), len(groups[0]))
    total = _level_seconds(cluster, kind, _messages(kind, algorithm, groups), len(groups[0]))
    if geometry is not None:
        latency = _latency(cluster, kind, algorithm, geometry)
    else:
        hops = len(groups[0]) - 1 if algorithm in ("ring", "rings") else 1
        crossed = [cluster.levels[cluster.crossed_level(group)].link for group in groups]
        latency = max(link.hop_of(kind) * hops + link.start_seconds.get(kind, 0.0) for link in crossed)
    return CostLine(
        algorithm=algorithm,
        latency_seconds=latency,
        own_seconds_per_byte=max(one.values(), default=0.0),
        total_seconds_per_byte=max(total.values(), default=0.0),
        busy_seconds_per_byte=tuple(sorted(total.items())),
    )


def _level_seconds(cluster: Cluster, kind: StepKind, messages: list[Message], members: int) -> dict[int, float]:
    """For every level, how long its most loaded wire is busy with these messages."""
    loads: dict[Wire, float] = wire_loads(cluster, messages)
    seconds: dict[int, float] = {}
    for wire, num_bytes in loads.items():
        link = cluster.levels[wire[0]].link
        busy = num_bytes * _seconds_per_byte(link, kind, members, 1)
        seconds[wire[0]] = max(seconds.get(wire[0], 0.0), busy)
    return seconds


def _messages(kind: StepKind, algorithm: Algorithm, groups: tuple[tuple[int, ...], ...]) -> list[Message]:
    """The messages of a collective for every byte of the array; libraries order a group by device."""
    messages: list[Message] = []
    for group in groups:
        n, ordered = len(group), sorted(group)
        share = _share(kind, n)
        match algorithm:
            case "ring":
                messages += [(device, ordered[(i + 1) % n], share.ring) for i, device in enumerate(ordered)]
            case "rings":
                ring = [(device, ordered[(i + 1) % n]) for i, device in enumerate(ordered)]
                messages += [(a, b, share.ring / 2) for a, b in (*ring, *((b, a) for a, b in ring))]
            case "direct":
                messages += [(a, b, share.message) for a in ordered for b in ordered if a != b]
            case "root" | "binomial":
                messages += [(group[0], b, share.message) for b in group[1:]]
            case "tree":
                for i in range(1, n):
                    child, parent = ordered[i], ordered[(i - 1) // 2]
                    messages += [(child, parent, share.tree / 2), (parent, child, share.tree / 2)]
    return messages
