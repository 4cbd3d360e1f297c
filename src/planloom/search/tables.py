"""The tables of a batch of problems: one shape, on several placements and with several numbers of micro-batches.

For every variable of the network the seconds and bytes of each choice, for every edge those of each pair. What
elimination minimizes is a weighted sum of them, a step's seconds and the price λ of memory (`costs`):

    J = Σ (m + p - 1) · seconds a micro-batch + seconds a step + λ · (stored bytes + k · saved bytes)

with m micro-batches, p stages and k micro-batches whose activations are kept at one time. For p equal stages J at λ =
0 is p times the step: (m + p - 1) times the seconds of one stage for a micro-batch, and what comes once a step.

The alternative of a repeated segment is to recompute it: its forward, communication included, counts twice, and only
what leaves it is kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planloom.blocks import Block
from planloom.cluster import Cluster
from planloom.graph import Graph
from planloom.plan.checks import BATCH_DIM
from planloom.search.conversions import Array, MeshBatch, conversion_seconds
from planloom.search.curves import AxisCurves, axis_curves
from planloom.search.elimination import Indices, SegmentTables, Table
from planloom.search.network import ChainSegment, Edge, Key, Network, Variable
from planloom.search.parameters import ParameterTables, parameter_tables, storage_options
from planloom.search.space import STAGES, Candidate, Shape, Wishes
from planloom.search.strategies import Rows, Strategies, block_strategies, boundary_states, junction_layouts, split_of
from planloom.search.work import WorkPrices


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class UnaryTables:
    """One variable: all of shape (problems, choices); `parameters` only for blocks that have some.

    `leaving_bytes`: what is kept of it where its segment is recomputed.
    """

    forward: Array
    backward: Array
    saved_bytes: Array
    leaving_bytes: Array
    peak_bytes: Array
    parameters: ParameterTables | None = None


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class PairTables:
    """One edge: seconds of shape (problems, choices of the source, choices of the target)."""

    forward: Array
    backward: Array


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Costs:
    """What elimination adds up, and for every variable (problem, choice) → the best way to store its parameters."""

    segments: tuple[SegmentTables, ...]
    sizes: dict[int, int]
    options: tuple[Indices | None, ...]

    def options_of(self, chosen: Indices) -> Indices:
        """The ways that go with the choices (variables, problems); -1 where there are no parameters."""
        problems = np.arange(chosen.shape[1])
        return np.stack(
            [
                own[problems, picked] if own is not None else np.full(len(problems), -1)
                for own, picked in zip(self.options, chosen, strict=True)
            ]
        )


class Tables:
    """All tables of a batch; made once, weighted as often as wanted."""

    def __init__(
        self,
        network: Network,
        works: WorkPrices,
        cluster: Cluster,
        shape: Shape,
        candidates: Sequence[Candidate],
        wishes: Wishes,
    ) -> None:
        self.network, self.works, self.shape, self.candidates = network, works, shape, tuple(candidates)
        self.cluster = cluster
        self.graph = network.blocks.graph
        self.num_micro = np.array([candidate.num_micro for candidate in candidates])
        self.schedule = candidates[0].schedule
        """Of all of them."""
        num_groups = shape.num_stages
        self.weights = np.array([self.schedule.weight(num_groups, m) for m in self.num_micro.tolist()])
        self.hidden = np.array([self.schedule.hidden(num_groups, m) for m in self.num_micro.tolist()])
        """The shares of weight-gradients that cost nothing."""
        self.mesh = _mesh(cluster, shape, candidates, by_volume=works.by_volume)
        self.options = tuple(
            option
            for option in storage_options(len(shape.sizes), wishes.storage)
            if option.kind != "zero3" or not self.schedule.is_split
        )
        self._wishes = wishes
        self._own: dict[object, tuple[Array, Array, Array, Array, ParameterTables | None]] = {}
        self.strategies: dict[Key, Strategies] = {}
        self.layouts: dict[Key, Rows] = {}
        self.unary: dict[Key, UnaryTables] = {}
        self.pairs: dict[Key, PairTables] = {}
        self._converted: dict[object, tuple[Array, Array]] = {}
        self.is_possible = True
        """Has every block a strategy whose splits are even?"""
        self._fill()

    # -- filling

    def _fill(self) -> None:
        blocks = self.network.blocks.blocks
        for key, variable in self.network.representatives.items():
            if not variable.tensor:
                self.strategies[key] = block_strategies(
                    blocks[variable.block], self.shape, self._wishes.pins, everywhere=self.works.by_volume
                )
        self.is_possible = all(len(strategies) for strategies in self.strategies.values())
        if not self.is_possible:
            return
        for key, variable in self.network.representatives.items():
            if variable.tensor:
                readers = [self._any_states(reader, variable.tensor) for reader in self._readers(variable)]
                self.layouts[key] = junction_layouts(self.graph, variable.tensor, readers, self.shape)
        for key, variable in self.network.representatives.items():
            self.unary[key] = self._junction(variable) if variable.tensor else self._block(variable)
        for key, edge in self.network.distinct_edges.items():
            self.pairs[key] = self._pair(edge)

    def _readers(self, junction: Variable) -> list[Variable]:
        variables, of_block = self.network.variables, self.network.of_block
        return [variables[of_block[block]] for block in self.network.readers[junction.number]]

    def _any_states(self, reader: Variable, tensor: str) -> Rows:
        """Its states under all strategies, pinned or not: a plan, which knows no pins, has the same junctions."""
        if not self._wishes.pins:
            return self._read_states(reader, tensor)
        block = self.network.blocks.blocks[reader.block]
        strategies = block_strategies(block, self.shape, everywhere=self.works.by_volume)
        return boundary_states(self.graph, block, strategies, tensor)

    def _read_states(self, reader: Variable, tensor: str) -> Rows:
        block = self.network.blocks.blocks[reader.block]
        return boundary_states(self.graph, block, self.strategies[reader.key], tensor)

    def num_choices(self, key: Key) -> int:
        return len(self.strategies[key]) if key in self.strategies else len(self.layouts[key])

    def _block(self, variable: Variable) -> UnaryTables:
        block, strategies = self.network.blocks.blocks[variable.block], self.strategies[variable.key]
        forward, backward, saved, peak, parameters = self._own_tables(block, strategies)
        for tensor in self._counted(block):
            states = boundary_states(self.graph, block, strategies, tensor)
            saved = saved + self._local_bytes(tensor, states, block)
        return UnaryTables(
            forward=forward,
            backward=backward,
            saved_bytes=saved,
            leaving_bytes=self._leaving_bytes(variable),
            peak_bytes=peak,
            parameters=parameters,
        )

    def _own_tables(
        self, block: Block, strategies: Strategies
    ) -> tuple[Array, Array, Array, Array, ParameterTables | None]:
        """What does not depend on a block's neighbours: once for all blocks with equal work and strategies."""
        blocks = self.network.blocks
        parameters_key = tuple(
            (
                self.graph.tensors[name].sizes,
                len(blocks.consumers[name]) == 1,
                *(d.shards.get(name) for d in block.dims),
            )
            for name in block.parameters
        )
        key = (self.works.class_of(block), strategies.dims.tobytes(), parameters_key)
        if key in self._own:
            return self._own[key]
        distinct, where = np.unique(strategies.pieces, axis=0, return_inverse=True)
        figures = np.full((4, len(self.candidates), len(distinct)), np.inf)
        by_micro = {m: works_of(self.works, block, distinct, m) for m in dict.fromkeys(self.num_micro.tolist())}
        for g, micro in enumerate(self.num_micro.tolist()):
            figures[:, g] = by_micro[micro]
        forward, backward, saved, peak = (figures[i][:, where.reshape(-1)] for i in range(4))
        parameters = None
        if block.parameters:
            parameters = parameter_tables(
                blocks, block, strategies, self.mesh, self.options,
                np.where(np.isfinite(forward), forward, 0.0), np.where(np.isfinite(backward), backward, 0.0),
                self.num_micro, in_pipeline=self.shape.num_stages > 1,
            )  # fmt: skip
        if self.hidden.any():
            backward = backward - self.hidden[:, None] * self._weight_seconds(block, distinct)[:, where.reshape(-1)]
        self._own[key] = (forward, backward, saved, peak, parameters)
        return self._own[key]

    def _weight_seconds(self, block: Block, pieces: Rows) -> Array:
        """Seconds of the weight-gradients of a block: (problems, rows of pieces)."""
        batch = next((d for d, dim in enumerate(block.dims) if dim.name == BATCH_DIM), -1)
        found = np.zeros((len(self.candidates), len(pieces)))
        if not block.parameters:
            return found
        for g, micro in enumerate(self.num_micro.tolist()):
            for i, row in enumerate(pieces.tolist()):
                if batch >= 0:
                    row[batch] *= micro
                if batch < 0 or block.dims[batch].size % row[batch] == 0:
                    found[g, i] = self.works.weight_seconds(block, tuple(row))
        return found

    def _leaving_bytes(self, variable: Variable) -> Array:
        producer = self.network.blocks.blocks[variable.block]
        total = np.zeros((len(self.candidates), self.num_choices(variable.key)))
        for tensor in self.network.leaving(variable):
            total = total + self._local_bytes(tensor, self._read_states(variable, tensor), producer)
        return total

    def _counted(self, block: Block) -> list[str]:
        """The tensors whose kept bytes count with this block: outputs that it keeps, and inputs that nobody else
        does."""
        kept, blocks = self.works.kept(block), self.network.blocks
        own = [tensor for tensor in block.outputs if tensor in kept.outputs]
        for tensor in block.inputs:
            producer = blocks.blocks[blocks.producer[tensor]]
            is_only = len(blocks.consumers[tensor]) == 1
            if tensor in kept.inputs and is_only and tensor not in self.works.kept(producer).outputs:
                own.append(tensor)
        return own

    def _junction(self, variable: Variable) -> UnaryTables:
        """A junction keeps its tensor if a reader does and the producer does not."""
        blocks, rows = self.network.blocks, self.layouts[variable.key]
        producer = blocks.blocks[variable.block]
        zeros = np.zeros((len(self.candidates), len(rows)))
        readers = [blocks.blocks[reader.block] for reader in self._readers(variable)]
        is_kept = any(variable.tensor in self.works.kept(reader).inputs for reader in readers)
        saved = zeros
        if is_kept and variable.tensor not in self.works.kept(producer).outputs:
            saved = self._local_bytes(variable.tensor, rows, producer)
        return UnaryTables(
            forward=zeros,
            backward=zeros,
            saved_bytes=saved,
            leaving_bytes=self._leaving_bytes(variable),
            peak_bytes=zeros,
        )

    def whole_bytes(self, tensor: str, producer: Block) -> Array:
        """Bytes of a tensor in a micro-batch, one number a problem."""
        value = self.graph.tensors[tensor]
        num_bytes = float(np.prod([float(n) for n in value.sizes])) * value.item_bytes * value.density
        dim = producer.dim(BATCH_DIM)
        is_timed = dim is not None and tensor in dim.shards
        return num_bytes / self.num_micro if is_timed else np.full(len(self.candidates), num_bytes)

    def _local_bytes(self, tensor: str, rows: Rows, block: Block) -> Array:
        num_factors = len(self.graph.tensors[tensor].sizes)
        return self.whole_bytes(tensor, block)[:, None] / split_of(rows, self.shape.sizes, num_factors)[None, :]

    def _pair(self, edge: Edge) -> PairTables:
        found = [self._conversion(edge, tensor) for tensor in edge.tensors]
        return PairTables(forward=sum_of([there for there, _ in found]), backward=sum_of([back for _, back in found]))

    def _conversion(self, edge: Edge, tensor: str) -> tuple[Array, Array]:
        """Of one tensor; computed for distinct layouts, and once for all edges that are alike."""
        source, target = self.network.variables[edge.source], self.network.variables[edge.target]
        blocks = self.network.blocks.blocks
        producer = blocks[source.block]
        produced = self.layouts[source.key] if source.tensor else self._read_states(source, tensor)
        consumed = self.layouts[target.key] if target.tensor else self._read_states(target, tensor)
        value = self.graph.tensors[tensor]
        carries = value_carries(self.graph, tensor, blocks[target.block] if not target.tensor else None)
        rows_from, from_where = np.unique(produced, axis=0, return_inverse=True)
        rows_to, to_where = np.unique(consumed, axis=0, return_inverse=True)
        whole = self.whole_bytes(tensor, producer)
        key = (rows_from.tobytes(), rows_to.tobytes(), len(value.sizes), whole.tobytes(), carries, producer.is_source,
               bool(source.tensor), bool(value.rows))  # fmt: skip
        if key not in self._converted:
            there, back = conversion_seconds(
                self.mesh,
                rows_from,
                rows_to,
                len(value.sizes),
                whole,
                is_differentiable=carries,
                takes_partial=producer.is_source and not source.tensor,
                is_junction=bool(source.tensor),
            )
            self._converted[key] = (there, back)
        there, back = self._converted[key]
        at = np.ix_(np.arange(len(whole)), from_where.reshape(-1), to_where.reshape(-1))
        return there[at], back[at]

    # -- between stages

    def send_seconds(self, g: int, num_bytes: float) -> float:
        """From a device of one stage to one of the next."""
        placement = self.candidates[g].placement
        row = dict(zip(placement.axes, placement.matrix, strict=True)).get(STAGES, ())
        levels = [level for level, size in zip(self.cluster.levels, row, strict=False) if size > 1]
        if not levels:
            return 0.0
        link = levels[-1].link
        rate = link.bandwidth_bytes_per_second * link.efficiency_of("exchange", 2)
        return link.hop_of("exchange") + num_bytes / rate

    # -- weighing

    def costs(
        self,
        price_of_memory: Array,
        kept_micro: Array,
        problems: Indices,
        *,
        recompute: bool = False,
        most_peak: Array | None = None,
    ) -> Costs:
        """The sum J of some problems, for a price of memory and a number of micro-batches kept, one number a problem.

        `recompute`: as an alternative, where allowed. `most_peak`: choices with a larger peak are forbidden.
        """
        network = self.network
        peaks = np.full(len(problems), np.inf) if most_peak is None else most_peak
        weighed = self._weighed(price_of_memory, kept_micro, problems, peaks, recompute=recompute)
        weights = self.weights[problems][:, None, None]
        pairs = {key: weights * (p.forward[problems] + p.backward[problems]) for key, p in self.pairs.items()}
        again = {key: pairs[key] + weights * p.forward[problems] for key, p in self.pairs.items()} if recompute else {}
        segments = []
        for segment in network.chain:
            numbers = [weighed.kept[v.key] for v in segment.variables]
            alternative: tuple[Table, ...] = ()
            if recompute and segment.is_repeated:
                others = [weighed.recomputed[v.key] for v in segment.variables]
                alternative = _tables(segment, others, again)
            segments.append(
                SegmentTables(
                    first=segment.variables[0].number,
                    tables=_tables(segment, numbers, pairs),
                    lives_on=segment.lives_on,
                    last_touched=segment.last_touched,
                    kind=(segment.kind, segment.is_repeated),
                    alternative=alternative,
                )
            )
        return Costs(
            segments=tuple(segments),
            sizes={v.number: self.num_choices(v.key) for v in network.variables},
            options=tuple(weighed.options.get(v.key) for v in network.variables),
        )

    def _weighed(
        self, price: Array, kept_micro: Array, problems: Indices, most_peak: Array, *, recompute: bool
    ) -> "_Weighed":
        """For every key what its choices add to J, and the best way to store parameters."""
        weights = self.weights[problems]
        found = _Weighed({}, {}, {})
        for key, unary in self.unary.items():
            forward = weights[:, None] * unary.forward[problems]
            cost = forward + weights[:, None] * unary.backward[problems]
            room = most_peak[:, None] - unary.peak_bytes[problems]
            cost = np.where(room < 0, np.inf, cost)
            if unary.parameters is not None:
                own = unary.parameters
                ways = weights[None, :, None] * own.micro_seconds[:, problems] + own.step_seconds[:, problems]
                ways = ways + price[None, :, None] * own.stored_bytes[:, problems]
                ways = np.where(own.working_bytes[:, problems] > room[None], np.inf, ways)
                found.options[key] = ways.argmin(axis=0)
                cost = cost + ways.min(axis=0)
            held = (price * kept_micro)[:, None]
            found.kept[key] = cost + held * unary.saved_bytes[problems]
            if recompute:
                found.recomputed[key] = cost + forward + held * unary.leaving_bytes[problems]
        return found


