"""Memory of a compiled run: an estimate of what torch's compiler stores and saves.

The compiler fuses pointwise operators, sums and views into the kernels around them. *Stored* are results of products
and attention, what products read, and what leaves the run; all else exists inside kernels only. What is kept for the
backward is a minimum cut (the compiler's own rule): every tensor that a derivative is written with must be had in the
backward, either kept or computed again,

    min Σ bytes of kept tensors,    a tensor is computed again only if all inputs of its operator are had

where never computed again are products, attention and embeddings, results under a quarter of what they are computed
from (norm statistics), and what a product of the backward reads, which would have to be stored again.

Peaks follow from lifetimes of the stored tensors in the order of the operators and, for the backward, in the reverse:
a tensor that only kernels hold is read when the stored tensor that it flows into is made, and that one may take the
place of what was read last.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

PRODUCTS = frozenset(
    (
        "aten.linear.default", "aten.addmm.default", "aten.mm.default", "aten.bmm.default", "aten.matmul.default",
        "aten.einsum.default", "aten.scaled_dot_product_attention.default", "planloom.convolution",
        "planloom.grouped_linear.default", "planloom.grouped_bias.default", "planloom.dispatch.default",
        "planloom.combine.default", "aten.cumsum.default", "planloom.topk", "planloom.sink_attention.default",
    )
)  # fmt: skip
"""Operators that the compiler calls as they are: products, and those of ragged tensors, which stay eager."""

_SMALL = 4
"""A result whose inputs are this many times larger is kept, not computed again (partitioners.py of PyTorch 2.13)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedTensor:
    """A tensor of the forward: its bytes, what it is computed from, and by which kind of operator.

    `is_lookup`: rows of a table; `is_sum`: of two tensors, whose cotangents are that of the sum; `is_input`: the run is
    given it; `needs`: what the derivative of its operator is written with.
    """

    num_bytes: int
    inputs: tuple[str, ...] = ()
    is_product: bool = False
    is_lookup: bool = False
    is_sum: bool = False
    is_input: bool = False
    needs: tuple[str, ...] = ()
    carries_cotangent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedMemory:
    """Names of the tensors that are kept, and peaks."""

    kept: frozenset[str]
    forward_peak_bytes: int
    backward_peak_bytes: int


def fused_memory(tensors: Mapping[str, FusedTensor], outputs: Sequence[str]) -> FusedMemory:
    """`tensors` in the order in which the run makes them, its inputs first."""
    kept = _kept(tensors, outputs)
    return FusedMemory(
        kept=kept,
        forward_peak_bytes=_forward_peak(tensors, outputs, kept),
        backward_peak_bytes=_backward_peak(tensors, outputs, kept),
    )


# -- what is kept


def _kept(tensors: Mapping[str, FusedTensor], outputs: Sequence[str]) -> frozenset[str]:
    needed = {name for tensor in tensors.values() for name in tensor.needs}
    read_by_products = {name for tensor in tensors.values() if tensor.is_product for name in tensor.needs}
    cut = _Cut()
    for name, tensor in tensors.items():
        cut.add(f"{name} in", f"{name} out", 2 * max(1, tensor.num_bytes) - (name in outputs))  # of equals, an output
        size = sum(tensors[source].num_bytes for source in tensor.inputs)
        is_small = bool(tensor.inputs) and _SMALL * tensor.num_bytes < size
        if tensor.is_input or tensor.is_product or tensor.is_lookup or is_small or name in read_by_products:
            cut.add("source", f"{name} in", _UNLIMITED)
        else:
            for source in tensor.inputs:
                cut.add(f"{source} out", f"{name} in", _UNLIMITED)
            if not tensor.inputs:
                continue  # computed from nothing: it costs nothing to have it again
    for name in needed:
        cut.add(f"{name} out", "sink", _UNLIMITED)
    reached = cut.reached()
    return frozenset(name for name in tensors if f"{name} in" in reached and f"{name} out" not in reached)


_UNLIMITED = 1 << 62


class _Cut:
    """A minimum cut between `source` and `sink` by augmenting along shortest paths, level by level (Dinic)."""

    def __init__(self) -> None:
        self._room: dict[str, dict[str, int]] = defaultdict(dict)

    def add(self, tail: str, head: str, capacity: int) -> None:
        self._room[tail][head] = self._room[tail].get(head, 0) + capacity
        self._room[head].setdefault(tail, 0)

    def reached(self) -> set[str]:
        """What is on the side of the source."""
        while True:
            levels = self._levels()
            if "sink" not in levels:
                return set(levels)
            edges = {node: iter(list(room)) for node, room in self._room.items()}
            while self._augment(levels, edges):
                pass

    def _levels(self) -> dict[str, int]:
        levels, waiting = {"source": 0}, deque(["source"])
        while waiting:
            node = waiting.popleft()
            for head, room in self._room[node].items():
                if room > 0 and head not in levels:
                    levels[head] = levels[node] + 1
                    waiting.append(head)
        return levels

    def _augment(self, levels: Mapping[str, int], edges: Mapping[str, Iterable[str]]) -> int:
        path = ["source"]
        while path[-1] != "sink":
            node = path[-1]
            head = next(
                (h for h in edges[node] if self._room[node][h] > 0 and levels.get(h, -1) == levels[node] + 1), None
            )
            if head is not None:
                path.append(head)
            elif len(path) == 1:
                return 0
            else:
                path.pop()
        pairs = list(pairwise(path))
        flow = min(self._room[tail][head] for tail, head in pairs)
        for tail, head in pairs:
            self._room[tail][head] -= flow
            self._room[head][tail] += flow
        return flow


