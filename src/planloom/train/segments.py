"""Whole segments of finalists, measured: a few steps of the runtime itself, on all ranks, with random parameters.

Before a segment of a body (`cost.segments`) and at its end a rank waits until none of its collectives is under way;
before it, the ranks of the stage wait for each other, too. So every layer and micro-batch of a step is a sample of what
a segment takes alone, with its collectives, and of several ranks the slowest counts. Waiting earlier than a program
asks changes no result, and all ranks of a stage do so at the same places. What is exchanged with other stages goes on.
"""

import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planloom.blocks import BlockGraph
from planloom.cost.segments import BodySegment, body_segments
from planloom.execute.compiled import CompiledRuns
from planloom.execute.processes import Launch, run_workers
from planloom.execute.wire import Wire
from planloom.graph import Graph
from planloom.plan import Plan, save_plan
from planloom.profile import require_device
from planloom.profile.runs import Measured
from planloom.profile.timing import deviation
from planloom.program import Program
from planloom.train.runtime import Runtime

_TIMEOUT_SECONDS = 300.0
_WARM_UP_STEPS, _STEPS = 1, 3
_SCALE = 0.02  # of random parameters: as models are initialized, so that nothing overflows


def segment_keys(blocks: BlockGraph, program: Program) -> set[str]:
    """The keys of all segments of a program."""
    stages = range(len(program.stages))
    return {segment.key for s in stages for found in body_segments(blocks, program, s).values() for segment in found}


def measure_segments(
    blocks: BlockGraph,
    programs: Sequence[Program],
    batch: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    known: Collection[str],
    *,
    progress: Callable[[int, int], None],
    save: Callable[[Measured], None] = lambda measured: None,
    compiled: bool = False,
) -> Measured:
    """The segments of programs, on all of their ranks; programs of which all segments are known are left out.

    `known` must be the same on every rank. `save` is called after every program.
    """
    todo = [program for program in programs if not segment_keys(blocks, program) <= set(known)]
    found: Measured = {}
    progress(0, len(todo))
    for i, program in enumerate(todo):
        measured = _measure(blocks, program, batch, buffers, compiled=compiled)
        save(measured)
        found.update(measured)
        progress(i + 1, len(todo))
    return found


def measure_segments_locally(
    model: str,
    plans: Sequence[Plan],
    store: Path,
    *,
    num_processes: int,
    progress: Callable[[int, int], None],
    device: str = "cpu",
    compiled: bool = False,
    label: str = "",
    launch: Launch = run_workers,
) -> None:
    """Measure on local processes the segments of plans with their collectives that the store lacks.

    A process for each device.
    """
    require_device(device)
    with tempfile.TemporaryDirectory(prefix="planloom-segments-") as folder:
        for i, plan in enumerate(plans):
            save_plan(plan, Path(folder) / f"{i:06d}.json")
        arguments = ["--model", model, "--plans", folder, "--store", str(store), "--device", device, "--label", label]
        arguments += ["--compiled"] if compiled else []
        launch(
            "planloom.train.segment_worker",
            arguments,
            num_processes,
            lambda event: progress(event["done"], event["total"]),
        )


def _measure(
    blocks: BlockGraph,
    program: Program,
    batch: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    *,
    compiled: bool,
) -> Measured:
    rank, at = dist.get_rank(), next(iter(batch.values())).device
    wire = Wire(rank, timeout_seconds=_TIMEOUT_SECONDS)
    make: dict[str, Any] = {"make_local": CompiledRuns().compile} if compiled else {}
    optimizer = partial(torch.optim.AdamW, lr=0.0)
    try:
        parameters = RandomParameters(blocks.graph, at)
        runtime = Runtime(blocks, program, rank, parameters, buffers, optimizer, wire, at=at, **make)
        wire.create_groups(stage.mesh.devices for stage in program.stages)
        clock = _Clock(runtime, body_segments(blocks, program, program.stage_of(rank)))
        for _ in range(_WARM_UP_STEPS):
            runtime.step(batch, clock.before)
        clock.samples.clear()
        for _ in range(_STEPS):
            runtime.step(batch, clock.before)
    finally:
        wire.close()
    return _slowest(program, clock.samples)


class _Clock:
    """Seconds of every segment that a rank goes through, in their order."""

    def __init__(self, runtime: Runtime, segments: Mapping[str, Sequence[BodySegment]]) -> None:
        self._runtime, self._group = runtime, runtime.stage.mesh.devices
        self._starts = {(body, of.start): of for body, found in segments.items() for of in found}
        self._current: BodySegment | None = None
        self._begun = 0.0
        self.samples: list[tuple[str, float]] = []

    def before(self, body: str, at: int) -> None:
        if self._current is not None and at == self._current.stop:
            self._runtime.drain()
            self.samples.append((self._current.key, time.perf_counter() - self._begun))
            self._current = None
        starting = self._starts.get((body, at))
        if starting is not None:
            self._runtime.drain()
            if len(self._group) > 1:
                dist.barrier(group=self._runtime.wire.process_group(self._group))
            self._current, self._begun = starting, time.perf_counter()


def _slowest(program: Program, own: list[tuple[str, float]]) -> Measured:
    """Of every sample the slowest rank of its stage, the median and the deviation over all of a key."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    by_key: dict[str, list[float]] = {}
    for stage in program.stages:
        for samples in zip(*(gathered[device] for device in stage.mesh.devices), strict=True):
            by_key.setdefault(samples[0][0], []).append(max(seconds for _, seconds in samples))
    return {key: (statistics.median(seconds), deviation(seconds)) for key, seconds in by_key.items()}


class RandomParameters(Mapping[str, Tensor]):
    """Parameters, drawn whole when they are asked for, the same on every rank: none holds more than its part."""

    def __init__(self, graph: Graph, device: torch.device) -> None:
        self._graph, self._device = graph, device

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._graph.tensors[name]
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(tensor.shape, generator=generator) * _SCALE
        return drawn.to(device=self._device, dtype=getattr(torch, tensor.dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(self._graph.parameters)

    def __len__(self) -> int:
        return len(self._graph.parameters)
