"""Recomputed segments: equal to one device on every kind of plan, to the bit what is kept otherwise; ZeRO-2."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from planloom.blocks import BlockGraph, find_segments
from planloom.capture import batch_spec, tensors_of
from planloom.graph import RANDOM_STATE
from planloom.plan import Plan, draft, named_plan, parse_named
from planloom.program import Backward, Forward, Program, build_program, collectives_in, verify_program
from tests.dist.cases import captured
from tests.emulation import Emulation
from tests.models import build
from tests.torch.equality import require_equal_to_one_device
from tests.zoo import SMALL

LAYERS = [
    "dp=2",
    "tp=2",
    "tp=2,sequence,vocab",
    "tp=2,tp2=2,vocab",
    "dp=2,zero1",
    "dp=2,zero2,micro=2",
    "dp=2,zero3,micro=2",
    "dp=2,tp=2,vocab,zero2,micro=2",
    "dp=2,tp=2,zero3",
    "micro=4",
    "pp=2,micro=4,1f1b",
    "pp=2,micro=4,gpipe",
    "pp=2,tp=2,sequence,vocab,micro=2,1f1b",
    "pp=2,dp=2,zero3,micro=4,1f1b",
    "pp=2,dp=2,zero2,micro=2,gpipe",
    "pp=2,dp=2,zero1,micro=2,1f1b",
]
OTHERS = ["tp=2,sequence,vocab", "dp=2,zero3"]
IN_TIME = ["dp=2,zero3,micro=2", "pp=2,tp=2,micro=2,1f1b"]
EXPERTS = ["dp=2,experts", "dp=2,tp=2,experts,vocab", "dp=2,experts,zero2,micro=2", "dp=4,experts,zero3"]
MIXING = ("clip", "gshard_moe")
"""Models that compare the samples of a batch with each other: they have no micro-batches."""
WITH_EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
FAST = {
    ("gpt2", "tp=2,sequence,vocab"),
    ("mixtral", "dp=2,experts"),
    ("mixtral", "dp=2,experts,zero2,micro=2"),
    ("t5", "pp=2,tp=2,micro=2,1f1b"),
    ("vit", "dp=2,zero3,micro=2"),
}


def plan_of(model: str, spec: str) -> Plan:
    blocks = captured(model, torch.float64)
    return named_plan(blocks, parse_named(spec), batch=batch_spec(build(model, torch.float64)[1]))


def everything(blocks: BlockGraph) -> tuple[int, ...]:
    return tuple(range(len(find_segments(blocks))))


def forwards(program: Program, *, again: bool) -> list[Forward]:
    return [
        instruction
        for stage in program.stages
        for body in ("forward", "backward")
        for instruction in stage.bodies[body]
        if isinstance(instruction, Forward) and instruction.again == again
    ]


@pytest.mark.parametrize(
    ("model", "spec"),
    [
        pytest.param(model, spec, marks=() if i % 2 == (model == "gpt-deep") else pytest.mark.slow)
        for model in ("gpt-deep", "llama-deep")
        for i, spec in enumerate(LAYERS)
    ],
)
def test_layers_are_recomputed_and_equal_to_one_device(model: str, spec: str) -> None:
    program = require_equal_to_one_device(model, plan_of(model, f"{spec},recompute"))
    again = [forward.run for forward in forwards(program, again=True)]
    assert again
    assert len(set(again)) == len(again), "each run once"
    saving = [f.run for f in (*forwards(program, again=False), *forwards(program, again=True)) if f.saves]
    taken = [i.run for stage in program.stages for i in stage.bodies["backward"] if isinstance(i, Backward)]
    assert sorted(saving) == sorted(taken), "what is saved is what a backward takes, once"


def plans_of(model: str) -> list[str]:
    in_time, of_experts = IN_TIME if model not in MIXING else [], EXPERTS if model in WITH_EXPERTS else []
    return [*OTHERS, *in_time, *of_experts]


@pytest.mark.parametrize(
    ("model", "spec"),
    [
        pytest.param(model, spec, marks=() if (model, spec) in FAST else pytest.mark.slow)
        for model in SMALL
        for spec in plans_of(model)
    ],
)
def test_every_segment_of_other_models(model: str, spec: str) -> None:
    plan = plan_of(f"zoo/{model}", spec)
    everywhere = replace(plan, recompute=everything(captured(f"zoo/{model}", torch.float64)))
    require_equal_to_the_bit(f"zoo/{model}", plan, everywhere)


@pytest.mark.parametrize("spec", ["dp=2", "tp=2,sequence,vocab", "pp=2,dp=2,zero3,micro=2,1f1b"])
@pytest.mark.parametrize("model", ["gpt2", pytest.param("bert", marks=pytest.mark.slow)])
def test_dropout_is_drawn_again(model: str, spec: str) -> None:
    name = f"zoo/{model}+dropout"
    blocks, plan = captured(name, torch.float64), plan_of(name, spec)
    assert blocks.graph.random
    require_equal_to_the_bit(name, plan, replace(plan, recompute=everything(blocks)))


def require_equal_to_the_bit(name: str, first: Plan, second: Plan) -> None:
    """Loss, gradients and new parameters of all devices; the first plan is one that other tests hold to one device."""
    results = [emulated(name, plan) for plan in (first, second)]
    assert results[0].keys() == results[1].keys()
    for key, value in results[0].items():
        assert torch.equal(value, results[1][key]), key


def emulated(name: str, plan: Plan) -> dict[tuple[str, int, str], Tensor]:
    model, batch = build(name, torch.float64)
    blocks = captured(name, torch.float64)
    program = build_program(blocks, plan)
    verify_program(blocks, program)
    held = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    parameters = {n: held[n].detach() for n in blocks.graph.parameters}
    emulation = Emulation(blocks, program, parameters, {n: held[n].detach() for n in blocks.graph.buffers}, 0.05)
    tensors = tensors_of(batch)
    if blocks.graph.random:
        tensors[RANDOM_STATE] = torch.tensor([3, 1])
    emulation.run(tensors)
    kinds = ("loss", "gradient", "parameter")
    return {key: value for key, value in emulation.results().items() if key[0] in kinds}


@cache
def programs(model: str, spec: str) -> tuple[Program, Program]:
    """Without and with recomputation of layers."""
    blocks = captured(model, torch.float64)
    return build_program(blocks, plan_of(model, spec)), build_program(blocks, plan_of(model, f"{spec},recompute"))


@pytest.mark.parametrize("model", ["gpt-deep", "llama-deep"])
def test_the_reduction_at_the_end_of_a_layer_is_not_repeated(model: str) -> None:
    """Of two all-reduces a layer, one is needed again; what comes behind the other only leaves the layer."""
    kept, recomputed = programs(model, "tp=2")
    num_layers = len(plan_of(model, "tp=2,recompute").recompute)
    assert num_layers >= 2
    bodies = ("enter", "forward", "backward", "exit")
    extra = [num_collectives_in(recomputed, body) - num_collectives_in(kept, body) for body in bodies]
    assert extra == [0, 0, num_layers, 0]


def num_collectives_in(program: Program, body: str) -> int:
    return sum(len(collectives_in(i)) for stage in program.stages for i in stage.bodies[body])


def test_parameters_are_gathered_once_for_recomputation_and_backward() -> None:
    """As FSDP does with checkpointing: twice a layer, not three times."""
    kept, recomputed = programs("gpt-deep", "dp=2,zero3,micro=2")
    assert num_collectives_in(recomputed, "backward") == num_collectives_in(kept, "backward")


def test_the_first_recomputation_of_a_stage_does_not_wait_for_cotangents() -> None:
    blocks = captured("gpt-deep", torch.float64)
    plan = replace(plan_of("gpt-deep", "pp=2,micro=2,1f1b"), recompute=everything(blocks))
    stage = build_program(blocks, plan).stages[0]
    received = {receive.target for receive in stage.bodies["backward receives"]}  # type: ignore[union-attr]
    body = stage.bodies["backward"]
    first = next(i for i, found in enumerate(body) if isinstance(found, Forward))
    waits = [i for i, found in enumerate(body) if getattr(found, "buffer", None) in received]
    assert first < min(waits)


def test_a_pattern_chooses_segments_all_of_whose_blocks_match() -> None:
    blocks = captured("gpt-deep", torch.float64)
    named = plan_of("gpt-deep", "dp=2,recompute")
    written = draft(blocks, named.meshes[0], batch=named.batch).split("*", batch="dp")
    assert written.recompute("layers.*").plan("p").recompute == named.recompute
    require_equal_to_one_device("gpt-deep", written.recompute("layers.*").plan("p"))
    assert written.recompute("*").plan("p").recompute == everything(blocks)
    assert written.recompute("layers.[01]*").plan("p").recompute == named.recompute[:1]
    both = written.recompute("layers.[01]*").recompute("layers.*").plan("p")
    assert both.recompute == named.recompute


@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize(
    "spec",
    [
        "dp=2,zero2",
        "dp=2,zero2,micro=2",
        "dp=2,tp=2,vocab,zero2,micro=2",
        pytest.param("pp=2,dp=2,zero2,micro=4,1f1b", marks=pytest.mark.slow),
        pytest.param("dp=4,zero2,micro=2", marks=pytest.mark.slow),
    ],
)
def test_zero2_is_equal_to_one_device(model: str, spec: str) -> None:
    require_equal_to_one_device(model, plan_of(model, spec))
