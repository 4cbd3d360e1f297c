"""A model of equal layers without torch: two linear maps with an activation between, added to what goes in."""

from planloom.blocks import BlockGraph, find_blocks
from planloom.graph import Graph, notate, refine_factors
from tests.pure.tiny_graph import linear, op, tensor


def layered_blocks(num_layers: int, *, batch: int, wide: int, hidden: int) -> BlockGraph:
    """A map, so many layers x + down · relu(up · x), and the sum of the result as loss."""
    x, loss = tensor("x", batch, wide), tensor("loss")
    tensors, ops, parameters = [x, loss], [], []

    def mapped(name: str, module: str, width: int) -> None:
        nonlocal x
        weight = tensor(f"{module}.weight", width, x.shape[-1])
        made, x = linear(name, x, weight, module=module)
        ops.append(made)
        tensors.extend([weight, x])
        parameters.append(weight.name)

    mapped("enter", "enter", wide)
    for i in range(num_layers):
        before = x
        mapped(f"up{i}", f"layers.{i}.up", hidden)
        active = tensor(f"active{i}", *x.shape)
        same = notate("... d -> ... d", x.shape, active.shape)
        ops.append(op(active.name, "aten.relu.default", [x.name], same, module=f"layers.{i}"))
        tensors.append(active)
        x = active
        mapped(f"down{i}", f"layers.{i}.down", wide)
        added = tensor(f"added{i}", *x.shape)
        rule = notate("... d, ... d -> ... d", before.shape, x.shape, added.shape, linear=((0, 1),))
        ops.append(op(added.name, "aten.add.Tensor", [before.name, x.name], rule, module=f"layers.{i}"))
        tensors.append(added)
        x = added
    ops.append(op("loss", "aten.sum.default", [x.name], notate("... d ->", x.shape, (), kind="contraction")))
    refined, rewritten = refine_factors({t.name: t for t in tensors}, ops)
    return find_blocks(
        Graph(
            tensors=refined, inputs=("x",), parameters=tuple(parameters), buffers=(), given=(), ops=tuple(rewritten),
            expansions=(), loss="loss", tied={},
        )
    )  # fmt: skip
