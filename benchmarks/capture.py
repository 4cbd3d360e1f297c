"""Capture, blocks and segments of models at full size, and published figures; the graph interpreter beside eager.

Every model is captured in a process of its own, timed from the start of that process (Python, torch and transformers
included) to its graph, and further to its blocks and segments. Nothing is allocated: memory is the peak of what the
process holds. Llama-3-405B's shape is captured with 8, 32 and 126 layers.

Published parameters must agree within 1 %. Published FLOPs are counted in different ways; `CONVENTIONS` says for each
figure which count of `planloom.graph.flops` it is compared with. Where the source's own formula is known to be another,
or to start from other numbers, the deviation is shown and no bar is set.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from rich.markup import escape
from rich.progress import track
from rich.table import Table

from benchmarks.bars import Bar, Outcome, run_benchmark
from planloom.graph.catalog import PublishedFlops, model_preset, preset_names
from planloom.graph.flops import Counting

ROOT = Path(__file__).parents[1]
TIMEOUT_SECONDS = 120
LARGEST = "llama3-405b"
LAYERS = (8, 32, 126)
QUICK_MODELS = ("vit-large",)
QUICK_LAYERS = (8, 126)
INTERPRETED = {"llama": 41, "gpt2": 21}
"""Rounds of the interpreter beside eager."""
QUICK_INTERPRETED = {"llama": 9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """How a published figure was counted. Not `agreed`: its formula or its numbers are others, for the reason given."""

    counting: Counting
    agreed: bool
    why: str


CONVENTIONS: dict[str, tuple[Convention, ...]] = {
    "bert-large": (
        Convention(
            counting="weights",
            agreed=False,
            why="6 × parameters, of which the source assumes 355M; the checkpoint has 335M",
        ),
    ),
    "clip-vit-large": (Convention(counting="full", agreed=True, why="counted by running it"),),
    "deepseek-v3": (
        Convention(counting="causal", agreed=True, why="parameters that a token meets, and attention at half"),
    ),
    "gpt3-175b": (Convention(counting="weights", agreed=True, why="6 × parameters"),),
    "llama3-405b": (
        Convention(counting="weights", agreed=True, why="6 × parameters"),
        Convention(
            counting="causal",
            agreed=False,
            why="formula not stated: equals products with weights and a quarter of attention in full",
        ),
    ),
    "swin-large": (Convention(counting="full", agreed=True, why="the paper's own count"),),
    "t5-11b": (
        Convention(
            counting="weights", agreed=False, why="3 × parameters, of which the source assumes 11B; there are 11.3B"
        ),
    ),
    "vit-giant": (Convention(counting="full", agreed=True, why="the paper's own count"),),
    "vit-gigantic": (Convention(counting="full", agreed=True, why="the paper's own count"),),
    "vit-large": (Convention(counting="full", agreed=True, why="counted by running it"),),
}


def measure(arguments: argparse.Namespace) -> Outcome:
    names = QUICK_MODELS if arguments.quick else preset_names()
    layers = QUICK_LAYERS if arguments.quick else LAYERS
    repeats = 1 if arguments.quick else 3
    depths = {num: f"{LARGEST}?num_hidden_layers={num}" for num in layers}
    published = list(published_figures(names))
    sources = dict.fromkeys([*names, *(source for source, *_ in published)])
    jobs = [*(list(depths.values()) * repeats), *sources]
    runs: dict[str, list[dict[str, Any]]] = {}
    for source in track(jobs, description="capturing", disable=arguments.json or not sys.stderr.isatty()):
        runs.setdefault(source, []).append(run_case("benchmarks.capture_case", source))
    cases = {source: _median(found) for source, found in runs.items()}
    rounds = QUICK_INTERPRETED if arguments.quick else INTERPRETED
    compared = [run_case("benchmarks.interpreter_case", name, str(num)) for name, num in rounds.items()]
    flops = [_flops_row(*figure, cases) for figure in published if "error" not in cases[figure[0]]]
    parameters = _parameter_rows(names, cases)
    return Outcome(
        tables=[
            _cases_table(cases.values()),
            _parameters_table(parameters),
            _flops_table(flops),
            _eager_table(compared),
        ],
        document={"cases": list(cases.values()), "parameters": parameters, "flops": flops, "interpreter": compared},
        bars=[
            *_depth_bars(depths, cases),
            Bar(name="models that failed", figure=sum("error" in c for c in (*cases.values(), *compared)), ceiling=0),
            Bar(name="parameters, largest deviation", figure=_largest(parameters), ceiling=0.01),
            Bar(
                name="FLOPs of known convention, largest deviation",
                figure=_largest([row for row in flops if row["agreed"]]),
                ceiling=0.01,
            ),
            *_eager_bars(compared),
        ],
    )


def run_case(module: str, name: str, *arguments: str) -> dict[str, Any]:
    """What a fresh process prints; its last line of complaint under `error` if it fails."""
    more = arguments or (repr(time.time()),)
    command = [sys.executable, "-m", module, name, *more]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"model": name, "error": f"not done after {TIMEOUT_SECONDS} seconds"}
    if done.returncode:
        complaint = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"model": name, "error": next((x for x in complaint if "Error:" in x), complaint[-1])}
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def _median(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Repeated runs of one model as one: medians of seconds, the largest memory."""
    failed = next((run for run in found if "error" in run), None)
    if failed is not None:
        return failed
    seconds = {key: median(run[key] for run in found) for key in found[0] if key.endswith("_seconds")}
    return {**found[0], **seconds, "peak_rss_bytes": max(run["peak_rss_bytes"] for run in found), "runs": len(found)}


