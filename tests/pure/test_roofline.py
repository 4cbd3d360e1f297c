"""Modelled seconds: products by shape, attention, what a compiler fuses, nothing unknown at zero."""

import csv
from dataclasses import replace
from pathlib import Path
from statistics import mean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.roofline_fit import CHIPS, START, predicted
from planloom.blocks import BlockGraph, find_blocks
from planloom.cluster import Device, load_cluster
from planloom.cost.attention import AttentionShape, attention_seconds
from planloom.cost.efficiency import GENERAL, Efficiency, efficiency_of, modelled_product, product_seconds
from planloom.cost.fusion import RunPhase, run_kernels
from planloom.cost.kernels import Attention, Kernel, Movement, Product
from planloom.cost.roofline import (
    FUSED_UPDATE_ACCESSES,
    UNKNOWN_UNCERTAINTY,
    UPDATE_ACCESSES,
    estimate_run,
    kernel_seconds,
    memory_seconds,
    update_seconds,
)
from planloom.errors import PriceError
from planloom.graph import Expansion, Graph, Op, Rule, Tensor, notate, refine_factors
from planloom.plan import named_plan, parse_named
from planloom.program import Program, build_program, run_operations
from tests.pure.tiny_graph import BATCH, HIDDEN, SEQUENCE, WIDE, tiny_batch, tiny_blocks, tiny_graph

MEASURED = Path(__file__).parents[3] / "shared" / "data" / "gemm_measured.csv"
PHASES: tuple[RunPhase, ...] = ("forward", "backward", "input_gradient")
H100, H200, A100 = (load_cluster(f"dgx-{name}").device for name in ("h100", "h200", "a100"))
UNKNOWN = Device(
    name="thing",
    flops_per_second={"float32": 1e12},
    memory_bytes=1 << 30,
    memory_bytes_per_second=1e11,
    launch_seconds=1e-6,
)


# --- products


def tflops(device: Device, *shape: int) -> float:
    batch, m, n, k = shape
    return 2e-12 * batch * m * n * k / product_seconds(device, "bfloat16", 2, (batch, m, n, k)).seconds


def test_a_large_product_runs_near_the_measured_rate() -> None:
    # [Empirical] NVIDIA H200, 2026-11-04: 769 to 798 TFLOP/s for 8192 × 8192 × 8192 in bf16, random numbers.
    shape = (1, 8192, 8192, 8192)
    alone = modelled_product(efficiency_of("H200"), 989e12, H200.memory_bytes_per_second, 2, shape)
    assert 2e-12 * 8192**3 / alone == pytest.approx(783, rel=0.1)
    assert 0.75 < tflops(H200, *shape) / 783 < 1, "in a step the clock is lower"


def test_a_short_contraction_and_a_small_product_are_less_efficient() -> None:
    assert tflops(H100, 1, 4096, 4096, 128) < 0.5 * tflops(H100, 1, 4096, 4096, 4096)
    assert tflops(H100, 1, 256, 256, 4096) < 0.2 * tflops(H100, 1, 4096, 4096, 4096)


def test_a_last_wave_costs_as_much_as_it_must() -> None:
    """108 processors: 768 × 4096 are 96 tiles of 256 × 128, one row more begins a second wave."""
    full, more = (product_seconds(A100, "bfloat16", 2, (1, m, 4096, 4096)).seconds for m in (768, 769))
    assert 1.1 * full < more < 2 * full


def test_a_batch_of_products_fills_processors_that_one_leaves_idle() -> None:
    one, eight = (product_seconds(H100, "bfloat16", 2, (batch, 256, 256, 1024)).seconds for batch in (1, 8))
    assert eight < 3 * one


@given(st.tuples(*[st.integers(1, 20000)] * 3), st.sampled_from(sorted(CHIPS)))
def test_the_fit_and_the_price_are_one_formula(shape: tuple[int, int, int], name: str) -> None:
    chip = CHIPS[name]
    constants = {key: getattr(efficiency_of(name), key) for key in START}
    rows = np.array([[*map(float, shape), 1.0]])
    price = modelled_product(efficiency_of(name), chip.rate, chip.bandwidth, 2, (1, *shape))
    assert price == pytest.approx(float(predicted(constants, chip, rows)[0]))


@pytest.mark.skipif(not MEASURED.exists(), reason=f"{MEASURED} is not here")
def test_products_over_50_us_are_within_ten_percent_of_measured_ones() -> None:
    errors: dict[str, list[float]] = {}
    with MEASURED.open() as lines:
        for i, row in enumerate(csv.DictReader(lines)):
            seconds = float(row["latency_us"]) * 1e-6
            if i % 40 or seconds < 50e-6:
                continue
            name = row["gpu"].split("-")[0]
            shape = (1, *(int(row[key]) for key in "mnk"))
            price = modelled_product(efficiency_of(name), CHIPS[name].rate, CHIPS[name].bandwidth, 2, shape)  # type: ignore[arg-type]
            errors.setdefault(name, []).append(abs(price / seconds - 1))
    assert set(errors) == set(CHIPS)
    assert max(map(mean, errors.values())) < 0.1


