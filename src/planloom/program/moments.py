"""Moments: where on its time axes a run is carried out.

A piece of a block has a coordinate along every digit that splits it. Along digits of space it is the device's; along
digits of time it is the same on all devices, and part of the run: its *moment*. Runs of one scope differ in their
moment alone. All that computes with coordinates of a device inside a run asks `coordinates_in`.
"""

from collections.abc import Mapping

from planloom.layout import Digit
from planloom.program.values import Run


def coordinates_in(run: Run, device: Mapping[Digit, int]) -> dict[Digit, int]:
    """The coordinates of a device's piece of a run, from the device's own."""
    return {**device, **dict(run.moment)}
