"""One setting of `prediction_gpu`: profile its distinct runs, freeze the predictions, then measure the whole.

The whole is forward and backward of one rank through the training runtime, without the update. A rank of several
communicates with nobody (`SilentWire`), so what is measured, as what is composed from profiles, is computation alone.

    python -m benchmarks.gpu_case cuda MARKS SETTING…    compiles the runs of settings ahead, into torch's cache on disk

writes a file to the folder MARKS for each that is done, and computes nothing: several such processes work ahead of the
one that measures.
"""

import gc
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_settings import SETTINGS, TINY_SETTINGS, Setting
from planloom.blocks import BlockGraph, find_blocks
from planloom.capture import batch_spec, capture, load_model, tensors_of
from planloom.cluster import load_cluster
from planloom.cost import Prices, run_fingerprint
from planloom.cost.keys import OVERLAP_COMPUTE_KEY, run_key
from planloom.execute import LocalRun, compute_given
from planloom.execute.compiled import CompiledRuns, prepare_runs
from planloom.execute.silent import SilentWire
from planloom.graph import RANDOM_STATE
from planloom.plan import named_plan, parse_named
from planloom.profile.runs import Measured, RunBench, measure_run
from planloom.program import Backward, Forward, Instruction, Program, Update, build_program
from planloom.simulate import simulate
from planloom.train.runtime import Runtime

RANK = 0
CLUSTER = "dgx-h200"
BUDGET_SECONDS = 0.3  # of measuring one run's forward and backward
NUM_WARM_UP, NUM_ROUNDS, STEPS_A_ROUND = 3, 5, 4


@dataclass(frozen=True, kw_only=True)
class Case:
    """A setting as a program, with what its batch and buffers look like (on `meta`)."""

    setting: Setting
    blocks: BlockGraph
    program: Program
    known: dict[str, Tensor]

    @property
    def fingerprints(self) -> dict[str, int]:
        """Fingerprint → the first run that has it."""
        found: dict[str, int] = {}
        for run in self.program.runs:
            found.setdefault(run_fingerprint(self.blocks, self.program, run), run.index)
        return found


def build_case(setting: Setting) -> Case:
    model, batch = load_model(setting.source)
    blocks = find_blocks(capture(model, batch))
    program = build_program(blocks, named_plan(blocks, parse_named(setting.plan), batch=batch_spec(batch)))
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    known = {**tensors_of(batch, model), **{name: held[name] for name in blocks.graph.buffers}}
    return Case(setting=setting, blocks=blocks, program=program, known=known)


def measure_case(
    setting: Setting, device: torch.device, known: Mapping[str, float], runs: CompiledRuns | None
) -> tuple[dict[str, Any], Measured]:
    """What was predicted and what was measured, and the new figures of runs."""
    started = time.perf_counter()
    if device.type == "cpu":
        torch.set_num_threads(1)
    case = build_case(setting)
    _warm_up(device)
    _collect(device)
    baseline_bytes = _allocated(device)
    model, batch = load_model(setting.source, device=str(device))
    inputs = tensors_of(batch, model)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    buffers = {name: held[name].detach() for name in case.blocks.graph.buffers}
    built = time.perf_counter()
    measured = _profile(case, {**inputs, **buffers}, device, known, runs)
    profiled = time.perf_counter()
    figures = {**known, **{key: value for key, (value, _) in measured.items()}}
    predicted, modelled = _predicted(case, figures), _predicted(case, {})
    parameters = {name: held[name] for name in case.blocks.graph.parameters}
    make_local = runs.compile if runs is not None else _as_it_is
    runtime = Runtime(
        case.blocks, case.program, RANK, parameters, buffers, _NoUpdate, SilentWire(RANK), make_local=make_local
    )
    del model, batch, held, parameters, buffers
    _collect(device)
    seconds, spread = _step_seconds(runtime, inputs, device)
    peak_bytes = _peak_bytes(runtime, inputs, device, baseline_bytes)
    result = {
        "setting": setting.name,
        "num_runs": len(case.program.runs),
        "num_distinct_runs": len(case.fingerprints),
        "num_measured_runs": len({key.split("/")[1] for key in measured}),
        "measured_seconds": seconds,
        "measured_spread": spread,
        "measured_bytes": peak_bytes,
        "host_seconds": _host_seconds(case, figures),
        "predicted_seconds": predicted[0],
        "predicted_bytes": predicted[1],
        "modelled_seconds": modelled[0],
        "modelled_bytes": modelled[1],
        "build_seconds": built - started,
        "profile_seconds": profiled - built,
        "whole_seconds": time.perf_counter() - started,
    }
    return result, measured


