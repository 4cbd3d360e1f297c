"""Space and time: each feature against the best plans without it, measured small and simulated at the papers' scales.

For every case (`space_time_cases`): all runs, collectives and exchanges of its plans are profiled on the ranks under
their quota, every plan is simulated with these prices, and only then all plans train in turns under the same limit of
memory. The *ratio* of a feature is the step of the best plan without it that fits over its own; plans that run out of
memory do not compete. Then the same pair at the paper's scale, simulated. A simulated ratio counts only where the
measured ratio of the small pair and its own simulated one agree: both above or both below one, and within 15 %.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks.bars import Bar, Outcome, run_benchmark
from benchmarks.plan_quality_race import device_of_share, usable_share
from benchmarks.plan_quality_ranks import Ranks
from benchmarks.space_time_cases import CASES as OTHER_CASES
from benchmarks.space_time_cases import Case, Large, Small
from benchmarks.space_time_interlaced import INTERLACED
from benchmarks.space_time_recycling import CASES as RECYCLING_CASES
from planloom.cli.models import CapturedModel, capture_model
from planloom.cli.pricing import with_figures
from planloom.cluster import Cluster, cluster_to_yaml, format_bytes, format_seconds, load_cluster
from planloom.cluster.units import parse_bytes
from planloom.cost import Prices
from planloom.errors import PlanError
from planloom.plan import Plan, find_named, named_plan, save_plan
from planloom.profile import local_store
from planloom.program import Program, build_program, verify_program
from planloom.simulate import Timeline, simulate
from testbed import DeviceLimits, OpenDevices, open_devices

CASES: tuple[Case, ...] = (*OTHER_CASES, INTERLACED, *RECYCLING_CASES)
DEFAULT_WORK = Path(".planloom/space_time")
_BUDGET_SECONDS = 0.1
_ROUNDS = 7
_AGREEMENT = 0.15
_RATIO, _NUM_RATIOS = 1.5, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A plan: predicted, and measured, if it was; `seconds` are those of its steps in turns with the others."""

    plan: str
    has_feature: bool
    predicted_seconds: float
    predicted_bytes: int
    bubble: float
    hidden: float
    fits: bool = True
    seconds: tuple[float, ...] = ()
    peak_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """One pair at one scale: the ratio of the best plan without the feature over the plan with it."""

    contestants: tuple[Contestant, ...]

    @property
    def predicted_ratio(self) -> float:
        own = min(c.predicted_seconds for c in self.contestants if c.has_feature and c.fits)
        return min((c.predicted_seconds for c in self._others), default=float("inf")) / own

    @property
    def ratio(self) -> float:
        """As measured: the median over rounds, against the rival that is fastest by its median."""
        own = next(c for c in self.contestants if c.has_feature)
        rivals = [c for c in self._others if c.seconds]
        if not rivals:
            return float("inf")
        best = min(rivals, key=lambda c: median(c.seconds))
        return median(b / a for a, b in zip(own.seconds, best.seconds, strict=False))

    @property
    def _others(self) -> list[Contestant]:
        return [c for c in self.contestants if not c.has_feature and c.fits]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A case at both scales."""

    case: Case
    small: Scale
    large: Scale | None

    @property
    def agrees(self) -> bool:
        measured, predicted = self.small.ratio, self.small.predicted_ratio
        if not (isfinite(measured) and isfinite(predicted)):
            return measured == predicted
        return (measured > 1) == (predicted > 1) and abs(measured / predicted - 1) <= _AGREEMENT

    @property
    def best_ratio(self) -> float:
        """The largest that counts."""
        large = self.large.predicted_ratio if self.large is not None and self.agrees else 0.0
        return max(self.small.ratio, large)


def measure(arguments: argparse.Namespace) -> Outcome:
    wanted = [case for case in CASES if arguments.only in case.feature]
    wanted = wanted[:1] if arguments.quick else wanted
    results: list[Result] = []
    kinds: set[str] = set()
    started = time.monotonic()
    for case in wanted:

        def say(text: str, case: Case = case) -> None:
            print(f"{(time.monotonic() - started) / 60:4.1f} min, {case.feature}: {text}", file=sys.stderr, flush=True)

        work = Path(arguments.work) / case.feature.replace(" ", "-")
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        with open_devices(case.small.path, DeviceLimits()) as devices:
            kinds.add(devices.kind)
            with Ranks(devices, work / "requests") as ranks:
                small = _Small(case.small, devices, ranks, work).run(2 if arguments.quick else _ROUNDS)
        say(f"measured {small.ratio:.2f}, simulated {small.predicted_ratio:.2f}")
        is_small = arguments.quick or arguments.small
        large = simulated(case.large) if case.large is not None and not is_small else None
        results.append(Result(case=case, small=small, large=large))
    return report(results, kinds, is_whole=len(results) == len(CASES))


class _Small:
    """A case on the testbed."""

    def __init__(self, case: Small, devices: OpenDevices, ranks: Ranks, work: Path) -> None:
        self.case, self.ranks, self.work = case, ranks, work
        cluster = devices.cluster
        self.cluster = replace(cluster, device=device_of_share(cluster.device, usable_share(cluster.num_devices)))
        self.captured = capture_model(case.source)
        self.limit = parse_bytes(case.limit, key="limit") if case.limit else None

    def run(self, num_rounds: int) -> Scale:
        """Profile, predict, and only then measure."""
        named = [(self.case.plan, True), *((other, False) for other in self.case.others)]
        plans = [_plan(self.captured, name, self.cluster) for name, _ in named]
        programs = [build_program(self.captured.blocks, plan) for plan in plans]
        for program in programs:
            verify_program(self.captured.blocks, program)
        self.ranks.ask("load", model=self.case.source)
        prices = self._profiled(plans)
        found = [
            _contestant(name, simulate(program, prices), has_feature=has_feature, limit=self.limit)
            for (name, has_feature), program in zip(named, programs, strict=True)
        ]
        fitting = [i for i, contestant in enumerate(found) if contestant.fits]
        answer: dict[str, dict[str, Any]] = self.ranks.ask(
            "race",
            plans=str(self._save([plans[i] for i in fitting], "plans")),
            rivals=[],
            rounds=num_rounds,
            limit_bytes=None,
        )
        for place, i in enumerate(fitting):
            figures = answer[f"{place:03}"]
            found[i] = replace(found[i], seconds=tuple(figures["seconds"]), peak_bytes=figures["peak_bytes"])
        return Scale(contestants=tuple(found))

    def _profiled(self, plans: Sequence[Plan]) -> Prices:
        store = self.work / "prices.sqlite"
        folder = self._save(plans, "profiled")
        label = self.case.topology
        self.ranks.ask("profile", plans=str(folder), store=str(store), label=label, budget_seconds=_BUDGET_SECONDS)
        kept = local_store(store, self.cluster.num_devices, label=label)
        prices = Prices(blocks=self.captured.blocks, cluster=self.cluster, measured_links=True)
        return with_figures(prices, kept.load_with_spread())

    def _save(self, plans: Sequence[Plan], name: str) -> Path:
        folder = self.work / name
        folder.mkdir()
        for i, plan in enumerate(plans):
            save_plan(plan, folder / f"{i:03}.json")
        return folder


def simulated(case: Large) -> Scale:
    """A pair at the paper's scale; plans that cannot be built for the model do not compete."""
    captured, cluster = capture_model(case.source), load_cluster(case.cluster, num_outer=case.nodes)
    prices = Prices(blocks=captured.blocks, cluster=cluster)
    found = []
    for name, has_feature in [(n, True) for n in case.plans] + [(n, False) for n in case.others]:
        try:
            program: Program = build_program(captured.blocks, _plan(captured, name, cluster))
        except PlanError:
            if has_feature:
                raise
            continue
        timeline = simulate(program, prices)
        found.append(_contestant(name, timeline, has_feature=has_feature, limit=cluster.device.memory_bytes))
    return Scale(contestants=tuple(found))


