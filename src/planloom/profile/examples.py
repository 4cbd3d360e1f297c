"""The batch and the buffers that runs are measured with: a model's own, or made up where it lies on `meta`.

A preset at its full size is built without memory, and a profile needs no parameters. Numbers that select rows (tokens,
labels) are random below the number of rows: the same row every time would be another kind of work.
"""

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor, nn

from planloom.capture import Batch, tensors_of
from planloom.graph import Graph
from planloom.graph.rules import ONE_HOT_FACTOR


def example_tensors(
    graph: Graph, model: nn.Module, batch: Batch, device: torch.device
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The batch and the buffers of a graph on a device."""
    fixed = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    given: Mapping[str, Tensor] = tensors_of(batch, model)
    filled = {name: _filled(graph, name, tensor, device) for name, tensor in given.items()}
    buffers = {name: _filled(graph, name, fixed[name].detach(), device) for name in graph.buffers}
    return filled, buffers


def _filled(graph: Graph, name: str, tensor: Tensor, device: torch.device) -> Tensor:
    if tensor.device.type != "meta":
        return tensor.to(device)
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.randn(tensor.shape, dtype=tensor.dtype, device=device)
    below = 2 if tensor.dtype == torch.bool else _num_rows(graph, name)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(below, tensor.shape, generator=generator).to(device=device, dtype=tensor.dtype)


def _num_rows(graph: Graph, name: str) -> int:
    """The fewest rows that anything selects from by this tensor, or by what is made of it."""
    derived = {name}
    for op in graph.given:
        if derived.intersection(op.inputs):
            derived.update(op.outputs)
    found = [2**15]
    for op in graph.ops:
        if op.rule is not None and derived.intersection(op.inputs):
            sizes = [size for factor, size in op.rule.sizes.items() if factor.split(".")[0] == ONE_HOT_FACTOR]
            found += [prod(sizes)] if sizes else []
    return min(found)
