"""An independent oracle of collective programs: what every device holds, chunk by chunk, contribution by contribution.

It shares no code with the search for programs (`synthesis`), and follows a program with P2's Hoare rules. The dims of
the tensor as the steps see it (`program.sizes`) are cut into *cells*, as many a dim as the layouts and the steps need;
a device holds nothing, or a box of cells and for each of them the set of *contributions* that are combined in it. A set
is a bit mask over the contributors. A contributor is a point of the source's partial digits: devices that differ in
other digits only hold the same contribution. With nothing partial there is one contributor. A masked device holds its
cells with the empty set.

| step                               | needs, in every group                                                        |
|------------------------------------|------------------------------------------------------------------------------|
| all_reduce, reduce_scatter, reduce | equal boxes, disjoint contributions (they may overlap for max)               |
| all_gather, gather, all_to_all     | boxes of equal shape, side by side along `along` in the group's order        |
| broadcast, scatter                 | a root that holds something; receivers that hold a subset of it or nothing   |
| slice, mask                        | the same cells with the same contributions; no mask for max                  |

and every member holds something, receivers of broadcast and scatter excepted. At the end the masters of the target
hold their boxes; over the devices of a partial group every contribution counts once, and devices that differ in
replicated digits only hold the same. What the others hold is not looked at.

All this is sound: a program that is accepted computes the target. It is strict where that makes the message better: an
array whose pieces lie in the wrong order is refused at once, although a later step could put them right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from planloom.collective.steps import CUTTING_KINDS, JOINING_KINDS, REDUCING_KINDS, CollectiveProgram, Step, StepKind
from planloom.errors import VerificationError
from planloom.layout import Box, Combine, Digit, Layout, Mesh

Contributions = NDArray[Any]
"""A bit mask a cell: unsigned 64-bit numbers where they suffice, Python's integers otherwise."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """What a device holds: a box, in cells, and the contributions in each of its cells."""

    box: Box
    contributions: Contributions

    def equals(self, other: "_Piece") -> bool:
        return self.box == other.box and np.array_equal(self.contributions, other.contributions)

    def is_subset_of(self, other: "_Piece") -> bool:
        if any(start < low or stop > high for (start, stop), (low, high) in zip(self.box, other.box, strict=True)):
            return False
        there = other.contributions[_index(self.box, other.box)]
        return not np.any(self.contributions & ~there)


_State = Mapping[int, _Piece]
"""Device → its piece; a device that is missing holds nothing."""


def check_program(program: CollectiveProgram, *, mesh: Mesh, source: Layout, target: Layout) -> None:
    """Raise a VerificationError if the program does not turn `source` into `target`.

    The error names the step (counted from 1), the rule and the group. A split that is not even is a LayoutError.
    """
    combine = _combination(source, target)
    before, after = (_element_boxes(program, mesh, layout) for layout in (source, target))
    units = _cell_sizes(program, (*before.values(), *after.values()))
    state: dict[int, _Piece] = {}
    contributors = _contributors(mesh, source.partial)
    everything = (1 << (max(contributors.values()) + 1)) - 1
    for device, box in before.items():
        cells = _in_cells(box, units)
        state[device] = _Piece(cells, _filled(cells, 1 << contributors[device], everything))
    for number, step in enumerate(program.steps, start=1):
        site = f"step {number} of {len(program.steps)}, {step.kind}"
        _check_form(step, site, mesh, len(units))
        for group in step.groups:
            pieces = _after(step, group, state, f"{site} over group {group}", combine)
            for device, piece in zip(group, pieces, strict=True):
                if piece is None:
                    state.pop(device, None)
                else:
                    state[device] = piece
    _check_end(state, {device: _in_cells(box, units) for device, box in after.items()}, mesh, target, everything)


# --- the start: layouts as boxes of cells


def _combination(source: Layout, target: Layout) -> Combine:
    if source.partial and target.partial and source.combine != target.combine:
        raise VerificationError(
            "before the first step: a partial maximum and a partial sum cannot become each other",
            given=f"from {source} to {target}",
            required="the same combination",
        )
    return source.combine if source.partial else target.combine if target.partial else "sum"


def _contributors(mesh: Mesh, partial: Sequence[Digit]) -> dict[int, int]:
    """The number of each device's contribution."""
    return {device: number for group in mesh.groups(partial) for number, device in enumerate(group)}


