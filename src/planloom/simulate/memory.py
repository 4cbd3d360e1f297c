"""What a role holds when: exact liveness over its program, as the runtime holds it.

Every buffer refers to a storage, and so does what autograd saved: a run's input that was saved lives on after its
buffer is freed, and is counted once however many runs saved it. A storage is gone when nobody refers to it.

Calls of a body do the same whatever their micro-batch, except the first ones (the first gradient becomes the sum, the
second makes a new one) and the last backward. So each kind of call is walked through once, instruction by instruction,
which gives what it adds and how far it rises above where it began; then the calls are gone through in their order,
with all micro-batches that are in flight.

| part          | what                                                                                        |
|---------------|---------------------------------------------------------------------------------------------|
| parameters    | as stored, and gathered ones while they are gathered                                        |
| optimizer     | two moments of AdamW, and the shards that it updates where they are not the stored ones     |
| gradients     | sums over micro-batches, reduced gradients                                                  |
| activations   | outputs of runs and what their backward needs                                               |
| temporaries   | inside a run's forward or backward, cotangents, inside the optimizer                        |
| communication | arrays on their way                                                                         |
| inputs        | the batch and what is computed from it alone                                                |
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from planloom.cost import Prices, RunMemory
from planloom.graph import Graph, held_elements, repeated_factors
from planloom.layout import Box, volume
from planloom.layout.boxes import lies_together
from planloom.program import (
    Accumulate,
    Backward,
    BodyCall,
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
    StageProgram,
    Sum,
    Take,
    Update,
    Wait,
    WeightGradient,
    collectives_in,
)
from planloom.program.schedule import is_last
from planloom.program.sizes import sizes_of_steps
from planloom.simulate.rings import RingMemory
from planloom.simulate.timeline import RoleMemory
from planloom.simulate.weight_memory import weight_gradient_needs

PARTS = ("parameters", "optimizer", "gradients", "activations", "temporaries", "communication", "inputs")
_NUM_MOMENTS = 2
_WALKED = 3
"""Calls of a body after which the next are alike; more where sends are awaited more than one micro-batch later."""

Place = tuple[Buffer, int]
Bytes = dict[str, int]


@dataclass(eq=False, slots=True)
class Storage:
    num_bytes: int
    part: str
    num_holders: int = 1


@dataclass(slots=True)
class _Arrival:
    """Communication under way: what it works with, and what its targets get; `shared`: views of one array."""

    working: Storage
    result_bytes: int
    shared: Storage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _CallMemory:
    """What one kind of call adds, and its highest point above where it began."""

    added: Bytes
    peak: Bytes
    when: str


def role_memory(program: Program, stage: int, prices: Prices, sizes: Mapping[Buffer, int]) -> RoleMemory:
    """The peak of one stage's devices over a step, with AdamW; `sizes`: the bytes of the stage's buffers."""
    own = program.stages[stage]
    walk = _Walk(program, stage, prices, sizes)
    kinds = walk.kinds_of_calls()
    live, peak, when = dict(walk.before), dict(walk.before), "before the step"
    rises = {kind: sum(memory.peak.values()) for kind, memory in kinds.items()}
    added = {kind: [(part, count) for part, count in memory.added.items() if count] for kind, memory in kinds.items()}
    most = sum(live.values())
    for call, kind in zip(own.calls, _kinds(own.calls, _num_walked(own)), strict=True):
        memory, reached = kinds[kind], sum(live.values()) + rises[kind]
        if reached > most:
            peak, most = _plus(live, memory.peak), reached
            when = memory.when + (f" of micro-batch {call.micro}" if call.micro >= 0 else "")
        for part, num_bytes in added[kind]:
            live[part] = live.get(part, 0) + num_bytes
    parts = {part: peak.get(part, 0) for part in PARTS if peak.get(part, 0)}
    return RoleMemory(devices=own.mesh.devices, peak_bytes=sum(parts.values()), parts=parts, when=when)


def _num_walked(stage: StageProgram) -> int:
    lags = (i.lag for body in stage.bodies.values() for i in body if isinstance(i, Wait))
    return max(_WALKED, 2 + max(lags, default=0))


def _kinds(calls: Sequence[BodyCall], num_walked: int) -> list[tuple[str, int]]:
    """(body, how manieth call of it, at most so many)."""
    counts: dict[str, int] = {}
    kinds = []
    for call in calls:
        kinds.append((call.body, min(counts.get(call.body, 0), num_walked - 1)))
        counts[call.body] = counts.get(call.body, 0) + 1
    return kinds


class _Walk:
    """One device of a stage, through a few micro-batches, one after another."""

    def __init__(self, program: Program, s: int, prices: Prices, sizes: Mapping[Buffer, int]) -> None:
        self.program, self.stage, self.prices, self.sizes = program, program.stages[s], prices, sizes
        self.graph = prices.blocks.graph
        self.held: dict[Place, Storage] = {}
        self.saved: dict[tuple[int, int], list[Storage]] = {}
        self.inputs_of: dict[int, tuple[Buffer, ...]] = {}
        """What the last forward of a run read."""
        self.rings = RingMemory(self)
        self.arriving: dict[Place, _Arrival] = {}
        self.gathers = {buffer for p in self.stage.parameters for buffer in p.gathers}
        """Gathered parameters and pieces that lie in them: what a run saves of one holds no storage."""
        self.parameters = set(self.graph.parameters)
        self.borrowed: set[Place] = set()
        self.live: Bytes = {}
        self.highest: Bytes = {}
        self.total = self.most = 0
        self.when = ""
        for stored in self.stage.parameters:
            self.held[stored.buffer, -1] = self.make(self.sizes[stored.buffer], "parameters")
            shard = prod(stored.optimizer_layout.local_sizes(stored.sizes))
            shard *= self.graph.tensors[stored.name].item_bytes
            self.make(_NUM_MOMENTS * shard, "optimizer")
            if stored.layout != stored.optimizer_layout:
                self.make(shard, "optimizer")
        self.make(given_bytes(self.graph), "inputs")
        self.before = dict(self.live)

    def kinds_of_calls(self) -> dict[tuple[str, int], _CallMemory]:
        """Every kind of call that occurs, walked in a plain order: each micro-batch forward and backward."""
        found: dict[tuple[str, int], _CallMemory] = {}
        counts, num_walked = dict[str, int](), _num_walked(self.stage)
        for call in _plain_order(self.stage, num_walked):
            kind = (call.body, counts.get(call.body, 0))
            counts[call.body] = kind[1] + 1
            memory = self._walk(call)
            if kind[1] < num_walked:
                found[kind] = memory
        return found

    def _walk(self, call: BodyCall) -> _CallMemory:
        start = dict(self.live)
        self.highest, self.most, self.when = dict(self.live), self.total, call.body
        for instruction in self.stage.bodies[call.body]:
            self._carry_out(instruction, call)
        return _CallMemory(added=_minus(self.live, start), peak=_minus(self.highest, start), when=self.when)

    # -- storages

    def make(self, num_bytes: int, part: str) -> Storage:
        self._add(num_bytes, part)
        return Storage(num_bytes, part)

    def _add(self, num_bytes: int, part: str) -> None:
        self.live[part] = self.live.get(part, 0) + num_bytes
        self.total += num_bytes

    def drop(self, storage: Storage | None) -> None:
        if storage is not None:
            storage.num_holders -= 1
            if storage.num_holders == 0:
                self._add(-storage.num_bytes, storage.part)

    def rise(self, what: str, extra: int = 0, part: str = "temporaries") -> None:
        """Is this the highest point so far?"""
        if self.total + extra > self.most:
            self.most = self.total + extra
            self.highest = _plus(self.live, {part: extra})
            self.when = what

    def put(self, buffer: Buffer, micro: int, storage: Storage) -> None:
        place = _place(buffer, micro)
        old = self.held.get(place)
        self.held[place] = storage
        self.drop(old)

    def _keep(self, buffer: Buffer, micro: int) -> Storage:
        storage = self.held[_place(buffer, micro)]
        storage.num_holders += 1
        return storage

    def keep_flagged(self, buffers: Sequence[Buffer], flags: Sequence[bool], micro: int) -> list[Storage]:
        """Hold on to what is flagged, but for what is gathered again."""
        pairs = zip(buffers, flags, strict=True)
        return [self._keep(b, micro) for b, is_kept in pairs if is_kept and b not in self.gathers]

    # -- instructions

    def _carry_out(self, instruction: Instruction, call: BodyCall) -> None:
        micro = call.micro
        match instruction:
            case Forward():
                self._forward(instruction, micro)
            case Backward():
                self._backward(instruction, micro)
            case WeightGradient():
                self._weight_gradient(instruction, micro)
            case Collective() | Coalesced():
                self._start(instruction, micro)
            case Send(source=source, transfers=transfers, sizes=sizes):
                copied = _apart_bytes([(t.source, t.source_box) for t in transfers], sizes, self.sizes[source])
                if copied:
                    self.arriving[_place(source, micro)] = _Arrival(self.make(copied, "communication"), -1)
            case Receive(target=target, transfers=transfers, sizes=sizes):
                copied = _apart_bytes([(t.target, t.target_box) for t in transfers], sizes, self.sizes[target])
                working = self.make(self.sizes[target] + copied, "communication")
                self.arriving[_place(target, micro)] = _Arrival(working, self.sizes[target])
            case Wait():
                self._wait(instruction, micro)
            case Sum(target=target, tensor=tensor):
                self.put(target, micro, self.make(self.sizes[target], self._part(tensor)))
            case Accumulate(target=target, source=source, tensor=tensor):
                self._accumulate(target, source, tensor, micro)
            case Take(source=source, target=target, box=box, sizes=sizes):
                if lies_together(box, sizes):
                    self.put(target, micro, self._keep(source, micro))
                    self.gathers.update({target} if source in self.gathers else ())
                else:
                    self.put(target, micro, self.make(self.sizes[target], self._part_of_pieces(source, micro)))
            case Put(source=source, target=target):
                if _place(target, micro) not in self.held:
                    self.put(target, micro, self.make(self.sizes[target], self._part_of_pieces(source, micro)))
            case Seed(target=target):
                self.put(target, micro, self.make(self.sizes[target], "temporaries"))
            case Free(buffer=buffer):
                self.drop(self.held.pop(_place(buffer, micro), None))
            case Update():
                self.rise("update", self.prices.update_bytes(self.stage))
        self.rise(call.body)

    def _part(self, tensor: str) -> str:
        return "gradients" if tensor in self.parameters else "temporaries"

    def _part_of_pieces(self, source: Buffer, micro: int) -> str:
        """That of what they are pieces of; a copy of parameters is there for a run, as activations are."""
        part = self.held[_place(source, micro)].part
        return "activations" if part == "parameters" else part

    def run_memory(self, run: int) -> RunMemory:
        return self.prices.run_memory(self.program, self.program.runs[run])

    def _forward(self, forward: Forward, micro: int) -> None:
        run = self.program.runs[forward.run]
        if run.turn is not None:
            self.rings.forward(forward, run, micro)
            return
        memory = self.run_memory(forward.run)
        what = "recomputation" if forward.again else "forward"
        self.rise(f"{what} of run {forward.run}", memory.forward_peak_bytes)
        for buffer in forward.outputs:
            self.put(buffer, micro, self.make(self.sizes[buffer], "activations"))
        if not forward.saves:
            return
        kept = [self.make(memory.saved_bytes, "activations")]
        kept += self.keep_flagged(forward.inputs, memory.saved_inputs, micro)
        kept += self.keep_flagged(forward.outputs, memory.saved_outputs, micro)
        self.saved[forward.run, micro] = kept
        self.inputs_of[forward.run] = forward.inputs

    def _backward(self, backward: Backward, micro: int) -> None:
        run = self.program.runs[backward.run]
        if run.turn is not None:
            self.rings.backward(backward, run, micro)
            return
        self.rise(f"backward of run {backward.run}", self.run_memory(backward.run).backward_peak_bytes)
        saved = self.saved.pop((backward.run, micro))
        if backward.is_split:
            self.saved[backward.run, micro] = self._left_over(backward.run, saved)
        else:
            for storage in saved:
                self.drop(storage)
        self.give(backward, micro)

    def _left_over(self, run: int, saved: Sequence[Storage]) -> list[Storage]:
        """What weight-gradients need: what was saved of activations that met parameters, and cotangents."""
        needed = weight_gradient_needs(self.prices.blocks, self.program, self.program.runs[run])
        memory = self.run_memory(run)
        own, *boundary = saved
        self.drop(own)
        kept = [self.make(needed.made_bytes + needed.cotangent_bytes, "activations")]
        slots = [i for i, (is_kept, b) in enumerate(zip(memory.saved_inputs, self.inputs_of[run], strict=True))
                 if is_kept and b not in self.gathers]  # fmt: skip
        for i, storage in enumerate(boundary):
            if i < len(slots) and slots[i] in needed.slots:
                kept.append(storage)
            else:
                self.drop(storage)
        return kept

    def _weight_gradient(self, rest: WeightGradient, micro: int) -> None:
        self.give(rest, micro)
        self.rise(f"weight-gradients of run {rest.run}")
        for storage in self.saved.pop((rest.run, micro)):
            self.drop(storage)

    def give(self, instruction: Backward | WeightGradient, micro: int) -> None:
        slots = self.program.runs[instruction.run].inputs
        for buffer, slot in zip(instruction.outputs, slots, strict=True):
            if buffer is not None:
                self.put(buffer, micro, self.make(self.sizes[buffer], self._part(slot.tensor)))

    def _accumulate(self, target: Buffer, source: Buffer, tensor: str, micro: int) -> None:
        place = _place(target, micro)
        if place not in self.held:
            self.held[place] = self._keep(source, micro)
            self.borrowed.add(place)
        elif place in self.borrowed:
            made = self.make(self.sizes[target], self._part(tensor))
            self.rise("second micro-batch's gradient")
            self.put(target, micro, made)
            self.borrowed.discard(place)

    # -- communication

    def _start(self, instruction: Collective | Coalesced, micro: int) -> None:
        members = collectives_in(instruction)
        if all(step.is_local for step in members[0].steps):
            for collective in members:
                result = self.make(self.sizes[collective.target], self._part(collective.tensor))
                self.put(collective.target, micro, result)
            return
        is_copied = isinstance(instruction, Coalesced)
        steps = [sizes_of_steps(self.graph, collective) for collective in members]
        totals = [sum(column) for column in zip(*steps, strict=True)]
        working = self.make(_working_bytes(members[0], totals, is_copied=is_copied), "communication")
        working.num_holders = len(members)
        shared = None
        if is_copied and not members[0].steps[-1].along:
            shared = Storage(totals[-1], "", num_holders=len(members))
        for collective, sizes in zip(members, steps, strict=True):
            self.arriving[_place(collective.target, micro)] = _Arrival(working, sizes[-1], shared)
            if isinstance(instruction, Coalesced) and instruction.takes_sources:
                self.drop(self.held.pop(_place(collective.source, micro), None))

    def _wait(self, wait: Wait, micro: int) -> None:
        places = [_place(wait.buffer, micro - wait.lag)]
        if wait.every:
            places = [place for place in (*self.held, *self.arriving) if place[0] == wait.buffer]
        for place in dict.fromkeys(places):
            arrival = self.arriving.pop(place, None)
            if arrival is not None:
                self._arrive(place, arrival)
            if wait.free:
                self.drop(self.held.pop(place, None))

    def _arrive(self, place: Place, arrival: _Arrival) -> None:
        buffer = place[0]
        if arrival.result_bytes < 0:  # a send
            self.drop(arrival.working)
        elif buffer in self.gathers:  # copied to where autograd expects it
            self.held[place] = self.make(arrival.result_bytes, "parameters")
            self.rise("gathered parameters")
            self.drop(arrival.working)
        elif place in self.held and self.held[place].part == "parameters":
            self.drop(arrival.working)
        elif arrival.shared is not None:
            if not arrival.shared.part:
                arrival.shared.part = self._part(buffer.tensor)
                self._add(arrival.shared.num_bytes, arrival.shared.part)
                arrival.working.num_holders = 1  # the results lie in what it worked with
                self.drop(arrival.working)
            self.held[place] = arrival.shared
        else:
            self.drop(arrival.working)
            self.put(*place, self.make(arrival.result_bytes, self._part_of_value(buffer)))

    def _part_of_value(self, buffer: Buffer) -> str:
        if buffer.tensor in self.parameters:
            return "parameters" if ":used" in buffer.name else "gradients"
        return "activations"


def _working_bytes(collective: Collective, totals: Sequence[int], *, is_copied: bool) -> int:
    """The most that a collective's arrays take on the way, its result included (see `execute.wire`)."""
    most = 0
    for i, step in enumerate(collective.steps):
        before, after = totals[i], totals[i + 1]
        match step.kind:
            case "all_reduce":
                needed = before
            case "all_gather":
                needed = 2 * after + (before if is_copied else 0)
            case "reduce_scatter":
                needed = 2 * before + after
            case "all_to_all":
                needed = 3 * before
            case "rotate":  # what a ring sends lies together
                needed = after
            case _:
                needed = before + after
        most = max(most, needed)
    return most


