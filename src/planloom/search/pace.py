"""The pace of a pipeline: no stage is faster than the heaviest piece that no cut divides.

Stages begin at given places. Between two neighbouring places the blocks are of one stage, which takes at least

    u = Σ over these blocks of the least seconds that any strategy computes them in, a micro-batch,

and a step of p stages and m micro-batches is  Σ μ_s + (m - 1) max μ_s + max σ_s  (`stages`). With T the least of
(m + p - 1) Σ μ + Σ σ over all choices, and as p ≤ m + p - 1,

    Σ μ + max σ  ≥  Σ μ + Σ σ / p  ≥  T / (m + p - 1),        so        step  ≥  T / (m + p - 1) + (m - 1) max u.

With few blocks a stage this is well above T / p, the bound that supposes equal stages.
"""

from collections.abc import Sequence

import numpy as np

from planloom.search.conversions import Array
from planloom.search.tables import Tables


def pace_bounds(tables: Tables, places: Sequence[int], bounds: Array) -> Array:
    """A bound on the step of every problem; `bounds`: T / p of each."""
    num_stages = tables.shape.num_stages
    if num_stages == 1 or tables.schedule.stages_per_group > 1:
        return bounds
    least = np.zeros((len(tables.candidates), len(tables.network.blocks.blocks)))
    for key, _, blocks in tables.network.places_of_keys:
        unary = tables.unary[key]
        seconds = unary.forward + unary.backward
        if unary.parameters is not None:
            seconds = seconds + unary.parameters.micro_seconds.min(axis=0)
        least[:, blocks] += seconds.min(axis=1)[:, None]
    heaviest = np.add.reduceat(least, [0, *places], axis=1).max(axis=1)
    found: Array = bounds * num_stages / tables.weights + (tables.num_micro - 1) * heaviest
    return found
