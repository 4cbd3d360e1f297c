"""Operators that move no elements, or copy them only where strides leave no other way."""

from collections.abc import Sequence
from math import prod

from planloom.cost.eager.tape import Tape
from planloom.cost.eager.values import Shape, Value, contiguous_strides, viewed_strides


def permute(tape: Tape, x: Value, dims: Sequence[int]) -> Value:
    order = [dim % x.rank for dim in dims]
    back = sorted(range(len(order)), key=order.__getitem__)
    result = x.shown_as([x.shape[dim] for dim in order], [x.strides[dim] for dim in order])
    return tape.record("permute", result, [x], [], lambda i, saved, c: permute(tape, c, back))


def transpose(tape: Tape, x: Value, first: int, second: int) -> Value:
    if x.rank == 0:
        return x
    order = list(range(x.rank))
    order[first % x.rank], order[second % x.rank] = second % x.rank, first % x.rank
    return permute(tape, x, order)


def transposed(tape: Tape, x: Value) -> Value:
    """aten.t: of a vector, itself."""
    return transpose(tape, x, 0, 1) if x.rank == 2 else x


def reshape(tape: Tape, x: Value, shape: Sequence[int]) -> Value:
    """A view where strides allow it, else a copy."""
    shape = tuple(shape)
    if -1 in shape:
        known = prod(size for size in shape if size != -1)
        shape = tuple(x.num_elements // known if size == -1 else size for size in shape)
    source, strides = x.shape, viewed_strides(x.shape, x.strides, shape)
    if strides is None:
        x = copied(tape, x, contiguous=True)
        strides = contiguous_strides(shape)
    result = x.shown_as(shape, strides)
    return tape.record("view", result, [x], [], lambda i, saved, c: reshape(tape, c, source))


def copied(tape: Tape, x: Value, *, contiguous: bool = False) -> Value:
    """A copy of a tensor."""
    result = tape.new(x.shape, x.dtype) if contiguous else tape.pointwise([x])
    return tape.record("clone", result, [x], [], lambda i, saved, c: c)


def contiguous(tape: Tape, x: Value) -> Value:
    return x if x.is_contiguous else copied(tape, x, contiguous=True)


def expand(tape: Tape, x: Value, shape: Sequence[int]) -> Value:
    pad = len(shape) - x.rank
    sizes = tuple(x.shape[i - pad] if size == -1 else size for i, size in enumerate(shape))
    strides = [
        0 if i < pad or (x.shape[i - pad] == 1 and size != 1) else x.strides[i - pad] for i, size in enumerate(sizes)
    ]
    return tape.record("expand", x.shown_as(sizes, strides), [x], [], lambda i, saved, c: c)


def part_of(tape: Tape, x: Value, shape: Sequence[int], strides: Sequence[int]) -> Value:
    """A view of some elements; its backward writes them into zeros."""
    whole, dtype = x.shape, x.dtype
    result = x.shown_as(shape, strides)
    return tape.record("slice", result, [x], [], lambda i, saved, c: tape.new(whole, dtype))


def select(tape: Tape, x: Value, dim: int, index: int) -> Value:
    dim %= x.rank
    return part_of(tape, x, x.shape[:dim] + x.shape[dim + 1 :], x.strides[:dim] + x.strides[dim + 1 :])


def slice_(
    tape: Tape, x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    dim %= x.rank
    length = len(range(x.shape[dim])[slice(start, end, step)])
    shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
    strides = (*x.strides[:dim], x.strides[dim] * step, *x.strides[dim + 1 :])
    return part_of(tape, x, shape, strides)


def narrow(tape: Tape, x: Value, dim: int, length: int) -> Value:
    return slice_(tape, x, dim, 0, length)


def unsqueeze(tape: Tape, x: Value, dim: int) -> Value:
    dim %= x.rank + 1
    stride = x.shape[dim] * x.strides[dim] if dim < x.rank else 1
    result = x.shown_as((*x.shape[:dim], 1, *x.shape[dim:]), (*x.strides[:dim], stride, *x.strides[dim:]))
    return tape.record("unsqueeze", result, [x], [], lambda i, saved, c: squeeze(tape, c, dim))


def squeeze(tape: Tape, x: Value, dim: int | Sequence[int]) -> Value:
    dims = {d % max(x.rank, 1) for d in ([dim] if isinstance(dim, int) else dim)}
    kept = [i for i in range(x.rank) if i not in dims or x.shape[i] != 1]
    shape = x.shape
    result = x.shown_as([x.shape[i] for i in kept], [x.strides[i] for i in kept])
    return tape.record("squeeze", result, [x], [], lambda i, saved, c: reshape(tape, c, shape))


def split(tape: Tape, x: Value, sizes: Sequence[int]) -> list[Value]:
    """Parts along the first dim."""
    parts = [x.shown_as((size, *x.shape[1:]), x.strides) for size in sizes]
    shape, dtype = x.shape, x.dtype
    tape.record_many("split", parts, [x], [], lambda saved, cotangents: [tape.new(shape, dtype)])
    return parts


def unbind(tape: Tape, x: Value) -> list[Value]:
    parts = [x.shown_as(x.shape[1:], x.strides[1:]) for _ in range(x.shape[0])]
    shape, dtype = x.shape, x.dtype
    tape.record_many("unbind", parts, [x], [], lambda saved, cotangents: [tape.new(shape, dtype)])
    return parts


def cat(tape: Tape, parts: Sequence[Value], dim: int = 0) -> Value:
    """Its backward is views of the cotangent."""
    dim %= parts[0].rank
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    lengths = [part.shape[dim] for part in parts]
    result = tape.new(shape, parts[0].dtype)

    def gradient(i: int, saved: list[Value], cotangent: Value) -> Value:
        own: Shape = (*cotangent.shape[:dim], lengths[i], *cotangent.shape[dim + 1 :])
        return cotangent.shown_as(own, cotangent.strides)

    return tape.record("cat", result, parts, [], gradient)


def local_part(tape: Tape, x: Value, factors: Sequence[Sequence[int]], sizes: Sequence[int]) -> Value:
    """What `local_slice` of the runtime makes of a whole given tensor: a piece with these lengths of its factors."""
    whole = [size for dim in factors for size in dim]
    if list(sizes) == whole:
        return x
    piece = reshape(tape, x, whole)
    for i, length in enumerate(sizes):
        piece = narrow(tape, piece, i, length)
    lengths = iter(sizes)
    return reshape(tape, piece, [prod(next(lengths) for _ in dim) for dim in factors])
