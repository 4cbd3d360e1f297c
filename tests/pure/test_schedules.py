"""Schedules: valid for any number of stages and micro-batches, with the bubble of the closed form; refused if wrong."""

import json
import time
from dataclasses import replace
from fractions import Fraction
from itertools import permutations, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from planloom.cli.app import app
from planloom.cluster import load_cluster
from planloom.cost import Prices
from planloom.errors import PlanError, VerificationError
from planloom.plan import named_plan, parse_named
from planloom.plan.order_checks import require_orders, sends_may_lag
from planloom.plan.orders import Call, Orders, backward, forward, input_gradient, weight_gradient
from planloom.plan.schedule_search import search_order
from planloom.plan.schedules import ORDERS, orders_of, stages_per_group
from planloom.plan.timing import StageTimes, time_orders
from planloom.program import Program, build_program, verify_program
from planloom.simulate import simulate
from tests.pure.chain_graph import chain_batch, chain_blocks

WIDTHS = {name: (1, 2, 3) if name in ("interleaved", "looped") else (stages_per_group(name),) for name in ORDERS}


def made(name: str, groups: int, micro: int, width: int) -> tuple[Orders, int] | None:
    """The orders and the number of stages; None where the schedule refuses this many, with a reason."""
    try:
        return orders_of(name, groups * width, micro, per_group=width), groups * width
    except PlanError:
        assert name in ("chimera", "dualpipe-v")
        return None


@pytest.mark.parametrize(("name", "width"), [(name, width) for name, widths in WIDTHS.items() for width in widths])
@settings(max_examples=40, deadline=None)
@given(groups=st.integers(1, 7), micro=st.integers(1, 17))
def test_orders_are_valid_and_need_no_more_time_than_one_after_another(
    name: str, width: int, groups: int, micro: int
) -> None:
    found = made(name, groups, micro, width)
    if found is None:
        return
    orders, num_stages = found
    require_orders(orders, num_stages, micro)
    if name in ("gpipe", "1f1b", "zb-h1"):
        assert sends_may_lag(orders, num_stages)
    timed = time_orders(orders, [StageTimes()] * num_stages)
    work = num_stages * micro * (1 if name == "inference" else 3)
    assert timed.busy_seconds == work
    assert timed.seconds <= work


@given(
    groups=st.integers(1, 8),
    rounds=st.integers(1, 4),
    width=st.integers(2, 3),
    f=st.integers(1, 3),
    i=st.integers(1, 3),
)
def test_bubbles_are_the_closed_forms(groups: int, rounds: int, width: int, f: int, i: int) -> None:
    micro, times = groups * rounds, StageTimes(forward=f, input_gradient=i, weight_gradient=i)
    whole = f + 2 * i
    for name in ("gpipe", "1f1b"):
        timed = time_orders(orders_of(name, groups, micro), [times] * groups)
        assert timed.bubble == Fraction(groups - 1, micro + groups - 1)
    for name in ("interleaved", "looped"):
        timed = time_orders(orders_of(name, groups * width, micro, per_group=width), [times] * (groups * width))
        assert timed.seconds == width * micro * whole + (groups - 1) * whole
        assert timed.bubble == Fraction(groups - 1, width * micro + groups - 1)


@given(groups=st.integers(1, 8), micro=st.integers(1, 24))
def test_zero_bubbles_are_the_closed_forms(groups: int, micro: int) -> None:
    if micro >= groups:
        timed = time_orders(orders_of("zb-h1", groups, micro), [StageTimes()] * groups)
        assert timed.seconds == 3 * micro + (groups - 1), "(G − 1)(F + I − W)"
        assert max(timed.held) <= groups
    if micro >= 2 * groups:
        timed = time_orders(orders_of("zb-v", 2 * groups, micro), [StageTimes()] * (2 * groups))
        assert timed.seconds < 6 * micro + 2 * groups, "whatever the number of micro-batches"
        assert max(timed.held) <= 2 * groups


def test_chimera_is_shorter_than_1f1b_where_micro_batches_are_few() -> None:
    for groups, micro in ((4, 4), (4, 8), (8, 8)):
        both = [time_orders(orders_of(n, groups, micro), [StageTimes()] * groups) for n in ("chimera", "1f1b")]
        assert both[0].seconds < both[1].seconds


