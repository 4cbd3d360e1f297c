"""Mixture of experts as operators with a ragged dim.

Each token goes to a few experts. The rows that experts compute are a tensor [experts, tokens, features] of which only
the routed part is stored: locally [1, n, features], one row for every true element of a mask [experts, tokens], sorted
by expert, then by token. So a split of experts or of tokens is a split like any other, and the change from the one to
the other an all-to-all with run-time counts.

    dispatch        tokens in, experts tokens -> experts tokens in
    grouped_linear  experts tokens in, experts out in, experts tokens -> experts tokens out
    grouped_bias    experts tokens out, experts out, experts tokens -> experts tokens out
    combine         experts tokens out, experts tokens, experts tokens -> tokens out

`experts_forward` writes Hugging Face's experts with them, through their interface for experts implementations. In a
trace they are opaque and have the shape of the whole; on real tensors they compute.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor  # tried with torch 2.11 and 2.13

IMPLEMENTATION = "planloom"


def dispatch(x: Tensor, mask: Tensor, per_token: int) -> Tensor:
    """The rows of all experts: those tokens that are routed to them. `per_token`: experts that a token is sent to."""
    return x.index_select(0, _routed(mask)[1]).unsqueeze(0)


def grouped_linear(x: Tensor, weight: Tensor, mask: Tensor, transposed: bool) -> Tensor:
    """Every row times its expert's matrix: [out, in], or [in, out] if transposed."""
    counts = mask.sum(1)
    if x.is_cuda and x.dtype == torch.bfloat16 and hasattr(torch.nn.functional, "grouped_mm"):
        matrices = weight if transposed else weight.transpose(1, 2)
        offsets = counts.cumsum(0).to(torch.int32)
        return torch.nn.functional.grouped_mm(x[0], matrices, offs=offsets).unsqueeze(0)
    parts = x[0].split(counts.tolist())
    products = [
        part @ matrix if transposed else torch.nn.functional.linear(part, matrix)
        for part, matrix in zip(parts, weight.unbind(0), strict=True)
    ]
    return torch.cat(products).unsqueeze(0)


def grouped_bias(x: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """Every row plus its expert's bias."""
    return x + bias.index_select(0, _routed(mask, x.shape[1])[0]).unsqueeze(0)


def combine(x: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """For every token the weighted sum of its rows."""
    experts, tokens = _routed(mask, x.shape[1])
    taken = weights[experts, tokens] if mask.is_cuda else weights[mask]
    weighted = x[0] * taken.unsqueeze(1)
    result = torch.zeros(mask.shape[1], x.shape[2], dtype=weighted.dtype, device=x.device)
    return result.index_add(0, tokens, weighted)


def _routed(mask: Tensor, num_rows: int | None = None) -> tuple[Tensor, Tensor]:
    """(expert, token) of every row. Where their number is known, a GPU is not waited for to count them."""
    if num_rows is None or not mask.is_cuda:
        experts, tokens = mask.nonzero().unbind(1)
        return experts, tokens
    places = mask.flatten().to(torch.uint8).argsort(descending=True, stable=True)[:num_rows]
    return places // mask.shape[1], places % mask.shape[1]


_LIBRARY = torch.library.Library("planloom", "DEF")
_LIBRARY.define("dispatch(Tensor x, Tensor mask, int per_token) -> Tensor")
_LIBRARY.define("grouped_linear(Tensor x, Tensor weight, Tensor mask, bool transposed) -> Tensor")
_LIBRARY.define("grouped_bias(Tensor x, Tensor bias, Tensor mask) -> Tensor")
_LIBRARY.define("combine(Tensor x, Tensor weights, Tensor mask) -> Tensor")


@torch.library.register_fake("planloom::dispatch", lib=_LIBRARY)
def _dispatch_shape(x: Tensor, mask: Tensor, per_token: int) -> Tensor:
    return x.new_empty(*mask.shape, x.shape[1])


@torch.library.register_fake("planloom::grouped_linear", lib=_LIBRARY)
def _linear_shape(x: Tensor, weight: Tensor, mask: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(*mask.shape, weight.shape[2 if transposed else 1])


@torch.library.register_fake("planloom::grouped_bias", lib=_LIBRARY)
def _bias_shape(x: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("planloom::combine", lib=_LIBRARY)
def _combine_shape(x: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    return x.new_empty(mask.shape[1], x.shape[2], dtype=torch.promote_types(x.dtype, weights.dtype))


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Hugging Face's experts: route, two products with a gate between them, combine."""
    ops: Any = torch.ops.planloom
    if not isinstance(hidden_states, FakeTensor) and hidden_states.device.type != "meta":
        ops = _REAL
    grid = (hidden_states.shape[0], self.num_experts)
    mask = torch.zeros(grid, dtype=torch.bool, device=hidden_states.device).scatter(1, top_k_index, True).t()
    weights = torch.zeros(grid, dtype=top_k_weights.dtype, device=hidden_states.device)
    weights = weights.scatter(1, top_k_index, top_k_weights).t()
    rows = ops.dispatch(hidden_states, mask, top_k_index.shape[1])
    first = self.gate_up_proj if self.has_gate else self.up_proj
    rows = ops.grouped_linear(rows, first, mask, self.is_transposed)
    if self.has_bias:
        bias = self.gate_up_proj_bias if self.has_gate else self.up_proj_bias
        rows = ops.grouped_bias(rows, bias, mask)
    rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    rows = ops.grouped_linear(rows, self.down_proj, mask, self.is_transposed)
    if self.has_bias:
        rows = ops.grouped_bias(rows, self.down_proj_bias, mask)
    if getattr(self, "has_post_expert_norm", False):
        rows = self.post_expert_norm(rows)
    return ops.combine(rows, weights, mask).to(hidden_states.dtype)  # type: ignore[no-any-return]


class _Real:
    dispatch = staticmethod(dispatch)
    grouped_linear = staticmethod(grouped_linear)
    grouped_bias = staticmethod(grouped_bias)
    combine = staticmethod(combine)


_REAL = _Real()


_MARKS = ("has_gate", "has_bias", "is_transposed")
"""What Hugging Face's decorator of experts classes sets on a module (seen in transformers 5.17 and 5.22)."""


def _takes_implementations(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    return hasattr(config, "_experts_implementation") and all(hasattr(module, mark) for mark in _MARKS)


@contextmanager
def our_experts(model: nn.Module) -> Iterator[None]:
    """While a model is traced: Hugging Face's experts by our operators."""
    modules: list[Any] = [module for module in model.modules() if _takes_implementations(module)]
    configs: dict[int, Any] = {id(module.config): module.config for module in modules}
    if not configs:
        yield
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    before = {key: config._experts_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._experts_implementation = IMPLEMENTATION
        yield
    finally:
        for key, config in configs.items():
            config._experts_implementation = before[key]
