"""Expansions: operators that reduce nonlinearly, as statistics and finish.

| original                  | stands as                                                                   |
|---------------------------|-----------------------------------------------------------------------------|
| linear, addmm, convolution with bias | product, then bias (a partial product must be reduced before the bias) |
| layer_norm                | sum, sum of squares around the mean, then normalization                     |
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
        like: str = "",
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
        dtype = dtype or self.tensors[like or origin.outputs[0]].dtype
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


class _Form:
    """The parts of an expansion, in float32 where the original's own sums are: for bfloat16 and float16."""

    def __init__(self, b: _Builder, op: Op, args: list[Arg], *, target: str = "") -> None:
        self.b, self.op = b, op
        self.narrow = b.tensors[op.inputs[0]].dtype if b.tensors[op.inputs[0]].dtype in _NARROW else ""
        self.dtype = "float32" if self.narrow else b.tensors[op.inputs[0]].dtype
        self.number = b.begin(target or op.target, args, {}, op.outputs[0])

    def __call__(self, suffix: str, target: str, args: list[Arg], shape: tuple[int, ...]) -> str:
        return self.b.emit(self.op, suffix, target, args, shape, dtype=self.dtype, expansion=self.number)

    def wide(self, x: Arg) -> Arg:
        """An input in the dtype of the sums."""
        return self._cast("wide", x, self.dtype) if self.narrow else x

    def finish(self, target: str, args: list[Arg], shape: tuple[int, ...]) -> None:
        """The last part, in the original's dtype."""
        if self.narrow:
            self._cast("", self("result", target, args, shape), self.b.tensors[self.op.outputs[0]].dtype)
        else:
            self("", target, args, shape)

    def _cast(self, suffix: str, x: Arg, dtype: str) -> str:
        shape, kwargs = self.b.tensors[x[1:]].shape, {"dtype": f"torch.{dtype}"}
        return self.b.emit(
            self.op, suffix, "aten._to_copy.default", [x], shape, dtype=dtype, expansion=self.number, kwargs=kwargs
        )


_NARROW = ("bfloat16", "float16")


def _layer_norm(b: _Builder, op: Op) -> bool:
    """The mean, then the mean of squares around it: one reduction would cancel where the mean is large."""
    normalized = op.args[1]
    shape = b.tensors[op.inputs[0]].shape
    dims = list(range(-len(normalized), 0))
    weight, bias, eps = _positional(op, 2, None), _positional(op, 3, None), _positional(op, 4, 1e-5)
    size, one = prod(normalized), (*shape[: -len(dims)], *[1] * len(dims))
    form = _Form(b, op, list(op.args[:5]))
    x = form.wide(op.args[0])
    total = form("sum", "aten.sum.dim_IntList", [x, dims, True], one)
    mean = form("mean", "aten.mul.Tensor", [total, 1 / size], one)
    centered = form("centered", "aten.sub.Tensor", [x, mean], shape)
    square = form("square", "aten.mul.Tensor", [centered, centered], shape)
    squares = form("squares", "aten.sum.dim_IntList", [square, dims, True], one)
    variance = form("variance", "aten.mul.Tensor", [squares, 1 / size], one)
    padded = form("padded", "aten.add.Tensor", [variance, eps], one)
    scale = form("scale", "aten.rsqrt.default", [padded], one)
    last: tuple[str, list[Arg]] = ("aten.mul.Tensor", [centered, scale])
    for suffix, target, parameter in (("scaled", "aten.mul.Tensor", weight), ("weighted", "aten.add.Tensor", bias)):
        if parameter is not None:
            last = (target, [form(suffix, *last, shape), parameter])
    form.finish(*last, shape)
    return True


def _rms_norm(b: _Builder, op: Op) -> bool:
    normalized = op.args[1]
    tensor = b.tensors[op.inputs[0]]
    weight, eps = _positional(op, 2, None), _positional(op, 3, None)
    eps = _EPSILON[tensor.dtype] if eps is None else eps
    dims = list(range(-len(normalized), 0))
    size, one = prod(normalized), (*tensor.shape[: -len(dims)], *[1] * len(dims))
    form = _Form(b, op, list(op.args))
    x = form.wide(op.args[0])
    square = form("square", "aten.mul.Tensor", [x, x], tensor.shape)
    squares = form("squares", "aten.sum.dim_IntList", [square, dims, True], one)
    moment = form("moment", "aten.mul.Tensor", [squares, 1 / size], one)
    padded = form("padded", "aten.add.Tensor", [moment, eps], one)
    scale = form("scale", "aten.rsqrt.default", [padded], one)
    last: list[Arg] = [x, scale]
    if weight is not None:
        last = [form("scaled", "aten.mul.Tensor", last, tensor.shape), weight]
    form.finish("aten.mul.Tensor", last, tensor.shape)
    return True


def _softmax(b: _Builder, op: Op) -> bool:
    x, dim = op.args[0], op.args[1]
    dtype = op.args[2] if len(op.args) > 2 else op.kwargs.get("dtype")
    shape = b.tensors[op.inputs[0]].shape
    if isinstance(dtype, str) and dtype.removeprefix("torch.") != b.tensors[op.inputs[0]].dtype:
        x = b.emit(op, "cast", "aten._to_copy.default", [x], shape, kwargs={"dtype": dtype})
        op = replace(op, args=(x, dim), kwargs={}, inputs=(x[1:],))
    one = tuple(1 if i == dim % len(shape) else size for i, size in enumerate(shape))
    form = _Form(b, op, [x, dim])
    x = form.wide(x)
    top = form("max", "planloom.statistic_max", [x, dim], one)
    is_safe = "safe" in op.target  # zeros, not NaN, where everything is masked
    if is_safe:
        top = form("finite", "aten.clamp_min.default", [top, -_LARGEST], one)
    shifted = form("shifted", "aten.sub.Tensor", [x, top], shape)
    exponential = form("exp", "aten.exp.default", [shifted], shape)
    total = form("sum", "aten.sum.dim_IntList", [exponential, [dim], True], one)
    if is_safe:
        total = form("some", "aten.clamp_min.default", [total, _SMALLEST], one)
    if "log" in op.target:
        form.finish("aten.sub.Tensor", [shifted, form("log", "aten.log.default", [total], one)], shape)
    else:
        form.finish("aten.div.Tensor", [exponential, total], shape)
    return True


