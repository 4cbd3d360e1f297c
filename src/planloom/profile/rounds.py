"""Figures of several rounds: a machine's speed changes while it is profiled, and plans are compared with each other.

A core computes more or less in a second as its clock changes and as others use its caches and its memory, for seconds
or minutes at a time. If every run is measured once, one after another, those measured in a slow minute look slow, and
a plan made of them loses. So all are measured, then all again, in the other order, and the median of the rounds counts:
every run has met the same minutes.

[Empirical] Four ranks of 0.4 cores of a machine whose other work ran at idle priority, three profiles in a row of the
12 runs of three pipelines, 22 s each, 2 vCPU AMD EPYC, 2026-11-18: the third took 1.25 to 2 times as long as the
first, in the median 1.55, with the same share of CPU seconds; within a profile a run's samples deviated by 5 to 25 %.
In rounds, two profiles of 60 s in a row differed by 7 % in the median, at most by 30 %.
"""

import statistics

from planloom.profile.runs import Measured
from planloom.profile.timing import deviation

NUM_ROUNDS = {"cpu": 3, "cuda": 1}
"""A GPU in one: nobody else computes on it, and it is warmed up."""


class Rounds:
    """What was measured in all rounds so far."""

    def __init__(self) -> None:
        self.first: Measured = {}
        self.measured: Measured = {}
        self._all: dict[str, list[tuple[float, float]]] = {}

    def add(self, found: Measured) -> Measured:
        """Figures of one more round; the same figures of all rounds together.

        The spread is that of a round's samples or that of the rounds, the larger of them.
        """
        together: Measured = {}
        for key, figure in found.items():
            self.first.setdefault(key, figure)
            own = self._all.setdefault(key, [])
            own.append(figure)
            values, spreads = ([each[i] for each in own] for i in range(2))
            together[key] = (statistics.median(values), max(statistics.median(spreads), deviation(values)))
        self.measured.update(together)
        return together
