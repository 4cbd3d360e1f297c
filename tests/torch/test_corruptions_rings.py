"""Corrupted rings: refused if and only if they mean something else."""

from functools import cache

import pytest

from tests.corruptions import FAMILIES, Corruption, repeat_message, shift_box, stretch_message
from tests.corruptions_rings import RINGS, rotate_the_other_way
from tests.judging import Outcome, judge_all, require_named, require_right

CASES = [
    ("llama", "context:cp=4"),
    ("gpt", "context:cp=2,dp=2,micro=2"),
    ("llama", "context:cp=4,zero3 again"),
    ("gpt", "context:cp=2,pp=2,micro=2"),
]
ABSENT = (shift_box, repeat_message, stretch_message)  # messages of these plans are whole arrays
ALL = [c for c in (*RINGS, *(c for family in FAMILIES.values() for c in family)) if c not in ABSENT]


@cache
def outcomes(corruption: Corruption, count: int) -> tuple[Outcome, ...]:
    return judge_all(CASES[:2] if count <= 4 else CASES, corruption, count)


@pytest.mark.parametrize("corruption", RINGS)
def test_refused_if_and_only_if_changed(corruption: Corruption) -> None:
    found = outcomes(corruption, 4)
    require_right(found)
    require_named(found)
    assert any(outcome.is_changed for outcome in found)


def test_of_two_devices_both_ways_are_one() -> None:
    found = [outcome for outcome in outcomes(rotate_the_other_way, 4) if outcome.place.startswith("gpt")]
    assert found
    assert not any(outcome.is_changed for outcome in found)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("corruption", ALL)
def test_many_corruptions(corruption: Corruption) -> None:
    found = outcomes(corruption, 12)
    require_right(found)
    require_named(found)
