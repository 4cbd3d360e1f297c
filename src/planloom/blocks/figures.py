"""A model in figures: what blocks and segments hold, and how many strategies there are to choose from.

A strategy over one axis gives every operator, or every block, one of its splittable dims or none: its number of choices
is (splittable dims + 1), and the number of strategies is the product of the choices. It shrinks twice (CFP): first from
operators to blocks, for inside a block every operator follows; then from all blocks to those of distinct segments, for
equal segments need not be searched, nor profiled, more than once. Products are far beyond floats: all are logarithms.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log10, prod

from planloom.blocks.dims import rule_of
from planloom.blocks.grouping import BlockGraph
from planloom.blocks.segments import Segment
from planloom.graph.flops import op_flops, tensor_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a group of blocks does forward: operations, bytes that enter and leave every block, its parameters."""

    num_operators: int
    flops: int
    moved_bytes: int
    num_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedSegment:
    """All segments with one fingerprint, shown by the first."""

    first: Segment
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategies:
    """Decimal logarithms of the numbers of strategies over one axis."""

    log10_over_operators: float
    log10_over_blocks: float
    log10_over_distinct_segments: float


def figures_of(blocks: BlockGraph, indices: Iterable[int]) -> Figures:
    """The figures of some blocks; a parameter that several of them read counts once."""
    graph, chosen = blocks.graph, [blocks.blocks[i] for i in indices]
    crossing = (name for b in chosen for name in (*b.inputs, *b.parameters, *b.given, *b.outputs))
    parameters = dict.fromkeys(name for block in chosen for name in block.parameters)
    return Figures(
        num_operators=sum(len(block.ops) for block in chosen),
        flops=sum(op_flops(graph.ops[i], graph.tensors) for block in chosen for i in block.ops),
        moved_bytes=sum(tensor_bytes(graph.tensors[name]) for name in crossing),
        num_parameters=sum(prod(graph.tensors[name].shape) for name in parameters),
    )


def repeated_segments(segments: Sequence[Segment]) -> tuple[RepeatedSegment, ...]:
    """Distinct segments in the order in which they first appear."""
    groups: dict[str, list[Segment]] = {}
    for segment in segments:
        groups.setdefault(segment.fingerprint, []).append(segment)
    return tuple(RepeatedSegment(first=group[0], count=len(group)) for group in groups.values())


def count_strategies(blocks: BlockGraph, segments: Sequence[Segment]) -> Strategies:
    """How many strategies there are over operators, over blocks, and over the blocks of distinct segments."""
    rules = [rule_of(op) for op in blocks.graph.ops]
    of_blocks = [log10(1 + len(block.dims)) for block in blocks.blocks]
    distinct = repeated_segments(segments)
    return Strategies(
        log10_over_operators=sum(log10(1 + len(rule.sizes.keys() - set(rule.fixed))) for rule in rules),
        log10_over_blocks=sum(of_blocks),
        log10_over_distinct_segments=sum(sum(of_blocks[s.first.start : s.first.stop]) for s in distinct),
    )
