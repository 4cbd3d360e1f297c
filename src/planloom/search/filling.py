"""Stages filled as far as they go: every segment with the option that makes the most of a stage's time and memory.

Packing (`stages`) gives a stage two options, one for its first segments and one for the others. With a few layers a
stage that leaves memory unused: a layer whose activations are kept by 16 micro-batches is a fifth of a device. Here
every segment of a stage may have any option. Stages take, one after another, as many blocks as they can at a given
pace, and the least pace at which all blocks are taken is found by bisection.

What a stage can be filled with is found segment by segment, by labels: (seconds, bytes held, peak) of all ways to take
the segments up to here. Of labels whose bytes are in the same of `_BUCKETS` parts of the limit, and whose peaks are
equal, the fastest stays, and of those only the ones that are faster than all with fewer bytes. The last segment may be
cut; its rest has the same option in the next stage, since a segment is recomputed as a whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planloom.search.conversions import Array
from planloom.search.stages import BlockFigures, Packing

_BUCKETS = 128
_BISECTIONS, _CLOSE = 16, 3e-4
_ROUNDING = 1 + 1e-12


@dataclass(frozen=True, eq=False, slots=True)
class _Labels:
    """Ways to fill a stage up to some place: sums, and how each came about (its label before, its option)."""

    seconds: Array
    held: Array
    peaks: Array
    before: NDArray[np.intp]
    options: NDArray[np.intp]

    @staticmethod
    def single(seconds: float, held: float, peak: float) -> "_Labels":
        none = np.full(1, -1)
        return _Labels(np.array([seconds]), np.array([held]), np.array([peak]), none, none)


@dataclass(frozen=True, slots=True)
class _Filled:
    """One stage: where it stops, the option of what it begins with (the rest of a segment that was cut, up to `begin`),
    and of every segment from there."""

    stop: int
    begin: int
    given: int
    options: tuple[int, ...]


class Filler:
    """Of one problem: `options` block by block, `places` where stages may begin, `switches` where segments do.

    `weight`: by what the seconds of a step are divided to count as some of a micro-batch's; `kept`: micro-batches held
    by every stage.
    """

    def __init__(
        self,
        options: Sequence[BlockFigures],
        places: Sequence[int],
        switches: Sequence[int],
        *,
        weight: float,
        kept: Sequence[int],
        limits: Sequence[float],
    ) -> None:
        count = len(options[0].micro_seconds)
        self.edges = np.array([0, *places, count])
        self.kept, self.limits, self.num_options = kept, limits, len(options)
        self.seconds = np.stack([_sums(own.micro_seconds + own.step_seconds / weight, self.edges) for own in options])
        self._stored = np.stack([_sums(own.stored_bytes, self.edges) for own in options])
        self._saved = np.stack([_sums(own.saved_bytes, self.edges) for own in options])
        self.peaks = np.stack([np.maximum.reduceat(own.peak_bytes, self.edges[:-1]) for own in options])
        begins = {0, *(int(i) for i in np.flatnonzero(np.isin(self.edges, list(switches))))}
        self.begins = np.array(sorted(begins | {len(self.edges) - 1}))
        """Edges at which a segment begins, and the end."""

    def packing(self) -> Packing | None:
        """The cut and the options with the least pace that is found; None if nothing fits."""
        slowest = float(self.seconds[:, -1].max())
        best = self._packed(slowest)
        if best is None:
            return None
        low, high = float(self.seconds[:, -1].min()) / len(self.kept), slowest
        for _ in range(_BISECTIONS):
            if high - low <= _CLOSE * high:
                break
            pace = (low + high) / 2
            found = self._packed(pace)
            if found is None:
                low = pace
            else:
                best, high = found, pace
        return best

    def _packed(self, pace: float) -> Packing | None:
        at, given, last = 0, 0, len(self.edges) - 1
        first_blocks, taken = [], np.zeros(int(self.edges[-1]), dtype=np.intp)
        for s in range(len(self.kept)):
            limit = last - (len(self.kept) - s - 1)  # one place for each stage that comes
            filled = self._filled(s, at, given, pace * _ROUNDING, limit)
            if filled is None or filled.stop <= at:
                return None
            first_blocks.append(int(self.edges[at]))
            taken[self.edges[at] : self.edges[filled.begin]] = filled.given
            low = filled.begin
            for option in filled.options:
                high = min(self._end_of(low), filled.stop)
                taken[self.edges[low] : self.edges[high]] = option
                low = high
            at, given = filled.stop, int(taken[self.edges[filled.stop] - 1])
        if at < last:
            return None
        return Packing(first_blocks=tuple(first_blocks), options=tuple(int(i) for i in taken))

    def _end_of(self, edge: int) -> int:
        """The edge at which the segment ends that has the edge."""
        return int(self.begins[self.begins.searchsorted(edge, side="right")])

    def _filled(self, s: int, at: int, given: int, pace: float, limit: int) -> _Filled | None:
        """The stage that gets farthest from an edge on, of equal ones the fastest."""
        held, room = self._stored + self.kept[s] * self._saved, self.limits[s]
        begin = int(self.begins[self.begins.searchsorted(at)])
        start = _Labels.single(0.0, 0.0, 0.0)
        if begin > at:
            reached, labels = self._partial(start, held, at, min(begin, limit), pace, room, only=given)
            if reached < min(begin, limit) or reached == limit:
                return _Filled(reached, reached, given, ())
            start = _Labels.single(float(labels.seconds[0]), float(labels.held[0]), float(labels.peaks[0]))
        steps, low = [start], begin
        while low < limit:
            high = self._end_of(low)
            if high > limit:
                break
            labels = self._extended(steps[-1], held, low, high, pace, room)
            if not len(labels.seconds):
                break
            steps.append(labels)
            low = high
        if low == limit:
            best = int(steps[-1].seconds.argmin())
            return _Filled(low, begin, given, self._traced(steps, best))
        reached, labels = self._partial(steps[-1], held, low, min(self._end_of(low), limit), pace, room)
        if reached > low:
            steps.append(labels)
        return _Filled(reached, begin, given, self._traced(steps, int(steps[-1].seconds.argmin())))

    def _partial(
        self, labels: _Labels, held: Array, low: int, high: int, pace: float, room: float, *, only: int | None = None
    ) -> tuple[int, _Labels]:
        """The farthest edge up to `high` that any label reaches, and the labels there; `low` if it is none."""
        for stop in range(high, low, -1):
            found = self._extended(labels, held, low, stop, pace, room, only=only)
            if len(found.seconds):
                return stop, found
        return low, labels

    def _extended(
        self, labels: _Labels, held: Array, low: int, high: int, pace: float, room: float, *, only: int | None = None
    ) -> _Labels:
        """Labels with the blocks between two edges in each of the options."""
        options = np.arange(self.num_options) if only is None else np.array([only])
        seconds = labels.seconds[:, None] + (self.seconds[options, high] - self.seconds[options, low])[None]
        held_bytes = labels.held[:, None] + (held[options, high] - held[options, low])[None]
        peaks = np.maximum(labels.peaks[:, None], self.peaks[options, low:high].max(axis=1)[None])
        before, which = np.nonzero((seconds <= pace) & (held_bytes + peaks <= room))
        at = (before, which)
        found = _Labels(seconds[at], held_bytes[at], peaks[at], before, options[which])
        return _pruned(found, room)

    @staticmethod
    def _traced(steps: Sequence[_Labels], place: int) -> tuple[int, ...]:
        """The options that led to a label."""
        found = []
        for labels in reversed(steps[1:]):
            found.append(int(labels.options[place]))
            place = int(labels.before[place])
        return tuple(reversed(found))


def _pruned(labels: _Labels, room: float) -> _Labels:
    """The fastest of each bucket and peak, and of these the ones that no other with the same peak beats."""
    if len(labels.seconds) < 2:
        return labels
    buckets = np.floor(labels.held / room * _BUCKETS)
    order = np.lexsort((labels.seconds, buckets, labels.peaks))
    peaks, buckets, seconds = labels.peaks[order], buckets[order], labels.seconds[order]
    is_new = np.append(True, (peaks[1:] != peaks[:-1]) | (buckets[1:] != buckets[:-1]))
    order, peaks, seconds = order[is_new], peaks[is_new], seconds[is_new]
    starts = np.flatnonzero(np.append(True, peaks[1:] != peaks[:-1]))
    stays = np.ones(len(order), dtype=bool)
    for low, high in zip(starts.tolist(), [*starts[1:].tolist(), len(order)], strict=True):
        least = np.minimum.accumulate(seconds[low:high])
        stays[low + 1 : high] = seconds[low + 1 : high] < least[:-1]
    kept = order[stays]
    return _Labels(
        labels.seconds[kept], labels.held[kept], labels.peaks[kept], labels.before[kept], labels.options[kept]
    )


def _sums(values: Array, edges: NDArray[np.intp]) -> Array:
    found: Array = np.concatenate([[0.0], np.cumsum(values)])[edges]
    return found
