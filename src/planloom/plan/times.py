"""Time axes inside a step: rows of blocks that are carried out piece by piece, and what they require of a plan.

Splitting a block dim over a time axis is splitting it over a space axis, but that the pieces follow each other on the
same devices. Inside a scope every tensor is split over the axis, partial over it, or the same for all pieces; from
outside, a scope is like one run: what enters is sliced, what leaves is put together or summed. So

    every block of a scope is split by its axis, but for sources (they read no activations) read inside alone
    time is minor to space in every dim: then a device's pieces lie side by side in what it holds outside
    a sum over the pieces is complete only behind the scope: nobody inside may read it
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from planloom.blocks import Block, BlockGraph
from planloom.errors import PlanError
from planloom.plan.values import Plan, TimeAxis


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Blocks `start` up to `stop`, carried out in the pieces of a time axis."""

    axis: TimeAxis
    start: int
    stop: int


def find_scopes(plan: Plan) -> tuple[Scope, ...]:
    """All scopes of a plan, in the order of the model."""
    found = [Scope(axis=axis, start=start, stop=stop) for axis in plan.times for start, stop in axis.scopes]
    return tuple(sorted(found, key=lambda scope: scope.start))


def scopes_by_block(plan: Plan) -> dict[int, Scope]:
    """Block → the scope that holds it, for those that one holds."""
    return {block: scope for scope in find_scopes(plan) for block in range(scope.start, scope.stop)}


def require_times(plan: Plan, blocks: BlockGraph) -> None:
    """Refuse time axes that do not fit the plan or the model's blocks."""
    for axis in plan.times:
        _require_axis(plan, axis)
    _require_scopes(plan, blocks)
    scope_of = scopes_by_block(plan)
    for block in blocks.blocks:
        _require_splits(plan, block, scope_of)
        if block.index in scope_of:
            _require_whole(plan, blocks, block, scope_of)


def _require_axis(plan: Plan, axis: TimeAxis) -> None:
    names = [time.name for time in plan.times] + [space.name for mesh in plan.groups for space in mesh.axes]
    if sum(name == axis.name for name in names) > 1:
        raise PlanError(
            f"two axes are named {axis.name!r}", given=f"axes {names}", required="a name of its own for every axis"
        )
    if axis.size < (1 if axis.recompute else 2) or not axis.scopes:
        raise PlanError(
            f"the time axis {axis.name!r} has no pieces to follow each other",
            given=f"size {axis.size}, {len(axis.scopes)} scopes",
            required="two pieces or more, or one that is recomputed, and a scope",
        )
    if axis.recompute and axis.order != "pieces":
        raise PlanError(
            f"the time axis {axis.name!r} would recompute all pieces at once",
            given=f"order {axis.order!r} with recompute",
            required="order 'pieces', where one piece is held at a time, or segments that are recomputed",
        )


def _require_scopes(plan: Plan, blocks: BlockGraph) -> None:
    before = 0
    for scope in find_scopes(plan):
        if not before <= scope.start < scope.stop <= len(blocks.blocks):
            raise PlanError(
                f"a scope of the time axis {scope.axis.name!r} is not a row of blocks of its own",
                given=f"blocks {scope.start} up to {scope.stop}, behind block {before - 1}",
                required=f"scopes that share no block, of the {len(blocks.blocks)} blocks there are",
            )
        before = scope.stop
        stages = plan.stages[scope.start : scope.stop]
        if len(set(stages)) > 1:
            raise PlanError(
                f"a scope of the time axis {scope.axis.name!r} lies in several stages",
                given=f"{_span(blocks, scope)} in stages {sorted(set(stages))}",
                required="scopes inside one stage",
                todo="cut the stages elsewhere, or give each side a scope of its own",
            )


def _require_splits(plan: Plan, block: Block, scope_of: Mapping[int, Scope]) -> None:
    """Time axes split blocks of their scopes alone, behind all space axes, evenly."""
    own = scope_of[block.index].axis.name if block.index in scope_of else ""
    times = {axis.name for axis in plan.times}
    for name, axes in plan.strategies[block.index].items():
        used = [axis for axis in axes if axis in times]
        if not used:
            continue
        if used != [own] or axes[-1] != own:
            raise PlanError(
                f"block {block.name} cannot be split along {name!r} over {' × '.join(axes)}",
                given=f"its scope is of {own or 'no time axis'}",
                required="the time axis whose scope holds the block, behind all space axes",
                todo="name the time axis last, and let its scope hold the block",
            )
        dim = block.dim(name)
        size = prod(plan.axis(block.index, axis).size for axis in axes)
        if dim is not None and dim.size % size:
            raise PlanError(
                f"block {block.name} does not divide into the pieces of {own!r}",
                given=f"{name}={dim.size} over {' × '.join(axes)} = {size}",
                required="a size that the product of the axes divides",
                todo="use fewer pieces, or another dim",
            )


def _require_whole(plan: Plan, blocks: BlockGraph, block: Block, scope_of: Mapping[int, Scope]) -> None:
    """What a block of a scope makes must be one piece of it, and complete where it is read."""
    scope = scope_of[block.index]
    name = scope.axis.name
    tensors = blocks.graph.tensors
    if any(tensors[tensor].rows for tensor in (*block.inputs, *block.outputs)):
        raise PlanError(
            f"block {block.name} holds rows of experts, whose number depends on data, in a scope of {name!r}",
            given=_span(blocks, scope),
            required="a scope of dense tensors",
        )
    split = next((dim for dim, axes in plan.strategies[block.index].items() if name in axes), None)
    readers = {t: [blocks.blocks[i] for i in blocks.consumers.get(t, ())] for t in block.outputs}
    leaving = [t for t, found in readers.items() if any(scope_of.get(r.index) != scope for r in found)]
    if split is None:
        if block.is_source and not leaving:
            return
        raise PlanError(
            f"block {block.name} would be carried out {scope.axis.size} times alike",
            given=f"it is in a scope of the time axis {name!r}, which does not split it",
            required="a dim of every block of a scope over its axis",
            todo=f"split one of {[dim.name for dim in block.dims]} over {name!r}, or end the scope before the block",
        )
    dim = block.dim(split)
    assert dim is not None
    for tensor, found in readers.items():
        inside = [reader.name for reader in found if scope_of.get(reader.index) == scope]
        if tensor in dim.partials and inside:
            raise PlanError(
                f"{inside[0]} reads {tensor} before it is complete",
                given=f"{block.name} makes a part of the sum in every piece of {name!r}",
                required="a scope that ends before the sum is read",
                todo=f"end the scope behind {block.name}, or split another dim of it than {split!r}",
            )
        if dim.partials.get(tensor) == "max":
            raise PlanError(
                f"{tensor} would be a maximum over the pieces of {name!r}",
                given=f"{block.name} split along {split!r}",
                required="sums over pieces; another dim",
            )


def _span(blocks: BlockGraph, scope: Scope) -> str:
    return f"{blocks.blocks[scope.start].name} … {blocks.blocks[scope.stop - 1].name}"
