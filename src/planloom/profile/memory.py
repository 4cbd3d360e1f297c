"""Memory of one run, measured: what autograd keeps between forward and backward, and the peaks of both.

What is kept is asked of autograd itself (its hooks for saved tensors), by storages: views of one storage count once,
and a storage that a slot of the run holds is reported by a flag, not by its bytes. Inputs, cotangents and outputs are
held by the caller throughout, as the buffers of a program hold them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from planloom.cost.memory import RunMemory
from planloom.execute import LocalRun, RunVjp
from planloom.execute.meter import peak_bytes, storage_address


def measure_run_memory(
    local: LocalRun,
    inputs: Sequence[Tensor],
    given: Mapping[str, Tensor],
    cotangents: Sequence[Tensor | None],
    device: torch.device,
) -> RunMemory:
    """One forward and backward of the first micro-batch, after one that warms up where kernels need workspaces."""
    cotangents = [None if value is None else value.contiguous() for value in cotangents]  # as runs hand them over
    held = [tensor for tensor in (*inputs, *given.values(), *cotangents) if tensor is not None]
    if device.type == "cuda":
        RunVjp(local, inputs, given, 0).backward(cotangents)
    packed: list[weakref.ref[Tensor]] = []

    def keep(tensor: Tensor) -> Tensor:
        held_by_node = tensor.detach()
        packed.append(weakref.ref(held_by_node))
        return held_by_node

    with peak_bytes(device) as forward, saved_tensors_hooks(keep, lambda tensor: tensor):
        vjp = RunVjp(local, inputs, given, 0)
    outputs = vjp.take_outputs()
    kept = {
        storage_address(tensor): tensor.untyped_storage().nbytes()
        for tensor in (reference() for reference in packed)
        if tensor is not None and tensor.device.type == device.type  # of what no output needs nothing is left
    }
    known = {storage_address(tensor) for tensor in (*held, *outputs)}
    with peak_bytes(device) as backward:
        gradients = vjp.backward(cotangents)
    del gradients
    return RunMemory(
        saved_bytes=sum(num_bytes for address, num_bytes in kept.items() if address not in known),
        saved_inputs=tuple(storage_address(tensor) in kept for tensor in inputs),
        saved_outputs=tuple(storage_address(tensor) in kept for tensor in outputs),
        forward_peak_bytes=forward[0],
        backward_peak_bytes=backward[0],
    )


def measure_peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """The most that a function allocates above what was there before."""
    with peak_bytes(device) as found:
        function()
    return found[0]