def _plan(captured: CapturedModel, name: str, cluster: Cluster) -> Plan:
    plan = named_plan(captured.blocks, find_named(name), batch=captured.spec)
    return replace(plan, cluster=cluster_to_yaml(cluster))


def _contestant(name: str, timeline: Timeline, *, has_feature: bool, limit: int | None) -> Contestant:
    summary = timeline.summary
    assert summary is not None
    communication = timeline.busy_seconds(timeline.devices[0], "communication")
    exposed = sum(summary.exposed_communication.values())
    return Contestant(
        plan=name,
        has_feature=has_feature,
        predicted_seconds=timeline.step_seconds,
        predicted_bytes=summary.peak_memory_bytes,
        bubble=summary.bubble,
        hidden=max(0.0, 1 - exposed / communication) if communication else 0.0,
        fits=limit is None or summary.peak_memory_bytes <= limit,
    )


def report(results: Sequence[Result], kinds: set[str], *, is_whole: bool) -> Outcome:
    plans = Table("feature", "plan", "predicted", "step", "off", "memory", "measured", "bubble", "hidden")
    for result in results:
        for c in result.small.contestants:
            step = median(c.seconds) if c.seconds else None
            plans.add_row(
                result.case.feature if c.has_feature else "",
                c.plan,
                format_seconds(c.predicted_seconds),
                format_seconds(step) if step else "does not fit" if not c.fits else "",
                f"{c.predicted_seconds / step - 1:+.1%}" if step else "",
                format_bytes(c.predicted_bytes),
                format_bytes(c.peak_bytes) if c.peak_bytes else "",
                f"{c.bubble:.0%}",
                f"{c.hidden:.0%}",
            )
    ratios = Table("feature", "measured", "simulated", "agree", "at the paper's scale", "best plan without it there")
    for result in results:
        large, best = result.large, ""
        if large is not None:
            rivals = [c for c in large.contestants if not c.has_feature and c.fits]
            best = min(rivals, key=lambda c: c.predicted_seconds).plan if rivals else "none fits"
        ratios.add_row(
            result.case.feature,
            f"{result.small.ratio:.2f}",
            f"{result.small.predicted_ratio:.2f}",
            "yes" if result.agrees else "no",
            f"{large.predicted_ratio:.2f}" if large is not None else "",
            best,
        )
    bars = [
        Bar(name=f"{r.case.feature}, measured, over the best without it", figure=r.small.ratio, floor=1.0)
        if r.case.wins
        else Bar(name=f"{r.case.feature}, measured, where it must not win", figure=r.small.ratio, ceiling=1.0)
        for r in results
    ]
    if is_whole:
        won = sum(r.best_ratio >= _RATIO for r in results if r.case.needs_ratio)
        bars.append(Bar(name=f"features that win by {_RATIO}x", figure=won, floor=_NUM_RATIOS))
    document = {
        "devices": sorted(kinds),
        "cases": [
            asdict(r)
            | {
                "ratio": _or_none(r.small.ratio),
                "predicted_ratio": _or_none(r.small.predicted_ratio),
                "agrees": r.agrees,
            }
            for r in results
        ],
    }
    return Outcome(tables=[plans, ratios], document=document, bars=bars)


def _or_none(ratio: float) -> float | None:
    """None: nothing else fits."""
    return ratio if isfinite(ratio) else None


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="features whose name contains this")
    parser.add_argument("--small", action="store_true", help="not the papers' scales, which take minutes to capture")
    parser.add_argument("--work", default=str(DEFAULT_WORK), help="where files are kept")


if __name__ == "__main__":
    run_benchmark("space_time", measure, description=__doc__ or "", options=_options)
