"""The search: the best plan for a model on a cluster, with a certificate.

    shapes          every number of stages and every size of the axes (`space`)
      placements    and micro-batches of a shape: a batch of problems with the same tables (`tables`)
        elimination the exact optimum of every problem without a limit of memory: its lower bound (`solutions`)
        prices      of memory, for problems whose bound is below the best plan so far
    finalists       the best estimates, as programs, ranked by the simulator

A problem is left out only where its bound is no better than the best estimate known (by more than `MARGIN`, so that
finalists remain to choose from). The gap is that between the best estimate and the least bound of all.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import log2, prod

import numpy as np

from planloom.blocks import BlockGraph
from planloom.cluster import Cluster
from planloom.cost.efficiency import rate_of
from planloom.graph.flops import training_flops
from planloom.plan.checks import BATCH_DIM
from planloom.search.network import Network, build_network
from planloom.search.one_stage import TOLERANCE
from planloom.search.processes import SharedSeconds, in_processes
from planloom.search.solutions import Solution, Solver
from planloom.search.space import Candidate, Shape, Space, Wishes, require_pin, search_space
from planloom.search.stages import cut_places
from planloom.search.tables import Tables, computing_seconds
from planloom.search.work import WorkPrices
from planloom.simulate.memory import given_bytes

MARGIN, WIDE_MARGIN = 0.05, 0.6
"""Problems whose bound is worse than the best estimate by more are not looked at: no finalist comes of them. Where
there are few devices, and so little to look at, the margin is wide, so that the best others can be shown."""
_FEW_DEVICES = 16
USABLE_MEMORY = 0.92
"""The share of a device's memory that a plan may fill: what remains is for the driver, for libraries and for what an
allocator cannot use. [Assumed]"""
_AT_ONCE = 8
_SAME = 1e-9
_SPLIT_GAIN = 0.95
"""By how much smaller pieces may be faster than the whole, in the model of kernels: tiles fit by chance. [Assumed]"""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A solution, and what it was found under."""

    solution: Solution
    limit_bytes: float

    @property
    def seconds(self) -> float:
        return self.solution.estimate.step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What was searched, and how far the best estimate may be from the best of that space."""

    space: str
    num_shapes: int
    num_problems: int
    num_solved: int
    best_seconds: float
    bound_seconds: float
    search_seconds: float

    @property
    def gap(self) -> float:
        return max(0.0, 1 - self.bound_seconds / self.best_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The best solutions by estimate, best first, each of another shape, placement or number of micro-batches."""

    ranked: tuple[Ranked, ...]
    certificate: Certificate


@dataclass(eq=False, slots=True)
class _State:
    """The search while it goes on; `shared`: the best estimate of all processes that search."""

    num_wanted: int
    shared: "SharedSeconds"
    margin: float = MARGIN
    best: list[Ranked] = field(default_factory=list)
    bound: float = float("inf")
    num_problems: int = 0
    num_solved: int = 0

    @property
    def below(self) -> float:
        """Problems whose bound is not below are left out."""
        return self.shared.value * (1 + self.margin)

    def add(self, ranked: Ranked) -> None:
        """One more solution; of two with the same seconds, which are the same plan under other names, the first."""
        self.shared.lower(ranked.seconds)
        if any(abs(ranked.seconds / other.seconds - 1) < _SAME for other in self.best):
            return
        self.best = sorted([*self.best, ranked], key=lambda own: own.seconds)[: self.num_wanted]

    def replace(self, before: Solution | None, ranked: Ranked) -> None:
        """A better solution of the same problem."""
        self.best = [own for own in self.best if own.solution is not before]
        self.add(ranked)

    def merge(self, other: "_State") -> None:
        for ranked in other.best:
            self.add(ranked)
        self.bound = min(self.bound, other.bound)
        self.num_problems += other.num_problems
        self.num_solved += other.num_solved


