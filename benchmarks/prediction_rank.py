"""One rank on the testbed: trains a model under plans and says how long, how much memory, how many bytes sent.

`python -m benchmarks.prediction_rank MODEL PLANS OUT [--limit BYTES]` runs every plan of a folder, one after another, a
few steps each. Times are those of the slowest rank; memory is what a rank allocates above its size before the model is
built. With a limit, the testbed kills the rank that allocates more.
"""

import argparse
import ctypes
import gc
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from planloom.blocks import BlockGraph, find_blocks
from planloom.capture import load_model, tensors_of
from planloom.execute.sharing import shared_capture
from planloom.execute.wire import Wire
from planloom.graph import Graph
from planloom.layout import Mesh
from planloom.plan import load_plan
from planloom.program import Program, build_program
from planloom.simulate.engine import PIPELINE
from planloom.simulate.script import axis_of
from planloom.train.runtime import Runtime
from testbed.limits import limit_memory, memory_use, peak_memory, reset_peak

_LIMIT = timedelta(seconds=300)
_COUNTED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all_single", "isend", "broadcast", "reduce")


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "plans", "out"):
        parser.add_argument(name)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--limit", type=int, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_LIMIT)
    torch.manual_seed(0)
    model, example = load_model(arguments.model)
    blocks = find_blocks(shared_capture(model, example))
    batch = {
        name: torch.randint(0, 2000, tensor.shape) if not tensor.is_floating_point() else torch.randn(tensor.shape)
        for name, tensor in tensors_of(example, model).items()
    }
    buffers = filled_buffers(blocks.graph, arguments.model)
    del model
    found = []
    for path in sorted(Path(arguments.plans).glob("*.json")):
        program = build_program(blocks, load_plan(path))
        found.append(run_plan(blocks, program, batch, buffers, arguments.steps, arguments.limit))
        if dist.get_rank() == 0:
            Path(arguments.out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def filled_buffers(graph: Graph, source: str) -> dict[str, Tensor]:
    """Buffers as the model has them, which is built for this once and forgotten."""
    if not graph.buffers:
        return {}
    model, _ = load_model(source, device="cpu")
    held = dict(model.named_buffers()) | dict(model.named_parameters())
    return {name: held[name].detach().clone() for name in graph.buffers}


def run_plan(
    blocks: BlockGraph,
    program: Program,
    batch: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    num_steps: int,
    limit: int | None,
) -> dict[str, Any]:
    """Build a device's part of a model, train, forget."""
    give_back()
    limit_memory(None)
    before = memory_use()
    reset_peak()
    if limit is not None:
        limit_memory(limit)
    wire = Wire(dist.get_rank(), timeout_seconds=_LIMIT.total_seconds())
    runtime = Runtime(
        blocks,
        program,
        dist.get_rank(),
        Drawn(blocks.graph),
        buffers,
        partial(torch.optim.AdamW, lr=1e-4),
        wire,
        at=torch.device("cpu"),
    )
    losses, seconds = [], []
    sent: dict[str, int] = {}
    for number in range(num_steps + 1):
        dist.barrier()
        start = time.perf_counter()
        if number == 0:
            with counting(program, sent):
                losses.append(float(runtime.step(batch)))
        else:
            losses.append(float(runtime.step(batch)))
        took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        seconds.append(float(took))
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, (peak_memory() - before, sent))
    wire.close()
    return {
        "plan": program.plan_name,
        "losses": losses,
        "seconds": seconds[1:],
        "step_seconds": median(seconds[1:]),
        "peak_bytes": [peak for peak, _ in peaks],
        "sent": [bytes_by_axis for _, bytes_by_axis in peaks],
    }


class Drawn(Mapping[str, Tensor]):
    """Parameters, drawn whole when they are asked for: no rank holds more of the model than its part."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._graph.tensors[name]
        dtype = getattr(torch, tensor.dtype)
        if len(tensor.shape) == 1:
            return torch.full(tensor.shape, float("bias" not in name), dtype=dtype)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        return torch.empty(tensor.shape, dtype=dtype).normal_(std=0.02, generator=generator)

    def __iter__(self) -> Iterator[str]:
        return iter(self._graph.parameters)

    def __len__(self) -> int:
        return len(self._graph.parameters)


@contextmanager
def counting(program: Program, sent: dict[str, int]) -> Iterator[None]:
    """Count the bytes that this rank hands to `torch.distributed`, by the axis that its peers lie along."""
    rank, originals = dist.get_rank(), {name: getattr(dist, name) for name in _COUNTED}
    mesh = program.stages[program.stage_of(rank)].mesh

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            array, peers = _handed_over(name, args, kwargs)
            axis = _axis(mesh, rank, peers)
            sent[axis] = sent.get(axis, 0) + array.numel() * array.element_size()
            return original(*args, **kwargs)

        return call

    for name, original in originals.items():
        setattr(dist, name, counted(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _handed_over(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Tensor, tuple[int, ...]]:
    """What a rank gives away, and to whom."""
    if name == "isend":
        return args[0], (args[1],)
    members = tuple(dist.get_process_group_ranks(kwargs["group"]))
    if name == "reduce_scatter":
        return torch.stack(args[1]), members
    return args[1] if name in ("all_gather", "all_to_all_single") else args[0], members


def _axis(mesh: Mesh, rank: int, peers: tuple[int, ...]) -> str:
    if any(peer not in mesh.devices for peer in peers):
        return PIPELINE
    return axis_of(mesh, ((rank, *(peer for peer in peers if peer != rank)),))


def give_back() -> None:
    """What the last plan has left behind."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def parameter_bytes(graph: Graph) -> int:
    return sum(prod(graph.tensors[p].shape) * graph.tensors[p].item_bytes for p in graph.parameters)


if __name__ == "__main__":
    main()
