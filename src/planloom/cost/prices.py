"""`Prices`: seconds of every instruction of a program, measured where known.

Nothing unknown is priced at zero: what has neither a measurement nor a model is an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Literal

from planloom.blocks import BlockGraph
from planloom.cluster import Cluster, Message, exchange_seconds
from planloom.collective import Step, step_cost
from planloom.cost.keys import Phase, collective_key, run_fingerprint, run_key, shard_sizes, update_key
from planloom.cost.roofline import run_seconds
from planloom.program import Program, Run, Transfer

Source = Literal["measured", "modelled"]

# Reads and writes of one AdamW step: parameter, gradient and two states in; parameter and two states out.
_UPDATE_ACCESSES = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Seconds, and where they come from."""

    seconds: float
    source: Source


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices of one model on one cluster. `measured_links`: use measured collectives, not the cluster's links."""

    blocks: BlockGraph
    cluster: Cluster
    measured: Mapping[str, float] = field(default_factory=dict)
    measured_links: bool = False

    def run(self, program: Program, run: Run, phase: Phase) -> Price:
        """One phase of a run on one device."""
        found = self.measured.get(run_key(run_fingerprint(self.blocks, program, run), phase))
        if found is not None:
            return Price(seconds=found, source="measured")
        modelled = run_seconds(self.blocks, program, run, phase, self.cluster.device)
        return Price(seconds=modelled, source="modelled")

    def step(self, step: Step, num_bytes: int) -> Price:
        """One step of a collective program; `num_bytes` in each device's array before it."""
        if step.is_local:
            return self.memory(2 * num_bytes)
        if self.measured_links:
            found = self._measured_collective(step.kind, step.group_size, num_bytes)
            if found is not None:
                return Price(seconds=found, source="measured")
        return Price(seconds=step_cost(self.cluster, step).seconds(num_bytes), source="modelled")

    def exchange(self, transfers: tuple[Transfer, ...], item_bytes: int) -> Price:
        """The messages of one exchange between stages, all at once."""
        messages: list[Message] = [
            (t.source, t.target, item_bytes * prod(stop - start for start, stop in t.source_box)) for t in transfers
        ]
        largest = max(int(num_bytes) for *_, num_bytes in messages)
        found = self._measured_collective("exchange", 2, largest) if self.measured_links else None
        if found is not None:
            return Price(seconds=found, source="measured")
        return Price(seconds=exchange_seconds(self.cluster, messages), source="modelled")

    def memory(self, num_bytes: int) -> Price:
        """Local work that reads and writes this many bytes: sums, copies."""
        device = self.cluster.device
        seconds = device.launch_seconds + num_bytes / device.memory_bytes_per_second
        return Price(seconds=seconds, source="modelled")

    def update(self, program: Program, stage: int) -> Price:
        """One optimizer step on the shards of one device."""
        sizes, tensors = shard_sizes(program.stages[stage]), self.blocks.graph.tensors
        parameters = [tensors[p.name] for p in program.stages[stage].parameters]
        found = self.measured.get(update_key(sizes, [p.dtype for p in parameters]))
        if found is not None:
            return Price(seconds=found, source="measured")
        launch = self.cluster.device.launch_seconds * len(sizes)
        num_bytes = sum(size * p.item_bytes for size, p in zip(sizes, parameters, strict=True))
        moved = self.memory(_UPDATE_ACCESSES * num_bytes).seconds
        return Price(seconds=launch + moved, source="modelled")

    def _measured_collective(self, kind: str, group_size: int, num_bytes: int) -> float | None:
        """Interpolated between measured sizes, extended at the rate of the last two."""
        prefix = collective_key(kind, group_size, 0)[:-1]  # type: ignore[arg-type]
        points = sorted((int(k.removeprefix(prefix)), s) for k, s in self.measured.items() if k.startswith(prefix))
        if len(points) < 2:
            return None
        for (low, a), (high, b) in pairwise(points):
            if num_bytes <= high or high == points[-1][0]:
                return max(min(a, b) if num_bytes < low else 0.0, a + (b - a) * (num_bytes - low) / (high - low))
        return None
