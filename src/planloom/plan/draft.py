"""Write a plan by hand: `split` blocks over axes, `assign` them to stages, `recompute` segments, `order` the calls.

    plan = (
        draft(blocks, Mesh.of(range(4), dp=2, tp=2), batch=batch_spec(batch))
        .split("*", batch="dp")
        .split("*.up", out="tp").split("*.down", **{"in": "tp"})
        .store("*", "zero1", over="dp")
        .recompute("layers.*")
        .order("1f1b", micro_batches=2)
        .plan("mine")
    )

Patterns are shell patterns over block names; `a|b` matches either. A dim may be named without its number (`out` for
`out.0`): the first part that the axis divides is taken. Every step returns a new draft; nothing is changed in place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import prod

from planloom.blocks import Block, BlockDim, BlockGraph, find_segments
from planloom.errors import PlanError
from planloom.graph import fingerprint
from planloom.graph.fingerprint import summary
from planloom.layout import Mesh
from planloom.plan.checks import require_plan
from planloom.plan.order_checks import require_held
from planloom.plan.orders import Call, OrderFunction
from planloom.plan.schedules import home_groups, orders_of, schedule_name
from planloom.plan.values import (
    Plan,
    Storage,
    StorageKind,
    TimeAxis,
    TimeOrder,
    device_groups,
    num_roles,
    require_model,
)

_WILD = frozenset("*?[|")


def matches(name: str, pattern: str) -> bool:
    return any(fnmatchcase(name, part) for part in pattern.split("|"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A plan under construction, with the blocks that it is for."""

    blocks: BlockGraph
    batch: dict[str, tuple[tuple[int, ...], str]]
    meshes: tuple[Mesh, ...]
    stages: tuple[int, ...]
    strategies: tuple[dict[str, tuple[str, ...]], ...]
    storage: dict[str, Storage]
    num_micro_batches: int = 1
    schedule: str = "gpipe"
    orders: tuple[tuple[Call, ...], ...] = ()
    order_function: OrderFunction | None = None
    max_held: int | None = None
    recomputed: tuple[int, ...] = ()
    times: tuple[TimeAxis, ...] = ()

    def split(self, pattern: str, **axes: str | Sequence[str]) -> "Draft":
        """Split dims of all matching blocks: `batch="dp"`, or over several axes, major first: `out=("d1", "d2")`.

        A time axis alone splits a dim further: behind the space axes that split it already.
        """
        strategies = list(self.strategies)
        found = dict.fromkeys(axes, False)
        for block in self._matching(pattern):
            for dim_name, over in axes.items():
                names = (over,) if isinstance(over, str) else tuple(over)
                dim = self._resolve(block, dim_name, names)
                if dim is not None:
                    found[dim_name] = True
                    strategies[block.index] = {**strategies[block.index], dim.name: self._behind(block, dim, names)}
        for dim_name, was_found in found.items():
            if not was_found:
                blocks = self._matching(pattern)
                raise PlanError(
                    f"no block that matches {pattern!r} can be split along {dim_name!r} over {axes[dim_name]}",
                    given=f"{dim_name}={axes[dim_name]}",
                    required=f"a dim of these blocks that the axis divides: {_describe_dims(blocks)}",
                )
        return replace(self, strategies=tuple(strategies))

    def time(
        self,
        name: str,
        *,
        size: int,
        over: str | Sequence[str],
        order: TimeOrder = "pieces",
        recompute: bool = False,
    ) -> "Draft":
        """A time axis: every row of blocks that match a pattern is a scope, in which blocks are split over it.

        Of several patterns each has scopes of its own, where rows would otherwise grow together.
        """
        scopes: list[tuple[int, int]] = []
        for pattern in (over,) if isinstance(over, str) else over:
            row = -1
            for block in self._matching(pattern):
                continues = block.index == row and self.stages[row - 1] == self.stages[row]
                scopes[-1:] = (
                    [(scopes[-1][0], row + 1)] if continues else [*scopes[-1:], (block.index, block.index + 1)]
                )
                row = block.index + 1
        axis = TimeAxis(name=name, size=size, scopes=tuple(scopes), order=order, recompute=recompute)
        return replace(self, times=(*self.times, axis))

    def assign(self, pattern: str, *, stage: int, mesh: Mesh | None = None) -> "Draft":
        """Move matching blocks to a stage; the mesh of a new stage must be given."""
        meshes = list(self.meshes)
        if not 0 <= stage <= len(meshes) or (stage == len(meshes) and mesh is None):
            raise PlanError(
                f"stage {stage} has no mesh",
                given=f"{len(meshes)} stages so far",
                required="stages numbered in order, each with mesh=… at first use",
            )
        if mesh is not None:
            meshes[stage : stage + 1] = [mesh]
        stages = list(self.stages)
        for block in self._matching(pattern):
            stages[block.index] = stage
        return replace(self, meshes=tuple(meshes), stages=tuple(stages))

    def store(self, pattern: str, kind: StorageKind, *, over: str) -> "Draft":
        """Store matching parameters (by name) as `kind` over an axis."""
        names = [name for name in self.blocks.graph.parameters if matches(name, pattern)]
        if not names:
            raise PlanError("no parameter matches", given=pattern, required=str(self.blocks.graph.parameters))
        return replace(self, storage={**self.storage, **dict.fromkeys(names, Storage(kind=kind, over=over))})

    def recompute(self, pattern: str) -> "Draft":
        """Recompute the segments all of whose blocks match, in addition to those chosen before.

        Segments are what repeats, and need not begin where a layer does: a norm's statistics may end one. All blocks
        must match, so that nothing is recomputed that the pattern does not name.
        """
        blocks, segments = self.blocks.blocks, find_segments(self.blocks)
        found = [i for i, s in enumerate(segments) if all(matches(b.name, pattern) for b in blocks[s.start : s.stop])]
        if not found:
            shown = "; ".join(f"{blocks[s.start].name} … {blocks[s.stop - 1].name}" for s in segments[:6])
            raise PlanError(
                f"no segment has only blocks that match {pattern!r}",
                given=pattern,
                required=f"a pattern for all blocks of one of: {shown}" + (" …" if len(segments) > 6 else ""),
                todo="widen the pattern; a|b matches either",
            )
        return replace(self, recomputed=tuple(sorted({*self.recomputed, *found})))

    def order(
        self,
        schedule: str | OrderFunction,
        *,
        micro_batches: int = 1,
        orders: Sequence[Sequence[Call]] | None = None,
        max_held: int | None = None,
    ) -> "Draft":
        """A named schedule, a function from stages and micro-batches to orders, or any order as calls a device group.

        `max_held`: the most micro-batches and stages whose activations a group may hold; more is refused.
        """
        name = schedule if isinstance(schedule, str) else getattr(schedule, "__name__", "own")
        if orders is None and isinstance(schedule, str):
            name = schedule_name(schedule)
        function = None if orders is not None or isinstance(schedule, str) else schedule
        chosen = tuple(map(tuple, orders)) if orders is not None else ()
        return replace(
            self,
            num_micro_batches=micro_batches,
            schedule=name,
            orders=chosen,
            order_function=function,
            max_held=max_held,
        )

    def plan(self, name: str) -> Plan:
        """The finished plan; what does not divide or fit is refused here."""
        if self.num_micro_batches < 1:
            raise PlanError(
                "a plan needs micro-batches", given=f"{self.num_micro_batches} micro-batches", required="one or more"
            )
        graph = self.blocks.graph
        plan = Plan(
            name=name,
            model=fingerprint(graph),
            summary=summary(graph),
            batch=self.batch,
            meshes=self.meshes,
            stages=self.stages,
            strategies=self.strategies,
            storage=self.storage,
            num_micro_batches=self.num_micro_batches,
            schedule=self.schedule,
            orders=self._orders(),
            recompute=self.recomputed,
            times=self.times,
        )
        require_plan(plan, self.blocks)
        if self.max_held is not None:
            require_held(plan.orders, self.max_held)
        return plan

    def _orders(self) -> tuple[tuple[Call, ...], ...]:
        if self.orders:
            return self.orders
        num_stages, groups = len(self.meshes), device_groups(self.meshes)[0]
        num_groups = num_roles(groups)
        if num_groups < len(groups):  # which stages are shared is for the schedule to say
            return orders_of(self.order_function or self.schedule, num_stages, self.num_micro_batches)
        if num_stages % num_groups:
            raise PlanError(
                "a named schedule puts equally many stages on every device group",
                given=f"{num_stages} stages on {num_groups} groups",
                required=f"a multiple of {num_groups} stages",
                todo="give the calls of every group: orders=…",
            )
        per_group = num_stages // num_groups
        schedule = self.order_function or self.schedule
        found = orders_of(schedule, num_stages, self.num_micro_batches, per_group=per_group)
        homes = home_groups(found, num_stages)
        if len(found) == num_groups and homes != device_groups(self.meshes)[1]:
            raise PlanError(
                f"schedule {self.schedule} has its stages on other device groups",
                given=f"groups of stages {device_groups(self.meshes)[1]}",
                required=f"groups of stages {homes}",
                todo="assign the stages to these meshes, or give the calls of every group: orders=…",
            )
        return found

    def _matching(self, pattern: str) -> list[Block]:
        if set(pattern).isdisjoint(_WILD):
            found = [block for block in self.blocks.blocks if block.name == pattern]
        else:
            found = [block for block in self.blocks.blocks if matches(block.name, pattern)]
        if not found:
            names = ", ".join(block.name for block in self.blocks.blocks)
            raise PlanError(f"no block matches {pattern!r}", given=pattern, required=f"a pattern for one of: {names}")
        return found

    def _resolve(self, block: Block, name: str, axes: Sequence[str]) -> BlockDim | None:
        mesh, sizes = self.meshes[self.stages[block.index]], {axis.name: axis.size for axis in self.times}
        sizes.update((axis, mesh.axis(axis).size) for axis in axes if axis not in sizes)
        exact = block.dim(name)
        if exact is not None:
            return exact
        for dim in block.dims:
            behind = self._behind(block, dim, axes)
            size = prod(sizes[axis] if axis in sizes else mesh.axis(axis).size for axis in behind)
            if dim.name.split(".")[0] == name and dim.size % size == 0:
                return dim
        return None

    def _behind(self, block: Block, dim: BlockDim, axes: Sequence[str]) -> tuple[str, ...]:
        """These axes; if they are of time alone, behind the space axes that split the dim."""
        times = {axis.name for axis in self.times}
        if not times.issuperset(axes):
            return tuple(axes)
        return (*(a for a in self.strategies[block.index].get(dim.name, ()) if a not in times), *axes)


