"""Verify: the symbolic interpreter of a program.

Every device's buffers hold symbols (index box, set of contributions) instead of numbers. The interpreter carries out
every call of every stage and proves, or names the tensor, the instruction and the ranks where it fails:

- every run reads complete values of exactly the boxes that its local function assumes;
- every cotangent that a run takes is complete, every contribution counted once;
- pieces are gathered in order; what is reduced has equal boxes and disjoint contributions;
- every message is matched; no order of calls deadlocks even if a send blocks until it is received, and a collective
  until all roles in it have come to it (`meetings`);
- nothing is read before it is written or after it is freed, and nothing is freed in flight;
- at the end the loss is complete on every device, and every parameter was updated once, from its complete gradient.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from planloom.blocks import BlockGraph
from planloom.errors import VerificationError
from planloom.layout import Box
from planloom.program.completeness import Completeness
from planloom.program.likeness import counted, goes_through, representatives, with_micro_batches
from planloom.program.meetings import Key, Meetings
from planloom.program.schedule import Line, interleave
from planloom.program.shared import span
from planloom.program.symbolic_rings import RingSymbols, SymbolicTurn
from planloom.program.symbolic_runs import RunError, SymbolicRun
from planloom.program.symbolic_steps import StepError, apply_steps, extract, join_messages, join_pieces
from planloom.program.symbols import SEED, STORED, Symbol, added
from planloom.program.values import (
    Accumulate,
    Backward,
    Buffer,
    Coalesced,
    Collective,
    Forward,
    Free,
    Instruction,
    Program,
    Put,
    Receive,
    Seed,
    Send,
    Sum,
    Take,
    Transfer,
    Update,
    Wait,
    WeightGradient,
)

Place = tuple[Buffer, int]
_Message = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How much was checked: a program that has one computes what the model computes on one device."""

    num_devices: int
    num_instructions: int
    num_collectives: int
    num_messages: int
    num_parameters: int


def verify_program(blocks: BlockGraph, program: Program) -> Proof:
    """Prove a program equal to the model on one device, or raise what is wrong.

    Of many micro-batches that are alike, some stand for all (`likeness`).
    """
    chosen = representatives(program)
    if chosen is None or not goes_through(program):  # the whole program says best where it is wrong
        return _Interpreter(blocks, program).run()
    fewer = with_micro_batches(program, chosen)
    proof = _Interpreter(blocks, fewer, share=(len(chosen), program.num_micro_batches)).run()
    return replace(proof, **counted(program))


class _FaultError(Exception):
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


