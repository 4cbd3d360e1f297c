"""The pieces of a device's array that a step sends to, or has from, the members of a group."""

from torch import Tensor

from planloom.collective import Step


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
