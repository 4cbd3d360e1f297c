"""The runtime: the interpreter of a program on one device, with real tensors and real communication."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from planloom.blocks import BlockGraph
from planloom.execute import Given, LocalRun, RunVjp, local_slice
from planloom.execute.background import Task
from planloom.execute.pieces import dims, put, take
from planloom.execute.ring_attention import LocalTurn, Rings
from planloom.execute.split_vjp import SplitVjp
from planloom.execute.vjp import Local
from planloom.execute.wire import Finish, Wire
from planloom.graph import RANDOM_STATE
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
    Run,
    Seed,
    Send,
    StoredParameter,
    Sum,
    Take,
    Update,
    Wait,
    WeightGradient,
    collectives_in,
)
from planloom.simulate.timeline import Event, Stream

Place = tuple[Buffer, int]
OptimizerFactory = Callable[[list[Tensor]], torch.optim.Optimizer]


class Runtime:
    """One device's memory and its way through the program, step by step."""

    def __init__(
        self,
        blocks: BlockGraph,
        program: Program,
        device: int,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        optimizer: OptimizerFactory,
        wire: Wire,
        *,
        seed: int = 0,
        at: torch.device | None = None,
        make_local: Callable[[LocalRun], Local] = lambda local: local,
    ) -> None:
        self.blocks, self.program, self.device, self.wire = blocks, program, device, wire
        self.stage = program.stages[program.stage_of(device)]
        self.at = at or next(iter(parameters.values())).device
        self.seed, self.num_steps = seed, 0
        self._given = Given(blocks.graph, buffers, self.at)
        self.buffers = {name: buffers[name].clone() for name in blocks.graph.updates}
        self._memory: dict[Place, Tensor] = {}
        self._borrowed: set[Place] = set()
        self._rings = Rings()
        self._saved: dict[tuple[int, int], RunVjp | SplitVjp] = {}
        self._in_flight: dict[Place, list[tuple[Finish, bool]]] = {}
        self._stored = {stored.name: stored for stored in self.stage.parameters}
        self._gathers = {buffer for stored in self.stage.parameters for buffer in stored.gathers}
        self._gathered: dict[Buffer, Tensor] = {}
        self._channels = _channel_tags(program)
        self._collected = {
            collective.target for body in self.stage.bodies.values() for i in body for collective in collectives_in(i)
        }
        self._split = self.stage.split_runs
        self._local: dict[int, Any] = {
            run.index: self._prepared(run, make_local)
            for run in program.runs
            if device in program.mesh_of(run.stage).devices
        }
        self._turns = {number: local for number, local in self._local.items() if isinstance(local, LocalTurn)}
        self.shards: dict[str, Tensor] = {}
        for stored in self.stage.parameters:
            self._store(stored, parameters[stored.name])
        self.optimizer = optimizer(list(self.shards.values())) if self.shards else None
        self.gradients: dict[str, Tensor] = {}
        self.keep_gradients = False
        self.events: list[Event] | None = None
        self._tasks: list[tuple[Task[object], str, int]] = []
        wire.create_groups(_all_groups(program))

    def _prepared(self, run: Run, make_local: Callable[[LocalRun], Local]) -> Local | LocalTurn:
        """A run as a function; one whose backward is split is cut at its parameters, and is not compiled."""
        coordinates = self.program.mesh_of(run.stage).coordinates(self.device)
        if run.turn is not None:
            return LocalTurn(self.blocks, run, coordinates, num_micro=self.program.num_micro_batches)
        local = LocalRun(self.blocks, run, coordinates, num_micro=self.program.num_micro_batches)
        return local if run.index in self._split else make_local(local)

    def _store(self, stored: StoredParameter, whole: Tensor) -> None:
        factors = self.blocks.graph.tensors[stored.name].factors
        coordinates = self.program.mesh_of(stored.stage).coordinates(self.device)
        held = local_slice(whole.detach(), factors, stored.layout.box(stored.sizes, coordinates)).clone()
        self._memory[stored.buffer, -1] = held
        shard = held.detach()  # the same memory: an update of the shard is an update of what is stored
        if stored.layout != stored.optimizer_layout:
            box = stored.optimizer_layout.box(stored.sizes, coordinates)
            shard = local_slice(whole.detach(), factors, box).clone()
        self.shards[stored.name] = shard.requires_grad_()

    def step(self, batch: Mapping[str, Tensor], before: Callable[[str, int], None] | None = None) -> Tensor:
        """One training step on the whole global batch; the loss, the same on every device.

        `before` is called with a body and the place of an instruction in it, before each and at the end.
        """
        known = {**batch, **self.buffers}
        if self.blocks.graph.random:
            known[RANDOM_STATE] = torch.tensor([self.seed, self.num_steps], device=self.at)
        given = self._given(known)
        with torch.no_grad():
            for call in self.stage.calls:
                body = self.stage.bodies[call.body]
                for at, instruction in enumerate(body):
                    if before is not None:
                        before(call.body, at)
                    self._timed(instruction, call.micro, given)
                if before is not None:
                    before(call.body, len(body))
        for name, value in self.blocks.graph.updates.items():
            self.buffers[name] = given[value]
        self.num_steps += 1
        return self._memory.pop((self.stage.loss, -1))

    def stored(self, name: str) -> Tensor:
        """This device's piece of a parameter, in its stored layout."""
        return self._memory[self._stored[name].buffer, -1].detach()

    def drain(self) -> None:
        """Wait until no collective is under way; what is awaited later is delivered then.

        Not for messages, which another stage may not expect yet: what a collective brought may be on its way to one.
        """
        for (buffer, _), works in self._in_flight.items():
            for finish, delivers in works:
                if delivers and buffer in self._collected:
                    finish()
        if self.at.type == "cuda":
            torch.cuda.current_stream(self.at).synchronize()

    def _timed(self, instruction: Instruction, micro: int, given: Mapping[str, Tensor]) -> None:
        if self.events is None:
            self._carry_out(instruction, micro, given)
            return
        start = time.perf_counter()
        self._carry_out(instruction, micro, given)
        stream = _stream(instruction)
        if stream is not None:
            self._record(stream, _name(instruction), micro, start, time.perf_counter())
        task = self.wire.last_task
        if task is not None and collectives_in(instruction):
            self._tasks.append((task, _name(instruction), micro))
            self.wire.last_task = None

    def _record(self, stream: Stream, name: str, micro: int, start: float, stop: float) -> None:
        assert self.events is not None
        event = Event(device=self.device, stream=stream, name=name, micro=micro, start_seconds=start, stop_seconds=stop)
        self.events.append(event)

    def record_communication(self) -> None:
        """Add what was carried out in the background to the events."""
        for task, name, micro in self._tasks:
            if task.span is not None:
                self._record("communication", name, micro, *task.span)
        self._tasks.clear()

    def _place(self, buffer: Buffer, micro: int) -> Place:
        return (buffer, micro if buffer.indexed else -1)

    def _get(self, buffer: Buffer, micro: int) -> Tensor:
        return self._memory[self._place(buffer, micro)]

    def _carry_out(self, instruction: Instruction, micro: int, given: Mapping[str, Tensor]) -> None:
        match instruction:  # the most frequent first: cases are tried one after the other
            case Free(buffer=buffer):
                self._free(buffer, micro)
            case Accumulate(target=target, source=source):
                self._accumulate(self._place(target, micro), self._get(source, micro))
            case Forward(run=run, inputs=inputs, outputs=outputs) if run in self._turns:
                values = [self._get(b, micro) for b in inputs]
                made = self._rings.forward(self._turns[run], values, given, micro, saves=instruction.saves)
                self._put_all(outputs, made, micro)
            case Backward(run=run, cotangents=cotangents, outputs=outputs, again=again) if run in self._turns:
                taken = [None if b is None else self._get(b, micro) for b in cotangents]
                held = [self._get(b, micro) for b in again]
                self._put_all(outputs, self._rings.backward(self._turns[run], taken, held, micro), micro)
            case Forward(run=run, inputs=inputs, outputs=outputs, saves=saves):
                vjp = self._vjp(run, saves)(self._local[run], [self._get(b, micro) for b in inputs], given, micro)
                if saves:
                    self._saved[run, micro] = vjp
                for buffer, value in zip(outputs, vjp.take_outputs(), strict=True):
                    self._memory[self._place(buffer, micro)] = value
            case Backward(run=run, cotangents=cotangents, outputs=outputs, is_split=is_split):
                vjp = self._saved.pop((run, micro))
                results = vjp.backward([None if b is None else self._get(b, micro) for b in cotangents])
                if is_split:
                    self._saved[run, micro] = vjp
                self._put_all(outputs, results, micro)
            case WeightGradient(run=run, outputs=outputs):
                vjp = self._saved.pop((run, micro))
                assert isinstance(vjp, SplitVjp)
                self._put_all(outputs, vjp.weight_gradients(), micro)
            case Collective(source=source, target=target, steps=steps, sizes=sizes, rows=Buffer() as rows):
                mask, count = self._get(rows, micro), instruction.num_row_dims
                finish = self.wire.move_rows(steps, self._get(source, micro), mask, sizes, count)
                self._start(target, micro, finish, delivers=True)
            case Collective(source=source, target=target, steps=steps, sizes=sizes):
                finish = self.wire.run_steps(steps, self._get(source, micro), sizes)
                finish = _shaped(finish, instruction.factors)  # one dim a factor, not one a sub-factor
                self._start(target, micro, _shaped(finish, self._factors(instruction.tensor)), delivers=True)
            case Coalesced():
                self._start_coalesced(instruction, micro)
            case Send(source=source, transfers=transfers, sizes=sizes, channel=channel):
                tag = self._tag(channel, micro)
                self._start(source, micro, self.wire.send(self._get(source, micro), sizes, transfers, tag))
            case Receive(target=target, transfers=transfers, sizes=sizes, channel=channel):
                dtype = getattr(torch, self.blocks.graph.tensors[instruction.tensor].dtype)
                finish = self.wire.receive(dtype, sizes, transfers, self._tag(channel, micro), self.at)
                self._start(target, micro, _shaped(finish, self._factors(instruction.tensor)), delivers=True)
            case Wait():
                self._wait(instruction, micro)
            case Sum(target=target, sources=sources):
                total = self._get(sources[0], micro).clone()
                for source in sources[1:]:
                    total += self._get(source, micro)
                self._memory[self._place(target, micro)] = total
            case Take(source=source, target=target, box=box, sizes=sizes):
                piece = take(self._get(source, micro), box, sizes, self._factors(instruction.tensor))
                self._memory[self._place(target, micro)] = piece
            case Put(source=source, target=target, box=box, sizes=sizes):
                place, piece = self._place(target, micro), self._get(source, micro)
                if place not in self._memory:
                    self._memory[place] = piece.new_empty(dims(sizes, self._factors(instruction.tensor)))
                put(self._memory[place], piece, box, sizes)
            case Seed(target=target, tensor=tensor):
                dtype = getattr(torch, self.blocks.graph.tensors[tensor].dtype)
                self._memory[self._place(target, micro)] = torch.ones((), dtype=dtype, device=self.at)
            case Update():
                self._update(instruction)

    def _vjp(self, run: int, saves: bool) -> type[RunVjp] | type[SplitVjp]:
        return SplitVjp if saves and run in self._split else RunVjp

    def _put_all(self, outputs: Sequence[Buffer | None], results: Sequence[Tensor | None], micro: int) -> None:
        for wanted, result in zip(outputs, results, strict=True):
            if wanted is not None and result is not None:
                self._memory[self._place(wanted, micro)] = result

    def _accumulate(self, place: Place, value: Tensor) -> None:
        """The first value is kept as it is: autograd may have given it to others, too. The second makes a new one."""
        if place not in self._memory:
            self._memory[place] = value
            self._borrowed.add(place)
        elif place in self._borrowed:
            self._memory[place] = self._memory[place] + value
            self._borrowed.discard(place)
        else:
            self._memory[place] += value

    def _start_coalesced(self, coalesced: Coalesced, micro: int) -> None:
        members = coalesced.collectives
        finish = self.wire.run_coalesced([(c.steps, self._get(c.source, micro), c.sizes) for c in members])
        for i, collective in enumerate(members):
            part = _shaped(partial(_item, finish, i), collective.factors)
            part = _shaped(part, self._factors(collective.tensor))
            self._start(collective.target, micro, part, delivers=True)
            if coalesced.takes_sources:
                del self._memory[self._place(collective.source, micro)]

    def _factors(self, tensor: str) -> tuple[tuple[int, ...], ...]:
        return self.blocks.graph.tensors[tensor].factors

    def _tag(self, channel: str, micro: int) -> int:
        return self._channels[channel] * (self.program.num_micro_batches + 1) + micro + 1

    def _start(self, buffer: Buffer, micro: int, finish: Finish, *, delivers: bool = False) -> None:
        self._in_flight.setdefault(self._place(buffer, micro), []).append((finish, delivers))

    def _wait(self, wait: Wait, micro: int) -> None:
        places = [self._place(wait.buffer, micro - wait.lag)]
        if wait.every:
            places = [place for place in self._in_flight if place[0] == wait.buffer]
        for place in places:
            for finish, delivers in self._in_flight.pop(place, ()):
                result = finish()
                if delivers:
                    self._deliver(place, result)
            if wait.free:
                self._memory.pop(place, None)

    def _deliver(self, place: Place, result: Tensor) -> None:
        """A parameter keeps its storage: autograd's saved views must see what is gathered again."""
        buffer = place[0]
        if buffer in self._gathers:
            held = self._gathered.setdefault(buffer, torch.empty_like(result))
            held.untyped_storage().resize_(result.numel() * result.element_size())
            held.data.copy_(result)
            self._memory[place] = held
        elif buffer.name in self._stored:
            self._memory[place].data.copy_(result)
        else:
            self._memory[place] = result

    def _free(self, buffer: Buffer, micro: int) -> None:
        tensor = self._memory.pop(self._place(buffer, micro))
        if buffer in self._gathers:
            tensor.untyped_storage().resize_(0)

    def _update(self, update: Update) -> None:
        for name, gradient in zip(update.parameters, update.gradients, strict=True):
            shard = self.shards[name]
            shard.grad = self._get(gradient, -1).reshape(shard.shape)
            if self.keep_gradients:
                self.gradients[name] = shard.grad.clone()
        if self.optimizer is not None:
            self.optimizer.step()
        for name, target in zip(update.parameters, update.targets, strict=True):
            self.shards[name].grad = None
            if target != self._stored[name].buffer:
                self._memory[target, -1] = self.shards[name].detach()


