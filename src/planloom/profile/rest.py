"""What a device that has waited makes good: the credit of a rank under a CPU quota.

A quota gives a rank a share q of every period P. A rank that computes without a pause runs for q P and is then held
back: d seconds of work take d, as measured in a row. One that has waited finds its quota unused and computes at full
speed, 1 / q times as fast, until it is spent: work is over up to (1 - q) P seconds earlier, on average over where in a
period it begins. Stages of a pipeline wait before almost every call, so short calls take much less than in a row.

    share     q: CPU seconds over seconds, in a row
    seconds   how much earlier work is over after a pause: the same work in a row and after pauses, in turns

[Empirical] Four ranks of 0.4 with P = 5 ms, forwards and backwards of 8 runs of a mixture of experts, 5 to 70 ms each,
2 vCPU AMD EPYC that had other work, 2026-11-18: after pauses of 11 ms each took 0 to 8 ms less than in a row, in the
median 2.95; (1 - q) P is 3.
"""

import statistics
import time

import torch

from planloom.cost.keys import REST_SECONDS_KEY, REST_SHARE_KEY
from planloom.profile.runs import Measured
from planloom.profile.timing import deviation, slowest, start_together

_ROUNDS = 7
_REPETITIONS = 6
_PAUSES_SECONDS = tuple(0.015 + 0.01 * i / _REPETITIONS for i in range(_REPETITIONS))
"""Of different lengths, so that work begins anywhere in a period, and longer than the testbed's periods of 5 ms.
Of a longer period, as of Kubernetes' 100 ms, no more than the shortest pause is found."""
_WORK_CPU_SECONDS = 0.008
"""Of one repetition: four times what a share of 0.4 may use in one of the testbed's periods."""
_NO_QUOTA_SHARE = 0.97
"""Above, nobody holds the rank back: what is missing is the system's. [Assumed]"""
_ELEMENTS = 1 << 12  # 16 KiB: in the fastest cache, whoever else computes


def measure_rest(device: torch.device) -> Measured:
    """The credit of this device; a GPU has none. Of several ranks, all measure at once, and the least credit counts."""
    nothing: Measured = {REST_SECONDS_KEY: (0.0, 0.0), REST_SHARE_KEY: (1.0, 0.0)}
    if device.type != "cpu":
        return nothing
    array = torch.randn(_ELEMENTS)
    count = _calibrated(array)
    saved, shares = [], []
    for _ in range(_ROUNDS):
        start_together(device)
        cpu = time.process_time()
        in_a_row = [_work(array, count) for _ in range(_REPETITIONS)]
        shares.append((time.process_time() - cpu) / sum(in_a_row))
        rested = []
        for pause_seconds in _PAUSES_SECONDS:
            time.sleep(pause_seconds)
            rested.append(_work(array, count))
        saved.append(statistics.fmean(in_a_row[1:]) - statistics.fmean(rested))  # the first was rested, too
    share = slowest([statistics.median(shares)])[0]
    least = -slowest([-statistics.median(saved)])[0]
    if share > _NO_QUOTA_SHARE:
        return nothing
    return {
        REST_SECONDS_KEY: (min(max(0.0, least), _PAUSES_SECONDS[0]), deviation(saved)),
        REST_SHARE_KEY: (share, deviation(shares)),
    }


def _work(array: torch.Tensor, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        torch.add(array, array)
    return time.perf_counter() - start


def _calibrated(array: torch.Tensor) -> int:
    """How many sums take the CPU time of a repetition."""
    num_tried = 2000
    cpu = time.process_time()
    _work(array, num_tried)
    each = (time.process_time() - cpu) / num_tried
    return max(1, round(_WORK_CPU_SECONDS / max(each, 1e-8)))
