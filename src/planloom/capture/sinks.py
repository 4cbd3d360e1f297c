"""Attention with sinks as one operator.

A *sink* is a logit of every head beside those of the keys, with no value: with scores s of a query,

    y = Σ exp(s_j) v_j / (Σ exp(s_j) + exp(sink))

Written out (as Hugging Face's GPT-OSS does for want of a kernel) it stores scores of all pairs of queries and keys. But
flash attention gives o and l = log Σ exp(s_j), and with l' = log(exp(l) + exp(sink)),

    y = o exp(l − l')

and the backward of flash attention is written with results and logarithms alone, p_j = exp(s_j − l'): given y and l'
in place of o and l it is that of attention with sinks. The sink's gradient is −Σ (dy · y) exp(sink − l').

The kernels are those of `flash`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor  # tried with torch 2.11 and 2.13

from planloom.capture.flash import Sight, attend, attend_backward

IMPLEMENTATION = "planloom_sinks"
TARGET = "planloom.sink_attention.default"

_LIBRARY = torch.library.Library("planloom", "FRAGMENT")
_LIBRARY.define(
    "sink_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor sinks, bool is_causal, int window, float scale)"
    " -> Tensor"
)


@torch.library.register_fake("planloom::sink_attention", lib=_LIBRARY)
def _shape(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor, is_causal: bool, window: int, scale: float
) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


def sink_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor, is_causal: bool, window: int, scale: float
) -> Tensor:
    """[batch, heads, queries, size]; keys and values may have fewer heads. `mask`: true where a query sees a key;
    `window`: of so many keys up to its own, of which a query of causal attention sees no others; 0: of all."""
    return _SinkAttention.apply(q, k, v, mask, sinks, is_causal, window, scale)  # type: ignore[no-any-return,no-untyped-call]


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        sinks: Tensor,
        is_causal: bool,
        window: int,
        scale: float,
    ) -> Tensor:
        how = (Sight(is_causal=is_causal, window=window), scale)
        result, sums, state = attend(q, k, v, mask, *how)
        whole = torch.logaddexp(sums, sinks.to(sums.dtype).view(1, -1, 1))
        result = result * (sums - whole).exp().unsqueeze(-1).to(result.dtype)
        ctx.save_for_backward(q, k, v, mask, sinks, result, whole, *state)
        ctx.how = how
        return result

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, sinks, result, whole, *state = ctx.saved_tensors
        cotangent = cotangent.to(result.dtype)
        of_sinks = sinks_cotangent(cotangent, sinks, result, whole) if ctx.needs_input_grad[4] else None
        if not any(ctx.needs_input_grad[:3]):
            return None, None, None, None, of_sinks, None, None, None
        of_q, of_k, of_v = attend_backward(cotangent, q, k, v, mask, result, whole, state, *ctx.how)
        return of_q, of_k, of_v, None, of_sinks, None, None, None


def sinks_cotangent(cotangent: Tensor, sinks: Tensor, result: Tensor, whole: Tensor) -> Tensor:
    """The gradient of the sinks; `whole`: logarithms of sums with the sinks."""
    given = (cotangent * result).sum(-1, dtype=whole.dtype)
    share = (sinks.to(whole.dtype).view(1, -1, 1) - whole).exp()
    return -(given * share).sum((0, 2)).to(sinks.dtype)


def attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    s_aux: Tensor,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """In place of Hugging Face's attention functions."""
    is_causal = attention_mask is None and module.is_causal and query.shape[2] > 1
    window = sliding_window if is_causal and sliding_window and sliding_window < query.shape[2] else 0
    is_fake = isinstance(query, FakeTensor) or query.device.type == "meta"
    function = torch.ops.planloom.sink_attention if is_fake else sink_attention
    result = function(query, key, value, attention_mask, s_aux, is_causal, window, scaling)
    return result.transpose(1, 2).contiguous(), None


@contextmanager
def our_sinks(model: nn.Module) -> Iterator[None]:
    """While a model is traced: Hugging Face's attention with sinks, where it would be written out, by our operator.

    Dropout of weights of attention is none of it: such models stay as they are.
    """
    modules: list[Any] = [module for module in model.modules() if _is_written_out(module)]
    configs: dict[int, Any] = {id(module.config): module.config for module in modules}
    if not configs:
        yield
        return
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, sdpa_mask)
    try:
        for config in configs.values():
            config._attn_implementation_internal = IMPLEMENTATION
        yield
    finally:
        for config in configs.values():
            config._attn_implementation_internal = "eager"


def _is_written_out(module: nn.Module) -> bool:
    config = getattr(module, "config", None)
    has_sinks = isinstance(getattr(module, "sinks", None), nn.Parameter) and hasattr(module, "is_causal")
    if not has_sinks or getattr(config, "_attn_implementation", None) != "eager":
        return False
    return not getattr(module, "attention_dropout", 0.0)
