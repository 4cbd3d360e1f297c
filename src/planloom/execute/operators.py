"""Operators by name: ATen's, and our own.

Our own operators, and the forms that one-hot contractions take when their vocabulary is split: indices outside the
piece contribute zero, so that the pieces sum to the whole.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from planloom.capture.experts import combine, dispatch, grouped_bias, grouped_linear
from planloom.capture.sinks import sink_attention
from planloom.execute.random import dropout, normal, uniform
from planloom.graph import FLOAT_MARK, Arg


def statistic_max(x: Tensor, dim: int) -> Tensor:
    """A maximum used as a statistic: it carries no cotangent."""
    return x.detach().amax(dim, keepdim=True)


def pick(logits: Tensor, labels: Tensor, offset: int = 0) -> Tensor:
    """logits[i, labels[i] − offset], zero where that lies outside."""
    index = labels - offset
    inside = (index >= 0) & (index < logits.shape[1])
    picked = logits.gather(1, index.clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
    return torch.where(inside, picked, torch.zeros_like(picked))


def embedding(weight: Tensor, indices: Tensor, padding: int = -1, *_: Any, offset: int = 0) -> Tensor:
    """Rows of a table of which this device holds those from `offset` on; row `padding` of the whole has no gradient."""
    index, count = indices - offset, weight.shape[0]
    inside = (index >= 0) & (index < count)
    own_padding = padding - offset if padding >= 0 and 0 <= padding - offset < count else None
    rows = F.embedding(index.clamp(0, count - 1), weight, padding_idx=own_padding)
    return torch.where(inside.unsqueeze(-1), rows, torch.zeros_like(rows))


def gather(x: Tensor, dim: int, index: Tensor, *, offset: int = 0) -> Tensor:
    """x gathered along a dim of which this device holds the part from `offset` on; zero where that lies outside."""
    own, count = index - offset, x.shape[dim]
    inside = (own >= 0) & (own < count)
    found = x.gather(dim, own.clamp(0, count - 1))
    return torch.where(inside, found, torch.zeros_like(found))


def index_select(x: Tensor, dim: int, index: Tensor, *, offset: int = 0) -> Tensor:
    """x at these indices of a dim of which this device holds the part from `offset` on; zero elsewhere."""
    own, count = index - offset, x.shape[dim]
    inside = (own >= 0) & (own < count)
    shape = [-1 if i == dim % x.dim() else 1 for i in range(x.dim())]
    found = x.index_select(dim, own.clamp(0, count - 1))
    return torch.where(inside.view(shape), found, torch.zeros_like(found))


def topk(x: Tensor, count: int, dim: int, largest: bool, ordered: bool) -> Tensor:
    """The indices of the largest (or smallest) elements along a dim."""
    if count == x.shape[dim]:
        return x.detach().argsort(dim=dim, descending=largest, stable=True)
    return x.detach().topk(count, dim, largest, ordered).indices


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int]
) -> Tensor:
    """A convolution in as many groups as the channels of input and weight say."""
    function = (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3]
    return function(x, weight, bias, stride, padding, dilation, x.shape[1] // weight.shape[1])  # type: ignore[operator]


def root(x: Tensor) -> Tensor:
    """The square root, whose derivative at zero is zero here, as that of a norm."""
    some = x > 0
    return torch.where(some, torch.where(some, x, 1).sqrt(), 0)


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """True where a query may see a key: not later than itself."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril()


def weighted_cross_entropy(
    logits: Tensor, labels: Tensor, weight: Tensor, ignored: int, smoothing: float = 0.0
) -> Tensor:
    """The sum of the tokens' losses, each with its weight."""
    losses = F.cross_entropy(logits, labels, reduction="none", ignore_index=ignored, label_smoothing=smoothing)
    return (losses * weight).sum().to(logits.dtype)


def constant(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor written into the forward pass."""
    return torch.tensor(values, dtype=dtype, device=device)


OWN: dict[str, Callable[..., Tensor]] = {
    "planloom.causal_mask": causal_mask,
    "planloom.combine.default": combine,
    "planloom.dispatch.default": dispatch,
    "planloom.grouped_bias.default": grouped_bias,
    "planloom.grouped_linear.default": grouped_linear,
    "planloom.convolution": convolution,
    "planloom.dropout": dropout,
    "planloom.normal": normal,
    "planloom.root": root,
    "planloom.topk": topk,
    "planloom.uniform": uniform,
    "planloom.constant": constant,
    "planloom.sink_attention.default": sink_attention,
    "planloom.statistic_max": statistic_max,
    "planloom.pick": pick,
    "planloom.weighted_cross_entropy": weighted_cross_entropy,
}
ONE_HOT: dict[str, Callable[..., Tensor]] = {
    "aten.embedding.default": embedding,
    "aten.gather.default": gather,
    "aten.index_select.default": index_select,
    "planloom.pick": pick,
}


@cache
def operator(target: str) -> Callable[..., Tensor]:
    """The callable of an operator's name, as the graph spells it."""
    if target in OWN:
        return OWN[target]
    namespace, name, overload = target.split(".", 2)
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)  # type: ignore[no-any-return]


def plain(arg: Arg) -> Any:
    """An argument without tensors, as torch takes it."""
    if isinstance(arg, str) and arg.startswith(FLOAT_MARK):
        return float(arg.removeprefix(FLOAT_MARK))
    if isinstance(arg, str) and arg.startswith("torch."):
        return getattr(torch, arg.removeprefix("torch."))
    if isinstance(arg, list | tuple):
        return [plain(item) for item in arg]
    return arg
