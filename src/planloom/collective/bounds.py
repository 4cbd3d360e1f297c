"""No program is faster: a lower bound on the time of a change of layout.

Contract every member of level l to a point, and look at one element of the tensor. It has contributions (or its only
copy) at p points and is wanted at q points. To combine p contributions takes at least p - 1 sends between points; to
bring the result to q points takes q - 1 more if one of them took part in combining, else q. So an all-reduce among n
points takes 2(n - 1) sends of every element, a reduce-scatter or an all-gather n - 1, an all-to-all 1 - 1/n on average.

Between points of level l only the links of levels 0 to l carry anything, and of these only those that lie on the way
between two devices of a group. With C_i what they carry together at level i in a second, over all groups of the change,

    seconds >= max over l of  sends_l · bytes / (C_0 + … + C_l)

and a master cannot send or receive faster than all its links together. Links count with the best efficiency of any
collective, and latencies are left out, so that no step is priced below its bound. On rings and tori a send between
members of a group costs as many hops as they are apart at least.

Groups that differ in digits which do not move are taken to hold elements of their own, as the replicas of a reduction
over one of several axes do. Where they really hold the same, they could share the work, and be faster than this.
"""

from collections.abc import Callable
from itertools import permutations
from math import prod

from planloom.cluster import COLLECTIVES, Cluster, Link
from planloom.cluster.routes import Wire, route
from planloom.collective.geometry import geometry_of_groups, terrain_of
from planloom.collective.refine import Letter, letters_of
from planloom.layout import Digit, Layout, Mesh


def lower_bound_seconds(
    cluster: Cluster, mesh: Mesh, source: Layout, target: Layout, sizes: tuple[int, ...], *, item_bytes: int = 4
) -> float:
    """Seconds below which no program changes the layout, whatever its steps."""
    before, after = letters_of(source), letters_of(target)
    pairs: dict[Digit, tuple[Letter, Letter]] = {}
    for digit in mesh.digits:
        was, will = before.get(digit, ("R", -1)), after.get(digit, ("R", -1))
        if was != will:
            pairs[digit] = ("A" if was[0] == "B" else was[0], will[0])
    if not pairs:
        return 0.0
    idle = [d for d in mesh.digits if d not in pairs and before.get(d, ("R", -1))[0] == "M"]
    groups = tuple(
        group
        for group in mesh.groups(tuple(pairs))
        if not any(mesh.coordinates(group[0])[digit] for digit in idle)  # only masters hold anything
    )
    split = prod(digit.size for digit, (was, _) in pairs.items() if was == "A")
    group_bytes = item_bytes * prod(source.local_sizes(sizes)) * split
    bound, capacity = 0.0, 0.0
    capacities = _capacities(cluster, groups)
    count = _PointCounter(cluster, mesh)
    for level in range(len(cluster.levels)):
        capacity += capacities.get(level, 0.0)
        if capacity > 0:
            sends = _sends(pairs, lambda digits, level=level: count(digits, level))  # type: ignore[misc]
            bound = max(bound, len(groups) * group_bytes * sends / capacity)
    return max(bound, _through_master(cluster, pairs, group_bytes))


def _sends(pairs: dict[Digit, tuple[Letter, Letter]], num_points: Callable[[tuple[Digit, ...]], int]) -> float:
    """Sends of one element between points, on average over the elements."""
    combined = num_points(tuple(d for d, (was, will) in pairs.items() if was == "P" and will != "P"))
    wanted = num_points(tuple(d for d, (was, will) in pairs.items() if was != "R" and will == "R"))
    elsewhere = tuple(d for d, pair in pairs.items() if pair in (("A", "B"), ("A", "M"), ("M", "B")))
    meeting = 1 / num_points(elsewhere)  # the share of elements that are wanted where they are
    return max(0.0, combined - 1 + wanted - meeting)


class _PointCounter:
    """How many members of a level, and of those around it, digits vary over together; the fewest of any group."""

    def __init__(self, cluster: Cluster, mesh: Mesh) -> None:
        self.cluster, self.mesh = cluster, mesh
        self.terrain = terrain_of(cluster, mesh)

    def __call__(self, digits: tuple[Digit, ...], level: int) -> int:
        if not digits:
            return 1
        if self.terrain is not None:
            return prod(s.size for s in self.terrain.strides if s.digit in digits and s.level <= level)
        return min(
            len({self.cluster.coordinates(device)[: level + 1] for device in group})
            for group in self.mesh.groups(digits)
        )


def _capacities(cluster: Cluster, groups: tuple[tuple[int, ...], ...]) -> dict[int, float]:
    """Bytes a second that the wires of every level carry together, in sends between members of a group."""
    geometry = geometry_of_groups(cluster, groups)
    if geometry is not None and all(level.link.shape in ("crossbar", "pairs") for level in cluster.levels):
        crossed = [crossing.level for crossing in geometry.crossings]
        devices = [device for group in groups for device in group]
        return {
            level: _num_wires(cluster, level, devices) * _best_rate(cluster.levels[level].link) for level in crossed
        }
    wires: dict[int, set[Wire]] = {}
    hops: dict[int, int] = {}
    for group in groups:
        for a, b in permutations(group, 2):
            passed = [wire for wire in route(cluster, a, b) if wire[1] != "in"]
            for level in {wire[0] for wire in passed}:
                own = [wire for wire in passed if wire[0] == level]
                wires.setdefault(level, set()).update(own)
                hops[level] = min(hops.get(level, len(own)), len(own))
    return {level: len(found) * _best_rate(cluster.levels[level].link) / hops[level] for level, found in wires.items()}


def _num_wires(cluster: Cluster, level: int, devices: list[int]) -> int:
    """The uplinks, or the links of pairs, that devices have at a level."""
    link, count = cluster.levels[level].link, cluster.levels[level].count
    if link.shape == "crossbar" and not link.shared:
        return len(devices)
    num_members = len({cluster.coordinates(device)[: level + 1] for device in devices})
    return num_members * (count - 1 if link.shape == "pairs" else 1)


def _best_rate(link: Link) -> float:
    kinds = [kind for kind in COLLECTIVES if kind != "exchange"]
    named = {kind for kind, members in link.efficiency if members == 0}
    best = max([share for (kind, _), share in link.efficiency.items() if kind in kinds], default=1.0)
    return link.bandwidth_bytes_per_second * (best if named >= set(kinds) else max(best, 1.0))


def _through_master(cluster: Cluster, pairs: dict[Digit, tuple[Letter, Letter]], group_bytes: float) -> float:
    """Where all digits come from, or go to, their master, everything else passes through its own links."""
    kinds = set(pairs.values())
    if len(kinds) > 1 or not kinds & {("P", "M"), ("A", "M"), ("M", "R"), ("M", "B")}:
        return 0.0
    rate = 0.0
    for level in cluster.levels:
        num_links = {"crossbar": 1, "ring": 2, "torus": 2, "pairs": level.count - 1}[level.link.shape]
        rate += num_links * _best_rate(level.link) if level.count > 1 else 0.0
    keeps = 1 / prod(digit.size for digit in pairs) if kinds & {("A", "M"), ("M", "B")} else 0.0
    return (1 - keeps) * group_bytes / rate if rate else 0.0
