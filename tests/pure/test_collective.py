"""Changes of layout: programs that, carried out on arrays by definition, make the target's pieces most cheaply."""

from itertools import pairwise, product
from math import prod
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planloom.collective import (
    DigitsPrice,
    SizePrice,
    Step,
    StepKind,
    Synthesized,
    change_layout,
    local_sizes_after,
    synthesize,
    volume_price,
)
from planloom.collective.oracle import check_program
from planloom.collective.refine import is_refinable
from planloom.errors import LayoutError
from planloom.layout import Combine, Digit, Layout, Mesh
from tests.pure.meshes import layouts, meshes

# --- an oracle: what every kind of step does, from the table in collective/steps.py

Array = np.ndarray
Pieces = dict[int, Array]


def combination(parts: list[Array], combine: Combine) -> Array:
    return np.maximum.reduce(parts) if combine == "max" else np.add.reduce(parts)


def cut(array: Array, step: Step, point: tuple[int, ...]) -> Array:
    for dim, count, index in zip(step.into, step.shape, point, strict=True):
        array = np.split(array, count, axis=dim)[index]
    return array


def put_together(parts: dict[tuple[int, ...], Array], step: Step) -> Array:
    """An array of the whole size, every part written to the place of its point."""
    first = next(iter(parts.values()))
    whole = np.full(
        [n * dict(zip(step.along, step.shape, strict=True)).get(i, 1) for i, n in enumerate(first.shape)], 0
    )
    for point, part in parts.items():
        place = [slice(None)] * part.ndim
        for dim, index in zip(step.along, point, strict=True):
            place[dim] = slice(index * part.shape[dim], (index + 1) * part.shape[dim])
        whole[tuple(place)] = part
    return whole


def carry_out(step: Step, pieces: Pieces) -> Pieces:
    """The arrays of the devices after one step; a device that holds nothing is not there."""
    after: Pieces = {}
    for group in step.groups:
        points = list(product(*map(range, step.shape)))
        if step.kind in ("broadcast", "scatter"):
            parts = [pieces[group[0]]] * len(group)
        else:
            parts = [pieces[device] for device in group]
        match step.kind:
            case "all_reduce":
                results = [combination(parts, step.combine)] * len(group)
            case "reduce":
                results = [combination(parts, step.combine)]
            case "reduce_scatter":
                results = [cut(combination(parts, step.combine), step, point) for point in points]
            case "all_gather":
                results = [put_together(dict(zip(points, parts, strict=True)), step)] * len(group)
            case "gather":
                results = [put_together(dict(zip(points, parts, strict=True)), step)]
            case "all_to_all":
                results = [cut(put_together(dict(zip(points, parts, strict=True)), step), step, q) for q in points]
            case "broadcast":
                results = parts
            case "slice" | "scatter":
                assert all(np.array_equal(part, parts[0]) for part in parts)
                results = [cut(parts[0], step, point) for point in points]
            case "mask":
                assert all(np.array_equal(part, parts[0]) for part in parts)
                results = [parts[0], *(np.zeros_like(part) for part in parts[1:])]
        after |= dict(zip(group, results, strict=False))
    assert pieces.keys() <= {device for group in step.groups for device in group}, "nothing held is forgotten"
    return after


def run_program(found: Synthesized, pieces: Pieces, mesh: Mesh) -> Pieces:
    """Carry out a program; local arrays have one dim a sub-factor inside, and one a factor outside."""
    local = found.local_sizes
    pieces = {device: array.reshape(local) for device, array in pieces.items()}
    for step in found.program(mesh).steps:
        pieces = carry_out(step, pieces)
        local = local_sizes_after(step, local)
        assert {array.shape for array in pieces.values()} == {local}
    sizes = iter(local)
    shape = [prod(next(sizes) for _ in subs) for subs in found.factors]
    return {device: array.reshape(shape) for device, array in pieces.items()}


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
    for part in change_layout(source, target, mesh, sizes):
        pieces = run_program(part, pieces, mesh)
    require_layout(pieces, tensor, target, mesh)


@settings(max_examples=200)
@given(changes(), st.integers(0, 2**32 - 1))
def test_programs_are_right_whatever_steps_cost(
    change: tuple[Mesh, Layout, Layout, tuple[int, ...]], seed: int
) -> None:
    """Random prices lead through masters, temporary splits and detours; the oracle accepts every one of them."""
    mesh, source, target, sizes = change
    rng = np.random.default_rng(seed)
    tensor = rng.integers(-99, 100, sizes)
    pieces = pieces_of(tensor, source, mesh, rng)
    here = source
    for part in change_layout(source, target, mesh, sizes, random_price(seed)):
        pieces = run_program(part, pieces, mesh)
    require_layout(pieces, tensor, target, mesh)
    if is_refinable(source, target):
        for found in synthesize(here, target, mesh, sizes, price=random_price(seed), num_best=4):
            check_program(found.program(mesh), mesh=mesh, source=source, target=target)


def random_price(seed: int) -> DigitsPrice:
    def price(mesh: Mesh, kind: StepKind, digits: tuple[Digit, ...], masters: tuple[Digit, ...]) -> SizePrice:
        factor = Random(f"{seed} {kind} {digits} {masters}").random() ** 4
        return lambda num_bytes: factor * num_bytes

    return price


@settings(max_examples=100)
@given(changes(), st.integers(0, 2**32 - 1))
def test_the_k_best_are_distinct_and_in_order(change: tuple[Mesh, Layout, Layout, tuple[int, ...]], seed: int) -> None:
    mesh, source, target, sizes = change
    if not is_refinable(source, target):
        return
    best = synthesize(source, target, mesh, sizes, price=random_price(seed), num_best=6)
    assert len({found.moves for found in best}) == len(best)
    prices = [found.price for found in best]
    assert all(a <= b * (1 + 1e-6) for a, b in pairwise(prices))
    (alone,) = synthesize(source, target, mesh, sizes, price=random_price(seed))
    assert alone.price == pytest.approx(prices[0], rel=1e-6)


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


