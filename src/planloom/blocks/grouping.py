"""Group operators into blocks.

A block is a convex group of operators in which every dim touches every contraction. Operators are visited in order:

- a contraction with a parameter (a linear map, an embedding) is a block of its own: a layout can change before and
after
  it (2-D tensor parallel needs it after, sequence parallel before);
- a view joins the block of its producer where no dim of that block is lost, else it counts as pointwise;
- pointwise operators and reductions join all *open* blocks of their producers: those whose contractions, if any, are
  reductions that this operator does not follow. A reduction's own dims must survive the merger.

So in a Llama layer q, k, v, attention core, output projection, gate, up, activation, down, norm statistics (with the
residual sum before them) and norm application are separate blocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from math import prod

from planloom.blocks.dims import (
    BlockDim,
    factor_classes,
    flow_labels,
    label_of,
    name_dim,
    of_loss,
    rule_of,
    split_states,
)
from planloom.blocks.rings import Ring, find_ring, with_one_sequence
from planloom.graph import Graph

# Tokens to experts and back: a layout may change on either side, as at a contraction with a parameter.
_ALONE = ("planloom.dispatch.default", "planloom.combine.default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """`inputs` are tensors of other blocks; parameters and given tensors are listed apart."""

    index: int
    name: str
    ops: tuple[int, ...]
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    given: tuple[str, ...]
    outputs: tuple[str, ...]
    dims: tuple[BlockDim, ...]
    is_source: bool = False
    """Reads no activations: an embedding, a position table, and what is made of parameters and constants alone."""
    ring: Ring | None = None
    """How it may be split along its sequence, if it is attention."""

    @property
    def all_dims(self) -> tuple[BlockDim, ...]:
        """Its dims, and that of its ring."""
        return self.dims if self.ring is None else (*self.dims, self.ring.dim)

    def dim(self, name: str) -> BlockDim | None:
        return next((dim for dim in self.all_dims if dim.name == name), None)


@dataclass(frozen=True, kw_only=True)
class BlockGraph:
    """A graph and its blocks, producers first."""

    graph: Graph
    blocks: tuple[Block, ...]

    @cached_property
    def found(self) -> dict[str, object]:
        """What is found once and asked for often: segments."""
        return {}

    @cached_property
    def producer(self) -> dict[str, int]:
        return {name: block.index for block in self.blocks for name in block.outputs}

    @cached_property
    def consumers(self) -> dict[str, tuple[int, ...]]:
        """For every tensor that crosses a block's boundary, the blocks that read it, in order."""
        found: dict[str, list[int]] = {}
        for block in self.blocks:
            for name in (*block.inputs, *block.parameters):
                found.setdefault(name, []).append(block.index)
        return {name: tuple(indices) for name, indices in found.items()}


def find_blocks(graph: Graph) -> BlockGraph:
    """Every operator in exactly one block."""
    grouping = _Grouping(graph)
    for index in range(len(graph.ops)):
        grouping.visit(index)
    grouping.join_terms_of_loss()
    groups = grouping.ordered_groups()
    group_of = {op: i for i, members in enumerate(groups) for op in members}
    labels = flow_labels(graph)
    used: dict[str, int] = {}
    blocks: list[Block] = []
    constant: set[str] = set()
    """Tensors that no input changes."""
    one_sequence = with_one_sequence(graph)
    for i, members in enumerate(groups):
        name = _block_name(graph, members)
        used[name] = used.get(name, 0) + 1
        name = name if used[name] == 1 else f"{name}#{used[name]}"
        block = _block(graph, i, name, members, group_of, labels)
        is_constant = constant.issuperset(block.inputs) and not graph.given_from_inputs.intersection(block.given)
        constant.update(block.outputs if is_constant else ())
        ring = find_ring(one_sequence, members, block.outputs)
        blocks.append(replace(block, is_source=is_constant or not block.inputs, ring=ring))
    return BlockGraph(graph=graph, blocks=tuple(blocks))