class _Interpreter:
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
        self.messages: dict[tuple[str, int], dict[_Message, Symbol]] = {}
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
                    box = stored.layout.box(stored.sizes, program.mesh_of(stored.stage).coordinates(device))
                    symbol = Symbol("value", stored.name, box, frozenset({STORED}))
                    self.memory[device][stored.buffer, -1] = symbol

    # -- the schedule

    def run(self) -> Proof:
        stuck = interleave(self.program, self._guarded)
        if stuck:
            self._raise_deadlock(stuck)
        return self._finish()

    def _guarded(self, line: Line) -> bool:
        self.now = f"instruction {line.index} ({_describe(line.instruction)}) in {_where(line)}"
        try:
            done = self._step(line.stage, line.instruction, line.micro)
        except _FaultError as fault:
            raise self._refusal(fault.tensor, fault.what, self.now, fault.ranks) from None
        self.counts["instructions"] += done
        return done

    def _refusal(self, tensor: str, what: str, instruction: str, ranks: tuple[int, ...]) -> VerificationError:
        return VerificationError(
            f"the program of {self.program.plan_name!r} does not compute {tensor} as the model does: {what}",
            given=f"{instruction}, ranks {', '.join(map(str, ranks))}",
            required=f"tensor {tensor} complete, in place, and every part counted once",
            todo="if the plan was written by Planloom, report this as a bug with the plan file",
        )

    def _raise_deadlock(self, stuck: Sequence[Line]) -> None:
        ranks = [", ".join(map(str, self.program.stages[line.stage].mesh.devices)) for line in stuck]
        shown = "; ".join(
            f"stage {line.stage} (ranks {who}) waits in {line.body} of micro-batch {line.micro} at instruction "
            f"{line.index}: {_describe(line.instruction)}"
            for line, who in zip(stuck, ranks, strict=True)
        )
        raise VerificationError(
            "the program deadlocks: every stage waits for a message that is never matched"
            + (", or for a collective to which not all come" if self.met else ""),
            given=shown,
            required="an order in which every receive meets its send"
            + (", and all start their collectives in one order" if self.met else ""),
            todo="change the order of the calls, or the stages' exchanges",
        )

    def _finish(self) -> Proof:
        for (device, place), works in self.in_flight.items():
            writer = self.written_by.get((device, place), "the program")
            what = f"{place[0]} is still in flight at the end of the step ({works[0].kind})"
            raise self._refusal(place[0].tensor, what, writer, (device,))
        loss = self.graph.loss
        for stage in self.program.stages:
            expected = {stored.name for stored in stage.parameters if self.complete.consumers(stored.name)}
            for device in stage.mesh.devices:
                self._final(device, loss, stage.loss, "value", ())
                for stored in stage.parameters:
                    if stored.name in expected:
                        box = stored.layout.box(stored.sizes, self.program.mesh_of(stored.stage).coordinates(device))
                        kind = "updated" if self.program.trains else "value"
                        self._final(device, stored.name, stored.buffer, kind, box)
        return Proof(
            num_devices=len(self.program.devices),
            num_instructions=self.counts["instructions"],
            num_collectives=self.counts["collectives"],
            num_messages=self.counts["messages"],
            num_parameters=len(self.graph.parameters),
        )

    def _final(self, device: int, tensor: str, buffer: Buffer, kind: str, box: Box) -> None:
        symbol = self.memory[device].get((buffer, -1))
        good = symbol is not None and symbol.kind == kind and symbol.box == box
        lack = self.complete.lacks_value(symbol) if good and symbol is not None else "it is not there"
        if lack:
            writer = self.written_by.get((device, (buffer, -1)), "no instruction writes it")
            what = f"at the end of the step {buffer} holds {symbol or 'nothing'}: {lack}"
            raise self._refusal(tensor, what, writer, (device,))

    # -- instructions

    def _step(self, s: int, instruction: Instruction, micro: int) -> bool:
        devices = self.program.stages[s].mesh.devices
        match instruction:
            case Collective():
                self._collective(s, devices, instruction, micro)
            case Coalesced(collectives=collectives, takes_sources=takes_sources):
                for collective in collectives:
                    self._collective(s, devices, collective, micro)
                if takes_sources:
                    self._take(devices, collectives, micro)
            case Wait():
                return self._wait(devices, instruction, micro)
            case Send():
                self._send(s, devices, instruction, micro)
            case Receive():
                self._receive(devices, instruction, micro)
            case Forward():
                for device in devices:
                    self._forward(s, device, instruction, micro)
            case Backward():
                for device in devices:
                    self._backward(s, device, instruction, micro)
            case WeightGradient():
                for device in devices:
                    self._weight_gradient(device, instruction, micro)
            case _:
                for device in devices:
                    self._local(s, device, instruction, micro)
        return True

    def _place(self, buffer: Buffer, micro: int) -> Place:
        return (buffer, micro if buffer.indexed else -1)

    def _read(self, device: int, buffer: Buffer, micro: int, tensor: str) -> Symbol:
        place = self._place(buffer, micro)
        if any(work.delivers for work in self.in_flight.get((device, place), ())):
            raise _FaultError(tensor, f"{buffer} is read before it was awaited", (device,))
        if place not in self.memory[device]:
            raise _FaultError(tensor, f"{buffer} is read before it is written or after it was freed", (device,))
        return self.memory[device][place]

    def _write(self, device: int, buffer: Buffer, micro: int, symbol: Symbol) -> None:
        place = self._place(buffer, micro)
        if (device, place) in self.in_flight:
            raise _FaultError(symbol.tensor, f"{buffer} is written while it is in flight", (device,))
        self.memory[device][place] = symbol
        self.written_by[device, place] = self.now
        self.pieces.pop((device, place), None)
        self.views.pop((device, place), None)

    def _local(self, s: int, device: int, instruction: Instruction, micro: int) -> None:
        match instruction:
            case Seed(tensor=tensor, target=target):
                self._write(device, target, micro, Symbol("cotangent", tensor, (), frozenset({SEED})))
            case Sum(tensor=tensor, target=target, sources=sources):
                symbols = [self._read(device, buffer, micro, tensor) for buffer in sources]
                total = symbols[0]
                for symbol in symbols[1:]:
                    total = self._add(device, tensor, total, symbol)
                self._require_tensor(device, tensor, total)
                self._write(device, target, micro, total)
            case Accumulate(tensor=tensor, target=target, source=source):
                symbol = self._read(device, source, micro, tensor)
                self._require_tensor(device, tensor, symbol)
                old = self.memory[device].get(self._place(target, micro))
                new = symbol if old is None else self._add(device, tensor, old, symbol)
                self._write(device, target, micro, new)
            case Take():
                self._take_piece(device, instruction, micro)
            case Put():
                self._put_piece(device, instruction, micro)
            case Free(buffer=buffer):
                place = self._place(buffer, micro)
                tensor = buffer.tensor
                if (device, place) in self.in_flight:
                    raise _FaultError(tensor, f"{buffer} is freed while it is in flight", (device,))
                self._read(device, buffer, micro, tensor)
                self._forget(device, place)
            case Update():
                self._update(s, device, instruction, micro)

    def _forget(self, device: int, place: Place) -> None:
        self.memory[device].pop(place, None)
        self.pieces.pop((device, place), None)

    def _take_piece(self, device: int, take: Take, micro: int) -> None:
        symbol = self._read(device, take.source, micro, take.tensor)
        self._require_tensor(device, take.tensor, symbol)
        try:
            piece = extract(symbol, take.box, take.sizes)
        except StepError as error:
            raise _FaultError(take.tensor, str(error), (device,)) from None
        self._write(device, take.target, micro, piece)
        if take.source in self.persistent:
            self.views[device, self._place(take.target, micro)] = take.source

    def _put_piece(self, device: int, put: Put, micro: int) -> None:
        """A piece beside those that are there; the buffer holds a value once none is missing."""
        symbol = self._read(device, put.source, micro, put.tensor)
        self._require_tensor(device, put.tensor, symbol)
        place = self._place(put.target, micro)
        if (device, place) in self.in_flight:
            raise _FaultError(put.tensor, f"{put.target} is written while it is in flight", (device,))
        pieces = self.pieces.get((device, place), [])
        if place in self.memory[device] and not pieces:
            raise _FaultError(put.tensor, f"a piece is written into {put.target}, which is none's place", (device,))
        pieces = [*((found, box) for found, box in pieces if box != put.box), (symbol, put.box)]
        try:
            whole = join_pieces(pieces, put.sizes)
        except StepError as error:
            raise _FaultError(put.tensor, str(error), (device,)) from None
        self.memory[device].pop(place, None)
        if whole is not None:
            self._write(device, put.target, micro, whole)
        self.pieces[device, place] = pieces

    def _require_tensor(self, device: int, tensor: str, symbol: Symbol) -> None:
        if symbol.tensor != tensor:
            raise _FaultError(tensor, f"the buffer holds {symbol}", (device,))

    def _add(self, device: int, tensor: str, first: Symbol, second: Symbol) -> Symbol:
        try:
            return added(first, second)
        except ValueError as error:
            raise _FaultError(tensor, str(error), (device,)) from None

    def _update(self, s: int, device: int, update: Update, micro: int) -> None:
        stage = self.program.stages[s]
        stored = {p.name: p for p in stage.parameters}
        for name, gradient, target in zip(update.parameters, update.gradients, update.targets, strict=True):
            symbol = self._read(device, gradient, micro, name)
            at = self.program.mesh_of(stored[name].stage).coordinates(device)
            box = stored[name].optimizer_layout.box(stored[name].sizes, at)
            if symbol.kind != "cotangent" or symbol.tensor != name or symbol.box != box:
                raise _FaultError(name, f"the update reads {symbol}, not the gradient at {list(box)}", (device,))
            lack = self.complete.lacks_cotangent(symbol)
            if lack:
                raise _FaultError(name, f"its gradient is incomplete: {lack}", (device,))
            if (device, name) in self.updated:
                raise _FaultError(name, "it is updated twice", (device,))
            self.updated.add((device, name))
            self._write(device, target, micro, Symbol("updated", name, box, frozenset({STORED})))

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
                raise _FaultError(tensor, f"{collective.target} is written while it is in flight", (device,))
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
            raise _FaultError(tensor, f"another collective is under way into {collective.target}", devices)
        brought.update(symbols)
        self.meetings.start(s, key, roles)

    def _roles_in(self, s: int, collective: Collective) -> frozenset[int]:
        """The roles that take part in a collective: of a role's own buffers itself alone, whatever its groups say."""
        if collective.source.of < 0 and collective.target.of < 0:
            return frozenset((s,))
        found = {self.role_of.get(device, -1) for device in span(collective)} | {s}
        if not found <= set(self._members(collective.target.of)):
            raise _FaultError(collective.tensor, "a group holds a device of another stage", ())
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
            raise _FaultError(collective.tensor, str(error), error.ranks) from None
        self.results.update(((device, key[0]), symbol) for device, symbol in results.items())

    def _take(self, devices: tuple[int, ...], collectives: Sequence[Collective], micro: int) -> None:
        """Sources that were copied at the start are forgotten, and no longer in flight."""
        for device in devices:
            for collective in collectives:
                place = self._place(collective.source, micro)
                if place[0] in self.persistent:
                    raise _FaultError(collective.tensor, "a stored parameter is forgotten", (device,))
                target = self._place(collective.target, micro)
                others = [work for work in self.in_flight.get((device, place), ()) if work.target != target]
                self._settle((device, place), others)
                if others:
                    raise _FaultError(collective.tensor, f"{collective.source} is forgotten in flight", (device,))
                self._forget(device, place)

    def _require_rows(self, device: int, collective: Collective, symbol: Symbol, micro: int) -> None:
        """A ragged tensor is moved with its mask: complete, and of the very rows that the device holds."""
        mask = self.graph.tensors[collective.tensor].rows
        if not mask and collective.rows is None:
            return
        if not mask or collective.rows is None:
            raise _FaultError(collective.tensor, "rows are moved without their mask", (device,))
        rows = self._read(device, collective.rows, micro, mask)
        expected = symbol.box[: len(self.graph.tensors[mask].sizes)]
        if rows.kind != "value" or rows.tensor != mask or rows.box != expected:
            raise _FaultError(collective.tensor, f"rows at {list(expected)} are moved by {rows}", (device,))
        lack = self.complete.lacks_value(rows)
        if lack:
            raise _FaultError(collective.tensor, f"rows are moved by an incomplete mask: {lack}", (device,))

    def _send(self, s: int, devices: tuple[int, ...], send: Send, micro: int) -> None:
        key = (send.channel, micro)
        if self.sent.get(key, set()).intersection(devices):
            raise _FaultError(send.tensor, f"channel {send.channel} is sent twice", devices)
        messages: dict[_Message, Symbol] = {}
        for message, transfer in _numbered(send.transfers):
            if transfer.source not in devices:
                if transfer.source in self.program.mesh_at(s, send.source).devices:
                    continue  # the share of another role
                raise _FaultError(send.tensor, "a device of another stage is asked to send", (transfer.source,))
            symbol = self._read(transfer.source, send.source, micro, send.tensor)
            try:
                messages[message] = extract(symbol, transfer.source_box, send.sizes)
            except StepError as error:
                raise _FaultError(send.tensor, str(error), (transfer.source,)) from None
        self.sent.setdefault(key, set()).update(devices)
        self.messages.setdefault(key, {}).update(messages)
        for device in devices:
            place = (device, self._place(send.source, micro))
            self.in_flight.setdefault(place, []).append(_Work("send", channel=send.channel, micro=micro))
        self.counts["messages"] += len(messages)

    def _receive(self, devices: tuple[int, ...], receive: Receive, micro: int) -> None:
        key = (receive.channel, micro)
        if self.receiving.get(key, set()).intersection(devices):
            raise _FaultError(receive.tensor, f"channel {receive.channel} is received twice", devices)
        if self.received.setdefault(key, receive) != receive:
            raise _FaultError(receive.tensor, f"channel {receive.channel} is received in two ways", devices)
        self.receiving.setdefault(key, set()).update(devices)
        for device in devices:
            place = (device, self._place(receive.target, micro))
            if place in self.in_flight:
                raise _FaultError(receive.tensor, f"{receive.target} is received while it is in flight", (device,))
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
        expected = {message: transfer.target_box for message, transfer in _numbered(receive.transfers)}
        started = self.sent[channel, micro]
        odd_ones = (set(sent) - set(expected)) | {key for key in set(expected) - set(sent) if key[0] in started}
        if not self.program.shared:
            odd_ones |= set(expected) - set(sent)
        if odd_ones:
            odd = min(odd_ones)
            what = f"message {odd[2]} from {odd[0]} to {odd[1]} of channel {channel} is not matched"
            raise _FaultError(receive.tensor, what, odd[:2])
        arrived = [(sent[key], box) for key, box in expected.items() if key[1] == device]
        try:
            symbol = join_messages(arrived, receive.sizes)
        except StepError as error:
            raise _FaultError(receive.tensor, str(error), (device,)) from None
        if symbol.tensor != receive.tensor:
            raise _FaultError(receive.tensor, f"{symbol} arrived", (device,))
        self.memory[device][place] = symbol

    # -- runs

    def _symbolic(self, s: int, device: int, run: int, micro: int) -> SymbolicRun:
        if device not in self.program.mesh_of(self.program.runs[run].stage).devices:
            raise RunError(self.program.runs[run].outputs[0].tensor, "the run is one of other devices")
        return SymbolicRun(
            blocks=self.blocks,
            complete=self.complete,
            run=self.program.runs[run],
            coordinates=self.program.mesh_of(self.program.runs[run].stage).coordinates(device),
            num_micro=self.program.num_micro_batches,
            micro=micro,
        )

    def _forward(self, s: int, device: int, forward: Forward, micro: int) -> None:
        def read(slot: int, tensor: str) -> Symbol:
            return self._read(device, forward.inputs[slot], micro, tensor)

        try:
            symbolic = self._symbolic(s, device, forward.run, micro)
            made = (self._turn(symbolic, device) if symbolic.run.turn else symbolic).forward(read)
        except RunError as error:
            raise _FaultError(error.tensor, str(error), (device,)) from None
        if forward.saves:
            read_from = [self.views.get((device, self._place(b, micro)), b) for b in forward.inputs]
            kept = {b: self.memory[device][b, -1] for b in read_from if b in self.persistent}
            self.saved[device, forward.run, micro] = kept
        for slot, buffer in zip(self.program.runs[forward.run].outputs, forward.outputs, strict=True):
            self._write(device, buffer, micro, made[slot.tensor])

    def _backward(self, s: int, device: int, backward: Backward, micro: int) -> None:
        run = self.program.runs[backward.run]
        if (device, backward.run, micro) not in self.saved:
            raise _FaultError(
                (run.outputs or run.inputs)[0].tensor,
                "the backward of a run has no forward before it that saved",
                (device,),
            )
        for buffer, symbol in self.saved.pop((device, backward.run, micro)).items():
            if self._read(device, buffer, micro, symbol.tensor) != symbol:
                what = f"{buffer} is not what the forward of the run read"
                raise _FaultError(symbol.tensor, what, (device,))
        cotangents = {
            slot.tensor: self._read(device, buffer, micro, slot.tensor)
            for slot, buffer in zip(run.outputs, backward.cotangents, strict=True)
            if buffer is not None
        }
        again = [self._read(device, buffer, micro, buffer.tensor) for buffer in backward.again]
        try:
            symbolic = self._symbolic(s, device, backward.run, micro)
            if symbolic.run.turn:
                slots = self._turn(symbolic, device).backward(cotangents, again)
            else:
                slots = symbolic.backward(cotangents)
        except RunError as error:
            raise _FaultError(error.tensor, str(error), (device,)) from None
        if backward.is_split:
            left = {i: symbol for i, symbol in slots.items() if symbol.tensor in self.graph.parameters}
            self.put_off[device, backward.run, micro] = left
            slots = {i: symbol for i, symbol in slots.items() if i not in left}
        self._give(device, backward, micro, slots)

    def _turn(self, of: SymbolicRun, device: int) -> SymbolicTurn:
        key = (device, of.run.blocks[0].block, of.micro)
        return SymbolicTurn(of=of, state=self.rings.setdefault(key, RingSymbols()))

    def _weight_gradient(self, device: int, rest: WeightGradient, micro: int) -> None:
        left = self.put_off.pop((device, rest.run, micro), None)
        if left is None:
            tensor = self.program.runs[rest.run].outputs[0].tensor
            raise _FaultError(tensor, "weight-gradients have no split backward before them", (device,))
        self._give(device, rest, micro, left)

    def _give(self, device: int, instruction: Backward | WeightGradient, micro: int, slots: dict[int, Symbol]) -> None:
        run = self.program.runs[instruction.run]
        for i, (slot, wanted) in enumerate(zip(run.inputs, instruction.outputs, strict=True)):
            if wanted is not None:
                if i not in slots:
                    raise _FaultError(slot.tensor, "a run gives no cotangent of this input here", (device,))
                self._write(device, wanted, micro, slots[i])


