"""How fast the search is, from the command line to the plan file, on this machine and without profiles.

Every case is `planloom plan … --json` in a process of its own: capture, search, simulation of the finalists, the file.
The growth of the search in depth, devices and axes is measured beside, and how many whole plans are estimated a second.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.bars import Bar, Outcome, run_benchmark

TIMEOUT_SECONDS = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One command, and what it may take."""

    name: str
    arguments: tuple[str, ...]
    seconds: float
    memory_bytes: float = float("inf")


CASES = (
    Case(
        name="Llama-3-8B, 64 GPUs, fixed 2-D mesh",
        arguments=("llama3-8b", "--nodes", "8", "--global-batch", "64", "--dp", "8", "--tp", "8", "--pp", "1"),
        seconds=10,
    ),
    Case(
        name="Llama-3-405B, 1,024 GPUs, fixed mesh",
        arguments=("llama3-405b", "--nodes", "128", "--global-batch", "512", "--dp", "8", "--tp", "8", "--pp", "16"),
        seconds=20,
        memory_bytes=4 * 2**30,
    ),
    Case(
        name="Mixtral-8x7B, 256 GPUs, open",
        arguments=("mixtral-8x7b", "--nodes", "32", "--global-batch", "256"),
        seconds=30,
    ),
    Case(
        name="Llama-3-405B, 16,384 GPUs, open",
        arguments=("llama3-405b", "--nodes", "2048", "--global-batch", "2048"),
        seconds=60,
    ),
)
QUICK = CASES[:1]
DEPTHS, NODES, AXES = (
    (8, 32, 126),
    (1, 8, 64, 512, 2048),
    ("dp=16", "dp=8,tp=2", "dp=4,tp=2,tp2=2", "pp=2,dp=2,tp=2,tp2=2"),
)
"""One to four axes, on sixteen devices: the data axis, a free one, a second free one, and that of the stages."""


def measure(arguments: argparse.Namespace) -> Outcome:
    found = []
    for case in QUICK if arguments.quick else [c for c in CASES if arguments.only in c.name]:
        print(case.name, file=sys.stderr, flush=True)
        found.append((case, _planned(case.arguments)))
    table = Table("case", "seconds", "limit", "search", "estimate", "simulated", "gap", "memory")
    bars = []
    for case, result in found:
        table.add_row(
            case.name, f"{result['wall_seconds']:.1f}", f"{case.seconds:g}", f"{result['search_seconds']:.1f}",
            f"{result['estimate_seconds']:.3f}", f"{result['step_seconds']:.3f}", f"{result['gap']:.1%}",
            f"{result['peak_rss_bytes'] / 2**30:.2f} GiB",
        )  # fmt: skip
        bars.append(Bar(name=f"{case.name}: seconds", figure=result["wall_seconds"], ceiling=case.seconds))
        if case.memory_bytes < float("inf"):
            bars.append(
                Bar(
                    name=f"{case.name}: GiB", figure=result["peak_rss_bytes"] / 2**30, ceiling=case.memory_bytes / 2**30
                )
            )
    tables: list[Any] = [table]
    document: dict[str, Any] = {"cases": {case.name: result for case, result in found}}
    if not arguments.quick and not arguments.only:
        growth, figures = _growth()
        tables.append(growth)
        document["growth"] = figures
    rate = estimates_a_second()
    bars.append(Bar(name="estimates of whole plans a second", figure=rate, floor=1000))
    return Outcome(tables=tables, document=document | {"estimates_a_second": rate}, bars=bars)


def _planned(arguments: tuple[str, ...]) -> dict[str, Any]:
    """`planloom plan`, from the start of the process to the plan file."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan.json"
        command = [sys.executable, "-m", "planloom", "plan", *arguments, "--cluster", "dgx-h100", "--json"]
        started = time.perf_counter()
        done = subprocess.run(
            [*command, "--out", str(out)], capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
        seconds = time.perf_counter() - started
        if done.returncode or not out.is_file():
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        result: dict[str, Any] = json.loads(done.stdout)
    return result | {"wall_seconds": seconds}


def _growth() -> tuple[Table, dict[str, dict[str, float]]]:
    """Seconds of the search alone, in depth, devices and axes."""
    from planloom.cli.models import capture_model
    from planloom.cluster import load_cluster
    from planloom.plan import parse_named
    from planloom.search import Planner, Wishes

    def seconds(model: str, nodes: int, wishes: Wishes) -> float:
        planner = Planner(capture_model(model).blocks, load_cluster("dgx-h100", num_outer=nodes), fused=True)
        return planner.search(wishes).certificate.search_seconds

    fixed = Wishes(dp=2, tp=8, pp=4)
    depth = {str(n): seconds(f"llama3-405b?num_hidden_layers={n}&batch=64", 8, fixed) for n in DEPTHS}
    devices = {
        str(8 * n): seconds("llama3-8b?batch=2048", n, Wishes(dp=n, tp=8, pp=1, tp2=1)) for n in NODES
    }  # fmt: skip
    axes = {}
    for text in AXES:
        named = parse_named(text)
        degrees = Wishes(dp=named.dp, tp=named.tp, tp2=named.tp2, pp=named.pp)
        axes[text] = seconds("llama3-8b?batch=64", 2, degrees)
    figures = {"layers": depth, "devices": devices, "axes": axes}
    table = Table("growth of the search in", *(str(i) for i in range(max(map(len, figures.values())))))
    for name, row in figures.items():
        table.add_row(name, *(f"{key}: {value:.2f} s" for key, value in row.items()))
    return table, figures


def estimates_a_second() -> float:
    """How many whole plans of Llama-3-8B are estimated a second, their tables being there."""
    from planloom.cli.models import capture_model
    from planloom.cluster import load_cluster
    from planloom.search import Planner, Wishes
    from planloom.search.figures import block_figures, exchange_seconds
    from planloom.search.stages import estimate_stages

    planner = Planner(capture_model("llama3-8b?batch=64").blocks, load_cluster("dgx-h100", num_outer=8), fused=True)
    wishes = Wishes(dp=8, tp=8, pp=1)
    ranked = planner.search(wishes).ranked[0]
    solver = planner.solver(ranked.solution.candidate, ranked.limit_bytes, wishes)
    generator = np.random.default_rng(0)
    tables, choice = solver.tables, ranked.solution.choice
    sizes = [tables.num_choices(v.key) for v in tables.network.variables]
    count, started = 300, time.perf_counter()
    for _ in range(count):
        changed = choice.variables.copy()
        at = int(generator.integers(len(changed)))
        changed[at] = generator.integers(sizes[at])
        other = type(choice)(variables=changed, storage=choice.storage, recomputed=choice.recomputed)
        figures = block_figures(tables, 0, other)
        estimate_stages(figures, (0,), 1, exchange_seconds(tables, 0, other, (0,)))
    return count / (time.perf_counter() - started)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="cases whose name contains this")


if __name__ == "__main__":
    run_benchmark("search_speed", measure, description=__doc__ or "", options=_options)
