"""Where an instruction stands and what it does, in words: for refusals."""

from collections.abc import Sequence

from planloom.errors import VerificationError
from planloom.program.schedule import Line
from planloom.program.values import (
    Accumulate,
    Backward,
    Coalesced,
    Collective,
    Forward,
    Free,
    Instruction,
    Program,
    Put,
    Receive,
    Seed,
    Send,
    Sum,
    Take,
    Wait,
    WeightGradient,
)


def where(line: Line) -> str:
    return f"stage {line.stage}, {line.body}" + (f" of micro-batch {line.micro}" if line.micro >= 0 else "")


def described(instruction: Instruction) -> str:
    match instruction:
        case Collective(source=source, target=target, steps=steps):
            return f"Collective {source} -> {target}: {'; '.join(map(str, steps))}"
        case Coalesced(collectives=collectives):
            return f"Coalesced {described(collectives[0])} and {len(collectives) - 1} others"
        case Send(channel=channel) | Receive(channel=channel):
            return f"{type(instruction).__name__} {channel}"
        case Forward(run=run, again=True):
            return f"Forward of run {run} again"
        case Forward(run=run) | Backward(run=run) | WeightGradient(run=run):
            return f"{type(instruction).__name__} of run {run}"
        case Wait(buffer=buffer) | Free(buffer=buffer):
            return f"{type(instruction).__name__} {buffer}"
        case Take(source=source, target=target):
            return f"Take {target} of {source}"
        case Sum(target=target) | Accumulate(target=target) | Seed(target=target) | Put(target=target):
            return f"{type(instruction).__name__} into {target}"
    return type(instruction).__name__


def deadlock(program: Program, stuck: Sequence[Line], *, of_meetings: bool) -> VerificationError:
    """What every role waits for; `of_meetings`: there are collectives to which not all have come."""
    ranks = [", ".join(map(str, program.stages[line.stage].mesh.devices)) for line in stuck]
    shown = "; ".join(
        f"stage {line.stage} (ranks {who}) waits in {line.body} of micro-batch {line.micro} at instruction "
        f"{line.index}: {described(line.instruction)}"
        for line, who in zip(stuck, ranks, strict=True)
    )
    return VerificationError(
        "the program deadlocks: every stage waits for a message that is never matched"
        + (", or for a collective to which not all come" if of_meetings else ""),
        given=shown,
        required="an order in which every receive meets its send"
        + (", and all start their collectives in one order" if of_meetings else ""),
        todo="change the order of the calls, or the stages' exchanges",
    )
