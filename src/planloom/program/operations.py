"""The operators that one device really executes in a run, with their local shapes.

A run's blocks hold operators of the graph, some of which stand for one original (a norm as statistics and finish). An
expansion runs *whole*, as its original, where

    the run holds every operator of it,
    nobody else reads an inner result, and
    every operator reads a tensor from outside from the same slot and as the same piece.

Whether two pieces are the same is a matter of digits, not of coordinates: all devices of a stage decide alike. The
runtime prepares this list, and prices of time and memory are sums over it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from planloom.blocks import Block, BlockGraph
from planloom.graph import referenced
from planloom.layout import Digit
from planloom.program.pieces import BlockPiece, piece_of
from planloom.program.values import Run, RunBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A tensor that an operator reads or makes, as one device holds it; of a ragged one `num_bytes` counts its rows.

    `slot`: the input slot of the run that it is read from; `is_given`: it is a slice of a given tensor; else made here.
    `part`: the place in `run.blocks` of the block as whose piece it is read or made.
    """

    tensor: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str
    num_bytes: int
    part: int
    slot: int | None = None
    is_given: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operator as executed: that with index `op`, or the original whose last operator that is.

    `part`: the place in `run.blocks` of the block that makes its result.
    """

    target: str
    op: int
    is_original: bool
    part: int
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """An operator of a run: its index in the graph, the place of its block in the run."""

    op: int
    part: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """What executes one operator, or the whole expansion that `members` stand for."""

    op: int
    part: int
    is_original: bool
    members: tuple[Member, ...]


def executed(blocks: BlockGraph, run: Run) -> tuple[Executed, ...]:
    """What a run executes, in order."""
    graph = blocks.graph
    members = sorted(
        (Member(op=index, part=i) for i, part in enumerate(run.blocks) for index in ops_of(blocks, part)),
        key=lambda member: member.op,
    )
    expanded: dict[int, list[Member]] = {}
    for member in members:
        expanded.setdefault(graph.ops[member.op].expansion, []).append(member)
    whole = _whole_expansions(blocks, run, expanded)
    found = []
    for member in members:
        op = graph.ops[member.op]
        if op.expansion not in whole:
            found.append(Executed(op=member.op, part=member.part, is_original=False, members=(member,)))
        elif op.outputs[0] == graph.expansions[op.expansion].output:
            own = tuple(expanded[op.expansion])
            found.append(Executed(op=member.op, part=member.part, is_original=True, members=own))
    return tuple(found)


def ops_of(blocks: BlockGraph, part: RunBlock) -> tuple[int, ...]:
    """The operators that a run carries out of a block: all, or those of one turn of a ring."""
    block, turn = blocks.blocks[part.block], part.turn
    if turn is None:
        return block.ops
    assert block.ring is not None
    return block.ring.ops(turn.number, turn.count)


def run_operations(blocks: BlockGraph, run: Run, *, num_micro: int) -> tuple[Operation, ...]:
    """What a run executes, in order, with local shapes: those at the first coordinates, which are those of all."""
    graph = blocks.graph
    digits = {digit for part in run.blocks for _, digits in part.splits for digit in digits}
    origin = dict.fromkeys(digits, 0)
    pieces = [piece_of(blocks.blocks[part.block], part, origin, num_micro) for part in run.blocks]
    operations = []
    for item in executed(blocks, run):
        op = graph.ops[item.op]
        expansion = graph.expansions[op.expansion] if item.is_original else None
        readers = {name: m.part for m in reversed(item.members) for name in graph.ops[m.op].inputs}
        names = op.inputs if expansion is None else tuple(referenced(expansion.args))
        operations.append(
            Operation(
                target=op.target if expansion is None else expansion.target,
                op=item.op,
                is_original=item.is_original,
                part=item.part,
                inputs=tuple(_read(blocks, pieces, readers[name], name) for name in names),
                outputs=tuple(_operand(blocks, pieces, item.part, name) for name in op.outputs),
            )
        )
    return tuple(operations)


def _whole_expansions(blocks: BlockGraph, run: Run, expanded: Mapping[int, Sequence[Member]]) -> set[int]:
    """Expansions of which this run holds every operator and nobody else reads an inner result."""
    graph = blocks.graph
    inside = {member.op for members in expanded.values() for member in members}
    outputs = {slot.tensor for slot in run.outputs}
    whole = set()
    for expansion, own in expanded.items():
        ops = graph.expansion_members[expansion] if expansion >= 0 else ()
        if not ops or len(own) < len(ops):
            continue
        inner = {name for i in ops for name in graph.ops[i].outputs} - {graph.expansions[expansion].output}
        read = {name for name in inner if any(i in inside and i not in ops for i in graph.readers.get(name, ()))}
        is_read = set(referenced(graph.expansions[expansion].args)).issubset(
            n for i in ops for n in graph.ops[i].inputs
        )
        if is_read and not inner & (outputs | read) and _reads_alike(blocks, run, own):
            whole.add(expansion)
    return whole


def _reads_alike(blocks: BlockGraph, run: Run, members: Sequence[Member]) -> bool:
    """Does every operator read a tensor from outside at the same place and as the same piece?"""
    places: dict[str, tuple[int | None, dict[int, tuple[tuple[Digit, ...], bool]]]] = {}
    for member in members:
        part = run.blocks[member.part]
        for name in blocks.graph.ops[member.op].inputs:
            place = (part.reads.get(name), _split_factors(blocks.blocks[part.block], part, name))
            if places.setdefault(name, place) != place:
                return False
    return True


def _split_factors(block: Block, part: RunBlock, tensor: str) -> dict[int, tuple[tuple[Digit, ...], bool]]:
    """For every factor of a tensor that this block splits: the digits, and whether micro-batches split it too."""
    digits_of = dict(part.splits)
    found = {}
    for dim in block.all_dims:
        how = (digits_of.get(dim.name, ()), dim.name == part.timed_dim)
        if tensor in dim.shards and (how[0] or how[1]):
            found[dim.shards[tensor]] = how
    return found


def _read(blocks: BlockGraph, pieces: Sequence[BlockPiece], part: int, name: str) -> Operand:
    slot = pieces[part].part.reads.get(name)
    is_given = slot is None and name in blocks.graph.given_names
    return _operand(blocks, pieces, part, name, slot=slot, is_given=is_given)


def _operand(
    blocks: BlockGraph,
    pieces: Sequence[BlockPiece],
    part: int,
    name: str,
    *,
    slot: int | None = None,
    is_given: bool = False,
) -> Operand:
    tensor = blocks.graph.tensors[name]
    sizes = tuple(stop - start for start, stop in pieces[part].box(tensor.sizes, name))
    lengths = iter(sizes)
    return Operand(
        tensor=name,
        shape=tuple(prod(next(lengths) for _ in dim) for dim in tensor.factors),
        sizes=sizes,
        dtype=tensor.dtype,
        num_bytes=round(prod(sizes) * tensor.item_bytes * tensor.density),
        part=part,
        slot=slot,
        is_given=is_given,
    )
