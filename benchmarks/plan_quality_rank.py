"""One rank on the testbed: waits for requests, and carries them out with all others; contestants train in turns.

`python -m benchmarks.plan_quality_rank FOLDER` reads FOLDER/000.json, 001.json, … as `plan_quality_ranks` writes them:
torch is imported and connections are made once for all cases of a topology.

    load       a model and its batch
    profile    what plans use and the store of prices lacks
    screen     every plan of a folder, one after another, a few steps each
    race       plans and rivals in turns
    end

In a race every rival and every plan is built, one after another, each with the same initial weights and under the limit
of memory, and takes two steps: with the limit its peak is its own. Then all take turns, each round in another order,
with a barrier before each step, which counts with its slowest rank. Who is far behind takes no part in the rounds that
follow.
"""

import argparse
import json
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.plan_quality_rivals import rival_step
from benchmarks.prediction_rank import Drawn, filled_buffers, give_back
from planloom.blocks import BlockGraph, find_blocks
from planloom.capture import load_model, tensors_of
from planloom.execute.sharing import shared_capture
from planloom.execute.wire import Wire
from planloom.graph import Graph
from planloom.plan import load_plan
from planloom.profile.session import local_store, profile_here
from planloom.program import Program, build_program
from planloom.train.runtime import Runtime
from testbed.limits import limit_memory, memory_use, peak_memory, reset_peak

_LIMIT_SECONDS = 300.0
_POLL_SECONDS = 0.05
_FAR_BEHIND = (2.0, 1.3)
"""Times the fastest median: who needs more after one round, or after the second and later ones, has lost."""

Step = Callable[[], float]
Answers = Mapping[str, Callable[["Loaded", Mapping[str, Any]], Any]]
"""What a request does, by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The model that requests are about."""

    source: str
    model: nn.Module
    example: Any
    blocks: BlockGraph
    batch: dict[str, Tensor]
    buffers: dict[str, Tensor]


def main() -> None:
    carry_out_requests(ANSWERS)


def carry_out_requests(answers: Answers) -> None:
    """One request after another, from the folder that the command line names, until the end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder: Path = parser.parse_args().folder
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loaded: Loaded | None = None
    number = 0
    while (request := _next_request(folder / f"{number:03}.json"))["do"] != "end":
        answer: Any = {}
        if request["do"] == "load":
            loaded = load(request["model"])
        else:
            assert loaded is not None
            answer = answers[request["do"]](loaded, request)
        if dist.get_rank() == 0:
            partly = folder / f"{number:03}.partly"
            partly.write_text(json.dumps(answer))
            partly.rename(folder / f"{number:03}.answer")
        number += 1
    dist.barrier()
    dist.destroy_process_group()


def _next_request(path: Path) -> dict[str, Any]:
    while not path.is_file():
        time.sleep(_POLL_SECONDS)
    request: dict[str, Any] = json.loads(path.read_text())
    return request


def load(source: str) -> Loaded:
    torch.manual_seed(0)
    model, example = load_model(source)
    blocks = find_blocks(shared_capture(model, example))
    batch = {name: _drawn(model, tensor) for name, tensor in tensors_of(example, model).items()}
    buffers = filled_buffers(blocks.graph, source)
    return Loaded(source=source, model=model, example=example, blocks=blocks, batch=batch, buffers=buffers)


def _drawn(model: nn.Module, like: Tensor) -> Tensor:
    """Tokens or labels that the model knows, or numbers."""
    if like.is_floating_point():
        return torch.randn(like.shape, dtype=like.dtype)
    config: Any = getattr(model, "config", None)
    known: int = getattr(config, "vocab_size", 0) or getattr(config, "num_labels", 2)
    return torch.randint(0, known, like.shape)


def profile(loaded: Loaded, request: Mapping[str, Any]) -> None:
    """Measure what the plans of a folder use and the store lacks."""
    store = local_store(request["store"], dist.get_world_size(), label=request["label"])
    programs = [build_program(loaded.blocks, load_plan(path)) for path in plans_of(request)]
    profile_here(
        loaded.blocks,
        loaded.model,
        loaded.example,
        programs,
        store,
        progress=lambda done, total: None,
        writes=dist.get_rank() == 0,
        budget_seconds=request["budget_seconds"],
    )


def screen(loaded: Loaded, request: Mapping[str, Any]) -> dict[str, list[float]]:
    """Seconds of a few steps of every plan after one to warm up; of who is far behind by then, of that one only."""
    found: dict[str, list[float]] = {}
    for path in plans_of(request):
        give_back()
        step, wire = _planned(loaded, build_program(loaded.blocks, load_plan(path)))
        warm_up, _ = timed(step)
        fastest = min((min(seconds) for seconds in found.values()), default=warm_up)
        repeats = request["steps"] if warm_up <= request["near"] * fastest else 0
        found[path.stem] = [timed(step)[0] for _ in range(repeats)] or [warm_up]
        wire.close()
    return found


def race(loaded: Loaded, request: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Steps of plans and rivals in turns."""
    wires: list[Wire] = []

    def planned(path: Path) -> Step:
        step, wire = _planned(loaded, build_program(loaded.blocks, load_plan(path)))
        wires.append(wire)
        return step

    makers: dict[str, Callable[[], Step]] = {path.stem: partial(planned, path) for path in plans_of(request)}
    makers |= {name: partial(_rival, name, loaded) for name in request["rivals"]}
    entered = {name: enter(make, request["limit_bytes"]) for name, make in makers.items()}
    turns = take_turns({name: step for name, (step, _) in entered.items()}, request["rounds"])
    found = {}
    for name, (_, figures) in entered.items():
        seconds, losses = zip(*turns[name], strict=True)
        found[name] = {**figures, "seconds": seconds, "losses": [*figures["losses"], losses[0]]}
    for wire in wires:
        wire.close()
    return found


