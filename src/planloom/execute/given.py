"""Given tensors: everything that depends on inputs and buffers alone, computed whole on every device once a step."""

from collections.abc import Mapping

import torch
from torch import Tensor

from planloom.execute.operators import operator, plain
from planloom.graph import Arg, Graph, is_reference
from planloom.layout import Box


def compute_given(graph: Graph, known: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """All given tensors from the batch and the buffers."""
    values = dict(known)

    def resolve(arg: Arg) -> object:
        if is_reference(arg):
            return values[arg[1:]]
        if isinstance(arg, list | tuple):
            return [resolve(item) for item in arg]
        return plain(arg)

    with torch.no_grad():
        for op in graph.given:
            kwargs = {key: resolve(value) for key, value in op.kwargs.items()}
            if not op.inputs:  # a factory: the graph does not say on which device
                kwargs["device"] = device
            values[op.outputs[0]] = operator(op.target)(*(resolve(arg) for arg in op.args), **kwargs)
    return values


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
