"""From gradients to new parameters: summed over micro-batches, reduced to the optimizer's layout, updated, gathered."""

from collections.abc import Callable, Mapping, Sequence, Set

from planloom.layout import Layout
from planloom.program.bodies import PartBodies, StageBodies
from planloom.program.connect import Connections
from planloom.program.overlap import bucket_bytes, coalesce, may_be_coalesced
from planloom.program.values import (
    Accumulate,
    Buffer,
    Collective,
    Free,
    Instruction,
    Slot,
    StoredParameter,
    Sum,
    Update,
    Wait,
    collectives_in,
)


class Gradients:
    """Writes what becomes of gradients into the bodies of all stages."""

    def __init__(
        self, connections: Connections, parameters: Mapping[str, StoredParameter], stages: Sequence[StageBodies]
    ) -> None:
        self.connections, self.parameters, self.stages = connections, parameters, stages

    def accumulate(
        self, body: list[Instruction], stage: StageBodies, slot: Slot, cotangent: Buffer, layout: Layout
    ) -> None:
        """Add a gradient to the sum of those of its layout."""
        sums = stage.gradients.setdefault(slot.tensor, {})
        target = sums.setdefault(layout, Buffer(name=f"{slot.tensor}:sum{len(sums)}"))
        body.append(Accumulate(tensor=slot.tensor, target=target, source=cotangent))

    def scatter(
        self, stage: StageBodies, part: PartBodies, scattered: list[tuple[Slot, list[Collective], Buffer]]
    ) -> None:
        """Reduce gradients to the optimizer's shards; they are awaited and added after the next run's backward."""
        body = self.connections.together([found for _, found, _ in scattered], takes_sources=True)
        last = [Wait(buffer=found[-1].target) for _, found, _ in scattered if found]
        part.gradient_body.extend(i for i in body if i not in last)
        part.delayed += last
        for slot, found, cotangent in scattered:
            layout = self.parameters[slot.tensor].optimizer_layout
            self.accumulate(part.delayed, stage, slot, found[-1].target if found else cotangent, layout)

    def send(self, s: int) -> None:
        """Bring every sum of gradients that another stage made to the optimizer's layout at the parameter's home."""
        stage = self.stages[s]
        for name, sums in stage.gradients.items():
            home = self.parameters[name]
            slot = whole_parameter(home)
            for i, (layout, buffer) in enumerate(list(sums.items())):
                if home.stage == s:
                    continue
                whole = layout.completed()
                complete = self.connections.change(stage.exit, s, slot, buffer, layout, whole, f"{name}:whole{i}")
                received = Buffer(name=f"{name}:from{s}.{i}")
                target = self.stages[home.stage]
                self.connections.exchange(
                    slot,
                    (s, stage.exit, complete, whole),
                    (home.stage, target.exit, received, home.optimizer_layout),
                )
                stage.exit.append(Wait(buffer=complete, free=True))
                if complete != buffer:
                    stage.exit.append(Free(buffer=buffer))
                target.gradients.setdefault(name, {})
                target.imported_gradients.setdefault(name, []).append(received)

    def update(self, s: int, readers: Mapping[str, Set[int]]) -> None:
        """One optimizer step of a group, and the gathering of what it updated in shards.

        `readers`: for every parameter the stages of the plan that read it and give it a gradient.
        """
        stage = self.stages[s]
        updated = [home for home in self.parameters.values() if home.stage == s and home.name in stage.gradients]
        buckets = self._bucketed(s, updated, readers)
        gradients = [buckets.get(home.name) or self._reduced(s, home) for home in updated]
        stage.exit += [Wait(buffer=gradient) for gradient in buckets.values()]
        targets = tuple(home.updated for home in updated)
        names = tuple(home.name for home in updated)
        stage.exit.append(Update(parameters=names, gradients=tuple(gradients), targets=targets))
        stage.exit += [Free(buffer=gradient) for gradient in gradients]
        gathers = [
            self.connections.collectives(
                s, whole_parameter(home), home.updated, home.optimizer_layout, home.layout, home.buffer.name
            )
            for home in updated
            if home.updated != home.buffer
        ]
        stage.exit += self._in_buckets([found[0] for found in gathers if len(found) == 1])
        stage.exit += self.connections.together([found for found in gathers if len(found) > 1])

    def _in_buckets(self, gathers: Sequence[Collective]) -> list[Instruction]:
        """Gathers, two buckets on their way at a time: all at once would take as much as the parameters, twice."""
        graph, body = self.connections.graph, list[Instruction]()
        before: Sequence[Collective] = ()
        for bucket in coalesce(graph, gathers, max_bytes=bucket_bytes(graph, gathers)):
            body += [bucket, *(Wait(buffer=gather.target) for gather in before)]
            before = collectives_in(bucket)
        return [*body, *(Wait(buffer=gather.target) for gather in before)]

    def _bucketed(self, s: int, updated: list[StoredParameter], readers: Mapping[str, Set[int]]) -> dict[str, Buffer]:
        """The gradients that are reduced during a stage's last backward, by parameter: those with one sum, made there.

        A parameter that two stages of the group read is complete in neither's last backward alone.
        """
        stage, graph = self.stages[s], self.connections.graph
        found: dict[int, dict[str, Collective]] = {}
        for home in updated:
            sums = stage.gradients[home.name]
            here = {part.stage for part in stage.parts} & readers[home.name]
            if len(sums) == 1 and len(here) == 1 and not stage.imported_gradients.get(home.name):
                ((layout, buffer),) = sums.items()
                name, slot = f"{home.name}:reduced0", whole_parameter(home)
                parts = self.connections.collectives(s, slot, buffer, layout, home.optimizer_layout, name)
                if len(parts) == 1 and may_be_coalesced(parts[0]):
                    found.setdefault(here.pop(), {})[home.name] = parts[0]
        for number, reductions in found.items():
            bodies = [body.gradient_body for part, body in stage.parts.items() if part.stage == number]
            ready = [i.target for body in bodies for i in body if isinstance(i, Accumulate)]
            collectives = sorted(reductions.values(), key=lambda c: len(ready) - 1 - ready[::-1].index(c.source))
            stage.buckets[number] = coalesce(
                graph, collectives, max_bytes=bucket_bytes(graph, collectives), takes_sources=True
            )
        return {name: c.target for reductions in found.values() for name, c in reductions.items()}

    def _reduced(self, s: int, home: StoredParameter) -> Buffer:
        """The gradient of a parameter at its home, summed and reduced in the exit."""
        stage, parts = self.stages[s], []
        for i, (layout, buffer) in enumerate(stage.gradients[home.name].items()):
            name, slot = f"{home.name}:reduced{i}", whole_parameter(home)
            reduced = self.connections.change(stage.exit, s, slot, buffer, layout, home.optimizer_layout, name)
            stage.exit += [Free(buffer=buffer)] if reduced != buffer else []
            parts.append(reduced)
        parts += stage.imported_gradients.get(home.name, [])
        gradient = sum_into(stage.exit, home.name, parts, f"{home.name}:gradient")
        stage.exit += [Free(buffer=part) for part in parts if part != gradient]
        return gradient


