"""Collective programs on arrays of integers: against them the oracle's verdicts are held."""

from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planloom.collective.oracle import check_program
from planloom.collective.steps import CUTTING_KINDS, JOINING_KINDS, REDUCING_KINDS, CollectiveProgram, Step
from planloom.errors import VerificationError
from planloom.layout import Digit, Layout, Mesh

Array = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program with the change of layout that it should make."""

    mesh: Mesh
    source: Layout
    target: Layout
    program: CollectiveProgram

    def check(self) -> None:
        check_program(self.program, mesh=self.mesh, source=self.source, target=self.target)

    def with_steps(self, *steps: Step) -> "Case":
        return replace(self, program=replace(self.program, steps=steps))

    @property
    def is_accepted(self) -> bool:
        try:
            self.check()
        except VerificationError:
            return False
        return True


class MalformedError(Exception):
    """A step that no machine could carry out."""


def pieces_of(case: Case, tensor: Array, rng: np.random.Generator) -> dict[int, Array]:
    """What every master holds of the tensor, with random contributions that combine to it."""
    partial, sizes = case.source.partial, tuple(map(prod, case.program.factors))
    points = list(product(*(range(digit.size) for digit in partial)))
    if case.source.combine == "max":
        parts = tensor - rng.integers(1, 99, (len(points), *tensor.shape))
        np.put_along_axis(parts, rng.integers(len(points), size=(1, *tensor.shape)), tensor[None], axis=0)
    else:
        parts = rng.integers(-(10**6), 10**6, (len(points), *tensor.shape))
        parts[0] += tensor - parts.sum(axis=0)
    held = {}
    for device in case.mesh.devices:
        at = case.mesh.coordinates(device)
        if not any(at[digit] for digit in case.source.master):
            contribution = parts[points.index(tuple(at[digit] for digit in partial))].reshape(sizes)
            held[device] = local(contribution, case.source, at)
    return {device: array.reshape(local_shape(case.program.factors, array.shape)) for device, array in held.items()}


def local(tensor: Array, layout: Layout, at: dict[Digit, int]) -> Array:
    box = layout.box(tensor.shape, at)
    return tensor[(*(slice(start, stop) for start, stop in box), ...)]


def local_shape(factors: tuple[tuple[int, ...], ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a local array with one dim a sub-factor, given that with one a factor."""
    result: list[int] = []
    for subs, size in zip(factors, shape, strict=True):
        for position in range(len(subs)):
            minor = prod(subs[position + 1 :])
            result.append(max(1, size // minor))
            size = min(size, minor)
    return tuple(result)


def carry_out(step: Step, held: dict[int, Array]) -> None:
    for group in step.groups:
        try:
            arrays = [held[device] for device in group[: 1 if step.kind in ("broadcast", "scatter") else None]]
        except KeyError:
            raise MalformedError from None
        if any(array.shape != arrays[0].shape for array in arrays):
            raise MalformedError
        whole = arrays[0]
        if step.kind in REDUCING_KINDS:
            whole = np.stack(arrays).max(axis=0) if step.combine == "max" else np.stack(arrays).sum(axis=0)
        elif step.kind in JOINING_KINDS:
            for dim, count in reversed(list(zip(step.along, step.shape, strict=True))):
                arrays = [np.concatenate(arrays[i : i + count], axis=dim) for i in range(0, len(arrays), count)]
            (whole,) = arrays
        for position, device in enumerate(group):
            held.pop(device, None)
            if step.kind in CUTTING_KINDS:
                held[device] = cut(step, arrays[position] if step.kind == "slice" else whole, position)
            elif step.kind == "mask":
                held[device] = arrays[position] if position == 0 else np.zeros_like(whole)
            elif position == 0 or step.kind not in ("reduce", "gather"):
                held[device] = whole


def cut(step: Step, array: Array, position: int) -> Array:
    point = np.unravel_index(position, step.shape)
    for dim, count, number in zip(step.into, step.shape, point, strict=True):
        if array.shape[dim] % count:
            raise MalformedError
        array = np.split(array, count, axis=dim)[number]
    return array


def computes_the_target(case: Case, seed: int) -> bool:
    """Whether the program makes the target's pieces of a random tensor; replicas must be equal."""
    rng = np.random.default_rng(seed)
    sizes = tuple(map(prod, case.program.factors))
    tensor = rng.integers(-999, 999, sizes)
    held = pieces_of(case, tensor, rng)
    for step in case.program.steps:
        carry_out(step, held)
    target, mesh = case.target, case.mesh
    read = [device for device in mesh.devices if not any(mesh.coordinates(device)[digit] for digit in target.master)]
    for device in read:
        wanted = local_shape(case.program.factors, target.local_sizes(sizes))
        if device not in held or held[device].shape != wanted:
            return False
    for group in mesh.groups(target.partial):
        if group[0] in read:
            stacked = np.stack([held[device] for device in group])
            combined = stacked.max(axis=0) if target.combine == "max" else stacked.sum(axis=0)
            wanted_piece = local(tensor, target, mesh.coordinates(group[0]))
            if not np.array_equal(combined, wanted_piece.reshape(combined.shape)):
                return False
    used = {*target.split_digits, *target.partial, *target.master}
    replicas = mesh.groups([digit for digit in mesh.digits if digit not in used])
    return all(np.array_equal(held[d], held[group[0]]) for group in replicas if group[0] in read for d in group)
