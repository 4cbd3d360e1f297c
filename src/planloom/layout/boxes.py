"""Boxes: the part of a tensor that one device holds, as one interval a factor.

A tensor's dims are products of ordered factors; seen as an array with one dim a factor, every piece that a layout
makes is a box. Boxes are exact: start and stop of each interval in the factor's own index.
"""

from math import prod

Box = tuple[tuple[int, int], ...]


def volume(box: Box) -> int:
    """Number of elements in a box; the box of a scalar has one."""
    return prod(stop - start for start, stop in box)


def whole(sizes: tuple[int, ...]) -> Box:
    """The box of an entire tensor with these factor sizes."""
    return tuple((0, size) for size in sizes)


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, or None if there is none."""
    common = tuple((max(s, t), min(e, f)) for (s, e), (t, f) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def relative(part: Box, base: Box) -> Box:
    """`part` in the index of a local array that holds `base`."""
    return tuple((start - offset, stop - offset) for (start, stop), (offset, _) in zip(part, base, strict=True))


def subtract(box: Box, hole: Box) -> tuple[Box, ...]:
    """What is left of `box` without `hole`, as disjoint boxes."""
    common = intersect(box, hole)
    if common is None:
        return (box,)
    rest: list[Box] = []
    for i, ((start, stop), (low, high)) in enumerate(zip(box, common, strict=True)):
        head, tail = common[:i], box[i + 1 :]
        if start < low:
            rest.append((*head, (start, low), *tail))
        if high < stop:
            rest.append((*head, (high, stop), *tail))
    return tuple(rest)
