"""The space of a search: how many stages, which axes inside a stage, where they lie, how many micro-batches.

A *shape* is a number of stages and the sizes of the space axes inside each. An axis is of a kind that says which dims
of a block it may split:

    data    the batch, or experts; nothing only where a block has neither
    free    any dim, or none: tensor, sequence, vocabulary, expert and data parallelism, block by block

Two free axes are ATP's mesh; a data axis beside them keeps the number of strategies of a block at (dims + 1)². Free
axes have
`MAX_FREE` devices together, if not pinned to more. What the user pins narrows the space. Shapes of one search have
every size from the divisors of the number of devices, and a *candidate* is a shape on a placement (P2's matrices,
with a row for the stages) with a number of micro-batches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from planloom.blocks import BlockGraph
from planloom.cluster import Cluster
from planloom.errors import PlanError
from planloom.layout import Placement, enumerate_placements
from planloom.search.schedules import MOST_STAGES, ONE_FORWARD_ONE_BACKWARD, TRIED, Schedule, schedules_to_search

AxisKind = Literal["data", "free"]
AXES = ("dp", "tp", "tp2")
"""The names of the axes inside a stage: the data axis and two free ones."""
STAGES = "pp"
"""The name of the axis along which the stages lie."""
VARIANTS = ("chunks", "co-shard", "interlaced", "schedules", "rings", "3f1b")
"""Kinds of plans that are tried beside the space whose bound is proven (`variants`), in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPin:
    """Blocks whose name matches `pattern` and that have the dim `dim` are split along it over the axis named `axis`."""

    pattern: str
    dim: str
    axis: str

    def matches(self, block_name: str) -> bool:
        return any(fnmatchcase(block_name, part) or fnmatchcase(block_name, f"*{part}*") for part in
                   self.pattern.split("|"))  # fmt: skip