def test_constants_are_found_by_a_word_of_the_name() -> None:
    assert efficiency_of("H100-SXM5-80GB") == efficiency_of("NVIDIA H100 80GB HBM3") != GENERAL
    for name in ("GH200 480GB", "V100-SXM2-16GB", "cpu-core", "RTX-A6000"):
        assert efficiency_of(name) == GENERAL


def test_a_device_that_nobody_measured_has_a_price_with_a_larger_uncertainty() -> None:
    unknown = product_seconds(UNKNOWN, "float32", 4, (1, 1024, 1024, 1024))
    assert unknown.seconds == pytest.approx(2 * 1024**3 * (1 + 128 / 1024) / (0.78 * 1e12), rel=0.05)
    assert unknown.uncertainty > 2 * product_seconds(H100, "bfloat16", 2, (1, 8192, 8192, 8192)).uncertainty


def test_a_dtype_without_a_rate_is_an_error() -> None:
    with pytest.raises(PriceError, match="no rate for float16"):
        product_seconds(UNKNOWN, "float16", 2, (1, 8, 8, 8))


# --- attention


def attention(length: int, size: int, *, is_causal: bool) -> AttentionShape:
    """As published: 16,384 tokens, heads × size = 2,048."""
    heads = 2048 // size
    return AttentionShape(
        batch=16384 // length,
        heads=heads,
        key_heads=heads,
        num_queries=length,
        num_keys=length,
        size=size,
        value=size,
        is_causal=is_causal,
    )


@pytest.mark.parametrize(
    ("size", "direction", "is_causal", "published"),
    [
        (128, "forward", False, {512: 497, 1024: 574, 4096: 609, 16384: 595}),
        (128, "forward", True, {512: 315, 1024: 410, 4096: 518, 16384: 539}),
        (64, "forward", False, {512: 335, 1024: 373, 4096: 408, 16384: 413}),
        (128, "backward", False, {512: 305, 1024: 408, 4096: 499, 16384: 516}),
        (64, "backward", False, {512: 266, 1024: 348, 4096: 417, 16384: 433}),
    ],
)
def test_attention_runs_at_published_rates(
    size: int, direction: str, is_causal: bool, published: dict[int, int]
) -> None:
    """TFLOP/s on an H100, cuDNN, as in `attention.py`; causal counts half of the operations."""
    for length, rate in published.items():
        shape = attention(length, size, is_causal=is_causal)
        flops = shape.flops * (2.5 if direction == "backward" else 1) / (2 if is_causal else 1)
        seconds = attention_seconds(H100, "bfloat16", 2, shape, direction).seconds  # type: ignore[arg-type]
        assert flops / seconds / 1e12 == pytest.approx(rate, rel=0.08)


MEASURED_SINKS = {
    (64, 0): ((0.614, 1.909), (1.007, 3.112), (1.877, 5.561), (3.637, 10.41)),
    (128, 0): ((0.987, 3.306), (1.755, 5.498), (3.442, 9.773), (6.633, 18.35)),
    (64, 128): ((0.527, 1.184), (0.522, 1.219), (0.506, 1.233), (0.487, 1.237)),
    (128, 128): ((0.741, 1.987), (0.732, 2.033), (0.683, 2.042), (0.654, 2.053)),
}
"""Milliseconds forward and backward on an H200, sequences of 1k to 8k, by head size and window (cost/attention.py)."""


@pytest.mark.parametrize(("size", "window"), MEASURED_SINKS)
def test_attention_with_sinks_runs_as_measured(size: int, window: int) -> None:
    device = load_cluster("dgx-h200").device
    for length, measured in zip((1024, 2048, 4096, 8192), MEASURED_SINKS[size, window], strict=True):
        shape = AttentionShape(
            batch=16384 // length, heads=64, key_heads=8, num_queries=length, num_keys=length, size=size, value=size,
            is_causal=True, window=window, has_sinks=True,
        )  # fmt: skip
        for direction, milliseconds in zip(("forward", "backward"), measured, strict=True):
            found = attention_seconds(device, "bfloat16", 2, shape, direction).seconds  # type: ignore[arg-type]
            assert found == pytest.approx(milliseconds / 1e3, rel=0.15)


