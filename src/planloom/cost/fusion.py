"""What a device launches for one phase of a run: its operators' kernels, fused where a compiler would.

Compiled (`fused`), fusible operators between products become one kernel: let the level of an operator be the number of
kernels of other sorts on the longest path to it (or as late as its readers allow); fusible operators that are joined by
tensors and have one level are a group. Not compiled, each is a group of its own; so are always those on ragged tensors
(rows of experts), which are not compiled. A group reads every tensor from
outside once and writes what others read, or the run gives away. What the backward needs of its inside is computed again
from its inputs, as compilers choose to.

The backward of a group reads the cotangents of what it wrote and the inputs that its derivatives depend on, and writes
the cotangents of its inputs; parameters that it spreads over rows (weights of norms, biases) need sums over all rows, a
kernel each. A group that only adds passes cotangents on. The backward of a product y[m, n] = x[m, k] w[k, n] is a
product (m, k, n) for x and a product (k, n, m) for w. Where a tensor has several readers, or its parts have, their
cotangents are put together: in the kernel that reads them if its producer is fusible, else by one more (not compiled:
one more for each).

The phase `input_gradient` is the backward without what only parameters need.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from planloom.cost.kernels import (
    Kernel,
    Movement,
    Product,
    Sort,
    attention_of,
    product_of,
    product_sides,
    rows_backward,
    rows_forward,
    sort_of,
)
from planloom.graph import Graph
from planloom.graph.flops import has_sinks
from planloom.program import Operand, Operation, Run

RunPhase = Literal["forward", "backward", "input_gradient"]

Key = tuple[str, int]
"""A tensor as it is read: its name, and the slot that it comes from or -1."""


def run_kernels(
    graph: Graph, run: Run, operations: Sequence[Operation], phase: RunPhase, *, fused: bool
) -> list[Kernel]:
    """All kernels of one phase, in no order."""
    flow = _Flow(graph, run, operations, fused=fused)
    if phase == "forward":
        return list(flow.forward())
    return list(flow.backward(with_parameters=phase == "backward"))


@dataclass(slots=True)
class _Node:
    """An operation, the roots of its inputs, what it makes, and where it is launched."""

    operation: Operation
    sort: Sort
    reads: tuple[Key, ...]
    makes: tuple[Key, ...]
    is_fused: bool
    """May it be in a group with others?"""
    level: int = 0
    group: int = -1

    @property
    def result(self) -> Operand:
        return self.operation.outputs[0]


def _key(operand: Operand) -> Key:
    return (operand.tensor, -1 if operand.slot is None else operand.slot)


class _Flow:
    """A run's operations as producers and readers of *roots*: tensors that views lead back to."""

    def __init__(self, graph: Graph, run: Run, operations: Sequence[Operation], *, fused: bool) -> None:
        self.graph, self.run, self.fused = graph, run, fused
        self.nodes: list[_Node] = []
        self.root_of: dict[Key, Key] = {}
        self.bytes_of: dict[Key, int] = {}
        """Of roots."""
        self.producer: dict[Key, int] = {}
        self.readers: dict[Key, dict[int, int]] = {}
        """Nodes that read a root or a part of it, with the bytes that they read."""
        for operation in operations:
            self._add(operation)
        self.given_away = {self.root_of.get(key, key) for key in ((slot.tensor, -1) for slot in run.outputs)}
        self._set_levels()
        self.groups = self._groups()

    def _add(self, operation: Operation) -> None:
        sort = sort_of(self.graph, operation)
        reads = tuple(self._root(operand) for operand in operation.inputs)
        makes = tuple(map(_key, operation.outputs))
        if sort == "view":
            self.root_of.update(dict.fromkeys(makes, reads[0]))
            return
        index = len(self.nodes)
        self.nodes.append(_Node(operation, sort, reads, makes, self.fused and self._is_fused(operation, sort)))
        for root, operand in zip(reads, operation.inputs, strict=True):
            sizes = self.readers.setdefault(root, {})
            sizes[index] = min(sizes.get(index, 0) + operand.num_bytes, self.bytes_of[root])
        for key, operand in zip(makes, operation.outputs, strict=True):
            self.producer[key], self.bytes_of[key] = index, operand.num_bytes

    def _is_fused(self, operation: Operation, sort: Sort) -> bool:
        tensors = self.graph.tensors
        return sort == "fusible" and not any(tensors[o.tensor].rows for o in (*operation.inputs, *operation.outputs))

    def _root(self, operand: Operand) -> Key:
        key = _key(operand)
        root = self.root_of.get(key, key)
        self.bytes_of.setdefault(root, operand.num_bytes)  # from outside the run, if it is not there
        return root

    # -- groups

    def _set_levels(self) -> None:
        level_of: dict[Key, int] = {}
        for node in self.nodes:
            node.level = max((level_of.get(root, 0) for root in node.reads), default=0)
            level_of.update(dict.fromkeys(node.makes, node.level + (node.sort != "fusible")))
        for node in reversed(self.nodes):
            later = [self.nodes[i].level for key in node.makes for i in self.readers.get(key, ())]
            if node.sort == "fusible" and later and self.given_away.isdisjoint(node.makes):
                node.level = min(later)

    def _groups(self) -> list[list[int]]:
        """The nodes of every group, in order."""
        first = list(range(len(self.nodes)))

        def find(i: int) -> int:
            while first[i] != i:
                first[i] = first[first[i]]
                i = first[i]
            return i

        for key, maker in self.producer.items():
            made = self.nodes[maker]
            for reader in self.readers.get(key, ()) if made.is_fused else ():
                if self.nodes[reader].is_fused and self.nodes[reader].level == made.level:
                    first[find(reader)] = find(maker)
        groups: dict[int, list[int]] = {}
        for i, node in enumerate(self.nodes):
            if node.sort == "fusible":
                groups.setdefault(find(i), []).append(i)
        for number, members in enumerate(groups.values()):
            for i in members:
                self.nodes[i].group = number
        return list(groups.values())

    def _is_inside(self, reader: int, root: Key) -> bool:
        """Did the reader's own group make this root?"""
        maker, group = self.producer.get(root), self.nodes[reader].group
        return maker is not None and group >= 0 and self.nodes[maker].group == group

    def _sources(self, members: Iterable[int]) -> dict[Key, int]:
        """Roots that a group reads and did not make, with the bytes."""
        found: dict[Key, int] = {}
        for i in members:
            for root in dict.fromkeys(self.nodes[i].reads):
                if not self._is_inside(i, root):
                    found[root] = min(found.get(root, 0) + self.readers[root][i], self.bytes_of[root])
        return found

    def _results(self, members: Iterable[int]) -> list[Key]:
        """What a group made that others read or the run gives away."""
        return [
            key
            for i in members
            for key in self.nodes[i].makes
            if key in self.given_away or any(not self._is_inside(r, key) for r in self.readers.get(key, ()))
        ]

    # -- forward

    def forward(self) -> Iterator[Kernel]:
        for node in self.nodes:
            if node.sort == "product":
                yield product_of(self.graph, node.operation)
            elif node.sort == "attention":
                yield attention_of(self.graph, node.operation, "forward")
                if has_sinks(self.graph.ops[node.operation.op]):  # results are made smaller by the sinks' share
                    yield Movement(2 * node.result.num_bytes)
            elif node.sort == "rows":
                yield rows_forward(self.graph, node.operation)
        for members in self.groups:
            written = sum(self.bytes_of[key] for key in self._results(members))
            yield Movement(sum(self._sources(members).values()) + written)

    # -- backward

    @cached_property
    def _parameters(self) -> frozenset[Key]:
        """Roots that are parameters or made of them alone."""
        names = self.graph.parameter_names
        found = {root for root in self.bytes_of if root[0] in names and root not in self.producer}
        for node in self.nodes:
            if node.reads and found.issuperset(node.reads):
                found.update(node.makes)
        return frozenset(found)

    def _carries(self, root: Key) -> bool:
        """Is there a cotangent of this root?"""
        name, slot = root
        if slot >= 0:
            return self.run.inputs[slot].cotangent is not None
        return root in self.producer and self.graph.is_differentiable(name)

    def backward(self, *, with_parameters: bool) -> Iterator[Kernel]:
        wanted = {root for root in self.bytes_of if self._carries(root)}
        if not with_parameters:
            wanted -= self._parameters
        for node in self.nodes:
            if node.sort != "fusible" and not wanted.isdisjoint(node.makes):
                yield from self._single(node, wanted)
        for members in self.groups:
            yield from self._group(members, wanted)
        for root in self.bytes_of:  # a set has another order in every process, and sums of seconds another last digit
            if root in wanted:
                yield from self._meeting(root)

    def _single(self, node: _Node, wanted: set[Key]) -> Iterator[Kernel]:
        """The backward of a product, of attention, or of an operator on rows."""
        operation = node.operation
        moving = [operand for root, operand in zip(node.reads, operation.inputs, strict=True) if root in wanted]
        if not moving:
            return
        if node.sort == "product":
            forward = product_of(self.graph, operation)
            batch, m, n, k = forward.shape
            left, right, bias = product_sides(self.graph, operation)
            for side, shape in ((left, (batch, m, k, n)), (right, (batch, k, n, m))):
                if node.reads[side] in wanted:
                    yield Product(shape, forward.dtype, forward.item_bytes, forward.is_regular)
            if bias is not None and node.reads[bias] in wanted:
                yield Movement(node.result.num_bytes + operation.inputs[bias].num_bytes)
        elif node.sort == "attention":  # first the sums of results × cotangents
            yield Movement(2 * node.result.num_bytes)
            yield attention_of(self.graph, operation, "backward")
            if has_sinks(self.graph.ops[operation.op]):  # those sums once more, for the sinks
                yield Movement(2 * node.result.num_bytes)
        else:
            yield rows_backward(self.graph, operation, moving)

    def _group(self, members: Sequence[int], wanted: set[Key]) -> Iterator[Kernel]:
        written, sources = set(self._results(members)), self._sources(members)
        results = written & wanted
        if not results or wanted.isdisjoint(sources):
            return
        summed: set[Key] = set()
        for i in members:
            parameters = self._summed(self.nodes[i], wanted)
            if parameters:
                needed = self._needed([i], written, wanted)
                sums = sum(self.bytes_of[root] for root in parameters)
                yield Movement(self.nodes[i].result.num_bytes + sum(needed.values()) + sums)
                summed.update(parameters)
        outgoing = self._written_back(members, sources, wanted.intersection(sources) - summed)
        incoming = {key: sum(self._cotangents(key)) for key in results}
        passes = all(self._passes_on(self.nodes[i]) for i in members)
        if outgoing and not (passes and all(size <= self.bytes_of[key] for key, size in incoming.items())):
            needed = self._needed(members, written, wanted)
            yield Movement(sum(incoming.values()) + sum(needed.values()) + outgoing)

    def _written_back(self, members: Iterable[int], sources: Mapping[Key, int], targets: set[Key]) -> int:
        """Bytes of the cotangents of these inputs; what an addition passes on to several is one tensor."""
        readers: dict[Key, list[int]] = {}
        for i in members:
            for root in targets.intersection(self.nodes[i].reads):
                readers.setdefault(root, []).append(i)
        total, passed = 0, set()
        for root, nodes in readers.items():
            if len(nodes) == 1 and self._passes_on(self.nodes[nodes[0]]):
                passed.add(nodes[0])
            else:
                total += sources[root]
        return total + sum(self.nodes[i].result.num_bytes for i in passed)

    def _summed(self, node: _Node, wanted: set[Key]) -> list[Key]:
        """Parameters that a fusible operator spreads over rows: their cotangents are sums over them."""
        num_elements = prod(node.result.shape)
        return [
            root
            for root, operand in zip(node.reads, node.operation.inputs, strict=True)
            if root in wanted and root in self._parameters and prod(operand.shape) < num_elements
        ]

    def _needed(self, members: Iterable[int], written: set[Key], wanted: set[Key]) -> dict[Key, int]:
        """What a group read or has `written` from which the values in its members' derivatives are computed again."""
        found: dict[Key, int] = {}
        waiting = [(i, at) for i in members for at in self._values(self.nodes[i], wanted)]
        seen: set[int] = set()
        while waiting:
            i, at = waiting.pop()
            root = self.nodes[i].reads[at]
            maker = self.producer.get(root)
            if maker is None or root in written or not self._is_inside(i, root):
                found[root] = max(found.get(root, 0), self.readers[root][i])
            elif maker not in seen:
                seen.add(maker)
                waiting += [(maker, other) for other in range(len(self.nodes[maker].reads))]
        return found

    def _values(self, node: _Node, wanted: set[Key]) -> set[int]:
        """The places of inputs whose values the derivative of a fusible operator needs."""
        moving = [at for at, root in enumerate(node.reads) if root in wanted]
        every = set(range(len(node.reads)))
        rule = self.graph.ops[node.operation.op].rule
        if rule is None or node.operation.is_original:
            return every if moving else set()
        needed: set[int] = set()
        for at in moving:
            needed |= next((every.difference(group) for group in rule.linear if at in group), every)
        return needed

    def _passes_on(self, node: _Node) -> bool:
        """Is the cotangent of each input that of the result, unchanged?"""
        result, inputs = node.result, node.operation.inputs
        if node.operation.is_original or node.operation.target != "aten.add.Tensor" or len(inputs) < 2:
            return False
        return all(operand.shape == result.shape and operand.dtype == result.dtype for operand in inputs)

    def _cotangents(self, root: Key) -> list[int]:
        """Bytes of what every kernel that reads a root, and what the run gives away, sends back to its producer."""
        senders: dict[int, int] = {}
        for i, num_bytes in self.readers.get(root, {}).items():
            node = self.nodes[i]
            if self._is_inside(i, root) or not any(self.graph.is_differentiable(name) for name, _ in node.makes):
                continue
            sender = i if node.group < 0 else -1 - node.group
            senders[sender] = min(senders.get(sender, 0) + num_bytes, self.bytes_of[root])
        return [*senders.values(), *([self.bytes_of[root]] if root in self.given_away else [])]

    def _meeting(self, root: Key) -> Iterator[Kernel]:
        """Cotangents of several readers, or of parts, become one, unless the kernel that reads them does that."""
        sizes, whole = self._cotangents(root), self.bytes_of[root]
        if not sizes or sizes == [whole]:
            return
        maker = self.producer.get(root)
        if maker is not None and self.nodes[maker].is_fused:
            return
        if self.fused or len(sizes) == 1:
            yield Movement(sum(sizes) + whole)
        else:
            yield from (Movement(3 * whole) for _ in sizes[1:])
