"""Variants: plans beside the space whose bound is proven, each made of what the search found.

    kind         what it adds                                         worth a try where
    chunks       layers in chunks of samples: one is reduced while    a device waits longer for communication inside
                 the next is computed                                 layers than the prices are uncertain
    co-shard     attention and MLPs one piece after another           memory binds: more of it would make a faster plan,
                                                                      or nothing fits
    rings        the sequence over a free axis, keys and values       there is self-attention that can go round, and
                 round a ring                                         time is lost to communication or recomputation
    interlaced   the vocabulary over all devices, layers in a         embeddings and head are as much as half a stage
                 pipeline
    schedules    ZB-V, DualPipe-V, Chimera                            a pipeline has a bubble
    3f1b         every pass forward through a pipeline, the last      the model recycles
                 one back

None of them has an estimate: they are built and simulated (`trying`), and are no part of what the certificate proves.
What the user pins holds for them, too. (Dynamic
axial parallel needs no variant: the space has it, block by block.) A variant has several *ways*, from fast and large to slow and small; the first
that fits counts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from types import MappingProxyType

from planloom.blocks import find_segments, repeated_segments
from planloom.errors import PlanError
from planloom.layout import Mesh, Placement, mesh_of
from planloom.plan import Draft, Plan, StorageKind, edit
from planloom.plan.checks import BATCH_DIM
from planloom.plan.draft import matches
from planloom.plan.families.axial import TURNS
from planloom.plan.families.context import context_parallel
from planloom.plan.families.interlaced import INTERLACED, shared_ends
from planloom.plan.families.recycled import RECYCLED, reads_by_pass
from planloom.plan.parallel import block_work, pipelined, recompute_layers, sharded, tensor_parallel
from planloom.plan.pieces import co_sharded, in_chunks
from planloom.search.finalists import Finalist, placement_words
from planloom.search.finished import candidate_of
from planloom.search.planner import Planner, promising_first
from planloom.search.space import Candidate, Shape, Wishes

BatchSpec = Mapping[str, tuple[tuple[int, ...], str]]
Way = Callable[[], Draft]

_CHUNKS, _PIECES = (2, 4), (2, 4, 8)
_LOST = 0.02
"""Variants that could save no more of the step than this share are not tried."""
_ROOM = 0.4
"""Memory does not bind where the best plan recomputes nothing and fills no more than this share of it."""
_PIPELINES = 2
"""So many of the best pipelines get other schedules."""
_HALF = 0.5
"""Of a stage's work or bytes: embeddings and head that are less are in nobody's way."""
_FOLDED = ("zb-v", "dualpipe-v")
"""Schedules with two stages a device group, down and up again, whose input- and weight-gradients are apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A plan to try, in some ways. `least_gain`: the share of its base's step that it must save to be believed."""

    kind: str
    name: str
    placement: str
    ways: tuple[Way, ...]
    base: Finalist | None = None
    least_gain: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The variants of a kind, most promising first; or why there are none."""

    variants: tuple[Variant, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What variants are made of. `with_more_memory`: plans of the space for larger devices, best first, that would be
    faster than the finalists and whose parameters fit. `num_shapes`: how many shapes a kind may try."""

    planner: Planner
    wishes: Wishes
    batch: BatchSpec
    finalists: tuple[Finalist, ...]
    with_more_memory: Callable[[], Sequence[Plan]]
    num_shapes: int

    @property
    def lost(self) -> float:
        """The share of the best step in which devices wait or recompute; all of it if there is no plan yet."""
        return min((lost_share(finalist) for finalist in self.finalists[:1]), default=1.0)

    def candidates(self, wanted: Callable[[Shape], bool]) -> list[Candidate]:
        """Shapes of the space, those of finalists first, each with a number of micro-batches."""
        found = [candidate_of(finalist.plan, self.planner.cluster) for finalist in self.finalists]
        found = [own for own in found if wanted(own.shape)]
        space = self.planner.space(self.wishes)
        others = [shape for shape in space.shapes if wanted(shape)]
        for shape in promising_first(others, self.planner.cluster, self.planner.batch):
            if len(found) >= self.num_shapes or any(own.shape == shape for own in found):
                continue
            data = prod(n for n, kind in zip(shape.sizes, shape.kinds, strict=True) if kind == "data")
            micro = [m for m in space.micro_batches if self.planner.batch % (m * data) == 0]
            if micro:
                placement = _tightest(space.placements(self.planner.cluster, shape))
                found.append(Candidate(shape=shape, placement=placement, num_micro=_usual(micro, shape.num_stages)))
        return list({own.shape: own for own in reversed(found)}.values())[::-1][: self.num_shapes]


