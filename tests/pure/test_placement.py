"""Placements: every parallelism matrix once, and the mesh that each one means."""

from itertools import permutations, product
from math import prod
from time import process_time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planloom.errors import LayoutError
from planloom.layout import Placement, enumerate_placements, mesh_of


def named(sizes: list[int]) -> dict[str, int]:
    return {f"axis{i}": size for i, size in enumerate(sizes)}


@pytest.mark.parametrize(
    ("levels", "sizes", "count"),
    [
        ((4, 16), [4, 16], 3),
        ((4, 16), [8, 8], 3),
        ((4, 16), [2, 32], 2),
        ((4, 16), [64], 1),
        ((4, 16), [4, 2, 8], 5),
        ((4, 16), [2, 2, 16], 4),
        ((1, 2, 2, 4), [4, 4], 4),
        ((2, 16), [8, 4], 2),
        ((4, 8), [8, 4], 3),
        ((), [1, 1], 1),
    ],
)
def test_number_of_placements(levels: tuple[int, ...], sizes: list[int], count: int) -> None:
    assert len(enumerate_placements(levels, named(sizes))) == count


@pytest.mark.alone
def test_thousands_of_placements_are_quick() -> None:
    start = process_time()
    placements = enumerate_placements((16, 8, 8, 8), named([16, 8, 8, 8]))
    assert process_time() - start < 0.1
    assert len(placements) == len(set(placements)) == 2746


@st.composite
def machines(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int]]:
    """Levels of a machine, and axes that fill it: the prime factors of the levels, dealt out to up to three axes."""
    levels = tuple(draw(st.lists(st.sampled_from((1, 2, 3, 4, 6)), min_size=1, max_size=3)))
    sizes = [1] * draw(st.integers(1, 3))
    for level in levels:
        for prime in (2, 2, 3):
            if level % prime == 0:
                level //= prime
                sizes[draw(st.integers(0, len(sizes) - 1))] *= prime
    return levels, sizes


@given(machines())
def test_placements_are_all_matrices_with_these_products(machine: tuple[tuple[int, ...], list[int]]) -> None:
    levels, sizes = machine
    rows = [[row for row in product(*(range(1, n + 1) for n in levels)) if prod(row) == size] for size in sizes]
    expected = {
        matrix
        for matrix in product(*rows)
        if all(prod(column) == n for column, n in zip(zip(*matrix, strict=True), levels, strict=True))
    }
    placements = enumerate_placements(levels, named(sizes))
    assert {placement.matrix for placement in placements} == expected
    assert len(placements) == len(expected)
    assert all(placement.axes == tuple(named(sizes)) for placement in placements)


@given(machines())
def test_a_mesh_has_every_device_once_and_groups_along_the_levels(machine: tuple[tuple[int, ...], list[int]]) -> None:
    """Devices that differ in one digit alone differ at that digit's level of the machine alone."""
    levels, sizes = machine
    for placement in enumerate_placements(levels, named(sizes)):
        mesh = mesh_of(placement)
        assert sorted(mesh.devices) == list(range(prod(levels)))
        assert {axis.name: axis.size for axis in mesh.axes} == named(sizes)
        place = dict(enumerate(product(*map(range, levels))))
        for digit in mesh.digits:
            for group in mesh.groups([digit]):
                columns = list(zip(*(place[device] for device in group), strict=True))
                crossed = [level for level, column in enumerate(columns) if len(set(column)) > 1]
                assert crossed == [digit.index]
                assert list(columns[digit.index]) == sorted(set(columns[digit.index]))


