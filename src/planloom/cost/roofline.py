"""Modelled seconds of a run's local work, without any measurement of it: a roofline by shape.

What is launched says `fusion.py`: products and attention with their shapes, and kernels that move bytes. Products are
priced by `efficiency.py`, attention by `attention.py`, bytes by the share of the peak bandwidth that streams reach:

    movement   start_seconds × launches + bytes / (bandwidth × stream_share)

The host launches kernels while the device computes, so a run takes the longer of the two, each summed over its kernels;
a device that is not asynchronous (a CPU) takes their sum. All figures of the hardware are those of the cluster file.

Errors of kernels of one run are alike, not independent (the same clock, the same library): the relative uncertainty of
a sum is the mean of the parts' by seconds.
"""

from collections.abc import Iterable, Sequence
from math import ceil

from planloom.blocks import BlockGraph
from planloom.cluster import Device
from planloom.cost.attention import attention_seconds
from planloom.cost.efficiency import Efficiency, Estimate, efficiency_of, product_seconds
from planloom.cost.fusion import RunPhase, run_kernels
from planloom.cost.kernels import Attention, Kernel, Movement, Product
from planloom.cost.rings import turn_kernels
from planloom.program import Operation, Program, Run, run_operations

STREAM_UNCERTAINTY = 0.15
"""Of kernels that move bytes: what a compiler fuses, and what a cache keeps, is not known exactly. Assumed."""

UNKNOWN_UNCERTAINTY = 1.0
"""Of users' operators, which are priced as if they only moved their tensors."""

IRREGULAR_UNCERTAINTY = 0.25
"""Of convolutions and grouped products of experts, which no fit has seen. Assumed."""

# Reads and writes of one AdamW step as torch's default on GPUs runs it, several tensors at a time, one operation after
# another (torch.optim.adamw, foreach): weight decay 2, first moment 3, second 2 + 3, root 2, division 2, epsilon 2,
# update 4. A fused one reads parameter, gradient and two moments and writes all but the gradient.
UPDATE_ACCESSES, FUSED_UPDATE_ACCESSES = 20, 7
UPDATE_OPERATIONS = 8
FOREACH_TENSORS = 36
"""Tensors that one launch of torch's multi-tensor kernels takes at most, for four lists: depth_to_max_tensors in ATen's
MultiTensorApply.cuh of torch 2.13 (252 where kernels may have long arguments)."""


def estimate_run(
    blocks: BlockGraph, program: Program, run: Run, phase: RunPhase, device: Device, *, fused: bool
) -> Estimate:
    """One phase of a run on one device, for one micro-batch; `fused`: the run is compiled."""
    operations = run_operations(blocks, run, num_micro=program.num_micro_batches)
    return estimate_operations(blocks, run, operations, phase, device, fused=fused)


def estimate_operations(
    blocks: BlockGraph, run: Run, operations: Sequence[Operation], phase: RunPhase, device: Device, *, fused: bool
) -> Estimate:
    """The same, where what the run executes is known already."""
    if run.turn is not None:
        return kernel_seconds(turn_kernels(blocks, run, operations, phase), device)
    return kernel_seconds(run_kernels(blocks.graph, run, operations, phase, fused=fused), device)


def kernel_seconds(kernels: Iterable[Kernel], device: Device) -> Estimate:
    """Kernels one after another."""
    efficiency = efficiency_of(device.name)
    seconds, deviation, num_launches = 0.0, 0.0, 0
    for kernel in kernels:
        one = _one(kernel, device, efficiency)
        seconds += one.seconds
        deviation += one.seconds * one.uncertainty
        num_launches += kernel.num_launches if isinstance(kernel, Movement) else 1
    uncertainty = deviation / seconds if seconds else STREAM_UNCERTAINTY
    launches = num_launches * device.launch_seconds
    total = max(seconds, launches) if efficiency.is_asynchronous else seconds + launches
    return Estimate(seconds=total, uncertainty=uncertainty)


def _one(kernel: Kernel, device: Device, efficiency: Efficiency) -> Estimate:
    if isinstance(kernel, Product):
        found = product_seconds(device, kernel.dtype, kernel.item_bytes, kernel.shape)
        if kernel.is_regular:
            return found
        return Estimate(seconds=found.seconds, uncertainty=max(found.uncertainty, IRREGULAR_UNCERTAINTY))
    if isinstance(kernel, Attention):
        return attention_seconds(device, kernel.dtype, kernel.item_bytes, kernel.shape, kernel.direction)
    moved = kernel.num_bytes / (device.memory_bytes_per_second * efficiency.stream_share)
    return Estimate(
        seconds=moved + kernel.num_launches * efficiency.start_seconds,
        uncertainty=STREAM_UNCERTAINTY if kernel.is_known else UNKNOWN_UNCERTAINTY,
    )


def memory_seconds(num_bytes: int, device: Device) -> Estimate:
    """One kernel that reads and writes so many bytes: a sum, a copy."""
    return kernel_seconds([Movement(num_bytes)], device)


def update_seconds(shards: Sequence[tuple[int, int]], device: Device, *, fused: bool = False) -> Estimate:
    """One AdamW step on shards of (elements, bytes of an element); moments have the parameter's dtype.

    `fused`: torch's `AdamW(fused=True)`, one kernel; else its default, operation by operation.
    """
    accesses = FUSED_UPDATE_ACCESSES if fused else UPDATE_ACCESSES
    num_bytes = accesses * sum(elements * item_bytes for elements, item_bytes in shards)
    launches = ceil(len(shards) / FOREACH_TENSORS) if efficiency_of(device.name).is_asynchronous else len(shards)
    return kernel_seconds([Movement(num_bytes, num_launches=launches * (1 if fused else UPDATE_OPERATIONS))], device)
