"""Predictions on the testbed: step times, memory and bytes of plans, predicted first and measured then.

For every topology (`prediction_cases`) and model: all runs, updates, collectives and exchanges that its plans use are
profiled on the ranks, under the quota that they train with; every plan's step is simulated, and the predictions are
written down; then every plan is trained for a few steps. Where a rank's memory limit is set 10 % below or above what
was predicted, it must die or live.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.bars import Bar, Outcome, run_benchmark
from benchmarks.prediction_cases import MODELS, QUICK, TOPOLOGIES, Topology
from planloom.cli.models import CapturedModel, capture_model
from planloom.cluster import cluster_to_yaml, format_bytes, format_seconds, load_cluster
from planloom.cost import Prices
from planloom.plan import Plan, named_plan, parse_named, save_plan
from planloom.profile import local_store
from planloom.program import Program, build_program
from planloom.simulate import simulate
from planloom.simulate.payload import payload_bytes
from testbed import DeviceLimits, OpenDevices, open_devices

_LIMIT_SECONDS = 3000
_BUDGET_SECONDS = 0.15
_TIE = 0.03
_LIMIT_CASES = (("GPT", "dp=4"), ("GPT", "tp=4,vocab"), ("GPT", "dp=2,pp=2,micro=4,1f1b"), ("MoE", "dp=4,zero3"))

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan: predicted, and measured."""

    topology: str
    model: str
    plan: str
    predicted_seconds: float
    seconds: float
    predicted_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    expected_sent: tuple[dict[str, int], ...]
    sent: tuple[dict[str, int], ...]
    sources: tuple[str, ...]
    exposed: dict[str, float]
    bubble: float
    steps: tuple[float, ...]

    @property
    def error(self) -> float:
        return self.predicted_seconds / self.seconds - 1

    @property
    def memory_error(self) -> float:
        """That of the rank whose peak was predicted worst."""
        pairs = zip(self.predicted_bytes, self.peak_bytes, strict=True)
        return max((predicted / measured - 1 for predicted, measured in pairs), key=abs)

    @property
    def sends_as_predicted(self) -> bool:
        return self.sent == self.expected_sent

    @property
    def has_ragged_rows(self) -> bool:
        """Rows of experts are as many as the routing gives: their bytes are no property of the program."""
        return "experts" in self.plan


def measure(arguments: argparse.Namespace) -> Outcome:
    topologies = QUICK if arguments.quick else [t for t in TOPOLOGIES if arguments.only in t.name]
    rows: list[Row] = []
    deaths: list[dict[str, Any]] = []
    kinds: set[str] = set()
    profiled: dict[str, int] = {}
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, disable=arguments.json or not sys.stderr.isatty(), transient=True) as progress:
        for topology in topologies:
            task = progress.add_task(topology.name)

            def say(text: str, task: Any = task) -> None:
                progress.update(task, description=text)
                print(text, file=sys.stderr, flush=True) if not sys.stderr.isatty() else None

            with open_devices(topology.path, DeviceLimits()) as devices:
                kinds.add(devices.kind)
                for model, every in topology.plans.items():
                    plans = [plan for plan in every if not arguments.plans or plan in arguments.plans.split(";")]
                    if not plans:
                        continue
                    case = _Case(
                        topology, model, plans, devices, say, Path(arguments.work), with_segments=arguments.segments
                    )
                    rows += case.run()
                    profiled[f"{topology.name}, {model}"] = case.num_profiled
                    if topology is topologies[0] and devices.kind == "testbed with quotas":
                        deaths += case.deaths()
    return report(rows, deaths, kinds, profiled)


