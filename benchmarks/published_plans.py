"""Published plans against chosen ones: for jobs that others have run, is the plan that the search chooses ever worse?

The jobs are the bf16 rows of `../shared/data/megatron_bridge_perf.csv`, read where they lie; rows of the same job with
the same plan are one. A row's plan is expressed in our terms: stages, a data axis, an axis of experts inside it,
ZeRO-1 for Megatron's distributed optimizer, micro-batches. It is simulated on every placement, the fastest counts;
where it would not fit into memory by our figures, its layers are recomputed, which the rows do not tell. Interleaved
schedules are priced as 1F1B with the same stages, and marked. The chosen plan is that of a search with everything open
but a second free axis (`tp2` is pinned to 1) and, on more than 64 GPUs, other numbers of stages than the published
one: what is left out can only make the chosen plan worse. Both have the same prices: the cluster's figures. Every
job's row is written when it is there; a run that was interrupted goes on with the others.
"""

import argparse
import csv
import hashlib
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from benchmarks.bars import Bar, Outcome, run_benchmark
from planloom.blocks import BlockGraph
from planloom.cli.models import CapturedModel, capture_model
from planloom.cluster import Cluster, cluster_to_yaml, format_bytes, format_seconds, load_cluster
from planloom.cost import Prices
from planloom.layout import Placement, enumerate_placements
from planloom.plan import NamedPlan, Plan, Storage, named_plan
from planloom.program import build_program
from planloom.search import Best, Planner, Wishes, find_best
from planloom.search.finished import stage_meshes
from planloom.search.planner import USABLE_MEMORY
from planloom.simulate import simulate

TABLE = Path(__file__).parents[2] / "shared" / "data" / "megatron_bridge_perf.csv"
CLUSTERS = {
    "H100-80GB-SXM": "dgx-h100",
    "B200-180GB-SXM": "dgx-b200",
    "B300-SXM": "dgx-b300",
    "GB200-SXM": "gb200-nvl72",
    "GB300-SXM": "gb300-nvl72",
}
MODELS = {
    "GPT-OSS-120B": "gpt-oss-120b",
    "DeepSeek-V3": "deepseek-v3",
    "Qwen3-30B-A3B": "qwen3-moe",
    "Qwen3-235B-A22B": "qwen3-moe?hidden_size=4096&moe_intermediate_size=1536&num_hidden_layers=94"
    "&num_attention_heads=64&num_key_value_heads=4",
    "LLAMA3-8B": "llama3-8b",
    "LLAMA3-70B": "llama3-70b",
    "LLAMA3.1-405B": "llama3-405b",
}
_MAX_PLACEMENTS = 8
_OPEN_GPUS = 64
"""With more of them the number of stages is pinned to the published one: the search of all takes over ten minutes."""
DEFAULT_WORK = Path(".planloom/published_plans")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A model on so many GPUs with a plan, and the rows that published it."""

    model: str
    gpu: str
    num_gpus: int
    gpus_per_node: int
    seq: int
    global_batch: int
    micro_batch: int
    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    interleaved: int
    recompute: str
    rows: tuple[str, ...] = ()
    published_seconds: tuple[float, ...] = ()

    @property
    def num_micro(self) -> int:
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def words(self) -> str:
        degrees = {"dp": self.dp, "tp": self.tp, "pp": self.pp, "cp": self.cp, "ep": self.ep, "micro": self.num_micro}
        return ",".join(f"{name}={size}" for name, size in degrees.items() if size > 1)

    @property
    def label(self) -> str:
        return f"{self.model}, {self.num_gpus} {self.gpu}, batch {self.global_batch} × {self.seq}"

    @property
    def instead(self) -> str:
        """What is priced in place of what the named plans do not have; empty if the plan is the published one."""
        return f"1F1B for {self.interleaved} interleaved chunks a stage" if self.interleaved > 1 else ""

    @property
    def why_not(self) -> str:
        """Why it cannot be expressed; empty if it can."""
        if self.gpu not in CLUSTERS:
            return f"no preset of a cluster of {self.gpu}"
        if self.model not in MODELS:
            return f"no preset of {self.model}"
        if self.cp > 1:
            return "context parallelism is none of the named plans"
        if self.dp * self.tp * self.pp != self.num_gpus:
            return "the degrees do not multiply to the number of GPUs"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The published plan and the chosen one, both predicted."""

    job: Job
    published: str
    published_seconds: float
    published_bytes: int
    published_fits: bool
    """By our figures, with recomputation if need be; else it is the placement that needs the least memory."""
    unfitting_seconds: float | None
    """Of the published plan without recomputation, if that does not fit."""
    chosen: str
    chosen_seconds: float
    chosen_bytes: int
    gap: float
    search_seconds: float

    @property
    def ratio(self) -> float:
        return self.chosen_seconds / self.published_seconds


