"""Random meshes and layouts for property tests: a few small digits, devices in any order."""

from math import prod

from hypothesis import strategies as st

from planloom.layout import Axis, Combine, Digit, Layout, Mesh


@st.composite
def meshes(draw: st.DrawFn, *, max_axes: int = 3, max_digits: int = 3) -> Mesh:
    """One to `max_axes` axes of one or two digits each, at most `max_digits` digits in all, on permuted devices."""
    axes: list[Axis] = []
    left = max_digits
    for number in range(draw(st.integers(1, max_axes))):
        if left == 0:
            break
        sizes = tuple(draw(st.lists(st.sampled_from((2, 2, 3)), min_size=1, max_size=min(2, left))))
        left -= len(sizes)
        axes.append(Axis(name=f"a{number}", sizes=sizes))
    first = draw(st.integers(0, 5))
    count = prod(axis.size for axis in axes)
    return Mesh(axes=tuple(axes), devices=tuple(draw(st.permutations(range(first, first + count)))))


@st.composite
def layouts(
    draw: st.DrawFn, digits: tuple[Digit, ...], num_factors: int, *, partial: bool, combine: Combine = "sum"
) -> Layout:
    """Every digit splits some factor, is partial where that is allowed, or replicates; in any order of digits."""
    splits: list[tuple[Digit, ...]] = [()] * num_factors
    partials: list[Digit] = []
    for digit in draw(st.permutations(digits)):
        place = draw(st.integers(-2 if partial else -1, num_factors - 1))
        if place >= 0:
            splits[place] += (digit,)
        elif place == -2:
            partials.append(digit)
    return Layout(splits=tuple(splits), partial=tuple(partials), combine=combine if partials else "sum")
