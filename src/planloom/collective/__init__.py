"""Changes of layout as programs of collectives, found by shortest path."""

from planloom.collective.paths import change_layout, volume_price
from planloom.collective.steps import Step, StepKind, local_sizes_after

__all__ = ["Step", "StepKind", "change_layout", "local_sizes_after", "volume_price"]
