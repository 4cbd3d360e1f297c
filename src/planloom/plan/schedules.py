"""The ready-made schedules by name, and orders from a name or from a user's own function."""

from collections.abc import Mapping
from inspect import signature
from types import MappingProxyType

from planloom.errors import PlanError
from planloom.plan.folded import chimera, dualpipe_v, zero_bubble_v
from planloom.plan.orders import (
    OrderFunction,
    Orders,
    gpipe,
    inference,
    interleaved,
    k_forwards_one_backward,
    looped,
    one_forward_one_backward,
    zero_bubble_h1,
)
from planloom.plan.shared import interlaced

ORDERS: Mapping[str, OrderFunction] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_forward_one_backward,
        "interleaved": interleaved,
        "looped": looped,
        "zb-h1": zero_bubble_h1,
        "zb-v": zero_bubble_v,
        "dualpipe-v": dualpipe_v,
        "chimera": chimera,
        "inference": inference,
    }
)
SHARED_ORDERS: Mapping[str, OrderFunction] = MappingProxyType({"interlaced": interlaced})
"""With stages that all groups share: plans for them say which (`plan.families`)."""
RECYCLED_ORDERS: Mapping[str, OrderFunction] = MappingProxyType({"3f1b": k_forwards_one_backward})
"""For models that run several times and are differentiated through the last time only (`plan.families`)."""
_ALL: Mapping[str, OrderFunction] = MappingProxyType({**ORDERS, **SHARED_ORDERS, **RECYCLED_ORDERS})
OTHER_NAMES = {"zb": "zb-h1", "zbv": "zb-v", "breadth-first": "looped"}
_FOLDED = ("zb-v", "dualpipe-v")


def schedule_name(text: str) -> str:
    """The name of a schedule in full."""
    name = OTHER_NAMES.get(text, text)
    if name not in _ALL:
        raise PlanError(
            f"no schedule is named {text!r}",
            given=text,
            required=f"one of {sorted(_ALL)}",
            todo="or give the calls of every device group: Draft.order(…, orders=…)",
        )
    return name


def takes_several(schedule: str) -> bool:
    """May the number of stages a device group be chosen?"""
    return "stages_per_group" in signature(_ALL[schedule]).parameters and schedule != "gpipe"


def num_passes(schedule: str, chosen: int = 0) -> int:
    """How often a micro-batch goes through all groups as one sequence of stages: of one pass one says how many."""
    return stages_per_group(schedule, chosen) if schedule in RECYCLED_ORDERS else 1


def stages_per_group(schedule: str, chosen: int = 0) -> int:
    """Stages that a schedule puts on a device group: `chosen`, where it may be; else two or one."""
    if takes_several(schedule):
        default = signature(_ALL[schedule]).parameters["stages_per_group"].default
        return chosen or int(default)
    fixed = 2 if schedule in _FOLDED else 1
    if chosen and chosen != fixed:
        raise PlanError(
            f"schedule {schedule} has {fixed} stage{'s' * (fixed > 1)} a device group",
            given=f"{chosen} a group",
            required=f"{fixed}, or one of {sorted(name for name in _ALL if takes_several(name))}",
        )
    return fixed


def orders_of(schedule: str | OrderFunction, num_stages: int, num_micro: int, *, per_group: int = 0) -> Orders:
    """The orders of a schedule, by name or by function; `per_group`: stages a device group, if it is to be chosen."""
    if num_stages < 1 or num_micro < 1:
        raise PlanError(
            "a schedule needs stages and micro-batches",
            given=f"{num_stages} stages, {num_micro} micro-batches",
            required="one or more of each",
        )
    function = _ALL[schedule_name(schedule)] if isinstance(schedule, str) else schedule
    if per_group and "stages_per_group" in signature(function).parameters:
        return function(num_stages, num_micro, stages_per_group=per_group)
    return function(num_stages, num_micro)


def home_groups(orders: Orders, num_stages: int) -> tuple[int, ...]:
    """For every stage the group that calls it on the first micro-batch: where its parameters live."""
    homes = {call.stage: group for group, order in enumerate(orders) for call in order if call.micro == 0}
    return tuple(homes.get(stage, 0) for stage in range(num_stages))
