"""What all benchmarks share: bars with their figures, options, and dated records.

A *bar* is a figure that must be reached. A benchmark measures, prints its table, then every bar with its figure and
whether it holds, and exits with 1 when one is missed. `--quick` takes under a minute, `--json` prints one document,
`--record` writes a dated file to benchmarks/results with the description of the machine.
"""

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A figure and the limit that it must reach: at least `floor`, at most `ceiling`."""

    name: str
    figure: float
    floor: float | None = None
    ceiling: float | None = None

    @property
    def holds(self) -> bool:
        above = self.floor is None or self.figure >= self.floor
        return above and (self.ceiling is None or self.figure <= self.ceiling)

    @property
    def limit(self) -> str:
        limits = (("≥", self.floor), ("≤", self.ceiling))
        return " and ".join(f"{sign} {limit:g}" for sign, limit in limits if limit is not None)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a benchmark found: for people, for machines, and its bars."""

    tables: list[RenderableType]
    document: dict[str, Any]
    bars: list[Bar] = field(default_factory=list)


def run_benchmark(
    name: str, measure: Callable[[argparse.Namespace], Outcome], *, description: str, options: Any = None
) -> None:
    """Parse the options, measure, print, record, and exit with 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("--quick", action="store_true", help="fewer cases: under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output, nothing else")
    parser.add_argument("--record", action="store_true", help="write a dated file to benchmarks/results")
    if options is not None:
        options(parser)
    arguments = parser.parse_args()
    outcome = measure(arguments)
    document = {
        "benchmark": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "quick": arguments.quick,
        "machine": machine(),
        "bars": [{**asdict(bar), "holds": bar.holds} for bar in outcome.bars],
        **outcome.document,
    }
    if arguments.json:
        json.dump(document, sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        console = Console(width=None if sys.stdout.isatty() else 160)
        for table in outcome.tables:
            console.print(table)
        console.print(bars_table(outcome.bars))
    if arguments.record:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{document['date'][:10]}-{name}{'-quick' if arguments.quick else ''}.json"
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(f"recorded in {path}", file=sys.stderr)
    sys.exit(0 if all(bar.holds for bar in outcome.bars) else 1)


def bars_table(bars: list[Bar]) -> Table:
    table = Table("bar", "figure", "limit", "", title="bars")
    for bar in bars:
        verdict = "[green]holds[/green]" if bar.holds else "[bold red]missed[/bold red]"
        table.add_row(bar.name, f"{bar.figure:.4g}", bar.limit, verdict)
    return table


def machine() -> dict[str, Any]:
    """What a figure depends on."""
    found = {"python": platform.python_version(), "system": platform.platform(), "cpus": os.cpu_count()}
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        found["cpu"] = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        found["cpu"] = platform.processor()
    for package in ("torch", "numpy", "scipy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found