def _apart_bytes(messages: Sequence[tuple[int, Box]], sizes: tuple[int, ...], num_bytes: int) -> int:
    """The most that a device copies of an array with these dims: boxes whose elements do not lie side by side."""
    volumes = {box: 0 if lies_together(box, sizes) else volume(box) for box in {box for _, box in messages}}
    copied: dict[int, int] = {}
    for device, box in messages:
        copied[device] = copied.get(device, 0) + volumes[box]
    return max(copied.values(), default=0) * num_bytes // max(1, prod(sizes))


def given_bytes(graph: Graph) -> int:
    """The batch, and what is computed from it alone, whole on every device; what repeats is held once."""
    read = {name for op in graph.ops for name in op.inputs} | set(graph.inputs)
    repeated = repeated_factors(graph)
    given = {name: graph.tensors[name] for name in read & graph.given_names if name in graph.tensors}
    return sum(
        held_elements(tensor.sizes, repeated.get(name, frozenset())) * tensor.item_bytes
        for name, tensor in given.items()
    )


def _plain_order(stage: StageProgram, num_walked: int) -> list[BodyCall]:
    """The calls of the first micro-batches of every body, one micro-batch after another, and of the last ones."""
    counts: dict[str, int] = {}
    walked: dict[int, None] = {}
    for call in stage.calls:
        counts[call.body] = counts.get(call.body, 0) + 1
        if call.micro >= 0 and (counts[call.body] <= num_walked or is_last(call.body)):
            walked[call.micro] = None
    of_micro: dict[int, list[BodyCall]] = {micro: [] for micro in sorted(walked)}
    around = [call for call in stage.calls if call.micro < 0]
    for call in stage.calls:
        if call.micro in of_micro:
            of_micro[call.micro].append(call)
    numbered = (
        BodyCall(body=call.body, micro=i) for i, calls in enumerate(of_micro.values()) for call in calls
    )  # as if they were all: what a call waits for of the micro-batch before it must have been there
    return [around[0], *numbered, *around[1:]]


def _place(buffer: Buffer, micro: int) -> Place:
    return (buffer, micro if buffer.indexed else -1)


def _plus(first: Bytes, second: Bytes) -> Bytes:
    return {part: first.get(part, 0) + second.get(part, 0) for part in {*first, *second}}


def _minus(first: Bytes, second: Bytes) -> Bytes:
    return {part: first.get(part, 0) - second.get(part, 0) for part in {*first, *second}}
