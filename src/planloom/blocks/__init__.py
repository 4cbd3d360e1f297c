"""Blocks: groups of operators through which a split passes without communication; segments of blocks that repeat."""

from planloom.blocks.dims import BlockDim
from planloom.blocks.grouping import Block, BlockGraph, find_blocks
from planloom.blocks.segments import Segment, find_segments

__all__ = ["Block", "BlockDim", "BlockGraph", "Segment", "find_blocks", "find_segments"]
