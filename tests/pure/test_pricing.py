"""Seconds of steps: from digits and from groups alike, against messages routed one by one, and by every figure."""

from collections.abc import Callable
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planloom.cluster import Cluster, Message
from planloom.cluster.routes import Wire, wire_loads
from planloom.collective import LOCAL_KINDS, Step, StepKind, digits_cost, rings_from_bytes, seconds_price, step_cost
from planloom.collective.geometry import Crossing, geometry_of_groups
from planloom.collective.pricing import RINGS_FROM_BYTES, groups_cost, master_groups
from planloom.collective.traffic import ALGORITHMS, Algorithm, level_traffic
from planloom.layout import Mesh
from tests.pure.test_geometry import chosen_digits, flat_meshes, placed_meshes, shuffled_meshes, sliced_meshes
from tests.pure.test_routes import DEVICE, cluster_of, clusters, link

KINDS: tuple[StepKind, ...] = tuple(kind for kind in get_args(StepKind) if kind not in LOCAL_KINDS)
SIZES = (1.0, 3e3, 1e5, 4e6, 1e9)
Groups = tuple[tuple[int, ...], ...]


@settings(max_examples=150)
@given(clusters(), st.data())
def test_digits_cost_what_their_groups_cost(cluster: Cluster, data: st.DataObject) -> None:
    mesh = data.draw(st.one_of(make(cluster) for make in (placed_meshes, sliced_meshes, flat_meshes, shuffled_meshes)))
    digits, masters = data.draw(chosen_digits(mesh))
    if not digits:
        return
    groups = master_groups(mesh, digits, masters)
    for kind in KINDS:
        by_digits = digits_cost(cluster, mesh, kind, digits, masters)
        by_groups = groups_cost(cluster, kind, groups)
        price = seconds_price(cluster)(mesh, kind, digits, masters)
        for size in SIZES:
            assert by_digits.seconds(size) == by_groups.seconds(size) == price(size) > 0
    step = Step(kind="all_reduce", groups=groups, shape=tuple(d.size for d in digits))
    assert step_cost(cluster, step) == groups_cost(cluster, "all_reduce", groups)


# --- against messages, written down by the table in traffic.py

AROUND_A_RING: dict[StepKind, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: n - 1.0,
    "reduce": lambda n: 1.0,
    "broadcast": lambda n: 1.0,
}


def sent(kind: StepKind, algorithm: Algorithm, group: tuple[int, ...]) -> list[Message]:
    """The messages of one group for every byte of a device's array."""
    n, in_order = len(group), sorted(group)
    following = [(in_order[i], in_order[(i + 1) % n]) for i in range(n)]
    match algorithm:
        case "ring":
            return [(a, b, AROUND_A_RING[kind](n)) for a, b in following]
        case "rings":
            half = AROUND_A_RING[kind](n) / 2
            return [(a, b, half) for a, b in following] + [(b, a, half) for a, b in following]
        case "direct":
            size = 1.0 if kind == "all_gather" else 1 / n
            return [(a, b, size) for a in group for b in group if a != b]
        case "neighbour":
            return [(a, b, 1.0) for a, b in following]
        case _:
            assert algorithm == "root"
            return [(group[0], b, 1.0 if kind == "gather" else 1 / n) for b in group[1:]]


def most_loaded(loads: dict[Wire, float], level: int) -> float:
    return max((load for wire, load in loads.items() if wire[0] == level), default=0.0)


def rings_use_half(cluster: Cluster, crossing: Crossing) -> bool:
    """Where two rings, one either way, leave half of a wire unused, which `level_traffic` does not know.

    They leave a member by its first device and by its last; and inside a member of an outer level they do not close.
    """
    link = cluster.levels[crossing.level].link
    own_uplinks = link.shape == "crossbar" and not link.shared
    return (own_uplinks and crossing.inner > 1) or (crossing.members == 2 and crossing.outer > 1)


@settings(max_examples=200)
@given(clusters(max_devices=36, shapes=("crossbar", "ring", "pairs"), libraries=("gloo",)), st.data())
def test_traffic_is_that_of_its_messages(cluster: Cluster, data: st.DataObject) -> None:
    mesh = data.draw(placed_meshes(cluster) | sliced_meshes(cluster))
    groups = master_groups(mesh, *data.draw(chosen_digits(mesh)))
    geometry = geometry_of_groups(cluster, groups)
    assert geometry is not None
    for kind, algorithms in ALGORITHMS["gloo"].items():
        for algorithm in algorithms:
            if algorithm == "binomial":
                continue
            alone = [wire_loads(cluster, sent(kind, algorithm, group)) for group in groups]
            together = wire_loads(cluster, [m for group in groups for m in sent(kind, algorithm, group)])
            traffic = level_traffic(cluster, kind, algorithm, geometry)
            assert {at.level for at in traffic} == {level for level, _, _ in together}
            for at, crossing in zip(traffic, geometry.crossings, strict=True):
                own = max(most_loaded(loads, at.level) for loads in alone)
                total = most_loaded(together, at.level)
                if algorithm == "rings" and rings_use_half(cluster, crossing):
                    assert own <= at.own_bytes * (1 + 1e-9) <= 2.001 * own
                    assert total <= at.total_bytes * (1 + 1e-9) <= 2.001 * total
                else:
                    assert at.own_bytes == pytest.approx(own), (kind, algorithm, at)
                    assert at.total_bytes == pytest.approx(total), (kind, algorithm, at)


