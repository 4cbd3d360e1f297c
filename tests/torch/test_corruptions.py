"""Corrupted programs: the verifier refuses those that mean something else, and accepts those that mean the same.

The judge is tests/emulation.py, which runs both programs on concrete float64 tensors. Labels are left out at random, so
that no permutation of rows is a symmetry of the data.
"""

import re
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random
from typing import get_args

import pytest
import torch
from torch import Tensor

from planloom.blocks import BlockGraph
from planloom.capture import batch_spec
from planloom.collective import Step, StepKind
from planloom.errors import VerificationError
from planloom.layout import Combine
from planloom.plan import named_plan, parse_named
from planloom.program import (
    Accumulate,
    Backward,
    Coalesced,
    Collective,
    Free,
    Instruction,
    Program,
    Send,
    Wait,
    build_program,
    verify_program,
)
from tests.boundaries import Side, boundary_plan
from tests.corruptions import (
    FAMILIES,
    Corruption,
    Spot,
    change,
    find,
    repeat_message,
    respell,
    stretch_message,
    with_body,
)
from tests.dist.cases import LEARNING_RATE, captured
from tests.emulation import BrokenError, Emulation, LocalRuns
from tests.models import build

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
]
"""`boundary`: two stages on 2 and 4 devices that split what crosses between them differently."""

CASES = [(model, plan) for model in ("gpt", "llama") for plan in PLANS]
EACH, EACH_SLOW = 7, 45
TOLERANCE = 1e-9
CRASH = "the verifier itself fails:"


Results = dict[tuple[str, int, str], Tensor]


@dataclass(frozen=True)
class Case:
    """A correct program and what it computes."""

    blocks: BlockGraph
    program: Program
    batch: dict[str, Tensor]
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    local_runs: LocalRuns = field(default_factory=dict)

    def run(self, program: Program) -> Results:
        emulation = Emulation(
            self.blocks, program, self.parameters, self.buffers, LEARNING_RATE, local_runs=self.local_runs
        )
        emulation.run(self.batch)
        return emulation.results()


@cache
def prepare(model_name: str, plan_name: str, *, respelled: bool) -> Case:
    model, batch = build(model_name, torch.float64)
    blocks, spec = captured(model_name, torch.float64), batch_spec(batch)
    if plan_name == "boundary":
        first, second = Side(devices=(1, 0), split="sequence"), Side(devices=(3, 5, 2, 4), split="batch and sequence")
        plan = boundary_plan(blocks, spec, first, second)
    else:
        plan = named_plan(blocks, parse_named(plan_name), batch=spec)
    program = build_program(blocks, plan)
    if respelled:
        program = respell(program, Random(f"{model_name} {plan_name}"))
    left_out = torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(3)) < 0.3
    return Case(
        blocks=blocks,
        program=program,
        batch={**batch, "labels": batch["labels"].masked_fill(left_out, -100)},
        parameters={name: parameter.detach() for name, parameter in model.named_parameters()},
        buffers=dict(model.named_buffers()),
    )


@cache
def expected(model_name: str, plan_name: str, *, respelled: bool) -> Results:
    case = prepare(model_name, plan_name, respelled=respelled)
    return case.run(case.program)


def difference(before: Results, after: Results) -> str:
    """What differs, or nothing. A gradient that is zero but for rounding is measured by the largest one."""
    largest = max(float(value.abs().max()) for (kind, *_), value in before.items() if kind == "gradient")
    for key in before.keys() | after.keys():
        if key not in before or key not in after or before[key].shape != after[key].shape:
            return f"{key} is there in one only, or has another shape"
        bound = TOLERANCE * max(float(before[key].abs().max()), 1e-6 * largest)
        if not float((after[key] - before[key]).abs().max()) <= bound:  # NaN is a difference
            return f"{key} differs"
    return ""


@dataclass(frozen=True)
class Outcome:
    """What a corruption did: to the meaning, if anything, and to the verifier."""

    place: str
    corruption: str
    number: int
    meaning: str
    refusal: str | None
    tensors: frozenset[str]

    @property
    def is_changed(self) -> bool:
        return bool(self.meaning)

    def __str__(self) -> str:
        changed, refused = self.meaning or "the same meaning", self.refusal or "accepted"
        return f"{self.place}: {self.corruption} {self.number}: {changed}; {refused}"

    def says_where(self) -> bool:
        """Does the refusal name a tensor, an instruction and a rank?"""
        text = self.refusal or ""
        words = set(re.findall(r"[\w.]+", text))
        return bool(words & self.tensors and re.search(r"instruction \d+", text) and re.search(r"\branks? \d+", text))


def judge(model_name: str, plan_name: str, corruption: Corruption, random: Random, number: int) -> Outcome | None:
    """One corruption, judged by the oracle and by the verifier; None where there is nothing to corrupt."""
    respelled = number % 2 == 1
    case = prepare(model_name, plan_name, respelled=respelled)
    program = corruption(case.program, random)
    if program is None or program == case.program:
        return None
    try:
        meaning = difference(expected(model_name, plan_name, respelled=respelled), case.run(program))
    except BrokenError as broken:
        meaning = f"broken: {broken}"
    try:
        verify_program(case.blocks, program)
        refusal = None
    except VerificationError as error:
        refusal = str(error)
    except Exception as error:  # a bug of the verifier's own, reported as a wrong refusal
        refusal = f"{CRASH} {error!r}"
    tensors = frozenset((*case.blocks.graph.tensors, "loss"))
    return Outcome(f"{model_name} {plan_name}", corruption.__name__, number, meaning, refusal, tensors)


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


def require_right(found: tuple[Outcome, ...]) -> None:
    assert not [str(outcome) for outcome in found if CRASH in (outcome.refusal or "")]
    missed = [str(outcome) for outcome in found if outcome.is_changed and outcome.refusal is None]
    assert not missed, "accepted, though the meaning is changed"
    refused = [str(outcome) for outcome in found if not outcome.is_changed and outcome.refusal is not None]
    assert not refused, "refused, though the meaning is the same"


def require_named(found: tuple[Outcome, ...]) -> None:
    assert not [str(outcome) for outcome in found if outcome.refusal is not None and not outcome.says_where()]


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
    """Or else some corruption would never be tried."""
    programs = [prepare(*case, respelled=respelled).program for case in CASES for respelled in (False, True)]
    found = {type(instruction) for program in programs for _, instruction in find(program, Instruction)}
    assert found == set(get_args(Instruction))
    steps = {step.kind for program in programs for _, c in find(program, Collective) for step in c.steps}
    assert steps == set(get_args(StepKind))


def test_both_verdicts_occur() -> None:
    """Every family changes meanings; those that can be neutral are so somewhere."""
    changed = {family for family in FAMILIES if any(o.is_changed for o in outcomes(family, EACH))}
    neutral = {family for family in FAMILIES if not all(o.is_changed for o in outcomes(family, EACH))}
    assert changed == set(FAMILIES)
    assert neutral >= set(FAMILIES) - {"a reduction left out", "a reduction done twice"}


# -- what such searches found: each is one of the corruptions above at a place of its own


def refusal_of(case: Case, program: Program) -> str:
    with pytest.raises(VerificationError) as caught:
        verify_program(case.blocks, program)
    return str(caught.value)


def is_changed(case: Case, program: Program) -> bool:
    try:
        return bool(difference(case.run(case.program), case.run(program)))
    except BrokenError:
        return True


def body_of(case: Case, spot: Spot) -> tuple[Instruction, ...]:
    return case.program.stages[spot.stage].bodies[spot.body]


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
