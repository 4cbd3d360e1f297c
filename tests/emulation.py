"""An independent oracle: a program run on concrete tensors, all devices in one process, collectives by definition.

It shares nothing with the verifier and nothing with the wire; only the local functions of runs are the runtime's own. A
program means what this computes, in the worst of the orders that the program allows:

- communication reads its source as late as it may, when it is awaited; what was freed or overwritten by then is NaN;
- a receive is awaited only when no other stage can go on;
- a send ends only when its receive has started (rendezvous);
- what arrives cannot be read before its wait;
- messages from one device to another on one channel meet in their order, first in, first out;
- a collective of a shared stage happens when all its devices have started it, and each device's in their order;
- a parameter that is gathered for each use has one storage: what a run saved of it is NaN while it is freed.

Four things belong to the meaning though results may not depend on them:

- a statistic that a run is given: a softmax is the same for any maximum that its devices agree on;
- a gathered parameter during a backward: the cotangents of a sum do not depend on its summands;
- what a run is given when it is recomputed: likewise;
- the factor sizes of what a collective makes: beside a factor of one element, another may hold the same array.

Programs that read what is not there, or that cannot go on, raise `BrokenError`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal, TypeVar

import torch
from torch import Tensor

from planloom.blocks import BlockGraph
from planloom.execute import LocalRun, RunVjp, compute_given, local_slice
from planloom.execute.ring_attention import LocalTurn, Rings
from planloom.program import (
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
from tests.emulated_steps import BrokenError, add, apply_step, between, narrow, own_shape

Place = tuple[Buffer, int]
LocalRuns = dict[tuple[int, int], LocalRun | LocalTurn]
Result = TypeVar("Result")


@dataclass(eq=False, slots=True)
class _Cell:
    """What a buffer holds; communication in flight holds the cell, and sees what becomes of it."""

    tensor: Tensor
    is_spoilt: bool = False

    def read(self) -> Tensor:
        return torch.full_like(self.tensor, float("nan")) if self.is_spoilt else self.tensor


@dataclass(eq=False, slots=True)
class _Reduction:
    """A collective program under way on all devices of a stage."""

    instruction: Collective
    micro: int
    sources: dict[int, _Cell]
    devices: frozenset[int] = frozenset()
    """All that take part, if other roles do, too."""
    results: dict[int, Tensor] | None = None
    masks: dict[int, Tensor] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Exchange:
    """The halves of an exchange on one channel for one micro-batch, as far as they have started."""

    send: Send | None = None
    receive: Receive | None = None
    sources: dict[int, _Cell] = field(default_factory=dict)
    """Of the devices that have started to send."""
    receiving: set[int] = field(default_factory=set)


_InFlight = tuple[Literal["collective", "send", "receive"], "_Reduction | _Exchange"]


class Emulation:
    """Training steps of a program with plain SGD on every device; `results` is what the last one computed.

    Emulations of programs with the same runs on the same meshes may share prepared runs: `local_runs`.
    """

    def __init__(
        self,
        blocks: BlockGraph,
        program: Program,
        whole: dict[str, Tensor],
        buffers: dict[str, Tensor],
        lr: float,
        local_runs: LocalRuns | None = None,
    ) -> None:
        self.blocks, self.program, self.buffers, self.lr = blocks, program, buffers, lr
        self._local_runs = {} if local_runs is None else local_runs
        self._memory: dict[int, dict[Place, _Cell]] = {device: {} for device in program.devices}
        self._saved: dict[tuple[int, int, int], tuple[RunVjp, list[Buffer]]] = {}
        self._rings = {device: Rings() for device in program.devices}
        self._put_off: dict[tuple[int, int, int], list[Tensor | None]] = {}
        self._further: dict[tuple[str, int, str], Tensor] = {}
        self._in_flight: dict[tuple[int, Place], list[_InFlight]] = {}
        self._exchanges: dict[tuple[str, int], _Exchange] = {}
        self._under_way: dict[int, list[_Reduction]] = {device: [] for device in program.devices}
        """What every device has started with others, in its order."""
        self._gradients: dict[int, dict[str, Tensor]] = {device: {} for device in program.devices}
        self._shards: dict[int, dict[str, Tensor]] = {device: {} for device in program.devices}
        self._gathers = {b for stage in program.stages for p in stage.parameters for b in p.gathers}
        self._gathered: dict[tuple[int, Buffer], Tensor] = {}
        self._taken_from: dict[tuple[int, Place], Buffer] = {}
        for stage in program.stages:
            for device in stage.mesh.devices:
                for stored in stage.parameters:
                    factors, mesh = blocks.graph.tensors[stored.name].factors, program.mesh_of(stored.stage)
                    if device not in mesh.devices:
                        raise BrokenError(f"{stored.name} is stored on {device}, which is not of its home")
                    at = mesh.coordinates(device)
                    held = local_slice(whole[stored.name], factors, stored.layout.box(stored.sizes, at))
                    self._memory[device][stored.buffer, -1] = _Cell(held.clone())
                    shard = local_slice(whole[stored.name], factors, stored.optimizer_layout.box(stored.sizes, at))
                    self._shards[device][stored.name] = shard.clone()

    # -- a step and what it computed

    def run(self, batch: dict[str, Tensor]) -> None:
        """One step on the global batch."""
        self._given = compute_given(self.blocks.graph, {**batch, **self.buffers}, torch.device("cpu"))
        self._exchanges.clear()
        for started in self._under_way.values():
            started.clear()
        self._further.clear()
        for stage in self.program.stages:
            for device in stage.mesh.devices:
                self._gradients[device].clear()
                self._memory[device].pop((stage.loss, -1), None)
        scripts = [
            [(i, call.micro) for call in stage.calls for i in stage.bodies[call.body]] for stage in self.program.stages
        ]
        at = [0] * len(scripts)
        while any(position < len(script) for position, script in zip(at, scripts, strict=True)):
            if not (self._go_on(scripts, at, arrivals=False) or self._go_on(scripts, at, arrivals=True)):
                raise BrokenError("deadlock")
        if self._in_flight:
            raise BrokenError("something is never awaited")

    def results(self) -> dict[tuple[str, int, str], Tensor]:
        """(kind, device, name) → a loss, gradient, new parameter or value given to a run, as far as there is one."""
        found = dict(self._further)
        for stage in self.program.stages:
            for device in stage.mesh.devices:
                if (stage.loss, -1) in self._memory[device]:
                    found["loss", device, ""] = self._memory[device][stage.loss, -1].tensor
                for name, gradient in self._gradients[device].items():
                    found["gradient", device, name] = gradient
                for stored in stage.parameters:
                    if (stored.buffer, -1) in self._memory[device]:
                        found["parameter", device, stored.name] = self._memory[device][stored.buffer, -1].tensor
        return found

    # -- the schedule

    def _go_on(self, scripts: list[list[tuple[Instruction, int]]], at: list[int], *, arrivals: bool) -> bool:
        """Every stage as far as it comes without awaiting a receive; with `arrivals`, one such wait of one stage."""
        moved = False
        for s, script in enumerate(scripts):
            while at[s] < len(script) and self._may_step(s, *script[at[s]], arrivals=arrivals):
                self._step(s, *script[at[s]])
                at[s] += 1
                moved = True
                if arrivals:
                    return True
        return moved

    def _may_step(self, s: int, instruction: Instruction, micro: int, *, arrivals: bool) -> bool:
        if not isinstance(instruction, Wait):
            return not arrivals
        awaited = [item for _, _, item in self._awaited(s, instruction, micro)]
        if any(kind == "receive" for kind, _ in awaited) != arrivals:
            return False
        return all(
            self._is_matched(device, work) if isinstance(work, _Exchange) else self._happens(work)
            for device, _, (_, work) in self._awaited(s, instruction, micro)
        )

    def _is_matched(self, device: int, exchange: _Exchange) -> bool:
        """Have all from whom a device receives and to whom it sends begun to?"""
        if exchange.send is None or exchange.receive is None:
            return False
        own = [t for t in (*exchange.send.transfers, *exchange.receive.transfers) if device in (t.source, t.target)]
        return not self.program.shared or all(
            t.source in exchange.sources and t.target in exchange.receiving for t in own
        )

    def _happens(self, work: _Reduction) -> bool:
        """Have all come to a collective, and is nothing before it with any of them?"""
        moved = True
        while moved:
            moved = False
            for queue in self._under_way.values():
                first = queue[0] if queue else None
                if first is not None and first.devices <= first.sources.keys():
                    others = [self._under_way[device] for device in first.devices]
                    if all(other and other[0] is first for other in others):
                        moved = True
                        for other in others:
                            other.pop(0)
        return all(work not in queue for queue in self._under_way.values())

    def _awaited(self, s: int, wait: Wait, micro: int) -> Iterator[tuple[int, Place, _InFlight]]:
        for device in self.program.stages[s].mesh.devices:
            for place in self._places(device, wait, micro):
                for item in self._in_flight.get((device, place), ()):
                    yield device, place, item

    def _places(self, device: int, wait: Wait, micro: int) -> list[Place]:
        if wait.every:
            return [place for d, place in self._in_flight if d == device and place[0] == wait.buffer]
        return [self._place(wait.buffer, micro - wait.lag)]

    def _step(self, s: int, instruction: Instruction, micro: int) -> None:
        devices = self.program.stages[s].mesh.devices
        match instruction:
            case Collective():
                self._start_collective(devices, instruction, micro)
            case Coalesced(collectives=collectives, takes_sources=takes_sources):
                for collective in collectives:
                    self._start_collective(devices, collective, micro, copied=takes_sources)
                for device in devices if takes_sources else ():
                    for collective in collectives:
                        self._forget(device, self._place(collective.source, micro))
            case Send():
                self._start_send(devices, instruction, micro)
            case Receive():
                self._start_receive(devices, instruction, micro)
            case Wait():
                self._wait(s, instruction, micro)
            case _:
                for device in devices:
                    self._local(device, s, instruction, micro)

    # -- memory

    def _place(self, buffer: Buffer, micro: int) -> Place:
        return (buffer, micro if buffer.indexed else -1)

    def _cell(self, device: int, buffer: Buffer, micro: int) -> _Cell:
        place = self._place(buffer, micro)
        if any(kind != "send" for kind, _ in self._in_flight.get((device, place), ())):
            raise BrokenError(f"{buffer} is read on {device} before it arrived")
        if place not in self._memory[device]:
            raise BrokenError(f"{buffer} is not there on {device}")
        return self._memory[device][place]

    def _get(self, device: int, buffer: Buffer, micro: int) -> Tensor:
        return self._cell(device, buffer, micro).tensor

    def _set(self, device: int, place: Place, value: Tensor) -> None:
        """A new value; whoever still reads the old one in flight finds it spoilt."""
        buffer = place[0]
        if place in self._memory[device]:
            self._memory[device][place].is_spoilt = True
        if buffer in self._gathers:
            held = self._gathered.setdefault((device, buffer), torch.empty_like(value))
            if held.shape != value.shape:
                raise BrokenError(f"{buffer} is gathered in two sizes")
            held.data.copy_(value)  # `.data`: what a run saved sees the values, not a change of version
            value = held
        self._memory[device][place] = _Cell(value)

    def _forget(self, device: int, place: Place) -> None:
        cell = self._memory[device].pop(place)
        cell.is_spoilt = True
        if place[0] in self._gathers:
            cell.tensor.data.fill_(float("nan"))

    # -- what a device does alone

    def _local(self, device: int, s: int, instruction: Instruction, micro: int) -> None:
        def get(buffer: Buffer) -> Tensor:
            return self._get(device, buffer, micro)

        def put(buffer: Buffer, value: Tensor) -> None:
            self._set(device, self._place(buffer, micro), value)

        match instruction:
            case Forward() | Backward() if isinstance(self._local_run(s, device, instruction.run), LocalTurn):
                self._turn(s, device, instruction, micro)
            case Forward(run=run, inputs=inputs, outputs=outputs, saves=saves, again=again):
                local, values = self._local_run(s, device, run), [get(buffer) for buffer in inputs]
                for slot, value in zip(self.program.runs[run].inputs, values, strict=True):
                    if again or slot.cotangent is None:
                        kind = "recomputed" if again else "statistic"
                        self._further[kind, device, f"{slot.tensor} in run {run} of {micro}"] = value.clone()
                vjp = _checked(lambda: RunVjp(local, values, self._given, micro))
                if saves:
                    read_from = [self._taken_from.get((device, self._place(b, micro)), b) for b in inputs]
                    self._saved[device, run, micro] = vjp, [buffer for buffer in read_from if buffer in self._gathers]
                for buffer, value in zip(outputs, vjp.take_outputs(), strict=True):
                    put(buffer, value)
            case Backward(run=run, cotangents=cotangents, outputs=outputs, is_split=is_split):
                if (device, run, micro) not in self._saved:
                    raise BrokenError(f"run {run} has nothing saved on {device}")
                given = [None if buffer is None else get(buffer) for buffer in cotangents]
                vjp, gathered = self._saved.pop((device, run, micro))
                for buffer in gathered:
                    value = self._gathered[device, buffer].clone()
                    self._further["gathered", device, f"{buffer} in the backward of run {run} of {micro}"] = value
                results = _checked(lambda: vjp.backward(given))
                if is_split:  # given out later; nothing that the program does meanwhile may change it
                    self._put_off[device, run, micro] = [None if value is None else value.clone() for value in results]
                for slot, buffer, value in zip(self.program.runs[run].inputs, outputs, results, strict=True):
                    if buffer is not None:
                        if is_split and slot.tensor in self.blocks.graph.parameters:
                            raise BrokenError("a split backward gives no cotangents of parameters")
                        assert value is not None
                        put(buffer, value)
            case WeightGradient(run=run, outputs=outputs):
                if (device, run, micro) not in self._put_off:
                    raise BrokenError(f"run {run} has put nothing off on {device}")
                results = self._put_off.pop((device, run, micro))
                for slot, buffer, value in zip(self.program.runs[run].inputs, outputs, results, strict=True):
                    if buffer is not None:
                        if slot.tensor not in self.blocks.graph.parameters or value is None:
                            raise BrokenError("not the cotangent of a parameter")
                        put(buffer, value)
            case Seed(target=target, tensor=tensor):
                put(target, torch.ones((), dtype=getattr(torch, self.blocks.graph.tensors[tensor].dtype)))
            case Sum(target=target, sources=sources):
                total = get(sources[0])
                for source in sources[1:]:
                    total = add(total, get(source))
                put(target, total)
            case Accumulate(target=target, source=source):
                old = self._memory[device].get(self._place(target, micro))
                put(target, get(source) if old is None else add(old.tensor, get(source)))
            case Take(tensor=tensor, source=source, target=target, box=box, sizes=sizes):
                factors, array = self.blocks.graph.tensors[tensor].factors, get(source)
                piece = narrow(_checked(lambda: array.reshape(sizes)), box)
                put(target, piece.reshape(own_shape(factors, piece.shape)))
                if source in self._gathers:
                    self._taken_from[device, self._place(target, micro)] = source
            case Put(tensor=tensor, source=source, target=target, box=box, sizes=sizes):
                place, piece = self._place(target, micro), get(source)
                factors, cell = self.blocks.graph.tensors[tensor].factors, self._memory[device].get(place)
                whole = torch.full(sizes, float("nan"), dtype=piece.dtype) if cell is None else cell.tensor.clone()
                inside = narrow(_checked(lambda: whole.reshape(sizes)), box)
                inside.copy_(_checked(lambda: piece.reshape(inside.shape)))
                put(target, whole.reshape(own_shape(factors, sizes)))
            case Free(buffer=buffer):
                get(buffer)
                self._forget(device, self._place(buffer, micro))
            case Update(parameters=parameters, gradients=gradients, targets=targets):
                for name, gradient, target in zip(parameters, gradients, targets, strict=True):
                    shard, value = self._shards[device][name], get(gradient)
                    if value.shape != shard.shape:
                        raise BrokenError(
                            f"the gradient of {name} is of shape {list(value.shape)}, not {list(shard.shape)}"
                        )
                    self._gradients[device][name] = value
                    self._shards[device][name] = shard - self.lr * value
                    put(target, self._shards[device][name])
            case _:
                raise AssertionError(instruction)

    def _turn(self, s: int, device: int, instruction: Forward | Backward, micro: int) -> None:
        """A turn of a ring: what the ring holds meanwhile is no buffer."""
        local, rings = self._local_run(s, device, instruction.run), self._rings[device]
        assert isinstance(local, LocalTurn)
        if isinstance(instruction, Forward):
            values = [self._get(device, buffer, micro) for buffer in instruction.inputs]
            saves = instruction.saves
            made: Sequence[Tensor | None] = _checked(
                lambda: rings.forward(local, values, self._given, micro, saves=saves)
            )
        else:
            taken = [None if b is None else self._get(device, b, micro) for b in instruction.cotangents]
            held = [self._get(device, buffer, micro) for buffer in instruction.again]
            made = _checked(lambda: rings.backward(local, taken, held, micro))
        for buffer, value in zip(instruction.outputs, made, strict=True):
            if buffer is not None:
                assert value is not None
                self._set(device, self._place(buffer, micro), value)

    def _local_run(self, s: int, device: int, run: int) -> LocalRun | LocalTurn:
        if (device, run) not in self._local_runs:
            of, num_micro = self.program.runs[run], self.program.num_micro_batches
            if device not in self.program.mesh_of(of.stage).devices:
                raise BrokenError(f"run {run} is one of other devices than {device}")
            make = LocalRun if of.turn is None else LocalTurn
            at = self.program.mesh_of(of.stage).coordinates(device)
            self._local_runs[device, run] = make(self.blocks, of, at, num_micro=num_micro)
        return self._local_runs[device, run]

    # -- communication

    def _start(self, device: int, place: Place, item: _InFlight) -> None:
        self._in_flight.setdefault((device, place), []).append(item)

    def _start_collective(
        self, devices: Sequence[int], collective: Collective, micro: int, *, copied: bool = False
    ) -> None:
        cells = {d: self._cell(d, collective.source, micro) for d in devices}
        if copied:
            cells = {d: _Cell(cell.read().clone()) for d, cell in cells.items()}
        reduction = self._met(devices, collective, micro)
        reduction.sources.update(cells)
        if collective.rows is not None:
            reduction.masks.update({d: self._get(d, collective.rows, micro).clone() for d in devices})
        for device in devices:
            self._start(device, self._place(collective.target, micro), ("collective", reduction))

    def _met(self, devices: Sequence[int], collective: Collective, micro: int) -> _Reduction:
        """A collective of these devices alone; or of a shared stage, which others may have started."""
        if not self.program.shared:
            return _Reduction(collective, micro, {})
        group = collective.target.of
        taking_part = frozenset(self.program.mesh_of(group).devices if group >= 0 else devices)
        same = [
            work
            for queue in self._under_way.values()
            for work in queue
            if (work.instruction, work.micro, work.devices) == (collective, micro, taking_part)
        ]
        work = same[0] if same else _Reduction(collective, micro, {}, taking_part)
        if work.sources.keys() & set(devices):
            raise BrokenError(f"{collective.target} is started twice")
        for device in devices:
            self._under_way[device].append(work)
        return work

    def _start_send(self, devices: Sequence[int], send: Send, micro: int) -> None:
        exchange = self._exchanges.setdefault((send.channel, micro), _Exchange())
        if exchange.send not in (None, send) or exchange.sources.keys() & set(devices):
            raise BrokenError(f"{send.channel} is sent twice")
        exchange.send = send
        for device in devices:
            exchange.sources[device] = self._cell(device, send.source, micro)
            self._start(device, self._place(send.source, micro), ("send", exchange))

    def _start_receive(self, devices: Sequence[int], receive: Receive, micro: int) -> None:
        exchange = self._exchanges.setdefault((receive.channel, micro), _Exchange())
        if exchange.receive not in (None, receive) or exchange.receiving & set(devices):
            raise BrokenError(f"{receive.channel} is received twice")
        exchange.receive = receive
        exchange.receiving.update(devices)
        for device in devices:
            self._start(device, self._place(receive.target, micro), ("receive", exchange))

    def _wait(self, s: int, wait: Wait, micro: int) -> None:
        for device in self.program.stages[s].mesh.devices:
            for place in self._places(device, wait, micro):
                for kind, work in self._in_flight.pop((device, place), ()):
                    if isinstance(work, _Reduction):
                        self._set(device, place, self._reduced(work)[device])
                    elif kind == "send":
                        self._end_send(device, work)
                    else:
                        self._set(device, place, self._received(device, work))
                if wait.free and place in self._memory[device]:
                    self._forget(device, place)

    def _reduced(self, work: _Reduction) -> dict[int, Tensor]:
        if work.results is None:
            collective, factors = work.instruction, self.blocks.graph.tensors[work.instruction.tensor].factors
            cells = work.sources
            if work.masks:
                work.results = self._reduced_rows(work)
                return work.results
            arrays = {d: _checked(lambda d=d: cells[d].read().reshape(collective.sizes)) for d in cells}
            for step in collective.steps:
                arrays = apply_step(step, arrays)
            if arrays.keys() != cells.keys():
                raise BrokenError("a device holds nothing at the end")
            arrays = {
                d: _checked(lambda a=a: a.reshape(own_shape(collective.factors, a.shape))) for d, a in arrays.items()
            }
            for device, array in arrays.items():
                key = ("sizes", device, f"{collective.target} of {work.micro}")
                while key in self._further:  # gathered again, for the backward
                    key = (*key[:2], f"{key[2]} again")
                self._further[key] = torch.tensor([*array.shape, 1])
            work.results = {d: array.reshape(own_shape(factors, array.shape)).clone() for d, array in arrays.items()}
        return work.results

    def _reduced_rows(self, work: _Reduction) -> dict[int, Tensor]:
        """A ragged tensor: written out with zeros between its rows, moved as any other, and rows taken out again."""
        collective = work.instruction
        wholes, masks = {}, {}
        for device, cell in work.sources.items():
            mask, rows = work.masks[device].flatten(), cell.read()[0]
            whole = torch.zeros(mask.numel(), rows.shape[1], dtype=rows.dtype)
            whole[mask] = rows
            wholes[device] = whole.reshape(collective.sizes)
            masks[device] = mask.unsqueeze(1).expand(whole.shape).reshape(collective.sizes).to(torch.float64)
        for step in collective.steps:
            wholes = apply_step(step, wholes)
            masks = masks if step.kind in ("all_reduce", "mask") else apply_step(replace(step, combine="max"), masks)
        count = collective.num_row_dims
        results = {}
        for device, whole in wholes.items():
            num_rows = prod(whole.shape[:count])
            held = masks[device].reshape(num_rows, -1)[:, 0] > 0
            results[device] = whole.reshape(num_rows, -1)[held].unsqueeze(0).clone()
        return results

    def _end_send(self, device: int, exchange: _Exchange) -> None:
        """The send has ended: every message has met its receive, and its elements are on their way."""
        send, receive = exchange.send, exchange.receive
        assert send is not None
        assert receive is not None
        for target in {t.target for t in send.transfers if t.source == device}:
            if len(between(send.transfers, device, target)) > len(between(receive.transfers, device, target)):
                raise BrokenError(f"a message from {device} to {target} is never received")
        exchange.sources[device] = _Cell(exchange.sources[device].read())

    def _received(self, device: int, exchange: _Exchange) -> Tensor:
        send, receive = exchange.send, exchange.receive
        assert send is not None
        assert receive is not None
        tensor = self.blocks.graph.tensors[receive.tensor]
        result = torch.full(receive.sizes, float("nan"), dtype=getattr(torch, tensor.dtype))
        for source in dict.fromkeys(t.source for t in receive.transfers if t.target == device):
            sent = between(send.transfers, source, device)
            expected = between(receive.transfers, source, device)
            if len(expected) > len(sent):
                raise BrokenError(f"a message from {source} to {device} is never sent")
            for there, here in zip(sent, expected, strict=False):
                array = _checked(lambda source=source: exchange.sources[source].read().reshape(send.sizes))
                message, place = narrow(array, there.source_box), narrow(result, here.target_box)
                if message.shape != place.shape:
                    raise BrokenError(f"a message from {source} to {device} is not of the size that is received")
                place.copy_(message)
        return result.reshape(own_shape(tensor.factors, receive.sizes))


def _checked(function: Callable[[], Result]) -> Result:
    """What torch refuses cannot be carried out."""
    try:
        return function()
    except (RuntimeError, IndexError) as error:
        raise BrokenError(str(error)) from error
