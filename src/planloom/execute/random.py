"""Random numbers that do not depend on the plan.

Element i of random operator k at step t is a function of (seed, k, t, i): the same on any number of devices, in any
order of pieces, after any resume, and again in a recomputation. The function is a 64-bit mixer (multiply, shift and
exclusive-or, twice) of i and a key; the state, a tensor [seed, t], is given to every step.
"""

from collections.abc import Sequence
from math import pi, prod

import torch
from torch import Tensor

from planloom.layout import Box

_BITS = 24  # of a uniform number: what float32 holds exactly
_ODD = (-7046029254386353131, -4658895280553007687, -7723592293110705685)  # odd, as two's complement


def whole_index(sizes: Sequence[int], box: Box, device: torch.device) -> Tensor:
    """The numbers, in the whole tensor, of the elements of a box of its factors; one dim a factor."""
    index, stride = torch.zeros((), dtype=torch.int64, device=device), prod(sizes)
    for i, ((start, stop), size) in enumerate(zip(box, sizes, strict=True)):
        stride //= size
        along = torch.arange(start, stop, dtype=torch.int64, device=device) * stride
        index = index + along.view(-1, *[1] * (len(sizes) - 1 - i))
    return index


def _mixed(value: Tensor) -> Tensor:
    for factor in _ODD[1:]:
        value = (value ^ ((value >> 32) & 0xFFFFFFFF)) * factor
    return value ^ ((value >> 29) & 0x7FFFFFFFF)


def uniform_numbers(index: Tensor, number: int, state: Tensor) -> Tensor:
    """Numbers in [0, 1), as float32, for elements by their index in the whole tensor."""
    key = _mixed(_mixed(state[0] * _ODD[0] + number) + state[1])
    bits = _mixed(index * _ODD[0] + key)
    return ((bits >> 20) & ((1 << _BITS) - 1)).to(torch.float32) * (1.0 / (1 << _BITS))


def dropout(
    x: Tensor, p: float, number: int, state: Tensor, *, sizes: Sequence[int] | None = None, box: Box | None = None
) -> Tensor:
    """Zero with probability p, else scaled by 1 / (1 − p); `sizes` and `box` say which part of the whole this is."""
    sizes = tuple(x.shape) if sizes is None else sizes
    box = tuple((0, size) for size in sizes) if box is None else box
    if p >= 1:
        return x * 0
    kept = uniform_numbers(whole_index(sizes, box, x.device), number, state) >= p
    return x * (kept.reshape(x.shape).to(x.dtype) * (1 / (1 - p)))


def uniform(shape: Sequence[int], dtype: torch.dtype, number: int, state: Tensor) -> Tensor:
    """A tensor of numbers in [0, 1)."""
    index = torch.arange(prod(shape), dtype=torch.int64, device=state.device)
    below_one = 1 - torch.finfo(dtype).eps / 2  # a short dtype would round up to one
    return uniform_numbers(index, number, state).to(dtype).clamp_max(below_one).reshape(list(shape))


def normal(shape: Sequence[int], dtype: torch.dtype, number: int, state: Tensor) -> Tensor:
    """A tensor of numbers with mean 0 and variance 1 (Box and Muller's transform of pairs of uniform numbers)."""
    index = torch.arange(prod(shape), dtype=torch.int64, device=state.device)
    radius = torch.sqrt(-2 * torch.log1p(-uniform_numbers(2 * index, number, state).double()))
    angle = 2 * pi * uniform_numbers(2 * index + 1, number, state).double()
    return (radius * torch.cos(angle)).to(dtype).reshape(list(shape))
