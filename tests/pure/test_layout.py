"""Meshes order devices, layouts cut tensors into equal boxes, boxes are exact."""

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planloom.errors import LayoutError
from planloom.layout import Axis, Box, Digit, Layout, Mesh, intersect, volume
from planloom.layout.boxes import lies_together, relative, subtract, whole
from tests.pure.meshes import layouts, meshes

A, B = Digit(axis="a", index=0, size=2), Digit(axis="b", index=0, size=3)

# --- meshes ----------------------------------------------------------------------------------------------------------


def test_groups_follow_the_order_of_the_devices() -> None:
    mesh = Mesh.of((5, 1, 4, 0, 3, 2), dp=2, tp=3)
    (dp,), (tp,) = mesh.axis("dp").digits, mesh.axis("tp").digits
    assert mesh.groups([tp]) == ((5, 1, 4), (0, 3, 2))
    assert mesh.groups([dp]) == ((5, 0), (1, 3), (4, 2))
    assert mesh.groups([dp, tp]) == ((5, 1, 4, 0, 3, 2),)
    assert mesh.groups([tp, dp]) == ((5, 0, 1, 3, 4, 2),)  # the first digit named is the major one
    assert mesh.groups([]) == ((5,), (1,), (4,), (0,), (3,), (2,))


@given(meshes(), st.data())
def test_groups_hold_the_devices_that_differ_in_their_digits_alone(mesh: Mesh, data: st.DataObject) -> None:
    over = data.draw(st.permutations(mesh.digits))[: data.draw(st.integers(0, len(mesh.digits)))]
    groups = mesh.groups(over)
    assert sorted(device for group in groups for device in group) == sorted(mesh.devices)
    for group in groups:
        points = [mesh.coordinates(device) for device in group]
        assert [tuple(point[d] for d in over) for point in points] == list(product(*(range(d.size) for d in over)))
        assert len({tuple(point[d] for d in mesh.digits if d not in over) for point in points}) == 1


@given(meshes())
def test_coordinates_are_a_bijection_in_row_major_order(mesh: Mesh) -> None:
    points = [tuple(mesh.coordinates(device)[digit] for digit in mesh.digits) for device in mesh.devices]
    assert points == list(product(*(range(digit.size) for digit in mesh.digits)))


def test_digits_of_size_one_are_left_out_and_the_others_keep_their_number() -> None:
    axis = Axis(name="tp", sizes=(2, 1, 3))
    assert axis.size == 6
    assert [(digit.index, digit.size) for digit in axis.digits] == [(0, 2), (2, 3)]
    assert [str(digit) for digit in axis.digits] == ["tp", "tp.2"]
    assert Mesh.of((7,), dp=1).coordinates(7) == {}


