"""Operators of a graph by name, as sequences of what autograd knows.

An operator that is not here is *unknown*: it is taken to save its inputs and its result, and its backward to make a
gradient of every input; reports name such operators.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planloom.cost.eager import indexing, pointwise, products, views
from planloom.cost.eager.tape import Tape
from planloom.cost.eager.values import Value, is_float, item_bytes
from planloom.program import Operand


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One operator with its arguments: values, numbers, strings and lists of them.

    `result`: its result on one device; `is_split`: the vocabulary of a one-hot contraction is; `share`: what a mean is
    scaled by.
    """

    target: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Operand
    is_split: bool = False
    share: float = 1.0

    def get(self, index: int, default: Any = None, key: str = "") -> Any:
        """A positional or keyword argument."""
        return self.args[index] if len(self.args) > index else self.kwargs.get(key, default)


Form = Callable[[Tape, Call], Value]
_FORMS: dict[str, Form] = {}


def is_known(target: str) -> bool:
    """Is it known what autograd saves for this operator?"""
    return target in _FORMS


def execute(tape: Tape, call: Call) -> Value:
    """The result of an operator."""
    result = _FORMS.get(call.target, _unknown)(tape, call)
    return result if call.share == 1 else pointwise.mul(tape, result, call.share)


def _form(*targets: str) -> Callable[[Form], Form]:
    def register(form: Form) -> Form:
        _FORMS.update(dict.fromkeys(targets, form))
        return form

    return register


def _unknown(tape: Tape, call: Call) -> Value:
    values = [arg for arg in _flat([call.args, list(call.kwargs.values())]) if isinstance(arg, Value)]
    result = tape.new(call.result.shape, call.result.dtype)
    shapes = [value.shape for value in values]
    saved = [*values, result]
    return tape.record(call.target, result, values, saved, lambda i, kept, c: tape.new(shapes[i], c.dtype))


def _flat(args: Any) -> list[Any]:
    if isinstance(args, list | tuple):
        return [item for arg in args for item in _flat(arg)]
    return [args]


# -- operators that take their arguments as they are


def _direct(function: Callable[..., Value], num_args: int) -> Form:
    def form(tape: Tape, call: Call) -> Value:
        return function(tape, *call.args[:num_args])

    return form


for _target, _function, _num_args in (
    ("aten.permute.default", views.permute, 2),
    ("aten.transpose.int", views.transpose, 3),
    ("aten.t.default", views.transposed, 1),
    ("aten.reshape.default", views.reshape, 2),
    ("aten.view.default", views.reshape, 2),
    ("aten.expand.default", views.expand, 2),
    ("aten.select.int", views.select, 3),
    ("aten.slice.Tensor", views.slice_, 5),
    ("aten.unsqueeze.default", views.unsqueeze, 2),
    ("aten.squeeze.dim", views.squeeze, 2),
    ("aten.squeeze.dims", views.squeeze, 2),
    ("aten.cat.default", views.cat, 2),
    ("aten.add.Tensor", pointwise.add, 2),
    ("aten.mul.Tensor", pointwise.mul, 2),
    ("aten.div.Tensor", pointwise.div, 2),
    ("aten.pow.Tensor_Scalar", pointwise.power, 2),
    ("aten.clamp.default", pointwise.clamp, 1),
    ("aten.clamp_min.default", pointwise.clamp, 1),
    ("aten.clamp_max.default", pointwise.clamp, 1),
    ("aten.where.self", pointwise.where, 3),
    ("aten.where.ScalarOther", pointwise.where, 3),
    ("aten.where.ScalarSelf", pointwise.where, 3),
    ("aten.masked_fill.Scalar", pointwise.masked_fill, 2),
    ("aten.linear.default", products.linear, 3),
    ("aten.mm.default", products.mm, 2),
    ("aten.bmm.default", products.bmm, 2),
    ("aten.matmul.default", products.matmul, 2),
    ("aten.einsum.default", products.einsum, 2),
    ("planloom.root", indexing.root, 1),
    ("planloom.dropout", indexing.dropout, 1),
    ("planloom.pick", indexing.pick, 2),
    ("planloom.grouped_bias.default", indexing.grouped_bias, 2),
    ("planloom.combine.default", indexing.combine, 3),
):
    _FORMS[_target] = _direct(_function, _num_args)


@_form("aten.detach.default")
def _detach(tape: Tape, call: Call) -> Value:
    value: Value = call.args[0]
    return value.detached()


# -- pointwise


@_form(*pointwise.UNARY)
def _unary(tape: Tape, call: Call) -> Value:
    return pointwise.unary(tape, call.target, call.args[0])


@_form(*pointwise.NOT_DIFFERENTIABLE)
def _constant(tape: Tape, call: Call) -> Value:
    return tape.pointwise([arg for arg in call.args if isinstance(arg, Value)], call.result.dtype)


@_form("aten.sub.Tensor")
def _sub(tape: Tape, call: Call) -> Value:
    return pointwise.add(tape, *call.args[:2], negative=True)


@_form("aten._to_copy.default")
def _cast(tape: Tape, call: Call) -> Value:
    value: Value = call.args[0]
    if not is_float(call.result.dtype):
        return tape.pointwise([value], call.result.dtype)
    return pointwise.cast(tape, value, call.result.dtype)


@_form("aten.sum.dim_IntList", "aten.mean.dim", "aten.sum.default", "aten.mean.default")
def _total(tape: Tape, call: Call) -> Value:
    mean = ".mean." in call.target
    return pointwise.total(tape, call.args[0], call.get(1) or (), keep=bool(call.get(2, False)), mean=mean)