def _profile(
    case: Case,
    known_tensors: Mapping[str, Tensor],
    device: torch.device,
    known: Mapping[str, float],
    runs: CompiledRuns | None,
) -> Measured:
    """Figures of every distinct run that has none."""
    state = {RANDOM_STATE: torch.tensor([0, 0], device=device)} if case.blocks.graph.random else {}
    given = compute_given(case.blocks.graph, {**known_tensors, **state}, device)
    make_local = runs.compile if runs is not None else _as_it_is
    measured: Measured = {}
    for fingerprint, index in case.fingerprints.items():
        if f"run/{fingerprint}/forward" not in known:
            bench = RunBench(case.blocks, case.program, case.program.runs[index], given, device, make_local)
            measured.update(measure_run(bench, fingerprint, budget_seconds=BUDGET_SECONDS))
            del bench
            _collect(device)
    return measured


def _as_it_is(local: LocalRun) -> LocalRun:
    return local


def _predicted(case: Case, figures: Mapping[str, float]) -> tuple[float, int]:
    """Seconds of computation and the peak of memory, as the simulator sees them, of a step without its update.

    The host starts a run while the GPU is still at others: what takes longer over the whole step counts, the sum of
    what the GPU takes or the sum of what the host takes to start it.
    """
    measured = {key: value for key, value in figures.items() if not key.endswith("_host")}
    measured[OVERLAP_COMPUTE_KEY] = 1.0  # nothing is sent, so nothing is slowed down by it
    prices = Prices(blocks=case.blocks, cluster=load_cluster(CLUSTER), measured=measured, fused=True)
    timeline = simulate(_without_update(case.program), prices)
    assert timeline.summary is not None
    role = next(role for role in timeline.summary.memory if RANK in role.devices)
    seconds = max(timeline.busy_seconds(role.devices[0], "compute"), _host_seconds(case, figures))
    return seconds, role.peak_bytes - role.parts.get("optimizer", 0)


def _host_seconds(case: Case, figures: Mapping[str, float]) -> float:
    """The seconds that the host takes to start all runs of a step; zero where that is not measured."""
    fingerprints = [run_fingerprint(case.blocks, case.program, run) for run in case.program.runs]
    stage, total = case.program.stages[case.program.stage_of(RANK)], 0.0
    for call in stage.calls:
        for instruction in stage.bodies[call.body]:
            match instruction:
                case Forward(run=run):
                    total += figures.get(run_key(fingerprints[run], "forward_host"), 0.0)
                case Backward(run=run):
                    total += figures.get(run_key(fingerprints[run], "backward_host"), 0.0)
    return total


def _without_update(program: Program) -> Program:
    def kept(body: tuple[Instruction, ...]) -> tuple[Instruction, ...]:
        return tuple(instruction for instruction in body if not isinstance(instruction, Update))

    stages = [
        replace(stage, bodies={name: kept(body) for name, body in stage.bodies.items()}) for stage in program.stages
    ]
    return replace(program, stages=tuple(stages))


class _NoUpdate(torch.optim.Optimizer):
    """An optimizer that leaves parameters as they are."""

    def __init__(self, parameters: list[Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""


def _step_seconds(runtime: Runtime, inputs: Mapping[str, Tensor], device: torch.device) -> tuple[float, float]:
    """Median and spread of the seconds of a step, over rounds of several steps in a row, as training has them."""
    num_steps = STEPS_A_ROUND if device.type == "cuda" else 1
    for _ in range(NUM_WARM_UP):
        runtime.step(inputs)
    rounds = []
    for _ in range(NUM_ROUNDS):
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(num_steps):
            runtime.step(inputs)
        _synchronize(device)
        rounds.append((time.perf_counter() - start) / num_steps)
    return median(rounds), max(rounds) - min(rounds)


def _peak_bytes(
    runtime: Runtime, inputs: Mapping[str, Tensor], device: torch.device, baseline_bytes: int
) -> int | None:
    """The most that was allocated during a step, above what was before the model was built; only on CUDA."""
    if device.type != "cuda":
        return None
    _collect(device)
    torch.cuda.reset_peak_memory_stats(device)
    runtime.step(inputs)
    _synchronize(device)
    return torch.cuda.max_memory_allocated(device) - baseline_bytes


def _warm_up(device: torch.device) -> None:
    """Products, so that the workspaces of cuBLAS are there before the baseline of memory is read."""
    matrix = torch.randn(1024, 1024, dtype=torch.bfloat16, device=device)
    for _ in range(2):
        torch.addmm(matrix[0], matrix, matrix) @ matrix


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _collect(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def prepare_settings(names: list[str], device: torch.device, marks: Path) -> None:
    """Compile the runs of settings ahead, one after the other; each leaves a mark."""
    settings = {setting.name: setting for setting in (*SETTINGS, *TINY_SETTINGS)}
    for name in names:
        case = build_case(settings[name])
        prepare_runs(case.blocks, case.program, RANK, case.known, device, CompiledRuns())
        mark_of(marks, settings[name]).touch()


def mark_of(marks: Path, setting: Setting) -> Path:
    return marks / setting.name.replace(" ", "_").replace("=", "")


if __name__ == "__main__":
    prepare_settings(sys.argv[3:], torch.device(sys.argv[1]), Path(sys.argv[2]))
