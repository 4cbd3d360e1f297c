"""How long simulating takes: a step of Llama-3-405B on 16,384 H100, a pipeline of 16 stages, 512 micro-batches.

128 data-parallel replicas of a pipeline whose stages are eight GPUs of one node each; sequences are of 8,192 tokens,
one a replica and micro-batch. Each time prices are new, as for a user who simulates once. Seconds are those of the
simulator's summary (step, waiting, memory of every role), with the events of the timeline, and of what comes before:
the plan, and its program.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import TypeVar

from rich.table import Table

from benchmarks.bars import Bar, Outcome, run_benchmark
from planloom.cli.models import CapturedModel, capture_model
from planloom.cluster import Cluster, cluster_to_yaml, format_bytes, format_seconds, load_cluster
from planloom.cost import Prices
from planloom.plan import named_plan, parse_named
from planloom.program import build_program
from planloom.simulate import Summary, simulate

MODEL, CLUSTER, NUM_NODES = "llama3-405b?batch=65536", "dgx-h100", 2048
PLANS = (
    "dp=128,tp=8,pp=16,micro=512,1f1b,vocab",
    "dp=128,tp=8,pp=16,micro=512,1f1b,vocab,sequence,zero1",
)

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds of everything for one plan, the simulator's as often as it was run."""

    plan: str
    plan_seconds: float
    build_seconds: float
    simulate_seconds: tuple[float, ...]
    with_events_seconds: tuple[float, ...]
    num_events: int
    step_seconds: float
    bubble: float
    mfu: float
    peak_memory_bytes: int


def timed(function: Callable[[], Made]) -> tuple[float, Made]:
    start = time.perf_counter()
    made = function()
    return time.perf_counter() - start, made


def row_of(name: str, captured: CapturedModel, cluster: Cluster, repeats: int) -> Row:
    planned, plan = timed(lambda: named_plan(captured.blocks, parse_named(name), batch=captured.spec))
    plan = replace(plan, cluster=cluster_to_yaml(cluster))
    built, program = timed(lambda: build_program(captured.blocks, plan))
    summaries: list[Summary] = []
    whole: list[float] = []
    for _ in range(repeats):
        seconds, timeline = timed(
            lambda: simulate(program, Prices(blocks=captured.blocks, cluster=cluster, fused=True))
        )
        assert timeline.summary is not None
        summaries.append(timeline.summary)
        whole.append(seconds)
    summary = summaries[-1]
    return Row(
        plan=name,
        plan_seconds=planned,
        build_seconds=built,
        simulate_seconds=tuple(each.simulate_seconds for each in summaries),
        with_events_seconds=tuple(whole),
        num_events=len(timeline.events),
        step_seconds=summary.step_seconds,
        bubble=summary.bubble,
        mfu=summary.mfu,
        peak_memory_bytes=summary.peak_memory_bytes,
    )


def measure(arguments: argparse.Namespace) -> Outcome:
    captured, cluster = capture_model(MODEL), load_cluster(CLUSTER, num_outer=NUM_NODES)
    rows = [row_of(name, captured, cluster, 1 if arguments.quick else 5) for name in PLANS]
    table = Table("plan", "planned", "built", "simulated", "slowest", "with events", "step", "bubble", "MFU", "memory")
    for row in rows:
        table.add_row(
            row.plan,
            format_seconds(row.plan_seconds),
            format_seconds(row.build_seconds),
            format_seconds(median(row.simulate_seconds)),
            format_seconds(max(row.simulate_seconds)),
            format_seconds(median(row.with_events_seconds)),
            format_seconds(row.step_seconds),
            f"{row.bubble:.1%}",
            f"{row.mfu:.1%}",
            format_bytes(row.peak_memory_bytes),
        )
    slowest = max(median(row.simulate_seconds) for row in rows)
    bars = [
        Bar(name="simulate_seconds, median, slower plan", figure=slowest, ceiling=1.0),
        Bar(name="devices", figure=cluster.num_devices, floor=16_384),
    ]
    return Outcome(tables=[table], document={"model": MODEL, "rows": [asdict(row) for row in rows]}, bars=bars)


if __name__ == "__main__":
    run_benchmark("simulate_speed", measure, description=__doc__.splitlines()[0])
