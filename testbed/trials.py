"""Which flows show whether the links are what the cluster file says, and what they must reach. Pure.

For every level with more than one member, from device 0 and its neighbours:

    alone                  one flow to the next member: the link's bandwidth
    both directions        one flow each way: the bandwidth each
    two senders            two devices of one member to two of the next: the bandwidth together where the member has one
                           uplink, the bandwidth each where every device has its own
    one after another      0 → 1 and 1 → 2: no member's sending takes from its receiving
    to two members         one device to two others: together over a crossbar's one uplink, each over links of their own
    through a neighbour    0 → 2 and 1 → 2 of a ring or torus: together, since the link from 1 to 2 carries both
    around the corner      of a torus with another inside: inner levels come first, so both flows share the last link

and one flow over every level, all at once, from device 0: no level takes from another.
"""

from dataclasses import dataclass
from typing import Literal

from planloom.cluster import Cluster
from testbed.wiring import num_inside


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Flows that run at once, and what they must reach: each of them its figure, or all together the first."""

    name: str
    level: str
    flows: tuple[tuple[int, int], ...]
    judged: Literal["each", "together"]
    bytes_per_second: tuple[float, ...]


def trials_of(cluster: Cluster) -> tuple[Trial, ...]:
    """All trials of a cluster, level by level from the outermost."""
    trials: list[Trial] = []
    for index, level in enumerate(cluster.levels):
        if level.count > 1:
            trials += _trials_of_level(cluster, index)
    outer = [index for index, level in enumerate(cluster.levels) if level.count > 1]
    if len(outer) > 1:
        trials.append(
            Trial(
                name="all levels at once",
                level="all",
                flows=tuple((0, num_inside(cluster, index)) for index in outer),
                judged="each",
                bytes_per_second=tuple(cluster.levels[index].link.bandwidth_bytes_per_second for index in outer),
            )
        )
    return tuple(trials)


def _trials_of_level(cluster: Cluster, index: int) -> list[Trial]:
    level, inside = cluster.levels[index], num_inside(cluster, index)
    link, count = level.link, level.count
    one, two, last = inside, 2 * inside, (count - 1) * inside  # device 0 of the members 1, 2 and the last
    trials: list[Trial] = []

    def add(name: str, judged: Literal["each", "together"], *flows: tuple[int, int]) -> None:
        rates = (link.bandwidth_bytes_per_second,) * len(flows)
        trials.append(Trial(name=name, level=level.name, flows=flows, judged=judged, bytes_per_second=rates))

    add("alone", "each", (0, one))
    add("both directions", "each", (0, one), (one, 0))
    if inside > 1:
        add("two senders", "together" if link.shared else "each", (0, one), (1, one + 1))
    if count > 2:
        add("one after another", "each", (0, one), (one, two))
        if link.shape == "crossbar":
            add("to two members", "together", (0, one), (0, two))
        else:
            add("to two members", "each", (0, one), (0, last))
    if count > 3 and link.shape in ("ring", "torus"):
        add("through a neighbour", "together", (0, two), (one, two))
    inner = index + 1
    if link.shape == "torus" and inner < len(cluster.levels) and cluster.levels[inner].link.shape == "torus":
        beside = num_inside(cluster, inner)
        if cluster.levels[inner].count > 1:
            add("around the corner", "together", (0, one + beside), (beside, one + beside))
    return trials
