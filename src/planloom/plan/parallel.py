"""The usual ways to split a whole model, each a step of a draft: told by the structure of blocks, not by their names.

    tensor_parallel     Megatron's over one axis, ATP's over two; with the sequence, with the vocabulary
    expert_parallel     between dispatch and combine the experts are split over the axis that splits the batch elsewhere
    sharded             parameters in shards over the axis that splits the batch: ZeRO
    recompute_layers    no activations of layers are kept
    pipelined           stages of about equal work on the slices of a mesh, as a schedule places them

Named plans (`library`, `families`) are made of these.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from planloom.blocks import Block, BlockGraph, find_segments, repeated_segments
from planloom.errors import PlanError
from planloom.graph import Graph
from planloom.layout import Mesh
from planloom.plan.checks import BATCH_DIM
from planloom.plan.draft import Draft, draft
from planloom.plan.schedules import home_groups, orders_of, stages_per_group
from planloom.plan.values import Storage, StorageKind


def pipelined(
    blocks: BlockGraph,
    mesh: Mesh,
    *,
    batch: dict[str, tuple[tuple[int, ...], str]],
    axis: str = "pp",
    schedule: str = "1f1b",
    micro_batches: int = 1,
    per_group: int = 0,
) -> Draft:
    """A draft with the stages of a pipeline along an axis of the mesh, in the order of a schedule.

    Without that axis, or with one group, the model is one stage. `per_group`: stages a group, where that may be chosen.
    """
    meshes = slices(mesh, axis)
    if len(meshes) == 1:
        return draft(blocks, meshes[0], batch=batch).order(schedule, micro_batches=micro_batches)
    num_stages = len(meshes) * stages_per_group(schedule, per_group)
    orders = orders_of(schedule, num_stages, micro_batches, per_group=num_stages // len(meshes))
    homes = home_groups(orders, num_stages)
    written = draft(blocks, meshes[0], batch=batch)
    written = replace(written, meshes=tuple(meshes[group] for group in homes), stages=even_stages(blocks, num_stages))
    return written.order(schedule, micro_batches=micro_batches)


def tensor_parallel(
    written: Draft, axis: str = "tp", second: str = "", *, sequence: bool = False, vocab: bool = False
) -> Draft:
    """Linear maps alternate column-first (out → first axis, in → second) and row-first (in → first, out → second).

    The residual stream is *outer*: a map that reads it is column-first and makes inner tensors; a map that reads inner
    tensors is row-first and returns to the stream. With one axis this is Megatron's tensor parallelism, else ATP's.
    """
    for block, is_inner in zip(written.blocks.blocks, _inner_blocks(written.blocks), strict=True):
        splits = _block_axes(written.blocks, block, is_inner, (axis, second), sequence=sequence, vocab=vocab)
        mesh = written.meshes[written.stages[block.index]]
        for dim, over in splits.items():
            size = next((own.size for own in mesh.axes if own.name == over), 1)
            if size > 1 and any(d.name.split(".")[0] == dim and d.size % size == 0 for d in block.dims):
                written = written.split(block.name, **{dim: over})
    return written


def expert_parallel(written: Draft, axis: str = "dp") -> Draft:
    """Between dispatch and combine, split the experts over the axis that splits the batch everywhere else."""
    graph, strategies = written.blocks.graph, list(written.strategies)
    found = False
    for block in written.blocks.blocks:
        if block.dim("experts") is not None and any(graph.tensors[t].rows for t in block.inputs) and any(
            graph.tensors[t].rows for t in block.outputs
        ):  # fmt: skip
            others = {dim: axes for dim, axes in strategies[block.index].items() if dim != BATCH_DIM}
            strategies[block.index] = {**others, "experts": (axis,)}
            found = True
    if not found:
        raise PlanError("the model has no experts to split", given="experts", required="a mixture of experts")
    return replace(written, strategies=tuple(strategies))


def sharded(written: Draft, kind: StorageKind, axis: str = "dp") -> Draft:
    """Store parameters in shards over an axis, except those that it splits already: experts."""
    taken = {
        name
        for block in written.blocks.blocks
        for dim, axes in written.strategies[block.index].items()
        if axis in axes and dim != BATCH_DIM
        for name in block.parameters
    }
    stored = {name: Storage(kind=kind, over=axis) for name in written.blocks.graph.parameters if name not in taken}
    return replace(written, storage={**written.storage, **stored})


def recompute_layers(written: Draft) -> Draft:
    """Recompute the segments that repeat."""
    segments = find_segments(written.blocks)
    repeated = {found.first.fingerprint for found in repeated_segments(segments) if found.count > 1}
    if not repeated:
        raise PlanError(
            "the model has no layers that repeat, so it has none to recompute",
            given="recompute",
            required=f"two equal segments or more; this model has {len(segments)}, all different",
            todo="choose segments by the names of their blocks: Draft.recompute",
        )
    return replace(
        written, recomputed=tuple(i for i, segment in enumerate(segments) if segment.fingerprint in repeated)
    )


def slices(mesh: Mesh, axis: str) -> list[Mesh]:
    """The slices of a mesh along one of its axes; the mesh itself, if it lacks the axis."""
    if all(own.name != axis for own in mesh.axes):
        return [mesh]
    order = mesh.axis(axis).digits
    rest = tuple(own for own in mesh.axes if own.name != axis)
    found: dict[tuple[int, ...], list[int]] = {}
    for device in mesh.devices:
        coordinates = mesh.coordinates(device)
        found.setdefault(tuple(coordinates[digit] for digit in order), []).append(device)
    return [Mesh(axes=rest, devices=tuple(devices)) for _, devices in sorted(found.items())]


def even_stages(blocks: BlockGraph, num_stages: int) -> tuple[int, ...]:
    """Cut the sequence of blocks where few tensors cross, as near as possible to equal work."""
    work = [block_work(blocks.graph, block) for block in blocks.blocks]
    count, total = len(work), sum(work)
    crossing = [
        sum(1 for t, users in blocks.consumers.items()
            if t in blocks.producer and blocks.producer[t] < cut <= max(users))
        for cut in range(1, count)
    ]  # fmt: skip
    fewest = [cut for cut in range(1, count) if crossing[cut - 1] == min(crossing)]
    candidates = fewest  # between layers, if there are enough of these places; else also inside
    if len(fewest) < 2 * num_stages:
        candidates = [cut for cut in range(1, count) if crossing[cut - 1] <= max(2, min(crossing))]
    cuts: list[int] = []
    for stage in range(1, num_stages):
        open_cuts = [c for c in candidates if not cuts or c > cuts[-1]]
        if not open_cuts:
            raise PlanError(
                "the model cannot be cut into that many stages",
                given=f"{num_stages} stages for {count} blocks",
                required=f"at most {len(candidates) + 1}",
            )
        cuts.append(min(open_cuts, key=lambda c: (abs(sum(work[:c]) - total * stage / num_stages), c)))
    return tuple(sum(1 for cut in cuts if i >= cut) for i in range(count))


def _block_axes(
    blocks: BlockGraph, block: Block, is_inner: bool, axes: Sequence[str], *, sequence: bool, vocab: bool
) -> dict[str, str]:
    """dim → axis for one block."""
    first, second = axes
    kinds = {dim.name.split(".")[0] for dim in block.dims}
    if block.name.startswith("loss") or is_head(blocks, block):
        whole = {"sequence": first} if sequence else {}
        return {"out": first, "vocab": first, "in": second} if vocab else {**whole, "in": second}
    if {"in", "out"} <= kinds:
        return {"out": first, "in": second} if is_inner else {"in": first, "out": second}
    if "vocab" in kinds:
        reads_tokens = "batch" in kinds
        tokens = {"vocab": first} if vocab else {"sequence": first} if sequence else {}
        return {**(tokens if reads_tokens else {}), "out": second}
    if is_inner:
        return {"heads": first} if "heads" in kinds else {"features": first}
    return {"features": second, **({"sequence": first} if sequence else {})}


def _inner_blocks(blocks: BlockGraph) -> list[bool]:
    """For every block: does it make inner tensors?"""
    inner: list[bool] = []
    for block in blocks.blocks:
        reads_inner = bool(block.inputs) and all(inner[blocks.producer[t]] for t in block.inputs)
        inner.append(reads_inner != _is_map(block))
    return inner


def _is_map(block: Block) -> bool:
    return {"in", "out"} <= {dim.name.split(".")[0] for dim in block.dims}


def is_head(blocks: BlockGraph, block: Block) -> bool:
    """Does a block make the logits of a loss over a vocabulary?"""
    readers = [blocks.blocks[c] for t in block.outputs for c in blocks.consumers.get(t, ())]
    return _is_map(block) and any(b.name.startswith("loss") and b.dim("vocab") is not None for b in readers)


def block_work(graph: Graph, block: Block) -> int:
    """How much a block computes, in no unit: the products of all dims of its operators, thrice with a backward."""
    rules = [graph.ops[index].rule for index in block.ops]
    forward = sum(prod(rule.sizes.values()) for rule in rules if rule is not None)
    return forward * (3 if any(map(graph.is_differentiable, block.outputs)) else 1)
