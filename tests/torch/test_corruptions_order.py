"""Corrupted orders and homes: refused if and only if they mean something else."""

from functools import cache

import pytest

from tests.corruptions import Corruption
from tests.corruptions_order import ORDER, move_call
from tests.judging import Outcome, judge_all, require_named, require_right

CASES = [
    ("gpt", "pp=2,micro=4,1f1b"),
    ("llama", "pp=2,dp=2,zero3,micro=2,gpipe"),
    ("gpt", "pp=2,micro=2,zb-v"),
    ("llama", "pp=2,micro=2,chimera"),
    ("gpt", "dp=4,zero3,micro=2"),
    ("zoo/t5", "interlaced:pp=2,micro=2"),
]
KINDS = [corruption for kind in ORDER.values() for corruption in kind]
EACH, EACH_SLOW = 6, 40


@cache
def outcomes(corruption: Corruption, count: int) -> tuple[Outcome, ...]:
    return judge_all(CASES, corruption, count)


@pytest.mark.parametrize("corruption", KINDS)
def test_refused_if_and_only_if_changed(corruption: Corruption) -> None:
    found = outcomes(corruption, EACH)
    require_right(found)
    require_named(found)
    assert any(outcome.is_changed for outcome in found)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("corruption", KINDS)
def test_many_corruptions(corruption: Corruption) -> None:
    found = outcomes(corruption, EACH_SLOW)
    require_right(found)
    require_named(found)


def test_other_orders_may_be_as_good() -> None:
    assert not all(outcome.is_changed for outcome in outcomes(move_call, EACH))


def test_a_cycle_is_said_to_be_one() -> None:
    refusals = [outcome.refusal for outcome in outcomes(move_call, EACH) if outcome.refusal is not None]
    assert any("deadlock" in refusal for refusal in refusals)
