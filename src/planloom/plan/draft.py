"""Write a plan by hand: `split` blocks over axes, `assign` them to stages, `recompute` segments, `order` the calls.

    plan = (
        draft(blocks, Mesh.of(range(4), dp=2, tp=2), batch=batch_spec(batch))
        .split("*", batch="dp")
        .split("*.up", out="tp").split("*.down", **{"in": "tp"})
        .store("*", "zero1", over="dp")
        .recompute("layers.*")
        .order("gpipe", micro_batches=2)
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
from planloom.plan.orders import ORDERS, Call
from planloom.plan.values import Plan, Storage, StorageKind


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
    recomputed: tuple[int, ...] = ()

    def split(self, pattern: str, **axes: str | Sequence[str]) -> "Draft":
        """Split dims of all matching blocks: `batch="dp"`, or over several axes, major first: `out=("d1", "d2")`."""
        strategies = list(self.strategies)
        found = dict.fromkeys(axes, False)
        for block in self._matching(pattern):
            for dim_name, over in axes.items():
                names = (over,) if isinstance(over, str) else tuple(over)
                dim = self._resolve(block, dim_name, names)
                if dim is not None:
                    found[dim_name] = True
                    strategies[block.index] = {**strategies[block.index], dim.name: names}
        for dim_name, was_found in found.items():
            if not was_found:
                blocks = self._matching(pattern)
                raise PlanError(
                    f"no block that matches {pattern!r} can be split along {dim_name!r} over {axes[dim_name]}",
                    given=f"{dim_name}={axes[dim_name]}",
                    required=f"a dim of these blocks that the axis divides: {_describe_dims(blocks)}",
                )
        return replace(self, strategies=tuple(strategies))

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
        self, schedule: str, *, micro_batches: int = 1, orders: Sequence[Sequence[Call]] | None = None
    ) -> "Draft":
        """A named schedule, or any order given as calls a stage."""
        if orders is None and schedule not in ORDERS:
            raise PlanError(f"no schedule is named {schedule!r}", given=schedule, required=f"one of {sorted(ORDERS)}")
        chosen = tuple(map(tuple, orders)) if orders is not None else ()
        return replace(self, num_micro_batches=micro_batches, schedule=schedule, orders=chosen)

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
            orders=self.orders or ORDERS[self.schedule](len(self.meshes), self.num_micro_batches),
            recompute=self.recomputed,
        )
        require_plan(plan, self.blocks)
        return plan

    def _matching(self, pattern: str) -> list[Block]:
        found = [block for block in self.blocks.blocks if matches(block.name, pattern)]
        if not found:
            names = ", ".join(block.name for block in self.blocks.blocks)
            raise PlanError(f"no block matches {pattern!r}", given=pattern, required=f"a pattern for one of: {names}")
        return found

    def _resolve(self, block: Block, name: str, axes: Sequence[str]) -> BlockDim | None:
        mesh = self.meshes[self.stages[block.index]]
        size = prod(mesh.axis(axis).size for axis in axes)
        exact = block.dim(name)
        if exact is not None:
            return exact
        parts = [dim for dim in block.dims if dim.name.split(".")[0] == name]
        return next((dim for dim in parts if dim.size % size == 0), None)


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
