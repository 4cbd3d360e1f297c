"""Blocks in pieces of time: equal to one device, overlapped where that is the order, and as large as is said."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch

from planloom.capture import batch_spec
from planloom.cluster import load_cluster
from planloom.cost import Prices
from planloom.cost.keys import run_fingerprint
from planloom.errors import PlanError
from planloom.layout import Mesh
from planloom.plan import Draft, Plan, draft, find_named, load_plan, named_plan, save_plan
from planloom.plan.pieces import co_sharded, in_chunks, inner_rows, split_rows
from planloom.profile.work import work_of
from planloom.program import BodyCall, Collective, Forward, Program, Wait, build_program
from planloom.program.likeness import representatives
from planloom.simulate import simulate
from tests.dist.cases import captured
from tests.models import build
from tests.torch import test_recompute_simulated as memory
from tests.torch.equality import require_equal_to_one_device
from tests.torch.test_programs import random_plan
from tests.torch.time_plans import (
    ATTENTION,
    LAYERS,
    MLP,
    empty,
    features,
    heads,
    heads_of_swin,
    sharded,
    tensor_parallel,
)

# -- equal to one device


def in_pieces(model: str, kind: str, recompute: bool) -> Plan:
    """Parameters in shards over dp; heads and features in two pieces; two micro-batches."""
    written = sharded(empty(model, dp=2), kind)  # type: ignore[arg-type]
    written = written.time("co", size=2, over=[ATTENTION[model], MLP[model]], recompute=recompute)
    return tensor_parallel(written, model, "co").order("gpipe", micro_batches=2).plan("in pieces")


@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("recompute", [True, False])
def test_pieces_of_parameters_in_shards(model: str, kind: str, recompute: bool) -> None:
    require_equal_to_one_device(model, in_pieces(model, kind, recompute))


@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("recompute", [True, False])
def test_pieces_of_what_a_device_has_in_segments_that_are_recomputed(model: str, recompute: bool) -> None:
    written = tensor_parallel(sharded(empty(model, dp=2, tp=2), "zero3"), model, "tp")
    written = written.time("co", size=2, over=[ATTENTION[model], MLP[model]], recompute=recompute)
    require_equal_to_one_device(model, tensor_parallel(written, model, "co").recompute("*").plan("both"))


@pytest.mark.parametrize("name", ["coshard:dp=2,tp=2,pieces=1", "coshard:pp=2,dp=2,micro=2,pieces=1"])
@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_one_piece_is_a_row_that_is_recomputed(model: str, name: str) -> None:
    blocks, (_, batch) = captured(model, torch.float64), build(model, torch.float64)
    plan = named_plan(blocks, find_named(name), batch=batch_spec(batch))
    program = build_program(blocks, plan)
    assert any(
        isinstance(i, Forward) and i.again for stage in program.stages for body in stage.bodies.values() for i in body
    )
    require_equal_to_one_device(model, plan)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "chimera"])
@pytest.mark.parametrize("recompute", [True, False])
def test_pieces_in_pipelines(schedule: str, recompute: bool) -> None:
    blocks, (_, batch) = captured("gpt", torch.float64), build("gpt", torch.float64)
    plan = named_plan(blocks, find_named(f"pp=2,tp=2,micro=2,{schedule}"), batch=batch_spec(batch))
    written = replace(
        draft(blocks, plan.meshes[0], batch=plan.batch),
        meshes=plan.meshes,
        stages=plan.stages,
        strategies=plan.strategies,
        num_micro_batches=plan.num_micro_batches,
        orders=plan.orders,
    )
    require_equal_to_one_device("gpt", co_sharded(written, pieces=2, recompute=recompute).plan("pipeline"))


@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("order", ["pieces", "runs"])
def test_layers_head_and_loss_in_pieces_of_the_batch(model: str, order: str) -> None:
    over = "*layers.*|*norm*|*head|loss*"
    written = tensor_parallel(empty(model, tp=2), model, "tp").time("co", size=4, over=over, order=order)  # type: ignore[arg-type]
    require_equal_to_one_device(model, written.split(over, batch="co").plan("batch"))


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_chunks_with_sequences_and_vocabulary_over_the_same_axis(model: str) -> None:
    blocks, (_, batch) = captured(model, torch.float64), build(model, torch.float64)
    plan = named_plan(blocks, find_named("dp=2,tp=2,sequence,vocab,zero3"), batch=batch_spec(batch))
    written = replace(draft(blocks, plan.meshes[0], batch=plan.batch), strategies=plan.strategies, storage=plan.storage)
    require_equal_to_one_device(model, in_chunks(written, chunks=2).plan("chunks"))


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_chunks_of_the_sequence_around_a_reduction(model: str) -> None:
    """From the map that leaves a sum behind to the maps that read the reduced stream."""
    names = [block.name for block in captured(model, torch.float64).blocks]
    own = names[names.index(next(n for n in names if n.endswith((".attention.out", ".o_proj")))) :]
    over = "|".join(own[: own.index(next(n for n in own if n.endswith((".down", ".down_proj")))) + 1])
    written = tensor_parallel(empty(model, tp=2), model, "tp").time("chunk", size=4, over=over, order="runs")
    program = require_equal_to_one_device(model, written.split(over, sequence="chunk").plan("sequence"))
    assert any(run.moment for run in program.runs)


def swin_by_heads(written: Draft) -> Draft:
    return heads_of_swin(heads_of_swin(written, "tp").time("co", size=2, over="*.attention*", recompute=True), "co")


def swin_by_batch(written: Draft) -> Draft:
    """Position biases are the same for all pieces, and their gradients sums over them."""
    over = "*.attention.?_proj|*.attention:attention"
    written = written.split("*", batch="tp").time("co", size=2, over="*.attention*", recompute=True)
    return written.split(over, batch="co")


def swin_by_windows(written: Draft) -> Draft:
    """Queries, keys, values and attention of half of the windows, then of the others."""
    over = "*.attention.[qkv]_proj|*.attention:attention|*.relative_position_bias"
    written = heads_of_swin(written, "tp").time("co", size=2, over=over, recompute=True)
    return written.split("*.attention.[qkv]_proj|*.attention:attention", **{"features.0": "co"})


@pytest.mark.parametrize("write", [swin_by_heads, swin_by_batch, swin_by_windows])
def test_windows_attention_in_pieces(write: Callable[[Draft], Draft]) -> None:
    require_equal_to_one_device("zoo/swin", write(empty("zoo/swin", tp=2)).plan("swin"))


def random_pieces(model: str, seed: int) -> Plan:
    """A random plan of space, some of whose rows go piece by piece, if anything divides."""
    random, plan = Random(seed), random_plan(model, seed)
    written = replace(
        draft(captured(model, torch.float64), plan.meshes[0], batch=plan.batch),
        meshes=plan.meshes,
        stages=plan.stages,
        strategies=plan.strategies,
        storage={},
        recomputed=plan.recompute,
        num_micro_batches=plan.num_micro_batches,
        orders=plan.orders,
    )
    if random.random() < 0.5:  # rows that space splits alike from end to end leave no elements to other pieces
        written = split_rows(written, random.choice([axis.name for axis in plan.meshes[0].axes]))
    if random.random() < 0.3:
        return in_chunks(written, chunks=2).plan(f"random chunks {seed}")
    samples, recompute = random.random() < 0.5, random.random() < 0.5
    return co_sharded(written, pieces=2, samples=samples, recompute=recompute).plan(f"random pieces {seed}")


def require_equal_or_refused(model: str, seed: int) -> bool:
    """What is not refused, with a reason of these, is equal to one device."""
    try:
        plan = random_pieces(model, seed)
        build_program(captured(model, torch.float64), plan)
    except PlanError as error:
        if not any(words in str(error) for words in ("piece by piece", "divides into")):
            raise
        return False
    require_equal_to_one_device(model, plan)
    return True


@pytest.mark.parametrize("model", ["gpt", "llama"])
def test_random_plans_in_pieces(model: str) -> None:
    assert sum(require_equal_or_refused(model, seed) for seed in range(10)) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("seed", range(100, 200))
def test_many_random_plans_in_pieces(model: str, seed: int) -> None:
    require_equal_or_refused(model, seed)


# -- what a loop is


def test_rows_are_found_by_the_dim_that_they_share() -> None:
    blocks = captured("zoo/swin", torch.float64)
    rows = [(blocks.blocks[start].name, blocks.blocks[stop - 1].name) for start, stop in inner_rows(blocks)]
    layers = [f"swin.encoder.layers.{i}.blocks.{j}" for i in range(2) for j in range(2)]
    ends = [("attention.q_proj", "attention.o_proj"), ("mlp.fc1", "mlp.fc2")]
    assert rows == [(f"{layer}.{first}", f"{layer}.{last}") for layer in layers for first, last in ends]


def test_all_moments_and_equal_layers_are_profiled_once() -> None:
    model, blocks = "gpt-deep", captured("gpt-deep", torch.float64)
    plan = named_plan(blocks, find_named("coshard:pieces=4"), batch=batch_spec(build(model, torch.float64)[1]))
    program = build_program(blocks, plan)
    in_scopes = [run for run in program.runs if run.moment]
    assert len(in_scopes) == 4 * 2 * 4
    assert {run.moment[0][1] for run in in_scopes} == {0, 1, 2, 3}
    assert len({run_fingerprint(blocks, program, run) for run in in_scopes}) == 2, "attention, MLP"
    assert len(work_of(blocks, [program], with_links=False).runs) < len(program.runs) / 3


def test_a_plan_with_time_axes_is_written_as_it_is_read(tmp_path) -> None:  # type: ignore[no-untyped-def]
    plan = in_pieces("gpt", "zero1", recompute=True)
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == plan


def test_many_micro_batches_are_proven_by_a_few() -> None:
    program = build_program(captured("gpt", torch.float64), in_pieces("gpt", "replicated", recompute=True))
    calls = program.stages[0].calls
    forward, backward = calls[1].body, calls[-2].body
    many = [BodyCall(body=body, micro=micro) for micro in range(20) for body in (forward, "backward")]
    stage = replace(program.stages[0], calls=(calls[0], *many[:-1], BodyCall(body=backward, micro=19), calls[-1]))
    found = representatives(replace(program, num_micro_batches=20, stages=(stage,)))
    assert found == {0, 1, 19}


# -- overlap


def chunked(order: str) -> Program:
    written = tensor_parallel(empty("gpt", tp=2), "gpt", "tp").time("chunk", size=4, over=LAYERS["gpt"], order=order)  # type: ignore[arg-type]
    return build_program(written.blocks, written.split(LAYERS["gpt"], batch="chunk").plan(order))


def num_hidden(program: Program, body: str) -> int:
    """Collectives during which a run is carried out."""
    instructions, hidden = program.stages[0].bodies[body], 0
    for at, instruction in enumerate(instructions):
        if isinstance(instruction, Collective) and not all(step.is_local for step in instruction.steps):
            end = instructions.index(Wait(buffer=instruction.target), at)
            hidden += any(type(i).__name__ in ("Forward", "Backward") for i in instructions[at:end])
    return hidden


@pytest.mark.parametrize("body", ["forward", "backward"])
def test_chunks_are_reduced_while_others_are_computed(body: str) -> None:
    """In a layer of two rows, a reduction lies inside the first three of four chunks, and at the last one's end."""
    assert num_hidden(chunked("runs"), body) >= 3 * 3
    assert num_hidden(chunked("pieces"), body) == 0


