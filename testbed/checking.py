"""Whether the links carry what the cluster file says, by measurement: trials, run on the testbed, against figures."""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from testbed import flows
from testbed.errors import TestbedError
from testbed.session import Testbed
from testbed.trials import Trial, trials_of
from testbed.wiring import device_address

TOLERANCE = 0.10
_SETTLE_SECONDS = 0.25
_MEASURE_SECONDS = 0.5
_MEASURE_BYTES = 2_500_000  # slow links are watched longer: enough packets for a figure within a few per cent
_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """What the flows of a trial reached, and how far the worst of them (or their sum) is off, as a share."""

    trial: Trial
    bytes_per_second: tuple[float, ...]
    deviation: float
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """All trials of a testbed."""

    results: tuple[TrialResult, ...]

    @property
    def ok(self) -> bool:
        return all(result.ok for result in self.results)


def check_network(testbed: Testbed) -> CheckResult:
    """Measure every link of a testbed, alone and together with others."""
    trials = trials_of(testbed.cluster)
    measure_seconds = [max(_MEASURE_SECONDS, _MEASURE_BYTES / min(trial.bytes_per_second)) for trial in trials]
    plan = {
        "addresses": [device_address(device) for device in range(testbed.cluster.num_devices)],
        "settle_seconds": _SETTLE_SECONDS,
        "trials": [
            {"number": number, "flows": trial.flows, "measure_seconds": seconds}
            for number, (trial, seconds) in enumerate(zip(trials, measure_seconds, strict=True))
        ],
    }
    ended = testbed.run(
        [sys.executable, "-S", "-E", str(Path(flows.__file__).resolve())],
        timeout_seconds=_START_SECONDS + 4 * sum(measure_seconds) + len(trials),
        env={"TESTBED_TRIALS": json.dumps(plan)},
        grace_seconds=1.0,
        limited=False,  # the links are measured, not the ranks
    )
    if ended.exit_code != 0:
        raise TestbedError(
            "the links could not be measured",
            given="".join(rank.stderr for rank in ended.ranks).strip() or f"exit code {ended.exit_code}",
            required="every device reaches every other one",
        )
    measured = {}
    for rank in ended.ranks:
        for line in rank.stdout.splitlines():
            report = json.loads(line)
            measured[report["trial"], report["flow"]] = float(report["bytes_per_second"])
    return CheckResult(
        results=tuple(
            judge(trial, [measured[number, flow] for flow in range(len(trial.flows))])
            for number, trial in enumerate(trials)
        )
    )


def judge(trial: Trial, rates: Iterable[float]) -> TrialResult:
    """Compare what was measured with what must be reached."""
    rates = tuple(rates)
    if trial.judged == "together":
        deviations = [sum(rates) / trial.bytes_per_second[0] - 1]
    else:
        deviations = [rate / wanted - 1 for rate, wanted in zip(rates, trial.bytes_per_second, strict=True)]
    worst = max(deviations, key=abs)
    return TrialResult(trial=trial, bytes_per_second=rates, deviation=worst, ok=abs(worst) <= TOLERANCE)
