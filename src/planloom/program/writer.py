"""What is known while bodies are written: where tensors are, in which layouts, and how they are brought there.

`Writer` goes through the parts of a plan (`schedule.Part`); `part` is the present one. Activations are looked up by
tensor and layout: as they were made in the group, received, or brought into another layout before; parameters come from
their home, once a step or for every use. A run may be a scope of a time axis (`loops`) or go round a ring (`rings`).
`materialize` writes forwards and backwards with it.
"""

from collections.abc import Sequence
from dataclasses import replace

from planloom.collective import DigitsPrice
from planloom.errors import PlanError
from planloom.layout import Layout
from planloom.plan import Plan
from planloom.plan.orders import Phase
from planloom.plan.shared import find_lags
from planloom.program.bodies import PartBodies, StageBodies, Use
from planloom.program.connect import Connections
from planloom.program.gradients import Gradients
from planloom.program.loops import LoopWriter, find_loops
from planloom.program.recompute import find_recomputations, masks_of, runs_with_backward
from planloom.program.rings import RingWriter, open_rings
from planloom.program.schedule import Part, Ways
from planloom.program.shared import spread
from planloom.program.storage import is_gathered, store_parameters
from planloom.program.transform import Splits
from planloom.program.values import (
    Buffer,
    Forward,
    Free,
    Instruction,
    Run,
    Slot,
    StoredParameter,
    Wait,
)


