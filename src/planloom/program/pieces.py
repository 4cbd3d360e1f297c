"""The piece of a block that one device computes: an interval for every split dim.

The runtime slices and offsets by it, the verifier proves with it: both read the same intervals.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from planloom.blocks import Block
from planloom.layout import Box, Digit
from planloom.program.values import RunBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPiece:
    """Intervals of a block's dims on one device, in the index of one micro-batch."""

    block: Block
    part: RunBlock
    intervals: dict[str, tuple[int, int]]
    num_micro: int

    def interval(self, dim: str, size: int, micro: int = 0) -> tuple[int, int]:
        """The interval of a dim in the index of the whole batch."""
        start, stop = self.intervals.get(dim, (0, size))
        shift = micro * (size // self.num_micro) if dim == self.part.timed_dim else 0
        return start + shift, stop + shift

    def box(self, sizes: Sequence[int], tensor: str, micro: int = 0) -> Box:
        """The part of a tensor that the block touches, in the index of the whole batch."""
        box = [(0, size) for size in sizes]
        for dim in self.block.all_dims:
            if dim.name in self.intervals and tensor in dim.shards:
                box[dim.shards[tensor]] = self.interval(dim.name, dim.size, micro)
        return tuple(box)


def piece_of(block: Block, part: RunBlock, coordinates: Mapping[Digit, int], num_micro: int) -> BlockPiece:
    """The piece of a block at these coordinates."""
    digits_of = dict(part.splits)
    intervals = {}
    for dim in block.all_dims:
        if dim.name not in digits_of and dim.name != part.timed_dim:
            continue
        size = dim.size // (num_micro if dim.name == part.timed_dim else 1)
        position, digits = 0, digits_of.get(dim.name, ())
        for digit in digits:
            position = position * digit.size + coordinates[digit]
        length = size // prod(digit.size for digit in digits)
        intervals[dim.name] = (position * length, (position + 1) * length)
    return BlockPiece(block=block, part=part, intervals=intervals, num_micro=num_micro)
