"""Transform: split every block as its strategy says, and find the layout of every tensor and cotangent.

With a block split along dim d over digit a:

| tensor of the block        | layout over a | its cotangent over a                                     |
|----------------------------|---------------|----------------------------------------------------------|
| input that has d           | split         | split                                                    |
| input without d            | replicated    | partial: every device adds its part                      |
| output that has d          | split         | split                                                    |
| output that d leaves partial | partial     | replicated                                               |

A block that is not split over a has everything replicated, cotangents too. One exception: a *source*, a block that
reads no activations (a position table), passes a partial cotangent on to its parameters, whose gradients are reduced
anyway; over the micro-batches it must, for no micro-batch sees more than its own part.

Micro-batches are a time axis: they split the dim `batch` before any device does, so a layout here is that of a tensor
inside one micro-batch, and `sizes` are its sizes there. Other time axes have a scope (`plan.times`): inside it their
digit splits tensors as one of space does, by the same table, and leaves them partial; outside there is no such digit.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from planloom.blocks import Block, BlockGraph
from planloom.layout import Digit, Layout
from planloom.plan import Plan
from planloom.plan.checks import BATCH_DIM
from planloom.plan.times import Scope, scopes_by_block


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The layouts that a plan's strategies give to the tensors of every block."""

    blocks: BlockGraph
    plan: Plan
    passed_on: dict[int, tuple[Digit, ...]]
    """For every block the digits over which it takes partial cotangents and passes them on."""
    known_splits: dict[int, tuple[tuple[str, tuple[Digit, ...]], ...]] = field(default_factory=dict)
    known_layouts: dict[tuple[int, str], Layout] = field(default_factory=dict)
    """What was asked before: a program's phases ask for the same layouts many times."""

    @cached_property
    def scope_of(self) -> Mapping[int, Scope]:
        """Block → the scope in whose pieces it is carried out."""
        return scopes_by_block(self.plan)

    def times(self, block: int) -> tuple[Digit, ...]:
        """The digits of time whose scope holds a block."""
        return (self.scope_of[block].axis.digit,) if block in self.scope_of else ()

    @cached_property
    def all_times(self) -> frozenset[Digit]:
        """The digits of all time axes beside the micro-batches."""
        return frozenset(axis.digit for axis in self.plan.times)

    def block_splits(self, block: Block) -> tuple[tuple[str, tuple[Digit, ...]], ...]:
        """(dim, digits of space and then of time) for every split dim of a block."""
        if block.index not in self.known_splits:
            self.known_splits[block.index] = self._find_splits(block)
        return self.known_splits[block.index]

    def _find_splits(self, block: Block) -> tuple[tuple[str, tuple[Digit, ...]], ...]:
        splits = {
            dim: tuple(digit for axis in axes for digit in self.plan.axis(block.index, axis).digits)
            for dim, axes in self.plan.strategies[block.index].items()
        }
        return tuple((dim, digits) for dim, digits in splits.items() if digits)

    def goes_round(self, block: Block) -> bool:
        """Is a block split along its sequence, so that keys and values go round a ring of devices?"""
        return block.ring is not None and any(dim == block.ring.dim.name for dim, _ in self.block_splits(block))

    def timed_dim(self, block: Block) -> str:
        """The dim that micro-batches split: `batch`, where the block has it."""
        return BATCH_DIM if self.plan.num_micro_batches > 1 and block.dim(BATCH_DIM) is not None else ""

    def timed_factor(self, block: Block, tensor: str) -> int:
        """The factor of a tensor that micro-batches split, or -1."""
        dim = block.dim(self.timed_dim(block))
        return dim.shards.get(tensor, -1) if dim is not None else -1

    def sizes(self, block: Block, tensor: str) -> tuple[int, ...]:
        """The tensor's factor sizes inside one micro-batch."""
        sizes = list(self.blocks.graph.tensors[tensor].sizes)
        factor = self.timed_factor(block, tensor)
        if factor >= 0:
            sizes[factor] //= self.plan.num_micro_batches
        return tuple(sizes)

    def layout(self, block: Block, tensor: str) -> Layout:
        """The layout of an input or output of a block."""
        key = (block.index, tensor)
        if key not in self.known_layouts:
            self.known_layouts[key] = self._find_layout(block, tensor)
        return self.known_layouts[key]

    def _find_layout(self, block: Block, tensor: str) -> Layout:
        num_factors = len(self.blocks.graph.tensors[tensor].sizes)
        splits: list[tuple[Digit, ...]] = [()] * num_factors
        partial: tuple[Digit, ...] = ()
        combine = "sum"
        for name, digits in self.block_splits(block):
            dim = block.dim(name)
            assert dim is not None
            if tensor in dim.shards:
                splits[dim.shards[tensor]] += digits
            elif tensor in dim.partials:
                partial += digits
                combine = dim.partials[tensor]
        layout = Layout(splits=tuple(splits), partial=tuple(sorted(partial)), combine=combine)  # type: ignore[arg-type]
        layout.local_sizes(self.sizes(block, tensor))
        return layout

    def produced_cotangent(self, block: Block, tensor: str) -> Layout:
        """The layout in which a block takes the cotangent of its output."""
        layout = self.layout(block, tensor).completed()
        return Layout(splits=layout.splits, partial=self.passed_on[block.index])

    def consumed_cotangent(self, block: Block, tensor: str) -> Layout:
        """The layout in which a block gives the cotangent of its input."""
        layout = self.layout(block, tensor)
        partial = [
            digit
            for name, digits in self.block_splits(block)
            if tensor not in block.dim(name).shards  # type: ignore[union-attr]
            for digit in digits
        ]
        partial += [digit for digit in self.passed_on[block.index] if digit not in partial]
        return Layout(splits=layout.splits, partial=tuple(sorted(partial)))

    def gives_cotangents(self, block: Block) -> bool:
        """Does a cotangent ever come back through this block?"""
        return any(self.is_differentiable(tensor) for tensor in block.outputs)

    def is_differentiable(self, tensor: str) -> bool:
        return self.blocks.graph.is_differentiable(tensor)


def split_blocks(blocks: BlockGraph, plan: Plan) -> Splits:
    """All layouts of a plan. Blocks are visited last to first: what one passes on depends on its consumers."""
    passed_on: dict[int, tuple[Digit, ...]] = {}
    splits = Splits(blocks=blocks, plan=plan, passed_on=passed_on)
    for block in reversed(blocks.blocks):
        partial: set[Digit] = set()
        if block.is_source:
            for tensor in block.outputs:
                for consumer in blocks.consumers.get(tensor, ()):
                    if plan.stages[consumer] == plan.stages[block.index]:
                        partial.update(splits.consumed_cotangent(blocks.blocks[consumer], tensor).partial)
            partial -= {digit for _, digits in splits.block_splits(block) for digit in digits}
            partial -= splits.all_times.difference(splits.times(block.index))
        passed_on[block.index] = tuple(sorted(partial))
    return splits
