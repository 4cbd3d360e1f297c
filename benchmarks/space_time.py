"""Space and time: each feature against the best plans without it, measured small and simulated at the papers' scales.

For every case (`space_time_cases`): all runs, collectives and exchanges of its plans are profiled on the ranks under
their quota, every plan is simulated with these prices, and only then all plans train in turns under the same limit of
memory. The *ratio* of a feature is the step of the best plan without it that fits over that of the best plan with it;
plans that are predicted to run out of memory do not compete, and their peak is measured without the limit. Then the
same pair at the paper's scale, simulated with the figures of the cluster. A simulated ratio counts only where the
measured ratio of the small pair and its own simulated one agree: both above or both below one, and within 15 %.

Where a feature must not win, it is enough that nobody would choose it: what it is predicted to gain is less than one
standard deviation of the prediction.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
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
from benchmarks.space_time_rank import union_seconds
from benchmarks.space_time_recycling import AXIAL, RECYCLED
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

CASES: tuple[Case, ...] = (*OTHER_CASES, INTERLACED, RECYCLED, replace(AXIAL, large=None))
"""The large pair of AXIAL takes minutes to build: `space_time_recycling` simulates it."""
DEFAULT_WORK = Path(".planloom/space_time")
_BUDGET_SECONDS = 0.1
_ROUNDS = 7
_AGREEMENT = 0.15
_RATIO, _NUM_RATIOS = 1.5, 2
_SLACK = 1.1
"""Of the limit that the kernel enforces: predicted peaks are up to 8 % off (`prediction_testbed`)."""
_FAR = 2.5
"""Plans that are predicted to take so many times the step of the slower of the best pair are not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A plan: predicted, and measured, if it was; `seconds` are those of its steps in turns with the others.

    idle: the share of the step in which a device does not compute; bubble: that in which it waits for other stages;
    hidden: the share of its communication during which it computes, of a plan without stages.
    """

    plan: str
    has_feature: bool
    predicted_seconds: float
    predicted_bytes: int
    uncertainty: float
    bubble: float
    predicted_idle: float
    predicted_hidden: float | None
    fits: bool = True
    seconds: tuple[float, ...] = ()
    peak_bytes: int = 0
    idle: float | None = None
    hidden: float | None = None

    @property
    def step_seconds(self) -> float:
        return median(self.seconds)


Pair = tuple[Contestant | None, Contestant | None]
"""The best plan with the feature and the best without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A case at one scale. A ratio is that of the best plan without the feature over the best with it.

    Infinite where no plan without it fits, zero where none with it does.
    """

    contestants: tuple[Contestant, ...]

    @property
    def predicted_pair(self) -> Pair:
        return self._pair([c for c in self.contestants if c.fits], lambda c: c.predicted_seconds)

    @property
    def pair(self) -> Pair:
        """The fastest as measured."""
        return self._pair([c for c in self.contestants if c.seconds], lambda c: c.step_seconds)

    @staticmethod
    def _pair(those: Sequence[Contestant], seconds: Callable[[Contestant], float]) -> Pair:
        own, rivals = ([c for c in those if c.has_feature == has] for has in (True, False))
        return min(own, key=seconds, default=None), min(rivals, key=seconds, default=None)

    @property
    def predicted_ratio(self) -> float:
        return _predicted(self.predicted_pair)

    @property
    def ratio(self) -> float:
        """As measured: the median over rounds."""
        own, rival = self.pair
        if own is None or rival is None:
            return _predicted(self.pair)
        return median(b / a for a, b in zip(own.seconds, rival.seconds, strict=False))

    @property
    def ratio_predicted(self) -> float:
        """What was predicted of the pair that is fastest as measured."""
        return _predicted(self.pair)

    @property
    def excess(self) -> float:
        """What the feature is predicted to gain, less one standard deviation of the prediction."""
        return self.predicted_ratio - 1 - max(c.uncertainty for c in self.predicted_pair if c is not None)


def _predicted(pair: Pair) -> float:
    own, rival = pair
    if own is None:
        return 0.0
    return float("inf") if rival is None else rival.predicted_seconds / own.predicted_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A case at both scales."""

    case: Case
    small: Scale
    large: Scale | None

    @property
    def agrees(self) -> bool:
        measured, predicted = self.small.ratio, self.small.ratio_predicted
        return (measured > 1) == (predicted > 1) and abs(measured / predicted - 1) <= _AGREEMENT

    @property
    def best_ratio(self) -> float:
        """The largest that counts."""
        return max(self.small.ratio, self.large_ratio)

    @property
    def large_ratio(self) -> float:
        """At the paper's scale, if it counts; else zero."""
        return self.large.predicted_ratio if self.large is not None and self.agrees else 0.0


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
            with Ranks(devices, work / "requests", "benchmarks.space_time_rank") as ranks:
                small = OnTestbed(case.small, devices, ranks, work, say).run(2 if arguments.quick else _ROUNDS)
        say(f"measured {small.ratio:.2f}, simulated {small.ratio_predicted:.2f}")
        is_small = arguments.quick or arguments.small
        large = simulated(case.large, say) if case.large is not None and not is_small else None
        if large is not None:
            say(f"at the paper's scale {large.predicted_ratio:.2f}")
        results.append(Result(case=case, small=small, large=large))
    return report(results, kinds, is_whole=len(results) == len(CASES))


