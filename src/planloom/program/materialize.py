"""Materialize: connect every producer's layout to every consumer's, and write the bodies.

A stage has four bodies:

    enter     what the step needs once: parameters from their home stage, parameters used in another layout
    forward   for each run: its inputs in its layouts, the run, sends to later stages
    backward  runs in reverse: the cotangents of each output meet in a junction (summed where layouts agree, reduced,
              summed), the run's vector-Jacobian product, parameter gradients accumulated
    exit      gradients reduced to the optimizer's layout, update, gather; the loss completed and told to all stages

and a fifth, the last backward, where gradients are reduced meanwhile (`overlap`).

Communication starts where its source is ready and is awaited where its result is needed. A send to a later stage is
awaited in the backward of the same micro-batch, whose cotangent proves that it arrived; a cotangent's send in the next
backward. So no order of calls can block on a send, and the verifier proves it for each program.
"""

from collections.abc import Sequence
from dataclasses import replace

from planloom.collective import DigitsPrice, Synthesized, change_layout, synthesize
from planloom.errors import LayoutError, PlanError
from planloom.graph import Tensor
from planloom.layout import Layout
from planloom.program.exchange import plan_transfers
from planloom.program.free import free_after_last_use
from planloom.program.overlap import bucket_bytes, coalesce, may_be_coalesced, prefetch, reduce_during
from planloom.program.schedule import ENTER, EXIT, LAST_BACKWARD, RECEIVES, with_receives_ahead
from planloom.program.storage import store_parameters
from planloom.program.transform import Splits
from planloom.program.values import (
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
    Receive,
    Run,
    Seed,
    Send,
    Slot,
    StageProgram,
    StoredParameter,
    Sum,
    Update,
    Wait,
)

LOSS = Buffer(name="loss")
_LOSS_TOTAL = Buffer(name="loss:total")
_NUM_WAYS = 32  # programs among which one that the wire can carry out on rows is looked for


def materialize(
    splits: Splits, runs: tuple[Run, ...], calls: tuple[tuple[BodyCall, ...], ...], price: DigitsPrice
) -> Program:
    """The program of all stages."""
    builder = _Builder(splits, runs, price)
    builder.build()
    plan = splits.plan
    stages = []
    for s, stage in enumerate(builder.stages):
        bodies, stage_calls = stage.bodies(calls[s])
        parameters = tuple(
            replace(p, gathers=tuple(sorted(stage.gathers.get(p.name, ()))))
            for p in builder.parameters.values()
            if p.stage == s
        )
        stages.append(
            StageProgram(mesh=plan.meshes[s], bodies=bodies, calls=stage_calls, parameters=parameters, loss=LOSS)
        )
    return Program(plan_name=plan.name, num_micro_batches=plan.num_micro_batches, stages=tuple(stages), runs=runs)


def _with_last_backward(calls: tuple[BodyCall, ...]) -> tuple[BodyCall, ...]:
    last = max(i for i, call in enumerate(calls) if call.body == "backward")
    return (*calls[:last], replace(calls[last], body=LAST_BACKWARD), *calls[last + 1 :])


def _receives_first(body: list[Instruction]) -> list[Instruction]:
    """Start all receives of a body before anything else: they depend on nothing, and messages then travel at once."""
    return sorted(body, key=lambda instruction: not isinstance(instruction, Receive))


def _without_receives(body: Sequence[Instruction]) -> tuple[tuple[Receive, ...], list[Instruction]]:
    """The receives of a body, and the rest of it."""
    receives = tuple(instruction for instruction in body if isinstance(instruction, Receive))
    return receives, [instruction for instruction in body if not isinstance(instruction, Receive)]


def _masks(backward: list[Instruction]) -> frozenset[Buffer]:
    """The masks of ragged cotangents: made in the forward, read in the backward."""
    return frozenset(i.rows for i in backward if isinstance(i, Collective) and i.rows is not None)


