"""Corruptions of rings: the errors that a planner could make where keys and values go round."""

from dataclasses import replace
from random import Random

from planloom.program import Backward, Buffer, Collective, Forward, Instruction, Program, Sum, Wait
from tests.corruptions import Corruption, Spot, change, choose, find, with_body


def _rotations(program: Program) -> list[tuple[Spot, Collective]]:
    return [(spot, found) for spot, found in find(program, Collective) if found.steps[0].kind == "rotate"]


def _turns(program: Program) -> list[tuple[Spot, Forward | Backward]]:
    """Turns proper, forward and backward."""
    found: list[tuple[Spot, Forward | Backward]] = [*find(program, Forward), *find(program, Backward)]
    turns = [(spot, instruction, program.runs[instruction.run].turn) for spot, instruction in found]
    return [(spot, instruction) for spot, instruction, turn in turns if turn is not None and not turn.opens]


def miss_rotation(program: Program, random: Random) -> Program | None:
    """What should have gone on is read where it was."""
    found = choose(random, _rotations(program))
    if found is None:
        return None
    spot, rotation = found
    body = program.stages[spot.stage].bodies[spot.body]
    kept = [i for i in body if i != rotation and not (isinstance(i, Wait) and i.buffer == rotation.target)]
    return with_body(program, spot, tuple(_reading(i, rotation.target, rotation.source) for i in kept))


def _reading(instruction: Instruction, old: Buffer, new: Buffer) -> Instruction:
    def other(buffers: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
        return tuple(new if buffer == old else buffer for buffer in buffers)

    match instruction:
        case Forward(inputs=inputs):
            return replace(instruction, inputs=other(inputs))
        case Backward(again=again):
            return replace(instruction, again=other(again))
        case Collective(source=source):
            return replace(instruction, source=new if source == old else source)
        case Sum(sources=sources):
            return replace(instruction, sources=other(sources))
    return instruction


def rotate_the_other_way(program: Program, random: Random) -> Program | None:
    """To the device before instead of the next; of two devices it is the same."""
    found = choose(random, _rotations(program))
    if found is None:
        return None
    spot, rotation = found
    (step,) = rotation.steps
    turned = replace(step, groups=tuple(group[::-1] for group in step.groups))
    return change(program, spot, replace(rotation, steps=(turned,)))


def rotate_twice(program: Program, random: Random) -> Program | None:
    found = choose(random, _rotations(program))
    if found is None:
        return None
    spot, rotation = found
    return change(program, spot, replace(rotation, steps=(*rotation.steps, *rotation.steps)))


def read_stale_keys(program: Program, random: Random) -> Program | None:
    """A turn reads keys or values of another turn, if they are still there."""
    turns = _turns(program)
    found = choose(random, turns)
    if found is None:
        return None
    spot, instruction = found
    name = "inputs" if isinstance(instruction, Forward) else "again"
    own: tuple[Buffer, ...] = getattr(instruction, name)
    i = random.randrange(len(own))
    others = sorted(
        {
            buffers[i]
            for other, turn in turns
            if (other.stage, other.body) == (spot.stage, spot.body) and type(turn) is type(instruction)
            for buffers in (getattr(turn, name),)
            if buffers[i].tensor == own[i].tensor
        }
        - {own[i]}
    )
    chosen = choose(random, others)
    if chosen is None:
        return None
    return change(program, spot, replace(instruction, **{name: (*own[:i], chosen, *own[i + 1 :])}))


def count_turn_twice(program: Program, random: Random) -> Program | None:
    found = choose(random, _turns(program))
    return None if found is None else change(program, found[0], found[1], found[1])


def leave_out_turn(program: Program, random: Random) -> Program | None:
    found = choose(random, [turn for turn in _turns(program) if isinstance(turn[1], Forward) and not turn[1].outputs])
    return None if found is None else change(program, found[0])


def leave_out_cotangent(program: Program, random: Random) -> Program | None:
    """A turn's cotangent of keys or values goes on without those of the turns before."""
    rotated = {rotation.tensor for _, rotation in _rotations(program)}
    sums = [(spot, found) for spot, found in find(program, Sum) if found.tensor in rotated]
    found = choose(random, sums)
    if found is None:
        return None
    spot, total = found
    return change(program, spot, replace(total, sources=(total.sources[random.randrange(2)],)))


RINGS: tuple[Corruption, ...] = (
    miss_rotation,
    rotate_the_other_way,
    rotate_twice,
    read_stale_keys,
    count_turn_twice,
    leave_out_turn,
    leave_out_cotangent,
)
