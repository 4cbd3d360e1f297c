"""Geometry of groups: from digits without looking at devices, and device by device, with equal results."""

from itertools import pairwise
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planloom.cluster import Cluster
from planloom.collective.geometry import Crossing, Geometry, geometry_of_groups, terrain_of
from planloom.collective.pricing import master_groups
from planloom.layout import Axis, Digit, Mesh, enumerate_placements, mesh_of
from tests.pure.test_routes import cluster_of, clusters, link


@st.composite
def axis_sizes(draw: st.DrawFn, num_devices: int, *, max_axes: int = 3) -> dict[str, int]:
    """Axes that fill so many devices: their prime factors, dealt out."""
    sizes = [1] * draw(st.integers(1, max_axes))
    left = num_devices
    for prime in (2, 3, 5, 7, 11, 13):
        while left % prime == 0:
            left //= prime
            sizes[draw(st.integers(0, len(sizes) - 1))] *= prime
    return {f"a{i}": size for i, size in enumerate(sizes)}


@st.composite
def placed_meshes(draw: st.DrawFn, cluster: Cluster) -> Mesh:
    """A placement on all devices of a cluster."""
    placements = enumerate_placements(cluster.level_counts, draw(axis_sizes(cluster.num_devices)))
    return mesh_of(draw(st.sampled_from(placements)))


@st.composite
def sliced_meshes(draw: st.DrawFn, cluster: Cluster) -> Mesh:
    """A placement on some neighbouring members of one level."""
    level = draw(st.integers(0, len(cluster.levels) - 1))
    counts = cluster.level_counts
    inner = prod(counts[level + 1 :])
    parent = draw(st.integers(0, prod(counts[:level]) - 1))
    first = draw(st.integers(0, counts[level] - 1))
    levels = (draw(st.integers(1, counts[level] - first)), *counts[level + 1 :])
    start = (parent * counts[level] + first) * inner
    placements = enumerate_placements(levels, draw(axis_sizes(prod(levels))))
    return mesh_of(draw(st.sampled_from(placements)), devices=range(start, start + prod(levels)))


@st.composite
def flat_meshes(draw: st.DrawFn, cluster: Cluster) -> Mesh:
    """One digit an axis, whatever the levels; devices in their order, some of them left out."""
    stride = draw(st.integers(1, min(3, cluster.num_devices)))
    first = draw(st.integers(0, stride - 1))
    devices = range(first, cluster.num_devices, stride)
    return Mesh.of(devices, **draw(axis_sizes(len(devices))))


@st.composite
def shuffled_meshes(draw: st.DrawFn, cluster: Cluster) -> Mesh:
    mesh = draw(placed_meshes(cluster))
    return Mesh(axes=mesh.axes, devices=tuple(draw(st.permutations(mesh.devices))))


@st.composite
def chosen_digits(draw: st.DrawFn, mesh: Mesh) -> tuple[tuple[Digit, ...], tuple[Digit, ...]]:
    """Digits of a step, and others along which only masters take part; in any order."""
    order = draw(st.permutations(mesh.digits))
    cuts = sorted((draw(st.integers(0, len(order))), draw(st.integers(0, len(order)))))
    return tuple(order[: cuts[0]]), tuple(order[cuts[0] : cuts[1]])


def require_equal(cluster: Cluster, mesh: Mesh, digits: tuple[Digit, ...], masters: tuple[Digit, ...]) -> None:
    terrain = terrain_of(cluster, mesh)
    assert terrain is not None
    assert terrain.geometry(digits, masters) == geometry_of_groups(cluster, master_groups(mesh, digits, masters))


@settings(max_examples=200)
@given(clusters(max_devices=36), st.data())
def test_digits_of_a_placement_and_their_groups_have_one_geometry(cluster: Cluster, data: st.DataObject) -> None:
    mesh = data.draw(placed_meshes(cluster) | sliced_meshes(cluster))
    require_equal(cluster, mesh, *data.draw(chosen_digits(mesh)))


@settings(max_examples=200)
@given(clusters(max_devices=36), st.data())
def test_any_mesh_has_no_terrain_or_the_geometry_of_its_groups(cluster: Cluster, data: st.DataObject) -> None:
    mesh = data.draw(flat_meshes(cluster) | shuffled_meshes(cluster))
    if terrain_of(cluster, mesh) is not None:
        require_equal(cluster, mesh, *data.draw(chosen_digits(mesh)))


