"""Variants that edit a plan of the search: layers in chunks, blocks in pieces, other schedules."""

from dataclasses import replace
from functools import partial

from planloom.layout import mesh_of
from planloom.plan import Draft, Plan, edit
from planloom.plan.checks import BATCH_DIM
from planloom.plan.parallel import pipelined
from planloom.plan.pieces import co_sharded, in_chunks
from planloom.search.finalists import placement_words
from planloom.search.finished import candidate_of
from planloom.search.variants import LOST, Ground, Proposal, Variant, named

_CHUNKS, _PIECES = (2, 4), (2, 4, 8)
_ROOM = 0.4
"""Memory does not bind where the best plan recomputes nothing and fills no more than this share of it."""
_PIPELINES = 2
"""So many of the best pipelines get other schedules."""
_FOLDED = ("zb-v", "dualpipe-v")
"""Schedules with two stages a device group, down and up again, whose input- and weight-gradients are apart."""


def propose_chunks(ground: Ground) -> Proposal:
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
        if waits <= max(summary.uncertainty, LOST):
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


def propose_pieces(ground: Ground) -> Proposal:
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
    return Proposal(variants=tuple(found), why="none is found that more memory would make faster")


def _in_pieces(ground: Ground, plan: Plan, count: int) -> Draft:
    return co_sharded(replace(edit(ground.planner.blocks, plan), recomputed=()), pieces=count)


def propose_schedules(ground: Ground) -> Proposal:
    if ground.wishes.schedule is not None:
        return Proposal(why="the schedule is pinned")
    found, why, seen = list[Variant](), "there is no pipeline among the best plans", set[object]()
    for base in ground.finalists:
        summary, own = base.timeline.summary, candidate_of(base.plan, ground.planner.cluster)
        assert summary is not None
        groups = own.shape.num_stages
        if groups < 2 or (own.shape, own.num_micro) in seen or len(seen) == _PIPELINES:
            continue
        if summary.bubble <= LOST:
            why = f"the bubble is {summary.bubble:.1%}"
            continue
        seen.add((own.shape, own.num_micro))
        names = [*(("chimera",) if groups % 2 == 0 else ()), *(() if ground.planner.works.fused else _FOLDED)]
        found += [
            Variant(
                kind="schedules",
                name=named(own, name),
                placement=base.placement,
                ways=(partial(_scheduled, ground, base.plan, name),),
            )
            for name in names
        ]
    return Proposal(variants=tuple(found), why=why)


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
