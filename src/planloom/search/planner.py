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
from heapq import heappush, heappushpop

import numpy as np

from planloom.blocks import BlockGraph
from planloom.cluster import Cluster
from planloom.cost.efficiency import rate_of
from planloom.errors import PlanError
from planloom.graph.flops import training_flops
from planloom.plan.checks import BATCH_DIM
from planloom.search.network import Network, build_network
from planloom.search.solutions import Solution, Solver
from planloom.search.space import Candidate, Shape, Space, Wishes, search_space
from planloom.search.stages import cut_places
from planloom.search.tables import Tables
from planloom.search.work import WorkPrices
from planloom.simulate.memory import given_bytes

MARGIN = 0.05
"""Problems whose bound is worse than the best estimate by more are not looked at: no finalist comes of them."""
USABLE_MEMORY = 0.92
"""The share of a device's memory that a plan may fill: what remains is for the driver, for libraries and for what an
allocator cannot use. [Assumed]"""
_AT_ONCE = 8
_MAX_NUMBERS = 60_000_000
"""Numbers in the largest table of a batch: more problems than that are solved in several batches."""

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A solution, with the tables that it was found in."""

    solution: Solution
    solver: Solver

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
    """The search while it goes on."""

    num_wanted: int
    best: list[tuple[float, int, Ranked]] = field(default_factory=list)
    """A heap with the worst of the best first: (-seconds, number, solution)."""
    bound: float = float("inf")
    num_problems: int = 0
    num_solved: int = 0
    count: int = 0

    @property
    def incumbent(self) -> float:
        return min((ranked.seconds for _, _, ranked in self.best), default=float("inf"))

    def add(self, ranked: Ranked) -> None:
        self.count += 1
        push = heappush if len(self.best) < self.num_wanted else heappushpop
        push(self.best, (-ranked.seconds, -self.count, ranked))


class Planner:
    """One model on one cluster: what all searches on it share."""

    def __init__(self, blocks: BlockGraph, cluster: Cluster, *, fused: bool) -> None:
        self.blocks, self.cluster = blocks, cluster
        self.network: Network = build_network(blocks)
        self.works = WorkPrices(blocks, cluster.device, fused=fused)
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
        """The best solutions of the whole space."""
        started = time.perf_counter()
        wishes = wishes or Wishes()
        limit = self.limit_bytes(wishes) if limit_bytes is None else limit_bytes
        space = self.space(wishes)
        state = _State(num_wanted)
        for i, shape in enumerate(space.shapes):
            if progress is not None:
                progress(str(shape), i, len(space.shapes))
            self._search_shape(space, shape, limit, state)
        if not state.best:
            raise PlanError(
                "no plan fits into memory",
                given=f"{limit / 2**30:.1f} GiB a device for parameters, activations and gradients",
                required="more memory, more devices or a smaller batch",
                todo="planloom fit says what would do",
            )
        ranked = tuple(item for *_, item in sorted(state.best, key=lambda entry: (-entry[0], -entry[1])))
        certificate = Certificate(
            space=space.description,
            num_shapes=len(space.shapes),
            num_problems=state.num_problems,
            num_solved=state.num_solved,
            best_seconds=ranked[0].seconds,
            bound_seconds=min(state.bound, ranked[0].seconds),
            search_seconds=time.perf_counter() - started,
        )
        return Found(ranked=ranked, certificate=certificate)

    def space(self, wishes: Wishes) -> Space:
        space = search_space(
            self.cluster.num_devices, batch=self.batch, max_stages=len(self.places) + 1, wishes=wishes
        )
        return space

    def _search_shape(self, space: Space, shape: Shape, limit: float, state: _State) -> None:
        candidates = []
        for num_micro in space.micro_batches:
            bound = self._least_seconds(shape, num_micro)
            if bound < state.incumbent * (1 + MARGIN):
                candidates += [
                    Candidate(shape=shape, placement=placement, num_micro=num_micro)
                    for placement in space.placements(self.cluster, shape)
                ]
        state.num_problems += len(candidates)
        if candidates:
            tables = Tables(self.network, self.works, self.cluster, shape, candidates, space.wishes)
            self._solve(Solver(tables, self.places, limit_bytes=limit, recompute=space.wishes.recompute), state)

    def _least_seconds(self, shape: Shape, num_micro: int) -> float:
        """All floating-point operations at the peak rate, and the bubble: no plan with these numbers is faster."""
        ideal = training_flops(self.blocks.graph, counting="causal") / (self._rate * self.cluster.num_devices)
        return ideal * (num_micro + shape.num_stages - 1) / num_micro

    @property
    def _rate(self) -> float:
        graph = self.blocks.graph
        return max(rate_of(self.cluster.device, graph.tensors[name].dtype) for name in graph.parameters)

    def _solve(self, solver: Solver, state: _State) -> None:
        """Problems in the order of their bounds, until these are no better than what is known."""
        order = [int(g) for g in np.argsort(solver.bounds) if np.isfinite(solver.bounds[g])]
        for start in range(0, len(order), _AT_ONCE):
            some = order[start : start + _AT_ONCE]
            below = state.incumbent * (1 + MARGIN)
            if solver.bounds[some[0]] >= below:
                break
            found = solver.solve(some, below=below)
            state.num_solved += len(some)
            for solution in found:
                state.add(Ranked(solution=solution, solver=solver))
        if order:
            state.bound = min(state.bound, float(solver.bounds[order].min()))


def batch_size(blocks: BlockGraph) -> int:
    """The size of the global batch: that of the blocks' dim `batch`."""
    sizes = {dim.size for block in blocks.blocks for dim in block.dims if dim.name == BATCH_DIM}
    return max(sizes, default=1)
