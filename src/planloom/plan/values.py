"""The `Plan`: every choice, resolved, for one model, one batch shape and one set of devices."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal

from planloom.errors import PlanError
from planloom.graph import Graph, fingerprint, graph_difference
from planloom.layout import Axis, Digit, Mesh
from planloom.plan.orders import Call

PLAN_VERSION = 2
StorageKind = Literal["replicated", "zero1", "zero2", "zero3"]
TimeOrder = Literal["pieces", "runs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How a parameter is stored over an axis that does not split it.

    replicated: whole on every device, gradients reduced once a step; zero1: as before, but every device updates a shard
    and the shards are gathered; zero2: as zero1, but gradients are reduced to shards at every use, so that no whole
    gradient is kept; zero3: only a shard is stored, gathered for every use, gradients reduced at every use.
    """

    kind: StorageKind = "replicated"
    over: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAxis:
    """An axis of `size` steps on the same devices, inside a micro-batch: the pieces of a dim, one after another.

    `scopes`: (start, stop) of each row of blocks that is carried out in pieces; all of its blocks are split. `order`:
    "pieces" carries a scope out for one piece, then for the next, so that one piece's activations are held at a time
    (co-shard); "runs" carries every run of it out for all pieces, so that one piece is communicated while the next is
    computed (overlap in chunks). `recompute`: the forward keeps of a scope what enters it, and each piece is carried
    out again before its backward. An axis of one piece does this and nothing else.
    """

    name: str
    size: int
    scopes: tuple[tuple[int, int], ...]
    order: TimeOrder = "pieces"
    recompute: bool = False

    @property
    def digit(self) -> Digit:
        return Digit(axis=self.name, index=0, size=self.size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`strategies[i]`: for block i, dim → axes, space axes before time axes; `stages[i]`: the stage of block i;
    `meshes[s]`: the mesh of stage s.

    Stages with one mesh share a *device group*; groups are counted as stages first name them, those that are *shared*,
    a union of others' devices, last. The others are *roles*: `orders[g]` lists the calls of role g; an empty tuple of
    orders is not a plan. A role that calls a stage of another one holds a copy of it; a shared stage is called by all
    roles in its mesh, each its share. `recompute`: the segments, by their numbers in `find_segments`, whose
    activations are recomputed in the backward and not kept. `times`: the time axes beside the micro-batches.
    `cluster`, if given, is the text of the cluster file whose links decide between collective programs; else the bytes
    that they move do. `source`: how the model was named on the command line.
    """

    name: str
    model: str
    summary: dict[str, str]
    batch: dict[str, tuple[tuple[int, ...], str]]
    meshes: tuple[Mesh, ...]
    stages: tuple[int, ...]
    strategies: tuple[dict[str, tuple[str, ...]], ...]
    storage: dict[str, Storage]
    num_micro_batches: int
    schedule: str
    orders: tuple[tuple[Call, ...], ...]
    recompute: tuple[int, ...] = ()
    cluster: str = ""
    source: str = ""
    times: tuple[TimeAxis, ...] = ()
    version: int = PLAN_VERSION

    def axis(self, block: int, name: str) -> Axis:
        """An axis by which a block may be split: of its stage's mesh, or of time."""
        for time in self.times:
            if time.name == name:
                return Axis(name=name, sizes=(time.size,))
        return self.meshes[self.stages[block]].axis(name)

    @property
    def groups(self) -> tuple[Mesh, ...]:
        """The mesh of every device group."""
        return device_groups(self.meshes)[0]

    def group_of(self, stage: int) -> int:
        """The device group of a stage, where its parameters live."""
        return device_groups(self.meshes)[1][stage]

    @property
    def roles(self) -> tuple[Mesh, ...]:
        """The device groups that are not shared: they come first."""
        return self.groups[: num_roles(self.groups)]

    def members(self, group: int) -> tuple[int, ...]:
        """The roles that carry out a device group's calls: itself, or all in a shared one."""
        roles = self.roles
        if group < len(roles):
            return (group,)
        devices = frozenset(self.groups[group].devices)
        return tuple(r for r, role in enumerate(roles) if devices.issuperset(role.devices))

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(device for mesh in self.roles for device in mesh.devices)


@cache
def device_groups(meshes: tuple[Mesh, ...]) -> tuple[tuple[Mesh, ...], tuple[int, ...]]:
    """The distinct meshes of stages, shared ones last, and for every stage the number of its own."""
    first: dict[tuple[int, ...], Mesh] = {}
    for mesh in meshes:
        first.setdefault(mesh.devices, mesh)
    groups = sorted(first.values(), key=lambda mesh: _is_shared(mesh, first.values()))
    numbers = {mesh.devices: number for number, mesh in enumerate(groups)}
    return tuple(groups), tuple(numbers[mesh.devices] for mesh in meshes)


@cache
def num_roles(groups: tuple[Mesh, ...]) -> int:
    return sum(not _is_shared(mesh, groups) for mesh in groups)


def _is_shared(mesh: Mesh, groups: Iterable[Mesh]) -> bool:
    """Does a mesh hold another one's devices, and more?"""
    own = frozenset(mesh.devices)
    return any(len(other.devices) < len(own) and own.issuperset(other.devices) for other in groups)


def require_model(plan: Plan, graph: Graph) -> None:
    """Refuse a plan that was made for another model, and say what differs."""
    if plan.model != fingerprint(graph):
        raise PlanError(
            f"plan {plan.name!r} was made for another model or batch shape",
            given=f"fingerprint {fingerprint(graph)}: {graph_difference(plan.summary, graph)}",
            required=f"fingerprint {plan.model}",
            todo="plan again for this model and batch, or load the model that the plan was made for",
        )
