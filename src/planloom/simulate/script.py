"""From a stage's bodies to items that take time: each body once, whatever the number of its calls.

    Busy       the device computes; what it communicates meanwhile and awaits at once is part of it
    Begin      a collective starts, behind what is under way on its lane
    Half       one half of an exchange with another stage starts
    Await      the program waits for what was started on buffers

A collective that is awaited at once, on links that no other stage uses, behind nothing on its lane, is like computing:
it holds the device for its seconds and cannot be disturbed. So the forward of a stage whose tensor parallelism stays
inside its nodes is one item, and a pipeline of hundreds of micro-batches is simulated in a fraction of a second.

Lanes: gloo carries out a rank's collectives one after another; NCCL has a stream for each group. Exchanges from one
stage to another go one after another, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Protocol

from planloom.collective import Step
from planloom.cost import Price, Prices
from planloom.cost.keys import Phase, SplitPhase
from planloom.cost.prices import Source
from planloom.cost.segments import BodySegment
from planloom.layout import Mesh
from planloom.layout.boxes import lies_together
from planloom.program import (
    Accumulate,
    Backward,
    Buffer,
    Collective,
    Forward,
    Instruction,
    Program,
    Put,
    Receive,
    Seed,
    Send,
    Sum,
    Take,
    Transfer,
    Update,
    Wait,
    WeightGradient,
    collectives_in,
)
from planloom.program.schedule import EXIT
from planloom.program.shared import between_roles
from planloom.program.sizes import mask_bytes_of_steps, sizes_of_steps
from planloom.simulate.links import Links, Loads
from planloom.simulate.timeline import Stream

Key = tuple[int, bool]
"""A buffer by number, and whether there is one for each micro-batch: buffers themselves are slow to hash."""


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a busy item, for the picture."""

    name: str
    stream: Stream
    start: float
    seconds: float
    axis: str = ""


@dataclass(frozen=True, slots=True)
class Busy:
    """The device is busy with all of its parts, one after another; or its host is, with starting them."""

    device_seconds: float
    parts: tuple[Part, ...]
    host_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.device_seconds, self.host_seconds)


@dataclass(frozen=True, slots=True)
class Begin:
    """A collective, or several as one, with what it loads; `roles`: those that start it, each where it comes to it."""

    name: str
    axis: str
    seconds: float
    lane: object
    targets: tuple[Key, ...]
    loads: Loads
    roles: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Half:
    """One half of an exchange; the sender's half knows its price. Several that start together are one."""

    channel: str
    peer: int
    buffers: tuple[Key, ...]
    is_send: bool
    seconds: float
    loads: Loads


@dataclass(frozen=True, slots=True)
class Await:
    """A wait, as in the program."""

    buffer: Key
    lag: int
    every: bool


Item = Busy | Begin | Half | Await


class MeasuredSegments(Protocol):
    """Segments of bodies that were measured as a whole."""

    def of(self, stage: int, body: str) -> Sequence[tuple[BodySegment, Price]]:
        """Those of a body, in their order."""
        ...

    def stretched(self, items: Sequence[Item], seconds: float) -> list[Item]:
        """Items of a segment, so that together they take so many seconds."""
        ...


@dataclass(slots=True)
class _Written:
    """What earlier instructions of a body have done to buffers."""

    accumulated: list[Buffer] = field(default_factory=list)
    at_once: set[Buffer] = field(default_factory=set)


