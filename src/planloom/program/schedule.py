"""Schedule: the calls of every stage, in the order that the plan gives them, with the step's entry and exit around."""

from planloom.plan import Plan
from planloom.program.values import BodyCall

ENTER, EXIT = "enter", "exit"


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
