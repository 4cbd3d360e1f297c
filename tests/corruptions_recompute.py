"""Corruptions of recomputations: the errors that a planner could make in programs that recompute segments."""

import re
from dataclasses import fields, replace
from random import Random
from typing import TypeVar

from planloom.program import Buffer, Forward, Instruction, Program
from tests.corruptions import Corruption, Spot, change, choose, find, free_earlier, with_body

Item = TypeVar("Item")
_SUFFIX = re.compile(r":again\d+")
"""In the names of buffers that a recomputation makes."""


def _again(program: Program) -> list[tuple[Spot, Forward]]:
    return [(spot, forward) for spot, forward in find(program, Forward) if forward.again]


def leave_out_recomputation(program: Program, random: Random) -> Program | None:
    found = choose(random, _again(program))
    return None if found is None else change(program, found[0])


def recompute_without_saving(program: Program, random: Random) -> Program | None:
    """A run is carried out again, and what its backward needs is not kept; or the other way round, which is neutral."""
    found = choose(random, _again(program))
    return None if found is None else change(program, found[0], replace(found[1], saves=not found[1].saves))


def recompute_later(program: Program, random: Random) -> Program | None:
    """A run is carried out again a few places later: perhaps behind its backward, or behind a free of what it reads."""
    found = choose(random, _again(program))
    if found is None:
        return None
    spot = found[0]
    body = list(program.stages[spot.stage].bodies[spot.body])
    latest = min(len(body) - 1, spot.index + 12)
    if latest <= spot.index:
        return None
    body.insert(random.randint(spot.index + 1, latest), body.pop(spot.index))
    return with_body(program, spot, tuple(body))


def recompute_from_forward(program: Program, random: Random) -> Program | None:
    """What was made again is read where the forward had put it: freed, unless the forward's own is kept."""
    spots = [
        (spot, forward, i)
        for spot, forward in _again(program)
        for i, buffer in enumerate(forward.inputs)
        if _SUFFIX.search(buffer.name)
    ]
    chosen = choose(random, spots)
    if chosen is None:
        return None
    spot, forward, i = chosen
    old = replace(forward.inputs[i], name=_SUFFIX.sub("", forward.inputs[i].name))
    return change(program, spot, replace(forward, inputs=(*forward.inputs[:i], old, *forward.inputs[i + 1 :])))


def keep_one_for_all_micro_batches(program: Program, random: Random) -> Program | None:
    """What enters a recomputed segment has one place, in which every micro-batch's forward writes."""
    kept = sorted(
        {
            (spot.stage, buffer)
            for spot, forward in _again(program)
            for buffer in forward.inputs
            if buffer.indexed and not _SUFFIX.search(buffer.name)
        }
    )
    chosen = choose(random, kept)
    if chosen is None:
        return None
    s, buffer = chosen
    stage = program.stages[s]
    bodies = {
        name: tuple(_with_buffer(i, buffer, replace(buffer, indexed=False)) for i in body)
        for name, body in stage.bodies.items()
    }
    stages = [replace(stage, bodies=bodies) if i == s else other for i, other in enumerate(program.stages)]
    return replace(program, stages=tuple(stages))


def _with_buffer(value: Item, old: Buffer, new: Buffer) -> Item:
    """An instruction, or what it holds, with another buffer in the place of one."""
    if value == old:
        return new  # type: ignore[return-value]
    if isinstance(value, tuple):
        return tuple(_with_buffer(item, old, new) for item in value)  # type: ignore[return-value]
    if isinstance(value, Instruction):
        changed = {f.name: _with_buffer(getattr(value, f.name), old, new) for f in fields(value)}
        return replace(value, **changed)
    return value


RECOMPUTATIONS: tuple[Corruption, ...] = (
    leave_out_recomputation,
    recompute_without_saving,
    recompute_later,
    recompute_from_forward,
    keep_one_for_all_micro_batches,
    free_earlier,
)
