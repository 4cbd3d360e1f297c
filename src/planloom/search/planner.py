"""The search: the best plan for a model on a cluster, with a certificate.

    shapes          every number of stages and every size of the axes (`space`)
      placements    and micro-batches of a shape: a batch of problems with the same tables (`tables`)
        bounds      the exact optimum of every problem without a limit of memory, and the pace of its heaviest piece
    problems        of all shapes, least bound first: solved under the limit of memory (`solutions`)
      refined       where memory binds and the bound is far from the best (`one_stage`, `pipeline_bound`)
    finalists       the best estimates, as programs, ranked by the simulator

A problem is left out only where its bound is no better than the last of the best estimates that are wanted, or worse
than the best by more than a margin. The gap is that between the best estimate and the least bound of all.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import log2, prod

import numpy as np

from planloom.blocks import BlockGraph
from planloom.cluster import Cluster
from planloom.cost.efficiency import rate_of
from planloom.graph.flops import training_flops
from planloom.plan.checks import BATCH_DIM, may_have_micro_batches, require_micro_batches
from planloom.search.network import Network, build_network
from planloom.search.one_stage import TOLERANCE
from planloom.search.pace import pace_bounds
from planloom.search.processes import BestSeconds, fork_context, in_processes, is_same
from planloom.search.schedules import Schedule
from planloom.search.solutions import Solution, Solver
from planloom.search.space import Candidate, Shape, Space, Wishes, require_pin, search_space
from planloom.search.stages import cut_places
from planloom.search.tables import Tables, computing_seconds
from planloom.search.work import Measured, WorkPrices
from planloom.simulate.memory import given_bytes

MARGIN, WIDE_MARGIN = 0.05, 0.6
"""Problems whose bound is worse than the best estimate by more are not looked at, and solutions that are worse by
more are no finalists. Where there are few devices, and so little to look at, the margin is wide, so that the best
others can be shown."""
_FEW_DEVICES = 16
USABLE_MEMORY = 0.92
"""The share of a device's memory that a plan may fill: what remains is for the driver, for libraries and for what an
allocator cannot use. [Assumed]"""
_AT_ONCE = 2
"""Problems of one shape that are solved together."""
_FILLED, _NEAR = 8, 1.03
"""How many of the best solutions have their stages filled, and how far from the best they may be."""
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A solution, and what it was found under."""

    solution: Solution
    limit_bytes: float
    before: Solution | None = None
    """What was found before its stages were filled."""

    @property
    def seconds(self) -> float:
        return self.solution.estimate.step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What was searched, and how far the best estimate of that space may be from the best of it. Schedules and variants
    that are tried beside it (`schedules`, `variants`) may be faster than either."""

    space: str
    num_shapes: int
    num_problems: int
    num_solved: int
    best_seconds: float
    bound_seconds: float
    search_seconds: float

    @property
    def has_plans(self) -> bool:
        """Is there a plan in the space that fits by the estimate?"""
        return self.best_seconds < float("inf")

    @property
    def gap(self) -> float:
        return max(0.0, 1 - self.bound_seconds / self.best_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best solutions by estimate, best first, each of another shape, placement or number of micro-batches."""

    ranked: tuple[Ranked, ...]
    certificate: Certificate


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A candidate that is not solved yet: no plan of it is faster than its bound."""

    candidate: Candidate
    bound_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unproven:
    """Problems of one shape and schedule whose bounds are not close to the best, least first."""

    problems: tuple[Problem, ...]

    def __str__(self) -> str:
        return f"proof for {self.problems[0].candidate.shape}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filling:
    """A solution whose stages are to be filled, and its place among all."""

    place: int
    ranked: Ranked

    def __str__(self) -> str:
        return f"filling stages of {self.ranked.solution.candidate.shape}"


@dataclass(eq=False, slots=True)
class _Findings:
    """What came of some shapes or problems."""

    solved: list[Ranked] = field(default_factory=list)
    open: list[Problem] = field(default_factory=list)
    closed: list[Problem] = field(default_factory=list)
    """Those that were solved, or proven not to fit, with what their bounds became."""
    num_problems: int = 0

    def merge(self, other: "_Findings") -> None:
        self.solved += other.solved
        self.open += other.open
        self.closed += other.closed
        self.num_problems += other.num_problems


class Planner:
    """One model on one cluster: what all searches on it share."""

    def __init__(
        self,
        blocks: BlockGraph,
        cluster: Cluster,
        *,
        fused: bool,
        by_volume: bool = False,
        measured: Measured | None = None,
    ) -> None:
        self.blocks, self.cluster = blocks, cluster
        self.network: Network = build_network(blocks)
        self.works = WorkPrices(blocks, cluster.device, fused=fused, by_volume=by_volume, measured=measured)
        self.places = cut_places(blocks)
        self.batch = batch_size(blocks)

    def with_measured(self, measured: Measured) -> "Planner":
        """The same model and cluster, priced with what was measured."""
        works = self.works
        return Planner(self.blocks, self.cluster, fused=works.fused, by_volume=works.by_volume, measured=measured)

    def device_bytes(self, wishes: Wishes) -> float:
        """What a plan may fill of a device's memory."""
        return wishes.memory_bytes or USABLE_MEMORY * self.cluster.device.memory_bytes

    def limit_bytes(self, wishes: Wishes) -> float:
        """What a device has for blocks: its usable memory without the batch, which every device holds."""
        return self.device_bytes(wishes) - given_bytes(self.blocks.graph)

    def search(
        self,
        wishes: Wishes | None = None,
        *,
        num_wanted: int = 8,
        limit_bytes: float | None = None,
        progress: Progress | None = None,
    ) -> Found:
        """The best solutions of the whole space; none if nothing fits into memory."""
        started = time.perf_counter()
        wishes = wishes or Wishes()
        limit = self.limit_bytes(wishes) if limit_bytes is None else limit_bytes
        space, best = self.space(wishes), BestSeconds(num_wanted)
        findings = _Findings()
        for own in in_processes(
            lambda shape, shared: self._bounded(space, shape, limit, shared),
            promising_first(space.shapes, self.cluster, self.batch),
            best,
            progress=progress,
        ):
            findings.merge(own)
            for ranked in own.solved:
                best.add(ranked.seconds)
        waiting, findings.open = _portions(findings.open), list[Problem]()
        for own in in_processes(
            lambda some, shared: self._solved(some, limit, wishes, shared), waiting, best, progress=progress
        ):
            findings.merge(own)
            for ranked in own.solved:
                best.add(ranked.seconds)
        self._refine(findings, best, limit, wishes, progress)
        others = self._tried(space, findings, best.least, limit, progress)
        bounds = [problem.bound_seconds for problem in (*findings.open, *findings.closed)]
        certificate = Certificate(
            space=space.description,
            num_shapes=len(space.shapes),
            num_problems=findings.num_problems,
            num_solved=len(findings.closed),
            best_seconds=best.least,
            bound_seconds=min([best.least, *bounds]),
            search_seconds=time.perf_counter() - started,
        )
        return Found(
            ranked=_distinct([*findings.solved, *others], best.least * (1 + self.margin))[:num_wanted],
            certificate=certificate,
        )

    def _below(self, best: BestSeconds) -> float:
        """Problems whose bound is not below are left out."""
        return min(best.least * (1 + self.margin), best.last)

    @property
    def margin(self) -> float:
        return WIDE_MARGIN if self.cluster.num_devices <= _FEW_DEVICES else MARGIN

    def space(self, wishes: Wishes) -> Space:
        """The space that wishes leave; pins that concern nothing, and micro-batches that cannot be, are refused."""
        for pin in wishes.pins:
            require_pin(pin, self.blocks)
        require_micro_batches(wishes.micro or 1, self.blocks)
        divided = self.batch if may_have_micro_batches(self.blocks) else 1
        return search_space(
            self.cluster.num_devices, batch=divided, max_stages=len(self.places) + 1, wishes=wishes,
            is_compiled=self.works.fused,
        )  # fmt: skip

    def tables(self, candidates: Sequence[Candidate], wishes: Wishes) -> Tables:
        """Of candidates of one shape and schedule."""
        network = build_network(self.blocks, wishes.pins) if wishes.pins else self.network
        return Tables(network, self.works, self.cluster, candidates[0].shape, candidates, wishes)

    def solver(self, candidate: Candidate, limit_bytes: float, wishes: Wishes) -> Solver:
        """Of one candidate alone; its choices are numbered as those of any batch with the same wishes."""
        tables = self.tables([candidate], wishes)
        return Solver(tables, self.places, limit_bytes=limit_bytes, recompute=wishes.recompute)

    def _bounded(self, space: Space, shape: Shape, limit: float, best: BestSeconds) -> _Findings:
        """Bounds of a shape on all its placements, with all schedules and numbers of micro-batches that may be worth
        it; and its best problems solved, where they may be better than all so far: so that others have something to
        beat."""
        num_groups, findings = shape.num_stages, _Findings()
        schedules = [
            (schedule, m)
            for schedule in space.schedules_of(num_groups)
            for m in space.micro_batches
            if schedule.is_possible(num_groups, m) and self.least_seconds(schedule, num_groups, m) < self._below(best)
        ]
        counts = sorted({m for _, m in schedules})
        computing = dict(
            zip(counts, computing_seconds(self.network, self.works, shape, space.wishes, counts), strict=True)
        )
        worthwhile: dict[Schedule, list[int]] = {}
        for schedule, m in schedules:
            if computing[m] * schedule.least_weight(num_groups, m) / num_groups < self._below(best):
                worthwhile.setdefault(schedule, []).append(m)
        for schedule, micro in worthwhile.items():
            candidates = [
                Candidate(shape=shape, placement=placement, num_micro=m, schedule=schedule)
                for placement in space.placements(self.cluster, shape)
                for m in micro
            ]
            findings.num_problems += len(candidates)
            self._bound(space, candidates, limit, best, findings)
        return findings

    def _bound(
        self, space: Space, candidates: Sequence[Candidate], limit: float, best: BestSeconds, findings: _Findings
    ) -> None:
        """Candidates of one shape and schedule."""
        tables = self.tables(candidates, space.wishes)
        if not tables.is_possible:
            return
        solver = Solver(tables, self.places, limit_bytes=limit, recompute=space.wishes.recompute)
        solver.bounds = np.maximum(solver.bounds, pace_bounds(tables, self.places, solver.bounds))
        order = [int(g) for g in np.argsort(solver.bounds, kind="stable") if np.isfinite(solver.bounds[g])]
        first = [g for g in order[:1] if solver.bounds[g] < best.least]
        self._solve(solver, first, best, findings)
        others = order[len(first) :]
        solver.tighten(others, below=self._below(best))
        findings.open += [Problem(candidate=candidates[g], bound_seconds=float(solver.bounds[g])) for g in others]

    def _solved(self, problems: "Sequence[Problem]", limit: float, wishes: Wishes, best: BestSeconds) -> _Findings:
        """Some problems of one shape, under the limit of memory."""
        findings = _Findings()
        left = [problem for problem in problems if problem.bound_seconds < self._below(best)]
        findings.open = [problem for problem in problems if problem not in left]
        if left:
            self._solve(self._solver_of(left, limit, wishes), list(range(len(left))), best, findings)
        return findings

    def _solver_of(self, problems: "Sequence[Problem]", limit: float, wishes: Wishes) -> Solver:
        """Of problems of one shape, which keep the bounds that are known of them."""
        tables = self.tables([problem.candidate for problem in problems], wishes)
        solver = Solver(tables, self.places, limit_bytes=limit, recompute=wishes.recompute)
        solver.bounds = np.maximum(solver.bounds, [problem.bound_seconds for problem in problems])
        return solver

    def _solve(self, solver: Solver, problems: Sequence[int], best: BestSeconds, findings: _Findings) -> None:
        if not problems:
            return
        for solution in solver.solve(problems, below=self._below(best)):
            best.add(solution.estimate.step_seconds)
            findings.solved.append(Ranked(solution=solution, limit_bytes=solver.limit_bytes))
        findings.closed += [
            Problem(candidate=solver.tables.candidates[g], bound_seconds=float(solver.bounds[g])) for g in problems
        ]

    def _refine(
        self, findings: _Findings, best: BestSeconds, limit: float, wishes: Wishes, progress: Progress | None
    ) -> None:
        """Closer bounds, and better solutions, of solved problems that may be better than the best by more than
        `TOLERANCE`: where memory binds, the row of prices leaves something open.

        Of a shape the problem with the least bound comes first: where it stays the least, others need not be better.
        """
        self._fill(findings, best, limit, wishes, progress)
        alike: dict[tuple[Shape, Schedule], list[Problem]] = {}
        for problem in sorted(findings.closed, key=lambda own: own.bound_seconds):
            if problem.bound_seconds < (1 - TOLERANCE) * best.least:
                alike.setdefault((problem.candidate.shape, problem.candidate.schedule), []).append(problem)
        solved = {own.solution.candidate: own for own in findings.solved}
        loosest = BestSeconds(1, fork_context())
        bounds: dict[Candidate, float] = {}
        for problems, improved in in_processes(
            lambda some, shared: self._proven(some.problems, solved, limit, wishes, shared, loosest),
            [_Unproven(problems=tuple(own)) for own in alike.values()],
            best,
            progress=progress,
        ):
            bounds |= {problem.candidate: problem.bound_seconds for problem in problems}
            for ranked in improved:
                best.add(ranked.seconds)
                solved[ranked.solution.candidate] = ranked
        findings.solved = list(solved.values())
        findings.closed = [
            replace(problem, bound_seconds=bounds.get(problem.candidate, problem.bound_seconds))
            for problem in findings.closed
        ]

    def _proven(
        self,
        problems: Sequence[Problem],
        solved: Mapping[Candidate, Ranked],
        limit: float,
        wishes: Wishes,
        best: BestSeconds,
        loosest: BestSeconds,
    ) -> tuple[list[Problem], list[Ranked]]:
        """Problems of one shape with closer bounds, and better solutions of them. `loosest`: the least bound that could
        not be brought close, of all shapes: then others need not be better."""
        solver, improved = self._solver_of(problems, limit, wishes), list[Ranked]()
        for g, problem in enumerate(problems):
            enough = min((1 - TOLERANCE) * best.least, loosest.least)
            if problem.bound_seconds >= enough:
                break
            known = solved.get(problem.candidate)
            before = known.solution if known is not None else None
            found = solver.refined(g, before, below=best.least, enough=enough)
            if found is not None:
                best.add(found.estimate.step_seconds)
                improved.append(replace(known or Ranked(solution=found, limit_bytes=limit), solution=found))
            loosest.add(float(solver.bounds[g]))
        closer = zip(problems, solver.bounds.tolist(), strict=True)
        return [
            replace(problem, bound_seconds=max(problem.bound_seconds, bound)) for problem, bound in closer
        ], improved

    def _fill(
        self, findings: _Findings, best: BestSeconds, limit: float, wishes: Wishes, progress: Progress | None
    ) -> None:
        """Better solutions of the best problems that memory may have made slower."""
        bounds = {problem.candidate: problem.bound_seconds for problem in findings.closed}
        places = sorted(range(len(findings.solved)), key=lambda i: findings.solved[i].seconds)[:_FILLED]
        near = [_Filling(place=place, ranked=findings.solved[place]) for place in places]
        wanted = [
            own
            for own in near
            if own.ranked.seconds <= _NEAR * best.least
            and bounds[own.ranked.solution.candidate] < (1 - TOLERANCE) * own.ranked.seconds
        ]

        def filled(filling: _Filling, _: BestSeconds) -> tuple[int, Solution | None]:
            solution = filling.ranked.solution
            found = self.solver(solution.candidate, limit, wishes).filled(0, solution)
            return filling.place, None if found is solution else found

        for place, found in in_processes(filled, wanted, best, progress=progress, few=1):
            if found is not None:
                best.add(found.estimate.step_seconds)
                before = findings.solved[place].solution
                findings.solved[place] = Ranked(solution=found, limit_bytes=limit, before=before)

    def _tried(
        self, space: Space, findings: _Findings, least: float, limit: float, progress: Progress | None
    ) -> list[Ranked]:
        """The best plans with schedules that are no part of the space whose bound is proven."""
        ranked = [own for own in sorted(findings.solved, key=lambda own: own.seconds) if own.seconds <= _NEAR * least]
        candidates = [
            replace(candidate, schedule=schedule)
            for candidate in (own.solution.candidate for own in ranked[:_FILLED])
            for schedule in space.tried_with(candidate.shape.num_stages, candidate.num_micro)
        ]

        def tried(candidate: Candidate, _: BestSeconds) -> tuple[int, Ranked | None]:
            solver = self.solver(candidate, limit, space.wishes)
            solved = solver.solve([0], below=_NEAR * least)
            solution = solver.filled(0, solved[0]) if solved else None
            own = Ranked(solution=solution, limit_bytes=limit, before=solved[0]) if solution is not None else None
            return candidates.index(candidate), own

        found = dict(in_processes(tried, candidates, BestSeconds(1), progress=progress, few=1))
        return [own for _, own in sorted(found.items()) if own is not None]

    def least_seconds(self, schedule: Schedule, num_groups: int, num_micro: int) -> float:
        """A bound on every plan with these numbers: all operations at the peak rate, perfectly divided, and the bubble.
        What was measured may be faster than a peak rate that a file states: then there is no such bound."""
        if self.works.by_volume or self.works.measured.figures:
            return 0.0
        ideal = self._peak_seconds / self.cluster.num_devices
        return ideal * schedule.least_weight(num_groups, num_micro) / num_micro

    @cached_property
    def _peak_seconds(self) -> float:
        """All floating-point operations on one device at its peak rate."""
        return training_flops(self.blocks.graph, counting="causal") / self._rate

    @property
    def _rate(self) -> float:
        graph = self.blocks.graph
        return max(rate_of(self.cluster.device, graph.tensors[name].dtype) for name in graph.parameters)