def _describe_dims(blocks: Sequence[Block]) -> str:
    shown = [f"{b.name} ({', '.join(f'{d.name}={d.size}' for d in b.dims)})" for b in blocks[:3]]
    return "; ".join(shown) + (" …" if len(blocks) > 3 else "")


def draft(blocks: BlockGraph, mesh: Mesh, *, batch: Mapping[str, tuple[tuple[int, ...], str]]) -> Draft:
    """A draft with everything replicated on one stage."""
    count = len(blocks.blocks)
    return Draft(
        blocks=blocks,
        batch=dict(batch),
        meshes=(mesh,),
        stages=(0,) * count,
        strategies=tuple({} for _ in range(count)),
        storage={},
    )


def edit(blocks: BlockGraph, plan: Plan) -> Draft:
    """A finished plan as a starting point to edit. Its calls stay as they are until `order` is called."""
    require_model(plan, blocks.graph)
    return Draft(
        blocks=blocks,
        batch=dict(plan.batch),
        meshes=plan.meshes,
        stages=plan.stages,
        strategies=plan.strategies,
        storage=dict(plan.storage),
        num_micro_batches=plan.num_micro_batches,
        schedule=plan.schedule,
        orders=plan.orders,
        recomputed=plan.recompute,
        times=plan.times,
    )
