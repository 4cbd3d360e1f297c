"""Stages on the union of several groups' devices: proven, equal to one device, and refused where shares do not fit."""

from dataclasses import replace

import pytest
import torch

from planloom.capture import batch_spec
from planloom.cluster import load_cluster
from planloom.cost import Prices
from planloom.errors import PlanError, VerificationError
from planloom.layout import Mesh
from planloom.plan import Plan, draft
from planloom.plan.families.interlaced import shared_ends
from planloom.plan.shared import interlaced
from planloom.program import Program, build_program, verify_program
from planloom.simulate import simulate
from planloom.simulate.payload import payload_bytes
from tests.dist.cases import LEARNING_RATE, captured
from tests.emulation import BrokenError, Emulation
from tests.models import build
from tests.shared_plans import in_other_order, interlaced_plan, with_role, with_wrong_run, without_share
from tests.torch.equality import require_equal_to_one_device

PLANS = [
    ("gpt", {"pp": 2, "micro": 4}),
    ("gpt", {"pp": 2, "dp": 2, "tp": 2, "micro": 2}),
    ("gpt", {"pp": 2, "dp": 2, "micro": 2, "zero": "zero1"}),
    ("gpt", {"pp": 2, "dp": 2, "micro": 4, "zero": "zero3"}),
    ("gpt", {"pp": 4, "micro": 8, "devices": (2, 0, 3, 1)}),
    ("llama", {"pp": 2, "tp": 2, "micro": 1}),
    ("zoo/gpt2", {"pp": 4, "micro": 4}),
    ("zoo/t5", {"pp": 4, "micro": 4}),
    ("zoo/t5", {"pp": 2, "tp": 2, "micro": 2}),
    ("zoo/mbart", {"pp": 4, "micro": 4}),
    ("zoo/mbart", {"pp": 2, "dp": 2, "micro": 2}),
]


@pytest.mark.parametrize(("model", "sizes"), PLANS)
def test_equal_to_one_device(model: str, sizes: dict) -> None:  # type: ignore[type-arg]
    plan = interlaced_plan(model, **sizes)
    program = require_equal_to_one_device(model, plan)
    shared = [p for p in program.stages[0].parameters if p.stage >= len(program.stages)]
    assert shared
    assert all(len(program.mesh_of(p.stage).devices) == len(plan.devices) for p in shared)


