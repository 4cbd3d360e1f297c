"""Layouts: for each factor of a tensor the ordered digits that split it, and the digits over which it is partial.

A factor of size n split over digits (a, b) is cut into |a|·|b| equal pieces; the device with coordinates (i, j) holds
piece i·|b| + j. Over a *partial* digit every device holds a contribution and the whole is their combination (sum or
max). Over a *master* digit only the devices with coordinate 0 hold it: before a broadcast or scatter, after a reduce or
gather. Over all other digits the tensor is replicated.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from planloom.errors import LayoutError
from planloom.layout.boxes import Box
from planloom.layout.mesh import Digit

Combine = Literal["sum", "max"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`splits[i]`: the digits of factor i, major to minor; `partial`: digits still to be combined; `master`: digits
    along which only coordinate 0 holds it.
    """

    splits: tuple[tuple[Digit, ...], ...]
    partial: tuple[Digit, ...] = ()
    combine: Combine = "sum"
    master: tuple[Digit, ...] = ()

    def __post_init__(self) -> None:
        digits = [d for split in self.splits for d in split] + list(self.partial) + list(self.master)
        if len(set(digits)) != len(digits):
            raise LayoutError(
                "a layout uses a digit twice", given=" ".join(map(str, digits)), required="each digit at most once"
            )

    @staticmethod
    def replicated(num_factors: int) -> "Layout":
        return Layout(splits=((),) * num_factors)

    @property
    def split_digits(self) -> tuple[Digit, ...]:
        return tuple(d for split in self.splits for d in split)

    def local_sizes(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The factor sizes of one device's piece; uneven splits are refused."""
        for size, split in zip(sizes, self.splits, strict=True):
            if size % prod(d.size for d in split):
                raise LayoutError(
                    "a split is not even",
                    given=f"a factor of size {size} over {' × '.join(f'{d}={d.size}' for d in split)}",
                    required="a size that the product of the axes divides",
                    todo="use smaller axes for this dim, or change the model or batch",
                )
        return tuple(s // prod(d.size for d in split) for s, split in zip(sizes, self.splits, strict=True))

    def box(self, sizes: tuple[int, ...], coordinates: Mapping[Digit, int]) -> Box:
        """The part of the tensor held at these coordinates."""
        intervals = []
        for local, split in zip(self.local_sizes(sizes), self.splits, strict=True):
            piece = 0
            for digit in split:
                piece = piece * digit.size + coordinates[digit]
            intervals.append((piece * local, (piece + 1) * local))
        return tuple(intervals)

    def completed(self) -> "Layout":
        """The same splits with nothing partial."""
        return Layout(splits=self.splits)

    def without(self, digits: Collection[Digit]) -> "Layout":
        """The same, with nothing split or partial over these digits."""
        if not any(digit in digits for digit in (*self.split_digits, *self.partial)):
            return self
        return Layout(
            splits=tuple(tuple(d for d in split if d not in digits) for split in self.splits),
            partial=tuple(d for d in self.partial if d not in digits),
            combine=self.combine,
            master=self.master,
        )

    def __str__(self) -> str:
        parts = [f"{i}:{'·'.join(map(str, split))}" for i, split in enumerate(self.splits) if split]
        parts += [f"{self.combine}({'·'.join(map(str, self.partial))})"] if self.partial else []
        parts += [f"master({'·'.join(map(str, self.master))})"] if self.master else []
        return "[" + (" ".join(parts) or "whole") + "]"
