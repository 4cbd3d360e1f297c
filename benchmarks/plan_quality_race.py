"""One case of `plan_quality_testbed`: search, profile, choose, and compete on the ranks."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.plan_quality_cases import Case, all_plans
from benchmarks.plan_quality_ranks import Ranks
from planloom.cli.models import CapturedModel, capture_model
from planloom.cli.pricing import with_figures
from planloom.cluster import Cluster, Device
from planloom.cost import Prices
from planloom.plan import named_plan, parse_named, save_plan
from planloom.profile import local_store
from planloom.program import Program, verify_program
from planloom.search import Best, Candidate, Planner, candidate_plans, find_best, plan_lazily
from testbed import DeviceLimits
from testbed.devices import plan_devices

CHOSEN = "chosen"
TORCH = ("DDP", "FSDP2", "DTensor TP")
FLAT, OURS, VOLUME = "TP flat", "TP ours", "volume"
_BUDGET_SECONDS = 0.1
_NUM_MEASURED = 8
_NUM_BY_VOLUME = 8
"""Of the plans with the least volume some cannot be built (rows of experts that would move in two steps)."""
_MANY_RANKS = 8
"""From here on a profile takes minutes, and fewer finalists are profiled."""
_SCREEN_STEPS = 2
_FAR = 2.0
"""Plans whose first step takes so many times the fastest so far are measured no further."""
_NEAR, _MOST_NEAR = 1.15, 5
"""Plans that took so many times the fastest step when all were measured once compete in turns, too, but so many."""

_CORE_FLOPS = {"float32": 112e9, "float64": 56e9}
_CORE_BYTES_PER_SECOND, _CORE_LAUNCH_SECONDS = 22e9, 4e-6
"""What a whole core does in a step. [Empirical] AMD EPYC, 2 cores, 2026-11-18: with these the modelled computation of
pp=2,tp=2,micro=8 of the GPT on flat-of-4 is the measured one; its matrix products alone run at 136 GFLOP/s."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How many plans the search may propose, and how many steps each contestant takes in turns with the others."""

    num_finalists: int = 8
    num_rounds: int = 5
    exhaustive: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """Who it is, and its steps in turns with the others, the first of them with all."""

    plan: str
    seconds: tuple[float, ...]
    peak_bytes: int
    losses: tuple[float, ...]
    predicted_seconds: float | None = None

    @property
    def step_seconds(self) -> float:
        return median(self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One case: the contestants; if all plans were measured, the seconds of each; how the chosen one was found."""

    case: Case
    devices: str
    contestants: dict[str, Contestant]
    all_plans: dict[str, float] = field(default_factory=dict)
    finalists: dict[str, float] = field(default_factory=dict)
    """By what the simulator says with measured prices, in its order."""
    gap: float = 0.0
    search_seconds: float = 0.0
    profile_seconds: float = 0.0
    seconds: float = 0.0
    """Of all of it."""

    def ratio(self, name: str) -> float:
        """The chosen plan's step over another's: the median of the rounds that both took part in."""
        pairs = zip(self.contestants[CHOSEN].seconds, self.contestants[name].seconds, strict=False)
        return median(own / other for own, other in pairs)

    @property
    def rivals(self) -> list[str]:
        return [name for name in self.contestants if name in (*TORCH, FLAT, OURS, VOLUME)]

    @property
    def others(self) -> list[str]:
        return [name for name in self.contestants if name != CHOSEN]

    @property
    def loss_difference(self) -> float:
        """The largest relative one between two contestants, before and after an update."""
        first = [contestant.losses[0] for contestant in self.contestants.values()]
        later = [contestant.losses[-1] for contestant in self.contestants.values()]
        return max(max(losses) / min(losses) - 1 for losses in (first, later))


class Race:
    """A model on the ranks of a topology."""

    def __init__(self, case: Case, cluster: Cluster, ranks: Ranks, say: Say, work: Path, effort: Effort) -> None:
        self.case, self.ranks, self.say, self.effort = case, ranks, say, effort
        self.cluster = replace(cluster, device=device_of_share(cluster.device, usable_share(cluster.num_devices)))
        self.captured: CapturedModel = capture_model(case.source)
        self.folder = work / case.name.replace("/", "-")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.store = work / f"{case.topology}.sqlite"

    def run(self, devices: str) -> Result:
        """Choose, and only then measure."""
        blocks, spec = self.captured.blocks, self.captured.spec
        self.say("search")
        started = time.monotonic()
        planner = Planner(blocks, self.cluster, fused=False)
        most = self.effort.num_finalists
        num_finalists = most if self.cluster.num_devices < _MANY_RANKS else most * 5 // 8
        best = find_best(planner, self._prices(), spec, num_finalists=num_finalists)
        search_seconds = time.monotonic() - started
        self.ranks.ask("load", model=self.case.source)
        ranked = self._ranked(best)
        profile_seconds = time.monotonic() - started - search_seconds
        chosen = ranked[0]
        assert chosen.program is not None
        verify_program(blocks, chosen.program)
        entered = {CHOSEN: chosen, **self._own_rivals(planner)}
        screened = self._screen(ranked) if self.case.exhaustive and self.effort.exhaustive else {}
        fastest = min((seconds for _, seconds in screened.values()), default=0.0)
        near = sorted((each for each in screened.items() if each[1][1] <= _NEAR * fastest), key=lambda each: each[1][1])
        for label, (candidate, _) in near[:_MOST_NEAR]:
            if candidate is not chosen:
                entered[label] = candidate
        return Result(
            case=self.case,
            devices=devices,
            contestants=self._compete(entered),
            all_plans={label: seconds for label, (_, seconds) in screened.items()},
            finalists={candidate.label: candidate.step_seconds for candidate in ranked},
            gap=best.certificate.gap,
            search_seconds=search_seconds,
            profile_seconds=profile_seconds,
            seconds=time.monotonic() - started,
        )

    def _prices(self) -> Prices:
        """All that is known: the cluster's figures, and what was measured on its ranks."""
        prices = Prices(blocks=self.captured.blocks, cluster=self.cluster, measured_links=True)
        store = local_store(self.store, self.cluster.num_devices, label=self.case.topology)
        return with_figures(prices, store.load_with_spread())

    def _ranked(self, best: Best) -> tuple[Candidate, ...]:
        """The finalists by simulated step; all that the fastest use is measured."""
        finalists = [
            Candidate(name=f.plan.name, placement=f.placement, plan=f.plan, program=f.program) for f in best.finalists
        ]
        of_program = {id(candidate.program): candidate for candidate in finalists}

        def measure(programs: Sequence[Program]) -> int:
            self.say(f"profile of {len(programs)} plans")
            folder = self._save({f"{i:03}": of_program[id(p)] for i, p in enumerate(programs)}, "profiled")
            self.ranks.ask(
                "profile",
                plans=str(folder),
                store=str(self.store),
                label=self.case.topology,
                budget_seconds=_BUDGET_SECONDS,
            )
            return len(programs)

        return plan_lazily(finalists, self._prices, measure, num_best=_NUM_MEASURED).ranked

    def _own_rivals(self, planner: Planner) -> dict[str, Candidate]:
        """Tensor parallel with either kind of reductions, and what the search chooses by volume."""
        named = parse_named(f"tp={self.cluster.num_devices},vocab")
        blocks, spec = self.captured.blocks, self.captured.spec
        plan = named_plan(blocks, named, batch=spec)
        flat = Candidate(name=str(named), placement="devices in order, flat", plan=plan)
        ours = candidate_plans(blocks, self.cluster, spec, names=[named])[0]
        return {FLAT: flat, OURS: ours, VOLUME: volume_plan(planner, self.captured)}

    def _screen(self, ranked: Sequence[Candidate]) -> dict[str, tuple[Candidate, float]]:
        """Every plan that there is, one after another, a few steps each; the finalists first."""
        blocks, spec = self.captured.blocks, self.captured.spec
        named = all_plans(self.cluster.num_devices, experts=any(t.rows for t in blocks.graph.tensors.values()))
        listed = candidate_plans(blocks, self.cluster, spec, names=named)
        possible = [candidate for candidate in (*ranked, *listed) if candidate.plan is not None]
        self.say(f"all {len(possible)} plans")
        files = {f"{i:03}": candidate for i, candidate in enumerate(possible)}
        found = self.ranks.ask("screen", plans=str(self._save(files, "all")), steps=_SCREEN_STEPS, near=_FAR)
        return {candidate.label: (candidate, min(found[file])) for file, candidate in files.items()}

    def _compete(self, entered: Mapping[str, Candidate]) -> dict[str, Contestant]:
        self.say(f"{len(entered)} plans and {len(TORCH)} of torch's in turns")
        files = {f"{i:03}": name for i, name in enumerate(entered)}
        folder = self._save({file: entered[name] for file, name in files.items()}, "plans")
        answer: dict[str, dict[str, Any]] = self.ranks.ask(
            "race",
            plans=str(folder),
            rivals=TORCH,
            rounds=self.effort.num_rounds,
            limit_bytes=self.cluster.device.memory_bytes,
        )
        found = {files.get(key, key): figures for key, figures in answer.items()}
        return {
            name: Contestant(
                plan=entered[name].label if name in entered else name,
                seconds=tuple(figures["seconds"]),
                peak_bytes=figures["peak_bytes"],
                losses=tuple(figures["losses"]),
                predicted_seconds=entered[name].step_seconds
                if name in entered and entered[name].timeline is not None
                else None,
            )
            for name, figures in found.items()
        }

    def _save(self, candidates: Mapping[str, Candidate], name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        for path in folder.glob("*.json"):
            path.unlink()
        for file, candidate in candidates.items():
            assert candidate.plan is not None
            save_plan(candidate.plan, folder / f"{file}.json")
        return folder


def device_of_share(device: Device, share: float) -> Device:
    """A share of one core of this machine."""
    return replace(
        device,
        flops_per_second={dtype: share * rate for dtype, rate in _CORE_FLOPS.items()},
        memory_bytes_per_second=share * _CORE_BYTES_PER_SECOND,
        launch_seconds=_CORE_LAUNCH_SECONDS / share,
    )


def usable_share(num_ranks: int) -> float:
    """What `DeviceLimits()` gives each of so many ranks."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    return plan_devices(num_ranks, DeviceLimits(), cores, float(len(cores))).share


def volume_plan(planner: Planner, captured: CapturedModel) -> Candidate:
    """What the search chooses in the same space if it prices as Alpa does: the least volume, whatever computes."""
    blind = Planner(captured.blocks, planner.cluster, fused=False, by_volume=True)
    prices = Prices(blocks=captured.blocks, cluster=planner.cluster)
    found = find_best(blind, prices, captured.spec, num_finalists=_NUM_BY_VOLUME).finalists
    best = min(found, key=lambda own: own.estimate.step_seconds if own.estimate is not None else float("inf"))
    return Candidate(name=best.plan.name, placement=best.placement, plan=best.plan, program=best.program)
