"""Orders whose stages several groups share: valid, as fast as their closed form, refused where groups do not meet."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planloom.errors import PlanError
from planloom.plan.order_checks import require_orders
from planloom.plan.orders import backward, forward, sharers
from planloom.plan.schedules import orders_of
from planloom.plan.shared import cotangent_lags, find_lags
from planloom.plan.timing import StageTimes, most_held, time_orders


@given(
    groups=st.integers(2, 8),
    micro=st.integers(1, 20),
    f=st.integers(1, 3),
    more=st.integers(0, 3),
    embedding=st.integers(0, 2),
    head=st.integers(0, 4),
)
def test_interlaced_takes_its_closed_form(
    groups: int, micro: int, f: int, more: int, embedding: int, head: int
) -> None:
    orders = orders_of("interlaced", groups + 2, micro)
    require_orders(orders, groups + 2, micro)
    assert sharers(orders) == {stage: tuple(range(groups)) for stage in (0, groups + 1)}
    layers = StageTimes(forward=f, input_gradient=f, weight_gradient=more)
    ends = [StageTimes(forward=s, input_gradient=s, weight_gradient=s) for s in (embedding, head)]
    seconds = time_orders(orders, [ends[0], *[layers] * groups, ends[1]]).seconds
    closed = (micro + groups - 1) * (2 * f + more) + 3 * micro * (embedding + head)
    assert seconds == closed if groups % 2 == 0 else seconds <= closed + f


@given(groups=st.integers(2, 16))
def test_interlaced_holds_one_and_a_half_times_as_much_as_1f1b(groups: int) -> None:
    orders = orders_of("interlaced", groups + 2, 4 * groups)
    held = [most_held([call for call in order if call.stage == g + 1]) for g, order in enumerate(orders)]
    assert max(held) == held[0] == (3 * groups + 1) // 2


def test_lags_leave_no_cotangent_behind() -> None:
    """The head's send ends one micro-batch later; that of a decoder's embedding from the third stage, after three."""
    lag = find_lags(orders_of("interlaced", 6, 16), 6)
    assert (lag(5, 4), lag(3, 0)) == (1, 3)
    assert cotangent_lags(orders_of("interlaced", 6, 2), 6)(3, 0) == 0  # too few: at the end of the step


BOTH = (forward(0, 0), backward(0, 0))


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (((*BOTH, forward(0, 1), backward(0, 1)), BOTH), "every phase.*on every group that shares"),
        (((forward(0, 0), forward(0, 1), backward(0, 0), backward(0, 1)),
          (forward(0, 1), forward(0, 0), backward(0, 0), backward(0, 1))), "in a cycle"),
        (((*BOTH,), (forward(0, 0),)), "every phase"),
    ],
)  # fmt: skip
def test_groups_that_do_not_meet_are_refused(orders: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        require_orders(orders, 1, len(orders[0]) // 2)  # type: ignore[arg-type,index]


def test_too_few_stages() -> None:
    with pytest.raises(PlanError, match="three stages"):
        orders_of("interlaced", 2, 4)
