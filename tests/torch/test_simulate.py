"""The simulator: closed forms, overlap, contention, and what its timeline says."""

import json
from dataclasses import replace

import pytest
import torch

from planloom.capture import batch_spec
from planloom.cost import Price
from planloom.errors import PriceError
from planloom.graph.flops import training_flops
from planloom.layout import Mesh
from planloom.plan import draft, named_plan, parse_named
from planloom.plan.schedules import home_groups, orders_of
from planloom.profile.work import Collectives, work_of
from planloom.program import (
    Accumulate,
    Coalesced,
    Collective,
    Instruction,
    Program,
    build_program,
    verify_program,
)
from planloom.program.sizes import buffer_bytes, mask_bytes_of_steps
from planloom.report import chrome_trace, timeline_svg
from planloom.simulate import Summary, Timeline, simulate
from tests.pure.chain_graph import chain_batch, chain_blocks
from tests.torch.captured import captured
from tests.torch.fixed_prices import FixedPrices


def program(spec: str) -> Program:
    model = captured("gpt", torch.float32)
    plan = named_plan(model.blocks, parse_named(spec), batch=batch_spec(model.batch))
    return build_program(model.blocks, plan)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("num_micro", [1, 2, 4, 8])
def test_a_pipeline_with_equal_stages_and_free_communication_takes_the_closed_form(
    schedule: str, num_micro: int
) -> None:
    built = program(f"pp=2,micro={num_micro},{schedule}")
    assert simulate(built, FixedPrices(built)).step_seconds == pytest.approx((num_micro + 1) * 3.0)


@pytest.mark.parametrize("num_micro", [4, 8, 32])
@pytest.mark.parametrize(
    ("schedule", "width", "bubble_seconds"),
    [
        ("gpipe", 1, 9),
        ("1f1b", 1, 9),
        ("interleaved", 2, 4.5),
        ("looped", 2, 4.5),
        ("zb-h1", 1, 3),
        ("inference", 1, 3),
    ],
)
def test_the_bubble_of_every_schedule_is_exactly_the_closed_form(
    schedule: str, width: int, bubble_seconds: float, num_micro: int
) -> None:
    """Four groups, a map a stage: (G − 1)(F + B) over the stages a group, (G − 1)(F + I − W), (G − 1) F."""
    num_stages = 4 * width
    blocks = chain_blocks(num_stages, batch=num_micro)
    orders = orders_of(schedule, num_stages, num_micro, per_group=width)
    meshes = tuple(Mesh.of([group]) for group in home_groups(orders, num_stages))
    written = draft(blocks, meshes[0], batch=chain_batch(num_micro))
    written = replace(written, meshes=meshes, stages=(*range(num_stages), num_stages - 1))
    built = build_program(blocks, written.order(schedule, micro_batches=num_micro).plan(schedule))
    verify_program(blocks, built)
    work = num_micro * (1.0 if schedule == "inference" else 3.0)
    summary = summary_of(simulate(built, FixedPrices(built, of=blocks)))
    assert summary.step_seconds == work + bubble_seconds
    assert summary.bubble == bubble_seconds / (work + bubble_seconds)


@pytest.mark.parametrize("exchange_seconds", [0.25, 0.5, 1.0])
def test_cotangents_are_on_their_way_while_the_next_are_computed(exchange_seconds: float) -> None:
    """A stage does not wait for its last send before its next backward: each way is paid once, not once a micro-batch.

    Three ways: the first activations', the last cotangents', and the loss's.
    """
    blocks, num_micro = chain_blocks(2, batch=4), 4
    written = draft(blocks, Mesh.of([0]), batch=chain_batch(num_micro))
    written = replace(written, meshes=(Mesh.of([0]), Mesh.of([1])), stages=(0, 1, 1))
    built = build_program(blocks, written.order("gpipe", micro_batches=num_micro).plan("gpipe"))
    verify_program(blocks, built)
    found = simulate(built, FixedPrices(built, of=blocks, exchange_seconds=exchange_seconds)).step_seconds
    assert found == pytest.approx((num_micro + 1) * 3.0 + 3 * exchange_seconds)


class Additions(FixedPrices):
    """Half a second for a new tensor, an eighth in place."""

    def memory(self, num_bytes: int) -> Price:
        return Price(seconds=0.5, source="measured")

    def accumulate(self, num_bytes: int) -> Price:
        return Price(seconds=0.125, source="measured")


