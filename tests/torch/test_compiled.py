"""Compiled runs compute what runs one operator at a time compute; equal layers are compiled once.

The quick tests trace and cut forward and backward as torch's compiler does, and run the parts with eager kernels; the
slow ones generate code.
"""

from collections.abc import Callable, Sequence
from math import prod
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import lookup_backend  # tried with torch 2.11 and 2.13

from examples.models.gpt import GPT, GPTConfig, batch_for
from planloom.blocks import find_blocks
from planloom.capture import batch_spec, capture
from planloom.errors import TrainingError
from planloom.execute import LocalRun, RunVjp, compute_given
from planloom.execute.compiled import CompiledRuns, placed_dropout, prepare_runs
from planloom.execute.random import dropout
from planloom.execute.silent import SilentWire
from planloom.graph import RANDOM_STATE
from planloom.plan import named_plan, parse_named
from planloom.program import Program, build_program
from planloom.train.runtime import Runtime
from tests.dist.cases import captured
from tests.emulation import Emulation
from tests.models import build, lifted

aot_eager: Callable[..., Any] = lookup_backend("aot_eager")
# torch's own use of its own function (seen with torch 2.13.0).
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


def program_of(model: str, plan: str, dtype: torch.dtype = torch.float64) -> tuple[Any, Program, dict[str, Tensor]]:
    blocks, batch = captured(model, dtype), build(model, dtype)[1]
    return blocks, build_program(blocks, named_plan(blocks, parse_named(plan), batch=batch_spec(batch))), batch


def compiled_runs(blocks: Any, program: Program, runs: CompiledRuns) -> dict[tuple[int, int], Any]:
    """(device, run) → the run compiled, for all devices."""
    return {
        (device, run.index): runs.compile(
            LocalRun(blocks, run, stage.mesh.coordinates(device), num_micro=program.num_micro_batches)
        )
        for run in program.runs
        for stage in (program.stages[run.stage],)
        for device in stage.mesh.devices
    }


def require_equal(model: str, plan: str, dtype: torch.dtype, runs: CompiledRuns, bound: float) -> Program:
    """Two steps on all devices of a plan, compiled and not: losses, gradients and parameters."""
    blocks, program, batch = program_of(model, plan, dtype)
    built = build(model, dtype)[0]
    parameters = {name: parameter.detach() for name, parameter in built.named_parameters()}
    buffers = {name: b for name, b in built.named_buffers() if name in blocks.graph.buffers}
    if blocks.graph.random:
        buffers[RANDOM_STATE] = torch.tensor([3, 1])
    eager = Emulation(blocks, program, parameters, buffers, 0.05)
    compiled = Emulation(blocks, program, parameters, buffers, 0.05, compiled_runs(blocks, program, runs))
    for _ in range(2):
        for emulation in (eager, compiled):
            emulation.run(batch)
        expected, found = eager.results(), compiled.results()
        assert expected.keys() == found.keys()
        for key, kept in expected.items():
            value, other = kept.double(), found[key].double()
            scale = max(float(value.abs().max()), 1e-3)
            assert float((other - value).abs().max()) <= bound * scale, key
    return program


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("gpt", "micro=2"),
        ("gpt", "tp=2,vocab"),
        ("llama", "dp=2,zero3"),
        ("llama", "pp=2,micro=2"),
        ("gpt-deep", "dp=2,zero3,recompute"),
    ],
)
def test_compiled_equals_eager(model: str, plan: str) -> None:
    runs = CompiledRuns(aot_eager)
    require_equal(model, plan, torch.float64, runs, 1e-10)
    assert runs.num_compilations == runs.num_structures
    assert runs.eager_runs() == ()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("plan", ["single", "tp=2,vocab", "dp=2,zero3"])
def test_generated_code_equals_eager(model: str, plan: str) -> None:
    require_equal(model, plan, torch.float32, CompiledRuns(), 2e-5)


@pytest.mark.slow
def test_generated_code_draws_the_same_dropout() -> None:
    runs = CompiledRuns()
    program = require_equal("zoo/gpt2+dropout", "micro=2", torch.float32, runs, 2e-5)
    assert runs.num_compilations <= len(program.runs)


def test_dropout_by_place_draws_the_same_numbers() -> None:
    random, state = Random(0), torch.tensor([11, 4])
    for number in range(5):
        sizes = [random.choice([2, 4, 6]) for _ in range(3)]
        box = tuple((start := random.randrange(size), random.randrange(start + 1, size + 1)) for size in sizes)
        lengths = [stop - start for start, stop in box]
        x = torch.ones(lengths[0], prod(lengths[1:]))
        place = torch.tensor([number, *(start for start, _ in box)])
        found = placed_dropout(x, 0.4, place, state, sizes=sizes, lengths=lengths)
        assert torch.equal(found, dropout(x, 0.4, number, state, sizes=sizes, box=box))


