"""What context parallel costs and saves: simulated bytes and bytes that a step takes, seconds, and what is hidden."""

from functools import cache
from math import prod

import pytest
import torch
from torch import Tensor, nn

from planloom.blocks import BlockGraph, find_blocks
from planloom.capture import batch_spec, capture
from planloom.cluster import load_cluster
from planloom.cost import Prices
from planloom.cost.kernels import Attention
from planloom.cost.keys import run_fingerprint
from planloom.cost.rings import turn_kernels
from planloom.execute import compute_given
from planloom.execute.silent import SilentWire
from planloom.plan.families import parse_recipe
from planloom.profile.memory import measure_peak_bytes
from planloom.profile.rings import bench_of
from planloom.profile.runs import measure_run
from planloom.program import Program, build_program, collectives_in, run_operations
from planloom.simulate import Timeline, simulate
from planloom.simulate.payload import payload_bytes
from planloom.train.runtime import Runtime

SEQUENCE, BATCH, HIDDEN = 256, 4, 64


@cache
def built() -> tuple[nn.Module, dict[str, Tensor]]:
    """Attention is most of it: long sequences, few features, grouped queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )
    tokens = torch.randint(128, (BATCH, SEQUENCE))
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens.clone()}


@cache
def blocks() -> BlockGraph:
    return find_blocks(capture(*built()))


def program_of(recipe: str) -> Program:
    plan = parse_recipe(recipe).draft(blocks(), batch=batch_spec(built()[1])).plan(recipe)
    return build_program(blocks(), plan)


def simulated(program: Program, cluster: str = "two-by-two") -> Timeline:
    return simulate(program, Prices(blocks=blocks(), cluster=load_cluster(cluster)))


def peak_bytes(program: Program) -> tuple[int, int]:
    """Above parameters and optimizer: simulated, and what the second step of the last device of the ring takes."""
    summary = simulated(program).summary
    assert summary is not None
    (role,) = summary.memory
    model, batch = built()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in blocks().graph.buffers}
    device = program.stages[0].mesh.devices[-1]
    parameters = dict(model.named_parameters())
    runtime = Runtime(blocks(), program, device, parameters, buffers, _sgd, SilentWire(device))
    runtime.step(batch)
    measured = measure_peak_bytes(lambda: runtime.step(batch), torch.device("cpu"))
    return role.peak_bytes - role.parts["parameters"] - role.parts["optimizer"], measured


def _sgd(tensors: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=0.01, foreach=False)


@pytest.mark.parametrize("options", ["cp=2", "cp=4", "cp=2,micro=2", "cp=2,recompute", "cp=2,tp=2"])
def test_simulated_memory_is_what_a_step_takes(options: str) -> None:
    found, measured = peak_bytes(program_of(f"context:{options}"))
    assert found == pytest.approx(measured, rel=0.05)


def test_context_parallel_divides_activations() -> None:
    whole, half, quarter = (
        simulated(program_of(f"context:cp={count}" if count > 1 else "megatron:tp=1")).summary for count in (1, 2, 4)
    )
    assert whole is not None
    assert half is not None
    assert quarter is not None
    activations = [summary.memory[0].parts["activations"] for summary in (whole, half, quarter)]
    assert activations[1] < 0.6 * activations[0]
    assert activations[2] < 0.6 * activations[1]


def test_a_turn_is_priced_as_attention_of_its_piece() -> None:
    """Not as nothing, nor as the whole; a later turn, where some device sees all keys, not as a causal one."""
    program = program_of("context:cp=4")
    prices = Prices(blocks=blocks(), cluster=load_cluster("dgx-h100"))
    turns = [run for run in program.runs if run.turn is not None and not run.turn.opens][:4]
    attention = blocks().blocks[turns[0].blocks[0].block]
    whole = program_of("megatron:tp=1")
    run = next(run for run in whole.runs if any(part.block == attention.index for part in run.blocks))
    for phase in ("forward", "backward"):
        seconds = [prices.run(program, turn, phase).seconds for turn in turns]  # type: ignore[arg-type]
        assert all(0 < each < prices.run(whole, run, phase).seconds for each in seconds)  # type: ignore[arg-type]
        operations = [
            turn_kernels(blocks(), turn, run_operations(blocks(), turn, num_micro=1), phase) for turn in turns
        ]  # type: ignore[arg-type]
        shapes = [next(k.shape for k in kernels if isinstance(k, Attention)) for kernels in operations]
        assert [shape.is_causal for shape in shapes] == [True, False, False, False]
        assert {(shape.num_queries, shape.num_keys) for shape in shapes} == {(SEQUENCE // 4, SEQUENCE // 4)}


def test_keys_are_sent_while_a_turn_computes() -> None:
    program = program_of("context:cp=4")
    events = [event for event in simulated(program).events if event.device == 0]
    turns = [run.index for run in program.runs if run.turn is not None and 0 <= run.turn.number < 3]
    sent = [event for event in events if event.name == "rotate"]
    for index in turns:
        computed = next(event for event in events if event.name == f"Forward {index}")
        assert any(s.start_seconds <= computed.start_seconds < s.stop_seconds for s in sent)


def test_payload_counts_what_goes_round() -> None:
    program = program_of("context:cp=2")
    (stage,) = program.stages
    steps = [c for call in stage.calls for i in stage.bodies[call.body] for c in collectives_in(i)]
    rotated = [collective for collective in steps if collective.steps[0].kind == "rotate"]
    keys = BATCH * 2 * (SEQUENCE // 2) * (HIDDEN // 4) * 4
    assert payload_bytes(blocks().graph, program, 0, library="gloo")["cp"] > len(rotated) * keys > 0
    assert {prod(c.sizes) * 4 for c in rotated} == {keys}


def test_turns_are_measured() -> None:
    """Every turn that is not like another, through the code that trains."""
    program = program_of("context:cp=4")
    model, batch = built()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in blocks().graph.buffers}
    given = compute_given(blocks().graph, {**batch, **buffers}, torch.device("cpu"))
    runs = {run_fingerprint(blocks(), program, run): run for run in program.runs if run.turn is not None}
    assert len(runs) == 4  # opening, first, later, last
    known: dict[str, float] = {}
    for fingerprint, run in runs.items():
        bench = bench_of(blocks(), program, run, given, torch.device("cpu"), lambda local: local)
        measured = measure_run(bench, fingerprint, budget_seconds=0.01)
        known.update((key, value) for key, (value, _) in measured.items())
    prices = Prices(blocks=blocks(), cluster=load_cluster("two-by-two"), measured=known)
    for run in program.runs:
        if run.turn is not None:
            assert prices.run(program, run, "forward").source == "measured"
            assert prices.run(program, run, "backward").seconds > 0
