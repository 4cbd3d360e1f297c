"""Variants that are written anew on a shape of the space: rings, interlaced and recycled pipelines."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from types import MappingProxyType

from planloom.blocks import find_segments, repeated_segments
from planloom.errors import PlanError
from planloom.layout import Mesh, Placement, mesh_of
from planloom.plan import Draft, Storage, StorageKind
from planloom.plan.draft import matches
from planloom.plan.families.axial import TURNS
from planloom.plan.families.context import context_parallel
from planloom.plan.families.interlaced import INTERLACED, shared_ends
from planloom.plan.families.recycled import RECYCLED, reads_by_pass
from planloom.plan.parallel import block_work, pipelined, recompute_layers, sharded, tensor_parallel
from planloom.search.finalists import placement_words
from planloom.search.space import Candidate, Shape
from planloom.search.variants import LOST, Ground, Proposal, Variant, Way, named

_HALF = 0.5
"""Of a stage's work or bytes: embeddings and head that are less are in nobody's way."""


def propose_rings(ground: Ground) -> Proposal:
    if all(block.ring is None for block in ground.planner.blocks.blocks):
        return Proposal(why="the model has no attention whose keys and values could go round")
    if ground.lost <= LOST:
        return Proposal(why=f"only {ground.lost:.1%} of the step are lost")
    found = [
        _of_shape(ground, own, "rings", f"ring={axis}", partial(_ringed, ground, own, axis), over=axis)
        for own in ground.candidates(lambda shape: "free" in shape.kinds)
        for axis in _free(own.shape)[:1]
    ]
    return Proposal(variants=tuple(found), why="no free axis may have several devices")


def _ringed(ground: Ground, own: Candidate, axis: str) -> Draft:
    written = pipelined(
        ground.planner.blocks,
        mesh_of(own.placement),
        batch=dict(ground.batch),
        schedule=ground.wishes.schedule or "1f1b",
        micro_batches=own.num_micro,
    )
    for other in _free(own.shape):
        written = tensor_parallel(written, other, vocab=True) if other != axis else written
    return _over_data(context_parallel(written, axis), own.shape)


def propose_interlaced(ground: Ground) -> Proposal:
    blocks, graph = ground.planner.blocks, ground.planner.blocks.graph
    if ground.wishes.schedule not in (None, "interlaced"):
        return Proposal(why="the schedule is pinned")
    try:
        first, last = shared_ends(blocks)
    except PlanError as error:
        return Proposal(why=error.what)
    if ground.lost <= LOST:
        return Proposal(why=f"only {ground.lost:.1%} of the step are lost")
    work = [block_work(graph, block) for block in blocks.blocks]
    size = {name: prod(graph.tensors[name].shape) for name in graph.parameters}
    ends = {name for index in first | last for name in blocks.blocks[index].parameters}
    share = max(sum(work[i] for i in first | last) / sum(work), sum(size[n] for n in ends) / sum(size.values()))

    def is_wanted(shape: Shape) -> bool:
        num_inside = len(blocks.blocks) - len(first | last)
        is_possible = 1 < shape.num_stages <= num_inside and len(_free(shape)) < 2
        return is_possible and share * shape.num_stages >= _HALF

    found = [
        _of_shape(ground, own, "interlaced", "interlaced", partial(_interlacing, ground, own))
        for own in ground.candidates(is_wanted)
    ]
    return Proposal(
        variants=tuple(found), why=f"embeddings and head are {share:.1%} of the model, less than half of a stage"
    )


def _interlacing(ground: Ground, own: Candidate) -> Draft:
    options = {**INTERLACED.options, "micro": own.num_micro, "zero1": False}
    mesh = _with_axes(own.placement, INTERLACED.axes)
    return INTERLACED.write(ground.planner.blocks, options, mesh=mesh, batch=dict(ground.batch))


def propose_recycled(ground: Ground) -> Proposal:
    if ground.wishes.schedule not in (None, "3f1b"):
        return Proposal(why="the schedule is pinned")
    try:
        reads_by_pass(ground.planner.blocks)
    except PlanError as error:
        return Proposal(why=error.what)
    found = [
        _of_shape(ground, own, "3f1b", "3f1b", partial(_recycling, ground, own))
        for own in ground.candidates(lambda shape: shape.num_stages > 1 and len(_free(shape)) < 2)
    ]
    return Proposal(variants=tuple(found), why="no pipeline is possible")


def _recycling(ground: Ground, own: Candidate) -> Draft:
    """The free axis turns rows and columns where the model is axial, else it is tensor parallel."""
    options = {**RECYCLED.options, "micro": own.num_micro, "zero1": False}
    mesh = _with_axes(own.placement, RECYCLED.axes, {"tp": "dap"} if _is_axial(ground) else {})
    return RECYCLED.write(ground.planner.blocks, options, mesh=mesh, batch=dict(ground.batch))


def _is_axial(ground: Ground) -> bool:
    """It then has an axis of another name, of which nothing can be pinned."""
    if ground.wishes.tp is not None or ground.wishes.pins:
        return False
    return any(matches(block.name, pattern) for block in ground.planner.blocks.blocks for pattern in TURNS)


# -- on a shape


def _of_shape(ground: Ground, own: Candidate, kind: str, suffix: str, write: Way, *, over: str = "") -> Variant:
    """Written anew on a shape; then with parameters in shards, over the data axis or `over`, and recomputed."""
    data = [axis for axis, kind_ in zip(own.shape.names, own.shape.kinds, strict=True) if kind_ == "data"]
    axis = data[0] if data and own.shape.sizes[own.shape.names.index(data[0])] > 1 else over
    return Variant(
        kind=kind,
        name=named(own, suffix),
        placement=placement_words(own.placement),
        ways=tuple(_ways(ground, write, axis, is_everywhere=bool(over) and axis == over)),
    )


def _ways(ground: Ground, write: Way, axis: str, *, is_everywhere: bool) -> Iterator[Way]:
    kinds: tuple[StorageKind, ...] = ("zero1", "zero3")
    pinned = ground.wishes.storage
    if pinned is not None or not axis:
        kinds = tuple(kind for kind in ("replicated", "zero1", "zero2", "zero3") if kind == (pinned or "replicated"))
    segments = find_segments(ground.planner.blocks)
    has_layers = any(repeated.count > 1 for repeated in repeated_segments(segments))
    for kind in kinds:
        for again in (False, True) if ground.wishes.recompute and has_layers else (False,):
            yield partial(_stored, write, kind, axis, is_everywhere, again)


def _stored(write: Way, kind: StorageKind, axis: str, is_everywhere: bool, again: bool) -> Draft:
    """`is_everywhere`: the axis splits the sequence of all blocks."""
    written = write()
    if axis and kind != "replicated":
        written = _sharded_over(written, kind, axis) if is_everywhere else sharded(written, kind, axis)
    return recompute_layers(written) if again else written


def _sharded_over(written: Draft, kind: StorageKind, axis: str) -> Draft:
    """All parameters that the axis does not split, as it may those of positions."""
    taken = {
        name
        for block, strategy in zip(written.blocks.blocks, written.strategies, strict=True)
        for dim in block.dims
        if axis in strategy.get(dim.name, ())
        for name in block.parameters
        if name in dim.shards
    }
    stored = {name: Storage(kind=kind, over=axis) for name in written.blocks.graph.parameters if name not in taken}
    return replace(written, storage={**written.storage, **stored})


def _over_data(written: Draft, shape: Shape) -> Draft:
    data = [
        name
        for name, kind, size in zip(shape.names, shape.kinds, shape.sizes, strict=True)
        if kind == "data" and size > 1
    ]
    return written.split("*", batch=data[0]) if data else written


def _free(shape: Shape) -> list[str]:
    """The free axes with several devices."""
    return [
        name
        for name, kind, size in zip(shape.names, shape.kinds, shape.sizes, strict=True)
        if kind == "free" and size > 1
    ]


def _with_axes(placement: Placement, names: Sequence[str], renamed: Mapping[str, str] = MappingProxyType({})) -> Mesh:
    """The mesh of a placement with just these axes, of which some have one device."""
    rows = {renamed.get(axis, axis): row for axis, row in zip(placement.axes, placement.matrix, strict=True)}
    one = (1,) * len(placement.matrix[0])
    return mesh_of(Placement(axes=tuple(names), matrix=tuple(rows.get(name, one) for name in names)))