def test_equal_layers_and_all_micro_batches_are_compiled_once() -> None:
    """Dropouts differ in their number and, between micro-batches, in their place; neither compiles anything again."""
    config = GPTConfig(num_layers=4, dropout=0.2)
    batch = batch_for(config, 4)
    blocks = find_blocks(capture(GPT(config), batch))
    program = build_program(blocks, named_plan(blocks, parse_named("micro=2"), batch=batch_spec(batch)))
    calls: list[int] = []

    def count(module: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
        calls.append(len(examples))
        return module

    runs = CompiledRuns(count)
    local = compiled_runs(blocks, program, runs)
    given = compute_given(blocks.graph, {**batch, RANDOM_STATE: torch.tensor([3, 1])}, torch.device("cpu"))
    for run in program.runs:
        inputs = [torch.randn(_local_shape(blocks, slot)) for slot in run.inputs]
        for micro in range(2):
            plain = LocalRun(blocks, run, program.stages[0].mesh.coordinates(0), num_micro=2)
            expected = RunVjp(plain, inputs, given, micro).take_outputs()
            found = RunVjp(local[0, run.index], inputs, given, micro).take_outputs()
            for a, b in zip(expected, found, strict=True):
                assert torch.equal(a, b)
    assert len(calls) == runs.num_compilations == runs.num_structures < len(program.runs)


def _sgd(tensors: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=0.01)


def _local_shape(blocks: Any, slot: Any) -> list[int]:
    lengths = iter(slot.layout.local_sizes(slot.sizes))
    return [prod(next(lengths) for _ in dim) for dim in blocks.graph.tensors[slot.tensor].factors]


def test_rows_of_experts_stay_eager_and_say_why() -> None:
    runs = CompiledRuns(aot_eager)
    program = require_equal("zoo/mixtral", "single", torch.float64, runs, 1e-10)
    eager = runs.eager_runs()
    assert 0 < len(eager) <= len(program.runs)
    assert all("rows of experts" in run.reason and run.num_operators > 0 for run in eager)
    assert any("grouped_linear" in name for run in eager for name in run.operators)
    assert runs.num_compilations > 0


def test_rows_that_come_from_another_run_stay_eager() -> None:
    runs = CompiledRuns(aot_eager)
    require_equal("zoo/mixtral", "dp=2,experts", torch.float64, runs, 1e-10)
    assert any("silu" in name for run in runs.eager_runs() for name in run.operators)


def test_runs_are_prepared_with_fake_tensors() -> None:
    """What a run needs is compiled by shapes alone; afterwards the run compiles nothing."""
    blocks, program, batch = program_of("gpt", "tp=2,micro=2")
    runs = CompiledRuns(aot_eager)
    prepare_runs(blocks, program, 0, batch, torch.device("cpu"), runs)
    prepared = runs.num_compilations
    parameters = dict(build("gpt", torch.float64)[0].named_parameters())
    runtime = Runtime(blocks, program, 0, parameters, {}, _sgd, SilentWire(0), make_local=runs.compile)
    assert bool(torch.isfinite(runtime.step(batch)))
    assert runs.num_compilations == prepared == runs.num_structures


def test_what_cannot_be_compiled_is_an_error_that_says_so() -> None:
    def refuse(module: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
        raise ValueError("no such operator")

    with pytest.raises(TrainingError, match=r"a run cannot be compiled(.|\n)*no such operator(.|\n)*compile=True"):
        require_equal("gpt", "single", torch.float64, CompiledRuns(refuse), 0.0)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("llama", "tp=2,sequence"),
        ("gpt", "tp=2,tp2=2,vocab"),
        ("llama", "dp=2,zero3,micro=2"),
        ("gpt", "pp=2,dp=2,micro=2"),
        ("zoo/mixtral", "dp=2,experts"),
    ],
)
def test_one_rank_runs_alone_on_a_silent_wire(model: str, plan: str) -> None:
    blocks, program, batch = program_of(model, plan)
    with lifted(torch.float64):
        built = build(model, torch.float64)[0]
    held = {**dict(built.named_parameters()), **dict(built.named_buffers())}
    known = {name: held[name] for name in blocks.graph.parameters}
    fixed = {name: held[name].detach() for name in blocks.graph.buffers}
    for device in program.devices:
        runtime = Runtime(blocks, program, device, known, fixed, _sgd, SilentWire(device))
        for _ in range(2):
            assert bool(torch.isfinite(runtime.step(batch)).all())
