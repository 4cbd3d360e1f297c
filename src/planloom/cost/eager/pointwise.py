"""Pointwise operators and sums: what each saves, and what its backward makes besides its result.

`saved` says which of input and output the derivative is written with (derivatives.yaml of PyTorch 2.13). A backward
that is several operators makes temporaries, which live until its last one: C++ frees them at the end of the expression.
"""

from collections.abc import Sequence
from typing import Literal

from planloom.cost.eager.tape import Tape
from planloom.cost.eager.values import Value

Scalar = float | int | bool

UNARY: dict[str, tuple[Literal["input", "output", "none"], int]] = {
    "aten.abs.default": ("input", 1),
    "aten.cos.default": ("input", 1),
    "aten.elu.default": ("input", 0),
    "aten.erf.default": ("input", 3),
    "aten.exp.default": ("output", 0),
    "aten.expm1.default": ("output", 1),
    "aten.gelu.default": ("input", 0),
    "aten.hardsigmoid.default": ("input", 0),
    "aten.hardswish.default": ("input", 0),
    "aten.hardtanh.default": ("input", 0),
    "aten.leaky_relu.default": ("input", 0),
    "aten.log.default": ("input", 0),
    "aten.log1p.default": ("input", 1),
    "aten.mish.default": ("input", 0),
    "aten.neg.default": ("none", 0),
    "aten.reciprocal.default": ("output", 2),
    "aten.relu.default": ("output", 0),
    "aten.rsqrt.default": ("output", 2),
    "aten.sigmoid.default": ("output", 0),
    "aten.silu.default": ("input", 0),
    "aten.sin.default": ("input", 1),
    "aten.softplus.default": ("input", 0),
    "aten.sqrt.default": ("output", 1),
    "aten.tanh.default": ("output", 0),
}
"""Target → what is saved, and the number of temporaries of the backward, each as large as the input."""

NOT_DIFFERENTIABLE = frozenset(
    f"aten.{name}"
    for name in (
        "eq.Tensor", "eq.Scalar", "ne.Tensor", "ne.Scalar", "lt.Tensor", "lt.Scalar", "le.Tensor", "le.Scalar",
        "gt.Tensor", "gt.Scalar", "ge.Tensor", "ge.Scalar", "bitwise_not.default", "bitwise_and.Tensor",
        "bitwise_or.Tensor", "logical_not.default", "logical_and.default", "logical_or.default", "floor.default",
        "sign.default", "isnan.default", "isinf.default",
    )
)  # fmt: skip
"""Pointwise operators through which no cotangent passes."""


def unary(tape: Tape, target: str, x: Value) -> Value:
    kind, temporaries = UNARY[target]
    result = tape.pointwise([x])
    saved = {"input": [x], "output": [result], "none": []}[kind]
    return tape.record(target, result, [x], saved, lambda i, kept, c: _made(tape, [*kept, c], temporaries))


def _made(tape: Tape, operands: Sequence[Value], temporaries: int = 0) -> Value:
    held = [tape.pointwise(operands) for _ in range(temporaries)]
    result = tape.pointwise(operands)
    del held
    return result


def add(tape: Tape, a: Value | Scalar, b: Value | Scalar, alpha: Scalar = 1, *, negative: bool = False) -> Value:
    """a + alpha · b, or a − alpha · b."""
    values = _values(a, b)
    result = tape.pointwise(values)
    scaled = len(values) - 1 if isinstance(b, Value) and (negative or alpha != 1) else -1

    def gradient(i: int, saved: list[Value], cotangent: Value) -> Value:
        return tape.pointwise([cotangent]) if i == scaled else cotangent

    return tape.record("add", result, values, [], gradient)


def mul(tape: Tape, a: Value | Scalar, b: Value | Scalar) -> Value:
    values = _values(a, b)
    result = tape.pointwise(values)
    if len(values) == 1:
        return tape.record("mul", result, values, [], lambda i, saved, c: tape.pointwise([c]))
    first, second = values
    saved = [second] * tape.needs(first) + [first] * tape.needs(second)

    def gradient(i: int, kept: list[Value], cotangent: Value) -> Value:
        return tape.pointwise([cotangent, kept[0 if i == 0 else -1]])

    return tape.record("mul", result, values, saved, gradient)