class _Stage:
    """The bodies of one stage while they are written."""

    def __init__(self) -> None:
        self.enter: list[Instruction] = []
        self.forward: list[Instruction] = []
        self.backward: list[Instruction] = []
        self.exit: list[Instruction] = []
        self.values: dict[tuple[str, Layout], Buffer] = {}
        self.cotangents: dict[str, list[tuple[Layout, Buffer]]] = {}
        self.gradients: dict[str, dict[Layout, Buffer]] = {}
        self.imported_gradients: dict[str, list[Buffer]] = {}
        self.gathers: dict[str, set[Buffer]] = {}
        self.delayed: list[Instruction] = []
        """The end of a reduction of gradients that goes on during the next run's backward."""
        self.buckets: list[Collective | Coalesced] = []

    def bodies(self, calls: tuple[BodyCall, ...]) -> tuple[dict[str, tuple[Instruction, ...]], tuple[BodyCall, ...]]:
        """The finished bodies, and the calls of them."""
        masks, gathered = _masks(self.backward), frozenset(b for found in self.gathers.values() for b in found)
        received, forward = _without_receives(prefetch(self.forward, gathered))
        received_back, backward = _without_receives(prefetch(self.backward, gathered))
        inherited = masks | {receive.target for receive in received_back}
        bodies = {
            ENTER: tuple(_receives_first(self.enter)),
            RECEIVES["forward"]: received,
            "forward": free_after_last_use(forward, kept=masks, inherited=frozenset(r.target for r in received)),
            RECEIVES["backward"]: received_back,
            "backward": free_after_last_use(backward, inherited=inherited),
            EXIT: tuple(_receives_first(self.exit)),
        }
        if self.buckets:
            last = reduce_during(backward, self.buckets)
            bodies[LAST_BACKWARD] = free_after_last_use(last, inherited=inherited)
            calls = _with_last_backward(calls)
        bodies = {name: body for name, body in bodies.items() if body or name not in RECEIVES.values()}
        return bodies, with_receives_ahead(calls, bodies)


