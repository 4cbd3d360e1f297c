"""3F1B on an Evoformer with three passes: proven, equal to one device, one home a parameter; corruptions are caught."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from planloom.capture import batch_spec
from planloom.errors import PlanError, VerificationError
from planloom.plan import Plan, draft, find_named, named_plan
from planloom.plan.checks import detached_stages
from planloom.plan.orders import backward
from planloom.plan.schedules import orders_of
from planloom.program import Accumulate, Backward, Forward, Program, Receive, Send, build_program, verify_program
from tests.dist.cases import captured
from tests.judging import difference, is_changed, prepare
from tests.models import build
from tests.torch.equality import require_equal_to_one_device

PLANS = [
    "3f1b:pp=2,micro=4",
    "3f1b:pp=4,micro=8",
    "3f1b:pp=2,tp=2,micro=2",
    "3f1b:pp=2,dp=2,micro=2,zero1,recompute",
    pytest.param("3f1b:pp=2,dp=2,tp=2,micro=2,zero1,recompute", marks=pytest.mark.slow),
    pytest.param("3f1b:pp=3,micro=4,recompute", marks=pytest.mark.slow),
]


def plan_of(text: str, model: str = "recycled") -> Plan:
    spec = batch_spec(build(model, torch.float64)[1])
    return named_plan(captured(model, torch.float64), find_named(text), batch=spec)


def test_only_the_last_pass_carries_cotangents() -> None:
    blocks = captured("recycled", torch.float64)
    graph = blocks.graph
    reads = Counter(len(blocks.consumers[name]) for name in graph.parameters)
    assert set(reads) == {1, 3}, "once a pass, and the heads once"
    differentiable = [any(map(graph.is_differentiable, block.outputs)) for block in blocks.blocks]
    first = differentiable.index(True)
    assert len(blocks.blocks) * 0.6 < first < len(blocks.blocks) * 0.7
    assert blocks.blocks[first].name == "embed_left#3", "a pass embeds anew"


@pytest.mark.parametrize("text", PLANS)
def test_it_is_equal_to_one_device(text: str) -> None:
    program = require_equal_to_one_device("recycled", plan_of(text))
    for stage in program.stages:
        called = Counter(call.body.split(" of ")[0].removeprefix("last ") for call in stage.calls)
        assert called["forward"] == 3 * called["backward"] == 3 * program.num_micro_batches
        saving = [i.saves for name, body in stage.bodies.items() for i in body if isinstance(i, Forward)]
        assert any(saving)
        assert not all(saving)


def test_parameters_have_one_home_and_are_never_sent() -> None:
    plan = plan_of("3f1b:pp=2,micro=4")
    program = build_program(captured("recycled", torch.float64), plan)
    names = set(captured("recycled", torch.float64).graph.parameters)
    sent = {i.tensor for s in program.stages for body in s.bodies.values() for i in body if isinstance(i, Send | Receive)}
    assert not sent & names
    assert sorted(p.name for s in program.stages for p in s.parameters) == sorted(names)
    for stage in program.stages:
        assert not stage.bodies["enter"]
        made = {name for name, body in stage.bodies.items() for i in body if isinstance(i, Accumulate | Backward)}
        assert all("backward" in name or name == "exit" or i_is_loss(stage.bodies[name]) for name in made)
    assert detached_stages(plan, captured("recycled", torch.float64)) == {0, 1, 2, 3}


def i_is_loss(body: tuple[object, ...]) -> bool:
    return all(i.target.name == "loss:total" for i in body if isinstance(i, Accumulate))


def test_a_stage_with_gradients_must_be_called_backward() -> None:
    plan = plan_of("3f1b:pp=2,micro=4")
    without = tuple(tuple(call for call in order if call.phase == "forward" or call.stage == 4) for order in plan.orders)
    with pytest.raises(PlanError, match=r"stage 5 is called forward only, but it has gradients"):
        build_program(captured("recycled", torch.float64), replace(plan, orders=without))


def test_stages_without_gradients_may_be_called_backward_all_the_same() -> None:
    plan = plan_of("3f1b:pp=2,micro=4")
    orders = orders_of("interleaved", 6, 4, per_group=3)
    require_equal_to_one_device("recycled", replace(plan, schedule="interleaved", orders=orders))
    assert backward(0, 0) in orders[0]


def test_the_same_model_under_1f1b_that_knows_no_recycling() -> None:
    """Four stages of the whole sequence of blocks: parameters are read on three groups, and copied every step."""
    require_equal_to_one_device("recycled", plan_of("pp=4,micro=8,1f1b"))


def test_models_that_do_not_recycle_are_refused() -> None:
    with pytest.raises(PlanError, match="the model does not recycle"):
        plan_of("3f1b:pp=2,micro=4", "gpt")


def test_more_stages_than_there_are_places_to_cut_are_refused() -> None:
    with pytest.raises(PlanError, match="cannot be cut"):
        plan_of("3f1b:pp=700,micro=4")


def test_own_stages_and_orders() -> None:
    """By hand: uneven stages, and the order with a function."""
    blocks, spec = captured("recycled", torch.float64), batch_spec(build("recycled", torch.float64)[1])
    named = plan_of("3f1b:pp=2,micro=4")
    written = replace(draft(blocks, named.meshes[0], batch=spec), meshes=named.meshes, stages=named.stages)
    assert written.order("3f1b", micro_batches=4).plan("own").orders == named.orders


# -- corruptions


def program_of(text: str) -> Program:
    return prepare("recycled", text, respelled=False).program


def with_stage(program: Program, number: int, **changed: object) -> Program:
    stages = list(program.stages)
    stages[number] = replace(stages[number], **changed)  # type: ignore[arg-type]
    return replace(program, stages=tuple(stages))


def stale_micro_batch(program: Program) -> Program:
    """Pass 2 of micro-batch 1 is fed with what pass 1 made of micro-batch 0: its receive meets the older message."""
    stage = program.stages[0]
    calls = [replace(c, micro=0) if (c.body, c.micro) == ("forward of stage 2", 1) else c for c in stage.calls]
    return with_stage(program, 0, calls=tuple(calls))


def an_earlier_pass(program: Program) -> Program:
    """The last pass reads what the first one made: the channels of two exchanges are one."""
    renamed = {}
    for stage in program.stages:
        for body in stage.bodies.values():
            for i in body:
                if isinstance(i, Receive) and i.channel.endswith("1>0"):
                    renamed.setdefault((i.sizes, i.transfers), []).append(i)
    first, last = next(alike for alike in renamed.values() if len(alike) > 1)[:2]
    bodies = {
        name: tuple(replace(i, channel=first.channel) if i == last else i for i in body)
        for name, body in program.stages[0].bodies.items()
    }
    return with_stage(program, 0, bodies=bodies)


def a_wrong_home(program: Program) -> Program:
    """A parameter is stored on the other group."""
    first, second = program.stages
    moved, *rest = first.parameters
    stages = (replace(first, parameters=tuple(rest)), replace(second, parameters=(*second.parameters, moved)))
    return replace(program, stages=stages)


def a_wrong_group(program: Program) -> Program:
    """A group carries out the other's stage."""
    theirs = program.stages[1].bodies["forward of stage 3"]
    return with_stage(program, 0, bodies={**program.stages[0].bodies, "forward of stage 2": theirs})


def a_pass_left_out(program: Program) -> Program:
    calls = tuple(c for c in program.stages[1].calls if (c.body, c.micro) != ("forward of stage 3", 2))
    return with_stage(program, 1, calls=calls)


def no_activations(program: Program) -> Program:
    """The last pass saves nothing for its backward, as the others."""
    bodies = {
        name: tuple(replace(i, saves=False) if isinstance(i, Forward) else i for i in body)
        for name, body in program.stages[0].bodies.items()
    }
    return with_stage(program, 0, bodies=bodies)


@pytest.mark.parametrize(
    "corrupt", [stale_micro_batch, an_earlier_pass, a_wrong_home, a_wrong_group, a_pass_left_out, no_activations]
)
def test_corruptions_are_caught(corrupt: object) -> None:
    case = prepare("recycled", "3f1b:pp=2,micro=4", respelled=False)
    assert not difference(case.run(case.program), case.run(case.program))
    wrong = corrupt(case.program)  # type: ignore[operator]
    assert wrong != case.program
    assert is_changed(case, wrong), "the oracle says that it means something else"
    with pytest.raises(VerificationError):
        verify_program(case.blocks, wrong)
