"""Dynamic axial parallel for Evoformers (Cheng et al., FastFold, 2022).

A representation [batch, rows, columns, channels] is split along what an operation does not mix, and turned from rows to
columns by an all-to-all between two operations.

    MSA     rows are sequences, columns residues: row attention by rows; column attention, transition and the outer
            product mean by columns
    pair    rows are i, columns j: triangles around outgoing edges and starting nodes by rows, around incoming edges
            and ending nodes by columns

Only where an operation begins, at its norm, is a split chosen; every other block follows what it reads. Where a
triangle or an outer product needs both ends of a pair, the other end is gathered, and so are the biases of attentions.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from planloom.blocks import Block, BlockDim, BlockGraph
from planloom.errors import PlanError
from planloom.graph import Graph
from planloom.layout import Mesh
from planloom.plan.checks import BATCH_DIM
from planloom.plan.draft import Draft, draft, matches
from planloom.plan.families.recipe import BatchSpec, Family, Options
from planloom.plan.parallel import recompute_layers, sharded

_ROWS, _COLUMNS = 1, 2
"""Dims of a representation."""
TURNS: Mapping[str, int] = {
    "*.row_attention.norm:*": _ROWS,
    "*.column_attention.norm:*": _COLUMNS,
    "*.triangle_out.norm:*|*.triangle_start.norm:*|*.triangle_start.pair_norm:*": _ROWS,
    "*.triangle_in.norm:*|*.triangle_end.norm:*|*.triangle_end.pair_norm:*": _COLUMNS,
    "*distance_head": _ROWS,
}


def dynamic_axial(blocks: BlockGraph, options: Options, *, mesh: Mesh, batch: BatchSpec) -> Draft:
    """`dap:dap=4,dp=2`: axial inside, data parallel outside."""
    written = split_axially(draft(blocks, mesh, batch=batch), "dap")
    if mesh.axis("dp").size > 1:
        written = written.split("*", batch="dp")
        written = sharded(written, "zero1") if options["zero1"] else written
    written = recompute_layers(written) if options["recompute"] else written
    return written.order("gpipe", micro_batches=int(options["micro"]))


def split_axially(written: Draft, axis: str) -> Draft:
    """Split representations over an axis, along rows or columns as operations need it."""
    graph, strategies, now = written.blocks.graph, list(written.strategies), dict[str, int]()
    num_turns = 0
    for block in written.blocks.blocks:
        size = written.meshes[written.stages[block.index]].axis(axis).size
        dims = [d for d in block.dims if d.name != BATCH_DIM and d.size % size == 0]
        place = next((at for pattern, at in TURNS.items() if matches(block.name, pattern) and _begins(block)), None)
        dim = _along(graph, block, dims, place) if place is not None else _following(graph, block, dims, now)
        num_turns += place is not None and dim is not None
        if dim is not None:
            strategies[block.index] = {**strategies[block.index], dim.name: (axis,)}
            now.update((name, dim.shards[name]) for name in (*block.inputs, *block.outputs) if name in dim.shards)
    if not num_turns:
        raise PlanError(
            "no operation of this model can be split along rows or columns",
            given=f"{len(written.blocks.blocks)} blocks, axis {axis!r} of {written.meshes[0].axis(axis).size}",
            required="an Evoformer with row_attention, column_attention and triangles, and an axis that divides its "
            "sequences and residues",
            todo="choose a smaller axis or another plan",
        )
    return replace(written, strategies=tuple(strategies))


def _begins(block: Block) -> bool:
    """Does an operation begin with this block? Its norm has read the sum of the residual before, in its old split."""
    return not block.name.split("#")[0].endswith(":statistics") or any(t.endswith(".centered") for t in block.outputs)


def _along(graph: Graph, block: Block, dims: list[BlockDim], place: int) -> BlockDim | None:
    """The dim of a block that splits its first output along rows or columns."""
    return next((d for d in dims if _place(graph, d, block.outputs[0]) == place), None)


def _following(graph: Graph, block: Block, dims: list[BlockDim], now: Mapping[str, int]) -> BlockDim | None:
    """The dim that leaves most bytes of a block's inputs as they are; of equals, one that splits its outputs alike.

    `now`: the factor along which every tensor was made, or last brought to be read.
    """

    def kept(dim: BlockDim) -> tuple[int, bool]:
        stays = [name for name in block.inputs if name in dim.shards and now.get(name, -1) == dim.shards[name]]
        places = {_place(graph, dim, name) for name in stays}
        num_bytes = sum(prod(graph.tensors[name].shape) * graph.tensors[name].item_bytes for name in stays)
        return num_bytes, any(_place(graph, dim, name) in places for name in block.outputs)

    whole = [dim for dim in dims if not dim.partials]
    best = max(whole, key=kept, default=None)
    return best if best is not None and kept(best)[0] else None


def _place(graph: Graph, dim: BlockDim, name: str) -> int:
    """Which dim of a tensor a block's dim splits, or -1."""
    if name not in dim.shards:
        return -1
    places = [i for i, factors in enumerate(graph.tensors[name].factors) for _ in factors]
    return places[dim.shards[name]]


AXIAL = Family(
    name="dap",
    about="dynamic axial parallel for Evoformers: rows and columns in turn, by all-to-alls",
    axes=("dp", "dap"),
    options={"dap": 2, "dp": 1, "micro": 1, "zero1": False, "recompute": False},
    write=dynamic_axial,
)
