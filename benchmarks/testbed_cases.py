"""The cases of `reductions_testbed`: topologies, axis sets, placements and sizes, fixed before anything is measured.

Each topology is a cluster file of benchmarks/clusters. Its axis sets are laid over it in all placements, and every axis
of every placement is reduced over.
"""

from dataclasses import dataclass
from pathlib import Path

from planloom.cluster import Cluster
from planloom.collective import Choice, Reduction, find_reductions
from planloom.layout import Digit, Layout, Mesh, Placement, enumerate_placements, mesh_of

CLUSTERS = Path(__file__).parent / "clusters"
ITEM_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A cluster file, the class it is printed under, its axis sets, and the bytes of a device's array."""

    name: str
    kind: str
    axis_sets: tuple[dict[str, int], ...]
    num_bytes: int
    num_best: int = 20
    """How many programs of every case are measured."""

    @property
    def path(self) -> Path:
        return CLUSTERS / f"{self.name}.yaml"


_EIGHT = ({"data": 8}, {"data": 4, "model": 2}, {"data": 2, "model": 4})
_SIXTEEN = ({"data": 16}, {"data": 4, "model": 4}, {"data": 8, "model": 2})

TOPOLOGIES = (
    Topology(name="shared-2x4", kind="shared uplinks", axis_sets=_EIGHT, num_bytes=4 << 20),
    Topology(name="uplinks-2x4", kind="one uplink a device", axis_sets=_EIGHT, num_bytes=8 << 20),
    Topology(name="three-2x2x2", kind="three levels", axis_sets=_EIGHT, num_bytes=6 << 20),
    Topology(name="torus-4x4", kind="torus", axis_sets=_SIXTEEN, num_bytes=8 << 20),
)
QUICK = (Topology(name="uplinks-2x4", kind="one uplink a device", axis_sets=_EIGHT[:1], num_bytes=6 << 20, num_best=3),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An all-reduce over one axis of one placement: what is predicted, before it is measured."""

    placement: Placement
    over: str
    num_elements: int
    choices: tuple[Choice, ...]
    """The best, best first."""
    default: Choice
    """torch's own all-reduce, in one piece."""
    lower_bound_seconds: float

    @property
    def mesh(self) -> Mesh:
        return mesh_of(self.placement)

    @property
    def digits(self) -> tuple[Digit, ...]:
        return self.mesh.axis(self.over).digits

    @property
    def label(self) -> str:
        return f"{self.placement}, over {self.over}"

    @property
    def counts(self) -> bool:
        """Whether the axis crosses a level and has two digits or more: what the bars are about."""
        return len(self.digits) >= 2


def is_default(choice: Choice) -> bool:
    return choice.num_chunks == 1 and [m.kind for p in choice.programs for m in p.moves] == ["all_reduce"]


def find_cases(topology: Topology, cluster: Cluster) -> list[Case]:
    """All cases of a topology with their predictions; a choice that is the default is not measured twice."""
    cases = []
    num_elements = topology.num_bytes // ITEM_BYTES
    for axes in topology.axis_sets:
        for placement in enumerate_placements(cluster.level_counts, axes):
            mesh = mesh_of(placement)
            for axis in mesh.axes:
                found = _reduction(cluster, mesh, axis.digits, num_elements, topology.num_best)
                cases.append(
                    Case(
                        placement=placement,
                        over=axis.name,
                        num_elements=num_elements,
                        choices=found.choices,
                        default=found.default,
                        lower_bound_seconds=found.lower_bound_seconds,
                    )
                )
    return cases


def _reduction(cluster: Cluster, mesh: Mesh, digits: tuple[Digit, ...], num_elements: int, num_best: int) -> Reduction:
    source, target = Layout(splits=((),), partial=digits), Layout(splits=((),))
    return find_reductions(cluster, mesh, source, target, (num_elements,), item_bytes=ITEM_BYTES, num_best=num_best)
