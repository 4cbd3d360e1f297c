"""Shared stages: bodies that several device groups carry out together, each its share.

A stage that lives on the union of several groups' devices has bodies of its own, written once as those of any group.
They go into the program of every group that shares it, with buffers that are marked as the stage's own: a device of a
group holds the group's values and its share of the shared stage's. A share computes and sends its devices' part; a
collective of the shared stage has groups that span roles, and happens when all of them have started it.

Enter and exit of a group are its own and those of the stages that it shares, put together: in the order of each, what
is received behind what the others send.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from planloom.layout import Layout, Mesh
from planloom.program.values import Buffer, Coalesced, Collective, Instruction, Receive, Send, Transfer, Update, Wait

Marked = TypeVar("Marked", bound=Instruction)


def marked(instruction: Marked, group: int) -> Marked:
    """An instruction on buffers of a shared group."""
    changed: dict[str, Any] = {}
    if isinstance(instruction, Coalesced):
        changed["collectives"] = tuple(marked(each, group) for each in instruction.collectives)
    for field in fields(instruction):
        value = getattr(instruction, field.name)
        if isinstance(value, Buffer):
            changed[field.name] = replace(value, of=group)
        elif isinstance(value, tuple) and any(isinstance(each, Buffer) for each in value):
            changed[field.name] = tuple(replace(e, of=group) if isinstance(e, Buffer) else e for e in value)
    return replace(instruction, **changed)


def put_together(bodies: Sequence[Sequence[Instruction]]) -> tuple[Instruction, ...]:
    """Several bodies as one, with one update for all; each in its own order, behind what it awaits of another."""
    if len(bodies) == 1:
        return tuple(bodies[0])
    before, updates, after = [], list[Update](), []
    for body in bodies:
        at = next((i for i, instruction in enumerate(body) if isinstance(instruction, Update)), len(body))
        before.append(body[:at])
        updates += [instruction for instruction in body[at : at + 1] if isinstance(instruction, Update)]
        after.append(body[at + 1 :])
    whole = [*_in_turn(before), *_one_update(updates), *_in_turn(after)]
    return tuple(sorted(whole, key=lambda instruction: not isinstance(instruction, Receive)))


def _one_update(updates: Sequence[Update]) -> list[Update]:
    if len(updates) < 2:
        return list(updates)
    return [
        Update(
            parameters=tuple(name for update in updates for name in update.parameters),
            gradients=tuple(buffer for update in updates for buffer in update.gradients),
            targets=tuple(buffer for update in updates for buffer in update.targets),
        )
    ]


def _in_turn(bodies: Sequence[Sequence[Instruction]]) -> Iterable[Instruction]:
    """Body after body, each as far as it comes without what a later one has yet to send."""
    unsent = {i.channel for body in bodies for i in body if isinstance(i, Send)}
    channels: Mapping[Buffer, str] = {i.target: i.channel for body in bodies for i in body if isinstance(i, Receive)}
    left = [list(reversed(body)) for body in bodies]
    while any(left):
        moved = False
        for body in left:
            while body and not (isinstance(body[-1], Wait) and channels.get(body[-1].buffer) in unsent):
                instruction = body.pop()
                if isinstance(instruction, Send):
                    unsent.discard(instruction.channel)
                moved = True
                yield instruction
        if not moved:  # they wait for each other: the verifier says so
            unsent.clear()


def spread(layout: Layout, sizes: tuple[int, ...], mesh: Mesh) -> Layout:
    """A layout in which no two devices of a mesh hold the same elements, as far as sizes divide: split further.

    So passes what enters and leaves a shared stage: a device sends or receives a piece, and gathers the rest from the
    others, or has it summed by them, where a single sender would send the whole to all.
    """
    splits = list(layout.splits)
    free = [digit for digit in mesh.digits if digit not in layout.split_digits]
    for digit in free:
        local = Layout(splits=tuple(splits)).local_sizes(sizes)
        fits = [factor for factor, size in enumerate(local) if size % digit.size == 0]
        if fits:
            largest = max(fits, key=lambda factor: local[factor])
            splits[largest] += (digit,)
    return Layout(splits=tuple(splits), partial=layout.partial, combine=layout.combine)


def between_roles(
    role_of: Mapping[int, int], transfers: Iterable[Transfer]
) -> dict[tuple[int, int], tuple[Transfer, ...]]:
    """The messages of an exchange by the roles that they go from and to; what a role sends to itself is none."""
    parts: dict[tuple[int, int], list[Transfer]] = {}
    for transfer in transfers:
        ends = role_of[transfer.source], role_of[transfer.target]
        if ends[0] != ends[1]:
            parts.setdefault(ends, []).append(transfer)
    return {ends: tuple(part) for ends, part in parts.items()}


def span(collective: Collective) -> frozenset[int]:
    """The devices that take part in a collective."""
    return frozenset(device for step in collective.steps for group in step.groups for device in group)
