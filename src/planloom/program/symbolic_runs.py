"""What a run does to symbols: block by block, with the very intervals that the runtime computes with."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from planloom.blocks import Block, BlockGraph
from planloom.layout import Box, Digit
from planloom.program.completeness import Completeness
from planloom.program.moments import coordinates_in
from planloom.program.pieces import BlockPiece, piece_of
from planloom.program.symbols import Part, Symbol, added
from planloom.program.values import Run, RunBlock


class RunError(Exception):
    """A run is given what its local function does not assume."""

    def __init__(self, tensor: str, what: str) -> None:
        super().__init__(what)
        self.tensor = tensor


@dataclass(frozen=True, kw_only=True)
class SymbolicRun:
    """A run on one device in one micro-batch."""

    blocks: BlockGraph
    complete: Completeness
    run: Run
    coordinates: Mapping[Digit, int]
    num_micro: int
    micro: int

    def forward(self, read: Callable[[int, str], Symbol]) -> dict[str, Symbol]:
        """Symbols of everything that the run makes; `read(slot, tensor)` gives its inputs."""
        made: dict[str, Symbol] = {}
        for block, part, piece in self.pieces():
            for tensor in (*block.inputs, *block.parameters):
                symbol = read(part.reads[tensor], tensor) if tensor in part.reads else made[tensor]
                self.require_value(block, tensor, symbol, self.box(piece, tensor))
            for tensor in block.outputs:
                summed = self.intervals(piece, lambda dim, t=tensor: t in dim.partials)
                parts: frozenset[Part] = frozenset({((tensor, block.name, summed),)})
                made[tensor] = Symbol("value", tensor, self.box(piece, tensor), parts)
        return made

    def backward(self, cotangents: Mapping[str, Symbol]) -> dict[int, Symbol]:
        """Slot → the cotangent of a run's input, from those of its outputs."""
        inside = dict(cotangents)
        slots: dict[int, Symbol] = {}
        for block, part, piece in reversed(self.pieces()):
            if not self.complete.gives_cotangents(block):
                continue
            taken = self.require_cotangents(block, part, piece, inside)
            for tensor in (*block.inputs, *block.parameters):
                if not self.is_differentiable(tensor):
                    continue
                symbol = self.cotangent(block, piece, tensor, taken)
                if tensor in part.reads:
                    slots[part.reads[tensor]] = self._sum(slots.get(part.reads[tensor]), symbol)
                else:
                    inside[tensor] = self._sum(inside.get(tensor), symbol)
        return slots

    def cotangent(self, block: Block, piece: BlockPiece, tensor: str, taken: Iterable[Part]) -> Symbol:
        """What a block gives as the cotangent of its input, from what it took."""
        own = self.intervals(piece, lambda dim: tensor not in dim.shards)
        parts = frozenset(((tensor, block.name, own), *rest) for rest in taken)
        return Symbol("cotangent", tensor, self.box(piece, tensor), parts)

    def is_differentiable(self, tensor: str) -> bool:
        return self.blocks.graph.is_differentiable(tensor)

    def pieces(self) -> list[tuple[Block, RunBlock, BlockPiece]]:
        pairs = [(self.blocks.blocks[part.block], part) for part in self.run.blocks]
        at = coordinates_in(self.run, self.coordinates)
        return [(block, part, piece_of(block, part, at, self.num_micro)) for block, part in pairs]

    def box(self, piece: BlockPiece, tensor: str) -> Box:
        return piece.box(self.blocks.graph.tensors[tensor].sizes, tensor, self.micro)

    def intervals(self, piece: BlockPiece, wanted: Callable[..., bool]) -> Box:
        return tuple(piece.interval(dim.name, dim.size, self.micro) for dim in piece.block.all_dims if wanted(dim))

    def require_value(self, block: Block, tensor: str, symbol: Symbol, box: Box) -> None:
        if symbol.kind != "value" or symbol.tensor != tensor or symbol.box != box:
            raise RunError(tensor, f"{block.name} needs it at {list(box)} and is given {symbol}")
        lack = self.complete.lacks_value(symbol)
        if lack:
            raise RunError(tensor, f"{block.name} is given an incomplete value: {lack}")

    def require_cotangents(
        self, block: Block, part: RunBlock, piece: BlockPiece, inside: Mapping[str, Symbol]
    ) -> set[Part]:
        """What the cotangents of a block's outputs are made of: one empty part if complete, else what is passed on."""
        taken: set[Part] = set()
        for tensor in block.outputs:
            if not self.is_differentiable(tensor):
                continue
            box = self.box(piece, tensor)
            symbol = inside.get(tensor, Symbol("cotangent", tensor, box, frozenset()))
            if symbol.kind != "cotangent" or symbol.tensor != tensor or symbol.box != box:
                raise RunError(tensor, f"{block.name} needs its cotangent at {list(box)} and is given {symbol}")
            if part.passes_partial:
                taken.update(symbol.parts)
                continue
            lack = self.complete.lacks_cotangent(symbol)
            if lack:
                raise RunError(tensor, f"{block.name} is given an incomplete cotangent: {lack}")
            taken.add(())
        return taken

    def _sum(self, old: Symbol | None, new: Symbol) -> Symbol:
        if old is None:
            return new
        try:
            return added(old, new)
        except ValueError as error:
            raise RunError(new.tensor, str(error)) from None