@settings(max_examples=60)
@given(clusters(max_devices=36, shapes=("crossbar",), libraries=("gloo",)), st.data())
def test_flows_are_messages_on_the_most_loaded_uplink(cluster: Cluster, data: st.DataObject) -> None:
    mesh = data.draw(placed_meshes(cluster))
    groups = master_groups(mesh, *data.draw(chosen_digits(mesh)))
    geometry = geometry_of_groups(cluster, groups)
    assert geometry is not None
    for kind, algorithm in (("all_reduce", "ring"), ("all_to_all", "direct"), ("scatter", "root")):
        units = [(a, b, 1.0) for group in groups for a, b, _ in sent(kind, algorithm, group)]
        loads = wire_loads(cluster, units)
        for at in level_traffic(cluster, kind, algorithm, geometry):
            assert at.num_flows == most_loaded(loads, at.level)


# --- what makes a step dearer

NODES = cluster_of((2, link(shared=True, bandwidth=1e9)), (4, link(bandwidth=8e9)))
ALL = (tuple(range(8)),)
STRIDED = tuple((i, i + 4) for i in range(4))


@settings(max_examples=60)
@given(clusters(), st.sampled_from(KINDS), st.data())
def test_more_bytes_are_never_cheaper(cluster: Cluster, kind: StepKind, data: st.DataObject) -> None:
    mesh = data.draw(placed_meshes(cluster))
    digits, masters = data.draw(chosen_digits(mesh))
    cost = digits_cost(cluster, mesh, kind, digits, masters)
    switch = cost.rings_from_bytes
    for line in cost.lines:
        assert all(line.seconds(a) <= line.seconds(b) for a, b in pairwise(SIZES))
    for less, more in pairwise(SIZES):
        if switch is None or not less < switch <= more:
            assert cost.seconds(less) <= cost.seconds(more)


@settings(max_examples=60)
@given(clusters(), st.sampled_from(KINDS), st.data())
def test_more_replicas_are_never_cheaper(cluster: Cluster, kind: StepKind, data: st.DataObject) -> None:
    mesh = data.draw(placed_meshes(cluster))
    digits, _ = data.draw(chosen_digits(mesh))
    groups = mesh.groups(digits)
    for size in SIZES:
        seconds = [groups_cost(cluster, kind, groups[:number]).seconds(size) for number in range(1, len(groups) + 1)]
        assert all(a <= b * (1 + 1e-12) for a, b in pairwise(seconds))


def test_replicas_share_an_uplink_and_not_own_ones() -> None:
    own = cluster_of((2, link(bandwidth=1e9)), (4, link(bandwidth=8e9)))
    for cluster, times in ((NODES, 4), (own, 1)):
        one = groups_cost(cluster, "all_reduce", STRIDED[:1]).seconds(1e9)
        assert groups_cost(cluster, "all_reduce", STRIDED).seconds(1e9) == pytest.approx(times * one, rel=1e-4)


def test_a_group_alone_pays_its_latency_and_full_links_hide_it() -> None:
    cluster = cluster_of((2, link(shared=True, latency=0.5)), (4, link()))
    assert groups_cost(cluster, "all_gather", STRIDED[:1]).seconds(1e9) == pytest.approx(0.5 + 1)
    assert groups_cost(cluster, "all_gather", STRIDED).seconds(1e9) == pytest.approx(4)
    assert groups_cost(cluster, "all_gather", STRIDED).seconds(1e6) == pytest.approx(0.5 + 1e-3)


def nccl(**figures: object) -> Cluster:
    return cluster_of((4, link(shared=True, latency=1e-6, **figures)), (2, link()))


NODE_GROUPS = ((0, 2, 4, 6), (1, 3, 5, 7))


def test_an_efficiency_is_for_its_collective_and_its_number_of_members() -> None:
    plain, seconds = nccl(), 6e9 / 1e9
    assert groups_cost(plain, "all_gather", NODE_GROUPS).seconds(1e9) == pytest.approx(seconds)
    for key, factor in (
        (("all_gather", 4), 2),
        (("all_gather", 0), 2),
        (("all_gather", 2), 1),
        (("all_reduce", 0), 1),
    ):
        cluster = nccl(efficiency={key: 0.5})
        assert groups_cost(cluster, "all_gather", NODE_GROUPS).seconds(1e9) == pytest.approx(factor * seconds)
    exact = nccl(efficiency={("all_gather", 0): 0.5, ("all_gather", 4): 0.25})
    assert groups_cost(exact, "all_gather", NODE_GROUPS).seconds(1e9) == pytest.approx(4 * seconds)


