"""Reductions on 4 × 8 V100: prices fitted to a few contiguous groups, held against all published measurements.

The table (`../shared/data/collectives_v100_4x8.csv`, NCCL on AWS p3.16xlarge) has all-reduce, reduce-scatter,
all-gather and all-to-all for contiguous and strided group sets. Its `elements` count the whole array: before an
all-reduce or a reduce-scatter, after an all-gather; of an all-to-all, over all devices of a group. `calibrate` sees
contiguous groups of two sizes only. Then

    single collectives   predicted against measured seconds of everything that was not fitted to
    reductions           an all-reduce, reduce-scatter or all-gather over the devices of a group set, by every program
                         whose steps were all measured at the sizes that they have in it; a program's measured time is
                         the sum of its steps'

Groups of one device move nothing and are left out.
"""

import argparse
import csv
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import inf, log2
from pathlib import Path
from statistics import fmean

from rich.table import Table

from benchmarks.bars import Bar, Outcome, run_benchmark
from planloom.cluster import Cluster, Device, Level, Link, format_bytes, format_seconds
from planloom.collective import SizePrice, StepKind, digits_cost, synthesize
from planloom.collective.calibration import Fit, calibrate
from planloom.collective.measurements import Measurement
from planloom.collective.pricing import groups_cost
from planloom.layout import Axis, Digit, Layout, Mesh

