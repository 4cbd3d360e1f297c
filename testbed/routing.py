"""Which way a packet takes: the next hop of every namespace towards every device, and whole paths.

A packet to a device goes over the outermost level at which it differs from where it is. Over a torus level the inner
levels come first: it is sent as if to the device that differs at the inner levels only, and that device sends it on.
What is decided here depends on the place and the destination alone, so it can be a routing table; and it is decided
for every pair, so no program can take another way.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from planloom.cluster import Cluster
from testbed.wiring import (
    FABRIC,
    End,
    Wiring,
    device_name,
    has_routers,
    member_of,
    num_inside,
    router_name,
    step_along,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """Out of this interface, to this namespace's interface at the other end (behind bridges, where there are any)."""

    interface: str
    gateway: str
    gateway_interface: str


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The next hops of all namespaces, and the paths that follow from them."""

    wiring: Wiring
    hops: dict[str, dict[int, Hop]]  # namespace -> device to reach -> where to send it

    @cached_property
    def users(self) -> dict[tuple[str, str], tuple[tuple[int, int], ...]]:
        """The (source, destination) pairs whose packets leave by an interface, by (namespace, interface)."""
        found: dict[tuple[str, str], list[tuple[int, int]]] = {}
        devices = range(self.wiring.cluster.num_devices)
        for source in devices:
            for destination in devices:
                for end in self.path(source, destination):
                    found.setdefault((end.namespace, end.interface), []).append((source, destination))
        return {key: tuple(pairs) for key, pairs in found.items()}

    def path(self, source: int, destination: int) -> tuple[End, ...]:
        """The interfaces by which a packet leaves, one after another, on its way between two devices."""
        here, goal, path = device_name(source), device_name(destination), list[End]()
        while here != goal:
            hop = self.hops[here][destination]
            start, arrival = self._end(here, hop.interface), self._end(hop.gateway, hop.gateway_interface)
            path += [start, *self._through_bridges(self._opposite(start), arrival)]
            here = hop.gateway
            if len(path) > len(self._ends):
                raise AssertionError(f"packets from {source} to {destination} go round in circles")
        return tuple(path)

    def _through_bridges(self, entry: End, arrival: End) -> list[End]:
        """The ports by which a frame leaves bridges between an entry and an arrival: none without bridges."""
        if entry == arrival:
            return []
        for way in self._ways(entry, ()):
            if self._opposite(way[-1]) == arrival:
                return list(way)
        raise AssertionError(f"no bridge leads from {entry} to {arrival}")

    def _ways(self, entry: End, before: tuple[End, ...]) -> Iterator[tuple[End, ...]]:
        if not entry.bridge:
            return
        for port in self._ports[entry.bridge]:
            if port != entry:
                yield (*before, port)
                yield from self._ways(self._opposite(port), (*before, port))

    @cached_property
    def _ends(self) -> dict[tuple[str, str], tuple[End, End]]:
        both = [pair for cable in self.wiring.cables for pair in (cable.ends, cable.ends[::-1])]
        return {(end.namespace, end.interface): (end, other) for end, other in both}

    @cached_property
    def _ports(self) -> dict[str, list[End]]:
        ports: dict[str, list[End]] = {}
        for end, _ in self._ends.values():
            if end.namespace == FABRIC:
                ports.setdefault(end.bridge, []).append(end)
        return ports

    def _end(self, namespace: str, interface: str) -> End:
        return self._ends[namespace, interface][0]

    def _opposite(self, end: End) -> End:
        return self._ends[end.namespace, end.interface][1]


def route(wiring: Wiring) -> Routing:
    """The next hops of every device and router towards every device."""
    cluster = wiring.cluster
    devices = range(cluster.num_devices)
    hops = {
        device_name(here): {there: device_hop(cluster, here, there) for there in devices if there != here}
        for here in devices
    }
    for index, level in enumerate(cluster.levels):
        if level.count > 1 and has_routers(cluster, index):
            for member in range(cluster.num_devices // num_inside(cluster, index)):
                hops[router_name(index, member)] = {
                    there: _router_hop(cluster, index, member, there) for there in devices
                }
    return Routing(wiring=wiring, hops=hops)


def device_hop(cluster: Cluster, here: int, there: int) -> Hop:
    """Where a device sends what is for another device."""
    index = cluster.crossed_level((here, there))
    level, inside = cluster.levels[index], num_inside(cluster, index)
    if level.link.shape == "crossbar":
        return Hop(interface=f"l{index}", gateway=device_name(there), gateway_interface=f"l{index}")
    if has_routers(cluster, index):
        router = router_name(index, member_of(cluster, here, index))
        return Hop(interface=f"l{index}", gateway=router, gateway_interface=f"d{here}")
    inner_first = here - here % inside + there % inside
    if inner_first != here:  # only a torus has devices that differ inside a member and no router
        return device_hop(cluster, here, inner_first)
    place, goal = here // inside % level.count, there // inside % level.count
    if level.link.shape == "pairs":
        return Hop(interface=f"l{index}m{goal}", gateway=device_name(there), gateway_interface=f"l{index}m{place}")
    step = step_along(level.count, place, goal)
    neighbour = here + ((place + step) % level.count - place) * inside
    return _ring_hop(index, step, device_name(neighbour))


def _router_hop(cluster: Cluster, index: int, member: int, there: int) -> Hop:
    """Where a member's router sends what is for a device: into its member, or to another member's router.

    What is for a device outside the member around is on the inner part of its way over an outer torus: it goes to the
    device here that differs from it at the outer levels only.
    """
    level, inside = cluster.levels[index], num_inside(cluster, index)
    around = inside * level.count
    place = member % level.count
    there = (member // level.count) * around + there % around
    goal = there // inside % level.count
    if goal == place:
        return Hop(interface=f"d{there}", gateway=device_name(there), gateway_interface=f"l{index}")
    if level.link.shape == "pairs":
        router = router_name(index, member + goal - place)
        return Hop(interface=f"l{index}m{goal}", gateway=router, gateway_interface=f"l{index}m{place}")
    step = step_along(level.count, place, goal)
    neighbour = member + (place + step) % level.count - place
    return _ring_hop(index, step, router_name(index, neighbour))


def _ring_hop(index: int, step: int, neighbour: str) -> Hop:
    out, into = ("next", "prev") if step == 1 else ("prev", "next")
    return Hop(interface=f"l{index}{out}", gateway=neighbour, gateway_interface=f"l{index}{into}")