@pytest.mark.parametrize(
    ("name", "stages", "micro", "message"),
    [
        ("chimera", 3, 4, "even number"),
        ("chimera", 4, 3, "even number"),
        ("zb-v", 3, 4, "device groups of 2"),
        ("interleaved", 3, 4, "device groups of 2"),
        ("dualpipe-v", 8, 7, "two micro-batches a device group"),
        ("1f1b", 0, 4, "needs stages"),
        ("zigzag", 2, 2, "no schedule is named"),
    ],
)
def test_what_a_schedule_cannot_do_is_refused(name: str, stages: int, micro: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        orders_of(name, stages, micro)


F, B, G, W = forward, backward, input_gradient, weight_gradient


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (((F(0, 0), B(0, 0)), (F(1, 0),)), "called forward only, but it has gradients"),
        (((F(0, 0), B(0, 0), F(0, 0)), (F(1, 0), B(1, 0))), "every phase"),
        (((F(0, 0), G(0, 0)), (F(1, 0), B(1, 0))), "every phase"),
        (((F(0, 0), W(0, 0), G(0, 0)), (F(1, 0), B(1, 0))), "in a cycle"),
        (((B(0, 0), F(0, 0)), (F(1, 0), B(1, 0))), "in a cycle"),
        (((F(0, 0), B(1, 0)), (F(1, 0), B(0, 0))), "on two device groups"),
        (((F(0, 0), B(0, 0)), (F(2, 0), B(2, 0))), "what is not there"),
    ],
)
def test_wrong_orders_are_refused(orders: Orders, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        require_orders(orders, 2, 1)


def test_a_bound_on_what_is_held() -> None:
    require_orders(orders_of("1f1b", 4, 8), 4, 8, max_held=4)
    with pytest.raises(PlanError, match=r"(?s)group 0 would hold.*8 micro-batches.*at most 4"):
        require_orders(orders_of("gpipe", 4, 8), 4, 8, max_held=4)


def test_an_order_whose_sends_must_not_be_awaited_early() -> None:
    """A group makes all cotangents of its second stage before the other one receives any: it awaits them at the end."""
    assert not sends_may_lag(orders_of("looped", 4, 6), 4)
    blocks = chain_blocks(5, batch=6)
    plan = named_plan(blocks, parse_named("pp=2,micro=6,looped"), batch=chain_batch(6))
    assert verify_program(blocks, build_program(blocks, plan)).num_messages > 0


def program(schedule: str, groups: int, micro: int) -> tuple[Any, Program]:
    width = stages_per_group(schedule)
    blocks = chain_blocks(groups * width + 1, batch=micro)
    plan = named_plan(blocks, parse_named(f"pp={groups},micro={micro},{schedule}"), batch=chain_batch(micro))
    return blocks, build_program(blocks, plan)


@pytest.mark.parametrize("schedule", list(ORDERS))
def test_many_micro_batches_are_verified_by_a_few_of_each_kind(schedule: str) -> None:
    """As many messages and instructions as there are, whether or not they are looked at one by one."""
    blocks, few = program(schedule, 4, 8)
    blocks_of_many, many = program(schedule, 4, 40)
    assert verify_program(blocks, few).num_messages < verify_program(blocks_of_many, many).num_messages
    proof = verify_program(blocks_of_many, many)
    assert proof.num_instructions == sum(len(s.bodies[c.body]) for s in many.stages for c in s.calls)


def changed(program: Program, stage: int, calls: Any) -> Program:
    stages = list(program.stages)
    stages[stage] = replace(stages[stage], calls=tuple(calls))
    return replace(program, stages=tuple(stages))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved", "chimera"])
@pytest.mark.parametrize("micro", [8, 40])
def test_corrupted_calls_are_refused(schedule: str, micro: int) -> None:
    """A stale micro-batch, a call that is missing or comes twice, a cycle; of many micro-batches in their midst."""
    blocks, built = program(schedule, 4, micro)
    calls = built.stages[1].calls
    places = [i for i, call in enumerate(calls) if call.micro == micro // 2 and "receives" not in call.body]
    at = places[0]
    stale = [replace(c, micro=c.micro - 1) if i == at else c for i, c in enumerate(calls)]
    missing = [c for i, c in enumerate(calls) if i != at]
    twice = [*calls[: at + 1], *calls[at:]]
    backwards_first = [*calls[:at], calls[places[-1]], *calls[at : places[-1]], *calls[places[-1] + 1 :]]
    for wrong in (stale, missing, twice, backwards_first):
        with pytest.raises(VerificationError):
            verify_program(blocks, changed(built, 1, wrong))


def test_receives_start_before_what_the_call_before_sends() -> None:
    """A weight-gradient exchanges nothing: what the forward behind it receives starts before the input-gradient."""
    _, built = program("zb-h1", 4, 8)
    calls = [(call.body, call.micro) for call in built.stages[2].calls]
    first = calls.index(("forward receives", 4))
    assert calls[first : first + 6] == [
        ("forward receives", 4),
        ("input-gradient", 2),
        ("weight-gradient", 0),
        ("input-gradient receives", 3),
        ("forward", 4),
        ("forward receives", 5),
    ]


def test_a_wrong_home_is_refused() -> None:
    """A call of a stage on a group that has neither its parameters nor its activations."""
    blocks, built = program("interleaved", 2, 4)
    bodies = built.stages[0].bodies
    other = {name: built.stages[1].bodies.get(name, body) for name, body in bodies.items()}
    names = sorted(name for name in bodies if name.startswith("forward of"))
    theirs = sorted(name for name in built.stages[1].bodies if name.startswith("forward of"))
    other[names[0]] = built.stages[1].bodies[theirs[0]]
    stages = (replace(built.stages[0], bodies=other), built.stages[1])
    with pytest.raises(VerificationError):
        verify_program(blocks, replace(built, stages=stages))


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_64_stages_and_1024_micro_batches(schedule: str) -> None:
    started = time.process_time()
    blocks, built = program(schedule, 64, 1024)
    verify_program(blocks, built)
    prices = Prices(blocks=blocks, cluster=load_cluster("dgx-h100", num_outer=8))
    assert simulate(built, prices, with_events=False).step_seconds > 0
    assert time.process_time() - started < 10


# --- search ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 1, 1), (1, 2, 1)])
def test_the_search_is_exact_for_two_stages_and_two_micro_batches(times: tuple[int, int, int]) -> None:
    """Against all orders."""
    of_stage = StageTimes(forward=times[0], input_gradient=times[1], weight_gradient=times[2])
    orders, note = search_order([of_stage] * 2, 2)
    pieces = [[phase(s, m) for m in (0, 1) for phase in (F, G, W)] for s in (0, 1)]
    shortest = None
    for pair in product(*(map(tuple, _in_order(piece)) for piece in pieces)):
        try:
            seconds = time_orders(pair, [of_stage] * 2).seconds
        except PlanError:
            continue
        shortest = seconds if shortest is None else min(shortest, seconds)
    assert time_orders(orders, [of_stage] * 2).seconds == shortest
    assert "no order is shorter" in note


def _in_order(calls: list[Call]) -> list[list[Call]]:
    """All orders of six calls in which a micro-batch's forward, input- and weight-gradient follow each other."""
    found = []
    for order in permutations(calls):
        place = {(c.phase, c.micro): i for i, c in enumerate(order)}
        if all(place["forward", m] < place["input-gradient", m] < place["weight-gradient", m] for m in (0, 1)):
            found.append(list(order))
    return found


def test_the_search_beats_what_is_ready_made_where_stages_are_uneven() -> None:
    times = [StageTimes(forward=2), StageTimes(), StageTimes(input_gradient=3)]
    orders, note = search_order(times, 3)
    found = time_orders(orders, times).seconds
    assert found <= min(time_orders(orders_of(n, 3, 3), times).seconds for n in ("1f1b", "zb-h1"))
    require_orders(orders, 3, 3)
    assert "zb-h1" in note


def test_a_case_that_is_too_large_is_refused() -> None:
    with pytest.raises(PlanError, match=r"too large"):
        search_order([StageTimes()] * 8, 8)


# --- command line ----------------------------------------------------------------------------------------------------


def run(*words: str) -> str:
    result = CliRunner().invoke(app, ["schedule", *words])
    assert result.exit_code == 0, result.output
    return result.output


def test_the_command_draws_a_row_for_every_group() -> None:
    text = run("1f1b", "--stages", "4", "--micro", "8")
    assert [line.split()[1] for line in text.splitlines() if line.startswith("group")] == ["0", "1", "2", "3"]
    assert "bubble 27.3%" in text


def test_the_command_as_json_and_as_a_picture(tmp_path: Path) -> None:
    out = tmp_path / "schedule.svg"
    document = json.loads(run("zb", "--stages", "3", "--micro", "4", "--json", "--picture", str(out)))
    assert document["schedule"] == "zb-h1"
    assert document["bubble"] == pytest.approx(2 / 14)
    assert sum(map(len, document["groups"])) == document["num_calls"] == 36
    assert out.read_text().count("<title>") == 36


def test_the_command_searches_and_refuses() -> None:
    assert "no order is shorter: 14" in run("search", "--stages", "3", "--micro", "4")
    for words in (("chimera", "--stages", "3"), ("1f1b", "--times", "1,2"), ("gpipe", "--max-held", "2")):
        assert isinstance(CliRunner().invoke(app, ["schedule", *words]).exception, PlanError)