class _Case:
    """One model on one topology."""

    def __init__(
        self,
        topology: Topology,
        model: str,
        plans: Sequence[str],
        devices: OpenDevices,
        say: Say,
        work: Path,
        *,
        with_segments: bool,
    ) -> None:
        self.with_segments = with_segments
        self.topology, self.model, self.devices, self.say = topology, model, devices, say
        self.cluster = load_cluster(topology.path)
        self.captured: CapturedModel = capture_model(MODELS[model])
        self.folder = work / f"{topology.name}-{model}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.plans = [self._plan(name) for name in plans]
        self.programs = [build_program(self.captured.blocks, plan) for plan in self.plans]
        self.timelines: list[Any] = []
        self.num_profiled = 0

    def _plan(self, name: str) -> Plan:
        from dataclasses import replace

        plan = named_plan(self.captured.blocks, parse_named(name), batch=self.captured.spec)
        return replace(plan, cluster=cluster_to_yaml(self.cluster))

    def run(self) -> list[Row]:
        """Profile, predict, and only then measure."""
        prices = self._profile()
        self.timelines = [simulate(program, prices) for program in self.programs]
        predictions = [
            {"plan": plan.name, "seconds": t.step_seconds, "bytes": [r.peak_bytes for r in t.summary.memory]}
            for plan, t in zip(self.plans, self.timelines, strict=True)
        ]
        (self.folder / "predictions.json").write_text(json.dumps(predictions))
        self.say(f"{self.topology.name}, {self.model}: {len(self.plans)} plans")
        measured = self._on_ranks(self.plans, "measured.json")
        return [self._row(*found) for found in zip(self.plans, self.programs, self.timelines, measured, strict=True)]

    def _profile(self) -> Prices:
        self.say(f"{self.topology.name}, {self.model}: profile")
        folder, store = self.folder / "profiled", self.folder / "prices.sqlite"
        self._save(self.plans, folder)
        command = [sys.executable, "-m", "planloom.profile.worker", "--model", MODELS[self.model]]
        given = ["--plans", str(folder), "--store", str(store), "--label", self.topology.name]
        self._start([*command, *given, "--budget", str(_BUDGET_SECONDS)])
        if self.with_segments:
            command[2] = "planloom.train.segment_worker"
            self._start([*command, *given])
        kept = local_store(store, self.cluster.num_devices, label=self.topology.name)
        figures = kept.load_with_spread()
        self.num_profiled = len({key.split("/")[1] for key in figures if key.startswith("run/")})
        return Prices(
            blocks=self.captured.blocks,
            cluster=self.cluster,
            measured={key: value for key, (value, _) in figures.items()},
            spreads={key: spread for key, (_, spread) in figures.items()},
            measured_links=True,
        )

    def _row(self, plan: Plan, program: Program, timeline: Any, found: dict[str, Any]) -> Row:
        devices, graph = range(self.cluster.num_devices), self.captured.blocks.graph
        roles = {d: role.peak_bytes for role in timeline.summary.memory for d in role.devices}
        return Row(
            topology=self.topology.name,
            model=self.model,
            plan=plan.name,
            predicted_seconds=timeline.step_seconds,
            seconds=found["step_seconds"],
            predicted_bytes=tuple(roles[d] for d in devices),
            peak_bytes=tuple(found["peak_bytes"]),
            expected_sent=tuple(payload_bytes(graph, program, d, library=self.cluster.library) for d in devices),
            sent=tuple(found["sent"]),
            sources=timeline.sources,
            exposed=timeline.summary.exposed_communication,
            bubble=timeline.summary.bubble,
            steps=tuple(found["seconds"]),
        )

    def deaths(self) -> list[dict[str, Any]]:
        """Plans under a limit of 10 % below and above what was predicted: the one must die, the other live."""
        found = []
        for plan, timeline in zip(self.plans, self.timelines, strict=True):
            if (self.model, plan.name) not in _LIMIT_CASES:
                continue
            for share in (1 / 1.1, 1 / 0.9):
                limit = round(timeline.summary.peak_memory_bytes * share)
                self.say(f"{self.topology.name}, {self.model}: {plan.name} with {format_bytes(limit)}")
                found.append(
                    {
                        "model": self.model,
                        "plan": plan.name,
                        "share": share,
                        "limit": limit,
                        **self._limited(plan, limit),
                    }
                )
        return found

    def _limited(self, plan: Plan, limit: int) -> dict[str, Any]:
        folder = self.folder / f"limited-{limit}"
        self._save([plan], folder)
        command = [sys.executable, "-m", "benchmarks.prediction_rank", MODELS[self.model], str(folder)]
        command += [str(folder / "out"), "--steps", "2", "--limit", str(limit)]
        result = self.devices.run(command, timeout_seconds=_LIMIT_SECONDS)
        return {"died": any(rank.out_of_memory for rank in result.ranks), "exit_code": result.exit_code}

    def _on_ranks(self, plans: Sequence[Plan], out: str) -> list[dict[str, Any]]:
        folder, path = self.folder / "plans", self.folder / out
        self._save(plans, folder)
        command = [sys.executable, "-m", "benchmarks.prediction_rank", MODELS[self.model], str(folder), str(path)]
        self._start(command)
        found: list[dict[str, Any]] = json.loads(path.read_text())
        return found

    def _save(self, plans: Sequence[Plan], folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        for i, plan in enumerate(plans):
            save_plan(plan, folder / f"{i:03}.json")

    def _start(self, command: list[str]) -> None:
        result = self.devices.run(command, timeout_seconds=_LIMIT_SECONDS)
        if result.exit_code:
            texts = [f"rank {rank.rank}: {rank.stderr[-3000:]}" for rank in result.ranks if rank.exit_code]
            raise SystemExit("\n".join(texts) or f"the ranks ended with {result.exit_code}")


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Agreement in order of (predicted, measured) pairs; pairs that either calls equal within 3 % do not count."""
    agreeing = counted = 0
    for (p, m), (q, n) in combinations(pairs, 2):
        if abs(m - n) < _TIE * min(m, n) or abs(p - q) < _TIE * min(p, q):
            continue
        counted += 1
        agreeing += 1 if (p - q) * (m - n) > 0 else -1
    return agreeing / counted if counted else 1.0


def report(rows: list[Row], deaths: list[dict[str, Any]], kinds: set[str], profiled: dict[str, int]) -> Outcome:
    table = Table("topology", "model", "plan", "predicted", "measured", "off", "memory", "measured", "off", "bytes")
    for row in rows:
        table.add_row(
            row.topology,
            row.model,
            row.plan,
            format_seconds(row.predicted_seconds),
            format_seconds(row.seconds),
            f"{row.error:+.1%}",
            format_bytes(max(row.predicted_bytes)),
            format_bytes(max(row.peak_bytes)),
            f"{row.memory_error:+.1%}",
            "ragged" if row.has_ragged_rows else "equal" if row.sends_as_predicted else "differ",
        )
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.topology, row.model), []).append(row)
    taus = {key: kendall([(r.predicted_seconds, r.seconds) for r in found]) for key, found in groups.items()}
    regrets = {
        key: min(found, key=lambda r: r.predicted_seconds).seconds / min(r.seconds for r in found) - 1
        for key, found in groups.items()
    }
    ranks = Table("topology", "model", "Kendall's τ", "predicted best over best", "profiled runs")
    for key, tau in taus.items():
        ranks.add_row(*key, f"{tau:.2f}", f"{regrets[key]:+.1%}", str(profiled.get(", ".join(key), "")))
    limits = Table("model", "plan", "limit over predicted", "died")
    for death in deaths:
        limits.add_row(death["model"], death["plan"], f"{death['share']:.2f}", "yes" if death["died"] else "no")
    counted = [row for row in rows if not row.has_ragged_rows]
    right = [death["died"] == (death["share"] < 1) for death in deaths]
    bars = [
        Bar(name="plans", figure=len(rows), floor=30),
        Bar(name="step time, mean absolute error", figure=fmean(abs(row.error) for row in rows), ceiling=0.10),
        Bar(name="Kendall's τ, worst of all topologies and models", figure=min(taus.values()), floor=0.85),
        Bar(name="predicted best over best, worst", figure=max(regrets.values()), ceiling=0.05),
        Bar(name="peak memory, worst error of a rank", figure=max(abs(row.memory_error) for row in rows), ceiling=0.10),
        Bar(
            name="share of plans whose bytes on every axis are the program's",
            figure=fmean(row.sends_as_predicted for row in counted),
            floor=1.0,
        ),
    ]
    if right:
        bars.append(Bar(name="share of limits that did what was predicted", figure=fmean(right), floor=1.0))
    document = {
        "devices": sorted(kinds),
        "rows": [asdict(row) | {"error": row.error, "memory_error": row.memory_error} for row in rows],
        "kendall": {", ".join(key): tau for key, tau in taus.items()},
        "regret": {", ".join(key): regret for key, regret in regrets.items()},
        "limits": deaths,
        "profiled_runs": profiled,
    }
    return Outcome(tables=[f"ranks: {', '.join(sorted(kinds))}", table, ranks, limits], document=document, bars=bars)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="topologies whose name contains this")
    parser.add_argument("--plans", default="", help="these plans of them, as 'dp=4;pp=4,micro=4,gpipe'")
    parser.add_argument("--segments", action="store_true", help="measure whole segments, too, and predict with them")
    parser.add_argument("--work", default=tempfile.mkdtemp(prefix="planloom-prediction-"), help="where files are kept")


if __name__ == "__main__":
    run_benchmark("prediction_testbed", measure, description=__doc__ or "", options=_options)