def _where(line: Line) -> str:
    return f"stage {line.stage}, {line.body}" + (f" of micro-batch {line.micro}" if line.micro >= 0 else "")


def _numbered(transfers: Sequence[Transfer]) -> Iterator[tuple[_Message, Transfer]]:
    """Messages as the wire tells them apart: by sender, receiver, and their order between these two."""
    counts: dict[tuple[int, int], int] = {}
    for transfer in transfers:
        pair = (transfer.source, transfer.target)
        counts[pair] = counts.get(pair, -1) + 1
        yield (*pair, counts[pair]), transfer


def _describe(instruction: Instruction) -> str:
    match instruction:
        case Collective(source=source, target=target, steps=steps):
            return f"Collective {source} -> {target}: {'; '.join(map(str, steps))}"
        case Coalesced(collectives=collectives):
            return f"Coalesced {_describe(collectives[0])} and {len(collectives) - 1} others"
        case Send(channel=channel) | Receive(channel=channel):
            return f"{type(instruction).__name__} {channel}"
        case Forward(run=run, again=True):
            return f"Forward of run {run} again"
        case Forward(run=run) | Backward(run=run) | WeightGradient(run=run):
            return f"{type(instruction).__name__} of run {run}"
        case Wait(buffer=buffer) | Free(buffer=buffer):
            return f"{type(instruction).__name__} {buffer}"
        case Take(source=source, target=target):
            return f"Take {target} of {source}"
        case Sum(target=target) | Accumulate(target=target) | Seed(target=target) | Put(target=target):
            return f"{type(instruction).__name__} into {target}"
    return type(instruction).__name__
