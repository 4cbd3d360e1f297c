"""Pipeline boundaries: 2 to 4 devices, 4 to 4 in permuted orders, the tensors replicated or split on either side."""

from itertools import product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planloom.capture import batch_spec
from planloom.layout import Axis, Layout, Mesh
from planloom.program import Program, Receive, Send
from planloom.program.exchange import plan_transfers
from tests.boundaries import SPLITS, Side, boundary_plan
from tests.dist.cases import captured
from tests.models import build
from tests.torch.equality import require_equal_to_one_device

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
    spec = batch_spec(build("gpt", torch.float64)[1])
    plan = boundary_plan(captured("gpt", torch.float64), spec, first, second)
    program = require_equal_to_one_device("gpt", plan)
    _require_split(program, 0, Send, first)
    _require_split(program, 1, Receive, second)


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
    body = "forward" if kind is Send else "forward receives"
    crossing = [i for i in program.stages[stage].bodies[body] if isinstance(i, kind)]
    assert [i.sizes for i in crossing] == [expected] * 2


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
