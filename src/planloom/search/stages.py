"""Where to cut a model into stages, and how long a step takes then.

With μ_s the seconds of stage s for one micro-batch, forward and backward, and σ_s what it does once a step, m
micro-batches and one-forward-one-backward,

    step = Σ_s μ_s + (m - 1) · max_s μ_s + max_s σ_s + Σ over cuts of the exchange there and back:

the first micro-batch passes all stages, the others follow at the pace of the slowest. Stage s keeps the activations of
min(p - s, m) micro-batches, so the first stages are the ones that lack memory. Other schedules (`schedules`) have other
weights, keep other numbers of micro-batches, and may give a device group several stages, which share its memory.

Every block comes with several *options*, from fast and large to slow and small: the solutions for a row of prices
of memory. A stage takes one option for its first segments and another, smaller one for the others; a segment that
is cut has the same option in both stages, since it is recomputed as a whole. For a pace every stage takes as many
blocks as fit into its time and memory, the peak being that of the blocks that are in it; the least pace at which
all blocks are taken is found by bisection.

For any cut, max ≥ mean gives  step ≥ (Σ_s ((m + p - 1) μ_s + σ_s)) / p: the bound that the search prunes with.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planloom.blocks import BlockGraph
from planloom.search.conversions import Array
from planloom.search.schedules import ONE_FORWARD_ONE_BACKWARD, Schedule

_BISECTIONS, _CLOSE = 30, 3e-4


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
    num_groups: int

    @property
    def group_bytes(self) -> tuple[float, ...]:
        """Of every group's devices: of its stages what each holds, and the largest peak."""
        groups = [self.stages[group :: self.num_groups] for group in range(self.num_groups)]
        return tuple(
            sum(stage.stored_bytes + stage.kept_micro * stage.saved_bytes for stage in own)
            + max(stage.peak_bytes for stage in own)
            for own in groups
        )

    @property
    def num_bytes(self) -> float:
        """Of the fullest group's devices."""
        return max(self.group_bytes)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The first block of every stage, and for every block which option it takes."""

    first_blocks: tuple[int, ...]
    options: tuple[int, ...]


def pack_stages(
    options: Sequence[BlockFigures],
    places: Sequence[int],
    num_micro: int,
    limits: Sequence[float],
    switches: Sequence[int] | None = None,
    schedule: Schedule = ONE_FORWARD_ONE_BACKWARD,
) -> Packing | None:
    """The cut and the options with the least pace; None if nothing fits into memory. `limits`: bytes, stage by
    stage; `switches`: the places at which a segment begins, and with it another option may (None: all of them).

    With several stages a device group each stage has the same pace.
    """
    count, num_stages = len(options[0].micro_seconds), len(limits)
    if len(places) + 1 < num_stages:
        return None
    num_groups = num_stages // schedule.stages_per_group
    packer = _Packer(
        options, np.array([0, *places, count]), limits, switches,
        kept=schedule.kept(num_groups, num_micro), weight=schedule.weight(num_groups, num_micro),
    )  # fmt: skip
    slowest = max(float(time[-1]) for time in packer.time)
    best = packer.pack(slowest)
    if best is None:
        return None
    low, high = min(float(time[-1]) for time in packer.time) / num_stages, slowest
    for _ in range(_BISECTIONS):
        if high - low <= _CLOSE * high:
            break
        pace = (low + high) / 2
        found = packer.pack(pace)
        if found is None:
            low = pace
        else:
            best, high = found, pace
    return best


@dataclass(frozen=True, slots=True)
class _Reach:
    """How far a stage gets, `stop`: with an option that is given up to `begin` (the rest of a segment that was cut),
    option `first` up to `switch` and option `second` from there."""

    stop: int
    begin: int
    first: int
    second: int
    switch: int


class _Packer:
    """Sums over blocks up to every edge (a place where a stage may begin), for every option."""

    def __init__(
        self,
        options: Sequence[BlockFigures],
        edges: NDArray[np.intp],
        limits: Sequence[float],
        switches: Sequence[int] | None,
        *,
        kept: Sequence[int],
        weight: float,
    ) -> None:
        self.edges, self.limits, self.kept = edges, limits, kept
        # What comes once a step counts as its share of a micro-batch.
        self.time = [_sums(o.micro_seconds + o.step_seconds / weight, edges) for o in options]
        self.stored = [_sums(o.stored_bytes, edges) for o in options]
        self.saved = [_sums(o.saved_bytes, edges) for o in options]
        self.peak = [np.maximum.reduceat(o.peak_bytes, edges[:-1]) for o in options]
        self._sums_held: dict[tuple[int, int], Array] = {}
        allowed = np.ones(len(edges), dtype=bool) if switches is None else np.isin(edges, np.array([0, *switches]))
        allowed[-1] = True
        self.switches = np.flatnonzero(allowed)
        """Edges at which an option may begin."""

    def pack(self, pace: float) -> Packing | None:
        """Stages that take as much as they can; None if something is left over."""
        at, last, first_edges, given = 0, len(self.edges) - 1, [], 0
        taken = np.zeros(int(self.edges[-1]), dtype=np.intp)
        for s, kept in enumerate(self.kept):
            limit = last - (len(self.kept) - s - 1)  # one for each stage that comes
            reach = self._farthest(at, given, kept, self.limits[s], pace, limit)
            if reach is None or reach.stop <= at:
                return None
            first_edges.append(at)
            for option, low, high in (
                (given, at, reach.begin), (reach.first, reach.begin, reach.switch),
                (reach.second, reach.switch, reach.stop),
            ):  # fmt: skip
                taken[self.edges[low] : self.edges[high]] = option
            at, given = reach.stop, int(taken[self.edges[reach.stop] - 1])
        if at < last:
            return None
        return Packing(
            first_blocks=tuple(int(self.edges[i]) for i in first_edges), options=tuple(int(i) for i in taken)
        )

    def _farthest(self, at: int, given: int, kept: int, num_bytes: float, pace: float, limit: int) -> _Reach | None:
        """The stage that gets farthest; of equal ones the one with the faster options."""
        begin = min(int(self.switches[self.switches.searchsorted(at)]), limit)
        start = self._Start(pace * (1 + 1e-12), num_bytes, 0.0)
        if begin > at:
            stop, left = self._run(start, given, kept, at, begin)
            if stop < begin or stop == limit:
                return _Reach(stop, stop, given, given, stop)
            start = left
        best: _Reach | None = None if begin == at else _Reach(begin, begin, given, given, begin)
        for first in range(len(self.time)):
            found = self._reach(start, begin, kept, limit, first)
            if found is not None and (best is None or found.stop > best.stop):
                best = found
            if best is not None and best.stop == limit:
                break  # options are sorted by speed: this is the fastest that gets there
        return best

    @dataclass(frozen=True, slots=True)
    class _Start:
        """What is left of a stage's time and memory, and the peak so far."""

        seconds: float
        num_bytes: float
        peak: float

    def _run(self, start: "_Start", option: int, kept: int, at: int, limit: int) -> tuple[int, "_Start"]:
        """How far one option gets from an edge on, and what is left there."""
        time, held = self.time[option], self._held(option, kept)
        farthest = min(
            _last(time, time[at] + start.seconds), _last(held, held[at] + start.num_bytes - start.peak), limit
        )
        if farthest <= at:
            return at, start
        peaks = np.maximum(np.maximum.accumulate(self.peak[option][at:farthest]), start.peak)
        fits = held[at + 1 : farthest + 1] - held[at] + peaks <= start.num_bytes
        count = int(fits.sum())  # what is held only grows
        if not count:
            return at, start
        stop = at + count
        return stop, self._Start(
            start.seconds - float(time[stop] - time[at]),
            start.num_bytes - float(held[stop] - held[at]),
            float(peaks[count - 1]),
        )

    def _reach(self, start: "_Start", at: int, kept: int, limit: int, first: int) -> _Reach | None:
        """How far an option, and from some switch on a smaller one, get within time and memory."""
        alone, _ = self._run(start, first, kept, at, limit)
        best = _Reach(alone, at, first, first, alone) if alone > at else None
        if alone == limit:
            return best
        low = int(self.switches.searchsorted(at))
        switches = self.switches[low : int(self.switches.searchsorted(min(alone, limit - 1), side="right"))]
        if not len(switches):
            return best
        time, held = self.time[first], self._held(first, kept)
        seconds, num_bytes = start.seconds - (time[switches] - time[at]), start.num_bytes - (held[switches] - held[at])
        peaks = np.maximum(np.maximum.accumulate(np.append(0.0, self.peak[first][at:alone])), start.peak)[switches - at]
        for second in range(first + 1, len(self.time)):
            time, held = self.time[second], self._held(second, kept)
            stops = np.minimum(
                time.searchsorted(time[switches] + seconds, side="right"),
                held.searchsorted(held[switches] + num_bytes - peaks, side="right"),
            )
            stops = np.minimum(stops - 1, limit)  # if its own peak is no larger
            for i in np.lexsort((-switches, -stops)).tolist():
                # the latest switch of equal ones: as much of the faster option as possible
                if stops[i] <= (best.stop if best is not None else at):
                    break
                left = self._Start(float(seconds[i]), float(num_bytes[i]), float(peaks[i]))
                stop, _ = self._run(left, second, kept, int(switches[i]), limit)
                if stop > (best.stop if best is not None else at):
                    best = _Reach(stop, at, first, second, int(switches[i]))
        return best

    def _held(self, option: int, kept: int) -> Array:
        """Bytes up to every edge, with so many micro-batches kept."""
        if (option, kept) not in self._sums_held:
            self._sums_held[option, kept] = self.stored[option] + kept * self.saved[option]
        return self._sums_held[option, kept]


def _last(sums: Array, limit: float) -> int:
    """The last edge up to which no more than the limit is summed."""
    return int(sums.searchsorted(limit, side="right")) - 1


def _sums(values: Array, edges: NDArray[np.intp]) -> Array:
    return np.concatenate([[0.0], np.cumsum(values)])[edges]


def estimate_stages(
    figures: BlockFigures,
    first_blocks: Sequence[int],
    num_micro: int,
    exchange_seconds: float,
    schedule: Schedule = ONE_FORWARD_ONE_BACKWARD,
) -> Estimate:
    """The estimate of a cut."""
    num_groups = len(first_blocks) // schedule.stages_per_group
    kept = schedule.kept(num_groups, num_micro)
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
    groups = [stages[group::num_groups] for group in range(num_groups)]
    slowest = max(sum(stage.micro_seconds for stage in own) for own in groups)
    last = max(sum(stage.step_seconds for stage in own) for own in groups)
    latency = schedule.latency
    step = latency * sum(stage.micro_seconds for stage in stages) + (num_micro - latency) * slowest + last
    return Estimate(
        step_seconds=step + exchange_seconds,
        stages=tuple(stages),
        exchange_seconds=exchange_seconds,
        num_groups=num_groups,
    )
