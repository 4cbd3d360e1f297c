"""Corruptions of loops: the errors that a planner could make where blocks are carried out piece by piece."""

from dataclasses import replace
from random import Random

from planloom.program import Accumulate, Backward, Buffer, Forward, Instruction, Program, Put, Take
from planloom.program.free import reads
from tests.corruptions import Corruption, Spot, change, choose, find, free_earlier, with_body


def _in_moments(program: Program) -> list[tuple[Spot, Forward | Backward]]:
    """The runs of scopes, forward and backward."""
    found: list[tuple[Spot, Forward | Backward]] = [*find(program, Forward), *find(program, Backward)]
    return [(spot, run) for spot, run in found if program.runs[run.run].moment]


def _sums(program: Program) -> list[tuple[Spot, Accumulate]]:
    """Additions of a piece to the sum over all."""
    return [(spot, addition) for spot, addition in find(program, Accumulate) if addition.target.indexed]


def _leaving(program: Program) -> list[tuple[Spot, Instruction]]:
    return [*find(program, Put), *_sums(program)]


def take_another_piece(program: Program, random: Random) -> Program | None:
    """A stale piece: the slice of another moment."""
    chosen = choose(random, find(program, Take))
    if chosen is None:
        return None
    spot, take = chosen
    boxes = sorted({t.box for _, t in find(program, Take) if t.source == take.source and t.sizes == take.sizes})
    return change(program, spot, replace(take, box=random.choice(boxes)))


def read_another_piece(program: Program, random: Random) -> Program | None:
    """A run reads, or its backward takes, what the same run made or was given in another moment."""
    chosen = choose(random, _in_moments(program))
    if chosen is None:
        return None
    spot, own = chosen
    others = [
        other
        for place, other in _in_moments(program)
        if place[:2] == spot[:2] and type(other) is type(own) and _alike(program, own, other)
    ]
    other = random.choice(others)
    if isinstance(own, Forward) and isinstance(other, Forward):
        i = random.randrange(len(own.inputs))
        return change(program, spot, replace(own, inputs=_with(own.inputs, i, other.inputs[i])))
    assert isinstance(own, Backward)
    assert isinstance(other, Backward)
    i = random.randrange(len(own.cotangents))
    return change(program, spot, replace(own, cotangents=_with(own.cotangents, i, other.cotangents[i])))


def _alike(program: Program, first: Forward | Backward, second: Forward | Backward) -> bool:
    """Are two runs the same in two moments?"""
    blocks = [[part.block for part in program.runs[of.run].blocks] for of in (first, second)]
    return blocks[0] == blocks[1] and (isinstance(first, Backward) or first.again == second.again)  # type: ignore[union-attr]


def _with(buffers: tuple[Buffer | None, ...], i: int, buffer: Buffer | None) -> tuple[Buffer, ...]:
    return (*buffers[:i], buffer, *buffers[i + 1 :])  # type: ignore[return-value]


def put_elsewhere(program: Program, random: Random) -> Program | None:
    """A piece is written to the place of another one."""
    chosen = choose(random, find(program, Put))
    if chosen is None:
        return None
    spot, put = chosen
    boxes = sorted({p.box for _, p in find(program, Put) if p.target == put.target and p.sizes == put.sizes})
    return change(program, spot, replace(put, box=random.choice(boxes)))


def miss_a_piece(program: Program, random: Random) -> Program | None:
    """A piece is neither put to its place nor added."""
    chosen = choose(random, _leaving(program))
    return None if chosen is None else change(program, chosen[0])


def count_a_piece_twice(program: Program, random: Random) -> Program | None:
    """A piece is added twice; or put to its place twice, which is neutral."""
    chosen = choose(random, _leaving(program))
    return None if chosen is None else change(program, chosen[0], chosen[1], chosen[1])


def leave_before_it_is_made(program: Program, random: Random) -> Program | None:
    """A piece leaves a few places earlier: perhaps before its run, or before its reduction has ended."""
    chosen = choose(random, _leaving(program))
    if chosen is None:
        return None
    spot = chosen[0]
    body = list(program.stages[spot.stage].bodies[spot.body])
    body.insert(max(0, spot.index - random.randint(1, 8)), body.pop(spot.index))
    return with_body(program, spot, tuple(body))


def take_later(program: Program, random: Random) -> Program | None:
    """A piece is taken a few places later: perhaps behind its use, or behind the free of the whole."""
    chosen = choose(random, find(program, Take))
    if chosen is None:
        return None
    spot = chosen[0]
    body = list(program.stages[spot.stage].bodies[spot.body])
    body.insert(min(len(body) - 1, spot.index + random.randint(1, 12)), body.pop(spot.index))
    return with_body(program, spot, tuple(body))


def read_the_whole(program: Program, random: Random) -> Program | None:
    """A run is given all pieces for one: of a tensor that is taken piece by piece."""
    sources = {take.target: take.source for _, take in find(program, Take)}
    spots = [(s, run) for s, run in _in_moments(program) if any(buffer in sources for buffer in reads(run))]
    chosen = choose(random, spots)
    if chosen is None:
        return None
    spot, run = chosen
    if isinstance(run, Forward):
        return change(program, spot, replace(run, inputs=tuple(sources.get(b, b) for b in run.inputs)))
    wholes = tuple(None if b is None else sources.get(b, b) for b in run.cotangents)
    return change(program, spot, replace(run, cotangents=wholes))


LOOPS: tuple[Corruption, ...] = (
    take_another_piece,
    read_another_piece,
    put_elsewhere,
    miss_a_piece,
    count_a_piece_twice,
    leave_before_it_is_made,
    take_later,
    read_the_whole,
    free_earlier,
)
