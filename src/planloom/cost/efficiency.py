"""Seconds of matrix products by shape, and what share of its peak figures a device reaches.

A library computes C[m, n] = A[m, k] B[k, n], `batch` times, by one of several kernels. A kernel cuts C into tiles of
t_m × t_n, and k into s splits; every processor of the device takes one such unit after another:

    units   u = batch ⌈m/t_m⌉ ⌈n/t_n⌉ s / processors                       in units a processor
    waves   w = quantization ⌈u⌉ + (1 - quantization) max(u, 1)            a last wave that is not full costs its share
    compute c = w 2 t_m t_n (⌈k/s⌉ + start_depth) / (rate a processor × share_t)          k/s in steps of 64
            share_t = peak_share / (1 + tile_loss (1/t_m + 1/t_n) 64)      small tiles load more for each operation
    memory  b = (bytes of A, B, C + split_bytes batch m n s if s > 1) / (bandwidth × memory_share)
    seconds t = (start_seconds + (c^p + b^p)^(1/p))                        p: how well the two overlap
              × (1 + sustained_loss / (1 + sustained_seconds × rate / flops))

and the library takes the fastest kernel. `start_depth` is the filling of the pipeline and the writing of the tile, in
units of k; the last factor is the lower clock, and the cache's end, in large products. In a training step the device is
at work all the time, and small products have the lower clock, too: there the factor is 1 + sustained_loss. The
constants are fitted to measured products for each device (`benchmarks/roofline_fit.py` writes `efficiency.yaml`, which
says from what); rate and bandwidth are those of the cluster file. A device that nobody measured has a general form
without tiles, and a larger uncertainty.
"""

import importlib.resources
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from math import ceil
from typing import Any

import yaml

from planloom.cluster import Device
from planloom.errors import PriceError

_CONSTANTS = importlib.resources.files("planloom.cost") / "efficiency.yaml"

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Rows and columns of tiles that libraries' kernels have; (n, m) and (m, n) differ where a dim is small or odd."""

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Into how many parts k may be cut."""

MIN_SPLIT_DEPTH = 128
"""A part of k is not cut smaller: two or more steps of a kernel's inner loop."""

MAX_SPLIT_WAVES = 4
"""k is cut to fill processors that have nothing to do; with so many units each there are none."""

DEPTH_STEP = 64
"""The inner loop of a kernel goes over k in steps of this size."""