def _element_boxes(program: CollectiveProgram, mesh: Mesh, layout: Layout) -> dict[int, Box]:
    """What the layout's masters hold, in elements of the dims that the steps see."""
    if len(layout.splits) != len(program.factors):
        raise VerificationError(
            f"the layout {layout} has {len(layout.splits)} factors and the program {len(program.factors)}",
            given=f"factors {program.factors}",
            required="as many factors in the program as in the layout",
        )
    if unknown := {*layout.split_digits, *layout.partial, *layout.master} - set(mesh.digits):
        raise VerificationError(
            f"the layout {layout} uses digits that its mesh does not have",
            given=", ".join(f"{d} of size {d.size}" for d in sorted(unknown)),
            required=f"of {', '.join(f'{d} of size {d.size}' for d in mesh.digits)}",
        )
    sizes = tuple(map(prod, program.factors))
    boxes: dict[int, Box] = {}
    for device in mesh.devices:
        coordinates = mesh.coordinates(device)
        if any(coordinates[digit] for digit in layout.master):
            continue
        box: Box = ()
        for interval, subs in zip(layout.box(sizes, coordinates), program.factors, strict=True):
            refined = _refined(interval, subs)
            if refined is None:
                raise VerificationError(
                    f"the layout {layout} does not fit the sub-factors of the program",
                    given=f"elements {interval[0]}:{interval[1]} on device {device}, of a factor seen as {subs}",
                    required="a box of the sub-factors",
                    todo="give every digit that splits the factor a sub-factor of its own",
                )
            box += refined
        boxes[device] = box
    return boxes


def _refined(interval: tuple[int, int], subs: tuple[int, ...]) -> Box | None:
    """An interval of a factor as a box of its sub-factors, major to minor; None if it is none."""
    start, stop = interval
    box: list[tuple[int, int]] = []
    for position, _ in enumerate(subs):
        stride = prod(subs[position + 1 :])
        first, last = start // stride, (stop - 1) // stride
        box.append((first, last + 1))
        if first == last:
            start, stop = start - first * stride, stop - first * stride
        elif start % stride or stop % stride:
            return None
        else:
            return (*box, *((0, size) for size in subs[position + 1 :]))
    return tuple(box)


