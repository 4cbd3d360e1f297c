"""Operators with indices, norms and losses, and our own operators (execute/operators.py, capture/experts.py)."""

from collections.abc import Sequence
from math import prod

from planloom.cost.eager import pointwise, products, views
from planloom.cost.eager.tape import Tape
from planloom.cost.eager.values import Value


def embedding(tape: Tape, weight: Value, indices: Value) -> Value:
    result = tape.new((*indices.shape, weight.shape[1]), weight.dtype)
    shape, dtype = weight.shape, weight.dtype
    return tape.record("embedding", result, [weight], [indices], lambda i, saved, c: tape.new(shape, dtype))


def inside_of(tape: Tape, index: Value) -> tuple[Value, Value]:
    """Of a split vocabulary: the indices clamped to the own part, and which of them lie in it."""
    shifted = tape.pointwise([index], index.dtype)
    first, second = tape.pointwise([shifted], "bool"), tape.pointwise([shifted], "bool")
    inside = tape.pointwise([first, second], "bool")
    del first, second
    return tape.pointwise([shifted], index.dtype), inside


def or_zero(tape: Tape, inside: Value, found: Value) -> Value:
    """Zero where an index lies outside."""
    return pointwise.where(tape, inside, found, tape.new(found.shape, found.dtype, found.strides))


def split_embedding(tape: Tape, weight: Value, indices: Value) -> Value:
    own, inside = inside_of(tape, indices)
    rows = embedding(tape, weight, own)
    return or_zero(tape, views.unsqueeze(tape, inside, -1), rows)


def gather(tape: Tape, x: Value, index: Value) -> Value:
    shape, dtype = x.shape, x.dtype
    result = tape.new(index.shape, x.dtype)
    return tape.record("gather", result, [x], [x, index], lambda i, saved, c: tape.new(shape, dtype))


def split_gather(tape: Tape, x: Value, index: Value) -> Value:
    own, inside = inside_of(tape, index)
    return or_zero(tape, inside, gather(tape, x, own))


def index_select(tape: Tape, x: Value, dim: int, index: Value, *, is_split: bool = False) -> Value:
    dim %= x.rank
    inside = None
    if is_split:
        index, inside = inside_of(tape, index)
    shape, dtype = x.shape, x.dtype
    result = tape.new((*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :]), x.dtype)
    found = tape.record("index_select", result, [x], [index], lambda i, saved, c: tape.new(shape, dtype))
    if inside is None:
        return found
    shown = views.reshape(tape, inside, [-1 if i == dim else 1 for i in range(x.rank)])
    return or_zero(tape, shown, found)


def pick(tape: Tape, logits: Value, labels: Value) -> Value:
    own, inside = inside_of(tape, labels)
    picked = views.squeeze(tape, gather(tape, logits, views.unsqueeze(tape, own, 1)), 1)
    return or_zero(tape, inside, picked)


def scatter(tape: Tape, x: Value, index: Value, source: Value | None) -> Value:
    result = tape.new(x.shape, x.dtype)
    shapes = [x.shape, index.shape]
    inputs = [x, *([] if source is None else [source])]
    return tape.record("scatter", result, inputs, [index], lambda i, saved, c: tape.new(shapes[i], c.dtype))


def topk(tape: Tape, x: Value, count: int, dim: int) -> Value:
    """Indices alone; the values are made, too."""
    shape = [count if i == dim % x.rank else size for i, size in enumerate(x.shape)]
    values = tape.new(shape, x.dtype)
    indices = tape.new(shape, "int64")
    del values
    return indices


def rms_norm(tape: Tape, x: Value, num_dims: int, weight: Value | None) -> Value:
    """As the CPU writes it out, in float32 at least; CUDA's kernel keeps less: its input and a number a row."""
    wide = pointwise.cast(tape, x, "float64" if x.dtype == "float64" else "float32")
    squares = pointwise.power(tape, wide, 2)
    means = pointwise.total(tape, squares, range(-num_dims, 0), keep=True, mean=True)
    del squares
    factor = pointwise.unary(tape, "aten.rsqrt.default", pointwise.add(tape, means, 1e-6))
    scaled = pointwise.mul(tape, wide, factor)
    return pointwise.cast(tape, scaled if weight is None else pointwise.mul(tape, scaled, weight), x.dtype)


def layer_norm(tape: Tape, x: Value, num_dims: int, weight: Value | None, bias: Value | None) -> Value:
    """Keeps its input and two numbers a row: mean and reciprocal deviation."""
    rows = (*x.shape[: x.rank - num_dims], *(1,) * num_dims)
    dense = x.detached() if x.is_contiguous else views.copied(tape, x.detached(), contiguous=True)
    result = tape.new(x.shape, x.dtype)
    numbers = [tape.new(rows, "float32" if x.dtype in ("float16", "bfloat16") else x.dtype) for _ in range(2)]
    del dense
    inputs = [x, *(value for value in (weight, bias) if value is not None)]
    shapes = [value.shape for value in inputs]
    edges = [tape.needs(value) for value in inputs]

    def gradients(kept: list[Value], cotangents: list[Value | None]) -> list[Value | None]:
        assert cotangents[0] is not None
        dense = [views.contiguous(tape, value) for value in (cotangents[0], kept[0])]
        sums = tape.new((2, *shapes[-1]), result_dtype)  # of weight and bias, one row a thread
        found = [tape.new(shape, result_dtype) if needed else None for shape, needed in zip(shapes, edges, strict=True)]
        del dense, sums
        return found

    result_dtype = x.dtype
    tape.record_many("norm", [result], inputs, [*inputs, *numbers], gradients)
    return result


