"""The chosen plan against torch's own, on the testbed: measured steps of the same model on the same devices.

For every case (`plan_quality_cases`): the search finds its finalists from the cluster's figures; all that they use is
measured on the ranks under their quota; the fastest by the simulator is the *chosen* plan. It then competes in turns
(`plan_quality_race`, `plan_quality_rank`) with

    DDP, FSDP2, DTensor TP    torch's own (`plan_quality_rivals`)
    TP flat                   1-D tensor parallel of ours, every reduction torch's all-reduce over all ranks
    TP ours                   the same, with the collective programs that the cluster's links suggest
    volume                    what the search chooses if it prices as Alpa does: bytes, computation free

on the same batch, in the same dtype, under the same limit of memory. In *exhaustive* cases all named plans on all
placements are measured with the finalists, and those near the fastest compete, too.
"""

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.bars import Bar, Outcome, run_benchmark
from benchmarks.plan_quality_cases import CASES, QUICK, Case
from benchmarks.plan_quality_race import CHOSEN, FLAT, OURS, TORCH, VOLUME, Effort, Race, Result
from planloom.cluster import format_bytes, format_seconds
from testbed import DeviceLimits, open_devices

_NUM_EXHAUSTIVE, _NUM_KINDS = 3, 6


def measure(arguments: argparse.Namespace) -> Outcome:
    words = [word for word in arguments.only.split(",") if word]
    wanted = [case for case in CASES if not words or any(word in case.name for word in words)]
    effort = Effort(num_rounds=arguments.rounds, exhaustive=not arguments.few)
    effort = Effort(num_finalists=2, num_rounds=2, exhaustive=False) if arguments.quick else effort
    results: list[Result] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, disable=arguments.json or not sys.stderr.isatty(), transient=True) as progress:
        for case in QUICK if arguments.quick else wanted:
            task = progress.add_task(case.name)

            def say(text: str, task: Any = task, case: Case = case) -> None:
                progress.update(task, description=f"{case.name}: {text}")
                print(f"{case.name}: {text}", file=sys.stderr, flush=True) if not sys.stderr.isatty() else None

            with open_devices(case.cluster, DeviceLimits()) as devices:
                race = Race(case, devices, say, Path(arguments.work), effort)
                results.append(race.run())
            say(", ".join(f"over {name} {results[-1].ratio(name):.2f}" for name in results[-1].others))
    return report(results, is_whole=not arguments.quick and len(results) == len(CASES))


def report(results: list[Result], *, is_whole: bool) -> Outcome:
    """Tables and bars; bars about all cases together only if all were measured."""
    table = Table("case", "chosen plan", "predicted", "step", *(f"over {n}" for n in (*TORCH, FLAT, OURS, VOLUME)), "")
    for result in results:
        chosen = result.contestants[CHOSEN]
        ratios = [f"{result.ratio(n):.2f}" for n in (*TORCH, FLAT, OURS, VOLUME)]
        worst = max(map(result.ratio, result.rivals))
        verdict = "best" if worst < 1 else "behind" if worst > 1.05 else "level"
        predicted = format_seconds(chosen.predicted_seconds or 0.0)
        table.add_row(result.case.name, chosen.plan, predicted, format_seconds(chosen.step_seconds), *ratios, verdict)
    memory = Table("case", *(f"memory of {name}" for name in (CHOSEN, *TORCH, FLAT, OURS)), "losses apart")
    for result in results:
        peaks = [format_bytes(result.contestants[name].peak_bytes) for name in (CHOSEN, *TORCH, FLAT, OURS)]
        memory.add_row(result.case.name, *peaks, f"{result.loss_difference:.1e}")
    exhausted = [result for result in results if result.all_plans]
    everything = Table("case", "plans measured", "near the fastest, in turns", "fastest of all", "chosen over it")
    for result in exhausted:
        best = min(result.others, key=lambda name: 1 / result.ratio(name))
        others = [name for name in result.others if name not in result.rivals]
        shown = result.contestants[best].plan
        figures = (str(len(result.all_plans)), str(len(others)), shown, f"{result.ratio(best):.3f}")
        everything.add_row(result.case.name, *figures)
    worst_ratios = [max(map(result.ratio, result.rivals)) for result in results]
    bars = [
        Bar(name="chosen over the best of the others, worst case", figure=max(worst_ratios), ceiling=1.05),
        Bar(name="cases better than all others", figure=fmean(r < 1 for r in worst_ratios), floor=1 / 3),
        Bar(
            name="gain over 1-D tensor parallel with torch's all-reduce, most",
            figure=max(1 / result.ratio(FLAT) - 1 for result in results),
            floor=0.37,
        ),
    ]
    if exhausted:
        far = max(max(map(result.ratio, result.others)) for result in exhausted)
        bars.append(Bar(name="chosen over the best of all plans, worst case", figure=far, ceiling=1.05))
    if is_whole:
        kinds = len({result.case.kind for result in results})
        bars.append(Bar(name="cases with all plans measured", figure=len(exhausted), floor=_NUM_EXHAUSTIVE))
        bars.append(Bar(name="kinds of topologies", figure=kinds, floor=_NUM_KINDS))
    own = max(1 / result.ratio(OURS) - 1 for result in results)
    note = f"gain over 1-D tensor parallel with our own reductions, most: {own:.0%}"
    document = {
        "devices": sorted({result.devices for result in results}),
        "cases": [asdict(result) | {"ratios": {n: result.ratio(n) for n in result.others}} for result in results],
        "gain_over_own_reductions": own,
    }
    return Outcome(tables=[table, memory, everything, note], document=document, bars=bars)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="cases whose name, topology/model, contains one of these, by commas")
    parser.add_argument("--rounds", type=int, default=7, help="steps of each, in turns")
    parser.add_argument("--few", action="store_true", help="not all plans, even in exhaustive cases")
    parser.add_argument("--work", default=tempfile.mkdtemp(prefix="planloom-quality-"), help="where files are kept")


if __name__ == "__main__":
    run_benchmark("plan_quality_testbed", measure, description=__doc__ or "", options=_options)