SMALL_SECONDS, LARGE_SECONDS = 10e-6, 50e-6
"""Products below and above these have an uncertainty of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Modelled seconds, and one standard deviation of them, relative."""

    seconds: float
    uncertainty: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What a kind of device reaches of its peak figures; the letters of the constants are above.

    `num_processors` 0: not fitted, no tiles. `stream_share`: of the memory bandwidth, in pointwise kernels and copies.
    `is_asynchronous`: the host launches kernels while the device computes. `uncertainty`: of small, medium and large
    products.
    """

    num_processors: int
    start_seconds: float
    memory_share: float
    stream_share: float
    start_depth: float
    quantization: float
    overlap: float
    peak_share: float
    tile_loss: float
    split_bytes: float
    sustained_loss: float
    sustained_seconds: float
    is_asynchronous: bool
    uncertainty: tuple[float, float, float]


GENERAL = Efficiency(
    num_processors=0,
    start_seconds=0.0,
    memory_share=0.8,
    stream_share=0.8,
    start_depth=128.0,
    quantization=0.0,
    overlap=3.0,
    peak_share=0.78,
    tile_loss=0.0,
    split_bytes=0.0,
    sustained_loss=0.0,
    sustained_seconds=0.0,
    is_asynchronous=False,
    uncertainty=(0.5, 0.4, 0.3),
)
"""For devices that nobody measured. peak_share: the median that large bf16 products reach on A100, H100, H200 (0.793,
0.779, 0.783: column large_gemm_median_frac_of_peak of hardware.csv, from ai-dynamo/aiconfigurator@095f58a); start_depth
and overlap: about what the fits of `efficiency.yaml` have; the shares of the bandwidth and the uncertainties are
assumed."""


@cache
def _fitted() -> dict[str, Efficiency]:
    document: dict[str, Any] = yaml.safe_load(_CONSTANTS.read_text(encoding="utf-8"))
    return {
        name: Efficiency(**{**constants, "uncertainty": tuple(constants["uncertainty"])})
        for name, constants in document["devices"].items()
    }


def fitted_devices() -> tuple[str, ...]:
    """The kinds of devices with constants of their own."""
    return tuple(_fitted())


@lru_cache(maxsize=256)
def efficiency_of(device_name: str) -> Efficiency:
    """The constants of a device: `H100` of `H100-SXM5-80GB` and of `NVIDIA H100 80GB HBM3`, general ones if unknown."""
    words = re.split(r"[^A-Z0-9]+", device_name.upper())
    return next((found for name, found in _fitted().items() if name in words), GENERAL)


def rate_of(device: Device, dtype: str) -> float:
    """The peak rate of products in a dtype."""
    rate = device.flops_per_second.get(dtype)
    if rate is None:
        raise PriceError(
            f"device {device.name} has no rate for {dtype}",
            given=f"rates for {sorted(device.flops_per_second)}",
            required=f"a rate for {dtype}",
            todo="add it to the cluster file, or profile on this device",
        )
    return rate


def product_seconds(device: Device, dtype: str, item_bytes: int, shape: tuple[int, int, int, int]) -> Estimate:
    """One kernel on the device: `batch` products [m, k] × [k, n], shape (batch, m, n, k)."""
    rate = rate_of(device, dtype)
    return _product(efficiency_of(device.name), rate, device.memory_bytes_per_second, item_bytes, shape)


@lru_cache(maxsize=1 << 17)
def _product(
    efficiency: Efficiency, rate: float, bandwidth: float, item_bytes: int, shape: tuple[int, int, int, int]
) -> Estimate:
    seconds = modelled_product(efficiency, rate, bandwidth, item_bytes, shape, sustained=True)
    small, medium, large = efficiency.uncertainty
    uncertainty = small if seconds < SMALL_SECONDS else medium if seconds < LARGE_SECONDS else large
    return Estimate(seconds=seconds, uncertainty=uncertainty)


def modelled_product(
    e: Efficiency,
    rate: float,
    bandwidth: float,
    item_bytes: int,
    shape: tuple[int, int, int, int],
    *,
    sustained: bool = False,
) -> float:
    """The formula above, for one product; `sustained`: in a step, where one follows another for seconds."""
    batch, m, n, k = shape
    num_bytes = item_bytes * batch * (m * k + k * n + m * n)
    memory = num_bytes / (bandwidth * e.memory_share)
    flops = 2.0 * batch * m * n * k
    if not e.num_processors:
        compute = flops * (1 + e.start_depth / k) / (rate * e.peak_share)
        best = (compute**e.overlap + memory**e.overlap) ** (1 / e.overlap)
    else:
        best = min(_kernels(e, rate, bandwidth, memory, shape))
    loss = 1 + e.sustained_loss / (1 + (0.0 if sustained else e.sustained_seconds * rate / flops))
    return float((e.start_seconds + best) * loss)


def _kernels(
    e: Efficiency, rate: float, bandwidth: float, memory: float, shape: tuple[int, int, int, int]
) -> list[float]:
    """Seconds with every kernel that may be taken, without its start."""
    batch, m, n, k = shape
    p, found = e.overlap, []
    for rows, columns in TILES:
        tiles = batch * ceil(m / rows) * ceil(n / columns) / e.num_processors
        share = e.peak_share / (1 + e.tile_loss * (1 / rows + 1 / columns) * DEPTH_STEP)
        unit = 2 * rows * columns * e.num_processors / (rate * share)
        for split in SPLITS:
            units = tiles * split
            if split > 1 and (k < MIN_SPLIT_DEPTH * split or units > MAX_SPLIT_WAVES):
                break
            waves = e.quantization * ceil(units) + (1 - e.quantization) * max(units, 1.0)
            compute = waves * unit * (ceil(k / split / DEPTH_STEP) * DEPTH_STEP + e.start_depth)
            partial = e.split_bytes * batch * m * n * split / (bandwidth * e.memory_share) if split > 1 else 0.0
            found.append((compute**p + (memory + partial) ** p) ** (1 / p))
    return found
