"""Corrupted recomputations: refused if and only if they mean something else."""

from functools import cache
from random import Random

import pytest

from planloom.program import Buffer, Forward, Free, Instruction
from planloom.program.free import reads
from tests.corruptions import FAMILIES, Corruption, find, with_body
from tests.corruptions_recompute import RECOMPUTATIONS, keep_one_for_all_micro_batches, recompute_from_forward
from tests.judging import (
    Outcome,
    body_of,
    is_changed,
    judge_all,
    prepare,
    refusal_of,
    require_named,
    require_right,
)

RECOMPUTED = [
    "dp=2,tp=2,vocab,micro=2 again",
    "dp=2,zero3,micro=2 again",
    "pp=2,tp=2,sequence,vocab,micro=2,1f1b again",
    "pp=2,micro=4,gpipe again",
]
"""With every segment recomputed."""
ALL = dict.fromkeys((*RECOMPUTATIONS, *(corruption for family in FAMILIES.values() for corruption in family)))


@cache
def outcomes_again(corruption: Corruption, count: int) -> tuple[Outcome, ...]:
    """Random corruptions of programs that recompute everything."""
    return judge_all([(model, plan) for model in ("gpt", "llama") for plan in RECOMPUTED], corruption, count)


@pytest.mark.parametrize("corruption", RECOMPUTATIONS)
def test_recomputations_are_refused_if_and_only_if_changed(corruption: Corruption) -> None:
    found = outcomes_again(corruption, 2)
    require_right(found)
    require_named(found)
    assert any(outcome.is_changed for outcome in found)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("corruption", ALL)
def test_many_corruptions_of_recomputations(corruption: Corruption) -> None:
    found = outcomes_again(corruption, 12)
    require_right(found)
    require_named(found)


def test_a_recomputation_that_is_missing_is_missed_by_its_backward() -> None:
    """The last of a segment, whose results nobody reads: only its backward can tell."""
    case = prepare("gpt", "dp=2,tp=2,vocab,micro=2 again", respelled=False)
    read = {b for stage in case.program.stages for i in stage.bodies["backward"] for b in _sources(i)}
    found = ((s, f) for s, f in find(case.program, Forward) if f.again and not read.intersection(f.outputs))
    spot, forward = next(found)
    frees = [Free(buffer=buffer) for buffer in forward.outputs]
    program = with_body(case.program, spot, tuple(i for i in body_of(case, spot) if i != forward and i not in frees))
    assert is_changed(case, program)
    assert "the backward of a run has no forward before it that saved" in refusal_of(case, program)


def _sources(instruction: Instruction) -> tuple[Buffer, ...]:
    """What an instruction reads, but for frees."""
    return () if isinstance(instruction, Free) else reads(instruction)


def test_a_recomputation_reads_a_buffer_that_the_forward_has_freed() -> None:
    case = prepare("gpt", "dp=2,tp=2,vocab,micro=2 again", respelled=False)
    program = recompute_from_forward(case.program, Random(0))
    assert program is not None
    assert is_changed(case, program)
    assert "read before it is written or after it was freed" in refusal_of(case, program)


def test_what_enters_a_segment_is_of_the_micro_batch_that_is_recomputed() -> None:
    case = prepare("gpt", "micro=2,gpipe again", respelled=False)
    program = keep_one_for_all_micro_batches(case.program, Random(0))
    assert program is not None
    assert is_changed(case, program)
    assert "needs it at" in refusal_of(case, program)