@dataclass(frozen=True, eq=False, slots=True)
class _Weighed:
    """By keys: J of every choice, the same where the segment is recomputed, and the ways to store parameters."""

    kept: dict[Key, Array]
    recomputed: dict[Key, Array]
    options: dict[Key, Indices]


def _tables(segment: ChainSegment, numbers: Sequence[Array], pairs: Mapping[Key, Array]) -> tuple[Table, ...]:
    found = [Table((v.number,), own) for v, own in zip(segment.variables, numbers, strict=True)]
    for edge in segment.edges:
        pair = pairs[edge.key]
        is_ordered = edge.source < edge.target
        ends = (edge.source, edge.target) if is_ordered else (edge.target, edge.source)
        found.append(Table(ends, pair if is_ordered else pair.swapaxes(1, 2)))
    return tuple(found)


def works_of(works: WorkPrices, block: Block, pieces: Rows, micro: int) -> NDArray[np.float64]:
    """Forward and backward seconds, saved and peak bytes, for rows of pieces; infinite where the batch does not
    divide."""
    found = np.full((4, len(pieces)), np.inf)
    found[2:] = 0.0
    for i, row in _possible_rows(block, pieces, micro):
        work = works.work(block, row)
        found[:, i] = (work.forward_seconds, work.backward_seconds, work.saved_bytes, work.peak_bytes)
    return found