ANSWERS: Answers = {"profile": profile, "screen": screen, "race": race}


def plans_of(request: Mapping[str, Any]) -> list[Path]:
    return sorted(Path(request["plans"]).glob("*.json"))


def enter(make: Callable[[], Step], limit: int | None) -> tuple[Step, dict[str, Any]]:
    """Build a contestant and let it warm up: its step, its first loss, the largest peak of all ranks."""
    give_back()
    limit_memory(None)
    before = memory_use()
    reset_peak()
    if limit is not None:
        limit_memory(limit)
    step = make()
    loss = step()
    step()  # the first had no states of the optimizer yet
    peak = torch.tensor(peak_memory() - before)
    limit_memory(None)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return step, {"losses": [loss], "peak_bytes": int(peak)}


def take_turns(
    steps: Mapping[str, Step], num_rounds: int, apart: Container[str] = ()
) -> dict[str, list[tuple[float, float]]]:
    """(seconds, loss) of every contestant's steps, seconds of the slowest rank; the same on all ranks.

    Those who are `apart` and all others have each a fastest of their own, and the slower of these two sets the pace.
    """
    names, found = list(steps), dict[str, list[tuple[float, float]]]()
    for number in range(num_rounds):
        turned = names[number % len(names) :] + names[: number % len(names)]
        for name in turned if number % 2 else reversed(turned):
            found.setdefault(name, []).append(timed(steps[name]))
        medians = {name: median(seconds for seconds, _ in own) for name, own in found.items()}
        sides = [[medians[name] for name in names if (name in apart) == is_apart] for is_apart in (True, False)]
        most = _FAR_BEHIND[min(number, 1)] * max(min(side) for side in sides if side)
        names = [name for name in names if medians[name] <= most]
    return found


def timed(step: Step) -> tuple[float, float]:
    dist.barrier()
    start = time.perf_counter()
    loss = step()
    elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return float(elapsed), loss


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _planned(loaded: Loaded, program: Program) -> tuple[Step, Wire]:
    runtime, wire = make_runtime(loaded, program)
    return lambda: float(runtime.step(loaded.batch)), wire


def make_runtime(loaded: Loaded, program: Program) -> tuple[Runtime, Wire]:
    """This rank's part of a program, with weights that are the same for all plans."""
    rank = dist.get_rank()
    wire = Wire(rank, timeout_seconds=_LIMIT_SECONDS)
    at = torch.device("cpu")
    weights = Drawn(loaded.blocks.graph)
    return Runtime(loaded.blocks, program, rank, weights, loaded.buffers, _optimizer, wire, at=at), wire


def _rival(name: str, loaded: Loaded) -> Step:
    model, _ = load_model(loaded.source, device="cpu")
    _draw(model, loaded.blocks.graph)
    return rival_step(name, model, loaded.batch, _optimizer)


def _draw(model: nn.Module, graph: Graph) -> None:
    """The weights that plans begin with."""
    drawn, named = Drawn(graph), dict(model.named_parameters())
    with torch.no_grad():
        for name in graph.parameters:
            named[name].copy_(drawn[name])


if __name__ == "__main__":
    main()
