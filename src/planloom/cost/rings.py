"""What the turns of a ring take: the operators of any run for what lies before and behind attention, and for a turn

    forward    attention of the device's queries with the keys at hand; from the second turn on, results so far × their
               share + results at hand × theirs
    backward   the sums of results × cotangents (once), the backward of attention with these keys, and from the second
               on the sum of the cotangents of queries

All devices are priced as the one that has most to do: under a causal mask the first turn is the diagonal, in the others
a device sees all keys or none, and some device sees all. A ring keeps between its turns queries, results and logarithms
of sums (in float32 at least), between forward and backward the same; keys and values are buffers of the program.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from planloom.blocks import BlockGraph
from planloom.blocks.rings import Ring
from planloom.cost.fusion import RunPhase, run_kernels
from planloom.cost.kernels import Kernel, Movement, attention_of
from planloom.program import Operand, Operation, Program, Run, Slot, Turn, run_operations

_WIDE_BYTES = 4
"""Of an element of results that are being combined, at least."""
_COMBINED, _COMBINE_LAUNCHES = 5, 6
"""Reads and writes of a result while two are combined, in place; operators on logarithms and results."""


def ring_of(blocks: BlockGraph, run: Run) -> tuple[Ring, Turn]:
    ring, turn = blocks.blocks[run.blocks[0].block].ring, run.turn
    assert ring is not None
    assert turn is not None
    return ring, turn


def with_queries(blocks: BlockGraph, run: Run) -> Run:
    """What opens a ring, with its queries among what it makes; of that slot, only the tensor is looked at."""
    ring, _ = ring_of(blocks, run)
    return replace(run, outputs=(*run.outputs, _slot_like(run.outputs[0], ring.query)))


def _slot_like(slot: Slot, tensor: str) -> Slot:
    return Slot(tensor=tensor, layout=slot.layout, cotangent=slot.cotangent, sizes=slot.sizes)


def turn_kernels(blocks: BlockGraph, run: Run, operations: Sequence[Operation], phase: RunPhase) -> list[Kernel]:
    """What a device launches for a turn, or for the opening of a ring."""
    ring, turn = ring_of(blocks, run)
    if turn.opens:
        return run_kernels(blocks.graph, with_queries(blocks, run), operations, phase, fused=False)
    attention = next(operation for operation in operations if operation.op == ring.op)
    behind = [operation for operation in operations if operation.op != ring.op]
    kernels = run_kernels(blocks.graph, run, behind, phase, fused=False) if behind else []
    whole = attention_of(blocks.graph, attention, "forward" if phase == "forward" else "backward")
    if ring.is_whole(turn.number):
        whole = replace(whole, shape=replace(whole.shape, is_causal=False, window=0))
    result, query = attention.outputs[0], attention.inputs[0]
    extra = [Movement(2 * result.num_bytes)] if phase != "forward" and turn.is_last else []
    if phase == "forward" and turn.number > 0:
        extra = [Movement(_COMBINED * _wide(blocks, result), num_launches=_COMBINE_LAUNCHES)]
    elif phase != "forward" and not turn.is_last:
        extra = [Movement(3 * _wide(blocks, query))]
    return [*kernels, whole, *extra]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnMemory:
    """Bytes on the device that has most to do. What a ring keeps from its opening: queries; of every turn, and from the
    first on, `results_bytes` and `sums_bytes`; in the backward `of_queries_bytes`.

    `forward_peak_bytes`, `backward_peak_bytes`: what a turn makes beside what the ring keeps.
    """

    queries_bytes: int
    results_bytes: int
    sums_bytes: int
    of_queries_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int


def turn_memory(blocks: BlockGraph, program: Program, run: Run) -> TurnMemory:
    """The memory of a turn, for one micro-batch."""
    ring, turn = ring_of(blocks, run)
    operations = run_operations(blocks, run, num_micro=program.num_micro_batches)
    attention = next(operation for operation in operations if operation.op == ring.op)
    query, keys, values = attention.inputs[:3]
    result = attention.outputs[0]
    heads, key_heads = query.shape[1], keys.shape[1]
    repeated = (keys.num_bytes + values.num_bytes) * heads // key_heads if heads > key_heads else 0
    item_bytes = query.num_bytes // max(1, _elements(query))
    hidden = 0
    if ring.window:  # a mask, made of two of bool
        hidden = query.shape[2] * keys.shape[2] * (item_bytes + 1)
    results, sums = _wide(blocks, result), max(_WIDE_BYTES, item_bytes) * _elements(query) // query.shape[3]
    made = results + (result.num_bytes if item_bytes < _WIDE_BYTES else 0) + sums
    again = 2 * repeated + query.num_bytes + keys.num_bytes + values.num_bytes
    if not repeated:
        again = query.num_bytes + keys.num_bytes + values.num_bytes
    return TurnMemory(
        queries_bytes=query.num_bytes,
        results_bytes=results,
        sums_bytes=sums,
        of_queries_bytes=_wide(blocks, query),
        forward_peak_bytes=made + max(repeated + hidden, 2 * sums if turn.number else 0),
        backward_peak_bytes=again + hidden,
    )


def _elements(operand: Operand) -> int:
    return prod(operand.shape)


def _wide(blocks: BlockGraph, operand: Operand) -> int:
    """Bytes of a tensor in float32 at least."""
    return _elements(operand) * max(_WIDE_BYTES, blocks.graph.tensors[operand.tensor].item_bytes)