def _possible_rows(block: Block, pieces: Rows, micro: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Rows of pieces into which so many micro-batches divide, these included."""
    batch = next((d for d, dim in enumerate(block.dims) if dim.name == BATCH_DIM), -1)
    for i, row in enumerate(pieces.tolist()):
        if batch >= 0:
            row[batch] *= micro
            if block.dims[batch].size % row[batch]:
                continue
        yield i, tuple(row)


def computing_seconds(
    network: Network, works: WorkPrices, shape: Shape, wishes: Wishes, micro_batches: Sequence[int]
) -> list[float]:
    """No plan of a shape computes a micro-batch in fewer seconds, all stages together: each block with the strategy
    that computes fastest."""
    totals = np.zeros(len(micro_batches))
    for key, numbers, _ in network.places_of_keys:
        variable = network.representatives[key]
        if variable.tensor:
            continue
        block = network.blocks.blocks[variable.block]
        strategies = block_strategies(block, shape, wishes.pins, everywhere=works.by_volume)
        if not len(strategies):
            return [float("inf")] * len(micro_batches)
        pieces = np.unique(strategies.pieces, axis=0)
        for i, micro in enumerate(micro_batches):
            least = min(
                (sum(works.seconds(block, row)) for _, row in _possible_rows(block, pieces, micro)), default=np.inf
            )
            totals[i] += len(numbers) * least
    return [float(seconds) for seconds in totals]


def sum_of(arrays: Sequence[Array]) -> Array:
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total


def value_carries(graph: Graph, tensor: str, reader: Block | None) -> bool:
    """Does a cotangent come back along this edge?"""
    is_differentiable = graph.is_differentiable
    if not is_differentiable(tensor):
        return False
    return reader is None or any(is_differentiable(name) for name in reader.outputs)


def _mesh(cluster: Cluster, shape: Shape, candidates: Sequence[Candidate], *, by_volume: bool) -> MeshBatch:
    known: dict[object, tuple[AxisCurves, ...]] = {}
    rows = []
    for candidate in candidates:
        key = candidate.placement.matrix
        if key not in known:
            found = axis_curves(cluster, candidate.placement, by_volume=by_volume)
            curves = dict(zip(candidate.placement.axes, found, strict=True))
            known[key] = tuple(curves[name] for name in shape.names)
        rows.append(known[key])
    return MeshBatch.of(rows, cluster.device, by_volume=by_volume)
