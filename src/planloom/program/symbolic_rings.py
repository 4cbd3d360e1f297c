"""What the turns of a ring do to symbols: every query must meet every key once, in the forward and in the backward.

A turn's keys and values are those of the device that it names: symbols of other boxes, or that are no values made by the
block, are refused. A ring remembers on each device the places of which it has met the keys; a place met twice is
refused, and what the last turn makes is made only if all were met. On the way back likewise for the cotangent of
queries; cotangents of keys and values name the queries that they are from, and must be complete where they come home.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from planloom.blocks.rings import Ring
from planloom.program.pieces import BlockPiece, piece_of
from planloom.program.symbolic_runs import RunError, SymbolicRun
from planloom.program.symbols import Part, Symbol, covers
from planloom.program.values import RunBlock, Turn


@dataclass(eq=False, slots=True)
class RingSymbols:
    """What a ring holds between its turns on one device in one micro-batch."""

    met: set[int] = field(default_factory=set)
    """Turns whose keys were met in the forward."""
    met_again: set[int] = field(default_factory=set)
    """In the backward."""
    has_cotangent: bool = False
    """The backward of the last turn was given a complete cotangent."""

    def forget(self) -> None:
        """The ring is opened."""
        self.met.clear()
        self.met_again.clear()
        self.has_cotangent = False


@dataclass(frozen=True, kw_only=True)
class SymbolicTurn:
    """A turn of a ring, or what opens it, on one device in one micro-batch."""

    of: SymbolicRun
    state: RingSymbols

    def forward(self, read: Callable[[int, str], Symbol]) -> dict[str, Symbol]:
        """Symbols of what the turn makes."""
        block, part, own = self.of.pieces()[0]
        turn, ring = _turn(part), self._ring
        if turn.opens:
            self.state.forget()
            for tensor, slot in part.reads.items():
                self.of.require_value(block, tensor, read(slot, tensor), self.of.box(own, tensor))
            return {tensor: self._value(own, tensor) for tensor in ring.rotated}
        self._require_keys([read(slot, tensor) for tensor, slot in part.reads.items()])
        self._meet(self.state.met, turn)
        if not turn.is_last:
            return {}
        self._require_all(self.state.met, turn, ring.result)
        return {tensor: self._value(own, tensor) for tensor in block.outputs}

    def backward(self, cotangents: Mapping[str, Symbol], again: Sequence[Symbol]) -> dict[int, Symbol]:
        """Slot → the cotangent of what a turn reads."""
        block, part, own = self.of.pieces()[0]
        turn, ring = _turn(part), self._ring
        if turn.opens:
            self._require_all(self.state.met_again, turn, ring.query)
            for tensor in ring.rotated:
                if self.of.is_differentiable(tensor):
                    self._require_home(tensor, cotangents.get(tensor), turn)
            return {
                slot: self.of.cotangent(block, own, tensor, {()})
                for tensor, slot in part.reads.items()
                if self.of.is_differentiable(tensor)
            }
        self._require_keys(again)
        if turn.is_last:
            self._require_all(self.state.met, turn, ring.result)
            self.of.require_cotangents(block, part, own, cotangents)
            self.state.has_cotangent = True
        if not self.state.has_cotangent:
            raise RunError(ring.result, f"{block.name} goes back round its ring before it has a cotangent")
        self._meet(self.state.met_again, turn)
        found = {}
        for tensor, slot in part.reads.items():
            if self.of.is_differentiable(tensor):
                box = self.of.box(self._met_piece(), tensor)
                found[slot] = Symbol("cotangent", tensor, box, frozenset({self._part(tensor, own)}))
        return found

    @property
    def _ring(self) -> Ring:
        ring = self.of.pieces()[0][0].ring
        assert ring is not None
        return ring

    def _met_piece(self) -> BlockPiece:
        """The piece of the device whose keys and values the turn meets."""
        block, part, _ = self.of.pieces()[0]
        return piece_of(block, part, _turn(part).met(self.of.coordinates), self.of.num_micro)

    def _value(self, piece: BlockPiece, tensor: str) -> Symbol:
        summed = self.of.intervals(piece, lambda dim: tensor in dim.partials)
        parts: frozenset[Part] = frozenset({((tensor, piece.block.name, summed),)})
        return Symbol("value", tensor, self.of.box(piece, tensor), parts)

    def _require_keys(self, given: Sequence[Symbol]) -> None:
        piece = self._met_piece()
        for tensor, symbol in zip(self._ring.rotated, given, strict=True):
            if symbol != self._value(piece, tensor):
                expected = list(self.of.box(piece, tensor))
                raise RunError(tensor, f"{piece.block.name} needs it at {expected} in this turn and is given {symbol}")

    def _meet(self, met: set[int], turn: Turn) -> None:
        if turn.number in met:
            raise RunError(self._ring.result, f"turn {turn.number} of its ring counts twice")
        met.add(turn.number)

    def _require_all(self, met: set[int], turn: Turn, tensor: str) -> None:
        if len(met) < turn.count:
            missing = min(set(range(turn.count)) - met)
            raise RunError(tensor, f"queries have not met the keys of turn {missing} of their ring")

    def _part(self, tensor: str, piece: BlockPiece) -> Part:
        """The contribution of a device's queries to the cotangent of keys or values."""
        context = self._ring.dim.name
        own = self.of.intervals(piece, lambda dim: dim.name == context or tensor not in dim.shards)
        return ((tensor, piece.block.name, own),)

    def _require_home(self, tensor: str, symbol: Symbol | None, turn: Turn) -> None:
        """The cotangent of the device's own keys or values must be there, with a part of every device's queries."""
        block, part, own = self.of.pieces()[0]
        box, context = self.of.box(own, tensor), self._ring.dim
        if symbol is None or symbol.kind != "cotangent" or symbol.tensor != tensor or symbol.box != box:
            raise RunError(tensor, f"{block.name} needs its cotangent at {list(box)} and is given {symbol}")
        at = [dim.name for dim in block.all_dims if dim.name == context.name or tensor not in dim.shards]
        place, mine = at.index(context.name), self._part(tensor, own)[0][2]
        boxes = {part[0][2] for part in symbol.parts if len(part) == 1 and part[0][:2] == (tensor, block.name)}
        others = {(*box[:place], *box[place + 1 :]) for box in boxes}
        queries = [(box[place],) for box in boxes]
        is_mine = others == {(*mine[:place], *mine[place + 1 :])} and len(boxes) == len(symbol.parts)
        if not is_mine or not covers(queries, ((0, context.size),)):
            raise RunError(tensor, f"{block.name} is given an incomplete cotangent: {len(boxes)} of {turn.count} parts")


def _turn(part: RunBlock) -> Turn:
    assert part.turn is not None
    return part.turn
