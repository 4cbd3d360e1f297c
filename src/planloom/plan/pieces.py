"""Steps of a draft that carry out rows of blocks piece by piece, over a time axis.

A *row* is what computes with one inner dim: from the maps that make it (heads of queries, keys and values, features of
an MLP) to the map that sums over it. A dim is followed from block to block by the tensors that carry it.

    co_sharded    every row one piece after another: heads or inner features, else samples (SuperScaler's co-shard)
    split_rows    every row over an axis of space, by the same dim from its first block to its last
    in_chunks     layers in chunks of samples: one chunk is reduced while the next is computed (ATP's overlap)

How blocks are split over space stays as it is: the pieces are of what each device has.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from planloom.blocks import Block, BlockGraph
from planloom.errors import PlanError
from planloom.plan.checks import BATCH_DIM
from planloom.plan.draft import Draft
from planloom.plan.values import TimeAxis, TimeOrder

Row = tuple[int, int]
"""Blocks `start` up to `stop`."""


def co_sharded(
    written: Draft, *, pieces: int, axis: str = "co", samples: bool = False, recompute: bool = True
) -> Draft:
    """Every row in pieces of heads or features; of samples, if that is asked for or alone divides."""
    found: dict[Row, dict[int, str]] = {}
    for row in inner_rows(written.blocks):
        inner, through = _dims(written.blocks, row)
        splits = _way(written, row, pieces, [*through, *inner] if samples else [*inner, *through])
        if splits is not None:
            found[row] = splits
    return _in_pieces(written, axis, pieces, found, order="pieces", recompute=recompute)


def in_chunks(written: Draft, *, chunks: int, axis: str = "chunk") -> Draft:
    """From the first to the last row of every stage, all in chunks of samples."""
    stages: dict[int, list[Row]] = {}
    for row in inner_rows(written.blocks):
        stages.setdefault(written.stages[row[0]], []).append(row)
    found: dict[Row, dict[int, str]] = {}
    for stage, rows in stages.items():
        inside = [row for row in rows if written.stages[row[1] - 1] == stage]
        row = (inside[0][0], inside[-1][1]) if inside else rows[0]
        splits = _way(written, row, chunks, [BATCH_DIM])
        if splits is not None:
            found[row] = splits
    return _in_pieces(written, axis, chunks, found, order="runs", recompute=False)


def split_rows(written: Draft, axis: str) -> Draft:
    """Rows that divide by heads or features over an axis of space; others stay as they are."""
    strategies = list(written.strategies)
    for row in inner_rows(written.blocks):
        size = written.meshes[written.stages[row[0]]].axis(axis).size
        cleared = {i: {dim: axes for dim, axes in strategies[i].items() if axis not in axes} for i in range(*row)}
        others = replace(written, strategies=tuple(cleared.get(i, old) for i, old in enumerate(strategies)))
        splits = _way(others, row, size, _dims(written.blocks, row)[0])
        for i, dim in splits.items() if splits is not None else ():
            strategies[i] = {**cleared[i], dim: (*cleared[i].get(dim, ()), axis)}
    return replace(written, strategies=tuple(strategies))


def inner_rows(blocks: BlockGraph) -> list[Row]:
    """The rows of a model, in its order."""
    rows: list[Row] = []
    for block in blocks.blocks:
        if block.is_source or (rows and block.index < rows[-1][1]):
            continue
        for dim in _dims(blocks, (block.index, block.index + 1))[0]:
            splits = _followed(blocks, (block.index, len(blocks.blocks)), dim)
            row = (block.index, max(splits) + 1) if splits else (0, 0)
            if splits and len(splits) > 1 and _is_whole(blocks, row, splits) and _is_summed(blocks, splits):
                rows.append(row)
                break
    return rows


def _in_pieces(
    written: Draft, axis: str, size: int, found: Mapping[Row, Mapping[int, str]], *, order: TimeOrder, recompute: bool
) -> Draft:
    if not found:
        raise PlanError(
            f"no attention or MLP divides into {size} pieces",
            given=f"{size} pieces",
            required="a number that divides heads and features, or samples, of what a device has",
        )
    strategies = list(written.strategies)
    for block, dim in (pair for splits in found.values() for pair in splits.items()):
        strategies[block] = {**strategies[block], dim: (*strategies[block].get(dim, ()), axis)}
    time = TimeAxis(name=axis, size=size, scopes=tuple(sorted(found)), order=order, recompute=recompute)
    return replace(written, strategies=tuple(strategies), times=(*written.times, time))


def _dims(blocks: BlockGraph, row: Row) -> tuple[list[str], list[str]]:
    """The dims of a row's first block: those that it makes (heads, features), those of what it reads (samples)."""
    first = blocks.blocks[row[0]]
    through = [dim.name for dim in first.dims if any(tensor in dim.shards for tensor in first.inputs)]
    inner = [dim.name for dim in first.dims if dim.name not in through]
    return inner, sorted(through, key=lambda name: name != BATCH_DIM)


