"""One run, measured: seconds and memory of its forward and backward, through the same code as in training.

On a CPU two things decide whether a run takes as long alone as in a step: what is in the caches, and whether memory is
fresh from the system. In a step there is other work between a forward and its backward, and other tensors are alive. So
a forward is carried out before the backward of the last one, and the gradients of some backwards are kept. Ratios of
the sum over runs, with the rest of the step as measured, to a whole step on one process, of three models with 1, 4 and
60 million parameters, AMD EPYC with 32 MiB of last-level cache, CPU seconds, 2026-11-16 [Empirical]:

    so                                                                      0.996, 1.000, 0.996
    each backward directly after its forward, nothing kept                  0.918, 0.965, 1.114
    the same, and the caches flushed before each of both                    1.074, 1.061, 1.116
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from planloom.blocks import BlockGraph
from planloom.cost.keys import mask_figures, run_key
from planloom.execute import LocalRun, RunVjp
from planloom.layout import Layout
from planloom.profile.memory import measure_run_memory
from planloom.profile.timing import BUDGET_SECONDS, Timing, time_phases
from planloom.program import Program, Run

Measured = dict[str, tuple[float, float]]
"""key → (value, spread); the spread is one standard deviation"""
MakeLocal = Callable[[LocalRun], Any]
"""The function that training calls for a run: the run itself, or compiled."""
_IN_FLIGHT = {"cpu": 2, "cuda": 1}
_KEPT_BACKWARDS = {"cpu": 3, "cuda": 0}
"""Forwards in flight at one time, and backwards whose gradients are kept: why, is above."""


class RunBench:
    """A run with inputs and cotangents of its local shapes, ready to be carried out again and again."""

    def __init__(
        self,
        blocks: BlockGraph,
        program: Program,
        run: Run,
        given: Mapping[str, Tensor],
        device: torch.device,
        make_local: MakeLocal,
    ) -> None:
        mesh = program.mesh_of(run.stage)
        local = LocalRun(blocks, run, mesh.coordinates(mesh.devices[0]), num_micro=program.num_micro_batches)
        self.run, self.local, self.given, self.device = run, make_local(local), given, device
        self.inputs = [example(blocks, s.tensor, s.layout, s.sizes, device) for s in run.inputs]
        self.is_activation = [s.tensor not in blocks.graph.parameter_names for s in run.inputs]
        self._saved: deque[RunVjp] = deque()
        self._outputs: tuple[Tensor, ...] = ()
        self._gradients: deque[list[Tensor | None]] = deque(maxlen=_KEPT_BACKWARDS[device.type])
        self.cotangents: list[Tensor | None] = []
        self.forward()
        outputs: tuple[Tensor, ...] = self._outputs
        self.cotangents = [
            None if slot.cotangent is None else torch.randn_like(output)
            for slot, output in zip(run.outputs, outputs, strict=True)
        ]
        self._saved.clear()

    def get_ready(self) -> None:
        """Forwards that are in flight before a repetition, as other runs are in training."""
        while self.in_flight < _IN_FLIGHT[self.device.type] - 1:
            self.forward()

    @property
    def in_flight(self) -> int:
        """Forwards whose backward is to come."""
        return len(self._saved)

    def forget(self) -> None:
        """Free what is in flight."""
        self._saved.clear()
        self._gradients.clear()
        self._outputs = ()

    def forward(self) -> None:
        vjp = RunVjp(self.local, self.inputs, self.given, 0)
        self._saved.append(vjp)
        self._outputs = vjp.take_outputs()

    def backward(self) -> None:
        self._gradients.append(self._saved.popleft().backward(self.cotangents))

    def input_gradient(self) -> None:
        self._gradients.append(self._saved.popleft().backward(self.cotangents, wanted=self.is_activation))

    @property
    def separates_gradients(self) -> bool:
        """Has it both activations and parameters with cotangents, so that their gradients are different work?"""
        kinds = {a for a, slot in zip(self.is_activation, self.run.inputs, strict=True) if slot.cotangent is not None}
        return kinds == {True, False}


def measure_run(bench: RunBench, fingerprint: str, *, budget_seconds: float = BUDGET_SECONDS) -> Measured:
    """All figures of a run."""
    bench.get_ready()
    phases = {"forward": bench.forward, "backward": bench.backward}
    timings = time_phases(phases, bench.device, budget_seconds=budget_seconds)
    timings["input_gradient"] = _input_gradient(bench, timings["backward"], budget_seconds / 2)
    found: Measured = {}
    for figure in ("forward", "backward", "input_gradient"):
        found[run_key(fingerprint, figure)] = (timings[figure].seconds, timings[figure].spread)
    if bench.device.type == "cuda":
        found[run_key(fingerprint, "forward_host")] = (timings["forward"].host_seconds, 0.0)
        found[run_key(fingerprint, "backward_host")] = (timings["backward"].host_seconds, 0.0)
    bench.forget()
    if bench.run.turn is not None:  # what a ring holds between its turns is no run's own
        return found
    memory = measure_run_memory(bench.local, bench.inputs, bench.given, bench.cotangents, bench.device)
    found[run_key(fingerprint, "saved_bytes")] = (float(memory.saved_bytes), 0.0)
    masks = mask_figures(run_key(fingerprint, "saved_inputs"), memory.saved_inputs)
    masks |= mask_figures(run_key(fingerprint, "saved_outputs"), memory.saved_outputs)
    found |= {key: (value, 0.0) for key, value in masks.items()}
    found[run_key(fingerprint, "forward_peak_bytes")] = (float(memory.forward_peak_bytes), 0.0)
    found[run_key(fingerprint, "backward_peak_bytes")] = (float(memory.backward_peak_bytes), 0.0)
    return found


def measure_run_again(bench: RunBench, fingerprint: str, first: Measured, *, budget_seconds: float) -> Measured:
    """Its seconds in a later round; those without weight gradients in the ratio to the backward's of the first."""
    bench.get_ready()
    phases = {"forward": bench.forward, "backward": bench.backward}
    timings = time_phases(phases, bench.device, budget_seconds=budget_seconds)
    forward, backward, input_gradient = (
        run_key(fingerprint, figure) for figure in ("forward", "backward", "input_gradient")
    )
    ratio = timings["backward"].seconds / first[backward][0]
    return {
        forward: (timings["forward"].seconds, timings["forward"].spread),
        backward: (timings["backward"].seconds, timings["backward"].spread),
        input_gradient: (ratio * first[input_gradient][0], ratio * first[input_gradient][1]),
    }


