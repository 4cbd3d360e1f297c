"""Storages and tensors without elements: shapes, strides, and who is alive.

A storage lives as long as some value refers to it, and Python frees it in the same moment in which torch would: its
bytes leave the meter then. So the model of a run is a run without elements, and its peak is read off the meter.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planloom.cost.eager.tape import Node

Shape = tuple[int, ...]


class Meter:
    """Bytes that are alive, and the most that ever were."""

    __slots__ = ("live", "peak")

    def __init__(self) -> None:
        self.live = self.peak = 0

    def restart(self) -> int:
        """Forget the peak; returns what is alive."""
        self.peak = self.live
        return self.live


class Storage:
    """Bytes that are counted by a meter until nobody refers to them; without a meter somebody else counts them."""

    __slots__ = ("_meter", "num_bytes")

    def __init__(self, num_bytes: int, meter: Meter | None) -> None:
        self.num_bytes = num_bytes
        self._meter = meter
        if meter is not None:
            meter.live += num_bytes
            meter.peak = max(meter.peak, meter.live)

    @property
    def is_counted(self) -> bool:
        return self._meter is not None

    def __del__(self) -> None:
        if self._meter is not None:
            self._meter.live -= self.num_bytes


class Value:
    """A tensor: a storage as shape and strides show it.

    `is_view`: another tensor was there first; `edge`: the node and the number of its result that made it.
    """

    __slots__ = ("dtype", "edge", "is_view", "shape", "storage", "strides")

    def __init__(self, storage: Storage, shape: Shape, strides: Shape, dtype: str, *, is_view: bool = False) -> None:
        self.storage = storage
        self.shape = shape
        self.strides = strides
        self.dtype = dtype
        self.is_view = is_view
        self.edge: tuple[Node, int] | None = None

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        return is_contiguous(self.shape, self.strides)

    def detached(self) -> Value:
        """The same without a node."""
        return Value(self.storage, self.shape, self.strides, self.dtype, is_view=self.is_view)

    def shown_as(self, shape: Sequence[int], strides: Sequence[int]) -> Value:
        """A view of it."""
        return Value(self.storage, tuple(shape), tuple(strides), self.dtype, is_view=True)


def item_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype, as torch names it."""
    bits = "".join(c for c in dtype.split("_")[0] if c.isdigit())
    return int(bits) // 8 if bits else 1


def is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "complex"))


def contiguous_strides(shape: Sequence[int]) -> Shape:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Does it fill its storage, in whatever order of dims?"""
    order = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1)
    return is_contiguous([size for _, size in reversed(order)], [stride for stride, _ in reversed(order)])


def viewed_strides(shape: Shape, strides: Shape, target: Shape) -> Shape | None:
    """The strides of a reshape that is a view; None if it must copy (the rule of torch's computeStride)."""
    if prod(shape) == 0:
        return contiguous_strides(target)
    found: list[int] = []
    at = len(target) - 1
    base = strides[-1] if strides else 1
    taken, made = 1, 1
    for dim in range(len(shape) - 1, -1, -1):
        taken *= shape[dim]
        is_end = dim == 0 or (shape[dim - 1] != 1 and strides[dim - 1] != taken * base)
        if is_end:
            while at >= 0 and (made < taken or target[at] == 1):
                found.append(made * base)
                made *= target[at]
                at -= 1
            if made != taken:
                return None
            if dim > 0:
                base, taken, made = strides[dim - 1], 1, 1
    while at >= 0 and not shape:  # of a scalar
        found.append(1)
        at -= 1
    return tuple(reversed(found)) if at < 0 else None


def broadcast_shape(shapes: Sequence[Shape]) -> Shape:
    rank = max(map(len, shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True))


def result_strides(shape: Shape, operands: Sequence[Value]) -> Shape:
    """The strides that a pointwise operator gives its result: the order of dims of its operands (TensorIterator)."""
    same = [value for value in operands if value.shape == shape]
    if len(same) == len(operands):
        if all(value.is_contiguous for value in operands):
            return contiguous_strides(shape)
        if len({value.strides for value in operands}) == 1 and is_dense(shape, operands[0].strides):
            return operands[0].strides
    rank = len(shape)
    table = []
    for value in operands:
        if value.rank:
            pad = rank - value.rank
            own = [
                0 if size == 1 and shape[pad + i] != 1 else stride
                for i, (size, stride) in enumerate(zip(value.shape, value.strides, strict=True))
            ]
            table.append([0] * pad + own)
    order = list(range(rank - 1, -1, -1))
    for i in range(1, rank):
        current = i
        for other in range(i - 1, -1, -1):
            comparison = _compared(table, shape, order[other], order[current])
            if comparison > 0:
                order[other], order[current] = order[current], order[other]
                current = other
            elif comparison < 0:
                break
    strides, step = [0] * rank, 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _compared(table: Sequence[Sequence[int]], shape: Shape, first: int, second: int) -> int:
    for strides in table:
        a, b = strides[first], strides[second]
        if a == 0 or b == 0:
            continue
        if a != b:
            return -1 if a < b else 1
        if shape[first] > shape[second]:
            return 1
    return 0