def _item(finish: Callable[[], list[Tensor]], i: int) -> Tensor:
    return finish()[i]


def _shaped(finish: Finish, factors: tuple[tuple[int, ...], ...]) -> Finish:
    """The result with the tensor's own dims instead of one dim a factor."""

    def shaped() -> Tensor:
        array = finish()
        lengths = iter(array.shape)
        return array.reshape([prod(next(lengths) for _ in dim) for dim in factors])

    return shaped


def _channel_tags(program: Program) -> dict[str, int]:
    channels = {
        instruction.channel
        for stage in program.stages
        for body in stage.bodies.values()
        for instruction in body
        if isinstance(instruction, Send)
    }
    return {channel: i for i, channel in enumerate(sorted(channels))}


def _all_groups(program: Program) -> list[tuple[int, ...]]:
    return [
        group
        for stage in program.stages
        for body in stage.bodies.values()
        for instruction in body
        for collective in collectives_in(instruction)
        for step in collective.steps
        if not step.is_local
        for group in step.groups
    ]


def _stream(instruction: Instruction) -> Stream | None:
    """Where an instruction's own time is spent; None if it only starts something, or forgets it."""
    if isinstance(instruction, Wait):
        return "waiting"
    computing = Forward | Backward | WeightGradient | Sum | Accumulate | Take | Put | Update
    return "compute" if isinstance(instruction, computing) else None


def _name(instruction: Instruction) -> str:
    match instruction:
        case Forward(run=run, again=True):
            return f"Recompute {run}"
        case Backward(run=run, is_split=True):
            return f"Input-gradient {run}"
        case WeightGradient(run=run):
            return f"Weight-gradient {run}"
        case Forward(run=run) | Backward(run=run):
            return f"{type(instruction).__name__} {run}"
    for collective in collectives_in(instruction):
        return " + ".join(step.kind for step in collective.steps if not step.is_local)
    return type(instruction).__name__
