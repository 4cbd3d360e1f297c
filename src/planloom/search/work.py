"""What one block costs a device by itself: seconds of its forward and backward, bytes that it keeps and needs.

A block under a strategy is a run of one block: its price is that of such a run (`cost`), whichever axes split it. Only
how many pieces each dim is cut into matters, the micro-batches' share of the batch included, so every such combination
is priced once for all meshes, placements and equal layers.

Where such a run was measured, its seconds are the *measured* ones. Runs of plans span several blocks, so most of what
is measured is of larger runs; then a block's modelled seconds are multiplied by the ratio that `measured` found for the
runs that it was measured in, and its price is *interpolated*. Else it is *modelled*. Bytes are always modelled: what a
run of several blocks keeps says nothing of each.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from planloom.blocks import Block, BlockGraph
from planloom.blocks.segments import block_fingerprint
from planloom.cluster import Device
from planloom.cost.keys import run_fingerprint, run_key
from planloom.cost.memory import run_memory
from planloom.cost.prices import Source
from planloom.cost.roofline import estimate_operations
from planloom.layout import Digit, Layout
from planloom.program import Program, Run, RunBlock, Slot, run_operations

Pieces = tuple[int, ...]
"""Into how many pieces every dim of a block is cut, in the order of its dims."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One micro-batch of a block on one device. `saved_bytes`: kept from forward to backward, boundary tensors
    apart."""

    forward_seconds: float
    backward_seconds: float
    saved_bytes: int
    peak_bytes: int
    source: Source = "modelled"


Class = tuple[object, Pieces]
"""Blocks with equal work, cut into so many pieces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What is known by measurement: figures by key (`cost.keys`), and for blocks in larger runs that were measured how
    many times longer than modelled these took, forward and backward."""

    figures: Mapping[str, float] = field(default_factory=dict)
    ratios: Mapping[Class, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Which tensors at its boundary a block keeps from forward to backward."""

    inputs: frozenset[str]
    outputs: frozenset[str]


