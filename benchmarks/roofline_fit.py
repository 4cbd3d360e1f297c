"""Fits the efficiency of matrix products by shape to measured ones, and shows how far off it is on products unseen.

The table `gemm_measured.csv` (71,358 bf16 products on A100, H100, H200 and B200, from ai-dynamo/aiconfigurator, Apache
2.0) is read where it lies, `--data`. For each GPU ten constants (`planloom.cost.efficiency`) are fitted to a random
sample of a random half of its products, by the mean absolute logarithm of predicted over measured seconds; all figures
are of products that the fit has not seen: those of the other half, and, with constants of a second fit, those with a k
that the second fit has not seen at all. `--write` writes `src/planloom/cost/efficiency.yaml`.
"""

import argparse
import csv
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from rich.table import Table
from scipy.optimize import minimize

from benchmarks.bars import Bar, Outcome, run_benchmark
from planloom.cost.efficiency import (
    DEPTH_STEP,
    LARGE_SECONDS,
    MAX_SPLIT_WAVES,
    MIN_SPLIT_DEPTH,
    SMALL_SECONDS,
    SPLITS,
    TILES,
    Efficiency,
)

DATA = Path(__file__).parent.parent.parent / "shared" / "data" / "gemm_measured.csv"
TARGET = Path(__file__).parent.parent / "src" / "planloom" / "cost" / "efficiency.yaml"
ITEM_BYTES = 2
SAMPLE, QUICK_SAMPLE = 3000, 800
UNSEEN_DEPTHS = (256, 1024, 3072, 5120, 10240, 51200)
SMALL_WEIGHT = 0.4  # of products under 50 us: a step's time is in the others
LARGE_FLOPS = 1e12
CEILING = 0.10

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """The figures that a fit needs: of the same data sheets as the presets of clusters."""

    num_processors: int
    rate: float
    bandwidth: float


# Streaming multiprocessors: data sheets; rates and bandwidths: hardware.csv, and presets in planloom.cluster.
CHIPS = {
    "A100": Chip(num_processors=108, rate=312e12, bandwidth=2.039e12),
    "H100": Chip(num_processors=132, rate=989e12, bandwidth=3.35e12),
    "H200": Chip(num_processors=132, rate=989e12, bandwidth=4.8e12),
    "B200": Chip(num_processors=148, rate=2250e12, bandwidth=8.0e12),
}
STREAM_SHARE = 0.9
"""[Empirical] NVIDIA H200, 2026-10-28: a copy from device to device through PyTorch moved 4.3 of 4.8 TB/s, read and
written; assumed for the other three."""

# The fitted constants, where a fit starts, and the way to an unbounded number: a logarithm, or of the odds of a share.
START = {
    "start_seconds": 3e-6,
    "memory_share": 0.82,
    "start_depth": 100.0,
    "quantization": 0.5,
    "overlap": 3.0,
    "peak_share": 0.86,
    "tile_loss": 0.2,
    "split_bytes": 10.0,
    "sustained_loss": 0.1,
    "sustained_seconds": 1e-3,
}
SHARES = ("memory_share", "quantization", "peak_share")


def measured(path: Path) -> dict[str, Floats]:
    """Rows m, n, k, seconds by GPU."""
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in CHIPS}
    with path.open() as lines:
        for row in csv.DictReader(lines):
            seconds = float(row["latency_us"]) * 1e-6
            found[row["gpu"].split("-")[0]].append((float(row["m"]), float(row["n"]), float(row["k"]), seconds))
    return {name: np.array(rows) for name, rows in found.items()}


def predicted(c: dict[str, float], chip: Chip, rows: Floats) -> Floats:
    """`planloom.cost.efficiency.modelled_product` for many products at once."""
    m, n, k = rows[:, 0], rows[:, 1], rows[:, 2]
    p = c["overlap"]
    bandwidth = chip.bandwidth * c["memory_share"]
    memory = ITEM_BYTES * (m * k + k * n + m * n) / bandwidth
    best = np.full(len(rows), np.inf)
    for tile_rows, tile_columns in TILES:
        tiles = np.ceil(m / tile_rows) * np.ceil(n / tile_columns) / chip.num_processors
        share = c["peak_share"] / (1 + c["tile_loss"] * (1 / tile_rows + 1 / tile_columns) * DEPTH_STEP)
        unit = 2 * tile_rows * tile_columns * chip.num_processors / (chip.rate * share)
        for split in SPLITS:
            units = tiles * split
            waves = c["quantization"] * np.ceil(units) + (1 - c["quantization"]) * np.maximum(units, 1)
            compute = waves * unit * (np.ceil(k / split / DEPTH_STEP) * DEPTH_STEP + c["start_depth"])
            partial = c["split_bytes"] * m * n * split / bandwidth if split > 1 else 0.0
            seconds = (compute**p + (memory + partial) ** p) ** (1 / p)
            if split > 1:
                seconds = np.where((k < MIN_SPLIT_DEPTH * split) | (units > MAX_SPLIT_WAVES), np.inf, seconds)
            best = np.minimum(best, seconds)
    loss = 1 + c["sustained_loss"] / (1 + c["sustained_seconds"] * chip.rate / (2 * m * n * k))
    return np.asarray((c["start_seconds"] + best) * loss)


def constants(free: Floats) -> dict[str, float]:
    found = {}
    for name, value in zip(START, free, strict=True):
        number = float(np.exp(value))
        found[name] = number / (1 + number) if name in SHARES else 1 + number if name == "overlap" else number
    return found


