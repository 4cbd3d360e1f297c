"""Collectives, exchanges and sums, measured; and how much computation and communication slow each other down.

A message is late while its ends compute: the threads that carry it wait for the processor, under a quota for the rest
of a period. It is as much late whatever its size. [Empirical] Four ranks of 0.4 cores, periods of 5 ms, 16 KiB to 1 MiB
over links of 50 and 150 Mbit/s, 2 vCPU AMD EPYC with other work at low priority, 2026-11-19: 0 to 9 ms, median 3.

All groups of a step send at once, as they do in training, and all ranks start together. A collective is measured over
rows of equal pieces, which is how several are carried out as one; what a program must permute before and after is left
out.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable
from math import ceil

import torch
import torch.distributed as dist
from torch import Tensor

from planloom.collective import Step
from planloom.cost.keys import (
    OVERLAP_COMMUNICATION_KEY,
    OVERLAP_COMPUTE_KEY,
    OVERLAP_EXCHANGE_KEY,
    accumulate_key,
    collective_key,
    exchange_key,
    memory_key,
)
from planloom.execute.background import Background
from planloom.execute.bundle import step_on_rows
from planloom.execute.wire import Wire
from planloom.profile.runs import Measured, RunBench
from planloom.profile.timing import Function, deviation, slowest, start_together, time_phases
from planloom.profile.work import Collectives, Exchanges
from planloom.program import Transfer

_ITEM_BYTES = 4  # of float32, in which everything is sent here
_OVERLAP_ROUNDS = 5
_WARM_UP_REPETITIONS = 2  # the first connects; a message needs no other memory than the one before
_OVERLAP_FIRST_BYTES, _OVERLAP_MOST_BYTES = 1 << 20, 1 << 28
_DELAY_BYTES, _DELAY_ROUNDS, _DELAY_LEAD_SECONDS = 1 << 16, 15, 0.004


def measure_collective(
    wire: Wire, of: Collectives, num_bytes: int, device: torch.device, *, budget_seconds: float
) -> Measured:
    """One step on all its groups."""
    key = collective_key(of.step.kind, of.step.groups, num_bytes)
    return {key: _timed(_collective(wire, step_on_rows(of.step), num_bytes, device), device, budget_seconds)}


def measure_exchange(
    wire: Wire, of: Exchanges, num_bytes: int, device: torch.device, *, budget_seconds: float
) -> Measured:
    """Messages of this size between all pairs at once."""
    elements = max(1, num_bytes // _ITEM_BYTES)
    sources = [source for source, target in of.pairs if target == wire.device]
    transfers = []
    for source, target in of.pairs:
        place = sorted(s for s, t in of.pairs if t == target).index(source)
        box = ((place * elements, (place + 1) * elements),)
        transfers.append(Transfer(source=source, target=target, source_box=((0, elements),), target_box=box))
    array, given = torch.randn(elements, device=device), tuple(transfers)
    is_source = any(source == wire.device for source, _ in of.pairs)

    def once() -> None:
        finishes = []
        if sources:
            finishes.append(wire.receive(torch.float32, (len(sources) * elements,), given, 0, device))
        if is_source:
            finishes.append(wire.send(array, (elements,), given, 0))
        for finish in finishes:
            finish()

    return {exchange_key(of.pairs, num_bytes): _timed(once, device, budget_seconds)}


def measure_sum(num_bytes: int, device: torch.device, *, budget_seconds: float) -> Measured:
    """A sum of two tensors into a third, which moves so many bytes in all, and one into the first of them."""
    a, b = (torch.randn(num_bytes // (3 * _ITEM_BYTES), device=device) for _ in range(2))
    held: deque[Tensor] = deque(maxlen=3)  # memory of earlier ones is there to be taken, as in training

    def once() -> None:
        held.append(torch.add(a, b))

    timings = time_phases({"sum": once, "in place": lambda: a.add_(b)}, device, budget_seconds=budget_seconds)
    keys = {"sum": memory_key(num_bytes), "in place": accumulate_key(num_bytes)}
    return {key: (timings[name].seconds, timings[name].spread) for name, key in keys.items()}


def measure_overlap(wire: Wire, bench: RunBench, device: torch.device, *, budget_seconds: float) -> Measured:
    """Forwards of a run during an all-reduce of all ranks, against both alone: ratios of at least one."""
    ranks = tuple(range(dist.get_world_size()))
    wire.create_groups([ranks])
    step = Step(kind="all_reduce", groups=(ranks,), shape=(len(ranks),))

    def compute() -> None:
        bench.forward()
        bench.forget()

    compute_seconds = time_phases({"run": compute}, device, budget_seconds=budget_seconds)["run"].seconds
    num_bytes = _OVERLAP_FIRST_BYTES
    while True:
        communicate = _collective(wire, step, num_bytes, device)
        alone_seconds, _ = _timed(communicate, device, budget_seconds)
        if alone_seconds >= 4 * compute_seconds or num_bytes >= _OVERLAP_MOST_BYTES:
            break
        num_bytes *= 2
    array = torch.randn(num_bytes // _ITEM_BYTES, device=device)
    together = _together_on_cuda if device.type == "cuda" else _together_on_cpu
    count = ceil(alone_seconds / compute_seconds) + 1
    ratios: list[tuple[float, float]] = []
    for _ in range(_OVERLAP_ROUNDS):
        start_together(device)
        run, sent = together(wire, step, array, compute, count)
        ratios.append((run / compute_seconds if run else 1.0, sent / alone_seconds))
    found = []
    for i in range(2):
        values = slowest([pair[i] for pair in ratios])
        found.append((max(1.0, statistics.median(values)), deviation(values)))
    late = (0.0, 0.0) if device.type == "cuda" else _measure_delay(wire, compute, compute_seconds)
    return {OVERLAP_COMPUTE_KEY: found[0], OVERLAP_COMMUNICATION_KEY: found[1], OVERLAP_EXCHANGE_KEY: late}


def _measure_delay(wire: Wire, compute: Function, compute_seconds: float) -> tuple[float, float]:
    """How much later messages of all ranks to both neighbours arrive while all ranks compute."""
    alone, busy = list[float](), list[float]()
    for number in range(_DELAY_ROUNDS):
        for found in (alone, busy):
            start_together(torch.device("cpu"))
            if found is busy:  # its quota is spent, and ranks are somewhere else in their periods
                for _ in range(1 + ceil((1 + number % 3) * _DELAY_LEAD_SECONDS / compute_seconds)):
                    compute()
            found.append(_neighbours(wire, compute if found is busy else None))
    # The mean of the ranks: of a pipeline's many messages each meets another moment.
    late = torch.tensor(statistics.median(busy) - statistics.median(alone), dtype=torch.float64)
    dist.all_reduce(late)
    return max(0.0, float(late) / dist.get_world_size()), deviation(busy)


def _neighbours(wire: Wire, compute: Function | None) -> float:
    """Seconds until a message from each neighbour has arrived."""
    rank, elements, here = wire.device, _DELAY_BYTES // _ITEM_BYTES, torch.device("cpu")
    neighbours = [other for other in (rank - 1, rank + 1) if 0 <= other < dist.get_world_size()]
    box, array = ((0, elements),), torch.empty(elements)
    begin, finishes = time.perf_counter(), []
    for other in neighbours:
        way = (Transfer(source=other, target=rank, source_box=box, target_box=box),)
        finishes.append(wire.receive(torch.float32, (elements,), way, 0, here))
    for other in neighbours:
        way = (Transfer(source=rank, target=other, source_box=box, target_box=box),)
        finishes.append(wire.send(array, (elements,), way, 0))
    task = Background()
    arrived = task.start(lambda: [finish() for finish in finishes])
    while compute is not None and arrived.span is None:
        compute()
    arrived.result()
    task.close()
    assert arrived.span is not None
    return arrived.span[1] - begin


def _together_on_cpu(wire: Wire, step: Step, array: Tensor, compute: Function, count: int) -> tuple[float, float]:
    """Mean seconds of the runs that ended during the communication (0: none did), and of the communication."""
    begin = time.perf_counter()
    finish = wire.run_steps((step,), array, tuple(array.shape))
    task, ends = wire.last_task, [begin]
    assert task is not None
    while task.span is None:
        compute()
        ends.append(time.perf_counter())
    finish()
    inside = [end for end in ends if end <= task.span[1]]
    run = (inside[-1] - inside[0]) / (len(inside) - 1) if len(inside) > 1 else 0.0
    return run, task.span[1] - begin


def _together_on_cuda(wire: Wire, step: Step, array: Tensor, compute: Function, count: int) -> tuple[float, float]:
    """The same by events; what is sent is awaited by a stream of its own."""
    aside = torch.cuda.Stream(array.device)
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    sent = torch.cuda.Event(enable_timing=True)
    ends[0].record()
    finish = wire.run_steps((step,), array, tuple(array.shape))
    with torch.cuda.stream(aside):
        finish()
        sent.record()
    for end in ends[1:]:
        compute()
        end.record()
    torch.cuda.synchronize(array.device)
    sent_seconds = ends[0].elapsed_time(sent) / 1e3
    inside = [seconds for end in ends if (seconds := ends[0].elapsed_time(end) / 1e3) <= sent_seconds]
    return (inside[-1] / (len(inside) - 1) if len(inside) > 1 else 0.0), sent_seconds


def _collective(wire: Wire, step: Step, num_bytes: int, device: torch.device) -> Callable[[], Tensor]:
    rows = step.group_size if step.into else 1
    sizes = (rows, max(1, num_bytes // (_ITEM_BYTES * rows)))
    array = torch.randn(sizes, device=device)
    return lambda: wire.run_steps((step,), array, sizes)()


def _timed(function: Function, device: torch.device, budget_seconds: float) -> tuple[float, float]:
    """All ranks begin every repetition together: else what is sent one way would pile up."""
    phases = {"link": function}
    timings = time_phases(
        phases,
        device,
        before=dist.barrier,
        hide_launch=False,
        budget_seconds=budget_seconds,
        warm_up_repetitions=_WARM_UP_REPETITIONS,
    )
    timing = timings["link"]
    return timing.seconds, timing.spread
