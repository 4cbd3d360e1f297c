"""Segments that were measured as a whole: on the simulator's clock they take as long as measured."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planloom.cost import Prices
from planloom.cost.keys import OVERLAP_COMMUNICATION_KEY, OVERLAP_COMPUTE_KEY
from planloom.cost.segments import body_segments
from planloom.simulate import simulate
from planloom.simulate.script import Await, Begin, Busy, Half, Item, Part
from planloom.simulate.segments import Corrected
from tests.pure.test_cost import cluster, program
from tests.pure.tiny_graph import tiny_blocks

SLOWDOWNS = {OVERLAP_COMPUTE_KEY: 1.3, OVERLAP_COMMUNICATION_KEY: 1.7}
BUSY = st.builds(lambda seconds: Busy(seconds, (Part("Forward 0", "compute", 0.0, seconds),)), st.floats(1e-4, 1.0))
BEGIN = st.builds(
    lambda seconds, lane, number, load: Begin("all_reduce", "tp", seconds, lane, ((number, True),), {"link": load}),
    st.floats(1e-4, 1.0),
    st.integers(0, 1),
    st.integers(0, 3),
    st.floats(0.1, 1.0),
)
AWAIT = st.builds(lambda number: Await((number, True), 0, False), st.integers(0, 3))
HALF = st.just(Half("c", 1, ((9, True),), True, 5.0, {}))


@given(st.lists(st.one_of(BUSY, BEGIN, AWAIT, HALF), min_size=1), st.floats(1e-3, 10.0))
def test_a_measured_segment_alone_takes_what_was_measured(items: list[Item], seconds: float) -> None:
    prices = Prices(blocks=tiny_blocks(), cluster=cluster(shared=True), measured=SLOWDOWNS, measured_links=True)
    corrected = Corrected(program("dp=2"), prices)
    stretched = corrected.stretched(items, seconds)
    assert [type(item) for item in stretched] == [type(item) for item in items]
    if any(isinstance(item, Busy | Begin) for item in items):
        assert corrected.alone_seconds(stretched) == pytest.approx(seconds, rel=1e-6)
    else:
        assert corrected.alone_seconds(stretched) == 0
    assert [item for item in stretched if isinstance(item, Half)] == [item for item in items if isinstance(item, Half)]


@pytest.mark.parametrize("spec", ["dp=4", "dp=2,tp=2", "pp=2,dp=2,micro=2"])
def test_a_step_follows_its_measured_segments(spec: str) -> None:
    built = program(spec)
    keys = {
        segment.key
        for stage in range(len(built.stages))
        for found in body_segments(tiny_blocks(), built, stage).values()
        for segment in found
    }
    parts = Prices(blocks=tiny_blocks(), cluster=cluster(shared=True), measured_links=True)
    slow = replace(parts, measured=dict.fromkeys(keys, 100.0), spreads=dict.fromkeys(keys, 1.0))
    slower = replace(slow, measured=dict.fromkeys(keys, 200.0))
    before, first, second = (simulate(built, prices) for prices in (parts, slow, slower))
    assert second.step_seconds - first.step_seconds >= 100.0, "on its way through the step at least one segment counts"
    assert "measured" in first.sources
    assert "measured" not in before.sources
    unused = replace(slow, measured_links=False)
    assert simulate(built, unused).step_seconds == simulate(built, replace(parts, measured_links=False)).step_seconds
