"""Given tensors: everything that depends on inputs and buffers alone, computed whole on every device once a step."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from planloom.execute.operators import operator, plain
from planloom.graph import Arg, Graph, Op, is_reference, referenced, repeated_dims
from planloom.layout import Box


def compute_given(graph: Graph, known: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """All given tensors from the batch, the buffers and the random state."""
    return Given(graph, {}, device)(known)


class Given:
    """The given tensors of every step; what no input changes (masks, position tables) is computed once."""

    def __init__(self, graph: Graph, buffers: Mapping[str, Tensor], device: torch.device) -> None:
        self._device = device
        self._repeated = repeated_dims(graph)
        self._shapes = {name: graph.tensors[name].shape for name in self._repeated}
        constant = {name for name in buffers if name not in graph.updates}
        ops: tuple[list[Op], list[Op]] = ([], [])
        for op in graph.given:
            is_constant = constant.issuperset(op.inputs)
            constant.update(op.outputs if is_constant else ())
            ops[is_constant].append(op)
        self._later = ops[0]
        kept = {graph.loss, *graph.updates.values()}.union(*(op.inputs for op in (*graph.ops, *self._later)))
        kept.update(name for expansion in graph.expansions for name in referenced(expansion.args))
        computed = self._compute(ops[1], buffers)
        self._constants = {name: value for name, value in computed.items() if name in kept or name in buffers}

    def __call__(self, known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All given tensors; `known` holds the batch, the random state, and buffers that change."""
        return self._compute(self._later, {**self._constants, **known})

    def _compute(self, ops: Sequence[Op], known: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = dict(known)

        def resolve(arg: Arg) -> object:
            if is_reference(arg):
                return values[arg[1:]]
            if isinstance(arg, list | tuple):
                return [resolve(item) for item in arg]
            return plain(arg)

        with torch.no_grad():
            for op in ops:
                kwargs = {key: resolve(value) for key, value in op.kwargs.items()}
                if not op.inputs:  # a factory: the graph does not say on which device
                    kwargs["device"] = self._device
                args = [resolve(arg) for arg in op.args]
                name = op.outputs[0]
                if name in self._repeated:
                    args = [_once(arg, self._repeated[name]) for arg in args] if op.inputs else [[], *args[1:]]
                    value = operator(op.target)(*args, **kwargs)
                    values[name] = value.expand(self._shapes[name])
                else:
                    values[name] = operator(op.target)(*args, **kwargs)
        return values


def _once(arg: object, repeated: frozenset[int]) -> object:
    """One element of an operand along the dims that repeat; sizes and numbers as they are."""
    if isinstance(arg, Tensor):
        for dim in repeated:
            if -dim <= arg.dim():
                arg = arg.narrow(dim, 0, 1)
    return arg


def local_slice(tensor: Tensor, factors: tuple[tuple[int, ...], ...], box: Box) -> Tensor:
    """The part of a whole tensor that a box of its factors holds, with the tensor's own dims."""
    sizes = [size for dim in factors for size in dim]
    if all(start == 0 and stop == size for (start, stop), size in zip(box, sizes, strict=True)):
        return tensor
    part = tensor.reshape(sizes)
    for i, (start, stop) in enumerate(box):
        part = part.narrow(i, start, stop - start)
    lengths = iter([stop - start for start, stop in box])
    shape = []
    for dim in factors:
        length = 1
        for _ in dim:
            length *= next(lengths)
        shape.append(length)
    return part.reshape(shape)
