"""Verify: the symbolic interpreter of a program.

Every device's buffers hold symbols (index box, set of contributions) instead of numbers. The interpreter carries out
every call of every stage and proves, or names the tensor, the instruction and the ranks where it fails:

- every run reads complete values of exactly the boxes that its local function assumes;
- every cotangent that a run takes is complete, every contribution counted once;
- pieces are gathered in order; what is reduced has equal boxes and disjoint contributions;
- every message is matched; no order of calls deadlocks even if a send blocks until it is received;
- nothing is read before it is written or after it is freed, and nothing is freed in flight;
- at the end the loss is complete on every device, and every parameter was updated once, from its complete gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from planloom.blocks import Block, BlockGraph
from planloom.errors import VerificationError
from planloom.layout import Box
from planloom.layout.boxes import whole
from planloom.program.pieces import BlockPiece, piece_of
from planloom.program.symbolic_steps import StepError, apply_steps, extract, join_messages
from planloom.program.symbols import SEED, STORED, Part, Symbol, covers, missing, overlapping
from planloom.program.values import (
    Accumulate,
    Backward,
    Buffer,
    Collective,
    Forward,
    Free,
    Instruction,
    Program,
    Receive,
    RunBlock,
    Seed,
    Send,
    Sum,
    Update,
    Wait,
)

Place = tuple[Buffer, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """How much was checked: a program that has one computes what the model computes on one device."""

    num_devices: int
    num_instructions: int
    num_collectives: int
    num_messages: int
    num_parameters: int


def verify_program(blocks: BlockGraph, program: Program) -> Proof:
    """Prove a program equal to the model on one device, or raise what is wrong."""
    return _Interpreter(blocks, program).run()


class _FaultError(Exception):
    """What is wrong, before instruction and ranks are known."""

    def __init__(self, tensor: str, what: str, ranks: tuple[int, ...]) -> None:
        super().__init__(what)
        self.tensor, self.what, self.ranks = tensor, what, ranks


class _Interpreter:
    def __init__(self, blocks: BlockGraph, program: Program) -> None:
        self.blocks, self.program, self.graph = blocks, program, blocks.graph
        self.memory: dict[int, dict[Place, Symbol]] = {device: {} for device in program.devices}
        self.saved: set[tuple[int, int]] = set()
        self.sent: dict[tuple[str, int], tuple[Send, int]] = {}
        self.received: dict[tuple[str, int], tuple[Receive, int]] = {}
        self.messages: dict[tuple[str, int], dict[tuple[int, int, int], Symbol]] = {}
        self.in_flight: dict[tuple[int, Place], list[tuple[str, int, str]]] = {}
        self.updated: set[tuple[int, str]] = set()
        self.counts = {"instructions": 0, "collectives": 0, "messages": 0}
        self._wholes: dict[tuple[str, int], Box] = {}
        self._further: dict[str, Mapping[str, Mapping[str, Box]]] = {}
        self._by_name = {block.name: block for block in blocks.blocks}
        for stage in program.stages:
            for stored in stage.parameters:
                for device in stage.mesh.devices:
                    box = stored.layout.box(stored.sizes, stage.mesh.coordinates(device))
                    symbol = Symbol("value", stored.name, box, frozenset({STORED}))
                    self.memory[device][stored.buffer, -1] = symbol

    # -- the schedule

    def run(self) -> Proof:
        scripts = [
            [(call.body, i, instruction, call.micro) for call in stage.calls
             for i, instruction in enumerate(stage.bodies[call.body])]
            for stage in self.program.stages
        ]  # fmt: skip
        at = [0] * len(scripts)
        while any(position < len(script) for position, script in zip(at, scripts, strict=True)):
            moved = False
            for s, script in enumerate(scripts):
                while at[s] < len(script) and self._guarded(s, *script[at[s]]):
                    at[s] += 1
                    moved = True
            if not moved:
                self._raise_deadlock(at, scripts)
        return self._finish()

    def _guarded(self, s: int, body: str, index: int, instruction: Instruction, micro: int) -> bool:
        try:
            done = self._step(s, instruction, micro)
        except _FaultError as fault:
            when = f" of micro-batch {micro}" if micro >= 0 else ""
            raise VerificationError(
                f"the program does not compute {fault.tensor} as the model does: {fault.what}",
                given=f"instruction {index} ({_describe(instruction)}) in stage {s}, {body}{when}, "
                f"ranks {', '.join(map(str, fault.ranks))}",
                required=f"tensor {fault.tensor} complete, in place, and every part counted once",
                todo="if the plan was written by Planloom, report this as a bug with the plan file",
            ) from None
        self.counts["instructions"] += done
        return done

    def _raise_deadlock(self, at: list[int], scripts: list[list[tuple[str, int, Instruction, int]]]) -> None:
        stuck = [(s, *script[at[s]]) for s, script in enumerate(scripts) if at[s] < len(script)]
        shown = "; ".join(
            f"stage {s} (ranks {', '.join(map(str, self.program.stages[s].mesh.devices))}) waits in {body}"
            f" of micro-batch {micro} at instruction {i}: {_describe(instruction)}"
            for s, body, i, instruction, micro in stuck
        )
        raise VerificationError(
            "the program deadlocks: every stage waits for a message that is never matched",
            given=shown,
            required="an order in which every receive meets its send",
            todo="change the order of the calls, or the stages' exchanges",
        )

    def _finish(self) -> Proof:
        loss = self.graph.loss
        for s, stage in enumerate(self.program.stages):
            expected = {stored.name for stored in stage.parameters if self._wants_gradient(stored.name)}
            for device in stage.mesh.devices:
                self._final(s, device, loss, self.memory[device].get((stage.loss, -1)), "value", ())
                for stored in stage.parameters:
                    if stored.name in expected:
                        box = stored.layout.box(stored.sizes, stage.mesh.coordinates(device))
                        symbol = self.memory[device].get((stored.buffer, -1))
                        self._final(s, device, stored.name, symbol, "updated", box)
        if self.in_flight:
            (device, place), _ = next(iter(self.in_flight.items()))
            raise VerificationError(
                f"something is still in flight at the end of the step: {place[0]} on rank {device}",
                required="a wait for everything that was started",
            )
        return Proof(
            num_devices=len(self.program.devices),
            num_instructions=self.counts["instructions"],
            num_collectives=self.counts["collectives"],
            num_messages=self.counts["messages"],
            num_parameters=len(self.graph.parameters),
        )

    def _final(self, s: int, device: int, tensor: str, symbol: Symbol | None, kind: str, box: Box) -> None:
        good = symbol is not None and symbol.kind == kind and symbol.box == box and not self._lacks_value(symbol)
        if not good:
            raise VerificationError(
                f"at the end of the step {tensor} is wrong on rank {device} (stage {s})",
                given=str(symbol) if symbol is not None else "nothing",
                required=f"the complete {'loss' if kind == 'value' else 'updated parameter'} at {list(box)}",
            )

    # -- instructions

    def _step(self, s: int, instruction: Instruction, micro: int) -> bool:
        devices = self.program.stages[s].mesh.devices
        match instruction:
            case Collective():
                self._collective(devices, instruction, micro)
            case Wait():
                return self._wait(devices, instruction, micro)
            case Send():
                self._send(devices, instruction, micro)
            case Receive():
                self._receive(devices, instruction, micro)
            case Forward():
                for device in devices:
                    self._forward(s, device, instruction, micro)
            case Backward():
                for device in devices:
                    self._backward(s, device, instruction, micro)
            case _:
                for device in devices:
                    self._local(s, device, instruction, micro)
        return True

    def _place(self, buffer: Buffer, micro: int) -> Place:
        return (buffer, micro if buffer.indexed else -1)

    def _read(self, device: int, buffer: Buffer, micro: int, tensor: str) -> Symbol:
        place = self._place(buffer, micro)
        if any(kind == "receive" for *_, kind in self.in_flight.get((device, place), ())):
            raise _FaultError(tensor, f"{buffer} is read before its receive was awaited", (device,))
        if place not in self.memory[device]:
            raise _FaultError(tensor, f"{buffer} is read before it is written or after it was freed", (device,))
        return self.memory[device][place]

    def _write(self, device: int, buffer: Buffer, micro: int, symbol: Symbol) -> None:
        place = self._place(buffer, micro)
        if (device, place) in self.in_flight:
            raise _FaultError(symbol.tensor, f"{buffer} is written while it is in flight", (device,))
        self.memory[device][place] = symbol

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
            case Free(buffer=buffer):
                place = self._place(buffer, micro)
                tensor = buffer.name.split(":")[0].split("@")[0]
                if (device, place) in self.in_flight:
                    raise _FaultError(tensor, f"{buffer} is freed while it is in flight", (device,))
                self._read(device, buffer, micro, tensor)
                del self.memory[device][place]
            case Update():
                self._update(s, device, instruction, micro)

    def _require_tensor(self, device: int, tensor: str, symbol: Symbol) -> None:
        if symbol.tensor != tensor:
            raise _FaultError(tensor, f"the buffer holds {symbol}", (device,))

    def _add(self, device: int, tensor: str, first: Symbol, second: Symbol) -> Symbol:
        if (first.kind, first.tensor, first.box) != (second.kind, second.tensor, second.box):
            raise _FaultError(tensor, f"{first} and {second} cannot be added", (device,))
        twice = overlapping(first.parts, second.parts)
        if twice is not None:
            raise _FaultError(
                tensor, f"the contribution of {twice[0][1]} at {list(twice[0][2])} is counted twice", (device,)
            )
        return Symbol(first.kind, first.tensor, first.box, first.parts | second.parts)

    def _update(self, s: int, device: int, update: Update, micro: int) -> None:
        stage = self.program.stages[s]
        stored = {p.name: p for p in stage.parameters}
        for name, gradient, target in zip(update.parameters, update.gradients, update.targets, strict=True):
            symbol = self._read(device, gradient, micro, name)
            box = stored[name].optimizer_layout.box(stored[name].sizes, stage.mesh.coordinates(device))
            if symbol.kind != "cotangent" or symbol.tensor != name or symbol.box != box:
                raise _FaultError(name, f"the update reads {symbol}, not the gradient at {list(box)}", (device,))
            lack = self._lacks_cotangent(symbol)
            if lack:
                raise _FaultError(name, f"its gradient is incomplete: {lack}", (device,))
            if (device, name) in self.updated:
                raise _FaultError(name, "it is updated twice", (device,))
            self.updated.add((device, name))
            self._write(device, target, micro, Symbol("updated", name, box, frozenset({STORED})))

    # -- communication

    def _collective(self, devices: tuple[int, ...], collective: Collective, micro: int) -> None:
        tensor = collective.tensor
        symbols = {device: self._read(device, collective.source, micro, tensor) for device in devices}
        for device, symbol in symbols.items():
            self._require_tensor(device, tensor, symbol)
            if tuple(stop - start for start, stop in symbol.box) != collective.sizes:
                raise _FaultError(tensor, f"{symbol} is not of local size {collective.sizes}", (device,))
        try:
            results = apply_steps(collective.steps, symbols)
        except StepError as error:
            raise _FaultError(tensor, str(error), error.ranks) from None
        for device, symbol in results.items():
            self._write(device, collective.target, micro, symbol)
        self.counts["collectives"] += sum(not step.is_local for step in collective.steps)

    def _send(self, devices: tuple[int, ...], send: Send, micro: int) -> None:
        key = (send.channel, micro)
        if key in self.sent:
            raise _FaultError(send.tensor, f"channel {send.channel} is sent twice", devices)
        box_of: dict[tuple[int, int, int], Symbol] = {}
        for i, transfer in enumerate(send.transfers):
            if transfer.source not in devices:
                raise _FaultError(send.tensor, "a device of another stage is asked to send", (transfer.source,))
            symbol = self._read(transfer.source, send.source, micro, send.tensor)
            try:
                box_of[transfer.source, transfer.target, i] = extract(symbol, transfer.source_box, send.sizes)
            except StepError as error:
                raise _FaultError(send.tensor, str(error), (transfer.source,)) from None
        self.sent[key] = (send, micro)
        self.messages[key] = box_of
        for device in devices:
            place = (device, self._place(send.source, micro))
            self.in_flight.setdefault(place, []).append((send.channel, micro, "send"))
        self.counts["messages"] += len(send.transfers)

    def _receive(self, devices: tuple[int, ...], receive: Receive, micro: int) -> None:
        key = (receive.channel, micro)
        if key in self.received:
            raise _FaultError(receive.tensor, f"channel {receive.channel} is received twice", devices)
        self.received[key] = (receive, micro)
        for device in devices:
            place = (device, self._place(receive.target, micro))
            if place in self.in_flight:
                raise _FaultError(receive.tensor, f"{receive.target} is received while it is in flight", (device,))
            self.in_flight[place] = [(receive.channel, micro, "receive")]

    def _wait(self, devices: tuple[int, ...], wait: Wait, micro: int) -> bool:
        """Rendezvous: both halves of an exchange must have started before either wait ends."""
        if wait.every:
            places = sorted({p for d, p in self.in_flight if d in devices and p[0] == wait.buffer})
        else:
            places = [self._place(wait.buffer, micro - wait.lag)]
        waited = [(d, p) for p in places for d in devices if (d, p) in self.in_flight]
        for device, place in waited:
            for channel, at, _ in self.in_flight[device, place]:
                if (channel, at) not in self.sent or (channel, at) not in self.received:
                    return False
        for device, place in waited:
            for channel, at, kind in self.in_flight.pop((device, place)):
                if kind == "receive":
                    self._deliver(device, place, channel, at)
        if wait.free:
            for device in devices:
                for place in places:
                    self.memory[device].pop(place, None)
        return True

    def _deliver(self, device: int, place: Place, channel: str, micro: int) -> None:
        receive, _ = self.received[channel, micro]
        sent = self.messages[channel, micro]
        expected = {(t.source, t.target, i): t.target_box for i, t in enumerate(receive.transfers)}
        if set(expected) != set(sent):
            odd = min(set(expected) ^ set(sent))
            raise _FaultError(receive.tensor, f"message {odd[2]} of channel {channel} is not matched", odd[:2])
        arrived = [(sent[key], box) for key, box in expected.items() if key[1] == device]
        try:
            symbol = join_messages(arrived, receive.sizes)
        except StepError as error:
            raise _FaultError(receive.tensor, str(error), (device,)) from None
        if symbol.tensor != receive.tensor:
            raise _FaultError(receive.tensor, f"{symbol} arrived", (device,))
        self.memory[device][place] = symbol

    # -- runs

    def _pieces(self, s: int, device: int, run: int) -> list[tuple[Block, RunBlock, BlockPiece]]:
        coordinates = self.program.stages[s].mesh.coordinates(device)
        num_micro = self.program.num_micro_batches
        parts = self.program.runs[run].blocks
        return [
            (block, part, piece_of(block, part, coordinates, num_micro))
            for part in parts
            for block in (self.blocks.blocks[part.block],)
        ]

    def _forward(self, s: int, device: int, forward: Forward, micro: int) -> None:
        run = self.program.runs[forward.run]
        inside: dict[str, Symbol] = {}
        for block, part, piece in self._pieces(s, device, forward.run):
            for tensor in (*block.inputs, *block.parameters):
                if tensor in part.reads:
                    symbol = self._read(device, forward.inputs[part.reads[tensor]], micro, tensor)
                else:
                    symbol = inside[tensor]
                self._require_input(device, block, tensor, symbol, self._box(piece, tensor, micro))
            for tensor in block.outputs:
                summed = tuple(piece.interval(d.name, d.size, micro) for d in block.dims if tensor in d.partials)
                parts = frozenset({((tensor, block.name, summed),)})
                inside[tensor] = Symbol("value", tensor, self._box(piece, tensor, micro), parts)
        self.saved.add((device, self._saved_key(forward.run, micro)))
        for slot, buffer in zip(run.outputs, forward.outputs, strict=True):
            self._write(device, buffer, micro, inside[slot.tensor])

    def _saved_key(self, run: int, micro: int) -> int:
        return run * (self.program.num_micro_batches + 1) + micro + 1

    def _box(self, piece: BlockPiece, tensor: str, micro: int) -> Box:
        return piece.box(self.graph.tensors[tensor].sizes, tensor, micro)

    def _require_input(self, device: int, block: Block, tensor: str, symbol: Symbol, box: Box) -> None:
        if symbol.kind != "value" or symbol.tensor != tensor or symbol.box != box:
            raise _FaultError(tensor, f"{block.name} needs it at {list(box)} and is given {symbol}", (device,))
        lack = self._lacks_value(symbol)
        if lack:
            raise _FaultError(tensor, f"{block.name} is given an incomplete value: {lack}", (device,))

    def _backward(self, s: int, device: int, backward: Backward, micro: int) -> None:
        run = self.program.runs[backward.run]
        key = (device, self._saved_key(backward.run, micro))
        if key not in self.saved:
            raise _FaultError(run.outputs[0].tensor, "the backward of a run has no forward before it", (device,))
        self.saved.remove(key)
        inside: dict[str, Symbol] = {}
        for slot, buffer in zip(run.outputs, backward.cotangents, strict=True):
            if buffer is not None:
                inside[slot.tensor] = self._read(device, buffer, micro, slot.tensor)
        slots: dict[int, Symbol] = {}
        for block, part, piece in reversed(self._pieces(s, device, backward.run)):
            if not self._gives_cotangents(block):
                continue
            taken = self._take_cotangents(device, block, part, piece, inside, micro)
            for tensor in (*block.inputs, *block.parameters):
                if not self._is_differentiable(tensor):
                    continue
                own = tuple(piece.interval(d.name, d.size, micro) for d in block.dims if tensor not in d.shards)
                link = (tensor, block.name, own)
                parts = frozenset((link, *rest) for rest in taken)
                symbol = Symbol("cotangent", tensor, self._box(piece, tensor, micro), parts)
                if tensor in part.reads:
                    slot_index = part.reads[tensor]
                    old = slots.get(slot_index)
                    slots[slot_index] = symbol if old is None else self._add(device, tensor, old, symbol)
                else:
                    old = inside.get(tensor)
                    inside[tensor] = symbol if old is None else self._add(device, tensor, old, symbol)
        for i, (slot, buffer) in enumerate(zip(run.inputs, backward.outputs, strict=True)):
            if buffer is not None:
                if i not in slots:
                    raise _FaultError(slot.tensor, "a run gives no cotangent of this input", (device,))
                self._write(device, buffer, micro, slots[i])

    def _take_cotangents(
        self, device: int, block: Block, part: RunBlock, piece: BlockPiece, inside: dict[str, Symbol], micro: int
    ) -> set[Part]:
        """What a block's cotangents are made of: nothing more to say if complete, else the parts passed on."""
        taken: set[Part] = set()
        for tensor in block.outputs:
            if not self._is_differentiable(tensor):
                continue
            box = self._box(piece, tensor, micro)
            symbol = inside.get(tensor, Symbol("cotangent", tensor, box, frozenset()))
            if symbol.kind != "cotangent" or symbol.tensor != tensor or symbol.box != box:
                raise _FaultError(
                    tensor, f"{block.name} needs its cotangent at {list(box)} and is given {symbol}", (device,)
                )
            lack = self._lacks_cotangent(symbol)
            if not lack and not part.passes_partial:
                taken.add(())
            elif part.passes_partial:
                taken.update(symbol.parts)
            else:
                raise _FaultError(tensor, f"{block.name} is given an incomplete cotangent: {lack}", (device,))
        return taken

    # -- completeness

    def _lacks_value(self, symbol: Symbol) -> str:
        if symbol.parts == {STORED}:
            return ""
        block = self.blocks.blocks[self.blocks.producer[symbol.tensor]]
        if any(part[0][:2] != (symbol.tensor, block.name) for part in symbol.parts):
            return "it holds foreign contributions"
        full = tuple((0, d.size) for d in block.dims if symbol.tensor in d.partials)
        boxes = [part[0][2] for part in symbol.parts]
        return "" if covers(boxes, full) else f"{block.name} contributed {len(boxes)} of its parts"

    def _lacks_cotangent(self, symbol: Symbol) -> str:
        if symbol.tensor == self.graph.loss:
            return "" if symbol.parts == {SEED} else "it is not the loss's own"
        return missing(symbol.tensor, symbol.parts, self._consumers(symbol.tensor), self._outputs)

    def _consumers(self, tensor: str) -> dict[str, Box]:
        consumers = {}
        for index in self.blocks.consumers.get(tensor, ()):
            block = self.blocks.blocks[index]
            if self._gives_cotangents(block):
                consumers[block.name] = self._lacking(block, tensor)
        return consumers

    def _lacking(self, block: Block, tensor: str) -> Box:
        key = (tensor, block.index)
        if key not in self._wholes:
            self._wholes[key] = whole(tuple(d.size for d in block.dims if tensor not in d.shards))
        return self._wholes[key]

    def _outputs(self, consumer: str) -> Mapping[str, Mapping[str, Box]]:
        block = self._by_name[consumer]
        return {tensor: self._consumers(tensor) for tensor in block.outputs if self._is_differentiable(tensor)}

    def _gives_cotangents(self, block: Block) -> bool:
        return any(self._is_differentiable(tensor) for tensor in block.outputs)

    def _is_differentiable(self, tensor: str) -> bool:
        return self.graph.is_differentiable(tensor)

    def _wants_gradient(self, name: str) -> bool:
        return bool(self._consumers(name))


def _describe(instruction: Instruction) -> str:
    match instruction:
        case Collective(source=source, target=target, steps=steps):
            return f"Collective {source} -> {target}: {'; '.join(map(str, steps))}"
        case Send(channel=channel) | Receive(channel=channel):
            return f"{type(instruction).__name__} {channel}"
        case Forward(run=run) | Backward(run=run):
            return f"{type(instruction).__name__} of run {run}"
        case Wait(buffer=buffer) | Free(buffer=buffer):
            return f"{type(instruction).__name__} {buffer}"
        case Sum(target=target) | Accumulate(target=target) | Seed(target=target):
            return f"{type(instruction).__name__} into {target}"
    return type(instruction).__name__
