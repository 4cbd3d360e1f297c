"""Blocks: groups of operators through which a split passes without communication; segments of blocks that repeat."""

from planloom.blocks.dims import BlockDim
from planloom.blocks.figures import (
    Figures,
    RepeatedSegment,
    Strategies,
    count_strategies,
    figures_of,
    repeated_segments,
)
from planloom.blocks.grouping import Block, BlockGraph, find_blocks
from planloom.blocks.segments import Segment, find_segments

__all__ = [
    "Block",
    "BlockDim",
    "BlockGraph",
    "Figures",
    "RepeatedSegment",
    "Segment",
    "Strategies",
    "count_strategies",
    "figures_of",
    "find_blocks",
    "find_segments",
    "repeated_segments",
]
