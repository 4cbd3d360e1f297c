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

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypedDict

from planloom.program.free import reads, writes
from planloom.program.schedule import ENTER, EXIT
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
            found["num_messages"] += count * sum(len(i.transfers) for i in body if isinstance(i, Send))
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
    """Can all sends, receives and waits of a program be carried out, if a send blocks until it is received?"""
    events = [{name: tuple(_events(body)) for name, body in stage.bodies.items()} for stage in program.stages]
    started: set[tuple[str, int, bool]] = set()
    in_flight: list[dict[tuple[Buffer, int], list[tuple[str, int]]]] = [{} for _ in program.stages]
    ways = [_through(stage.calls, events[s], started, in_flight[s]) for s, stage in enumerate(program.stages)]
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


_Event = tuple[str, Buffer, str, int]
"""(kind, buffer, channel, lag)."""


def _events(body: Sequence[Instruction]) -> Iterator[_Event]:
    exchanged = {i.source for i in body if isinstance(i, Send)} | {i.target for i in body if isinstance(i, Receive)}
    local = {c.target for i in body for c in collectives_in(i)} - exchanged
    for instruction in body:
        match instruction:
            case Send(source=source, channel=channel):
                yield "send", source, channel, 0
            case Receive(target=target, channel=channel):
                yield "receive", target, channel, 0
            case Wait(buffer=buffer, every=True):
                yield "every", buffer, "", 0
            case Wait(buffer=buffer, lag=lag) if buffer not in local:
                yield "wait", buffer, "", lag


def _through(
    calls: Sequence[BodyCall],
    events: dict[str, tuple[_Event, ...]],
    started: set[tuple[str, int, bool]],
    in_flight: dict[tuple[Buffer, int], list[tuple[str, int]]],
) -> Iterator[bool]:
    """One role's way: yields True when it has gone on and stops, False when it has not."""
    gone_on = True
    for call in calls:
        for kind, buffer, channel, lag in events[call.body]:
            micro = call.micro if buffer.indexed else -1
            if kind in ("send", "receive"):
                started.add((channel, call.micro, kind == "send"))
                in_flight.setdefault((buffer, micro), []).append((channel, call.micro))
                continue
            places = [(buffer, micro - lag if buffer.indexed else -1)]
            if kind == "every":
                places = [place for place in in_flight if place[0] == buffer]
            for place in places:
                for name, at in in_flight.get(place, ()):
                    while (name, at, True) not in started or (name, at, False) not in started:
                        yield gone_on
                        gone_on = False
                    gone_on = True
                in_flight.pop(place, None)
