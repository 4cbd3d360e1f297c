"""Forms of random numbers, and of attention, which may draw them."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from planloom.capture.canonical.shapes import cast, expanded, reshaped, unsqueezed
from planloom.capture.canonical.table import Result, argument, form, val
from planloom.graph import FLOAT_MARK, RANDOM_STATE, Arg, reference

if TYPE_CHECKING:
    from planloom.capture.translate import Translator


@form("aten.dropout.default", "aten.native_dropout.default")
def _dropout(t: Translator, node: fx.Node) -> Result:
    source, p = t.name(node.args[0]), float(node.args[1])  # type: ignore[arg-type]
    train = node.args[2] is not False
    name = dropped(t, source, p) if p and train else source
    return [name, None] if "native" in str(node.target) else name


def dropped(t: Translator, source: str, p: float) -> str:
    """Dropout whose mask is a function of the element, the operator's number, the step and the seed."""
    tensor, number = t.tensors[source], t.random_number()
    args: list[Arg] = [reference(source), p, number, reference(RANDOM_STATE)]
    return t.emit("planloom.dropout", args, tensor.shape, tensor.dtype)


@form("aten.rand.default", "aten.rand_like.default", "aten.randn.default", "aten.randn_like.default")
def _random(t: Translator, node: fx.Node) -> Result:
    word = "planloom.normal" if "randn" in str(node.target) else "planloom.uniform"
    return _drawn(t, word, val(node).shape, val(node).dtype)


def _drawn(t: Translator, target: str, shape: Sequence[int], dtype: Any) -> str:
    args: list[Arg] = [list(shape), str(dtype), t.random_number(), reference(RANDOM_STATE)]
    return t.emit(target, args, shape, dtype)


@form("aten.bernoulli.default", "aten.bernoulli.p")
def _bernoulli(t: Translator, node: fx.Node) -> Result:
    value = val(node)
    dtype = value.dtype if value.dtype.is_floating_point else torch.float32
    drawn = reference(_drawn(t, "planloom.uniform", value.shape, dtype))
    if str(node.target).endswith(".p"):
        chosen = t.emit("aten.lt.Scalar", [drawn, node.args[1]], value.shape, torch.bool)  # type: ignore[list-item]
    else:
        chosen = t.emit("aten.lt.Tensor", [drawn, t.arg(node.args[0])], value.shape, torch.bool)
    return cast(t, chosen, value.dtype)


@form("aten.scaled_dot_product_attention.default")
def _attention(t: Translator, node: fx.Node) -> Result:
    """With dropout: products, softmax and dropout one by one, for the fused operator draws its own numbers."""
    p, rank = float(argument(node, 4, 0.0, "dropout_p")), val(node).dim()
    if not p:
        return _attention_of_one_head(t, node) if rank == 3 else None
    q, k, v = (t.name(node.args[i]) for i in range(3))  # type: ignore[arg-type]
    mask, is_causal = argument(node, 3, None, "attn_mask"), argument(node, 5, False, "is_causal")
    scale = argument(node, 6, None, "scale")
    shape, keys, dtype = t.tensors[q].shape, t.tensors[k].shape, t.tensors[q].dtype
    group = shape[1] // keys[1] if rank == 4 else 1
    if group > 1:
        k, v = (_grouped(t, name, group) for name in (k, v))
        keys = t.tensors[k].shape
    scale = 1 / sqrt(shape[-1]) if scale is None else scale
    scaled = t.emit("aten.mul.Tensor", [reference(q), scale], shape, dtype)
    turned = t.emit("aten.transpose.int", [reference(k), -2, -1], [*keys[:-2], keys[-1], keys[-2]], dtype)
    grid = [*shape[:-1], keys[-2]]
    scores = t.emit("aten.matmul.default", [reference(scaled), reference(turned)], grid, dtype)
    if is_causal:
        causal = t.emit("planloom.causal_mask", [shape[-2], keys[-2]], [shape[-2], keys[-2]], torch.bool)
        scores = _masked(t, scores, causal)
    if mask is not None:
        name = t.name(mask)
        if t.tensors[name].dtype == "bool":
            scores = _masked(t, scores, name)
        else:
            scores = t.emit("aten.add.Tensor", [reference(scores), reference(name)], grid, dtype)
    weights = t.emit("aten._safe_softmax.default", [reference(scores), -1], grid, dtype)
    kept = dropped(t, weights, p)
    out = [*shape[:-1], t.tensors[v].shape[-1]]
    return t.emit("aten.matmul.default", [reference(kept), reference(v)], out, dtype)


def _attention_of_one_head(t: Translator, node: fx.Node) -> str:
    """Attention [batch, sequence, size]: the same with one head."""
    args: list[Arg] = [reference(unsqueezed(t, t.name(a), 1)) for a in node.args[:3]]  # type: ignore[arg-type]
    rest = [t.arg(a) for a in node.args[3:]]
    kwargs = {key: t.arg(value) for key, value in node.kwargs.items()}
    mask = rest[0] if rest else kwargs.get("attn_mask")
    if isinstance(mask, str) and len(t.tensors[mask[1:]].shape) == 3:
        raised = reference(unsqueezed(t, mask[1:], 1))
        rest, kwargs = ([raised, *rest[1:]], kwargs) if rest else (rest, {**kwargs, "attn_mask": raised})
    batch, length, size = val(node).shape
    name = t.emit(str(node.target), [*args, *rest], (batch, 1, length, size), val(node).dtype, kwargs)
    return reshaped(t, name, val(node).shape)


def _masked(t: Translator, scores: str, mask: str) -> str:
    shape, dtype = t.tensors[scores].shape, t.tensors[scores].dtype
    inverse = t.emit("aten.logical_not.default", [reference(mask)], t.tensors[mask].shape, torch.bool)
    args: list[Arg] = [reference(scores), reference(inverse), f"{FLOAT_MARK}-inf"]
    return t.emit("aten.masked_fill.Scalar", args, shape, dtype)


def _grouped(t: Translator, name: str, group: int) -> str:
    """Keys or values [batch, heads, …] once for each of a group of queries."""
    batch, heads, length, size = t.tensors[name].shape
    wide = expanded(t, unsqueezed(t, name, 2), [batch, heads, group, length, size])
    return reshaped(t, wide, [batch, heads * group, length, size])
