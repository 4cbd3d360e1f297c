"""What a run holds between its input-gradients and its weight-gradients, as `execute.split_vjp` does.

Where parameters and activations meet, the parameter's gradient needs the activation (unless the operator is a sum) and
the cotangent of the result. Views share the storage of what they are views of; the cotangent of a summand is that of
the sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planloom.blocks import BlockGraph
from planloom.program import Operation, Program, Run, run_operations

_SUMS = ("aten.add.Tensor", "aten.sub.Tensor")
_VIEWS = (
    "aten.view.default",
    "aten.reshape.default",
    "aten.permute.default",
    "aten.transpose.int",
    "aten.t.default",
    "aten.expand.default",
    "aten.select.int",
    "aten.slice.Tensor",
    "aten.unsqueeze.default",
    "aten.squeeze.dim",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNeeds:
    """Slots whose storage is held, bytes of activations that the run made itself, bytes of cotangents."""

    slots: frozenset[int]
    made_bytes: int
    cotangent_bytes: int


def weight_gradient_needs(blocks: BlockGraph, program: Program, run: Run) -> WeightNeeds:
    """What one device holds for one micro-batch."""
    operations = run_operations(blocks, run, num_micro=program.num_micro_batches)
    parameters = set(blocks.graph.parameters)
    from_parameters = set(parameters)
    root: dict[str, str] = {}
    slots: dict[int, None] = {}
    made: dict[str, int] = {}
    cotangents: dict[str, int] = {}
    passed_on = _passed_on(operations, {slot.tensor for slot in run.outputs})
    sizes = {operand.tensor: operand.num_bytes for operation in operations for operand in operation.outputs}
    for operation in operations:
        result = operation.outputs[0]
        met = [operand for operand in operation.inputs if operand.tensor in from_parameters]
        others = [operand for operand in operation.inputs if operand.tensor not in from_parameters]
        if operation.target in _VIEWS and others:
            root[result.tensor] = root.get(others[0].tensor, others[0].tensor)
        if not met:
            continue
        if not others:
            from_parameters.add(result.tensor)
            continue
        end = result.tensor
        while end in passed_on:
            end = passed_on[end]
        cotangents[end] = sizes[result.tensor]
        for operand in others if operation.target not in _SUMS else ():
            name = root.get(operand.tensor, operand.tensor)
            slot = operand.slot if operand.slot is not None else _slot_of(run, name)
            if operand.is_given:
                continue
            if slot is not None and name not in sizes:
                slots[slot] = None
            else:
                made[name] = max(made.get(name, 0), operand.num_bytes)
    return WeightNeeds(slots=frozenset(slots), made_bytes=sum(made.values()), cotangent_bytes=sum(cotangents.values()))


def _slot_of(run: Run, tensor: str) -> int | None:
    return next((i for i, slot in enumerate(run.inputs) if slot.tensor == tensor), None)


def _passed_on(operations: Sequence[Operation], outputs: set[str]) -> dict[str, str]:
    """Tensor → the sum or view whose cotangent is its own, where nobody else reads it."""
    readers: dict[str, list[Operation]] = {}
    for operation in operations:
        for operand in operation.inputs:
            readers.setdefault(operand.tensor, []).append(operation)
    return {
        tensor: found[0].outputs[0].tensor
        for tensor, found in readers.items()
        if len(found) == 1 and found[0].target in (*_SUMS, *_VIEWS) and tensor not in outputs
    }
