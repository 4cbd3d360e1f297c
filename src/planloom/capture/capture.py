"""Capture: `nn.Module` + example batch → `Graph`.

The stages, in order: export (torch), translate (nodes → operators, identities dropped, tuples flattened), expand
(norms, losses and biases into forms that can be split), separate what depends on inputs alone, attach rules, agree on
factors. Nothing is computed: tensors are fake, and a model on the `meta` device is captured as well as one in memory.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from planloom.capture.expand import expand
from planloom.capture.guards import refuse_hidden_no_grad, refusing_own_backwards
from planloom.capture.rules import attach_rule
from planloom.capture.translate import translate
from planloom.errors import CaptureError
from planloom.graph import Graph, Op, refine_factors

Batch = Mapping[str, torch.Tensor]
LossFunction = Callable[[Any], torch.Tensor]


class _WithLoss(nn.Module):
    """The model and its loss as one module that returns a scalar."""

    def __init__(self, model: nn.Module, loss: LossFunction | None) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        output = self.model(**batch)
        loss = self.loss(output) if self.loss else getattr(output, "loss", output)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shown = f"{type(loss).__name__}{list(loss.shape) if isinstance(loss, torch.Tensor) else ''}"
            raise CaptureError(
                "the model does not return a scalar loss",
                given=shown,
                required="a scalar tensor, or an output with a scalar `.loss`",
                todo="pass loss=…, a function from the model's output to a scalar, or put labels into the batch",
            )
        return loss if loss.dim() == 0 else loss.reshape(())


def capture(model: nn.Module, batch: Batch, *, loss: LossFunction | None = None) -> Graph:
    """The forward pass and loss of `model` on inputs shaped like `batch`."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    example = {name: torch.empty_like(tensor, device=device) for name, tensor in batch.items()}
    program = _export(_WithLoss(model, loss), example)
    graph = expand(translate(program, model))
    if graph.loss not in {name for op in graph.ops for name in op.outputs}:
        raise CaptureError(
            "the loss does not depend on any trainable parameter",
            given=f"{len(graph.parameters)} parameters that the loss reads",
            required="at least one",
            todo="return the loss of the model's output, and leave requires_grad on",
        )
    ruled = [replace(op, rule=attach_rule(op, graph.tensors, graph.parameters)) for op in graph.ops]
    tensors, ops = refine_factors(graph.tensors, ruled)
    return replace(graph, tensors=tensors, ops=_producers_first(ops))


def _export(model: nn.Module, example: dict[str, torch.Tensor]) -> ExportedProgram:
    try:
        with warnings.catch_warnings(), refusing_own_backwards():
            # torch 2.13.0's own use of a deprecated class, nothing that a user could change
            warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
            program = torch.export.export(model, (), example, strict=False)
            refuse_hidden_no_grad(program)
            return program.run_decompositions({})
    except CaptureError:
        raise
    except Exception as error:  # torch.export raises many types; each is the user's to repair
        lines = str(error).strip().splitlines()
        raise CaptureError(
            f"{type(model.model).__name__} cannot be captured",
            given=f"{type(error).__name__}: {lines[0] if lines else ''} (batch: {', '.join(example)})",
            required="a batch that the model takes, and no control flow or shape that depends on values",
            todo="try model(**batch) first; --debug shows torch's full message with the line of user code",
        ) from error


def _producers_first(ops: list[Op]) -> tuple[Op, ...]:
    made = {name for op in ops for name in op.outputs}
    seen: set[str] = set()
    for op in ops:
        assert all(name in seen for name in op.inputs if name in made), op.name
        seen.update(op.outputs)
    return tuple(ops)


def batch_spec(batch: Batch) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every input: what a plan records of its batch."""
    return {name: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in batch.items()}


def capture_from_spec(
    model: nn.Module, spec: Mapping[str, tuple[tuple[int, ...], str]], *, loss: LossFunction | None = None
) -> Graph:
    """Capture for a batch of which only shapes and dtypes are known."""
    empty = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for name, (shape, dtype) in spec.items()
    }
    return capture(model, empty, loss=loss)