def lost_share(finalist: Finalist) -> float:
    """Of the step: waiting for communication and other stages, and what recomputation takes at most."""
    summary, plan = finalist.timeline.summary, finalist.plan
    assert summary is not None
    waits = sum(summary.exposed_communication.values()) / summary.step_seconds
    return waits + summary.bubble + (0.25 if plan.recompute else 0.0)


def propose(kind: str, ground: Ground) -> Proposal:
    """All variants of a kind that may be worth a try."""
    return _KINDS[kind](ground)


# -- from finalists


def _chunks(ground: Ground) -> Proposal:
    found, least = list[Variant](), ""
    for base in ground.finalists[:2]:
        summary = base.timeline.summary
        assert summary is not None
        inside = {
            axis
            for strategy in base.plan.strategies
            for dim, axes in strategy.items()
            if dim != BATCH_DIM
            for axis in axes
        }
        waits = sum(s for axis, s in summary.exposed_communication.items() if axis in inside) / summary.step_seconds
        if waits <= max(summary.uncertainty, _LOST):
            least = (
                least or f"a device waits {waits:.0%} of the step inside layers, prices are ± {summary.uncertainty:.0%}"
            )
            continue
        found += [
            Variant(
                kind="chunks",
                name=f"{base.plan.name},chunks={count}",
                placement=base.placement,
                ways=(partial(_chunked, ground, base.plan, count),),
                base=base,
                least_gain=summary.uncertainty,
            )
            for count in _CHUNKS
        ]
    return Proposal(variants=tuple(found), why=least or "there is no plan whose layers could be in chunks")


def _chunked(ground: Ground, plan: Plan, count: int) -> Draft:
    return in_chunks(edit(ground.planner.blocks, plan), chunks=count)


def _co_shard(ground: Ground) -> Proposal:
    if not ground.wishes.recompute:
        return Proposal(why="recomputation is not allowed")
    limit = ground.planner.device_bytes(ground.wishes)
    if any(own.memory_bytes <= _ROOM * limit and not own.plan.recompute for own in ground.finalists[:1]):
        return Proposal(why="memory does not bind")
    found = [
        Variant(
            kind="co-shard",
            name=f"{plan.name},co-shard",
            placement=placement_words(candidate_of(plan, ground.planner.cluster).placement),
            ways=tuple(partial(_in_pieces, ground, plan, count) for count in _PIECES),
        )
        for plan in ground.with_more_memory()
    ]
    return Proposal(variants=tuple(found), why="more memory would make no faster plan")


def _in_pieces(ground: Ground, plan: Plan, count: int) -> Draft:
    return co_sharded(replace(edit(ground.planner.blocks, plan), recomputed=()), pieces=count)


def _schedules(ground: Ground) -> Proposal:
    if ground.wishes.schedule is not None:
        return Proposal(why="the schedule is pinned")
    found, why, seen = list[Variant](), "there is no pipeline among the best plans", set[object]()
    for base in ground.finalists:
        summary, own = base.timeline.summary, candidate_of(base.plan, ground.planner.cluster)
        assert summary is not None
        groups = own.shape.num_stages
        if groups < 2 or (own.shape, own.num_micro) in seen or len(seen) == _PIPELINES:
            continue
        if summary.bubble <= _LOST:
            why = f"the bubble is {summary.bubble:.1%}"
            continue
        seen.add((own.shape, own.num_micro))
        names = [*(("chimera",) if groups % 2 == 0 else ()), *(() if ground.planner.works.fused else _FOLDED)]
        found += [
            Variant(
                kind="schedules",
                name=_named(own, name),
                placement=base.placement,
                ways=(partial(_scheduled, ground, base.plan, name),),
            )
            for name in names
        ]
    return Proposal(variants=tuple(found), why=why)


def _named(own: Candidate, suffix: str) -> str:
    return ",".join([str(own.shape), *([f"micro={own.num_micro}"] if own.num_micro > 1 else []), suffix])


def _scheduled(ground: Ground, plan: Plan, name: str) -> Draft:
    """The strategies of a plan on stages of equal work, as the schedule places them."""
    candidate = candidate_of(plan, ground.planner.cluster)
    mesh = mesh_of(candidate.placement)
    written = pipelined(
        ground.planner.blocks,
        mesh,
        batch=dict(plan.batch),
        schedule=name,
        micro_batches=plan.num_micro_batches,
    )
    own = edit(ground.planner.blocks, plan)
    return replace(written, strategies=own.strategies, storage=own.storage, recomputed=own.recomputed)


# -- from shapes


def _rings(ground: Ground) -> Proposal:
    if all(block.ring is None for block in ground.planner.blocks.blocks):
        return Proposal(why="the model has no attention whose keys and values could go round")
    if ground.lost <= _LOST:
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


