"""Routes: the wires of a message by every shape, walked wire by wire, and the loads and seconds of many at once.

The random clusters of this file serve the tests of prices, bounds and reductions too.
"""

from itertools import permutations
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planloom.cluster import LIBRARIES, SHAPES, Cluster, Device, Level, Library, Link, Message, Shape, exchange_seconds
from planloom.cluster.routes import Wire, ring_hops, route, wire_loads

DEVICE = Device(
    name="d",
    flops_per_second={"float32": 1e12},
    memory_bytes=1 << 30,
    memory_bytes_per_second=1e12,
    launch_seconds=1e-6,
)


def link(
    shape: Shape = "crossbar", *, shared: bool = False, bandwidth: float = 1e9, latency: float = 1e-6, **figures: object
) -> Link:
    return Link(
        bandwidth_bytes_per_second=bandwidth,
        latency_seconds=latency,
        shared=shared,
        shape=shape,
        **figures,
    )


def cluster_of(*levels: tuple[int, Link], library: Library = "nccl") -> Cluster:
    """Levels, outermost first, as (count, link)."""
    named = tuple(Level(name=f"l{i}", count=count, link=link) for i, (count, link) in enumerate(levels))
    return Cluster(name="c", levels=named, device=DEVICE, library=library)


@st.composite
def clusters(
    draw: st.DrawFn,
    *,
    max_devices: int = 24,
    min_count: int = 1,
    max_levels: int = 3,
    shapes: tuple[Shape, ...] = SHAPES,
    libraries: tuple[Library, ...] = LIBRARIES,
) -> Cluster:
    """One to three levels of one to four members, with any links that do not contradict them."""
    counts: list[int] = []
    for _ in range(draw(st.integers(1, max_levels))):
        counts.append(draw(st.integers(min_count, max(min_count, min(4, max_devices // prod(counts))))))
    levels = []
    for index, count in enumerate(counts):
        shape = draw(st.sampled_from(shapes))
        must_share = shape in ("ring", "pairs") and prod(counts[index + 1 :]) > 1
        shared = must_share or (shape != "torus" and draw(st.booleans()))
        bandwidth = draw(st.sampled_from((1e9, 2e9, 5e9, 3e10)))
        latency = draw(st.sampled_from((1e-9, 1e-6, 1e-5)))
        levels.append((count, link(shape, shared=shared, bandwidth=bandwidth, latency=latency)))
    return cluster_of(*levels, library=draw(st.sampled_from(libraries)))


def follow(cluster: Cluster, source: int, target: int, wires: list[Wire]) -> tuple[int, ...]:
    """The coordinates at which a message arrives that passes these wires, one after another."""
    here, there = list(cluster.coordinates(source)), cluster.coordinates(target)
    is_torus = cluster.levels[cluster.crossed_level((source, target))].link.shape == "torus"
    for level, way, whose in wires:
        link, count = cluster.levels[level].link, cluster.levels[level].count
        after = list(here) if is_torus else list(there)  # a torus moves one coordinate, a switch all of them
        if link.shape == "torus":
            assert whose == tuple(here), "in a torus a device sends on its own links"
        else:
            length = len(here) if link.shape == "crossbar" and not link.shared else level + 1
            at = here if way != "in" else there if not is_torus else [*here[:level], there[level], *here[level + 1 :]]
            assert whose[:length] == tuple(at[:length])
        match way:
            case "out":
                continue
            case "in" | "to":
                after[level] = whose[-1] if way == "to" else whose[level]
            case "up" | "down":
                after = list(here)
                after[level] = (here[level] + (1 if way == "up" else -1)) % count
                if not is_torus and after[level] == there[level]:
                    after = list(there)
        here = after
    return tuple(here)


@given(clusters(), st.data())
def test_a_message_arrives(cluster: Cluster, data: st.DataObject) -> None:
    devices = st.integers(0, cluster.num_devices - 1)
    source, target = data.draw(devices), data.draw(devices)
    wires = route(cluster, source, target)
    assert (wires == []) == (source == target)
    assert follow(cluster, source, target, wires) == cluster.coordinates(target)
    assert len(set(wires)) == len(wires), "no wire twice"


@given(clusters(), st.data())
def test_only_the_outermost_differing_level_carries_a_message_outside_tori(
    cluster: Cluster, data: st.DataObject
) -> None:
    devices = st.integers(0, cluster.num_devices - 1)
    source, target = data.draw(devices), data.draw(devices)
    outermost = cluster.crossed_level((source, target))
    levels = [level for level, _, _ in route(cluster, source, target)]
    if cluster.levels[outermost].link.shape != "torus":
        assert set(levels) <= {outermost}
    else:
        here, there = cluster.coordinates(source), cluster.coordinates(target)
        assert levels == sorted(levels, reverse=True), "inner levels first"
        assert set(levels) == {level for level, (a, b) in enumerate(zip(here, there, strict=True)) if a != b}


@given(st.integers(2, 9), st.data())
def test_ring_hops_go_the_shorter_way(count: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, count - 1))
    stop = (start + data.draw(st.integers(1, count - 1))) % count
    hops = ring_hops(start, stop, count)
    ascending, descending = (stop - start) % count, (start - stop) % count
    assert len(hops) == min(ascending, descending)
    (way,) = {way for _, way in hops}
    if ascending != descending:
        assert way == ("up" if ascending < descending else "down")
    elif count > 2:
        assert way == "up"
    at = start
    for position, _ in hops:
        assert position == at
        at = (at + (1 if way == "up" else -1)) % count
    assert at == stop


def test_two_members_of_a_ring_have_one_link() -> None:
    cluster = cluster_of((2, link("ring")))
    assert route(cluster, 0, 1) == [(0, "up", (0,))]
    assert route(cluster, 1, 0) == [(0, "down", (1,))]


def test_members_opposite_on_a_ring_go_up() -> None:
    cluster = cluster_of((4, link("ring")))
    assert route(cluster, 3, 1) == [(0, "up", (3,)), (0, "up", (0,))]
    assert route(cluster, 0, 3) == [(0, "down", (0,))]


def test_uplinks_of_a_crossbar() -> None:
    shared = cluster_of((2, link(shared=True)), (2, link()))
    assert route(shared, 1, 2) == [(0, "out", (0,)), (0, "in", (1,))]
    own = cluster_of((2, link()), (2, link()))
    assert route(own, 1, 2) == [(0, "out", (0, 1)), (0, "in", (1, 0))]
    assert route(own, 2, 3) == [(1, "out", (1, 0)), (1, "in", (1, 1))]


def test_pairs_have_a_link_each() -> None:
    cluster = cluster_of((3, link("pairs", shared=True)), (2, link()))
    used = [wire for a, b in permutations((0, 2, 4), 2) for wire in route(cluster, a, b)]
    assert len(used) == len(set(used)) == 6
    assert route(cluster, 0, 2) == route(cluster, 1, 3) == [(0, "to", (0, 1))]


def test_a_torus_is_travelled_inner_level_first() -> None:
    cluster = cluster_of((4, link("torus")), (4, link("torus")))
    assert route(cluster, 0, 2 * 4 + 3) == [(1, "down", (0, 0)), (0, "up", (0, 3)), (0, "up", (1, 3))]
    assert route(cluster, 2 * 4 + 3, 0) == [(1, "up", (2, 3)), (0, "up", (2, 0)), (0, "up", (3, 0))]


# --- many messages


@st.composite
def messages(draw: st.DrawFn, cluster: Cluster) -> list[Message]:
    devices = st.integers(0, cluster.num_devices - 1)
    return draw(st.lists(st.tuples(devices, devices, st.integers(1, 99).map(float)), max_size=8))


@given(clusters(), st.data())
def test_loads_are_additive(cluster: Cluster, data: st.DataObject) -> None:
    first, second = data.draw(messages(cluster)), data.draw(messages(cluster))
    alone = [wire_loads(cluster, [message]) for message in (*first, *second)]
    together = wire_loads(cluster, [*first, *second])
    assert together.keys() == {wire for loads in alone for wire in loads}
    for wire, load in together.items():
        assert load == sum(loads.get(wire, 0) for loads in alone)
    doubled = wire_loads(cluster, [(a, b, 2 * size) for a, b, size in (*first, *second)])
    assert doubled == {wire: 2 * load for wire, load in together.items()}


@given(clusters(), st.data())
def test_an_exchange_takes_the_longest_way_and_the_most_loaded_wire(cluster: Cluster, data: st.DataObject) -> None:
    sent = data.draw(messages(cluster))
    seconds = exchange_seconds(cluster, sent)
    loads = wire_loads(cluster, sent)
    rates = [level.link.bandwidth_bytes_per_second for level in cluster.levels]
    busy = max((load / rates[level] for (level, _, _), load in loads.items()), default=0.0)
    assert seconds >= busy
    hops = [[wire[0] for wire in route(cluster, a, b) if wire[1] != "in"] for a, b, _ in sent]
    latency = max((sum(cluster.levels[i].link.latency_seconds for i in levels) for levels in hops), default=0.0)
    assert seconds == pytest.approx(latency + busy)
    assert exchange_seconds(cluster, [*sent, *data.draw(messages(cluster))]) >= seconds


def test_nothing_sent_takes_no_time() -> None:
    cluster = cluster_of((2, link()), (2, link()))
    assert exchange_seconds(cluster, []) == exchange_seconds(cluster, [(1, 1, 1e9)]) == 0.0


def test_hops_on_a_ring_add_their_latencies() -> None:
    cluster = cluster_of((6, link("ring", latency=1e-3)))
    assert exchange_seconds(cluster, [(0, 3, 1e6)]) == pytest.approx(3e-3 + 1e-3)


def test_an_exchange_has_a_hop_and_an_efficiency_of_its_own() -> None:
    own = link(latency=1e-3, hop_seconds={"exchange": 2e-3}, efficiency={("exchange", 2): 0.5, ("all_reduce", 0): 0.1})
    assert exchange_seconds(cluster_of((2, own)), [(0, 1, 1e6)]) == pytest.approx(2e-3 + 2e-3)


def test_a_shared_uplink_carries_the_sum_and_its_directions_are_apart() -> None:
    shared = cluster_of((2, link(shared=True, latency=1e-9)), (2, link()))
    own = cluster_of((2, link(latency=1e-9)), (2, link()))
    crossing = [(0, 2, 1e9), (1, 3, 1e9)]
    assert exchange_seconds(shared, crossing) == pytest.approx(2.0)
    assert exchange_seconds(own, crossing) == pytest.approx(1.0)
    assert exchange_seconds(shared, [(0, 2, 1e9), (3, 1, 1e9)]) == pytest.approx(1.0)
