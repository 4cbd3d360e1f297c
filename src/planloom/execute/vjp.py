"""The forward of a run with what its backward needs, and nothing more.

Between forward and backward a run holds gradient edges, not its boundary tensors: inputs enter through an identity
whose only differentiable argument is a dummy leaf, so no accumulator keeps them alive, and outputs are remembered by
their edge. Whole parameters stay anyway: they enter as leaves, which takes a tenth of the time. Cotangents are made
contiguous before they leave: autograd may return the same tensor twice, or one with zero strides.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from planloom.graph import Graph
from planloom.program import Run


class Local(Protocol):
    """The forward function of a run on local tensors: a `LocalRun`, or one that is compiled."""

    @property
    def run(self) -> Run: ...

    @property
    def graph(self) -> Graph: ...

    def __call__(self, inputs: Sequence[Tensor], given: Mapping[str, Tensor], micro: int) -> tuple[Tensor, ...]: ...


class Enter(torch.autograd.Function):
    """Identity: makes a tensor differentiable without becoming its owner."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None]:
        return None, None


class RunVjp:
    """One forward of a run; `backward` may be called once."""

    def __init__(self, local: Local, inputs: Sequence[Tensor], given: Mapping[str, Tensor], micro: int) -> None:
        self._slots = local.run.inputs
        self._shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in inputs]
        entered: list[Tensor] = []
        self._edges_in: list[GradientEdge | Tensor | None] = []
        # In a moment of a time axis a parameter may be a piece, which is freed before the backward.
        stay = local.graph.parameters if not local.run.moment else {}
        anchor = torch.zeros((), requires_grad=True)
        with torch.enable_grad():
            for slot, tensor in zip(self._slots, inputs, strict=True):
                if slot.cotangent is None:
                    entered.append(tensor)
                    self._edges_in.append(None)
                elif slot.tensor in stay:
                    entered.append(tensor.detach().requires_grad_())
                    self._edges_in.append(entered[-1])
                else:
                    entered.append(Enter.apply(anchor, tensor))
                    self._edges_in.append(get_gradient_edge(entered[-1]))
            outputs = local(entered, given, micro)
        self._edges_out: list[GradientEdge | None] = [
            get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in outputs
        ]
        self.outputs: tuple[Tensor, ...] | None = tuple(tensor.detach() for tensor in outputs)

    def take_outputs(self) -> tuple[Tensor, ...]:
        """The outputs, which this object then forgets."""
        assert self.outputs is not None
        outputs, self.outputs = self.outputs, None
        return outputs

    def backward(
        self, cotangents: Sequence[Tensor | None], *, wanted: Sequence[bool] | None = None
    ) -> list[Tensor | None]:
        """The cotangents of the inputs, None for those without; zero where nothing depends on an input.

        `wanted` says of every input whether its cotangent is computed; without it, all are.
        """
        edges_in = self._edges_in
        if wanted is not None:
            edges_in = [edge if want else None for edge, want in zip(self._edges_in, wanted, strict=True)]
        pairs = [
            (edge, cotangent)
            for edge, cotangent in zip(self._edges_out, cotangents, strict=True)
            if edge is not None and cotangent is not None
        ]
        targets: Any = [edge for edge in edges_in if edge is not None]
        found = iter(
            torch.autograd.grad(
                [edge for edge, _ in pairs], targets, [cotangent for _, cotangent in pairs], allow_unused=True
            )
            if pairs and targets
            else [None] * len(targets)
        )
        results: list[Tensor | None] = []
        for edge, (shape, dtype, device) in zip(edges_in, self._shapes, strict=True):
            gradient = next(found) if edge is not None else None
            if edge is not None and gradient is None:
                gradient = torch.zeros(shape, dtype=dtype, device=device)
            results.append(None if gradient is None else gradient.contiguous())
        return results
