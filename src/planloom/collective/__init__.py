"""Changes of layout as programs of collectives: synthesized, priced on a cluster, bounded from below, and checked.

`steps` has the values; `refine` and `synthesis` find programs, `geometry` and `pricing` say what steps cost.
"""

from planloom.collective.pricing import (
    SizePrice,
    StepCost,
    digits_cost,
    rings_from_bytes,
    seconds_price,
    step_cost,
)
from planloom.collective.reductions import Choice, Reduction, find_reductions
from planloom.collective.steps import LOCAL_KINDS, CollectiveProgram, Step, StepKind, local_sizes_after
from planloom.collective.synthesis import DigitsPrice, Move, Synthesized, change_layout, synthesize, volume_price

__all__ = [
    "LOCAL_KINDS",
    "Choice",
    "CollectiveProgram",
    "DigitsPrice",
    "Move",
    "Reduction",
    "SizePrice",
    "Step",
    "StepCost",
    "StepKind",
    "Synthesized",
    "change_layout",
    "digits_cost",
    "find_reductions",
    "local_sizes_after",
    "rings_from_bytes",
    "seconds_price",
    "step_cost",
    "synthesize",
    "volume_price",
]
