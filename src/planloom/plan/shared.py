"""Orders with stages that several groups share: a large embedding and head on all devices, layers on disjoint ones.

A call of a shared stage is one of every group that shares it, and a rendezvous: its collectives begin when all have
come to it. `interlaced` (SuperScaler, Lin 2024) therefore works in rounds. G groups hold one stage of layers each; the
first stage (embeddings) and the last (head and loss) are shared by all. In a round every group takes the forward of one
micro-batch and the backward of another: groups of even number the forward first, of odd number the backward. So in
round r, with a = ⌈G / 2⌉, group g takes

    forward of micro-batch r − ⌊g / 2⌋, which the group before has taken in the last round, or first in this one
    backward of micro-batch r − a − G + 1 + g, which the group behind has taken in the last round

and none waits for another if a forward takes no longer than a backward. Between rounds all take part in

    the embedding's backward of micro-batch r − a − G; the head, both ways, of r − a; the embedding's forward of r

each of which the last round has made ready. With equal stages M micro-batches take (M + G − 1)(F + B) and the shared
stages' seconds, if G is even: the bubble of 1F1B, though no group computes a whole embedding or head. The first group
holds the activations of 3 G / 2 micro-batches (rounded up), under 1F1B of G: there, a forward and a backward of
neighbours follow each other inside what is one round here, and all others would wait for both.
"""

from collections.abc import Callable

from planloom.errors import PlanError
from planloom.plan.order_checks import sends_may_lag
from planloom.plan.orders import Call, Orders, backward, forward, sharers
from planloom.plan.timing import StageTimes, TimedCall, time_orders

_PASSING = ("backward", "input-gradient")


def interlaced(num_stages: int, num_micro: int) -> Orders:
    """1F1B in rounds, the shared first and last stage between them."""
    groups = num_stages - 2
    if groups < 1:
        raise PlanError(
            "an interlaced pipeline has a shared stage before and one behind those of its groups",
            given=f"{num_stages} stages",
            required="three stages or more: embeddings, one or more of layers, head and loss",
        )
    turn = (groups + 1) // 2
    orders: list[list[Call]] = [[] for _ in range(groups)]
    for r in range(num_micro + turn + groups):
        between = [backward(0, r - turn - groups), forward(groups + 1, r - turn)]
        between += [backward(groups + 1, r - turn), forward(0, r)]
        for g, order in enumerate(orders):
            own = [forward(g + 1, r - g // 2), backward(g + 1, r - turn - groups + 1 + g)]
            calls = [*between, *(own if g % 2 == 0 else reversed(own))]
            order += [call for call in calls if 0 <= call.micro < num_micro]
    return tuple(map(tuple, orders))


def find_lags(orders: Orders, num_stages: int) -> Callable[[int, int], int]:
    """(stage that makes cotangents, stage that takes them) → after how many micro-batches a send is awaited; or 0."""
    if sharers(orders):
        return cotangent_lags(orders, num_stages)
    lag = int(sends_may_lag(orders, num_stages))
    return lambda source, target: lag


def cotangent_lags(orders: Orders, num_stages: int) -> Callable[[int, int], int]:
    """(stage that makes cotangents, stage that takes them) → after how many micro-batches a send may be awaited.

    The least number for which, with unit times, the receiver has begun the call before the one that needs the
    cotangent strictly before the sender would await it: then nobody waits, and there is no cycle. 0: there is none.
    """
    timed = time_orders(orders, [StageTimes()] * num_stages).groups
    shared, start, before = sharers(orders), dict[tuple[int, int, int], float](), dict[tuple[int, int, int], float]()
    for group, calls in enumerate(timed):
        for at, later in enumerate(calls):
            if later.call.phase in _PASSING:
                place = (later.call.stage, later.call.micro, group)
                start[place], before[place] = later.start, _previous(calls, at).start

    def callers(stage: int, micro: int) -> list[tuple[int, int, int]]:
        groups = shared.get(stage, range(len(orders)))
        return [place for group in groups if (place := (stage, micro, group)) in start]

    def lag(source: int, target: int) -> int:
        micros = sorted({micro for stage, micro, _ in start if stage == source})
        for least in range(1, len(micros)):
            pairs = [
                (sender, receiver)
                for micro in micros[least:]
                for sender in callers(source, micro)
                for receiver in callers(target, micro - least)
            ]
            if all(before[receiver] < start[sender] for sender, receiver in pairs):
                return least
        return 0

    return lag


def _previous(calls: tuple[TimedCall, ...], at: int) -> TimedCall:
    return calls[max(0, at - 1)]
