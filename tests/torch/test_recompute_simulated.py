"""What recomputation and ZeRO-2 cost and save: simulated seconds, simulated bytes, and bytes that a step takes."""

from dataclasses import replace
from functools import cache
from math import prod

import pytest
import torch
from torch import Tensor, nn

from examples.models.gpt import GPT, GPTConfig, batch_for
from planloom.blocks import BlockGraph, find_blocks, find_segments
from planloom.capture import batch_spec, capture
from planloom.cluster import load_cluster
from planloom.cost import Prices
from planloom.cost.memory import run_memory
from planloom.execute.silent import SilentWire
from planloom.plan import Plan, named_plan, parse_named
from planloom.plan.orders import forward, input_gradient, weight_gradient
from planloom.profile.memory import measure_peak_bytes
from planloom.program import Forward, Program, Slot, build_program
from planloom.program.recompute import runs_with_backward
from planloom.simulate import RoleMemory, Summary, simulate
from planloom.train.runtime import Runtime
from tests.models import build
from tests.torch.fixed_prices import FixedPrices
from tests.zoo import SMALL

CONFIG = GPTConfig(num_layers=6, hidden=64, sequence=64, vocab=256)
BATCH = 16


@cache
def blocks_of(model: str) -> BlockGraph:
    built, batch = gpt() if model == "gpt" else build(model, torch.float32)
    return find_blocks(capture(built, batch))


def gpt() -> tuple[nn.Module, dict[str, Tensor]]:
    """Six layers whose activations are large beside the parameters."""
    torch.manual_seed(0)
    return GPT(CONFIG), batch_for(CONFIG, BATCH)


def plan_of(spec: str, *, everywhere: bool = False) -> Plan:
    plan = named_plan(blocks_of("gpt"), parse_named(spec), batch=batch_spec(gpt()[1]))
    return replace(plan, recompute=tuple(range(len(find_segments(blocks_of("gpt")))))) if everywhere else plan


def program_of(spec: str, *, everywhere: bool = False) -> Program:
    return build_program(blocks_of("gpt"), plan_of(spec, everywhere=everywhere))


def simulated(program: Program) -> Summary:
    prices = Prices(blocks=blocks_of("gpt"), cluster=load_cluster("two-by-two"))
    summary = simulate(program, prices).summary
    assert summary is not None
    return summary


# -- seconds


@pytest.mark.parametrize("num_micro", [1, 4])
def test_a_step_takes_one_more_forward_of_what_is_recomputed(num_micro: int) -> None:
    built = program_of(f"dp=2,micro={num_micro}", everywhere=True)
    again = sum(isinstance(i, Forward) and i.again for i in built.stages[0].bodies["backward"])
    assert again >= CONFIG.num_layers - 1
    seconds = simulate(built, FixedPrices(built, blocks_of("gpt"))).step_seconds
    assert seconds == pytest.approx(num_micro * (3.0 + again / len(built.runs)))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_micro", [2, 8])
def test_in_a_pipeline_the_first_recomputation_of_a_stage_hides_in_the_bubble(schedule: str, num_micro: int) -> None:
    """The last stage takes 1 + 1 + 2 a micro-batch; the first has one of its segments ready when that is over."""
    built = program_of(f"pp=2,micro={num_micro},{schedule}", everywhere=True)
    num_runs = [sum(run.stage == s for run in built.runs) for s in range(2)]
    for stage, count in zip(built.stages, num_runs, strict=True):
        again = sum(isinstance(i, Forward) and i.again for i in stage.bodies["backward"])
        assert again == count, "every run is recomputed"
    seconds = simulate(built, FixedPrices(built, blocks_of("gpt"))).step_seconds
    assert seconds == pytest.approx(1 + 4 * num_micro + 3 - 1 / num_runs[0])


def test_the_timeline_names_recomputations() -> None:
    built = program_of("pp=2,micro=2,1f1b,recompute")
    timeline = simulate(built, FixedPrices(built, blocks_of("gpt")))
    again = [event for event in timeline.events if event.name.startswith("Recompute ")]
    per_call = sum(isinstance(i, Forward) and i.again for stage in built.stages for i in stage.bodies["backward"])
    assert len(again) == 2 * per_call > 0


# -- bytes


@pytest.mark.parametrize("spec", ["dp=2", "tp=2,vocab", "tp=2,sequence,vocab", "dp=2,zero3", "pp=2,micro=8,gpipe"])
def test_recomputed_layers_need_less_memory_and_more_time(spec: str) -> None:
    kept, recomputed = simulated(program_of(spec)), simulated(program_of(f"{spec},recompute"))
    assert recomputed.peak_memory_bytes < 0.75 * kept.peak_memory_bytes
    assert kept.step_seconds < recomputed.step_seconds < 1.5 * kept.step_seconds


