"""Rows of experts on the wire, where a device has none of them."""

import pytest
import torch

from planloom.collective import Step
from planloom.execute.wire import Wire


@pytest.mark.parametrize(("held", "expected"), [((True, True, False), 2), ((False, False, True), 1), ((False,) * 3, 0)])
def test_rows_that_a_device_keeps_of_what_it_has(held: tuple[bool, ...], expected: int) -> None:
    mask = torch.tensor([held, [True, False, True]])
    local = torch.arange(int(mask.sum()) * 4.0).reshape(1, -1, 4)
    step = Step(kind="slice", groups=((0, 1),), shape=(2,), into=(0,))
    kept = Wire(0, timeout_seconds=1).move_rows((step,), local, mask, (2, 3, 4), 2)()
    assert kept.shape == (1, expected, 4)
    torch.testing.assert_close(kept[0], local[0, :expected])
