"""Attention with sinks as one operator.

A *sink* is a logit of every head beside those of the keys, with no value: with scores s of a query,

    y = Σ exp(s_j) v_j / (Σ exp(s_j) + exp(sink))

Written out (as Hugging Face's GPT-OSS does for want of a kernel) it stores scores of all pairs of queries and keys. But
flash attention gives o and l = log Σ exp(s_j), and with l' = log(exp(l) + exp(sink)),

    y = o exp(l − l')

and the backward of flash attention is written with results and logarithms alone, p_j = exp(s_j − l'): given y and l'
in place of o and l it is that of attention with sinks. The sink's gradient is −Σ (dy · y) exp(sink − l').

Kernels: on the CPU torch's flash kernel, with a mask where there is a window; on a GPU flash attention (bfloat16 and
float16, no mask), which skips what a window hides, else the memory-efficient kernel with a mask.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor  # tried with torch 2.11 and 2.13

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
        how = (is_causal, window, scale)
        result, sums, state = _forward(q, k, v, mask, *how)
        whole = torch.logaddexp(sums, sinks.to(sums.dtype).view(1, -1, 1))
        result = result * (sums - whole).exp().unsqueeze(-1).to(result.dtype)
        ctx.save_for_backward(q, k, v, mask, sinks, result, whole, *state)
        ctx.how = how
        return result

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, sinks, result, whole, *state = ctx.saved_tensors
        cotangent = cotangent.to(result.dtype)
        of_sinks = _of_sinks(cotangent, sinks, result, whole) if ctx.needs_input_grad[4] else None
        if not any(ctx.needs_input_grad[:3]):
            return None, None, None, None, of_sinks, None, None, None
        of_q, of_k, of_v = _backward(cotangent, q, k, v, mask, result, whole, state, *ctx.how)
        return of_q, of_k, of_v, None, of_sinks, None, None, None


def _of_sinks(cotangent: Tensor, sinks: Tensor, result: Tensor, whole: Tensor) -> Tensor:
    given = (cotangent * result).sum(-1, dtype=whole.dtype)
    share = (sinks.to(whole.dtype).view(1, -1, 1) - whole).exp()
    return -(given * share).sum((0, 2)).to(sinks.dtype)


def _is_flash(q: Tensor, mask: Tensor | None) -> bool:
    return q.device.type == "cuda" and q.dtype in (torch.bfloat16, torch.float16) and mask is None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, window: int, scale: float
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Results, logarithms of sums [batch, heads, queries], and what else the kernel's backward wants."""
    if _is_flash(q, mask):
        found = torch.ops.aten._flash_attention_forward(
            *(x.transpose(1, 2) for x in (q, k, v)), None, None, q.shape[2], k.shape[2], 0.0, is_causal, False,
            scale=scale, **_sides(window),
        )  # fmt: skip
        return found[0].transpose(1, 2), found[1], [found[2], found[3]]
    keys, values = _repeated(k, q), _repeated(v, q)
    if q.device.type == "cuda":
        found = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, keys, values, _bias(q, k, mask, is_causal, window), True, 0.0, False, scale=scale
        )
        return found[0], found[1][..., : q.shape[2]], [found[2], found[3]]
    bias = _bias(q, k, mask, is_causal, window) if mask is not None or window else None
    result, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, keys, values, 0.0, is_causal and bias is None, attn_mask=bias, scale=scale
    )
    return result, sums, []


def _backward(
    cotangent: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    result: Tensor,
    sums: Tensor,
    state: list[Tensor],
    is_causal: bool,
    window: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if _is_flash(q, mask):
        flipped = [x.transpose(1, 2) for x in (cotangent, q, k, v, result)]
        found = torch.ops.aten._flash_attention_backward(
            *flipped, sums, None, None, q.shape[2], k.shape[2], 0.0, is_causal, *state, scale=scale, **_sides(window)
        )
        return found[0].transpose(1, 2), found[1].transpose(1, 2), found[2].transpose(1, 2)
    keys, values = _repeated(k, q), _repeated(v, q)
    if q.device.type == "cuda":
        bias = _bias(q, k, mask, is_causal, window)
        of_q, of_k, of_v, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            cotangent, q, keys, values, bias, result, _padded(sums), *state, 0.0, [True, True, True, False],
            False, scale=scale,
        )  # fmt: skip
    else:
        some = _bias(q, k, mask, is_causal, window) if mask is not None or window else None
        of_q, of_k, of_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            cotangent, q, keys, values, result, sums, 0.0, is_causal and some is None, attn_mask=some, scale=scale
        )
    return of_q, _summed(of_k, k), _summed(of_v, v)


_MULTIPLE = 32
"""Of queries, to which the memory-efficient kernel pads its logarithms of sums."""


def _padded(sums: Tensor) -> Tensor:
    missing = -sums.shape[2] % _MULTIPLE
    return torch.nn.functional.pad(sums, (0, missing), value=float("inf")) if missing else sums.contiguous()


def _sides(window: int) -> dict[str, int]:
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Every head of keys or values for each of its queries' heads."""
    group = q.shape[1] // x.shape[1]
    return x if group == 1 else x.repeat_interleave(group, 1)


def _summed(cotangent: Tensor, x: Tensor) -> Tensor:
    group = cotangent.shape[1] // x.shape[1]
    return cotangent if group == 1 else cotangent.unflatten(1, (x.shape[1], group)).sum(2)


def _bias(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, window: int) -> Tensor:
    """What is added to scores: nothing, or −∞ where a query does not see a key."""
    seen = mask if mask is not None else torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    if is_causal:
        seen = seen.tril()
    if window:
        seen = seen.triu(1 - window)
    bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, float("-inf"))
    return bias.expand(q.shape[0], q.shape[1], -1, -1)


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
