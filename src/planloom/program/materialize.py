"""Materialize: connect every producer's layout to every consumer's, and write the bodies.

A stage has four bodies:

    enter     what the step needs once: parameters from their home stage, parameters used in another layout
    forward   for each run: its inputs in its layouts, the run, sends to later stages
    backward  runs in reverse: the cotangents of each output meet in a junction (summed where layouts agree, reduced,
              summed), the run's vector-Jacobian product, parameter gradients accumulated; before the first run of a
              segment that is recomputed, what its backwards need is carried out again (`recompute`)
    exit      gradients reduced to the optimizer's layout, update, gather; the loss completed and told to all stages

and a fifth, the last backward, where gradients are reduced meanwhile (`overlap`).

Communication starts where its source is ready and is awaited where its result is needed. A send to a later stage is
awaited in the backward of the same micro-batch, whose cotangent proves that it arrived; a cotangent's send in the next
backward. So no order of calls can block on a send, and the verifier proves it for each program.
"""

from dataclasses import dataclass, replace
from math import prod

from planloom.collective import DigitsPrice
from planloom.layout import Layout
from planloom.program.bodies import StageBodies, Use
from planloom.program.connect import Connections
from planloom.program.gradients import Gradients, sum_into
from planloom.program.recompute import Recomputation, find_recomputations, masks_of, runs_with_backward
from planloom.program.storage import is_gathered, is_scattered, store_parameters
from planloom.program.transform import Splits
from planloom.program.values import (
    Accumulate,
    Backward,
    BodyCall,
    Buffer,
    Collective,
    Forward,
    Free,
    Instruction,
    Program,
    Receive,
    Run,
    Seed,
    Slot,
    StageProgram,
    Sum,
    Wait,
)

LOSS = Buffer(name="loss")
_LOSS_TOTAL = Buffer(name="loss:total")


