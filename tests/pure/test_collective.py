"""Changes of layout: programs that, carried out on arrays by definition, make the target's pieces most cheaply."""

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planloom.collective import Step, change_layout, local_sizes_after, volume_price
from planloom.errors import LayoutError
from planloom.layout import Combine, Layout, Mesh
from tests.pure.meshes import layouts, meshes

# --- an oracle: what every kind of step does, from the table in collective/steps.py

Array = np.ndarray
Pieces = dict[int, Array]


def combination(parts: list[Array], combine: Combine) -> Array:
    return np.maximum.reduce(parts) if combine == "max" else np.add.reduce(parts)


def carry_out(step: Step, pieces: Pieces) -> Pieces:
    """The arrays of all devices after one step."""
    after: Pieces = {}
    for group in step.groups:
        parts = [pieces[device] for device in group]
        for position, device in enumerate(group):

            def cut(array: Array, group: tuple[int, ...] = group, position: int = position) -> Array:
                return np.split(array, len(group), axis=step.into)[position]

            match step.kind:
                case "all_reduce":
                    after[device] = combination(parts, step.combine)
                case "reduce_scatter":
                    after[device] = cut(combination(parts, step.combine))
                case "all_gather":
                    after[device] = np.concatenate(parts, axis=step.along)
                case "all_to_all":
                    after[device] = cut(np.concatenate(parts, axis=step.along))
                case "slice":
                    assert all(np.array_equal(part, parts[0]) for part in parts)
                    after[device] = cut(parts[position])
                case "mask":
                    assert all(np.array_equal(part, parts[0]) for part in parts)
                    after[device] = parts[0] if position == 0 else np.zeros_like(parts[0])
    assert after.keys() == pieces.keys()
    return after


def pieces_of(tensor: Array, layout: Layout, mesh: Mesh, rng: np.random.Generator) -> Pieces:
    """A tensor's pieces in a layout: over partial digits, random contributions that combine to the tensor."""
    points = list(product(*(range(digit.size) for digit in layout.partial)))
    noise = [rng.integers(-9, 10, tensor.shape) for _ in points]
    if layout.combine == "sum":
        contributions = [*noise[1:], tensor - sum(noise[1:], np.zeros_like(tensor))]
    else:
        owner = rng.integers(len(points), size=tensor.shape)
        contributions = [np.where(owner == i, tensor, tensor - abs(n)) for i, n in enumerate(noise)]
    held = {}
    for device in mesh.devices:
        coordinates = mesh.coordinates(device)
        box = layout.box(tensor.shape, coordinates)
        point = tuple(coordinates[digit] for digit in layout.partial)
        held[device] = contributions[points.index(point)][tuple(slice(*interval) for interval in box)]
    return held


def require_layout(pieces: Pieces, tensor: Array, layout: Layout, mesh: Mesh) -> None:
    """The pieces are those of `tensor` in `layout`: whole where nothing is partial, else they combine to it."""
    for group in mesh.groups(layout.partial):
        combined = combination([pieces[device] for device in group], layout.combine)
        box = layout.box(tensor.shape, mesh.coordinates(group[0]))
        assert np.array_equal(combined, tensor[tuple(slice(*interval) for interval in box)])


@st.composite
def changes(draw: st.DrawFn) -> tuple[Mesh, Layout, Layout, tuple[int, ...]]:
    mesh = draw(meshes())
    num_factors = draw(st.integers(1, 3))
    combine: Combine = draw(st.sampled_from(("sum", "sum", "max")))
    source = draw(layouts(mesh.digits, num_factors, partial=True, combine=combine))
    target = draw(layouts(mesh.digits, num_factors, partial=combine == "sum"))
    sizes = tuple(
        prod(digit.size for digit in {*source.splits[i], *target.splits[i]}) * draw(st.integers(1, 2))
        for i in range(num_factors)
    )
    return mesh, source, target, sizes


@settings(max_examples=300)
@given(changes(), st.integers(0, 2**32 - 1))
def test_programs_make_the_pieces_of_the_target(
    change: tuple[Mesh, Layout, Layout, tuple[int, ...]], seed: int
) -> None:
    mesh, source, target, sizes = change
    rng = np.random.default_rng(seed)
    tensor = rng.integers(-99, 100, sizes)
    pieces = pieces_of(tensor, source, mesh, rng)
    local = source.local_sizes(sizes)
    for step in change_layout(source, target, mesh, sizes):
        pieces = carry_out(step, pieces)
        local = local_sizes_after(step, local)
        assert {array.shape for array in pieces.values()} == {local}
    assert local == target.local_sizes(sizes)
    require_layout(pieces, tensor, target, mesh)


# --- the cheapest programs of well-known changes