class WorkPrices:
    """Prices of single blocks, each combination looked at once; `by_volume`: computation is free, as Alpa prices."""

    def __init__(
        self,
        blocks: BlockGraph,
        device: Device,
        *,
        fused: bool,
        by_volume: bool = False,
        measured: Measured | None = None,
    ) -> None:
        self.blocks, self.device, self.fused, self.by_volume = blocks, device, fused, by_volume
        self.measured = measured or Measured()
        self._known: dict[Class, Work] = {}
        self._modelled: dict[Class, Work] = {}
        self._timed: dict[Class, tuple[float, float]] = {}
        self._weights: dict[Class, float] = {}
        self._classes: dict[int, object] = {}
        self._kept: dict[int, Kept] = {}

    def class_of(self, block: Block) -> object:
        """Equal for blocks with equal work."""
        if block.index not in self._classes:
            carried = tuple(self.blocks.graph.is_differentiable(name) for name in block.inputs)
            self._classes[block.index] = (block_fingerprint(self.blocks, block), carried)
        return self._classes[block.index]

    def work(self, block: Block, pieces: Pieces) -> Work:
        key = (self.class_of(block), pieces)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._price(block, pieces)
        return found

    def _price(self, block: Block, pieces: Pieces) -> Work:
        """Measured, or corrected by what larger runs took, or modelled."""
        modelled = self.modelled(block, pieces)
        if self.by_volume:
            return modelled
        figures = self.measured.figures
        if figures:
            run = single_run(self.blocks, block, pieces)
            fingerprint = run_fingerprint(self.blocks, _program(run), run)
            forward, backward = (figures.get(run_key(fingerprint, phase)) for phase in ("forward", "backward"))
            if forward is not None and backward is not None:
                return replace(modelled, forward_seconds=forward, backward_seconds=backward, source="measured")
        ratio = self.measured.ratios.get((self.class_of(block), pieces))
        if ratio is None:
            return modelled
        return replace(
            modelled,
            forward_seconds=modelled.forward_seconds * ratio[0],
            backward_seconds=modelled.backward_seconds * ratio[1],
            source="interpolated",
        )

    def modelled(self, block: Block, pieces: Pieces) -> Work:
        """From the device's figures alone."""
        key = (self.class_of(block), pieces)
        if key not in self._modelled:
            self._modelled[key] = self._model(block, pieces)
        return self._modelled[key]

    def seconds(self, block: Block, pieces: Pieces) -> tuple[float, float]:
        """Forward and backward alone: without the bytes, which take longer to find."""
        if self.measured.figures or self.measured.ratios:
            work = self.work(block, pieces)
            return work.forward_seconds, work.backward_seconds
        return self._modelled_seconds(block, pieces)

    def _modelled_seconds(self, block: Block, pieces: Pieces) -> tuple[float, float]:
        if self.by_volume:
            return 0.0, 0.0
        key = (self.class_of(block), pieces)
        if key not in self._timed:
            run = single_run(self.blocks, block, pieces)
            operations = run_operations(self.blocks, run, num_micro=1)
            forward, backward = (
                estimate_operations(self.blocks, run, operations, phase, self.device, fused=self.fused).seconds
                for phase in ("forward", "backward")
            )
            self._timed[key] = (forward, backward)
        return self._timed[key]

    def _model(self, block: Block, pieces: Pieces) -> Work:
        run = single_run(self.blocks, block, pieces)
        forward, backward = self._modelled_seconds(block, pieces)
        memory = run_memory(self.blocks, _program(run), run, fused=self.fused)
        return Work(
            forward_seconds=forward,
            backward_seconds=backward,
            saved_bytes=memory.saved_bytes,
            peak_bytes=max(memory.forward_peak_bytes, memory.backward_peak_bytes),
        )

    def weight_seconds(self, block: Block, pieces: Pieces) -> float:
        """What of a block's backward makes the gradients of its parameters: modelled, as a share of the backward."""
        key = (self.class_of(block), pieces)
        if key not in self._weights:
            run = single_run(self.blocks, block, pieces)
            operations = run_operations(self.blocks, run, num_micro=1)
            whole, first = (
                estimate_operations(self.blocks, run, operations, phase, self.device, fused=self.fused).seconds
                for phase in ("backward", "input_gradient")
            )
            share = max(0.0, 1 - first / whole) if whole > 0 else 0.0
            self._weights[key] = share * self.work(block, pieces).backward_seconds
        return self._weights[key]

    def kept(self, block: Block) -> Kept:
        """What a block keeps at its boundary; no split changes it."""
        if block.index not in self._kept:
            self._kept[block.index] = self._find_kept(block)
        return self._kept[block.index]

    def _find_kept(self, block: Block) -> Kept:
        run = single_run(self.blocks, block, (1,) * len(block.dims))
        memory = run_memory(self.blocks, _program(run), run, fused=self.fused)
        inputs = zip(run.inputs, memory.saved_inputs, strict=True)
        outputs = zip(run.outputs, memory.saved_outputs, strict=True)
        return Kept(
            inputs=frozenset(slot.tensor for slot, is_kept in inputs if is_kept),
            outputs=frozenset(slot.tensor for slot, is_kept in outputs if is_kept),
        )


def single_run(blocks: BlockGraph, block: Block, pieces: Pieces) -> Run:
    """A run of one block whose dims are cut into so many pieces."""
    digits = {
        dim.name: Digit(axis=dim.name, index=0, size=count)
        for dim, count in zip(block.dims, pieces, strict=True)
        if count > 1
    }

    def slot(tensor: str, *, carries: bool) -> Slot:
        sizes = blocks.graph.tensors[tensor].sizes
        splits: list[tuple[Digit, ...]] = [()] * len(sizes)
        for dim in block.dims:
            if dim.name in digits and tensor in dim.shards:
                splits[dim.shards[tensor]] += (digits[dim.name],)
        layout = Layout(splits=tuple(splits))
        return Slot(tensor=tensor, layout=layout, cotangent=layout if carries else None, sizes=sizes)

    is_differentiable = blocks.graph.is_differentiable
    gives = any(is_differentiable(tensor) for tensor in block.outputs)
    read = (*block.inputs, *block.parameters)
    part = RunBlock(
        block=block.index,
        splits=tuple((name, (digit,)) for name, digit in digits.items()),
        timed_dim="",
        reads={tensor: i for i, tensor in enumerate(read)},
        passes_partial=block.is_source,
    )
    return Run(
        index=0,
        stage=0,
        blocks=(part,),
        inputs=tuple(slot(tensor, carries=gives and is_differentiable(tensor)) for tensor in read),
        outputs=tuple(slot(tensor, carries=is_differentiable(tensor)) for tensor in block.outputs),
    )


def _program(run: Run) -> Program:
    return Program(plan_name="", num_micro_batches=1, stages=(), runs=(run,))
