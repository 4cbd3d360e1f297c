"""A run whose backward comes in two halves, measured: as in training it is cut at its parameters and never compiled.

So its forward takes longer than that of a whole one, and its halves together longer than a whole backward: on small
runs by much (`execute.split_vjp`).
"""

from collections import deque
from collections.abc import Mapping

import torch
from torch import Tensor

from planloom.blocks import BlockGraph
from planloom.cost.keys import split_key
from planloom.execute.split_vjp import SplitVjp
from planloom.profile.runs import Measured, RunBench
from planloom.profile.timing import time_phases
from planloom.program import Program, Run


class SplitBench(RunBench):
    """A run in three phases: forward, input-gradient, weight-gradient."""

    def __init__(
        self, blocks: BlockGraph, program: Program, run: Run, given: Mapping[str, Tensor], device: torch.device
    ) -> None:
        self._split: deque[SplitVjp] = deque()
        self._halved: deque[SplitVjp] = deque()
        super().__init__(blocks, program, run, given, device, lambda local: local)
        self._split.clear()

    @property
    def in_flight(self) -> int:
        return len(self._split)

    def forget(self) -> None:
        super().forget()
        self._split.clear()
        self._halved.clear()

    def forward(self) -> None:
        vjp = SplitVjp(self.local, self.inputs, self.given, 0)
        self._split.append(vjp)
        self._outputs = vjp.take_outputs()

    def input_gradient(self) -> None:
        vjp = self._split.popleft()
        self._gradients.append(vjp.backward(self.cotangents))
        self._halved.append(vjp)

    def weight_gradient(self) -> None:
        self._gradients.append(self._halved.popleft().weight_gradients())

    def carry_out(self) -> None:
        """All phases once."""
        for phase in (self.forward, self.input_gradient, self.weight_gradient):
            phase()


def measure_split(bench: SplitBench, fingerprint: str, *, budget_seconds: float) -> Measured:
    """Seconds of its phases."""
    bench.get_ready()
    phases = {
        "forward": bench.forward,
        "input_gradient": bench.input_gradient,
        "weight_gradient": bench.weight_gradient,
    }
    timings = time_phases(phases, bench.device, budget_seconds=budget_seconds)
    bench.forget()
    return {
        split_key(fingerprint, phase): (timings[phase].seconds, timings[phase].spread)
        for phase in ("forward", "input_gradient", "weight_gradient")
    }
