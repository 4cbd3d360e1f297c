"""Expansions: operators that reduce nonlinearly, as statistics and finish.

| original                  | stands as                                                                   |
|---------------------------|-----------------------------------------------------------------------------|
| linear with bias          | product, then bias (a partial product must be reduced before the bias)      |
| layer_norm                | sum and sum of squares, then normalization                                  |
| cross_entropy_loss (mean) | maximum, sum of exponentials, picked logit; weighted sum over the tokens    |

The blocks see the expanded form; a run that holds all operators of an expansion computes the original. The mean of a
loss divides by the number of labels in the whole batch, which depends on inputs alone: it becomes a `given` weight a
token.
"""

from dataclasses import replace

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


def _layer_norm(b: _Builder, op: Op) -> bool:
    x, normalized = op.args[0], op.args[1]
    shape = b.tensors[op.inputs[0]].shape
    if len(normalized) != 1:
        raise CaptureError(
            "a norm over several dims is not supported yet", given=f"{normalized} in {op.module}", required="one dim"
        )
    weight, bias, eps = _positional(op, 2, None), _positional(op, 3, None), _positional(op, 4, 1e-5)
    size, one = shape[-1], (*shape[:-1], 1)
    e = b.begin(op.target, list(op.args[:5]), {}, op.outputs[0])

    def emit(suffix: str, target: str, args: list[Arg], out_shape: tuple[int, ...], finish: bool = False) -> str:
        return b.emit(op, "" if finish else suffix, target, args, out_shape, expansion=e)

    total = emit("sum", "aten.sum.dim_IntList", [x, [-1], True], one)
    square = emit("square", "aten.mul.Tensor", [x, x], shape)
    squares = emit("squares", "aten.sum.dim_IntList", [square, [-1], True], one)
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


def _positional(op: Op, index: int, default: Arg) -> Arg:
    return op.args[index] if len(op.args) > index else default


def _cross_entropy(b: _Builder, op: Op) -> bool:
    logits, labels = op.args[0], op.args[1]
    weight, reduction, ignored = _positional(op, 2, None), _positional(op, 3, 1), _positional(op, 4, -100)
    smoothing = _positional(op, 5, 0.0)
    shape = b.tensors[op.inputs[0]].shape
    mean, total = 1, 2
    if weight is not None or smoothing or reduction not in (mean, total) or len(shape) != 2:
        raise CaptureError(
            "this form of cross_entropy is not supported yet",
            given=f"class weights {weight}, label smoothing {smoothing}, reduction {reduction}, logits {shape}",
            required="logits [tokens, classes], no class weights, no smoothing, reduction mean or sum",
        )
    rows, column, dtype = (shape[0],), (shape[0], 1), b.tensors[op.inputs[0]].dtype
    counted = b.emit(op, "counted", "aten.ne.Scalar", [labels, ignored], rows, dtype="bool")
    cast = {"dtype": f"torch.{dtype}"}
    share = b.emit(op, "share", "aten._to_copy.default", [counted], rows, dtype=dtype, kwargs=cast)
    if reduction == mean:
        count = b.emit(op, "count", "aten.sum.default", [share], (), dtype=dtype)
        share = b.emit(op, "weight", "aten.div.Tensor", [share, count], rows, dtype=dtype)
    e = b.begin("planloom.weighted_cross_entropy", [logits, labels, share, ignored], {}, op.outputs[0])

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
    losses = emit("losses", "aten.sub.Tensor", [flat, picked], rows)
    weighted = emit("weighted", "aten.mul.Tensor", [losses, share], rows)
    emit("", "aten.sum.default", [weighted], ())
    return True


_EXPANDED = {
    "aten.linear.default": _linear,
    "aten.layer_norm.default": _layer_norm,
    "aten.cross_entropy_loss.default": _cross_entropy,
}
