"""What the search takes schedules to be, against their orders carried out call by call."""

from fractions import Fraction

import numpy as np
import pytest

from planloom.errors import PlanError
from planloom.plan.timing import StageTimes, time_orders
from planloom.search.schedules import SEVERAL, Schedule, schedule_of, schedules_to_search
from planloom.search.stages import BlockFigures, estimate_stages

SCHEDULES = [
    Schedule(),
    Schedule(name="gpipe"),
    Schedule(name="zb-h1"),
    *(Schedule(name=name, stages_per_group=v) for name in ("interleaved", "looped") for v in SEVERAL),
]
TIMES = [(1, 1, 1), (2, 3, 1), (3, 5, 2), (3, 3, 0)]
"""Forward, input-gradient and weight-gradient, which is the longest nowhere: else ZB-H1's form is another."""


@pytest.mark.parametrize("times", TIMES, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_equal_stages_take_what_their_order_takes(schedule: Schedule, times: tuple[int, int, int]) -> None:
    stage = StageTimes(forward=times[0], input_gradient=times[1], weight_gradient=times[2])
    for num_groups, num_micro in ((1, 3), (2, 4), (4, 8), (4, 16), (8, 8)):
        if not schedule.is_possible(num_groups, num_micro):
            continue
        num_stages = schedule.num_stages(num_groups)
        exact = time_orders(schedule.orders(num_groups, num_micro), [stage] * num_stages).seconds
        hidden = Fraction(schedule.hidden(num_groups, num_micro)).limit_denominator(1000)
        micro = sum(times) - hidden * times[2]
        figures = BlockFigures(
            micro_seconds=np.full(num_stages, float(micro)),
            step_seconds=np.zeros(num_stages),
            stored_bytes=np.zeros(num_stages),
            saved_bytes=np.zeros(num_stages),
            peak_bytes=np.zeros(num_stages),
        )
        found = estimate_stages(figures, range(num_stages), num_micro, 0.0, schedule)
        assert found.step_seconds == pytest.approx(float(exact), rel=1e-12)
        whole = schedule.weight(num_groups, num_micro) * schedule.stages_per_group * float(micro)
        assert found.step_seconds == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_no_group_holds_more_than_is_counted(schedule: Schedule) -> None:
    for num_groups, num_micro in ((2, 4), (4, 8), (4, 64), (8, 8)):
        orders = schedule.orders(num_groups, num_micro)
        kept = schedule.kept(num_groups, num_micro)
        for group, order in enumerate(orders):
            held, most = dict.fromkeys(range(group, len(kept), num_groups), 0), dict[int, int]()
            for call in order:
                held[call.stage] += {"forward": 1, "input-gradient": 0}.get(call.phase, -1)
                most[call.stage] = max(most.get(call.stage, 0), held[call.stage])
            assert all(count <= kept[stage] for stage, count in most.items())
            if not schedule.is_split:
                assert most == {stage: kept[stage] for stage in held}


def test_what_is_searched() -> None:
    assert [str(own) for own in schedules_to_search(None, is_compiled=True)] == ["1f1b"]
    assert [str(own) for own in schedules_to_search(None, is_compiled=False)] == ["1f1b", "zb-h1"]
    pinned = schedules_to_search("interleaved", is_compiled=True)
    assert [str(own) for own in pinned] == ["interleaved,chunks=2", "interleaved,chunks=4"]
    assert [str(own) for own in schedules_to_search("zb", is_compiled=True)] == ["zb-h1"]
    with pytest.raises(PlanError, match="chimera"):
        schedules_to_search("chimera", is_compiled=True)
    with pytest.raises(PlanError, match="no schedule is named"):
        schedules_to_search("fastest", is_compiled=True)


def test_schedules_of_finished_plans() -> None:
    assert schedule_of("interleaved", 8, 4) == Schedule(name="interleaved", stages_per_group=2)
    assert schedule_of("mine", 4, 4) == Schedule()
    with pytest.raises(PlanError, match="several stages"):
        schedule_of("zb-v", 8, 4)
