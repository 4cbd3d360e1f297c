"""Floating-point operations and bytes of operators and graphs.

Counted is what *products* do: contractions that are linear in each of at least two inputs (linear maps, products of
matrices, einsum, convolutions, grouped products of experts), and attention, which is two products. A multiply-add is
two operations, so a product takes

    2 × Π sizes of its factors            attention: 2 × Π (all but the two head sizes) × (size + value)

times the density of a ragged tensor in it. All else counts nothing: pointwise operators, sums, one-hot contractions
(embeddings, gathers, tokens sent to experts and back), and `given` operators, which no plan splits. An expanded
operator stands in the graph as its parts alone, of which one is the product.

Published figures are counted in three ways:

    full       every product as dense kernels would compute it, masked or not
    causal     attention that is said to be causal at half
    weights    products with a parameter only: what "2 parameters a token", or 6 in training, counts

The backward of a product is one product for each of its two sides that carries a cotangent: 3 × forward where both do,
2 × for the first convolution of images, whose input needs no gradient. Nothing is counted for recomputation.
"""

from collections.abc import Mapping
from math import prod
from typing import Literal

from planloom.graph.rules import Rule, flat
from planloom.graph.values import Graph, Op, Tensor, referenced

Counting = Literal["full", "causal", "weights"]

_CONVOLUTION = "planloom.convolution"
_COMBINE = "planloom.combine.default"
_SINKS, _WINDOW_ARGUMENT = "planloom.sink_attention.default", 6
_HEAD_SIZES = ("size", "value")
_CAUSAL_ARGUMENT = 5
"""The place of `is_causal` among the arguments of torch's scaled_dot_product_attention."""


def is_product(op: Op) -> bool:
    """Does this operator multiply two tensors and sum?"""
    rule = op.rule
    if rule is None or rule.kind != "contraction" or rule.rewrite == "one_hot" or op.target == _COMBINE:
        return False
    return is_attention(op) or sum(len(group) == 1 for group in rule.linear) > 1


def is_attention(op: Op) -> bool:
    """Is this attention as one operator? Written out it is two products like others."""
    return "attention" in op.target


def has_sinks(op: Op) -> bool:
    """Is it attention with a logit of every head beside those of the keys?"""
    return op.target == _SINKS


def attention_window(op: Op) -> int:
    """Of how many keys a query sees some, where there is such a limit; else 0."""
    return int(op.args[_WINDOW_ARGUMENT]) if has_sinks(op) else 0


def product_flops(op: Op, sizes: Mapping[str, int]) -> int:
    """Multiplications and additions of a dense product whose factors have these sizes, those of a piece perhaps."""
    if is_attention(op):
        ends = {name: size for name, size in sizes.items() if _word(name) in _HEAD_SIZES}
        both = sum(prod(size for name, size in ends.items() if _word(name) == word) for word in _HEAD_SIZES)
        return 2 * prod(size for name, size in sizes.items() if name not in ends) * both
    if op.target == _CONVOLUTION:  # what only its input has are the places that a kernel passes over
        rule = _rule(op)
        counted = {*flat(rule.outputs[0]), *flat(rule.inputs[1])}
        return 2 * prod(size for name, size in sizes.items() if name in counted)
    return 2 * prod(sizes.values())


def op_flops(op: Op, tensors: Mapping[str, Tensor], *, counting: Counting = "full") -> int:
    """Floating-point operations of an operator's forward. What `weights` leaves out is known to graphs only."""
    if not is_product(op):
        return 0
    density = min(tensors[name].density for name in (*op.inputs, *op.outputs))
    if counting == "causal" and is_attention(op) and _is_causal(op):
        window, num_keys = attention_window(op), tensors[op.inputs[1]].shape[-2]
        density *= min(1 / 2, window / num_keys) if window else 1 / 2
    return round(density * product_flops(op, _rule(op).sizes))


def graph_flops(graph: Graph, *, counting: Counting = "full") -> int:
    """Floating-point operations of a forward pass and loss."""
    return sum(op_flops(op, graph.tensors, counting=counting) for op in _counted(graph, counting))


def training_flops(graph: Graph, *, counting: Counting = "full") -> int:
    """Floating-point operations of a forward and a backward pass."""
    return sum(
        op_flops(op, graph.tensors, counting=counting) * (1 + _num_backward(graph, op))
        for op in _counted(graph, counting)
    )


def op_bytes(op: Op, tensors: Mapping[str, Tensor]) -> int:
    """What an operator reads and writes; a view moves nothing."""
    if op.rule is not None and op.rule.kind == "view":
        return 0
    return sum(tensor_bytes(tensors[name]) for name in (*op.inputs, *op.outputs))


def graph_bytes(graph: Graph) -> int:
    """What the operators of a forward pass and loss read and write; an expanded one counts as its original."""
    originals = sum(
        tensor_bytes(graph.tensors[name])
        for expansion in graph.expansions
        for name in (*referenced([expansion.args, expansion.kwargs]), expansion.output)
    )
    return originals + sum(op_bytes(op, graph.tensors) for op in graph.ops if op.expansion < 0)


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor; of a ragged one, those of its rows."""
    return round(prod(tensor.shape) * tensor.item_bytes * tensor.density)


def _counted(graph: Graph, counting: Counting) -> tuple[Op, ...]:
    if counting != "weights":
        return graph.ops
    held = set(graph.parameters)
    """Parameters, and what is made of them alone."""
    counted = []
    for op in graph.ops:
        if held.issuperset(op.inputs):
            held.update(op.outputs)
        elif held.intersection(op.inputs):
            counted.append(op)
    return tuple(counted)


def _num_backward(graph: Graph, op: Op) -> int:
    """How many products of the same size the backward takes."""
    if not any(graph.is_differentiable(name) for name in op.outputs):
        return 0
    if is_attention(op):
        return 2
    sides = [group[0] for group in _rule(op).linear if len(group) == 1]
    return sum(graph.is_differentiable(op.inputs[side]) for side in sides)


def _is_causal(op: Op) -> bool:
    at = _CAUSAL_ARGUMENT
    return bool(op.args[at] if len(op.args) > at else op.kwargs.get("is_causal", False))


def _word(factor: str) -> str:
    """A factor's word: `size` of `size.1`, a part of it."""
    return factor.split(".")[0]


def _rule(op: Op) -> Rule:
    assert op.rule is not None, op.name
    return op.rule