class _Builder:
    def __init__(self, splits: Splits, runs: tuple[Run, ...], price: DigitsPrice) -> None:
        self.splits, self.runs, self.price = splits, runs, price
        self.graph = splits.blocks.graph
        self.meshes = splits.plan.meshes
        self.parameters = store_parameters(splits)
        self.stages = [_Stage() for _ in self.meshes]
        self.made = {slot.tensor: (run, slot) for run in runs for slot in run.outputs}
        self.imports = self._find_imports()

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
            self._send_gradients(s)
        for s in range(len(self.stages)):
            self._update(s)
        self._loss()

    # -- the pieces that every phase uses

    def _change(
        self, body: list[Instruction], stage: int, slot: Slot, source: Buffer, before: Layout, after: Layout, name: str
    ) -> Buffer:
        """Bring a buffer into another layout; the same buffer if nothing changes."""
        for collective in self._collectives(stage, slot, source, before, after, name):
            body += [collective, Wait(buffer=collective.target)]
            source = collective.target
        return source

    def _collectives(
        self, stage: int, slot: Slot, source: Buffer, before: Layout, after: Layout, name: str
    ) -> list[Collective]:
        """The collectives, one after another, that bring a buffer into another layout, in a buffer of this name."""
        try:
            item_bytes = self.graph.tensors[slot.tensor].item_bytes
            parts = change_layout(before, after, self.meshes[stage], slot.sizes, self.price, item_bytes)
        except LayoutError as error:
            raise PlanError(
                f"{slot.tensor} cannot be brought from its producer to its consumer",
                given=f"layout {before}",
                required=f"layout {after}",
                todo="split the blocks on both sides alike, or over axes that divide the tensor",
            ) from error
        if len(parts) > 1 and self.graph.tensors[slot.tensor].rows:
            raise PlanError(
                f"the rows of experts {slot.tensor} would change their layout in {len(parts)} steps",
                given=f"layout {before}",
                required=f"layout {after}, in one step",
                todo="split experts and tokens over whole axes, in the same order",
            )
        rows = self._rows(stage, slot, before) if parts else None
        if rows is not None:
            parts = (self._movable(stage, slot, before, after),)
        num_row_factors = len(self._mask(slot).sizes) if rows is not None else 0
        found = []
        for i, part in enumerate(parts):
            target = Buffer(name=f"{name}:{i}" if i + 1 < len(parts) else name, indexed=source.indexed)
            found.append(
                Collective(
                    tensor=slot.tensor,
                    source=source,
                    target=target,
                    steps=part.program(self.meshes[stage]).steps,
                    factors=part.factors,
                    sizes=part.local_sizes,
                    rows=rows,
                    num_row_dims=sum(len(subs) for subs in part.factors[:num_row_factors]),
                )
            )
            source = target
        return found

    def _together(self, collectives: list[list[Collective]], *, takes_sources: bool = False) -> list[Instruction]:
        """Independent changes of layout, each of one collective or more, started together and awaited."""
        alone = [found[0] for found in collectives if len(found) == 1]
        body: list[Instruction] = list(coalesce(self.graph, alone, takes_sources=takes_sources))
        body += [Wait(buffer=collective.target) for collective in alone]
        for found in collectives:
            for collective in found if len(found) > 1 else ():
                body += [collective, Wait(buffer=collective.target)]
        return body

    def _mask(self, slot: Slot) -> Tensor:
        return self.graph.tensors[self.graph.tensors[slot.tensor].rows]

    def _movable(self, s: int, slot: Slot, before: Layout, after: Layout) -> Synthesized:
        """The cheapest program that moves the rows of experts as rows, or as features of the same rows."""
        item_bytes, num_row_factors = self.graph.tensors[slot.tensor].item_bytes, len(self._mask(slot).sizes)
        ways = synthesize(
            before, after, self.meshes[s], slot.sizes, price=self.price, item_bytes=item_bytes, num_best=_NUM_WAYS
        )
        movable = []
        for way in ways:
            count = sum(len(subs) for subs in way.factors[:num_row_factors])
            steps = way.program(self.meshes[s]).steps
            mixed = any(len({dim < count for dim in (*step.along, *step.into)}) > 1 for step in steps)
            if not mixed and not any(step.kind in ("broadcast", "reduce", "scatter", "gather") for step in steps):
                movable.append((any(dim < count for step in steps for dim in (*step.along, *step.into)), way))
        if movable:  # rows that stay where they are need no counting, and are sent as any other array is
            return min(movable, key=lambda found: found[0])[1]
        raise PlanError(
            f"the rows of experts {slot.tensor} cannot be brought from one layout to the other",
            given=f"layout {before}",
            required=f"layout {after}, by collectives of rows or of features",
            todo="split experts and tokens over whole axes, and features alike on both sides",
        )

    def _rows(self, s: int, slot: Slot, layout: Layout) -> Buffer | None:
        """The mask of a ragged tensor in the tensor's own layout, brought there in the forward."""
        if not self.graph.tensors[slot.tensor].rows:
            return None
        mask = self._mask(slot)
        count = len(mask.sizes)
        own = Layout(splits=layout.splits[:count])
        return self._value(s, Slot(tensor=mask.name, layout=own, cotangent=None, sizes=slot.sizes[:count]))

    def _exchange(
        self,
        slot: Slot,
        sender: tuple[int, list[Instruction], Buffer, Layout],
        receiver: tuple[int, list[Instruction], Buffer, Layout],
    ) -> None:
        """A send in one stage's body and the receive with its wait in another's."""
        source_stage, source_body, source, before = sender
        target_stage, target_body, target, after = receiver
        channel = f"{target.name}:{source_stage}>{target_stage}"
        transfers = plan_transfers(slot.sizes, before, self.meshes[source_stage], after, self.meshes[target_stage])
        sizes, new_sizes = before.local_sizes(slot.sizes), after.local_sizes(slot.sizes)
        tensor = slot.tensor
        source_body.append(Send(tensor=tensor, channel=channel, source=source, transfers=transfers, sizes=sizes))
        target_body.append(Receive(tensor=tensor, channel=channel, target=target, transfers=transfers, sizes=new_sizes))
        target_body.append(Wait(buffer=target))

    # -- forward

    def _forward(self, run: Run) -> None:
        stage = self.stages[run.stage]
        self._receive_imports(run)
        gathered = self._gather(run, stage.forward)
        inputs = [
            self._value(run.stage, slot)
            if slot.tensor not in self.parameters
            else gathered.get((slot.tensor, slot.layout)) or self._parameter(run.stage, slot)
            for slot in run.inputs
        ]
        outputs = tuple(Buffer(name=slot.tensor, indexed=True) for slot in run.outputs)
        stage.forward.append(Forward(run=run.index, inputs=tuple(inputs), outputs=outputs))
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
                self._exchange(
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
                stage.values[slot.tensor, whole] = self._change(
                    stage.forward, run.stage, slot, buffer, slot.layout, whole, name
                )
            stage.backward.append(Wait(buffer=stage.values[slot.tensor, whole], free=True))

    def _value(self, s: int, slot: Slot) -> Buffer:
        """An activation in the layout that a run needs."""
        stage = self.stages[s]
        key = (slot.tensor, slot.layout)
        if key not in stage.values:
            before = next(layout for tensor, layout in stage.values if tensor == slot.tensor)
            name = f"{slot.tensor}@{slot.layout}"
            stage.values[key] = self._change(
                stage.forward, s, slot, stage.values[slot.tensor, before], before, slot.layout, name
            )
        return stage.values[key]

    def _gather(self, run: Run, body: list[Instruction]) -> dict[tuple[str, Layout], Buffer]:
        """The parameters that are gathered for this run alone, all at once."""
        stage, gathered, changes = self.stages[run.stage], {}, []
        for slot in run.inputs:
            home = self.parameters.get(slot.tensor)
            if home is None or home.layout == slot.layout or not self._is_gathered(run.stage, home):
                continue
            name = f"{slot.tensor}:gathered@{slot.layout}"
            changes.append(self._collectives(run.stage, slot, home.buffer, home.layout, slot.layout, name))
            gathered[slot.tensor, slot.layout] = changes[-1][-1].target
            stage.gathers.setdefault(slot.tensor, set()).add(changes[-1][-1].target)
        body += self._together(changes)
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
                self._change(stage.enter, s, slot, home.buffer, home.layout, slot.layout, used.name)
            else:
                sender = (home.stage, self.stages[home.stage].enter, home.buffer, home.layout)
                self._exchange(slot, sender, (s, stage.enter, used, slot.layout))
                self.stages[home.stage].exit.append(Wait(buffer=home.buffer, every=True))
            stage.values[key] = used
            stage.exit.append(Free(buffer=used))
        return stage.values[key]

    def _is_gathered(self, s: int, home: StoredParameter) -> bool:
        storage = self.splits.plan.storage.get(home.name)
        return home.stage == s and storage is not None and storage.kind == "zero3"

    # -- backward

    def _backward(self, run: Run) -> None:
        stage = self.stages[run.stage]
        cotangents = [self._output_cotangent(run, slot) for slot in run.outputs]
        if not any(cotangents):
            return
        gathered = self._gather(run, stage.backward)
        outputs = [
            Buffer(name=f"{slot.tensor}:d{run.index}.{i}", indexed=True) if slot.cotangent is not None else None
            for i, slot in enumerate(run.inputs)
        ]
        stage.backward.append(Backward(run=run.index, cotangents=tuple(cotangents), outputs=tuple(outputs)))
        stage.backward += [*(Free(buffer=buffer) for buffer in gathered.values()), *stage.delayed]
        stage.delayed = []
        scattered: list[tuple[Slot, list[Collective], Buffer]] = []
        for slot, cotangent in zip(run.inputs, outputs, strict=True):
            if cotangent is None:
                continue
            if slot.tensor not in self.parameters:
                stage.cotangents.setdefault(slot.tensor, []).append((_cotangent(slot), cotangent))
            elif self._is_gathered(run.stage, self.parameters[slot.tensor]):
                scattered.append((slot, self._shard_collectives(run, slot, cotangent), cotangent))
            else:
                self._accumulate(stage.backward, stage, slot, cotangent, _cotangent(slot))
        self._scatter(stage, scattered)
        self._send_cotangents(run)

    def _shard_collectives(self, run: Run, slot: Slot, cotangent: Buffer) -> list[Collective]:
        home, name = self.parameters[slot.tensor], f"{slot.tensor}:shard{run.index}"
        return self._collectives(run.stage, slot, cotangent, _cotangent(slot), home.optimizer_layout, name)

    def _scatter(self, stage: _Stage, scattered: list[tuple[Slot, list[Collective], Buffer]]) -> None:
        """Reduce gradients to the shards that are stored; they are awaited and added after the next run's backward."""
        body = self._together([found for _, found, _ in scattered], takes_sources=True)
        stage.backward += [i for i in body if not isinstance(i, Wait)]
        stage.delayed += [i for i in body if isinstance(i, Wait)]
        for slot, found, cotangent in scattered:
            layout = self.parameters[slot.tensor].optimizer_layout
            self._accumulate(stage.delayed, stage, slot, found[-1].target if found else cotangent, layout)

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
            total = self._sum(body, slot.tensor, buffers, f"{slot.tensor}:junction{i}")
            results.append(self._change(body, s, slot, total, layout, target, f"{slot.tensor}:reduced{i}"))
        return self._sum(body, slot.tensor, results, f"{slot.tensor}:cotangent")

    def _sum(self, body: list[Instruction], tensor: str, buffers: list[Buffer], name: str) -> Buffer:
        if len(buffers) == 1:
            return buffers[0]
        target = Buffer(name=name, indexed=buffers[0].indexed)
        body.append(Sum(tensor=tensor, target=target, sources=tuple(buffers)))
        return target

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
            self._exchange(
                slot, (s, stage.backward, complete, slot.layout), (source.stage, home.backward, received, whole)
            )
            stage.backward.insert(0, Wait(buffer=complete, lag=1, free=True))
            stage.exit.append(Wait(buffer=complete, every=True, free=True))
            home.cotangents.setdefault(tensor, []).append((whole, received))

    # -- parameters

    def _accumulate(
        self, body: list[Instruction], stage: _Stage, slot: Slot, cotangent: Buffer, layout: Layout
    ) -> None:
        sums = stage.gradients.setdefault(slot.tensor, {})
        target = sums.setdefault(layout, Buffer(name=f"{slot.tensor}:sum{len(sums)}"))
        body.append(Accumulate(tensor=slot.tensor, target=target, source=cotangent))

    def _send_gradients(self, s: int) -> None:
        """Bring every sum of gradients to the optimizer's layout at the parameter's home."""
        stage = self.stages[s]
        for name, sums in stage.gradients.items():
            home = self.parameters[name]
            slot = _whole(home)
            for i, (layout, buffer) in enumerate(list(sums.items())):
                if home.stage == s:
                    continue
                whole = layout.completed()
                complete = self._change(stage.exit, s, slot, buffer, layout, whole, f"{name}:whole{i}")
                received = Buffer(name=f"{name}:from{s}.{i}")
                target = self.stages[home.stage]
                self._exchange(
                    slot,
                    (s, stage.exit, complete, whole),
                    (home.stage, target.exit, received, home.optimizer_layout),
                )
                stage.exit.append(Wait(buffer=complete, free=True))
                if complete != buffer:
                    stage.exit.append(Free(buffer=buffer))
                target.gradients.setdefault(name, {})
                target.imported_gradients.setdefault(name, []).append(received)

    def _update(self, s: int) -> None:
        stage = self.stages[s]
        updated = [home for home in self.parameters.values() if home.stage == s and home.name in stage.gradients]
        buckets = self._bucketed(s, updated)
        gradients = [buckets.get(home.name) or self._reduced(s, home) for home in updated]
        stage.exit += [Wait(buffer=gradient) for gradient in buckets.values()]
        targets = tuple(home.updated for home in updated)
        names = tuple(home.name for home in updated)
        stage.exit.append(Update(parameters=names, gradients=tuple(gradients), targets=targets))
        stage.exit += [Free(buffer=gradient) for gradient in gradients]
        stage.exit += self._together(
            [
                self._collectives(s, _whole(home), home.updated, home.optimizer_layout, home.layout, home.buffer.name)
                for home in updated
                if home.updated != home.buffer
            ]
        )

    def _bucketed(self, s: int, updated: list[StoredParameter]) -> dict[str, Buffer]:
        """The gradients that are reduced during the last backward, by parameter: those with one sum, made here."""
        stage, found = self.stages[s], {}
        for home in updated:
            sums = stage.gradients[home.name]
            if len(sums) == 1 and not stage.imported_gradients.get(home.name):
                ((layout, buffer),) = sums.items()
                name = f"{home.name}:reduced0"
                parts = self._collectives(s, _whole(home), buffer, layout, home.optimizer_layout, name)
                if len(parts) == 1 and may_be_coalesced(parts[0]):
                    found[home.name] = parts[0]
        ready = [i.target for i in stage.backward if isinstance(i, Accumulate)]
        collectives = sorted(found.values(), key=lambda c: len(ready) - 1 - ready[::-1].index(c.source))
        stage.buckets = coalesce(
            self.graph, collectives, max_bytes=bucket_bytes(self.graph, collectives), takes_sources=True
        )
        return {name: collective.target for name, collective in found.items()}

    def _reduced(self, s: int, home: StoredParameter) -> Buffer:
        """The gradient of a parameter at its home, summed and reduced in the exit."""
        stage, parts = self.stages[s], []
        for i, (layout, buffer) in enumerate(stage.gradients[home.name].items()):
            name = f"{home.name}:reduced{i}"
            reduced = self._change(stage.exit, s, _whole(home), buffer, layout, home.optimizer_layout, name)
            stage.exit += [Free(buffer=buffer)] if reduced != buffer else []
            parts.append(reduced)
        parts += stage.imported_gradients.get(home.name, [])
        gradient = self._sum(stage.exit, home.name, parts, f"{home.name}:gradient")
        stage.exit += [Free(buffer=part) for part in parts if part != gradient]
        return gradient

    # -- loss

    def _loss(self) -> None:
        run, slot = self.made[self.graph.loss]
        whole, home = slot.layout.completed(), self.stages[run.stage]
        complete = self._change(home.exit, run.stage, slot, _LOSS_TOTAL, slot.layout, whole, LOSS.name)
        if complete == _LOSS_TOTAL:
            home.exit.append(Sum(tensor=slot.tensor, target=LOSS, sources=(_LOSS_TOTAL,)))
        home.exit.append(Free(buffer=_LOSS_TOTAL))
        for s, stage in enumerate(self.stages):
            if s != run.stage:
                self._exchange(slot, (run.stage, home.exit, LOSS, whole), (s, stage.exit, LOSS, whole))
        if len(self.stages) > 1:
            home.exit.append(Wait(buffer=LOSS))


def _cotangent(slot: Slot) -> Layout:
    assert slot.cotangent is not None
    return slot.cotangent


def _whole(home: StoredParameter) -> Slot:
    """A stored parameter as the tensor that collectives move."""
    return Slot(tensor=home.name, layout=home.layout, cotangent=None, sizes=home.sizes)