def _interlaced(ground: Ground) -> Proposal:
    blocks, graph = ground.planner.blocks, ground.planner.blocks.graph
    if ground.wishes.schedule not in (None, "interlaced"):
        return Proposal(why="the schedule is pinned")
    try:
        first, last = shared_ends(blocks)
    except PlanError as error:
        return Proposal(why=error.what)
    if ground.lost <= _LOST:
        return Proposal(why=f"only {ground.lost:.1%} of the step are lost")
    work = [block_work(graph, block) for block in blocks.blocks]
    size = {name: prod(graph.tensors[name].shape) for name in graph.parameters}
    ends = {name for index in first | last for name in blocks.blocks[index].parameters}
    share = max(sum(work[i] for i in first | last) / sum(work), sum(size[n] for n in ends) / sum(size.values()))

    def is_wanted(shape: Shape) -> bool:
        return shape.num_stages > 1 and len(_free(shape)) < 2 and share * shape.num_stages >= _HALF

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


def _recycled(ground: Ground) -> Proposal:
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
    return any(matches(block.name, pattern) for block in ground.planner.blocks.blocks for pattern in TURNS)


# -- what they share


def _of_shape(ground: Ground, own: Candidate, kind: str, suffix: str, write: Way, *, over: str = "") -> Variant:
    """Written anew on a shape; then with parameters in shards, over the data axis or `over`, and recomputed."""
    data = [axis for axis, kind_ in zip(own.shape.names, own.shape.kinds, strict=True) if kind_ == "data"]
    axis = data[0] if data and own.shape.sizes[own.shape.names.index(data[0])] > 1 else over
    return Variant(
        kind=kind,
        name=_named(own, suffix),
        placement=placement_words(own.placement),
        ways=tuple(_ways(ground, write, axis)),
    )


def _ways(ground: Ground, write: Way, axis: str) -> Iterator[Way]:
    kinds: tuple[StorageKind, ...] = ("zero1", "zero3")
    pinned = ground.wishes.storage
    if pinned is not None or not axis:
        kinds = tuple(kind for kind in ("replicated", "zero1", "zero2", "zero3") if kind == (pinned or "replicated"))
    segments = find_segments(ground.planner.blocks)
    has_layers = any(repeated.count > 1 for repeated in repeated_segments(segments))
    for kind in kinds:
        for again in (False, True) if ground.wishes.recompute and has_layers else (False,):
            yield partial(_stored, write, kind, axis, again)


def _stored(write: Way, kind: StorageKind, axis: str, again: bool) -> Draft:
    written = write()
    written = sharded(written, kind, axis) if axis and kind != "replicated" else written
    return recompute_layers(written) if again else written


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


def _usual(micro: Sequence[int], num_stages: int) -> int:
    """About four micro-batches a stage; one, where there are no stages."""
    wanted = 4 * num_stages if num_stages > 1 else 1
    return min(micro, key=lambda m: (m < num_stages, abs(m - wanted), m))


def _tightest(placements: Sequence[Placement]) -> Placement:
    """The last axes at the innermost levels."""
    return max(placements, key=lambda own: [row[::-1] for row in reversed(own.matrix)])


def _with_axes(placement: Placement, names: Sequence[str], renamed: Mapping[str, str] = MappingProxyType({})) -> Mesh:
    """The mesh of a placement with just these axes, of which some have one device."""
    rows = {renamed.get(axis, axis): row for axis, row in zip(placement.axes, placement.matrix, strict=True)}
    one = (1,) * len(placement.matrix[0])
    return mesh_of(Placement(axes=tuple(names), matrix=tuple(rows.get(name, one) for name in names)))


def respects(plan: Plan, ground: Ground) -> bool:
    """Are all blocks split as the user pins them?"""
    for block in ground.planner.blocks.blocks:
        for axis in {pin.axis for pin in ground.wishes.pins}:
            wanted = {pin.dim for pin in ground.wishes.pins if pin.axis == axis and pin.matches(block.name)}
            pinned = [dim.name for dim in block.dims if wanted & {dim.name, dim.name.split(".")[0]}]
            sizes = {own.name: own.size for own in plan.meshes[plan.stages[block.index]].axes}
            is_split = any(axis in plan.strategies[block.index].get(dim, ()) for dim in pinned)
            if pinned and sizes.get(axis, 1) > 1 and not is_split:
                return False
    return True


_KINDS: Mapping[str, Callable[[Ground], Proposal]] = MappingProxyType(
    {
        "chunks": _chunks,
        "co-shard": _co_shard,
        "rings": _rings,
        "interlaced": _interlaced,
        "schedules": _schedules,
        "3f1b": _recycled,
    }
)
