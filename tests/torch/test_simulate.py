"""The simulator: closed forms, overlap, and what its timeline says."""

from dataclasses import dataclass

import pytest
import torch

from planloom.capture import batch_spec
from planloom.collective import Step
from planloom.cost import Price
from planloom.errors import PriceError
from planloom.plan import Call, named_plan, parse_named
from planloom.program import Program, Run, Transfer, build_program
from planloom.report import timeline_svg
from planloom.simulate import simulate
from tests.torch.captured import captured


@dataclass
class FixedPrices:
    """Forward one second a stage and micro-batch, backward two, everything else as told."""

    program: Program
    exchange_seconds: float = 0.0
    step_seconds: float = 0.0
    update_seconds: float = 0.0

    @property
    def blocks(self) -> object:
        return captured("gpt", torch.float32).blocks

    def run(self, program: Program, run: Run, phase: str) -> Price:
        count = sum(1 for other in program.runs if other.stage == run.stage)
        return Price(seconds=(1.0 if phase == "forward" else 2.0) / count, source="measured")

    def step(self, step: Step, num_bytes: int) -> Price:
        return Price(seconds=self.step_seconds, source="modelled")

    def exchange(self, transfers: tuple[Transfer, ...], item_bytes: int) -> Price:
        return Price(seconds=self.exchange_seconds, source="modelled")

    def memory(self, num_bytes: int) -> Price:
        return Price(seconds=0.0, source="modelled")

    def update(self, program: Program, stage: int) -> Price:
        return Price(seconds=self.update_seconds, source="measured")


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


def test_the_timeline_names_the_sources_of_its_prices() -> None:
    built = program("tp=2")
    assert simulate(built, FixedPrices(built)).sources == ("measured", "modelled")


def test_an_order_that_deadlocks_has_no_time() -> None:
    model = captured("gpt", torch.float32)
    plan = named_plan(model.blocks, parse_named("pp=2,micro=2,gpipe"), batch=batch_spec(model.batch))
    backward_first = tuple(
        Call(phase=phase, micro=m) for m, phase in ((0, "backward"), (0, "forward"), (1, "forward"), (1, "backward"))
    )
    from dataclasses import replace

    built = build_program(model.blocks, replace(plan, orders=(backward_first, plan.orders[1])))
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
