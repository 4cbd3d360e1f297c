"""How many bytes and hops a collective takes at every level, by every algorithm that its library has.

With n devices in a group, m of them members of a level, and b bytes in a device's array before the step, a wire of the
level carries for each group that passes it

    ring      the share: 2b(n-1)/n of an all-reduce, b(n-1)/n of a reduce-scatter, b(n-1) of an all-gather,
              b of a reduce or broadcast; once, since a ring in device order enters and leaves a member once
    rings     half of it in either direction: the same on a crossbar, half of it on a wire of a ring or torus
    tree      2b of an all-reduce, b where only two members meet (each is root of one half)
    direct    what its devices send to those beyond: inner · (m-1) · inner messages
    root      what the first device of a group receives or sends: (m-1) · inner messages
    binomial  b · ⌈log2 m⌉, from the root
    neighbour b: every device's array to the next, in the order of the group

NCCL lays several rings, one for each device of a member, so that members whose devices have uplinks of their own
(`shared: false`) use them all; gloo lays one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil, log2
from typing import Literal

from planloom.cluster import Cluster, Link
from planloom.cluster.routes import Message, ring_hops, wire_loads
from planloom.collective.geometry import Crossing, Geometry, Wires
from planloom.collective.steps import StepKind

Algorithm = Literal["ring", "rings", "tree", "direct", "root", "binomial", "neighbour"]

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
        "rotate": ("neighbour",),
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
        "rotate": ("neighbour",),
    },
}
"""What a library does in a collective: NVIDIA/nccl src/graph/tuning.cc; pytorch/gloo gloo/*.cc."""


def num_messages(library: str, kind: StepKind, algorithm: Algorithm, group_size: int) -> int:
    """How many messages the host of a device has to start: NCCL's are started by one kernel."""
    if library == "nccl":
        return 1
    rounds = group_size - 1
    match algorithm:
        case "rings":
            return 2 * rounds
        case "ring":
            return (2 if kind == "all_reduce" else 1) * rounds
        case "direct" | "root":
            return rounds
        case "tree" | "binomial":
            return ceil(log2(group_size))
        case "neighbour":
            return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelTraffic:
    """What a collective does at one level; bytes on the most loaded wire for every byte of an array before it."""

    level: int
    members: int
    num_hops: int
    own_bytes: float
    """Of one group."""
    total_bytes: float
    """Of all groups at once."""
    num_flows: int


def level_traffic(
    cluster: Cluster, kind: StepKind, algorithm: Algorithm, geometry: Geometry
) -> tuple[LevelTraffic, ...]:
    """The traffic of regular groups at every level that they cross, outermost first; not for tori."""
    found = []
    for crossing in geometry.crossings:
        link = cluster.levels[crossing.level].link
        own, total, num_flows = _wire_bytes(cluster, link, crossing, algorithm, _share(kind, geometry.group_size))
        found.append(
            LevelTraffic(
                level=crossing.level,
                members=crossing.members,
                num_hops=_num_hops(cluster, kind, algorithm, crossing),
                own_bytes=own,
                total_bytes=total,
                num_flows=num_flows,
            )
        )
    return tuple(found)


def routed_traffic(
    cluster: Cluster,
    kind: StepKind,
    algorithm: Algorithm,
    groups: tuple[tuple[int, ...], ...],
    geometry: Geometry | None,
) -> tuple[LevelTraffic, ...]:
    """The traffic of any groups on any shape: every message is routed."""
    own = _most_loaded(cluster, _messages(kind, algorithm, groups[:1]))
    total = _most_loaded(cluster, _messages(kind, algorithm, groups))
    n = len(groups[0])
    if kind == "rotate":
        hops = {min(cluster.crossed_level(group) for group in groups): 1}
    elif geometry is not None:
        hops = {c.level: _num_hops(cluster, kind, algorithm, c) for c in geometry.crossings}
    else:
        outermost = min(cluster.crossed_level(group) for group in groups)
        hops = {outermost: n - 1 if algorithm in ("ring", "rings") else 1}
    return tuple(
        LevelTraffic(
            level=level,
            members=n,
            num_hops=hops.get(level, 0),
            own_bytes=own.get(level, 0.0),
            total_bytes=total[level],
            num_flows=1,
        )
        for level in sorted(total)
    )


def _most_loaded(cluster: Cluster, messages: list[Message]) -> dict[int, float]:
    """Bytes on the most loaded wire of every level."""
    most: dict[int, float] = {}
    for (level, _, _), num_bytes in wire_loads(cluster, messages).items():
        most[level] = max(most.get(level, 0.0), num_bytes)
    return most


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
        case "reduce" | "broadcast" | "rotate":
            return _Share(ring=1.0, tree=1.0, message=1.0)
        case "slice" | "mask":
            raise ValueError(f"{kind} sends nothing")


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
            if algorithm == "rings" and _leaves_once(crossing, own_uplinks) and link.shape == "crossbar":
                edge /= 2
        case "tree":
            edge, flows = share.tree / (2 if m == 2 else 1), 1
            if own_uplinks and cluster.library == "nccl":
                edge /= inner
        case "binomial":
            edge, flows = share.ring * ceil(log2(m)), 1
        case "neighbour":
            edge, flows = share.ring, 1
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


def _leaves_once(crossing: Crossing, own_uplinks: bool) -> bool:
    """Whether only one of two rings leaves by an uplink: by its first device one way and by its last the other, or from
    one end of a line of two.
    """
    return (own_uplinks and crossing.inner > 1) or (crossing.members == 2 and crossing.outer > 1)


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


def _num_hops(cluster: Cluster, kind: StepKind, algorithm: Algorithm, crossing: Crossing) -> int:
    both_ways = 2 if kind == "all_reduce" else 1
    match algorithm:
        case "ring" | "rings":
            return both_ways * crossing.outer * (crossing.members - 1)
        case "tree" | "binomial":
            return both_ways * ceil(log2(crossing.members))
        case "direct" | "root":  # NCCL starts its messages one after another, gloo all at once
            return (crossing.members - 1) * crossing.inner if cluster.library == "nccl" else 1
        case "neighbour":
            return 1


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
            case "neighbour":
                messages += [(device, group[(i + 1) % n], share.ring) for i, device in enumerate(group)]
            case "direct":
                messages += [(a, b, share.message) for a in ordered for b in ordered if a != b]
            case "root" | "binomial":
                messages += [(group[0], b, share.message) for b in group[1:]]
            case "tree":
                for i in range(1, n):
                    child, parent = ordered[i], ordered[(i - 1) // 2]
                    messages += [(child, parent, share.tree / 2), (parent, child, share.tree / 2)]
    return messages
