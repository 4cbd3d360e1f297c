"""Measure: each distinct run once, forward and backward, through the same code as in training.

Called on every rank of a process group, all ranks measure the same thing at the same time, as they will compute at the
same time in training; the price is the median over repetitions of the slowest rank. Shards are symmetric, so any
coordinates do.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from planloom.blocks import BlockGraph
from planloom.collective import Step, StepKind
from planloom.cost import collective_key, run_fingerprint, run_key, update_key
from planloom.cost.keys import shard_sizes
from planloom.execute import LocalRun, RunVjp, compute_given
from planloom.execute.wire import Wire
from planloom.graph import RANDOM_STATE
from planloom.layout import Layout
from planloom.program import Program, Run, Transfer

Result = TypeVar("Result")
Measured = dict[str, tuple[float, float]]
"""key → (seconds, spread)"""

_REPEATS = 5
_COLLECTIVE_BYTES = (1 << 12, 1 << 17, 1 << 20, 1 << 22)


def missing_runs(
    blocks: BlockGraph, programs: Sequence[Program], known: Mapping[str, float]
) -> dict[str, tuple[Program, Run]]:
    """Fingerprint → an example, for every run of these programs without a price."""
    missing: dict[str, tuple[Program, Run]] = {}
    for program in programs:
        for run in program.runs:
            fingerprint = run_fingerprint(blocks, program, run)
            if run_key(fingerprint, "forward") not in known:
                missing.setdefault(fingerprint, (program, run))
    return missing


def is_measured(blocks: BlockGraph, programs: Sequence[Program], known: Mapping[str, float]) -> bool:
    """Is there nothing left to measure for these programs?"""
    has_collectives = any(key.startswith("collective/") for key in known)
    missing = missing_runs(blocks, programs, known) or _missing_updates(blocks, programs, known)
    return has_collectives and not missing


def measure_programs(
    blocks: BlockGraph,
    programs: Sequence[Program],
    batch: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    known: Mapping[str, float],
    *,
    progress: Callable[[int, int], None],
) -> Measured:
    """Prices of everything in these programs that `known` lacks: runs, updates, collectives."""
    device = next(iter(batch.values())).device
    state = {RANDOM_STATE: torch.tensor([0, 0], device=device)} if blocks.graph.random else {}
    given = compute_given(blocks.graph, {**batch, **buffers, **state}, device)
    tasks: list[Callable[[], Measured]] = [
        partial(_measure_run, blocks, fingerprint, program, run, given, device)
        for fingerprint, (program, run) in missing_runs(blocks, programs, known).items()
    ]
    for key, (sizes, dtypes) in _missing_updates(blocks, programs, known).items():
        tasks.append(partial(_measure_update, key, sizes, dtypes, device))
    if dist.is_initialized() and dist.get_world_size() > 1:
        tasks += _collective_tasks(known, device)
    measured: Measured = {}
    for i, task in enumerate(tasks):
        measured.update(task())
        progress(i + 1, len(tasks))
    return measured


def _measure_run(
    blocks: BlockGraph, fingerprint: str, program: Program, run: Run, given: Mapping[str, Tensor], device: torch.device
) -> Measured:
    mesh = program.stages[run.stage].mesh
    local = LocalRun(blocks, run, mesh.coordinates(mesh.devices[0]), num_micro=program.num_micro_batches)
    inputs = [_random(blocks, slot.tensor, slot.layout, slot.sizes, device) for slot in run.inputs]
    outputs = RunVjp(local, inputs, given, 0).take_outputs()
    cotangents = [
        None if slot.cotangent is None else torch.randn_like(output)
        for slot, output in zip(run.outputs, outputs, strict=True)
    ]
    del outputs
    forwards, backwards = [], []
    for _ in range(_REPEATS + 1):
        seconds, vjp = _timed(lambda: RunVjp(local, inputs, given, 0), device)
        forwards.append(seconds)
        vjp.take_outputs()
        seconds, _ = _timed(lambda: vjp.backward(cotangents), device)  # noqa: B023
        backwards.append(seconds)
    return {
        run_key(fingerprint, "forward"): _summary(forwards[1:]),
        run_key(fingerprint, "backward"): _summary(backwards[1:]),
    }


def _random(blocks: BlockGraph, name: str, layout: Layout, sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """A local tensor with random values; of experts, the rows that a balanced routing gives."""
    tensor, dtype = blocks.graph.tensors[name], getattr(torch, blocks.graph.tensors[name].dtype)
    lengths = iter(layout.local_sizes(sizes))
    shape = [prod(next(lengths) for _ in dim) for dim in tensor.factors]
    if tensor.rows:
        num_rows = int(_balanced(shape[:2], tensor.density, device).sum())
        return torch.randn((1, num_rows, *shape[2:]), device=device).to(dtype)
    if dtype == torch.bool:
        return _balanced(shape, _densities(blocks).get(name, 0.5), device)
    if not dtype.is_floating_point:  # indices: zero is one of any dim
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.randn(shape, device=device).to(dtype)


def _densities(blocks: BlockGraph) -> dict[str, float]:
    """Masks of ragged tensors, with the share of their elements that is true."""
    return {tensor.rows: tensor.density for tensor in blocks.graph.tensors.values() if tensor.rows}


def _balanced(shape: Sequence[int], density: float, device: torch.device) -> Tensor:
    """A mask that is true at regular places."""
    every = max(1, round(1 / density))
    number = sum(torch.arange(n, device=device).view(-1, *[1] * (len(shape) - 1 - i)) for i, n in enumerate(shape))
    return torch.as_tensor(number, device=device).expand(list(shape)) % every == 0


def _missing_updates(
    blocks: BlockGraph, programs: Sequence[Program], known: Mapping[str, float]
) -> dict[str, tuple[list[int], list[str]]]:
    missing = {}
    for program in programs:
        for stage in program.stages:
            sizes = shard_sizes(stage)
            dtypes = [blocks.graph.tensors[p.name].dtype for p in stage.parameters]
            if sizes and update_key(sizes, dtypes) not in known:
                missing[update_key(sizes, dtypes)] = (sizes, dtypes)
    return missing


def _measure_update(key: str, sizes: list[int], dtypes: list[str], device: torch.device) -> Measured:
    shards = []
    for size, dtype in zip(sizes, dtypes, strict=True):
        shard = torch.randn(size, device=device).to(getattr(torch, dtype)).requires_grad_()
        shard.grad = torch.randn_like(shard)
        shards.append(shard)
    optimizer = torch.optim.AdamW(shards, lr=1e-3)
    return {key: _summary([_timed(optimizer.step, device)[0] for _ in range(_REPEATS + 1)][1:])}


def _collective_tasks(known: Mapping[str, float], device: torch.device) -> list[Callable[[], Measured]]:
    """The usual kinds of collectives on all group sizes that divide the world, all groups at once."""
    world, rank = dist.get_world_size(), dist.get_rank()
    wire = Wire(rank, timeout_seconds=120)
    kinds: tuple[StepKind, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "reduce", "broadcast")
    tasks: list[Callable[[], Measured]] = []
    for size in (n for n in range(2, world + 1) if world % n == 0):
        groups = tuple(tuple(range(i, i + size)) for i in range(0, world, size))
        wire.create_groups(groups)
        for kind in kinds:
            for num_bytes in _COLLECTIVE_BYTES:
                key = collective_key(kind, size, num_bytes)
                if key not in known:
                    step = Step(kind=kind, groups=groups, shape=(size,), along=(0,), into=(1,))
                    tasks.append(partial(_measure_step, key, wire, step, num_bytes, device))
    for num_bytes in _COLLECTIVE_BYTES:
        key = collective_key("exchange", 2, num_bytes)
        if key not in known:
            tasks.append(partial(_measure_exchange, key, wire, num_bytes, device))
    return tasks


def _measure_step(key: str, wire: Wire, step: Step, num_bytes: int, device: torch.device) -> Measured:
    sizes = (2, num_bytes // 8)
    array = torch.randn(sizes, device=device)
    runs = [_timed(lambda: wire.run_steps((step,), array, sizes)(), device)[0] for _ in range(_REPEATS + 1)]
    return {key: _summary(runs[1:])}


def _measure_exchange(key: str, wire: Wire, num_bytes: int, device: torch.device) -> Measured:
    """The lower half of the ranks sends to the upper half, all at once."""
    half, sizes = dist.get_world_size() // 2, (num_bytes // 4,)
    box = ((0, sizes[0]),)
    transfers = tuple(Transfer(source=i, target=i + half, source_box=box, target_box=box) for i in range(half))
    array = torch.randn(sizes, device=device)

    def once() -> Tensor:
        if wire.device < half:
            return wire.send(array, sizes, transfers, 0)()
        return wire.receive(torch.float32, sizes, transfers, 0, device)()

    return {key: _summary([_timed(once, device)[0] for _ in range(_REPEATS + 1)][1:])}


def _timed(function: Callable[[], Result], device: torch.device) -> tuple[float, Result]:
    """Seconds of the slowest rank, all starting together; and the result."""
    if dist.is_initialized():
        dist.barrier()
    _synchronize(device)
    start = time.perf_counter()
    result = function()
    _synchronize(device)
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds), result


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _summary(seconds: list[float]) -> tuple[float, float]:
    return statistics.median(seconds), max(seconds) - min(seconds)
