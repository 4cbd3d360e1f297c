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

from planloom.graph import Arg


def statistic_max(x: Tensor, dim: int) -> Tensor:
    """A maximum used as a statistic: it carries no cotangent."""
    return x.detach().amax(dim, keepdim=True)


def pick(logits: Tensor, labels: Tensor, offset: int = 0) -> Tensor:
    """logits[i, labels[i] − offset], zero where that lies outside."""
    index = labels - offset
    inside = (index >= 0) & (index < logits.shape[1])
    picked = logits.gather(1, index.clamp(0, logits.shape[1] - 1).unsqueeze(1)).squeeze(1)
    return torch.where(inside, picked, torch.zeros_like(picked))


def embedding(weight: Tensor, indices: Tensor, *_: Any, offset: int = 0) -> Tensor:
    """Rows of a table of which this device holds those from `offset` on."""
    index = indices - offset
    inside = (index >= 0) & (index < weight.shape[0])
    rows = F.embedding(index.clamp(0, weight.shape[0] - 1), weight)
    return rows * inside.unsqueeze(-1).to(rows.dtype)


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weight: Tensor, ignored: int) -> Tensor:
    """The sum of the tokens' losses, each with its weight."""
    return (F.cross_entropy(logits, labels, reduction="none", ignore_index=ignored) * weight).sum()


OWN: dict[str, Callable[..., Tensor]] = {
    "planloom.statistic_max": statistic_max,
    "planloom.pick": pick,
    "planloom.weighted_cross_entropy": weighted_cross_entropy,
}
ONE_HOT: dict[str, Callable[..., Tensor]] = {"planloom.pick": pick, "aten.embedding.default": embedding}


@cache
def operator(target: str) -> Callable[..., Tensor]:
    """The callable of an operator's name, as the graph spells it."""
    if target in OWN:
        return OWN[target]
    namespace, name, overload = target.split(".", 2)
    found = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    # A piece has other strides than the whole: what was a view of the whole may need a copy.
    return torch.ops.aten.reshape.default if name in ("view", "_unsafe_view") else found  # type: ignore[no-any-return]


def plain(arg: Arg) -> Any:
    """An argument without tensors, as torch takes it."""
    if isinstance(arg, str) and arg.startswith("torch."):
        return getattr(torch, arg.removeprefix("torch."))
    if isinstance(arg, list | tuple):
        return [plain(item) for item in arg]
    return arg