def _depth_bars(depths: dict[int, str], cases: dict[str, dict[str, Any]]) -> Iterator[Bar]:
    found = {num: cases[source] for num, source in depths.items() if "error" not in cases[source]}
    if len(found) < len(depths):
        return
    least, most = min(found), max(found)
    seconds = {num: case["capture_seconds"] for num, case in found.items()}
    distinct = [case["distinct_segments"] for case in found.values()]
    yield Bar(name=f"{LARGEST}, seconds from process start to graph", figure=seconds[most], ceiling=15)
    yield Bar(name=f"{LARGEST}, GiB at most", figure=found[most]["peak_rss_bytes"] / 2**30, ceiling=4)
    yield Bar(name=f"{most} layers over {least}, time", figure=seconds[most] / seconds[least], ceiling=1.5)
    yield Bar(
        name=f"distinct segments of {', '.join(map(str, found))} layers: largest less smallest",
        figure=max(distinct) - min(distinct),
        ceiling=0,
    )


def _eager_bars(compared: Sequence[dict[str, Any]]) -> Iterator[Bar]:
    for row in compared:
        name = f"interpreter over eager, {row['model']}"
        if "error" in row:
            continue
        yield Bar(name=f"{name}, time", figure=row["ratio"], ceiling=1.02)
        yield Bar(name=f"{name}, loss differs by", figure=row["loss_difference"], ceiling=1e-6)
        yield Bar(name=f"{name}, gradients differ by", figure=row["gradient_difference"], ceiling=1e-6)


def published_figures(names: Sequence[str]) -> Iterator[tuple[str, str, PublishedFlops, Convention]]:
    """(model to capture, preset, figure, how it was counted): at the length of sequence that the source names."""
    for name in names:
        preset = model_preset(name)
        for flops, convention in zip(preset.flops, CONVENTIONS.get(name, ()), strict=True):
            other = flops.seq is not None and flops.seq != preset.seq
            yield f"{name}?seq={flops.seq}" if other else name, name, flops, convention


def _flops_row(
    source: str, name: str, flops: PublishedFlops, convention: Convention, cases: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    case = cases[source]
    counts = {c: n / _num_units(case, flops.unit) for c, n in case[f"{flops.of}_flops"].items()}
    ours = counts[convention.counting]
    return {
        "model": source,
        "of": flops.of,
        "unit": flops.unit,
        "published": flops.per_unit,
        "source": flops.source,
        "ours": ours,
        "deviation": ours / flops.per_unit - 1,
        **asdict(convention),
        "counts": counts,
    }


def _num_units(case: dict[str, Any], unit: str) -> int:
    """Images or pairs in the batch, or its tokens: a token is read by an encoder or by a decoder."""
    batch = case["batch"]
    if unit == "token":
        return sum(prod(batch[name]) for name in ("input_ids", "decoder_input_ids") if name in batch)
    return int(batch["pixel_values"][0])


def _parameter_rows(names: Sequence[str], cases: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for name in names:
        preset, case = model_preset(name), cases[name]
        if preset.parameters is not None and "error" not in case:
            deviation = case["graph_parameters"] / preset.parameters - 1
            row = {"model": name, "published": preset.parameters, "source": preset.parameters_source}
            rows.append({**row, "ours": case["graph_parameters"], "deviation": deviation})
    return rows


def _largest(rows: Sequence[dict[str, Any]]) -> float:
    return max((abs(row["deviation"]) for row in rows), default=0.0)


def _cases_table(cases: Any) -> Table:
    table = Table("model", title="capture: seconds from the start of the process, and what was found")
    for name in ("to model", "to graph", "to blocks", "GiB", "operators", "blocks", "segments", "distinct"):
        table.add_column(name, justify="right")
    for case in cases:
        if "error" in case:
            table.add_row(case["model"], f"[red]{escape(case['error'])}[/red]")
            continue
        seconds = [f"{case[f'{part}_seconds']:.1f}" for part in ("load", "capture", "blocks")]
        counts = [f"{case[name]:,}" for name in ("operators", "blocks", "segments", "distinct_segments")]
        table.add_row(case["model"], *seconds, f"{case['peak_rss_bytes'] / 2**30:.2f}", *counts)
    return table


def _parameters_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("model", "source", title="parameters")
    for name in ("published", "ours", "deviation"):
        table.add_column(name, justify="right")
    for row in rows:
        figures = (f"{row['published']:,}", f"{row['ours']:,}", f"{row['deviation']:+.2%}")
        table.add_row(row["model"], row["source"], *figures)
    return table


def _flops_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("model", "of", "counted", "convention", title="FLOPs")
    for name in ("published", "ours", "deviation", "bar"):
        table.add_column(name, justify="right")
    for row in rows:
        figures = (f"{row['published']:.4g}", f"{row['ours']:.4g}", f"{row['deviation']:+.2%}")
        of = f"{row['of']} per {row['unit']}"
        table.add_row(row["model"], of, row["counting"], row["why"], *figures, "1 %" if row["agreed"] else "none")
    return table


def _eager_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("model", title="graph interpreter over eager, one thread, forward and backward")
    for name in ("eager", "time", "processor time", "loss differs by", "gradients differ by", "bitwise equal"):
        table.add_column(name, justify="right")
    for row in rows:
        if "error" in row:
            table.add_row(row["model"], f"[red]{escape(row['error'])}[/red]")
            continue
        ratios = (f"{row['eager_seconds']:.3f} s", f"{row['ratio']:.3f}", f"{row['processor_ratio']:.3f}")
        differences = (f"{row['loss_difference']:.1e}", f"{row['gradient_difference']:.1e}")
        table.add_row(row["model"], *ratios, *differences, f"{row['bitwise_equal_gradients']} of {row['gradients']}")
    return table


if __name__ == "__main__":
    run_benchmark("capture", measure, description=__doc__.splitlines()[0])
