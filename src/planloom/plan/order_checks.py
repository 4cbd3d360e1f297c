"""Is an order valid? Every piece once, in its place, after what it needs; and held micro-batches within a bound.

pieces         every stage calls, for every micro-batch, forward and backward, or forward, input-gradient and
               weight-gradient; or forwards only: all of them, for inference, or the first ones, if nothing in them
               carries a cotangent
places         the calls of one stage and micro-batch are on one device group, whose mesh is like the stage's own; or,
               of a shared stage, on every group that shares it, and all groups come to them in one order
dependencies   the calls can be carried out group by group in their order (`timing`): no cycle
rendezvous     and so they can if a send blocks until it is received: `sends_may_lag` says whether a group may
               await its last cotangent's send when it makes the next, or must leave it to the end of the step
memory         no group holds the activations of more micro-batches and stages than a bound that was given
"""

from collections.abc import Mapping, Sequence, Set

from planloom.errors import PlanError
from planloom.plan.orders import Call, Orders, sharers, without_backward
from planloom.plan.timing import Piece, StageTimes, makes, most_held, needs, refuse_stuck, time_orders

_PASSING = ("backward", "input-gradient")
_WHOLE = ({"forward", "backward"}, {"forward", "input-gradient", "weight-gradient"})


def require_orders(
    orders: Orders,
    num_stages: int,
    num_micro: int,
    *,
    max_held: int | None = None,
    detached: Set[int] = frozenset(),
) -> None:
    """Refuse orders that are not valid, with the reason; `detached`: the stages in which nothing has a cotangent."""
    _require_pieces(orders, num_stages, num_micro)
    _require_backwards(orders, detached)
    carry_out(orders, num_stages, with_lag=False)
    if max_held is not None:
        require_held(orders, max_held)


def require_held(orders: Orders, max_held: int) -> None:
    for group, order in enumerate(orders):
        if most_held(order) > max_held:
            raise PlanError(
                f"device group {group} would hold the activations of {most_held(order)} micro-batches and stages",
                given=shown(order),
                required=f"at most {max_held} at a time",
                todo="call backwards earlier, as 1f1b does, or allow more",
            )


def _require_pieces(orders: Orders, num_stages: int, num_micro: int) -> None:
    homes: dict[tuple[int, int], int] = {}
    phases: dict[tuple[int, int, int], list[str]] = {}
    shared = sharers(orders)
    for group, order in enumerate(orders):
        for call in order:
            piece = (call.stage, call.micro)
            if not (0 <= call.stage < num_stages and 0 <= call.micro < num_micro):
                raise PlanError(
                    f"device group {group} calls what is not there",
                    given=f"{call.phase} of stage {call.stage}, micro-batch {call.micro}",
                    required=f"stages 0 to {num_stages - 1}, micro-batches 0 to {num_micro - 1}",
                )
            if homes.setdefault(piece, group) != group and call.stage not in shared:
                raise PlanError(
                    f"stage {call.stage} has micro-batch {call.micro} on two device groups",
                    given=f"{call.phase} on group {group}, another call on group {homes[piece]}",
                    required="all calls of a stage and micro-batch on one group: what its forward saved is there",
                )
            phases.setdefault((*piece, group), []).append(call.phase)
    forward_only = without_backward(orders)
    for stage in range(num_stages):
        for micro, group in ((m, g) for m in range(num_micro) for g in shared.get(stage, (homes.get((stage, m), 0),))):
            found = phases.get((stage, micro, group), [])
            if found == ["forward"] and stage in forward_only:
                continue
            if len(found) != len(set(found)) or set(found) not in _WHOLE:
                raise PlanError(
                    f"the order of stage {stage} does not call every phase of every micro-batch once"
                    + (
                        f" on every group that shares it ({', '.join(map(str, shared[stage]))})"
                        if stage in shared
                        else ""
                    ),
                    given=f"of micro-batch {micro}: {', '.join(found) or 'nothing'}; group {group} calls "
                    f"{shown(orders[group]) if orders else 'nothing'}",
                    required=f"forward and backward (or input-gradient and weight-gradient) of {num_micro} "
                    "micro-batches",
                )


