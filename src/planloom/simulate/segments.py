"""Segments that were measured as a whole: their items take as long together as was measured.

The parts of a segment (runs, collectives, sums) were measured alone. Together they take longer or shorter: they share
caches, cores and links. With p the seconds of the segment alone on the simulator's clock, from its first item until all
that it started has ended, and m what was measured, every item gets m / p of its seconds. Rates do not depend on how
long things take, so the segment alone then takes m exactly; among others, it overlaps with them as before.
"""

from collections.abc import Sequence
from dataclasses import replace

from planloom.cost import Price, Prices
from planloom.cost.segments import BodySegment, body_segments
from planloom.program import BodyCall, Program
from planloom.simulate.engine import Engine
from planloom.simulate.script import Await, Begin, Busy, Half, Item

_ALONE = "segment"


class Corrected:
    """The measured segments of a program, by stage and body."""

    def __init__(self, program: Program, prices: Prices) -> None:
        self._prices = prices
        self._of: dict[tuple[int, str], list[tuple[BodySegment, Price]]] = {}
        if not prices.has_segments:
            return
        for stage in range(len(program.stages)):
            for body, segments in body_segments(prices.blocks, program, stage).items():
                found = [(segment, price) for segment in segments if (price := prices.segment(segment.key)) is not None]
                self._of[stage, body] = found

    def of(self, stage: int, body: str) -> Sequence[tuple[BodySegment, Price]]:
        """Those of a body, in their order."""
        return self._of.get((stage, body), ())

    def stretched(self, items: Sequence[Item], seconds: float) -> list[Item]:
        """Items of a segment, so that together they take so many seconds."""
        alone = self.alone_seconds(items)
        return [_times(item, seconds / alone) for item in items] if alone > 0 else list(items)

    def alone_seconds(self, items: Sequence[Item]) -> float:
        """From the first item until all that was started has ended, with nothing else under way."""
        own = [replace(item, roles=()) if isinstance(item, Begin) else item for item in items]
        own = [item for item in own if not isinstance(item, Half)]
        started = [key for item in own if isinstance(item, Begin) for key in item.targets]
        own += [Await(key, 0, False) for key in started]
        engine = Engine(
            [[BodyCall(body=_ALONE, micro=0)]],
            [{_ALONE: own}],
            compute_slowdown=self._prices.compute_slowdown,
            communication_slowdown=self._prices.communication_slowdown,
            exchange_delay=self._prices.exchange_delay,
        )
        return engine.run()


def _times(item: Item, factor: float) -> Item:
    match item:
        case Busy():
            parts = tuple(replace(p, start=p.start * factor, seconds=p.seconds * factor) for p in item.parts)
            return Busy(item.device_seconds * factor, parts, item.host_seconds * factor)
        case Begin():
            return replace(item, seconds=item.seconds * factor)
        case _:
            return item
