"""The chosen plan against torch's own, on the testbed: measured steps of the same model on the same devices.

For every case (`plan_quality_cases`): the search finds its finalists from the cluster's figures; all that they use is
measured on the ranks under their quota; the fastest by the simulator is the *chosen* plan. It then competes in turns
(`plan_quality_race`, `plan_quality_rank`) with

    DDP, FSDP2, DTensor TP    torch's own (`plan_quality_rivals`)
    TP flat                   1-D tensor parallel of ours, every reduction torch's all-reduce over all ranks
    TP ours                   the same, with the collective programs that the cluster's links suggest
    volume                    what the search chooses if it prices as Alpa does: bytes, computation free

on the same batch, in the same dtype, under the same limit of memory. In *exhaustive* cases all plans of a declared
space (`plan_quality_cases.all_plans`, on all placements) are measured with the finalists, and those near the fastest
compete, too. Every case's result is written when it is there; a run that was interrupted goes on with the others.
"""

import argparse
import hashlib
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

import msgspec
from rich.table import Table

from benchmarks.bars import Bar, Outcome, run_benchmark
from benchmarks.plan_quality_cases import QUICK, TOPOLOGIES, Case
from benchmarks.plan_quality_race import CHOSEN, FLAT, OURS, TORCH, VOLUME, Effort, Race, Result
from benchmarks.plan_quality_ranks import Ranks
from planloom.cluster import format_bytes, format_seconds
from testbed import DeviceLimits, open_devices

DEFAULT_WORK = Path(".planloom/plan_quality")
_OWN_FILES = (
    "plan_quality_cases",
    "plan_quality_ra",
    "plan_quality_rivals",
    *(topology.name for topology in TOPOLOGIES),
)
_NUM_EXHAUSTIVE, _NUM_KINDS = 3, 6


def measure(arguments: argparse.Namespace) -> Outcome:
    words = [word for word in arguments.only.split(",") if word]
    effort = Effort(num_rounds=arguments.rounds, exhaustive=not arguments.few)
    effort = Effort(num_finalists=2, num_rounds=2, exhaustive=False) if arguments.quick else effort
    topologies = QUICK if arguments.quick else TOPOLOGIES
    wanted = [case for t in topologies for case in t.cases if not words or any(word in case.name for word in words)]
    work = (arguments.work or DEFAULT_WORK) / digest(effort)
    if arguments.fresh:
        shutil.rmtree(work, ignore_errors=True)
    (work / "results").mkdir(parents=True, exist_ok=True)
    results, started = [], time.monotonic()
    for topology in topologies:
        cases = [case for case in topology.cases if case in wanted]
        left = [case for case in cases if not result_file(work, case).is_file()]
        if left:
            with open_devices(topology.path, DeviceLimits()) as devices, Ranks(devices, work / "requests") as ranks:
                for case in left:

                    def say(text: str, case: Case = case) -> None:
                        minutes = (time.monotonic() - started) / 60
                        print(f"{minutes:4.1f} min, {case.name}: {text}", file=sys.stderr, flush=True)

                    result = Race(case, devices.cluster, ranks, say, work, effort).run(devices.kind)
                    result_file(work, case).write_bytes(msgspec.json.encode(result))
                    ratios = ", ".join(f"over {name} {result.ratio(name):.2f}" for name in result.others)
                    own = result.contestants[CHOSEN]
                    say(f"{result.seconds:.0f} s; {own.plan}, {own.step_seconds:.2f} s; {ratios}")
        results += [msgspec.json.decode(result_file(work, case).read_bytes(), type=Result) for case in cases]
    return report(results, is_whole=not arguments.quick and len(results) == sum(len(t.cases) for t in topologies))


def result_file(work: Path, case: Case) -> Path:
    """Where a case's result is kept: a run that was interrupted goes on after it."""
    return work / "results" / f"{case.name.replace('/', '-')}.json"


def digest(effort: Effort) -> str:
    """Of all code that a figure may depend on: figures of other code are not taken for its own."""
    root, found = Path(__file__).parents[1], hashlib.sha256(repr(effort).encode())
    for folder in ("src/planloom", "testbed", "benchmarks"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".yaml") and (folder != "benchmarks" or path.stem.startswith(_OWN_FILES)):
                found.update(path.read_bytes())
    return found.hexdigest()[:12]


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
    parser.add_argument("--rounds", type=int, default=5, help="steps of each, in turns")
    parser.add_argument("--few", action="store_true", help="not all plans, even in exhaustive cases")
    parser.add_argument("--work", type=Path, help=f"where results are kept as they come; {DEFAULT_WORK} if not given")
    parser.add_argument("--fresh", action="store_true", help="measure again what this code has measured before")


if __name__ == "__main__":
    run_benchmark("plan_quality_testbed", measure, description=__doc__ or "", options=_options)
