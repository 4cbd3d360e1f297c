"""Models nobody here wrote: captured, interpreted as eager runs them, and split along every dim of every block."""

from dataclasses import replace
from functools import cache
from itertools import combinations

import msgspec
import pytest
import torch
from torch import Tensor, nn

from planloom.blocks import BlockGraph, find_blocks, find_segments
from planloom.blocks.segments import block_fingerprint
from planloom.capture import batch_spec, capture, load_model, tensors_of
from planloom.capture.rules.custom import rule_source
from planloom.errors import VerificationError
from planloom.execute import Interpreter, local_slice
from planloom.graph import RANDOM_STATE, Graph
from planloom.plan import named_plan, parse_named
from planloom.program import Collective, build_program, verify_program
from tests.emulation import Emulation
from tests.models import build, lifted, loss_of
from tests.torch.captured import Captured, of
from tests.torch.split_execution import Execution, even_dims
from tests.zoo import SMALL

FAST = ("gpt2", "mixtral", "vit")
ALL = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SMALL]
EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
MIXING = ("clip", "gshard_moe")
"""Models that compare the samples of a batch with each other: they have no micro-batches."""


@cache
def in_float32(name: str) -> tuple[nn.Module, dict[str, Tensor], Graph]:
    model, batch = build(f"zoo/{name}", torch.float32)
    return model, batch, capture(model, batch)


@cache
def in_float64(name: str) -> tuple[Captured, dict[str, Tensor], Tensor]:
    """The captured model, and eager's gradients and loss."""
    model, batch = build(f"zoo/{name}", torch.float64)
    with lifted(torch.float64):
        graph = capture(model, batch)
        loss = loss_of(model, batch)
        loss.backward()
    tensors = tensors_of(batch)
    if graph.random:
        tensors[RANDOM_STATE] = torch.tensor([3, 1])
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return of(model, tensors, find_blocks(graph)), gradients, loss.detach()


@pytest.mark.parametrize("name", ALL)
def test_the_interpreter_computes_what_eager_computes(name: str) -> None:
    model, batch, graph = in_float32(name)
    expected = loss_of(model, batch)
    expected.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    held = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    interpreter = Interpreter(graph, {n: held[n].detach() for n in graph.buffers}, torch.device("cpu"))
    parameters = {n: held[n].detach().clone().requires_grad_() for n in graph.parameters}
    loss = interpreter(parameters, tensors_of(batch))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    largest = max(float(g.abs().max()) for g in gradients.values())
    found = {n: p.grad for n, p in parameters.items() if p.grad is not None}
    assert found.keys() == {n for n, g in gradients.items() if bool(g.any()) or n in found}
    for n, gradient in found.items():
        scale = max(float(gradients[n].abs().max()), 1e-4 * largest)
        assert float((gradient - gradients[n]).abs().max()) <= 1e-6 * scale, n
    if name not in (*EXPERTS, "gshard_moe", "evoformer", "mamba2"):  # their sums are made in another order
        assert all(torch.equal(gradient, gradients[n]) for n, gradient in found.items())


@pytest.mark.parametrize("name", ALL)
def test_graphs_are_written_and_read_without_loss(name: str) -> None:
    graph = in_float32(name)[2]
    assert msgspec.json.decode(msgspec.json.encode(graph), type=Graph) == graph


@pytest.mark.parametrize("name", ALL)
def test_every_block_can_be_split_along_every_dim(name: str) -> None:
    execution = Execution(in_float64(name)[0])
    different = {block_fingerprint(execution.blocks, block): block for block in execution.blocks.blocks}
    for block in different.values():
        for dim in even_dims(block):
            execution.require_free_split(block, [dim])


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_every_block_can_be_split_along_every_two_dims(name: str) -> None:
    execution = Execution(in_float64(name)[0])
    different = {block_fingerprint(execution.blocks, block): block for block in execution.blocks.blocks}
    for block in different.values():
        for pair in combinations(even_dims(block), 2):
            execution.require_free_split(block, pair)


PLANS = ["dp=2", "tp=2", "tp=2,sequence,vocab", "tp=2,tp2=2", "dp=2,tp=2,vocab,zero1"]
IN_TIME = ["dp=2,zero3,micro=2", "pp=2,tp=2,micro=2,1f1b"]
OF_EXPERTS = ["dp=2,experts", "dp=2,tp=2,experts,vocab", "dp=2,experts,zero1,micro=2", "dp=4,experts,zero3"]


