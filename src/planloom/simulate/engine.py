"""The clock: stages go through their scripts, and what goes on at one time shares links and devices.

Computing and communicating are *activities*: seconds of work that is done at a rate. The rate of communication is one
over the largest sum of loads on any of its links, at most one, and less while its devices compute; the rate of
computing is less while its device communicates. Rates change only when an activity begins or ends, so between two such
moments every activity's end is known, and the clock jumps to the next one.

A message between stages is late where one of them computes meanwhile: once, by what was measured (`profile.links`). It
has left the links by then, so that others are not.

A device under a quota that has waited for another stage has *credit*: what it computes next is over as much earlier as
it has rested, up to what was measured (`cost.Credit`). Not after collectives: what is computed after one is over
earlier, too, but the collective, measured with a quota unused, meets one that is spent, and takes longer.

[Empirical] Four ranks of 0.4 cores, small mixture of experts on pairs-of-2x2, 2 vCPU AMD EPYC, 2026-11-18. After waits
for stages (`pp=4,micro=8`, last stage): forward and backward 14 and 35 ms measured alone, 11 and 33 in the step. With
collectives (`pp=2,tp=2,micro=8`): a run 5.0 and 6.7 alone, 2.4 and 4.0 in the step; an all-to-all 3.3 alone, 6.0 there.
"""

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from planloom.cost import Credit
from planloom.errors import PriceError
from planloom.program import BodyCall
from planloom.simulate.links import Link, Loads
from planloom.simulate.script import Await, Begin, Busy, Half, Item

PIPELINE = "pp"
"""The axis of exchanges between stages."""

Place = tuple[int, int]
"""A buffer's number, and the micro-batch."""
_NOTHING: Loads = {}
_NO_CREDIT = Credit()


@dataclass(eq=False, slots=True)
class Activity:
    """Work that is under way, or has ended."""

    name: str
    axis: str
    stages: tuple[int, ...]
    remaining: float
    micro: int
    loads: Loads
    parts: Busy | None = None
    start: float = -1.0
    stop: float = -1.0
    rate: float = 0.0
    seen_at: float = 0.0
    version: int = 0
    lanes: tuple[object, ...] = ()
    is_late: bool = False
    has_left: bool = False
    """It has left its links and lanes, and arrives later."""
    missing: int = 0
    """Roles that have yet to come to it."""


@dataclass(eq=False, slots=True)
class StageClock:
    """Where a stage is in its script."""

    calls: Sequence[tuple[str, int]]
    call: int = 0
    item: int = 0
    time: float = 0.0
    computing: Activity | None = None
    communicating: dict[Activity, None] = field(default_factory=dict)
    """What is under way, in the order of its beginning."""
    waits_from: float = -1.0
    pending: dict[Place, list[Activity]] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)
    """Seconds of waiting by axis."""
    bubble: float = 0.0
    rested: float = 0.0
    """Seconds of waiting for other stages that are not made good yet."""


