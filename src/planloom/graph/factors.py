"""Common factors: cut every dim of every tensor so that all operators that touch it agree on its factors.

Each rule names the factors that its own operator sees: a linear map sees `out` of size 64, the view behind it `(heads
size)` = 4 × 16. A *cut* of a dim of size n is a number c that divides n: the size of a trailing part of it. Cuts
travel between a tensor's dims and the factors of the operators around it until nothing changes; the ratios of
consecutive cuts are then the factors, and rules are rewritten in them (`out` becomes `out.0 out.1`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

from planloom.errors import CaptureError
from planloom.graph.rules import ONE_HOT_FACTOR, Rule, Term, flat
from planloom.graph.values import Op, Tensor

Cuts = set[int]


def refine_factors(tensors: dict[str, Tensor], ops: Sequence[Op]) -> tuple[dict[str, Tensor], list[Op]]:
    """The same tensors and operators with common factors; selections that nobody can split are fixed."""
    dim_cuts: dict[tuple[str, int], Cuts] = {
        (t.name, i): {1, size} for t in tensors.values() for i, size in enumerate(t.shape)
    }
    factor_cuts: list[dict[str, Cuts]] = [{n: {1, s} for n, s in _rule(op).sizes.items()} for op in ops]
    _agree(ops, factor_cuts, dim_cuts)
    refined = {
        t.name: replace(t, factors=tuple(_sizes(dim_cuts[t.name, i]) for i in range(len(t.shape))))
        for t in tensors.values()
    }
    rewritten: dict[tuple[int, str], Rule] = {}  # equal layers share rules, before and after
    new_ops = []
    for op, cuts in zip(ops, factor_cuts, strict=True):
        key = (id(op.rule), repr({name: sorted(own) for name, own in cuts.items()}))
        if key not in rewritten:
            rewritten[key] = _rewrite(op, cuts)
        new_ops.append(replace(op, rule=rewritten[key]))
    return refined, _fix_selections(new_ops)


def _agree(ops: Sequence[Op], factor_cuts: list[dict[str, Cuts]], dim_cuts: dict[tuple[str, int], Cuts]) -> None:
    """Let cuts travel: an operator is visited again when a tensor that it touches has got new ones."""
    touching: dict[str, list[int]] = {}
    for i, op in enumerate(ops):
        for name in dict.fromkeys((*op.inputs, *op.outputs)):
            touching.setdefault(name, []).append(i)
    waiting, queued = deque(range(len(ops))), set(range(len(ops)))
    while waiting:
        i = waiting.popleft()
        queued.discard(i)
        changed: set[str] = set()
        while new := _exchange_cuts(ops[i], factor_cuts[i], dim_cuts):
            changed |= new
        for j in sorted({j for name in changed for j in touching[name]} - queued - {i}):
            queued.add(j)
            waiting.append(j)


def _rule(op: Op) -> Rule:
    assert op.rule is not None
    return op.rule


def _terms(op: Op) -> list[tuple[str, Term]]:
    rule = _rule(op)
    return [*zip(op.inputs, rule.inputs, strict=True), *zip(op.outputs, rule.outputs, strict=True)]


def _exchange_cuts(op: Op, factor_cuts: dict[str, Cuts], dim_cuts: dict[tuple[str, int], Cuts]) -> set[str]:
    """Exchange cuts between an operator's factors and its tensors; the tensors for which something changed."""
    sizes = _rule(op).sizes
    changed: set[str] = set()
    for tensor, term in _terms(op):
        for dim, names in enumerate(term):
            cuts = dim_cuts[tensor, dim]
            if len(names) == 1 and cuts == factor_cuts[names[0]]:  # they agree already
                continue
            below = prod(sizes[n] for n in names)
            if not below:  # nothing to cut
                continue
            for name in names:
                above, below = below, below // sizes[name]
                inner = {c // below for c in cuts if below < c < above and c % below == 0 and above % c == 0}
                outer = {c * below for c in factor_cuts[name]}
                if not inner <= factor_cuts[name] or not outer <= cuts:
                    factor_cuts[name] |= inner
                    cuts |= outer
                    changed.add(tensor)
                    _require_chain(op, tensor, dim, cuts)
    return changed


def _require_chain(op: Op, tensor: str, dim: int, cuts: Cuts) -> None:
    ordered = sorted(cuts)
    if any(large % small for small, large in pairwise(ordered)):
        raise CaptureError(
            f"dim {dim} of {tensor} is regrouped in two ways that have no common factors",
            given=f"trailing sizes {ordered}, last at {op.target} ({op.name}) in {op.module or 'the model'}",
            required="sizes of which each divides the next",
            todo="reshape this tensor in one way only, or make the sizes multiples of each other",
        )


def _sizes(cuts: Cuts) -> tuple[int, ...]:
    if 0 in cuts:
        return (0,)
    ordered = sorted(cuts, reverse=True)
    return tuple(large // small for large, small in pairwise(ordered))


def _rewrite(op: Op, factor_cuts: dict[str, Cuts]) -> Rule:
    rule = _rule(op)
    parts: dict[str, tuple[str, ...]] = {}
    sizes: dict[str, int] = {}
    for name, cuts in factor_cuts.items():
        split = _sizes(cuts)
        parts[name] = (name,) if len(split) == 1 else tuple(f"{name}.{i}" for i in range(len(split)))
        sizes.update(zip(parts[name], split, strict=True))

    fixed = [part for name in rule.fixed for part in parts[name]]
    if rule.rewrite == "one_hot":  # a piece is a range of rows: only the major factor of the vocabulary can be split
        fixed += parts.get(ONE_HOT_FACTOR, ())[1:]

    def rewritten(term: Term) -> Term:
        return tuple(tuple(part for name in names for part in parts[name]) for names in term)

    return replace(
        rule,
        inputs=tuple(map(rewritten, rule.inputs)),
        outputs=tuple(map(rewritten, rule.outputs)),
        sizes=sizes,
        fixed=tuple(fixed),
    )


def _fix_selections(ops: list[Op]) -> list[Op]:
    """Fix factors that a later view selects from (the 3 of a fused q, k, v): splitting them always communicates."""
    selected: set[tuple[str, int]] = set()
    result = []
    for op in reversed(ops):
        rule = _rule(op)
        fixed = set(rule.fixed)
        for tensor, term in zip(op.outputs, rule.outputs, strict=True):
            fixed.update(name for i, name in enumerate(flat(term)) if (tensor, i) in selected)
        if rule.kind != "contraction":
            for tensor, term in zip(op.inputs, rule.inputs, strict=True):
                selected.update((tensor, i) for i, name in enumerate(flat(term)) if name in fixed)
        if fixed != set(rule.fixed):
            op = replace(op, rule=replace(rule, fixed=tuple(sorted(fixed))))
        result.append(op)
    return result[::-1]