_LARGEST, _SMALLEST = 3e38, 1e-38
"""Of float32, nearly."""


def _vector_norm(b: _Builder, op: Op) -> bool:
    order, dims, keep = _positional(op, 1, 2), _positional(op, 2, None), _positional(op, 3, False)
    shape = b.tensors[op.inputs[0]].shape
    if order != 2 or op.kwargs.get("dtype") is not None:
        return False
    form = _Form(b, op, list(op.args))
    x, out = form.wide(op.args[0]), b.tensors[op.outputs[0]].shape
    square = form("square", "aten.mul.Tensor", [x, x], shape)
    total = form("squares", "aten.sum.dim_IntList", [square, dims or list(range(len(shape))), keep], out)
    form.finish("planloom.root", [total], out)
    return True


def _positional(op: Op, index: int, default: Arg) -> Arg:
    return op.args[index] if len(op.args) > index else default


def _cross_entropy(b: _Builder, op: Op) -> bool:
    logits, labels = op.args[0], op.args[1]
    weight, reduction, ignored = _positional(op, 2, None), _positional(op, 3, 1), _positional(op, 4, -100)
    smoothing = _positional(op, 5, 0.0)
    shape, mean, total = b.tensors[op.inputs[0]].shape, 1, 2
    by_class = b.tensors[labels[1:]].is_float
    if weight is not None or reduction not in (mean, total) or by_class or len(shape) < 2:
        raise CaptureError(
            f"this form of cross_entropy is not supported, in {op.module or 'the model'}",
            given=f"logits {shape}, {'probabilities' if by_class else 'class numbers'} as labels, "
            f"class weights: {'no' if weight is None else 'yes'}, reduction {('none', 'mean', 'sum')[reduction]}",
            required="class numbers as labels, no class weights, reduction mean or sum",
            todo="write it with log_softmax, gather and sum",
        )
    if len(shape) > 2:  # [samples, classes, …]: the classes last, all else in one dim
        turned = (shape[0], *shape[2:], shape[1])
        order = [0, *range(2, len(shape)), 1]
        logits = b.emit(op, "turned", "aten.permute.default", [logits, order], turned, like=op.inputs[0])
        shape = (prod(turned[:-1]), shape[1])
        logits = b.emit(op, "rows", "aten.reshape.default", [logits, list(shape)], shape, like=op.inputs[0])
        labels = b.emit(op, "labels", "aten.reshape.default", [labels, [shape[0]]], (shape[0],), dtype="int64")
        op = replace(op, inputs=(logits[1:], labels[1:]))
    rows, column = (shape[0],), (shape[0], 1)
    counted = b.emit(op, "counted", "aten.ne.Scalar", [labels, ignored], rows, dtype="bool")
    wide = "float32" if b.tensors[op.inputs[0]].dtype in _NARROW else b.tensors[op.inputs[0]].dtype
    cast = {"dtype": f"torch.{wide}"}
    share = b.emit(op, "share", "aten._to_copy.default", [counted], rows, dtype=wide, kwargs=cast)
    if reduction == mean:
        count = b.emit(op, "count", "aten.sum.default", [share], (), dtype=wide)
        share = b.emit(op, "weight", "aten.div.Tensor", [share, count], rows, dtype=wide)
    args = [logits, labels, share, ignored, smoothing]
    form = _Form(b, op, args, target="planloom.weighted_cross_entropy")
    logits = form.wide(logits)
    top = form("max", "planloom.statistic_max", [logits, 1], column)
    shifted = form("shifted", "aten.sub.Tensor", [logits, top], shape)
    exponential = form("exp", "aten.exp.default", [shifted], shape)
    total_exp = form("sum", "aten.sum.dim_IntList", [exponential, [1], True], column)
    picked = form("picked", "planloom.pick", [logits, labels], rows)
    log = form("log", "aten.log.default", [total_exp], column)
    normalizer = form("normalizer", "aten.add.Tensor", [log, top], column)
    flat = form("flat", "aten.squeeze.dim", [normalizer, 1], rows)
    if smoothing:
        everything = form("everything", "aten.sum.dim_IntList", [logits, [1]], rows)
        spread = form("spread", "aten.mul.Tensor", [everything, smoothing / shape[1]], rows)
        sharp = form("sharp", "aten.mul.Tensor", [picked, 1 - smoothing], rows)
        picked = form("smooth", "aten.add.Tensor", [sharp, spread], rows)
    losses = form("losses", "aten.sub.Tensor", [flat, picked], rows)
    weighted = form("weighted", "aten.mul.Tensor", [losses, share], rows)
    form.finish("aten.sum.default", [weighted], ())
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
    "aten._safe_softmax.default": _softmax,
    "aten.log_softmax.int": _softmax,
    "aten._log_softmax.default": _softmax,
    "aten.linalg_vector_norm.default": _vector_norm,
    "aten.cross_entropy_loss.default": _cross_entropy,
}
