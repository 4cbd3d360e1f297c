"""Finalists: the best solutions as programs, ranked by the simulator, none that would not fit.

The estimate of memory is a sum over blocks; the simulator's is exact liveness. Where a finalist holds more than a device
has, its problem is solved again with as much less room as the estimate was too small.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from planloom.cost import Prices
from planloom.errors import LayoutError, PlanError
from planloom.plan import Plan
from planloom.program import Program, build_program
from planloom.search.finished import plan_of
from planloom.search.planner import Found, Planner, Ranked
from planloom.search.solutions import Solver
from planloom.search.space import Wishes
from planloom.search.stages import Estimate
from planloom.simulate import Timeline, simulate

_TRIES = 4
BatchSpec = Mapping[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalist:
    """A plan with its program, its simulated step, and the estimate that it was found by."""

    plan: Plan
    program: Program
    timeline: Timeline
    estimate: Estimate
    placement: str

    @property
    def step_seconds(self) -> float:
        return self.timeline.step_seconds

    @property
    def memory_bytes(self) -> int:
        assert self.timeline.summary is not None
        return self.timeline.summary.peak_memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Finalists:
    """Those that fit, fastest first; and why others dropped out."""

    fitting: tuple[Finalist, ...]
    refused: tuple[tuple[str, str], ...]


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
    """Build and simulate the best solutions, until so many fit."""
    limit = planner.device_bytes(wishes)
    fitting: list[Finalist] = []
    refused: list[tuple[str, str]] = []
    for ranked in found.ranked:
        if len(fitting) == num_finalists:
            break
        if progress is not None:
            progress(len(fitting), num_finalists)
        finalist = _fitted(planner, ranked, prices, batch, limit, refused)
        if finalist is not None:
            fitting.append(finalist)
    return Finalists(
        fitting=tuple(sorted(fitting, key=lambda f: (f.step_seconds, f.plan.name, f.placement))), refused=tuple(refused)
    )


def _fitted(
    planner: Planner,
    ranked: Ranked,
    prices: Prices,
    batch: BatchSpec,
    limit: float,
    refused: list[tuple[str, str]],
) -> Finalist | None:
    """A solution that the simulator finds to fit, solved again with less room as often as needed."""
    for _ in range(_TRIES):
        try:
            finalist = _simulated(planner, ranked, prices, batch)
        except (PlanError, LayoutError) as error:
            refused.append((str(ranked.solution.candidate.shape), error.what))
            return None
        if finalist.memory_bytes <= limit:
            return finalist
        again = _with_less_room(ranked, limit / finalist.memory_bytes)
        if again is None:
            break
        ranked = again
    refused.append((finalist.plan.name, f"holds {finalist.memory_bytes / 2**30:.1f} GiB of {limit / 2**30:.1f}"))
    return None


def _with_less_room(ranked: Ranked, share: float) -> Ranked | None:
    """The same problem where the fullest stage may hold that share of what it was estimated to hold."""
    solver, solution = ranked.solver, ranked.solution
    room = min(solver.limit_bytes, solution.estimate.num_bytes) * share * 0.995
    smaller = Solver(solver.tables, solver.places, limit_bytes=room, recompute=solver.recompute)
    g = solver.tables.candidates.index(solution.candidate)
    found = smaller.solve([g], below=float("inf"))
    return Ranked(solution=found[0], solver=smaller) if found else None


def _simulated(planner: Planner, ranked: Ranked, prices: Prices, batch: BatchSpec) -> Finalist:
    plan = plan_of(ranked.solution, ranked.solver.tables, planner.cluster, batch)
    program = build_program(planner.blocks, plan)
    return Finalist(
        plan=plan,
        program=program,
        timeline=simulate(program, prices, with_events=False),
        estimate=ranked.solution.estimate,
        placement=str(ranked.solution.candidate.placement),
    )


def with_source(finalists: Sequence[Finalist], source: str) -> tuple[Finalist, ...]:
    """The same, their plans saying how the model was named."""
    return tuple(replace(f, plan=replace(f.plan, source=source)) for f in finalists)
