"""Free every buffer of a micro-batch after its last use in the body that made it."""

from planloom.program.values import (
    Accumulate,
    Backward,
    Buffer,
    Coalesced,
    Collective,
    Forward,
    Free,
    Instruction,
    Receive,
    Seed,
    Send,
    Sum,
    Update,
    Wait,
    collectives_in,
)


def reads(instruction: Instruction) -> tuple[Buffer, ...]:
    """Buffers that must hold a value before the instruction."""
    match instruction:
        case Forward(inputs=inputs):
            return inputs
        case Backward(cotangents=cotangents):
            return tuple(buffer for buffer in cotangents if buffer is not None)
        case Collective(source=source, rows=rows):
            return (source,) if rows is None else (source, rows)
        case Coalesced(collectives=collectives):
            return tuple(collective.source for collective in collectives)
        case Send(source=source) | Accumulate(source=source):
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
        case Backward(outputs=outputs):
            return tuple(buffer for buffer in outputs if buffer is not None)
        case Collective(target=target) | Receive(target=target) | Accumulate(target=target):
            return (target,)
        case Coalesced(collectives=collectives):
            return tuple(collective.target for collective in collectives)
        case Sum(target=target) | Seed(target=target):
            return (target,)
        case Update(targets=targets):
            return targets
    return ()


def free_after_last_use(
    body: list[Instruction], *, kept: frozenset[Buffer] = frozenset(), inherited: frozenset[Buffer] = frozenset()
) -> tuple[Instruction, ...]:
    """The same body with a `Free` behind the last use of every buffer of the micro-batch that no send holds or takes.

    `kept`: buffers that a later body reads, and frees as `inherited`.
    """
    sent = {instruction.source for instruction in body if isinstance(instruction, Send)}
    source_of = {c.target: c.source for instruction in body for c in collectives_in(instruction)}
    taken = {c.source for i in body if isinstance(i, Coalesced) and i.takes_sources for c in i.collectives}
    last: dict[Buffer, int] = {}
    for i, instruction in enumerate(body):
        used = (*writes(instruction), *reads(instruction))
        if isinstance(instruction, Wait) and instruction.buffer in source_of:
            used += (source_of[instruction.buffer],)  # in flight until then
        for buffer in used:
            if buffer.indexed and buffer not in sent | taken | kept:
                last[buffer] = i
    made = {*inherited, *(buffer for instruction in body for buffer in writes(instruction))}
    freed: dict[int, list[Buffer]] = {}
    for buffer, i in last.items():
        if buffer in made:
            freed.setdefault(i, []).append(buffer)
    result: list[Instruction] = []
    for i, instruction in enumerate(body):
        result.append(instruction)
        result += [Free(buffer=buffer) for buffer in freed.get(i, ())]
    return tuple(result)
