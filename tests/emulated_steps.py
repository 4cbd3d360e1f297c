"""What steps of collectives and messages do to arrays, by definition: of tests/emulation.py."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from planloom.collective import Step
from planloom.layout import Box
from planloom.program import Transfer


class BrokenError(Exception):
    """The program cannot be carried out."""


def add(first: Tensor, second: Tensor) -> Tensor:
    if first.shape != second.shape:
        raise BrokenError(f"shapes {list(first.shape)} and {list(second.shape)} cannot be added")
    return first + second


def between(transfers: Sequence[Transfer], source: int, target: int) -> list[Transfer]:
    return [t for t in transfers if (t.source, t.target) == (source, target)]


def narrow(array: Tensor, box: Box) -> Tensor:
    for dim, (start, stop) in enumerate(box):
        if not 0 <= start < stop <= array.shape[dim]:
            raise BrokenError(f"{list(box)} lies outside {list(array.shape)}")
        array = array.narrow(dim, start, stop - start)
    return array


def own_shape(factors: tuple[tuple[int, ...], ...], sizes: Sequence[int]) -> list[int]:
    """The sizes of a tensor's own dims from those of its factors."""
    left = iter(sizes)
    return [prod(next(left) for _ in dim) for dim in factors]


def apply_step(step: Step, arrays: dict[int, Tensor]) -> dict[int, Tensor]:
    """What every device holds after a step; a device that holds nothing has no array."""
    taking_part = [device for group in step.groups for device in group]
    receiving = {device for group in step.groups for device in group[1:]} if step.kind in _FROM_FIRST else set()
    if len(set(taking_part)) != len(taking_part) or not arrays.keys() <= set(taking_part):
        raise BrokenError("the groups of a step do not hold every device once")
    if any(device not in arrays and device not in receiving for device in taking_part):
        raise BrokenError("a device takes part that holds nothing, or that there is not")
    result: dict[int, Tensor] = {}
    for group in step.groups:
        if len(group) != prod(step.shape):
            raise BrokenError("a group is not of the size of its shape")
        if step.kind in _FROM_FIRST:
            given = [arrays[group[0]]] * len(group)
        else:
            given = [arrays[device] for device in group]
        if len({part.shape for part in given}) > 1:
            raise BrokenError("the members of a group hold arrays of different sizes")
        for device, array in zip(group, _of_group(step, given), strict=False):
            result[device] = array
    return result


_FROM_FIRST = ("broadcast", "scatter")


def _of_group(step: Step, given: list[Tensor]) -> list[Tensor]:
    """The arrays of a group's members after a step; of the first only, after a reduce or a gather."""
    n = len(given)
    match step.kind:
        case "all_reduce" | "reduce_scatter" | "reduce":
            stacked = torch.stack(given)
            whole = stacked.sum(0) if step.combine == "sum" else stacked.amax(0)
        case "all_gather" | "all_to_all" | "gather":
            whole = _put_together(given, step.along, step.shape)
        case _:
            whole = given[0]
    match step.kind:
        case "all_reduce" | "all_gather" | "broadcast":
            return [whole] * n
        case "reduce" | "gather":
            return [whole]
        case "reduce_scatter" | "all_to_all" | "scatter":
            return [_piece(whole, step, position) for position in range(n)]
        case "slice":
            return [_piece(given[position], step, position) for position in range(n)]
        case "rotate":
            return [given[position - 1] for position in range(n)]
        case "mask":
            return [given[0], *(torch.zeros_like(array) for array in given[1:])]
    raise AssertionError(step.kind)


def _put_together(parts: list[Tensor], dims: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """Parts listed row-major over `shape`, put together along one dim each: the last one first."""
    if not dims:
        (whole,) = parts
        return whole
    count = shape[-1]
    rows = [torch.cat(parts[i : i + count], dims[-1]) for i in range(0, len(parts), count)]
    return _put_together(rows, dims[:-1], shape[:-1])


def _piece(array: Tensor, step: Step, position: int) -> Tensor:
    for dim, count in reversed(list(zip(step.into, step.shape, strict=True))):
        position, index = divmod(position, count)
        if array.shape[dim] % count:
            raise BrokenError(f"{array.shape[dim]} elements cannot be cut into {count} equal pieces")
        array = array.chunk(count, dim)[index]
    return array
