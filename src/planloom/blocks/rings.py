"""Rings: attention whose keys and values go round the devices that split its sequence.

Along its sequence, attention mixes: no dim of a block. But with queries, keys and values all split along it over n
devices, a device can meet all keys in n *turns*: in turn t device r computes with the keys and values that lie at
device (r − t) mod n, which have come to it from neighbour to neighbour, and its results over some keys and over others
combine by their logarithms of sums (`execute.ring_attention`). Seen from outside, such a block is split along its
sequence like any other, and needs no communication at its boundary: this is its dim `context`.

The operators before attention (rotary embeddings, biases, views) are carried out before the first turn, for the device's
own part, those behind it in the last.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planloom.blocks.dims import BlockDim, factor_classes, rule_of, split_states
from planloom.graph import Graph, Op, Rule
from planloom.graph.rules import Term

CONTEXT_DIM = "context"
_ATTENTION, _SINKS = "aten.scaled_dot_product_attention.default", "planloom.sink_attention.default"
_NUM_DIMS, _DROPOUT, _CAUSAL, _WINDOW = 4, 4, 5, 6
"""Dims of queries; places of arguments: dropout and causality of torch's attention, the window of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """The attention `op` of a block, whose `keys` and `values` go round along `dim`; all are operators by index.

    `is_causal`, `window`: as in `capture.flash.Sight`.
    """

    op: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    query: str
    keys: str
    values: str
    result: str
    dim: BlockDim
    is_causal: bool
    window: int

    @property
    def rotated(self) -> tuple[str, str]:
        """What goes round."""
        return self.keys, self.values

    def ops(self, turn: int, count: int) -> tuple[int, ...]:
        """The operators of one turn of so many; before the first, number -1, those before attention."""
        return self.before if turn < 0 else (self.op, *(self.after if turn == count - 1 else ()))

    def is_whole(self, turn: int) -> bool:
        """Does every query of some device see every key of this turn? The first turn is the diagonal."""
        return not self.is_causal or (turn > 0 and not self.window)


def with_one_sequence(graph: Graph) -> Graph:
    """The graph with the sequence of queries and of keys under one name, splittable: as rings split attention."""
    if not any(op.target in (_ATTENTION, _SINKS) for op in graph.ops):
        return graph
    return replace(graph, ops=tuple(map(_with_one_sequence, graph.ops)))


def _with_one_sequence(op: Op) -> Op:
    rule = rule_of(op)
    if op.target not in (_ATTENTION, _SINKS) or _of(rule, "query") != _of(rule, "key"):
        return op

    def named(terms: tuple[Term, ...]) -> tuple[Term, ...]:
        return tuple(tuple(tuple(_merged(name) for name in names) for names in term) for term in terms)

    sizes = {_merged(name): size for name, size in rule.sizes.items()}
    fixed = tuple(name for name in rule.fixed if name.split(".")[0] not in ("query", "key"))
    return replace(
        op, rule=replace(rule, inputs=named(rule.inputs), outputs=named(rule.outputs), sizes=sizes, fixed=fixed)
    )


def _of(rule: Rule, word: str) -> list[int]:
    """The sizes of the factors of a dim."""
    return [size for name, size in rule.sizes.items() if name.split(".")[0] == word]


def _merged(name: str) -> str:
    """`key.1` → `query.1`."""
    return "query" + name.removeprefix("key") if name.split(".")[0] == "key" else name


def find_ring(graph: Graph, members: Sequence[int], outputs: Sequence[str]) -> Ring | None:
    """The ring of a block in a graph `with_one_sequence`; None if there is no attention, or `why_no_ring`."""
    if why_no_ring(graph, members):
        return None
    index = next(i for i in members if graph.ops[i].target in (_ATTENTION, _SINKS))
    op = graph.ops[index]
    rows = {name for name in rule_of(op).sizes if name.split(".")[0] == "query"}
    for factors in factor_classes(graph, members):
        if not any(i == index and name in rows for i, name in factors):
            continue
        states = split_states(graph, members, outputs, factors)
        if states is None or states[1]:
            continue
        size = rule_of(op).sizes[next(name for i, name in factors if i == index)]
        return Ring(
            op=index,
            before=tuple(i for i in members if i < index),
            after=tuple(i for i in members if i > index),
            query=op.inputs[0],
            keys=op.inputs[1],
            values=op.inputs[2],
            result=op.outputs[0],
            dim=BlockDim(name=CONTEXT_DIM, size=size, shards=states[0], partials={}),
            is_causal=bool(op.args[_CAUSAL]) if len(op.args) > _CAUSAL else bool(op.kwargs.get("is_causal", False)),
            window=int(op.args[_WINDOW]) if op.target == _SINKS else 0,
        )
    return None


def why_no_ring(graph: Graph, members: Sequence[int]) -> str:
    """Why a block with these operators cannot go round a ring; nothing if it can."""
    found = [i for i in members if graph.ops[i].target in (_ATTENTION, _SINKS)]
    if len(found) != 1:
        return "it is not attention as one operator" if not found else "it has more than one attention"
    index, op = found[0], graph.ops[found[0]]
    query, key, value = (graph.tensors[name].shape for name in op.inputs[:3])
    if op.target == _ATTENTION and len(op.args) > _DROPOUT and op.args[_DROPOUT]:
        return "it has dropout"
    if len(op.inputs) > 3 + (op.target == _SINKS):
        return "it has a mask that is neither causal nor a window"
    if query[2] != key[2] or len(query) != _NUM_DIMS:
        return "its queries and keys are not of one sequence"
    if query[3] != value[3]:
        return "its keys and values are of different head sizes"
    if len(set(op.inputs)) < len(op.inputs) or any(name not in graph.producer for name in op.inputs[:3]):
        return "its queries, keys and values are not three results of operators"
    made = set(op.outputs)
    for i in members:
        if i > index:
            if not made.issuperset(graph.ops[i].inputs):
                return f"{graph.ops[i].name} behind it reads other tensors, too"
            made.update(graph.ops[i].outputs)
    return ""
