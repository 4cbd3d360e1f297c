"""Given tensors that repeat themselves: along which dims all elements are equal, whatever the inputs hold.

A mask that depends on positions alone is written once per sample by many models, and the zeros into which a router's
weights are scattered once per token: at a batch of 1,280 these would be a hundred GiB on every device. Along a dim of
which this module says that it repeats, a device computes and holds one element (`execute.given`), and `given_bytes`
counts one:

    full                    all dims
    expand                  dims that it adds or widens, and those that repeat already
    elementwise operators   dims along which every operand is of size 1, missing, or repeats
    views                   what repeats before, as factors: of a dim that joins samples and windows, the samples
"""

from collections.abc import Mapping, Sequence
from math import prod

from planloom.graph.values import Graph, Op

FULL, EXPAND = "aten.full.default", "aten.expand.default"
VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.unsqueeze.default")
ELEMENTWISE = frozenset(
    f"aten.{name}"
    for name in (
        "where.ScalarOther", "where.ScalarSelf", "where.Scalar", "where.self", "__and__.Tensor", "__or__.Tensor",
        "logical_and.default", "logical_or.default", "logical_not.default", "bitwise_not.default", "_to_copy.default",
        "clone.default",
        "le.Tensor", "lt.Tensor", "ge.Tensor", "gt.Tensor", "eq.Tensor", "ne.Tensor", "le.Scalar", "lt.Scalar",
        "ge.Scalar", "gt.Scalar", "eq.Scalar", "ne.Scalar", "add.Tensor", "sub.Tensor", "mul.Tensor",
    )
)  # fmt: skip


def repeated_dims(graph: Graph) -> dict[str, frozenset[int]]:
    """Given tensor → the dims of more than one element along which it repeats; tensors without such dims are left out.

    Dims are counted from the last, -1, so that operands of different rank are aligned.
    """
    found: dict[str, frozenset[int]] = {}
    for op in graph.given:
        name = op.outputs[0]
        if name not in graph.tensors or any(operand not in graph.tensors for operand in op.inputs):
            continue
        shape = graph.tensors[name].shape
        dims = [dim for dim in range(-len(shape), 0) if shape[dim] > 1]
        repeated = frozenset(dim for dim in dims if _repeats(graph, op, dim, found))
        if repeated:
            found[name] = repeated
    return found


def repeated_factors(graph: Graph) -> dict[str, frozenset[int]]:
    """Given tensor → the factors along which it repeats, counted through all its dims; others are left out."""
    dims, found = repeated_dims(graph), dict[str, frozenset[int]]()
    for op in graph.given:
        name = op.outputs[0]
        if name in dims:
            tensor = graph.tensors[name]
            of_factor = [at - len(tensor.factors) for at, dim in enumerate(tensor.factors) for _ in dim]
            found[name] = frozenset(i for i, dim in enumerate(of_factor) if dim in dims[name])
        elif op.target in VIEWS and op.inputs[0] in found and name in graph.tensors:
            before, after = graph.tensors[op.inputs[0]].sizes, graph.tensors[name].sizes
            through = _through_view(before, found[op.inputs[0]], after)
            if held_elements(before, found[op.inputs[0]]) == held_elements(after, through):
                found[name] = through
    return {name: factors for name, factors in found.items() if factors}


def held_elements(sizes: Sequence[int], repeated: frozenset[int]) -> int:
    """Elements that are held of a tensor of these factors, some of which repeat."""
    return prod(1 if i in repeated else size for i, size in enumerate(sizes))


def _through_view(before: Sequence[int], repeated: frozenset[int], after: Sequence[int]) -> frozenset[int]:
    """The factors that lie inside repeating ones when the same elements are counted in other factors."""
    spans = [(prod(before[:i]), prod(before[: i + 1])) for i in repeated]

    def is_inside(i: int) -> bool:
        start, stop = prod(after[:i]), prod(after[: i + 1])
        return any(start % first == 0 and last % stop == 0 for first, last in spans)

    return frozenset(i for i, size in enumerate(after) if size > 1 and is_inside(i))


def _repeats(graph: Graph, op: Op, dim: int, found: Mapping[str, frozenset[int]]) -> bool:
    if op.target == FULL:
        return True
    if op.target != EXPAND and (op.target not in ELEMENTWISE or not op.inputs):
        return False
    shapes = {name: graph.tensors[name].shape for name in op.inputs}
    return all(
        -dim > len(shape) or shape[dim] == 1 or dim in found.get(name, frozenset()) for name, shape in shapes.items()
    )