MESH = Mesh.of((3, 0, 2, 1), a=2, b=2)
A, B = MESH.digits
LINE = Mesh.of((1, 0), a=2)
WHOLE = Layout.replicated(2)
ROWS = Layout(splits=((A,), ()))
COLUMNS = Layout(splits=((), (A,)))
PARTIAL = Layout(splits=((), ()), partial=(A,))
PARTIAL_MAX = Layout(splits=((), ()), partial=(A,), combine="max")
PARTIAL_TWICE = Layout(splits=((), ()), partial=(A, B))
SIZES = (8, 8)


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        (WHOLE, WHOLE, []),
        (PARTIAL, WHOLE, ["all_reduce"]),
        (PARTIAL, ROWS, ["reduce_scatter"]),
        (ROWS, WHOLE, ["all_gather"]),
        (ROWS, COLUMNS, ["all_to_all"]),
        (WHOLE, ROWS, ["slice"]),
        (WHOLE, PARTIAL, ["mask"]),
        (ROWS, PARTIAL, ["all_gather", "mask"]),
        (PARTIAL_MAX, WHOLE, ["all_reduce"]),
        (PARTIAL_MAX, ROWS, ["all_reduce", "slice"]),
    ],
    ids=str,
)
def test_the_cheapest_program_over_one_axis(source: Layout, target: Layout, kinds: list[str]) -> None:
    assert [step.kind for step in change_layout(source, target, LINE, SIZES)] == kinds


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        (Layout(splits=((A, B), ())), ROWS, ["all_gather"]),
        (Layout(splits=((A, B), ())), Layout(splits=((A,), (B,))), ["all_to_all"]),
        (PARTIAL_TWICE, WHOLE, ["all_reduce"]),
        (PARTIAL_TWICE, Layout(splits=((B, A), ())), ["reduce_scatter"]),
        (Layout(splits=((B,), ()), partial=(A,)), Layout(splits=((B,), (A,))), ["reduce_scatter"]),
        (Layout(splits=((A,), ()), partial=(B,)), Layout(splits=((), (A,)), partial=(B,)), ["all_to_all"]),
    ],
    ids=str,
)
def test_the_cheapest_program_over_two_axes(source: Layout, target: Layout, kinds: list[str]) -> None:
    assert [step.kind for step in change_layout(source, target, MESH, SIZES)] == kinds


def test_digits_that_neither_layout_uses_are_not_moved() -> None:
    mesh = Mesh.of(range(16), a=4, b=4)
    over = mesh.axis("a").digits
    (step,) = change_layout(Layout(splits=((), ()), partial=over), WHOLE, mesh, (16, 16))
    assert step.groups == mesh.groups(over)


def test_steps_act_on_ordered_groups() -> None:
    (step,) = change_layout(PARTIAL, ROWS, MESH, SIZES)
    assert step == Step(kind="reduce_scatter", groups=((3, 2), (0, 1)), into=0)
    assert step.group_of(2) == (3, 2)
    (gather,) = change_layout(Layout(splits=((B, A), ())), WHOLE, MESH, SIZES)
    assert gather == Step(kind="all_gather", groups=((3, 2, 0, 1),), along=0)
    assert str(gather) == "all_gather along 0 over (3, 2, 0, 1)"
    with pytest.raises(KeyError):
        gather.group_of(7)


def test_free_changes_send_nothing() -> None:
    for target in (ROWS, PARTIAL, Layout(splits=((B, A), ())), Layout(splits=((), (A,)), partial=(B,))):
        assert all(step.is_local for step in change_layout(WHOLE, target, MESH, SIZES))


# --- prices


def test_the_price_decides() -> None:
    """Rows to columns is one all-to-all, unless that costs more than gathering and cutting."""

    def no_all_to_all(step: Step, num_bytes: int) -> float:
        return 1e6 if step.kind == "all_to_all" else volume_price(step, num_bytes)

    kinds = [step.kind for step in change_layout(ROWS, COLUMNS, MESH, SIZES, no_all_to_all)]
    assert kinds == ["all_gather", "slice"]


def test_the_price_sees_the_bytes_before_the_step() -> None:
    seen: set[tuple[str, int]] = set()

    def record(step: Step, num_bytes: int) -> float:
        seen.add((step.kind, num_bytes))
        return volume_price(step, num_bytes)

    change_layout(Layout(splits=((A, B), ())), WHOLE, MESH, SIZES, record, item_bytes=2)
    assert ("all_gather", 32) in seen  # 8 · 8 elements over four devices, two bytes each


def test_reducing_over_two_digits_at_once_costs_less_than_one_after_the_other() -> None:
    (step,) = change_layout(PARTIAL_TWICE, WHOLE, MESH, SIZES)
    one_by_one = [
        *change_layout(PARTIAL_TWICE, PARTIAL, MESH, SIZES),
        *change_layout(PARTIAL, WHOLE, MESH, SIZES),
    ]
    assert volume_price(step, 256) < sum(volume_price(step, 256) for step in one_by_one)


@settings(max_examples=60)
@given(changes())
def test_no_program_costs_more_than_going_through_the_whole_tensor(
    change: tuple[Mesh, Layout, Layout, tuple[int, ...]],
) -> None:
    mesh, source, target, sizes = change

    def cost(layout: Layout, steps: tuple[Step, ...]) -> float:
        total, local = 0.0, layout.local_sizes(sizes)
        for step in steps:
            total += volume_price(step, 4 * prod(local))
            local = local_sizes_after(step, local)
        return total

    whole = Layout.replicated(len(sizes))
    through = cost(source, change_layout(source, whole, mesh, sizes))
    through += cost(whole, change_layout(whole, target, mesh, sizes))
    assert cost(source, change_layout(source, target, mesh, sizes)) <= through * (1 + 1e-12)


# --- what cannot be changed


def test_a_partial_maximum_does_not_become_a_partial_sum() -> None:
    with pytest.raises(LayoutError, match=r"(?s)maximum cannot become.*max\(a\).*sum\(b\)"):
        change_layout(PARTIAL_MAX, Layout(splits=((), ()), partial=(B,)), MESH, SIZES)


def test_a_whole_tensor_does_not_become_a_partial_maximum() -> None:
    with pytest.raises(LayoutError, match=r"(?s)no program.*whole.*max\(a\)"):
        change_layout(WHOLE, PARTIAL_MAX, MESH, SIZES)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (ROWS, WHOLE),
        pytest.param(
            WHOLE,
            ROWS,
        ),
    ],
    ids=str,
)
def test_a_split_that_is_not_even_names_size_and_axis(source: Layout, target: Layout) -> None:
    with pytest.raises(LayoutError, match="size 7 over a=2"):
        change_layout(source, target, LINE, (7, 8))
