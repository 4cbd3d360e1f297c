"""Every message takes the links that the cluster model says, in every shape and mixture. No namespaces are needed."""

from collections import Counter

import pytest

from planloom.cluster import Cluster, load_cluster
from testbed import TestbedError
from testbed.network import network_script
from testbed.routing import Routing, route
from testbed.shaping import shape
from testbed.trials import trials_of
from testbed.wiring import FABRIC, Wiring, wire
from tests.net.clusters import EXAMPLES, ODD, TWO_BY_TWO, cluster, level

CLUSTERS = [TWO_BY_TWO, *ODD, *(load_cluster(path) for path in EXAMPLES)]


def model_hops(case: Cluster, source: int, destination: int) -> list[int]:
    """How many shaped ends a message leaves by at each level: from the model's words, not the testbed's code."""
    ours, theirs = case.coordinates(source), case.coordinates(destination)
    differing = [index for index, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    ends = [0] * len(case.levels)
    for position, index in enumerate(differing):
        part = case.levels[index]
        distance = abs(ours[index] - theirs[index])
        around = min(distance, part.count - distance)
        if part.link.shape == "torus":
            ends[index] = around
            continue  # and what differs inside was travelled first
        # out of one member and into the other: two ends over a switch
        ends[index] = {"crossbar": 2, "pairs": 1, "ring": around}[part.link.shape]
        assert all(ends[inner] == 0 for inner in differing[position + 1 :])
        break
    return ends


def levels_of(wiring: Wiring) -> dict[tuple[str, str], tuple[int, float]]:
    return {
        (end.namespace, end.interface): (cable.level, cable.bytes_per_second)
        for cable in wiring.cables
        for end in cable.ends
    }


def shaped(routing: Routing, source: int, destination: int) -> list[int]:
    """The levels of the shaped ends on a path."""
    known = levels_of(routing.wiring)
    ways = [known[end.namespace, end.interface] for end in routing.path(source, destination)]
    return [index for index, rate in ways if rate]


@pytest.mark.parametrize("case", CLUSTERS, ids=lambda case: case.name)
def test_messages_take_the_links_of_the_model_and_no_others(case: Cluster) -> None:
    routing = route(wire(case))
    for source in range(case.num_devices):
        for destination in range(case.num_devices):
            if source != destination:
                counted = Counter(shaped(routing, source, destination))
                assert [counted[index] for index in range(len(case.levels))] == model_hops(case, source, destination)


@pytest.mark.parametrize("case", CLUSTERS, ids=lambda case: case.name)
def test_a_torus_travels_inner_levels_first(case: Cluster) -> None:
    routing = route(wire(case))
    for source in range(case.num_devices):
        for destination in range(case.num_devices):
            order = shaped(routing, source, destination)
            assert order == sorted(order, reverse=True)


@pytest.mark.parametrize("case", CLUSTERS, ids=lambda case: case.name)
def test_every_cable_is_shaped_to_its_levels_bandwidth_or_not_at_all(case: Cluster) -> None:
    for cable in wire(case).cables:
        assert cable.bytes_per_second in (0, case.levels[cable.level].link.bandwidth_bytes_per_second)
    names = [(end.namespace, end.interface) for cable in wire(case).cables for end in cable.ends]
    assert len(set(names)) == len(names)
    assert all(len(name) < 16 for _, name in names)  # the kernel's limit


def test_devices_of_a_node_share_one_uplink_or_have_one_each() -> None:
    def links_between_nodes(shared: bool) -> set[tuple[str, str]]:
        case = cluster(level("node", 2, 100, shared=shared), level("device", 4, 400))
        wiring = wire(case)
        routing, known = route(wiring), levels_of(wiring)
        return {
            (end.namespace, end.interface)
            for source in range(4)
            for end in routing.path(source, source + 4)
            if known[end.namespace, end.interface][1]
        }

    assert len(links_between_nodes(shared=True)) == 2  # out of one node, into the other
    assert len(links_between_nodes(shared=False)) == 8


def test_equal_ways_around_a_ring_ascend() -> None:
    routing = route(wire(cluster(level("ring", 4, 100, shape="ring"))))
    for source in range(4):
        across = [(end.namespace, end.interface) for end in routing.path(source, (source + 2) % 4)]
        assert across == [(f"device{source}", "l0next"), (f"device{(source + 1) % 4}", "l0next")]


def test_two_in_a_ring_have_one_cable() -> None:
    assert len(wire(cluster(level("ring", 2, 100, shape="ring"))).cables) == 1
    torus = wire(cluster(level("torus", 2, 100, shape="torus"), level("inner", 3, 100, shape="torus")))
    assert Counter(cable.level for cable in torus.cables) == {0: 3, 1: 6}


def test_bridges_are_all_in_the_fabric_and_have_no_loops() -> None:
    for case in CLUSTERS:
        wiring = wire(case)
        ends = [end for cable in wiring.cables for end in cable.ends]
        assert all((end.namespace == FABRIC) == bool(end.bridge) for end in ends)
        between = [cable.ends for cable in wiring.cables if all(end.bridge for end in cable.ends)]
        joined = {bridge: bridge for bridge in wiring.bridges}
        for one, other in between:
            roots = []
            for bridge in (one.bridge, other.bridge):
                while joined[bridge] != bridge:
                    bridge = joined[bridge]
                roots.append(bridge)
            assert roots[0] != roots[1]
            joined[roots[0]] = roots[1]


def test_many_pairs_share_a_class_by_source() -> None:
    pairs = [(f"10.77.0.{a}", f"10.77.0.{b}") for a in range(1, 17) for b in range(17, 33)]
    few, many = shape("l0", 1e7, pairs[:64]), shape("l0", 1e7, pairs)
    assert sum("match ip src" in line for line in few) == 64
    assert sum("match ip src" in line for line in many) == 16


@pytest.mark.parametrize("case", CLUSTERS, ids=lambda case: case.name)
def test_trials_cover_every_level_and_use_devices_that_exist(case: Cluster) -> None:
    trials = trials_of(case)
    assert {trial.level for trial in trials} >= {part.name for part in case.levels if part.count > 1}
    for trial in trials:
        assert all(0 <= end < case.num_devices for flow in trial.flows for end in flow)
        for (source, destination), rate in zip(trial.flows, trial.bytes_per_second, strict=True):
            crossed = case.levels[case.crossed_level((source, destination))]
            assert crossed.link.bandwidth_bytes_per_second == rate


def test_too_many_devices_and_too_fast_links_are_refused() -> None:
    with pytest.raises(TestbedError, match=r"65 devices[\s\S]*2 to 64"):
        network_script(cluster(level("device", 65, 100)))
    with pytest.raises(TestbedError, match="1 devices"):
        network_script(cluster(level("device", 1, 100)))
    with pytest.raises(TestbedError, match=r"faster[\s\S]*80 Gbit/s[\s\S]*at most 10 Gbit/s[\s\S]*divided"):
        network_script(cluster(level("device", 2, 80_000)))
