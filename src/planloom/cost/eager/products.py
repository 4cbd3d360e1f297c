"""Products: linear maps, products of matrices, einsum, convolutions, attention.

A product saves each side whose other side needs a gradient. Which reshapes copy, and in which order of dims gradients
come out, follows ATen (LinearAlgebra.cpp, Linear.cpp, FunctionsManual.cpp of PyTorch 2.13).
"""

from collections.abc import Sequence
from math import prod

from planloom.cost.eager import pointwise, views
from planloom.cost.eager.tape import Tape
from planloom.cost.eager.values import Value, broadcast_shape, contiguous_strides


def mm(tape: Tape, a: Value, b: Value, bias: Value | None = None) -> Value:
    """a · b, plus a bias: [m, k] · [k, n]."""
    result = tape.new((a.shape[0], b.shape[1]), a.dtype)
    saved = [b] * tape.needs(a) + [a] * tape.needs(b)
    shapes = [(value.shape, value.strides) for value in (a, b)]

    def gradient(i: int, kept: list[Value], cotangent: Value) -> Value:
        if i == 2:
            return cotangent
        (rows, columns), strides = shapes[i]
        is_column_major = strides[0] == 1 and strides[1] == rows
        return tape.new((rows, columns), cotangent.dtype, (1, rows) if is_column_major else None)

    return tape.record("mm", result, [a, b, *([] if bias is None else [bias])], saved, gradient)


def bmm(tape: Tape, a: Value, b: Value) -> Value:
    result = tape.new((*a.shape[:2], b.shape[2]), a.dtype)
    saved = [b] * tape.needs(a) + [a] * tape.needs(b)
    shapes = [a.shape, b.shape]
    return tape.record("bmm", result, [a, b], saved, lambda i, kept, c: tape.new(shapes[i], c.dtype))


def vector_product(tape: Tape, a: Value, b: Value) -> Value:
    """[m, k] · [k], or [k] · [k]: the gradient of the matrix is an outer product."""
    result = tape.new(a.shape[:-1], a.dtype)
    saved = [b] * tape.needs(a) + [a] * tape.needs(b)
    shapes = [a.shape, b.shape]
    return tape.record("mv", result, [a, b], saved, lambda i, kept, c: tape.new(shapes[i], c.dtype))


def matmul(tape: Tape, a: Value, b: Value) -> Value:
    if b.rank == 1 and a.rank <= 2:
        return vector_product(tape, a, b)
    if a.rank == 2 and b.rank == 2:
        return mm(tape, a, b)
    if a.rank == 1:
        return views.squeeze(tape, matmul(tape, views.unsqueeze(tape, a, 0), b), -2)
    if _folds(tape, a, b):
        return _folded(tape, a, b)
    if b.rank == 1:
        return views.squeeze(tape, matmul(tape, a, views.unsqueeze(tape, b, 1)), -1)
    batch = broadcast_shape([a.shape[:-2], b.shape[:-2]])
    flat = [
        views.reshape(tape, views.expand(tape, x, (*batch, *x.shape[-2:])), (prod(batch), *x.shape[-2:]))
        for x in (a, b)
    ]
    return views.reshape(tape, bmm(tape, *flat), (*batch, a.shape[-2], b.shape[-1]))


def _folds(tape: Tape, a: Value, b: Value) -> bool:
    """Is the larger side flattened to a matrix?"""
    is_first = a.rank >= b.rank
    large, small = (a, b) if is_first else (b, a)
    if large.rank < 3 or small.rank > 2:
        return False
    if tape.needs(small):
        return True
    if a.rank == 2:
        return False
    shape, strides = large.shape, large.strides
    return all(shape[i] == 1 or strides[i] == strides[i + 1] * shape[i + 1] for i in range(large.rank - 2))


def _folded(tape: Tape, a: Value, b: Value) -> Value:
    is_first = a.rank >= b.rank
    large = a if is_first else views.transpose(tape, b, -1, -2)
    small = b if is_first else views.transposed(tape, a)
    flat = views.reshape(tape, large, (-1, large.shape[-1]))
    if small.rank == 1:
        return views.reshape(tape, vector_product(tape, flat, small), large.shape[:-1])
    shown = views.reshape(tape, mm(tape, flat, small), (*large.shape[:-1], small.shape[1]))
    return shown if is_first else views.transpose(tape, shown, -1, -2)


def linear(tape: Tape, x: Value, weight: Value, bias: Value | None = None) -> Value:
    columns = views.transposed(tape, weight)
    if bias is not None and x.rank == 2:
        return mm(tape, x, columns, bias)
    if bias is not None and x.rank > 2 and x.is_contiguous:
        flat = views.reshape(tape, x, (-1, x.shape[-1]))
        return views.reshape(tape, mm(tape, flat, columns, bias), (*x.shape[:-1], weight.shape[0]))
    product = matmul(tape, x, columns)
    if bias is None:
        return product
    return add_in_place(tape, product, bias)


