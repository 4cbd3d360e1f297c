"""Materialize: connect every producer's layout to every consumer's, and write the bodies.

A device group has bodies

    enter     what the step needs once: parameters from their home, parameters used in another layout
    exit      gradients reduced to the optimizer's layout, update, gather; the loss completed and told to all groups

and for every stage that it calls, by every way on which it does (`schedule`),

    forward   for each run: its inputs in its layouts, the run, sends to other groups
    backward  runs in reverse: the cotangents of each output meet in a junction (summed where layouts agree, reduced,
              summed), the run's vector-Jacobian product, parameter gradients accumulated; before the first run of a
              segment that is recomputed, what its backwards need is carried out again (`recompute`). Where a plan
              calls input- and weight-gradient apart, all that concerns the gradients of parameters is a body of its own

and one more, the last backward of a stage, where gradients are reduced meanwhile (`overlap`).

Stages of one group pass tensors on without an exchange. A copy of a stage has runs of its own; its parameters come
from the stage's home once a step, and its gradients go there: partial sums, as those of any second reader.

Communication starts where its source is ready and is awaited where its result is needed. A send to a later stage is
awaited in the backward of the same micro-batch, whose cotangent proves that it arrived, or, if the stage is called
forward only, in that of a later stage of the group; a cotangent's send in the next backward, or, where an order would
then block, at the end of the step. So no order of calls can block on a send, and the verifier proves it for each
program.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from planloom.collective import DigitsPrice
from planloom.layout import Layout
from planloom.program.bodies import Use, of_role
from planloom.program.gradients import junction
from planloom.program.loss import LOSS, LOSS_TOTAL, complete_loss
from planloom.program.recompute import Recomputation
from planloom.program.schedule import Ways
from planloom.program.storage import is_scattered
from planloom.program.transform import Splits
from planloom.program.values import (
    Accumulate,
    Backward,
    Buffer,
    Collective,
    Free,
    Instruction,
    Program,
    Receive,
    Run,
    Seed,
    Slot,
    StageProgram,
    Wait,
    WeightGradient,
)
from planloom.program.writer import Writer


def materialize(splits: Splits, runs: tuple[Run, ...], ways: Ways, price: DigitsPrice) -> Program:
    """The program of all device groups."""
    builder = _Builder(splits, runs, ways, price)
    builder.build()
    plan, groups, num_roles = splits.plan, splits.plan.groups, ways.num_roles
    members = [plan.members(group) for group in range(len(groups))]
    finished = []
    for group, stage in enumerate(builder.stages):
        own = [call for call in plan.orders[members[group][0]] if ways.part(call).group == group]
        finished.append((group if group >= num_roles else -1, own, *stage.finished(own, ways)))
    stages = []
    for role, order in enumerate(plan.orders):
        mine = [group for group, roles in enumerate(members) if role in roles]
        bodies, calls = of_role(order, [finished[group] for group in mine])
        parameters = tuple(p for group in mine for p in builder.stored(group))
        loss = replace(LOSS, of=builder.loss_group) if builder.loss_group in mine[1:] else LOSS
        stages.append(StageProgram(mesh=groups[role], bodies=bodies, calls=calls, parameters=parameters, loss=loss))
    return Program(
        plan_name=plan.name,
        num_micro_batches=plan.num_micro_batches,
        stages=tuple(stages),
        runs=tuple(builder.runs),
        trains=builder.trains,
        shared=groups[num_roles:],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Again:
    """A recomputation while it is written: its instructions, and the values that it has made so far."""

    what: Recomputation
    body: list[Instruction]
    values: dict[Use, Buffer]


class _Builder(Writer):
    """Writes forwards, recomputations and backwards."""

    def build(self) -> None:
        for way, homes in enumerate(self.ways.homes):
            self.imports = self._find_imports(self.base, homes)
            for run in self.base:
                self._enter(way, homes, run)
                self._forward(run, self._opened(run))
            for run in reversed(self.base):
                self._enter(way, homes, run)
                self._backward(run, self._opened(run))
            for part in self._parts(way):
                part.gradient_body.extend(part.delayed)
                part.delayed = []
        for s in reversed(range(len(self.stages))):
            self.gradients.send(s)
        for s in range(len(self.stages)):
            if self.trains:
                self.gradients.update(s, self._stages_of_parameters())
        run, slot = self.made[self.graph.loss]
        makers = dict.fromkeys((run.stage, *(way[self._stage_of(run)] for way in self.ways.homes)))
        told = set(range(self.ways.num_roles)).difference(self.splits.plan.members(run.stage))
        complete_loss(self.connections, self.stages, slot, makers, sorted(told))

    # -- forward

    def _forward(self, base: Run, run: Run) -> None:
        """`base`: the run at its stage's home; `run`: the same on the present group."""
        body = self.part.forward
        self._receive_imports(base)
        gathered = self._gather(run, body, {})
        inputs = [
            self._value(slot)
            if slot.tensor not in self.parameters
            else gathered.get((slot.tensor, slot.layout)) or self._parameter(slot)
            for slot in run.inputs
        ]
        outputs = tuple(Buffer(name=slot.tensor, indexed=True) for slot in base.outputs)
        saves = base.index in self.with_backward and base.index not in self.recomputed
        self._run(body, run, base, inputs, outputs, saves=saves)
        body += [Free(buffer=buffer) for buffer in gathered.values()]
        for slot, buffer in zip(base.outputs, outputs, strict=True):
            self.arrived[slot.tensor, slot.layout] = buffer
            if slot.tensor == self.graph.loss:
                body.append(Accumulate(tensor=slot.tensor, target=LOSS_TOTAL, source=buffer))
            self._export(slot, buffer)

    def _receive_imports(self, base: Run) -> None:
        """What this run is the first of its group to read from another one: both halves of the exchange."""
        for (tensor, group), (first, slot) in self.imports.items():
            if group == self.group and first == base.index:
                source = self._other(tensor)
                whole = self._passed(source.part.group, slot, self.made[tensor][1].layout.completed())
                exported = self.stages[source.part.group].arrived[source.part.way][tensor, whole]
                received = Buffer(name=f"{tensor}:received", indexed=True)
                self.connections.exchange(
                    slot,
                    (source.part.group, source.forward, exported, whole),
                    (group, self.part.forward, received, self._passed(group, slot, slot.layout)),
                )
                self.arrived[tensor, self._passed(group, slot, slot.layout)] = received

    def _export(self, slot: Slot, buffer: Buffer) -> None:
        """Complete what another group reads, and await its sends in the backward."""
        if all(tensor != slot.tensor for tensor, _ in self.imports):
            return
        whole = self._passed(self.group, slot, slot.layout.completed())
        if (slot.tensor, whole) not in self.arrived:
            name = f"{slot.tensor}:complete"
            self.arrived[slot.tensor, whole] = self.connections.change(
                self.part.forward, self.group, slot, buffer, slot.layout, whole, name
            )
        sent = self.arrived[slot.tensor, whole]
        if not self.trains:
            self.part.forward.insert(0, Wait(buffer=sent, lag=1, free=True))
        proof = self._first_backward()
        if proof is None:
            self._await_at_the_end(sent)
        else:
            proof.backward.append(Wait(buffer=sent, free=True))

    # -- recompute

    def _recompute(self, what: Recomputation) -> None:
        """Carry out again what the backwards of a segment need.

        Where a stage's backward begins with it, it need not wait for the cotangents of later stages, and goes first.
        """
        part, again = self.part, _Again(what=what, body=[], values={})
        last_use = {
            (slot.tensor, slot.layout): index
            for index in sorted(what.saving, reverse=True)
            for slot in self._at_home(index).inputs
        }
        for index in what.runs:
            self._forward_again(self._at_home(index), index in what.saving, again, last_use)
        if not part.is_split:
            again.body.extend(part.delayed)
            part.delayed = []
        at = len(part.backward)
        if not any(isinstance(instruction, Backward) for instruction in part.backward):
            at = next((i for i, found in enumerate(part.backward) if isinstance(found, Receive)), at)
        part.backward[at:at] = again.body

    def _forward_again(self, base: Run, saves: bool, again: _Again, last_use: dict[Use, int]) -> None:
        """One run; parameters that were gathered for it are held for its backward."""
        run, held, body = self._opened(base), self.part.held, again.body
        gathered = self._gather(run, body, held)
        held.update((use, (buffer, last_use[use])) for use, buffer in gathered.items() if use in last_use)
        inputs = []
        for slot in run.inputs:
            use = (slot.tensor, slot.layout)
            if slot.tensor not in self.parameters:
                inputs.append(self._value_again(slot, again))
            elif use in held:
                inputs.append(held[use][0])
            else:
                inputs.append(gathered.get(use) or self._parameter(slot))
        outputs = tuple(Buffer(name=again.what.name(slot.tensor), indexed=True) for slot in base.outputs)
        read = frozenset(slot.tensor for index in again.what.runs for slot in self._at_home(index).inputs)
        self._run(body, run, base, inputs, outputs, saves=saves, again=True, read=read)
        body += [Free(buffer=buffer) for use, buffer in gathered.items() if use not in held]
        again.values.update(
            ((slot.tensor, slot.layout), buffer) for slot, buffer in zip(base.outputs, outputs, strict=True)
        )

    def _value_again(self, slot: Slot, again: _Again) -> Buffer:
        """An activation as a run reads it: made again, or what entered the segment, kept from the forward."""
        use = (slot.tensor, slot.layout)
        if slot.tensor in self.masks:
            return self._value(slot)
        if use not in again.values:
            if all(tensor != slot.tensor for tensor, _ in again.values):
                kept = self._kept_layout(slot, again.what)
                again.values[slot.tensor, kept] = self._value(replace(slot, layout=kept))
            before = next(layout for tensor, layout in again.values if tensor == slot.tensor)
            name = f"{again.what.name(slot.tensor)}@{slot.layout}"
            again.values[use] = self.connections.change(
                again.body, self.group, slot, again.values[slot.tensor, before], before, slot.layout, name
            )
        return again.values[use]

    def _kept_layout(self, slot: Slot, what: Recomputation) -> Layout:
        """In which layout to keep what enters a segment: as it is read, unless it arrived smaller or is read in more.

        Then it is kept as it arrived, and changed again; but partial sums are kept as they were first completed.
        """
        arrived = self._arrived(slot.tensor)
        read = {i.layout: None for index in what.runs for i in self._at_home(index).inputs if i.tensor == slot.tensor}
        if arrived.partial or (len(read) == 1 and _num_elements(slot, slot.layout) <= _num_elements(slot, arrived)):
            return slot.layout
        return arrived

    # -- backward

    def _backward(self, base: Run, run: Run) -> None:
        part, body = self.part, self.part.backward
        if base.index in self.recomputed_before:
            self._recompute(self.recomputed_before[base.index])
        cotangents = [self._output_cotangent(slot) for slot in base.outputs]
        if not any(cotangents):
            return
        gathered = self._gather(run, body, part.held)
        outputs = [
            Buffer(name=f"{slot.tensor}:d{base.index}.{i}", indexed=True) if slot.cotangent is not None else None
            for i, slot in enumerate(run.inputs)
        ]
        of_parameters = tuple(
            buffer if slot.tensor in self.parameters else None for slot, buffer in zip(run.inputs, outputs, strict=True)
        )
        is_whole = base.index in self.loops or base.index in self.rings
        is_split = part.is_split and any(of_parameters) and not is_whole
        now = tuple(None if is_split and of else buffer for buffer, of in zip(outputs, of_parameters, strict=True))
        if base.index in self.loops:
            inputs = self._entered_again(base, gathered)
            body += self._loop(base, inputs).backward(cotangents, outputs)
        elif base.index in self.rings:
            ring = self._ring(base, again=base.index in self.recomputed)
            self.role.early.update(ring.backward(body, tuple(cotangents), now))
        else:
            body.append(Backward(run=run.index, cotangents=tuple(cotangents), outputs=now, is_split=is_split))
        done = [use for use, (_, last) in part.held.items() if last == base.index]
        gathered |= {use: part.held.pop(use)[0] for use in done}
        body += [Free(buffer=buffer) for buffer in gathered.values()]
        if is_split:
            part.weight.append(WeightGradient(run=run.index, outputs=of_parameters))
        part.gradient_body.extend(part.delayed)
        part.delayed = []
        scattered: list[tuple[Slot, list[Collective], Buffer]] = []
        for slot, cotangent in zip(run.inputs, outputs, strict=True):
            if cotangent is None:
                continue
            if slot.tensor not in self.parameters:
                self.cotangents.setdefault(slot.tensor, []).append((_cotangent(slot), cotangent))
            elif is_scattered(self.splits.plan, self.parameters[slot.tensor], self.group):
                scattered.append((slot, self._shard_collectives(base, slot, cotangent), cotangent))
            else:
                self.gradients.accumulate(part.gradient_body, self.role, slot, cotangent, _cotangent(slot))
        self.gradients.scatter(self.role, part, scattered)
        self._send_cotangents(base)

    def _entered_again(self, base: Run, gathered: Mapping[Use, Buffer]) -> list[Buffer]:
        """What enters a loop, for its backward: parameters that were gathered for the forward are gathered again."""
        held = {use: buffer for use, (buffer, _) in self.part.held.items()} | dict(gathered)
        entered = self.entered[self.part.part, base.index]
        return [held.get((s.tensor, s.layout), buffer) for s, buffer in zip(base.inputs, entered, strict=True)]

    def _shard_collectives(self, base: Run, slot: Slot, cotangent: Buffer) -> list[Collective]:
        home, name = self.parameters[slot.tensor], f"{slot.tensor}:shard{base.index}"
        return self.connections.collectives(self.group, slot, cotangent, _cotangent(slot), home.optimizer_layout, name)

    def _output_cotangent(self, slot: Slot) -> Buffer | None:
        """The complete cotangent of a run's output, in the layout that the run takes."""
        if slot.cotangent is None or not self.trains:
            return None
        if slot.tensor == self.graph.loss:
            seed = Buffer(name="loss:seed", indexed=True)
            self.part.backward.append(Seed(tensor=slot.tensor, target=seed))
            return seed
        parts = self.cotangents.get(slot.tensor, [])
        return self._junction(slot, parts, slot.cotangent) if parts else None

    def _junction(self, slot: Slot, parts: list[tuple[Layout, Buffer]], target: Layout) -> Buffer:
        body, group = self.part.backward, self.group

        def change(total: Buffer, layout: Layout, name: str) -> Buffer:
            return self.connections.change(body, group, slot, total, layout, target, name)

        return junction(body, slot.tensor, parts, change)

    def _send_cotangents(self, base: Run) -> None:
        """Cotangents of what this run was the first to import go back to the group that made it.

        Those of the last micro-batch are awaited behind all computing, before these are sent: they are on their way
        meanwhile. All waits come first, so that what is sent is started together.
        """
        completed: list[tuple[str, Slot, Buffer]] = []
        for (tensor, group), (first, slot) in self.imports.items():
            if group == self.group and first == base.index and tensor in self.cotangents:
                sent = self._passed(group, slot, slot.layout)
                completed.append((tensor, slot, self._junction(slot, self.cotangents[tensor], sent)))
        for tensor, _, complete in completed:
            lag = self.lag(self.part.part.stage, self._other(tensor).part.stage)
            self.part.backward += [Wait(buffer=complete, lag=lag, free=True)] if lag else []
        for tensor, slot, complete in completed:
            made, source = self.made[tensor][1], self._other(tensor)
            assert made.cotangent is not None
            whole = self._passed(source.part.group, slot, made.cotangent.completed())
            received = Buffer(name=f"{tensor}:from{self.group}", indexed=True)
            self.connections.exchange(
                slot,
                (self.group, self.part.backward, complete, self._passed(self.group, slot, slot.layout)),
                (source.part.group, source.backward, received, whole),
            )
            self._await_at_the_end(complete)
            home = self.stages[source.part.group].cotangents.setdefault(source.part.way, {})
            home.setdefault(tensor, []).append((whole, received))


def _cotangent(slot: Slot) -> Layout:
    assert slot.cotangent is not None
    return slot.cotangent


def _num_elements(slot: Slot, layout: Layout) -> int:
    return prod(layout.local_sizes(slot.sizes))
