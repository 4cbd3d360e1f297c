"""The block graph as variables and edges, for elimination: what does not depend on any mesh.

Every block is a variable: its strategy. A tensor that several blocks read is a variable, too, a *junction*: the layout
into which it is brought once, for all who read it in that layout, and in which their cotangents meet on the way back.
An edge leads from a block to the only reader of a tensor, or to the junction, and from there to the readers.

The masks of experts' rows go to the block that dispatches the rows only: whoever reads the rows has the mask in the
rows' own layout, and its bytes are some thousandths of theirs (one for each row).

Variables that stand alike in equal segments have equal keys: their tables are made once.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planloom.blocks import Block, BlockGraph, find_segments
from planloom.search.space import BlockPin

Key = Hashable
Numbers = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A block's strategy, or the layout of a junction: then `tensor` is its name, and `block` the one that makes it."""

    number: int
    segment: int
    block: int
    tensor: str = ""
    key: Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Tensors that go from one variable to another."""

    source: int
    target: int
    tensors: tuple[str, ...]
    key: Key


@dataclass(frozen=True, kw_only=True)
class Network:
    """All variables, segment by segment, and all edges."""

    blocks: BlockGraph
    variables: tuple[Variable, ...]
    edges: tuple[Edge, ...]

    @cached_property
    def of_block(self) -> tuple[int, ...]:
        """For every block its variable."""
        return tuple(v.number for v in self.variables if not v.tensor)

    @cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """For every junction the blocks that read it."""
        found: dict[int, list[int]] = {}
        for edge in self.edges:
            if self.variables[edge.source].tensor:
                found.setdefault(edge.source, []).append(self.variables[edge.target].block)
        return {number: tuple(blocks) for number, blocks in found.items()}

    @cached_property
    def representatives(self) -> dict[Key, Variable]:
        """One variable for every key."""
        found: dict[Key, Variable] = {}
        for variable in self.variables:
            found.setdefault(variable.key, variable)
        return found

    @cached_property
    def distinct_edges(self) -> dict[Key, Edge]:
        found: dict[Key, Edge] = {}
        for edge in self.edges:
            found.setdefault(edge.key, edge)
        return found

    @cached_property
    def places_of_keys(self) -> tuple[tuple[Key, Numbers, Numbers], ...]:
        """(key, its variables, their blocks) for every key."""
        found: dict[Key, list[Variable]] = {}
        for variable in self.variables:
            found.setdefault(variable.key, []).append(variable)
        return tuple(
            (key, np.array([v.number for v in own]), np.array([v.block for v in own])) for key, own in found.items()
        )

    @cached_property
    def places_of_edges(self) -> tuple[tuple[Key, Numbers, Numbers, Numbers], ...]:
        """(key, sources, targets, the targets' blocks) for every key of edges."""
        found: dict[Key, list[Edge]] = {}
        for edge in self.edges:
            found.setdefault(edge.key, []).append(edge)
        return tuple(
            (
                key,
                np.array([e.source for e in own]),
                np.array([e.target for e in own]),
                np.array([self.variables[e.target].block for e in own]),
            )
            for key, own in found.items()
        )

    @cached_property
    def segment_of_block(self) -> Numbers:
        return np.array([self.variables[number].segment for number in self.of_block])

    def leaving(self, variable: Variable) -> tuple[str, ...]:
        """The tensors of a block that later segments read. They are kept as it made them, whatever their junctions."""
        if variable.tensor:
            return ()
        own, readers = self.segment_of_block, self.blocks.consumers
        outputs = self.blocks.blocks[variable.block].outputs
        return tuple(t for t in outputs if any(own[user] > variable.segment for user in readers.get(t, ())))

    @cached_property
    def places_of_junctions(self) -> tuple["JunctionPlaces", ...]:
        """All junctions, by their keys, with the edges that end there and begin there."""
        around: dict[int, list[Edge]] = {}
        for edge in self.edges:
            for end in (edge.source, edge.target):
                if self.variables[end].tensor:
                    around.setdefault(end, []).append(edge)
        by_key: dict[Key, list[int]] = {}
        for number in around:
            by_key.setdefault(self.variables[number].key, []).append(number)
        found = []
        for key, numbers in by_key.items():
            columns = zip(*(around[number] for number in numbers), strict=True)
            edges = tuple(
                (
                    column[0].key,
                    column[0].target == numbers[0],
                    np.array([e.source if e.target == n else e.target for e, n in zip(column, numbers, strict=True)]),
                )
                for column in columns
            )
            found.append(JunctionPlaces(key=key, numbers=np.array(numbers), edges=edges))
        return tuple(found)

    def crossing(self, cut: int) -> tuple[str, ...]:
        """The tensors made before a block and read from it on."""
        if cut not in self._crossing:
            self._crossing[cut] = tuple(t for low, high, t in self._spans if low < cut <= high)
        return self._crossing[cut]

    @cached_property
    def _crossing(self) -> dict[int, tuple[str, ...]]:
        return {}

    @cached_property
    def _spans(self) -> list[tuple[int, int, str]]:
        made = self.blocks.producer
        return [(made[t], max(users), t) for t, users in self.blocks.consumers.items() if t in made]

    @cached_property
    def chain(self) -> tuple["ChainSegment", ...]:
        return tuple(_chain(self))


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class JunctionPlaces:
    """Junctions of one key: their numbers, and for every edge its key, whether it ends here, and the blocks'
    variables at its other end."""

    key: Key
    numbers: Numbers
    edges: tuple[tuple[Key, bool, Numbers], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSegment:
    """A segment as elimination goes through it; see `elimination.SegmentTables`."""

    variables: tuple[Variable, ...]
    edges: tuple[Edge, ...]
    """Between its variables, or from those of earlier segments to them."""
    lives_on: tuple[bool, ...]
    last_touched: tuple[int, ...]
    is_repeated: bool
    """Is it one of several equal segments? Then its activations may be recomputed."""
    kind: Key


def build_network(blocks: BlockGraph, pins: Sequence[BlockPin] = ()) -> Network:
    """Variables and edges of a model's blocks. Blocks that pins tell apart have different keys."""
    places: list[Key] = []
    segment_of: list[int] = []
    for number, segment in enumerate(find_segments(blocks)):
        for i, block in enumerate(blocks.blocks[segment.start : segment.stop]):
            places.append((segment.fingerprint, i, *(pin for pin in pins if pin.matches(block.name))))
        segment_of += [number] * (segment.stop - segment.start)
    variables: list[Variable] = []
    of_block: dict[int, int] = {}
    junctions: dict[str, int] = {}
    for block in blocks.blocks:
        of_block[block.index] = len(variables)
        at = (segment_of[block.index], block.index)
        variables.append(Variable(number=len(variables), segment=at[0], block=at[1], key=places[block.index]))
        for i, tensor in enumerate(block.outputs):
            readers = _readers(blocks, tensor)
            if len(readers) > 1:
                key = ("junction", places[block.index], i, tuple(places[reader] for reader in readers))
                junctions[tensor] = len(variables)
                variables.append(Variable(number=len(variables), segment=at[0], block=at[1], tensor=tensor, key=key))
    return Network(
        blocks=blocks, variables=tuple(variables), edges=tuple(_edges(blocks, variables, of_block, junctions))
    )


def _readers(blocks: BlockGraph, tensor: str) -> tuple[int, ...]:
    """The blocks that read a tensor; of a mask of rows only the first."""
    found = blocks.consumers.get(tensor, ())
    return found[:1] if tensor in _masks(blocks) else found


def _masks(blocks: BlockGraph) -> frozenset[str]:
    if "masks" not in blocks.found:
        blocks.found["masks"] = frozenset(t.rows for t in blocks.graph.tensors.values() if t.rows)
    return blocks.found["masks"]  # type: ignore[return-value]


def _edges(
    blocks: BlockGraph, variables: list[Variable], of_block: dict[int, int], junctions: dict[str, int]
) -> list[Edge]:
    tensors: dict[tuple[int, int], list[str]] = {}
    for block in blocks.blocks:
        for tensor in block.inputs:
            if block.index in _readers(blocks, tensor):
                source = junctions.get(tensor, of_block[blocks.producer[tensor]])
                tensors.setdefault((source, of_block[block.index]), []).append(tensor)
        for tensor in block.outputs:
            if tensor in junctions:
                tensors.setdefault((of_block[block.index], junctions[tensor]), []).append(tensor)
    found = []
    for (source, target), names in tensors.items():
        outputs = _outputs(blocks, variables[source])
        key = (variables[source].key, variables[target].key, tuple(outputs.index(name) for name in names))
        found.append(Edge(source=source, target=target, tensors=tuple(names), key=key))
    return found


def _outputs(blocks: BlockGraph, variable: Variable) -> tuple[str, ...]:
    block: Block = blocks.blocks[variable.block]
    return (variable.tensor,) if variable.tensor else block.outputs


def _chain(network: Network) -> list[ChainSegment]:
    count = max(variable.segment for variable in network.variables) + 1
    own: list[list[Variable]] = [[] for _ in range(count)]
    for variable in network.variables:
        own[variable.segment].append(variable)
    edges: list[list[Edge]] = [[] for _ in range(count)]
    last = {variable.number: variable.segment for variable in network.variables}
    for edge in network.edges:
        segments = [network.variables[end].segment for end in (edge.source, edge.target)]
        edges[max(segments)].append(edge)
        for end in (edge.source, edge.target):
            last[end] = max(last[end], *segments)
    prints = [segment.fingerprint for segment in find_segments(network.blocks)]
    found = []
    for s in range(count):
        first = own[s][0].number
        lives_on = tuple(last[variable.number] > s for variable in own[s])
        touched = tuple(v.number for v in network.variables if v.segment < s and last[v.number] == s)
        kind = (
            tuple(v.key for v in own[s]),
            tuple((e.key, _relative(network, e.source, s, first), _relative(network, e.target, s, first))
                  for e in edges[s]),
            lives_on,
            tuple(_relative(network, v, s, first) for v in touched),
        )  # fmt: skip
        found.append(
            ChainSegment(
                variables=tuple(own[s]),
                edges=tuple(edges[s]),
                lives_on=lives_on,
                last_touched=touched,
                is_repeated=prints.count(prints[s]) > 1,
                kind=kind,
            )
        )
    return found


def _relative(network: Network, variable: int, segment: int, first: int) -> tuple[str, int]:
    """Counted from the segment's first variable, if it is of this segment or the one before; else as it is."""
    is_near = network.variables[variable].segment >= segment - 1
    return ("near", variable - first) if is_near else ("far", variable)