def vector_norm(tape: Tape, x: Value, dims: Sequence[int], *, keep: bool) -> Value:
    reduced = {dim % x.rank for dim in dims} if dims else set(range(x.rank))
    shape = [1 if i in reduced else size for i, size in enumerate(x.shape) if keep or i not in reduced]
    result = tape.new(shape, x.dtype)

    def gradient(i: int, kept: list[Value], cotangent: Value) -> Value:
        held = tape.new(kept[0].shape, "bool"), tape.pointwise([kept[0]])
        made = tape.pointwise([kept[0]])
        del held
        return made

    return tape.record("vector_norm", result, [x], [x, result], gradient)


def cross_entropy(tape: Tape, logits: Value, labels: Value, weight: Value, smoothing: float) -> Value:
    """Logarithms of probabilities are kept, and the labels; with smoothed labels the mask of ignored ones, too."""
    logarithms = pointwise.softmax(tape, logits)
    losses = tape.new(labels.shape, logits.dtype)
    total_weight = tape.new((), logits.dtype)
    saved = [logarithms, labels, total_weight]
    shape, dtype = logits.shape, logits.dtype
    losses = tape.record("nll_loss", losses, [logarithms], saved, lambda i, kept, c: tape.new(shape, dtype))
    if smoothing:
        smooth = pointwise.unary(tape, "aten.neg.default", pointwise.total(tape, logarithms, [1], keep=False))
        ignored = tape.new(labels.shape, "bool")
        smooth = pointwise.masked_fill(tape, smooth, ignored)
        first = pointwise.mul(tape, losses, 1 - smoothing)
        second = pointwise.mul(tape, smooth, smoothing)
        losses = pointwise.add(tape, first, second)
    del logarithms, saved, total_weight
    weighted = pointwise.mul(tape, losses, weight)
    return pointwise.cast(tape, pointwise.total(tape, weighted, [], keep=False), dtype)


def root(tape: Tape, x: Value) -> Value:
    """The square root with a derivative at zero."""
    some = tape.pointwise([x], "bool")
    safe = pointwise.where(tape, some, x, 1)
    return pointwise.where(tape, some, pointwise.unary(tape, "aten.sqrt.default", safe), 0)


def dropout(tape: Tape, x: Value) -> Value:
    """Keeps the mask, scaled, in the dtype of its input; on the way random numbers of 64 bits."""
    count = (prod(x.shape),)
    held = [tape.new(count, "int64") for _ in range(_MIXING)]
    kept = tape.new(count, "bool")
    del held
    shown = tape.new(x.shape, x.dtype)
    factor = tape.pointwise([shown])
    del shown, kept
    return pointwise.mul(tape, x, factor)


_MIXING = 4
"""Integers of 64 bits an element that are alive at one time while random numbers are mixed."""


# -- experts


def dispatch(tape: Tape, x: Value, num_rows: int) -> Value:
    """Rows of experts: indices of all routed pairs, of which the tokens' are kept by a view."""
    pairs = tape.new((num_rows, 2), "int64", (1, num_rows))
    index = views.select(tape, pairs, 1, 1)
    del pairs
    return views.unsqueeze(tape, index_select(tape, x, 0, index), 0)


def grouped_linear(tape: Tape, x: Value, weight: Value, num_experts: int, *, is_transposed: bool) -> Value:
    """Every expert's rows times its matrix. The rows are taken to be spread evenly."""
    rows = views.select(tape, x, 0, 0)
    count, rest = divmod(rows.shape[0], num_experts)
    sizes = [count + (i < rest) for i in range(num_experts)]
    parts = views.split(tape, rows, sizes)
    matrices = views.unbind(tape, weight)
    made = [
        products.matmul(tape, part, matrix) if is_transposed else products.linear(tape, part, matrix)
        for part, matrix in zip(parts, matrices, strict=True)
    ]
    return views.unsqueeze(tape, views.cat(tape, made), 0)


def grouped_bias(tape: Tape, x: Value, bias: Value) -> Value:
    pairs = tape.new((x.shape[1], 2), "int64", (1, x.shape[1]))
    rows = index_select(tape, bias, 0, views.select(tape, pairs, 1, 0))
    return pointwise.add(tape, x, views.unsqueeze(tape, rows, 0))


def combine(tape: Tape, x: Value, weights: Value, mask: Value) -> Value:
    """The weighted sum of a token's rows."""
    rows = views.select(tape, x, 0, 0)
    shape, dtype = weights.shape, weights.dtype
    taken = tape.record("index", tape.new((rows.shape[0],), weights.dtype), [weights], [mask],
                        lambda i, saved, c: tape.new(shape, dtype))  # fmt: skip
    weighted = pointwise.mul(tape, rows, views.unsqueeze(tape, taken, 1))
    zeros = tape.new((mask.shape[1], x.shape[2]), weighted.dtype)
    pairs = tape.new((rows.shape[0], 2), "int64", (1, rows.shape[0]))
    index = views.select(tape, pairs, 1, 1)
    del rows, pairs
    result = tape.new(zeros.shape, zeros.dtype)
    shape_of_rows = weighted.shape
    return tape.record(
        "index_add", result, [weighted], [index, weighted], lambda i, saved, c: tape.new(shape_of_rows, c.dtype)
    )
