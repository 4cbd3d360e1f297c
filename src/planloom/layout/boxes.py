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


def lies_together(box: Box, sizes: tuple[int, ...]) -> bool:
    """Whether the elements of a box lie side by side in an array with these dims, the last the innermost."""
    outer = 0
    while outer < len(box) and box[outer][1] - box[outer][0] == 1:
        outer += 1
    return box[outer + 1 :] == whole(sizes[outer + 1 :])


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes, or None if there is none."""
    common = tuple((max(s, t), min(e, f)) for (s, e), (t, f) in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def relative(part: Box, base: Box) -> Box:
    """`part` in the index of a local array that holds `base`."""
    return tuple((start - offset, stop - offset) for (start, stop), (offset, _) in zip(part, base, strict=True))


def refined(box: Box, factors: tuple[tuple[int, ...], ...]) -> Box | None:
    """A box with one interval a sub-factor, where factor i is the product of `factors[i]`, major to minor.

    None if it is no box there: an interval that neither stays in one index of a sub-factor nor ends with one.
    """
    intervals: list[tuple[int, int]] = []
    for (start, stop), subs in zip(box, factors, strict=True):
        weight = prod(subs)
        for size in subs:
            weight //= size
            if start // weight == (stop - 1) // weight:
                index = start // weight
                intervals.append((index, index + 1))
                start, stop = start - index * weight, stop - index * weight
            elif start % weight or stop % weight:
                return None
            else:
                intervals.append((start // weight, stop // weight))
                start, stop = 0, weight
    return tuple(intervals)


def coarsened(box: Box, factors: tuple[tuple[int, ...], ...]) -> Box | None:
    """The inverse of `refined`; None if the sub-factors of a factor do not make up one interval."""
    intervals: list[tuple[int, int]] = []
    left = iter(box)
    for subs in factors:
        start, length, is_open = 0, 1, False
        for size in subs:
            low, high = next(left)
            if is_open and (low, high) != (0, size):
                return None
            is_open = is_open or high - low > 1
            start, length = start * size + low, length * (high - low)
        intervals.append((start, start + length))
    return tuple(intervals)


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
