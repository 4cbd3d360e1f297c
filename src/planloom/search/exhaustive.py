"""Exhaustive search: every named plan on every placement, priced by the simulator.

Candidates that a model or batch does not allow are kept with the reason, so that the table says why a plan is missing.
`plan_lazily` measures only what the best plans use: it ranks by what is known, measures the best, and ranks again,
until nothing in them is unmeasured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from planloom.blocks import BlockGraph
from planloom.cluster import Cluster, cluster_to_yaml
from planloom.cost import Prices
from planloom.errors import LayoutError, PlanError
from planloom.layout import enumerate_placements
from planloom.plan import NamedPlan, Plan, axis_sizes, library, named_plan
from planloom.program import Program, build_program
from planloom.simulate import Timeline, simulate

BatchSpec = Mapping[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan with its program and simulated timeline, or the reason why it cannot be.

    `fits`: does its peak fit into a device's memory? Known once it is priced.
    """

    name: str
    placement: str
    plan: Plan | None = None
    program: Program | None = None
    timeline: Timeline | None = None
    fits: bool = True
    refused: str = ""

    @property
    def label(self) -> str:
        return f"{self.name} on {self.placement}"

    @property
    def step_seconds(self) -> float:
        return self.timeline.step_seconds if self.timeline is not None else float("inf")

    @property
    def memory_bytes(self) -> int:
        """The largest peak of all devices; zero where nothing was simulated."""
        summary = self.timeline.summary if self.timeline is not None else None
        return summary.peak_memory_bytes if summary is not None else 0


def candidate_plans(
    blocks: BlockGraph,
    cluster: Cluster,
    batch: BatchSpec,
    *,
    max_micro: int = 4,
    names: Sequence[NamedPlan] | None = None,
) -> tuple[Candidate, ...]:
    """Every named plan, or those given, on every distinct placement, built but not yet priced."""
    candidates = []
    links = cluster_to_yaml(cluster)
    has_experts = any(tensor.rows for tensor in blocks.graph.tensors.values())
    listed = library(cluster.num_devices, max_micro=max_micro, experts=has_experts) if names is None else names
    for named in listed:
        axes = {name: size for name, size in axis_sizes(named).items() if size > 1} or {"dp": 1}
        for placement in enumerate_placements(cluster.level_counts, axes):
            name, where = str(named), str(placement)
            try:
                plan = named_plan(blocks, named, batch=dict(batch), placement=placement)
                plan = replace(plan, cluster=links)
                program = build_program(blocks, plan)
                candidates.append(Candidate(name=name, placement=where, plan=plan, program=program))
            except (PlanError, LayoutError) as error:
                candidates.append(Candidate(name=name, placement=where, refused=error.what))
    return tuple(candidates)


def price_plans(
    candidates: Sequence[Candidate], prices: Prices, *, progress: Callable[[int, int], None] | None = None
) -> tuple[Candidate, ...]:
    """Candidates with their timelines, fastest first; those that do not fit into memory behind, the refused last."""
    priced, limit = [], prices.cluster.device.memory_bytes
    for i, candidate in enumerate(candidates):
        timeline = simulate(candidate.program, prices) if candidate.program is not None else None
        found = replace(candidate, timeline=timeline)
        priced.append(replace(found, fits=found.memory_bytes <= limit))
        if progress is not None:
            progress(i + 1, len(candidates))
    return tuple(sorted(priced, key=lambda c: (c.timeline is None, not c.fits, c.step_seconds, c.label)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyPlans:
    """Ranked candidates, of which the best are measured; in how many rounds, and how many runs that took."""

    ranked: tuple[Candidate, ...]
    num_rounds: int
    num_measured: int


def plan_lazily(
    candidates: Sequence[Candidate],
    prices_of: Callable[[], Prices],
    measure: Callable[[Sequence[Program]], int],
    *,
    num_best: int = 3,
    progress: Callable[[int, int], None] | None = None,
) -> LazyPlans:
    """Rank, measure what the best `num_best` plans use, and rank again until they are all measured.

    `prices_of()` gives prices from all that is known at that time. `measure(programs)` measures what these programs use
    and is not known, and returns how many runs that were. A program is given to it once, so there are at most as many
    rounds as candidates.
    """
    measured: set[int] = set()
    num_rounds = num_measured = 0
    while True:
        ranked = price_plans(candidates, prices_of(), progress=progress)
        best = [c.program for c in ranked if c.program is not None and c.timeline is not None][:num_best]
        todo = [program for program in best if id(program) not in measured]
        if not todo:
            return LazyPlans(ranked=ranked, num_rounds=num_rounds, num_measured=num_measured)
        num_measured += measure(todo)
        num_rounds += 1
        measured.update(map(id, todo))
