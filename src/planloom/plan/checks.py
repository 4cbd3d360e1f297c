"""Does a plan fit its model? Asked of every plan, by hand or from a file, before a program is made of it."""

from math import prod
from typing import get_args

from planloom.blocks import BlockGraph, find_segments
from planloom.errors import PlanError
from planloom.layout import Mesh
from planloom.plan.order_checks import require_orders
from planloom.plan.orders import sharers
from planloom.plan.times import require_times
from planloom.plan.values import Plan, StorageKind

BATCH_DIM = "batch"


def require_plan(plan: Plan, blocks: BlockGraph) -> None:
    """Refuse a plan whose parts do not fit each other or the model's blocks."""
    _require_updates(blocks)
    _require_counts(plan, blocks)
    _require_storage(plan, blocks)
    _require_strategies(plan, blocks)
    _require_batch(plan, blocks)
    _require_stages(plan, blocks)
    require_times(plan, blocks)
    _require_recompute(plan, blocks)
    _require_orders(plan, blocks)


def _require_updates(blocks: BlockGraph) -> None:
    written = [name for name, value in blocks.graph.updates.items() if value not in blocks.graph.given_names]
    if written:
        raise PlanError(
            "a buffer that the forward pass computes from activations cannot be trained under a plan yet",
            given=", ".join(written[:4]) + (" …" if len(written) > 4 else ""),
            required="a model whose forward pass writes no such buffer",
            todo="use a norm without running statistics, such as LayerNorm or GroupNorm",
        )


def _require_counts(plan: Plan, blocks: BlockGraph) -> None:
    num_blocks, num_stages = len(blocks.blocks), len(plan.meshes)
    for what, found, needed in (
        ("stages", len(plan.stages), num_blocks),
        ("strategies", len(plan.strategies), num_blocks),
        ("orders", len(plan.orders), len(plan.roles)),
    ):
        if found != needed:
            unit = "blocks" if what != "orders" else "device groups"
            raise PlanError(
                f"plan {plan.name!r} has {found} {what} for {needed} {unit}", given=str(found), required=str(needed)
            )
    if plan.num_micro_batches < 1:
        raise PlanError(
            "a plan needs micro-batches", given=f"{plan.num_micro_batches} micro-batches", required="one or more"
        )
    if any(not 0 <= stage < num_stages for stage in plan.stages):
        raise PlanError(
            "a block is assigned to a stage without a mesh",
            given=f"stages {sorted(set(plan.stages))}",
            required=f"stages from 0 to {num_stages - 1}",
        )


def _require_storage(plan: Plan, blocks: BlockGraph) -> None:
    for name, storage in plan.storage.items():
        if storage.kind not in get_args(StorageKind) or name not in blocks.graph.parameters:
            raise PlanError(
                f"parameter {name!r} cannot be stored as {storage.kind!r}",
                given=storage.kind,
                required=f"a parameter of the model, stored as one of {get_args(StorageKind)}",
            )


def _require_strategies(plan: Plan, blocks: BlockGraph) -> None:
    for block, strategy in zip(blocks.blocks, plan.strategies, strict=True):
        used: set[str] = set()
        for dim, axes in strategy.items():
            if block.dim(dim) is None:
                raise PlanError(
                    f"block {block.name} has no dim {dim!r}",
                    given=str(strategy),
                    required=f"one of {[d.name for d in block.dims]}",
                )
            for axis in (plan.axis(block.index, axis) for axis in axes):
                if axis.name in used:
                    raise PlanError(
                        f"block {block.name} uses axis {axis.name!r} twice",
                        given=str(strategy),
                        required="an axis splits one dim of a block at most",
                    )
                used.add(axis.name)


def require_micro_batches(num_micro_batches: int, blocks: BlockGraph) -> None:
    """Refuse several micro-batches for a model that needs the whole batch at once."""
    if num_micro_batches == 1:
        return
    for block in blocks.blocks:
        dim = block.dim(BATCH_DIM)
        if dim is None and (not block.is_source or any(name in blocks.graph.given_from_inputs for name in block.given)):
            raise PlanError(
                f"block {block.name} mixes the batch and cannot run on micro-batches",
                given=f"{num_micro_batches} micro-batches",
                required="one micro-batch, or a model whose operators keep the batch apart",
            )
        if dim is not None and any(t in dim.partials and t != blocks.graph.loss for t in block.outputs):
            raise PlanError(
                f"block {block.name} sums over the whole batch and cannot run on micro-batches",
                given=f"{num_micro_batches} micro-batches",
                required="one micro-batch, or a model that reduces over the batch in its loss alone",
            )


def may_have_micro_batches(blocks: BlockGraph) -> bool:
    try:
        require_micro_batches(2, blocks)
    except PlanError:
        return False
    return True


