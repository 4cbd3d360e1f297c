"""Prices: loads on links, the store, measured before modelled, nothing unknown at zero."""

import multiprocessing as mp
import sqlite3
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planloom.cluster import Cluster, Device, Level, Link, exchange_seconds
from planloom.cluster.routes import wire_loads
from planloom.collective import Step
from planloom.cost import Price, Prices, PriceStore, collective_key, run_fingerprint, run_key
from planloom.cost.keys import exchange_key, memory_key
from planloom.errors import PriceError
from planloom.plan import named_plan, parse_named
from planloom.program import Program, Transfer, build_program
from tests.pure.tiny_graph import tiny_batch, tiny_blocks

LATENCY = 1e-6


def cluster(*, shared: bool, flops: dict[str, float] | None = None) -> Cluster:
    """Two nodes with two devices: 100 bytes a second between nodes, 1000 inside."""
    outer = Link(bandwidth_bytes_per_second=100, latency_seconds=LATENCY, shared=shared)
    inner = Link(bandwidth_bytes_per_second=1000, latency_seconds=LATENCY)
    device = Device(
        name="d",
        flops_per_second=flops or {"float32": 1e9},
        memory_bytes=1 << 30,
        memory_bytes_per_second=1e9,
        launch_seconds=1e-9,
    )
    levels = (Level(name="node", count=2, link=outer), Level(name="device", count=2, link=inner))
    return Cluster(name="c", levels=levels, device=device)


def program(spec: str) -> Program:
    return build_program(tiny_blocks(), named_plan(tiny_blocks(), parse_named(spec), batch=tiny_batch()))


def test_messages_inside_a_node_do_not_load_the_uplink() -> None:
    inside = exchange_seconds(cluster(shared=True), [(0, 1, 1000), (2, 3, 1000)])
    assert inside == pytest.approx(1.0, rel=1e-4)


def test_a_shared_uplink_carries_the_sum_and_own_uplinks_do_not() -> None:
    messages = [(0, 2, 100.0), (1, 3, 100.0)]
    assert exchange_seconds(cluster(shared=True), messages) == pytest.approx(2.0, rel=1e-4)
    assert exchange_seconds(cluster(shared=False), messages) == pytest.approx(1.0, rel=1e-4)


def test_both_directions_of_a_link_are_used_at_once() -> None:
    assert exchange_seconds(cluster(shared=True), [(0, 2, 100.0), (2, 0, 100.0)]) == pytest.approx(1.0, rel=1e-4)


def test_a_strided_all_reduce_costs_more_than_a_contiguous_one() -> None:
    prices = Prices(blocks=tiny_blocks(), cluster=cluster(shared=True))
    inside = prices.step(Step(kind="all_reduce", groups=((0, 1), (2, 3)), shape=(2,)), 1000).seconds
    across = prices.step(Step(kind="all_reduce", groups=((0, 2), (1, 3)), shape=(2,)), 1000).seconds
    assert across == pytest.approx(20 * inside, rel=1e-3)


def test_a_measured_run_is_preferred_and_says_so() -> None:
    built = program("dp=2")
    run = built.runs[0]
    prices = Prices(blocks=tiny_blocks(), cluster=cluster(shared=True))
    assert prices.run(built, run, "forward").source == "modelled"
    assert prices.run(built, run, "forward").seconds > 0
    key = run_key(run_fingerprint(tiny_blocks(), built, run), "forward")
    known = replace(prices, measured={key: 0.25})
    assert known.run(built, run, "forward").seconds == 0.25
    assert known.run(built, run, "forward").source == "measured"


def test_equal_local_work_has_one_fingerprint_and_other_shapes_another() -> None:
    halves, quarters = program("dp=2"), program("dp=4")
    prints = [run_fingerprint(tiny_blocks(), p, p.runs[0]) for p in (halves, program("dp=2,zero1"), quarters)]
    assert prints[0] == prints[1]
    assert prints[0] != prints[2]


def test_measured_collectives_are_interpolated_and_extended() -> None:
    step = Step(kind="all_reduce", groups=((0, 1), (2, 3)), shape=(2,))
    sizes = ((1000, 1.0), (3000, 3.0), (5000, 9.0))
    known = {collective_key("all_reduce", step.groups, n): s for n, s in sizes}
    prices = Prices(blocks=tiny_blocks(), cluster=cluster(shared=True), measured=known, measured_links=True)
    assert prices.step(step, 2000).seconds == pytest.approx(2.0)
    assert prices.step(step, 4000).seconds == pytest.approx(6.0)
    assert prices.step(step, 6000).seconds == pytest.approx(12.0)
    assert prices.step(step, 3000).source == "measured"
    across = Step(kind="all_reduce", groups=((0, 2), (1, 3)), shape=(2,))
    assert prices.step(across, 3000).source == "modelled", "other groups are other links"


def test_a_few_measured_bytes_are_no_price_of_many() -> None:
    step = Step(kind="all_reduce", groups=((0, 1), (2, 3)), shape=(2,))
    known = {collective_key("all_reduce", step.groups, 4): 1e-3}
    prices = Prices(blocks=tiny_blocks(), cluster=cluster(shared=True), measured=known, measured_links=True)
    assert 1e-3 <= prices.step(step, 8).seconds <= 2e-3
    alone = Prices(blocks=tiny_blocks(), cluster=cluster(shared=True))
    assert prices.step(step, 1 << 20) == alone.step(step, 1 << 20), "in proportion it would take four minutes"