def _free(start: dict[str, float]) -> Floats:
    def one(name: str, value: float) -> float:
        return float(np.log(value / (1 - value) if name in SHARES else value - 1 if name == "overlap" else value))

    return np.array([one(name, value) for name, value in start.items()])


def fit(chip: Chip, rows: Floats, *, num_steps: int) -> dict[str, float]:
    """The constants with the least mean of |log(predicted / measured)|, by the simplex method."""
    weight = np.where(rows[:, 3] < LARGE_SECONDS, SMALL_WEIGHT, 1.0)
    start = _free(START)

    def loss(free: Floats) -> float:
        errors = np.abs(np.log(predicted(constants(free), chip, rows) / rows[:, 3]))
        return float((weight * errors).sum() / weight.sum() + 1e-5 * ((free - start) ** 2).sum())

    simplex = np.vstack([start, start + 0.5 * np.eye(len(start))])
    options = {"maxfev": num_steps, "adaptive": True, "initial_simplex": simplex}
    return constants(minimize(loss, start, method="Nelder-Mead", options=options).x)


def groups(rows: Floats) -> dict[str, NDArray[np.bool_]]:
    seconds, flops = rows[:, 3], 2 * rows[:, 0] * rows[:, 1] * rows[:, 2]
    return {
        "all": seconds > 0,
        "under 10 us": seconds < SMALL_SECONDS,
        "10 to 50 us": (seconds >= SMALL_SECONDS) & (seconds < LARGE_SECONDS),
        "over 50 us": seconds >= LARGE_SECONDS,
        "over 1 TFLOP": flops > LARGE_FLOPS,
    }


def figures(c: dict[str, float], chip: Chip, rows: Floats) -> dict[str, dict[str, float]]:
    ratio = predicted(c, chip, rows) / rows[:, 3]
    return {
        name: {
            "num": int(chosen.sum()),
            "mape": float(np.abs(ratio[chosen] - 1).mean()),
            "p90": float(np.percentile(np.abs(ratio[chosen] - 1), 90)),
            "bias": float(np.exp(np.log(ratio[chosen]).mean()) - 1),
            "deviation": float(np.sqrt((np.log(ratio[chosen]) ** 2).mean())),
        }
        for name, chosen in groups(rows).items()
    }


def efficiency(name: str, c: dict[str, float], held_out: dict[str, dict[str, float]]) -> Efficiency:
    deviations = [round(held_out[group]["deviation"], 3) for group in list(held_out)[1:4]]
    return Efficiency(
        **{key: float(f"{value:.4g}") for key, value in c.items()},
        num_processors=CHIPS[name].num_processors,
        stream_share=STREAM_SHARE,
        is_asynchronous=True,
        uncertainty=(deviations[0], deviations[1], deviations[2]),
    )


HEADER = """# Shares of peak figures that matrix products reach, by device; efficiency.py says what the constants are.
# Written by `python -m benchmarks.roofline_fit --write`.
# Fitted to half of the bf16 products of gemm_measured.csv: ai-dynamo/aiconfigurator@095f58a (Apache-2.0), A100: sglang
# 0.5.10, others: TensorRT-LLM 1.3.0rc20. uncertainty: standard deviation of log(predicted / measured) on the other
# half, products under 10 us, from 10 to 50 us, and longer. stream_share: see benchmarks/roofline_fit.py.
"""


def measure(arguments: argparse.Namespace) -> Outcome:
    num_rows, num_steps = (QUICK_SAMPLE, 500) if arguments.quick else (SAMPLE, 2500)
    table = Table("GPU", "products", "unseen", "number", "MAPE", "p90", "bias", title="products that no fit has seen")
    document: dict[str, Any] = {}
    found: dict[str, Efficiency] = {}
    bars = []
    for name, rows in measured(arguments.data).items():
        chip, shuffled = CHIPS[name], np.random.default_rng(0).permutation(rows)
        half = len(rows) // 2
        best = fit(chip, shuffled[:half][:num_rows], num_steps=num_steps)
        held_out = figures(best, chip, shuffled[half:])
        found[name] = efficiency(name, best, held_out)
        is_unseen = np.isin(shuffled[:, 2], UNSEEN_DEPTHS)
        second = fit(chip, shuffled[~is_unseen][:num_rows], num_steps=num_steps)
        depths = figures(second, chip, shuffled[is_unseen])
        for unseen, shown in (("half", held_out), ("some k", depths)):
            for group, errors in shown.items():
                line = [f"{errors[key]:.1%}" for key in ("mape", "p90", "bias")]
                table.add_row(name, group, unseen, f"{errors['num']:,}", *line)
        document[name] = {"constants": best, "unseen_half": held_out, "unseen_k": depths}
        bars.append(Bar(name=f"{name}: MAPE over 50 us", figure=held_out["over 50 us"]["mape"], ceiling=CEILING))
        bars.append(Bar(name=f"{name}: the same, unseen k", figure=depths["over 50 us"]["mape"], ceiling=CEILING))
    if arguments.write:
        devices = {name: {**asdict(one), "uncertainty": list(one.uncertainty)} for name, one in found.items()}
        TARGET.write_text(HEADER + yaml.safe_dump({"devices": devices}, sort_keys=False))
    return Outcome(tables=[table], document={"gpus": document}, bars=bars)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, default=DATA, help=f"the table of measured products (default {DATA})")
    parser.add_argument("--write", action="store_true", help=f"write the constants to {TARGET.name}")


if __name__ == "__main__":
    run_benchmark("roofline_fit", measure, description=(__doc__ or "").splitlines()[0], options=_options)
