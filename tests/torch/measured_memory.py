"""One measured forward and backward of a run, with random inputs and cotangents."""

from collections.abc import Callable

import torch

from planloom.cost.memory import RunMemory
from planloom.execute import LocalRun, RunVjp
from planloom.profile.memory import measure_run_memory
from planloom.profile.runs import example
from planloom.program import Program, Run
from tests.torch.captured import Captured


def measured(
    model: Captured, program: Program, run: Run, make: Callable[[LocalRun], LocalRun] | None = None
) -> RunMemory:
    """What the first device of a run's stage measures; `make`: what makes the callable that is measured."""
    device, mesh = torch.device("cpu"), program.stages[run.stage].mesh
    local = LocalRun(model.blocks, run, mesh.coordinates(mesh.devices[0]), num_micro=program.num_micro_batches)
    local = local if make is None else make(local)
    inputs = [example(model.blocks, slot.tensor, slot.layout, slot.sizes, device) for slot in run.inputs]
    vjp = RunVjp(local, inputs, model.given, 0)
    cotangents = [
        None if slot.cotangent is None else torch.randn(output.shape, dtype=output.dtype)
        for slot, output in zip(run.outputs, vjp.take_outputs(), strict=True)
    ]
    vjp.backward(cotangents)
    return measure_run_memory(local, inputs, model.given, cotangents, device)
