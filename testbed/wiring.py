"""Which namespaces, bridges and cables a cluster is made of. Pure: no namespace is touched here.

The cluster model says that two devices talk over the link of the outermost level at which they differ, and over
nothing else. So every device gets a namespace, an address of its own that belongs to no cable, and for each level its
own way out:

    crossbar          one cable, shaped at both ends, into the switch of the member around (a bridge)
    crossbar, shared  one unshaped cable into the bridge of its member; that bridge has the one shaped cable to the
                      switch of the member around
    torus             a shaped cable to the next and to the previous device along the level
    ring, pairs       a shaped cable to the next and previous member, or to every other member; members with several
                      devices have a router for it, and the devices an unshaped cable to that router

A cable is a veth pair and so runs in both directions at once; shaping the egress of both its ends gives every
direction the whole bandwidth. Two members next to each other in both directions (a ring of two) have one cable: its two
directions are the two links. A level with one member has no cables.

`testbed.routing` says which way a packet takes through these cables, `testbed.shaping` how an end is shaped.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from planloom.cluster import Cluster, Level
from testbed.errors import TestbedError

FABRIC = "fabric"
"""The namespace of all bridges. They are switches: they have no addresses and route nothing."""

MAX_DEVICES = 64
"""Beyond this, namespaces and processes of one machine measure the machine and not the network."""

MAX_BYTES_PER_SECOND = 1.25e9
"""10 Gbit/s: a veth pair between two processes of one core carries little more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """One end of a cable: an interface in a namespace, plugged into a bridge there or not."""

    namespace: str
    interface: str
    mac: str
    bridge: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """A veth pair, shaped at both ends or (rate 0) not at all."""

    level: int
    ends: tuple[End, End]
    bytes_per_second: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """All of a cluster's network: namespaces beside the fabric, with their addresses, bridges and cables."""

    cluster: Cluster
    addresses: dict[str, str]  # namespace (device or router) -> its address
    bridges: tuple[str, ...]
    cables: tuple[Cable, ...]


def device_name(device: int) -> str:
    return f"device{device}"


def device_address(device: int) -> str:
    return f"10.77.0.{device + 1}"


def router_name(level: int, member: int) -> str:
    return f"router{level}-{member}"


def num_inside(cluster: Cluster, level: int) -> int:
    """How many devices a member of a level has."""
    return math.prod(cluster.level_counts[level + 1 :])


def member_of(cluster: Cluster, device: int, level: int) -> int:
    """The member of a level that a device is in, counted through the whole cluster. Level -1 is the cluster."""
    return device // num_inside(cluster, level)


def has_routers(cluster: Cluster, level: int) -> bool:
    """Whether a ring or pairs of members with several devices needs a router a member."""
    return cluster.levels[level].link.shape in ("ring", "pairs") and num_inside(cluster, level) > 1


def step_along(count: int, here: int, there: int) -> int:
    """The shorter way around a ring: +1 or -1; of two equal ways the ascending one; of two members the one cable."""
    if count == 2:
        return 1 if here == 0 else -1
    return 1 if 2 * ((there - here) % count) <= count else -1


def wire(cluster: Cluster) -> Wiring:
    """All cables of a cluster."""
    _require_buildable(cluster)
    addresses = {device_name(device): device_address(device) for device in range(cluster.num_devices)}
    bridges: dict[str, None] = {}
    cables: list[Cable] = []
    macs = (f"02:77:00:00:{number >> 8:02x}:{number & 255:02x}" for number in itertools.count(1))
    routers = 0
    for index, level in enumerate(cluster.levels):
        if level.count == 1:
            continue
        if has_routers(cluster, index):
            for member in range(cluster.num_devices // num_inside(cluster, index)):
                routers += 1
                addresses[router_name(index, member)] = f"10.77.1.{routers}"
        for rate, one, other in _cables_of(cluster, index, level):
            ends = tuple(End(namespace=n, interface=i, mac=next(macs), bridge=b) for n, i, b in (one, other))
            bridges.update({end.bridge: None for end in ends if end.bridge})
            cables.append(Cable(level=index, ends=(ends[0], ends[1]), bytes_per_second=rate))
    return Wiring(cluster=cluster, addresses=addresses, bridges=tuple(bridges), cables=tuple(cables))


_Socket = tuple[str, str, str]  # namespace, interface, bridge or nothing


def _cables_of(cluster: Cluster, index: int, level: Level) -> Iterator[tuple[float, _Socket, _Socket]]:
    """The cables of one level: the rate, and what each end is plugged into."""
    rate, inside = level.link.bandwidth_bytes_per_second, num_inside(cluster, index)
    devices = range(cluster.num_devices)
    if level.link.shape == "crossbar":
        shared = level.link.shared and inside > 1
        for device in devices:
            switch = f"s{index}-{member_of(cluster, device, index - 1)}"
            bridge = f"b{index}-{member_of(cluster, device, index)}" if shared else switch
            port = (FABRIC, f"p{index}-{device}", bridge)
            yield 0.0 if shared else rate, (device_name(device), f"l{index}", ""), port
            if shared and device % inside == 0:
                member = device // inside
                yield rate, (FABRIC, f"u{index}-{member}", bridge), (FABRIC, f"d{index}-{member}", switch)
        return
    if has_routers(cluster, index):
        for device in devices:
            router = router_name(index, member_of(cluster, device, index))
            yield 0.0, (device_name(device), f"l{index}", ""), (router, f"d{device}", "")
    for (one, one_place), (other, other_place) in _neighbours(cluster, index, level):
        if level.link.shape == "pairs":
            yield rate, (one, f"l{index}m{other_place}", ""), (other, f"l{index}m{one_place}", "")
        else:
            yield rate, (one, f"l{index}next", ""), (other, f"l{index}prev", "")


def _neighbours(cluster: Cluster, index: int, level: Level) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
    """The namespaces, with their place along the level, that a ring, pairs or torus links directly."""
    routers = has_routers(cluster, index)
    inside = 1 if routers else num_inside(cluster, index)  # a torus links devices, whatever is inside a member
    total = cluster.num_devices // num_inside(cluster, index) * inside
    for number in range(total):
        place = number // inside % level.count
        if level.link.shape == "pairs":
            others = range(place + 1, level.count)
        else:
            following = (place + 1) % level.count
            others = range(following, following + 1) if level.count > 2 or place == 0 else range(0)
        for there in others:
            other = number + (there - place) * inside
            names = [router_name(index, at) if routers else device_name(at) for at in (number, other)]
            yield (names[0], place), (names[1], there)


def _require_buildable(cluster: Cluster) -> None:
    if not 2 <= cluster.num_devices <= MAX_DEVICES:
        raise TestbedError(
            f"cluster {cluster.name!r} has a number of devices that the testbed does not build",
            given=f"{cluster.num_devices} devices",
            required=f"2 to {MAX_DEVICES}",
            todo="give the levels other counts",
        )
    for level in cluster.levels:
        rate = level.link.bandwidth_bytes_per_second
        if level.count > 1 and rate > MAX_BYTES_PER_SECOND:
            raise TestbedError(
                f"the link of level {level.name!r} is faster than a link of the testbed can be",
                given=f"{rate * 8 / 1e9:g} Gbit/s",
                required=f"at most {MAX_BYTES_PER_SECOND * 8 / 1e9:g} Gbit/s, and sensibly at most 1 Gbit/s a link",
                todo="write a cluster file with all bandwidths divided by the same number; `testbed/clusters` has some",
            )
