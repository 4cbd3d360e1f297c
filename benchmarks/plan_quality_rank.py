"""One rank on the testbed: contestants train the same model on the same batch, in turns.

`python -m benchmarks.plan_quality_rank MODEL PLANS OUT --rivals DDP "DTensor TP" --limit BYTES` builds every rival and
every plan of a folder, one after another, each with the same initial weights and under the limit of memory, and lets it
take a step: with the limit its peak is its own. Then all take turns, each round in another order, with a barrier
before each step, which counts with its slowest rank. Who is far behind takes no part in the rounds that follow.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.plan_quality_rivals import rival_step
from benchmarks.prediction_rank import Drawn, filled_buffers, give_back
from planloom.blocks import BlockGraph, find_blocks
from planloom.capture import load_model, tensors_of
from planloom.execute.sharing import shared_capture
from planloom.execute.wire import Wire
from planloom.graph import Graph
from planloom.plan import load_plan
from planloom.program import Program, build_program
from planloom.train.runtime import Runtime
from testbed.limits import limit_memory, memory_use, peak_memory, reset_peak

_LIMIT_SECONDS = 300.0
_FAR_BEHIND = (2.0, 1.3)
"""Times the fastest median: who needs more after one round, or after the second and later ones, has lost."""

Step = Callable[[], float]


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "plans", "out"):
        parser.add_argument(name)
    parser.add_argument("--rivals", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", type=int, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, example = load_model(arguments.model)
    blocks = find_blocks(shared_capture(model, example))
    config: Any = model.config
    batch = {name: torch.randint(0, config.vocab_size, t.shape) for name, t in tensors_of(example, model).items()}
    buffers = filled_buffers(blocks.graph, arguments.model)
    makers: dict[str, Callable[[], Step]] = {
        name: partial(_rival, name, arguments.model, blocks.graph, batch) for name in arguments.rivals
    }
    for path in sorted(Path(arguments.plans).glob("*.json")):
        program = build_program(blocks, load_plan(path))
        makers[path.stem] = partial(_planned, blocks, program, batch, buffers)
    entered = {name: _enter(make, arguments.limit) for name, make in makers.items()}
    turns = take_turns({name: step for name, (step, _) in entered.items()}, arguments.rounds)
    if dist.get_rank() == 0:
        found = {}
        for name, (_, figures) in entered.items():
            seconds, losses = zip(*turns[name], strict=True)
            found[name] = {**figures, "seconds": seconds, "losses": [*figures["losses"], losses[0]]}
        Path(arguments.out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _enter(make: Callable[[], Step], limit: int | None) -> tuple[Step, dict[str, Any]]:
    """Build a contestant and let it warm up: its step, its first loss, the largest peak of all ranks."""
    give_back()
    limit_memory(None)
    before = memory_use()
    reset_peak()
    if limit is not None:
        limit_memory(limit)
    step = make()
    loss = step()
    peak = torch.tensor(peak_memory() - before)
    limit_memory(None)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return step, {"losses": [loss], "peak_bytes": int(peak)}


def take_turns(steps: Mapping[str, Step], num_rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(seconds, loss) of every contestant's steps, seconds of the slowest rank; the same on all ranks."""
    names, found = list(steps), dict[str, list[tuple[float, float]]]()
    for number in range(num_rounds):
        turned = names[number % len(names) :] + names[: number % len(names)]
        for name in turned if number % 2 else reversed(turned):
            found.setdefault(name, []).append(_timed(steps[name]))
        medians = {name: median(seconds for seconds, _ in own) for name, own in found.items()}
        most = _FAR_BEHIND[min(number, 1)] * min(medians.values())
        names = [name for name in names if medians[name] <= most]
    return found


def _timed(step: Step) -> tuple[float, float]:
    dist.barrier()
    start = time.perf_counter()
    loss = step()
    elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return float(elapsed), loss


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _planned(blocks: BlockGraph, program: Program, batch: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Step:
    rank = dist.get_rank()
    wire = Wire(rank, timeout_seconds=_LIMIT_SECONDS)
    at = torch.device("cpu")
    runtime = Runtime(blocks, program, rank, Drawn(blocks.graph), buffers, _optimizer, wire, at=at)
    return lambda: float(runtime.step(batch))


def _rival(name: str, source: str, graph: Graph, batch: Mapping[str, Tensor]) -> Step:
    model, _ = load_model(source, device="cpu")
    _draw(model, graph)
    return rival_step(name, model, batch, _optimizer)


def _draw(model: nn.Module, graph: Graph) -> None:
    """The weights that plans begin with."""
    drawn, named = Drawn(graph), dict(model.named_parameters())
    with torch.no_grad():
        for name in graph.parameters:
            named[name].copy_(drawn[name])


if __name__ == "__main__":
    main()