@given(machines(), st.data())
def test_folding_keeps_one_of_the_placements_that_differ_by_an_exchange(
    machine: tuple[tuple[int, ...], list[int]], data: st.DataObject
) -> None:
    """Against brute force: exchange the rows of equal axes of a set in every way, and take one of each orbit."""
    levels, sizes = machine
    axes = named(sizes)
    order = data.draw(st.permutations(list(axes)))
    cut = data.draw(st.integers(0, len(order)))
    groups = [group for group in (order[:cut], order[cut:]) if group]
    group_of = {name: index for index, group in enumerate(groups) for name in group}

    def orbit(placement: Placement) -> frozenset[tuple[tuple[int, ...], ...]]:
        classes = [(group_of[name], axes[name]) for name in axes]
        return frozenset(
            matrix
            for arrangement in permutations(range(len(axes)))
            if all(classes[place] == classes[source] for place, source in enumerate(arrangement))
            for matrix in [tuple(placement.matrix[source] for source in arrangement)]
        )

    folded = enumerate_placements(levels, axes, interchangeable=groups)
    every = enumerate_placements(levels, axes)
    orbits = [orbit(placement) for placement in folded]
    assert len(set(orbits)) == len(orbits)
    assert set(orbits) == {orbit(placement) for placement in every}
    assert set(folded) <= set(every)


def test_folding_by_example() -> None:
    axes = {"a": 4, "b": 4, "c": 4}
    every = enumerate_placements((4, 4, 4), axes)
    folded = enumerate_placements((4, 4, 4), axes, interchangeable=[("a", "b")])
    assert [p.matrix for p in enumerate_placements((2, 2), {"a": 2, "b": 2}, interchangeable=[("a", "b")])] == [
        ((2, 1), (1, 2))  # a, the first, lies outermost
    ]
    alike = [placement for placement in every if placement.matrix[0] == placement.matrix[1]]
    assert 2 * len(folded) == len(every) + len(alike)
    assert enumerate_placements((4, 4, 4), axes, interchangeable=[("b", "a")]) == folded
    assert enumerate_placements((4, 4, 4), axes, interchangeable=[("a",), ()]) == every
    sizes = {"a": 4, "b": 16}  # of different sizes: nothing to exchange
    assert enumerate_placements((4, 16), sizes, interchangeable=[("a", "b")]) == enumerate_placements((4, 16), sizes)


@pytest.mark.parametrize(
    ("interchangeable", "message"),
    [
        ([("dp", "pp")], r"(?s)axis 'pp' does not exist.*interchangeable dp, pp.*axes dp, tp, each once"),
        ([("dp", "tp"), ("dp",)], r"(?s)axis 'dp' is interchangeable twice.*required:"),
        ([("dp", "dp")], r"(?s)axis 'dp' is interchangeable twice"),
    ],
)
def test_sets_of_interchangeable_axes_that_cannot_be(interchangeable: list[tuple[str, ...]], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        enumerate_placements((4, 4), {"dp": 4, "tp": 4}, interchangeable=interchangeable)


@pytest.mark.parametrize(("levels", "axes"), [((0, 4), {"dp": 0}), ((2, 2), {"dp": -2, "tp": -2})])
def test_levels_and_axes_have_members(levels: tuple[int, ...], axes: dict[str, int]) -> None:
    with pytest.raises(LayoutError, match=r"(?s)has no members.*a whole number from 1"):
        enumerate_placements(levels, axes)


def test_meshes_by_example() -> None:
    outside = Placement(axes=("dp", "tp"), matrix=((2, 1), (1, 4)))
    assert mesh_of(outside).devices == (0, 1, 2, 3, 4, 5, 6, 7)
    inside = Placement(axes=("dp", "tp"), matrix=((1, 2), (2, 2)))
    mesh = mesh_of(inside)
    assert mesh.devices == (0, 1, 4, 5, 2, 3, 6, 7)  # dp is the outer half of a node, tp the inner and the nodes
    assert mesh.groups(mesh.axis("tp").digits) == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert mesh_of(inside, devices=range(10, 18)).devices == (10, 11, 14, 15, 12, 13, 16, 17)
    assert str(inside) == "dp 1×2, tp 2×2"


def test_axes_that_do_not_fill_the_machine() -> None:
    with pytest.raises(LayoutError, match=r"(?s)do not fill.*\(4, 16\) = 64.*= 32.*to do:"):
        enumerate_placements((4, 16), {"dp": 4, "tp": 8})


def test_devices_that_a_placement_does_not_fill() -> None:
    with pytest.raises(LayoutError, match=r"(?s)3 devices for dp 2×2.*4 devices"):
        mesh_of(Placement(axes=("dp",), matrix=((2, 2),)), devices=(0, 1, 2))
