"""A corrupted program, judged: what it means is for tests/emulation.py to say, whether it is refused for the verifier.

Labels are left out at random, so that no permutation of rows is a symmetry of the data.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

import pytest
import torch
from torch import Tensor

from planloom.blocks import BlockGraph, find_segments
from planloom.capture import batch_spec
from planloom.errors import VerificationError
from planloom.plan import find_named, named_plan
from planloom.program import Instruction, Program, build_program, verify_program
from tests.boundaries import Side, boundary_plan
from tests.corruptions import Corruption, Spot, respell
from tests.dist.cases import LEARNING_RATE, captured
from tests.emulation import BrokenError, Emulation, LocalRuns
from tests.models import build

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
        name, _, again = plan_name.partition(" ")
        segments = tuple(range(len(find_segments(blocks)))) if again else ()
        plan = replace(named_plan(blocks, find_named(name), batch=spec), recompute=segments)
    program = build_program(blocks, plan)
    if respelled:
        program = respell(program, Random(f"{model_name} {plan_name}"))
    labels = "labels" if "labels" in batch else "msa_labels"
    left_out = torch.rand(batch[labels].shape, generator=torch.Generator().manual_seed(3)) < 0.3
    return Case(
        blocks=blocks,
        program=program,
        batch={**batch, labels: batch[labels].masked_fill(left_out, -100)},
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


def require_right(found: tuple[Outcome, ...]) -> None:
    assert not [str(outcome) for outcome in found if CRASH in (outcome.refusal or "")]
    missed = [str(outcome) for outcome in found if outcome.is_changed and outcome.refusal is None]
    assert not missed, "accepted, though the meaning is changed"
    refused = [str(outcome) for outcome in found if not outcome.is_changed and outcome.refusal is not None]
    assert not refused, "refused, though the meaning is the same"


def require_named(found: tuple[Outcome, ...]) -> None:
    assert not [str(outcome) for outcome in found if outcome.refusal is not None and not outcome.says_where()]


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


def judge_all(cases: Sequence[tuple[str, str]], corruption: Corruption, count: int) -> tuple[Outcome, ...]:
    """So many random corruptions of a kind, of each of these models under its plan."""
    found = []
    for model_name, plan_name in cases:
        random = Random(f"{model_name} {plan_name} {corruption.__name__} {count}")
        outcomes = [judge(model_name, plan_name, corruption, random, number) for number in range(count)]
        found += [outcome for outcome in outcomes if outcome is not None]
    assert found
    return tuple(found)