@pytest.mark.parametrize(("num_micro", "seconds"), [(1, 0.0), (2, 0.5), (4, 0.5 + 2 * 0.125)])
def test_the_first_gradient_is_kept_the_second_makes_a_new_one_others_are_added_in_place(
    num_micro: int, seconds: float
) -> None:
    blocks = chain_blocks(1, batch=4)
    written = draft(blocks, Mesh.of([0]), batch=chain_batch(4))
    built = build_program(blocks, written.order("gpipe", micro_batches=num_micro).plan("one"))
    (stage,) = built.stages
    count = sum(isinstance(i, Accumulate) for body in stage.bodies.values() for i in body)
    assert count == 2, "the loss in the forward, the gradient in the backward"
    timeline = simulate(built, Additions(built, of=blocks))
    added = [e.stop_seconds - e.start_seconds for e in timeline.events if e.name == "Accumulate"]
    assert sum(added) == pytest.approx(count * seconds)


def test_without_a_pipeline_times_add_up() -> None:
    built = program("dp=2,micro=4")
    timeline = simulate(built, FixedPrices(built, update_seconds=0.5))
    assert timeline.step_seconds == pytest.approx(4 * 3.0 + 0.5)
    assert timeline.busy_seconds(0, "compute") == pytest.approx(12.5)


def test_an_exchange_delays_the_next_stage_in_both_directions() -> None:
    built = program("pp=2,micro=1,gpipe")
    free = simulate(built, FixedPrices(built)).step_seconds
    slow = simulate(built, FixedPrices(built, exchange_seconds=0.25)).step_seconds
    # activations, cotangents, the gradient of the tied parameter, the loss; the parameter's way to the head is hidden
    assert slow == pytest.approx(free + 4 * 0.25)


def test_collectives_are_counted_on_their_stream() -> None:
    built = program("tp=2")
    timeline = simulate(built, FixedPrices(built, step_seconds=0.125))
    count = sum(1 for event in timeline.events if event.stream == "communication")
    assert count >= 4 * 2, "two layers with two all-reduces forward and two backward each"
    assert timeline.busy_seconds(0, "communication") == pytest.approx(0.125 * count)
    assert timeline.step_seconds == pytest.approx(3.0 + 0.125 * count)


def test_rows_of_experts_are_told_by_their_mask_first_which_takes_a_step_of_its_own() -> None:
    model = captured("zoo/mixtral", torch.float32)
    plan = named_plan(model.blocks, parse_named("dp=2,experts"), batch=batch_spec(model.batch))
    built = build_program(model.blocks, plan)
    (stage,), sizes = built.stages, buffer_bytes(model.blocks.graph, built, 0)
    started = [i for call in stage.calls for i in stage.bodies[call.body] if isinstance(i, Collective)]
    kinds = {tuple(step.kind for step in c.steps) for c in started if c.rows is not None}
    assert kinds == {("all_to_all",)}
    masks = work_of(model.blocks, [built], with_links=True)
    for collective in started:
        (num_bytes,) = mask_bytes_of_steps(collective)
        assert num_bytes == (sizes[collective.rows] if collective.rows is not None else 0), "a byte for each of them"
        if num_bytes:
            assert any(isinstance(w, Collectives) and num_bytes in w.sizes for w in masks.links.values())
    found = simulate(built, FixedPrices(built, of=model.blocks, step_seconds=0.125))
    of_rows = [e for e in found.events if e.name == "all_to_all" and e.stop_seconds - e.start_seconds == 0.25]
    assert len(of_rows) == sum(c.rows is not None for c in started)


def test_the_timeline_names_the_sources_of_its_prices() -> None:
    built = program("tp=2")
    assert simulate(built, FixedPrices(built)).sources == ("measured", "modelled")


def test_an_order_that_deadlocks_has_no_time() -> None:
    model = captured("gpt", torch.float32)
    plan = named_plan(model.blocks, parse_named("pp=2,micro=2,gpipe"), batch=batch_spec(model.batch))
    built = build_program(model.blocks, plan)
    backward_first = sorted(built.stages[0].calls, key=lambda call: (call.body != "enter", "backward" not in call.body))
    built = replace(built, stages=(replace(built.stages[0], calls=tuple(backward_first)), built.stages[1]))
    with pytest.raises(PriceError, match="deadlocks"):
        simulate(built, FixedPrices(built))


def test_a_picture_has_a_bar_for_every_event() -> None:
    built = program("pp=2,micro=2,1f1b")
    timeline = simulate(built, FixedPrices(built, exchange_seconds=0.1))
    picture = timeline_svg({"simulated <1f1b>": timeline})
    assert picture.count("<title>") == len(timeline.events)
    assert "simulated &lt;1f1b&gt;" in picture
    assert "device 0" in picture
    assert "device 1" in picture


def summary_of(timeline: Timeline) -> Summary:
    assert timeline.summary is not None
    return timeline.summary


@pytest.mark.parametrize(("schedule", "num_micro"), [("gpipe", 4), ("1f1b", 4), ("1f1b", 8)])
def test_the_bubble_of_a_pipeline_is_the_closed_form(schedule: str, num_micro: int) -> None:
    built = program(f"pp=2,micro={num_micro},{schedule}")
    assert summary_of(simulate(built, FixedPrices(built))).bubble == pytest.approx(1 / (num_micro + 1))