# -- peaks


@dataclass(slots=True)
class _Step:
    """A tensor in the order of a schedule.

    `is_stored`: it has a buffer; `is_held`: to the end; `is_product`: its kernel cannot write over what it reads.
    """

    num_bytes: int
    inputs: list[str] = field(default_factory=list)
    is_stored: bool = False
    is_held: bool = False
    is_product: bool = False


def _peak(steps: Mapping[str, _Step], there: Mapping[str, int]) -> int:
    """The most above the start; `there`: buffers that are there before, and freed after their last use."""
    order = {name: i for i, name in enumerate(steps)}
    read_at: dict[str, int] = {}
    last: dict[str, int] = {}
    for name, step in reversed(list(steps.items())):
        at = order[name] if step.is_stored or step.is_held else max(read_at.get(name, -1), -1)
        for source in step.inputs:
            if at >= 0:
                read_at[source] = max(read_at.get(source, -1), at)
                last[source] = max(last.get(source, -1), at)
    freed: dict[int, list[int]] = defaultdict(list)
    for name, step in steps.items():
        if step.is_stored and not step.is_held:
            freed[max(last.get(name, -1), order[name])].append(step.num_bytes)
    for name, num_bytes in there.items():
        freed[last.get(name, len(steps) - 1)].append(num_bytes)
    live = peak = 0
    for i, step in enumerate(steps.values()):
        if step.is_stored:
            if not step.is_product and step.num_bytes in freed[i]:  # a fused kernel writes over what it read last
                freed[i].remove(step.num_bytes)
            else:
                live += step.num_bytes
        peak = max(peak, live)
        live -= sum(freed[i])
    return peak


def _forward_peak(tensors: Mapping[str, FusedTensor], outputs: Sequence[str], kept: frozenset[str]) -> int:
    read = {source for tensor in tensors.values() if tensor.is_product for source in tensor.inputs}
    held = {*outputs, *kept}
    steps = {
        name: _Step(
            num_bytes=tensor.num_bytes,
            inputs=list(tensor.inputs),
            is_stored=tensor.is_product or name in read or name in held,
            is_held=name in held,
            is_product=tensor.is_product,
        )
        for name, tensor in tensors.items()
        if not tensor.is_input
    }
    return _peak(steps, {})


def _backward_peak(tensors: Mapping[str, FusedTensor], outputs: Sequence[str], kept: frozenset[str]) -> int:
    """The compiler orders the two products of a backward as it likes: the larger peak of the two orders."""
    there = {name: tensors[name].num_bytes for name in kept if not (tensors[name].is_input or name in outputs)}
    return max(_peak(_Backward(tensors, outputs, kept, reverse).steps, there) for reverse in (False, True))


class _Backward:
    """Cotangents in reverse order: each is the sum of what the readers of a tensor contribute."""

    def __init__(
        self, tensors: Mapping[str, FusedTensor], outputs: Sequence[str], kept: frozenset[str], reverse: bool
    ) -> None:
        self.steps: dict[str, _Step] = {}
        self._tensors, self._kept, self._reverse = tensors, kept, reverse
        self._parts: dict[str, list[str]] = {name: [f"given {name}"] for name in outputs}
        for name in reversed(list(tensors)):
            if tensors[name].carries_cotangent and name in self._parts:
                self._pass_on(name, self._cotangent(name))

    def _cotangent(self, name: str) -> str:
        """The step that holds the cotangent of a tensor: its only part, or the sum of all."""
        tensor, parts = self._tensors[name], self._parts[name]
        found = parts[0]
        if len(parts) > 1:
            found = f"sum {name}"
            self.steps[found] = _Step(num_bytes=tensor.num_bytes, inputs=parts)
        step = self.steps.get(found)
        if step is not None:
            step.is_stored |= tensor.is_product or tensor.is_lookup or tensor.is_input
            step.is_held |= tensor.is_input
        return found

    def _pass_on(self, name: str, cotangent: str) -> None:
        tensor = self._tensors[name]
        sources = [s for s in dict.fromkeys(tensor.inputs) if self._tensors[s].carries_cotangent]
        for source in reversed(sources) if self._reverse else sources:
            part = f"{name} to {source}"
            if tensor.is_sum and self._tensors[source].num_bytes == tensor.num_bytes:
                part = cotangent  # passed on as it is
            else:
                others = [need for need in tensor.needs if not (tensor.is_product and need == source)]
                self.steps[part] = _Step(
                    num_bytes=self._tensors[source].num_bytes,
                    inputs=[cotangent, *_had(self._tensors, others, self._kept)],
                    is_stored=tensor.is_product or tensor.is_lookup,
                    is_product=tensor.is_product or tensor.is_lookup,
                )
            self._parts.setdefault(source, []).append(part)


def _had(tensors: Mapping[str, FusedTensor], needs: Iterable[str], kept: frozenset[str]) -> list[str]:
    """The kept tensors from which these are had in the backward."""
    found: dict[str, None] = {}
    waiting, seen = list(needs), set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in kept or tensors[name].is_input:
            found[name] = None
        else:
            waiting += tensors[name].inputs
    return list(found)
