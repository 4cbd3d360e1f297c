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

from dataclasses import dataclass, replace

from planloom.blocks import BlockGraph
from planloom.errors import VerificationError
from planloom.layout import Box
from planloom.program.devices import Devices, FaultError
from planloom.program.likeness import counted, goes_through, representatives, with_micro_batches
from planloom.program.schedule import Line, interleave
from planloom.program.symbolic_rings import RingSymbols, SymbolicTurn
from planloom.program.symbolic_runs import RunError, SymbolicRun
from planloom.program.symbolic_steps import StepError, extract, join_pieces
from planloom.program.symbols import SEED, STORED, Symbol
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
    Update,
    Wait,
    WeightGradient,
)
from planloom.program.wording import deadlock, described, where


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


class _Interpreter(Devices):
    """Carries out every line of a program on symbols."""

    # -- the schedule

    def run(self) -> Proof:
        self._require_homes()
        stuck = interleave(self.program, self._guarded)
        if stuck:
            raise deadlock(self.program, stuck, of_meetings=bool(self.met))
        return self._finish()

    def _require_homes(self) -> None:
        for stage in self.program.stages:
            for stored in stage.parameters:
                home = self.program.mesh_of(stored.stage)
                strange = tuple(device for device in stage.mesh.devices if device not in home.devices)
                if strange:
                    what = f"devices store it that are not of its home, ranks {', '.join(map(str, home.devices))}"
                    raise self._refusal(stored.name, what, "the parameters of a role", strange)

    def _guarded(self, line: Line) -> bool:
        self.now = f"instruction {line.index} ({described(line.instruction)}) in {where(line)}"
        try:
            done = self._step(line.stage, line.instruction, line.micro)
        except FaultError as fault:
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
                    raise FaultError(tensor, f"{buffer} is freed while it is in flight", (device,))
                self._read(device, buffer, micro, tensor)
                self._forget(device, place)
            case Update():
                self._update(s, device, instruction, micro)

    def _take_piece(self, device: int, take: Take, micro: int) -> None:
        symbol = self._read(device, take.source, micro, take.tensor)
        self._require_tensor(device, take.tensor, symbol)
        try:
            piece = extract(symbol, take.box, take.sizes)
        except StepError as error:
            raise FaultError(take.tensor, str(error), (device,)) from None
        self._write(device, take.target, micro, piece)
        if take.source in self.persistent:
            self.views[device, self._place(take.target, micro)] = take.source

    def _put_piece(self, device: int, put: Put, micro: int) -> None:
        """A piece beside those that are there; the buffer holds a value once none is missing."""
        symbol = self._read(device, put.source, micro, put.tensor)
        self._require_tensor(device, put.tensor, symbol)
        place = self._place(put.target, micro)
        if (device, place) in self.in_flight:
            raise FaultError(put.tensor, f"{put.target} is written while it is in flight", (device,))
        pieces = self.pieces.get((device, place), [])
        if place in self.memory[device] and not pieces:
            raise FaultError(put.tensor, f"a piece is written into {put.target}, which is none's place", (device,))
        pieces = [*((found, box) for found, box in pieces if box != put.box), (symbol, put.box)]
        try:
            whole = join_pieces(pieces, put.sizes)
        except StepError as error:
            raise FaultError(put.tensor, str(error), (device,)) from None
        self.memory[device].pop(place, None)
        if whole is not None:
            self._write(device, put.target, micro, whole)
        self.pieces[device, place] = pieces

    def _update(self, s: int, device: int, update: Update, micro: int) -> None:
        stage = self.program.stages[s]
        stored = {p.name: p for p in stage.parameters}
        for name, gradient, target in zip(update.parameters, update.gradients, update.targets, strict=True):
            symbol = self._read(device, gradient, micro, name)
            at = self.program.mesh_of(stored[name].stage).coordinates(device)
            box = stored[name].optimizer_layout.box(stored[name].sizes, at)
            if symbol.kind != "cotangent" or symbol.tensor != name or symbol.box != box:
                raise FaultError(name, f"the update reads {symbol}, not the gradient at {list(box)}", (device,))
            lack = self.complete.lacks_cotangent(symbol)
            if lack:
                raise FaultError(name, f"its gradient is incomplete: {lack}", (device,))
            if (device, name) in self.updated:
                raise FaultError(name, "it is updated twice", (device,))
            self.updated.add((device, name))
            self._write(device, target, micro, Symbol("updated", name, box, frozenset({STORED})))

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
            raise FaultError(error.tensor, str(error), (device,)) from None
        if forward.saves:
            read_from = [self.views.get((device, self._place(b, micro)), b) for b in forward.inputs]
            kept = {b: self.memory[device][b, -1] for b in read_from if b in self.persistent}
            self.saved[device, forward.run, micro] = kept
        for slot, buffer in zip(self.program.runs[forward.run].outputs, forward.outputs, strict=True):
            self._write(device, buffer, micro, made[slot.tensor])

    def _backward(self, s: int, device: int, backward: Backward, micro: int) -> None:
        run = self.program.runs[backward.run]
        if (device, backward.run, micro) not in self.saved:
            raise FaultError(
                (run.outputs or run.inputs)[0].tensor,
                "the backward of a run has no forward before it that saved",
                (device,),
            )
        for buffer, symbol in self.saved.pop((device, backward.run, micro)).items():
            if self._read(device, buffer, micro, symbol.tensor) != symbol:
                what = f"{buffer} is not what the forward of the run read"
                raise FaultError(symbol.tensor, what, (device,))
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
            raise FaultError(error.tensor, str(error), (device,)) from None
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
            raise FaultError(tensor, "weight-gradients have no split backward before them", (device,))
        self._give(device, rest, micro, left)

    def _give(self, device: int, instruction: Backward | WeightGradient, micro: int, slots: dict[int, Symbol]) -> None:
        run = self.program.runs[instruction.run]
        for i, (slot, wanted) in enumerate(zip(run.inputs, instruction.outputs, strict=True)):
            if wanted is not None:
                if i not in slots:
                    raise FaultError(slot.tensor, "a run gives no cotangent of this input here", (device,))
                self._write(device, wanted, micro, slots[i])