def require_pin(pin: BlockPin, blocks: BlockGraph) -> None:
    """Refuse a pin that no block and dim of the model, or no axis of the search, is named by."""
    matching = [block for block in blocks.blocks if pin.matches(block.name)]
    dims = sorted({dim.name.split(".")[0] for block in matching for dim in block.dims})
    if not matching or pin.dim.split(".")[0] not in dims or pin.axis not in AXES:
        raise PlanError(
            "a pin concerns nothing",
            given=f"{pin.pattern}={pin.dim}:{pin.axis}, which {len(matching)} blocks match",
            required=f"names of `planloom blocks`, a dim ({', '.join(dims) or 'none here'}), an axis of "
            + ", ".join(AXES),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user pins; None: open.

    `dp` is the size of the data axis, `tp` and `tp2` of the free axes; `memory_bytes`: of a device, for everything.
    `variants`: the kinds of plans that may be tried beside the proven space.
    """

    dp: int | None = None
    tp: int | None = None
    tp2: int | None = None
    pp: int | None = None
    micro: int | None = None
    schedule: str | None = None
    storage: str | None = None
    recompute: bool = True
    memory_bytes: int | None = None
    pins: tuple[BlockPin, ...] = ()
    variants: tuple[str, ...] = VARIANTS

    def __post_init__(self) -> None:
        if unknown := [kind for kind in self.variants if kind not in VARIANTS]:
            raise PlanError(
                "the search knows no such variants", given=", ".join(unknown), required=f"some of {', '.join(VARIANTS)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Stages, and the space axes of each: names, kinds and sizes, outermost first."""

    num_stages: int
    names: tuple[str, ...]
    kinds: tuple[AxisKind, ...]
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        degrees = {STAGES: self.num_stages, **dict(zip(self.names, self.sizes, strict=True))}
        return ",".join(f"{name}={size}" for name, size in degrees.items() if size > 1) or "single"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A shape on a placement, with a number of micro-batches and a schedule. The shape's stages are device groups, each
    of which the schedule may give several stages."""

    shape: Shape
    placement: Placement
    num_micro: int
    schedule: Schedule = ONE_FORWARD_ONE_BACKWARD

    def __str__(self) -> str:
        return f"{self.schedule} of {self.shape}"

    @property
    def num_stages(self) -> int:
        return self.schedule.num_stages(self.shape.num_stages)

    @property
    def kept(self) -> tuple[int, ...]:
        """How many micro-batches' activations each stage keeps."""
        return self.schedule.kept(self.shape.num_stages, self.num_micro)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Everything that a search looks at, and in words what that is."""

    shapes: tuple[Shape, ...]
    micro_batches: tuple[int, ...]
    description: str
    wishes: Wishes = field(default_factory=Wishes)
    schedules: tuple[Schedule, ...] = (ONE_FORWARD_ONE_BACKWARD,)
    max_stages: int = 1

    def schedules_of(self, num_groups: int) -> tuple[Schedule, ...]:
        """The schedules for so many device groups; for one it makes no difference."""
        return (ONE_FORWARD_ONE_BACKWARD,) if num_groups == 1 else self._having(self.schedules, num_groups)

    def tried_with(self, num_groups: int, num_micro: int) -> tuple[Schedule, ...]:
        """What is tried with the best plans, beside the space."""
        if num_groups == 1 or self.wishes.schedule is not None:
            return ()
        return tuple(s for s in self._having(TRIED, num_groups) if s.is_possible(num_groups, num_micro))

    def _having(self, schedules: Sequence[Schedule], num_groups: int) -> tuple[Schedule, ...]:
        """Those with no more stages than there may be."""
        most = min(MOST_STAGES, self.max_stages)
        return tuple(s for s in schedules if s.stages_per_group == 1 or s.num_stages(num_groups) <= most)

    def placements(self, cluster: Cluster, shape: Shape) -> tuple[Placement, ...]:
        axes = {STAGES: shape.num_stages, **dict(zip(shape.names, shape.sizes, strict=True))}
        free = [name for name, kind in zip(shape.names, shape.kinds, strict=True) if kind == "free"]
        return enumerate_placements(cluster.level_counts, axes, interchangeable=[free])


MAX_FREE = 64


def divisors(number: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def search_space(num_devices: int, *, batch: int, max_stages: int, wishes: Wishes, is_compiled: bool = False) -> Space:
    """All shapes that fill the devices and that the wishes allow; `batch`: what micro-batches divide;
    `is_compiled`: are runs compiled?"""
    shapes = []
    for pp in divisors(num_devices):
        if pp > max_stages or wishes.pp not in (None, pp):
            continue
        for dp, tp, tp2 in _sizes(num_devices // pp, wishes):
            axes = [("dp", "data", dp), ("tp", "free", tp), ("tp2", "free", tp2)]
            kept = [axis for axis in axes if axis[2] > 1] or [("dp", "data", 1)]
            names, kinds, sizes = zip(*kept, strict=True)
            shapes.append(Shape(num_stages=pp, names=names, kinds=kinds, sizes=sizes))
    if not shapes:
        given = {name: value for name in ("dp", "tp", "tp2", "pp") if (value := getattr(wishes, name)) is not None}
        raise PlanError(
            "the pinned degrees do not fill the devices",
            given=", ".join(f"{name}={value}" for name, value in given.items()) or f"{num_devices} devices",
            required=f"degrees whose product divides {num_devices}, at most {max_stages} stages",
            todo="change a degree or the number of devices",
        )
    micro = tuple(m for m in divisors(batch) if wishes.micro in (None, m))
    if not micro:
        raise PlanError(
            "the batch does not divide into that many micro-batches",
            given=f"{wishes.micro} micro-batches of a batch of {batch}",
            required=f"one of {', '.join(map(str, divisors(batch)))}",
        )
    schedules = schedules_to_search(wishes.schedule, is_compiled=is_compiled)
    if max(shape.num_stages for shape in shapes) == 1:
        schedules = (ONE_FORWARD_ONE_BACKWARD,)
    return Space(
        shapes=tuple(shapes), micro_batches=micro, description=_described(shapes, micro, schedules), wishes=wishes,
        schedules=schedules, max_stages=max_stages,
    )  # fmt: skip


def _sizes(num_devices: int, wishes: Wishes) -> Iterator[tuple[int, int, int]]:
    """Sizes of the data axis and of two free axes, of which the first is not the smaller one unless they are pinned."""
    for dp in divisors(num_devices):
        if wishes.dp not in (None, dp):
            continue
        for tp in divisors(num_devices // dp):
            tp2 = num_devices // dp // tp
            is_named = wishes.tp is not None or wishes.tp2 is not None
            if is_named and (tp != (wishes.tp or tp) or tp2 != (wishes.tp2 or (1 if wishes.tp else tp2))):
                continue
            if is_named or (tp >= tp2 and tp * tp2 <= MAX_FREE):
                yield dp, tp, tp2


def _described(shapes: Sequence[Shape], micro: Sequence[int], schedules: Sequence[Schedule]) -> str:
    stages = sorted({shape.num_stages for shape in shapes})
    return (
        f"{len(shapes)} shapes: {_listed(stages)} stages × a data axis × up to two free axes of {MAX_FREE} devices, on "
        "every placement; "
        f"{_listed(micro)} micro-batches; schedules {' / '.join(map(str, schedules))}; per block every dim on every "
        "axis; per parameter replicated, ZeRO-1, -2 or -3 over the data axis or one free axis"
    )


def _listed(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
