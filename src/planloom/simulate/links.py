"""Which links communication loads, so that what goes on at the same time can be told to be in each other's way.

| level                       | links                                                                                 |
|-----------------------------|---------------------------------------------------------------------------------------|
| crossbar, one a device      | a stage's own: all its devices do the same, and no other stage has them               |
| crossbar, shared            | one for each member: stages with devices in the same member share it                  |
| ring, pairs, torus          | the wires between neighbours that messages pass (`cluster.routes`)                    |

A load is the share of its time in which a collective keeps its most loaded wire of a level busy; the loads of
everything on a link add up, and above one all of it takes longer. Links run both ways at once: an exchange loads the
way out of one stage and the way into the other, a collective both.
"""

from collections.abc import Iterable, Mapping, Sequence

from planloom.cluster import Cluster
from planloom.cluster.routes import route, wire_loads
from planloom.cost import Price
from planloom.program import Program, Transfer

Link = tuple[object, ...]
Loads = dict[Link, float]

_MAX_MEMBERS = 8
"""Where a stage lies in more members than this, all stages are taken to share the level's links."""
_MAX_ROUTED = 64


class Links:
    """The links of a program's stages on a cluster; and which stages use each."""

    def __init__(self, program: Program, cluster: Cluster) -> None:
        self._program, self._cluster = program, cluster
        self._users: dict[Link, set[int]] = {}
        self._inside: list[int] = []
        inside = cluster.num_devices
        for level in cluster.levels:
            inside //= level.count
            self._inside.append(max(1, inside))

    def of_collective(
        self, stages: Sequence[int], busy: Mapping[int, float], seconds: float, groups: Iterable[tuple[int, ...]]
    ) -> Loads:
        """The loads of a collective on these groups of a stage's devices, or of all that take part."""
        loads: Loads = {}
        for level, at in busy.items():
            load = min(1.0, at / seconds) if seconds else 0.0
            both: list[tuple[int, int]] = []
            if self._is_routed(level):
                pairs = [(a, b) for group in groups for a, b in zip(group, (*group[1:], group[0]), strict=True)]
                both = [*pairs, *((b, a) for a, b in pairs)]
            for stage in stages:
                links = [*self._at(level, stage, "out", both), *self._at(level, stage, "in", ())]
                loads.update(dict.fromkeys(links, load))
        for stage in stages:
            self._used(loads, stage)
        return loads

    def of_exchange(self, source: int, target: int, price: Price, transfers: Sequence[Transfer]) -> Loads:
        """The loads of an exchange between two stages."""
        loads: Loads = {}
        for level, at in price.busy:
            load = min(1.0, at / price.seconds) if price.seconds else 0.0
            if self._is_routed(level):
                passed = wire_loads(self._cluster, [(t.source, t.target, 1.0) for t in transfers])
                most = max(passed.values())
                loads.update({wire: load * count / most for wire, count in passed.items() if wire[0] == level})
                continue
            links = [*self._at(level, source, "out", ()), *self._at(level, target, "in", ())]
            loads.update(dict.fromkeys(links, load))
        return self._used(self._used(loads, source), target)

    def are_private(self, loads: Loads) -> bool:
        """Does no other stage use these links? To be asked when the loads of everything are known."""
        return all(len(self._users[link]) == 1 for link in loads)

    def _used(self, loads: Loads, stage: int) -> Loads:
        for link in loads:
            self._users.setdefault(link, set()).add(stage)
        return loads

    def _is_routed(self, level: int) -> bool:
        is_crossbar = self._cluster.levels[level].link.shape == "crossbar"
        return not is_crossbar and self._cluster.num_devices <= _MAX_ROUTED

    def _at(self, level: int, stage: int, way: str, pairs: Iterable[tuple[int, int]]) -> Iterable[Link]:
        link, inside = self._cluster.levels[level].link, self._inside[level]
        if self._is_routed(level):
            wires = {wire for a, b in pairs for wire in route(self._cluster, a, b) if wire[0] == level}
            return sorted(wires)
        if link.shape == "crossbar" and not (link.shared and inside > 1):
            return [(level, "stage", stage, way)]
        members = {device // inside for device in self._program.stages[stage].mesh.devices}
        if len(members) > _MAX_MEMBERS:
            return [(level, "all", 0, way)]
        return [(level, "member", member, way) for member in sorted(members)]
