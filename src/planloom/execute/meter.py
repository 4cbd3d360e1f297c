"""A meter of the bytes that operators allocate, inside kernels too.

On the CPU every allocation and release is read from torch's profiler. (A dispatch mode sees the results of operators
only, and changes what it measures: while one is on, autograd adds no cotangents in place.) On CUDA the caching
allocator counts, in blocks of 512 bytes.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor
from torch.autograd.profiler import profile

_STDERR = 2
_MEMORY_EVENT = "[memory]"


def storage_address(tensor: Tensor) -> int:
    """Where a tensor's storage lies: equal for views of one storage."""
    return tensor.untyped_storage().data_ptr()


@contextmanager
def peak_bytes(device: torch.device) -> Iterator[list[int]]:
    """Yields a list that holds afterwards the most that was allocated above what was there before."""
    found: list[int] = []
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield found
        torch.cuda.synchronize(device)
        found.append(torch.cuda.max_memory_allocated(device) - before)
        return
    profiler = profile(profile_memory=True)
    with _quiet():
        profiler.__enter__()
    try:
        yield found
    finally:
        with _quiet():
            profiler.__exit__(None, None, None)
    found.append(max(accumulate(_changes(profiler), initial=0)))


def _changes(profiler: profile) -> Sequence[int]:
    """Bytes allocated and, negative, released on the CPU, in order."""
    assert profiler.kineto_results is not None
    events = [event for event in profiler.kineto_results.events() if event.name() == _MEMORY_EVENT]
    events.sort(key=lambda event: event.start_ns())
    return [event.nbytes() for event in events]  # type: ignore[attr-defined]


@contextmanager
def _quiet() -> Iterator[None]:
    """While torch's profiler starts or stops, which it announces on standard error."""
    kept = os.dup(_STDERR)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, _STDERR)
        yield
    finally:
        os.dup2(kept, _STDERR)
        os.close(kept)
        os.close(nowhere)
