"""Free every buffer of a micro-batch after its last use in the bodies that it goes through."""

from collections.abc import Sequence
from dataclasses import replace

from planloom.program.values import (
    Accumulate,
    Backward,
    Buffer,
    Coalesced,
    Collective,
    Forward,
    Free,
    Instruction,
    Put,
    Receive,
    Seed,
    Send,
    Sum,
    Take,
    Update,
    Wait,
    WeightGradient,
    collectives_in,
)


def reads(instruction: Instruction) -> tuple[Buffer, ...]:
    """Buffers that must hold a value before the instruction."""
    match instruction:
        case Forward(inputs=inputs):
            return inputs
        case Backward(cotangents=cotangents, again=again):
            return (*(buffer for buffer in cotangents if buffer is not None), *again)
        case Collective(source=source, rows=rows):
            return (source,) if rows is None else (source, rows)
        case Coalesced(collectives=collectives):
            return tuple(collective.source for collective in collectives)
        case Send(source=source) | Accumulate(source=source) | Take(source=source) | Put(source=source):
            return (source,)
        case Sum(sources=sources):
            return sources
        case Update(gradients=gradients):
            return gradients
        case Wait(buffer=buffer, lag=0, every=False):
            return (buffer,)
        case Free(buffer=buffer):
            return (buffer,)
    return ()


def writes(instruction: Instruction) -> tuple[Buffer, ...]:
    """Buffers that hold a new value after the instruction."""
    match instruction:
        case Forward(outputs=outputs):
            return outputs
        case Backward(outputs=outputs) | WeightGradient(outputs=outputs):
            return tuple(buffer for buffer in outputs if buffer is not None)
        case Collective(target=target) | Receive(target=target) | Accumulate(target=target):
            return (target,)
        case Coalesced(collectives=collectives):
            return tuple(collective.target for collective in collectives)
        case Sum(target=target) | Seed(target=target) | Take(target=target) | Put(target=target):
            return (target,)
        case Update(targets=targets):
            return targets
    return ()


def free_after_last_use(bodies: Sequence[Sequence[Instruction]]) -> list[tuple[Instruction, ...]]:
    """The bodies that a micro-batch goes through, with a `Free` behind the last use of every buffer of its own.

    Not where a send holds the buffer, which the wait for it frees, unless it is used after that; nor where a
    collective takes it.
    """
    line = [(number, instruction) for number, body in enumerate(bodies) for instruction in body]
    sent = {instruction.source for _, instruction in line if isinstance(instruction, Send)}
    source_of = {c.target: c.source for _, instruction in line for c in collectives_in(instruction)}
    taken = {c.source for _, i in line if isinstance(i, Coalesced) and i.takes_sources for c in i.collectives}
    made = {buffer for _, instruction in line for buffer in writes(instruction) if buffer.indexed} - taken
    last: dict[Buffer, int] = {}
    last_read: dict[Buffer, int] = {}
    for at, (_, instruction) in enumerate(line):
        used = (*writes(instruction), *reads(instruction))
        if isinstance(instruction, Wait) and instruction.buffer in source_of:
            used += (source_of[instruction.buffer],)  # in flight until then
        for buffer in made.intersection(used):
            last[buffer] = at
            if not isinstance(instruction, Wait | Free):
                last_read[buffer] = at
    awaited = {i.buffer: at for at, (_, i) in enumerate(line) if isinstance(i, Wait) and i.free and not i.lag}
    read_on = {buffer for buffer in sent if last_read.get(buffer, -1) > awaited.get(buffer, len(line))}
    freed: dict[int, list[Buffer]] = {}
    for buffer, at in last.items():
        if buffer not in sent or buffer in read_on:
            freed.setdefault(at, []).append(buffer)
    results: list[list[Instruction]] = [[] for _ in bodies]
    for at, (number, instruction) in enumerate(line):
        if isinstance(instruction, Wait) and instruction.free and instruction.buffer in read_on:
            instruction = replace(instruction, free=False)
        results[number] += [instruction, *(Free(buffer=buffer) for buffer in freed.get(at, ()))]
    return [tuple(result) for result in results]
