"""Kernels: what one operator of a run launches, with local shapes.

Operators fall into five sorts:

    view        launches nothing
    product     a matrix product of a library, its shape (batch, m, n, k) read off the operator's rule
    attention   one kernel of a library
    rows        gathers and scatters (embeddings, tokens to experts and back) and operators that nobody here knows: a
                kernel each, that moves what it touches
    fusible     all else: pointwise operators, and reductions such as norms, softmax and losses

A `Movement` is priced by its bytes. What a whole run launches is put together in `fusion.py`.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

from planloom.cost.attention import AttentionShape, Direction
from planloom.errors import PriceError
from planloom.graph import Graph, Op
from planloom.graph.flops import attention_window, has_sinks, is_attention, is_product
from planloom.graph.rules import Rule, flat
from planloom.program import Operand, Operation

Sort = Literal["view", "fusible", "product", "attention", "rows"]


@dataclass(frozen=True, slots=True)
class Product:
    """`batch` products [m, k] × [k, n]; `shape` is (batch, m, n, k).

    `is_regular`: False for convolutions and groups of experts, kernels that no fit has seen.
    """

    shape: tuple[int, int, int, int]
    dtype: str
    item_bytes: int
    is_regular: bool = True


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention as one kernel."""

    shape: AttentionShape
    direction: Direction
    dtype: str
    item_bytes: int


@dataclass(frozen=True, slots=True)
class Movement:
    """A kernel that reads and writes so many bytes. `is_known`: False if it may do more than that."""

    num_bytes: int
    num_launches: int = 1
    is_known: bool = True


Kernel = Product | Attention | Movement

_VIEWS = ("aten.expand.default", "aten.detach.default")
"""Pointwise by their rules, yet they move nothing."""

_DISPATCH, _COMBINE = "planloom.dispatch.default", "planloom.combine.default"
_GROUPED_BIAS = "planloom.grouped_bias.default"
_ROWS = (_DISPATCH, _COMBINE, _GROUPED_BIAS, "planloom.topk")
_ROUTING_LAUNCHES = 6
"""Operators on rows of experts find the rows first (nonzero of the mask: a few small kernels). Assumed."""

_GROUPED, _CONVOLUTION = "planloom.grouped_linear.default", "planloom.convolution"
_EMBEDDING = "aten.embedding.default"
_SORT_LAUNCHES = 4
"""The backward of an embedding sorts the indices first: a few small kernels. Assumed."""

_NAMESPACES = ("aten.", "planloom.")
"""Operators of others may do anything."""

_CAUSAL_ARGUMENT = 5
"""The place of `is_causal` among the arguments of torch's scaled_dot_product_attention."""


def sort_of(graph: Graph, operation: Operation) -> Sort:
    """How an operation is priced."""
    op = graph.ops[operation.op]
    if op.rule is None:
        raise PriceError(
            f"operator {op.target} has no rule, so its work is unknown",
            given=f"{op.name} in {op.module or 'the model'}",
            required="an operator with a dimension rule",
            todo="register one (dimension_rule), or profile on this device",
        )
    if operation.is_original:
        return "product" if _product_member(graph, op) is not None else "fusible"
    if op.rule.kind == "view" or op.target in _VIEWS:
        return "view"
    if is_attention(op):
        return "attention"
    if is_product(op):
        return "product"
    if op.target in _ROWS or op.rule.rewrite == "one_hot" or not op.target.startswith(_NAMESPACES):
        return "rows"
    return "fusible"


def is_known(operation: Operation) -> bool:
    """Is it an operator that only moves its tensors, as far as anybody can tell?"""
    return operation.target.startswith(_NAMESPACES)


# --- products


def _product_member(graph: Graph, last: Op) -> Op | None:
    """The product in an expansion, as in a linear map with bias."""
    return next((graph.ops[i] for i in graph.expansion_members[last.expansion] if is_product(graph.ops[i])), None)


def _product_rule(graph: Graph, operation: Operation) -> tuple[Op, Rule]:
    op = graph.ops[operation.op]
    found = _product_member(graph, op) if operation.is_original else op
    assert found is not None
    assert found.rule is not None
    return found, found.rule


def product_sides(graph: Graph, operation: Operation) -> tuple[int, int, int | None]:
    """The places among an operation's inputs of the two sides of a product, and of the bias of an original."""
    op, rule = _product_rule(graph, operation)
    at = [group[0] for group in rule.linear if len(group) == 1]
    places = {operand.tensor: i for i, operand in enumerate(operation.inputs)}
    others = [i for i, operand in enumerate(operation.inputs) if operand.tensor not in op.inputs]
    bias = others[0] if operation.is_original and others else None
    return places[op.inputs[at[0]]], places[op.inputs[at[1]]], bias


