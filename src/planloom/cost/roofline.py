"""Modelled seconds of a run's local work: a roofline over its operators.

A product takes flops over the device's rate, or bytes over its memory bandwidth if that is longer; all other operators
take their bytes. The backward of a product is two products.
"""

from math import prod

from planloom.blocks import BlockGraph
from planloom.cluster import Device
from planloom.cost.keys import Phase
from planloom.errors import PriceError
from planloom.graph import Op
from planloom.graph.flops import is_product, product_flops
from planloom.graph.rules import flat
from planloom.program import BlockPiece, Program, Run, piece_of

# Median share of the peak rate that large bf16 products reach on A100, H100 and H200: 0.793, 0.779, 0.783
# (column large_gemm_median_frac_of_peak of hardware.csv, from ai-dynamo/aiconfigurator@095f58a).
MATMUL_EFFICIENCY = 0.78


def run_seconds(blocks: BlockGraph, program: Program, run: Run, phase: Phase, device: Device) -> float:
    """Modelled seconds of one phase of a run on one device."""
    coordinates = dict.fromkeys(program.stages[run.stage].mesh.digits, 0)
    total = 0.0
    for part in run.blocks:
        block = blocks.blocks[part.block]
        piece = piece_of(block, part, coordinates, program.num_micro_batches)
        total += sum(_op_seconds(blocks, blocks.graph.ops[index], piece, device) for index in block.ops)
    return total * (1 if phase == "forward" else 2)


def _op_seconds(blocks: BlockGraph, op: Op, piece: BlockPiece, device: Device) -> float:
    rule = op.rule
    assert rule is not None
    if rule.kind == "view":
        return 0.0
    moved, sizes, density = 0.0, dict(rule.sizes), 1.0
    for name, term in zip((*op.inputs, *op.outputs), (*rule.inputs, *rule.outputs), strict=True):
        tensor = blocks.graph.tensors[name]
        lengths = [stop - start for start, stop in piece.box(tensor.sizes, name)]
        sizes.update(zip(flat(term), lengths, strict=True))
        moved += prod(lengths) * tensor.item_bytes * tensor.density
        density = min(density, tensor.density)
    memory_seconds = moved / device.memory_bytes_per_second
    if not is_product(op):
        return memory_seconds + device.launch_seconds
    dtype = blocks.graph.tensors[op.outputs[0]].dtype
    if dtype not in device.flops_per_second:
        raise PriceError(
            f"device {device.name} has no rate for {dtype}",
            given=f"rates for {sorted(device.flops_per_second)}",
            required=f"a rate for {dtype}",
            todo="add it to the cluster file, or profile on this device",
        )
    flops_seconds = density * product_flops(op, sizes) / (device.flops_per_second[dtype] * MATMUL_EFFICIENCY)
    return max(flops_seconds, memory_seconds) + device.launch_seconds
