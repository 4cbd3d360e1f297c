"""Schedule: the calls of every stage, in the order that the plan gives them, with the step's entry and exit around.

`interleave` is the way in which interpreters of a whole program walk through it: each stage goes on as far as it can.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planloom.plan import Plan
from planloom.program.values import BodyCall, Instruction, Program

ENTER, EXIT = "enter", "exit"
LAST_BACKWARD = "last backward"
"""The backward of a stage's last micro-batch, where it also starts the reduction of gradients."""
RECEIVES = {"forward": "forward receives", "backward": "backward receives", LAST_BACKWARD: "backward receives"}
"""The bodies that start what a call receives from other stages: they are called one call ahead. A message travels once
both ends have started, and gloo's answer that a receiver is ready waits behind whatever the receiver itself sends."""


def schedule_calls(plan: Plan) -> tuple[tuple[BodyCall, ...], ...]:
    """One list of calls a stage."""
    return tuple(
        (
            BodyCall(body=ENTER),
            *(BodyCall(body=call.phase, micro=call.micro) for call in order),
            BodyCall(body=EXIT),
        )
        for order in plan.orders
    )


def with_receives_ahead(calls: tuple[BodyCall, ...], bodies: Mapping[str, object]) -> tuple[BodyCall, ...]:
    """The calls of a stage, with what each receives started before the call that comes before it."""
    receives = [
        BodyCall(body=RECEIVES[call.body], micro=call.micro) if RECEIVES.get(call.body) in bodies else None
        for call in calls
    ]
    found: list[BodyCall] = []
    for i, call in enumerate(calls):
        ahead = receives[i + 1] if i + 1 < len(calls) else None
        found += [ahead, call] if ahead is not None else [call]
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One instruction of a stage's script: where it stands and for which micro-batch it is carried out."""

    stage: int
    body: str
    index: int
    instruction: Instruction
    micro: int


def interleave(program: Program, step: Callable[[Line], bool]) -> tuple[Line, ...]:
    """Carry out all stages together; `step` says whether a line could be done. Returns the lines that all wait at."""
    scripts = [
        [
            Line(stage=s, body=call.body, index=i, instruction=instruction, micro=call.micro)
            for call in stage.calls
            for i, instruction in enumerate(stage.bodies[call.body])
        ]
        for s, stage in enumerate(program.stages)
    ]
    at = [0] * len(scripts)
    moved = True
    while moved:
        moved = False
        for s, script in enumerate(scripts):
            while at[s] < len(script) and step(script[at[s]]):
                at[s] += 1
                moved = True
    return tuple(script[at[s]] for s, script in enumerate(scripts) if at[s] < len(script))
