"""The strategies of a block over the axes of a shape, and what each makes of the tensors at its boundary.

A strategy gives every axis one dim of the block, or none. Over one axis a tensor is then in a *state*, a number:

    0 … F-1   factor f is split
    F         its producer leaves it partial, or its reader gives a partial cotangent (it reads the whole, but is split)
    F + 1     replicated, and so is its cotangent

A reader in state F reads the tensor whole, as one in state F + 1 does; the states differ on the way back. A layout is a
row of states, one an axis.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from planloom.blocks import Block
from planloom.graph import Graph
from planloom.plan.checks import BATCH_DIM
from planloom.search.space import BlockPin, Shape

EXPERTS_DIM = "experts"
Rows = NDArray[np.intp]
"""One row a strategy or layout, one column an axis."""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Strategies:
    """The strategies of a block: `dims[k, a]` is the dim that strategy k gives to axis a, -1 for none.

    `pieces[k, d]`: into how many pieces dim d is cut.
    """

    dims: Rows
    pieces: Rows

    def __len__(self) -> int:
        return len(self.dims)


def block_strategies(
    block: Block, shape: Shape, pins: Sequence[BlockPin] = (), *, everywhere: bool = False
) -> Strategies:
    """All strategies whose splits are even, before micro-batches.

    `everywhere`: a block with parameters is split over every axis, as it must be where computation is free.
    """
    allowed = [_allowed(block, shape, axis, pins) for axis in range(len(shape.sizes))]
    if everywhere and block.parameters and block.dims:
        allowed = [[d for d in own if d >= 0] or own for own in allowed]
    found, cut = [], []
    for dims in product(*allowed):
        pieces = [prod(n for n, own in zip(shape.sizes, dims, strict=True) if own == d) for d in range(len(block.dims))]
        if all(dim.size % count == 0 for dim, count in zip(block.dims, pieces, strict=True)):
            found.append(dims)
            cut.append(pieces)
    count = len(found)
    return Strategies(
        dims=np.array(found, dtype=np.intp).reshape(count, len(shape.sizes)),
        pieces=np.array(cut, dtype=np.intp).reshape(count, len(block.dims)),
    )


def _allowed(block: Block, shape: Shape, axis: int, pins: Sequence[BlockPin]) -> list[int]:
    """The dims that an axis may split, -1 for none. A pin says nothing of blocks that lack its dim."""
    if shape.sizes[axis] == 1:
        return [-1]
    wanted = {pin.dim for pin in pins if pin.axis == shape.names[axis] and pin.matches(block.name)}
    pinned = [i for i, dim in enumerate(block.dims) if wanted & {dim.name, _word(dim.name)}]
    if pinned:
        return pinned
    if shape.kinds[axis] == "data":
        found = [i for i, dim in enumerate(block.dims) if dim.name in (BATCH_DIM, EXPERTS_DIM)]
        return found or [-1]
    return [-1, *range(len(block.dims))]


def _word(dim: str) -> str:
    return dim.split(".")[0]


def boundary_states(graph: Graph, block: Block, strategies: Strategies, tensor: str) -> Rows:
    """The states of a block's input or output: a dim that an output lacks leaves it partial, one that an input lacks
    its cotangent."""
    num_factors = len(graph.tensors[tensor].sizes)
    by_dim = [dim.shards.get(tensor, num_factors) for dim in block.dims]
    return np.array([*by_dim, num_factors + 1], dtype=np.intp)[strategies.dims]


def junction_layouts(graph: Graph, tensor: str, readers: Sequence[Rows], shape: Shape) -> Rows:
    """Layouts of a junction: over every axis any state in which some reader reads it, if the splits are even."""
    sizes = graph.tensors[tensor].sizes
    options = [sorted({int(s) for rows in readers for s in np.unique(rows[:, a])}) for a in range(len(shape.sizes))]
    found = [
        states
        for states in product(*options)
        if all(
            size % prod(n for n, state in zip(shape.sizes, states, strict=True) if state == f) == 0
            for f, size in enumerate(sizes)
        )
    ]
    return np.array(found, dtype=np.intp).reshape(len(found), len(shape.sizes))


def split_of(states: Rows, sizes: Sequence[int], num_factors: int) -> NDArray[np.float64]:
    """Into how many pieces the whole tensor is cut in every layout."""
    counts = np.where(states < num_factors, np.array(sizes, dtype=float), 1.0)
    found: NDArray[np.float64] = counts.prod(axis=1)
    return found