def whole_parameter(home: StoredParameter) -> Slot:
    """A stored parameter as the tensor that collectives move."""
    return Slot(tensor=home.name, layout=home.layout, cotangent=None, sizes=home.sizes)


def junction(
    body: list[Instruction],
    tensor: str,
    parts: Sequence[tuple[Layout, Buffer]],
    change: Callable[[Buffer, Layout, str], Buffer],
    suffix: str = "",
) -> Buffer:
    """Sum what has one layout, reduce each sum by `change`, sum the results: partial sums are passed on as such."""
    by_layout: dict[Layout, list[Buffer]] = {}
    for layout, buffer in parts:
        by_layout.setdefault(layout, []).append(buffer)
    results = []
    for i, (layout, buffers) in enumerate(by_layout.items()):
        total = sum_into(body, tensor, buffers, f"{tensor}:junction{i}{suffix}")
        results.append(change(total, layout, f"{tensor}:reduced{i}{suffix}"))
    return sum_into(body, tensor, results, f"{tensor}:cotangent{suffix}")


def sum_into(body: list[Instruction], tensor: str, buffers: list[Buffer], name: str) -> Buffer:
    """The sum of buffers in one of this name; one buffer alone is its own sum."""
    if len(buffers) == 1:
        return buffers[0]
    target = Buffer(name=name, indexed=buffers[0].indexed)
    body.append(Sum(tensor=tensor, target=target, sources=tuple(buffers)))
    return target
