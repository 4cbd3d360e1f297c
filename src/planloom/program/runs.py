"""Runs: maximal sequences of blocks with no communication between them, forward or backward.

An edge is *cut* where the producer's layout differs from the consumer's, or the cotangent's from what the producer
takes. The depth of a block is the largest number of cuts on a path to it; the blocks of one stage with equal depth
form a run; a block that goes round a ring is one of its own (`rings`). Edges never lead to a smaller depth, and edges
inside one depth are not cut, so runs are convex and in order. A run ends at a segment's end too: then every layer has
the same runs, profiled and compiled once. And it ends where a scope of a time axis begins or ends; inside a scope it is
formed in its first moment, and has copies in others.
"""

from dataclasses import dataclass

from planloom.blocks import Block, BlockGraph, find_segments
from planloom.layout import Layout
from planloom.program.transform import Splits
from planloom.program.values import Run, RunBlock, Slot


def form_runs(splits: Splits) -> tuple[Run, ...]:
    """All runs, in an order in which producers come first, stage by stage."""
    blocks = splits.blocks
    groups: dict[tuple[int, int, int], list[Block]] = {}
    for block, depth in zip(blocks.blocks, _depths(splits), strict=True):
        alone = 1 + block.index if splits.goes_round(block) else 0
        groups.setdefault((splits.plan.stages[block.index], depth, alone), []).append(block)
    group_of = splits.plan.group_of
    return tuple(_form_run(splits, i, group_of(key[0]), groups[key]) for i, key in enumerate(sorted(groups)))


def _depths(splits: Splits) -> list[int]:
    blocks, stages = splits.blocks, splits.plan.stages
    starts = {segment.start for segment in find_segments(blocks)}
    starts.update(end for scope in splits.scope_of.values() for end in (scope.start, scope.stop))
    depths: list[int] = []
    base = 0
    for block in blocks.blocks:
        if block.index in starts and depths:
            base = max(depths) + 1
        depth = base
        for tensor in block.inputs:
            source = blocks.blocks[blocks.producer[tensor]]
            cut = stages[source.index] != stages[block.index] or is_cut(splits, source, block, tensor)
            depth = max(depth, depths[source.index] + cut)
        depths.append(depth)
    return depths


def is_cut(splits: Splits, source: Block, target: Block, tensor: str) -> bool:
    """Does this edge communicate, forward or backward? A block that goes round a ring is a run of its own."""
    if splits.goes_round(source) or splits.goes_round(target):
        return True
    if splits.layout(source, tensor) != splits.layout(target, tensor):
        return True
    if not (splits.is_differentiable(tensor) and splits.gives_cotangents(target)):
        return False
    return splits.produced_cotangent(source, tensor) != splits.consumed_cotangent(target, tensor)


@dataclass(frozen=True, slots=True)
class _SlotKey:
    tensor: str
    layout: Layout
    cotangent: Layout | None


def _form_run(splits: Splits, index: int, stage: int, members: list[Block]) -> Run:
    numbers = {block.index for block in members}
    slots = _input_slots(splits, members)
    run_blocks = []
    for block in members:
        reads = {
            tensor: next(i for i, key in enumerate(slots) if _serves(key, _key(splits, block, tensor)))
            for tensor in _read_from_outside(splits, block, members)
        }
        run_blocks.append(
            RunBlock(
                block=block.index,
                splits=splits.block_splits(block),
                timed_dim=splits.timed_dim(block),
                reads=reads,
                passes_partial=block.is_source,
            )
        )
    outputs = [
        _output_slot(splits, block, tensor)
        for block in members
        for tensor in block.outputs
        if _leaves(splits.blocks, tensor, numbers)
    ]
    inputs = tuple(_slot(splits, block, key) for key, block in slots.items())
    moment = tuple((digit, 0) for digit in splits.times(members[0].index))
    return Run(index=index, stage=stage, blocks=tuple(run_blocks), inputs=inputs, outputs=tuple(outputs), moment=moment)


def _read_from_outside(splits: Splits, block: Block, members: list[Block]) -> list[str]:
    inside = {tensor for member in members for tensor in member.outputs}
    return [tensor for tensor in (*block.inputs, *block.parameters) if tensor not in inside]


def _input_slots(splits: Splits, members: list[Block]) -> dict[_SlotKey, Block]:
    """One slot for each tensor, layout and cotangent; a reader without a cotangent uses a slot that has one."""
    keys = {
        _key(splits, block, tensor): block for block in members for tensor in _read_from_outside(splits, block, members)
    }
    return {
        key: block
        for key, block in keys.items()
        if key.cotangent is not None or not any(k != key and _serves(k, key) for k in keys)
    }


def _serves(slot: _SlotKey, wanted: _SlotKey) -> bool:
    same = (slot.tensor, slot.layout) == (wanted.tensor, wanted.layout)
    return same and wanted.cotangent in (None, slot.cotangent)


def _key(splits: Splits, block: Block, tensor: str) -> _SlotKey:
    return _SlotKey(tensor, splits.layout(block, tensor), _cotangent(splits, block, tensor))


def _leaves(blocks: BlockGraph, tensor: str, members: set[int]) -> bool:
    return tensor == blocks.graph.loss or any(c not in members for c in blocks.consumers.get(tensor, ()))


def _cotangent(splits: Splits, block: Block, tensor: str) -> Layout | None:
    if not (splits.is_differentiable(tensor) and splits.gives_cotangents(block)):
        return None
    return splits.consumed_cotangent(block, tensor)


def _slot(splits: Splits, block: Block, key: _SlotKey) -> Slot:
    return Slot(
        tensor=key.tensor,
        layout=key.layout,
        cotangent=key.cotangent,
        sizes=splits.sizes(block, key.tensor),
    )


def _output_slot(splits: Splits, block: Block, tensor: str) -> Slot:
    cotangent = splits.produced_cotangent(block, tensor) if splits.is_differentiable(tensor) else None
    return _slot(splits, block, _SlotKey(tensor, splits.layout(block, tensor), cotangent))
