"""A cluster's network as the commands that build it: for `ip`, for `tc`, and the kernel's settings, by namespace.

Every device has one address, on an interface `dev0` that is no cable; it is what programs bind to and connect to. For
every other device there is a route to that one address (/32) out of the right interface, and the next hop's hardware
address is written down too: nothing is left to be found out by broadcast.
"""

from dataclasses import dataclass, field

from planloom.cluster import Cluster
from testbed.routing import Routing, route
from testbed.shaping import FINE, MTU_BYTES, WINDOW_BYTES, Packets, largest_packet_bytes, shape
from testbed.wiring import FABRIC, Wiring, device_name, wire

ADDRESS_INTERFACE = "dev0"

CONGESTION_CONTROL = "cubic"
"""Said with each route, because a namespace may not choose its default freely. bbr, the default of some
machines, sends next to nothing for 0.2 s every ten seconds, to measure the path anew (its PROBE_RTT)."""

_SETTINGS = {
    "net/ipv4/conf/all/rp_filter": "0",  # around a ring, answers may take another way
    "net/ipv4/conf/default/rp_filter": "0",
    "net/ipv4/conf/all/send_redirects": "0",  # the way is ours to choose
    "net/ipv4/conf/default/send_redirects": "0",
    "net/ipv4/conf/all/accept_redirects": "0",
    "net/ipv4/conf/default/accept_redirects": "0",
    "net/ipv4/ip_forward": "1",
    "net/ipv4/tcp_wmem": f"4096 65536 {WINDOW_BYTES}",
    "net/ipv4/tcp_slow_start_after_idle": "0",  # a step waits for computation; the next message starts as fast
    "net/ipv4/tcp_no_metrics_save": "1",  # what one connection met is nothing to the next
    "net/ipv6/conf/all/disable_ipv6": "1",
    "net/ipv6/conf/default/disable_ipv6": "1",
}
_FABRIC_SETTINGS = {
    "net/bridge/bridge-nf-call-iptables": "0",  # bridges here are switches, not firewalls
    "net/ipv6/conf/all/disable_ipv6": "1",
    "net/ipv6/conf/default/disable_ipv6": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceScript:
    """What is done inside one namespace."""

    name: str
    settings: dict[str, str]  # below /proc/sys; what the kernel does not have is left out
    ip: list[str] = field(default_factory=list)
    tc: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkScript:
    """All namespaces, the fabric first, and the cables between them; `{name}` in a cable stands for a namespace."""

    namespaces: list[NamespaceScript]
    cables: list[str]


def network_script(cluster: Cluster, packets: Packets = FINE) -> NetworkScript:
    """The commands that build a cluster's network, with packets of this size."""
    wiring = wire(cluster)
    routing = route(wiring)
    scripts = {FABRIC: NamespaceScript(name=FABRIC, settings=_FABRIC_SETTINGS, ip=_bridges(wiring))}
    for name, address in wiring.addresses.items():
        scripts[name] = NamespaceScript(name=name, settings=_SETTINGS, ip=_addresses(address))
    cables = []
    for cable in wiring.cables:
        one, other = (
            f"name {end.interface} address {end.mac} mtu {MTU_BYTES} netns {{{end.namespace}}}" for end in cable.ends
        )
        cables.append(f"link add {one} type veth peer {other}")
        packet_bytes = largest_packet_bytes(cluster.levels[cable.level].link.bandwidth_bytes_per_second, packets)
        for end in cable.ends:
            script = scripts[end.namespace]
            master = f" master {end.bridge}" if end.bridge else ""
            script.ip.append(f"link set dev {end.interface}{master} gso_max_size {packet_bytes} up")
            users = routing.users.get((end.namespace, end.interface), ())
            if cable.bytes_per_second and users:
                pairs = [(wiring.addresses[device_name(a)], wiring.addresses[device_name(b)]) for a, b in users]
                script.tc.extend(shape(end.interface, cable.bytes_per_second, pairs, packets))
    for name in wiring.addresses:
        scripts[name].ip.extend(_routes(routing, name))
    return NetworkScript(namespaces=list(scripts.values()), cables=cables)


def _bridges(wiring: Wiring) -> list[str]:
    lines = ["link set dev lo up"]
    for bridge in wiring.bridges:
        lines.append(f"link add name {bridge} mtu {MTU_BYTES} type bridge mcast_snooping 0")
        lines.append(f"link set dev {bridge} up")
    return lines


def _addresses(address: str) -> list[str]:
    """`dev0` is one end of a veth pair whose other end is never used: not every kernel has dummy devices."""
    return [
        "link set dev lo up",
        f"link add name {ADDRESS_INTERFACE} mtu {MTU_BYTES} type veth peer name {ADDRESS_INTERFACE}-unused",
        f"address add {address}/32 dev {ADDRESS_INTERFACE}",
        f"link set dev {ADDRESS_INTERFACE} up",
        f"link set dev {ADDRESS_INTERFACE}-unused up",
    ]


def _routes(routing: Routing, name: str) -> list[str]:
    addresses = routing.wiring.addresses
    macs = {(end.namespace, end.interface): end.mac for cable in routing.wiring.cables for end in cable.ends}
    neighbours, routes = dict[str, None](), []
    for device, hop in routing.hops[name].items():
        gateway, mac = addresses[hop.gateway], macs[hop.gateway, hop.gateway_interface]
        neighbours[f"neighbor replace {gateway} lladdr {mac} dev {hop.interface} nud permanent"] = None
        routes.append(
            f"route add {addresses[device_name(device)]}/32 via {gateway} dev {hop.interface} onlink"
            f" src {addresses[name]} congctl {CONGESTION_CONTROL}"
        )
    return [*neighbours, *routes]
