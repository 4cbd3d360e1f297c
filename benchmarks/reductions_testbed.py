"""Reductions on shaped networks: all placements, the best twenty programs and torch's own all-reduce, measured.

For every topology (`testbed_cases`) the links are calibrated from messages between two devices only; then all cases are
predicted, and the predictions written down; then everything is measured, programs in turn, in several rounds. The bars
are about the cases whose axis has two digits or more.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.bars import Bar, Outcome, run_benchmark
from benchmarks.testbed_cases import QUICK, TOPOLOGIES, Case, Topology, find_cases, is_default
from planloom.cluster import COLLECTIVES, Cluster, cluster_to_yaml, load_cluster
from planloom.collective import Synthesized
from testbed import Testbed

_RUN_LIMIT_SECONDS = 2400


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A case, and the measured seconds of its choices and of the default."""

    topology: Topology
    case: Case
    seconds: tuple[float, ...]
    default_seconds: float

    @property
    def chosen_seconds(self) -> float:
        return self.seconds[0]

    @property
    def speedup(self) -> float:
        return self.default_seconds / self.chosen_seconds

    @property
    def best_seconds(self) -> float:
        return min(*self.seconds, self.default_seconds)

    @property
    def regret(self) -> float:
        return self.chosen_seconds / self.best_seconds - 1

    @property
    def over_bound(self) -> float:
        return self.chosen_seconds / self.case.lower_bound_seconds

    @property
    def place_of_best(self) -> int:
        """Where the fastest measured program comes in the prediction, from 1, the default included."""
        programs = [(c.seconds, s) for c, s in zip(self.case.choices, self.seconds, strict=True)]
        if not any(is_default(choice) for choice in self.case.choices):
            programs.append((self.case.default.seconds, self.default_seconds))
        best = min(programs, key=lambda p: p[1])
        order = [p for i, p in enumerate(programs) if i == 0 or p[0] < best[0]]  # the chosen one comes first
        return 1 if best == programs[0] else 1 + len({id(p) for p in order if p is not best})


def measure(arguments: argparse.Namespace) -> Outcome:
    topologies = QUICK if arguments.quick else [t for t in TOPOLOGIES if arguments.only in t.name]
    found: list[Measured] = []
    documents = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, disable=arguments.json or not sys.stderr.isatty(), transient=True) as progress:
        for topology in topologies:
            task = progress.add_task(topology.name)
            rows, document = measure_topology(topology, partial(_say, progress, task))
            found += rows
            documents.append(document)
    return report(found, documents)


def _say(progress: Progress, task: TaskID, text: str) -> None:
    progress.update(task, description=text)


def measure_topology(topology: Topology, say: Callable[[str], None]) -> tuple[list[Measured], dict[str, object]]:
    """Calibrate, predict, and only then measure."""
    nominal = load_cluster(topology.path)
    with tempfile.TemporaryDirectory() as name, Testbed(topology.path) as testbed:
        folder = Path(name)
        say(f"{topology.name}: links")
        links = _on_ranks(testbed, ["links"], folder / "links.json")
        cluster = calibrated(nominal, links)
        cases = find_cases(topology, cluster)
        predictions = folder / "cases.json"
        predictions.write_bytes(msgspec.json.encode(cases))
        say(f"{topology.name}: {len(cases)} cases")
        times = _on_ranks(testbed, ["cases", str(predictions)], folder / "times.json")
    rows = []
    for case, row in zip(cases, times, strict=True):
        seconds = [row[-1] if is_default(choice) else s for choice, s in zip(case.choices, row[:-1], strict=True)]
        rows.append(Measured(topology=topology, case=case, seconds=tuple(seconds), default_seconds=row[-1]))
    document: dict[str, object] = {
        "topology": topology.name,
        "links": links,
        "cluster": cluster_to_yaml(cluster),
        "cases": [
            {
                "case": row.case.label,
                "counts": row.case.counts,
                "predicted": [choice.seconds for choice in row.case.choices],
                "measured": list(row.seconds),
                "default_predicted": row.case.default.seconds,
                "default_measured": row.default_seconds,
                "lower_bound": row.case.lower_bound_seconds,
                "chunks": [choice.num_chunks for choice in row.case.choices],
                "programs": [_words(choice.programs) for choice in row.case.choices],
            }
            for row in rows
        ],
    }
    return rows, document


