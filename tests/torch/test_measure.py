"""Profiles: every run of a plan can be measured alone, what does not fit is left out, sizes are covered."""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from typer.testing import CliRunner

from planloom.blocks import BlockGraph
from planloom.capture import batch_spec, load_model
from planloom.cli.app import app
from planloom.cluster import load_cluster
from planloom.cost import Prices
from planloom.cost.keys import Figure, SplitPhase, flags_of, run_fingerprint, run_key, split_key, update_key
from planloom.errors import PriceError
from planloom.execute import compute_given
from planloom.execute.compiled import CompiledRuns
from planloom.graph import RANDOM_STATE
from planloom.plan import named_plan, parse_named
from planloom.profile import capacity, is_measured, local_store, measure_programs, missing_runs, require_device
from planloom.profile.examples import example_tensors
from planloom.profile.rounds import NUM_ROUNDS, Rounds
from planloom.profile.runs import RunBench
from planloom.profile.timing import deviation, time_phases
from planloom.profile.work import COVERED_RATIO, uncovered
from planloom.program import Program, build_program
from planloom.simulate import simulate
from tests.dist.cases import captured
from tests.models import build

CPU = torch.device("cpu")
Tensors = Mapping[str, Tensor]


def case(model: str, plan: str) -> tuple[BlockGraph, Program, Tensors, Tensors]:
    blocks = captured(model, torch.float64)
    built, batch = build(model, torch.float64)
    program = build_program(blocks, named_plan(blocks, parse_named(plan), batch=batch_spec(batch)))
    return blocks, program, *example_tensors(blocks.graph, built, batch, CPU)


@pytest.mark.parametrize(
    ("model", "plan"),
    [("zoo/mixtral", "dp=2,experts"), ("zoo/mixtral", "dp=2,tp=2,experts"), ("zoo/gpt2+dropout", "dp=2,tp=2")],
)
def test_every_run_is_measured_and_saved_at_once(model: str, plan: str) -> None:
    blocks, program, batch, buffers = case(model, plan)
    seen: list[tuple[int, int]] = []
    saved: dict[str, float] = {}
    measured = measure_programs(
        blocks,
        [program],
        batch,
        buffers,
        {},
        progress=lambda done, total: seen.append((done, total)),
        save=lambda found: saved.update({key: value for key, (value, _) in found.items()}),
        budget_seconds=0.0,
    )
    prices = {key: value for key, (value, _) in measured.items()}
    assert prices == saved
    assert not missing_runs(blocks, [program], prices)
    assert is_measured(blocks, [program], prices, with_links=False)
    assert seen == [(i, seen[-1][1]) for i in range(seen[-1][1] + 1)]
    figures: tuple[Figure, ...] = ("forward", "backward", "forward_peak_bytes", "backward_peak_bytes")
    for run in program.runs:
        fingerprint = run_fingerprint(blocks, program, run)
        assert all(prices[run_key(fingerprint, figure)] > 0 for figure in figures)
        assert prices[run_key(fingerprint, "input_gradient")] >= 0  # a share of one noisy sample: no upper limit holds
        assert len(flags_of(run_key(fingerprint, "saved_inputs"), prices, len(run.inputs))) == len(run.inputs)


def test_what_is_known_is_not_measured_again_and_what_does_not_fit_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, program, batch, buffers = case("gpt", "dp=2")
    quick = {"progress": lambda done, total: None, "budget_seconds": 0.0}
    measured = measure_programs(blocks, [program], batch, buffers, {}, **quick)
    assert measure_programs(blocks, [program], batch, buffers, measured, **quick) == {}
    monkeypatch.setattr(capacity, "available_bytes", lambda: 1 << 14)
    skipped: dict[str, str] = {}
    found = measure_programs(blocks, [program], batch, buffers, {}, skip=skipped.update, **quick)
    assert not [key for key in found if key.startswith(("run/", "update/"))]
    assert set(skipped) == {key for key in measured if key.endswith("/forward") or key.count("/") == 1} - set(found)
    assert all("MiB are free" in reason for reason in skipped.values())


