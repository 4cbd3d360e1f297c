"""Expansions: operators that reduce nonlinearly, as statistics and finish.

| original                  | stands as                                                                   |
|---------------------------|-----------------------------------------------------------------------------|
| linear, addmm, convolution with bias | product, then bias (a partial product must be reduced before the bias) |
| layer_norm                | sum and sum of squares, then normalization                                  |
| rms_norm                  | sum of squares, then normalization                                          |
| softmax, log_softmax      | maximum, sum of exponentials, then normalization                            |
| linalg_vector_norm        | sum of squares, then its root                                               |
| cross_entropy_loss        | maximum, sum of exponentials, picked logit; weighted sum over the tokens    |

The blocks see the expanded form; a run that holds all operators of an expansion computes the original. The mean of a
loss divides by the number of labels in the whole batch, which depends on inputs alone: it becomes a `given` weight a
token.
"""

from dataclasses import replace
from math import prod

from planloom.errors import CaptureError
from planloom.graph import Arg, Expansion, Graph, Op, Tensor, reference, referenced


def expand(graph: Graph) -> Graph:
    """The same graph with every expandable operator expanded."""
    builder = _Builder(graph)
    for op in graph.ops:
        rule = _EXPANDED.get(op.target)
        if rule is None or not rule(builder, op):
            builder.ops.append(op)
    return replace(
        graph,
        tensors=builder.tensors,
        ops=tuple(builder.ops),
        given=tuple(builder.given),
        expansions=tuple(builder.expansions),
    )


class _Builder:
    """Collects operators; `origin` is the operator being expanded."""

    def __init__(self, graph: Graph) -> None:
        self.tensors = dict(graph.tensors)
        self.ops: list[Op] = []
        self.given = list(graph.given)
        self.given_names = set(graph.given_names)
        self.expansions: list[Expansion] = []

    def begin(self, target: str, args: list[Arg], kwargs: dict[str, Arg], output: str) -> int:
        self.expansions.append(Expansion(target=target, args=tuple(args), kwargs=kwargs, output=output))
        return len(self.expansions) - 1

    def emit(
        self,
        origin: Op,
        suffix: str,
        target: str,
        args: list[Arg],
        shape: tuple[int, ...],
        *,
        dtype: str = "",
        expansion: int = -1,
        kwargs: dict[str, Arg] | None = None,
    ) -> str:
        """Add an operator; an empty suffix gives it the original's output. Returns a reference to its result."""
        name = f"{origin.name}.{suffix}" if suffix else origin.outputs[0]
        while suffix and name in self.tensors:
            name += "_"
        inputs = tuple(referenced([args, kwargs]))
        op = Op(
            name=name,
            target=target,
            args=tuple(args),
            kwargs=kwargs or {},
            inputs=inputs,
            outputs=(name,),
            module=origin.module,
            expansion=expansion,
        )
        dtype = dtype or self.tensors[origin.outputs[0]].dtype
        self.tensors[name] = Tensor(name=name, shape=shape, dtype=dtype)
        if all(name in self.given_names for name in inputs):
            self.given.append(replace(op, expansion=-1))
            self.given_names.add(name)
        else:
            self.ops.append(op)
        return reference(name)


def _linear(b: _Builder, op: Op) -> bool:
    if len(op.args) < 3 or op.args[2] is None:
        return False
    shape = b.tensors[op.outputs[0]].shape
    e = b.begin(op.target, list(op.args), {}, op.outputs[0])
    product = b.emit(op, "product", op.target, list(op.args[:2]), shape, expansion=e)
    b.emit(op, "", "aten.add.Tensor", [product, op.args[2]], shape, expansion=e)
    return True


