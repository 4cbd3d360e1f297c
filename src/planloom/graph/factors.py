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

from planloom.graph.rules import ONE_HOT_FACTOR, Rule, Term, flat
from planloom.graph.values import Op, Tensor

Cuts = set[int]


def refine_factors(tensors: dict[str, Tensor], ops: Sequence[Op]) -> tuple[dict[str, Tensor], list[Op]]:
    """The same tensors and operators with common factors; selections that nobody can split are fixed.

    Where two operators regroup a dim in ways that have no common factors (windows of 7, every second row), one of them
    takes the dim as a whole, and cannot be split along it.
    """
    ops = list(ops)
    while True:
        agreement = _Agreement(tensors, ops)
        try:
            agreement.reach()
            break
        except _ConflictError as conflict:
            index, names = conflict.choose(ops)
            ops[index] = replace(ops[index], rule=_as_a_whole(_rule(ops[index]), names))
    refined = {
        t.name: replace(t, factors=tuple(_sizes(agreement.dim_cuts[t.name, i]) for i in range(len(t.shape))))
        for t in tensors.values()
    }
    rewritten: dict[tuple[int, str], Rule] = {}  # equal layers share rules, before and after
    new_ops = []
    for op, cuts in zip(ops, agreement.factor_cuts, strict=True):
        key = (id(op.rule), repr({name: sorted(own) for name, own in cuts.items()}))
        if key not in rewritten:
            rewritten[key] = _rewrite(op, cuts)
        new_ops.append(replace(op, rule=rewritten[key]))
    return refined, _fix_selections(new_ops)


Origin = tuple[int, tuple[str, ...]]
"""Where a cut comes from: an operator, and the factors of the dim in which it lies between two of them."""


class _ConflictError(Exception):
    """Two operators cut a dim in ways that have no common factors."""

    def __init__(self, *origins: Origin) -> None:
        super().__init__()
        self.origins = origins

    def choose(self, ops: Sequence[Op]) -> Origin:
        """Who gives way: a selection of elements rather than a regrouping, else the later one."""
        return max(self.origins, key=lambda origin: (_rule(ops[origin[0]]).rewrite == "slice", origin[0]))


class _Agreement:
    """Cuts of all dims and factors, and where they come from."""

    def __init__(self, tensors: dict[str, Tensor], ops: Sequence[Op]) -> None:
        self.ops = ops
        self.dim_cuts: dict[tuple[str, int], Cuts] = {
            (t.name, i): {1, size} for t in tensors.values() for i, size in enumerate(t.shape)
        }
        self.factor_cuts: list[dict[str, Cuts]] = [{n: {1, s} for n, s in _rule(op).sizes.items()} for op in ops]
        self._dim_origins: dict[tuple[str, int, int], Origin] = {}
        self._factor_origins: dict[tuple[int, str, int], Origin] = {}

    def reach(self) -> None:
        """Let cuts travel: an operator is visited again when a tensor that it touches has got new ones."""
        touching: dict[str, list[int]] = {}
        for i, op in enumerate(self.ops):
            for name in dict.fromkeys((*op.inputs, *op.outputs)):
                touching.setdefault(name, []).append(i)
        waiting, queued = deque(range(len(self.ops))), set(range(len(self.ops)))
        while waiting:
            i = waiting.popleft()
            queued.discard(i)
            changed: set[str] = set()
            while new := self._exchange(i):
                changed |= new
            for j in sorted({j for name in changed for j in touching[name]} - queued - {i}):
                queued.add(j)
                waiting.append(j)

    def _exchange(self, i: int) -> set[str]:
        """Exchange cuts between an operator's factors and its tensors; the tensors for which something changed."""
        op, factor_cuts = self.ops[i], self.factor_cuts[i]
        sizes = _rule(op).sizes
        changed: set[str] = set()
        for tensor, term in _terms(op):
            for dim, names in enumerate(term):
                cuts = self.dim_cuts[tensor, dim]
                if len(names) == 1 and cuts == factor_cuts[names[0]]:  # they agree already
                    continue
                below = prod(sizes[n] for n in names)
                if not below:  # nothing to cut
                    continue
                for name in names:
                    above, below = below, below // sizes[name]
                    inner = {c // below for c in cuts if below < c < above and c % below == 0 and above % c == 0}
                    outer = {c * below for c in factor_cuts[name]}
                    if inner <= factor_cuts[name] and outer <= cuts:
                        continue
                    own: Origin = (i, names)
                    for c in inner - factor_cuts[name]:
                        self._factor_origins[i, name, c] = self._dim_origins.get((tensor, dim, c * below), own)
                    for c in outer - cuts:
                        self._dim_origins[tensor, dim, c] = self._factor_origins.get((i, name, c // below), own)
                    factor_cuts[name] |= inner
                    cuts |= outer
                    changed.add(tensor)
                    self._require_chain(tensor, dim, own)
        return changed

    def _require_chain(self, tensor: str, dim: int, last: Origin) -> None:
        for small, large in pairwise(sorted(self.dim_cuts[tensor, dim])):
            if large % small:
                origins = [self._dim_origins.get((tensor, dim, cut)) for cut in (small, large)]
                raise _ConflictError(*(origin or last for origin in origins))


def _as_a_whole(rule: Rule, names: tuple[str, ...]) -> Rule:
    """The rule with every dim that shares factors with these taken as one factor, which cannot be split."""
    terms = (*rule.inputs, *rule.outputs)
    together, grown = set(names), True
    while grown:
        grown = False
        for group in (set(dim) for term in terms for dim in term):
            if group & together and not group <= together:
                together |= group
                grown = True
    sizes = {name: size for name, size in rule.sizes.items() if name not in together}
    fixed = [name for name in rule.fixed if name not in together]
    renamed: list[Term] = []
    for term in terms:
        dims: list[tuple[str, ...]] = []
        for dim in term:
            if together.intersection(dim):
                name = f"whole{len(fixed)}"
                sizes[name] = prod(rule.sizes[n] for n in dim)
                fixed.append(name)
                dims.append((name,))
            else:
                dims.append(dim)
        renamed.append(tuple(dims))
    count = len(rule.inputs)
    rewrite = rule.rewrite if rule.rewrite != "one_hot" else "none"
    return replace(
        rule,
        inputs=tuple(renamed[:count]),
        outputs=tuple(renamed[count:]),
        sizes=sizes,
        fixed=tuple(fixed),
        rewrite=rewrite,
    )


def _rule(op: Op) -> Rule:
    assert op.rule is not None
    return op.rule


def _terms(op: Op) -> list[tuple[str, Term]]:
    rule = _rule(op)
    return [*zip(op.inputs, rule.inputs, strict=True), *zip(op.outputs, rule.outputs, strict=True)]


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
