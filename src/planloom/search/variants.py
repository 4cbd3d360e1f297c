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
What the user pins holds for them, too. (Dynamic axial parallel needs no variant: the space has it, block by block.) A
variant has several *ways*, from fast and large to slow and small; the first that fits counts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from planloom.blocks import BlockGraph
from planloom.layout import Placement
from planloom.plan import Draft, Plan
from planloom.plan.parallel import block_work
from planloom.search.finalists import Finalist
from planloom.search.finished import candidate_of
from planloom.search.planner import Planner, promising_first
from planloom.search.space import Candidate, Shape, Wishes

BatchSpec = Mapping[str, tuple[tuple[int, ...], str]]
Way = Callable[[], Draft]

LOST = 0.02
"""Variants that could save no more of the step than this share are not tried."""


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
        return min((lost_share(finalist, self.planner.blocks) for finalist in self.finalists[:1]), default=1.0)

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


def lost_share(finalist: Finalist, blocks: BlockGraph) -> float:
    """Of the step: waiting for communication and other stages, what recomputation takes at most, and work that several
    devices do alike."""
    summary, plan = finalist.timeline.summary, finalist.plan
    assert summary is not None
    waits = sum(summary.exposed_communication.values()) / summary.step_seconds
    work = done = 0.0
    for block in blocks.blocks:
        mesh = plan.meshes[plan.stages[block.index]]
        pieces = prod(mesh.axis(axis).size for axes in plan.strategies[block.index].values() for axis in axes)
        own = block_work(blocks.graph, block)
        work, done = work + own, done + own * len(mesh.devices) / pieces
    return waits + summary.bubble + (0.25 if plan.recompute else 0.0) + 1 - work / done


def named(own: Candidate, suffix: str) -> str:
    """The name of a variant on a candidate's shape."""
    return ",".join([str(own.shape), *([f"micro={own.num_micro}"] if own.num_micro > 1 else []), suffix])


def _usual(micro: Sequence[int], num_stages: int) -> int:
    """About four micro-batches a stage; one, where there are no stages."""
    wanted = 4 * num_stages if num_stages > 1 else 1
    return min(micro, key=lambda m: (m < num_stages, abs(m - wanted), m))


def _tightest(placements: Sequence[Placement]) -> Placement:
    """The last axes at the innermost levels."""
    return max(placements, key=lambda own: [row[::-1] for row in reversed(own.matrix)])


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