def test_few_heads_do_not_fill_the_device_and_a_mask_costs() -> None:
    shape = attention(2048, 128, is_causal=False)
    small = replace(shape, batch=1, heads=1, key_heads=1)
    seconds = [attention_seconds(H100, "bfloat16", 2, s, "forward").seconds for s in (shape, small)]
    assert seconds[1] > 2 * seconds[0] / (shape.batch * shape.heads)
    masked = attention_seconds(H100, "bfloat16", 2, replace(shape, mask_bytes=1 << 20), "forward")
    assert masked.seconds > seconds[0]
    assert masked.uncertainty > attention_seconds(H100, "bfloat16", 2, shape, "forward").uncertainty


# --- kernels of runs


def program(blocks: BlockGraph, spec: str = "dp=1") -> Program:
    return build_program(blocks, named_plan(blocks, parse_named(spec), batch=tiny_batch()))


def kernels(blocks: BlockGraph, phase: RunPhase, *, fused: bool, spec: str = "dp=1") -> list[Kernel]:
    built = program(blocks, spec)
    found: list[Kernel] = []
    for run in built.runs:
        operations = run_operations(blocks, run, num_micro=built.num_micro_batches)
        found += run_kernels(blocks.graph, run, operations, phase, fused=fused)
    return found


def shapes(found: list[Kernel]) -> list[tuple[int, ...]]:
    return sorted(kernel.shape for kernel in found if isinstance(kernel, Product))


def moved(found: list[Kernel]) -> list[int]:
    return sorted(kernel.num_bytes for kernel in found if isinstance(kernel, Movement))


ROWS = BATCH * SEQUENCE


def test_the_backward_of_a_product_is_two_products_of_their_own_shapes() -> None:
    blocks = tiny_blocks()
    assert shapes(kernels(blocks, "forward", fused=True)) == [(1, ROWS, WIDE, HIDDEN), (1, ROWS, HIDDEN, WIDE)]
    second_input, second_weight, first_weight = (
        (1, ROWS, HIDDEN, WIDE),
        (1, HIDDEN, WIDE, ROWS),
        (1, WIDE, HIDDEN, ROWS),
    )
    # the model's input needs no cotangent
    assert shapes(kernels(blocks, "backward", fused=True)) == sorted([second_input, second_weight, first_weight])
    assert shapes(kernels(blocks, "input_gradient", fused=True)) == [second_input]


