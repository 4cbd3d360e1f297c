"""Given tensors that repeat themselves: along which dims all elements are equal, whatever the inputs hold.

A mask that depends on positions alone is written once per sample by many models, and the zeros into which a router's
weights are scattered once per token: at a batch of 1,280 these would be a hundred GiB on every device. Along a dim of
which this module says that it repeats, a device computes and holds one element (`execute.given`), and `given_bytes`
counts one:

    full                    all dims
    expand                  dims that it adds or widens, and those that repeat already
    elementwise operators   dims along which every operand is of size 1, missing, or repeats
"""

from collections.abc import Mapping
from math import prod

from planloom.graph.values import Graph, Op

FULL, EXPAND = "aten.full.default", "aten.expand.default"
ELEMENTWISE = frozenset(
    f"aten.{name}"
    for name in (
        "where.ScalarOther", "where.ScalarSelf", "where.Scalar", "where.self", "__and__.Tensor", "__or__.Tensor",
        "logical_and.default", "logical_or.default", "logical_not.default", "bitwise_not.default", "_to_copy.default",
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


def held_elements(shape: tuple[int, ...], repeated: frozenset[int]) -> int:
    """Elements that are held of a tensor that repeats along some dims."""
    return prod(1 if dim - len(shape) in repeated else size for dim, size in enumerate(shape))


def _repeats(graph: Graph, op: Op, dim: int, found: Mapping[str, frozenset[int]]) -> bool:
    if op.target == FULL:
        return True
    if op.target != EXPAND and (op.target not in ELEMENTWISE or not op.inputs):
        return False
    shapes = {name: graph.tensors[name].shape for name in op.inputs}
    return all(
        -dim > len(shape) or shape[dim] == 1 or dim in found.get(name, frozenset()) for name, shape in shapes.items()
    )
