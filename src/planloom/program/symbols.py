"""Symbolic values: which box of which tensor, made of which contributions.

A *part* names one contribution to a sum. Its links say how it came about:

    value       ((tensor, block, box),)             the part of the block's contracted dims that was summed
    cotangent   ((tensor, consumer, box),)          the part of the consumer's dims that the tensor lacks
                ((tensor, consumer, box), *part)    the same, passed on: the consumer's own cotangent was a `part`

A value is *complete* when its parts cover every contraction exactly once, a cotangent when they do so for every
consumer. Adding two values with a common part would count it twice and is refused.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from planloom.layout import Box, intersect, volume

Link = tuple[str, str, Box]
Part = tuple[Link, ...]
Kind = Literal["value", "cotangent", "updated"]

STORED: Part = (("", "stored", ()),)
SEED: Part = (("", "seed", ()),)


@dataclass(frozen=True, slots=True)
class Symbol:
    """What a buffer holds on one device."""

    kind: Kind
    tensor: str
    box: Box
    parts: frozenset[Part]

    def __str__(self) -> str:
        name = self.tensor if self.kind == "value" else f"{self.kind} of {self.tensor}"
        return f"{name} at {list(self.box)} with {len(self.parts)} part{'s' * (len(self.parts) != 1)}"


def overlapping(first: frozenset[Part], second: frozenset[Part]) -> Part | None:
    """A part of the second that the first holds already, wholly or in part."""
    common = first & second
    if common:
        return min(common)
    names: dict[tuple[tuple[str, str], ...], list[Part]] = {}
    for part in first:
        names.setdefault(tuple(link[:2] for link in part), []).append(part)
    for part in second:
        for other in names.get(tuple(link[:2] for link in part), ()):
            if all(intersect(a[2], b[2]) is not None for a, b in zip(part, other, strict=True)):
                return part
    return None


def added(first: Symbol, second: Symbol) -> Symbol:
    """The sum of two symbols; ValueError if they are not of one box, or if a part would count twice."""
    if (first.kind, first.tensor, first.box) != (second.kind, second.tensor, second.box):
        raise ValueError(f"{first} and {second} cannot be added")
    twice = overlapping(first.parts, second.parts)
    if twice is not None:
        raise ValueError(f"the contribution of {twice[0][1]} at {list(twice[0][2])} is counted twice")
    return Symbol(first.kind, first.tensor, first.box, first.parts | second.parts)


def covers(boxes: Iterable[Box], whole: Box) -> bool:
    """Do disjoint boxes cover the whole?"""
    return sum(map(volume, set(boxes))) == volume(whole)


def missing(
    tensor: str,
    parts: Iterable[Part],
    consumers: Mapping[str, Box],
    outputs: Callable[[str], Mapping[str, Mapping[str, Box]]],
) -> str:
    """What a cotangent lacks, in words; empty if it is complete.

    `consumers`: consumer → the box of all its dims that the tensor lacks; `outputs`: consumer → for each of its outputs
    the same mapping, for cotangents that were passed on.
    """
    parts = list(parts)
    for consumer, whole in consumers.items():
        own = [part for part in parts if part[0][:2] == (tensor, consumer)]
        boxes = {part[0][2] for part in own}
        if not covers(boxes, whole):
            return f"{consumer} contributes {sum(map(volume, boxes))} of {volume(whole)} parts"
        for box in boxes:
            rests = [part[1:] for part in own if part[0][2] == box]
            if () in rests:
                continue
            for output, further in outputs(consumer).items():
                lack = missing(output, [rest for rest in rests if rest[0][0] == output], further, outputs)
                if lack:
                    return f"{lack}, passed on by {consumer}"
    return ""
