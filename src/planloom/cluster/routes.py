"""Which links a message uses, and how much of every link a set of messages uses at once.

A message uses the link of the outermost level at which its two devices differ (see `model` for the shapes). On a
crossbar that is the uplink of the sender and that of the receiver; on a ring the links on the shorter way, ascending
where both ways are equal; among pairs the pair's own link; in a torus the links of every level at which the two
differ, inner levels first.
"""

from collections.abc import Iterable, Iterator, Sequence

from planloom.cluster.model import Cluster

Message = tuple[int, int, float]
"""(from, to, bytes)"""

Wire = tuple[int, str, tuple[int, ...]]
"""One direction of one link: its level, which one (`out`, `in`, `up`, `down`, `to`), and whose."""


def route(cluster: Cluster, source: int, target: int) -> list[Wire]:
    """The wires that a message between two devices passes."""
    here, there = list(cluster.coordinates(source)), cluster.coordinates(target)
    if source == target:
        return []
    outermost = next(level for level, (a, b) in enumerate(zip(here, there, strict=True)) if a != b)
    if cluster.levels[outermost].link.shape != "torus":
        return list(_cross(cluster, outermost, tuple(here), there))
    wires: list[Wire] = []
    for level in reversed(range(outermost, len(here))):
        if here[level] != there[level]:
            after = tuple(there[level] if i == level else here[i] for i in range(len(here)))
            wires += _cross(cluster, level, tuple(here), after)
            here = list(after)
    return wires


def _cross(cluster: Cluster, level: int, here: tuple[int, ...], there: tuple[int, ...]) -> Iterator[Wire]:
    """The wires of one level."""
    link, count = cluster.levels[level].link, cluster.levels[level].count
    if link.shape == "crossbar":
        yield level, "out", here[: level + 1] if link.shared else here
        yield level, "in", there[: level + 1] if link.shared else there
    elif link.shape == "pairs":
        yield level, "to", (*here[: level + 1], there[level])
    else:
        others = here[level + 1 :] if link.shape == "torus" else ()
        for position, way in ring_hops(here[level], there[level], count):
            yield level, way, (*here[:level], position, *others)


def ring_hops(start: int, stop: int, count: int) -> list[tuple[int, str]]:
    """The hops of the shorter way round a ring: the position that each leaves, and whether it goes up or down.

    Two members have one link between them, so the way up and the way down are its two directions.
    """
    ascending = (stop - start) % count
    descending = count - ascending
    if ascending <= descending and not (count == 2 and start == 1):
        return [((start + i) % count, "up") for i in range(ascending)]
    return [((start - i) % count, "down") for i in range(descending)]


def wire_loads(cluster: Cluster, messages: Iterable[Message]) -> dict[Wire, float]:
    """Bytes on every wire that messages use."""
    loads: dict[Wire, float] = {}
    for source, target, num_bytes in messages:
        for wire in route(cluster, source, target):
            loads[wire] = loads.get(wire, 0.0) + num_bytes
    return loads


def exchange_seconds(cluster: Cluster, messages: Sequence[Message]) -> float:
    """Messages that all travel at once: the longest way's latency, and the load of the most loaded wire."""
    if all(level.link.shape == "crossbar" for level in cluster.levels):
        return _crossbar_seconds(cluster, messages)
    latency, slowest = 0.0, 0.0
    for source, target, _ in messages:
        hops = [cluster.levels[level].link for level, way, _ in route(cluster, source, target) if way != "in"]
        latency = max(latency, sum(link.hop_of("exchange") for link in hops))
    for (level, _, _), num_bytes in wire_loads(cluster, messages).items():
        link = cluster.levels[level].link
        rate = link.bandwidth_bytes_per_second * link.efficiency_of("exchange", 2)
        slowest = max(slowest, num_bytes / rate)
    return latency + slowest


def _crossbar_seconds(cluster: Cluster, messages: Sequence[Message]) -> float:
    """The same where every level is a crossbar: without coordinates, for exchanges of thousands of devices."""
    latency, slowest, inside, rest = 0.0, 0.0, cluster.num_devices, messages
    for level in cluster.levels:
        inside //= level.count
        crossing = [message for message in rest if message[0] // inside != message[1] // inside]
        if not crossing:
            continue
        if len(crossing) < len(rest):
            rest = [message for message in rest if message[0] // inside == message[1] // inside]
        else:
            rest = ()
        link, sharing = level.link, inside if level.link.shared else 1
        sent: dict[int, float] = {}
        received: dict[int, float] = {}
        for source, target, num_bytes in crossing:
            out, into = source // sharing, target // sharing
            sent[out] = sent.get(out, 0.0) + num_bytes
            received[into] = received.get(into, 0.0) + num_bytes
        rate = link.bandwidth_bytes_per_second * link.efficiency_of("exchange", 2)
        latency = max(latency, link.hop_of("exchange"))
        slowest = max(slowest, max(sent.values()) / rate, max(received.values()) / rate)
    return latency + slowest
