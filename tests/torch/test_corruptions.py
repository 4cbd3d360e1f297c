"""Corrupted programs: the verifier refuses those that mean something else, and accepts those that mean the same.

The judge is tests/emulation.py, which runs both programs on concrete float64 tensors. Labels are left out at random, so
that no permutation of rows is a symmetry of the data.
"""

from dataclasses import replace
from functools import cache
from random import Random
from typing import get_args

import pytest

from planloom.collective import Step, StepKind
from planloom.layout import Combine
from planloom.program import (
    Accumulate,
    Backward,
    Coalesced,
    Collective,
    Free,
    Instruction,
    Put,
    Send,
    Take,
    Wait,
    verify_program,
)
from tests.corruptions import FAMILIES, change, find, repeat_message, stretch_message, with_body
from tests.judging import (
    Outcome,
    body_of,
    difference,
    expected,
    is_changed,
    judge,
    prepare,
    refusal_of,
    require_named,
    require_right,
)

PLANS = [
    "dp=2,tp=2,vocab",
    "tp=2,tp2=2,vocab",
    "tp=4,sequence,vocab",
    "dp=4,zero3,micro=2",
    "dp=2,zero1",
    "pp=2,tp=2,micro=4,1f1b",
    "pp=2,dp=2,zero3,micro=2,gpipe",
    "pp=2,tp=2,vocab,sequence,micro=2,1f1b",
    "boundary",
    "pp=2,micro=2,zb-v",
    "pp=2,dp=2,zero2,micro=2,zb-h1",
    "pp=2,micro=2,chimera",
]
"""`boundary`: two stages on 2 and 4 devices that split what crosses between them differently."""

CASES = [(model, plan) for model in ("gpt", "llama") for plan in PLANS]
EACH, EACH_SLOW = 7, 45