def test_what_is_computed_is_measured_in_rounds_all_of_it_before_any_of_it_again() -> None:
    blocks, program, batch, buffers = case("gpt", "dp=2")
    saved: list[set[str]] = []
    measured = measure_programs(
        blocks,
        [program],
        batch,
        buffers,
        {},
        progress=lambda done, total: None,
        save=lambda found: saved.append(set(found)),
        budget_seconds=0.0,
    )
    forwards = [key for found in saved for key in found if key.endswith("/forward")]
    count = len({run_fingerprint(blocks, program, run) for run in program.runs})
    rounds = [forwards[i : i + count] for i in range(0, len(forwards), count)]
    assert len(rounds) == NUM_ROUNDS["cpu"]
    assert all(set(own) == set(rounds[0]) for own in rounds), "each run once in each"
    assert rounds[1] == rounds[0][::-1], "in the other order"
    assert sum(key.endswith("/saved_bytes") for found in saved for key in found) == count, "memory is measured once"
    assert set().union(*saved) == set(measured)


def test_a_slow_round_does_not_count_and_shows_in_the_spread() -> None:
    rounds = Rounds()
    assert rounds.add({"run": (1.0, 0.01), "bytes": (7.0, 0.0)}) == {"run": (1.0, 0.01), "bytes": (7.0, 0.0)}
    rounds.add({"run": (5.0, 0.02)})
    assert rounds.add({"run": (1.2, 0.03)})["run"] == (1.2, pytest.approx(1.4826 * 0.2))
    assert rounds.measured["bytes"] == (7.0, 0.0)
    assert rounds.first["run"] == (1.0, 0.01)


def test_a_control_group_limits_what_is_available() -> None:
    assert 0 < capacity.available_bytes() < 1 << 62


def test_runs_whose_backward_comes_in_two_halves_are_measured_as_they_are_carried_out() -> None:
    blocks, program, batch, buffers = case("gpt", "pp=2,micro=4,zb-h1")
    quick = {"progress": lambda done, total: None, "budget_seconds": 0.0}
    measured = measure_programs(blocks, [program], batch, buffers, {}, **quick)
    figures = {key: value for key, (value, _) in measured.items()}
    prices = Prices(blocks=blocks, cluster=load_cluster("two-by-two"), measured=figures)
    phases: tuple[SplitPhase, ...] = ("forward", "input_gradient", "weight_gradient")
    for run in program.runs:
        fingerprint = run_fingerprint(blocks, program, run)
        found = {phase: prices.split_run(program, run, phase) for phase in phases}
        assert {phase: price.seconds for phase, price in found.items()} == {
            phase: figures[split_key(fingerprint, phase)] for phase in phases
        }
        assert {price.source for price in found.values()} == {"measured"}
    timeline = simulate(program, prices)
    assert "measured" in timeline.sources
    simulated = {event.name for event in timeline.events if event.stream == "compute"}
    assert {
        f"{phase} {run.index}" for run in program.runs for phase in ("Input-gradient", "Weight-gradient")
    } <= simulated


def test_halves_that_were_not_measured_are_told_from_the_whole() -> None:
    blocks, program, batch, buffers = case("gpt", "pp=2,micro=4,1f1b")
    quick = {"progress": lambda done, total: None, "budget_seconds": 0.0}
    measured = measure_programs(blocks, [program], batch, buffers, {}, **quick)
    assert not [key for key in measured if "/split" in key]
    figures = {key: value for key, (value, _) in measured.items()}
    prices = Prices(blocks=blocks, cluster=load_cluster("two-by-two"), measured=figures)
    for run in program.runs:
        first, rest = (prices.split_run(program, run, phase) for phase in ("input_gradient", "weight_gradient"))
        whole, least = prices.run(program, run, "backward").seconds, first.seconds
        assert rest.seconds == max(0.0, whole - least)
        assert {first.source, rest.source} == {"interpolated"}


