"""Schedules that are found by carrying them out: ZB-V, Chimera; and DualPipe-V, whose order is written down.

`carried_out` gives every group, whenever it is free, the first of its calls that could begin, in an order of
preference, with unit times (a backward two). A micro-batch is let into a group's first stage only while the group
holds fewer than its limit: a micro-batch that is in has room until it is out, so no limit can make the groups wait for
each other.
"""

import heapq
from collections.abc import Callable, Sequence
from itertools import count

from planloom.errors import PlanError
from planloom.plan.orders import Call, Orders, backward, forward, input_gradient, num_groups, weight_gradient
from planloom.plan.timing import Piece, makes, needs

Preference = Callable[[Call], tuple[int, ...]]
"""Calls that may begin are taken in this order, smallest first."""


def zero_bubble_v(num_stages: int, num_micro: int) -> Orders:
    """ZB-V (Qi 2024): stages go down the groups and up again, so that the last group turns each micro-batch around.

    Input-gradients first, then forwards, those of the way up before those of the way down; weight-gradients when
    nothing else can begin.
    """
    groups = num_groups("zb-v", num_stages, 2)
    pieces = [
        [
            phase(stage, m)
            for m in range(num_micro)
            for stage in (group, num_stages - 1 - group)
            for phase in (forward, input_gradient, weight_gradient)
        ]
        for group in range(groups)
    ]
    rank = {"input-gradient": 0, "forward": 1, "weight-gradient": 2}
    return carried_out(
        pieces,
        num_stages,
        prefer=lambda call: (rank[call.phase], call.micro, -call.stage if call.phase == "forward" else call.stage),
        most_held=[groups] * groups,
    )


