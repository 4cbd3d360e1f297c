"""The devices of a program as the verifier sees them: symbols in buffers, and what is under way between them.

What has been started belongs to a buffer until it is awaited: half of an exchange, the source of a collective, or its
result. Reading what has not arrived, and writing or freeing what is in flight, is refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from planloom.blocks import BlockGraph
from planloom.layout import Box
from planloom.program.completeness import Completeness
from planloom.program.exchange import Message, numbered
from planloom.program.meetings import Key, Meetings
from planloom.program.shared import span
from planloom.program.symbolic_rings import RingSymbols
from planloom.program.symbolic_steps import StepError, apply_steps, extract, join_messages
from planloom.program.symbols import STORED, Symbol, added
from planloom.program.values import (
    Buffer,
    Collective,
    Program,
    Receive,
    Send,
    Wait,
)

Place = tuple[Buffer, int]


class FaultError(Exception):
    """What is wrong, before instruction and ranks are known."""

    def __init__(self, tensor: str, what: str, ranks: tuple[int, ...]) -> None:
        super().__init__(what)
        self.tensor, self.what, self.ranks = tensor, what, ranks


@dataclass(frozen=True, slots=True)
class _Work:
    """What is under way on a buffer: half of an exchange, the source of a collective, or its result."""

    kind: Literal["send", "receive", "source", "result"]
    channel: str = ""
    micro: int = -1
    target: "Place | None" = None

    @property
    def delivers(self) -> bool:
        return self.kind in ("receive", "result")


class Devices:
    """All devices between two instructions, and the instructions that move something between them."""

    def __init__(self, blocks: BlockGraph, program: Program, *, share: tuple[int, int] = (1, 1)) -> None:
        self.blocks, self.program, self.graph = blocks, program, blocks.graph
        self.memory: dict[int, dict[Place, Symbol]] = {device: {} for device in program.devices}
        self.complete = Completeness(blocks=blocks, share=share)
        self.saved: dict[tuple[int, int, int], dict[Buffer, Symbol]] = {}
        self.rings: dict[tuple[int, int, int], RingSymbols] = {}
        """By device, block and micro-batch: what rings hold between their turns."""
        self.put_off: dict[tuple[int, int, int], dict[int, Symbol]] = {}
        """Gradients of parameters that a split backward has left to a `WeightGradient`, by slot."""
        self.sent: dict[tuple[str, int], set[int]] = {}
        """The devices that have started to send on a channel, for a micro-batch."""
        self.receiving: dict[tuple[str, int], set[int]] = {}
        self.received: dict[tuple[str, int], Receive] = {}
        self.messages: dict[tuple[str, int], dict[Message, Symbol]] = {}
        self.in_flight: dict[tuple[int, Place], list[_Work]] = {}
        self.written_by: dict[tuple[int, Place], str] = {}
        self.pieces: dict[tuple[int, Place], list[tuple[Symbol, Box]]] = {}
        """What has been put into a buffer, piece by piece."""
        self.views: dict[tuple[int, Place], Buffer] = {}
        """Pieces of stored or gathered parameters, which lie in their storage."""
        self.meetings = Meetings(self._meet)
        self.met: dict[Key, tuple[Collective, dict[int, Symbol]]] = {}
        """What the roles that came to a collective have brought."""
        self.results: dict[tuple[int, Place], Symbol] = {}
        self.role_of = {device: s for s, stage in enumerate(program.stages) for device in stage.mesh.devices}
        self.now = ""
        self.updated: set[tuple[int, str]] = set()
        # Autograd keeps views of these: a backward sees what they hold then, not what the forward read.
        self.persistent = {b for stage in program.stages for p in stage.parameters for b in (p.buffer, *p.gathers)}
        self.counts = {"instructions": 0, "collectives": 0, "messages": 0}
        for stage in program.stages:
            for stored in stage.parameters:
                for device in stage.mesh.devices:
                    home = program.mesh_of(stored.stage)
                    if device not in home.devices:
                        continue  # refused before anything is carried out
                    box = stored.layout.box(stored.sizes, home.coordinates(device))
                    symbol = Symbol("value", stored.name, box, frozenset({STORED}))
                    self.memory[device][stored.buffer, -1] = symbol

    def _place(self, buffer: Buffer, micro: int) -> Place:
        return (buffer, micro if buffer.indexed else -1)

    def _read(self, device: int, buffer: Buffer, micro: int, tensor: str) -> Symbol:
        place = self._place(buffer, micro)
        if any(work.delivers for work in self.in_flight.get((device, place), ())):
            raise FaultError(tensor, f"{buffer} is read before it was awaited", (device,))
        if place not in self.memory[device]:
            raise FaultError(tensor, f"{buffer} is read before it is written or after it was freed", (device,))
        return self.memory[device][place]

    def _write(self, device: int, buffer: Buffer, micro: int, symbol: Symbol) -> None:
        place = self._place(buffer, micro)
        if (device, place) in self.in_flight:
            raise FaultError(symbol.tensor, f"{buffer} is written while it is in flight", (device,))
        self.memory[device][place] = symbol
        self.written_by[device, place] = self.now
        self.pieces.pop((device, place), None)
        self.views.pop((device, place), None)

    def _forget(self, device: int, place: Place) -> None:
        self.memory[device].pop(place, None)
        self.pieces.pop((device, place), None)

    def _require_tensor(self, device: int, tensor: str, symbol: Symbol) -> None:
        if symbol.tensor != tensor:
            raise FaultError(tensor, f"the buffer holds {symbol}", (device,))

    def _add(self, device: int, tensor: str, first: Symbol, second: Symbol) -> Symbol:
        try:
            return added(first, second)
        except ValueError as error:
            raise FaultError(tensor, str(error), (device,)) from None

    # -- communication

    def _collective(self, s: int, devices: tuple[int, ...], collective: Collective, micro: int) -> None:
        tensor = collective.tensor
        symbols = {device: self._read(device, collective.source, micro, tensor) for device in devices}
        for device, symbol in symbols.items():
            self._require_tensor(device, tensor, symbol)
            self._require_rows(device, collective, symbol, micro)
        target = self._place(collective.target, micro)
        for device in devices:
            if (device, target) in self.in_flight:
                raise FaultError(tensor, f"{collective.target} is written while it is in flight", (device,))
            source = self._place(collective.source, micro)
            self.in_flight[device, target] = [_Work("result")]
            self.written_by[device, target] = self.now
            if source != target:
                self.in_flight.setdefault((device, source), []).append(_Work("source", target=target))
        self.counts["collectives"] += sum(not step.is_local for step in collective.steps)
        roles = self._roles_in(s, collective)
        key = (target, roles)
        known, brought = self.met.setdefault(key, (collective, {}))
        if known != collective or any(device in brought for device in devices):
            raise FaultError(tensor, f"another collective is under way into {collective.target}", devices)
        brought.update(symbols)
        self.meetings.start(s, key, roles)

    def _roles_in(self, s: int, collective: Collective) -> frozenset[int]:
        """The roles that take part in a collective: of a role's own buffers itself alone, whatever its groups say."""
        if collective.source.of < 0 and collective.target.of < 0:
            return frozenset((s,))
        found = {self.role_of.get(device, -1) for device in span(collective)} | {s}
        if not found <= set(self._members(collective.target.of)):
            raise FaultError(collective.tensor, "a group holds a device of another stage", ())
        return frozenset(found)

    def _members(self, group: int) -> set[int]:
        """The roles that share a group."""
        return {self.role_of[device] for device in self.program.mesh_of(group).devices} if group >= 0 else set()

    def _meet(self, key: Any) -> None:
        """All have come: a collective happens."""
        collective, symbols = self.met.pop(key)
        try:
            combine = self.complete.combine(next(iter(symbols.values())))
            results = apply_steps(collective, symbols, combine)
        except StepError as error:
            raise FaultError(collective.tensor, str(error), error.ranks) from None
        self.results.update(((device, key[0]), symbol) for device, symbol in results.items())

    def _take(self, devices: tuple[int, ...], collectives: Sequence[Collective], micro: int) -> None:
        """Sources that were copied at the start are forgotten, and no longer in flight."""
        for device in devices:
            for collective in collectives:
                place = self._place(collective.source, micro)
                if place[0] in self.persistent:
                    raise FaultError(collective.tensor, "a stored parameter is forgotten", (device,))
                target = self._place(collective.target, micro)
                others = [work for work in self.in_flight.get((device, place), ()) if work.target != target]
                self._settle((device, place), others)
                if others:
                    raise FaultError(collective.tensor, f"{collective.source} is forgotten in flight", (device,))
                self._forget(device, place)

    def _require_rows(self, device: int, collective: Collective, symbol: Symbol, micro: int) -> None:
        """A ragged tensor is moved with its mask: complete, and of the very rows that the device holds."""
        mask = self.graph.tensors[collective.tensor].rows
        if not mask and collective.rows is None:
            return
        if not mask or collective.rows is None:
            raise FaultError(collective.tensor, "rows are moved without their mask", (device,))
        rows = self._read(device, collective.rows, micro, mask)
        expected = symbol.box[: len(self.graph.tensors[mask].sizes)]
        if rows.kind != "value" or rows.tensor != mask or rows.box != expected:
            raise FaultError(collective.tensor, f"rows at {list(expected)} are moved by {rows}", (device,))
        lack = self.complete.lacks_value(rows)
        if lack:
            raise FaultError(collective.tensor, f"rows are moved by an incomplete mask: {lack}", (device,))

    def _send(self, s: int, devices: tuple[int, ...], send: Send, micro: int) -> None:
        key = (send.channel, micro)
        if self.sent.get(key, set()).intersection(devices):
            raise FaultError(send.tensor, f"channel {send.channel} is sent twice", devices)
        messages: dict[Message, Symbol] = {}
        for message, transfer in numbered(send.transfers):
            if transfer.source not in devices:
                if transfer.source in self.program.mesh_at(s, send.source).devices:
                    continue  # the share of another role
                raise FaultError(send.tensor, "a device of another stage is asked to send", (transfer.source,))
            symbol = self._read(transfer.source, send.source, micro, send.tensor)
            try:
                messages[message] = extract(symbol, transfer.source_box, send.sizes)
            except StepError as error:
                raise FaultError(send.tensor, str(error), (transfer.source,)) from None
        self.sent.setdefault(key, set()).update(devices)
        self.messages.setdefault(key, {}).update(messages)
        for device in devices:
            place = (device, self._place(send.source, micro))
            self.in_flight.setdefault(place, []).append(_Work("send", channel=send.channel, micro=micro))
        self.counts["messages"] += len(messages)

    def _receive(self, devices: tuple[int, ...], receive: Receive, micro: int) -> None:
        key = (receive.channel, micro)
        if self.receiving.get(key, set()).intersection(devices):
            raise FaultError(receive.tensor, f"channel {receive.channel} is received twice", devices)
        if self.received.setdefault(key, receive) != receive:
            raise FaultError(receive.tensor, f"channel {receive.channel} is received in two ways", devices)
        self.receiving.setdefault(key, set()).update(devices)
        for device in devices:
            place = (device, self._place(receive.target, micro))
            if place in self.in_flight:
                raise FaultError(receive.tensor, f"{receive.target} is received while it is in flight", (device,))
            self.in_flight[place] = [_Work("receive", channel=receive.channel, micro=micro)]
            self.written_by[place] = self.now

    def _wait(self, devices: tuple[int, ...], wait: Wait, micro: int) -> bool:
        """Rendezvous: both halves of an exchange must have started before either wait ends."""
        if wait.every:
            places = sorted({p for d, p in self.in_flight if d in devices and p[0] == wait.buffer})
        else:
            places = [self._place(wait.buffer, micro - wait.lag)]
        waited = [(d, p) for p in places for d in devices if (d, p) in self.in_flight]
        for device, place in waited:
            for work in self.in_flight[device, place]:
                if work.channel and not self._is_matched(device, work.channel, work.micro):
                    return False
                if work.kind == "result" and (device, place) not in self.results:
                    return False
        for device, place in waited:
            works = self.in_flight[device, place]
            kept = [work for work in works if work.kind == "source"]  # until its result is awaited
            self._settle((device, place), kept)
            for work in works:
                if work.kind == "receive":
                    self._deliver(device, place, work.channel, work.micro)
                elif work.kind == "result":
                    self.memory[device][place] = self.results.pop((device, place))
                    self._release_sources(device, place)
        if wait.free:
            for device in devices:
                for place in places:
                    self._forget(device, place)
        return True

    def _is_matched(self, device: int, channel: str, micro: int) -> bool:
        """Have both halves of all that a device sends and receives on a channel started?

        Of an exchange between two roles, that is: both halves.
        """
        key = (channel, micro)
        if key not in self.sent or key not in self.received:
            return False
        if not self.program.shared:
            return True
        own = [t for t in self.received[key].transfers if device in (t.source, t.target)]
        return all(t.source in self.sent[key] and t.target in self.receiving[key] for t in own)

    def _settle(self, key: tuple[int, Place], works: list[_Work]) -> None:
        if works:
            self.in_flight[key] = works
        else:
            self.in_flight.pop(key, None)

    def _release_sources(self, device: int, target: Place) -> None:
        """A collective's source may be written and freed again once its result was awaited."""
        for key in [key for key in self.in_flight if key[0] == device]:
            self._settle(key, [work for work in self.in_flight[key] if work.target != target])

    def _deliver(self, device: int, place: Place, channel: str, micro: int) -> None:
        receive = self.received[channel, micro]
        sent = self.messages[channel, micro]
        expected = {message: transfer.target_box for message, transfer in numbered(receive.transfers)}
        started = self.sent[channel, micro]
        odd_ones = (set(sent) - set(expected)) | {key for key in set(expected) - set(sent) if key[0] in started}
        if not self.program.shared:
            odd_ones |= set(expected) - set(sent)
        if odd_ones:
            odd = min(odd_ones)
            what = f"message {odd[2]} from {odd[0]} to {odd[1]} of channel {channel} is not matched"
            raise FaultError(receive.tensor, what, odd[:2])
        arrived = [(sent[key], box) for key, box in expected.items() if key[1] == device]
        try:
            symbol = join_messages(arrived, receive.sizes)
        except StepError as error:
            raise FaultError(receive.tensor, str(error), (device,)) from None
        if symbol.tensor != receive.tensor:
            raise FaultError(receive.tensor, f"{symbol} arrived", (device,))
        self.memory[device][place] = symbol