TABLE = Path(__file__).parents[2] / "shared" / "data" / "collectives_v100_4x8.csv"
NUM_NODES, GPUS = 4, 8
FITTED_BYTES = (256 << 10, 256 << 20)
MIN_BYTES = 64 << 10
ITEM_BYTES = {"f16": 2, "f32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measurement, on the machine's own device numbers."""

    machine: tuple[int, int]
    """Nodes, and GPUs of each, that were used."""
    dtype: str
    whole_bytes: int
    measurement: Measurement

    @property
    def is_contiguous(self) -> bool:
        per_node = self.machine[1]
        numbers = [[d // GPUS * per_node + d % GPUS for d in group] for group in self.measurement.groups]
        return all(g[-1] - g[0] == len(g) - 1 for g in numbers)


def read_rows() -> list[Row]:
    rows = []
    with TABLE.open() as file:
        for line in csv.DictReader(file):
            machine = (int(line["nodes"]), int(line["gpus_per_node"]))
            groups = tuple(
                tuple(int(d) // machine[1] * GPUS + int(d) % machine[1] for d in group.split("-"))
                for group in line["groups"].split(";")
            )
            whole = int(line["elements"]) * ITEM_BYTES[line["dtype"]]
            n = len(groups[0])
            if n == 1 or whole == 0:
                continue
            kind: StepKind = line["collective"]  # type: ignore[assignment]
            before = whole / n if kind in ("all_gather", "all_to_all") else float(whole)
            measured = Measurement(kind=kind, groups=groups, num_bytes=before, seconds=float(line["seconds"]))
            rows.append(Row(machine=machine, dtype=line["dtype"], whole_bytes=whole, measurement=measured))
    return rows


def bare_cluster() -> Cluster:
    """AWS p3.16xlarge with nominal links and nothing known of its collectives: 25 Gbit/s a node, six NVLinks a GPU."""
    device = Device(
        name="V100-SXM2-16GB",
        flops_per_second={"float16": 125e12, "float32": 15.7e12},
        memory_bytes=16 << 30,
        memory_bytes_per_second=900e9,
        launch_seconds=5e-6,
    )
    network = Link(bandwidth_bytes_per_second=25e9 / 8, latency_seconds=100e-6, shared=True)
    nvlink = Link(bandwidth_bytes_per_second=150e9, latency_seconds=10e-6)
    levels = (Level(name="node", count=NUM_NODES, link=network), Level(name="gpu", count=GPUS, link=nvlink))
    return Cluster(name="p3.16xlarge", levels=levels, device=device)


def predicted(cluster: Cluster, m: Measurement) -> float:
    return groups_cost(cluster, m.kind, m.groups).seconds(m.num_bytes)


# -- reductions


def binary_mesh(machine: tuple[int, int]) -> Mesh:
    """All devices of a machine along one axis of digits of two: every measured group set varies over some of them."""
    nodes, gpus = machine
    sizes = (2,) * round(log2(nodes * gpus))
    devices = tuple(node * GPUS + gpu for node in range(nodes) for gpu in range(gpus))
    return Mesh(axes=(Axis(name="all", sizes=sizes),), devices=devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A goal over some digits of a machine, for one size and dtype."""

    machine: tuple[int, int]
    goal: str
    digits: tuple[Digit, ...]
    dtype: str
    whole_bytes: int

    def layouts(self) -> tuple[Layout, Layout]:
        whole, split = Layout(splits=((),)), Layout(splits=(self.digits,))
        partial = Layout(splits=((),), partial=self.digits)
        return {"all_reduce": (partial, whole), "reduce_scatter": (partial, split), "all_gather": (split, whole)}[
            self.goal
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """The programs of a case: predicted and measured seconds of each."""

    case: Case
    programs: tuple[tuple[float, float], ...]

    @property
    def place_of_best(self) -> int:
        """Where the program that was measured fastest comes in the prediction, from 1."""
        best = min(self.programs, key=lambda p: p[1])
        return 1 + sum(p[0] < best[0] for p in self.programs)

    @property
    def regret(self) -> float:
        chosen = min(self.programs, key=lambda p: p[0])
        return chosen[1] / min(measured for _, measured in self.programs) - 1


MOST_PROGRAMS = 2000

Key = tuple[tuple[int, int], str, str, frozenset[tuple[int, ...]], int]
"""Machine, dtype, collective, groups, and the bytes of a device's array before it."""


def rank(case: Case, measured: Mapping[Key, float], cluster: Cluster) -> Ranked:
    """Every program of a case whose steps were measured."""
    mesh = binary_mesh(case.machine)

    def seconds(kind: StepKind, digits: tuple[Digit, ...], num_bytes: float) -> float:
        key: Key = (case.machine, case.dtype, kind, groups_of(mesh, digits), round(num_bytes))
        return measured.get(key, inf)

    def price(_: Mesh, kind: StepKind, digits: tuple[Digit, ...], masters: tuple[Digit, ...]) -> SizePrice:
        return lambda num_bytes: seconds(kind, digits, num_bytes)

    source, target = case.layouts()
    sizes = (case.whole_bytes // ITEM_BYTES[case.dtype],)
    found = synthesize(
        source, target, mesh, sizes, price=price, item_bytes=ITEM_BYTES[case.dtype], num_best=MOST_PROGRAMS
    )
    programs = []
    for program in found:
        expected = sum(
            digits_cost(cluster, mesh, move.kind, tuple(m.digit for m in move.digits)).seconds(move.num_bytes)
            for move in program.moves
        )
        programs.append((expected, program.price))
    return Ranked(case=case, programs=tuple(programs))


@cache
def groups_of(mesh: Mesh, digits: tuple[Digit, ...]) -> frozenset[tuple[int, ...]]:
    return frozenset(mesh.groups(digits))


def cases(rows: list[Row], sizes: list[int]) -> list[Case]:
    """Every goal over every group set that was measured, of every size."""
    found = []
    for machine in sorted({row.machine for row in rows}, reverse=True):
        mesh = binary_mesh(machine)
        digits = mesh.digits
        runs = {digits[i:j] for i in range(len(digits)) for j in range(i + 1, len(digits) + 1)}
        sets = {frozenset(row.measurement.groups) for row in rows if row.machine == machine}
        for run in sorted(runs, key=len, reverse=True):
            if groups_of(mesh, run) not in sets:
                continue
            for goal in ("all_reduce", "reduce_scatter", "all_gather"):
                found += [
                    Case(machine=machine, goal=goal, digits=run, dtype=dtype, whole_bytes=size)
                    for dtype in ITEM_BYTES
                    for size in sizes
                ]
    return found


def measure(arguments: argparse.Namespace) -> Outcome:
    rows = read_rows()
    fitted = [row for row in rows if row.is_contiguous and row.whole_bytes in FITTED_BYTES]
    fit = calibrate(bare_cluster(), [row.measurement for row in fitted])
    rest = [row for row in rows if row not in fitted]
    sizes = sorted({row.whole_bytes for row in rows if row.whole_bytes >= MIN_BYTES})
    sizes = sizes[::4] if arguments.quick else sizes
    measured: dict[Key, float] = {
        (r.machine, r.dtype, r.measurement.kind, frozenset(r.measurement.groups), round(r.measurement.num_bytes)): (
            r.measurement.seconds
        )
        for r in rows
    }
    ranked = []
    for case in cases(rows, sizes):
        key = (case.machine, case.dtype, case.goal, groups_of(binary_mesh(case.machine), case.digits))
        n = 2 ** len(case.digits)
        before = case.whole_bytes // n if case.goal == "all_gather" else case.whole_bytes
        if (*key, before) in measured:
            found = rank(case, measured, fit.cluster)
            ranked += [found] if len(found.programs) > 1 else []
    return report(rows, fitted, fit, rest, ranked)


def report(rows: list[Row], fitted: list[Row], fit: Fit, rest: list[Row], ranked: list[Ranked]) -> Outcome:
    errors: dict[tuple[str, bool], list[float]] = defaultdict(list)
    for row in rest:
        error = abs(predicted(fit.cluster, row.measurement) / row.measurement.seconds - 1)
        for name in (row.measurement.kind, "all"):
            errors[name, row.whole_bytes >= MIN_BYTES].append(error)
    single = Table("collective", "from 64 KiB: points", "mean error", "smaller: points", "mean error ")
    for name in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "all"):
        large, small = errors[name, True], errors[name, False]
        single.add_row(name, str(len(large)), f"{fmean(large):.1%}", str(len(small)), f"{fmean(small):.1%}")
    single.title = (
        f"fitted to {len(fitted)} of {len(rows)} points (their own error {fit.error:.1%}), predicting the rest"
    )

    by_goal = Table("goal", "on", "reductions", "programs", "best in top 1", "top 3", "mean regret", "best gain")
    for goal in ("all_reduce", "reduce_scatter", "all_gather"):
        for machine in sorted({r.case.machine for r in ranked}, reverse=True):
            own = [r for r in ranked if r.case.goal == goal and r.case.machine == machine]
            if own:
                by_goal.add_row(goal, "{} × {}".format(*machine), *_summary(own))
    by_goal.add_row("all", "", *_summary(ranked))
    by_goal.title = "reductions with more than one measured program, from 64 KiB"

    spread, example = _spread(rows)
    bars = [
        Bar(name="share of points fitted to", figure=len(fitted) / len(rows), ceiling=0.1),
        Bar(name="mean error of single collectives from 64 KiB", figure=fmean(errors["all", True]), ceiling=0.10),
        Bar(name="best measured in predicted top three", figure=_share(ranked, 3), floor=0.95),
        Bar(name="best measured is predicted best", figure=_share(ranked, 1), floor=0.75),
        Bar(name="mean regret", figure=fmean(r.regret for r in ranked), ceiling=0.03),
        Bar(name="spread between placements, measured", figure=spread, floor=100),
    ]
    document = {
        "num_points": len(rows),
        "num_fitted": len(fitted),
        "errors": {name: fmean(errors[name, True]) for name, large in errors if large},
        "errors_below_64_kib": {name: fmean(errors[name, False]) for name, large in errors if not large},
        "num_reductions": len(ranked),
        "num_programs": sum(len(r.programs) for r in ranked),
    }
    return Outcome(tables=[single, by_goal, f"widest spread: {example}\n"], document=document, bars=bars)


def _summary(ranked: list[Ranked]) -> list[str]:
    return [
        str(len(ranked)),
        str(sum(len(r.programs) for r in ranked)),
        f"{_share(ranked, 1):.1%}",
        f"{_share(ranked, 3):.1%}",
        f"{fmean(r.regret for r in ranked):.2%}",
        f"{max(max(m for _, m in r.programs) / min(m for _, m in r.programs) for r in ranked):.1f}x",
    ]


def _share(ranked: list[Ranked], top: int) -> float:
    return fmean(r.place_of_best <= top for r in ranked)


def _spread(rows: list[Row]) -> tuple[float, str]:
    """The slowest over the fastest all-reduce of one size among as many groups of as many devices."""
    found: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        m = row.measurement
        if m.kind == "all_reduce" and row.whole_bytes >= MIN_BYTES:
            found[row.machine, row.dtype, row.whole_bytes, len(m.groups[0])].append(row)
    slow, fast = max(
        ((max(group, key=_seconds), min(group, key=_seconds)) for group in found.values()),
        key=lambda pair: _seconds(pair[0]) / _seconds(pair[1]),
    )
    text = (
        f"{format_bytes(slow.whole_bytes)} among {len(slow.measurement.groups[0])} devices: "
        f"{slow.measurement.groups[0]} … {format_seconds(_seconds(slow))}, "
        f"{fast.measurement.groups[0]} … {format_seconds(_seconds(fast))}"
    )
    return _seconds(slow) / _seconds(fast), text


def _seconds(row: Row) -> float:
    return row.measurement.seconds


if __name__ == "__main__":
    run_benchmark("reductions_v100", measure, description=__doc__.splitlines()[0])
