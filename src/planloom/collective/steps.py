"""The steps of a collective program, and the program.

A program changes the layout of one tensor. The tensor's factors are refined: factor f of size N is seen as the product
of its *sub-factors* `factors[f]`, major to minor, and the local array of a device has one dim a sub-factor. A digit
that splits the tensor at any time splits a whole sub-factor of its own, so pieces are boxes whatever the steps.

A step acts at once on all its groups (ordered tuples of devices). A group has a `shape`, one number a digit that it
varies over, and a member's position is row-major in it. `along` names the dims that are put together and `into` those
that are cut, one dim a digit: dim `into[i]` is cut into `shape[i]` pieces, and a member at point q of the shape takes
piece q[i] of each.

| kind           | before                            | after                                              |
|----------------|-----------------------------------|----------------------------------------------------|
| all_reduce     | contributions                     | their combination, on every member                 |
| reduce_scatter | contributions                     | a piece of the combination, cut `into`             |
| all_gather     | pieces `along`                    | all pieces, on every member                        |
| all_to_all     | pieces `along`                    | all of `along`, a piece `into`                     |
| reduce         | contributions                     | their combination, on the first member only        |
| gather         | pieces `along`                    | all pieces, on the first member only               |
| broadcast      | the array, on the first member    | the array, on every member                         |
| scatter        | the array, on the first member    | a piece, cut `into`                                |
| rotate         | any arrays of one size            | that of the member before; the first has the last's |
| slice          | the same array on every member    | a piece, cut `into`; nothing is sent               |
| mask           | the same array on every member    | kept by the first member, zero elsewhere; nothing is sent |

After reduce and gather the other members hold nothing; steps until their broadcast or scatter leave them out of their
groups.
"""

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Literal

from planloom.layout import Combine

StepKind = Literal[
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "reduce",
    "gather",
    "broadcast",
    "scatter",
    "rotate",
    "slice",
    "mask",
]
LOCAL_KINDS: tuple[StepKind, ...] = ("slice", "mask")
REDUCING_KINDS: tuple[StepKind, ...] = ("all_reduce", "reduce_scatter", "reduce")
JOINING_KINDS: tuple[StepKind, ...] = ("all_gather", "all_to_all", "gather")
CUTTING_KINDS: tuple[StepKind, ...] = ("reduce_scatter", "all_to_all", "scatter", "slice")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One collective on all its groups at once."""

    kind: StepKind
    groups: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    along: tuple[int, ...] = ()
    into: tuple[int, ...] = ()
    combine: Combine = "sum"

    @property
    def is_local(self) -> bool:
        return self.kind in LOCAL_KINDS

    @property
    def group_size(self) -> int:
        return prod(self.shape)

    @property
    def points(self) -> tuple[tuple[int, ...], ...]:
        """The point of every position in a group."""
        return tuple(product(*map(range, self.shape)))

    def group_of(self, device: int) -> tuple[int, ...] | None:
        """The group that a device is in; None if it takes no part."""
        return next((group for group in self.groups if device in group), None)

    def __str__(self) -> str:
        along = f" along {_dims(self.along)}" if self.along else ""
        into = f" into {_dims(self.into)}" if self.into else ""
        return f"{self.kind}{along}{into} over {' '.join(map(str, self.groups))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveProgram:
    """Steps on a tensor whose factor f is the product of `factors[f]`, major to minor."""

    factors: tuple[tuple[int, ...], ...]
    steps: tuple[Step, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of all sub-factors: the dims of the whole tensor as the steps see it."""
        return tuple(size for subs in self.factors for size in subs)


def local_sizes_after(step: Step, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The dims of a local array after the step; for reduce and gather, on the first member of a group."""
    result = list(sizes)
    if step.kind in JOINING_KINDS:
        for dim, count in zip(step.along, step.shape, strict=True):
            result[dim] *= count
    if step.kind in CUTTING_KINDS:
        for dim, count in zip(step.into, step.shape, strict=True):
            result[dim] //= count
    return tuple(result)


def _dims(dims: tuple[int, ...]) -> str:
    return "·".join(map(str, dims))
