"""Measure: each distinct run, update, collective and exchange of programs once, and hand it over at once.

Without a process group one process measures runs and updates: shards are symmetric, so any coordinates do. With one,
all ranks measure the same thing at the same time, as they will compute at the same time in training, and what is sent
is measured, too. What does not fit into memory is left out with the reason.

On CPUs what is computed is measured in rounds (`rounds`): all of it once, then all of it again. What is sent is not:
the links' bandwidth decides.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from planloom.blocks import BlockGraph
from planloom.cost.keys import run_key, split_key, update_peak_key
from planloom.execute import compute_given
from planloom.execute.wire import Wire
from planloom.graph import RANDOM_STATE
from planloom.profile.capacity import too_large, why_not
from planloom.profile.links import measure_collective, measure_exchange, measure_overlap, measure_sum
from planloom.profile.memory import measure_peak_bytes
from planloom.profile.rest import measure_rest
from planloom.profile.rings import bench_of
from planloom.profile.rounds import NUM_ROUNDS, Rounds
from planloom.profile.runs import MakeLocal, Measured, RunBench, measure_run, measure_run_again
from planloom.profile.splits import SplitBench, measure_split
from planloom.profile.timing import BUDGET_SECONDS, slowest, time_phases
from planloom.profile.work import Collectives, Work, missing_work, work_of
from planloom.program import Program, Run

_TIMEOUT_SECONDS = 300.0

Task = Callable[[], Measured]
Ready = TypeVar("Ready")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """What every measurement needs."""

    blocks: BlockGraph
    given: Mapping[str, Tensor]
    device: torch.device
    make_local: MakeLocal
    skip: Callable[[dict[str, str]], None]
    budget_seconds: float


def measure_programs(
    blocks: BlockGraph,
    programs: Sequence[Program],
    batch: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    known: Collection[str],
    *,
    progress: Callable[[int, int], None],
    save: Callable[[Measured], None] = lambda measured: None,
    skip: Callable[[dict[str, str]], None] = lambda reasons: None,
    make_local: MakeLocal = lambda local: local,
    with_links: bool = True,
    budget_seconds: float = BUDGET_SECONDS,
) -> Measured:
    """Everything in these programs that `known` lacks; `with_links`: with several ranks what they send, too.

    `save` is called after every measurement and `skip` for what does not fit, both on every rank: on all but one they
    do nothing. Repetitions of one measurement take `budget_seconds`, or five of them.
    """
    device = next(iter(batch.values())).device
    state = {RANDOM_STATE: torch.tensor([0, 0], device=device)} if blocks.graph.random else {}
    given = compute_given(blocks.graph, {**batch, **buffers, **state}, device)
    bench = _Bench(
        blocks=blocks, given=given, device=device, make_local=make_local, skip=skip, budget_seconds=budget_seconds
    )
    has_links = with_links and dist.is_initialized() and dist.get_world_size() > 1
    work = work_of(blocks, programs, with_links=has_links)
    wire = Wire(dist.get_rank(), timeout_seconds=_TIMEOUT_SECONDS) if has_links else None
    rounds = Rounds()
    try:
        missing = missing_work(work, agreed(known))
        tasks = _tasks(bench, work, missing, wire)
        num_later = NUM_ROUNDS[device.type] - 1
        total = len(tasks) + num_later * missing.num_computed
        progress(0, total)
        done = 0
        for number in range(1 + num_later):
            for task in tasks if number == 0 else _tasks_again(bench, missing, rounds, backwards=number % 2 == 1):
                save(rounds.add(task()))
                done += 1
                progress(done, total)
    finally:
        if wire is not None:
            wire.close()
    return rounds.measured


def agreed(known: Collection[str]) -> Collection[str]:
    """What the first rank knows, on every rank: another session may have written to the store between two readings."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return known
    text = "\n".join(sorted(known)).encode()
    size = torch.tensor([len(text)])
    dist.broadcast(size, 0)
    told = torch.frombuffer(bytearray(text), dtype=torch.uint8) if dist.get_rank() == 0 and text else None
    told = torch.empty(int(size), dtype=torch.uint8) if told is None else told
    if int(size):
        dist.broadcast(told, 0)
    return set(bytes(told.tolist()).decode().split("\n"))


def _tasks(bench: _Bench, whole: Work, work: Work, wire: Wire | None) -> list[Task]:
    """Tasks for the part `work` of the whole."""
    budget = bench.budget_seconds
    tasks: list[Task] = [partial(_measure_run, bench, fingerprint, *of) for fingerprint, of in work.runs.items()]
    tasks += [partial(_measure_split, bench, fingerprint, *of) for fingerprint, of in work.splits.items()]
    tasks += [partial(_measure_update, bench, key, *of) for key, of in work.updates.items()]
    tasks += [partial(measure_sum, num_bytes, bench.device, budget_seconds=budget) for num_bytes in work.memory]
    if wire is None:
        return tasks
    wire.create_groups(
        group for link in work.links.values() if isinstance(link, Collectives) for group in link.step.groups
    )
    for link in work.links.values():
        for num_bytes in sorted(link.sizes):
            if isinstance(link, Collectives):
                tasks.append(partial(measure_collective, wire, link, num_bytes, bench.device, budget_seconds=budget))
            else:
                tasks.append(partial(measure_exchange, wire, link, num_bytes, bench.device, budget_seconds=budget))
    if work.overlap:
        tasks.append(partial(_measure_overlap, bench, whole.runs, wire))
    if work.rest:
        tasks.append(partial(measure_rest, bench.device))
    return tasks