def add_in_place(tape: Tape, x: Value, y: Value) -> Value:
    return tape.record("add_", x.detached(), [x, y], [], lambda i, saved, c: c)


def einsum(tape: Tape, equation: str, operands: Sequence[Value]) -> Value:
    """Of one or two operands: permuted and flattened to [kept by both, left, summed] · […, summed, right]."""
    left, right = equation.replace(" ", "").split("->")
    terms = left.split(",")
    if len(operands) == 1:
        return _einsum_of_one(tape, terms[0], right, operands[0])
    sizes = {letter: size for term, x in zip(terms, operands, strict=True) for letter, size in zip(term, x.shape)}  # noqa: B905
    shared = set(terms[0]) & set(terms[1])
    both = [c for c in right if c in shared]
    summed = sorted(c for c in shared if c not in right)
    first = [c for c in right if c in terms[0] and c not in shared]
    second = [c for c in right if c in terms[1] and c not in shared]
    sides = list(operands)
    for i, term in enumerate(terms):
        lost = [c for c in term if c not in right and c not in shared]
        if lost:
            sides[i] = pointwise.total(tape, sides[i], [term.index(c) for c in lost], keep=False)
            terms[i] = "".join(c for c in term if c not in lost)
    if not summed:
        shown = [_aligned(tape, x, term, right) for x, term in zip(sides, terms, strict=True)]
        return pointwise.mul(tape, *shown)
    count = {name: prod(sizes[c] for c in part) for name, part in
             (("both", both), ("summed", summed), ("first", first), ("second", second))}  # fmt: skip
    a = views.permute(tape, sides[0], [terms[0].index(c) for c in (*both, *first, *summed)])
    b = views.permute(tape, sides[1], [terms[1].index(c) for c in (*both, *summed, *second)])
    product = bmm(
        tape,
        views.reshape(tape, a, (count["both"], count["first"], count["summed"])),
        views.reshape(tape, b, (count["both"], count["summed"], count["second"])),
    )
    made = [*both, *first, *second]
    shown_product = views.reshape(tape, product, [sizes[c] for c in made])
    return views.permute(tape, shown_product, [made.index(c) for c in right])


def _aligned(tape: Tape, x: Value, term: str, right: str) -> Value:
    ordered = views.permute(tape, x, [term.index(c) for c in right if c in term])
    for i, letter in enumerate(right):
        if letter not in term:
            ordered = views.unsqueeze(tape, ordered, i)
    return ordered


def _einsum_of_one(tape: Tape, term: str, right: str, x: Value) -> Value:
    lost = [i for i, letter in enumerate(term) if letter not in right]
    kept = [letter for letter in term if letter in right]
    rest = pointwise.total(tape, x, lost, keep=False) if lost else x
    return views.permute(tape, rest, [kept.index(letter) for letter in right])


def convolution(tape: Tape, x: Value, weight: Value, bias: Value | None, shape: Sequence[int]) -> Value:
    """A convolution whose result has this shape; its backward gives all gradients at once."""
    result = tape.new(shape, x.dtype)
    inputs = [x, weight, *([] if bias is None else [bias])]
    shapes = [value.shape for value in inputs]
    needed = [tape.needs(value) for value in inputs]

    def gradients(kept: list[Value], cotangents: list[Value | None]) -> list[Value | None]:
        assert cotangents[0] is not None
        dense, dtype = views.contiguous(tape, cotangents[0]), cotangents[0].dtype
        reordered = tape.new(dense.shape, dtype)  # as oneDNN wants it
        found = [tape.new(shape, dtype) if need else None for shape, need in zip(shapes, needed, strict=True)]
        del dense, reordered
        return found

    tape.record_many("conv", [result], inputs, [x, weight], gradients)
    return result


_QUERIES_AT_ONCE = ((768, 256), (192, 64), (0, 32))
_KEYS_AT_ONCE = 512
"""Tiles of the CPU's flash kernel by the number of queries (FlashAttentionKernel.cpp of PyTorch 2.13)."""


