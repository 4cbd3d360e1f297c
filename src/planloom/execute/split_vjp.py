"""The forward of a run whose backward comes in two halves: cotangents of activations now, of parameters later.

The run is cut at the operators in which parameters and activations meet (products, embeddings, the scale of a norm).
Each of these is an autograd graph of its own:

    backward           goes through the run once; at a meeting operator it remembers the cotangent of the result and
                       passes on that of the activation alone
    weight_gradients   for each meeting operator, its parameter's cotangent from the remembered one; then once through
                       what is computed from parameters alone (a transpose, a cast)

Nothing is computed twice: an operator is differentiated by its activation in one half and by its parameter in the
other. After `backward` only what the second half needs is held: the activations that met parameters, and cotangents.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from planloom.execute.local import Key, LocalRun, Step, fill, keys_of
from planloom.execute.vjp import Enter


@dataclass(eq=False, slots=True)
class _Meeting:
    """One operator in a graph of its own, by gradient edges: they keep no tensors but those that autograd saved.

    `arrival`: where the cotangent of its result arrives in the run's graph.
    """

    result: GradientEdge
    activations: list[GradientEdge]
    parameters: dict[Key, GradientEdge]
    arrival: GradientEdge | None = None
    cotangent: Tensor | None = None


class _Meet(torch.autograd.Function):
    """The result of a meeting operator; backward differentiates it by its activations."""

    @staticmethod
    def forward(ctx: Any, meeting: _Meeting, made: Tensor, anchor: Tensor, *activations: Tensor) -> Tensor:
        ctx.meeting = meeting
        return made.detach()

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> tuple[Tensor | None, ...]:
        meeting = ctx.meeting
        if not meeting.activations:
            return None, None, None
        found = torch.autograd.grad(
            [meeting.result], meeting.activations, cotangents, retain_graph=True, allow_unused=True
        )
        return None, None, None, *found


class SplitVjp:
    """One forward of a run; `backward` once, then `weight_gradients` once."""

    def __init__(self, local: LocalRun, inputs: Sequence[Tensor], given: Mapping[str, Tensor], micro: int) -> None:
        self._slots = local.run.inputs
        self._shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in inputs]
        self._is_parameter = [slot.tensor in local.graph.parameters for slot in self._slots]
        self._meetings: list[_Meeting] = []
        self._edges_in: list[GradientEdge | None] = []
        self._from_parameters: dict[Key, Tensor] = {}
        self._direct: list[tuple[int, Key]] = []
        self._anchor = torch.zeros((), requires_grad=True)
        with torch.enable_grad():
            outputs = self._forward(local, inputs, given, micro)
        self._edges_out = [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in outputs]
        self.outputs: tuple[Tensor, ...] | None = tuple(tensor.detach() for tensor in outputs)

    def _forward(
        self, local: LocalRun, inputs: Sequence[Tensor], given: Mapping[str, Tensor], micro: int
    ) -> list[Tensor]:
        table = dict(local.given_tensors(given, micro))
        for i, (slot, tensor, is_parameter) in enumerate(zip(self._slots, inputs, self._is_parameter, strict=True)):
            key, wanted = ("slot", str(i)), slot.cotangent is not None
            if is_parameter:
                self._from_parameters[key] = tensor.detach().requires_grad_(wanted)
                self._edges_in.append(None)
                continue
            table[key] = Enter.apply(self._anchor, tensor) if wanted else tensor
            self._edges_in.append(get_gradient_edge(table[key]) if wanted else None)
        for step in local.steps:
            keys = keys_of((step.args, step.kwargs))
            read = {key for key in keys if key in self._from_parameters}
            if read and len(read) == len(set(keys)):
                self._from_parameters[step.result] = _called(step, self._from_parameters, micro)
            elif read:
                table[step.result] = self._met(step, table, micro)
            else:
                table[step.result] = _called(step, table, micro)
            for key in step.finished:
                table.pop(key, None)
        outputs = []
        for i, slot in enumerate(local.run.outputs):
            key = ("made", slot.tensor)
            if key in self._from_parameters:  # its cotangent is a matter of the second half
                self._direct.append((i, key))
                outputs.append(self._from_parameters[key].detach())
            else:
                outputs.append(table[key])
        return outputs

    def _met(self, step: Step, table: Mapping[Key, Tensor], micro: int) -> Tensor:
        keys = dict.fromkeys(keys_of((step.args, step.kwargs)))
        inside: dict[Key, Tensor] = {}
        outside, activations, parameters = [], [], {}
        for key in keys:
            tensor = self._from_parameters.get(key, table.get(key))
            assert tensor is not None
            if not tensor.requires_grad:
                inside[key] = tensor
                continue
            inside[key] = Enter.apply(self._anchor, tensor.detach())
            if key in self._from_parameters:
                parameters[key] = get_gradient_edge(inside[key])
            else:
                activations.append(get_gradient_edge(inside[key]))
                outside.append(tensor)
        result = _called(step, inside, micro)
        if not result.requires_grad:
            return result
        meeting = _Meeting(get_gradient_edge(result), activations, parameters)
        made: Tensor = _Meet.apply(meeting, result.detach(), self._anchor, *outside)
        meeting.arrival = get_gradient_edge(made)
        self._meetings.append(meeting)
        return made

    def take_outputs(self) -> tuple[Tensor, ...]:
        """The outputs, which this object then forgets."""
        assert self.outputs is not None
        outputs, self.outputs = self.outputs, None
        return outputs

    def backward(self, cotangents: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The cotangents of activations; None for parameters."""
        pairs = [
            (edge, cotangent)
            for edge, cotangent in zip(self._edges_out, cotangents, strict=True)
            if edge is not None and cotangent is not None
        ]
        targets = [edge for edge in self._edges_in if edge is not None]
        met = [meeting.arrival for meeting in self._meetings if meeting.arrival is not None]
        found: list[Tensor | None] = [None] * (len(targets) + len(met))
        if pairs and found:
            edges, values = [edge for edge, _ in pairs], [cotangent for _, cotangent in pairs]
            found = list(torch.autograd.grad(edges, [*targets, *met], values, allow_unused=True))
        for meeting, cotangent in zip(self._meetings, found[len(targets) :], strict=True):
            meeting.cotangent, meeting.arrival = cotangent, None
            meeting.activations.clear()
        self._given = {i: cotangents[i] for i, _ in self._direct}
        arriving, self._edges_out = iter(found), []
        return [
            None if edge is None else _contiguous(next(arriving), *shape)
            for edge, shape in zip(self._edges_in, self._shapes, strict=True)
        ]

    def weight_gradients(self) -> list[Tensor | None]:
        """The cotangents of parameters; None for activations."""
        sums: dict[Key, Tensor] = {}
        for i, key in self._direct:
            _add(sums, key, self._given[i])
        for meeting in self._meetings:
            if meeting.cotangent is not None and meeting.parameters:
                found = torch.autograd.grad(
                    [meeting.result], list(meeting.parameters.values()), [meeting.cotangent], allow_unused=True
                )
                for key, gradient in zip(meeting.parameters, found, strict=True):
                    _add(sums, key, gradient)
        self._meetings.clear()
        leaves = {
            i: self._from_parameters["slot", str(i)]
            for i, (slot, is_parameter) in enumerate(zip(self._slots, self._is_parameter, strict=True))
            if is_parameter and slot.cotangent is not None
        }
        totals = {i: sums.pop(("slot", str(i)), None) for i in leaves}
        derived = [(self._from_parameters[key], gradient) for key, gradient in sums.items()]
        if derived and leaves:
            found = torch.autograd.grad(
                [tensor for tensor, _ in derived],
                list(leaves.values()),
                [gradient for _, gradient in derived],
                allow_unused=True,
            )
            for i, gradient in zip(leaves, found, strict=True):
                if gradient is not None:
                    own = totals[i]
                    totals[i] = gradient if own is None else own + gradient
        return [_contiguous(totals[i], *shape) if i in leaves else None for i, shape in enumerate(self._shapes)]


def _called(step: Step, table: Mapping[Key, Tensor], micro: int) -> Tensor:
    return step.function(*fill(step.args, table, micro), **fill(step.kwargs, table, micro))


def _add(sums: dict[Key, Tensor], key: Key, gradient: Tensor | None) -> None:
    if gradient is not None:
        sums[key] = sums[key] + gradient if key in sums else gradient


def _contiguous(gradient: Tensor | None, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A cotangent as it leaves; zero where nothing depends on the input."""
    if gradient is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    return gradient.contiguous()
