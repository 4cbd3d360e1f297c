"""The pieces of a device's array: those that a step sends to, or has from, a group, and those of a time axis."""

from math import prod

from torch import Tensor

from planloom.collective import Step
from planloom.layout import Box
from planloom.layout.boxes import lies_together

Factors = tuple[tuple[int, ...], ...]
"""A tensor's dims, each a product of factors."""


def cut(array: Tensor, step: Step) -> Tensor:
    """The pieces of an array, cut into the step's dims, in the order of a group: one more dim, in front."""
    counts = dict(zip(step.into, step.shape, strict=True))
    split: list[int] = []
    for i, size in enumerate(array.shape):
        split += [counts[i], size // counts[i]] if i in counts else [size]
    places = {i: i + sum(other < i for other in step.into) for i in step.into}  # of the counts among the split dims
    front = [places[i] for i in step.into]
    order = front + [i for i in range(len(split)) if i not in front]
    pieces = array.reshape(split).permute(order)
    return pieces.reshape(step.group_size, *pieces.shape[len(front) :])


def join(pieces: Tensor, step: Step) -> Tensor:
    """The inverse of `cut`, for the dims along which pieces are put together."""
    shape = pieces.shape[1:]
    spread = pieces.reshape(*step.shape, *shape)
    order: list[int] = []
    for i in range(len(shape)):
        order += [step.along.index(i)] if i in step.along else []
        order.append(len(step.shape) + i)
    counts = dict(zip(step.along, step.shape, strict=True))
    return spread.permute(order).reshape([size * counts.get(i, 1) for i, size in enumerate(shape)])


def take(array: Tensor, box: Box, sizes: tuple[int, ...], factors: Factors) -> Tensor:
    """A piece of an array with these sizes of its factors: a view where its elements lie side by side, else a copy."""
    piece = _narrow(array.reshape(sizes), box)
    if not lies_together(box, sizes):
        piece = piece.contiguous()
    return piece.reshape(dims([stop - start for start, stop in box], factors))


def put(array: Tensor, piece: Tensor, box: Box, sizes: tuple[int, ...]) -> None:
    """Write a piece to its place in an array that lies together, with these sizes of its factors."""
    _narrow(array.view(sizes), box).copy_(piece.reshape([stop - start for start, stop in box]))


def dims(sizes: tuple[int, ...] | list[int], factors: Factors) -> list[int]:
    """The sizes of a tensor's own dims from those of its factors."""
    left = iter(sizes)
    return [prod(next(left) for _ in dim) for dim in factors]


def _narrow(array: Tensor, box: Box) -> Tensor:
    for i, (start, stop) in enumerate(box):
        array = array.narrow(i, start, stop - start)
    return array