def _input_gradient(bench: RunBench, backward: Timing, budget_seconds: float) -> Timing:
    if bench.separates_gradients:
        phases = {"forward": bench.forward, "input_gradient": bench.input_gradient}
        return time_phases(phases, bench.device, budget_seconds=budget_seconds)["input_gradient"]
    has_activations = any(
        is_activation and slot.cotangent is not None
        for is_activation, slot in zip(bench.is_activation, bench.run.inputs, strict=True)
    )
    return backward if has_activations else Timing(seconds=0.0, spread=0.0, host_seconds=0.0)  # nothing to do


def example(blocks: BlockGraph, name: str, layout: Layout, sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """A local tensor with random values; of experts, the rows that a balanced routing gives."""
    tensor, dtype = blocks.graph.tensors[name], getattr(torch, blocks.graph.tensors[name].dtype)
    lengths = iter(layout.local_sizes(sizes))
    shape = [prod(next(lengths) for _ in dim) for dim in tensor.factors]
    if tensor.rows:
        num_rows = int(_balanced(shape[:2], tensor.density, device).sum())
        return torch.randn((1, num_rows, *shape[2:]), device=device).to(dtype)
    if dtype == torch.bool:
        return _balanced(shape, _densities(blocks).get(name, 0.5), device)
    if not (dtype.is_floating_point or dtype.is_complex):  # indices: zero is one of any dim
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.randn(shape, dtype=dtype, device=device)


def _densities(blocks: BlockGraph) -> dict[str, float]:
    """Masks of ragged tensors, with the share of their elements that is true."""
    return {tensor.rows: tensor.density for tensor in blocks.graph.tensors.values() if tensor.rows}


def _balanced(shape: Sequence[int], density: float, device: torch.device) -> Tensor:
    """A mask that is true at regular places."""
    every = max(1, round(1 / density))
    number = sum(torch.arange(n, device=device).view(-1, *[1] * (len(shape) - 1 - i)) for i, n in enumerate(shape))
    return torch.as_tensor(number, device=device).expand(list(shape)) % every == 0
