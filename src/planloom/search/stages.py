"""Where to cut a model into stages, and how long a step takes then.

With μ_s the seconds of stage s for one micro-batch, forward and backward, and σ_s what it does once a step, m micro-batches
and one-forward-one-backward,

    step = Σ_s μ_s + (m - 1) · max_s μ_s + max_s σ_s + Σ over cuts of the exchange there and back:

the first micro-batch passes all stages, the others follow at the pace of the slowest. Stage s keeps the activations of
min(p - s, m) micro-batches. Of all cuts that fit into memory the one with the least max μ_s is taken, found by bisection:
for a pace, every stage takes as many blocks as the pace and its memory allow.

For any cut, max ≥ mean gives  step ≥ (Σ_s ((m + p - 1) μ_s + σ_s)) / p: the bound that the search prunes with.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planloom.blocks import BlockGraph
from planloom.search.conversions import Array

_BISECTIONS = 30


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class BlockFigures:
    """One problem, block by block: seconds and bytes of what was chosen."""

    micro_seconds: Array
    step_seconds: Array
    stored_bytes: Array
    saved_bytes: Array
    peak_bytes: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """One stage: its first block, seconds a micro-batch and a step, and the bytes of a device by part."""

    first_block: int
    micro_seconds: float
    step_seconds: float
    stored_bytes: float
    saved_bytes: float
    peak_bytes: float
    kept_micro: int

    @property
    def num_bytes(self) -> float:
        return self.stored_bytes + self.kept_micro * self.saved_bytes + self.peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The estimate of a plan: the sum over blocks and edges, put together by the formula above."""

    step_seconds: float
    stages: tuple[StageFigures, ...]
    exchange_seconds: float

    @property
    def num_bytes(self) -> float:
        """Of the fullest stage's devices."""
        return max(stage.num_bytes for stage in self.stages)


def cut_places(blocks: BlockGraph) -> tuple[int, ...]:
    """The blocks at which a stage may begin: where two tensors cross at most, and no rows of experts."""
    count = len(blocks.blocks)
    crossing, rows = np.zeros(count + 1, dtype=int), np.zeros(count + 1, dtype=int)
    for tensor, users in blocks.consumers.items():
        if tensor in blocks.producer:
            low, high = blocks.producer[tensor] + 1, max(users)
            crossing[low] += 1
            crossing[high + 1] -= 1
            if blocks.graph.tensors[tensor].rows:
                rows[low] += 1
                rows[high + 1] -= 1
    crossing, rows = np.cumsum(crossing), np.cumsum(rows)
    allowed = [at for at in range(1, count) if not rows[at]]
    fewest = min((crossing[at] for at in allowed), default=0)
    return tuple(at for at in allowed if crossing[at] <= max(2, fewest))


def kept_micro_batches(num_stages: int, num_micro: int) -> list[int]:
    """How many micro-batches' activations each stage keeps under one-forward-one-backward."""
    return [min(num_stages - s, num_micro) for s in range(num_stages)]


def cut_into_stages(
    figures: BlockFigures,
    places: Sequence[int],
    num_stages: int,
    num_micro: int,
    limit_bytes: float,
) -> tuple[int, ...] | None:
    """The first block of every stage, or None if no cut fits into memory."""
    kept = kept_micro_batches(num_stages, num_micro)
    edges = np.array([0, *places, len(figures.micro_seconds)])
    time = _sums(figures.micro_seconds, edges)
    stored, saved = _sums(figures.stored_bytes, edges), _sums(figures.saved_bytes, edges)
    room = limit_bytes - float(figures.peak_bytes.max())
    if num_stages == 1:
        return (0,) if stored[-1] + kept[0] * saved[-1] <= room else None
    if len(edges) - 1 < num_stages:
        return None
    low, high = time[-1] / num_stages, time[-1]
    best = _packed(time, stored, saved, kept, high, room)
    if best is None:
        return None
    for _ in range(_BISECTIONS):
        pace = (low + high) / 2
        found = _packed(time, stored, saved, kept, pace, room)
        if found is None:
            low = pace
        else:
            best, high = found, pace
        if high - low <= 1e-9 * high:
            break
    return tuple(int(edges[i]) for i in best)


def _sums(values: Array, edges: NDArray[np.intp]) -> Array:
    return np.concatenate([[0.0], np.cumsum(values)])[edges]


def _packed(
    time: Array, stored: Array, saved: Array, kept: Sequence[int], pace: float, room: float
) -> list[int] | None:
    """The edge at which every stage begins, each taking as much as it can; None if something is left over."""
    at, found, last = 0, [], len(time) - 1
    for s, count in enumerate(kept):
        found.append(at)
        held = stored + count * saved
        stop = min(
            int(np.searchsorted(time, time[at] + pace * (1 + 1e-12), side="right")) - 1,
            int(np.searchsorted(held, held[at] + room, side="right")) - 1,
            last - (len(kept) - s - 1),  # one for each stage that comes
        )
        if stop <= at:
            return None
        at = stop
    return found if at == last else None


def estimate_stages(
    figures: BlockFigures, first_blocks: Sequence[int], num_micro: int, exchange_seconds: float
) -> Estimate:
    """The estimate of a cut."""
    kept = kept_micro_batches(len(first_blocks), num_micro)
    edges = [*first_blocks, len(figures.micro_seconds)]
    stages = []
    for s, start in enumerate(first_blocks):
        own = slice(start, edges[s + 1])
        stages.append(
            StageFigures(
                first_block=start,
                micro_seconds=float(figures.micro_seconds[own].sum()),
                step_seconds=float(figures.step_seconds[own].sum()),
                stored_bytes=float(figures.stored_bytes[own].sum()),
                saved_bytes=float(figures.saved_bytes[own].sum()),
                peak_bytes=float(figures.peak_bytes[own].max()),
                kept_micro=kept[s],
            )
        )
    micro = [stage.micro_seconds for stage in stages]
    step = sum(micro) + (num_micro - 1) * max(micro) + max(stage.step_seconds for stage in stages)
    return Estimate(step_seconds=step + exchange_seconds, stages=tuple(stages), exchange_seconds=exchange_seconds)
