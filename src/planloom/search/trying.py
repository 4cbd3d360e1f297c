"""Trying variants: each is built, simulated with the finalists' prices, and taken where it wins.

Kinds take turns, so that each has a try before any has a second one. Their number is bounded, and so is what they may
cost of the search's own time. A variant is taken where it fits and is faster than the best plan of the proven space by
`LEAST_GAIN`, and saves more of its base than its `least_gain` (chunks: the uncertainty of the prices).
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType
from typing import Literal

from planloom.cluster import cluster_to_yaml, format_bytes
from planloom.cost import Prices
from planloom.errors import LayoutError, PlanError
from planloom.plan import Plan
from planloom.program import build_program
from planloom.search.edited_variants import propose_chunks, propose_pieces, propose_schedules
from planloom.search.finalists import Finalist
from planloom.search.finished import candidate_of, plan_of
from planloom.search.planner import Planner, Ranked
from planloom.search.space import Wishes
from planloom.search.variants import BatchSpec, Ground, Proposal, Variant, respects
from planloom.search.written_variants import propose_interlaced, propose_recycled, propose_rings
from planloom.simulate import simulate, simulate_memory

LEAST_GAIN = 0.01
"""Of the step of the best plan that has an estimate and a proof: for less, that one stands."""
_LARGE_BLOCKS, _FEW_DEVICES = 400, 16
"""Models that are larger have few variants and are not searched again; larger clusters not as a whole."""
_MOST, _MOST_OF_LARGE = 16, 2
_SHAPES, _SHAPES_OF_LARGE = 4, 1
_LEAST_SECONDS, _SHARE, _ALONE_SECONDS = 1.5, 0.25, 30.0
"""What trying may take of the process's own time: a share of the search's; more where there is no plan without it.
No plan is begun that would take longer than what is left, if it took as long as a finalist."""
_MORE_MEMORY, _MUCH_MORE_MEMORY = (2.0,), (1.5, 3.0)
"""Times the limit: what a search with so much more memory finds is tried with blocks in pieces."""
_BASES = 4
_KINDS: Mapping[str, Callable[[Ground], Proposal]] = MappingProxyType(
    {
        "chunks": propose_chunks,
        "co-shard": propose_pieces,
        "rings": propose_rings,
        "interlaced": propose_interlaced,
        "schedules": propose_schedules,
        "3f1b": propose_recycled,
    }
)
Outcome = Literal["wins", "slower", "gains too little", "too large", "refused"]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One variant and what came of it; `why`: in words, if it was not taken."""

    kind: str
    name: str
    placement: str
    outcome: Outcome
    step_seconds: float | None = None
    memory_bytes: int | None = None
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trials:
    """What was tried beside the proven space; `left_out`: kinds that were not, and why; `num_waiting`: how many
    variants there was no time for."""

    tried: tuple[Trial, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    num_waiting: int = 0
    seconds: float = 0.0

    @property
    def sentence(self) -> str:
        """In words: how many of which kinds."""
        if not self.tried:
            return "no variants tried beside it"
        counts: dict[str, int] = {}
        for trial in self.tried:
            counts[trial.kind] = counts.get(trial.kind, 0) + 1
        listed = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        rest = f", no time for {self.num_waiting} more" if self.num_waiting else ""
        return f"tried beside it, without a proof: {listed}{rest}"


def try_variants(
    planner: Planner,
    fitting: Sequence[Finalist],
    prices: Prices,
    batch: BatchSpec,
    wishes: Wishes,
    *,
    seconds: float,
    each_seconds: float,
    progress: Progress | None = None,
) -> tuple[tuple[Finalist, ...], Trials]:
    """The variants that win, of each kind the fastest; and what was tried.

    `seconds`: what the search has taken; `each_seconds`: what building and simulating a finalist did.
    """
    started = time.perf_counter()
    is_large = len(planner.blocks.blocks) > _LARGE_BLOCKS
    best = min((own.step_seconds for own in fitting), default=float("inf"))
    most = _MOST_OF_LARGE if is_large else _MOST
    allowed = max(_LEAST_SECONDS, _SHARE * seconds) if fitting else _ALONE_SECONDS
    ground = Ground(
        planner=planner,
        wishes=wishes,
        batch=batch,
        finalists=tuple(fitting),
        with_more_memory=lambda: _with_more_memory(planner, fitting, batch, wishes, best, progress),
        num_shapes=_SHAPES_OF_LARGE if is_large else _SHAPES,
    )
    proposals = {kind: _KINDS[kind](ground) for kind in wishes.variants if not planner.works.by_volume}
    waiting, clock = list(_in_turn([own.variants for own in proposals.values()])), time.process_time()
    taken: dict[str, Finalist] = {}
    tried: list[Trial] = []

    is_counted = bool(fitting) and is_large and planner.cluster.num_devices <= _FEW_DEVICES

    def is_over() -> bool:
        """Would another plan take longer than all may? On few devices, where plans are small, their number is enough:
        then a busy machine finds the same."""
        return not is_counted and time.process_time() - clock + (each_seconds if fitting else 0.0) > allowed

    while waiting and len(tried) < most and not is_over():
        variant = waiting.pop(0)
        if progress is not None:
            progress(f"variants, {variant.name}", len(tried), len(tried) + len(waiting) + 1)
        trial, finalist = _tried(variant, ground, prices, best, is_over)
        tried.append(trial)
        if finalist is not None and (
            variant.kind not in taken or finalist.step_seconds < taken[variant.kind].step_seconds
        ):
            taken[variant.kind] = finalist
    return tuple(taken.values()), Trials(
        tried=tuple(tried),
        left_out={kind: own.why for kind, own in proposals.items() if not own.variants},
        num_waiting=len(waiting),
        seconds=time.perf_counter() - started,
    )


def _in_turn(kinds: Sequence[Sequence[Variant]]) -> Iterator[Variant]:
    for place in range(max(map(len, kinds), default=0)):
        yield from (own[place] for own in kinds if place < len(own))


def _tried(
    variant: Variant, ground: Ground, prices: Prices, best: float, is_over: Callable[[], bool]
) -> tuple[Trial, Finalist | None]:
    """The first way that fits, if it wins; no way is begun when the time is over."""
    planner, limit = ground.planner, ground.planner.device_bytes(ground.wishes)
    trial = Trial(kind=variant.kind, name=variant.name, placement=variant.placement, outcome="refused")
    for way in variant.ways:
        if is_over():
            break
        try:
            plan = replace(way().plan(variant.name), cluster=cluster_to_yaml(planner.cluster))
            if not respects(plan, ground):
                trial = replace(trial, why="would not keep what is pinned")
                continue
            program = build_program(planner.blocks, plan)
        except (PlanError, LayoutError) as error:
            trial = replace(trial, why=error.what) if trial.outcome == "refused" else trial
            continue
        memory = simulate_memory(program, prices)
        held = max(role.peak_bytes for role in memory)
        if held > limit:
            why = f"holds {format_bytes(held)} of {format_bytes(round(limit))}"
            trial = replace(trial, outcome="too large", memory_bytes=held, why=why)
            continue
        timeline = simulate(program, prices, with_events=False, memory=memory)
        finalist = Finalist(
            plan=plan, program=program, timeline=timeline, estimate=None, placement=variant.placement,
            variant=variant.kind,
        )  # fmt: skip
        trial = replace(trial, step_seconds=finalist.step_seconds, memory_bytes=held, why="")
        if finalist.step_seconds >= best:
            return replace(trial, outcome="slower"), None
        base = variant.base.step_seconds if variant.base is not None else best
        if finalist.step_seconds > (1 - LEAST_GAIN) * best or finalist.step_seconds > (1 - variant.least_gain) * base:
            least = max(LEAST_GAIN, variant.least_gain)
            return replace(trial, outcome="gains too little", why=f"saves less than {least:.0%}"), None
        return replace(trial, outcome="wins"), finalist
    return trial, None


def _with_more_memory(
    planner: Planner,
    fitting: Sequence[Finalist],
    batch: BatchSpec,
    wishes: Wishes,
    best: float,
    progress: Progress | None,
) -> Sequence[Plan]:
    """Plans of the space that would be faster, on devices with more memory; but whose parameters fit on these."""
    limit, plans = planner.limit_bytes(wishes), dict[str, tuple[float, Plan]]()
    tensors = planner.blocks.graph.tensors
    whole = sum(4 * prod(tensors[p].shape) * tensors[p].item_bytes for p in planner.blocks.graph.parameters)
    if whole / planner.cluster.num_devices > limit:  # parameters, gradients and moments, each once
        return []
    for times in _MORE_MEMORY if fitting else _MUCH_MORE_MEMORY:
        for own in _wider(planner, fitting, wishes):
            for ranked in _searched(planner, own, times * limit, progress):
                solution = ranked.solution
                stored = max(stage.stored_bytes for stage in solution.estimate.stages)
                if ranked.seconds < best and stored < limit:
                    tables = planner.tables([solution.candidate], own)
                    plan = plan_of(solution, tables, planner.cluster, batch)
                    plans.setdefault(plan.name, (ranked.seconds, plan))
    return [plan for _, plan in sorted(plans.values(), key=lambda own: own[0])][:_BASES]


def _searched(planner: Planner, wishes: Wishes, limit_bytes: float, progress: Progress | None) -> tuple[Ranked, ...]:
    return planner.search(wishes, limit_bytes=limit_bytes, num_wanted=_BASES, progress=progress).ranked


def _wider(planner: Planner, fitting: Sequence[Finalist], wishes: Wishes) -> list[Wishes]:
    """What is searched again with more memory: everything where there are few devices or no plan; else the best plan's
    shape with half as many devices in its first free axis, and twice as many in the data axis; of large models
    nothing."""
    is_large = len(planner.blocks.blocks) > _LARGE_BLOCKS
    if not fitting or (planner.cluster.num_devices <= _FEW_DEVICES and not is_large):
        return [wishes]
    if is_large:
        return []
    shape = candidate_of(fitting[0].plan, planner.cluster).shape
    sizes = dict(zip(shape.names, shape.sizes, strict=True))
    if sizes.get("tp", 1) < 2 or wishes.tp is not None or wishes.dp is not None:
        return []
    dp, tp, tp2 = 2 * sizes.get("dp", 1), sizes["tp"] // 2, sizes.get("tp2", 1)
    return [replace(wishes, pp=shape.num_stages, dp=dp, tp=tp, tp2=tp2)]
