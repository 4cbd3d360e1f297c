"""A deep model without torch: a chain of equal linear maps, and the sum of the result as loss."""

from planloom.blocks import BlockGraph, find_blocks
from planloom.graph import Graph, notate, refine_factors
from tests.pure.tiny_graph import linear, op, tensor

WIDE = 4


def chain_blocks(num_maps: int, *, batch: int) -> BlockGraph:
    """`num_maps` blocks and the loss's own."""
    x, loss = tensor("x", batch, WIDE), tensor("loss")
    tensors, ops, parameters = [x, loss], [], []
    for i in range(num_maps):
        weight = tensor(f"maps.{i}.weight", WIDE, WIDE)
        made, x = linear(f"map{i}", x, weight, module=f"maps.{i}")
        ops.append(made)
        tensors += [weight, x]
        parameters.append(weight.name)
    ops.append(op("loss", "aten.sum.default", [x.name], notate("... d ->", x.shape, (), kind="contraction")))
    refined, rewritten = refine_factors({t.name: t for t in tensors}, ops)
    return find_blocks(
        Graph(
            tensors=refined,
            inputs=("x",),
            parameters=tuple(parameters),
            buffers=(),
            given=(),
            ops=tuple(rewritten),
            expansions=(),
            loss="loss",
            tied={},
        )
    )


def chain_batch(batch: int) -> dict[str, tuple[tuple[int, ...], str]]:
    return {"x": ((batch, WIDE), "float32")}
