"""What an order comes to: when every call begins and ends, given the seconds of every stage's phases.

A call begins when its group is free and what it needs has arrived:

    forward(s, m)           forward(s − 1, m)
    input-gradient(s, m)    input-gradient(s + 1, m) and forward(s, m)    (a backward is one with its weight-gradient)
    weight-gradient(s, m)   input-gradient(s, m)

A call of a shared stage begins when it could on all groups that share it, and what it makes comes from all of them.

Seconds may be any numbers: with whole ones or fractions every figure is exact.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from planloom.errors import PlanError
from planloom.plan.orders import Call, Orders, Phase, sharers

Seconds = Any
"""int, Fraction or float: whatever was given, added and compared."""
Piece = tuple[int, int, bool]
"""(stage, micro-batch, whether it is the backward's)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of a stage's phases on one micro-batch, and of the way to the next group."""

    forward: Seconds = 1
    input_gradient: Seconds = 1
    weight_gradient: Seconds = 1
    exchange: Seconds = 0

    def of(self, phase: Phase) -> Seconds:
        if phase == "forward":
            return self.forward
        if phase == "backward":
            return self.input_gradient + self.weight_gradient
        return self.input_gradient if phase == "input-gradient" else self.weight_gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedCall:
    """A call with its place in time."""

    call: Call
    start: Seconds
    stop: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedOrders:
    """All calls in time; `held`: for every group the most micro-batches of a stage whose activations it holds."""

    groups: tuple[tuple[TimedCall, ...], ...]
    held: tuple[int, ...]

    @property
    def seconds(self) -> Seconds:
        return max((calls[-1].stop for calls in self.groups if calls), default=0)

    @property
    def busy_seconds(self) -> Seconds:
        return sum(timed.stop - timed.start for calls in self.groups for timed in calls)

    @property
    def bubble(self) -> Seconds:
        """The share of all groups' time in which they wait."""
        whole = self.seconds * len(self.groups)
        if not whole:
            return 0
        idle = whole - self.busy_seconds
        return idle / whole if isinstance(whole, float) else Fraction(idle, 1) / whole


def needs(call: Call, num_stages: int) -> tuple[Piece, ...]:
    """What must be done before a call."""
    if call.phase == "forward":
        return ((call.stage - 1, call.micro, False),) if call.stage else ()
    if call.phase == "weight-gradient":
        return ((call.stage, call.micro, True),)
    before = ((call.stage, call.micro, False),)
    return (*before, (call.stage + 1, call.micro, True)) if call.stage + 1 < num_stages else before


def makes(call: Call) -> Piece | None:
    """What others wait for; nobody waits for weight-gradients."""
    return None if call.phase == "weight-gradient" else (call.stage, call.micro, call.phase != "forward")


def time_orders(orders: Orders, times: Sequence[StageTimes]) -> TimedOrders:
    """When every call of valid orders begins and ends; an order that cannot be carried out is refused."""
    num_stages, num_calls = len(times), sum(map(len, orders))
    done: dict[Piece, tuple[Seconds, int]] = {}
    timed: list[list[TimedCall]] = [[] for _ in orders]
    at, free = [0] * len(orders), [0] * len(orders)
    waiting: dict[Piece, list[int]] = {}
    shared, met = sharers(orders), dict[Call, dict[int, Seconds]]()
    ready, count = list(range(len(orders))), 0
    while ready:
        group = ready.pop()
        order = orders[group]
        while at[group] < len(order):
            call = order[at[group]]
            start, missing = free[group], None
            for piece in needs(call, num_stages):
                found = done.get(piece)
                if found is None:
                    missing = piece
                    break
                arrived = found[0] + (times[piece[0]].exchange if found[1] != group else 0)
                start = max(start, arrived)
            if missing is not None:
                waiting.setdefault(missing, []).append(group)
                break
            sharing: Sequence[int] = shared.get(call.stage, ())
            if sharing:
                met.setdefault(call, {})[group] = start
                if len(met[call]) < len(sharing):
                    break
                start = max(met[call].values())
                ready += [other for other in sharing if other != group]
            stop = start + times[call.stage].of(call.phase)
            for member in sharing or (group,):
                free[member] = stop
                timed[member].append(TimedCall(call=call, start=start, stop=stop))
                at[member] += 1
                count += 1
            made = makes(call)
            if made is not None:
                done[made] = (stop, -1 if sharing else group)
                ready += waiting.pop(made, ())
    if count < num_calls:
        refuse_stuck(orders, at, num_stages, done)
    return TimedOrders(groups=tuple(map(tuple, timed)), held=tuple(most_held(order) for order in orders))


def refuse_stuck(orders: Orders, at: Sequence[int], num_stages: int, done: object) -> None:
    """Say what every group waits for."""
    stuck = []
    for group, order in enumerate(orders):
        if at[group] < len(order):
            call = order[at[group]]
            lacking = [piece for piece in needs(call, num_stages) if piece not in done]  # type: ignore[operator]
            waits_for = "the others that share the stage"
            if lacking:
                stage, _, is_back = lacking[0]
                waits_for = f"the {'backward' if is_back else 'forward'} of stage {stage}"
            stuck.append(
                f"group {group} at {call.phase} of stage {call.stage}, micro-batch {call.micro}, waits for {waits_for}"
            )
    raise PlanError(
        "the order cannot be carried out: its calls wait for each other in a cycle",
        given="; ".join(stuck[:4]) + (" …" if len(stuck) > 4 else ""),
        required="an order in which every call comes after what it needs",
        todo="call forwards in the order of stages, backwards in the opposite one, each after its forward",
    )


def most_held(order: Sequence[Call]) -> int:
    """The most forwards whose backward, or weight-gradient where that is apart, is yet to come.

    A stage that is called forward only keeps nothing.
    """
    ends = {"backward": -1, "weight-gradient": -1, "forward": 1, "input-gradient": 0}
    keeping = {call.stage for call in order if call.phase in ("backward", "weight-gradient")}
    if not keeping:
        return min(1, len(order))  # nothing is kept
    held = most = 0
    for call in order:
        held += ends[call.phase] if call.stage in keeping else 0
        most = max(most, held)
    return most
