"""Pipeline boundaries: 2 to 4 devices, 4 to 4 in permuted orders, the tensors replicated or split on either side."""

from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planloom.capture import batch_spec
from planloom.execute import local_slice
from planloom.layout import Axis, Layout, Mesh
from planloom.program import Program, Receive, Send, build_program, verify_program
from planloom.program.exchange import plan_transfers
from tests.boundaries import SPLITS, Side, boundary_plan
from tests.dist.cases import LEARNING_RATE, captured, reference
from tests.emulation import Emulation
from tests.models import build

NUM_STEPS = 4
TWO_TO_FOUR = [
    (Side(devices=(0, 1), split=first), Side(devices=(2, 3, 4, 5), split=second))
    for first, second in product(SPLITS[:4], SPLITS)
]
FOUR_TO_FOUR = [
    (Side(devices=(2, 0, 3, 1), split=first), Side(devices=(7, 4, 6, 5), split=second))
    for first, second in product(SPLITS, SPLITS)
]


@pytest.mark.parametrize(("first", "second"), TWO_TO_FOUR + FOUR_TO_FOUR, ids=str)
def test_equal_to_one_device(first: Side, second: Side) -> None:
    """Losses, gradients and parameters, with the tolerances of the tests on real processes."""
    model, batch = build("gpt", torch.float64)
    blocks = captured("gpt", torch.float64)
    program = build_program(blocks, boundary_plan(blocks, batch_spec(batch), first, second))
    verify_program(blocks, program)
    _require_split(program, 0, Send, first)
    _require_split(program, 1, Receive, second)

    expected = reference("gpt", torch.float64, "sgd", NUM_STEPS)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    emulation = Emulation(blocks, program, parameters, dict(model.named_buffers()), LEARNING_RATE)
    largest = max(float(gradient.abs().max()) for gradient in expected["gradients"].values())
    for step in range(NUM_STEPS):
        emulation.run(batch)
        results = emulation.results()
        for device in program.devices:
            assert float(results["loss", device, ""]) == pytest.approx(expected["losses"][step], rel=1e-12)
        if step == 0:
            for device, name, layout in _pieces(program, optimizer=True):
                whole = expected["gradients"][name]
                bound = 1e-10 * max(float(whole.abs().max()), 1e-6 * largest)
                error = results["gradient", device, name] - local_slice(whole, *layout)
                assert float(error.abs().max()) <= bound, (device, name)
    for device, name, layout in _pieces(program, optimizer=False):
        error = results["parameter", device, name] - local_slice(expected["parameters"][name], *layout)
        assert float(error.abs().max()) <= 1e-10, (device, name)


def _require_split(program: Program, stage: int, kind: type[Send | Receive], side: Side) -> None:
    """The two tensors of the residual stream that cross the boundary are split as the side says, and no more."""
    number, (batch, sequence, features) = len(side.devices), (4, 16, 64)
    expected = {
        "replicated": (batch, sequence, features),
        "batch": (batch // number, sequence, features),
        "sequence": (batch, sequence // number, features),
        "features": (batch, sequence, features // number),
        "batch and sequence": (batch // 2, sequence // (number // 2), features),
    }[side.split]
    crossing = [i for i in program.stages[stage].bodies["forward"] if isinstance(i, kind)]
    assert [i.sizes for i in crossing] == [expected] * 2


def _pieces(program: Program, *, optimizer: bool):  # type: ignore[no-untyped-def]
    """(device, parameter, (factors, box)) of every piece of a parameter, as stored or as the optimizer holds it."""
    factors = captured("gpt", torch.float64).graph.tensors
    for stage in program.stages:
        for device in stage.mesh.devices:
            for stored in stage.parameters:
                layout = stored.optimizer_layout if optimizer else stored.layout
                box = layout.box(stored.sizes, stage.mesh.coordinates(device))
                yield device, stored.name, (factors[stored.name].factors, box)


# -- one exchange alone


@st.composite
def sides(draw: st.DrawFn, devices: tuple[int, ...], num_factors: int) -> tuple[Layout, Mesh]:
    """A layout without partial digits on these devices in any order, as one axis, two axes, or one of two digits."""
    shapes = [(("x", (len(devices),)),)]
    if len(devices) == 4:
        shapes += [(("x", (2,)), ("y", (2,))), (("x", (2, 2)),)]
    axes = tuple(Axis(name=name, sizes=sizes) for name, sizes in draw(st.sampled_from(shapes)))
    mesh = Mesh(axes=axes, devices=tuple(draw(st.permutations(devices))))
    splits: list[tuple] = [()] * num_factors  # type: ignore[type-arg]
    for digit in draw(st.permutations(mesh.digits)):
        factor = draw(st.integers(-1, num_factors - 1))  # -1: replicated over this digit
        if factor >= 0:
            splits[factor] += (digit,)
    return Layout(splits=tuple(splits)), mesh


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Layout, Mesh], tuple[Layout, Mesh]]:
    senders, receivers = draw(st.sampled_from([(2, 4), (4, 2), (4, 4), (2, 2)]))
    sizes = tuple(draw(st.lists(st.sampled_from([4, 8, 12]), min_size=1, max_size=3)))
    ranks = tuple(draw(st.permutations(range(senders + receivers))))
    source = draw(sides(ranks[:senders], len(sizes)))
    return sizes, source, draw(sides(ranks[senders:], len(sizes)))


@settings(max_examples=300)
@given(exchanges())
def test_every_receiver_gets_exactly_its_box(case: tuple) -> None:  # type: ignore[type-arg]
    sizes, (source, source_mesh), (target, target_mesh) = case
    whole = np.arange(prod(sizes)).reshape(sizes)

    def piece(layout: Layout, mesh: Mesh, device: int) -> np.ndarray:
        return whole[_slices(layout.box(sizes, mesh.coordinates(device)))]

    received = {d: np.zeros_like(piece(target, target_mesh, d)) for d in target_mesh.devices}
    times = {device: np.zeros_like(array) for device, array in received.items()}
    for transfer in plan_transfers(sizes, source, source_mesh, target, target_mesh):
        message = piece(source, source_mesh, transfer.source)[_slices(transfer.source_box)]
        place = received[transfer.target][_slices(transfer.target_box)]
        assert message.shape == place.shape
        place[...] = message
        times[transfer.target][_slices(transfer.target_box)] += 1
    for device in target_mesh.devices:
        assert np.array_equal(received[device], piece(target, target_mesh, device))
        assert np.all(times[device] == 1)


def _slices(box: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
