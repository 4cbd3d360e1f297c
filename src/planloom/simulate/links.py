"""Which links communication loads, so that what goes on at the same time can be told to be in each other's way.

A link here is a level's wires as one stage sees them. Where every device has its own (a crossbar that is not shared), a
stage's wires are its own, and only what the same stage does meanwhile shares them. Where members of a level share wires
(one uplink a node, a ring, a torus), stages with devices in the same member share them. A load is the share of its time
in which a collective keeps its most loaded wire of the link busy; the loads of everything on a link add up, and above
one all of it takes longer.

Links run both ways at once: an exchange loads the way out of one stage and the way into the other, a collective both.
"""

from collections.abc import Mapping

from planloom.cluster import Cluster
from planloom.cost import Price
from planloom.program import Program

Link = tuple[int, int, str]
"""Level, owner among the stages, way: out or in."""
Loads = dict[Link, float]


class Links:
    """The links of a program's stages on a cluster."""

    def __init__(self, program: Program, cluster: Cluster) -> None:
        self._owner: list[list[int]] = []
        """By level and stage: the first of all stages that share wires with it."""
        self._num_owners: dict[tuple[int, int], int] = {}
        inside = cluster.num_devices
        for level in cluster.levels:
            inside //= level.count
            is_shared = level.link.shape != "crossbar" or (level.link.shared and inside > 1)
            self._owner.append(_owners(program, max(1, inside)) if is_shared else list(range(len(program.stages))))
        for level_index, owners in enumerate(self._owner):
            for owner in owners:
                self._num_owners[level_index, owner] = self._num_owners.get((level_index, owner), 0) + 1

    def of_collective(self, stage: int, busy: Mapping[int, float], seconds: float) -> Loads:
        loads: Loads = {}
        for level, at in busy.items():
            for way in ("out", "in"):
                loads[level, self._owner[level][stage], way] = min(1.0, at / seconds) if seconds else 0.0
        return loads

    def of_exchange(self, source: int, target: int, price: Price) -> Loads:
        loads: Loads = {}
        for level, at in price.busy:
            load = min(1.0, at / price.seconds) if price.seconds else 0.0
            loads[level, self._owner[level][source], "out"] = load
            loads[level, self._owner[level][target], "in"] = load
        return loads

    def are_private(self, loads: Loads) -> bool:
        """Does no other stage use these links?"""
        return all(self._num_owners[level, owner] == 1 for level, owner, _ in loads)


def _owners(program: Program, inside: int) -> list[int]:
    """For every stage the first one with devices in the same members, directly or through others."""
    first_in: dict[int, int] = {}
    owner = list(range(len(program.stages)))

    def find(s: int) -> int:
        while owner[s] != s:
            s = owner[s]
        return s

    for s, stage in enumerate(program.stages):
        for member in {device // inside for device in stage.mesh.devices}:
            other = first_in.setdefault(member, s)
            one, two = find(other), find(s)
            owner[max(one, two)] = min(one, two)
    return [find(s) for s in range(len(program.stages))]
