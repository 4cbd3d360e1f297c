"""Seconds of functions as training meets them: medians over samples, each a mean over repetitions in a row.

A repetition carries out *phases* one after the other (a forward, then its backward), each with its own seconds. A
sample is as many repetitions as fill a twentieth of a second: a rank with a CPU quota runs for a part of every period
and then waits, so one repetition says nothing about its speed and the mean over many periods does. On CUDA the
repetitions of a sample are enqueued while the device is kept busy with something else, so that the host is ahead as it
is in training; the seconds are the device's, by events, and those of the host are told apart. A GPU that has been idle
computes faster than one that has been at work for a second, and holds its power: it is warmed up for as long, or else
the sum over runs is a tenth less than a step (H200, 2026-11-16). A function whose host waits for the device (rows of
experts are counted there) cannot be enqueued ahead: it takes what it takes from one end to the other. Of several
ranks, all measure at the same time and the slowest counts, by its median: the slowest of every sample would be slower
than any rank is, the more so the more of them there are.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

import torch
import torch.distributed as dist

Function = Callable[[], object]

WARM_UP_REPETITIONS = 5  # until a CPU's allocator has the pages that it needs; see `runs`
BUDGET_SECONDS = 0.5  # of all samples of one measurement, unless five repetitions take longer
MIN_SAMPLES, MAX_SAMPLES = 5, 10
MIN_LONG_SAMPLES = 3  # of what takes longer than the budget in one repetition: over many periods of a quota
SAMPLE_SECONDS = {"cpu": 0.05, "cuda": 0.05}
MAX_REPETITIONS = {"cpu": 200, "cuda": 20}  # a CUDA stream takes about a thousand kernels before its host waits
_NORMAL_SHARE = 1.4826  # of a normal distribution, its standard deviation over the median distance from its median
_BUSY_SECONDS = 0.05  # several times what a host takes to start a run
SUSTAINED_SECONDS = {"cpu": 0.0, "cuda": 0.6}
_PLUG_ELEMENTS = 4096  # a product of square matrices of this size is 0.2 ms on an H200: a unit of keeping it busy


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Median seconds of a phase, one standard deviation of its samples, and seconds in which the host started it."""

    seconds: float
    spread: float
    host_seconds: float


def time_phases(
    phases: Mapping[str, Function],
    device: torch.device,
    *,
    before: Function | None = None,
    hide_launch: bool = True,
    budget_seconds: float = BUDGET_SECONDS,
    warm_up_repetitions: int = WARM_UP_REPETITIONS,
) -> dict[str, Timing]:
    """The phases of one repetition, timed; `before` is called before every repetition and is not counted."""
    repeat = _Repeated(phases, device, before, hide_launch=hide_launch)
    for _ in range(warm_up_repetitions - 1):
        repeat.sample(1)
    if repeat.host_waits():
        repeat = _Repeated(phases, device, before, hide_launch=False)
    once = slowest([sum(seconds for seconds, _ in repeat.sample(1))])[0]
    goal = min(SAMPLE_SECONDS[device.type], budget_seconds / MIN_SAMPLES)
    most = MAX_REPETITIONS[device.type]
    repetitions = max(1, min(most, ceil(goal / max(once, 1e-9))))
    for _ in range(ceil(SUSTAINED_SECONDS[device.type] / max(once * repetitions, 1e-9))):
        repeat.sample(repetitions)
    least = MIN_SAMPLES if once <= budget_seconds else MIN_LONG_SAMPLES
    num_samples = max(least, min(MAX_SAMPLES, round(budget_seconds / max(once * repetitions, 1e-9))))
    samples = [repeat.sample(repetitions) for _ in range(num_samples)]
    found = {}
    for i, name in enumerate(phases):
        own, host = ([sample[i][of] for sample in samples] for of in range(2))
        seconds, spread, host_seconds = slowest([statistics.median(own), deviation(own), statistics.median(host)])
        found[name] = Timing(seconds=seconds, spread=spread, host_seconds=host_seconds)
    return found


def deviation(samples: Sequence[float]) -> float:
    """One standard deviation of samples by their median distance from the median, to which outliers do not matter."""
    middle = statistics.median(samples)
    return _NORMAL_SHARE * statistics.median(abs(sample - middle) for sample in samples)


def slowest(numbers: Sequence[float]) -> list[float]:
    """The largest of every number over all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(numbers)
    tensor = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [float(number) for number in tensor]


def start_together(device: torch.device) -> None:
    """Wait until this device is idle and all ranks are here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


class _Repeated:
    def __init__(
        self, phases: Mapping[str, Function], device: torch.device, before: Function | None, *, hide_launch: bool
    ) -> None:
        self._phases, self._device, self._before = list(phases.values()), device, before
        self._host_seconds = 1e-3  # of one repetition; learned
        self._plug = _Plug(device) if device.type == "cuda" and hide_launch else None

    def host_waits(self) -> bool:
        """Does the host wait for the device: does it take as long as whatever keeps the device busy?"""
        if self._plug is None:
            return False
        torch.cuda.synchronize(self._device)
        self._plug.keep_busy(_BUSY_SECONDS)
        start = time.perf_counter()
        if self._before is not None:
            self._before()
        for phase in self._phases:
            phase()
        seconds = time.perf_counter() - start
        torch.cuda.synchronize(self._device)
        return slowest([seconds])[0] > _BUSY_SECONDS / 2

    def sample(self, repetitions: int) -> list[tuple[float, float]]:
        """Mean (seconds, host seconds) of every phase."""
        start_together(self._device)
        if self._device.type == "cuda":
            return self._on_cuda(repetitions)
        totals = [0.0] * len(self._phases)
        for _ in range(repetitions):
            if self._before is not None:
                self._before()
            for i, phase in enumerate(self._phases):
                start = time.perf_counter()
                phase()
                totals[i] += time.perf_counter() - start
        return [(total / repetitions, total / repetitions) for total in totals]

    def _on_cuda(self, repetitions: int) -> list[tuple[float, float]]:
        count = len(self._phases)
        events = [
            [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)] for _ in range(repetitions)
        ]  # made before the device is kept busy
        host = [0.0] * count
        if self._plug is not None:
            self._plug.keep_busy(1.5 * repetitions * self._host_seconds)
        for marks in events:
            if self._before is not None:
                self._before()
            marks[0].record()
            for i, phase in enumerate(self._phases):
                start = time.perf_counter()
                phase()
                host[i] += (time.perf_counter() - start) / repetitions
                marks[i + 1].record()
        torch.cuda.synchronize(self._device)
        self._host_seconds = sum(host)
        means = [statistics.fmean(marks[i].elapsed_time(marks[i + 1]) / 1e3 for marks in events) for i in range(count)]
        return list(zip(means, host, strict=True))


class _Plug:
    """Work that keeps a CUDA device busy for about as long as asked, so that the host gets ahead."""

    def __init__(self, device: torch.device) -> None:
        size = (_PLUG_ELEMENTS, _PLUG_ELEMENTS)
        self._matrix = torch.randn(size, device=device).to(torch.bfloat16)  # zeros take less power
        self._result = torch.empty_like(self._matrix)
        self._unit()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._unit()
        stop.record()
        torch.cuda.synchronize(device)
        self._unit_seconds = start.elapsed_time(stop) / 1e3

    def _unit(self) -> None:
        torch.mm(self._matrix, self._matrix, out=self._result)

    def keep_busy(self, seconds: float) -> None:
        for _ in range(ceil(seconds / self._unit_seconds)):
            self._unit()