@pytest.mark.parametrize(
    ("axes", "devices", "message"),
    [
        ({"dp": 2, "tp": 2}, (0, 1, 2), r"(?s)do not fill.*'dp': 2, 'tp': 2.*3 devices \(0, 1, 2\).*to do:"),
        ({"dp": 2}, (4, 4), r"(?s)device twice.*\(4, 4\).*distinct"),
    ],
)
def test_meshes_that_do_not_fit_their_devices(axes: dict[str, int], devices: tuple[int, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Mesh.of(devices, **axes)


def test_an_axis_named_twice() -> None:
    axis = Axis(name="dp", sizes=(2,))
    with pytest.raises(LayoutError, match=r"(?s)axis twice.*'dp', 'dp'"):
        Mesh(axes=(axis, axis), devices=(0, 1, 2, 3))


def test_an_axis_that_is_not_there() -> None:
    with pytest.raises(LayoutError, match=r"(?s)no axis 'tp'.*'pp', 'dp'"):
        Mesh.of((0, 1), pp=1, dp=2).axis("tp")


# --- layouts ---------------------------------------------------------------------------------------------------------


@given(meshes(), st.data())
def test_boxes_tile_the_tensor_exactly_once_a_replica(mesh: Mesh, data: st.DataObject) -> None:
    num_factors = data.draw(st.integers(1, 3))
    layout = data.draw(layouts(mesh.digits, num_factors, partial=True))
    sizes = tuple(data.draw(st.integers(1, 2)) * prod(digit.size for digit in split) for split in layout.splits)
    copies = np.zeros(sizes, dtype=int)
    for device in mesh.devices:
        box = layout.box(sizes, mesh.coordinates(device))
        assert tuple(stop - start for start, stop in box) == layout.local_sizes(sizes)
        copies[tuple(slice(*interval) for interval in box)] += 1
    others = [digit for digit in mesh.digits if digit not in layout.split_digits]
    assert (copies == prod(digit.size for digit in others)).all()


def test_the_first_digit_of_a_factor_is_the_major_one() -> None:
    layout = Layout(splits=((B, A), ()))
    assert layout.box((12, 5), {A: 1, B: 2}) == ((10, 12), (0, 5))
    assert layout.box((12, 5), {A: 0, B: 1}) == ((4, 6), (0, 5))


def test_an_uneven_split_names_size_and_axes() -> None:
    layout = Layout(splits=((), (A, B)))
    with pytest.raises(LayoutError, match=r"(?s)not even.*size 8 over a=2 × b=3.*divides.*to do:"):
        layout.local_sizes((8, 8))
    with pytest.raises(LayoutError, match="size 8 over a=2 × b=3"):
        layout.box((8, 8), {A: 0, B: 0})


@pytest.mark.parametrize(
    ("splits", "partial"), [(((A,), (A,)), ()), (((A, B, A),), ()), (((B,),), (B,)), (((),), (A, A))]
)
def test_a_digit_used_twice(splits: tuple[tuple[Digit, ...], ...], partial: tuple[Digit, ...]) -> None:
    with pytest.raises(LayoutError, match="digit twice"):
        Layout(splits=splits, partial=partial)


def test_layouts_in_words() -> None:
    assert str(Layout.replicated(2)) == "[whole]"
    layout = Layout(splits=((A, B), ()), partial=(Digit(axis="c", index=1, size=2),), combine="max")
    assert str(layout) == "[0:a·b max(c.1)]"
    assert layout.completed() == Layout(splits=((A, B), ()))


# --- boxes -----------------------------------------------------------------------------------------------------------

EDGE = 6


def boxes(rank: int) -> st.SearchStrategy[Box]:
    interval = st.tuples(st.integers(0, EDGE - 1), st.integers(1, EDGE)).filter(lambda pair: pair[0] < pair[1])
    return st.tuples(*[interval] * rank)


PAIRS = st.integers(0, 3).flatmap(lambda rank: st.tuples(boxes(rank), boxes(rank)))


def points(box: Box) -> set[tuple[int, ...]]:
    return set(product(*(range(start, stop) for start, stop in box)))


@given(PAIRS)
def test_intersect_is_the_common_points(pair: tuple[Box, Box]) -> None:
    common = intersect(*pair)
    assert (points(common) if common is not None else set()) == points(pair[0]) & points(pair[1])
    assert common == intersect(*reversed(pair))


@given(PAIRS)
def test_subtract_leaves_the_other_points_once(pair: tuple[Box, Box]) -> None:
    rest = subtract(*pair)
    assert set().union(*map(points, rest)) == points(pair[0]) - points(pair[1])
    assert sum(map(volume, rest)) == len(points(pair[0]) - points(pair[1]))


@given(PAIRS)
def test_relative_finds_the_part_in_the_local_array(pair: tuple[Box, Box]) -> None:
    base, other = pair
    part = intersect(base, other)
    if part is None:
        return
    tensor = np.arange(EDGE ** len(base)).reshape((EDGE,) * len(base))
    local = tensor[tuple(slice(*interval) for interval in base)]
    seen = local[tuple(slice(*interval) for interval in relative(part, base))]
    assert np.array_equal(seen, tensor[tuple(slice(*interval) for interval in part)])


def test_the_box_of_a_whole_tensor() -> None:
    assert whole((2, 3)) == ((0, 2), (0, 3))
    assert volume(whole((2, 3))) == 6
    assert volume(whole(())) == 1


@given(PAIRS)
def test_a_box_lies_together_where_its_elements_are_consecutive(pair: tuple[Box, Box]) -> None:
    box, sizes = pair[0], (EDGE,) * len(pair[0])
    places = np.arange(EDGE ** len(box)).reshape(sizes)[tuple(slice(*interval) for interval in box)].ravel()
    assert lies_together(box, sizes) == bool((np.diff(places) == 1).all())
