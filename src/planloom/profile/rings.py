"""The turns of a ring, measured: one turn, or the opening, again and again on a ring that has gone round once.

On the device that has most to do, the last of its ring: under a causal mask it sees all keys in all turns but the
first.
A turn's memory is not measured: what it leaves in the ring and what it takes from it are not its own (`cost.rings`).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from planloom.blocks import BlockGraph
from planloom.execute.ring_attention import LocalTurn, RingVjp
from planloom.profile.runs import MakeLocal, RunBench, example
from planloom.program import Program, Run


def bench_of(
    blocks: BlockGraph,
    program: Program,
    run: Run,
    given: Mapping[str, Tensor],
    device: torch.device,
    make_local: MakeLocal,
) -> RunBench:
    """A run, or a turn of a ring, ready to be measured."""
    if run.turn is not None:
        return TurnBench(blocks, program, run, given, device)
    return RunBench(blocks, program, run, given, device, make_local)


class TurnBench(RunBench):
    """A turn on a ring whose forward has ended and whose backward has begun, so that either can be carried out."""

    def __init__(
        self, blocks: BlockGraph, program: Program, run: Run, given: Mapping[str, Tensor], device: torch.device
    ) -> None:
        mesh, turn = program.mesh_of(run.stage), run.turn
        assert turn is not None
        at = max(map(mesh.coordinates, mesh.devices), key=turn.position)
        ring = [
            LocalTurn(blocks, other, at, num_micro=program.num_micro_batches)
            for other in program.runs
            if other.turn is not None
            and (other.stage, other.blocks[0].block) == (run.stage, run.blocks[0].block)
            and other.moment == run.moment
        ]
        ring.sort(key=lambda local: local.turn.number)
        opening, *turns = ring
        self.run, self.given, self.device = run, given, device
        self.is_activation = [slot.tensor not in blocks.graph.parameter_names for slot in run.inputs]
        self._of = next(local for local in ring if local.turn == turn)
        self._opening = opening
        self._first = [example(blocks, s.tensor, s.layout, s.sizes, device) for s in opening.run.inputs]
        self._ring = RingVjp(opening, self._first, given, 0)
        self._own = self._ring.take_outputs()
        for local in turns:
            self._ring.forward(local, *self._own)
        made = self._ring.take_outputs()
        self._of_results: list[Tensor | None] = [torch.randn_like(tensor) for tensor in made]
        self._of_queries = torch.randn_like(self._ring.query)
        self._ring.backward(turns[-1], self._of_results, *self._own)

    def get_ready(self) -> None:
        """Nothing else is in flight."""

    def forget(self) -> None:
        """What it holds is what a ring holds."""

    def forward(self) -> None:
        if self._of.turn.opens:
            self._ring = RingVjp(self._opening, self._first, self.given, 0)
        else:
            self._ring.forward(self._of, *self._own)
        self._ring.take_outputs()

    def backward(self) -> None:
        if self._of.turn.opens:
            self._ring.of_queries = self._of_queries
            self._ring.close([torch.ones_like(tensor) for tensor in self._own])
        else:
            self._ring.backward(self._of, self._of_results, *self._own)

    @property
    def separates_gradients(self) -> bool:
        """A ring's backward is not split."""
        return False
