"""Is a plan equal to one device? All its devices in one process, with the tolerances of the tests on real processes."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from planloom.blocks import BlockGraph
from planloom.execute import local_slice
from planloom.plan import Plan
from planloom.program import Program, build_program, verify_program
from tests.dist.cases import LEARNING_RATE, captured, reference
from tests.emulation import Emulation
from tests.models import build

NUM_STEPS = 2


def require_equal_to_one_device(model_name: str, plan: Plan) -> Program:
    """Verify a plan's program and run it: losses, gradients and parameters of every device, in float64."""
    model, batch = build(model_name, torch.float64)
    blocks = captured(model_name, torch.float64)
    program = build_program(blocks, plan)
    verify_program(blocks, program)
    expected = reference(model_name, torch.float64, "sgd", NUM_STEPS)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in blocks.graph.buffers}
    emulation = Emulation(blocks, program, parameters, buffers, LEARNING_RATE)
    largest = max(float(gradient.abs().max()) for gradient in expected["gradients"].values())
    for step in range(NUM_STEPS):
        emulation.run(batch)
        results = emulation.results()
        for device in program.devices:
            assert float(results["loss", device, ""]) == pytest.approx(expected["losses"][step], rel=1e-12)
        if step == 0:
            for device, name, whole in _pieces(blocks, program, expected["gradients"], optimizer=True):
                bound = 1e-10 * max(float(expected["gradients"][name].abs().max()), 1e-6 * largest)
                assert _error(results["gradient", device, name], whole) <= bound, (device, name)
    for device, name, whole in _pieces(blocks, program, expected["parameters"], optimizer=False):
        assert _error(results["parameter", device, name], whole) <= 1e-10, (device, name)
    return program


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.reshape(expected.shape) - expected).abs().max())


def _pieces(
    blocks: BlockGraph, program: Program, wholes: dict[str, Tensor], *, optimizer: bool
) -> Iterator[tuple[int, str, Tensor]]:
    """(device, parameter, its piece of the whole), as stored or as the optimizer holds it."""
    for stage in program.stages:
        for device in stage.mesh.devices:
            for stored in stage.parameters:
                layout = stored.optimizer_layout if optimizer else stored.layout
                box = layout.box(stored.sizes, program.mesh_of(stored.stage).coordinates(device))
                yield (
                    device,
                    stored.name,
                    local_slice(wholes[stored.name], blocks.graph.tensors[stored.name].factors, box),
                )