def test_the_simulator_hides_what_is_communicated_behind_other_chunks() -> None:
    prices = Prices(blocks=captured("gpt", torch.float64), cluster=load_cluster("two-by-two"))
    exposed = {}
    for order in ("runs", "pieces"):
        summary = simulate(chunked(order), prices).summary
        assert summary is not None
        exposed[order] = sum(summary.exposed_communication.values())
    assert exposed["runs"] < exposed["pieces"]


# -- memory


def simulated_and_measured(plan: Plan) -> tuple[int, int]:
    program = build_program(memory.blocks_of("gpt"), plan)
    (role,) = memory.simulated(program).memory
    return memory.simulated_rise_bytes(role), memory.measured_rise_bytes(program)


def deep() -> Draft:
    """Six layers whose activations are large beside the parameters."""
    return draft(memory.blocks_of("gpt"), Mesh.of(range(1)), batch=batch_spec(memory.gpt()[1]))


def by_heads(recompute: bool) -> Draft:
    return heads(deep().time("co", size=4, over=ATTENTION["gpt"], recompute=recompute), "gpt", "co")


def by_features(recompute: bool) -> Draft:
    return features(deep().time("co", size=4, over=MLP["gpt"], recompute=recompute), "gpt", "co")


def by_batch(recompute: bool) -> Draft:
    written = deep().time("co", size=4, over=[f"layers.{i}.*|layers.{i}:*" for i in range(6)], recompute=recompute)
    return written.split(LAYERS["gpt"] + "|layers.?:*", batch="co")


