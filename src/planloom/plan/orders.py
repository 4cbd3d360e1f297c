"""Orders: for every device group the sequence of its calls, from (number of stages, number of micro-batches).

    Call(stage, phase, micro)    one phase of one stage on one micro-batch

A new schedule is one short function that returns a list of calls a device group. Which group calls a stage is where
the stage lives: with several stages a group its stages are *virtual*; a stage that two groups call, each on other
micro-batches, has two homes; one whose every piece several groups call is *shared*: each calls its share (`shared`).
The backward is one call, or two: `input-gradient` passes the cotangent on to the stage before, `weight-gradient` may
come at any time later and fills what would be a bubble.

The schedules here are loops; those in `folded` are found by carrying them out. What makes an order valid is in
`order_checks`, what it comes to in `timing`.

    S stages, G groups, M micro-batches; F, I, W seconds of a stage's forward, input- and weight-gradient, B = I + W

    schedule      stages a group   bubble of a group, equal stages and free communication      activations held, most
    gpipe         1                (G − 1)(F + B)                                              M
    1f1b          1                (G − 1)(F + B)                                              G
    interleaved   v                (G − 1)(F + B), of F and B v times smaller                  G·v + G − 1
    looped        v                (G − 1)(F + B), likewise                                    M·v
    zb-h1         1                (G − 1)(F + I − W) where F = I = W, M ≥ G                   G
    zb-v          2                less than 2 G F where F = I = W, M ≥ 2 G, whatever M        2 G
    dualpipe-v    2                no closed form here; M ≥ 2 G                                2 G + 1
    chimera       2 (one a copy)   no closed form here; M and G even                           G + 2
    interlaced    1 and two shared (G − 1)(F + B) beside the shared stages' seconds            3 G / 2, of layers
    inference     1                (G − 1) F                                                   none
    3f1b          k (3)            (G − 1)(F + B) where M ≥ G: k forwards and one B each       less than 2 G
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from planloom.errors import PlanError

Phase = Literal["forward", "backward", "input-gradient", "weight-gradient"]
_LETTERS = {"forward": "F", "backward": "B", "input-gradient": "I", "weight-gradient": "W"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a stage's phase on a micro-batch."""

    phase: Phase
    micro: int
    stage: int

    def __str__(self) -> str:
        return f"{_LETTERS[self.phase]}{self.micro}"


Orders = tuple[tuple[Call, ...], ...]
OrderFunction = Callable[..., Orders]
"""(number of stages, number of micro-batches) → the calls of every device group; `stages_per_group` where it may be
chosen."""


def sharers(orders: Orders) -> dict[int, tuple[int, ...]]:
    """Shared stages: those of which several groups call the same piece; with all groups that call any."""
    callers: dict[int, set[int]] = {}
    for group, order in enumerate(orders):
        for stage in {call.stage for call in order}:
            callers.setdefault(stage, set()).add(group)
    several = {stage for stage, groups in callers.items() if len(groups) > 1}
    calls: dict[int, list[Call]] = {stage: [] for stage in several}
    for order in orders if several else ():
        for call in order:
            if call.stage in several:
                calls[call.stage].append(call)
    return {stage: tuple(sorted(callers[stage])) for stage in several if len(set(calls[stage])) < len(calls[stage])}


def forward(stage: int, micro: int) -> Call:
    return Call(phase="forward", micro=micro, stage=stage)


def backward(stage: int, micro: int) -> Call:
    return Call(phase="backward", micro=micro, stage=stage)


def input_gradient(stage: int, micro: int) -> Call:
    return Call(phase="input-gradient", micro=micro, stage=stage)


def weight_gradient(stage: int, micro: int) -> Call:
    return Call(phase="weight-gradient", micro=micro, stage=stage)


def gpipe(num_stages: int, num_micro: int) -> Orders:
    """All forwards, then all backwards."""
    return looped(num_stages, num_micro, stages_per_group=1)


def one_forward_one_backward(num_stages: int, num_micro: int) -> Orders:
    """1F1B: fill the pipeline, alternate, drain: at most (stages − s) micro-batches are in flight on stage s."""
    orders = []
    for stage in range(num_stages):
        forwards = [forward(stage, m) for m in range(num_micro)]
        backwards = [backward(stage, m) for m in range(num_micro)]
        orders.append(_alternating(forwards, backwards, warm_up=num_stages - stage - 1))
    return tuple(orders)


