"""Segments of a stage's bodies: the instructions of one repeated group of blocks, with their collectives.

A body's runs follow each other segment by segment. A segment of a body begins with its first run and ends before the
first run of the next, so what its runs start (a gather for the next, a reduction of its gradients) belongs to it. It
ends earlier where the stage waits for another one: how long that takes is no property of the segment. Nor is it of a
shared stage, whose collectives wait for other roles: its bodies have no segments.

Its seconds are those from its first instruction, nothing being under way, until all that it started has ended: the sum
of its parts and whatever they do to each other. Equal segments (equal runs, collectives, groups and bytes) share a key.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from planloom.blocks import BlockGraph, find_segments
from planloom.cost.keys import SEGMENT_PREFIX, collective_prefix, run_fingerprint
from planloom.layout.boxes import lies_together
from planloom.program import (
    Accumulate,
    Backward,
    Buffer,
    Forward,
    Instruction,
    Program,
    Put,
    Receive,
    Send,
    Sum,
    Take,
    Wait,
    collectives_in,
)
from planloom.program.sizes import buffer_bytes, sizes_of_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class BodySegment:
    """The instructions `start` up to `stop` of a body; the key of its seconds."""

    start: int
    stop: int
    key: str


def body_segments(blocks: BlockGraph, program: Program, stage: int) -> dict[str, tuple[BodySegment, ...]]:
    """The segments of every body that a stage calls."""
    own = program.stages[stage]
    called = {call.body: own.bodies[call.body] for call in own.calls}
    bodies = {name: () if _is_shared(body) else body for name, body in called.items()}
    starts = [segment.start for segment in find_segments(blocks)]
    segment_of = {run.index: bisect_right(starts, run.blocks[0].block) for run in program.runs}
    exchanged = {
        i.source if isinstance(i, Send) else i.target
        for body in own.bodies.values()
        for i in body
        if isinstance(i, Send | Receive)
    }
    writer = _Signatures(blocks, program, buffer_bytes(blocks.graph, program, stage))
    found = {}
    for name, body in bodies.items():
        stretches = _stretches(body, segment_of, exchanged)
        found[name] = tuple(
            BodySegment(start=start, stop=stop, key=writer.key(body[start:stop])) for start, stop in stretches
        )
    return found


def _is_shared(body: Sequence[Instruction]) -> bool:
    return any(buffer.of >= 0 for i in body if isinstance(i, Forward | Backward) for buffer in _given(i))


def _given(run: Forward | Backward) -> list[Buffer]:
    """What a run makes, or takes the cotangents of."""
    return [b for b in (run.outputs if isinstance(run, Forward) else run.cotangents) if b is not None]


def _stretches(
    body: Sequence[Instruction], segment_of: Mapping[int, int], exchanged: set[Buffer]
) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    start, current = -1, -1
    for at, instruction in enumerate(body):
        if isinstance(instruction, Forward | Backward):
            segment = segment_of[instruction.run]
            if start >= 0 and segment != current:
                found.append((start, at))
                start = -1
            start, current = (at if start < 0 else start), segment
        elif start >= 0 and isinstance(instruction, Wait) and instruction.buffer in exchanged:
            found.append((start, at))
            start = -1
    return [*found, (start, len(body))] if start >= 0 else found


class _Signatures:
    """Instructions without names."""

    def __init__(self, blocks: BlockGraph, program: Program, sizes: Mapping[Buffer, int]) -> None:
        self._blocks, self._program, self._sizes = blocks, program, sizes
        self._prints: dict[int, str] = {}

    def key(self, instructions: Sequence[Instruction]) -> str:
        lines = [line for line in map(self._line, instructions) if line]
        return SEGMENT_PREFIX + hashlib.sha256(msgspec.json.encode(lines)).hexdigest()[:20]

    def _line(self, instruction: Instruction) -> list[object]:
        name = type(instruction).__name__
        match instruction:
            case Forward(run=run, saves=saves):
                return [name, self._print(run), saves]
            case Backward(run=run):
                return [name, self._print(run)]
            case Sum(target=target, sources=sources):
                return [name, self._sizes[target], len(sources)]
            case Accumulate(target=target):
                return [name, self._sizes[target], target.indexed or self._program.num_micro_batches > 1]
            case Take(target=target, box=box, sizes=sizes):
                return [] if lies_together(box, sizes) else [name, self._sizes[target]]
            case Put(source=source):
                return [name, self._sizes[source]]
        members = collectives_in(instruction)
        if not members:
            return []  # waits and frees take no time of their own, and sends are started only
        totals = [sum(column) for column in zip(*(sizes_of_steps(self._blocks.graph, c) for c in members), strict=True)]
        return [name, len(members), totals, [collective_prefix(step.kind, step.groups) for step in members[0].steps]]

    def _print(self, run: int) -> str:
        if run not in self._prints:
            self._prints[run] = run_fingerprint(self._blocks, self._program, self._program.runs[run])
        return self._prints[run]
