"""The best ways to carry out a change of layout on a cluster, and how far from optimal they can be.

A *choice* is one program, or two that take turns, cut into chunks. A single chunk takes the sum of its steps. Several
chunks are on their way at once: while one is reduced between nodes the next is reduced inside them. With t_s the
seconds of step s on one chunk, and b_sl how long it keeps the busiest wire of level l busy, over all chunks

    wires    = max( max over levels l of the sum of b_sl,  max over queues of the sum of t_s )
    host     = what a device's host takes to start and to receive all messages
    rate     = √(wires² + host²)
    rest     = the sum of all t_s, less that of the wires
    seconds  = the longest chunk's sum of t_s  +  (rate + loss · rest) · (chunks - 1) / chunks

since all steps at a level share its wires, and steps in one queue run one after another: those of a process group,
where a library has to see them in one order, or, by rings, which are single messages, each step by itself. With one
program for all chunks this is the first chunk's whole time and then one bottleneck a chunk. What is done beside the
bottleneck is not quite free: a share of it, `OVERLAP_LOSS`, is lost, and where host and wires are both nearly busy all
the time each waits for the other now and then, which the root of squares describes well enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import hypot

from planloom.cluster import Cluster
from planloom.collective.bounds import lower_bound_seconds
from planloom.collective.pricing import CostLine, digits_cost, seconds_price
from planloom.collective.refine import is_refinable, refine
from planloom.collective.steps import LOCAL_KINDS
from planloom.collective.synthesis import Move, Synthesized, synthesize
from planloom.errors import LayoutError
from planloom.layout import Layout, Mesh

MAX_CHUNKS = 32
CYCLES = ((1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (7, 1), (1, 7), (5, 3), (3, 5))
"""Of how many chunks each of two programs takes its turns: where links differ, so do the best shares."""

MIN_CHUNK_BYTES = 256 << 10
"""Smaller collectives are mostly latency, and cannot be priced well."""

OVERLAP_LOSS = 0.05
"""[Empirical] On the testbed (2 cores, gloo, 2026-11-16), chunks of two-level reductions."""

MIN_GAIN = 0.03
"""A second program, or steps to save others, must promise to be this much faster than a simpler choice."""
MIN_CHUNK_GAIN = 0.01
"""Twice as many chunks must promise to be this much faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The program of all chunks, or a cycle of programs that take turns."""

    programs: tuple[Synthesized, ...]
    num_chunks: int
    seconds: float

    @property
    def lanes(self) -> tuple[Synthesized, ...]:
        """The program of every chunk."""
        return tuple(self.programs[i % len(self.programs)] for i in range(self.num_chunks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """A change of layout on one mesh: the default (one collective over all digits), the choices, best first."""

    default: Choice
    choices: tuple[Choice, ...]
    lower_bound_seconds: float

    @property
    def best(self) -> Choice:
        return self.choices[0]

    @property
    def speedup(self) -> float:
        return self.default.seconds / self.best.seconds


def find_reductions(
    cluster: Cluster,
    mesh: Mesh,
    source: Layout,
    target: Layout,
    sizes: tuple[int, ...],
    *,
    item_bytes: int = 4,
    num_best: int = 1,
    chunked: bool = True,
) -> Reduction:
    """The `num_best` best choices; `chunked=False` leaves out pipelining and pairs of programs."""
    num_moved = len(refine(source, target, mesh, sizes).moved) if is_refinable(source, target) else 0
    width = max(num_best, (_SEARCHED if num_moved <= _FEW_DIGITS else _PAIRED) if chunked else 1)
    price = seconds_price(cluster)
    found = synthesize(source, target, mesh, sizes, price=price, item_bytes=item_bytes, num_best=width, detours=False)
    (cheapest,) = synthesize(source, target, mesh, sizes, price=price, item_bytes=item_bytes)
    if cheapest.price < found[0].price * (1 - MIN_GAIN):
        found = (cheapest, *found)
    if not found[0].moves:
        raise LayoutError("nothing is to be done", given=str(source), required="a target that differs from the source")
    estimate = _Estimate(cluster, mesh)
    choices = [_best_chunking(estimate, (program,), chunked) for program in found]
    if chunked:
        pairs = combinations([program for program in found[:_PAIRED] if len(program.moves) > 1], 2)
        single = min(choice.seconds for choice in choices)
        most = min(p.moves[0].num_bytes for p in found) / MIN_CHUNK_BYTES
        turns = [turn for turn in CYCLES if sum(turn) <= most]
        cycles = [_cycle(*pair, *turn) for pair in pairs if _differ_at_first(*pair) for turn in turns]
        paired = [_best_chunking(estimate, cycle, chunked) for cycle in cycles]
        choices += [choice for choice in paired if choice.seconds < single * (1 - MIN_GAIN)]
    ranked = _distinct(sorted(choices, key=lambda choice: (choice.seconds, len(choice.programs), choice.num_chunks)))
    return Reduction(
        default=_default(estimate, source, target, mesh, sizes, item_bytes),
        choices=_worthwhile(ranked)[:num_best],
        lower_bound_seconds=lower_bound_seconds(cluster, mesh, source, target, sizes, item_bytes=item_bytes),
    )


_SEARCHED = 24  # programs whose chunking is tried; with more digits than a few, those that are tried in pairs
_FEW_DIGITS = 4
_PAIRED = 8  # programs that are tried in pairs


def _default(
    estimate: "_Estimate", source: Layout, target: Layout, mesh: Mesh, sizes: tuple[int, ...], item_bytes: int
) -> Choice:
    """The shortest program: one collective over all digits, wherever one collective does it."""
    (shortest,) = synthesize(
        source, target, mesh, sizes, price=lambda *_: lambda num_bytes: 1.0, item_bytes=item_bytes, num_best=1
    )
    return Choice(programs=(shortest,), num_chunks=1, seconds=estimate.seconds((shortest,), 1))


def _cycle(first: Synthesized, second: Synthesized, num_first: int, num_second: int) -> tuple[Synthesized, ...]:
    """Turns of two programs, spread as evenly as they go."""
    length = num_first + num_second
    return tuple(second if (i + 1) * num_second // length > i * num_second // length else first for i in range(length))


def _differ_at_first(first: Synthesized, second: Synthesized) -> bool:
    return {m.digit for m in first.moves[0].digits} != {m.digit for m in second.moves[0].digits}


def _best_chunking(estimate: "_Estimate", programs: tuple[Synthesized, ...], chunked: bool) -> Choice:
    """The fewest chunks than which more promise no worthwhile gain."""
    num_bytes = min(program.moves[0].num_bytes for program in programs)
    best: Choice | None = None
    num_chunks = len(programs)
    while best is None or (chunked and num_chunks <= MAX_CHUNKS and num_bytes / num_chunks >= MIN_CHUNK_BYTES):
        seconds = estimate.seconds(programs, num_chunks)
        if best is None or seconds < best.seconds * (1 - MIN_CHUNK_GAIN):
            best = Choice(programs=programs, num_chunks=num_chunks, seconds=seconds)
        num_chunks *= 2
    return best


def _distinct(ranked: Sequence[Choice]) -> list[Choice]:
    """Of choices that use the same programs, the best."""
    seen: set[frozenset[tuple[Move, ...]]] = set()
    kept = []
    for choice in ranked:
        key = frozenset(program.moves for program in choice.programs)
        if key not in seen:
            seen.add(key)
            kept.append(choice)
    return kept


def _worthwhile(ranked: Sequence[Choice]) -> tuple[Choice, ...]:
    """Put a simpler choice first where a more complicated one promises no worthwhile gain."""
    best = ranked[0]
    simpler = [c for c in ranked if c.seconds * (1 - MIN_GAIN) <= best.seconds]
    first = min(simpler, key=lambda c: (len(c.programs), c.num_chunks > 1, sum(len(p.moves) for p in c.programs)))
    return (first, *(choice for choice in ranked if choice is not first))


class _Estimate:
    """Seconds of programs in chunks on one mesh."""

    def __init__(self, cluster: Cluster, mesh: Mesh) -> None:
        self.cluster, self.mesh = cluster, mesh
        self.price = seconds_price(cluster)

    def seconds(self, programs: tuple[Synthesized, ...], num_chunks: int) -> float:
        if len(programs) == 1 and num_chunks == 1:
            return sum(self._step_seconds(move, 1) for move in programs[0].moves)
        levels: dict[int, float] = {}
        queues: dict[object, float] = {}
        longest, host = 0.0, 0.0
        for program in programs:
            share = num_chunks / len(programs)
            chunk = 0.0
            for number, move in enumerate(program.moves):
                seconds = self._step_seconds(move, num_chunks)
                chunk += seconds
                line = self._line(move, num_chunks)
                digits = tuple(m.digit for m in move.digits)
                queue = (digits, move.masters, number if line is not None and line.algorithm == "rings" else -1)
                queues[queue] = queues.get(queue, 0.0) + seconds * share
                if line is None:
                    continue
                host += line.num_messages * self.cluster.device.launch_seconds * share
                for level, per_byte in line.busy_seconds_per_byte:
                    busy = per_byte * move.num_bytes / num_chunks
                    levels[level] = levels.get(level, 0.0) + busy * share
            longest = max(longest, chunk)
        wires = max((*levels.values(), *queues.values()))
        rest = max(0.0, sum(queues.values()) - wires)
        return longest + (hypot(wires, host) + OVERLAP_LOSS * rest) * (num_chunks - 1) / num_chunks

    def _step_seconds(self, move: Move, num_chunks: int) -> float:
        digits = tuple(m.digit for m in move.digits)
        return self.price(self.mesh, move.kind, digits, move.masters)(move.num_bytes / num_chunks)

    def _line(self, move: Move, num_chunks: int) -> CostLine | None:
        """How a step is carried out on a chunk; None if it sends nothing."""
        if move.kind in LOCAL_KINDS:
            return None
        digits = tuple(m.digit for m in move.digits)
        return digits_cost(self.cluster, self.mesh, move.kind, digits, move.masters).line(move.num_bytes / num_chunks)