def test_what_is_kept_of_a_layer_is_what_enters_it() -> None:
    """Each layer more costs the residual stream and its norm, and not its activations."""
    held = BATCH * CONFIG.sequence * CONFIG.hidden * 4
    kept, recomputed = (simulated(program_of(spec)).memory[0].parts for spec in ("single", "single,recompute"))
    num_layers = len(plan_of("single,recompute").recompute)
    assert recomputed["activations"] <= kept["activations"] - (num_layers - 2) * 10 * held


def measured_rise_bytes(program: Program) -> int:
    """The most that a second step of the first device allocates above what is there before it; nothing is sent."""
    model, batch = gpt()
    parameters = dict(model.named_parameters())
    runtime = Runtime(blocks_of("gpt"), program, 0, parameters, {}, _sgd, SilentWire(0))
    runtime.step(batch)
    return measure_peak_bytes(lambda: runtime.step(batch), torch.device("cpu"))


def _sgd(tensors: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=0.01, foreach=False)


def simulated_rise_bytes(role: RoleMemory) -> int:
    return role.peak_bytes - role.parts["parameters"] - role.parts["optimizer"]


@pytest.mark.parametrize("spec", ["single", "micro=2", "micro=4"])
@pytest.mark.parametrize("recompute", ["", ",recompute"])
def test_simulated_memory_is_what_a_step_takes(spec: str, recompute: str) -> None:
    program = program_of(spec + recompute)
    (role,) = simulated(program).memory
    assert simulated_rise_bytes(role) == pytest.approx(measured_rise_bytes(program), rel=0.05)


def test_simulated_memory_of_a_split_backward_is_what_a_step_takes() -> None:
    """All weight-gradients at the end: what they need of four micro-batches is held until then."""
    calls = [phase(0, m) for m in range(4) for phase in (forward, input_gradient)]
    plan = replace(plan_of("micro=4"), orders=((*calls, *(weight_gradient(0, m) for m in range(4))),))
    program = build_program(blocks_of("gpt"), plan)
    (role,) = simulated(program).memory
    assert simulated_rise_bytes(role) == pytest.approx(measured_rise_bytes(program), rel=0.05)
    assert measured_rise_bytes(program) > 2 * measured_rise_bytes(program_of("micro=4"))


def test_a_step_really_takes_less() -> None:
    kept, recomputed = (measured_rise_bytes(program_of(spec)) for spec in ("single", "single,recompute"))
    assert recomputed < 0.5 * kept


def test_zero2_keeps_no_whole_gradients() -> None:
    """Beside parameters that are large, what differs are the sums of gradients: whole, in shards, in shards."""
    config = GPTConfig(num_layers=6, hidden=128, sequence=4, vocab=64)
    batch = batch_for(config, 16)
    blocks = find_blocks(capture(GPT(config), batch))
    prices = Prices(blocks=blocks, cluster=load_cluster("two-by-two"))
    peaks = {}
    for kind in ("zero1", "zero2", "zero3"):
        plan = named_plan(blocks, parse_named(f"dp=4,{kind},micro=4"), batch=batch_spec(batch))
        summary = simulate(build_program(blocks, plan), prices).summary
        assert summary is not None
        peaks[kind] = summary.peak_memory_bytes
    whole = sum(prod(blocks.graph.tensors[name].shape) * 4 for name in blocks.graph.parameters)
    assert peaks["zero2"] < peaks["zero1"] - 0.6 * whole
    assert peaks["zero3"] < peaks["zero2"]


# -- which runs need not be recomputed


@pytest.mark.parametrize(
    "model",
    ["gpt", "llama", *(pytest.param(f"zoo/{name}", marks=pytest.mark.slow) for name in SMALL)],
)
@pytest.mark.parametrize("spec", ["single", "tp=2", "tp=2,sequence"])
def test_what_saves_in_the_forward_of_a_recomputed_segment_keeps_little(model: str, spec: str) -> None:
    """Nothing of its own but statistics of rows, no input of the segment, no output but what leaves it."""
    blocks = blocks_of(model)
    batch = batch_spec((gpt() if model == "gpt" else build(model, torch.float32))[1])
    plan = named_plan(blocks, parse_named(spec), batch=batch)
    program = build_program(blocks, replace(plan, recompute=tuple(range(len(find_segments(blocks))))))
    saved = [i.run for i in program.stages[0].bodies["forward"] if isinstance(i, Forward) and i.saves]
    for run in (program.runs[index] for index in saved):
        memory = run_memory(blocks, program, run, fused=False)
        largest = max(blocks.graph.tensors[slot.tensor].item_bytes * _num_elements(slot) for slot in run.outputs)
        assert memory.saved_bytes <= largest / 4
        is_activation = [slot.tensor not in blocks.graph.parameters for slot in run.inputs]
        assert not any(kept and own for kept, own in zip(memory.saved_inputs, is_activation, strict=True))
    assert set(saved) <= runs_with_backward(blocks.graph, program.runs)


def _num_elements(slot: Slot) -> int:
    return prod(slot.layout.local_sizes(slot.sizes))
