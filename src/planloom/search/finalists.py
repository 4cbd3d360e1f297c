"""Finalists: the best solutions as programs, ranked by the simulator, none that would not fit.

The estimate of memory is a sum over blocks; the simulator's is exact liveness. Where a stage of a finalist does not
fit, its problem is solved again with that stage's limit lowered by as much as its estimate was too small; where in
the end all leave room that a faster plan could use, once more with limits raised. The estimate hides a block's
communication behind the block alone, the simulator behind all that is computed meanwhile: so a finalist that scatters
parameters or gradients at every micro-batch is simulated with ZeRO-1 in their place, too, if that fits.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from planloom.cluster import format_bytes
from planloom.cost import Prices
from planloom.errors import LayoutError, PlanError, PlanloomError
from planloom.layout import Placement
from planloom.plan import Plan
from planloom.program import Program, build_program
from planloom.search.exhaustive import Candidate
from planloom.search.finished import estimate_plan, plan_of
from planloom.search.planner import Found, Planner, Ranked
from planloom.search.processes import BestSeconds, in_processes
from planloom.search.solutions import Solution
from planloom.search.space import Wishes
from planloom.search.stages import Estimate
from planloom.simulate import Timeline, simulate, simulate_memory
from planloom.simulate.timeline import RoleMemory

_TRIES, _TRIES_OF_OTHERS = 4, 2
_SPARE = 0.99
"""Of the room: so that rounding does not make another try necessary."""
_FULL = 0.95
_FAR = 1.1
"""Solutions whose estimate is so many times the fastest simulated step, and the planner's margin, are not simulated."""
_NO_LOSS = 1.001
"""A solution this close to its bound would gain nothing from more memory."""
_LARGE = 400
"""Blocks of a model whose programs are worth processes of their own, and are not simulated more often than need be."""
BatchSpec = Mapping[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalist:
    """A plan with its program, its simulated step, and the estimate that it was found by.

    `variant`: of which kind it is, if it is none of the proven space; it has no estimate then, and was only simulated.
    """

    plan: Plan
    program: Program
    timeline: Timeline
    estimate: Estimate | None
    placement: str
    variant: str = ""

    @property
    def step_seconds(self) -> float:
        return self.timeline.step_seconds

    @property
    def memory_bytes(self) -> int:
        assert self.timeline.summary is not None
        return self.timeline.summary.peak_memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalists:
    """Those that fit, fastest first; and why others dropped out: first `too_large` of them, for want of memory."""

    fitting: tuple[Finalist, ...]
    refused: tuple[tuple[str, str], ...]
    too_large: int = 0


class _TooLargeError(PlanError):
    """A finalist that holds more than a device has."""


def simulate_finalists(
    planner: Planner,
    found: Found,
    prices: Prices,
    batch: BatchSpec,
    wishes: Wishes,
    *,
    num_finalists: int,
    progress: Callable[[int, int], None] | None = None,
) -> Finalists:
    """Build and simulate the best solutions, until so many fit.

    They are taken in rounds of as many as are missing, so that several processes find what one would.
    """
    fitting: list[Finalist] = []
    refused: list[tuple[str, PlanloomError]] = []
    waiting, is_large = list(found.ranked), len(planner.blocks.blocks) > _LARGE
    while waiting and len(fitting) < num_finalists:
        fastest = min((finalist.step_seconds for finalist in fitting), default=float("inf"))
        missing = num_finalists - len(fitting)
        some = [r for r in waiting[:missing] if r.seconds <= (_FAR + planner.margin) * fastest]
        waiting = waiting[missing:] if len(some) == missing else []
        if progress is not None:
            progress(len(fitting), num_finalists)

        def fitted(ranked: Ranked, _: BestSeconds) -> tuple[int, Finalist | PlanloomError]:
            is_first, place = ranked is found.ranked[0], found.ranked.index(ranked)
            tries = _TRIES if is_first else _TRIES_OF_OTHERS
            try:
                return place, _fitted(
                    planner, ranked, prices, batch, wishes, tries, simulates_all=is_first or not is_large
                )
            except (PlanError, LayoutError) as error:
                return place, error

        few = 1 if is_large else len(some)
        for place, own in sorted(in_processes(fitted, some, BestSeconds(1), few=few), key=lambda result: result[0]):
            if isinstance(own, PlanloomError):
                refused.append((str(found.ranked[place].solution.candidate.shape), own))
            else:
                fitting.append(own)
    ordered = sorted(fitting, key=lambda finalist: (finalist.step_seconds, finalist.plan.name, finalist.placement))
    refused.sort(key=lambda own: not isinstance(own[1], _TooLargeError))
    return Finalists(
        fitting=tuple(ordered),
        refused=tuple((shape, error.what) for shape, error in refused),
        too_large=sum(isinstance(error, _TooLargeError) for _, error in refused),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Built:
    """A solution, or what was made of it, as a program; and what every device group holds."""

    solution: Solution
    estimate: Estimate
    plan: Plan
    program: Program
    memory: tuple[RoleMemory, ...]

    @property
    def estimate_seconds(self) -> float:
        return self.estimate.step_seconds

    @property
    def memory_bytes(self) -> int:
        return max(role.peak_bytes for role in self.memory)


def _fitted(
    planner: Planner,
    ranked: Ranked,
    prices: Prices,
    batch: BatchSpec,
    wishes: Wishes,
    num_tries: int,
    *,
    simulates_all: bool,
) -> Finalist:
    """The fastest of a few tries that the simulator finds to fit: by estimate, or, of filled stages and others, by the
    simulator, if it `simulates_all`.

    Filled stages use all that the estimate leaves them, and so are the first that do not fit. So what is tried first
    are stages that are not; once some fit, they are filled under the limits that these were found with.
    """
    limit, num_groups = planner.device_bytes(wishes), ranked.solution.candidate.shape.num_stages
    solver = planner.solver(ranked.solution.candidate, ranked.limit_bytes, wishes)
    solution, limits = ranked.before or ranked.solution, [ranked.limit_bytes] * num_groups
    best: _Built | None = None
    found_with, least = limits, float("inf")

    def built(solution: Solution) -> _Built:
        plan = plan_of(solution, solver.tables, planner.cluster, batch)
        return _built(solution, solution.estimate, plan, planner, prices)

    for _ in range(num_tries):
        own = built(solution)
        least = min(least, own.memory_bytes)
        if own.memory_bytes <= limit:
            best, found_with = own, limits
            if not _would_gain(own, limit):
                break
        limits = _moved_limits(solution.estimate, [role.peak_bytes for role in own.memory], limits, limit)
        again = solver.again(solution, limits)
        if again is None or (best is not None and not _is_faster(again, best.solution)):
            break
        solution = again
    if best is None:
        shape = str(ranked.solution.candidate.shape)
        raise _TooLargeError(f"holds {format_bytes(least)}, more than {format_bytes(limit)}", given=shape)
    fitting = [best]
    if num_groups > 1:
        filled = solver.again(ranked.solution, found_with, fills=True)
        if filled is not None and filled.estimate.step_seconds < best.estimate_seconds:
            own = built(filled)
            fitting += [own] if own.memory_bytes <= limit else []
    fitting = fitting if simulates_all else fitting[-1:]
    if wishes.storage is None:
        relaxed = _with_zero1(fitting[-1], planner, prices, limit)
        fitting += [relaxed] if relaxed is not None else []
    return min((_finalist(own, prices) for own in fitting), key=lambda finalist: finalist.step_seconds)


def _built(solution: Solution, estimate: Estimate, plan: Plan, planner: Planner, prices: Prices) -> _Built:
    program = build_program(planner.blocks, plan)
    memory = simulate_memory(program, prices)
    return _Built(solution=solution, estimate=estimate, plan=plan, program=program, memory=memory)


def _with_zero1(own: _Built, planner: Planner, prices: Prices, limit: float) -> _Built | None:
    """With every parameter gathered, and its gradient reduced, once a step instead of at every micro-batch; if it
    fits, which the estimates of both tell well enough to leave out what does not."""
    storage = {
        name: replace(stored, kind="zero1") if stored.kind in ("zero2", "zero3") else stored
        for name, stored in own.plan.storage.items()
    }
    if storage == own.plan.storage:
        return None
    plan = replace(own.plan, storage=storage)
    estimate = estimate_plan(plan, planner.network, planner.works, planner.cluster)
    added = (more - held for more, held in zip(estimate.group_bytes, own.estimate.group_bytes, strict=True))
    if any(role.peak_bytes + more > limit for role, more in zip(own.memory, added, strict=True)):
        return None
    relaxed = _built(own.solution, estimate, plan, planner, prices)
    return relaxed if relaxed.memory_bytes <= limit else None


def _finalist(own: _Built, prices: Prices) -> Finalist:
    return Finalist(
        plan=own.plan,
        program=own.program,
        timeline=simulate(own.program, prices, with_events=False, memory=own.memory),
        estimate=own.estimate,
        placement=placement_words(own.solution.candidate.placement),
    )


def _would_gain(own: _Built, limit: float) -> bool:
    """Is there room left, and time lost for want of it?"""
    loses = bool(own.plan.recompute) or own.estimate_seconds > own.solution.bound_seconds * _NO_LOSS
    return loses and own.memory_bytes < _FULL * limit


def _is_faster(again: Solution, solution: Solution) -> bool:
    """Is a solution with more room worth another simulation?"""
    return again.estimate.step_seconds * _NO_LOSS < solution.estimate.step_seconds


def _moved_limits(estimate: Estimate, held: Sequence[int], limits: Sequence[float], limit: float) -> list[float]:
    """For every device group another limit of the estimate: lower where it does not fit; if all do, higher."""
    fits = max(held) <= limit
    moved = []
    for estimated, own_bytes, own in zip(estimate.group_bytes, held, limits, strict=True):
        reached = estimated * limit / own_bytes * _SPARE
        moved.append(max(own, reached) if fits else min(own, reached) if own_bytes > limit else own)
    return moved


def placement_words(placement: Placement) -> str:
    """A placement in words, without axes of one device."""
    rows = zip(placement.axes, placement.matrix, strict=True)
    return ", ".join(f"{name} {'×'.join(map(str, row))}" for name, row in rows if prod(row) > 1)


def as_candidate(finalist: Finalist, *, name: str = "") -> Candidate:
    """A finalist among other plans, to be ranked with them."""
    return Candidate(
        name=name or finalist.plan.name,
        placement=finalist.placement or "one device",
        plan=finalist.plan,
        program=finalist.program,
        timeline=finalist.timeline,
    )