@settings(max_examples=100)
@given(clusters(max_devices=36), st.data())
def test_a_geometry_says_where_the_devices_of_a_group_are(cluster: Cluster, data: st.DataObject) -> None:
    mesh = data.draw(placed_meshes(cluster) | shuffled_meshes(cluster))
    groups = master_groups(mesh, *data.draw(chosen_digits(mesh)))
    geometry = geometry_of_groups(cluster, groups)
    if geometry is None:
        return
    assert all(a.level < b.level for a, b in pairwise(geometry.crossings))
    assert geometry.group_size == prod(crossing.members for crossing in geometry.crossings)
    for group in groups:
        places = [cluster.coordinates(device) for device in group]
        for crossing in geometry.crossings:
            level = crossing.level
            parents = {place[:level] for place in places}
            members = {place[: level + 1] for place in places}
            assert len(parents) == crossing.outer
            assert len(members) == crossing.outer * crossing.members
            assert len(group) == len(members) * crossing.inner
            positions = tuple(sorted({place[level] for place in places}))
            assert positions in {found for wires in crossing.wires for found, _ in wires}
    for crossing in geometry.crossings:  # every group is counted once in every parent
        parents = {cluster.coordinates(device)[: crossing.level] for group in groups for device in group}
        if len(crossing.wires) == 1:
            counted = sum(multiplicity for _, multiplicity in crossing.wires[0])
            assert counted * len(parents) == len(groups) * crossing.outer


NODES = cluster_of((2, link(shared=True)), (4, link()))


def test_a_digit_that_reaches_over_two_levels() -> None:
    mesh = Mesh.of(range(8), a=8)
    require_equal(NODES, mesh, mesh.digits, ())
    terrain = terrain_of(NODES, mesh)
    assert terrain is not None
    assert terrain.geometry(mesh.digits) == Geometry(
        group_size=8,
        crossings=(
            Crossing(level=0, members=2, inner=4, outer=1, wires=((((0, 1), 1),),)),
            Crossing(level=1, members=4, inner=1, outer=2, wires=((((0, 1, 2, 3), 1),),)),
        ),
    )


def test_replicas_on_an_uplink_are_counted() -> None:
    mesh = Mesh.of(range(8), a=2, b=4)
    geometry = geometry_of_groups(NODES, mesh.groups(mesh.axis("a").digits))
    assert geometry is not None
    (crossing,) = geometry.crossings
    assert crossing.wires == ((((0, 1), 4),),)
    masters_only = geometry_of_groups(NODES, master_groups(mesh, mesh.axis("a").digits, mesh.axis("b").digits))
    assert masters_only is not None
    assert masters_only.crossings[0].wires == ((((0, 1), 1),),)


def test_strided_digits_name_their_positions() -> None:
    mesh = Mesh.of(range(8), n=2, a=2, b=2)
    terrain = terrain_of(NODES, mesh)
    assert terrain is not None
    (crossing,) = terrain.geometry(mesh.axis("a").digits).crossings
    assert (crossing.level, crossing.wires) == (1, ((((0, 2), 1), ((1, 3), 1)),))


@pytest.mark.parametrize(
    ("devices", "reason"),
    [((2, 3, 4, 5), "carries into the next node"), ((3, 2, 1, 0), "descends"), ((0, 1, 4, 6), "is uneven")],
)
def test_devices_that_lie_at_no_constant_strides(devices: tuple[int, ...], reason: str) -> None:
    assert terrain_of(NODES, Mesh.of(devices, a=2, b=2)) is None, reason


def test_groups_that_are_no_products_or_not_alike_have_no_geometry() -> None:
    assert geometry_of_groups(NODES, ((0, 1, 4),)) is None
    assert geometry_of_groups(NODES, ((0, 1), (4, 2))) is None
    assert geometry_of_groups(NODES, ((0, 1, 4, 6),)) is None


def test_one_device_crosses_nothing() -> None:
    mesh = Mesh(axes=(Axis(name="a", sizes=(1, 1)),), devices=(5,))
    require_equal(NODES, mesh, (), ())
    assert geometry_of_groups(NODES, ((5,),)) == Geometry(group_size=1, crossings=())