def product_of(graph: Graph, operation: Operation) -> Product:
    """The shape of a product from its rule: which factors both sides have, which one alone, which are summed."""
    op, rule = _product_rule(graph, operation)
    terms = dict(zip(op.inputs, rule.inputs, strict=True))
    sizes: dict[str, int] = {}
    for operand in operation.inputs:  # of an einsum of three or more all are counted
        if operand.tensor in terms:
            sizes.update(zip(flat(terms[operand.tensor]), operand.sizes, strict=True))
    left, right, _ = product_sides(graph, operation)
    one, two = (set(flat(terms[operation.inputs[i].tensor])) for i in (left, right))
    kept = set(flat(rule.outputs[0]))
    if op.target == _CONVOLUTION:  # what only its input has are the places that a kernel passes over
        sizes.update(zip(flat(rule.outputs[0]), operation.outputs[0].sizes, strict=True))
        sizes = {name: size for name, size in sizes.items() if name in kept or name in two}
    batch = prod(size for name, size in sizes.items() if name in one and name in two and name in kept)
    m = prod(size for name, size in sizes.items() if name in kept and name not in two)
    n = prod(size for name, size in sizes.items() if name in kept and name in two and name not in one)
    k = prod(size for name, size in sizes.items() if name not in kept)
    if op.target == _GROUPED:  # the rows of one expert, on average
        m = max(1, round(m * graph.tensors[operation.inputs[left].tensor].density))
    result = operation.outputs[0]
    item_bytes = graph.tensors[result.tensor].item_bytes
    return Product((batch, m, n, k), result.dtype, item_bytes, op.target not in (_GROUPED, _CONVOLUTION))


# --- attention


def attention_of(graph: Graph, operation: Operation, direction: Direction) -> Attention:
    query, key, value, *masks = operation.inputs
    op = graph.ops[operation.op]
    window = attention_window(op)
    if has_sinks(op):
        masks.pop()
    at = _CAUSAL_ARGUMENT
    shape = AttentionShape(
        batch=query.shape[0],
        heads=query.shape[1],
        key_heads=key.shape[1],
        num_queries=query.shape[2],
        num_keys=key.shape[2],
        size=query.shape[3],
        value=value.shape[3],
        is_causal=bool(op.args[at] if len(op.args) > at else op.kwargs.get("is_causal", False)),
        mask_bytes=sum(mask.num_bytes for mask in masks),
        window=window,
        has_sinks=has_sinks(op),
    )
    result = operation.outputs[0]
    return Attention(shape, direction, result.dtype, graph.tensors[result.tensor].item_bytes)


# --- rows


def rows_forward(graph: Graph, operation: Operation) -> Movement:
    """What an operator on rows reads and writes: of a table, only the rows that it takes."""
    rule, inputs = graph.ops[operation.op].rule, operation.inputs
    made = sum(operand.num_bytes for operand in operation.outputs)
    read = sum(operand.num_bytes for operand in inputs)
    if operation.target == _COMBINE:  # rows × weights; zeros; a copy of them, to which rows are added
        weighted = _weighted_bytes(graph, operation)
        return Movement(read + 4 * weighted + 3 * made, num_launches=_ROUTING_LAUNCHES)
    if operation.target == _GROUPED_BIAS:  # the bias of every row, then the sum
        return Movement(read + 3 * made, num_launches=_ROUTING_LAUNCHES)
    if operation.target == _DISPATCH or (rule is not None and rule.rewrite == "one_hot"):
        read += min(inputs[0].num_bytes, made) - inputs[0].num_bytes
    launches = _ROUTING_LAUNCHES if operation.target == _DISPATCH else 1
    return Movement(read + made, num_launches=launches, is_known=is_known(operation))


def rows_backward(graph: Graph, operation: Operation, with_cotangent: list[Operand]) -> Movement:
    """The cotangents of these inputs: a table's is zero everywhere, then rows are added to it."""
    rule = graph.ops[operation.op].rule
    made = sum(operand.num_bytes for operand in operation.outputs)
    written = sum(operand.num_bytes for operand in with_cotangent)
    if operation.target == _DISPATCH or (rule is not None and rule.rewrite == "one_hot"):
        launches = 2 + (_SORT_LAUNCHES if operation.target == _EMBEDDING else 0)
        return Movement(written + 3 * made, num_launches=launches)
    read = sum(operand.num_bytes for operand in operation.inputs)
    if operation.target == _COMBINE:  # rows of the cotangent, × weights, × rows and their sums
        return Movement(read + written + 6 * _weighted_bytes(graph, operation), num_launches=_ROUTING_LAUNCHES)
    return Movement(read + made + written, is_known=is_known(operation))


def _weighted_bytes(graph: Graph, operation: Operation) -> int:
    """Bytes of all rows times their weights, in the dtype of the result."""
    rows, result = operation.inputs[0], operation.outputs[0]
    items = (graph.tensors[operand.tensor].item_bytes for operand in (result, rows))
    return rows.num_bytes * next(items) // next(items)