def attention(tape: Tape, q: Value, k: Value, v: Value, mask: Value | None, *, dropout: float = 0.0) -> Value:
    """Scaled dot-product attention by the kernel that torch takes on the CPU: flash if it can, else written out.

    The flash kernel's result lies as its queries do, gradients as [batch, query, heads, size]; it keeps q, k, v, result
    and the logarithm of the sum of exponentials, a float32 a query and head. CUDA's flash kernel keeps the same.
    """
    if mask is not None and mask.dtype == "bool":
        mask = tape.new(mask.shape, q.dtype)
    is_even = q.shape[-1] == k.shape[-1] == v.shape[-1]
    if q.rank != 4 or not is_even or dropout or (mask is not None and tape.needs(mask)):
        return _written_attention(tape, q, k, v, mask)
    result = tape.pointwise([q])
    sums = tape.new(q.shape[:3], "float64" if q.dtype == "float64" else "float32")
    split = next(size for least, size in _QUERIES_AT_ONCE if q.shape[2] >= least)
    num_scores = min(split, q.shape[2]) * min(_KEYS_AT_ONCE, k.shape[2])
    scratch = tape.new((num_scores + min(split, q.shape[2]) * (2 + v.shape[3]),), sums.dtype)
    del scratch
    saved = [q, k, v, result, sums, *([] if mask is None else [mask])]
    shapes = [value.shape for value in (q, k, v)]

    def gradients(kept: list[Value], cotangents: list[Value | None]) -> list[Value | None]:
        assert cotangents[0] is not None
        dtype = cotangents[0].dtype
        scores = tape.new((2, num_scores), kept[4].dtype)
        found: list[Value | None] = [_heads_inside(tape, shape, dtype) for shape in shapes]
        del scores
        return found

    tape.record_many("attention", [result], [q, k, v], saved, gradients)
    return result


def sink_attention(tape: Tape, q: Value, k: Value, v: Value, mask: Value | None, sinks: Value, *, window: int) -> Value:
    """Attention with sinks as `capture.sinks` carries it out on the CPU: keys and values repeated for their groups of
    queries, a mask for a window, then results × the share that the sinks leave. On CUDA as much is kept."""
    wide = "float64" if q.dtype == "float64" else "float32"
    is_masked = mask is not None or window > 0
    shapes, grid = [value.shape for value in (q, k, v)], (1, 1, q.shape[2], k.shape[2]) if mask is None else mask.shape
    split = next(size for least, size in _QUERIES_AT_ONCE if q.shape[2] >= least)
    num_scores = min(split, q.shape[2]) * min(_KEYS_AT_ONCE, k.shape[2])
    num_repeats = q.shape[1] // k.shape[1]

    def repeated() -> list[Value]:
        wanted = ((*q_shape[:2], *shape[2:]) for shape in shapes[1:]) if num_repeats > 1 else ()
        found = [tape.new(shape, q_dtype) for shape in wanted]
        if is_masked:
            seen = [tape.new(grid, "bool"), tape.new(grid, "bool")]
            del seen[0]
            zeros = tape.new(grid, q_dtype)
            hidden = tape.new(grid, "bool")
            found.append(tape.new(grid, q_dtype))
            del zeros, hidden
        return found

    q_shape, q_dtype = q.shape, q.dtype
    held = repeated()
    plain = tape.pointwise([q])
    sums = tape.new(q.shape[:3], wide)
    scratch = tape.new((num_scores + min(split, q.shape[2]) * (2 + v.shape[3]),), wide)
    del scratch, held
    whole = tape.new(q.shape[:3], wide)
    left = tape.new(q.shape[:3], wide)
    del sums
    result = tape.pointwise([plain])
    del plain, left
    saved = [q, k, v, *([] if mask is None else [mask]), sinks, result, whole]
    num_sinks, sinks_dtype = sinks.shape, sinks.dtype

    def gradients(kept: list[Value], cotangents: list[Value | None]) -> list[Value | None]:
        assert cotangents[0] is not None
        dtype = cotangents[0].dtype
        products = tape.new(q_shape, dtype)
        given = tape.new(q_shape[:3], wide)
        del products
        of_sinks = tape.new(num_sinks, sinks_dtype)
        del given
        again = repeated()
        scores = tape.new((2, num_scores), wide)
        found: list[Value | None] = [_heads_inside(tape, (*q_shape[:2], *shape[2:]), dtype) for shape in shapes]
        del scores
        summed = [tape.new(shape, dtype) for shape in shapes[1:]] if num_repeats > 1 else found[1:]
        del again
        return [found[0], *summed, of_sinks]

    tape.record_many("sink_attention", [result], [q, k, v, sinks], saved, gradients)
    return result


def _heads_inside(tape: Tape, shape: tuple[int, ...], dtype: str) -> Value:
    """A tensor [batch, heads, query, size] that lies as [batch, query, heads, size]."""
    strides = contiguous_strides((shape[0], shape[2], shape[1], shape[3]))
    return tape.new(shape, dtype, (strides[0], strides[2], strides[1], strides[3]))


def _written_attention(tape: Tape, q: Value, k: Value, v: Value, mask: Value | None) -> Value:
    scaled_q = pointwise.mul(tape, q, 1.0)
    scaled_k = pointwise.mul(tape, views.transpose(tape, k, -2, -1), 1.0)
    scores = matmul(tape, scaled_q, scaled_k)
    if mask is not None:
        scores = add_in_place(tape, scores, mask)
    shares = pointwise.softmax(tape, scores, is_safe=mask is not None)
    del scores
    return matmul(tape, shares, v)
