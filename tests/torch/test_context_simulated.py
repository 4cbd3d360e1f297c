"""What context parallel costs and saves: simulated bytes and bytes that a step takes, seconds, and what is hidden."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from planloom.blocks import BlockGraph, find_blocks
from planloom.capture import batch_spec, capture
from planloom.cluster import load_cluster
from planloom.cost import Prices
from planloom.execute.silent import SilentWire
from planloom.plan.families import parse_recipe
from planloom.profile.memory import measure_peak_bytes
from planloom.program import Program, build_program, collectives_in
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