class OnTestbed:
    """A case on the testbed."""

    def __init__(self, case: Small, devices: OpenDevices, ranks: Ranks, work: Path, say: Callable[[str], None]) -> None:
        self.case, self.ranks, self.work, self.say = case, ranks, work, say
        cluster = devices.cluster
        self.cluster = replace(cluster, device=device_of_share(cluster.device, usable_share(cluster.num_devices)))
        self.captured = capture_model(case.source)
        self.limit = parse_bytes(case.limit, key="limit") if case.limit else None

    def run(self, num_rounds: int, *, far: float = _FAR) -> Scale:
        """Profile, predict, and only then measure. `far`: times the slower of the best pair, for what is measured."""
        named = [*((own, True) for own in self.case.plans), *((other, False) for other in self.case.others)]
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
        fitting = [c for c in found if c.fits]
        if not any(c.has_feature for c in fitting):
            needs = ", ".join(f"{c.plan} {format_bytes(c.predicted_bytes)}" for c in found if c.has_feature)
            raise SystemExit(f"no plan with the feature fits into {self.case.limit}: {needs}")
        most = far * max(c.predicted_seconds for c in Scale(contestants=tuple(fitting)).predicted_pair if c is not None)
        entered = [i for i, c in enumerate(found) if c.predicted_seconds <= most]
        self.say(f"profiled; {len(entered)} of {len(found)} plans in turns, or beyond the limit")
        answer: dict[str, dict[str, Any]] = self.ranks.ask(
            "compete",
            plans=str(self._save([plans[i] for i in entered], "plans")),
            fitting=[f"{place:03}" for place, i in enumerate(entered) if found[i].fits],
            own=[f"{place:03}" for place, i in enumerate(entered) if found[i].has_feature],
            rounds=num_rounds,
            limit_bytes=None if self.limit is None else int(_SLACK * self.limit),
        )
        for place, i in enumerate(entered):
            figures = answer[f"{place:03}"]
            found[i] = replace(
                found[i],
                peak_bytes=figures["peak_bytes"],
                seconds=tuple(figures.get("seconds", ())),
                idle=figures.get("idle"),
                hidden=figures.get("hidden"),
            )
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


def simulated(case: Large, say: Callable[[str], None] = lambda text: None) -> Scale:
    """A pair at the paper's scale; plans that cannot be built for the model do not compete."""
    captured, cluster = capture_model(case.source), load_cluster(case.cluster, num_outer=case.nodes)
    say(f"captured {len(captured.blocks.blocks)} blocks")
    prices = Prices(blocks=captured.blocks, cluster=cluster)
    found = []
    for name, has_feature in [(n, True) for n in case.plans] + [(n, False) for n in case.others]:
        try:
            program: Program = build_program(captured.blocks, _plan(captured, name, cluster))
        except PlanError as error:
            say(f"{name} cannot be built: {error}")
            continue
        timeline = simulate(program, prices)
        found.append(_contestant(name, timeline, has_feature=has_feature, limit=cluster.device.memory_bytes))
        say(f"{name}: {format_seconds(timeline.step_seconds)}, {format_bytes(found[-1].predicted_bytes)}")
    return Scale(contestants=tuple(found))


def _plan(captured: CapturedModel, name: str, cluster: Cluster) -> Plan:
    plan = named_plan(captured.blocks, find_named(name), batch=captured.spec)
    return replace(plan, cluster=cluster_to_yaml(cluster))


