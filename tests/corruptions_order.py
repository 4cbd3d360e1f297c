"""Corruptions of when and where: another micro-batch, another home, another order of calls, frees and gathers."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from planloom.program import BodyCall, Coalesced, Collective, Free, Program, StageProgram, Wait
from tests.corruptions import Corruption, choose, find, with_body


def stale_micro_batch(program: Program, random: Random) -> Program | None:
    """A role calls a body for a micro-batch that is not its turn, instead of the one that is."""

    def stale(calls: list[BodyCall]) -> list[BodyCall] | None:
        at = choose(random, [i for i, call in enumerate(calls) if call.micro >= 0])
        others = sorted({call.micro for call in calls if call.micro >= 0 and at is not None} - {calls[at or 0].micro})
        if at is None or not others:
            return None
        calls[at] = replace(calls[at], micro=random.choice(others))
        return calls

    return _with_calls(program, random, stale)


def move_call(program: Program, random: Random) -> Program | None:
    """A role makes a call earlier, so that roles may wait for each other in a cycle; some orders are as good."""

    def moved(calls: list[BodyCall]) -> list[BodyCall]:
        at = random.randrange(1, len(calls))
        earliest = at - 1 if random.random() < 0.5 else 0  # half of them one place only: some of these are as good
        calls.insert(random.randrange(earliest, at), calls.pop(at))
        return calls

    return _with_calls(program, random, moved)


def _with_calls(
    program: Program, random: Random, changed: Callable[[list[BodyCall]], list[BodyCall] | None]
) -> Program | None:
    s = random.randrange(len(program.stages))
    calls = changed(list(program.stages[s].calls))
    return None if calls is None else _with_stage(program, s, replace(program.stages[s], calls=tuple(calls)))


def _with_stage(program: Program, s: int, stage: StageProgram) -> Program:
    return replace(program, stages=(*program.stages[:s], stage, *program.stages[s + 1 :]))


def store_elsewhere(program: Program, random: Random) -> Program | None:
    """A parameter is stored on another role than the one that reads it."""
    found = choose(random, [(s, p) for s, stage in enumerate(program.stages) for p in stage.parameters])
    if found is None or len(program.stages) < 2:
        return None
    s, stored = found
    other = random.choice([t for t in range(len(program.stages)) if t != s])
    own, others = program.stages[s], program.stages[other]
    kept = tuple(p for p in own.parameters if p != stored)
    program = _with_stage(program, s, replace(own, parameters=kept))
    moved = replace(stored, stage=other)
    return _with_stage(program, other, replace(others, parameters=(*others.parameters, moved)))


def free_twice(program: Program, random: Random) -> Program | None:
    """What is freed, or freed when it has been waited for, is freed once more at a later place of the body."""
    found = [(spot, free.buffer) for spot, free in find(program, Free)]
    found += [(spot, wait.buffer) for spot, wait in find(program, Wait) if wait.free]
    chosen = choose(random, found)
    if chosen is None:
        return None
    spot, buffer = chosen
    body = list(program.stages[spot.stage].bodies[spot.body])
    body.insert(random.randint(spot.index + 1, len(body)), Free(buffer=buffer))
    return with_body(program, spot, tuple(body))


def gather_after_use(program: Program, random: Random) -> Program | None:
    """A collective is started at a later place of the body, which may be behind what reads its result."""
    spots = [spot for kind in (Collective, Coalesced) for spot, _ in find(program, kind)]
    spots = [s for s in spots if s.index + 1 < len(program.stages[s.stage].bodies[s.body])]
    spot = choose(random, spots)
    if spot is None:
        return None
    body = list(program.stages[spot.stage].bodies[spot.body])
    body.insert(random.randint(spot.index + 1, len(body) - 1), body.pop(spot.index))
    return with_body(program, spot, tuple(body))


ORDER: dict[str, tuple[Corruption, ...]] = {
    "a stale micro-batch": (stale_micro_batch,),
    "a wrong home": (store_elsewhere,),
    "a cycle": (move_call,),
    "a double free": (free_twice,),
    "a gather after its use": (gather_after_use,),
}