@pytest.mark.parametrize("write", [by_heads, by_features, by_batch])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("num_micro", [1, 2])
def test_simulated_memory_is_what_a_step_takes(write: Callable[[bool], Draft], recompute: bool, num_micro: int) -> None:
    plan = write(recompute).order("1f1b", micro_batches=num_micro).plan("memory")
    simulated, measured = simulated_and_measured(plan)
    assert simulated == pytest.approx(measured, rel=0.01)


def test_simulated_memory_of_chunks_and_of_pieces_in_recomputed_segments() -> None:
    chunks = in_chunks(deep(), chunks=4).order("1f1b", micro_batches=2)
    for plan in (chunks.plan("chunks"), *(by_features(again).recompute("*").plan("both") for again in (True, False))):
        simulated, measured = simulated_and_measured(plan)
        assert simulated == pytest.approx(measured, rel=0.01)


def test_pieces_that_are_recomputed_take_the_memory_of_one() -> None:
    _, kept = simulated_and_measured(deep().plan("whole"))
    _, pieces = simulated_and_measured(co_sharded(deep(), pieces=4).plan("pieces"))
    assert pieces < 0.4 * kept
    simulated, rows = simulated_and_measured(co_sharded(deep(), pieces=1).plan("rows"))
    assert pieces <= rows < kept
    assert simulated == pytest.approx(rows, rel=0.02)