def materialize(
    splits: Splits, runs: tuple[Run, ...], calls: tuple[tuple[BodyCall, ...], ...], price: DigitsPrice
) -> Program:
    """The program of all stages."""
    builder = _Builder(splits, runs, price)
    builder.build()
    plan = splits.plan
    stages = []
    for s, stage in enumerate(builder.stages):
        bodies, stage_calls = stage.finished(calls[s])
        parameters = tuple(
            replace(p, gathers=tuple(sorted(stage.gathers.get(p.name, ()))))
            for p in builder.parameters.values()
            if p.stage == s
        )
        stages.append(
            StageProgram(mesh=plan.meshes[s], bodies=bodies, calls=stage_calls, parameters=parameters, loss=LOSS)
        )
    return Program(plan_name=plan.name, num_micro_batches=plan.num_micro_batches, stages=tuple(stages), runs=runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Again:
    """A recomputation while it is written: its instructions, and the values that it has made so far."""

    what: Recomputation
    body: list[Instruction]
    values: dict[Use, Buffer]


class _Builder:
    def __init__(self, splits: Splits, runs: tuple[Run, ...], price: DigitsPrice) -> None:
        self.splits, self.runs = splits, runs
        self.graph = splits.blocks.graph
        self.parameters = store_parameters(splits)
        self.stages = [StageBodies() for _ in splits.plan.meshes]
        self.connections = Connections(splits, price, self._value)
        self.gradients = Gradients(self.connections, self.parameters, self.stages)
        self.made = {slot.tensor: (run, slot) for run in runs for slot in run.outputs}
        self.imports = self._find_imports()
        self.with_backward = runs_with_backward(self.graph, runs)
        recomputations = find_recomputations(splits, runs, self.with_backward)
        self.recomputed_before = {found.first_backward: found for found in recomputations}
        """By the run whose backward is the first to need it."""
        self.recomputed = frozenset(index for found in recomputations for index in found.saving)
        self.masks = masks_of(self.graph)

    def _find_imports(self) -> dict[tuple[str, int], tuple[int, Slot]]:
        """(tensor, stage) → the first run of the stage that reads a tensor made in another, and its slot."""
        imports: dict[tuple[str, int], tuple[int, Slot]] = {}
        for run in self.runs:
            for slot in run.inputs:
                if slot.tensor in self.made and self.made[slot.tensor][0].stage != run.stage:
                    imports.setdefault((slot.tensor, run.stage), (run.index, slot))
        return imports

    def build(self) -> None:
        for run in self.runs:
            self._forward(run)
        for run in reversed(self.runs):
            self._backward(run)
        for stage in self.stages:
            stage.backward += stage.delayed
        for s in reversed(range(len(self.stages))):
            self.gradients.send(s)
        for s in range(len(self.stages)):
            self.gradients.update(s)
        self._loss()

    # -- forward

    def _forward(self, run: Run) -> None:
        stage = self.stages[run.stage]
        self._receive_imports(run)
        gathered = self._gather(run, stage.forward, {})
        inputs = [
            self._value(run.stage, slot)
            if slot.tensor not in self.parameters
            else gathered.get((slot.tensor, slot.layout)) or self._parameter(run.stage, slot)
            for slot in run.inputs
        ]
        outputs = tuple(Buffer(name=slot.tensor, indexed=True) for slot in run.outputs)
        saves = run.index in self.with_backward and run.index not in self.recomputed
        stage.forward.append(Forward(run=run.index, inputs=tuple(inputs), outputs=outputs, saves=saves))
        stage.forward += [Free(buffer=buffer) for buffer in gathered.values()]
        for slot, buffer in zip(run.outputs, outputs, strict=True):
            stage.values[slot.tensor, slot.layout] = buffer
            if slot.tensor == self.graph.loss:
                stage.forward.append(Accumulate(tensor=slot.tensor, target=_LOSS_TOTAL, source=buffer))
            self._export(run, slot, buffer)

    def _receive_imports(self, run: Run) -> None:
        """What this run is the first of its stage to read from another one: both halves of the exchange."""
        for (tensor, stage), (first, slot) in self.imports.items():
            if stage == run.stage and first == run.index:
                source, made = self.made[tensor]
                received = Buffer(name=f"{tensor}:received", indexed=True)
                self.connections.exchange(
                    slot,
                    (source.stage, self.stages[source.stage].forward, self._exported(tensor), made.layout.completed()),
                    (stage, self.stages[stage].forward, received, slot.layout),
                )
                self.stages[stage].values[tensor, slot.layout] = received

    def _exported(self, tensor: str) -> Buffer:
        source, made = self.made[tensor]
        return self.stages[source.stage].values[tensor, made.layout.completed()]

    def _export(self, run: Run, slot: Slot, buffer: Buffer) -> None:
        """Complete what a later stage reads, and await its sends in the backward."""
        if any(tensor == slot.tensor for tensor, _ in self.imports):
            whole = slot.layout.completed()
            stage = self.stages[run.stage]
            if (slot.tensor, whole) not in stage.values:
                name = f"{slot.tensor}:complete"
                stage.values[slot.tensor, whole] = self.connections.change(
                    stage.forward, run.stage, slot, buffer, slot.layout, whole, name
                )
            stage.backward.append(Wait(buffer=stage.values[slot.tensor, whole], free=True))

    def _value(self, s: int, slot: Slot) -> Buffer:
        """An activation in the layout that a run needs."""
        stage = self.stages[s]
        key = (slot.tensor, slot.layout)
        if key not in stage.values:
            before = self._arrived(s, slot.tensor)
            name = f"{slot.tensor}@{slot.layout}"
            stage.values[key] = self.connections.change(
                stage.forward, s, slot, stage.values[slot.tensor, before], before, slot.layout, name
            )
        return stage.values[key]

    def _arrived(self, s: int, tensor: str) -> Layout:
        """The layout in which a tensor was made in a stage, or received."""
        return next(layout for name, layout in self.stages[s].values if name == tensor)

    def _gather(self, run: Run, body: list[Instruction], held: dict[Use, tuple[Buffer, int]]) -> dict[Use, Buffer]:
        """The parameters that are gathered for this run alone, all at once; those that are held need not be."""
        stage, gathered, changes = self.stages[run.stage], {}, []
        for slot in run.inputs:
            home, use = self.parameters.get(slot.tensor), (slot.tensor, slot.layout)
            if (
                home is None
                or use in held
                or home.layout == slot.layout
                or not is_gathered(self.splits.plan, home, run.stage)
            ):
                continue
            name = f"{slot.tensor}:gathered@{slot.layout}"
            changes.append(self.connections.collectives(run.stage, slot, home.buffer, home.layout, slot.layout, name))
            gathered[use] = changes[-1][-1].target
            stage.gathers.setdefault(slot.tensor, set()).add(changes[-1][-1].target)
        body += self.connections.together(changes)
        return gathered

    def _parameter(self, s: int, slot: Slot) -> Buffer:
        """A parameter in the layout of its use, where it is not gathered for every use."""
        stage, home = self.stages[s], self.parameters[slot.tensor]
        if home.stage == s and home.layout == slot.layout:
            return home.buffer
        key = (slot.tensor, slot.layout)
        if key not in stage.values:
            used = Buffer(name=f"{slot.tensor}:used@{slot.layout}")
            if home.stage == s:
                self.connections.change(stage.enter, s, slot, home.buffer, home.layout, slot.layout, used.name)
            else:
                sender = (home.stage, self.stages[home.stage].enter, home.buffer, home.layout)
                self.connections.exchange(slot, sender, (s, stage.enter, used, slot.layout))
                self.stages[home.stage].exit.append(Wait(buffer=home.buffer, every=True))
            stage.values[key] = used
            stage.exit.append(Free(buffer=used))
        return stage.values[key]

    # -- recompute

    def _recompute(self, s: int, what: Recomputation) -> None:
        """Carry out again what the backwards of a segment need.

        Where a stage's backward begins with it, it need not wait for the cotangents of later stages, and goes first.
        """
        stage, again = self.stages[s], _Again(what=what, body=[], values={})
        last_use = {
            (slot.tensor, slot.layout): index
            for index in sorted(what.saving, reverse=True)
            for slot in self.runs[index].inputs
        }
        for index in what.runs:
            self._forward_again(self.runs[index], again, last_use)
        again.body.extend(stage.delayed)
        stage.delayed = []
        at = len(stage.backward)
        if not any(isinstance(instruction, Backward) for instruction in stage.backward):
            at = next((i for i, found in enumerate(stage.backward) if isinstance(found, Receive)), at)
        stage.backward[at:at] = again.body

    def _forward_again(self, run: Run, again: _Again, last_use: dict[Use, int]) -> None:
        """One run; parameters that were gathered for it are held for its backward."""
        stage, body = self.stages[run.stage], again.body
        gathered = self._gather(run, body, stage.held)
        stage.held.update((use, (buffer, last_use[use])) for use, buffer in gathered.items() if use in last_use)
        inputs = []
        for slot in run.inputs:
            use = (slot.tensor, slot.layout)
            if slot.tensor not in self.parameters:
                inputs.append(self._value_again(run.stage, slot, again))
            elif use in stage.held:
                inputs.append(stage.held[use][0])
            else:
                inputs.append(gathered.get(use) or self._parameter(run.stage, slot))
        outputs = tuple(Buffer(name=again.what.name(slot.tensor), indexed=True) for slot in run.outputs)
        saves = run.index in again.what.saving
        body.append(Forward(run=run.index, inputs=tuple(inputs), outputs=outputs, saves=saves, again=True))
        body += [Free(buffer=buffer) for use, buffer in gathered.items() if use not in stage.held]
        again.values.update(
            ((slot.tensor, slot.layout), buffer) for slot, buffer in zip(run.outputs, outputs, strict=True)
        )

    def _value_again(self, s: int, slot: Slot, again: _Again) -> Buffer:
        """An activation as a run reads it: made again, or what entered the segment, kept from the forward."""
        use, values = (slot.tensor, slot.layout), self.stages[s].values
        if slot.tensor in self.masks:
            return self._value(s, slot)
        if use not in again.values:
            if all(tensor != slot.tensor for tensor, _ in again.values):
                kept = self._kept_layout(s, slot, again.what)
                again.values[slot.tensor, kept] = values[slot.tensor, kept]
            before = next(layout for tensor, layout in again.values if tensor == slot.tensor)
            name = f"{again.what.name(slot.tensor)}@{slot.layout}"
            again.values[use] = self.connections.change(
                again.body, s, slot, again.values[slot.tensor, before], before, slot.layout, name
            )
        return again.values[use]

    def _kept_layout(self, s: int, slot: Slot, what: Recomputation) -> Layout:
        """In which layout to keep what enters a segment: as it is read, unless it arrived smaller or is read in more.

        Then it is kept as it arrived, and changed again; but partial sums are kept as they were first completed.
        """
        arrived = self._arrived(s, slot.tensor)
        read = {i.layout: None for index in what.runs for i in self.runs[index].inputs if i.tensor == slot.tensor}
        if arrived.partial or (len(read) == 1 and _num_elements(slot, slot.layout) <= _num_elements(slot, arrived)):
            return slot.layout
        return arrived

    # -- backward

    def _backward(self, run: Run) -> None:
        stage = self.stages[run.stage]
        if run.index in self.recomputed_before:
            self._recompute(run.stage, self.recomputed_before[run.index])
        cotangents = [self._output_cotangent(run, slot) for slot in run.outputs]
        if not any(cotangents):
            return
        gathered = self._gather(run, stage.backward, stage.held)
        outputs = [
            Buffer(name=f"{slot.tensor}:d{run.index}.{i}", indexed=True) if slot.cotangent is not None else None
            for i, slot in enumerate(run.inputs)
        ]
        stage.backward.append(Backward(run=run.index, cotangents=tuple(cotangents), outputs=tuple(outputs)))
        done = [use for use, (_, last) in stage.held.items() if last == run.index]
        gathered |= {use: stage.held.pop(use)[0] for use in done}
        stage.backward += [*(Free(buffer=buffer) for buffer in gathered.values()), *stage.delayed]
        stage.delayed = []
        scattered: list[tuple[Slot, list[Collective], Buffer]] = []
        for slot, cotangent in zip(run.inputs, outputs, strict=True):
            if cotangent is None:
                continue
            if slot.tensor not in self.parameters:
                stage.cotangents.setdefault(slot.tensor, []).append((_cotangent(slot), cotangent))
            elif is_scattered(self.splits.plan, self.parameters[slot.tensor], run.stage):
                scattered.append((slot, self._shard_collectives(run, slot, cotangent), cotangent))
            else:
                self.gradients.accumulate(stage.backward, stage, slot, cotangent, _cotangent(slot))
        self.gradients.scatter(stage, scattered)
        self._send_cotangents(run)

    def _shard_collectives(self, run: Run, slot: Slot, cotangent: Buffer) -> list[Collective]:
        home, name = self.parameters[slot.tensor], f"{slot.tensor}:shard{run.index}"
        return self.connections.collectives(run.stage, slot, cotangent, _cotangent(slot), home.optimizer_layout, name)

    def _output_cotangent(self, run: Run, slot: Slot) -> Buffer | None:
        """The complete cotangent of a run's output, in the layout that the run takes."""
        stage = self.stages[run.stage]
        if slot.cotangent is None:
            return None
        if slot.tensor == self.graph.loss:
            seed = Buffer(name="loss:seed", indexed=True)
            stage.backward.append(Seed(tensor=slot.tensor, target=seed))
            return seed
        parts = stage.cotangents.get(slot.tensor, [])
        return self._junction(run.stage, slot, parts, slot.cotangent) if parts else None

    def _junction(self, s: int, slot: Slot, parts: list[tuple[Layout, Buffer]], target: Layout) -> Buffer:
        """Sum what has one layout, reduce each sum, sum the results: partial sums are passed on as such."""
        body = self.stages[s].backward
        by_layout: dict[Layout, list[Buffer]] = {}
        for layout, buffer in parts:
            by_layout.setdefault(layout, []).append(buffer)
        results = []
        for i, (layout, buffers) in enumerate(by_layout.items()):
            total = sum_into(body, slot.tensor, buffers, f"{slot.tensor}:junction{i}")
            results.append(self.connections.change(body, s, slot, total, layout, target, f"{slot.tensor}:reduced{i}"))
        return sum_into(body, slot.tensor, results, f"{slot.tensor}:cotangent")

    def _send_cotangents(self, run: Run) -> None:
        """Cotangents of what this run was the first to import go back to the stage that made it."""
        for (tensor, s), (first, slot) in self.imports.items():
            stage = self.stages[s]
            if s != run.stage or first != run.index or tensor not in stage.cotangents:
                continue
            source, made = self.made[tensor]
            assert made.cotangent is not None
            complete = self._junction(s, slot, stage.cotangents[tensor], slot.layout)
            whole = made.cotangent.completed()
            received = Buffer(name=f"{tensor}:from{s}", indexed=True)
            home = self.stages[source.stage]
            self.connections.exchange(
                slot, (s, stage.backward, complete, slot.layout), (source.stage, home.backward, received, whole)
            )
            stage.backward.insert(0, Wait(buffer=complete, lag=1, free=True))
            stage.exit.append(Wait(buffer=complete, every=True, free=True))
            home.cotangents.setdefault(tensor, []).append((whole, received))

    # -- loss

    def _loss(self) -> None:
        run, slot = self.made[self.graph.loss]
        whole, home = slot.layout.completed(), self.stages[run.stage]
        complete = self.connections.change(home.exit, run.stage, slot, _LOSS_TOTAL, slot.layout, whole, LOSS.name)
        if complete == _LOSS_TOTAL:
            home.exit.append(Sum(tensor=slot.tensor, target=LOSS, sources=(_LOSS_TOTAL,)))
        home.exit.append(Free(buffer=_LOSS_TOTAL))
        for s, stage in enumerate(self.stages):
            if s != run.stage:
                self.connections.exchange(slot, (run.stage, home.exit, LOSS, whole), (s, stage.exit, LOSS, whole))
        if len(self.stages) > 1:
            home.exit.append(Wait(buffer=LOSS))


def _cotangent(slot: Slot) -> Layout:
    assert slot.cotangent is not None
    return slot.cotangent


def _num_elements(slot: Slot, layout: Layout) -> int:
    return prod(layout.local_sizes(slot.sizes))
