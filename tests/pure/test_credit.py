"""What a device under a quota makes good when it has waited: on the simulator's clock."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planloom.cluster import load_cluster
from planloom.cost import Credit, Prices
from planloom.cost.keys import OVERLAP_EXCHANGE_KEY, REST_SECONDS_KEY, REST_SHARE_KEY, accumulate_key, memory_key
from planloom.program import BodyCall
from planloom.simulate.engine import Engine
from planloom.simulate.script import Await, Begin, Busy, Half, Item, Part
from tests.pure.tiny_graph import tiny_blocks

CREDIT = Credit(seconds=3.0, share=0.4)


def busy(seconds: float) -> Busy:
    return Busy(seconds, (Part("Forward 0", "compute", 0.0, seconds),))


def after_waiting(waited: float, *items: Item, credit: Credit = CREDIT) -> float:
    """Seconds of a second stage's items behind its wait for the first."""
    first = (busy(waited), Half("c", 1, ((0, True),), True, 1e-9, {}))
    second = (Half("c", 0, ((1, True),), False, 0.0, {}), Await((1, True), 0, False), *items)
    calls = [[BodyCall(body="b", micro=0)]] * 2
    engine = Engine(
        calls, [{"b": first}, {"b": second}], compute_slowdown=1.0, communication_slowdown=1.0, credit=credit
    )
    return engine.run() - waited


def test_work_after_a_wait_is_over_earlier_by_the_credit() -> None:
    assert after_waiting(10.0, busy(8.0)) == pytest.approx(8.0 - 3.0)
    assert after_waiting(10.0, busy(8.0), credit=Credit()) == pytest.approx(8.0)


def test_no_more_is_made_good_than_was_waited() -> None:
    assert after_waiting(2.0, busy(8.0)) == pytest.approx(8.0 - 2.0)


def test_short_work_runs_at_full_speed_and_leaves_the_rest_to_the_next() -> None:
    assert after_waiting(10.0, busy(1.0)) == pytest.approx(0.4)
    apart = (busy(1.0), Await((7, True), 0, False), busy(10.0))  # nothing to await: the items are only kept apart
    assert after_waiting(10.0, *apart) == pytest.approx(11.0 - 3.0)


def test_credit_is_spent_once() -> None:
    twice = (busy(8.0), Await((7, True), 0, False), busy(8.0))
    assert after_waiting(10.0, *twice) == pytest.approx(16.0 - 3.0)


def test_after_a_collective_nothing_is_made_good() -> None:
    """The device's own threads carry it out."""
    items = (Begin("all_reduce", "tp", 10.0, 0, ((3, True),), {}), Await((3, True), 0, False), busy(8.0))
    engine = Engine(
        [[BodyCall(body="b", micro=0)]],
        [{"b": items}],
        compute_slowdown=1.0,
        communication_slowdown=1.0,
        credit=CREDIT,
    )
    assert engine.run() == pytest.approx(18.0)


@given(st.floats(0.0, 20.0), st.floats(0.0, 20.0), st.floats(0.0, 5.0), st.floats(0.05, 1.0))
def test_rests_make_nothing_longer_and_nothing_faster_than_a_whole_core(
    rested: float, seconds: float, most: float, share: float
) -> None:
    saved = Credit(seconds=most, share=share).saved(rested, seconds)
    assert 0 <= saved <= min(rested, most)
    assert share * seconds <= seconds - saved + 1e-9


def test_credit_is_that_of_measured_links_only() -> None:
    measured = {REST_SECONDS_KEY: 0.003, REST_SHARE_KEY: 0.4}
    cluster = load_cluster("two-by-two")
    known = Prices(blocks=tiny_blocks(), cluster=cluster, measured=measured, measured_links=True)
    assert known.credit == Credit(seconds=0.003, share=0.4)
    assert Prices(blocks=tiny_blocks(), cluster=cluster, measured=measured).credit == Credit()
    assert Prices(blocks=tiny_blocks(), cluster=cluster, measured_links=True).credit == Credit()


def test_additions_in_place_have_a_price_of_their_own() -> None:
    measured = {memory_key(1200): 4.0, memory_key(2400): 8.0, accumulate_key(1200): 1.0, accumulate_key(2400): 2.0}
    prices = Prices(blocks=tiny_blocks(), cluster=load_cluster("two-by-two"), measured=measured)
    assert prices.accumulate(1200).seconds == 1.0
    assert prices.accumulate(1800).seconds == pytest.approx(1.5)
    older = {key: value for key, value in measured.items() if key.startswith("memory/")}
    prices = Prices(blocks=tiny_blocks(), cluster=load_cluster("two-by-two"), measured=older)
    assert prices.accumulate(1200).seconds == 4.0


def with_a_message(*, delay: float, sender: tuple[Item, ...] = (), receiver: tuple[Item, ...] = ()) -> float:
    """Seconds until a message of one second has arrived, whose ends do other things behind its start."""
    first = (Half("c", 1, ((0, True),), True, 1.0, {}), *sender)
    second = (Half("c", 0, ((1, True),), False, 0.0, {}), *receiver, Await((1, True), 0, False))
    engine = Engine(
        [[BodyCall(body="b", micro=0)]] * 2,
        [{"b": first}, {"b": second}],
        compute_slowdown=1.0,
        communication_slowdown=1.0,
        exchange_delay=delay,
    )
    engine.run()
    return engine.stages[1].time


def test_a_message_is_late_once_where_an_end_computes() -> None:
    assert with_a_message(delay=0.25) == pytest.approx(1.0), "nobody computes"
    assert with_a_message(delay=0.25, sender=(busy(0.1),)) == pytest.approx(1.25)
    twice = (busy(0.1), Await((7, True), 0, False), busy(0.1))
    assert with_a_message(delay=0.25, sender=twice, receiver=(busy(0.5),)) == pytest.approx(1.25), "once"
    assert with_a_message(delay=0.0, sender=(busy(0.1),)) == pytest.approx(1.0)


@pytest.mark.parametrize(("second_peer", "expected"), [(1, [1.25, 2.25]), (2, [2.25, 2.25])], ids=["lane", "link"])
def test_a_late_message_has_left_its_lane_and_link(second_peer: int, expected: list[float]) -> None:
    """Two messages of a second one after the other, or at a time on one link: what is late holds nobody up."""
    link: Any = "link"
    peers = {0: 1, 1: second_peer}
    sends = [Half(f"c{i}", peer, ((i, True),), True, 1.0, {link: 1.0}) for i, peer in peers.items()]
    arriving: dict[int, list[Item]] = {1: [], 2: []}
    for i, peer in peers.items():
        arriving[peer].append(Half(f"c{i}", 0, ((i, True),), False, 0.0, {}))
    engine = Engine(
        [[BodyCall(body="b", micro=0)]] * 3,
        [{"b": (*sends, busy(3.0))}, {"b": arriving[1]}, {"b": arriving[2]}],
        compute_slowdown=1.0,
        communication_slowdown=1.0,
        exchange_delay=0.25,
    )
    engine.run()
    assert sorted(activity.stop for activity in engine.finished if activity.axis == "pp") == pytest.approx(expected)


def test_a_message_is_late_where_the_links_are_measured_only() -> None:
    blocks, cluster = tiny_blocks(), load_cluster("two-by-two")
    for measured_links, delay in ((True, 0.003), (False, 0.0)):
        prices = Prices(
            blocks=blocks, cluster=cluster, measured={OVERLAP_EXCHANGE_KEY: 0.003}, measured_links=measured_links
        )
        assert prices.exchange_delay == delay
