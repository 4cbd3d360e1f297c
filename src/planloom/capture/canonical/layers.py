"""Forms of reductions, losses, convolutions and batch norm."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from planloom.capture.canonical.shapes import cast, reshaped
from planloom.capture.canonical.table import CANONICAL, Form, Result, argument, form, val
from planloom.graph import Arg, reference

if TYPE_CHECKING:
    from planloom.capture.translate import Translator


@form("aten.var_mean.correction")
def _var_mean(t: Translator, node: fx.Node) -> Result:
    source, dims = reference(t.name(node.args[0])), t.arg(argument(node, 1, None, "dim"))  # type: ignore[arg-type]
    keep, (variance, mean) = bool(node.kwargs.get("keepdim", False)), val(node)
    dims = dims if dims is not None else list(range(val(node.args[0]).dim()))
    kwargs = {"correction": t.arg(node.kwargs.get("correction")), "keepdim": keep}
    return [
        t.emit("aten.var.correction", [source, dims], variance.shape, variance.dtype, kwargs),
        t.emit("aten.mean.dim", [source, dims, keep], mean.shape, mean.dtype),
    ]


@form("aten.adaptive_avg_pool1d.default", "aten.adaptive_avg_pool2d.default")
def _pool(t: Translator, node: fx.Node) -> Result:
    if any(size != 1 for size in node.args[1]):  # type: ignore[union-attr]
        return None
    value = val(node)
    dims = [-1] if "1d" in str(node.target) else [-2, -1]
    args: list[Arg] = [reference(t.name(node.args[0])), dims, True]  # type: ignore[arg-type]
    return t.emit("aten.mean.dim", args, value.shape, value.dtype)


def _loss_form(reduction_at: int) -> Form:
    def form(t: Translator, node: fx.Node) -> Result:
        reduction = argument(node, reduction_at, 1, "reduction")
        if reduction == 0:
            return None
        source = t.tensors[t.name(node.args[0])]  # type: ignore[arg-type]
        args = [t.arg(a) for a in node.args[:reduction_at]]
        args += [None] * (reduction_at - len(args)) + [0]
        rest = [t.arg(a) for a in node.args[reduction_at + 1 :]]
        kwargs = {k: t.arg(v) for k, v in node.kwargs.items() if k != "reduction"}
        name = t.emit(str(node.target), [*args, *rest], source.shape, val(node).dtype, kwargs)
        target = "aten.mean.default" if reduction == 1 else "aten.sum.default"
        return t.emit(target, [reference(name)], (), val(node).dtype)

    return form


_LOSSES: dict[str, Form] = {
    "aten.mse_loss.default": _loss_form(2),
    "aten.l1_loss.default": _loss_form(2),
    "aten.smooth_l1_loss.default": _loss_form(2),
    "aten.huber_loss.default": _loss_form(2),
    "aten.binary_cross_entropy_with_logits.default": _loss_form(4),
    "aten.binary_cross_entropy.default": _loss_form(3),
}
CANONICAL.update(_LOSSES)


@form("aten.embedding_renorm.default", "aten.embedding_renorm_.default")
def _embedding_renorm(t: Translator, node: fx.Node) -> Result:
    raise t.error(
        "an embedding with max_norm writes into its parameter",
        required="a forward pass that leaves parameters as they are",
        todo="leave out max_norm, and normalize what the embedding returns",
    )


@form("aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default", "aten.convolution.default")
def _convolution(t: Translator, node: fx.Node) -> Result:
    """Without the number of groups: it follows from the shapes, of a piece as of the whole."""
    source, weight = (t.name(node.args[i]) for i in range(2))  # type: ignore[arg-type]
    num_dims = len(t.tensors[weight].shape) - 2
    bias = argument(node, 2, None, "bias")
    if str(node.target) == "aten.convolution.default":
        if node.args[6]:  # transposed
            return None
        stride, padding, dilation = node.args[3:6]
    else:
        stride, padding, dilation = (
            argument(node, i, default, key) for i, default, key in ((3, 1, "stride"), (4, 0, "padding"), (5, 1, ""))
        )
    if isinstance(padding, str) or len(t.tensors[source].shape) != num_dims + 2:
        return None
    sizes: list[Arg] = [_each(value, num_dims) for value in (stride, padding, dilation)]
    args = [reference(source), reference(weight), t.arg(bias), *sizes]
    return t.emit("planloom.convolution", args, val(node).shape, val(node).dtype)


def _each(value: Any, count: int) -> list[int]:
    values = [value] * count if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


@form(
    "aten._native_batch_norm_legit_functional.default",
    "aten._native_batch_norm_legit_no_training.default",
    "aten._native_batch_norm_legit.no_stats",
)
def _batch_norm(t: Translator, node: fx.Node) -> Result:
    """Batch norm by its parts, in float32 at least; in training the running statistics are results, too."""
    has_running = not str(node.target).endswith("no_stats")
    training = not str(node.target).endswith("no_training.default")
    tensors: list[Any] = [None if a is None else t.name(a) for a in node.args[: 5 if has_running else 3]]  # type: ignore[arg-type]
    source, weight, bias, running_mean, running_var = [*tensors, None, None][:5]
    momentum, eps = (node.args[-2], node.args[-1])
    wide = torch.promote_types(val(node.args[0]).dtype, torch.float32)
    source = cast(t, source, wide)
    shape, dtype = t.tensors[source].shape, t.tensors[source].dtype
    column = (1, shape[1], *[1] * (len(shape) - 2))

    def emit(target: str, *args: Any, shape: Sequence[int] = column) -> str:
        return t.emit(target, [reference(a) if isinstance(a, str) else a for a in args], shape, dtype)

    dims: list[Arg] = [i for i in range(len(shape)) if i != 1]
    if training:
        mean = emit("aten.mean.dim", source, dims, True)
        centered = emit("aten.sub.Tensor", source, mean, shape=shape)
        square = emit("aten.mul.Tensor", centered, centered, shape=shape)
        variance = emit("aten.mean.dim", square, dims, True)
    else:
        mean, variance = (reshaped(t, str(name), column) for name in (running_mean, running_var))
        centered = emit("aten.sub.Tensor", source, mean, shape=shape)
    scale = emit("aten.rsqrt.default", emit("aten.add.Tensor", variance, eps))
    result = emit("aten.mul.Tensor", centered, scale, shape=shape)
    if weight is not None:
        result = emit("aten.mul.Tensor", result, reshaped(t, weight, column), shape=shape)
    if bias is not None:
        result = emit("aten.add.Tensor", result, reshaped(t, bias, column), shape=shape)
    result = cast(t, result, val(node)[0].dtype)
    if not training or not has_running:
        return [result, None, None]
    count = prod(shape) // shape[1]
    updated = []
    for old, new, factor in ((running_mean, mean, 1.0), (running_var, variance, count / max(count - 1, 1))):
        flat = emit("aten.detach.default", reshaped(t, new, [shape[1]]), shape=[shape[1]])
        share = emit("aten.mul.Tensor", flat, momentum * factor, shape=[shape[1]])  # type: ignore[operator]
        kept = emit("aten.mul.Tensor", old, 1 - momentum, shape=[shape[1]])  # type: ignore[operator]
        updated.append(emit("aten.add.Tensor", kept, share, shape=[shape[1]]))
    return [result, None, None, *updated]