def div(tape: Tape, a: Value | Scalar, b: Value | Scalar) -> Value:
    values = _values(a, b)
    result = tape.pointwise(values)
    if not isinstance(b, Value):
        return tape.record("div", result, values, [], lambda i, saved, c: tape.pointwise([c]))
    saved = [b] + ([a] if tape.needs(b) and isinstance(a, Value) else [])
    divisor = len(values) - 1

    def gradient(i: int, kept: list[Value], cotangent: Value) -> Value:
        if i < divisor:
            return tape.pointwise([cotangent, kept[0]])
        return _made(tape, [cotangent, *kept], 3)

    return tape.record("div", result, values, saved, gradient)


def power(tape: Tape, x: Value, exponent: Scalar) -> Value:
    result = tape.pointwise([x])
    return tape.record("pow", result, [x], [x], lambda i, saved, c: _made(tape, [*saved, c], 2))


def clamp(tape: Tape, x: Value) -> Value:
    """Between bounds: the backward compares again."""

    def gradient(i: int, saved: list[Value], cotangent: Value) -> Value:
        held = [tape.pointwise(saved, "bool") for _ in range(3)]
        result = tape.pointwise([*saved, cotangent])
        del held
        return result

    return tape.record("clamp", tape.pointwise([x]), [x], [x], gradient)


def where(tape: Tape, condition: Value, a: Value | Scalar, b: Value | Scalar) -> Value:
    values = _values(a, b)
    result = tape.pointwise([condition, *values], _dtype_of(values))

    def gradient(i: int, saved: list[Value], cotangent: Value) -> Value:
        return tape.pointwise([*saved, cotangent], cotangent.dtype)

    return tape.record("where", result, values, [condition], gradient)


def masked_fill(tape: Tape, x: Value, mask: Value) -> Value:
    result = tape.pointwise([x, mask], x.dtype)
    return tape.record("masked_fill", result, [x], [mask], lambda i, saved, c: tape.pointwise([c, *saved], c.dtype))


def cast(tape: Tape, x: Value, dtype: str) -> Value:
    if x.dtype == dtype:
        return x
    source = x.dtype
    return tape.record("to", tape.pointwise([x], dtype), [x], [], lambda i, saved, c: cast(tape, c, source))


def total(tape: Tape, x: Value, dims: Sequence[int], *, keep: bool, mean: bool = False) -> Value:
    """A sum or mean over dims (none: over all); the backward of a sum is a view of its cotangent."""
    reduced = {dim % max(x.rank, 1) for dim in dims} if dims else set(range(x.rank))
    shape = [1 if i in reduced else size for i, size in enumerate(x.shape) if keep or i not in reduced]
    result = tape.new(shape, x.dtype)
    source = x.shape

    def gradient(i: int, saved: list[Value], cotangent: Value) -> Value:
        strides = iter(cotangent.strides)
        wide = []
        for dim in range(len(source)):
            is_reduced = dim in reduced
            stride = next(strides) if keep or not is_reduced else 0
            wide.append(0 if is_reduced else stride)
        shown = cotangent.shown_as(source, wide)
        return tape.pointwise([shown]) if mean else shown

    return tape.record("sum", result, [x], [], gradient)


def softmax(tape: Tape, x: Value, *, is_safe: bool = False) -> Value:
    """Over one dim, or its logarithm; `is_safe`: rows without any finite number give zeros."""
    result = tape.new(x.shape, x.dtype)
    if is_safe:
        tape.new(x.shape, "bool")  # which elements are finite; freed at once
    return tape.record("softmax", result, [x], [result], lambda i, saved, c: tape.new(saved[0].shape, saved[0].dtype))


def _values(*operands: Value | Scalar) -> list[Value]:
    return [operand for operand in operands if isinstance(operand, Value)]


def _dtype_of(values: Sequence[Value]) -> str:
    return values[0].dtype if values else "float32"