def steps_of(source: Layout, target: Layout, mesh: Mesh, *args: Any) -> list[Step]:
    return [
        step for part in change_layout(source, target, mesh, *(args or (SIZES,))) for step in part.program(mesh).steps
    ]


def kinds_of(source: Layout, target: Layout, mesh: Mesh, *args: Any) -> list[str]:
    return [step.kind for step in steps_of(source, target, mesh, *args)]


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
        (PARTIAL_MAX, ROWS, ["reduce_scatter"]),
    ],
    ids=str,
)
def test_the_cheapest_program_over_one_axis(source: Layout, target: Layout, kinds: list[str]) -> None:
    assert kinds_of(source, target, LINE) == kinds


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
    assert kinds_of(source, target, MESH) == kinds


def test_digits_that_neither_layout_uses_are_not_moved() -> None:
    mesh = Mesh.of(range(16), a=4, b=4)
    over = mesh.axis("a").digits
    (step,) = steps_of(Layout(splits=((), ()), partial=over), WHOLE, mesh, (16, 16))
    assert step.groups == mesh.groups(over)


def test_steps_act_on_ordered_groups() -> None:
    (step,) = steps_of(PARTIAL, ROWS, MESH)
    assert step == Step(kind="reduce_scatter", groups=((3, 2), (0, 1)), shape=(2,), into=(0,))
    assert step.group_of(2) == (3, 2)
    ((gather),) = steps_of(Layout(splits=((B, A), ())), WHOLE, MESH)
    assert gather == Step(kind="all_gather", groups=((3, 0, 2, 1),), shape=(2, 2), along=(1, 0))
    assert str(gather) == "all_gather along 1·0 over (3, 0, 2, 1)"
    assert gather.group_of(7) is None


def test_free_changes_send_nothing() -> None:
    for target in (ROWS, PARTIAL, Layout(splits=((B, A), ())), Layout(splits=((), (A,)), partial=(B,))):
        assert all(step.is_local for step in steps_of(WHOLE, target, MESH))


def test_broadcast_reduce_scatter_and_gather_are_changes_too() -> None:
    master = Layout(splits=((), ()), master=(A, B))
    assert kinds_of(master, WHOLE, MESH) == ["broadcast"]
    assert kinds_of(PARTIAL_TWICE, master, MESH) == ["reduce"]
    assert kinds_of(Layout(splits=((A,), (B,))), master, MESH) == ["gather"]
    assert kinds_of(master, Layout(splits=((A,), (B,))), MESH) == ["scatter"]


# --- prices


def test_the_price_decides() -> None:
    """Rows to columns is one all-to-all, unless that costs more than gathering and cutting."""

    def no_all_to_all(mesh: Mesh, kind: StepKind, digits: tuple[Digit, ...], masters: tuple[Digit, ...]) -> SizePrice:
        return (lambda _: 1e6) if kind == "all_to_all" else volume_price(mesh, kind, digits, masters)

    assert kinds_of(ROWS, COLUMNS, MESH, SIZES, no_all_to_all) == ["all_gather", "slice"]


def test_the_price_sees_the_bytes_before_the_step() -> None:
    seen: set[tuple[str, float]] = set()

    def record(mesh: Mesh, kind: StepKind, digits: tuple[Digit, ...], masters: tuple[Digit, ...]) -> SizePrice:
        def price(num_bytes: float) -> float:
            seen.add((kind, num_bytes))
            return volume_price(mesh, kind, digits, masters)(num_bytes)

        return price

    change_layout(Layout(splits=((A, B), ())), WHOLE, MESH, SIZES, record, 2)
    assert ("all_gather", 32) in seen  # 8 · 8 elements over four devices, two bytes each


def test_slow_outer_links_make_a_reduction_hierarchical() -> None:
    """Reduce-scatter inside, all-reduce across, all-gather inside."""
    mesh = Mesh.of(range(4), a=2, b=2)

    def price(mesh: Mesh, kind: StepKind, digits: tuple[Digit, ...], masters: tuple[Digit, ...]) -> SizePrice:
        slow = 100 if any(digit.axis == "a" for digit in digits) else 1
        return lambda num_bytes: slow * volume_price(mesh, kind, digits, masters)(num_bytes)

    steps = steps_of(PARTIAL_TWICE, WHOLE, mesh, SIZES, price)
    assert [(step.kind, step.groups[0]) for step in steps] == [
        ("reduce_scatter", (0, 1)),
        ("all_reduce", (0, 2)),
        ("all_gather", (0, 1)),
    ]


def test_a_reported_price_is_the_sum_of_its_steps() -> None:
    for found in synthesize(PARTIAL_TWICE, Layout(splits=((), (A,))), MESH, SIZES, num_best=10):
        prices = [volume_price(MESH, m.kind, tuple(d.digit for d in m.digits))(m.num_bytes) for m in found.moves]
        assert found.price == pytest.approx(sum(prices), rel=1e-12)


@settings(max_examples=60)
@given(changes())
def test_no_program_costs_more_than_going_through_the_whole_tensor(
    change: tuple[Mesh, Layout, Layout, tuple[int, ...]],
) -> None:
    mesh, source, target, sizes = change

    def cost(before: Layout, after: Layout) -> float:
        return sum(part.price for part in change_layout(before, after, mesh, sizes))

    whole = Layout.replicated(len(sizes))
    assert cost(source, target) <= (cost(source, whole) + cost(whole, target)) * (1 + 1e-9)


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