def read_jobs(path: Path) -> tuple[list[Job], int, int]:
    """The distinct bf16 jobs of the table, how many rows they are, and how many rows there are."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    jobs: dict[Job, list[dict[str, str]]] = {}
    for row in rows:
        if row["precision"] == "bf16":
            jobs.setdefault(_job(row), []).append(row)
    found = [
        replace(
            job,
            rows=tuple(row["row_id"] for row in own),
            published_seconds=tuple(float(row["step_time_s"]) for row in own),
        )
        for job, own in jobs.items()
    ]
    return found, sum(map(len, jobs.values())), len(rows)


def _job(row: dict[str, str]) -> Job:
    def number(key: str) -> int:
        return int(row[key] or 1)

    return Job(
        model=row["model"],
        gpu=row["gpu"],
        num_gpus=number("num_gpus"),
        gpus_per_node=number("gpus_per_node"),
        seq=number("seq_len"),
        global_batch=number("gbs"),
        micro_batch=number("mbs"),
        dp=number("dp"),
        tp=number("tp"),
        pp=number("pp"),
        cp=number("cp"),
        ep=number("ep"),
        interleaved=number("vp"),
        recompute=row["recompute"],
    )


def published_plans(
    job: Job, captured: CapturedModel, cluster: Cluster, *, recompute: bool
) -> Iterable[tuple[Placement, Plan]]:
    """The published plan on every placement."""
    named = NamedPlan(
        dp=job.dp,
        tp=job.tp,
        pp=job.pp,
        sequence=job.tp > 1,
        vocab=job.tp > 1,
        experts=job.ep > 1,
        storage="zero1",
        micro=job.num_micro,
        recompute=recompute,
    )
    whole = named_plan(captured.blocks, named, batch=captured.spec)
    axes = {"pp": job.pp, "dp": job.dp // job.ep, "ep": job.ep, "tp": job.tp}
    kept = {name: size for name, size in axes.items() if size > 1}
    for placement in enumerate_placements(cluster.level_counts, {"pp": job.pp, **kept})[:_MAX_PLACEMENTS]:
        meshes = stage_meshes(placement)
        plan = replace(with_expert_axis(whole, captured.blocks, kept), meshes=meshes, cluster=cluster_to_yaml(cluster))
        yield placement, plan


def with_expert_axis(plan: Plan, blocks: BlockGraph, axes: dict[str, int]) -> Plan:
    """A plan whose data axis is two, the inner one that of experts: what has no experts is data-parallel over both."""
    data = tuple(name for name in ("dp", "ep") if name in axes)
    strategies = []
    experts: set[str] = set()
    for block, strategy in zip(blocks.blocks, plan.strategies, strict=True):
        found = {dim: over for dim, over in strategy.items() if "dp" not in over}
        if "experts" in strategy:
            found |= {"experts": ("ep",)} | ({"batch": ("dp",)} if "dp" in axes else {})
            experts |= set(block.parameters)
        elif "dp" in strategy.get("batch", ()):
            found["batch"] = data
        strategies.append(found)
    stored = {name: Storage(kind="zero1", over=data[0]) for name in blocks.graph.parameters if name not in experts}
    if "dp" in axes:
        stored |= {name: Storage(kind="zero1", over="dp") for name in experts}
    return replace(plan, strategies=tuple(strategies), storage=stored)


@lru_cache(maxsize=1)
def _captured(source: str) -> CapturedModel:
    return capture_model(source)


def compare(job: Job, searched: dict[tuple[Any, ...], Best], say: Callable[[str], None]) -> Row:
    """Both plans of a job, simulated with the same prices."""
    base = MODELS[job.model]
    source = f"{base}{'&' if '?' in base else '?'}batch={job.global_batch}&seq={job.seq}"
    say(f"{job.label}: capture")
    captured = _captured(source)
    one = load_cluster(CLUSTERS[job.gpu])
    cluster = load_cluster(CLUSTERS[job.gpu], num_outer=job.num_gpus // one.num_devices)
    prices = Prices(blocks=captured.blocks, cluster=cluster, fused=True)
    limit = USABLE_MEMORY * cluster.device.memory_bytes
    say(f"{job.label}: {job.words} as published")
    found = []
    for recompute in (False, True):
        for placement, plan in published_plans(job, captured, cluster, recompute=recompute):
            timeline = simulate(build_program(captured.blocks, plan), prices, with_events=False)
            assert timeline.summary is not None
            name = f"{job.words}{',recompute' if recompute else ''} on {placement}"
            found.append((timeline.step_seconds, timeline.summary.peak_memory_bytes, name))
        if any(num_bytes <= limit for _, num_bytes, _ in found):
            break
    fitting = [each for each in found if each[1] <= limit]
    seconds, num_bytes, name = min(fitting) if fitting else min(found, key=lambda each: each[1])
    fastest = min(found)
    wishes = Wishes(tp2=1) if job.num_gpus <= _OPEN_GPUS else Wishes(tp2=1, pp=job.pp)
    key = (source, cluster.name, job.num_gpus, wishes)
    if key not in searched:
        say(f"{job.label}: search")
        planner = Planner(captured.blocks, cluster, fused=True)
        searched[key] = find_best(planner, prices, captured.spec, wishes)
    best = searched[key]
    return Row(
        job=job,
        published=name,
        published_seconds=seconds,
        published_bytes=num_bytes,
        published_fits=bool(fitting),
        unfitting_seconds=fastest[0] if fastest[1] > limit else None,
        chosen=f"{best.winner.plan.name} on {best.winner.placement}",
        chosen_seconds=best.winner.step_seconds,
        chosen_bytes=best.winner.memory_bytes,
        gap=best.certificate.gap,
        search_seconds=best.certificate.search_seconds,
    )


def measure(arguments: argparse.Namespace) -> Outcome:
    jobs, num_rows, num_all = read_jobs(arguments.data)
    possible = [job for job in jobs if not job.why_not]
    possible = sorted(possible, key=lambda job: (job.num_gpus, job.model, job.global_batch, job.seq, job.gpu))
    possible = [job for job in possible if arguments.only in job.label]
    possible = possible[:1] if arguments.quick else possible
    work = (arguments.work or DEFAULT_WORK) / digest()
    work.mkdir(parents=True, exist_ok=True)
    searched: dict[tuple[Any, ...], Best] = {}
    rows, started = [], time.monotonic()

    def say(text: str) -> None:
        print(f"{(time.monotonic() - started) / 60:4.1f} min, {text}", file=sys.stderr, flush=True)

    for number, job in enumerate(possible):
        kept = work / f"{job.rows[0]}.json"
        if not kept.is_file():
            row = compare(job, searched, say)
            kept.write_bytes(msgspec.json.encode(row))
        rows.append(msgspec.json.decode(kept.read_bytes(), type=Row))
        say(f"{number + 1} of {len(possible)}, {job.label}: chosen over published {rows[-1].ratio:.3f}")
    covered = sum(len(row.job.rows) for row in rows)
    title = f"{len(rows)} of {len(jobs)} distinct bf16 jobs: {covered} of {num_rows} rows; the table has {num_all}"
    return report(rows, [job for job in jobs if job.why_not], title)


def digest() -> str:
    """Of all code that a prediction may depend on: rows of other code are not taken for its own."""
    found, source = hashlib.sha256(Path(__file__).read_bytes()), Path(__file__).parents[1] / "src" / "planloom"
    for path in sorted(source.rglob("*")):
        if path.suffix in (".py", ".yaml"):
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


def report(rows: list[Row], skipped: list[Job], title: str) -> Outcome:
    table = Table("job", "published plan", "predicted", "memory", "measured", "chosen plan", "predicted", "memory",
                  "chosen over published", "gap", title=title)  # fmt: skip
    for row in rows:
        table.add_row(
            row.job.label,
            row.published + (f" ({row.job.instead})" if row.job.instead else ""),
            format_seconds(row.published_seconds),
            format_bytes(row.published_bytes) + ("" if row.published_fits else ", does not fit"),
            " ".join(f"{seconds:.2f}" for seconds in row.job.published_seconds),
            row.chosen,
            format_seconds(row.chosen_seconds),
            format_bytes(row.chosen_bytes),
            f"{row.ratio:.3f}",
            f"{row.gap:.1%}",
        )
    left_out = Table("not expressed", "published plan", "rows", "why")
    for job in skipped:
        left_out.add_row(job.label, job.words, str(len(job.rows)), job.why_not)
    bars = [Bar(name="chosen over published, worst", figure=max(row.ratio for row in rows), ceiling=1.0)]
    document = {
        "title": title,
        "rows": [asdict(row) | {"ratio": row.ratio} for row in rows],
        "skipped": [{"job": job.label, "plan": job.words, "rows": job.rows, "why": job.why_not} for job in skipped],
    }
    return Outcome(tables=[table, left_out], document=document, bars=bars)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--work", type=Path, help=f"where rows are kept as they come; {DEFAULT_WORK} if not given")
    parser.add_argument("--only", default="", help="jobs whose label contains this")
    parser.add_argument("--data", type=Path, default=TABLE, help="the table of published jobs")


if __name__ == "__main__":
    run_benchmark("published_plans", measure, description=__doc__ or "", options=_options)
