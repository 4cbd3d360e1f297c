"""A training step of ours beside PyTorch's on one device, in a process of its own.

    python -m benchmarks.overhead_case MODEL ROUNDS cpu|cuda [--compile]

Both train copies of one model with the same optimizer on the same batch, forward, backward and update: PyTorch the
model as it is, or under `torch.compile`; ours under the plan `single`, its runs compiled if the other is. They take
turns, in alternating order, on a CPU with one thread; ratios are medians over rounds, of elapsed time and of the
processor's, which other processes disturb less. The losses of the first steps must agree.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from benchmarks.overhead_models import build, loss_of
from planloom.blocks import find_blocks
from planloom.capture import batch_spec, capture
from planloom.plan import named_plan, parse_named
from planloom.train import parallelize
from planloom.train.trainer import Trainer

NUM_WARM_UP = 3
LEARNING_RATE = 1e-4
STEPS_A_ROUND = {"cpu": 1, "cuda": 3}

Step = Callable[[], float | Tensor]


def compare(name: str, num_rounds: int, device: str, *, is_compiled: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    model, batch = build(name, device)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    started = time.perf_counter()
    step_theirs = _pytorch(copy.deepcopy(model), batch, device, is_compiled=is_compiled)
    trainer = our_trainer(model, batch, "single", device, is_compiled=is_compiled)
    ours: Step = lambda: trainer.step(batch)  # noqa: E731
    first = {"ours": float(ours()), "theirs": float(step_theirs())}
    prepared = time.perf_counter()
    for _ in range(NUM_WARM_UP):
        ours()
        step_theirs()
    rounds = []
    for number in range(num_rounds):
        both = {"ours": ours, "theirs": step_theirs}
        order = ("ours", "theirs") if number % 2 else ("theirs", "ours")
        seconds = {which: _seconds(both[which], device) for which in order}
        rounds.append((seconds["theirs"], seconds["ours"]))
    result = {
        "model": name,
        "device": device if device == "cpu" else torch.cuda.get_device_name(),
        "compiled": is_compiled,
        "parameters": num_parameters,
        "rounds": num_rounds,
        "theirs_seconds": median(theirs[0] for theirs, _ in rounds),
        "ours_seconds": median(ours[0] for _, ours in rounds),
        "ratio": median(ours[0] / theirs[0] for theirs, ours in rounds),
        "processor_ratio": median(ours[1] / theirs[1] for theirs, ours in rounds),
        "ratios": sorted(ours[0] / theirs[0] for theirs, ours in rounds),
        "loss_difference": abs(first["ours"] - first["theirs"]) / abs(first["theirs"]),
        "prepare_seconds": prepared - started,
    }
    trainer.close()
    dist.destroy_process_group()
    return result


def our_trainer(
    model: nn.Module, batch: dict[str, Tensor], plan_name: str, device: str, *, is_compiled: bool
) -> Trainer:
    """A trainer of the model, which it takes over, under a named plan."""
    blocks = find_blocks(capture(model, batch))
    plan = named_plan(blocks, parse_named(plan_name), batch=batch_spec(batch))
    optimizer = partial(make_optimizer, device=device)
    return parallelize(model, plan, optimizer=optimizer, blocks=blocks, compile=is_compiled)


def make_optimizer(tensors: Any, device: str) -> torch.optim.Optimizer:
    return torch.optim.AdamW(tensors, lr=LEARNING_RATE, fused=True if device == "cuda" else None)


def _pytorch(model: nn.Module, batch: dict[str, Tensor], device: str, *, is_compiled: bool) -> Step:
    optimizer = make_optimizer(model.parameters(), device)
    called: Any = torch.compile(model) if is_compiled else model

    def step() -> Tensor:
        loss = loss_of(called, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return lambda: float(step())  # ours returns a number, too


def _seconds(step: Step, device: str) -> tuple[float, float]:
    """(elapsed, processor) seconds of one step."""
    num_steps = STEPS_A_ROUND[device]
    if device == "cuda":
        torch.cuda.synchronize()
    start, processor_start = time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    elapsed, processor = time.perf_counter() - start, time.process_time() - processor_start
    return elapsed / num_steps, processor / num_steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("rounds", type=int)
    parser.add_argument("device")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    json.dump(compare(options.model, options.rounds, options.device, is_compiled=options.compile), sys.stdout)