def _words(programs: tuple[Synthesized, ...]) -> str:
    return " | ".join(
        ", ".join(f"{m.kind} {'·'.join(str(d.digit) for d in m.digits)}" for m in program.moves) for program in programs
    )


def _on_ranks(testbed: Testbed, arguments: list[str], out: Path) -> Any:
    command = [sys.executable, "-m", "benchmarks.testbed_rank", *arguments, str(out)]
    result = testbed.run(command, timeout_seconds=_RUN_LIMIT_SECONDS)
    if result.exit_code:
        texts = [f"rank {rank.rank}: {rank.stderr[-2000:]}" for rank in result.ranks if rank.exit_code]
        raise SystemExit(f"the ranks failed with {result.exit_code}\n" + "\n".join(texts[:2]))
    return json.loads(out.read_text())


def calibrated(cluster: Cluster, links: list[dict[str, float]]) -> Cluster:
    """The cluster with the bandwidths and latencies of messages between two devices.

    A collective is handed to a thread before its first message: it starts with one more latency. What a message costs
    its host is measured while all devices send: sixteen of them share two cores here.
    """
    levels = [
        dataclasses.replace(
            level,
            link=dataclasses.replace(
                level.link,
                bandwidth_bytes_per_second=measured["bandwidth"],
                latency_seconds=measured["latency"],
                start_seconds=dict.fromkeys(COLLECTIVES, measured["latency"]) if level is cluster.levels[-1] else {},
            ),
        )
        for level, measured in zip(cluster.levels, links, strict=True)
    ]
    device = dataclasses.replace(cluster.device, launch_seconds=max(measured["message"] for measured in links))
    return dataclasses.replace(cluster, levels=tuple(levels), device=device)


def report(found: list[Measured], documents: list[dict[str, object]]) -> Outcome:
    table = Table(
        "topology", "case", "programs", "default", "chosen", "predicted", "speed-up", "over bound", "best's place"
    )
    for row in found:
        mark = "" if row.case.counts else "[dim]"
        table.add_row(
            mark + row.topology.name,
            mark + row.case.label,
            str(len(row.seconds)),
            f"{row.default_seconds * 1e3:.0f} ms",
            f"{row.chosen_seconds * 1e3:.0f} ms",
            f"{row.case.choices[0].seconds * 1e3:.0f} ms",
            f"{row.speedup:.2f}x",
            f"{row.over_bound:.2f}",
            str(row.place_of_best),
        )
    counted = [row for row in found if row.case.counts]
    classes = Table("class", "cases", "faster", "mean", "most", "over bound, mean", "mean regret", title="by class")
    for kind in dict.fromkeys(row.topology.kind for row in counted):
        own = [row for row in counted if row.topology.kind == kind]
        classes.add_row(
            kind,
            str(len(own)),
            f"{fmean(row.speedup > 1.0 for row in own):.0%}",
            f"{fmean(row.speedup for row in own):.2f}x",
            f"{max(row.speedup for row in own):.2f}x",
            f"{fmean(row.over_bound for row in own):.2f}",
            f"{fmean(row.regret for row in own):.1%}",
        )
    bars = [
        Bar(name="faster than the default", figure=fmean(row.speedup > 1.0 for row in counted), floor=0.69),
        Bar(name="speed-up, mean", figure=fmean(row.speedup for row in counted), floor=1.27),
        Bar(name="speed-up, most", figure=max(row.speedup for row in counted), floor=2.04),
        Bar(name="slowest over the default", figure=max(1 / row.speedup for row in counted), ceiling=1.03),
        Bar(name="within 1.15 of the bound", figure=fmean(row.over_bound <= 1.15 for row in counted), floor=0.90),
        Bar(name="best in predicted top three", figure=fmean(row.place_of_best <= 3 for row in counted), floor=0.95),
        Bar(name="mean regret", figure=fmean(row.regret for row in counted), ceiling=0.05),
    ]
    return Outcome(tables=[table, classes], document={"topologies": documents}, bars=bars)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="topologies whose name contains this")


if __name__ == "__main__":
    run_benchmark("reductions_testbed", measure, description=__doc__.splitlines()[0], options=_options)
