"""The dims of a block: classes of factors that are split together, and what a split does to every tensor.

Two factors are one class if an operator of the block names them alike or a tensor carries them from one operator to the
next. A class is a *dim* of the block if splitting it is legal: walk the operators in order with one state a tensor,
S(i) (factor i is split), P (partial) or R (replicated):

- an operator that has the split factor must have exactly one such, not fixed; all its other inputs are R, and its
output
  is S where it keeps the factor and P where it contracts it;
- an operator without it passes R; it passes P only where it is linear in exactly the partial inputs;
- every output of the block must be S or P: a replicated output of a split block would need a partial cotangent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planloom.graph import Graph, Op, Rule
from planloom.graph.rules import flat
from planloom.layout import Combine

Factor = tuple[int, str]
"""(index of an operator, name of a factor in its rule)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDim:
    """A splittable dim: which tensors have it, at which factor (`shards`), and which it leaves partial (`partials`)."""

    name: str
    size: int
    shards: dict[str, int]
    partials: dict[str, Combine]


def rule_of(op: Op) -> Rule:
    assert op.rule is not None, op.name
    return op.rule


def factor_classes(graph: Graph, members: Sequence[int]) -> list[list[Factor]]:
    """Classes of factors over the operators of a block, in order of first appearance."""
    parent: dict[Factor, Factor] = {}

    def find(item: Factor) -> Factor:
        while parent.setdefault(item, item) != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    at: dict[tuple[str, int], Factor] = {}
    for index in members:
        op = graph.ops[index]
        for tensor, names in terms(op):
            for i, name in enumerate(names):
                factor = (index, name)
                parent[find(at.setdefault((tensor, i), factor))] = find(factor)
    classes: dict[Factor, list[Factor]] = {}
    for index in members:
        for name in rule_of(graph.ops[index]).sizes:
            classes.setdefault(find((index, name)), []).append((index, name))
    return list(classes.values())


def terms(op: Op) -> list[tuple[str, tuple[str, ...]]]:
    """(tensor, names of its factors in order) for all inputs and outputs."""
    rule = rule_of(op)
    pairs = [*zip(op.inputs, rule.inputs, strict=True), *zip(op.outputs, rule.outputs, strict=True)]
    return [(tensor, flat(term)) for tensor, term in pairs]


def split_states(
    graph: Graph, members: Sequence[int], outputs: Sequence[str], factors: Sequence[Factor]
) -> tuple[dict[str, int], dict[str, Combine]] | None:
    """(sharded tensors, partial tensors) if the class can be split over these operators, else None."""
    chosen: dict[int, list[str]] = {}
    for index, name in factors:
        chosen.setdefault(index, []).append(name)
    shards: dict[str, int] = {}
    partials: dict[str, Combine] = {}
    for index in members:
        op = graph.ops[index]
        rule = rule_of(op)
        names = chosen.get(index, [])
        partial_inputs = tuple(i for i, tensor in enumerate(op.inputs) if tensor in partials)
        if not names:
            if not partial_inputs:
                continue
            kinds = {partials[op.inputs[i]] for i in partial_inputs}
            if partial_inputs not in rule.linear or kinds != {"sum"}:
                return None
            partials.update(dict.fromkeys(op.outputs, "sum"))
            continue
        if len(names) > 1 or names[0] in rule.fixed or partial_inputs:
            return None
        name = names[0]
        for tensor, have in terms(op):
            if have.count(name) > 1 or (name not in have and tensor in shards and tensor not in op.outputs):
                return None
            if name in have and shards.setdefault(tensor, have.index(name)) != have.index(name):
                return None
            if tensor in op.outputs and name not in have:
                partials[tensor] = rule.combine
    if any(tensor not in shards and tensor not in partials for tensor in outputs):
        return None
    return shards, partials


def name_dim(
    graph: Graph, factors: Sequence[Factor], shards: Mapping[str, int], labels: Mapping[tuple[str, int], str]
) -> str:
    """A word for a class: a label that flows from the inputs, else the contraction's own word, else `features`."""
    for tensor, i in shards.items():
        if (tensor, i) in labels:
            return labels[tensor, i]
    if any(of_loss(graph, graph.ops[index]) for index, _ in factors):
        return "vocab"
    words = [name.split(".")[0] for index, name in factors if rule_of(graph.ops[index]).kind == "contraction"]
    named = [word for word in words if word in ("in", "out", "vocab", "heads", "group", "experts")]
    return named[0] if named else "features"


def label_of(graph: Graph, factors: Sequence[Factor], labels: Mapping[tuple[str, int], str]) -> str:
    """The label that some tensor gives to a class of factors, or nothing."""
    for index, factor in factors:
        for tensor, names in terms(graph.ops[index]):
            for i, name in enumerate(names):
                if name == factor and (tensor, i) in labels:
                    return labels[tensor, i]
    return ""


def of_loss(graph: Graph, op: Op) -> bool:
    """Does this operator belong to an expanded loss?"""
    return op.expansion >= 0 and graph.expansions[op.expansion].target == "planloom.weighted_cross_entropy"


def flow_labels(graph: Graph) -> dict[tuple[str, int], str]:
    """`batch` and `sequence`, followed from the inputs through the operators.

    The batch is the first dim of the inputs, where they have the size that most of them have there; the sequence is the
    second dim of whole numbers (tokens, labels), or of inputs [batch, sequence, features]. `experts` begins where
    tokens are sent to them.
    """
    tensors = [graph.tensors[name] for name in graph.inputs]
    firsts = [tensor.shape[0] for tensor in tensors if tensor.shape]
    batch = max(firsts, key=firsts.count, default=0)
    labels: dict[tuple[str, int], str] = {}
    for tensor in tensors:
        words = ["batch" if tensor.shape[:1] == (batch,) else ""]
        words += ["sequence" if words[0] and (not tensor.is_float or len(tensor.shape) == 3) else ""]
        dims = [dim for dim, factors in enumerate(tensor.factors) for _ in factors]
        labels.update({(tensor.name, i): words[dim] for i, dim in enumerate(dims) if dim < 2 and words[dim]})
    found = -1
    while found < len(labels):
        found = len(labels)
        _flow(graph.ops, labels, forward=True)
        _flow(graph.ops[::-1], labels, forward=False)
    return labels


def _flow(ops: Sequence[Op], labels: dict[tuple[str, int], str], *, forward: bool) -> None:
    """Follow labels from inputs to outputs, or from outputs back to inputs that have none (given tensors)."""
    for op in ops:
        known: dict[str, str] = {}
        if op.target == "planloom.dispatch.default":
            known.update({name: "experts" for name in rule_of(op).sizes if name.split(".")[0] == "experts"})
        pairs = terms(op)
        sources, targets = pairs[: len(op.inputs)], pairs[len(op.inputs) :]
        if not forward:
            sources, targets = targets, sources
        for name, factors in sources:
            for i, factor in enumerate(factors):
                if (name, i) in labels:
                    known.setdefault(factor, labels[name, i])
        for name, factors in targets:
            for i, factor in enumerate(factors):
                if factor in known:
                    labels.setdefault((name, i), known[factor])