@_form(
    "aten.softmax.int",
    "aten._softmax.default",
    "aten._safe_softmax.default",
    "aten.log_softmax.int",
    "aten._log_softmax.default",
)
def _softmax(tape: Tape, call: Call) -> Value:
    x = pointwise.cast(tape, call.args[0], call.result.dtype)
    return pointwise.softmax(tape, x, is_safe="_safe_" in call.target)


@_form("planloom.statistic_max", "aten.argmax.default", "aten.argmin.default")
def _statistic(tape: Tape, call: Call) -> Value:
    return tape.new(call.result.shape, call.result.dtype)


@_form("aten.cumsum.default")
def _cumsum(tape: Tape, call: Call) -> Value:
    x: Value = call.args[0]
    shape = x.shape

    def gradient(i: int, saved: list[Value], cotangent: Value) -> Value:
        held = tape.new(shape, cotangent.dtype), tape.new(shape, cotangent.dtype)
        result = tape.new(shape, cotangent.dtype)
        del held
        return result

    return tape.record("cumsum", tape.new(shape, call.result.dtype), [x], [], gradient)


@_form("aten.roll.default", "aten.flip.default")
def _moved(tape: Tape, call: Call) -> Value:
    """A roll along several dims is one after the other."""
    x: Value = call.args[0]
    is_twice = ".roll." in call.target and len(call.get(2) or ()) > 1

    def gradient(i: int, saved: list[Value], cotangent: Value) -> Value:
        held = tape.new(cotangent.shape, cotangent.dtype) if is_twice else None
        result = tape.new(cotangent.shape, cotangent.dtype)
        del held
        return result

    return tape.record("roll", gradient(0, [], x), [x], [], gradient)


@_form("aten.pad.default", "aten.constant_pad_nd.default")
def _pad(tape: Tape, call: Call) -> Value:
    x: Value = call.args[0]
    shape = x.shape
    result = tape.new(call.result.shape, x.dtype)
    return tape.record("pad", result, [x], [], lambda i, saved, c: tape.new(shape, c.dtype))


# -- products


@_form("aten.addmm.default")
def _addmm(tape: Tape, call: Call) -> Value:
    bias, a, b = call.args[:3]
    return products.mm(tape, a, b, bias)


@_form("planloom.convolution")
def _convolution(tape: Tape, call: Call) -> Value:
    return products.convolution(tape, call.args[0], call.args[1], call.args[2], call.result.shape)


@_form("aten.scaled_dot_product_attention.default")
def _attention(tape: Tape, call: Call) -> Value:
    q, k, v = call.args[:3]
    return products.attention(tape, q, k, v, call.get(3, None, "attn_mask"), dropout=call.get(4, 0.0, "dropout_p"))


@_form("planloom.sink_attention.default")
def _sink_attention(tape: Tape, call: Call) -> Value:
    q, k, v, mask, sinks, _, window, _ = call.args
    return products.sink_attention(tape, q, k, v, mask, sinks, window=window)


# -- indices, norms, losses, experts


@_form("aten.embedding.default")
def _embedding(tape: Tape, call: Call) -> Value:
    function = indexing.split_embedding if call.is_split else indexing.embedding
    return function(tape, *call.args[:2])


@_form("aten.gather.default")
def _gather(tape: Tape, call: Call) -> Value:
    function = indexing.split_gather if call.is_split else indexing.gather
    return function(tape, call.args[0], call.args[2])


@_form("aten.index_select.default")
def _index_select(tape: Tape, call: Call) -> Value:
    return indexing.index_select(tape, *call.args[:3], is_split=call.is_split)


@_form("aten.scatter.value", "aten.scatter.src")
def _scatter(tape: Tape, call: Call) -> Value:
    source = call.args[3] if isinstance(call.args[3], Value) else None
    return indexing.scatter(tape, call.args[0], call.args[2], source)


@_form("planloom.topk")
def _topk(tape: Tape, call: Call) -> Value:
    return indexing.topk(tape, *call.args[:3])


@_form("aten.layer_norm.default")
def _layer_norm(tape: Tape, call: Call) -> Value:
    return indexing.layer_norm(tape, call.args[0], len(call.args[1]), call.get(2), call.get(3))


@_form("aten.rms_norm.default")
def _rms_norm(tape: Tape, call: Call) -> Value:
    return indexing.rms_norm(tape, call.args[0], len(call.args[1]), call.get(2))


@_form("aten.linalg_vector_norm.default")
def _vector_norm(tape: Tape, call: Call) -> Value:
    return indexing.vector_norm(tape, call.args[0], call.get(2) or (), keep=bool(call.get(3, False)))


@_form("planloom.weighted_cross_entropy")
def _cross_entropy(tape: Tape, call: Call) -> Value:
    return indexing.cross_entropy(tape, call.args[0], call.args[1], call.args[2], call.get(4, 0.0))


@_form("planloom.dispatch.default")
def _dispatch(tape: Tape, call: Call) -> Value:
    rows = call.result
    return indexing.dispatch(tape, call.args[0], rows.num_bytes // (rows.shape[2] * item_bytes(rows.dtype)))


@_form("planloom.grouped_linear.default")
def _grouped_linear(tape: Tape, call: Call) -> Value:
    x, weight, _, is_transposed = call.args[:4]
    return indexing.grouped_linear(tape, x, weight, weight.shape[0], is_transposed=bool(is_transposed))
