"""Blocks with large activations in pieces: peak memory and time of a step, beside the same model without pieces.

    python -m benchmarks.coshard_gpu              on a GPU
    python -m benchmarks.coshard_gpu --quick      tiny, on a CPU: that it runs, and what is simulated; no bars

One sample as long as Llama 3.2's context, 131,072 tokens, through layers of the 1B model's widths (half as many, so
that the plan without pieces fits at all): a batch of one, which micro-batches do not divide. MLPs, and head with loss,
hold most of the activations and, beside attention over such a sequence, take little time. They are carried out in
pieces of the sequence, each recomputed before its backward. The bars hold this against the plan that keeps all
activations; a third plan recomputes whole layers instead. A step is forward and backward of one device without the
update.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from benchmarks.bars import Bar, Outcome, run_benchmark
from planloom.blocks import BlockGraph, find_blocks
from planloom.capture import batch_spec, capture, load_model, tensors_of
from planloom.cluster import load_cluster
from planloom.cost import Prices
from planloom.execute.compiled import CompiledRuns
from planloom.execute.silent import SilentWire
from planloom.layout import Mesh
from planloom.plan import Draft, Plan, draft
from planloom.plan.parallel import recompute_layers
from planloom.profile.memory import measure_peak_bytes
from planloom.program import Instruction, Program, Update, build_program, verify_program
from planloom.simulate import simulate
from planloom.train.runtime import Runtime

MIN_SAVED, MAX_SLOWDOWN = 0.40, 1.10
"""Issue 7: peak memory −40 % or more at ≤ 10 % more time."""
PIECES = 8
NUM_WARM_UP, NUM_ROUNDS = 2, 5
MIB = 1 << 20

MLPS = "model.layers.*.post_attention_layernorm*|model.layers.*.mlp*"
HEAD = "lm_head|loss*"


def in_pieces(written: Draft) -> Draft:
    """MLPs with their norms, and head with loss, an eighth of the sequence at a time."""
    return (
        written.time("mlps", size=PIECES, over=MLPS, recompute=True)
        .split(MLPS, sequence="mlps")
        .time("head", size=PIECES, over=HEAD, recompute=True)
        .split(HEAD, sequence="head")
    )


PLANS: dict[str, Callable[[Draft], Draft]] = {
    "whole": lambda written: written,
    "in pieces": in_pieces,
    "recomputed layers": recompute_layers,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    source: str


FULL = Case(
    name="Llama of 1B widths, 128 Ki tokens",
    source="llama3-8b?num_hidden_layers=8&hidden_size=2048&intermediate_size=8192&num_attention_heads=32&num_key_value_heads=8"
    "&head_dim=64&vocab_size=128256&max_position_embeddings=131072&dtype=bfloat16&batch=1&seq=131072",
)
QUICK = Case(
    name="tiny Llama",
    source="llama3-8b?num_hidden_layers=4&hidden_size=64&intermediate_size=256&num_attention_heads=8&num_key_value_heads=8"
    "&head_dim=8&vocab_size=8192&dtype=float32&batch=1&seq=512",
)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one plan."""

    seconds: float
    peak_bytes: int
    """Above the parameters; the batch is counted."""
    simulated_bytes: int
    parameter_bytes: int

    @property
    def whole_bytes(self) -> int:
        return self.parameter_bytes + self.peak_bytes


def measure_plan(case: Case, blocks: BlockGraph, plan: Plan, device: torch.device, *, compiled: bool) -> Figures:
    program = _without_update(build_program(blocks, plan))
    verify_program(blocks, build_program(blocks, plan))
    model, batch = load_model(case.source, device=str(device))
    inputs = tensors_of(batch, model)
    held: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    parameters = {name: held[name].detach() for name in blocks.graph.parameters}
    buffers = {name: held[name].detach() for name in blocks.graph.buffers}
    make: dict[str, Any] = {"make_local": CompiledRuns().compile} if compiled else {}
    runtime = Runtime(blocks, program, 0, parameters, buffers, _no_update, SilentWire(0), **make)
    del model, batch, held, parameters, buffers
    seconds = _step_seconds(runtime, inputs, device)
    _collect(device)
    peak_bytes = measure_peak_bytes(lambda: runtime.step(inputs), device)
    summary = simulate(program, Prices(blocks=blocks, cluster=load_cluster("dgx-h200"), fused=compiled)).summary
    assert summary is not None
    (role,) = summary.memory
    own = role.parts["parameters"]
    return Figures(
        seconds=seconds,
        peak_bytes=peak_bytes,
        simulated_bytes=role.peak_bytes - own - role.parts.get("optimizer", 0),
        parameter_bytes=own,
    )


def measure(arguments: argparse.Namespace) -> Outcome:
    device = torch.device("cpu" if arguments.quick or not torch.cuda.is_available() else "cuda")
    if device.type == "cpu":
        torch.set_num_threads(1)
    table = Table(
        "case", "plan", "step", "peak", "above parameters", "simulated", title=f"in {PIECES} pieces, {device}"
    )
    case = QUICK if device.type == "cpu" else FULL
    model, batch = load_model(case.source)
    blocks = find_blocks(capture(model, batch))
    empty = draft(blocks, Mesh.of(range(1)), batch=batch_spec(batch))
    figures: dict[str, Figures] = {}
    for name, write in PLANS.items():
        plan = write(empty).plan(name)
        found = figures[name] = measure_plan(case, blocks, plan, device, compiled=device.type == "cuda")
        sizes = (f"{n / MIB:,.1f} MiB" for n in (found.whole_bytes, found.peak_bytes, found.simulated_bytes))
        print(f"{name}: {found.seconds:.3f} s, {found.whole_bytes / MIB:,.0f} MiB", file=sys.stderr, flush=True)
        table.add_row(case.name, name, f"{found.seconds:.3f} s", *sizes)
    whole, pieces = figures["whole"], figures["in pieces"]
    saved, slowdown = 1 - pieces.whole_bytes / whole.whole_bytes, pieces.seconds / whole.seconds
    bars = [
        Bar(name="peak memory saved by pieces", figure=saved, floor=MIN_SAVED),
        Bar(name="times as long in pieces", figure=slowdown, ceiling=MAX_SLOWDOWN),
    ]
    document = {
        "device": str(device),
        "case": asdict(case),
        "saved": saved,
        "slowdown": slowdown,
        "plans": {name: asdict(found) for name, found in figures.items()},
    }
    return Outcome(tables=[table], document=document, bars=bars if device.type == "cuda" else [])


def _without_update(program: Program) -> Program:
    (stage,) = program.stages
    bodies: dict[str, tuple[Instruction, ...]] = {
        name: tuple(i for i in body if not isinstance(i, Update)) for name, body in stage.bodies.items()
    }
    return replace(program, stages=(replace(stage, bodies=bodies),))


def _no_update(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.0)


def _step_seconds(runtime: Runtime, inputs: Mapping[str, Tensor], device: torch.device) -> float:
    for _ in range(NUM_WARM_UP):
        runtime.step(inputs)
    rounds = []
    for _ in range(NUM_ROUNDS):
        _synchronize(device)
        start = time.perf_counter()
        runtime.step(inputs)
        _synchronize(device)
        rounds.append(time.perf_counter() - start)
    return median(rounds)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run_benchmark("coshard_gpu", measure, description="Blocks with large activations in pieces: memory and time.")