class _Grouping:
    """Union of operators into groups; a group is named by one of its operators."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._parameters = graph.parameter_names
        self.group_of: dict[int, int] = {}
        self.members: dict[int, list[int]] = {}

    def visit(self, index: int) -> None:
        self.group_of[index], self.members[index] = index, [index]
        op = self.graph.ops[index]
        rule = rule_of(op)
        producers = self._producer_groups(index)
        if rule.kind == "contraction" and any(name in self._parameters for name in op.inputs):
            return
        if op.target in _ALONE or (rule.sizes and set(rule.sizes) == set(rule.fixed)):
            return
        if rule.kind == "view" and len(producers) == 1 and self._joins_as_view(producers[0], index):
            self._merge(producers[0], index)
            return
        for group in producers:
            if self._is_open(group, index) and self._keeps_dims([*self.members[group], *self._own(index)]):
                self._merge(group, index)

    def join_terms_of_loss(self) -> None:
        """One block for the terms of a loss and what adds them up: a sum over the batch is a sum of micro-batches."""
        made = self.graph.producer
        tail: set[int] = set()
        terms: set[int] = set()
        waiting = [made[self.graph.loss]]
        while waiting:
            index = waiting.pop()
            op = self.graph.ops[index]
            own = tuple(i for i, name in enumerate(op.inputs) if name in made)
            is_scalar = prod(self.graph.tensors[op.outputs[0]].shape) == 1
            is_sum = is_scalar and own in rule_of(op).linear and rule_of(op).kind != "contraction"
            (tail if is_sum else terms).add(index)
            waiting += [made[op.inputs[i]] for i in own] if is_sum else []
        groups = {self.group_of[i] for i in tail | terms}
        members = sorted(i for group in groups for i in self.members[group])
        if tail and all(rule_of(self.graph.ops[i]).kind == "contraction" for i in terms) and self._is_convex(members):
            first, *rest = sorted(groups)
            for group in rest:
                self._merge(first, group)

    def _own(self, index: int) -> list[int]:
        return self.members[self.group_of[index]]

    def _producer_groups(self, index: int) -> list[int]:
        return list(dict.fromkeys(self.group_of[i] for i in self._sources(index)))

    def _merge(self, group: int, index: int) -> None:
        absorbed = self.group_of[index]
        if absorbed == group:
            return
        members = sorted([*self.members[group], *self.members.pop(absorbed)])
        self.members[group] = members
        for member in members:
            self.group_of[member] = group

    def _joins_as_view(self, group: int, index: int) -> bool:
        members = [*self.members[group], index]
        return self._keeps_dims(members) and self._is_convex(members)

    def _is_open(self, group: int, index: int) -> bool:
        """May pointwise operators and reductions still join this group?"""
        contractions = [i for i in self.members[group] if rule_of(self.graph.ops[i]).kind == "contraction"]
        for i in contractions:
            op = self.graph.ops[i]
            if (
                any(name in self._parameters for name in op.inputs)
                or op.target in _ALONE
                or op.target.endswith("attention.default")
            ):
                return False
        own = self._own(index)
        followed = self._descendants(contractions, within={*self.members[group], *own})
        return not followed & set(own) and self._is_convex([*self.members[group], *own])

    def _descendants(self, sources: Iterable[int], within: set[int]) -> set[int]:
        reached = set(sources)
        for index in sorted(within):
            if any(i in reached for i in self._sources(index)):
                reached.add(index)
        return reached - set(sources)

    def _is_convex(self, members: list[int]) -> bool:
        """No path leaves these operators and returns to them, other groups taken as wholes."""
        inside, reached = set(members), set()
        changed = True
        while changed:
            changed = False
            for index in range(min(inside), max(inside) + 1):
                group = self.group_of[index]
                if index not in inside and group not in reached:
                    sources = self._sources(index)
                    if any(i in inside or self.group_of[i] in reached for i in sources):
                        reached.add(group)
                        changed = True
        return not any(self.group_of[i] in reached for index in inside for i in self._sources(index))

    def _sources(self, index: int) -> list[int]:
        """The operators that make the inputs of one."""
        made = self.graph.producer
        return [made[name] for name in self.graph.ops[index].inputs if name in made]

    def _keeps_dims(self, members: list[int]) -> bool:
        """Every legal factor of every contraction is a legal class of the whole, and touches every contraction."""
        members = sorted(members)
        contractions = [i for i in members if rule_of(self.graph.ops[i]).kind == "contraction"]
        if not contractions:
            return True
        for factors in factor_classes(self.graph, members):
            touching = {i for i, name in factors if name not in rule_of(self.graph.ops[i]).fixed}
            if not touching & set(contractions):
                continue
            if not touching >= set(contractions) or split_states(self.graph, members, (), factors) is None:
                return False
        return True

    def ordered_groups(self) -> list[list[int]]:
        """The groups in an order in which producers come first; ties by first operator."""
        waiting = {
            group: {self.group_of[i] for index in members for i in self._sources(index)} - {group}
            for group, members in self.members.items()
        }
        readers: dict[int, list[int]] = {}
        for group, needs in waiting.items():
            for source in needs:
                readers.setdefault(source, []).append(group)
        missing = {group: len(needs) for group, needs in waiting.items()}
        ready = [(self.members[group][0], group) for group, count in missing.items() if not count]
        heapify(ready)
        order: list[list[int]] = []
        while ready:
            _, group = heappop(ready)
            order.append(self.members[group])
            for reader in readers.get(group, ()):
                missing[reader] -= 1
                if not missing[reader]:
                    heappush(ready, (self.members[reader][0], reader))
        assert len(order) == len(waiting), "groups are not convex"
        return order


def _block(
    graph: Graph,
    index: int,
    name: str,
    members: list[int],
    group_of: dict[int, int],
    labels: dict[tuple[str, int], str],
) -> Block:
    produced = {tensor for i in members for tensor in graph.ops[i].outputs}
    read = dict.fromkeys(tensor for i in members for tensor in graph.ops[i].inputs if tensor not in produced)
    read_outside = {
        t for t in produced if t == graph.loss or any(group_of[i] != index for i in graph.readers.get(t, ()))
    }
    outputs = tuple(t for i in members for t in graph.ops[i].outputs if t in read_outside)
    return Block(
        index=index,
        name=name,
        ops=tuple(members),
        inputs=tuple(t for t in read if t in graph.producer),
        parameters=tuple(t for t in read if t in graph.parameter_names),
        given=tuple(t for t in read if t in graph.given_names),
        outputs=outputs,
        dims=_dims(graph, members, outputs, labels, joined="batch" if graph.loss in produced else ""),
    )


def _dims(
    graph: Graph, members: list[int], outputs: tuple[str, ...], labels: dict[tuple[str, int], str], *, joined: str
) -> tuple[BlockDim, ...]:
    """The dims of a block; factors with the label `joined` are one dim, though nothing but their name connects them."""
    found: list[tuple[str, int, dict[str, int], dict[str, str]]] = []
    classes = factor_classes(graph, members)
    if joined:
        named = [c for c in classes if label_of(graph, c, labels) == joined]
        together = [factor for c in named for factor in c]
        if len(named) > 1 and split_states(graph, members, outputs, together) is not None:
            classes = [together, *(c for c in classes if c not in named)]
    for factors in classes:
        states = split_states(graph, members, outputs, factors)
        if states is not None:
            index, factor = factors[0]
            size = rule_of(graph.ops[index]).sizes[factor]
            found.append((name_dim(graph, factors, states[0], labels), size, *states))  # type: ignore[arg-type]
    counts = {name: sum(1 for other in found if other[0] == name) for name, *_ in found}
    numbers: dict[str, int] = {}
    dims = []
    for name, size, shards, partials in found:
        number = numbers.setdefault(name, 0)
        numbers[name] += 1
        unique = f"{name}.{number}" if counts[name] > 1 else name
        dims.append(BlockDim(name=unique, size=size, shards=shards, partials=partials))  # type: ignore[arg-type]
    return tuple(dims)


def _block_name(graph: Graph, members: list[int]) -> str:
    """The module of the block's contraction (or last operator), and what it does there."""
    contractions = [i for i in members if rule_of(graph.ops[i]).kind == "contraction"]
    op = graph.ops[contractions[-1] if contractions else members[-1]]
    if contractions and op.module and any(name in graph.parameter_names for name in op.inputs):
        return op.module
    word = op.target.split(".")[1] if contractions else "apply"
    word = {
        "scaled_dot_product_attention": "attention",
        "sink_attention": "attention",
        "mean": "statistics",
        "sum": "statistics",
    }.get(word, word)
    if any(graph.loss in graph.ops[i].outputs for i in members):
        return "loss"
    if of_loss(graph, op):
        return f"loss:{word.removeprefix('statistic_')}"
    return f"{op.module or 'model'}:{word}"