class Writer:
    """The bodies of all groups while they are written, way by way; `part` is the one that is being written."""

    part: PartBodies

    def __init__(self, splits: Splits, runs: tuple[Run, ...], ways: Ways, price: DigitsPrice) -> None:
        self.splits, self.ways = splits, ways
        self.loops, self.base = find_loops(splits, runs)
        """The runs of stages at home; a scope is one run."""
        self.whole = {run.index: run for run in self.base}
        self.runs, self.rings = open_rings(splits, runs)
        """The runs of stages at home, then those of copies and of other moments; the runs of blocks that go round."""
        self.graph = splits.blocks.graph
        self.parameters = store_parameters(splits)
        self.stages = [StageBodies() for _ in splits.plan.groups]
        self.connections = Connections(splits, price, lambda _, slot: self._value(slot))
        self.gradients = Gradients(self.connections, self.parameters, self.stages)
        self.made = {slot.tensor: (run, slot) for run in self.base for slot in run.outputs}
        """By tensor: the run of its stage, at home, and the slot."""
        self.trains = any(call.phase != "forward" for order in splits.plan.orders for call in order)
        self.with_backward = runs_with_backward(self.graph, self.base) if self.trains else frozenset()
        self.with_backward_inside = runs_with_backward(self.graph, runs) if self.trains else frozenset()
        self.entered: dict[tuple[Part, int], list[Buffer]] = {}
        """What the backward of a loop reads: by its part and first run."""
        recomputations = find_recomputations(splits, self.base, self.with_backward)
        self.recomputed_before = {found.first_backward: found for found in recomputations}
        """By the run whose backward is the first to need it."""
        self.recomputed = frozenset(index for found in recomputations for index in found.saving)
        self.masks = masks_of(self.graph)
        self.lag = find_lags(splits.plan.orders, len(splits.plan.meshes))
        self.copies: dict[tuple[int, int, int], int] = {}
        self.imports: dict[tuple[str, int], tuple[int, Slot]] = {}
        phases = _phases(splits.plan, ways)
        for part in ways.parts():
            stage = self.stages[part.group]
            stage.parts[part] = PartBodies(part=part, phases=phases.get(part, frozenset()))
        self._require_storage()

    def _require_storage(self) -> None:
        split = any(part.is_split for stage in self.stages for part in stage.parts.values())
        gathered = [name for name, how in self.splits.plan.storage.items() if how.kind == "zero3"]
        if split and gathered:
            raise PlanError(
                "weight-gradients apart do not go with parameters that are gathered for every use",
                given=f"zero3 for {gathered[0]}" + (f" and {len(gathered) - 1} others" if gathered[1:] else ""),
                required="zero1 or zero2 under this schedule, or a schedule with whole backwards",
            )

    @property
    def loss_group(self) -> int:
        """The group of the stage that makes the loss."""
        return self.made[self.graph.loss][0].stage

    def stored(self, group: int) -> list[StoredParameter]:
        """A group's parameters; of a shared one, in buffers of its own."""
        found = []
        for p in self.parameters.values():
            if p.stage == group:
                of = group if group >= self.ways.num_roles else -1
                gathers = sorted(self.stages[group].gathers.get(p.name, ()))
                own = tuple(replace(buffer, of=of) for buffer in gathers)
                found.append(replace(p, buffer=replace(p.buffer, of=of), gathers=own))
        return found

    def _parts(self, way: int) -> list[PartBodies]:
        return [body for stage in self.stages for part, body in stage.parts.items() if part.way == way]

    def _stage_of(self, run: Run) -> int:
        return self.splits.plan.stages[run.blocks[0].block]

    def _stages_of_parameters(self) -> dict[str, set[int]]:
        """The stages of the plan that read each parameter and give it a gradient."""
        found: dict[str, set[int]] = {}
        for run in self.runs:
            for slot in run.inputs:
                if slot.tensor in self.parameters and slot.cotangent is not None:
                    found.setdefault(slot.tensor, set()).add(self._stage_of(run))
        return found

    def _enter(self, way: int, homes: Sequence[int], run: Run) -> None:
        stage = self._stage_of(run)
        part = Part(way=way, stage=stage, group=homes[stage])
        self.part = self.stages[part.group].parts[part]

    @property
    def group(self) -> int:
        return self.part.part.group

    @property
    def role(self) -> StageBodies:
        return self.stages[self.group]

    @property
    def arrived(self) -> dict[Use, Buffer]:
        return self.role.arrived.setdefault(self.part.part.way, {})

    @property
    def cotangents(self) -> dict[str, list[tuple[Layout, Buffer]]]:
        return self.role.cotangents.setdefault(self.part.part.way, {})

    def _other(self, tensor: str) -> PartBodies:
        """The part that makes a tensor on the present way."""
        way, stage = self.part.part.way, self._stage_of(self.made[tensor][0])
        part = Part(way=way, stage=stage, group=self.ways.homes[way][stage])
        return self.stages[part.group].parts[part]

    def _copy(self, run: Run, piece: int = 0) -> Run:
        """A run on the group of the present part, in the moment of a piece: itself at home, else one like it."""
        if run.index in self.loops and not run.moment:
            return run
        if run.stage == self.group and piece == 0:
            return run
        key = (run.index, self.group, piece)
        if key not in self.copies:
            self.copies[key] = len(self.runs)
            moment = tuple((digit, piece) for digit, _ in run.moment)
            self.runs.append(replace(run, index=len(self.runs), stage=self.group, moment=moment))
        return self.runs[self.copies[key]]

    def _opened(self, base: Run) -> Run:
        """What a run is begun with on the group of the present part: a scope, or what opens a ring, or itself."""
        return self._copy(base if base.index in self.loops else self.runs[base.index])

    def _at_home(self, index: int) -> Run:
        """A run of a stage at home; of a loop or ring the one that it is from outside."""
        return self.whole[index]

    def _loop(self, base: Run, inputs: Sequence[Buffer]) -> LoopWriter:
        return LoopWriter(
            loop=self.loops[base.index],
            connections=self.connections,
            group=self.group,
            with_backward=self.with_backward_inside,
            at=self._copy,
            inputs=inputs,
        )

    def _run(
        self,
        body: list[Instruction],
        run: Run,
        base: Run,
        inputs: list[Buffer],
        outputs: tuple[Buffer, ...],
        *,
        saves: bool,
        again: bool = False,
        read: frozenset[str] | None = None,
    ) -> None:
        """Write a forward; `read`: what of it is read, if not all; of the rest, only what it saves is wanted."""
        if base.index in self.rings:
            self._ring(base, again=again).forward(body, tuple(inputs), outputs, saves=saves, again=again)
            return
        if base.index not in self.loops:
            body.append(Forward(run=run.index, inputs=tuple(inputs), outputs=outputs, saves=saves, again=again))
            return
        recomputes = self.loops[run.index].scope.axis.recompute
        if saves:
            self.entered[self.part.part, run.index] = inputs
        leaving = {
            slot.tensor: buffer
            for slot, buffer in zip(base.outputs, outputs, strict=True)
            if read is None or slot.tensor in read
        }
        if leaving or not recomputes:
            body += self._loop(run, inputs).forward(leaving, saves=saves and not recomputes, again=again)

    def _ring(self, base: Run, *, again: bool = False) -> RingWriter:
        """The ring of a block that goes round, on the present group; recomputed, it has buffers of its own."""
        runs, name = tuple(map(self._copy, self.rings[base.index])), f" of ring {base.index}" + " again" * again
        return RingWriter(runs=runs, mesh=self.splits.plan.groups[self.group], name=name)

    def _find_imports(self, runs: Sequence[Run], homes: Sequence[int]) -> dict[tuple[str, int], tuple[int, Slot]]:
        """(tensor, group) → the first run of the group that reads a tensor made in another, and its slot."""
        imports: dict[tuple[str, int], tuple[int, Slot]] = {}
        for run in runs:
            group = homes[self._stage_of(run)]
            for slot in run.inputs:
                if slot.tensor in self.made and homes[self._stage_of(self.made[slot.tensor][0])] != group:
                    imports.setdefault((slot.tensor, group), (run.index, slot))
        return imports

    def _passed(self, group: int, slot: Slot, layout: Layout) -> Layout:
        """The layout in which a group sends or receives what it holds in this one: a shared group spreads it."""
        if group < self.ways.num_roles:
            return layout
        return spread(layout, slot.sizes, self.splits.plan.groups[group])

    def _first_backward(self) -> PartBodies | None:
        """The part of this group whose backward a micro-batch comes to first: all forwards are done then."""
        found = [b for b in self._parts(self.part.part.way) if b.part.group == self.group and b.phases - {"forward"}]
        return self.part if self.part in found else max(found, key=lambda body: body.part.stage, default=None)

    def _await_at_the_end(self, buffer: Buffer) -> None:
        wait = Wait(buffer=buffer, every=True, free=True)
        self.role.exit += [wait] if wait not in self.role.exit else []

    def _value(self, slot: Slot) -> Buffer:
        """An activation in the layout that a run needs."""
        key = (slot.tensor, slot.layout)
        found = self.arrived.get(key) or self.part.values.get(key)
        if found is None:
            before = self._arrived(slot.tensor)
            name = f"{slot.tensor}@{slot.layout}"
            if len(self.role.parts) > 1:
                name += f" for {self.part.part.stage}"  # others bring it there by themselves
            found = self.part.values[key] = self.connections.change(
                self.part.forward, self.group, slot, self.arrived[slot.tensor, before], before, slot.layout, name
            )
        return found

    def _arrived(self, tensor: str) -> Layout:
        """The layout in which a tensor was made in a group, or received."""
        return next(layout for name, layout in self.arrived if name == tensor)

    def _gather(self, run: Run, body: list[Instruction], held: dict[Use, tuple[Buffer, int]]) -> dict[Use, Buffer]:
        """The parameters that are gathered for this run alone, all at once; those that are held need not be."""
        gathered, changes = {}, []
        for slot in run.inputs:
            home, use = self.parameters.get(slot.tensor), (slot.tensor, slot.layout)
            if (
                home is None
                or use in held
                or home.layout == slot.layout
                or not is_gathered(self.splits.plan, home, self.group)
            ):
                continue
            name = f"{slot.tensor}:gathered@{slot.layout}"
            changes.append(self.connections.collectives(self.group, slot, home.buffer, home.layout, slot.layout, name))
            gathered[use] = changes[-1][-1].target
            self.role.gathers.setdefault(slot.tensor, set()).add(changes[-1][-1].target)
        body += self.connections.together(changes)
        return gathered

    def _parameter(self, slot: Slot) -> Buffer:
        """A parameter in the layout of its use, where it is not gathered for every use."""
        role, home = self.role, self.parameters[slot.tensor]
        if home.stage == self.group and home.layout == slot.layout:
            return home.buffer
        key = (slot.tensor, slot.layout)
        if key not in role.used:
            used = Buffer(name=f"{slot.tensor}:used@{slot.layout}")
            if home.stage == self.group:
                self.connections.change(role.enter, self.group, slot, home.buffer, home.layout, slot.layout, used.name)
            else:
                sender = (home.stage, self.stages[home.stage].enter, home.buffer, home.layout)
                self.connections.exchange(slot, sender, (self.group, role.enter, used, slot.layout))
                self.stages[home.stage].exit.append(Wait(buffer=home.buffer, every=True))
            role.used[key] = used
            role.exit.append(Free(buffer=used))
        return role.used[key]


def _phases(plan: Plan, ways: Ways) -> dict[Part, frozenset[Phase]]:
    found: dict[Part, set[Phase]] = {}
    for order in plan.orders:
        for call in order:
            found.setdefault(ways.part(call), set()).add(call.phase)
    return {part: frozenset(phases) for part, phases in found.items()}