def test_of_many_micro_batches_a_few_stand_for_all() -> None:
    from tests.pure.chain_graph import chain_batch, chain_blocks

    blocks = chain_blocks(6, batch=40)
    mesh = Mesh.of(range(2), pp=2)
    halves = [Mesh.of((device,), tp=1) for device in range(2)]
    written = replace(draft(blocks, mesh, batch=chain_batch(40)), meshes=(mesh, *halves, mesh))
    count = len(blocks.blocks)
    written = replace(written, stages=tuple(min(3, index * 4 // count) for index in range(count)))
    program = build_program(blocks, written.order("interlaced", micro_batches=40).plan("many"))
    proof = verify_program(blocks, program)
    assert proof.num_instructions == sum(len(s.bodies[c.body]) for s in program.stages for c in s.calls)


# -- what does not fit is refused


def program_of(model: str = "gpt") -> tuple[object, Program]:
    return captured(model, torch.float64), build_program(
        captured(model, torch.float64), interlaced_plan(model, pp=2, micro=4)
    )


def corrupted(program: Program) -> dict[str, Program]:
    stages = program.stages
    head = next(name for name in stages[0].bodies if name.startswith("forward of stage 3"))
    calls = list(stages[0].calls)
    at = next(i for i, call in enumerate(calls) if call.body == "forward of stage 0" and call.micro == 2)
    later = next(i for i, call in enumerate(calls) if call.body == "forward of stage 0" and call.micro == 3)
    stale, missing, swapped = [list(calls) for _ in range(3)]
    stale[at] = replace(stale[at], micro=1)
    del missing[at]
    swapped[at], swapped[later] = swapped[later], swapped[at]
    return {
        "a share is missing": without_share(program, 1, head),
        "a rendezvous in another order": in_other_order(program, 1, head),
        "a wrong home": with_wrong_run(program, 0),
        "a stale micro-batch": replace(program, stages=(replace(stages[0], calls=tuple(stale)), stages[1])),
        "a missing call": replace(program, stages=(replace(stages[0], calls=tuple(missing)), stages[1])),
        "calls in another order": replace(program, stages=(replace(stages[0], calls=tuple(swapped)), stages[1])),
        "a share of another stage": with_role(program, 1, {head: stages[1].bodies["forward of stage 0"]}),
    }


@pytest.mark.parametrize("what", list(corrupted(program_of()[1])))
def test_shares_that_do_not_fit_are_refused(what: str) -> None:
    """By the verifier, and the oracle says that the program cannot be carried out or means something else."""
    blocks, program = program_of()
    wrong = corrupted(program)[what]
    with pytest.raises(VerificationError):
        verify_program(blocks, wrong)  # type: ignore[arg-type]
    model, batch = build("gpt", torch.float64)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    right = Emulation(blocks, program, parameters, dict(model.named_buffers()), LEARNING_RATE)  # type: ignore[arg-type]
    right.run(batch)
    emulation = Emulation(blocks, wrong, parameters, dict(model.named_buffers()), LEARNING_RATE)  # type: ignore[arg-type]
    try:
        emulation.run(batch)
    except BrokenError:
        return
    found, expected = emulation.results(), right.results()
    assert any(
        key not in found or not torch.allclose(found[key], value, rtol=1e-9)
        for key, value in expected.items()
        if key[0] in ("loss", "gradient")
    )


def changed_plan(what: str) -> Plan:
    plan = interlaced_plan("gpt", pp=2, micro=2)
    first, second = plan.orders
    if what == "missing":
        return replace(plan, orders=(first, tuple(call for call in second if call.stage != 3)))
    if what == "order":
        (a, b) = [i for i, call in enumerate(second) if call.stage == 0 and call.phase == "forward"]
        calls = list(second)
        calls[a], calls[b] = calls[b], calls[a]
        return replace(plan, orders=(first, tuple(calls)))
    overlapping = (*plan.meshes[:3], Mesh.of((1, 2), groups=2, dp=1, tp=1))
    return replace(plan, meshes=overlapping)


@pytest.mark.parametrize(
    ("what", "message"),
    [("missing", "its share of every piece|share it"), ("order", "cycle"), ("mesh", "mesh|devices")],
)
def test_plans_whose_shares_do_not_fit_are_refused(what: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        build_program(captured("gpt", torch.float64), changed_plan(what))


def test_a_model_without_a_vocabulary_is_refused() -> None:
    from tests.pure.chain_graph import chain_blocks

    with pytest.raises(PlanError, match="no vocabulary"):
        shared_ends(chain_blocks(4, batch=4))


# -- time


def test_simulated() -> None:
    """The rendezvous of shared stages in time: a step, what each role holds, and what is sent over which axis."""
    blocks = captured("zoo/t5", torch.float64)
    plan = interlaced_plan("zoo/t5", pp=4, micro=4)
    program = build_program(blocks, plan)
    timeline = simulate(program, Prices(blocks=blocks, cluster=load_cluster("two-by-two")))
    assert timeline.summary.step_seconds > 0
    assert {event.axis for event in timeline.events if event.stream == "communication"} == {"pp", "groups"}
    assert len(timeline.summary.memory) == 4
    sent = [payload_bytes(blocks.graph, program, device, library="gloo")["groups"] for device in range(4)]
    assert min(sent) > 0


def test_draft_assigns_a_union() -> None:
    blocks, spec = captured("gpt", torch.float64), batch_spec(build("gpt", torch.float64)[1])
    first, last = shared_ends(blocks)
    names = [block.name for block in blocks.blocks]
    every, half = Mesh.of((0, 1), all=2), [Mesh.of((0,)), Mesh.of((1,))]
    layers = [index for index in range(len(names)) if index not in first | last]
    cut = len(layers) // 2
    written = draft(blocks, every, batch=spec)
    for stage, (indices, mesh) in enumerate(
        [(layers[:cut], half[0]), (layers[cut:], half[1]), (sorted(last), every)], start=1
    ):
        for index in indices:
            written = written.assign(names[index], stage=stage, mesh=mesh)
    written = written.split(names[min(first)], vocab="all").split("*head", out="all")
    plan = written.order(interlaced, micro_batches=2).plan("by hand")
    assert plan.members(plan.group_of(0)) == (0, 1)
    require_equal_to_one_device("gpt", plan)
