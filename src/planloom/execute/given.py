"""Given tensors: everything that depends on inputs and buffers alone, computed whole on every device once a step.

What repeats is held once, as a tensor with strides of zero. Where a part of a dim repeats (the samples, of a dim that
joins samples and windows) that takes a dim for each factor: `own_dims` and `local_slice` give the tensor's own.
"""

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from planloom.execute.operators import operator, plain
from planloom.graph import Arg, Graph, Op, is_reference, referenced, repeated_dims, repeated_factors
from planloom.layout import Box


def compute_given(graph: Graph, known: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """All given tensors from the batch, the buffers and the random state; see `Given`."""
    return Given(graph, {}, device)(known)


class Given:
    """The given tensors of every step; what no input changes (masks, position tables) is computed once.

    Those in `in_factors` have a dim for each factor, all others their own.
    """

    def __init__(self, graph: Graph, buffers: Mapping[str, Tensor], device: torch.device) -> None:
        self._device = device
        self._repeated = repeated_dims(graph)
        self._tensors = graph.tensors
        self._factors = repeated_factors(graph)
        self.in_factors = frozenset(self._factors).difference(self._repeated, graph.updates.values())
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
                value = values[arg[1:]]
                return own_dims(value, self._tensors[arg[1:]].factors) if arg[1:] in self.in_factors else value
            if isinstance(arg, list | tuple):
                return [resolve(item) for item in arg]
            return plain(arg)

        with torch.no_grad():
            for op in ops:
                name = op.outputs[0]
                if name in self.in_factors:
                    values[name] = self._viewed(values[op.inputs[0]], op.inputs[0], name)
                    continue
                kwargs = {key: resolve(value) for key, value in op.kwargs.items()}
                if not op.inputs:  # a factory: the graph does not say on which device
                    kwargs["device"] = self._device
                args = [resolve(arg) for arg in op.args]
                if name in self._repeated:
                    args = [_once(arg, self._repeated[name]) for arg in args] if op.inputs else [[], *args[1:]]
                    value = operator(op.target)(*args, **kwargs)
                    values[name] = value.expand(self._tensors[name].shape)
                else:
                    values[name] = operator(op.target)(*args, **kwargs)
        return values

    def _viewed(self, tensor: Tensor, before: str, after: str) -> Tensor:
        """A view of what repeats: of the elements that are held, and as often as it has them."""
        part = tensor.reshape(self._tensors[before].sizes)
        for i in self._factors[before]:
            part = part.narrow(i, 0, 1)
        sizes = self._tensors[after].sizes
        return part.reshape([1 if i in self._factors[after] else n for i, n in enumerate(sizes)]).expand(sizes)


def _once(arg: object, repeated: frozenset[int]) -> object:
    """One element of an operand along the dims that repeat; sizes and numbers as they are."""
    if isinstance(arg, Tensor):
        for dim in repeated:
            if -dim <= arg.dim():
                arg = arg.narrow(dim, 0, 1)
    return arg


def own_dims(tensor: Tensor, factors: tuple[tuple[int, ...], ...]) -> Tensor:
    """A tensor that has its own dims, or one for each factor, with its own."""
    return tensor.reshape([prod(dim) for dim in factors])


def local_slice(tensor: Tensor, factors: tuple[tuple[int, ...], ...], box: Box) -> Tensor:
    """The part of a whole tensor that a box of its factors holds, with the tensor's own dims."""
    sizes = [size for dim in factors for size in dim]
    if all(start == 0 and stop == size for (start, stop), size in zip(box, sizes, strict=True)):
        return own_dims(tensor, factors)
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
