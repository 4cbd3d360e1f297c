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
    return rows * inside.unsqueeze(-1).to(rows.dtype)


def weighted_cross_entropy(logits: Tensor, labels: Tensor, weight: Tensor, ignored: int) -> Tensor:
    """The sum of the tokens' losses, each with its weight."""
    return (F.cross_entropy(logits, labels, reduction="none", ignore_index=ignored) * weight).sum()


def constant(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor written into the forward pass."""
    return torch.tensor(values, dtype=dtype, device=device)


OWN: dict[str, Callable[..., Tensor]] = {
    "planloom.constant": constant,
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
