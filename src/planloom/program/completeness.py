"""When is a symbol complete? For a value: its producer contributed everything; for a cotangent: every consumer did."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from planloom.blocks import Block, BlockDim, BlockGraph
from planloom.layout import Box, Combine
from planloom.layout.boxes import whole
from planloom.plan.checks import BATCH_DIM
from planloom.program.symbols import SEED, STORED, Symbol, covers, missing


@dataclass(frozen=True, kw_only=True)
class Completeness:
    """What is complete in a model; answers are words that say what is missing, empty if nothing is.

    `share`: of so many micro-batches, only so many are looked at: what is summed over the batch is complete with their
    part of it.
    """

    blocks: BlockGraph
    share: tuple[int, int] = (1, 1)

    def lacks_value(self, symbol: Symbol) -> str:
        if symbol.tensor in self.blocks.graph.parameters:
            return "" if symbol.parts == {STORED} else "it is zero here"
        block = self.blocks.blocks[self.blocks.producer[symbol.tensor]]
        if any(part[0][:2] != (symbol.tensor, block.name) for part in symbol.parts):
            return "it holds foreign contributions"
        full = tuple((0, self._size(dim)) for dim in block.dims if symbol.tensor in dim.partials)
        boxes = [part[0][2] for part in symbol.parts]
        return "" if covers(boxes, full) else f"{block.name} contributed only {len(boxes)} of its parts"

    def lacks_cotangent(self, symbol: Symbol) -> str:
        if symbol.tensor == self.blocks.graph.loss:
            return "" if symbol.parts == {SEED} else "it is not the loss's own"
        return missing(symbol.tensor, symbol.parts, self.consumers(symbol.tensor), self._outputs)

    def combine(self, symbol: Symbol) -> Combine:
        """How the parts of a symbol combine."""
        if symbol.kind != "value" or symbol.tensor not in self.blocks.producer:
            return "sum"
        block = self.blocks.blocks[self.blocks.producer[symbol.tensor]]
        kinds = {dim.partials[symbol.tensor] for dim in block.dims if symbol.tensor in dim.partials}
        return "max" if "max" in kinds else "sum"

    def consumers(self, tensor: str) -> Mapping[str, Box]:
        """The blocks that give a cotangent of a tensor, each with the box of its dims that the tensor lacks."""
        return self._consumers.get(tensor, {})

    def gives_cotangents(self, block: Block) -> bool:
        return any(self.blocks.graph.is_differentiable(tensor) for tensor in block.outputs)

    @cached_property
    def _consumers(self) -> dict[str, dict[str, Box]]:
        found: dict[str, dict[str, Box]] = {}
        for tensor, indices in self.blocks.consumers.items():
            for block in (self.blocks.blocks[index] for index in indices):
                if self.gives_cotangents(block):
                    lacking = whole(tuple(self._size(dim) for dim in block.all_dims if tensor not in dim.shards))
                    found.setdefault(tensor, {})[block.name] = lacking
        return found

    def _size(self, dim: BlockDim) -> int:
        found, of = self.share
        return dim.size * found // of if dim.name == BATCH_DIM else dim.size

    def _outputs(self, consumer: str) -> Mapping[str, Mapping[str, Box]]:
        block = self._by_name[consumer]
        graph = self.blocks.graph
        return {tensor: self.consumers(tensor) for tensor in block.outputs if graph.is_differentiable(tensor)}

    @cached_property
    def _by_name(self) -> dict[str, Block]:
        return {block.name: block for block in self.blocks.blocks}
