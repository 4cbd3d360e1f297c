"""Plans that prices cannot tell apart are tried out, and no others."""

from collections.abc import Sequence
from typing import Any, cast

from planloom.plan import Plan
from planloom.search import Candidate, settle
from planloom.simulate import Timeline


class _Named:
    """A plan and a timeline as far as `settle` looks at them."""

    def __init__(self, name: str, step_seconds: float) -> None:
        self.name, self.step_seconds = name, step_seconds


def _candidate(name: str, seconds: float, *, fits: bool = True) -> Candidate:
    of: Any = _Named(name, seconds)
    return Candidate(name=name, placement="", plan=cast(Plan, of), timeline=cast(Timeline, of), fits=fits)


def test_near_plans_are_ordered_by_their_measured_steps() -> None:
    ranked = [_candidate("a", 1.0), _candidate("b", 1.1), _candidate("c", 1.3), _candidate("d", 1.05, fits=False)]
    asked: list[str] = []

    def try_out(plans: Sequence[Plan]) -> list[float]:
        asked.extend(plan.name for plan in plans)
        return [2.0 if plan.name == "a" else 1.0 for plan in plans]

    settled, seconds = settle(ranked, try_out)
    assert asked == ["a", "b"]
    assert [candidate.name for candidate in settled] == ["b", "a", "c", "d"]
    assert list(seconds.values()) == [1.0, 2.0]


def test_a_plan_that_is_clearly_the_best_is_not_tried_out() -> None:
    def try_out(plans: Sequence[Plan]) -> list[float]:
        raise AssertionError("nothing to tell apart")

    ranked = [_candidate("a", 1.0), _candidate("b", 1.2)]
    assert settle(ranked, try_out) == (tuple(ranked), {})
