"""The simulator: the interpreter of a program that counts seconds.

Each stage has a compute stream and a communication stream. Runs, sums and updates take the compute stream; a
collective starts when its source is ready and the communication stream is free, and a wait holds the compute stream
until it is done. A message arrives its exchange's time after both halves have started; a send does not hold its
sender. All devices of a stage do the same, so one of them stands for all.
"""

from dataclasses import dataclass, field
from math import prod

from planloom.collective import local_sizes_after
from planloom.cost import Price, Prices
from planloom.cost.keys import Phase
from planloom.cost.prices import Source
from planloom.errors import PriceError
from planloom.program import (
    Accumulate,
    Backward,
    Buffer,
    Collective,
    Forward,
    Instruction,
    Program,
    Receive,
    Seed,
    Send,
    Sum,
    Update,
    Wait,
)
from planloom.program.schedule import interleave
from planloom.simulate.timeline import Event, Stream, Timeline

Place = tuple[Buffer, int]


def simulate(program: Program, prices: Prices) -> Timeline:
    """The timeline of one step, one device for each stage."""
    return _Simulator(program, prices).run()


@dataclass
class _Stage:
    compute: float = 0.0
    communication: float = 0.0
    pending: dict[Place, list[tuple[str, str, int]]] = field(default_factory=dict)
    ready: dict[Place, float] = field(default_factory=dict)


class _Simulator:
    def __init__(self, program: Program, prices: Prices) -> None:
        self.program, self.prices = program, prices
        self.stages = [_Stage() for _ in program.stages]
        self.sent: dict[tuple[str, int], float] = {}
        self.received: dict[tuple[str, int], float] = {}
        self.exchange_seconds: dict[tuple[str, int], float] = {}
        self.events: list[Event] = []
        self.sources: set[Source] = set()
        self._run_prices: dict[tuple[int, str], float] = {}
        self._step_prices: dict[int, float] = {}

    def run(self) -> Timeline:
        if interleave(self.program, lambda line: self._step(line.stage, line.instruction, line.micro)):
            raise PriceError("a program that deadlocks has no time", required="a program that verifies")
        return Timeline(events=tuple(self.events), sources=tuple(sorted(self.sources)))

    def _step(self, s: int, instruction: Instruction, micro: int) -> bool:
        stage = self.stages[s]
        match instruction:
            case Forward(run=run):
                self._compute(s, instruction, micro, self._run_seconds(run, "forward"))
            case Backward(run=run):
                self._compute(s, instruction, micro, self._run_seconds(run, "backward"))
            case Sum() | Accumulate() | Seed():
                self._compute(s, instruction, micro, self._memory_seconds(s, instruction))
            case Update():
                self._compute(s, instruction, micro, self._seen(self.prices.update(self.program, s)))
            case Collective(target=target):
                start = max(stage.compute, stage.communication)
                stage.communication = start + self._steps_seconds(instruction)
                stage.ready[target, micro if target.indexed else -1] = stage.communication
                self._record(s, "communication", instruction, micro, start, stage.communication)
            case Send(channel=channel, source=source):
                self._start_half(s, self.sent, channel, micro, (source, micro if source.indexed else -1))
                seconds = self._seen(self.prices.exchange(instruction.transfers, self._item_bytes(instruction.tensor)))
                self.exchange_seconds[channel, micro] = seconds
            case Receive(channel=channel, target=target):
                self._start_half(s, self.received, channel, micro, (target, micro if target.indexed else -1))
            case Wait():
                return self._wait(s, instruction, micro)
        return True

    def _start_half(self, s: int, halves: dict[tuple[str, int], float], channel: str, micro: int, place: Place) -> None:
        halves[channel, micro] = self.stages[s].compute
        kind = "send" if halves is self.sent else "receive"
        self.stages[s].pending.setdefault(place, []).append((kind, channel, micro))

    def _wait(self, s: int, wait: Wait, micro: int) -> bool:
        stage = self.stages[s]
        if wait.every:
            places = [place for place in stage.pending if place[0] == wait.buffer]
        else:
            places = [(wait.buffer, micro - wait.lag if wait.buffer.indexed else -1)]
        pending = [half for place in places for half in stage.pending.get(place, ())]
        if any((channel, at) not in self.sent or (channel, at) not in self.received for _, channel, at in pending):
            return False
        start, stop = stage.compute, stage.compute
        for _, channel, at in pending:
            begun = max(self.sent[channel, at], self.received[channel, at])
            stop = max(stop, begun + self.exchange_seconds[channel, at])
        for place in places:
            stage.pending.pop(place, None)
            stop = max(stop, stage.ready.pop(place, 0.0))
        stage.compute = stop
        if stop > start and pending:
            self._record(s, "communication", wait, micro, start, stop)
        return True

    def _compute(self, s: int, instruction: Instruction, micro: int, seconds: float) -> None:
        stage = self.stages[s]
        self._record(s, "compute", instruction, micro, stage.compute, stage.compute + seconds)
        stage.compute += seconds

    def _record(self, s: int, stream: Stream, instruction: Instruction, micro: int, start: float, stop: float) -> None:
        name = type(instruction).__name__
        if isinstance(instruction, Forward | Backward):
            name += f" {instruction.run}"
        elif isinstance(instruction, Collective):
            name = " + ".join(step.kind for step in instruction.steps)
        device = self.program.stages[s].mesh.devices[0]
        event = Event(device=device, stream=stream, name=name, micro=micro, start_seconds=start, stop_seconds=stop)
        self.events.append(event)

    # -- prices, each asked for once

    def _seen(self, price: Price) -> float:
        self.sources.add(price.source)
        return price.seconds

    def _item_bytes(self, tensor: str) -> int:
        return self.prices.blocks.graph.tensors[tensor].item_bytes

    def _stored_bytes(self, tensor: str, sizes: tuple[int, ...]) -> int:
        """Bytes of a local array; of a ragged tensor only the rows that are there."""
        return round(prod(sizes) * self._item_bytes(tensor) * self.prices.blocks.graph.tensors[tensor].density)

    def _run_seconds(self, run: int, phase: Phase) -> float:
        if (run, phase) not in self._run_prices:
            self._run_prices[run, phase] = self._seen(self.prices.run(self.program, self.program.runs[run], phase))
        return self._run_prices[run, phase]

    def _steps_seconds(self, collective: Collective) -> float:
        if id(collective) not in self._step_prices:
            total, sizes = 0.0, collective.sizes
            for step in collective.steps:
                num_bytes = self._stored_bytes(collective.tensor, sizes)
                total += self._seen(self.prices.step(step, num_bytes))
                sizes = local_sizes_after(step, sizes)
            self._step_prices[id(collective)] = total
        return self._step_prices[id(collective)]

    def _memory_seconds(self, s: int, instruction: Instruction) -> float:
        """Sums and accumulations read and write a cotangent or gradient; its size is that of the whole at most."""
        tensor = self.prices.blocks.graph.tensors[instruction.tensor]  # type: ignore[union-attr]
        shares = len(self.program.stages[s].mesh.devices)
        num_bytes = self._stored_bytes(tensor.name, tensor.shape) // shares
        accesses = 1 + (len(instruction.sources) if isinstance(instruction, Sum) else 2)
        return self._seen(self.prices.memory(accesses * num_bytes))
