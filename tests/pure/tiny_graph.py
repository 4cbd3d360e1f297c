"""A model without torch: two linear maps with an activation between them, and the sum of the results as loss.

    hidden = relu(x · firstᵀ)    loss = Σ hidden · secondᵀ

The operators are listed in the order of the model; the graph is what capture would make of it.
"""

from collections.abc import Sequence

from planloom.blocks import BlockGraph, find_blocks
from planloom.graph import Graph, Op, Rule, Tensor, notate, refine_factors

BATCH, SEQUENCE, WIDE, HIDDEN = 8, 2, 4, 12


def op(name: str, target: str, inputs: Sequence[str], rule: Rule, *, module: str = "") -> Op:
    """An operator that takes its tensors in order and makes one of its own name."""
    return Op(
        name=name,
        target=target,
        args=tuple(f"%{tensor}" for tensor in inputs),
        kwargs={},
        inputs=tuple(inputs),
        outputs=(name,),
        module=module,
        rule=rule,
    )


def tensor(name: str, *shape: int) -> Tensor:
    return Tensor(name=name, shape=shape, dtype="float32")


def linear(name: str, x: Tensor, weight: Tensor, *, module: str = "") -> tuple[Op, Tensor]:
    """A linear map and its result."""
    result = tensor(name, *x.shape[:-1], weight.shape[0])
    rule = notate(
        "... in, out in -> ... out", x.shape, weight.shape, result.shape, linear=((0,), (1,)), kind="contraction"
    )
    return op(name, "aten.linear.default", (x.name, weight.name), rule, module=module), result


def tiny_graph(*, batch: int = BATCH, sequence: tuple[int, ...] = (SEQUENCE,), hidden: int = HIDDEN) -> Graph:
    """Inputs [batch, sequence, wide]; with an empty `sequence` [batch, wide]."""
    x, loss = tensor("x", batch, *sequence, WIDE), tensor("loss")
    first, second = tensor("first.weight", hidden, WIDE), tensor("second.weight", WIDE, hidden)
    map1, made1 = linear("map1", x, first, module="first")
    active = tensor("active", *made1.shape)
    relu = op("active", "aten.relu.default", ["map1"], notate("... d -> ... d", made1.shape, active.shape))
    map2, made2 = linear("map2", active, second, module="second")
    total = op("loss", "aten.sum.default", ["map2"], notate("... d ->", made2.shape, (), kind="contraction"))
    tensors, ops = refine_factors(
        {t.name: t for t in (x, first, second, made1, active, made2, loss)}, [map1, relu, map2, total]
    )
    return Graph(
        tensors=tensors,
        inputs=("x",),
        parameters=("first.weight", "second.weight"),
        buffers=(),
        given=(),
        ops=tuple(ops),
        expansions=(),
        loss="loss",
        tied={},
    )


def tiny_blocks() -> BlockGraph:
    return find_blocks(tiny_graph())


def tiny_batch() -> dict[str, tuple[tuple[int, ...], str]]:
    return {"x": ((BATCH, SEQUENCE, WIDE), "float32")}