@given(st.integers(1, 1 << 22), st.floats(0.01, 100), st.sampled_from(("step", "exchange", "memory")))
def test_below_the_least_measured_size_latency_and_bytes_count(num_bytes: int, factor: float, what: str) -> None:
    """Measured `factor` times the model at one size: below it the model's shape, never outside what bytes allow."""
    least, step = 1 << 22, Step(kind="all_reduce", groups=((0, 1), (2, 3)), shape=(2,))
    modelled = Prices(blocks=tiny_blocks(), cluster=cluster(shared=True))

    def price(prices: Prices, size: int) -> Price:
        box = ((0, size),)
        transfers = (Transfer(source=0, target=2, source_box=box, target_box=box),)
        by_name = {"step": partial(prices.step, step), "exchange": lambda n: prices.exchange(transfers, 1)}
        return by_name.get(what, prices.memory)(size)

    keys = {
        "step": collective_key("all_reduce", step.groups, least),
        "exchange": exchange_key(((0, 2),), least),
        "memory": memory_key(least),
    }
    at_least = factor * price(modelled, least).seconds
    prices = replace(modelled, measured={keys[what]: at_least}, measured_links=True)
    found = price(prices, num_bytes)
    assert at_least * num_bytes / least * (1 - 1e-9) <= found.seconds <= at_least * (1 + 1e-9)
    assert found.seconds == pytest.approx(factor * price(modelled, num_bytes).seconds, rel=1e-6)
    assert found.source == ("measured" if num_bytes == least else "modelled")
    assert found.uncertainty > 0


def test_a_model_that_contradicts_a_measurement_stays_between_its_bounds() -> None:
    """The cluster says latency alone; ten bytes of a thousand still take at most what a thousand took."""
    step = Step(kind="all_reduce", groups=((0, 1), (2, 3)), shape=(2,))
    known = {collective_key("all_reduce", step.groups, 1000): 1.0}
    prices = Prices(blocks=tiny_blocks(), cluster=cluster(shared=True), measured=known, measured_links=True)
    assert 0.01 <= prices.step(step, 10).seconds <= 1.0


def test_a_price_has_an_uncertainty_by_its_source() -> None:
    built = program("dp=2")
    key = run_key(run_fingerprint(tiny_blocks(), built, built.runs[0]), "forward")
    modelled = Prices(blocks=tiny_blocks(), cluster=cluster(shared=True))
    measured = replace(modelled, measured={key: 0.25}, spreads={key: 0.005})
    assert modelled.run(built, built.runs[0], "forward").uncertainty > 0.1
    assert measured.run(built, built.runs[0], "forward").uncertainty == pytest.approx(0.02)


def test_a_crossbars_exchange_is_that_of_its_routes() -> None:
    for shared in (True, False):
        machine = cluster(shared=shared)
        messages = [(0, 2, 100.0), (1, 3, 50.0), (0, 1, 10.0), (3, 0, 70.0)]
        loads = wire_loads(machine, messages)
        slowest = max(n / machine.levels[wire[0]].link.bandwidth_bytes_per_second for wire, n in loads.items())
        assert exchange_seconds(machine, messages) == pytest.approx(slowest + LATENCY, rel=1e-9)


def test_a_dtype_without_a_rate_is_an_error_not_a_guess() -> None:
    built = program("dp=2")
    prices = Prices(blocks=tiny_blocks(), cluster=cluster(shared=True, flops={"bfloat16": 1e9}))
    with pytest.raises(PriceError, match="has no rate for float32"):
        prices.run(built, built.runs[0], "forward")


def test_the_store_keeps_prices_by_device_and_software(tmp_path: Path) -> None:
    here = PriceStore(tmp_path / "a" / "prices.sqlite", device="cpu", software="1")
    here.save({"run/x/forward": (1.5, 0.1), "run/y/forward": (2.0, 0.0)})
    here.save({"run/x/forward": (1.25, 0.1)})
    assert here.load() == {"run/x/forward": 1.25, "run/y/forward": 2.0}
    assert PriceStore(tmp_path / "a" / "prices.sqlite", device="gpu", software="1").load() == {}
    assert PriceStore(tmp_path / "a" / "prices.sqlite", device="cpu", software="2").load() == {}


def save_many(path: Path, name: str) -> None:
    store = PriceStore(path, device="cpu", software="1")
    for i in range(20):
        store.save({f"{name}{i}": (float(i), 0.0)})


def test_several_processes_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "prices.sqlite"
    context = mp.get_context("spawn")
    writers = [context.Process(target=save_many, args=(path, name)) for name in ("a", "b")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=60)
        assert writer.exitcode == 0
    assert len(PriceStore(path, device="cpu", software="1").load()) == 40


def test_a_file_that_is_no_store_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prices.sqlite"
    path.write_text("not a database, but long enough to be looked at as one " * 20)
    with pytest.raises(PriceError, match="cannot be opened") as caught:
        PriceStore(path, device="cpu", software="1")
    assert isinstance(caught.value.__cause__, sqlite3.Error)
