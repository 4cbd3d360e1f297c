"""Programs of many plans, named, hand-written and random, are proven and equal to one device."""

import re
from dataclasses import replace
from math import prod
from pathlib import Path
from random import Random

import pytest
import torch

import planloom
from planloom.blocks import find_segments
from planloom.capture import batch_spec
from planloom.errors import PlanError, VerificationError
from planloom.layout import Mesh
from planloom.plan import Call, Plan, draft, named_plan, parse_named
from planloom.program import build_program, verify_program
from tests.dist.cases import captured
from tests.models import build
from tests.torch.equality import require_equal_to_one_device

THREE_AXES = [
    "dp=2,tp=2,tp2=2",
    "dp=2,tp=2,tp2=2,vocab,micro=2",
    "dp=2,tp=2,tp2=2,vocab,zero1",
    "pp=2,tp=2,tp2=2,vocab,micro=2,1f1b",
    "pp=2,dp=2,tp=2,sequence,vocab,zero3,micro=4,gpipe",
]


def spec_of(model: str) -> dict[str, tuple[tuple[int, ...], str]]:
    return batch_spec(build(model, torch.float64)[1])


@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("name", THREE_AXES)
def test_three_space_axes_and_a_time_axis(model: str, name: str) -> None:
    blocks = captured(model, torch.float64)
    require_equal_to_one_device(model, named_plan(blocks, parse_named(name), batch=spec_of(model)))


def random_plan(model: str, seed: int) -> Plan:
    """Every block split at random over two or three axes, on shuffled devices, in one or two stages.

    Every second segment or so is recomputed.
    """
    random, blocks = Random(seed), captured(model, torch.float64)
    sizes = random.choice([{"a": 2, "b": 2}, {"a": 4}, {"a": 2, "b": 2, "c": 2}, {"a": 2}])
    num_stages, num_micro = random.choice([1, 1, 2]), random.choice([1, 2])
    devices = list(range(num_stages * prod(sizes.values())))
    random.shuffle(devices)
    count = prod(sizes.values())
    meshes = [Mesh.of(devices[s * count : (s + 1) * count], **sizes) for s in range(num_stages)]
    written = draft(blocks, meshes[0], batch=spec_of(model))
    if num_stages == 2:
        for block in blocks.blocks[random.randrange(1, len(blocks.blocks)) :]:
            written = written.assign(block.name.replace("[", "[[]"), stage=1, mesh=meshes[1])
    for block in blocks.blocks:
        strategy: dict[str, list[str]] = {}
        for axis in sizes:
            dim = random.choice([*block.dims, None])
            if dim is not None:
                pieces = prod(sizes[a] for a in (*strategy.get(dim.name, ()), axis))
                pieces *= num_micro if dim.name == "batch" else 1
                if dim.size % pieces == 0:
                    strategy.setdefault(dim.name, []).append(axis)
        if strategy:
            written = written.split(block.name, **strategy)
    for name in blocks.graph.parameters:
        kind = random.choice(["replicated", "zero1", "zero2", "zero3"])
        home = blocks.consumers[name][0]
        used = {axis for axes in written.strategies[home].values() for axis in axes}
        free = [axis for axis in sizes if axis not in used]
        if kind != "replicated" and free:
            written = written.store(name, kind, over=random.choice(free))  # type: ignore[arg-type]
    segments = tuple(i for i in range(len(find_segments(blocks))) if random.random() < 0.5)
    written = replace(written, recomputed=segments)
    return written.order(random.choice(["gpipe", "1f1b"]), micro_batches=num_micro).plan(f"random {seed}")


@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("seed", range(12))
def test_random_plans(model: str, seed: int) -> None:
    require_equal_to_one_device(model, random_plan(model, seed))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "llama", "gpt-deep", "llama-deep"])
@pytest.mark.parametrize("seed", range(100, 250))
def test_many_random_plans(model: str, seed: int) -> None:
    require_equal_to_one_device(model, random_plan(model, seed))


@pytest.mark.parametrize("seed", [172, 187])
def test_shards_whose_layout_changes_in_two_steps(seed: int) -> None:
    """Random plans that once awaited the first step of a scatter too late, or gathered by the second step first."""
    require_equal_to_one_device("gpt", random_plan("gpt", seed))


def test_megatron_needs_two_all_reduces_a_layer_each_way() -> None:
    blocks = captured("llama", torch.float64)
    program = build_program(blocks, named_plan(blocks, parse_named("tp=2"), batch=spec_of("llama")))
    for body in ("forward", "backward"):
        steps = [s.kind for i in program.stages[0].bodies[body] for s in getattr(i, "steps", ())]
        assert steps == ["all_reduce"] * 4, "two layers with two each"


def test_an_order_that_deadlocks_is_refused_with_who_waits_for_what() -> None:
    blocks = captured("gpt", torch.float64)
    good = named_plan(blocks, parse_named("pp=2,micro=2,gpipe"), batch=spec_of("gpt"))
    crossed = tuple(
        Call(phase=p, micro=m, stage=1) for m, p in ((1, "forward"), (1, "backward"), (0, "forward"), (0, "backward"))
    )
    straight = tuple(Call(phase=p, micro=m, stage=0) for m in (0, 1) for p in ("forward", "backward"))
    with pytest.raises(PlanError, match=r"(?s)wait for each other in a cycle.*group 0 at backward of stage 0"):
        build_program(blocks, replace(good, orders=(straight, crossed)))
    program = build_program(blocks, good)
    first, second = program.stages
    alternating = sorted(first.calls[1:-1], key=lambda call: call.micro)
    first = replace(first, calls=(first.calls[0], *alternating, first.calls[-1]))
    with pytest.raises(VerificationError, match=r"(?s)deadlocks.*stage 0 \(ranks 0\).*stage 1 \(ranks 1\) waits in"):
        verify_program(blocks, replace(program, stages=(first, second)))


def test_the_plan_in_the_readme_is_one() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    (snippet,) = re.findall(r"```python\nblocks = planloom(.*?)```", text, re.DOTALL)
    expression = snippet[snippet.index("plan = (") + len("plan = ") : snippet.index("planloom.save_plan")]
    blocks = captured("gpt", torch.float64)
    _, batch = build("gpt", torch.float64)
    plan = eval(expression, {"planloom": planloom, "blocks": blocks, "batch": batch})
    require_equal_to_one_device("gpt", plan)
