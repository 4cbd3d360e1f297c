"""Prices that make the time of a step a closed form."""

from dataclasses import dataclass, field

import torch

from planloom.blocks import BlockGraph
from planloom.cluster import Cluster, load_cluster
from planloom.collective import Step
from planloom.cost import Credit, Price, RunMemory
from planloom.cost.memory import run_memory
from planloom.program import Program, Run, StageProgram, Transfer
from tests.torch.captured import captured


@dataclass
class FixedPrices:
    """Forward one second a role and micro-batch, backward two, half of it input-gradients, everything else as told."""

    program: Program
    of: BlockGraph | None = None
    """The model; the small GPT if it is not said."""
    exchange_seconds: float = 0.0
    step_seconds: float = 0.0
    update_seconds: float = 0.0
    level: int = -1
    """The level whose wires all communication keeps busy; none."""
    compute_slowdown: float = 1.0
    communication_slowdown: float = 1.0
    exchange_delay: float = 0.0
    credit: Credit = field(default_factory=Credit)
    on: str = "two-by-two"
    has_segments: bool = False

    @property
    def blocks(self) -> BlockGraph:
        return self.of or captured("gpt", torch.float32).blocks

    @property
    def cluster(self) -> Cluster:
        return load_cluster(self.on)

    def run_memory(self, program: Program, run: Run) -> RunMemory:
        return run_memory(self.blocks, program, run, fused=False)

    def update_bytes(self, stage: StageProgram) -> int:
        return 0

    def run(self, program: Program, run: Run, phase: str) -> Price:
        count = sum(1 for other in program.runs if other.stage == run.stage)
        return Price(seconds=(2.0 if phase == "backward" else 1.0) / count, source="measured")

    def split_run(self, program: Program, run: Run, phase: str) -> Price:
        return self.run(program, run, "input_gradient")  # all three phases take the same time

    def step(self, step: Step, num_bytes: int) -> Price:
        busy = ((self.level, self.step_seconds),) if self.level >= 0 else ()
        return Price(seconds=self.step_seconds, source="modelled", busy=busy)

    def exchange(self, transfers: tuple[Transfer, ...], item_bytes: int) -> Price:
        busy = ((self.level, self.exchange_seconds),) if self.level >= 0 else ()
        return Price(seconds=self.exchange_seconds, source="modelled", busy=busy)

    def memory(self, num_bytes: int) -> Price:
        return Price(seconds=0.0, source="modelled")

    def accumulate(self, num_bytes: int) -> Price:
        return self.memory(num_bytes)

    def update(self, program: Program, stage: int) -> Price:
        return Price(seconds=self.update_seconds, source="measured")
