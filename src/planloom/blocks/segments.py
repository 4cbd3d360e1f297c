"""Segments: sequences of blocks that repeat, known by their fingerprint.

A block's fingerprint holds its operators, shapes, dtypes and dims; in a sequence also how far back its inputs were
made, or by which block where all layers read the same (an encoder's output). A segment is the period of the longest
repetition in the sequence of fingerprints; what lies before and after is searched again.
"""

import hashlib
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from planloom.blocks.grouping import Block, BlockGraph
from planloom.graph.values import is_reference

# Shorter repetitions (two equal maps side by side) are not layers.
_SHORTEST_PERIOD = 4
_MANY_LAYERS = 3
_FARTHEST_IN_LAYER = 6
"""Readers of one tensor that do equal work (q, k, v and a gate) are not further apart in one layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Blocks `start` up to `stop`; equal fingerprints mean equal work."""

    start: int
    stop: int
    fingerprint: str


def block_fingerprint(blocks: BlockGraph, block: Block) -> str:
    """A digest of what the block computes, without names."""
    graph = blocks.graph
    numbers: dict[str, int] = {}

    def number(tensor: str) -> int:
        return numbers.setdefault(tensor, len(numbers))

    def plain(arg: object) -> object:
        if is_reference(arg):
            return {"tensor": number(str(arg)[1:])}
        if isinstance(arg, float):
            return "number"  # another rate or scale is the same work
        return [plain(item) for item in arg] if isinstance(arg, list | tuple) else arg

    lines: list[object] = []
    for index in block.ops:
        op = graph.ops[index]
        shapes = [(graph.tensors[t].shape, graph.tensors[t].dtype, number(t)) for t in (*op.inputs, *op.outputs)]
        lines.append((op.target, plain(op.work_args), {k: plain(v) for k, v in op.kwargs.items()}, shapes))
    dims = [(dim.name, dim.size) for dim in block.dims]
    return _digest([lines, dims, len(block.parameters)])


def _digest(lines: object) -> str:
    return hashlib.sha256(msgspec.json.encode(lines)).hexdigest()[:16]


def _with_sources(blocks: BlockGraph, works: list[str]) -> list[str]:
    """Fingerprints that also say where inputs were made: so many blocks before, or, what all layers read, by whom."""
    shared: set[str] = set()
    for tensor, users in blocks.consumers.items():
        seen: dict[str, list[int]] = {}
        for user in users:  # in how many layers do equal blocks read it?
            layers = seen.setdefault(works[user], [user])
            if user - layers[-1] > _FARTHEST_IN_LAYER:
                layers.append(user)
        if any(len(layers) >= _MANY_LAYERS for layers in seen.values()):
            shared.add(tensor)
    prints = []
    for block, work in zip(blocks.blocks, works, strict=True):
        made = [(t in shared, blocks.producer[t]) for t in block.inputs]
        prints.append(_digest([work, [at if is_shared else at - block.index for is_shared, at in made]]))
    return prints


def find_segments(blocks: BlockGraph) -> tuple[Segment, ...]:
    """A partition of the blocks into segments, repetitions found first."""
    if "segments" not in blocks.found:
        blocks.found["segments"] = _find_segments(blocks)
    return blocks.found["segments"]  # type: ignore[return-value]


def _find_segments(blocks: BlockGraph) -> tuple[Segment, ...]:
    prints = _with_sources(blocks, [block_fingerprint(blocks, block) for block in blocks.blocks])
    crossing = _crossings(blocks)
    return tuple(
        Segment(start=a, stop=b, fingerprint=hashlib.sha256("".join(prints[a:b]).encode()).hexdigest()[:16])
        for a, b in _partition(prints, crossing, 0, len(prints))
    )


def _crossings(blocks: BlockGraph) -> list[int]:
    """How many tensors cross every cut; one through an expansion costs more, for then its original cannot run."""
    count = len(blocks.blocks)
    spans = [(blocks.producer[t], max(users), 1) for t, users in blocks.consumers.items() if t in blocks.producer]
    block_of = {i: block.index for block in blocks.blocks for i in block.ops}
    for members in blocks.graph.expansion_members:
        at = [block_of[i] for i in members]
        if at:
            spans.append((min(at), max(at), count))
    steps = [0] * (count + 1)
    for first, last, cost in spans:  # cuts after `first`, up to `last`
        if first < last:
            steps[first + 1] += cost
            steps[last + 1] -= cost
    return list(accumulate(steps))[:count]


def _partition(prints: list[str], crossing: list[int], low: int, high: int) -> list[tuple[int, int]]:
    best = (0, 0, 0)  # covered, -period, start
    for period in range(_SHORTEST_PERIOD, (high - low) // 2 + 1):
        run = 0
        for i in range(low, high - period):
            run = run + 1 if prints[i] == prints[i + period] else 0
            if run >= period and run % period == 0:
                best = max(best, (run + period, -period, i + 1 - run))
    covered, period, start = best[0], -best[1], best[2]
    if not covered:
        return [(low, high)] if low < high else []
    # Any rotation of the period repeats too, once less; start where the fewest tensors cross.
    shift = min(range(period), key=lambda r: (crossing[start + r], r))
    first, count = start + shift, covered // period - bool(shift)
    middle = [(first + i * period, first + (i + 1) * period) for i in range(count)]
    before = _partition(prints, crossing, low, first) if first > low else []
    return before + middle + _partition(prints, crossing, first + count * period, high)
