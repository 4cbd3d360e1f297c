"""Memory of rings: what they hold between their turns, storage by storage, as `execute.ring_attention` holds it.

opened            queries, and what autograd saves of the operators before attention
first turn on     results and logarithms of sums, in float32 at least
last turn         the results lie where the block's output does
backward          the sum of the cotangents of queries, from the first turn that is carried out to the opening's own
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from planloom.cost.rings import TurnMemory, turn_memory
from planloom.program import Backward, Forward, Run

if TYPE_CHECKING:
    from planloom.simulate.memory import Storage, _Walk

_ACTIVATIONS = "activations"


@dataclass(eq=False, slots=True)
class _Open:
    """What one ring holds."""

    kept: list["Storage"] = field(default_factory=list)
    results: "Storage | None" = None
    of_queries: "Storage | None" = None


class RingMemory:
    """The rings of one device; `walk` makes and drops storages."""

    def __init__(self, walk: "_Walk") -> None:
        self._walk = walk
        self._open: dict[tuple[int, int], _Open] = {}
        self._known: dict[int, TurnMemory] = {}

    def forward(self, forward: Forward, run: Run, micro: int) -> None:
        walk, turn, key = self._walk, run.turn, (run.blocks[0].block, micro)
        assert turn is not None
        what = f"{'recomputation' if forward.again else 'forward'} of a ring's turn in run {run.index}"
        if turn.opens:
            memory = walk.run_memory(run.index)
            walk.rise(what, memory.forward_peak_bytes)
            ring = self._open[key] = _Open()
            ring.kept.append(
                walk.make(memory.saved_bytes + self._of(self._turn_after(run)).queries_bytes, _ACTIVATIONS)
            )
            ring.kept += walk.keep_flagged(forward.inputs, memory.saved_inputs, micro)
        else:
            ring, memory_of_turn = self._open[key], self._of(run)
            walk.rise(what, memory_of_turn.forward_peak_bytes)
            if turn.number == 0:
                ring.results = walk.make(memory_of_turn.results_bytes, _ACTIVATIONS)
                ring.kept.append(walk.make(memory_of_turn.sums_bytes, _ACTIVATIONS))
        for buffer in forward.outputs:
            walk.put(buffer, micro, walk.make(walk.sizes[buffer], _ACTIVATIONS))
        if turn.is_last and turn.number >= 0:
            walk.drop(ring.results)  # it is the output's storage now
            ring.results = None
            if forward.saves:
                ring.kept += walk.keep_flagged(forward.outputs, (True,) * len(forward.outputs), micro)
            else:
                self._close(key)

    def backward(self, backward: Backward, run: Run, micro: int) -> None:
        walk, turn, key = self._walk, run.turn, (run.blocks[0].block, micro)
        assert turn is not None
        what, ring = f"backward of a ring's turn in run {run.index}", self._open[key]
        if turn.opens:
            walk.rise(what, walk.run_memory(run.index).backward_peak_bytes)
            self._close(key)
        else:
            memory = self._of(run)
            walk.rise(what, memory.backward_peak_bytes)
            if ring.of_queries is None:
                ring.of_queries = walk.make(memory.of_queries_bytes, _ACTIVATIONS)
        walk.give(backward, micro)

    def _close(self, key: tuple[int, int]) -> None:
        ring = self._open.pop(key)
        for storage in (*ring.kept, ring.of_queries):
            self._walk.drop(storage)

    def _of(self, run: Run) -> TurnMemory:
        if run.index not in self._known:
            self._known[run.index] = turn_memory(self._walk.prices.blocks, self._walk.program, run)
        return self._known[run.index]

    def _turn_after(self, opening: Run) -> Run:
        """The first turn of the ring that a run opens."""
        return next(
            run
            for run in self._walk.program.runs
            if run.turn is not None
            and run.turn.number == 0
            and (run.stage, run.blocks[0].block) == (opening.stage, opening.blocks[0].block)
        )
