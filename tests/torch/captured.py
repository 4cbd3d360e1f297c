"""The models of the tests, captured once a process, and what every tensor of them holds."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from planloom.blocks import BlockGraph, find_blocks
from planloom.capture import capture
from planloom.execute import compute_given
from tests.models import build, lifted


@dataclass(frozen=True)
class Captured:
    """A model, its batch, its blocks, and all tensors that every device knows whole."""

    model: nn.Module
    batch: dict[str, Tensor]
    blocks: BlockGraph
    given: dict[str, Tensor]

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}


@cache
def captured(name: str, dtype: torch.dtype) -> Captured:
    model, batch = build(name, dtype)
    with lifted(dtype):
        graph = capture(model, batch)
    return of(model, batch, find_blocks(graph))


def of(model: nn.Module, batch: dict[str, Tensor], blocks: BlockGraph) -> Captured:
    """A captured model with its given tensors; frozen parameters count as buffers."""
    held = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    fixed = {name: held[name].detach() for name in blocks.graph.buffers}
    given = compute_given(blocks.graph, {**batch, **fixed}, torch.device("cpu"))
    return Captured(model=model, batch=batch, blocks=blocks, given=given)
