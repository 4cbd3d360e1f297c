"""Autograd without elements: nodes that hold what their backward needs, and the engine that runs them.

The engine follows torch's: of the nodes whose cotangents have all arrived the one made last runs next; a second
cotangent of the same result is added in place where nobody else holds the first (a view holds its base); a gradient
that is larger than its input is summed to the input's shape, one of another dtype is cast; what a node saved is freed
when it has run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from planloom.cost.eager.values import (
    Meter,
    Shape,
    Storage,
    Value,
    broadcast_shape,
    contiguous_strides,
    is_dense,
    is_float,
    item_bytes,
    result_strides,
)

Gradients = Callable[[list[Value], list[Value | None]], Sequence[Value | None]]
"""From what a node saved and the cotangents of its results to the gradients of its inputs."""


class Node:
    """One differentiable operator that was executed."""

    __slots__ = ("gradients", "inputs", "name", "next", "num_results", "number", "saved")

    def __init__(
        self,
        name: str,
        number: int,
        inputs: Sequence[Value],
        saved: Sequence[Value],
        gradients: Gradients,
        num_results: int,
    ) -> None:
        self.name = name
        self.number = number
        self.next = [value.edge for value in inputs]
        self.inputs = [(value.shape, value.dtype) for value in inputs]
        self.saved = [value.detached() for value in saved]
        self.gradients = gradients
        self.num_results = num_results


class Tape:
    """Executes operators: makes their results, and a node where an input carries a cotangent."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.num_nodes = 0
        self._is_recording = True

    # -- results

    def new(self, shape: Sequence[int], dtype: str, strides: Shape | None = None) -> Value:
        """A tensor in a storage of its own."""
        shape = tuple(shape)
        num_bytes = item_bytes(dtype)
        for size in shape:
            num_bytes *= size
        return Value(Storage(num_bytes, self.meter), shape, strides or contiguous_strides(shape), dtype)

    def pointwise(self, operands: Sequence[Value], dtype: str = "") -> Value:
        """The result of a pointwise operator, laid out as its operands are."""
        shape = broadcast_shape([value.shape for value in operands])
        return self.new(shape, dtype or promoted(operands), result_strides(shape, operands))

    def record(
        self,
        name: str,
        result: Value,
        inputs: Sequence[Value],
        saved: Sequence[Value],
        gradient: Callable[..., Value | None],
    ) -> Value:
        """A node with one result. `gradient(i, saved, cotangent)` is the gradient of input i."""
        if not self.needs(*inputs) or not is_float(result.dtype):
            return result

        def gradients(kept: list[Value], cotangents: list[Value | None]) -> list[Value | None]:
            assert cotangents[0] is not None
            found: list[Value | None] = [None] * len(edges)
            for i in reversed(range(len(edges))):  # in the order of their names: other before self, mat2 before self
                found[i] = None if edges[i] is None else gradient(i, kept, cotangents[0])
            return found

        edges = [value.edge for value in inputs]
        node = self._node(name, inputs, saved, gradients, 1)
        result.edge = (node, 0)
        return result

    def record_many(
        self,
        name: str,
        results: Sequence[Value],
        inputs: Sequence[Value],
        saved: Sequence[Value],
        gradients: Gradients,
    ) -> None:
        """A node with several results; `gradients` gives those of all inputs at once."""
        if self.needs(*inputs):
            node = self._node(name, inputs, saved, gradients, len(results))
            for i, result in enumerate(results):
                result.edge = (node, i)

    def needs(self, *values: Value) -> bool:
        """Will a gradient of one of these be asked for?"""
        return self._is_recording and any(value.edge is not None for value in values)

    def enter(self, value: Value) -> Value:
        """The same tensor as one whose gradient is wanted."""
        inside = value.detached()
        inside.edge = (self._node("enter", (), (), lambda saved, cotangents: (), 1), 0)
        return inside

    def _node(
        self,
        name: str,
        inputs: Sequence[Value],
        saved: Sequence[Value],
        gradients: Gradients,
        num_results: int,
    ) -> Node:
        self.num_nodes += 1
        return Node(name, self.num_nodes, inputs, saved, gradients, num_results)

    # -- the backward

    def sum_to(self, value: Value, shape: Shape) -> Value:
        """The sum over the dims along which a tensor is larger than a shape."""
        if value.shape == shape:
            return value
        return self.new(shape, value.dtype)

    def backward(self, roots: Sequence[tuple[tuple[Node, int], Value]], wanted: Sequence[Node]) -> list[Value | None]:
        """The gradients that arrive at these nodes, from the cotangents of some results."""
        self._is_recording = False
        waiting = self._dependencies([node for (node, _), _ in roots])
        arrived: dict[int, list[Value | None]] = {}
        ready: list[tuple[int, Node]] = []
        captured: dict[int, Value | None] = {node.number: None for node in wanted}
        for (node, place), cotangent in roots:
            self._arrive(arrived, node, place, cotangent)
        for node in {node.number: node for (node, _), _ in roots}.values():
            if not waiting[node.number]:
                heappush(ready, (-node.number, node))
        while ready:
            node = heappop(ready)[1]
            cotangents = arrived.pop(node.number, None)
            if node.number in captured:
                captured[node.number] = cotangents[0] if cotangents else None
                continue
            gradients = self._called(node, cotangents)
            del cotangents
            node.saved.clear()
            gradients.reverse()
            for edge in node.next:
                gradient = gradients.pop()
                if edge is None:
                    continue
                target, place = edge
                if gradient is not None:
                    self._arrive(arrived, target, place, gradient)
                del gradient
                waiting[target.number] -= 1
                if not waiting[target.number]:
                    heappush(ready, (-target.number, target))
        return [captured[node.number] for node in wanted]

    def _called(self, node: Node, cotangents: list[Value | None] | None) -> list[Value | None]:
        if cotangents is None or all(value is None for value in cotangents):
            return [None] * len(node.next)
        gradients = list(node.gradients(node.saved, cotangents))
        for i, (shape, dtype) in enumerate(node.inputs):
            gradient = gradients[i]
            if gradient is not None:
                gradient = self.sum_to(gradient, shape)
                gradients[i] = gradient if gradient.dtype == dtype else self.new(shape, dtype)
                del gradient
        return gradients

    def _arrive(self, arrived: dict[int, list[Value | None]], node: Node, place: int, cotangent: Value) -> None:
        places = arrived.setdefault(node.number, [None] * node.num_results)
        old = places[place]
        if old is None:
            places[place] = cotangent.detached()
            return
        is_alone = not old.is_view and sys.getrefcount(old.storage) <= _OWN_REFERENCES
        if not (is_alone and is_dense(old.shape, old.strides)):
            places[place] = self.pointwise([old, cotangent])

    def _dependencies(self, roots: Sequence[Node]) -> dict[int, int]:
        """For every node that will run, how many results must arrive first."""
        waiting = {node.number: 0 for node in roots}
        open_nodes = list({node.number: node for node in roots}.values())
        while open_nodes:
            for edge in open_nodes.pop().next:
                if edge is not None:
                    if edge[0].number not in waiting:
                        waiting[edge[0].number] = 0
                        open_nodes.append(edge[0])
                    waiting[edge[0].number] += 1
        return waiting


_OWN_REFERENCES = 2
"""What `sys.getrefcount` counts of a storage that one value alone holds: that value, and the argument."""


_RANK = {"bool": 0, "uint8": 1, "int8": 1, "int16": 2, "int32": 3, "int64": 4, "float16": 5, "bfloat16": 5,
         "float32": 6, "float64": 7, "complex64": 8, "complex128": 9}  # fmt: skip


def promoted(operands: Sequence[Value]) -> str:
    """The dtype of a result: the highest among the operands; one without dims counts by its kind only."""
    with_dims = [value.dtype for value in operands if value.rank] or [value.dtype for value in operands]
    kinds = max(is_float(value.dtype) for value in operands)
    if {"float16", "bfloat16"} <= set(with_dims):
        return "float32"
    best = max(with_dims, key=_RANK.__getitem__)
    return best if is_float(best) == kinds else max((value.dtype for value in operands), key=_RANK.__getitem__)