def _way(written: Draft, row: Row, pieces: int, dims: Sequence[str]) -> dict[int, str] | None:
    """The first of these dims by which all of a row divides into pieces: block → its dim."""
    for dim in dims:
        splits = _followed(written.blocks, row, dim)
        if splits and _is_whole(written.blocks, row, splits) and _divides(written, splits, pieces):
            return splits
    return None


def _followed(blocks: BlockGraph, row: Row, dim: str) -> dict[int, str] | None:
    """Block → dim, from a dim of a row's first block on; None if a block cannot be split so, or reads a sum over it."""
    if blocks.blocks[row[0]].dim(dim) is None:
        return None
    splits, sums = {row[0]: dim}, set[str]()
    waiting = [blocks.blocks[row[0]]]
    while waiting:
        block = waiting.pop()
        own = block.dim(splits[block.index])
        assert own is not None
        sums.update(own.partials)
        for tensor in (tensor for tensor in (*block.inputs, *block.outputs) if tensor in own.shards):
            made = [blocks.producer[tensor]] if tensor in block.inputs else []
            others = (blocks.blocks[i] for i in (*made, *blocks.consumers.get(tensor, ())) if row[0] <= i < row[1])
            for other in others:
                met = next((d.name for d in other.dims if d.shards.get(tensor, -1) == own.shards[tensor]), None)
                if met is None or splits.get(other.index, met) != met:
                    return None
                if other.index not in splits:
                    splits[other.index] = met
                    waiting.append(other)
    return None if any(sums.intersection(blocks.blocks[i].inputs) for i in splits) else splits


def _is_whole(blocks: BlockGraph, row: Row, splits: Mapping[int, str]) -> bool:
    """Are all blocks of a row split, but for sources that it alone reads?"""
    return all(_is_own_source(blocks, blocks.blocks[i], row) for i in range(*row) if i not in splits)


def _is_own_source(blocks: BlockGraph, block: Block, row: Row) -> bool:
    readers = [i for tensor in block.outputs for i in blocks.consumers.get(tensor, ())]
    return block.is_source and all(row[0] <= i < row[1] for i in readers)


def _is_summed(blocks: BlockGraph, splits: Mapping[int, str]) -> bool:
    """Does nothing but sums leave the blocks that are split?"""
    for index, name in splits.items():
        block, dim = blocks.blocks[index], blocks.blocks[index].dim(name)
        assert dim is not None
        for tensor in block.outputs:
            if tensor in dim.shards and any(i not in splits for i in blocks.consumers.get(tensor, ())):
                return False
    return True


def _divides(written: Draft, splits: Mapping[int, str], pieces: int) -> bool:
    for index, name in splits.items():
        dim, mesh = written.blocks.blocks[index].dim(name), written.meshes[written.stages[index]]
        count = pieces * prod(mesh.axis(axis).size for axis in written.strategies[index].get(name, ()))
        if dim is None or dim.size % (count * (written.num_micro_batches if name == BATCH_DIM else 1)):
            return False
    return len({written.stages[index] for index in splits}) == 1