class ScriptWriter:
    """Prices the instructions of a program, and remembers where the prices came from."""

    def __init__(self, program: Program, prices: Prices, links: Links) -> None:
        self.program, self.prices, self.links = program, prices, links
        self.graph = prices.blocks.graph
        self.sources: set[Source] = set()
        self.deviation = 0.0
        """Seconds of standard deviation of all prices, each counted once."""
        self.priced = 0.0
        self._axes: dict[int, str] = {}
        self._lanes: dict[frozenset[frozenset[int]], int] = {}
        self._lane_of: dict[int, int] = {}
        self._numbers: dict[Buffer, int] = {}
        self._stage_of = {d: s for s, stage in enumerate(program.stages) for d in stage.mesh.devices}
        self._split = frozenset[int]().union(*(stage.split_runs for stage in program.stages))

    def scripts(
        self, sizes: Sequence[dict[Buffer, int]], measured: MeasuredSegments
    ) -> list[dict[str, tuple[Item, ...]]]:
        """The items of every body of every stage; `sizes`: the bytes of each stage's buffers."""
        items = [
            {name: self._body(s, name, body, sizes[s], measured) for name, body in stage.bodies.items()}
            for s, stage in enumerate(self.program.stages)
        ]
        together = _started_together(items)
        return [
            {
                name: tuple(self._merged(_with_halves_joined(body, together), lane_is_free=name != EXIT))
                for name, body in bodies.items()
            }
            for bodies in items
        ]

    def _body(
        self,
        s: int,
        name: str,
        body: Sequence[Instruction],
        sizes: dict[Buffer, int],
        measured: MeasuredSegments,
    ) -> list[Item]:
        """The items of a body, of which segments that were measured as a whole take as long as measured."""
        items: list[Item] = []
        written = _Written()
        at = 0
        for segment, price in measured.of(s, name):
            items += self._items(s, body[at : segment.start], sizes, written)
            before = (set(self.sources), self.deviation, self.priced)
            parts = self._items(s, body[segment.start : segment.stop], sizes, written)
            self.sources, self.deviation, self.priced = before  # the prices of the parts do not count
            items += measured.stretched(parts, self._seen(price).seconds)
            at = segment.stop
        return items + self._items(s, body[at:], sizes, written)

    def _items(self, s: int, body: Sequence[Instruction], sizes: dict[Buffer, int], written: _Written) -> list[Item]:
        items: list[Item] = []
        accumulated, at_once = written.accumulated, written.at_once
        for instruction in body:
            match instruction:
                case Forward(run=run, again=again, saves=saves):
                    is_split = saves and run in self._split
                    price = self._half(run, "forward") if is_split else self._run(run, "forward")
                    items.append(self._busy(f"{'Recompute' if again else 'Forward'} {run}", price))
                case Backward(run=run, is_split=True):
                    items.append(self._busy(f"Input-gradient {run}", self._half(run, "input_gradient")))
                case Backward(run=run):
                    items.append(self._busy(f"Backward {run}", self._run(run, "backward")))
                case WeightGradient(run=run):
                    items.append(self._busy(f"Weight-gradient {run}", self._half(run, "weight_gradient")))
                case Sum(target=target, sources=sources):
                    price = self._seen(self.prices.memory((1 + len(sources)) * sizes[target]))
                    items.append(self._busy("Sum", price))
                case Accumulate(target=target):
                    items += self._accumulate(target, sizes[target], accumulated.count(target))
                    accumulated.append(target)
                case Take(target=target, box=box, sizes=dims):
                    if not lies_together(box, dims):  # else it is a view
                        items.append(self._busy("Take", self._seen(self.prices.memory(2 * sizes[target]))))
                case Put(source=source):
                    items.append(self._busy("Put", self._seen(self.prices.memory(2 * sizes[source]))))
                case Seed():
                    items.append(self._busy("Seed", self._seen(self.prices.memory(8))))
                case Update():
                    items.append(self._busy("Update", self._seen(self.prices.update(self.program, s))))
                case Send(channel=channel, source=source, transfers=transfers):
                    item_bytes = self.graph.tensors[instruction.tensor].item_bytes
                    for name, peer, part in self._with_each_peer(s, channel, transfers, is_send=True):
                        price = self._seen(self.prices.exchange(part, item_bytes))
                        loads = self.links.of_exchange(s, peer, price, part)
                        items.append(Half(name, peer, (self._key(source),), True, price.seconds, loads))
                case Receive(channel=channel, target=target, transfers=transfers):
                    for name, peer, _ in self._with_each_peer(s, channel, transfers, is_send=False):
                        items.append(Half(name, peer, (self._key(target),), False, 0.0, {}))
                case Wait(buffer=buffer):
                    wait = Await(self._key(buffer), instruction.lag, instruction.every)
                    items += [wait] if buffer not in at_once else []
            collectives = collectives_in(instruction)
            if collectives:
                items += self._begin(s, collectives)
                if all(step.is_local for step in collectives[0].steps):
                    at_once.update(collective.target for collective in collectives)
        return items

    def _accumulate(self, target: Buffer, num_bytes: int, num_before: int) -> list[Item]:
        """An addition into a buffer of the step, or of a micro-batch, behind others in this body.

        The first value is kept as it is, the second makes a new buffer, and the others are added in place; of a buffer
        of the step over all micro-batches, of which each takes the mean.
        """
        num_micro = 1 if target.indexed else self.program.num_micro_batches
        if num_before == 0 and num_micro == 1:
            return []
        price = self._seen(self.prices.accumulate(3 * num_bytes))
        if num_before == (num_micro == 1):
            new = self._seen(self.prices.memory(3 * num_bytes))
            price = (
                new
                if num_micro == 1
                else replace(price, seconds=(new.seconds + (num_micro - 2) * price.seconds) / num_micro)
            )
        return [self._busy("Accumulate", price)]

    def _begin(self, s: int, collectives: tuple[Collective, ...]) -> list[Item]:
        """A collective with the sum of its steps' seconds; several as one, with the sum of their bytes.

        A step that brings rows of a ragged tensor is two, its mask's and its rows'.
        """
        steps = collectives[0].steps
        bytes_of = [sizes_of_steps(self.graph, collective) for collective in collectives]
        seconds, busy = 0.0, dict[int, float]()
        masks = [sum(column) for column in zip(*map(mask_bytes_of_steps, collectives), strict=True)]
        sent = [(step, sum(each[i] for each in bytes_of)) for i, step in enumerate(steps)]
        sent += [(step, num_bytes) for step, num_bytes in zip(steps, masks, strict=True) if num_bytes]
        for step, num_bytes in sent:
            price = self._seen(self.prices.step(step, num_bytes))
            seconds += price.seconds
            for level, at in price.busy:
                busy[level] = busy.get(level, 0.0) + at
        targets = tuple(self._key(collective.target) for collective in collectives)
        if all(step.is_local for step in steps):
            name = " + ".join(step.kind for step in steps)
            return [self._busy(name, Price(seconds=seconds, source="modelled"))] if seconds else []
        packed: list[Item] = []
        if len(collectives) > 1:
            price = self._seen(self.prices.memory(2 * sum(each[0] for each in bytes_of)))
            packed.append(self._busy("Pack", price))
        communicating = [step for step in steps if not step.is_local]
        name = " + ".join(step.kind for step in communicating)
        mesh = self.program.mesh_at(s, collectives[0].target)
        axes = [self._axis(mesh, step.groups) for step in communicating]
        lane = self._lane(communicating[0].groups)
        roles = (s,) if collectives[0].target.of < 0 else self._roles(s, communicating)
        loads = self.links.of_collective(roles, busy, seconds, communicating[0].groups)
        return [*packed, Begin(name, "·".join(dict.fromkeys(axes)), seconds, lane, targets, loads, roles)]

    def _roles(self, s: int, steps: Sequence[Step]) -> tuple[int, ...]:
        """The roles that a role meets in a collective, by way of others, too."""
        groups = [{self._stage_of[device] for device in group} for step in steps for group in step.groups]
        found, before = {s}, set[int]()
        while found != before:
            before = set(found)
            found.update(*(group for group in groups if group & before))
        return tuple(sorted(found))

    def _with_each_peer(
        self, s: int, channel: str, transfers: tuple[Transfer, ...], *, is_send: bool
    ) -> list[tuple[str, int, tuple[Transfer, ...]]]:
        """The messages between a role and each other one, under a name of their own if there are several roles."""
        if not self.program.shared:
            return [(channel, self._stage_of[transfers[0].target if is_send else transfers[0].source], transfers)]
        return [
            (f"{channel} {a}>{b}", b if is_send else a, part)
            for (a, b), part in between_roles(self._stage_of, transfers).items()
            if s == (a if is_send else b)
        ]

    def _merged(self, items: Sequence[Item], *, lane_is_free: bool) -> list[Item]:
        """Adjacent busy items as one, with collectives that are awaited at once and cannot be disturbed.

        `lane_is_free`: nothing is under way when the body begins.
        """
        merged: list[Item] = []
        in_flight: set[Key] = set()
        at = 0
        while at < len(items):
            item = items[at]
            following = items[at + 1] if at + 1 < len(items) else None
            if (
                isinstance(item, Begin)
                and isinstance(following, Await)
                and lane_is_free
                and not in_flight
                and item.targets == (following.buffer,)
                and not following.every
                and len(item.roles) <= 1
                and self.links.are_private(item.loads)
            ):
                part = Part(item.name, "communication", 0.0, item.seconds, item.axis)
                item, at = Busy(item.seconds, (part,)), at + 1
            if isinstance(item, Begin):
                in_flight.update(item.targets)
            if isinstance(item, Await):
                in_flight.discard(item.buffer)
            if isinstance(item, Busy) and merged and isinstance(merged[-1], Busy):
                merged[-1] = _joined(merged[-1], item)
            else:
                merged.append(item)
            at += 1
        return merged

    # -- prices

    def _run(self, run: int, phase: Phase) -> Price:
        return self._seen(self.prices.run(self.program, self.program.runs[run], phase))

    def _half(self, run: int, phase: SplitPhase) -> Price:
        return self._seen(self.prices.split_run(self.program, self.program.runs[run], phase))

    def _seen(self, price: Price) -> Price:
        self.sources.add(price.source)
        self.deviation += price.seconds * price.uncertainty
        self.priced += price.seconds
        return price

    @property
    def uncertainty(self) -> float:
        """The mean of all prices' uncertainties, by seconds: they are alike, not independent."""
        return self.deviation / self.priced if self.priced else 0.0

    @staticmethod
    def _busy(name: str, price: Price) -> Busy:
        return Busy(price.seconds, (Part(name, "compute", 0.0, price.seconds),), price.host_seconds)

    def _key(self, buffer: Buffer) -> Key:
        return self._numbers.setdefault(buffer, len(self._numbers)), buffer.indexed

    def _lane(self, groups: tuple[tuple[int, ...], ...]) -> int:
        """gloo has one; else one for each set of groups, in any order, as the wire makes them once."""
        if self.prices.cluster.library == "gloo":
            return 0
        if id(groups) not in self._lane_of:  # of a step of the program, which outlives this: most steps share them
            ranks = frozenset(map(frozenset, groups))
            self._lane_of[id(groups)] = self._lanes.setdefault(ranks, 1 + len(self._lanes))
        return self._lane_of[id(groups)]

    def _axis(self, mesh: Mesh, groups: tuple[tuple[int, ...], ...]) -> str:
        key = id(groups)  # of a step of the program, which outlives this
        if key not in self._axes:
            self._axes[key] = axis_of(mesh, groups)
        return self._axes[key]


