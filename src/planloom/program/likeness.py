"""Micro-batches that are alike: of a thousand, the verifier looks at a few, and they stand for all.

Instructions touch the instances of buffers of their own micro-batch, and buffers of the step. So two micro-batches for
which every role calls the same bodies in the same order are carried out alike, but for names, if

    enter and exit     come once, first (but for receives that were started ahead) and last
    buffers of a step  are written by loop bodies in three ways only: accumulated into, which any order may do; gathered
                       and freed within one body; made of sums by a body that comes once, after everything that
                       accumulates into these sums
    lagging waits      concern buffers that one body alone uses, so it does not matter when other micro-batches come

Then the few are interpreted in full, and what is summed over micro-batches is complete with their share of the batch.
That no order of calls deadlocks is a matter of all micro-batches: `goes_through` carries out the sends, receives and
waits of the whole program. Where a condition does not hold, nothing is left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypedDict

from planloom.program.free import reads, writes
from planloom.program.meetings import Key, Meetings
from planloom.program.schedule import ENTER, EXIT
from planloom.program.shared import span
from planloom.program.values import (
    Accumulate,
    BodyCall,
    Buffer,
    Free,
    Instruction,
    Program,
    Receive,
    Send,
    StageProgram,
    Wait,
    collectives_in,
)

_FEW = 16
"""So many micro-batches are looked at one by one, alike or not."""
_OF_A_KIND = 2
"""Micro-batches that stand for those alike: the second may meet what the first has left in flight."""


class Counts(TypedDict):
    """How much there is of a program."""

    num_instructions: int
    num_collectives: int
    num_messages: int


def representatives(program: Program) -> frozenset[int] | None:
    """Micro-batches that stand for all; None if all must be looked at."""
    if program.num_micro_batches <= _FEW or not all(map(_keeps_apart, program.stages)):
        return None
    bodies: list[list[tuple[int, str]]] = [[] for _ in range(program.num_micro_batches)]
    for s, stage in enumerate(program.stages):
        for call in _looped(stage):
            if not 0 <= call.micro < program.num_micro_batches:
                return None
            bodies[call.micro].append((s, call.body))
    kinds: dict[tuple[tuple[int, str], ...], list[int]] = {}
    for micro, called in enumerate(bodies):
        kinds.setdefault(tuple(called), []).append(micro)
    chosen = frozenset(micro for alike in kinds.values() for micro in alike[:_OF_A_KIND])
    return chosen if len(chosen) < program.num_micro_batches else None


def with_micro_batches(program: Program, chosen: frozenset[int]) -> Program:
    """The program without the calls of other micro-batches."""
    stages = tuple(
        replace(stage, calls=tuple(call for call in stage.calls if call.micro < 0 or call.micro in chosen))
        for stage in program.stages
    )
    return replace(program, stages=stages)


def counted(program: Program) -> Counts:
    """The instructions that are carried out, collectives and messages."""
    found: Counts = {"num_instructions": 0, "num_collectives": 0, "num_messages": 0}
    for stage in program.stages:
        times: dict[str, int] = {}
        for call in stage.calls:
            times[call.body] = times.get(call.body, 0) + 1
        for name, count in times.items():
            body = stage.bodies[name]
            steps = (step for i in body for c in collectives_in(i) for step in c.steps)
            found["num_instructions"] += count * len(body)
            found["num_collectives"] += count * sum(not step.is_local for step in steps)
            own = set(stage.mesh.devices)
            found["num_messages"] += count * sum(
                len(i.transfers) if i.source.of < 0 else sum(t.source in own for t in i.transfers)
                for i in body
                if isinstance(i, Send)
            )
    return found


def _keeps_apart(stage: StageProgram) -> bool:
    """Do the conditions hold that make micro-batches independent of each other?"""
    calls, names = _looped(stage), [call.body for call in stage.calls]
    if names.count(ENTER) != 1 or names.count(EXIT) != 1 or names[-1] != EXIT:
        return False
    before = set(names[: names.index(ENTER)])
    if any(not isinstance(instruction, Receive) for name in before for instruction in stage.bodies[name]):
        return False
    loop = {name: stage.bodies[name] for name in dict.fromkeys(call.body for call in calls)}
    sums = {i.target: None for b in loop.values() for i in b if isinstance(i, Accumulate) and not i.target.indexed}
    return all(_is_apart(body, sums) for body in loop.values()) and (
        _sums_come_first(calls, loop, sums) and _lags_alone(stage, loop)
    )


def _looped(stage: StageProgram) -> list[BodyCall]:
    return [call for call in stage.calls if call.body not in (ENTER, EXIT)]


def _is_apart(body: Sequence[Instruction], sums: dict[Buffer, None]) -> bool:
    """Are buffers of the step only accumulated into, made of sums, or made and freed here?"""
    freed = {i.buffer for i in body if isinstance(i, Free) and not i.buffer.indexed}
    for instruction in body:
        if isinstance(instruction, Wait) and instruction.every:
            return False
        if isinstance(instruction, Accumulate):
            continue
        collectives = collectives_in(instruction)
        for buffer in writes(instruction):
            from_sums = bool(collectives) and all(c.source in sums for c in collectives)
            if not buffer.indexed and buffer not in freed and not from_sums:
                return False
    return not freed.intersection(sums)


def _sums_come_first(
    calls: Sequence[BodyCall], loop: dict[str, tuple[Instruction, ...]], sums: dict[Buffer, None]
) -> bool:
    """Is every sum read once, by a body behind all that accumulate into it?"""
    accumulates = {name: {i.target for i in body if isinstance(i, Accumulate)} for name, body in loop.items()}
    readers = {name: {b for i in body for b in reads(i) if b in sums} for name, body in loop.items()}
    taken: set[Buffer] = set()
    for call in calls:
        if taken.intersection(accumulates[call.body]) or taken.intersection(readers[call.body]):
            return False
        taken |= readers[call.body]
    return True


def _lags_alone(stage: StageProgram, loop: dict[str, tuple[Instruction, ...]]) -> bool:
    lagging = {i.buffer for body in loop.values() for i in body if isinstance(i, Wait) and i.lag}
    for buffer in lagging:
        users = {
            name
            for name, body in loop.items()
            for i in body
            if buffer in (*reads(i), *writes(i)) or (isinstance(i, Wait) and i.buffer == buffer)
        }
        if len({name.removeprefix("last ") for name in users}) > 1:
            return False
    return True


# -- deadlocks


def goes_through(program: Program) -> bool:
    """Can all sends, receives and waits of a program be carried out, if a send blocks until it is received?

    And where groups are shared all collectives, if each blocks until all roles in it have come to it.
    """
    role_of = {device: s for s, stage in enumerate(program.stages) for device in stage.mesh.devices}
    events = [
        {name: tuple(_events(body, s, role_of, shared=bool(program.shared))) for name, body in stage.bodies.items()}
        for s, stage in enumerate(program.stages)
    ]
    started, meetings = set[_Half](), Meetings()
    ways = [_through(s, stage.calls, events[s], started, meetings) for s, stage in enumerate(program.stages)]
    unfinished = set(range(len(ways)))
    moved = True
    while unfinished and moved:
        moved = False
        for s in sorted(unfinished):
            gone_on = next(ways[s], None)
            moved = gone_on is not False or moved
            if gone_on is None:
                unfinished.discard(s)
    return not unfinished


_Half = tuple[str, int, bool, int]
"""(channel, micro-batch, whether it is sent, role)."""


@dataclass(frozen=True, slots=True)
class _Event:
    """`roles`: those at the other end of an exchange, or in a collective."""

    kind: Literal["send", "receive", "collect", "wait", "every"]
    buffer: Buffer
    channel: str = ""
    lag: int = 0
    roles: frozenset[int] = frozenset()


def _events(body: Sequence[Instruction], s: int, role_of: Mapping[int, int], *, shared: bool) -> Iterator[_Event]:
    exchanged = {i.source for i in body if isinstance(i, Send)} | {i.target for i in body if isinstance(i, Receive)}
    local = {c.target for i in body for c in collectives_in(i)} - exchanged
    for instruction in body:
        match instruction:
            case Send(source=source, channel=channel, transfers=transfers):
                peers = {role_of.get(t.target, -1) for t in transfers if role_of.get(t.source) == s}
                yield _Event("send", source, channel, roles=frozenset(peers))
            case Receive(target=target, channel=channel, transfers=transfers):
                peers = {role_of.get(t.source, -1) for t in transfers if role_of.get(t.target) == s}
                yield _Event("receive", target, channel, roles=frozenset(peers))
            case Wait(buffer=buffer, every=True):
                yield _Event("every", buffer)
            case Wait(buffer=buffer, lag=lag) if shared or buffer not in local:
                yield _Event("wait", buffer, lag=lag)
        for collective in collectives_in(instruction) if shared else ():
            roles = {s} if collective.target.of < 0 else {role_of.get(d, -1) for d in span(collective)}
            yield _Event("collect", collective.target, roles=frozenset(roles))


def _through(
    s: int,
    calls: Sequence[BodyCall],
    events: dict[str, tuple[_Event, ...]],
    started: set[_Half],
    meetings: Meetings,
) -> Iterator[bool]:
    """One role's way: yields True when it has gone on and stops, False when it has not."""
    gone_on = True
    in_flight: dict[tuple[Buffer, int], list[tuple[tuple[_Half, ...], Key]]] = {}
    for call in calls:
        for event in events[call.body]:
            buffer = event.buffer
            place = (buffer, call.micro - event.lag if buffer.indexed else -1)
            if event.kind == "collect":
                key = (place, event.roles)
                meetings.start(s, key, event.roles)
                in_flight.setdefault(place, []).append(((), key))
                continue
            if event.kind in ("send", "receive"):
                is_send = event.kind == "send"
                started.add((event.channel, call.micro, is_send, s))
                others = tuple((event.channel, call.micro, not is_send, peer) for peer in event.roles)
                in_flight.setdefault(place, []).append((others, None))
                continue
            places = [place] if event.kind == "wait" else [found for found in in_flight if found[0] == buffer]
            for place in places:
                for halves, met in in_flight.get(place, ()):
                    while not (started.issuperset(halves) and (met is None or meetings.is_over(met))):
                        yield gone_on
                        gone_on = False
                    gone_on = True
                in_flight.pop(place, None)
