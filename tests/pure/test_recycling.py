"""3F1B: valid for any sizes, as short as any order can be, held against all orders of small cases; refused if wrong."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from planloom.cli.app import app
from planloom.errors import PlanError
from planloom.plan.order_checks import require_orders
from planloom.plan.orders import Call, Orders, backward, forward
from planloom.plan.schedules import num_passes, orders_of, stages_per_group
from planloom.plan.timing import StageTimes, makes, needs, time_orders


def recycled(groups: int, micro: int, passes: int) -> Orders:
    return orders_of("3f1b", groups * passes, micro, per_group=passes)


@given(groups=st.integers(1, 7), micro=st.integers(1, 17), passes=st.integers(1, 5))
def test_orders_are_valid_and_hold_little(groups: int, micro: int, passes: int) -> None:
    orders = recycled(groups, micro, passes)
    require_orders(
        orders, groups * passes, micro, detached=frozenset(range(groups * (passes - 1))), max_held=3 * groups
    )
    if micro % groups == 0:
        assert max(time_orders(orders, [StageTimes()] * groups * passes).held) < 2 * groups


@given(
    groups=st.integers(1, 8),
    more=st.integers(0, 24),
    passes=st.integers(1, 5),
    f=st.integers(1, 5),
    i=st.integers(1, 5),
)
def test_the_bubble_is_the_closed_form_and_no_order_has_less(
    groups: int, more: int, passes: int, f: int, i: int
) -> None:
    """No group has fewer: the last begins after (G − 1) F, and what it does last takes (G − 1) B to the first."""
    micro, times = groups + more, StageTimes(forward=f, input_gradient=i, weight_gradient=i)
    timed = time_orders(recycled(groups, micro, passes), [times] * groups * passes)
    work = micro * (passes * f + 2 * i)
    assert timed.seconds == work + (groups - 1) * (f + 2 * i)
    assert timed.bubble == 1 - Fraction(work, timed.seconds)


def test_one_pass_is_1f1b() -> None:
    for groups, micro in product(range(1, 6), range(1, 12)):
        times = [StageTimes()] * groups
        assert (
            time_orders(recycled(groups, micro, 1), times).seconds
            == time_orders(orders_of("1f1b", groups, micro), times).seconds
        )


def shortest(groups: int, micro: int, times: Sequence[StageTimes]) -> int:
    """The least seconds of all orders that let micro-batches follow each other, by dynamic programming over states.

    A state is how many calls of each stage and phase are done, and when; one that is late everywhere is dropped.
    """
    stages = len(times)
    first = stages - groups
    lines = [[(s, "forward") for s in range(g, stages, groups)] + [(first + g, "backward")] for g in range(groups)]
    keys = [key for line in lines for key in line]
    best: dict[tuple[int, ...], set[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]]
    best = {(0,) * len(keys): {((0,) * groups, ((),) * len(keys))}}
    for _ in range(micro * len(keys)):
        following: dict[tuple[int, ...], set[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]] = {}
        for counts, states in best.items():
            for number, (stage, phase) in enumerate(keys):
                at = counts[number]
                call = forward(stage, at) if phase == "forward" else backward(stage, at)
                if at == micro:
                    continue
                wanted = [(keys.index((s, "backward" if b else "forward")), m) for s, m, b in needs(call, stages)]
                if any(counts[k] <= m for k, m in wanted):
                    continue
                group = stage % groups
                for free, ends in states:
                    start = max([free[group], *(ends[k][m] for k, m in wanted)])
                    stop = start + times[stage].of(call.phase)
                    later = tuple(stop if g == group else f for g, f in enumerate(free))
                    done = tuple((*e, stop) if k == number else e for k, e in enumerate(ends))
                    new = tuple(c + (k == number) for k, c in enumerate(counts))
                    following.setdefault(new, set()).add((later, done))
        best = {counts: _undominated(states) for counts, states in following.items()}
    return min(max(free) for states in best.values() for free, _ in states)


def _undominated(
    states: set[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]],
) -> set[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]:
    def flat(state: tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]) -> list[int]:
        return [*state[0], *(end for ends in state[1] for end in ends)]

    kept: list[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]] = []
    for state in sorted(states, key=flat):
        mine = flat(state)
        if not any(all(a <= b for a, b in zip(flat(other), mine, strict=True)) for other in kept):
            kept.append(state)
    return set(kept)


@pytest.mark.parametrize(
    ("groups", "micro", "passes"),
    [(2, 2, 2), (2, 3, 2), (2, 2, 3), (2, 3, 3), (3, 2, 2), pytest.param(2, 4, 2, marks=pytest.mark.slow)],
)
def test_no_order_of_small_cases_is_shorter(groups: int, micro: int, passes: int) -> None:
    times = [StageTimes(forward=2, input_gradient=1, weight_gradient=2)] * groups * passes
    found = time_orders(recycled(groups, micro, passes), times).seconds
    best = shortest(groups, micro, times)
    assert found == best if micro >= groups else found <= 1.2 * best


@pytest.mark.parametrize("slow", [0, 1])
def test_uneven_stages_are_near_the_best_order(slow: int) -> None:
    """A group that takes twice as long is never idle once it has begun, but for the fill and the drain."""
    groups, micro, passes = 2, 3, 2
    times = [StageTimes(forward=2 if s % groups == slow else 1) for s in range(groups * passes)]
    found = time_orders(recycled(groups, micro, passes), times).seconds
    assert shortest(groups, micro, times) <= found <= 1.1 * shortest(groups, micro, times)


@given(micro=st.integers(4, 24), slow=st.integers(0, 3), more=st.integers(1, 3))
def test_the_slowest_group_sets_the_pace(micro: int, slow: int, more: int) -> None:
    times = [StageTimes(forward=1 + more * (s % 4 == slow)) for s in range(12)]
    timed = time_orders(recycled(4, micro, 3), times)
    busy = sum(t.stop - t.start for t in timed.groups[slow])
    assert timed.seconds <= busy + 3 * (1 + 2) + 3 * more


F, B = forward, backward


@pytest.mark.parametrize(
    ("orders", "detached", "message"),
    [
        (((F(0, 0), F(2, 0), B(2, 0)), (F(1, 0), F(3, 0), B(3, 0))), {0}, "stage 1 is called forward only, but it has"),
        (((F(0, 0), F(2, 0), B(2, 0)), (F(1, 0), F(3, 0))), {0, 1}, "stage 3 is called forward only, but it has"),
        (((F(0, 0), F(2, 0), B(2, 0), B(0, 0)), (F(1, 0), F(3, 0), B(3, 0))), {1}, r"stage 0 before it has one"),
        (((F(0, 0), F(2, 0), B(2, 0)), (F(3, 0), F(1, 0), B(3, 0))), {0, 1}, "in a cycle"),
        (((F(0, 0), F(2, 0), F(2, 0), B(2, 0)), (F(1, 0), F(3, 0), B(3, 0))), {0, 1}, "every phase"),
        (((F(0, 0), F(0, 0), F(2, 0), B(2, 0)), (F(1, 0), F(3, 0), B(3, 0))), {0, 1}, "every phase"),
    ],
)  # fmt: skip
def test_wrong_orders_are_refused(orders: tuple[tuple[Call, ...], ...], detached: set[int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        require_orders(orders, 4, 1, detached=frozenset(detached))


def test_what_is_called_forward_only_makes_what_others_need() -> None:
    orders = recycled(3, 4, 3)
    made = {makes(call) for order in orders for call in order}
    assert all(piece in made for order in orders for call in order for piece in needs(call, 9))


def test_it_is_a_picture() -> None:
    assert (num_passes("3f1b"), stages_per_group("3f1b"), num_passes("1f1b")) == (3, 3, 1)
    result = CliRunner().invoke(app, ["schedule", "3f1b", "--stages", "4", "--micro", "8"])
    assert "3f1b: 12 stages, 8 micro-batches" in result.output
    assert "takes 49, bubble 18.4%, activations held by group: 6, 5, 4, 3" in result.output
    result = CliRunner().invoke(app, ["schedule", "3f1b", "--stages", "2", "--micro", "2", "--per-group", "4"])
    assert "8 stages" in result.output