def _cell_sizes(program: CollectiveProgram, boxes: Sequence[Box]) -> tuple[int, ...]:
    """The number of elements of a cell along each dim.

    Of a dim of N elements the ends of all boxes are multiples of N/p at the start, p as small as possible, and of
    N/(p·k_1·k_2…) after cuts into k_1, k_2, … pieces. They are whole numbers, so multiples of N/gcd(N, p·k_1·k_2…).
    """
    result = []
    for dim, size in enumerate(program.sizes):
        num_pieces = size // gcd(size, *(end for box in boxes for end in box[dim]))
        for step in program.steps:
            num_pieces *= prod(n for d, n in zip(step.into, step.shape, strict=False) if d == dim and n > 0)
        result.append(size // gcd(size, num_pieces))
    return tuple(result)


def _in_cells(box: Box, units: tuple[int, ...]) -> Box:
    return tuple((start // unit, stop // unit) for (start, stop), unit in zip(box, units, strict=True))


def _filled(box: Box, mask: int, everything: int) -> Contributions:
    shape = tuple(stop - start for start, stop in box)
    return np.full(shape, mask, dtype=np.uint64 if everything < 1 << 64 else object)


# --- the steps


def _check_form(step: Step, site: str, mesh: Mesh, num_dims: int) -> None:
    """What is wrong with a step whatever the devices hold."""
    if step.kind not in get_args(StepKind):
        raise VerificationError(f"{site}: no such collective", required=f"one of {', '.join(get_args(StepKind))}")
    if not step.groups or min(step.shape, default=1) < 1:
        raise VerificationError(
            f"{site}: a step acts on groups that are not empty", given=f"{step}, shape {step.shape}"
        )
    seen: set[int] = set()
    for group in step.groups:
        where = f"{site} over group {group}"
        if len(group) != step.group_size:
            raise VerificationError(
                f"{where}: a group has as many members as its shape has points",
                given=f"{len(group)} members",
                required=f"{step.group_size}, the product of {step.shape}",
            )
        for device in group:
            if device not in mesh.devices:
                raise VerificationError(f"{where}: device {device} is unknown", required=f"of {mesh.devices}")
            if device in seen:
                raise VerificationError(
                    f"{where}: device {device} takes part twice", given=str(step), required="once in one group a step"
                )
            seen.add(device)
    for name, dims, kinds in (("along", step.along, JOINING_KINDS), ("into", step.into, CUTTING_KINDS)):
        required = len(step.shape) if step.kind in kinds else 0
        if len(dims) != required or len(set(dims)) != len(dims) or not all(0 <= dim < num_dims for dim in dims):
            raise VerificationError(
                f"{site} over group {step.groups[0]}: `{name}` names one dim for each number of the shape, or none",
                given=f"{name} {dims}, shape {step.shape}, {num_dims} dims",
                required=f"{required} different dims",
            )


def _after(step: Step, group: tuple[int, ...], state: _State, site: str, combine: Combine) -> Sequence[_Piece | None]:
    """What the members of a group hold after the step."""
    if step.kind in ("broadcast", "scatter"):
        whole = _of_root(group, state, site)
    else:
        pieces = _of_members(group, state, site)
        if step.kind == "rotate":
            return [pieces[-1], *pieces[:-1]]
        if step.kind in REDUCING_KINDS:
            whole = _combined(step, pieces, site, combine)
        elif step.kind in JOINING_KINDS:
            whole = _joined(step, pieces, site)
        else:
            whole = _common(pieces, site)
    if step.kind in CUTTING_KINDS:
        return [_cut(step, whole, point, site) for point in step.points]
    if step.kind in ("reduce", "gather"):
        return [whole, *[None] * (len(group) - 1)]
    if step.kind == "mask":
        if combine != "sum":
            raise VerificationError(
                f"{site}: a mask makes partial sums", given=f"a tensor that is combined by {combine}"
            )
        zero = _Piece(whole.box, np.zeros_like(whole.contributions))
        return [whole, *[zero] * (len(group) - 1)]
    return [whole] * len(group)


def _of_members(group: tuple[int, ...], state: _State, site: str) -> list[_Piece]:
    if empty := [device for device in group if device not in state]:
        raise VerificationError(
            f"{site}: a device that holds nothing is read",
            given=f"nothing on {', '.join(map(str, empty))}",
            required="an array on every member",
        )
    return [state[device] for device in group]


def _of_root(group: tuple[int, ...], state: _State, site: str) -> _Piece:
    """The root's array, of which the receivers hold nothing or a subset."""
    (root,) = _of_members(group[:1], state, site)
    for device in group[1:]:
        if device in state and not state[device].is_subset_of(root):
            raise VerificationError(
                f"{site}: a receiver holds what its root does not",
                given=f"{_told(device, state[device])}; {_told(group[0], root)}",
                required="a subset of what the root holds, or nothing",
            )
    return root


def _combined(step: Step, pieces: Sequence[_Piece], site: str, combine: Combine) -> _Piece:
    if step.combine != combine:
        raise VerificationError(f"{site}: a wrong combination", given=step.combine, required=combine)
    result = np.zeros_like(pieces[0].contributions)
    for position, piece in enumerate(pieces):
        if piece.box != pieces[0].box:
            raise VerificationError(
                f"{site}: members of a reduction hold equal chunks",
                given=f"{_cells(pieces[0].box)} on the first member, {_cells(piece.box)} on member {position}",
            )
        if combine == "sum" and np.any(result & piece.contributions):
            raise VerificationError(
                f"{site}: the contributions of a sum are disjoint",
                given=f"member {position} brings contributions that members before it bring too",
                required="every contribution once",
            )
        result = result | piece.contributions
    return _Piece(pieces[0].box, result)


def _joined(step: Step, pieces: Sequence[_Piece], site: str) -> _Piece:
    lengths = [stop - start for start, stop in pieces[0].box]
    box = list(pieces[0].box)
    for dim, count in zip(step.along, step.shape, strict=True):
        box[dim] = (box[dim][0], box[dim][0] + count * lengths[dim])
    whole = tuple(box)
    places: list[Box] = []
    for point in step.points:
        place = list(pieces[0].box)
        for dim, number in zip(step.along, point, strict=True):
            start = whole[dim][0] + number * lengths[dim]
            place[dim] = (start, start + lengths[dim])
        places.append(tuple(place))
    held = [piece.box for piece in pieces]
    if held != places:
        shapes = {tuple(stop - start for start, stop in box) for box in held}
        if len(shapes) > 1:
            rule = "members of a gather hold equal numbers of chunks"
        elif len(set(held)) < len(held):
            rule = "members of a gather hold disjoint chunks"
        else:
            rule = "the pieces of a gather lie side by side in the group's order"
        position = next(i for i, box in enumerate(held) if box != places[i])
        raise VerificationError(
            f"{site}: {rule}",
            given=f"{_cells(held[position])} on member {position}, {_cells(held[0])} on the first",
            required=f"{_cells(places[position])} on member {position}",
        )
    result = np.zeros([stop - start for start, stop in whole], dtype=pieces[0].contributions.dtype)
    for piece in pieces:
        result[_index(piece.box, whole)] = piece.contributions
    return _Piece(whole, result)


def _common(pieces: Sequence[_Piece], site: str) -> _Piece:
    for position, piece in enumerate(pieces):
        if not piece.equals(pieces[0]):
            raise VerificationError(
                f"{site}: members of a local step hold the same",
                given=f"{_cells(pieces[0].box)} on the first member, {_cells(piece.box)} on member {position}"
                + (", with other contributions" if piece.box == pieces[0].box else ""),
            )
    return pieces[0]


def _cut(step: Step, whole: _Piece, point: tuple[int, ...], site: str) -> _Piece:
    box = list(whole.box)
    for dim, count, number in zip(step.into, step.shape, point, strict=True):
        start, stop = box[dim]
        if (stop - start) % count:
            raise VerificationError(
                f"{site}: a dim is cut into equal pieces",
                given=f"dim {dim} of {_cells(whole.box)}",
                required=f"{count} equal pieces",
            )
        length = (stop - start) // count
        box[dim] = (start + number * length, start + (number + 1) * length)
    piece = tuple(box)
    return _Piece(piece, whole.contributions[_index(piece, whole.box)])


def _index(part: Box, base: Box) -> tuple[Any, ...]:
    """The place of a box in the array of another. The dots keep an array without dims an array."""
    slices = (slice(start - low, stop - low) for (start, stop), (low, _) in zip(part, base, strict=True))
    return (*slices, ...)


# --- the end


def _check_end(state: _State, boxes: Mapping[int, Box], mesh: Mesh, target: Layout, everything: int) -> None:
    site = "after the last step"
    for device, box in boxes.items():
        if device not in state or state[device].box != box:
            raise VerificationError(
                f"{site}: device {device} does not hold its piece of {target}",
                given=_told(device, state.get(device)),
                required=_cells(box),
            )
    for group in mesh.groups(target.partial):
        if group[0] not in boxes:
            continue
        total = np.zeros_like(state[group[0]].contributions)
        for device in group:
            contributions = state[device].contributions
            if target.combine == "sum" and np.any(total & contributions):
                raise VerificationError(
                    f"{site}: over group {group} of {target} a contribution counts twice",
                    given=f"device {device} holds contributions that devices before it hold too",
                    required="every contribution once",
                )
            total = total | contributions
        if np.any(total != everything):
            raise VerificationError(
                f"{site}: over group {group} of {target} contributions are missing",
                given=f"{_told(group[0], state[group[0]])}" if len(group) == 1 else f"devices {group}",
                required="every contribution in every cell",
            )
    moved = {*target.split_digits, *target.partial, *target.master}
    for group in mesh.groups([digit for digit in mesh.digits if digit not in moved]):
        for device in group if group[0] in boxes else ():
            if not state[device].equals(state[group[0]]):
                raise VerificationError(
                    f"{site}: replicas {group} of {target} differ",
                    given=f"other contributions on device {device} than on {group[0]}",
                    required="the same on all of them",
                )


def _told(device: int, piece: _Piece | None) -> str:
    if piece is None:
        return f"nothing on device {device}"
    counts = {int(mask).bit_count() for mask in piece.contributions.flat}
    return f"{_cells(piece.box)} with {' or '.join(map(str, sorted(counts)))} contributions on device {device}"


def _cells(box: Box) -> str:
    return "cells " + (" × ".join(f"{start}:{stop}" for start, stop in box) or "of a scalar")
