"""Whether a rank is as fast as its share of a core says, and always: measured while the others idle, compute and send.

One rank on each core times a fixed loop again and again; what the others do changes from loop to loop, so that a
machine that becomes slower by itself does so for all. For each rank, with medians over the rounds,

    share       CPU time / time, against the share that the rank should get
    off         time / time while the others idle - 1

and each may be off by `SPEED_TOLERANCE`.
"""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed import loops
from testbed.errors import TestbedError
from testbed.session import Testbed
from testbed.wiring import device_address

SPEED_TOLERANCE = 0.05
NUM_ROUNDS = 7
CPU_SECONDS = 0.15  # of one loop: at 0.2 of a core about 150 periods of 5 ms
_START_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedResult:
    """A rank's loop while the others do one thing: medians, and how far they are off, as shares."""

    rank: int
    others: str  # idle, compute, send
    seconds: float
    cpu_seconds: float
    share: float
    share_deviation: float
    speed_deviation: float  # of the time that the loop takes
    ok: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedCheck:
    """All of them, for ranks of one share."""

    num_ranks: int
    cpu_share: float
    results: tuple[SpeedResult, ...]

    @property
    def ok(self) -> bool:
        return all(result.ok for result in self.results)


def check_speed(testbed: Testbed, *, rounds: int = NUM_ROUNDS, cpu_seconds: float = CPU_SECONDS) -> SpeedCheck:
    """Measure the speed of a rank of a testbed whose devices have limits."""
    plan = testbed.device_plan
    if plan is None:
        raise TestbedError(
            "the ranks of this testbed have no speed of their own",
            given="a testbed without limits for devices",
            required="one between `with`, made with `devices=DeviceLimits(...)`",
        )
    num_ranks = testbed.cluster.num_devices
    measured = measured_ranks(plan.core_of_rank)
    num_others = num_ranks - len(measured)
    modes = ["idle", "compute", "send"][: min(num_others, 2) + 1]  # sending takes two others
    expected_seconds = rounds * len(modes) * (1 + cpu_seconds / plan.share)
    handle, name = tempfile.mkstemp(prefix="planloom-testbed-loops-")
    try:
        os.write(handle, bytes(2 + num_ranks))
        request = {
            "file": name,
            "addresses": [device_address(device) for device in range(num_ranks)],
            "modes": modes,
            "measured": measured,
            "rounds": rounds,
            "cpu_seconds": cpu_seconds,
        }
        limit = _START_SECONDS + 4 * expected_seconds
        ended = testbed.run(
            [sys.executable, "-S", "-E", str(Path(loops.__file__).resolve())],
            timeout_seconds=limit,
            env={"TESTBED_LOOPS": json.dumps(request), "TESTBED_LOOPS_SECONDS": f"{limit:g}"},
            grace_seconds=1.0,
        )
    finally:
        os.close(handle)
        os.unlink(name)
    if ended.exit_code != 0:
        raise TestbedError(
            "the speed of ranks could not be measured",
            given="".join(rank.stderr for rank in ended.ranks).strip() or f"exit code {ended.exit_code}",
            required="every device reaches every other one",
        )
    results = []
    for rank in measured:
        loop_times: dict[str, list[tuple[float, float]]] = {mode: [] for mode in modes}
        for line in ended.ranks[rank].stdout.splitlines():
            loop = json.loads(line)
            loop_times[loop["mode"]].append((float(loop["seconds"]), float(loop["cpu_seconds"])))
        results += judge_speed(rank, loop_times, plan.share)
    return SpeedCheck(num_ranks=num_ranks, cpu_share=plan.share, results=tuple(results))


def measured_ranks(core_of_rank: Sequence[int | None]) -> list[int]:
    """The first rank on each core, if two others are left to send; else rank 0."""
    firsts = sorted({core: rank for rank, core in reversed(list(enumerate(core_of_rank)))}.values())
    return firsts if len(core_of_rank) - len(firsts) >= 2 else [0]


def judge_speed(rank: int, times: dict[str, list[tuple[float, float]]], cpu_share: float) -> list[SpeedResult]:
    """Compare loops, given as time and CPU time by what the others did, with the share and with idle others."""
    idle_seconds = statistics.median(seconds for seconds, _ in times["idle"])
    results = []
    for others, pairs in times.items():
        seconds = statistics.median(seconds for seconds, _ in pairs)
        share = statistics.median(used / seconds for seconds, used in pairs)
        off = share / cpu_share - 1, seconds / idle_seconds - 1
        results.append(
            SpeedResult(
                rank=rank,
                others=others,
                seconds=seconds,
                cpu_seconds=statistics.median(used for _, used in pairs),
                share=share,
                share_deviation=off[0],
                speed_deviation=off[1],
                ok=max(map(abs, off)) <= SPEED_TOLERANCE,
            )
        )
    return results