def _addmm(b: _Builder, op: Op) -> bool:
    if any(op.kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
        return False
    bias, x, weight = op.args
    shape = b.tensors[op.outputs[0]].shape
    e = b.begin(op.target, list(op.args), {}, op.outputs[0])
    product = b.emit(op, "product", "aten.mm.default", [x, weight], shape, expansion=e)
    b.emit(op, "", "aten.add.Tensor", [product, bias], shape, expansion=e)
    return True


def _convolution(b: _Builder, op: Op) -> bool:
    x, weight, bias, *rest = op.args
    if bias is None:
        return False
    shape = b.tensors[op.outputs[0]].shape
    e = b.begin(op.target, list(op.args), {}, op.outputs[0])
    product = b.emit(op, "product", op.target, [x, weight, None, *rest], shape, expansion=e)
    column = (shape[1], *[1] * (len(shape) - 2))
    raised = b.emit(op, "bias", "aten.reshape.default", [bias, list(column)], column, expansion=e)
    b.emit(op, "", "aten.add.Tensor", [product, raised], shape, expansion=e)
    return True


def _layer_norm(b: _Builder, op: Op) -> bool:
    x, normalized = op.args[0], op.args[1]
    shape = b.tensors[op.inputs[0]].shape
    dims = list(range(-len(normalized), 0))
    weight, bias, eps = _positional(op, 2, None), _positional(op, 3, None), _positional(op, 4, 1e-5)
    size, one = prod(normalized), (*shape[: -len(dims)], *[1] * len(dims))
    e = b.begin(op.target, list(op.args[:5]), {}, op.outputs[0])

    def emit(suffix: str, target: str, args: list[Arg], out_shape: tuple[int, ...], finish: bool = False) -> str:
        return b.emit(op, "" if finish else suffix, target, args, out_shape, expansion=e)

    total = emit("sum", "aten.sum.dim_IntList", [x, dims, True], one)
    square = emit("square", "aten.mul.Tensor", [x, x], shape)
    squares = emit("squares", "aten.sum.dim_IntList", [square, dims, True], one)
    mean = emit("mean", "aten.mul.Tensor", [total, 1 / size], one)
    mean2 = emit("mean2", "aten.mul.Tensor", [mean, mean], one)
    moment = emit("moment", "aten.mul.Tensor", [squares, 1 / size], one)
    variance = emit("variance", "aten.sub.Tensor", [moment, mean2], one)
    padded = emit("padded", "aten.add.Tensor", [variance, eps], one)
    scale = emit("scale", "aten.rsqrt.default", [padded], one)
    centered = emit("centered", "aten.sub.Tensor", [x, mean], shape)
    result = emit("scaled", "aten.mul.Tensor", [centered, scale], shape, finish=weight is None and bias is None)
    if weight is not None:
        result = emit("weighted", "aten.mul.Tensor", [result, weight], shape, finish=bias is None)
    if bias is not None:
        emit("biased", "aten.add.Tensor", [result, bias], shape, finish=True)
    return True


def _rms_norm(b: _Builder, op: Op) -> bool:
    x, normalized = op.args[0], op.args[1]
    tensor = b.tensors[op.inputs[0]]
    weight, eps = _positional(op, 2, None), _positional(op, 3, None)
    eps = _EPSILON[tensor.dtype] if eps is None else eps
    dims = list(range(-len(normalized), 0))
    size, one = prod(normalized), (*tensor.shape[: -len(dims)], *[1] * len(dims))
    e = b.begin(op.target, list(op.args), {}, op.outputs[0])

    def emit(suffix: str, target: str, args: list[Arg], out_shape: tuple[int, ...]) -> str:
        return b.emit(op, suffix, target, args, out_shape, expansion=e)

    square = emit("square", "aten.mul.Tensor", [x, x], tensor.shape)
    squares = emit("squares", "aten.sum.dim_IntList", [square, dims, True], one)
    moment = emit("moment", "aten.mul.Tensor", [squares, 1 / size], one)
    padded = emit("padded", "aten.add.Tensor", [moment, eps], one)
    scale = emit("scale", "aten.rsqrt.default", [padded], one)
    result = emit("scaled" if weight is not None else "", "aten.mul.Tensor", [x, scale], tensor.shape)
    if weight is not None:
        emit("", "aten.mul.Tensor", [result, weight], tensor.shape)
    return True


def _softmax(b: _Builder, op: Op) -> bool:
    x, dim = op.args[0], op.args[1]
    dtype = op.args[2] if len(op.args) > 2 else op.kwargs.get("dtype")
    shape = b.tensors[op.inputs[0]].shape
    if isinstance(dtype, str) and dtype.removeprefix("torch.") != b.tensors[op.inputs[0]].dtype:
        x = b.emit(op, "cast", "aten._to_copy.default", [x], shape, kwargs={"dtype": dtype})
    one = tuple(1 if i == dim % len(shape) else size for i, size in enumerate(shape))
    e = b.begin(op.target, [x, dim], {}, op.outputs[0])

    def emit(suffix: str, target: str, args: list[Arg], out_shape: tuple[int, ...]) -> str:
        return b.emit(op, suffix, target, args, out_shape, expansion=e)

    top = emit("max", "planloom.statistic_max", [x, dim], one)
    shifted = emit("shifted", "aten.sub.Tensor", [x, top], shape)
    exponential = emit("exp", "aten.exp.default", [shifted], shape)
    total = emit("sum", "aten.sum.dim_IntList", [exponential, [dim], True], one)
    if "log" in op.target:
        log = emit("log", "aten.log.default", [total], one)
        emit("", "aten.sub.Tensor", [shifted, log], shape)
    else:
        emit("", "aten.div.Tensor", [exponential, total], shape)
    return True


def _vector_norm(b: _Builder, op: Op) -> bool:
    order, dims, keep = _positional(op, 1, 2), _positional(op, 2, None), _positional(op, 3, False)
    shape = b.tensors[op.inputs[0]].shape
    if order != 2 or op.kwargs.get("dtype") is not None:
        return False
    e = b.begin(op.target, list(op.args), {}, op.outputs[0])
    square = b.emit(op, "square", "aten.mul.Tensor", [op.args[0], op.args[0]], shape, expansion=e)
    out = b.tensors[op.outputs[0]].shape
    args: list[Arg] = [square, dims or list(range(len(shape))), keep]
    total = b.emit(op, "squares", "aten.sum.dim_IntList", args, out, expansion=e)
    b.emit(op, "", "aten.sqrt.default", [total], out, expansion=e)
    return True


def _positional(op: Op, index: int, default: Arg) -> Arg:
    return op.args[index] if len(op.args) > index else default


def _cross_entropy(b: _Builder, op: Op) -> bool:
    logits, labels = op.args[0], op.args[1]
    weight, reduction, ignored = _positional(op, 2, None), _positional(op, 3, 1), _positional(op, 4, -100)
    smoothing = _positional(op, 5, 0.0)
    shape = b.tensors[op.inputs[0]].shape
    mean, total = 1, 2
    if weight is not None or reduction not in (mean, total) or len(shape) != 2 or len(b.tensors[labels[1:]].shape) != 1:
        raise CaptureError(
            f"this form of cross_entropy is not supported, in {op.module or 'the model'}",
            given=f"class weights {weight}, reduction {reduction}, logits {shape}",
            required="logits [tokens, classes], labels [tokens], no class weights, reduction mean or sum",
            todo="flatten batch and sequence: F.cross_entropy(logits.flatten(0, 1), labels.flatten())",
        )
    rows, column, dtype = (shape[0],), (shape[0], 1), b.tensors[op.inputs[0]].dtype
    counted = b.emit(op, "counted", "aten.ne.Scalar", [labels, ignored], rows, dtype="bool")
    cast = {"dtype": f"torch.{dtype}"}
    share = b.emit(op, "share", "aten._to_copy.default", [counted], rows, dtype=dtype, kwargs=cast)
    if reduction == mean:
        count = b.emit(op, "count", "aten.sum.default", [share], (), dtype=dtype)
        share = b.emit(op, "weight", "aten.div.Tensor", [share, count], rows, dtype=dtype)
    e = b.begin("planloom.weighted_cross_entropy", [logits, labels, share, ignored, smoothing], {}, op.outputs[0])

    def emit(suffix: str, target: str, args: list[Arg], out_shape: tuple[int, ...]) -> str:
        return b.emit(op, suffix, target, args, out_shape, dtype=dtype, expansion=e)

    top = emit("max", "planloom.statistic_max", [logits, 1], column)
    shifted = emit("shifted", "aten.sub.Tensor", [logits, top], shape)
    exponential = emit("exp", "aten.exp.default", [shifted], shape)
    total_exp = emit("sum", "aten.sum.dim_IntList", [exponential, [1], True], column)
    picked = emit("picked", "planloom.pick", [logits, labels], rows)
    log = emit("log", "aten.log.default", [total_exp], column)
    normalizer = emit("normalizer", "aten.add.Tensor", [log, top], column)
    flat = emit("flat", "aten.squeeze.dim", [normalizer, 1], rows)
    if smoothing:
        everything = emit("everything", "aten.sum.dim_IntList", [logits, [1]], rows)
        spread = emit("spread", "aten.mul.Tensor", [everything, smoothing / shape[1]], rows)
        sharp = emit("sharp", "aten.mul.Tensor", [picked, 1 - smoothing], rows)
        picked = emit("smooth", "aten.add.Tensor", [sharp, spread], rows)
    losses = emit("losses", "aten.sub.Tensor", [flat, picked], rows)
    weighted = emit("weighted", "aten.mul.Tensor", [losses, share], rows)
    emit("", "aten.sum.default", [weighted], ())
    return True


_EPSILON = {"float32": 2.0**-23, "float64": 2.0**-52, "bfloat16": 2.0**-7, "float16": 2.0**-10}
"""The machine's rounding, which torch's rms_norm adds if no other number is given."""

_EXPANDED = {
    "aten.linear.default": _linear,
    "aten.addmm.default": _addmm,
    "planloom.convolution": _convolution,
    "aten.layer_norm.default": _layer_norm,
    "aten.rms_norm.default": _rms_norm,
    "aten.softmax.int": _softmax,
    "aten._softmax.default": _softmax,
    "aten.log_softmax.int": _softmax,
    "aten._log_softmax.default": _softmax,
    "aten.linalg_vector_norm.default": _vector_norm,
    "aten.cross_entropy_loss.default": _cross_entropy,
}
