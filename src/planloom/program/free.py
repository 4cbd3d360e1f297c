"""Free every buffer of a micro-batch after its last use in the body that made it."""

from planloom.program.values import (
    Accumulate,
    Backward,
    Buffer,
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
        case Sum(target=target) | Seed(target=target):
            return (target,)
        case Update(targets=targets):
            return targets
    return ()


def free_after_last_use(
    body: list[Instruction], *, kept: frozenset[Buffer] = frozenset(), inherited: frozenset[Buffer] = frozenset()
) -> tuple[Instruction, ...]:
    """The same body with a `Free` behind the last use of every buffer of the micro-batch that no send holds.

    `kept`: buffers that a later body reads, and frees as `inherited`.
    """
    sent = {instruction.source for instruction in body if isinstance(instruction, Send)}
    source_of = {c.target: c.source for c in body if isinstance(c, Collective)}
    last: dict[Buffer, int] = {}
    for i, instruction in enumerate(body):
        used = (*writes(instruction), *reads(instruction))
        if isinstance(instruction, Wait) and instruction.buffer in source_of:
            used += (source_of[instruction.buffer],)  # in flight until then
        for buffer in used:
            if buffer.indexed and buffer not in sent and buffer not in kept:
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