def test_shapes_are_those_of_one_device() -> None:
    found = shapes(kernels(tiny_blocks(), "forward", fused=True, spec="tp=2"))
    assert found == [(1, ROWS, WIDE, HIDDEN // 2), (1, ROWS, HIDDEN // 2, WIDE)]


def test_an_activation_reads_and_writes_and_its_backward_reads_twice() -> None:
    blocks, hidden, wide = tiny_blocks(), 4 * ROWS * HIDDEN, 4 * ROWS * WIDE
    assert moved(kernels(blocks, "forward", fused=True)) == sorted([2 * hidden, wide + 4])
    # the cotangent and the input of relu in, one out; that of the sum is spread
    assert moved(kernels(blocks, "backward", fused=True)) == sorted([3 * hidden, 4 + wide + wide])


def chain(*steps: tuple[str, str, list[str], tuple[tuple[int, ...], ...]]) -> BlockGraph:
    """Pointwise operators (name, target, inputs, linear) on x · firstᵀ, then the sum as loss."""
    base = tiny_graph(sequence=())
    shape = (BATCH, HIDDEN)
    tensors = {name: replace(base.tensors[name], factors=()) for name in ("x", "first.weight", "map1", "loss")}
    ops = [base.ops[0]]
    for name, target, inputs, linear in steps:
        tensors[name] = Tensor(name=name, shape=shape, dtype="float32")
        rule = notate(", ".join(["... d"] * len(inputs)) + " -> ... d", *[shape] * (len(inputs) + 1), linear=linear)
        ops.append(_op(name, target, inputs, rule))
    ops.append(_op("loss", "aten.sum.default", [steps[-1][0]], notate("... d ->", shape, (), kind="contraction")))
    refined, ruled = refine_factors(tensors, [replace(op, rule=op.rule) for op in ops])
    return find_blocks(replace(base, tensors=refined, ops=tuple(ruled), parameters=("first.weight",), loss="loss"))


def _op(name: str, target: str, inputs: list[str], rule: Rule) -> Op:
    args = tuple(f"%{tensor}" for tensor in inputs)
    return Op(
        name=name, target=target, args=args, kwargs={}, inputs=tuple(inputs), outputs=(name,), module="", rule=rule
    )


CHAIN = (
    ("a", "aten.exp.default", ["map1"], ()),
    ("b", "aten.mul.Tensor", ["a", "map1"], ((0,), (1,))),
    ("c", "aten.tanh.default", ["b"], ()),
)


def chain_kernels(blocks: BlockGraph, phase: RunPhase, *, fused: bool) -> list[Kernel]:
    built = build_program(blocks, named_plan(blocks, parse_named("dp=1"), batch={"x": ((BATCH, WIDE), "float32")}))
    found: list[Kernel] = []
    for run in built.runs:
        operations = run_operations(blocks, run, num_micro=1)
        found += run_kernels(blocks.graph, run, operations, phase, fused=fused)
    return found


def test_a_chain_is_one_kernel_if_compiled_and_one_each_if_not() -> None:
    blocks, one = chain(*CHAIN), 4 * BATCH * HIDDEN
    assert moved(chain_kernels(blocks, "forward", fused=True)) == [one + 4]
    assert moved(chain_kernels(blocks, "forward", fused=False)) == sorted([2 * one, 3 * one, 2 * one, one + 4])


def test_the_backward_of_a_chain_computes_again_from_its_input() -> None:
    blocks, one = chain(*CHAIN), 4 * BATCH * HIDDEN
    # the loss's cotangent and the input in, the input's cotangent out
    assert moved(chain_kernels(blocks, "backward", fused=True)) == [4 + one + one]
    assert sum(moved(chain_kernels(blocks, "backward", fused=False))) > 8 * one


def test_an_operator_of_the_user_is_priced_by_its_bytes_and_not_trusted() -> None:
    blocks = chain(("a", "mylib.scan.default", ["map1"], ()))
    unknown = [k for k in chain_kernels(blocks, "forward", fused=True) if isinstance(k, Movement) and not k.is_known]
    assert [k.num_bytes for k in unknown] == [2 * 4 * BATCH * HIDDEN]
    assert kernel_seconds(unknown, H100).uncertainty == UNKNOWN_UNCERTAINTY


def test_an_operator_without_a_rule_is_an_error() -> None:
    blocks = tiny_blocks()
    built = program(blocks)
    bare = replace(blocks.graph, ops=tuple(replace(op, rule=None) for op in blocks.graph.ops))
    operations = run_operations(blocks, built.runs[0], num_micro=1)
    with pytest.raises(PriceError, match="has no rule"):
        run_kernels(bare, built.runs[0], operations, "forward", fused=True)


def test_an_expansion_that_is_whole_is_its_original() -> None:
    """relu as the only part of an original with a product in it would be one product; without one, it is fusible."""
    base = tiny_graph()
    ops = tuple(replace(op, expansion=0) if op.name == "active" else op for op in base.ops)
    expansion = Expansion(target="aten.norm.default", args=("%map1",), kwargs={}, output="active")
    graph: Graph = replace(base, ops=ops, expansions=(expansion,))
    hidden = 4 * ROWS * HIDDEN
    assert 2 * hidden in moved(kernels(find_blocks(graph), "forward", fused=False))


# --- seconds


@pytest.mark.parametrize("fused", [True, False])
def test_every_phase_has_a_price_and_the_parts_are_less_than_the_whole(fused: bool) -> None:
    blocks = tiny_blocks()
    built = program(blocks)
    device = replace(UNKNOWN, launch_seconds=1e-9)
    for run in built.runs:
        forward, backward, inputs = (estimate_run(blocks, built, run, p, device, fused=fused) for p in PHASES)
        assert 0 < forward.seconds < backward.seconds
        assert inputs.seconds < backward.seconds
        assert 0 < forward.uncertainty < 1


def test_small_kernels_wait_for_the_host() -> None:
    many = [Movement(1024)] * 10
    assert kernel_seconds(many, H100).seconds == pytest.approx(10 * H100.launch_seconds)
    large: Kernel = Product((1, 8192, 8192, 8192), "bfloat16", 2)
    assert kernel_seconds([large], H100).seconds == product_seconds(H100, "bfloat16", 2, (1, 8192, 8192, 8192)).seconds


def test_bytes_take_their_share_of_the_bandwidth() -> None:
    efficiency: Efficiency = efficiency_of(H100.name)
    seconds = memory_seconds(1 << 30, H100).seconds
    assert seconds == pytest.approx(
        efficiency.start_seconds + (1 << 30) / (H100.memory_bytes_per_second * efficiency.stream_share)
    )


def test_the_optimizer_reads_and_writes_parameters_gradients_and_moments() -> None:
    shards = [(10**9, 2)]
    bandwidth = H100.memory_bytes_per_second * efficiency_of(H100.name).stream_share
    for fused, accesses in ((True, FUSED_UPDATE_ACCESSES), (False, UPDATE_ACCESSES)):
        seconds = update_seconds(shards, H100, fused=fused).seconds
        assert seconds == pytest.approx(accesses * 2e9 / bandwidth, rel=0.01)


def test_attention_is_priced_in_a_run() -> None:
    kernel = Attention(attention(4096, 128, is_causal=True), "backward", "bfloat16", 2)
    assert kernel_seconds([kernel], H100) == attention_seconds(H100, "bfloat16", 2, kernel.shape, "backward")