def axis_of(mesh: Mesh, groups: tuple[tuple[int, ...], ...]) -> str:
    """The axes of a mesh along which the members of a group differ."""
    place_of = {device: place for place, device in enumerate(mesh.devices)}
    places, stride, differing = [place_of[device] for device in groups[0]], 1, set[str]()
    for digit in reversed(mesh.digits):
        if len({place // stride % digit.size for place in places}) > 1:
            differing.add(digit.axis)
        stride *= digit.size
    return "·".join(axis.name for axis in mesh.axes if axis.name in differing)


def _joined(first: Busy, second: Busy) -> Busy:
    parts = tuple(replace(part, start=part.start + first.device_seconds) for part in second.parts)
    return Busy(
        first.device_seconds + second.device_seconds, first.parts + parts, first.host_seconds + second.host_seconds
    )


def _started_together(items: Sequence[Mapping[str, Sequence[Item]]]) -> dict[str, str]:
    """Channel → the one that stands for it: those that follow each other on both sides, between the same stages.

    They share the way, so one message with the bytes of all takes as long as all of them.
    """
    followed: list[set[tuple[str, str]]] = [set(), set()]
    for stage in items:
        for body in stage.values():
            for first, second in pairwise(body):
                if not (isinstance(first, Half) and isinstance(second, Half)):
                    continue
                if (first.peer, first.is_send) == (second.peer, second.is_send):
                    followed[first.is_send].add((first.channel, second.channel))
    stands_for = {second: first for first, second in followed[0] & followed[1]}
    return {channel: _root(channel, stands_for) for channel in stands_for}


def _root(channel: str, stands_for: Mapping[str, str]) -> str:
    while channel in stands_for:
        channel = stands_for[channel]
    return channel


def _with_halves_joined(items: Sequence[Item], together: Mapping[str, str]) -> list[Item]:
    joined: list[Item] = []
    for item in items:
        last = joined[-1] if joined else None
        if isinstance(item, Half) and isinstance(last, Half) and together.get(item.channel) == last.channel:
            joined[-1] = _both(last, item)
        else:
            joined.append(item)
    return joined


def _both(first: Half, second: Half) -> Half:
    """Two messages on one way: as far as they load it, one after the other; else at the same time."""
    load = max(second.loads.values(), default=0.0)
    seconds = max(first.seconds, second.seconds) + load * min(first.seconds, second.seconds)
    loads = {link: max(second.loads.get(link, 0.0), load) for link, load in first.loads.items()}
    return replace(first, buffers=first.buffers + second.buffers, seconds=seconds, loads=loads)
