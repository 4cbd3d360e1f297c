"""Flash attention with its logarithms of sums, by torch's kernels.

With scores s of a query, attention gives o = Σ exp(s_j − l) v_j with l = log Σ exp(s_j), and its backward is written
with results and logarithms alone: p_j = exp(s_j − l). So who knows the o and l of *more* than the keys at hand (of a
sink: `sinks`; of keys that lay on other devices: `execute.ring_attention`) gives them to the backward in place of the
kernel's own, and gets the exact cotangents of the keys at hand.

Kernels: on the CPU torch's flash kernel, with a mask where there is a window; on a GPU flash attention (bfloat16 and
float16, no mask), which skips what a window hides, else the memory-efficient kernel with a mask.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Which keys a query sees: if `is_causal` none behind it, and of those up to its own the last `window` (0: all).

    `offset`: how far the first query lies behind the first key.
    """

    is_causal: bool
    window: int = 0
    offset: int = 0

    def sees_nothing(self, num_queries: int, num_keys: int) -> bool:
        """Is every key hidden from every query?"""
        nearest, farthest = self.offset - num_keys + 1, self.offset + num_queries - 1
        return self.is_causal and (farthest < 0 or 0 < self.window <= nearest)

    def sees_all(self, num_queries: int, num_keys: int) -> bool:
        """Does every query see every key?"""
        nearest, farthest = self.offset - num_keys + 1, self.offset + num_queries - 1
        return not self.is_causal or (nearest >= 0 and not 0 < self.window <= farthest)

    @property
    def is_plain(self) -> bool:
        """Is it a causal mask as kernels know it?"""
        return self.is_causal and not self.window and not self.offset


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sight: Sight, scale: float
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Results, logarithms of sums [batch, heads, queries], and what else the kernel's backward wants.

    [batch, heads, queries, size]; keys and values may have fewer heads. `mask`: true where a query sees a key.
    """
    if _is_flash(q, mask, sight):
        found = torch.ops.aten._flash_attention_forward(
            *(x.transpose(1, 2) for x in (q, k, v)), None, None, q.shape[2], k.shape[2], 0.0,
            _is_masked(q, k, sight), False, scale=scale, **_sides(q, k, sight),
        )  # fmt: skip
        return found[0].transpose(1, 2), found[1], [found[2], found[3]]
    keys, values = _repeated(k, q), _repeated(v, q)
    if q.device.type == "cuda":
        found = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, keys, values, _bias(q, k, mask, sight), True, 0.0, False, scale=scale
        )
        return found[0], found[1][..., : q.shape[2]], [found[2], found[3]]
    bias = _bias_for_cpu(q, k, mask, sight)
    result, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, keys, values, 0.0, bias is None and _is_masked(q, k, sight), attn_mask=bias, scale=scale
    )
    return result, sums, []


def attend_backward(
    cotangent: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    result: Tensor,
    sums: Tensor,
    state: list[Tensor],
    sight: Sight,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The cotangents of queries, keys and values, from results and logarithms of sums over these keys and any others."""
    if _is_flash(q, mask, sight):
        flipped = [x.transpose(1, 2) for x in (cotangent, q, k, v, result)]
        found = torch.ops.aten._flash_attention_backward(
            *flipped, sums, None, None, q.shape[2], k.shape[2], 0.0, _is_masked(q, k, sight), *state,
            scale=scale, **_sides(q, k, sight),
        )  # fmt: skip
        return found[0].transpose(1, 2), found[1].transpose(1, 2), found[2].transpose(1, 2)
    keys, values = _repeated(k, q), _repeated(v, q)
    if q.device.type == "cuda":
        of_q, of_k, of_v, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            cotangent, q, keys, values, _bias(q, k, mask, sight), result, _padded(sums), *state, 0.0,
            [True, True, True, False], False, scale=scale,
        )  # fmt: skip
    else:
        bias = _bias_for_cpu(q, k, mask, sight)
        of_q, of_k, of_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            cotangent, q, keys, values, result, sums, 0.0, bias is None and _is_masked(q, k, sight), attn_mask=bias,
            scale=scale,
        )  # fmt: skip
    return of_q, _summed(of_k, k), _summed(of_v, v)


def _is_flash(q: Tensor, mask: Tensor | None, sight: Sight) -> bool:
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    return q.device.type == "cuda" and is_half and mask is None and not (sight.window and sight.offset)


def _is_masked(q: Tensor, k: Tensor, sight: Sight) -> bool:
    return not sight.sees_all(q.shape[2], k.shape[2])


def _bias_for_cpu(q: Tensor, k: Tensor, mask: Tensor | None, sight: Sight) -> Tensor | None:
    is_known = sight.is_plain or not _is_masked(q, k, sight)
    return None if mask is None and is_known else _bias(q, k, mask, sight)


_MULTIPLE = 32
"""Of queries, to which the memory-efficient kernel pads its logarithms of sums."""


def _padded(sums: Tensor) -> Tensor:
    missing = -sums.shape[2] % _MULTIPLE
    return torch.nn.functional.pad(sums, (0, missing), value=float("inf")) if missing else sums.contiguous()


def _sides(q: Tensor, k: Tensor, sight: Sight) -> dict[str, int]:
    is_limited = sight.window and _is_masked(q, k, sight)
    return {"window_size_left": sight.window - 1, "window_size_right": 0} if is_limited else {}


def _repeated(x: Tensor, q: Tensor) -> Tensor:
    """Every head of keys or values for each of its queries' heads."""
    group = q.shape[1] // x.shape[1]
    return x if group == 1 else x.repeat_interleave(group, 1)


def _summed(cotangent: Tensor, x: Tensor) -> Tensor:
    group = cotangent.shape[1] // x.shape[1]
    return cotangent if group == 1 else cotangent.unflatten(1, (x.shape[1], group)).sum(2)


def _bias(q: Tensor, k: Tensor, mask: Tensor | None, sight: Sight) -> Tensor:
    """What is added to scores: nothing, or −∞ where a query does not see a key.

    Where keys lie elsewhere a query may see none of these: then a number so low that they count for nothing beside any
    other key, for −∞ from −∞ is none.
    """
    seen = mask if mask is not None else torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    if sight.is_causal:
        seen = seen.tril(sight.offset)
        if sight.window:
            seen = seen.triu(sight.offset + 1 - sight.window)
    hidden = torch.finfo(q.dtype).min / 2 if sight.offset else float("-inf")
    bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, hidden)
    return bias.expand(q.shape[0], q.shape[1], -1, -1)