def _require_backwards(orders: Orders, detached: Set[int]) -> None:
    """Stages that are called forward only are those through which no cotangent passes; or the order trains nothing."""
    forward_only = without_backward(orders)
    with_backward = {call.stage for order in orders for call in order} - forward_only
    for stage in sorted(forward_only) if with_backward else ():
        if stage not in detached or min(with_backward) < stage:
            has = "it has gradients" if stage not in detached else f"stage {min(with_backward)} before it has one"
            raise PlanError(
                f"stage {stage} is called forward only, but {has}",
                given=f"no backward of stages {', '.join(map(str, sorted(forward_only)))}",
                required="forwards alone of the first stages only, and of stages in which nothing carries a cotangent: "
                f"{', '.join(map(str, sorted(detached))) or 'none here'}",
                todo="call a backward of every micro-batch in this stage, or cut the stages where the model is detached",
            )


def carry_out(orders: Orders, num_stages: int, *, with_lag: bool) -> None:
    """Go through all groups' calls as far as each comes; refuse what stops before the end.

    `with_lag`: a group that makes a cotangent first waits until its stage's previous one is being received, which is
    so when the receiver has come to the call before the one that needs it.
    """
    done: set[Piece] = set()
    at = [0] * len(orders)
    place = _places(orders) if with_lag else {}
    shared, met = sharers(orders), dict[Call, set[int]]()
    moved = True
    while moved:
        moved = False
        for group, order in enumerate(orders):
            first = at[group]
            while at[group] < len(order):
                call = order[at[group]]
                if any(piece not in done for piece in needs(call, num_stages)):
                    break
                if with_lag and not _is_received(call, group, place, at):
                    break
                if call.stage in shared:
                    met.setdefault(call, set()).add(group)
                    if len(met[call]) < len(shared[call.stage]):
                        break
                made = makes(call)
                if made is not None:
                    done.add(made)
                at[group] += 1
            moved = moved or at[group] > first
    if any(position < len(order) for position, order in zip(at, orders, strict=True)):
        if with_lag:
            raise PlanError("a send would block for ever", given="a cotangent's send", required="a receiver")
        refuse_stuck(orders, at, num_stages, done)


def sends_may_lag(orders: Orders, num_stages: int) -> bool:
    """May every cotangent's send be awaited when the stage makes its next one?

    Else some group would wait for ever; or, with unit times, for a receiver that is still busy with something else.
    """
    try:
        carry_out(orders, num_stages, with_lag=True)
    except PlanError:
        return False
    timed, place = time_orders(orders, [StageTimes()] * num_stages).groups, _places(orders)
    for group, calls in enumerate(timed):
        for at, later in enumerate(calls):
            call = later.call
            mine = place.get((call.stage, call.micro - 1, True))
            if call.stage == 0 or call.phase not in _PASSING or mine is None or mine[0] != group or mine[1] > at:
                continue
            receiver, position = place.get((call.stage - 1, call.micro - 1, True), (group, 0))
            if receiver != group and timed[receiver][max(0, position - 1)].start > later.start:
                return False
    return True


def _places(orders: Orders) -> Mapping[Piece, tuple[int, int]]:
    """Where every cotangent is made: (group, place in its order). A stage that is called forward only takes none."""
    return {
        made: (group, i)
        for group, order in enumerate(orders)
        for i, call in enumerate(order)
        if (made := makes(call)) is not None and made[2]
    }


def _is_received(call: Call, group: int, place: Mapping[Piece, tuple[int, int]], at: Sequence[int]) -> bool:
    """Has the receiver of the stage's previous cotangent started to receive it?"""
    if call.phase not in _PASSING or call.stage == 0:
        return True
    mine = place.get((call.stage, call.micro - 1, True))
    if mine is None or mine[0] != group or mine[1] > at[group]:
        return True  # not made here, or not yet: nothing is in flight
    receiver, position = place.get((call.stage - 1, call.micro - 1, True), (group, 0))
    return receiver == group or at[receiver] >= position - 1


def shown(calls: Sequence[Call]) -> str:
    return " ".join(map(str, calls[:40])) + (" …" if len(calls) > 40 else "")
