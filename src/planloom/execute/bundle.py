"""Several arrays side by side in one, so that collectives of equal kinds and groups are carried out as one.

Whatever dims a step cuts an array into or joins it along, its pieces are g arrays of n elements, one for each member of
the group. So with each array as a matrix of its g pieces, the matrices lie side by side in one of g rows: a step over
the rows of the one is the step on each of the others.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from planloom.collective import Step, local_sizes_after
from planloom.execute.pieces import cut, join


def step_on_rows(step: Step) -> Step:
    """The step over the rows that `pack` makes."""
    return Step(
        kind=step.kind,
        groups=step.groups,
        shape=(step.group_size,),
        along=(0,) if step.along else (),
        into=(0,) if step.into else (),
        combine=step.combine,
    )


def pack(arrays: Sequence[Tensor], steps: Sequence[Step]) -> Tensor:
    """A copy: a row for each member of the group that gets a piece; one row for all, where nothing is cut."""
    if not steps[0].into:
        return torch.cat([array.reshape(-1) for array in arrays]).view(1, -1)
    size = steps[0].group_size
    return torch.cat([cut(a, step).reshape(size, -1) for a, step in zip(arrays, steps, strict=True)], dim=1)


def unpack(rows: Tensor, steps: Sequence[Step], before: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """The arrays after the steps, whose dims were `before`, from the rows that arrived."""
    dims = [local_sizes_after(step, sizes) for step, sizes in zip(steps, before, strict=True)]
    if not steps[0].along:
        parts = rows.reshape(-1).split([prod(after) for after in dims])
        return [part.view(after) for part, after in zip(parts, dims, strict=True)]
    size, arrays = steps[0].group_size, []
    for step, after, piece in zip(steps, dims, rows.split([prod(d) // size for d in dims], dim=1), strict=True):
        counts = dict(zip(step.along, step.shape, strict=True))
        shape = [length // counts.get(i, 1) for i, length in enumerate(after)]
        arrays.append(join(piece.reshape(size, *shape), step))
    return arrays