@cache
def outcomes(family: str, count: int) -> tuple[Outcome, ...]:
    """Random corruptions of every program, in turn of the program as built and of a longer spelling of it."""
    found = []
    for model_name, plan_name in CASES:
        random = Random(f"{model_name} {plan_name} {family} {count}")
        for number in range(count):
            outcome = None
            for corruption in random.sample(FAMILIES[family], len(FAMILIES[family])):
                outcome = outcome or judge(model_name, plan_name, corruption, random, number)
            found += [] if outcome is None else [outcome]
    assert len(found) >= count * len(CASES) // 3, "the corruption hardly applies to these programs"
    return tuple(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_refused_if_and_only_if_changed(family: str) -> None:
    require_right(outcomes(family, EACH))


@pytest.mark.parametrize("family", FAMILIES)
def test_refusals_name_tensor_instruction_and_ranks(family: str) -> None:
    require_named(outcomes(family, EACH))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
def test_many_corruptions(family: str) -> None:
    require_right(outcomes(family, EACH_SLOW))
    require_named(outcomes(family, EACH_SLOW))


@pytest.mark.parametrize(("model", "plan"), CASES)
def test_longer_spellings_are_accepted(model: str, plan: str) -> None:
    case = prepare(model, plan, respelled=True)
    verify_program(case.blocks, case.program)
    assert not difference(expected(model, plan, respelled=False), expected(model, plan, respelled=True))


def test_every_instruction_and_step_occurs() -> None:
    """Or else some corruption would never be tried. Time axes and rings have tests of their own."""
    programs = [prepare(*case, respelled=respelled).program for case in CASES for respelled in (False, True)]
    found = {type(instruction) for program in programs for _, instruction in find(program, Instruction)}
    assert found == set(get_args(Instruction)) - {Take, Put}
    steps = {step.kind for program in programs for _, c in find(program, Collective) for step in c.steps}
    assert steps == set(get_args(StepKind)) - {"rotate"}


def test_both_verdicts_occur() -> None:
    """Every family changes meanings; those that can be neutral are so somewhere."""
    changed = {family for family in FAMILIES if any(o.is_changed for o in outcomes(family, EACH))}
    neutral = {family for family in FAMILIES if not all(o.is_changed for o in outcomes(family, EACH))}
    assert changed == set(FAMILIES)
    assert neutral >= set(FAMILIES) - {"a reduction left out", "a reduction done twice"}


# -- what such searches found: each is one of the corruptions above at a place of its own


def test_a_gathered_parameter_is_freed_before_the_backward_that_needs_it() -> None:
    case = prepare("gpt", "dp=4,zero3,micro=2", respelled=False)
    name = "layers.0.up.weight"
    gathers = next(p.gathers for p in case.program.stages[0].parameters if p.name == name)
    spot = next(s for s, i in find(case.program, Free) if s.body == "backward" and i.buffer in gathers)
    backward = max(s.index for s, _ in find(case.program, Backward) if s.index < spot.index)
    body = list(body_of(case, spot))
    body.insert(backward, body.pop(spot.index))
    program = with_body(case.program, spot, tuple(body))
    assert is_changed(case, program)
    assert name in refusal_of(case, program)


@pytest.mark.parametrize("body", ["forward", "backward"])
def test_parameters_are_gathered_on_one_device_only(body: str) -> None:
    case = prepare("gpt", "dp=4,zero3,micro=2", respelled=False)
    spot, gathers = next((s, c) for s, c in find(case.program, Coalesced) if s.body == body and not c.takes_sources)
    last = gathers.collectives[0].steps[-1]
    mask = Step(kind="mask", groups=last.groups, shape=last.shape)
    masked = tuple(replace(gather, steps=(*gather.steps, mask)) for gather in gathers.collectives)
    program = change(case.program, spot, replace(gathers, collectives=masked))
    assert is_changed(case, program)
    refusal = refusal_of(case, program)
    assert any(gather.tensor in refusal for gather in gathers.collectives)


def test_a_gradient_is_reduced_before_the_last_part_was_added() -> None:
    case = prepare("gpt", "dp=2,tp=2,vocab", respelled=False)
    spot, bucket = next((s, c) for s, c in find(case.program, Coalesced) if s.body == "last backward")
    sources = {collective.source for collective in bucket.collectives}
    body = list(body_of(case, spot))
    last = max(i for i in range(spot.index) if isinstance(body[i], Accumulate) and body[i].target in sources)
    body.insert(last, body.pop(spot.index))
    program = with_body(case.program, spot, tuple(body))
    assert is_changed(case, program)
    refusal_of(case, program)


def test_stored_parameters_are_taken_by_a_gather() -> None:
    case = prepare("gpt", "dp=4,zero3,micro=2", respelled=False)
    spot, gathers = next((s, c) for s, c in find(case.program, Coalesced) if not c.takes_sources)
    program = change(case.program, spot, replace(gathers, takes_sources=True))
    assert is_changed(case, program)
    refusal_of(case, program)


def test_one_half_of_a_tensor_arrives_twice_and_the_other_never() -> None:
    case = prepare("gpt", "pp=2,tp=2,vocab,sequence,micro=2,1f1b", respelled=False)
    program = repeat_message(case.program, Random(0))
    assert program is not None
    assert is_changed(case, program)
    refusal_of(case, program)


def test_a_message_is_larger_than_the_room_for_it() -> None:
    case = prepare("gpt", "boundary", respelled=False)
    program = stretch_message(case.program, Random(0))
    assert program is not None
    assert is_changed(case, program)
    refusal_of(case, program)


def test_messages_between_other_devices_may_come_in_any_order() -> None:
    case = prepare("gpt", "pp=2,tp=2,micro=4,1f1b", respelled=False)
    spot, send = find(case.program, Send)[0]
    program = change(case.program, spot, replace(send, transfers=send.transfers[::-1]))
    assert not is_changed(case, program)
    verify_program(case.blocks, program)


@pytest.mark.parametrize(("was", "becomes"), [("sum", "max"), ("max", "sum")])
def test_a_sum_is_not_a_maximum(was: Combine, becomes: Combine) -> None:
    case = prepare("gpt", "dp=2,tp=2,vocab", respelled=False)
    spot, found = next((s, c) for s, c in find(case.program, Collective) if c.steps[0].combine == was)
    program = change(case.program, spot, replace(found, steps=(replace(found.steps[0], combine=becomes),)))
    assert is_changed(case, program)
    assert found.tensor in refusal_of(case, program)


def test_the_result_of_a_collective_is_read_before_its_wait() -> None:
    case = prepare("gpt", "dp=2,tp=2,vocab", respelled=False)
    collective = next(i for s, i in find(case.program, Collective) if s.body == "forward")
    waits = (s for s, i in find(case.program, Wait) if s.body == "forward" and i.buffer == collective.target)
    program = change(case.program, next(waits))
    assert is_changed(case, program)
    assert collective.tensor in refusal_of(case, program)


def test_a_wrong_loss_names_the_instruction_that_made_it() -> None:
    case = prepare("gpt", "dp=2,zero1", respelled=False)
    loss = case.blocks.graph.loss
    spot, reduction = next((s, c) for s, c in find(case.program, Collective) if c.tensor == loss)
    program = change(case.program, spot, replace(reduction, steps=()))
    assert is_changed(case, program)
    assert f"instruction {spot.index}" in refusal_of(case, program)
