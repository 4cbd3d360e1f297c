"""What a run executes, with local shapes, and what it keeps, on graphs that are small enough to count by hand."""

from dataclasses import replace

import pytest

from planloom.blocks import BlockGraph, find_blocks
from planloom.cost.eager.values import contiguous_strides, viewed_strides
from planloom.cost.memory import run_memory
from planloom.graph import Expansion, Graph, notate, refine_factors
from planloom.layout import Mesh
from planloom.plan import draft, named_plan, parse_named
from planloom.program import Program, build_program, run_operations
from tests.pure.tiny_graph import BATCH, HIDDEN, SEQUENCE, WIDE, linear, op, tensor, tiny_batch, tiny_blocks


def with_bias() -> BlockGraph:
    """A linear map with a bias as product and sum, which stand for one operator; then the sum of all."""
    x, weight, bias = tensor("x", BATCH, WIDE), tensor("map.weight", HIDDEN, WIDE), tensor("map.bias", HIDDEN)
    product, made = linear("product", x, weight, module="map")
    result, loss = tensor("result", BATCH, HIDDEN), tensor("loss")
    rule = notate("a d, d -> a d", made.shape, bias.shape, result.shape, linear=((0, 1),))
    added = op("result", "aten.add.Tensor", ["product", "map.bias"], rule, module="map")
    total = op("loss", "aten.sum.default", ["result"], notate("a d ->", result.shape, (), kind="contraction"))
    ops = [replace(product, expansion=0), replace(added, expansion=0), total]
    tensors, refined = refine_factors({t.name: t for t in (x, weight, bias, made, result, loss)}, ops)
    whole = Expansion(target="aten.linear.default", args=("%x", "%map.weight", "%map.bias"), kwargs={}, output="result")
    graph = Graph(tensors=tensors, inputs=("x",), parameters=("map.weight", "map.bias"), buffers=(), given=(),
                  ops=tuple(refined), expansions=(whole,), loss="loss", tied={})  # fmt: skip
    return find_blocks(graph)


def program_of(blocks: BlockGraph, **splits: str) -> Program:
    """On two devices; `splits` says of the blocks of the map which dim is split."""
    written = draft(blocks, Mesh.of(range(2), tp=2), batch={"x": ((BATCH, WIDE), "float32")})
    for pattern, dim in splits.items():
        written = written.split(pattern, **{dim: "tp"})
    return build_program(blocks, written.plan("test"))


def test_an_expansion_that_a_run_holds_whole_runs_as_its_original() -> None:
    blocks = with_bias()
    program = program_of(blocks)
    operations = [o for run in program.runs for o in run_operations(blocks, run, num_micro=1)]
    assert [(o.target, o.is_original) for o in operations] == [
        ("aten.linear.default", True),
        ("aten.sum.default", False),
    ]
    first = operations[0]
    assert [(x.tensor, x.shape, x.slot, x.is_given) for x in first.inputs] == [
        ("x", (BATCH, WIDE), None, True),
        ("map.weight", (HIDDEN, WIDE), 0, False),
        ("map.bias", (HIDDEN,), 1, False),
    ]
    assert first.outputs[0].tensor == "result"
    assert first.outputs[0].num_bytes == BATCH * HIDDEN * 4


def test_an_expansion_in_two_runs_runs_in_parts() -> None:
    """A product with a contracted dim that is split leaves partial sums, which meet before the bias."""
    blocks = with_bias()
    program = program_of(blocks, map="in")
    operations = [o for run in program.runs for o in run_operations(blocks, run, num_micro=1)]
    assert [(o.target, o.is_original) for o in operations] == [
        ("aten.linear.default", False),
        ("aten.add.Tensor", False),
        ("aten.sum.default", False),
    ]
    assert operations[0].inputs[0].shape == (BATCH, WIDE // 2)
    assert operations[0].outputs[0].shape == (BATCH, HIDDEN)


@pytest.mark.parametrize(
    ("plan", "batch", "hidden"),
    [("single", BATCH, HIDDEN), ("dp=2", BATCH // 2, HIDDEN), ("tp=2", BATCH, HIDDEN // 2),
     ("micro=2", BATCH // 2, HIDDEN)],
)  # fmt: skip
def test_shapes_are_those_of_one_device_and_one_micro_batch(plan: str, batch: int, hidden: int) -> None:
    blocks = tiny_blocks()
    program = build_program(blocks, named_plan(blocks, parse_named(plan), batch=tiny_batch()))
    operations = [o for run in program.runs for o in run_operations(blocks, run, num_micro=program.num_micro_batches)]
    relu = next(o for o in operations if o.target == "aten.relu.default")
    assert relu.inputs[0].shape == relu.outputs[0].shape == (batch, SEQUENCE, hidden)
    assert relu.outputs[0].num_bytes == batch * SEQUENCE * hidden * 4


def test_memory_of_two_maps_by_hand() -> None:
    """Kept: what relu made, for itself and for the second map; the first map's input is the batch."""
    blocks = tiny_blocks()
    program = build_program(blocks, named_plan(blocks, parse_named("single"), batch=tiny_batch()))
    (run,) = program.runs
    hidden, wide, anchor = BATCH * SEQUENCE * HIDDEN * 4, BATCH * SEQUENCE * WIDE * 4, 4
    weights = 2 * WIDE * HIDDEN * 4
    memory = run_memory(blocks, program, run, fused=False)
    assert memory.saved_bytes == hidden
    assert memory.saved_inputs == (False, True)
    assert memory.saved_outputs == (False,)
    assert memory.forward_peak_bytes == 2 * hidden + anchor
    assert memory.backward_peak_bytes >= hidden + weights // 2
    assert memory.backward_peak_bytes <= 2 * hidden + wide + weights
    compiled = run_memory(blocks, program, run, fused=True)
    assert compiled.saved_bytes <= memory.saved_bytes + hidden // 4


@pytest.mark.parametrize(
    ("shape", "strides", "target", "expected"),
    [
        ((2, 3, 4), (12, 4, 1), (6, 4), (4, 1)),
        ((2, 3, 4), (12, 4, 1), (2, 3, 2, 2), (12, 4, 2, 1)),
        ((3, 2, 4), (4, 12, 1), (6, 4), None),
        ((3, 2, 4), (4, 12, 1), (3, 2, 2, 2), (4, 12, 2, 1)),
        ((1, 4), (100, 1), (4,), (1,)),
        ((4,), (0,), (2, 2), (0, 0)),
        ((), (), (1, 1), (1, 1)),
    ],
)
def test_which_reshapes_are_views(
    shape: tuple[int, ...], strides: tuple[int, ...], target: tuple[int, ...], expected: tuple[int, ...] | None
) -> None:
    assert viewed_strides(shape, strides, target) == expected
    assert viewed_strides(shape, contiguous_strides(shape), target) is not None
