"""Results as people and programs read them: a table, JSON documents."""

from dataclasses import asdict

from rich.table import Table

from testbed.checking import TOLERANCE, CheckResult
from testbed.results import RunResult
from testbed.speed import SPEED_TOLERANCE, SpeedCheck


def run_document(result: RunResult) -> dict[str, object]:
    return {
        "timed_out": result.timed_out,
        "seconds": result.seconds,
        "ranks": [
            {
                "rank": rank.rank,
                "exit_code": rank.exit_code,
                "ended_by_testbed": rank.ended_by_testbed,
                "out_of_memory": rank.out_of_memory,
                "stdout": rank.stdout,
                "stderr": rank.stderr,
            }
            for rank in result.ranks
        ],
    }


def check_document(checked: CheckResult) -> dict[str, object]:
    return {
        "ok": checked.ok,
        "tolerance": TOLERANCE,
        "trials": [
            {
                "level": result.trial.level,
                "name": result.trial.name,
                "flows": result.trial.flows,
                "judged": result.trial.judged,
                "required_bytes_per_second": result.trial.bytes_per_second,
                "measured_bytes_per_second": result.bytes_per_second,
                "deviation": result.deviation,
                "ok": result.ok,
            }
            for result in checked.results
        ],
    }


def check_table(checked: CheckResult, name: str) -> Table:
    table = Table(title=f"Links of {name}, Mbit/s", box=None, title_justify="left", header_style="dim")
    for column in ("level", "trial", "flows"):
        table.add_column(column)
    for column in ("required", "measured", "off"):
        table.add_column(column, justify="right")
    for result in checked.results:
        trial = result.trial
        together = trial.judged == "together"
        wanted = (
            trial.bytes_per_second[:1] if together or len(set(trial.bytes_per_second)) == 1 else trial.bytes_per_second
        )
        colour = "green" if result.ok else "bold red"
        table.add_row(
            trial.level,
            trial.name,
            ", ".join(f"{source}→{destination}" for source, destination in trial.flows),
            _megabits(wanted) + (" together" if together else " each" if len(trial.flows) > 1 else ""),
            _megabits(result.bytes_per_second),
            f"[{colour}]{result.deviation:+.1%}[/{colour}]",
        )
    return table


def speed_document(checked: SpeedCheck) -> dict[str, object]:
    return {
        "ok": checked.ok,
        "tolerance": SPEED_TOLERANCE,
        "num_ranks": checked.num_ranks,
        "cpu_share": checked.cpu_share,
        "loops": [asdict(result) for result in checked.results],
    }


def speed_table(checked: SpeedCheck, name: str) -> Table:
    title = f"Speed of ranks of {name}: {checked.num_ranks} with {checked.cpu_share:g} of a core each"
    table = Table(title=title, box=None, title_justify="left", header_style="dim")
    table.add_column("rank")
    table.add_column("the others")
    for column in ("loop, ms", "CPU, ms", "share", "share off", "time off"):
        table.add_column(column, justify="right")
    for result in checked.results:
        off = [
            f"[{'green' if abs(value) <= SPEED_TOLERANCE else 'bold red'}]{value:+.1%}[/]"
            for value in (result.share_deviation, result.speed_deviation)
        ]
        table.add_row(
            str(result.rank),
            result.others,
            f"{result.seconds * 1e3:.1f}",
            f"{result.cpu_seconds * 1e3:.1f}",
            f"{result.share:.4f}",
            *off,
        )
    return table


def _megabits(rates: tuple[float, ...]) -> str:
    return " ".join(f"{rate * 8 / 1e6:.1f}".removesuffix(".0") for rate in rates)
