"""Seconds of attention as one kernel (flash attention), forward and backward, by shape.

With F = 2 batch heads s_q s_k (size + value) floating-point operations if nothing is masked,

    seconds = start + max(F work fill / (rate share), bytes / bandwidth)
    forward   work = 1 + h / s_k                            backward: 2.5 × as many operations, with its own share and h
    causal    work = ½ loss (1 + h_causal / s_k)            half of the scores, and masked halves of tiles
    window    work = loss_window (window + tile + ½ loss h_causal) / s_k, if that is less: the keys that a tile sees
    fill      waves of tiles of 128 queries over the processors, as for products (`efficiency.py`)

`share` is what the kernel that torch takes reaches of the peak rate on long sequences. From published figures:

    Hopper    cuDNN 9, which torch 2.11 takes by default on compute capability 9.0 and 10.0 (huggingface/transformers
              #48163); H100 SXM5, batch × sequence = 16,384, heads × size = 2,048; FlashAttention-3, arXiv:2407.08608,
              bar charts of attention speed as transcribed at subtext.edge.nugit.net (not compared with the paper; which
              charts are causal is inferred from their level), TFLOP/s for sequences of 512, 1k, 2k, 4k, 8k, 16k:
                  forward, size 128           497 574 617 609 600 595     causal  315 410 484 518 529 539
                  forward, size 64            335 373 395 408 412 413
                  forward, size 256, causal   308 391 450 483 497 509
                  backward, size 128          305 408 465 499 518 516     size 64 266 348 395 417 432 433
              The constants below give those for sizes 64 and 128 within 8 % (tests/pure/test_roofline.py).
    Ampere    FlashAttention-2, which torch takes there: up to 73 % of an A100's peak forward (arXiv:2307.08691,
              abstract). 63 % backward is from memory of the same paper, and what other head sizes and short sequences
              lose is assumed.
    others    as Ampere, assumed; with a larger uncertainty.
    sinks     run in FlashAttention-2 everywhere (`capture/sinks.py`). On Hopper [Empirical]: H200, torch 2.11.0+cu130,
              2026-11-18, 64 heads, 8 of keys, batch × sequence = 16,384; milliseconds forward / backward for sequences
              of 1k, 2k, 4k, 8k:
                  size 64, causal       0.614/1.909  1.007/3.112  1.877/5.561  3.637/10.41
                  size 128, causal      0.987/3.306  1.755/5.498  3.442/9.773  6.633/18.35
                  size 64, window 128   0.527/1.184  0.522/1.219  0.506/1.233  0.487/1.237
                  size 128, window 128  0.741/1.987  0.732/2.033  0.683/2.042  0.654/2.053
              The constants below give them within 15 %. Its instructions are Ampere's, which Blackwell is assumed to
              carry out at Hopper's rate.

Attention with a mask in a tensor runs in a slower kernel that also reads the mask: MASKED_SHARE is assumed.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Literal

from planloom.cluster import Device
from planloom.cost.efficiency import Efficiency, Estimate, efficiency_of, rate_of

Direction = Literal["forward", "backward"]

BACKWARD_FLOPS = 2.5
"""Five products where the forward has two: the scores are computed again."""

QUERY_TILE = 128
"""Queries that one unit of work takes. Assumed: usual in flash kernels."""

CAUSAL_LOSS = 1.09
"""Long causal sequences: 560 TFLOP/s where unmasked ones reach 610."""

MASKED_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares of the peak rate by head size, and the lengths h of the docstring, for one direction."""

    by_size: tuple[tuple[int, float], ...]
    extra_keys: float
    extra_keys_causal: float
    window_loss: tuple[float, float] = (1.0, 1.0)
    """At the least of the sizes, and from twice that on."""

    def of(self, size: float) -> float:
        """Linear between the sizes that were measured."""
        (low, share), *rest = self.by_size
        if size <= low:
            return share * size / low
        for high, above in rest:
            if size <= high:
                return share + (above - share) * (size - low) / (high - low)
            low, share = high, above
        return share

    def loss_of(self, size: float) -> float:
        """Of a window."""
        small, large = self.window_loss
        return large + (small - large) * min(max(2 - size / self.by_size[0][0], 0.0), 1.0)