def _contestant(name: str, timeline: Timeline, *, has_feature: bool, limit: int | None) -> Contestant:
    summary = timeline.summary
    assert summary is not None
    spans = [
        (e.start_seconds, e.stop_seconds)
        for e in timeline.events
        if e.device == timeline.devices[0] and e.stream == "communication"
    ]
    communication, exposed = union_seconds(spans), sum(summary.exposed_communication.values())
    is_alone = len(timeline.devices) == 1 and communication > 0
    return Contestant(
        plan=name,
        has_feature=has_feature,
        predicted_seconds=timeline.step_seconds,
        predicted_bytes=summary.peak_memory_bytes,
        uncertainty=summary.uncertainty,
        bubble=summary.bubble,
        predicted_idle=summary.bubble + exposed / timeline.step_seconds,
        predicted_hidden=max(0.0, 1 - exposed / communication) if is_alone else None,
        fits=limit is None or summary.peak_memory_bytes <= limit,
    )


def report(results: Sequence[Result], kinds: set[str], *, is_whole: bool) -> Outcome:
    bars = [
        Bar(name=f"{r.case.feature}, measured, over the best without it", figure=r.small.ratio, floor=1.0)
        if r.case.wins
        else Bar(name=f"{r.case.feature}: gain predicted, less its deviation", figure=r.small.excess, ceiling=0.0)
        for r in results
    ]
    bars += [
        Bar(name=f"{r.case.feature}, simulated at the paper's scale, if it counts", figure=r.large_ratio, floor=1.0)
        for r in results
        if r.large is not None
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
                "ratio_predicted": _or_none(r.small.ratio_predicted),
                "agrees": r.agrees,
                "large_ratio": _or_none(r.large.predicted_ratio) if r.large is not None else None,
            }
            for r in results
        ],
    }
    larges = [scale_table(r.case.feature, r.large, "at the paper's scale") for r in results if r.large is not None]
    smalls = [scale_table(r.case.feature, r.small, f"{r.case.small.topology}, {r.case.small.source}") for r in results]
    return Outcome(tables=[*smalls, *larges, _ratios_table(results)], document=document, bars=bars)


def scale_table(feature: str, scale: Scale, title: str) -> Table:
    """Predicted, and where it was measured, that beside it."""
    table = Table("", "plan", "predicted", "step", "off", "memory", "measured", "bubble", "idle", "", "hidden", "")
    table.title = f"{feature}: {title}"
    for c in sorted(scale.contestants, key=lambda c: (not c.has_feature, c.predicted_seconds)):
        step = c.step_seconds if c.seconds else None
        table.add_row(
            feature if c.has_feature else "",
            c.plan,
            format_seconds(c.predicted_seconds),
            format_seconds(step) if step else "does not fit" if not c.fits else "",
            f"{c.predicted_seconds / step - 1:+.1%}" if step else "",
            format_bytes(c.predicted_bytes),
            format_bytes(c.peak_bytes) if c.peak_bytes else "",
            f"{c.bubble:.0%}",
            *(f"{share:.0%}" if share is not None else "" for share in (c.predicted_idle, c.idle)),
            *(f"{share:.0%}" if share is not None else "" for share in (c.predicted_hidden, c.hidden)),
        )
    return table


def _ratios_table(results: Sequence[Result]) -> Table:
    table = Table("feature", "measured", "simulated", "agree", "over", "at the paper's scale", "over")
    for r in results:
        rival, best = r.small.pair[1], r.large.predicted_pair[1] if r.large is not None else None
        table.add_row(
            r.case.feature,
            f"{r.small.ratio:.2f}",
            f"{r.small.ratio_predicted:.2f}",
            "yes" if r.agrees else "no",
            rival.plan if rival is not None else "none fits",
            f"{r.large.predicted_ratio:.2f}" if r.large is not None else "",
            best.plan if best is not None else "none fits" if r.large is not None else "",
        )
    return table


def _or_none(ratio: float) -> float | None:
    """None: nothing else fits."""
    return ratio if ratio < float("inf") else None


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="features whose name contains this")
    parser.add_argument("--small", action="store_true", help="not the papers' scales, which take minutes to capture")
    parser.add_argument("--work", default=str(DEFAULT_WORK), help="where files are kept")


if __name__ == "__main__":
    run_benchmark("space_time", measure, description=__doc__ or "", options=_options)