def _tasks_again(bench: _Bench, work: Work, rounds: Rounds, *, backwards: bool) -> list[Task]:
    """What is computed, once more; what did not fit gives nothing again."""
    tasks: list[Task] = [partial(_measure_again, bench, rounds, f, *of) for f, of in work.runs.items()]
    tasks += [partial(_measure_split, bench, f, *of) for f, of in work.splits.items()]
    tasks += [partial(_measure_update, bench, key, *of) for key, of in work.updates.items()]
    return tasks[::-1] if backwards else tasks


def _measure_run(bench: _Bench, fingerprint: str, program: Program, run: Run) -> Measured:
    def prepare() -> RunBench:
        ready = bench_of(bench.blocks, program, run, bench.given, bench.device, bench.make_local)
        ready.forward()
        ready.backward()
        return ready

    def measure(ready: RunBench) -> Measured:
        return measure_run(ready, fingerprint, budget_seconds=bench.budget_seconds)

    reason = why_not(bench.blocks, program, run, bench.device)
    return _fitting(bench, run_key(fingerprint, "forward"), reason, prepare, measure)


def _measure_again(bench: _Bench, rounds: Rounds, fingerprint: str, program: Program, run: Run) -> Measured:
    if run_key(fingerprint, "forward") not in rounds.measured:  # it does not fit
        return {}
    ready = bench_of(bench.blocks, program, run, bench.given, bench.device, bench.make_local)
    return measure_run_again(ready, fingerprint, rounds.first, budget_seconds=bench.budget_seconds)


def _measure_split(bench: _Bench, fingerprint: str, program: Program, run: Run) -> Measured:
    """Of several rounds each measures it alike."""

    def prepare() -> SplitBench:
        ready = SplitBench(bench.blocks, program, run, bench.given, bench.device)
        ready.carry_out()
        return ready

    def measure(ready: SplitBench) -> Measured:
        return measure_split(ready, fingerprint, budget_seconds=bench.budget_seconds)

    reason = why_not(bench.blocks, program, run, bench.device)
    return _fitting(bench, split_key(fingerprint, "forward"), reason, prepare, measure)


def _measure_update(bench: _Bench, key: str, sizes: list[int], dtypes: list[str]) -> Measured:
    """One step of AdamW, and the most that it allocates when its states are there."""

    def prepare() -> torch.optim.AdamW:
        shards = []
        for size, dtype in zip(sizes, dtypes, strict=True):
            shard = torch.randn(size, dtype=getattr(torch, dtype), device=bench.device).requires_grad_()
            shard.grad = torch.randn_like(shard)
            shards.append(shard)
        optimizer = torch.optim.AdamW(shards, lr=1e-3)
        optimizer.step()
        return optimizer

    def measure(optimizer: torch.optim.AdamW) -> Measured:
        peak = measure_peak_bytes(optimizer.step, bench.device)
        timing = time_phases({"update": optimizer.step}, bench.device, budget_seconds=bench.budget_seconds)["update"]
        return {key: (timing.seconds, timing.spread), update_peak_key(key): (float(peak), 0.0)}

    needed = sum(4 * size * getattr(torch, dtype).itemsize for size, dtype in zip(sizes, dtypes, strict=True))
    return _fitting(bench, key, too_large(needed, bench.device), prepare, measure)


def _fitting(
    bench: _Bench, key: str, reason: str, prepare: Callable[[], Ready], measure: Callable[[Ready], Measured]
) -> Measured:
    """Prepare and measure; what does not fit into memory, for which there may be a `reason` already, is skipped.

    If it does not fit on one rank, no rank measures it.
    """
    ready: list[Ready] = []
    if not reason:
        try:
            ready.append(prepare())
        except torch.OutOfMemoryError as error:
            reason = _first_line(error)
    if not slowest([float(bool(reason))])[0]:
        try:
            return measure(ready.pop())
        except torch.OutOfMemoryError as error:
            if dist.is_initialized() and dist.get_world_size() > 1:
                raise  # the others wait in the middle of it
            reason = _first_line(error)
    ready.clear()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    bench.skip({key: reason or "does not fit into the memory of another rank"})
    return {}


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


def _measure_overlap(bench: _Bench, runs: Mapping[str, tuple[Program, Run]], wire: Wire) -> Measured:
    """With the run that has most blocks: a layer's."""
    largest = max(runs, key=lambda fingerprint: (len(runs[fingerprint][1].blocks), fingerprint))
    ready = bench_of(bench.blocks, *runs[largest], bench.given, bench.device, bench.make_local)
    return measure_overlap(wire, ready, bench.device, budget_seconds=bench.budget_seconds)