def plans_of(name: str) -> list[str]:
    return [*PLANS, *([] if name in MIXING else IN_TIME), *(OF_EXPERTS if name in EXPERTS else [])]


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(name, plan, marks=() if name in FAST and i % 3 == 0 else pytest.mark.slow)
        for name in SMALL
        for i, plan in enumerate(plans_of(name))
    ],
)
def test_plans_are_proven_and_equal_to_one_device(name: str, plan: str) -> None:
    require_equal_to_eager(name, plan)


def require_equal_to_eager(name: str, spec: str) -> None:
    """Losses and gradients of all devices in one process, in float64."""
    model, gradients, loss = in_float64(name)
    blocks: BlockGraph = model.blocks
    plan = named_plan(blocks, parse_named(spec), batch=batch_spec(build(f"zoo/{name}", torch.float64)[1]))
    program = build_program(blocks, plan)
    verify_program(blocks, program)
    held = {**dict(model.model.named_buffers()), **model.parameters}
    parameters = {n: held[n].clone() for n in blocks.graph.parameters}
    emulation = Emulation(blocks, program, parameters, {n: held[n] for n in blocks.graph.buffers}, 0.05)
    emulation.run(dict(model.batch))
    results = emulation.results()
    largest = max(float(g.abs().max()) for g in gradients.values())
    for stage in program.stages:
        for device in stage.mesh.devices:
            assert float(results["loss", device, ""]) == pytest.approx(float(loss), rel=1e-11)
            for stored in stage.parameters:
                if ("gradient", device, stored.name) not in results:
                    assert not gradients.get(stored.name, torch.zeros(1)).any(), stored.name
                    continue
                box = stored.optimizer_layout.box(stored.sizes, stage.mesh.coordinates(device))
                whole = gradients[stored.name]
                expected = local_slice(whole, blocks.graph.tensors[stored.name].factors, box)
                found = results["gradient", device, stored.name].reshape(expected.shape)
                scale = max(float(whole.abs().max()), 1e-5 * largest)
                assert float((found - expected).abs().max()) <= 1e-10 * scale, (device, stored.name)


@pytest.mark.parametrize("name", ALL)
def test_every_operator_has_a_written_rule(name: str) -> None:
    graph = in_float32(name)[2]
    assert {rule_source(op.target) for op in graph.ops} <= {"written", "family"}
    assert all(op.rule is not None for op in graph.ops)


@pytest.mark.parametrize(
    "name",
    [
        "gpt2",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("t5-11b", "mbart-large", "mixtral-8x7b", "bert-large")),
    ],
)
def test_deeper_models_have_no_more_distinct_segments(name: str) -> None:
    found = []
    for num_layers in (5, 8):
        blocks = find_blocks(capture(*load_model(f"{name}?num_hidden_layers={num_layers}&seq=64")))
        segments = find_segments(blocks)
        assert len(segments) >= num_layers - 1
        found.append({segment.fingerprint for segment in segments})
    assert len(found[0]) == len(found[1]) <= 6


def test_rows_are_moved_by_their_own_mask_or_not_at_all() -> None:
    """A program that moves the rows of experts without their mask, or by that of another layer, is refused."""
    model = in_float64("mixtral")[0]
    spec = batch_spec(build("zoo/mixtral", torch.float64)[1])
    program = build_program(model.blocks, named_plan(model.blocks, parse_named("dp=2,experts"), batch=spec))
    stage = program.stages[0]
    called = {call.body: stage.bodies[call.body] for call in stage.calls}
    moves = [(name, i, c) for name, body in called.items() for i, c in enumerate(body)
             if isinstance(c, Collective) and c.rows is not None]  # fmt: skip
    masks = {c.rows for _, _, c in moves}
    assert len(moves) == 8  # two layers, to the experts and back, forward and backward
    for name, i, move in moves:
        for rows in (None, *sorted(masks - {move.rows})):
            body = list(stage.bodies[name])
            body[i] = replace(move, rows=rows)
            broken = replace(stage, bodies={**stage.bodies, name: tuple(body)})
            with pytest.raises(VerificationError):
                verify_program(model.blocks, replace(program, stages=(broken,)))
