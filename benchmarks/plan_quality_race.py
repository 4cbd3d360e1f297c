"""One case of `plan_quality_testbed`: search, profile, choose, and compete on the ranks."""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.plan_quality_cases import Case
from planloom.cli.models import CapturedModel, capture_model
from planloom.cli.pricing import Lab, with_figures
from planloom.cluster import Device, load_cluster
from planloom.cost import Prices
from planloom.plan import named_plan, parse_named, save_plan
from planloom.program import Program, verify_program
from planloom.search import Best, Candidate, Planner, candidate_plans, find_best, plan_lazily
from testbed import DeviceLimits, OpenDevices
from testbed.devices import plan_devices
from testbed.workers import launcher

CHOSEN = "chosen"
TORCH = ("DDP", "FSDP2", "DTensor TP")
FLAT, OURS, VOLUME = "TP flat", "TP ours", "volume"
_BUDGET_SECONDS = 0.15
_LIMIT_SECONDS = 3000
_NUM_MEASURED = 4
_SCREEN_STEPS = 2
_NEAR = 1.15
"""Plans that took so many times the fastest step when all were measured once compete in turns, too."""

_CORE_FLOPS = {"float32": 112e9, "float64": 56e9}
_CORE_BYTES_PER_SECOND, _CORE_LAUNCH_SECONDS = 22e9, 4e-6
"""What a whole core does in a step. [Empirical] AMD EPYC, 2 cores, 2026-11-18: with these the modelled computation of
pp=2,tp=2,micro=8 of the GPT on flat-of-4 is the measured one; its matrix products alone run at 136 GFLOP/s."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How many plans the search may propose, and how many steps each contestant takes in turns with the others."""

    num_finalists: int = 8
    num_rounds: int = 7
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
    """A model on a topology's devices."""

    def __init__(self, case: Case, devices: OpenDevices, say: Say, work: Path, effort: Effort) -> None:
        self.case, self.devices, self.say, self.effort = case, devices, say, effort
        cluster = load_cluster(case.cluster)
        self.cluster = replace(cluster, device=device_of_share(cluster.device, usable_share(cluster.num_devices)))
        self.captured: CapturedModel = capture_model(case.source)
        self.folder = work / case.name.replace("/", "-")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lab = Lab(
            store=work / f"{case.topology}.sqlite",
            num_processes=self.cluster.num_devices,
            label=case.topology,
            launch=launcher(devices, timeout_seconds=_LIMIT_SECONDS),
            budget_seconds=_BUDGET_SECONDS,
        )

    def run(self) -> Result:
        """Choose, and only then measure."""
        blocks, spec = self.captured.blocks, self.captured.spec
        self.say("search")
        started = time.monotonic()
        planner = Planner(blocks, self.cluster, fused=False)
        best = find_best(planner, self._prices(), spec, num_finalists=self.effort.num_finalists)
        search_seconds = time.monotonic() - started
        ranked = self._ranked(best)
        profile_seconds = time.monotonic() - started - search_seconds
        chosen = ranked[0]
        assert chosen.program is not None
        verify_program(blocks, chosen.program)
        named = candidate_plans(blocks, self.cluster, spec)
        entered = {CHOSEN: chosen, **self._own_rivals(planner, named)}
        screened = self._screen([*ranked, *named]) if self.case.exhaustive and self.effort.exhaustive else {}
        fastest = min((seconds for _, seconds in screened.values()), default=0.0)
        for label, (candidate, seconds) in screened.items():
            if seconds <= _NEAR * fastest and candidate is not chosen:
                entered[label] = candidate
        return Result(
            case=self.case,
            devices=self.devices.kind,
            contestants=self._compete(entered),
            all_plans={label: seconds for label, (_, seconds) in screened.items()},
            finalists={candidate.label: candidate.step_seconds for candidate in ranked},
            gap=best.certificate.gap,
            search_seconds=search_seconds,
            profile_seconds=profile_seconds,
        )

    def _prices(self) -> Prices:
        """All that is known: the cluster's figures, and what was measured on its ranks."""
        prices = Prices(blocks=self.captured.blocks, cluster=self.cluster, measured_links=True)
        return with_figures(prices, self.lab.figures())

    def _ranked(self, best: Best) -> tuple[Candidate, ...]:
        """The finalists by simulated step; all that the fastest use is measured."""
        finalists = [
            Candidate(name=f.plan.name, placement=f.placement, plan=f.plan, program=f.program) for f in best.finalists
        ]
        plans = {id(candidate.program): candidate.plan for candidate in finalists}

        def measure(programs: Sequence[Program]) -> int:
            self.say(f"profile of {len(programs)} plans")
            before = len(self.lab.figures())
            self.lab.measure(self.case.source, [plan for p in programs if (plan := plans[id(p)]) is not None])
            return len(self.lab.figures()) - before

        return plan_lazily(finalists, self._prices, measure, num_best=_NUM_MEASURED).ranked

    def _own_rivals(self, planner: Planner, named: Sequence[Candidate]) -> dict[str, Candidate]:
        """Tensor parallel with either kind of reductions, and what the search chooses by volume."""
        tensor = f"tp={self.cluster.num_devices},vocab"
        plan = named_plan(self.captured.blocks, parse_named(tensor), batch=self.captured.spec)
        found = {FLAT: Candidate(name=tensor, placement="devices in order, flat", plan=plan)}
        found[OURS] = next(candidate for candidate in named if candidate.name == tensor)
        return {**found, VOLUME: volume_plan(planner, self.captured)}

    def _screen(self, candidates: Sequence[Candidate]) -> dict[str, tuple[Candidate, float]]:
        """Every plan that there is, one after another, a few steps each."""
        possible = [candidate for candidate in candidates if candidate.plan is not None]
        self.say(f"all {len(possible)} plans")
        folder, out = self.folder / "all", self.folder / "all.json"
        self._save({f"{i:03}": candidate for i, candidate in enumerate(possible)}, folder)
        command = [sys.executable, "-m", "benchmarks.prediction_rank", self.case.source, str(folder), str(out)]
        self._start([*command, "--steps", str(_SCREEN_STEPS)])
        found: list[dict[str, Any]] = json.loads(out.read_text())
        return {c.label: (c, min(measured["seconds"])) for c, measured in zip(possible, found, strict=True)}

    def _compete(self, entered: Mapping[str, Candidate]) -> dict[str, Contestant]:
        self.say(f"{len(entered)} plans and {len(TORCH)} of torch's in turns")
        folder, out = self.folder / "plans", self.folder / "race.json"
        files = {f"{i:03}": name for i, name in enumerate(entered)}
        self._save({file: entered[name] for file, name in files.items()}, folder)
        command = [sys.executable, "-m", "benchmarks.plan_quality_rank", self.case.source, str(folder), str(out)]
        command += ["--rivals", *TORCH, "--rounds", str(self.effort.num_rounds)]
        self._start([*command, "--limit", str(self.cluster.device.memory_bytes)])
        found = {files.get(key, key): figures for key, figures in json.loads(out.read_text()).items()}
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

    def _save(self, candidates: Mapping[str, Candidate], folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        for path in folder.glob("*.json"):
            path.unlink()
        for file, candidate in candidates.items():
            assert candidate.plan is not None
            save_plan(candidate.plan, folder / f"{file}.json")

    def _start(self, command: list[str]) -> None:
        result = self.devices.run(command, timeout_seconds=_LIMIT_SECONDS)
        if result.exit_code:
            texts = [f"rank {rank.rank}: {rank.stderr[-3000:]}" for rank in result.ranks if rank.exit_code]
            raise SystemExit("\n".join(texts) or f"the ranks ended with {result.exit_code}")


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
    best = find_best(blind, prices, captured.spec, num_finalists=1).winner
    return Candidate(name=best.plan.name, placement=best.placement, plan=best.plan, program=best.program)