def test_input_gradients_alone_are_those_of_the_whole_backward() -> None:
    blocks, program, batch, buffers = case("gpt", "tp=2")
    state = {RANDOM_STATE: torch.tensor([0, 0])} if blocks.graph.random else {}
    tensors = compute_given(blocks.graph, {**batch, **buffers, **state}, CPU)
    num_compared = 0
    for run in program.runs:
        bench = RunBench(blocks, program, run, tensors, CPU, lambda local: local)
        bench.forward()
        bench.forward()
        bench.backward()
        bench.input_gradient()
        whole, part = bench._gradients
        for is_activation, a, b in zip(bench.is_activation, whole, part, strict=True):
            assert is_activation or b is None
            if is_activation and a is not None:
                assert b is not None
                assert torch.equal(a, b)
                num_compared += 1
    assert num_compared > 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_runs_are_measured_too() -> None:
    blocks, program, batch, buffers = case("gpt", "single")
    runs = CompiledRuns()
    quick = {"progress": lambda done, total: None, "budget_seconds": 0.0}
    measured = measure_programs(blocks, [program], batch, buffers, {}, make_local=runs.compile, **quick)
    assert not missing_runs(blocks, [program], {key: value for key, (value, _) in measured.items()})
    assert runs.num_compilations > 0


def test_a_model_without_memory_gets_a_batch_of_its_own() -> None:
    from planloom.capture import capture

    model, batch = load_model(
        "gpt2?n_layer=2&n_embd=32&n_head=2&vocab_size=50&seq=8&batch=2&bos_token_id=0&eos_token_id=0"
    )
    graph = capture(model, batch)
    filled, buffers = example_tensors(graph, model, batch, CPU)
    assert all(tensor.device == CPU for tensor in (*filled.values(), *buffers.values()))
    assert 10 < int(filled["input_ids"].max()) < 50


@pytest.mark.alone
def test_phases_are_timed_each_by_itself() -> None:
    import time

    timings = time_phases({"short": lambda: time.sleep(0.001), "long": lambda: time.sleep(0.01)}, CPU, budget_seconds=0)
    assert 0.001 <= timings["short"].seconds < 0.01 <= timings["long"].seconds
    assert timings["long"].spread >= 0


def test_a_spread_is_one_standard_deviation_whatever_the_outliers() -> None:
    samples = [NormalDist(mu=3.0, sigma=0.25).inv_cdf((i + 0.5) / 100) for i in range(100)]
    assert deviation(samples) == pytest.approx(0.25, rel=0.02)
    assert deviation([*samples, 60.0]) == pytest.approx(0.25, rel=0.03)
    assert deviation([1.0, 1.0]) == 0.0


def test_a_device_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(PriceError, match="no CUDA device"):
        require_device("cuda")


sizes = st.lists(st.integers(min_value=1, max_value=10**7), max_size=30)


@given(wanted=sizes, measured=sizes)
def test_few_sizes_cover_all(wanted: list[int], measured: list[int]) -> None:
    added = uncovered(wanted, measured)
    assert added <= set(wanted)
    have = sorted({*added, *measured})
    for size in wanted:
        below, above = [n for n in have if n <= size], [n for n in have if n >= size]
        assert below
        assert above
        assert above[0] <= COVERED_RATIO * below[-1]
    assert not uncovered(wanted, have)


def test_an_update_is_known_by_its_shards() -> None:
    assert update_key([4, 5], ["float32", "float32"]) != update_key([4, 5], ["float32", "bfloat16"])


def test_the_command_line_carries_profiles_and_says_what_is_wrong(tmp_path: Path) -> None:
    store, other, file = (str(tmp_path / name) for name in ("a.sqlite", "b.sqlite", "profile.json"))
    local_store(store).save({"memory/12": (1.0, 0.5)})
    runner = CliRunner()
    done = runner.invoke(app, ["profile", "--export", file, "--store", store, "--json"])
    assert json.loads(done.stdout)["exported_figures"] == 1
    done = runner.invoke(app, ["profile", "--import", file, "--store", other, "--json"])
    assert json.loads(done.stdout)["imported_figures"] == 1
    assert local_store(other).load_with_spread() == {"memory/12": (1.0, 0.5)}
    for arguments, message in (
        ([], "nothing to profile"),
        (["model", "--device", "tpu"], "no device 'tpu'"),
        (["--import", str(tmp_path / "none")], "cannot be read"),
    ):
        done = runner.invoke(app, ["profile", "--store", other, *arguments])
        assert isinstance(done.exception, PriceError)
        assert message in done.exception.what
