"""Corrupted loops: refused if and only if they mean something else."""

from dataclasses import replace
from functools import cache
from random import Random

import pytest

from planloom.program import Forward, Put, verify_program
from tests.corruptions import FAMILIES, Corruption, change, find, repeat_message
from tests.corruptions_time import LOOPS, count_a_piece_twice, miss_a_piece, put_elsewhere, take_another_piece
from tests.judging import Case, Outcome, is_changed, judge_all, prepare, refusal_of, require_named, require_right

PLANS = [
    "coshard:tp=2,pieces=2",
    "coshard:dp=2,pp=2,micro=2,pieces=2,samples,no-recompute",
    "coshard:tp=2,pieces=2,no-recompute again",
    "atp:d1=2,d2=2,chunks=2",
]
"""Pieces and chunks, recomputed by themselves or with their segment."""
ALL = dict.fromkeys((*LOOPS, *(corruption for family in FAMILIES.values() for corruption in family)))
del ALL[repeat_message]  # no device of these plans receives two messages of one tensor


@cache
def outcomes_in_pieces(corruption: Corruption, count: int) -> tuple[Outcome, ...]:
    return judge_all([(model, plan) for model in ("gpt", "llama") for plan in PLANS], corruption, count)


@pytest.mark.parametrize("corruption", LOOPS)
def test_loops_are_refused_if_and_only_if_changed(corruption: Corruption) -> None:
    found = outcomes_in_pieces(corruption, 2)
    require_right(found)
    require_named(found)
    assert any(outcome.is_changed for outcome in found)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("corruption", ALL)
def test_many_corruptions_of_loops(corruption: Corruption) -> None:
    found = outcomes_in_pieces(corruption, 12)
    require_right(found)
    require_named(found)


def first_refusal(case: Case, corruption: Corruption) -> str:
    """Why the first of random corruptions that changes something is refused."""
    for seed in range(40):
        program = corruption(case.program, Random(seed))
        if program is not None and program != case.program and is_changed(case, program):
            return refusal_of(case, program)
    raise AssertionError("nothing changes the meaning")


@pytest.mark.parametrize(
    ("corruption", "words"),
    [
        (take_another_piece, "needs it at"),
        (miss_a_piece, "is given an incomplete value"),
        (put_elsewhere, "read before it is written"),
        (count_a_piece_twice, "is counted twice"),
    ],
)
def test_what_is_wrong_is_said(corruption: Corruption, words: str) -> None:
    assert words in first_refusal(prepare("gpt", "coshard:tp=2,pieces=2", respelled=False), corruption)


def test_a_piece_that_is_put_twice_is_there_once() -> None:
    case = prepare("gpt", "coshard:tp=2,pieces=2,samples", respelled=False)
    spot, put = find(case.program, Put)[0]
    program = change(case.program, spot, put, put)
    assert not is_changed(case, program)
    verify_program(case.blocks, program)


def test_a_run_in_another_moment_is_refused() -> None:
    case = prepare("gpt", "coshard:tp=2,pieces=2", respelled=False)
    spot, forward = next((s, f) for s, f in find(case.program, Forward) if case.program.runs[f.run].moment)
    run = case.program.runs[forward.run]
    (other,) = [r for r in case.program.runs if r.blocks == run.blocks and r.moment != run.moment]
    assert "needs it at" in refusal_of(case, change(case.program, spot, replace(forward, run=other.index)))