_HOPPER: dict[Direction, Shares] = {
    "forward": Shares(by_size=((64, 0.42), (128, 0.617), (256, 0.58)), extra_keys=116.0, extra_keys_causal=370.0),
    "backward": Shares(by_size=((64, 0.45), (128, 0.536), (256, 0.5)), extra_keys=330.0, extra_keys_causal=580.0),
}
_AMPERE: dict[Direction, Shares] = {
    "forward": Shares(by_size=((64, 0.6), (128, 0.73), (256, 0.69)), extra_keys=116.0, extra_keys_causal=370.0),
    "backward": Shares(by_size=((64, 0.53), (128, 0.63), (256, 0.59)), extra_keys=330.0, extra_keys_causal=580.0),
}
_FLASH2_ON_HOPPER: dict[Direction, Shares] = {
    "forward": Shares(
        by_size=((64, 0.349), (128, 0.38)), extra_keys=116.0, extra_keys_causal=330.0, window_loss=(1.5, 1.1)
    ),
    "backward": Shares(by_size=((64, 0.312), (128, 0.352)), extra_keys=330.0, extra_keys_causal=570.0),
}
_FLASH2_RATE = 989e12
"""Of half precision, on Hopper and later."""
_HOPPER_LIKE = ("H100", "H200", "H20", "H800", "GH200", "B200", "B300", "GB200")
_HALF = ("bfloat16", "float16")
_UNCERTAINTY = {"H100": 0.1, "H200": 0.1, "A100": 0.2}
_UNKNOWN_UNCERTAINTY = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Local sizes: heads are those of the queries; keys and values have `key_heads`."""

    batch: int
    heads: int
    key_heads: int
    num_queries: int
    num_keys: int
    size: int
    value: int
    is_causal: bool
    mask_bytes: int = 0
    window: int = 0
    has_sinks: bool = False

    @property
    def flops(self) -> float:
        """Of the forward, if nothing were masked."""
        return 2.0 * self.batch * self.heads * self.num_queries * self.num_keys * (self.size + self.value)

    @property
    def num_elements(self) -> int:
        """Of queries, keys, values and results."""
        queries = self.heads * self.num_queries * (self.size + self.value)
        return self.batch * (queries + self.key_heads * self.num_keys * (self.size + self.value))


def attention_seconds(
    device: Device, dtype: str, item_bytes: int, shape: AttentionShape, direction: Direction
) -> Estimate:
    """One kernel on the device."""
    efficiency, rate = efficiency_of(device.name), rate_of(device, dtype)
    is_hopper = any(word in device.name for word in _HOPPER_LIKE)
    known = (found for word, found in _UNCERTAINTY.items() if word in device.name and dtype in _HALF)
    uncertainty = _UNKNOWN_UNCERTAINTY if shape.mask_bytes else next(known, _UNKNOWN_UNCERTAINTY)
    bandwidth = device.memory_bytes_per_second
    if is_hopper and shape.has_sinks:
        rate = min(rate, _FLASH2_RATE)
    seconds = _attention(efficiency, rate, bandwidth, item_bytes, shape, direction, is_hopper)
    return Estimate(seconds=seconds, uncertainty=uncertainty)


@lru_cache(maxsize=1 << 15)
def _attention(
    e: Efficiency,
    rate: float,
    bandwidth: float,
    item_bytes: int,
    shape: AttentionShape,
    direction: Direction,
    is_hopper: bool,
) -> float:
    on_hopper = _FLASH2_ON_HOPPER if shape.has_sinks else _HOPPER
    shares, size = (on_hopper if is_hopper else _AMPERE)[direction], (shape.size + shape.value) / 2
    share = shares.of(size)
    is_causal = shape.is_causal and shape.num_queries > 1
    extra = shares.extra_keys_causal if is_causal else shares.extra_keys
    work = (1 + extra / shape.num_keys) * (CAUSAL_LOSS / 2 if is_causal else 1.0)
    if is_causal and shape.window:
        seen = shape.window + QUERY_TILE + CAUSAL_LOSS / 2 * extra
        work = min(work, shares.loss_of(size) * seen / shape.num_keys)
    if direction == "backward":
        work *= BACKWARD_FLOPS
    if shape.mask_bytes:
        share *= MASKED_SHARE
    compute = shape.flops * work * _fill(e, shape) / (rate * share)
    passes = 1 if direction == "forward" else 2  # q, k, v, o; then these again, and their cotangents
    num_bytes = passes * shape.num_elements * item_bytes + shape.mask_bytes
    memory = num_bytes / (bandwidth * e.stream_share)
    return e.start_seconds + max(compute, memory)


def _fill(e: Efficiency, shape: AttentionShape) -> float:
    """How much longer it takes because the tiles do not fill the last wave, or not even one."""
    if not e.num_processors:
        return 1.0
    units = shape.batch * shape.heads * ceil(shape.num_queries / QUERY_TILE) / e.num_processors
    return (e.quantization * ceil(units) + (1 - e.quantization) * max(units, 1.0)) / units