class Engine:
    """All stages of a program, each with its calls of bodies, on one clock."""

    def __init__(
        self,
        calls: Sequence[Sequence[BodyCall]],
        scripts: Sequence[Mapping[str, Sequence[Item]]],
        *,
        compute_slowdown: float,
        communication_slowdown: float,
        credit: Credit = _NO_CREDIT,
        exchange_delay: float = 0.0,
    ) -> None:
        self.scripts, self.credit, self.exchange_delay = scripts, credit, exchange_delay
        self.slow_compute, self.slow_communication = 1 / compute_slowdown, 1 / communication_slowdown
        self.stages = [StageClock([(c.body, c.micro) for c in of]) for of in calls]
        self.exchanges: dict[tuple[str, int], Activity] = {}
        """Of which one half has started."""
        self.meetings: dict[tuple[object, ...], Activity] = {}
        """Collectives of several roles to which not all have come."""
        self.lanes: dict[object, deque[Activity]] = {}
        self.on_link: dict[Link, dict[Activity, None]] = {}
        self.ends: list[tuple[float, int, int, Activity]] = []
        self.finished: list[Activity] = []
        self.waits: list[tuple[int, str, int, float, float]] = []
        """(stage, axis, micro-batch, start, stop) of every wait that took time."""
        self.num_pushed = 0
        self.now = 0.0

    def run(self) -> float:
        """Seconds until the last stage has ended."""
        for s in range(len(self.stages)):
            self._go_on(s)
        while self.ends:
            time, _, version, activity = heapq.heappop(self.ends)
            if version == activity.version and activity.stop < 0:
                self.now = time
                self._end(activity)
        if any(clock.call < len(clock.calls) for clock in self.stages):
            raise PriceError("a program that deadlocks has no time", required="a program that verifies")
        return max(clock.time for clock in self.stages)

    # -- a stage's way through its script

    def _go_on(self, s: int) -> None:
        """Carry out items until one takes time."""
        clock, scripts = self.stages[s], self.scripts[s]
        calls, num_calls = clock.calls, len(clock.calls)
        while clock.call < num_calls:
            body, micro = calls[clock.call]
            items = scripts[body]
            at, count = clock.item, len(items)
            while at < count:
                item = items[at]
                kind = type(item)
                if kind is Await:
                    is_over = self._await(s, clock, item, micro)  # type: ignore[arg-type]
                elif kind is Half:
                    self._half(s, clock, item, micro)  # type: ignore[arg-type]
                    is_over = True
                elif kind is Busy:
                    is_over = self._busy(s, clock, item, micro)  # type: ignore[arg-type]
                else:
                    self._queue(s, clock, item, micro)  # type: ignore[arg-type]
                    is_over = True
                if not is_over:
                    clock.item = at
                    return
                at += 1
            clock.call, clock.item = clock.call + 1, 0
        clock.time = max(clock.time, self.now)

    def _busy(self, s: int, clock: StageClock, item: Busy, micro: int) -> bool:
        """Whether the item is over; else the stage goes on when it is."""
        if clock.computing is None:
            seconds = item.seconds
            if not seconds:
                return True
            if clock.rested:
                saved = self.credit.saved(clock.rested, seconds)
                seconds, clock.rested = seconds - saved, clock.rested - saved
            clock.computing = Activity("", "", (s,), seconds, micro, _NOTHING, parts=item)
            self._begin(clock.computing)
            return False
        if clock.computing.stop < 0:
            return False
        clock.computing = None
        return True

    def _queue(self, s: int, clock: StageClock, item: Begin, micro: int) -> None:
        activity = self._met(s, item, micro) if len(item.roles) > 1 else self._own(s, item, micro)
        for number, is_indexed in item.targets:
            clock.pending.setdefault((number, micro if is_indexed else -1), []).append(activity)
        self._line_up(activity, ((s, item.lane),))

    @staticmethod
    def _own(s: int, item: Begin, micro: int) -> Activity:
        lanes = ((s, item.lane),)
        return Activity(item.name, item.axis, (s,), item.seconds, micro, item.loads, lanes=lanes)

    def _met(self, s: int, item: Begin, micro: int) -> Activity:
        """A collective to which other roles may have come."""
        key = (item.targets, micro, item.roles)
        activity = self.meetings.get(key)
        if activity is None:
            lanes = tuple((role, item.lane) for role in item.roles)
            activity = Activity(item.name, item.axis, item.roles, item.seconds, micro, item.loads, lanes=lanes)
            activity.missing = len(item.roles)
            self.meetings[key] = activity
        activity.missing -= 1
        if not activity.missing:
            del self.meetings[key]
        return activity

    def _line_up(self, activity: Activity, lanes: tuple[object, ...]) -> None:
        """Begin behind what is under way on the same lanes, when all have come."""
        for lane in lanes:
            self.lanes.setdefault(lane, deque()).append(activity)
        self._begin_if_first(activity)

    def _begin_if_first(self, activity: Activity) -> None:
        if activity.missing:
            return
        for lane in activity.lanes:
            if self.lanes[lane][0] is not activity:
                return
        self._begin(activity)

    def _half(self, s: int, clock: StageClock, half: Half, micro: int) -> None:
        key = (half.channel, micro)
        activity = self.exchanges.pop(key, None)
        is_first = activity is None
        if activity is None:
            activity = self.exchanges[key] = Activity("exchange", PIPELINE, (s, half.peer), 0.0, micro, _NOTHING)
        if half.is_send:
            activity.remaining, activity.loads, activity.lanes = half.seconds, half.loads, ((s, half.peer, PIPELINE),)
        for number, is_indexed in half.buffers:
            clock.pending.setdefault((number, micro if is_indexed else -1), []).append(activity)
        if not is_first:
            self._line_up(activity, activity.lanes)

    def _await(self, s: int, clock: StageClock, wait: Await, micro: int) -> bool:
        (number, is_indexed), pending = wait.buffer, clock.pending
        if wait.every:
            places = [place for place in pending if place[0] == number]
        else:
            place = (number, micro - wait.lag if is_indexed else -1)
            if place not in pending:
                return True
            places = [place]
        for place in places:
            for work in pending[place]:
                if work.stop < 0:
                    if clock.waits_from < 0:
                        clock.waits_from = self.now
                    return False
        if clock.waits_from >= 0:
            self._count_wait(s, clock, [work for place in places for work in pending[place]], micro)
            clock.waits_from = -1.0
        for place in places:
            del pending[place]
        return True

    def _count_wait(self, s: int, clock: StageClock, works: Sequence[Activity], micro: int) -> None:
        """Time before an exchange has begun is a bubble; what it takes then is exposed."""
        last = max(works, key=lambda activity: activity.stop)
        start, stop = clock.waits_from, last.stop
        is_met = last.axis == PIPELINE or len(last.stages) > 1  # what others must come to, too
        begun = min(max(last.start, start), stop) if is_met else start
        clock.bubble += begun - start
        clock.waited[last.axis] = clock.waited.get(last.axis, 0.0) + stop - begun
        if last.axis == PIPELINE:
            clock.rested = min(self.credit.seconds, clock.rested + stop - start)
        if stop > start:
            self.waits.append((s, last.axis, micro, start, stop))

    # -- activities

    def _begin(self, activity: Activity) -> None:
        activity.start = activity.seen_at = self.now
        if activity.parts is None:
            for s in activity.stages:
                self.stages[s].communicating[activity] = None
            for link in activity.loads:
                self.on_link.setdefault(link, {})[activity] = None
        if self.exchange_delay:
            self._make_late(activity)
        self._set_rate(activity)
        self._disturb(activity)

    def _end(self, activity: Activity) -> None:
        if activity.is_late and not activity.has_left:
            self._leave(activity)
            activity.has_left = True
            self._end_at(activity, self.now + self.exchange_delay)
            return
        activity.stop = self.now
        self.finished.append(activity)
        if not activity.has_left:
            self._leave(activity)
        for s in activity.stages:
            self._go_on(s)

    def _leave(self, activity: Activity) -> None:
        """Its links, devices and lanes are for others."""
        if activity.parts is None:
            for s in activity.stages:
                del self.stages[s].communicating[activity]
            for link in activity.loads:
                del self.on_link[link][activity]
        self._disturb(activity)
        queues = [self.lanes[lane] for lane in activity.lanes]
        for queue in queues:
            queue.popleft()
        for following in [queue[0] for queue in queues if queue]:
            if following.start < 0:  # it may be first on several
                self._begin_if_first(following)

    def _disturb(self, activity: Activity) -> None:
        """The rates of what shares links or devices with an activity that begins or ends."""
        if activity.parts is None:
            for link in activity.loads:
                for other in self.on_link[link]:
                    if other is not activity:
                        self._set_rate(other)
            if self.slow_compute < 1:
                for s in activity.stages:
                    computing = self.stages[s].computing
                    if computing is not None and computing.stop < 0:
                        self._set_rate(computing)
        elif self.slow_communication < 1:
            for other in self.stages[activity.stages[0]].communicating:
                self._set_rate(other)

    def _make_late(self, begun: Activity) -> None:
        """Messages arrive later, once, if one of their stages computes when they begin, or begins to."""
        if begun.parts is None:
            concerned = [begun] if any(self._is_computing(s) for s in begun.stages) else []
        else:
            concerned = list(self.stages[begun.stages[0]].communicating)
        for activity in concerned:
            activity.is_late = activity.is_late or activity.axis == PIPELINE

    def _is_computing(self, s: int) -> bool:
        computing = self.stages[s].computing
        return computing is not None and computing.stop < 0

    def _set_rate(self, activity: Activity) -> None:
        rate = self._rate(activity)
        if rate != activity.rate:
            self._reckon(activity, rate)

    def _reckon(self, activity: Activity, rate: float) -> None:
        """When an activity will end that goes on at this rate."""
        activity.remaining -= (self.now - activity.seen_at) * activity.rate
        activity.rate, activity.seen_at = rate, self.now
        self._end_at(activity, self.now + max(0.0, activity.remaining) / rate)

    def _end_at(self, activity: Activity, seconds: float) -> None:
        activity.version += 1
        self.num_pushed += 1
        heapq.heappush(self.ends, (seconds, self.num_pushed, activity.version, activity))

    def _rate(self, activity: Activity) -> float:
        if activity.parts is not None:
            return self.slow_compute if self.stages[activity.stages[0]].communicating else 1.0
        crowd = 1.0
        for link, load in activity.loads.items():
            on = self.on_link[link]
            if len(on) > 1 or load > 1:
                crowd = max(crowd, sum(other.loads[link] for other in on))
        if self.slow_communication < 1 and any(self._is_computing(s) for s in activity.stages):
            return self.slow_communication / crowd
        return 1 / crowd