# -- refusals


def refused(written: Draft, *words: str) -> None:
    with pytest.raises(PlanError) as caught:
        build_program(written.blocks, written.plan("refused"))
    assert all(word in str(caught.value) for word in words), caught.value


def test_what_cannot_go_piece_by_piece_is_refused_with_the_reason() -> None:
    llama, gpt = empty("llama", tp=2), empty("gpt", tp=2)
    timed = gpt.time("co", size=2, over=MLP["gpt"])
    refused(timed.split("*.up", out="co"), "would be carried out 2 times alike", "split one of")
    refused(gpt.time("co", size=3, over="*.0.up").split("*.0.up", batch="co"), "batch", "multiple of 3")
    refused(features(timed, "gpt", "co").split("head", out="co"), "head", "the time axis whose scope holds the block")
    refused(timed.split("*.up|layers.?:apply|*.down", batch=("co", "tp")), "behind all space axes")
    refused(features(gpt.time("co", size=2, over="layers.0.*"), "gpt", "co"), "times alike")
    refused(features(gpt.time("tp", size=2, over=MLP["gpt"]), "gpt", "tp"), "two axes are named 'tp'")
    refused(features(gpt.time("co", size=1, over=MLP["gpt"]), "gpt", "co"), "no pieces")
    again = gpt.time("co", size=2, over=MLP["gpt"], order="runs", recompute=True)
    refused(features(again, "gpt", "co"), "recompute all pieces at once")
    twice = timed.time("more", size=2, over="*.up")
    refused(features(twice, "gpt", "co"), "not a row of blocks of its own")
    sums = llama.time("co", size=2, over="*layers.0.mlp*|*layers.1.input_layernorm:statistics")
    sums = features(sums, "llama", "co").split("*layers.1.input_layernorm:statistics", features="co")
    refused(sums, "before it is complete", "behind model.layers.0.mlp.down_proj")


def test_elements_of_other_pieces_are_refused() -> None:
    written = empty("llama", tp=2).split("*.gate_proj|*.up_proj", out="tp").time("co", size=2, over=MLP["llama"])
    refused(features(written, "llama", "co"), "piece by piece", "elements of other pieces")


def test_rows_of_experts_are_refused_in_pieces() -> None:
    written = empty("zoo/qwen3_moe", dp=1)
    ragged = [b.name for b in written.blocks.blocks if any(written.blocks.graph.tensors[t].rows for t in b.outputs)]
    written = written.time("co", size=2, over=ragged[0])
    refused(written, "rows of experts")


def test_forwards_of_pieces_are_told_from_each_other() -> None:
    program = chunked("pieces")
    moments = [program.runs[i.run].moment for i in program.stages[0].bodies["forward"] if isinstance(i, Forward)]
    inside = [moment[0][1] for moment in moments if moment]
    assert inside == sorted(inside), "all runs for one chunk, then for the next"
