"""How large every buffer of a stage is on one of its devices."""

from math import prod

from planloom.collective import local_sizes_after
from planloom.graph import Graph
from planloom.layout import Layout
from planloom.program.values import (
    Accumulate,
    Backward,
    Buffer,
    Collective,
    Forward,
    Program,
    Put,
    Receive,
    Seed,
    Slot,
    Sum,
    Take,
    Update,
    WeightGradient,
    collectives_in,
)


def buffer_bytes(graph: Graph, program: Program, stage: int) -> dict[Buffer, int]:
    """Bytes of every buffer that a stage's instructions write, and of its stored parameters."""
    own = program.stages[stage]
    found = {p.buffer: local_bytes(graph, p.name, p.layout.local_sizes(p.sizes)) for p in own.parameters}
    for body in own.bodies.values():
        for instruction in body:
            match instruction:
                case Forward(run=run, outputs=outputs):
                    slots = program.runs[run].outputs
                    found.update((b, slot_bytes(graph, s, s.layout)) for b, s in zip(outputs, slots, strict=True))
                case Backward(run=run, outputs=cotangents) | WeightGradient(run=run, outputs=cotangents):
                    for buffer, slot in zip(cotangents, program.runs[run].inputs, strict=True):
                        if buffer is not None and slot.cotangent is not None:
                            found[buffer] = slot_bytes(graph, slot, slot.cotangent)
                case Receive(target=target, tensor=tensor, sizes=sizes):
                    found[target] = local_bytes(graph, tensor, sizes)
                case Take(target=target, tensor=tensor, box=box):
                    found[target] = local_bytes(graph, tensor, tuple(stop - start for start, stop in box))
                case Put(target=target, tensor=tensor, sizes=sizes):
                    found[target] = local_bytes(graph, tensor, sizes)
                case Sum(target=target, sources=sources):
                    found[target] = found[sources[0]]
                case Accumulate(target=target, source=source):
                    found[target] = found[source]
                case Seed(target=target, tensor=tensor):
                    found[target] = graph.tensors[tensor].item_bytes
                case Update():
                    updated = {p.updated: p for p in own.parameters}
                    for target in instruction.targets:
                        p = updated[target]
                        found[target] = local_bytes(graph, p.name, p.optimizer_layout.local_sizes(p.sizes))
            found.update((c.target, sizes_of_steps(graph, c)[-1]) for c in collectives_in(instruction))
    return found


def sizes_of_steps(graph: Graph, collective: Collective) -> list[int]:
    """Bytes of a device's array before every step of a collective, and after the last."""
    sizes, found = collective.sizes, [local_bytes(graph, collective.tensor, collective.sizes)]
    for step in collective.steps:
        sizes = local_sizes_after(step, sizes)
        found.append(local_bytes(graph, collective.tensor, sizes))
    return found


def mask_bytes_of_steps(collective: Collective) -> list[int]:
    """Bytes of a device's mask that goes before the rows of every step; 0 where none does.

    A ragged tensor's rows arrive in numbers that only the sender knows, so a step that brings rows from others first
    brings their mask, a byte each (`execute.wire`). A reduction adds rows that all have.
    """
    if collective.rows is None:
        return [0] * len(collective.steps)
    sizes, found = collective.sizes, []
    for step in collective.steps:
        moves_rows = any(dim < collective.num_row_dims for dim in (*step.along, *step.into))
        is_asked = step.kind in ("all_gather", "all_to_all") and moves_rows
        found.append(prod(sizes[: collective.num_row_dims]) if is_asked else 0)
        sizes = local_sizes_after(step, sizes)
    return found


def slot_bytes(graph: Graph, slot: Slot, layout: Layout) -> int:
    return local_bytes(graph, slot.tensor, layout.local_sizes(slot.sizes))


def local_bytes(graph: Graph, tensor: str, sizes: tuple[int, ...]) -> int:
    """Bytes of a local array; of a ragged tensor only the rows that are there."""
    return round(prod(sizes) * graph.tensors[tensor].item_bytes * graph.tensors[tensor].density)