def _require_batch(plan: Plan, blocks: BlockGraph) -> None:
    require_micro_batches(plan.num_micro_batches, blocks)
    for block in blocks.blocks:
        dim = block.dim(BATCH_DIM)
        if dim is None:
            continue
        axes = plan.strategies[block.index].get(BATCH_DIM, ())
        pieces = plan.num_micro_batches * prod(plan.axis(block.index, axis).size for axis in axes)
        if dim.size % pieces:
            raise PlanError(
                f"the batch does not divide: block {block.name}",
                given=f"batch {dim.size} over {plan.num_micro_batches} micro-batches × axes {axes or 'none'}",
                required=f"a multiple of {pieces}",
                todo="change the global batch, the number of micro-batches or the axis",
            )


def _require_stages(plan: Plan, blocks: BlockGraph) -> None:
    if len(set(plan.devices)) != len(plan.devices) or any(
        plan.groups[plan.group_of(s)] != mesh for s, mesh in enumerate(plan.meshes)
    ):
        raise PlanError(
            "two stages share a device, but not their mesh",
            given=str([mesh.devices for mesh in plan.meshes]),
            required="stages on disjoint devices, on one and the same mesh, or one on the union of others' meshes",
        )
    for group in range(len(plan.roles), len(plan.groups)):
        covered = {device for role in plan.members(group) for device in plan.roles[role].devices}
        if covered != set(plan.groups[group].devices):
            raise PlanError(
                "a shared stage lies on devices that no other stage has",
                given=f"devices {plan.groups[group].devices}",
                required="a union of whole device groups of other stages",
                todo="leave these devices out, or assign them blocks of their own",
            )
    for block in blocks.blocks:
        for tensor in block.inputs:
            source = blocks.producer[tensor]
            if blocks.graph.tensors[tensor].rows and plan.stages[source] != plan.stages[block.index]:
                raise PlanError(
                    f"the rows of experts {tensor} would leave their stage",
                    given=f"{blocks.blocks[source].name} in stage {plan.stages[source]}, {block.name} in another",
                    required="dispatch, experts and combine in one stage",
                    todo="cut the stages elsewhere",
                )
            if plan.stages[source] > plan.stages[block.index]:
                raise PlanError(
                    f"block {block.name} in stage {plan.stages[block.index]} reads from a later stage",
                    given=f"{tensor} is made by {blocks.blocks[source].name} in stage {plan.stages[source]}",
                    required="stages in the order of the model",
                )


def _require_recompute(plan: Plan, blocks: BlockGraph) -> None:
    if not plan.recompute:
        return
    num_segments = len(find_segments(blocks))
    wrong = [number for number in plan.recompute if not 0 <= number < num_segments]
    if wrong or len(set(plan.recompute)) < len(plan.recompute):
        problem = f"segment {wrong[0]}, which the model does not have" if wrong else "a segment twice"
        raise PlanError(
            f"plan {plan.name!r} recomputes {problem}",
            given=f"segments {' '.join(map(str, plan.recompute[:40]))}",
            required=f"segments from 0 to {num_segments - 1}, each at most once",
            todo="count segments as blocks.find_segments does, or name their blocks: Draft.recompute",
        )


def detached_stages(plan: Plan, blocks: BlockGraph) -> frozenset[int]:
    """The stages in which nothing carries a cotangent, as in all but the last pass of a model that recycles."""
    graph = blocks.graph
    with_cotangents = {plan.stages[b.index] for b in blocks.blocks if any(map(graph.is_differentiable, b.outputs))}
    return frozenset(range(len(plan.meshes))) - with_cotangents


def _require_orders(plan: Plan, blocks: BlockGraph) -> None:
    require_orders(plan.orders, len(plan.meshes), plan.num_micro_batches, detached=detached_stages(plan, blocks))
    called_by = sharers(plan.orders)
    for stage in range(len(plan.meshes)):
        members = plan.members(plan.group_of(stage))
        callers = called_by.get(stage, members[:1] if len(members) > 1 else members)
        if callers != members:
            raise PlanError(
                f"stage {stage} lies on the devices of {len(members)} groups and is called by others",
                given=f"groups {', '.join(map(str, callers))}",
                required=f"groups {', '.join(map(str, members))}: each calls its share of every piece",
            )
    for group, order in enumerate(plan.orders):
        for stage in dict.fromkeys(call.stage for call in order):
            own, other = plan.meshes[stage], plan.groups[group]
            if group not in plan.members(plan.group_of(stage)) and own.axes != other.axes:
                raise PlanError(
                    f"device group {group} cannot hold a copy of stage {stage}",
                    given=f"axes {_axes(other)}",
                    required=f"the stage's own axes: {_axes(own)}",
                )


def _axes(mesh: Mesh) -> str:
    return " ".join(f"{axis.name}={axis.size}" for axis in mesh.axes) or "none"
