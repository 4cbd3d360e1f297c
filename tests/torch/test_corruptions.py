"""Corrupted programs: the verifier refuses those that mean something else, and accepts those that mean the same.

The judge is tests/emulation.py, which runs both programs on concrete float64 tensors. Labels are left out at random, so that
no permutation of rows is a symmetry of the data.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import get_args

import pytest
import torch
from torch import Tensor

from planloom.blocks import BlockGraph
from planloom.capture import batch_spec
from planloom.collective import StepKind
from planloom.errors import VerificationError
from planloom.plan import named_plan, parse_named
from planloom.program import Collective, Instruction, Program, build_program, verify_program
from tests.boundaries import Side, boundary_plan
from tests.corruptions import FAMILIES, Corruption, find, respell
from tests.dist.cases import LEARNING_RATE, captured
from tests.emulation import Broken, Emulation, LocalRuns
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
EACH, EACH_SLOW = 8, 60
TOLERANCE = 1e-9
CRASH = "the verifier itself fails:"


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """The tensors are so small that a second thread only costs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    """The first result that differs, or nothing. A gradient that is zero but for rounding is measured by the largest."""
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
        return f"{self.corruption} {self.number}: {changed}; {refused}"

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
    except Broken as broken:
        meaning = f"broken: {broken}"
    try:
        verify_program(case.blocks, program)
        refusal = None
    except VerificationError as error:
        refusal = str(error)
    except Exception as error:  # a bug of the verifier's own, reported as a wrong refusal
        refusal = f"{CRASH} {error!r}"
    tensors = frozenset((*case.blocks.graph.tensors, "loss"))
    return Outcome(corruption.__name__, number, meaning, refusal, tensors)


@cache
def outcomes(model_name: str, plan_name: str, family: str, count: int) -> tuple[Outcome, ...]:
    """Random corruptions of a family, in turn on the program as built and on a longer spelling of it."""
    random = Random(f"{model_name} {plan_name} {family} {count}")
    found = []
    for number in range(count):
        outcome = None
        for corruption in random.sample(FAMILIES[family], len(FAMILIES[family])):
            outcome = outcome or judge(model_name, plan_name, corruption, random, number)
        found += [] if outcome is None else [outcome]
    return tuple(found)


def applied(model_name: str, plan_name: str, family: str, count: int) -> tuple[Outcome, ...]:
    found = outcomes(model_name, plan_name, family, count)
    if not found:
        pytest.skip(f"nothing to corrupt: the program has no place for {family}")
    return found


def require_right(found: tuple[Outcome, ...]) -> None:
    missed = [str(outcome) for outcome in found if outcome.is_changed and outcome.refusal is None]
    refused = [str(outcome) for outcome in found if not outcome.is_changed and outcome.refusal is not None]
    crashed = [str(outcome) for outcome in found if CRASH in (outcome.refusal or "")]
    assert not crashed
    assert not missed, "accepted, though the meaning is changed"
    assert not refused, "refused, though the meaning is the same"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("model", "plan"), CASES)
def test_refused_if_and_only_if_changed(model: str, plan: str, family: str) -> None:
    require_right(applied(model, plan, family, EACH))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("model", "plan"), CASES)
def test_refusals_name_tensor_instruction_and_ranks(model: str, plan: str, family: str) -> None:
    refused = [outcome for outcome in applied(model, plan, family, EACH) if outcome.refusal is not None]
    assert not [str(outcome) for outcome in refused if not outcome.says_where()]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("model", "plan"), CASES)
def test_many_corruptions(model: str, plan: str, family: str) -> None:
    found = applied(model, plan, family, EACH_SLOW)
    require_right(found)
    assert not [str(outcome) for outcome in found if outcome.refusal is not None and not outcome.says_where()]


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
    changed, neutral = set(), set()
    for family in FAMILIES:
        for model, plan in CASES:
            for outcome in outcomes(model, plan, family, EACH):
                (changed if outcome.is_changed else neutral).add(family)
    assert changed == set(FAMILIES)
    assert neutral >= {"ranks swapped in a group", "a wrong slice", "swapped sends", "an early free"}