def test_a_hop_replaces_the_latency_of_its_collective() -> None:
    cluster = nccl(hop_seconds={"reduce_scatter": 1e-3})
    assert groups_cost(cluster, "reduce_scatter", NODE_GROUPS).seconds(0) == pytest.approx(3e-3)
    assert groups_cost(cluster, "all_gather", NODE_GROUPS).seconds(0) == pytest.approx(3e-6)


def test_starts_add_up_from_the_outermost_crossed_level_inwards() -> None:
    outer, inner = (link(start_seconds={"all_gather": start}, latency=1e-9) for start in (1.0, 0.1))
    cluster = cluster_of((2, outer), (2, inner))
    for groups, seconds in ((((0, 1), (2, 3)), 0.1), (((0, 2), (1, 3)), 1.1), (((0, 1, 2, 3),), 1.1)):
        assert groups_cost(cluster, "all_gather", groups).seconds(0) == pytest.approx(seconds, rel=1e-6)
    assert groups_cost(cluster, "reduce_scatter", ((0, 2), (1, 3))).seconds(0) < 1e-6


def test_each_flow_beside_the_first_prolongs_a_step() -> None:
    cluster, plain = nccl(flow={"all_gather": 0.1}), nccl()
    for groups, crowding in ((NODE_GROUPS[:1], 1.0), (NODE_GROUPS, 1.1)):
        expected = crowding * groups_cost(plain, "all_gather", groups).seconds(1e9)
        assert groups_cost(cluster, "all_gather", groups).seconds(1e9) == pytest.approx(expected, rel=1e-4)


def test_local_steps_read_and_write_their_array() -> None:
    mesh = Mesh.of(range(8), a=8)
    for kind in LOCAL_KINDS:
        seconds = seconds_price(NODES)(mesh, kind, mesh.digits, ())(1e9)
        assert seconds == DEVICE.launch_seconds + 2e9 / DEVICE.memory_bytes_per_second


# --- the choice of algorithms


def test_nccl_reduces_between_two_nodes_by_a_tree() -> None:
    """Each node is root of half a tree: b bytes between nodes, where a ring takes 2b(n-1)/n."""
    cost = groups_cost(NODES, "all_reduce", ALL)
    assert cost.line(1e9).algorithm == "tree"
    assert cost.seconds(1e9) == pytest.approx(1.0, rel=1e-3)


def test_nccl_reduces_between_four_nodes_by_a_tree_when_small_and_a_ring_when_large() -> None:
    cluster = cluster_of((4, link(shared=True, latency=1e-5)), (4, link(bandwidth=8e9)))
    cost = groups_cost(cluster, "all_reduce", (tuple(range(16)),))
    assert cost.line(1e3).algorithm == "tree"
    assert cost.line(1e9).algorithm == "ring"
    assert cost.seconds(1e9) == pytest.approx(2 * 15 / 16, rel=1e-3)


def test_nccl_uses_all_uplinks_of_a_node_and_gloo_one() -> None:
    levels = ((4, link(bandwidth=1e9, latency=1e-9)), (4, link(bandwidth=1e12, latency=1e-9)))
    groups = (tuple(range(16)),)
    seconds = [
        groups_cost(cluster_of(*levels, library=library), "all_reduce", groups).seconds(1e9)
        for library in ("nccl", "gloo")
    ]
    assert seconds == pytest.approx([2 * 15 / 16 / 4, 2 * 15 / 16], rel=1e-3)


def test_gloo_lays_rings_from_a_size_of_the_whole_array_on() -> None:
    cluster = cluster_of((2, link(shared=True)), (4, link()), library="gloo")
    for kind, whole in (("reduce_scatter", 1), ("all_gather", 8)):
        cost = groups_cost(cluster, kind, ALL)
        assert cost.rings_from_bytes == rings_from_bytes("gloo", kind, 8) == RINGS_FROM_BYTES / whole
        assert cost.line(RINGS_FROM_BYTES / whole).algorithm == "rings"
        assert cost.line(RINGS_FROM_BYTES / whole - 1).algorithm == "direct"
    for kind in KINDS:
        if kind not in ("reduce_scatter", "all_gather"):
            assert rings_from_bytes("gloo", kind, 8) is None
        assert rings_from_bytes("nccl", kind, 8) is None


def test_two_rings_halve_the_load_of_a_ring_of_members() -> None:
    cluster = cluster_of((4, link("ring", latency=1e-9)), library="gloo")
    seconds = groups_cost(cluster, "reduce_scatter", ((0, 1, 2, 3),)).seconds(1e9)
    assert seconds == pytest.approx(3 / 4 / 2, rel=1e-3)
