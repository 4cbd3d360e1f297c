"""Orders: for every stage the sequence of its calls, from (number of stages, number of micro-batches).

A new schedule is one short function. `Call(phase, micro)` runs the forward or backward of a stage on one micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a stage's phase on a micro-batch."""

    phase: Phase
    micro: int

    def __str__(self) -> str:
        return f"{self.phase[0].upper()}{self.micro}"


def gpipe(num_stages: int, num_micro: int) -> tuple[tuple[Call, ...], ...]:
    """All forwards, then all backwards."""
    forwards = tuple(Call(phase="forward", micro=m) for m in range(num_micro))
    backwards = tuple(Call(phase="backward", micro=m) for m in range(num_micro))
    return tuple(forwards + backwards for _ in range(num_stages))


def one_forward_one_backward(num_stages: int, num_micro: int) -> tuple[tuple[Call, ...], ...]:
    """1F1B: fill the pipeline, alternate, drain: at most (stages − s) micro-batches are in flight on stage s."""
    orders = []
    for stage in range(num_stages):
        warm_up = min(num_stages - stage - 1, num_micro)
        calls = [Call(phase="forward", micro=m) for m in range(warm_up)]
        for m in range(num_micro - warm_up):
            calls += [Call(phase="forward", micro=warm_up + m), Call(phase="backward", micro=m)]
        calls += [Call(phase="backward", micro=m) for m in range(num_micro - warm_up, num_micro)]
        orders.append(tuple(calls))
    return tuple(orders)


OrderFunction = Callable[[int, int], tuple[tuple[Call, ...], ...]]
ORDERS: dict[str, OrderFunction] = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