class Planner:
    """One model on one cluster: what all searches on it share."""

    def __init__(self, blocks: BlockGraph, cluster: Cluster, *, fused: bool, by_volume: bool = False) -> None:
        self.blocks, self.cluster = blocks, cluster
        self.network: Network = build_network(blocks)
        self.works = WorkPrices(blocks, cluster.device, fused=fused, by_volume=by_volume)
        self.places = cut_places(blocks)
        self.batch = batch_size(blocks)

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
        space = self.space(wishes)
        state = _State(num_wanted, SharedSeconds())
        for other in in_processes(
            lambda shape, shared: self._searched(space, shape, limit, num_wanted, shared),
            promising_first(space.shapes, self.cluster),
            state.shared,
            progress=progress,
        ):
            state.merge(other)
        ranked = tuple(state.best)
        certificate = Certificate(
            space=space.description,
            num_shapes=len(space.shapes),
            num_problems=state.num_problems,
            num_solved=state.num_solved,
            best_seconds=state.shared.value,
            bound_seconds=min(state.bound, state.shared.value),
            search_seconds=time.perf_counter() - started,
        )
        return Found(ranked=ranked, certificate=certificate)

    @property
    def margin(self) -> float:
        return WIDE_MARGIN if self.cluster.num_devices <= _FEW_DEVICES else MARGIN

    def space(self, wishes: Wishes) -> Space:
        """The space that wishes leave; pins that concern nothing are refused."""
        for pin in wishes.pins:
            require_pin(pin, self.blocks)
        return search_space(self.cluster.num_devices, batch=self.batch, max_stages=len(self.places) + 1, wishes=wishes)

    def tables(self, candidates: Sequence[Candidate], wishes: Wishes) -> Tables:
        """Of candidates of one shape."""
        network = build_network(self.blocks, wishes.pins) if wishes.pins else self.network
        return Tables(network, self.works, self.cluster, candidates[0].shape, candidates, wishes)

    def solver(self, candidate: Candidate, limit_bytes: float, wishes: Wishes) -> Solver:
        """Of one candidate alone; its choices are numbered as those of any batch with the same wishes."""
        tables = self.tables([candidate], wishes)
        return Solver(tables, self.places, limit_bytes=limit_bytes, recompute=wishes.recompute)

    def _searched(self, space: Space, shape: Shape, limit: float, num_wanted: int, shared: SharedSeconds) -> "_State":
        """One shape on all its placements, with all numbers of micro-batches that may be worth it."""
        state = _State(num_wanted, shared, self.margin)
        some = [m for m in space.micro_batches if self.least_seconds(shape.num_stages, m) < state.below]
        bounds = computing_seconds(self.network, self.works, shape, space.wishes, some)
        worthwhile = [m for m, bound in zip(some, bounds, strict=True) if bound < state.below]
        candidates = [
            Candidate(shape=shape, placement=placement, num_micro=num_micro)
            for placement in space.placements(self.cluster, shape)
            for num_micro in worthwhile
        ]
        state.num_problems = len(candidates)
        if candidates:
            tables = self.tables(candidates, space.wishes)
            if tables.is_possible:
                self._solve(Solver(tables, self.places, limit_bytes=limit, recompute=space.wishes.recompute), state)
        return state

    def least_seconds(self, num_stages: int, num_micro: int) -> float:
        """A bound on every plan with these numbers: all computation, perfectly divided, and the bubble."""
        if self.works.by_volume:
            return 0.0
        ideal = max(self._peak_seconds, _SPLIT_GAIN * self._whole_seconds) / self.cluster.num_devices
        return ideal * (num_micro + num_stages - 1) / num_micro

    @cached_property
    def _peak_seconds(self) -> float:
        """All floating-point operations on one device at its peak rate."""
        return training_flops(self.blocks.graph, counting="causal") / self._rate

    @cached_property
    def _whole_seconds(self) -> float:
        """All blocks on one device, whole: no split makes a block's operations faster by themselves."""
        total = 0.0
        for key, numbers, _ in self.network.places_of_keys:
            variable = self.network.representatives[key]
            if not variable.tensor:
                block = self.blocks.blocks[variable.block]
                work = self.works.work(block, (1,) * len(block.dims))
                total += len(numbers) * (work.forward_seconds + work.backward_seconds)
        return total

    @property
    def _rate(self) -> float:
        graph = self.blocks.graph
        return max(rate_of(self.cluster.device, graph.tensors[name].dtype) for name in graph.parameters)

    def _solve(self, solver: Solver, state: _State) -> None:
        """Problems in the order of their bounds, until these are no better than what is known."""
        order = [int(g) for g in np.argsort(solver.bounds) if np.isfinite(solver.bounds[g])]
        for start in range(0, len(order), _AT_ONCE):
            some = order[start : start + _AT_ONCE]
            if solver.bounds[some[0]] >= state.below:
                break
            found = solver.solve(some, below=state.below)
            state.num_solved += len(some)
            for solution in found:
                state.add(Ranked(solution=solution, limit_bytes=solver.limit_bytes))
        self._refine(solver, state)
        if order:
            state.bound = min(state.bound, float(solver.bounds[order].min()))

    def _refine(self, solver: Solver, state: _State) -> None:
        """Problems whose bound is further from the best estimate than `TOLERANCE`: closer ones, where memory binds."""
        known = {own.solution.candidate: own.solution for own in state.best}
        enough = float("inf")  # no bound need be better than the worst that cannot be helped
        while True:
            g = int(solver.bounds.argmin())
            enough = min(enough, (1 - TOLERANCE) * state.shared.value)
            if solver.bounds[g] >= enough or not np.isfinite(solver.bounds[g]):
                break
            before = known.get(solver.tables.candidates[g])
            solution = solver.refined(g, before, below=state.shared.value, enough=enough)
            if solution is not None and solution is not before:
                state.replace(before, Ranked(solution=solution, limit_bytes=solver.limit_bytes))
            enough = min(enough, float(solver.bounds[g]))


def promising_first(shapes: Sequence[Shape], cluster: Cluster) -> list[Shape]:
    """Those with one free axis, about as large as a node, before the others: the better the first, the less is left."""
    inside = log2(max(2, cluster.level_counts[-1]))

    def rank(shape: Shape) -> tuple[float, ...]:
        free = [n for n, kind in zip(shape.sizes, shape.kinds, strict=True) if kind == "free"]
        return (max(0, len(free) - 1), abs(log2(prod(free)) - inside), abs(log2(shape.num_stages) - inside / 2))

    return sorted(shapes, key=rank)


def batch_size(blocks: BlockGraph) -> int:
    """The size of the global batch: that of the blocks' dim `batch`."""
    sizes = {dim.size for block in blocks.blocks for dim in block.dims if dim.name == BATCH_DIM}
    return max(sizes, default=1)
