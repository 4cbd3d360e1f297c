"""Seconds of changes of layout: the table in `search.conversions`, row by row, and in batches as alone."""

import numpy as np
import pytest

from planloom.cluster import load_cluster
from planloom.layout import Placement
from planloom.search.conversions import MeshBatch, conversion_seconds, reduction_seconds
from planloom.search.curves import AxisCurves, axis_curves

CLUSTER = load_cluster("two-by-two")
WHOLE_BYTES = 1.5e6
SPLIT_0, SPLIT_1, PARTIAL, WHOLE = range(4)
"""The states of a tensor with two factors."""
FACTORS = 2


def curves_of(**rows: tuple[int, ...]) -> tuple[AxisCurves, ...]:
    return axis_curves(CLUSTER, Placement(axes=tuple(rows), matrix=tuple(rows.values())))


LINE = curves_of(tp=(2, 2))
"""One axis over all four devices."""
OUTER_INNER = curves_of(dp=(2, 1), tp=(1, 2))
INNER_OUTER = curves_of(dp=(1, 2), tp=(2, 1))


def batch(*rows: tuple[AxisCurves, ...]) -> MeshBatch:
    return MeshBatch.of(rows, CLUSTER.device, by_volume=False)


def seconds(curves: tuple[AxisCurves, ...], was: tuple[int, ...], will: tuple[int, ...], **given: bool) -> list[float]:
    """Forward and backward."""
    mesh, settings = batch(curves), {"is_differentiable": True, **given}
    found = conversion_seconds(mesh, np.array([was]), np.array([will]), FACTORS, np.array([WHOLE_BYTES]), **settings)
    return [float(own[0, 0, 0]) for own in found]


def cost(curves: AxisCurves, kind: str, num_bytes: float) -> float:
    return float(getattr(curves, kind)(np.array([num_bytes]))[0])


def copied(num_bytes: float) -> float:
    return CLUSTER.device.launch_seconds + 2 * num_bytes / CLUSTER.device.memory_bytes_per_second


PART = WHOLE_BYTES / 4
ROWS = [
    (SPLIT_0, SPLIT_0, None, None),
    (SPLIT_0, SPLIT_1, ("all_to_all", PART), ("all_to_all", PART)),
    (SPLIT_0, PARTIAL, ("all_gather", PART), ("reduce_scatter", WHOLE_BYTES)),
    (SPLIT_0, WHOLE, ("all_gather", PART), ("slice", PART)),
    (PARTIAL, SPLIT_1, ("reduce_scatter", WHOLE_BYTES), ("all_gather", PART)),
    (PARTIAL, WHOLE, ("all_reduce", WHOLE_BYTES), None),
    (PARTIAL, PARTIAL, ("all_reduce", WHOLE_BYTES), ("all_reduce", WHOLE_BYTES)),
    (WHOLE, SPLIT_1, ("slice", PART), ("all_gather", PART)),
    (WHOLE, WHOLE, None, None),
    (WHOLE, PARTIAL, None, ("all_reduce", WHOLE_BYTES)),
]


@pytest.mark.parametrize(("was", "will", "there", "back"), ROWS)
def test_over_one_axis(was: int, will: int, there: tuple[str, float] | None, back: tuple[str, float] | None) -> None:
    def priced(step: tuple[str, float] | None) -> float:
        if step is None:
            return 0.0
        return copied(step[1]) if step[0] == "slice" else cost(LINE[0], *step)

    assert seconds(LINE, (was,), (will,)) == pytest.approx([priced(there), priced(back)], rel=1e-12)
    assert seconds(LINE, (was,), (will,), is_differentiable=False)[1] == 0


def test_a_source_that_takes_partial_cotangents_needs_no_all_reduce() -> None:
    assert seconds(LINE, (WHOLE,), (PARTIAL,), takes_partial=True) == [0.0, 0.0]
    assert seconds(LINE, (PARTIAL,), (PARTIAL,), is_junction=True) == [0.0, 0.0], "a junction passes partial ones on"


def test_over_two_axes_arrays_are_small_when_they_travel() -> None:
    """Partial over both, split by both: the fast axis scatters first, so the slow one carries half."""
    slow, fast = OUTER_INNER
    expected = cost(fast, "reduce_scatter", WHOLE_BYTES) + cost(slow, "reduce_scatter", WHOLE_BYTES / 2)
    back = cost(slow, "all_gather", PART) + cost(fast, "all_gather", 2 * PART)
    assert seconds(OUTER_INNER, (PARTIAL, PARTIAL), (SPLIT_0, SPLIT_1)) == pytest.approx([expected, back], rel=1e-12)
    assert expected < cost(slow, "reduce_scatter", WHOLE_BYTES) + cost(fast, "reduce_scatter", WHOLE_BYTES / 2)


def test_an_all_reduce_over_two_axes_goes_by_scattering_over_the_faster() -> None:
    slow, fast = OUTER_INNER
    scattered = (
        cost(fast, "reduce_scatter", WHOLE_BYTES)
        + cost(slow, "all_reduce", WHOLE_BYTES / 2)
        + cost(fast, "all_gather", WHOLE_BYTES / 2)
    )
    alone = cost(fast, "all_reduce", WHOLE_BYTES) + cost(slow, "all_reduce", WHOLE_BYTES)
    assert scattered < alone
    assert seconds(OUTER_INNER, (PARTIAL, PARTIAL), (WHOLE, WHOLE))[0] == pytest.approx(scattered, rel=1e-12)


def test_pieces_are_sorted_anew_where_an_outer_axis_leaves_a_factor() -> None:
    slow, fast = OUTER_INNER
    there, _ = seconds(OUTER_INNER, (SPLIT_0, SPLIT_0), (WHOLE, SPLIT_0))
    expected = cost(fast, "all_to_all", PART) + cost(slow, "all_gather", PART)
    assert there == pytest.approx(expected, rel=1e-12)
    there, _ = seconds(OUTER_INNER, (SPLIT_0, SPLIT_0), (SPLIT_0, WHOLE))
    assert there == pytest.approx(cost(fast, "all_gather", PART), rel=1e-12), "inner ones leave in order"


def test_problems_of_a_batch_cost_what_they_cost_alone() -> None:
    """Placements whose axes are fast in different orders: each has its own order of steps."""
    rows = [OUTER_INNER, INNER_OUTER, OUTER_INNER]
    whole = np.array([WHOLE_BYTES, WHOLE_BYTES, WHOLE_BYTES / 8])
    states = np.array([(a, b) for a in range(4) for b in range(4)])
    together = conversion_seconds(batch(*rows), states, states, FACTORS, whole, is_differentiable=True)
    over = np.array([[True, True], [True, False], [False, False]])
    sizes = np.outer(whole, [1.0, 2.0, 3.0])
    reduced = reduction_seconds(batch(*rows), over, sizes)
    assert batch(*rows).parts, "else nothing was tested"
    for g, row in enumerate(rows):
        alone = conversion_seconds(batch(row), states, states, FACTORS, whole[[g]], is_differentiable=True)
        for own, other in zip(together, alone, strict=True):
            assert (own[g] == other[0]).all()
        assert (reduced[g] == reduction_seconds(batch(row), over, sizes[[g]])[0]).all()