def chimera(num_stages: int, num_micro: int) -> Orders:
    """Chimera (Li 2021): half of the micro-batches go through the groups downwards, half upwards, through copies.

    Group g holds stage g and a copy of stage G − 1 − g; the gradients of the two copies are partial sums.
    """
    if num_stages % 2 or num_micro % 2:
        raise PlanError(
            "Chimera needs an even number of stages and of micro-batches",
            given=f"{num_stages} stages, {num_micro} micro-batches",
            required="two even numbers: half of the micro-batches go each way",
            todo="add a stage or a micro-batch, or use 1f1b",
        )
    half = num_micro // 2
    pieces: list[list[Call]] = [[] for _ in range(num_stages)]
    for stage in range(num_stages):
        for m in range(num_micro):
            group = stage if m < half else num_stages - 1 - stage
            pieces[group] += [forward(stage, m), backward(stage, m)]
    return carried_out(
        pieces,
        num_stages,
        prefer=lambda call: (call.phase == "forward", call.micro % half, -call.stage, call.micro),
        most_held=[max(2, num_stages // 2 + 1)] * num_stages,
        in_turn=half,
    )


def dualpipe_v(num_stages: int, num_micro: int) -> Orders:
    """DualPipe-V (DeepSeek, Sea AI 2025): a V of stages; forwards of one way alternate with backwards of the other.

    The eight steps of its published code; a forward and a backward that it overlaps follow each other here.
    """
    groups = num_groups("dualpipe-v", num_stages, 2)
    if num_micro < 2 * groups:
        raise PlanError(
            "DualPipe-V needs two micro-batches a device group or more",
            given=f"{num_micro} micro-batches on {groups} groups",
            required=f"{2 * groups} micro-batches or more",
            todo="use more micro-batches, or zb-v",
        )
    orders = []
    for group in range(groups):
        writer = _VWriter((group, num_stages - 1 - group))
        behind = groups - group - 1
        for _ in range(2 * behind):
            writer.forward(0)
        for _ in range(group + 1):
            writer.forward(0)
            writer.forward(1)
        for _ in range(behind):
            writer.backward(1, is_split=True)
            writer.weight()
            writer.forward(1)
        for _ in range(num_micro - 2 * groups + group + 1):
            writer.forward(0)
            writer.backward(1)
            writer.forward(1)
            writer.backward(0)
        for _ in range(behind):
            writer.backward(1)
            writer.forward(1)
            writer.backward(0)
        for i in range(group + 1):
            late, is_odd = (group + 1) // 2, group % 2 == 1
            writer.backward(1, is_split=i > late or (i == late and is_odd))
            writer.backward(0, is_split=i >= late)
        for _ in range(behind):
            writer.weight()
            writer.backward(0, is_split=True)
        writer.rest()
        orders.append(tuple(writer.calls))
    return tuple(orders)


class _VWriter:
    """The calls of one group with two stages; weight-gradients that were put off come first in, first out."""

    def __init__(self, stages: tuple[int, int]) -> None:
        self.stages, self.calls = stages, list[Call]()
        self._forwards, self._backwards, self._put_off = [0, 0], [0, 0], list[tuple[int, int]]()

    def forward(self, way: int) -> None:
        self.calls.append(forward(self.stages[way], self._forwards[way]))
        self._forwards[way] += 1

    def backward(self, way: int, *, is_split: bool = False) -> None:
        stage, micro = self.stages[way], self._backwards[way]
        self.calls.append(input_gradient(stage, micro) if is_split else backward(stage, micro))
        self._put_off += [(stage, micro)] if is_split else []
        self._backwards[way] += 1

    def weight(self) -> None:
        self.calls.append(weight_gradient(*self._put_off.pop(0)))

    def rest(self) -> None:
        while self._put_off:
            self.weight()


def carried_out(
    pieces: Sequence[Sequence[Call]],
    num_stages: int,
    *,
    prefer: Preference,
    most_held: Sequence[int],
    in_turn: int = 0,
) -> Orders:
    """The order in which groups would call their pieces if each took what it prefers of what can begin.

    `most_held`: micro-batches that a group lets in, each until its last call; `in_turn`: with copies, micro-batches
    from this one on are counted by themselves.
    """
    state = _Groups(pieces, num_stages, prefer, most_held, in_turn)
    moments: list[tuple[int, int, int, Call | None]] = [
        (0, i, group, None) for i, group in enumerate(range(len(pieces)))
    ]
    numbers = count(len(pieces))
    while moments:
        now = moments[0][0]
        freed: set[int] = set()
        while moments and moments[0][0] == now:
            _, _, group, ended = heapq.heappop(moments)
            freed.update(state.end(group, ended))
        for group in sorted(freed):
            call = state.begin(group)
            if call is not None:
                seconds = 2 if call.phase == "backward" else 1
                heapq.heappush(moments, (now + seconds, next(numbers), group, call))
    return tuple(map(tuple, state.orders))


class _Groups:
    """What every group has called, could call and holds."""

    def __init__(
        self, pieces: Sequence[Sequence[Call]], num_stages: int, prefer: Preference, limits: Sequence[int], in_turn: int
    ) -> None:
        self.orders: list[list[Call]] = [[] for _ in pieces]
        self._prefer, self._limits, self._in_turn = prefer, limits, in_turn
        self._open: list[list[tuple[tuple[int, ...], int, Call]]] = [[] for _ in pieces]
        """Calls that could begin, but for the limit."""
        self._done: set[Piece] = set()
        self._missing: dict[Call, int] = {}
        self._waiting: dict[Piece, list[tuple[int, Call]]] = {}
        self._left: list[dict[int, int]] = [{} for _ in pieces]
        """Calls that are left of every micro-batch."""
        self._inside: list[dict[bool, set[int]]] = [{False: set(), True: set()} for _ in pieces]
        self._busy = [True] * len(pieces)
        self._numbers = count()
        for group, calls in enumerate(pieces):
            for call in calls:
                self._left[group][call.micro] = self._left[group].get(call.micro, 0) + 1
                needed = needs(call, num_stages)
                self._missing[call] = len(needed)
                for piece in needed:
                    self._waiting.setdefault(piece, []).append((group, call))
                if not needed:
                    self._offer(group, call)

    def _offer(self, group: int, call: Call) -> None:
        heapq.heappush(self._open[group], (self._prefer(call), next(self._numbers), call))

    def end(self, group: int, call: Call | None) -> set[int]:
        """The groups that may begin something now."""
        self._busy[group] = False
        concerned = {group}
        if call is None:
            return concerned
        made, left = makes(call), self._left[group]
        for waiting, other in self._waiting.pop(made, ()) if made is not None else ():
            self._missing[other] -= 1
            if not self._missing[other]:
                self._offer(waiting, other)
                concerned.add(waiting)
        left[call.micro] -= 1
        if not left[call.micro]:
            self._inside[group][self._is_second(call)].discard(call.micro)
        return concerned

    def begin(self, group: int) -> Call | None:
        """The call that the group prefers, if it is free and any can begin."""
        if self._busy[group]:
            return None
        passed, found = [], None
        while self._open[group]:
            entry = heapq.heappop(self._open[group])
            if self._may_enter(group, entry[2]):
                found = entry[2]
                break
            passed.append(entry)
        for entry in passed:
            heapq.heappush(self._open[group], entry)
        if found is not None:
            self._busy[group] = True
            self._inside[group][self._is_second(found)].add(found.micro)
            self.orders[group].append(found)
        return found

    def _may_enter(self, group: int, call: Call) -> bool:
        inside = self._inside[group][self._is_second(call)]
        return call.micro in inside or len(inside) < self._limits[group]

    def _is_second(self, call: Call) -> bool:
        return bool(self._in_turn) and call.micro >= self._in_turn
