"""How long it takes to find reductions: two to six digits, 16 to 65,536 devices.

A cluster of as many levels as digits, slower outside than inside, the two outer ones with shared uplinks; an all-reduce
over one axis with a digit at every level. Times are from layouts to the best program (search), with the groups of all
its steps written out (groups), and to the ten best.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from statistics import median

from rich.table import Table

from benchmarks.bars import Bar, Outcome, run_benchmark
from planloom.cluster import Cluster, Device, Level, Link
from planloom.collective import Synthesized, seconds_price, synthesize
from planloom.layout import Layout, Mesh, Placement, mesh_of

# Levels by number of digits: from 16 devices to 65,536 where that many digits allow.
SHAPES: dict[int, tuple[tuple[int, ...], ...]] = {
    2: ((4, 4), (16, 16), (256, 256)),
    3: ((4, 2, 2), (8, 8, 8), (64, 32, 32)),
    4: ((2, 2, 2, 2), (8, 8, 4, 4), (16, 16, 16, 16)),
    5: ((2, 2, 2, 2, 2), (4, 4, 4, 4, 4), (16, 16, 8, 8, 4)),
    6: ((2, 2, 2, 2, 2, 2), (4, 4, 4, 4, 4, 4), (16, 8, 8, 8, 4, 2)),
}
LIMITS = {2: 0.01, 3: 0.01, 4: 0.1, 6: 2.0}
"""Seconds by number of digits: milliseconds for two and three, 0.1 for four, 2 for six."""


def cluster_of(counts: tuple[int, ...]) -> Cluster:
    levels = tuple(
        Level(
            name=f"level{i}",
            count=count,
            link=Link(bandwidth_bytes_per_second=1e9 * 4**i, latency_seconds=1e-5 / (i + 1), shared=i < 2),
        )
        for i, count in enumerate(counts)
    )
    device = Device(
        name="device",
        flops_per_second={"float32": 1e12},
        memory_bytes=1 << 34,
        memory_bytes_per_second=1e12,
        launch_seconds=5e-6,
    )
    return Cluster(name="levels", levels=levels, device=device)


def search(cluster: Cluster, mesh: Mesh, num_best: int) -> tuple[Synthesized, ...]:
    source, target = Layout(splits=((),), partial=mesh.digits), Layout(splits=((),))
    seconds_price.cache_clear()
    return synthesize(source, target, mesh, (1 << 30,), price=seconds_price(cluster), num_best=num_best)


def timed(function: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return median(times)


def measure(arguments: argparse.Namespace) -> Outcome:
    table = Table("digits", "devices", "levels", "search", "with groups", "ten best", "steps")
    rows = []
    repeats = 1 if arguments.quick else 3
    for num_digits, shapes in SHAPES.items():
        for counts in shapes:
            cluster = cluster_of(counts)
            mesh = mesh_of(Placement(axes=("all",), matrix=(counts,)))
            seconds = timed(partial(search, cluster, mesh, 1), repeats)
            (best,) = search(cluster, mesh, 1)
            groups = timed(partial(best.program, mesh), 1)
            ten = timed(partial(search, cluster, mesh, 10), 1)
            row = {
                "digits": num_digits,
                "devices": len(mesh.devices),
                "search_seconds": seconds,
                "groups_seconds": groups,
                "ten_best_seconds": ten,
                "num_steps": len(best.moves),
            }
            rows.append(row)
            table.add_row(
                str(num_digits),
                f"{len(mesh.devices):,}",
                " × ".join(map(str, counts)),
                f"{seconds * 1e3:.1f} ms",
                f"{(seconds + groups) * 1e3:.1f} ms",
                f"{ten * 1e3:.1f} ms",
                str(len(best.moves)),
            )
    bars = [
        Bar(
            name=f"{n} digits, slowest search, seconds",
            figure=max(float(row["search_seconds"]) for row in rows if row["digits"] == n),
            ceiling=limit,
        )
        for n, limit in LIMITS.items()
    ]
    return Outcome(tables=[table], document={"rows": rows}, bars=bars)


if __name__ == "__main__":
    run_benchmark("synthesis_speed", measure, description=__doc__.splitlines()[0])