def interleaved(num_stages: int, num_micro: int, *, stages_per_group: int = 2) -> Orders:
    """1F1B over virtual stages (Megatron-LM, Narayanan 2021): group g holds the stages g, g + G, g + 2G, …

    As many micro-batches as there are groups go through one stage of a group, then through its next. Where the number
    of micro-batches is no multiple of the groups, some of these rounds are larger: smaller ones would wait in a cycle.
    """
    groups = num_groups("interleaved", num_stages, stages_per_group)
    rounds = _rounds(num_micro, groups)
    longest = max(map(len, rounds))
    orders = []
    for group in range(groups):
        stages = range(group, num_stages, groups)
        forwards = [forward(s, m) for micros in rounds for s in stages for m in micros]
        backwards = [backward(s, m) for micros in rounds for s in reversed(stages) for m in micros]
        warm_up = 2 * (groups - group - 1) + (stages_per_group - 1) * longest
        orders.append(_alternating(forwards, backwards, warm_up=warm_up if stages_per_group > 1 else warm_up // 2))
    return tuple(orders)


def looped(num_stages: int, num_micro: int, *, stages_per_group: int = 2) -> Orders:
    """Breadth-first (Lamy-Poirier 2022): all micro-batches through a group's first stage, then all through its next.

    Parameters of a stage are needed, and its gradients complete, for one stretch of time: made for ZeRO.
    """
    groups = num_groups("looped", num_stages, stages_per_group)
    orders = []
    for group in range(groups):
        stages = range(group, num_stages, groups)
        forwards = [forward(s, m) for s in stages for m in range(num_micro)]
        orders.append((*forwards, *(backward(s, m) for s in reversed(stages) for m in range(num_micro))))
    return tuple(orders)


def zero_bubble_h1(num_stages: int, num_micro: int) -> Orders:
    """ZB-H1 (Qi 2023): 1F1B whose weight-gradients come later on later stages, and fill the end of the step.

    No group holds more activations than the first one does under 1F1B.
    """
    orders = []
    for stage in range(num_stages):
        warm_up = min(num_stages - stage - 1, num_micro)
        calls = [forward(stage, m) for m in range(warm_up)]
        num_weights = 0
        for m in range(num_micro):
            if warm_up + m < num_micro:
                calls.append(forward(stage, warm_up + m))
            calls.append(input_gradient(stage, m))
            if m >= stage or warm_up + m >= num_micro:  # in the drain, every second call
                calls.append(weight_gradient(stage, num_weights))
                num_weights += 1
        calls += [weight_gradient(stage, m) for m in range(num_weights, num_micro)]
        orders.append(tuple(calls))
    return tuple(orders)


def k_forwards_one_backward(num_stages: int, num_micro: int, *, stages_per_group: int = 3) -> Orders:
    """3F1B (SuperScaler, Lin 2023) for a model that runs k times and is differentiated through the last time only.

    Group g holds stage g of every pass, g + G of the second, …; only the last pass is called backward. As many
    micro-batches as there are groups go through one pass, then through the next: the last group passes them on to the
    first as fast as that can take them. Then every group calls k forwards and a backward in turn. A group is k
    forwards, one micro-batch, ahead of the group behind it for every backward: a cotangent needs B for the way that an
    activation goes in F, and the forwards between are what the group has to do meanwhile.
    """
    groups = num_groups("3f1b", num_stages, stages_per_group)
    rounds = _rounds(num_micro, groups)
    longest = max(map(len, rounds))
    orders = []
    for group in range(groups):
        forwards = [forward(s, m) for micros in rounds for s in range(group, num_stages, groups) for m in micros]
        ahead = (stages_per_group - 1) * longest + stages_per_group * (groups - group - 1) + 1
        calls = forwards[:ahead]
        for m in range(num_micro):
            first = ahead + stages_per_group * m
            calls += [backward(num_stages - groups + group, m), *forwards[first : first + stages_per_group]]
        orders.append(tuple(calls))
    return tuple(orders)


def inference(num_stages: int, num_micro: int) -> Orders:
    """Forwards only."""
    return tuple(tuple(forward(stage, m) for m in range(num_micro)) for stage in range(num_stages))


def without_backward(orders: Orders) -> frozenset[int]:
    """The stages that are called forward only."""
    calls = {(call.stage, call.phase == "forward") for order in orders for call in order}
    return frozenset(stage for stage, is_forward in calls if is_forward and (stage, False) not in calls)


def _rounds(num_micro: int, groups: int) -> list[range]:
    """Micro-batches in rounds of as many as there are groups, or more where they do not divide."""
    count = max(1, num_micro // groups)
    return [range(i * num_micro // count, (i + 1) * num_micro // count) for i in range(count)]


def _alternating(forwards: Sequence[Call], backwards: Sequence[Call], *, warm_up: int) -> tuple[Call, ...]:
    """So many forwards, then one forward and one backward in turn, then the rest of the backwards."""
    warm_up = min(warm_up, len(forwards))
    calls = list(forwards[:warm_up])
    for ahead, back in zip(forwards[warm_up:], backwards, strict=False):
        calls += [ahead, back]
    return (*calls, *backwards[len(forwards) - warm_up :])


def num_groups(name: str, num_stages: int, stages_per_group: int) -> int:
    """Device groups of so many stages each."""
    if stages_per_group < 1 or num_stages % stages_per_group:
        raise PlanError(
            f"{num_stages} stages cannot be laid on device groups of {stages_per_group} ({name})",
            given=f"{num_stages} stages, {stages_per_group} a group",
            required=f"a multiple of {max(1, stages_per_group)} stages",
            todo="cut the model into another number of stages",
        )
    return num_stages // stages_per_group
