"""Schedules of the search: what an order of calls makes of the seconds and bytes of its stages.

With μ_s the seconds of stage s for one micro-batch, forward and backward, σ_g what device group g does once a step, p
groups of v stages each and m micro-batches,

    step = Σ_s μ_s / v + (m - 1 / v) · max_g Σ_(s in g) μ_s + max_g σ_g + the exchanges at all cuts,

which for equal stages is the closed form of `plan.orders`: m micro-batches and a bubble of (p - 1) / v of one.

    1f1b         v = 1           stage s keeps min(p - s, m) micro-batches
    interleaved  v = 2 or 4      of every stage as many as its order holds at a time; p divides m
    zb-h1        v = 1           every stage keeps min(p, m); p ≤ m
    gpipe        v = 1           all m
    looped       v = 2 or 4      all m

ZB-H1 fills the drain with weight-gradients: its bubble is (p - 1)(F + I - W), 2 (p - 1) W less than 1F1B's. So of a
block's weight-gradient the share 2 (p - 1) / (m + p - 1) costs nothing, and with that the sum above is its closed form.
What reads its cotangent twice, zero3, does not go with it, and its runs are not compiled: where runs are, it is looked
at only if it is pinned.

By these formulas GPipe and looped take as long as 1F1B and interleaved, and keep more: they are never better, and are
looked at only if they are pinned.

Several stages a group share its memory and its pace, and the bound that knows this is far from what is found where
memory binds (Llama-3-405B on 1,024 devices: 13 %). So unless they are pinned, they are no part of the space whose
bound is proven, but tried with the best plans of that space.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from planloom.errors import PlanError
from planloom.plan import Orders
from planloom.plan.schedules import orders_of, schedule_name, stages_per_group, takes_several

SEVERAL = (2, 4)
"""Stages a device group, where there may be several."""
MOST_STAGES = 32
"""Pipelines with several stages a group have no more stages."""
_ROUNDS = 4
"""So many rounds of micro-batches hold as many activations as any number of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule of `plan.schedules` with so many stages a device group."""

    name: str = "1f1b"
    stages_per_group: int = 1

    def __str__(self) -> str:
        return f"{self.name},chunks={self.stages_per_group}" if self.stages_per_group > 1 else self.name

    @property
    def is_split(self) -> bool:
        """Are input- and weight-gradients apart?"""
        return self.name == "zb-h1"

    @property
    def latency(self) -> float:
        """How often all stages' seconds count by themselves, beside the pace."""
        return 1 / self.stages_per_group

    def num_stages(self, num_groups: int) -> int:
        return num_groups * self.stages_per_group

    def is_possible(self, num_groups: int, num_micro: int) -> bool:
        if self.name == "interleaved":
            return num_micro % num_groups == 0
        return not self.is_split or num_micro >= num_groups

    def weight(self, num_groups: int, num_micro: int) -> float:
        """How often one of equal groups' seconds a micro-batch count."""
        return num_micro + (num_groups - 1) * self.latency

    def hidden(self, num_groups: int, num_micro: int) -> float:
        """The share of weight-gradients that fills the drain."""
        return 2 * (num_groups - 1) / (num_micro + num_groups - 1) if self.is_split else 0.0

    def least_weight(self, num_groups: int, num_micro: int) -> float:
        """No less than so often, even if there were nothing but weight-gradients."""
        return self.weight(num_groups, num_micro) * max(0.0, 1 - self.hidden(num_groups, num_micro))

    def kept(self, num_groups: int, num_micro: int) -> tuple[int, ...]:
        """How many micro-batches' activations each stage keeps."""
        num_stages = self.num_stages(num_groups)
        if self.name == "1f1b":
            return tuple(min(num_stages - s, num_micro) for s in range(num_stages))
        if self.name in ("gpipe", "looped"):
            return (num_micro,) * num_stages
        if self.is_split:
            return (min(num_groups, num_micro),) * num_stages
        return _held(self, num_stages, min(num_micro, _ROUNDS * num_groups))

    def orders(self, num_groups: int, num_micro: int) -> Orders:
        per_group = self.stages_per_group if self.stages_per_group > 1 else 0
        return orders_of(self.name, self.num_stages(num_groups), num_micro, per_group=per_group)


ONE_FORWARD_ONE_BACKWARD = Schedule()


@lru_cache(maxsize=256)
def _held(schedule: Schedule, num_stages: int, num_micro: int) -> tuple[int, ...]:
    """Of every stage the most forwards whose backward is yet to come, by its order."""
    most = [0] * num_stages
    for order in schedule.orders(num_stages // schedule.stages_per_group, num_micro):
        held = dict.fromkeys((call.stage for call in order), 0)
        for call in order:
            held[call.stage] += 1 if call.phase == "forward" else -1
            most[call.stage] = max(most[call.stage], held[call.stage])
    return tuple(most)


TRIED = tuple(Schedule(name="interleaved", stages_per_group=v) for v in SEVERAL)
"""What is tried with the best plans, if no schedule is pinned."""


def schedules_to_search(pinned: str | None, *, is_compiled: bool) -> tuple[Schedule, ...]:
    """What there is to choose from, 1F1B first; or of a pinned schedule every number of stages a group."""
    if pinned is None:
        return (ONE_FORWARD_ONE_BACKWARD, *(() if is_compiled else (Schedule(name="zb-h1"),)))
    name = schedule_name(pinned)
    if name not in ("1f1b", "zb-h1", "gpipe", "interleaved", "looped"):
        raise PlanError(
            f"the search does not know what schedule {name} takes",
            given=pinned,
            required="1f1b, zb-h1, interleaved, gpipe or looped: those with a closed form",
            todo="leave it open, or name a whole plan: --named",
        )
    counts: Sequence[int] = SEVERAL if takes_several(name) else (stages_per_group(name),)
    return tuple(Schedule(name=name, stages_per_group=v) for v in counts)


def schedule_of(name: str, num_stages: int, num_groups: int) -> Schedule:
    """That of a finished plan; of a schedule that is none of these, what 1F1B would take."""
    per_group = num_stages // num_groups
    if name in ("1f1b", "zb-h1", "gpipe", "interleaved", "looped"):
        return Schedule(name=name, stages_per_group=per_group)
    if per_group > 1:
        raise PlanError(
            f"a plan with schedule {name!r} and several stages a device group has no estimate",
            given=f"{num_stages} stages on {num_groups} groups",
            required="1f1b, zb-h1, interleaved, gpipe or looped",
            todo="use planloom simulate",
        )
    return ONE_FORWARD_ONE_BACKWARD