def test_gradients_are_reduced_during_the_backward() -> None:
    """The first buckets hide behind the rest of the backward."""
    built = program("dp=2")
    buckets = sum(isinstance(i, Coalesced) for i in built.stages[0].bodies["last backward"])
    assert buckets >= 2
    timeline = simulate(built, FixedPrices(built, step_seconds=0.01))
    summary = summary_of(timeline)
    assert summary.step_seconds < 3.0 + 0.01 * buckets
    assert set(summary.exposed_communication) == {"dp"}
    hidden = timeline.busy_seconds(0, "communication") - summary.exposed_communication["dp"]
    assert hidden == pytest.approx(0.01 * (buckets - 1), rel=0.01)


def test_computing_is_slower_while_the_device_communicates() -> None:
    built = program("dp=2")
    plain = simulate(built, FixedPrices(built, step_seconds=0.05)).step_seconds
    slowed = simulate(built, FixedPrices(built, step_seconds=0.05, compute_slowdown=1.5)).step_seconds
    assert plain < slowed < 1.5 * plain


def test_communication_is_slower_while_its_devices_compute_and_only_then() -> None:
    """Half as fast from its beginning to the end of the backward, though it loads no link."""
    built = program("dp=2")
    buckets = sum(isinstance(i, Coalesced) for i in built.stages[0].bodies["last backward"])
    timeline = simulate(built, FixedPrices(built, step_seconds=2.0, communication_slowdown=2.0))
    first = min(event.start_seconds for event in timeline.events if event.stream == "communication")
    others = sum(event.axis == "dp" for event in timeline.events if event.stream == "communication") - buckets
    assert first < 3.0
    assert timeline.step_seconds == pytest.approx(3.0 + 2.0 * (buckets + others) - (3.0 - first) / 2)


def test_equal_groups_are_one_lane_whichever_tuples_hold_them() -> None:
    """NCCL carries out what a set of ranks sends one after another; each step here has tuples of its own."""
    built = program("dp=2")
    (stage,) = built.stages
    bodies = {name: tuple(map(with_own_groups, body)) for name, body in stage.bodies.items()}
    apart = replace(built, stages=(replace(stage, bodies=bodies),))
    prices = FixedPrices(built, step_seconds=2.0, on="dgx-h100")
    assert simulate(apart, prices).step_seconds == pytest.approx(simulate(built, prices).step_seconds)


def with_own_groups(instruction: Instruction) -> Instruction:
    """The same instruction; the groups of its collectives are equal and nobody else's."""
    if not isinstance(instruction, Coalesced):
        return instruction
    collectives = []
    for collective in instruction.collectives:
        steps = [replace(s, groups=tuple((*group,) for group in s.groups)) for s in collective.steps]
        collectives.append(replace(collective, steps=tuple(steps)))
    return replace(instruction, collectives=tuple(collectives))


def test_stages_that_share_an_uplink_are_in_each_others_way() -> None:
    """Both stages have a device in each node, and reduce over the one uplink that a node has."""
    model = captured("gpt", torch.float32)
    mesh = Mesh(axes=Mesh.of(range(4), pp=2, dp=2).axes, devices=(0, 2, 1, 3))
    plan = named_plan(model.blocks, parse_named("pp=2,dp=2,micro=2,gpipe"), batch=batch_spec(model.batch), mesh=mesh)
    built = build_program(model.blocks, plan)
    apart = simulate(built, FixedPrices(built, step_seconds=2.0)).step_seconds
    sharing = simulate(built, FixedPrices(built, step_seconds=2.0, level=0)).step_seconds
    assert sharing > apart + 1.0


def test_shared_wires_do_not_matter_to_what_comes_one_after_another() -> None:
    built = program("tp=2")
    apart = simulate(built, FixedPrices(built, step_seconds=0.125)).step_seconds
    assert simulate(built, FixedPrices(built, step_seconds=0.125, level=0)).step_seconds == pytest.approx(apart)


def test_mfu_is_that_of_the_models_operations() -> None:
    built = program("dp=2")
    prices = FixedPrices(built)
    operations = training_flops(captured("gpt", torch.float32).blocks.graph, counting="causal")
    rate = prices.cluster.device.flops_per_second["float32"]
    assert summary_of(simulate(built, prices)).mfu == pytest.approx(operations / (2 * 3.0 * rate))


def test_a_trace_has_every_event_on_its_device() -> None:
    built = program("pp=2,micro=2,1f1b")
    timeline = simulate(built, FixedPrices(built, exchange_seconds=0.1))
    trace = json.loads(chrome_trace(timeline))
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(bars) == len(timeline.events)
    assert {bar["pid"] for bar in bars} == {0, 1}
    assert max(bar["ts"] + bar["dur"] for bar in bars) == pytest.approx(timeline.step_seconds * 1e6)
