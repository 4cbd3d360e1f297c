"""Seconds of a set of messages that travel at once: latency, and the load of the most loaded link over its bandwidth.

A message between two devices uses the link of the outermost level at which they differ. Where the members of that
level share one uplink, all their devices' bytes add up on it; else every device has its own (P2's contention, without
routes).
"""

from collections.abc import Iterable

from planloom.cluster import Cluster
from planloom.collective import Step

Message = tuple[int, int, float]
"""(from, to, bytes)"""


def routed_seconds(cluster: Cluster, messages: Iterable[Message], num_rounds: int) -> float:
    """Time of messages that all travel at once, in `num_rounds` dependent rounds."""
    loads: dict[tuple[int, str, tuple[int, ...]], float] = {}
    latency = 0.0
    for source, target, num_bytes in messages:
        level = cluster.crossed_level((source, target))
        link = cluster.levels[level].link
        latency = max(latency, link.latency_seconds)
        for direction, device in (("out", source), ("in", target)):
            coordinates = cluster.coordinates(device)
            uplink = coordinates[: level + 1] if link.shared else coordinates
            key = (level, direction, uplink)
            loads[key] = loads.get(key, 0.0) + num_bytes
    slowest = max(
        (load / cluster.levels[level].link.bandwidth_bytes_per_second for (level, _, _), load in loads.items()),
        default=0.0,
    )
    return latency * num_rounds + slowest


def step_messages(step: Step, num_bytes: float) -> tuple[list[Message], int]:
    """The messages of a collective by ring or direct exchange, and its rounds; `num_bytes` in each array before."""
    n = step.group_size
    messages: list[Message] = []
    if step.kind in ("all_reduce", "all_gather"):
        share = 2 * num_bytes * (n - 1) / n if step.kind == "all_reduce" else num_bytes * (n - 1)
        for group in step.groups:
            messages += [(device, group[(i + 1) % n], share) for i, device in enumerate(group)]
        return messages, 2 * (n - 1) if step.kind == "all_reduce" else n - 1
    for group in step.groups:
        messages += [(a, b, num_bytes / n) for a in group for b in group if a != b]
    return messages, 1
