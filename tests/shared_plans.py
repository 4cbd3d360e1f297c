"""Interlaced plans of the tests, and ways in which their shares can go wrong."""

from dataclasses import replace

import torch

from planloom.capture import batch_spec
from planloom.layout import Mesh
from planloom.plan import Plan
from planloom.plan.families.interlaced import interlaced
from planloom.program import Collective, Instruction, Program, collectives_in
from tests.dist.cases import captured
from tests.models import build


def interlaced_plan(
    model: str, *, pp: int, micro: int, dp: int = 1, tp: int = 1, devices: tuple[int, ...] = (), zero: str = ""
) -> Plan:
    """On devices 0 …, or these, in float64; `zero`: parameters in shards over dp."""
    blocks, spec = captured(model, torch.float64), batch_spec(build(model, torch.float64)[1])
    mesh = Mesh.of(devices or range(pp * dp * tp), pp=pp, dp=dp, tp=tp)
    written = interlaced(blocks, {"micro": micro, "zero1": False, "recompute": False}, batch=spec, mesh=mesh)
    written = written.store("*", zero, over="dp") if zero else written  # type: ignore[arg-type]
    return written.plan(f"interlaced pp={pp} dp={dp} tp={tp} micro={micro}")


def with_role(program: Program, role: int, bodies: dict[str, tuple[Instruction, ...]]) -> Program:
    """The program with other bodies of one role."""
    stages = list(program.stages)
    stages[role] = replace(stages[role], bodies={**stages[role].bodies, **bodies})
    return replace(program, stages=tuple(stages))


def without_share(program: Program, role: int, body: str) -> Program:
    """One role leaves its first share of a collective out."""
    written = list(program.stages[role].bodies[body])
    at = next(i for i, instruction in enumerate(written) if _is_shared(instruction))
    del written[at]
    return with_role(program, role, {body: tuple(written)})


def in_other_order(program: Program, role: int, body: str) -> Program:
    """One role starts the first two collectives that are independent of each other the other way round."""
    written = list(program.stages[role].bodies[body])
    places = [i for i, instruction in enumerate(written) if _is_shared(instruction)]
    first, second = places[0], next(i for i in places[1:] if _source(written[i]) != _target(written[places[0]]))
    written[first], written[second] = written[second], written[first]
    return with_role(program, role, {body: tuple(written)})


def with_wrong_run(program: Program, role: int) -> Program:
    """A role carries out a run of another role's stage: a wrong home."""
    own, other = program.stages[role], program.stages[(role + 1) % len(program.stages)]
    return with_role(program, role, {"forward": other.bodies["forward"], "backward": own.bodies["backward"]})


def _is_shared(instruction: Instruction) -> bool:
    found = collectives_in(instruction)
    return bool(found) and found[0].target.of >= 0 and not all(step.is_local for step in found[0].steps)


def _source(instruction: Instruction) -> object:
    return instruction.source if isinstance(instruction, Collective) else None


def _target(instruction: Instruction) -> object:
    return instruction.target if isinstance(instruction, Collective) else None