def _portions(problems: Sequence[Problem]) -> list[tuple[Problem, ...]]:
    """Problems of one shape and schedule together, a few at a time; those with the least bounds first."""
    alike: dict[tuple[Shape, Schedule], list[Problem]] = {}
    for problem in sorted(problems, key=lambda own: own.bound_seconds):
        alike.setdefault((problem.candidate.shape, problem.candidate.schedule), []).append(problem)
    found = [tuple(own[i : i + _AT_ONCE]) for own in alike.values() for i in range(0, len(own), _AT_ONCE)]
    return sorted(found, key=lambda own: own[0].bound_seconds)


def _distinct(solved: Sequence[Ranked], limit: float) -> tuple[Ranked, ...]:
    """Those up to the limit, best first; of several with the same seconds, which are one plan under several names, the
    first."""
    found: list[Ranked] = []
    for ranked in sorted(solved, key=lambda own: own.seconds):
        if ranked.seconds <= limit and not (found and is_same(found[-1].seconds, ranked.seconds)):
            found.append(ranked)
    return tuple(found)


def promising_first(shapes: Sequence[Shape], cluster: Cluster, batch: int) -> list[Shape]:
    """Those whose free axes have about as many devices as a node first, or as many as the batch is too small for: the
    better the first, the less is left. Four micro-batches a stage make a small bubble."""
    node = max(2, cluster.level_counts[-1])
    free = log2(max(node, 4 * cluster.num_devices / batch))
    wanted = 2 if free > log2(node) else 1

    def rank(shape: Shape) -> tuple[float, ...]:
        sizes = [n for n, kind in zip(shape.sizes, shape.kinds, strict=True) if kind == "free"]
        return (abs(log2(prod(sizes)) - free), abs(len(sizes) - wanted), abs(log2(shape.num_stages) - free / 2))

    return sorted(shapes, key=rank)


def batch_size(blocks: BlockGraph) -> int:
    """The size of the global batch: that of the blocks' dim `batch`."""
    sizes = {dim.size for block in blocks.blocks for dim in block.dims if dim.name == BATCH_DIM}
    return max(sizes, default=1)
