"""One rank of `space_time`: as `plan_quality_rank`, with one request more.

    compete    plans that fit train in turns under the limit of memory; then one step of each is watched. Of plans that
               do not fit, the peak is measured without a limit, in two steps

What is watched is how long a rank computes, communicates and waits in a step: the share in which its processor has
nothing to do (`idle`, the mean of all ranks), and the share of the communication of collectives that is hidden behind
computation. The latter only where all waiting is for collectives: a rank that waits for another stage may wait for
what that computes.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.plan_quality_rank import (
    ANSWERS,
    Loaded,
    Step,
    carry_out_requests,
    enter,
    make_runtime,
    plans_of,
    take_turns,
    timed,
)
from planloom.execute.wire import Wire
from planloom.plan import load_plan
from planloom.program import Program, build_program
from planloom.simulate import Timeline
from planloom.simulate.timeline import Event
from planloom.train.runtime import Runtime


def compete(loaded: Loaded, request: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By file: peak; of those that fit also the seconds of their steps, the share of them that is idle, and hidden."""
    entered: dict[str, tuple[Step, dict[str, Any]]] = {}
    runtimes: dict[str, tuple[Program, Runtime, Wire]] = {}
    found: dict[str, dict[str, Any]] = {}
    for path in plans_of(request):
        program, fits = build_program(loaded.blocks, load_plan(path)), path.stem in request["fitting"]

        def make(name: str = path.stem, program: Program = program) -> Step:
            runtime, wire = make_runtime(loaded, program)
            runtimes[name] = (program, runtime, wire)
            return lambda: float(runtime.step(loaded.batch))

        step, figures = enter(make, request["limit_bytes"] if fits else None)
        found[path.stem] = figures
        if fits:
            entered[path.stem] = (step, figures)
        else:
            runtimes.pop(path.stem)[2].close()
            del step
    turns = take_turns({name: step for name, (step, _) in entered.items()}, request["rounds"], request["own"])
    for name, (program, runtime, wire) in runtimes.items():
        seconds, losses = zip(*turns[name], strict=True)
        figures = {"seconds": seconds, "losses": [*found[name]["losses"], losses[0]]}
        found[name] |= figures | _watched(loaded, program, runtime)
        wire.close()
    return found


def _watched(loaded: Loaded, program: Program, runtime: Runtime) -> dict[str, float | None]:
    runtime.events = []
    step_seconds, _ = timed(lambda: float(runtime.step(loaded.batch)))
    runtime.record_communication()
    events, runtime.events = tuple(runtime.events), None
    spans = [(e.start_seconds, e.stop_seconds) for e in events if e.stream == "communication"]
    waited = Timeline(events=events).busy_seconds(dist.get_rank(), "waiting")
    communicated = union_seconds(spans)
    computed = sum(_seconds(e) for e in events if e.stream == "compute")
    figures = torch.tensor([computed, min(waited, communicated), communicated], dtype=torch.float64)
    dist.all_reduce(figures)
    total, exposed, communication = (float(figure) / dist.get_world_size() for figure in figures)
    is_alone = len(program.stages) == 1 and communication > 0
    return {"idle": 1 - total / step_seconds, "hidden": 1 - exposed / communication if is_alone else None}


def _seconds(event: Event) -> float:
    return event.stop_seconds - event.start_seconds


def union_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """How long at least one of these spans lasts."""
    total, until = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, until))
        until = max(until, stop)
    return total


if __name__ == "__main__":
    carry_out_requests({**ANSWERS, "compete": compete})
