"""The dimension rules of ATen operators: from an operator and its shapes to a resolved `Rule`.

Families come first: pointwise operators (torch tags them), views by arithmetic, reductions. Single operators follow.
An operator without a rule is an error, never a guess.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from planloom.errors import CaptureError
from planloom.graph import Op, Rule, Tensor, notate
from planloom.graph.rules import Term

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An operator with the shapes of its tensors."""

    op: Op
    inputs: tuple[Shape, ...]
    output: Shape

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return (*self.inputs, self.output)


RuleFunction = Callable[[Call], Rule]
_RULES: dict[str, RuleFunction] = {}

# Linear in these operators means: a partial sum may pass. `add` of a tensor and a number is affine, not linear.
_JOINTLY_LINEAR = ("aten.add.Tensor", "aten.sub.Tensor")
_LINEAR_IN_EACH = ("aten.mul.Tensor", "aten.neg.default", "aten._to_copy.default")
_LINEAR_IN_FIRST = ("aten.div.Tensor",)


def attach_rule(op: Op, tensors: Mapping[str, Tensor], parameters: Sequence[str]) -> Rule:
    """The rule of an operator, or an error that names it."""
    call = Call(op=op, inputs=tuple(tensors[n].shape for n in op.inputs), output=tensors[op.outputs[0]].shape)
    function = _RULES.get(op.target) or (_pointwise if _is_pointwise(op.target) else None)
    if function is None:
        raise CaptureError(
            f"operator {op.target} has no dimension rule",
            given=f"{op.name} in {op.module or 'the model'}, shapes {call.inputs} -> {call.output}",
            required="an operator listed in planloom/capture/rules.py",
            todo="express it with other operators, or add a rule",
        )
    return function(call)


def _rule(*targets: str) -> Callable[[RuleFunction], RuleFunction]:
    def register(function: RuleFunction) -> RuleFunction:
        _RULES.update(dict.fromkeys(targets, function))
        return function

    return register


def _is_pointwise(target: str) -> bool:
    namespace, name, overload = target.split(".", 2) if target.count(".") >= 2 else ("", "", "")
    if namespace != "aten":
        return False
    return torch.Tag.pointwise in getattr(getattr(torch.ops.aten, name), overload).tags


@_rule("aten._to_copy.default")
def _pointwise(call: Call) -> Rule:
    rank, target, count = len(call.output), call.op.target, len(call.inputs)
    names = [f"d{i}" for i in range(rank)]
    text = ", ".join(" ".join(names[rank - len(shape) :]) for shape in call.inputs) + " -> " + " ".join(names)
    linear: tuple[tuple[int, ...], ...] = ()
    if target in _JOINTLY_LINEAR and count == 2:
        linear = ((0, 1),)
    elif target in _LINEAR_IN_EACH:
        linear = tuple((i,) for i in range(count))
    elif target in _LINEAR_IN_FIRST:
        linear = ((0,),)
    sizes = dict(zip(names, call.output, strict=True))
    return notate(text, *call.shapes, sizes=sizes, linear=linear, kind="pointwise")


def _view(text: str, call: Call, *, rewrite: str = "none", sizes: dict[str, int] | None = None) -> Rule:
    return notate(text, *call.shapes, sizes=sizes, linear=((0,),), kind="view", rewrite=rewrite)


@_rule("aten.reshape.default")
def _reshape(call: Call) -> Rule:
    """Regroup: cut both shapes at the sizes that they have in common, then into common factors."""
    before, after, sizes = _regroup(call.inputs[0], call.output)
    return Rule(inputs=(before,), outputs=(after,), sizes=sizes, linear=((0,),), kind="view", rewrite="shape")


def _regroup(before: Shape, after: Shape) -> tuple[Term, Term, dict[str, int]]:
    """Factors of both shapes of a view: walk from the right, taking the smaller remaining dim each time."""
    terms: tuple[list[list[str]], list[list[str]]] = ([[] for _ in before], [[] for _ in after])
    sizes: dict[str, int] = {}
    i, j, left, right = len(before) - 1, len(after) - 1, 1, 1
    while True:
        while left == 1 and i >= 0:
            left, i = before[i], i - 1
        while right == 1 and j >= 0:
            right, j = after[j], j - 1
        if left == 1 and right == 1:
            break
        size = min(left, right)
        if left % size or right % size:
            raise CaptureError(
                "a view regroups sizes without common factors",
                given=f"{before} -> {after}",
                required="dims of which one divides the other",
            )
        name = f"v{len(sizes)}"
        sizes[name] = size
        terms[0][i + 1].insert(0, name)
        terms[1][j + 1].insert(0, name)
        left, right = left // size, right // size
    return tuple(map(tuple, terms[0])), tuple(map(tuple, terms[1])), sizes


@_rule("aten.detach.default")
def _detach(call: Call) -> Rule:
    names = " ".join(f"d{i}" for i in range(len(call.output)))
    return notate(f"{names} -> {names}", *call.shapes, linear=((0,),), kind="pointwise", differentiable=False)


@_rule("aten.transpose.int", "aten.permute.default", "aten.t.default")
def _permute(call: Call) -> Rule:
    rank, args = len(call.output), call.op.args
    order = list(range(rank))
    if call.op.target == "aten.permute.default":
        order = [d % rank for d in args[1]]
    else:
        i, j = (args[1] % rank, args[2] % rank) if len(args) > 2 else (0, 1)
        order[i], order[j] = order[j], order[i]
    return _view(" ".join(f"d{i}" for i in range(rank)) + " -> " + " ".join(f"d{i}" for i in order), call)


@_rule("aten.unsqueeze.default", "aten.squeeze.dim", "aten.squeeze.dims")
def _insert_or_drop(call: Call) -> Rule:
    before, after, sizes = _regroup(call.inputs[0], call.output)
    return Rule(inputs=(before,), outputs=(after,), sizes=sizes, linear=((0,),), kind="view")


@_rule("aten.expand.default")
def _expand(call: Call) -> Rule:
    rank = len(call.output)
    names = [f"d{i}" for i in range(rank)]
    source = " ".join(names[rank - len(call.inputs[0]) :])
    sizes = dict(zip(names, call.output, strict=True))
    text = f"{source} -> {' '.join(names)}"
    return notate(text, *call.shapes, sizes=sizes, linear=((0,),), kind="pointwise", rewrite="shape")


@_rule("aten.slice.Tensor")
def _slice(call: Call) -> Rule:
    """A slice of one of several equal pieces is a view and a selection; any other fixes the dim."""
    args, shape = call.op.args, call.inputs[0]
    dim = args[1] % len(shape) if len(args) > 1 else 0
    start, step = (args[2] or 0) if len(args) > 2 else 0, args[4] if len(args) > 4 else 1
    start, length = start % shape[dim] if start < 0 else start, call.output[dim]
    names = [f"d{i}" for i in range(len(shape))]
    before, after = list(names), list(names)
    equal_piece = step == 1 and shape[dim] % length == 0 and start % length == 0
    before[dim] = f"(pick! d{dim})" if equal_piece else "from!"
    after[dim] = f"d{dim}" if equal_piece else "to!"
    sizes = {f"d{dim}": length, "pick": shape[dim] // length} if equal_piece else None
    return _view(f"{' '.join(before)} -> {' '.join(after)}", call, rewrite="slice", sizes=sizes)


@_rule("aten.select.int")
def _select(call: Call) -> Rule:
    dim = call.op.args[1] % len(call.inputs[0])
    names = [f"d{i}" for i in range(len(call.inputs[0]))]
    before = [*names[:dim], "pick!", *names[dim + 1 :]]
    return _view(f"{' '.join(before)} -> {' '.join(names[:dim] + names[dim + 1 :])}", call)


@_rule("aten.cat.default")
def _cat(call: Call) -> Rule:
    rank, dim = len(call.output), call.op.args[1] if len(call.op.args) > 1 else 0
    dim %= rank
    names = [f"d{i}" for i in range(rank)]
    equal = len({shape[dim] for shape in call.inputs}) == 1
    sources, target = [list(names) for _ in call.inputs], list(names)
    sizes = {f"d{dim}": call.inputs[0][dim], "piece": len(call.inputs)} if equal else None
    target[dim] = f"(piece! d{dim})" if equal else "all!"
    if not equal:
        for i, source in enumerate(sources):
            source[dim] = f"part{i}!"
    text = ", ".join(" ".join(s) for s in sources) + " -> " + " ".join(target)
    linear = (tuple(range(len(call.inputs))),)
    return notate(text, *call.shapes, sizes=sizes, linear=linear, kind="pointwise")


def _reduction(call: Call, dims: Sequence[int], **fields: Any) -> Rule:
    shape = call.inputs[0]
    dims = [d % len(shape) for d in dims] or list(range(len(shape)))
    names = [f"d{i}" for i in range(len(shape))]
    keep = len(call.output) == len(shape)
    kept = ["1" if i in dims else name for i, name in enumerate(names) if keep or i not in dims]
    return notate(f"{' '.join(names)} -> {' '.join(kept)}", *call.shapes, kind="contraction", **fields)


@_rule("aten.sum.dim_IntList", "aten.sum.default", "aten.mean.dim", "aten.mean.default")
def _sum(call: Call) -> Rule:
    rewrite = "mean" if "mean" in call.op.target else "none"
    dims = call.op.args[1] if len(call.op.args) > 1 else []
    return _reduction(call, dims or [], linear=((0,),), rewrite=rewrite)


@_rule("planloom.statistic_max")
def _statistic_max(call: Call) -> Rule:
    return _reduction(call, [call.op.args[1]], combine="max", differentiable=False)


@_rule("planloom.pick")
def _pick(call: Call) -> Rule:
    return notate("token vocab, token -> token", *call.shapes, linear=((0,),), kind="contraction", rewrite="one_hot")


@_rule("aten.linear.default")
def _linear(call: Call) -> Rule:
    return notate("... in, out in -> ... out", *call.shapes, linear=((0,), (1,)), kind="contraction")


@_rule("aten.embedding.default")
def _embedding(call: Call) -> Rule:
    if any(call.op.args[3:5]):
        raise CaptureError(
            "an embedding with scale_grad_by_freq or sparse gradients is not supported",
            given=f"{call.op.name} in {call.op.module or 'the model'}",
            required="a plain embedding: its gradient must not depend on the rest of the batch",
            todo="leave out scale_grad_by_freq and sparse",
        )
    return notate("vocab out, ... -> ... out", *call.shapes, linear=((0,),), kind="contraction", rewrite="one_hot")


@_rule("aten.scaled_dot_product_attention.default")
def _attention(call: Call) -> Rule:
    query, key = call.inputs[0], call.inputs[1]
    if len(query) != 4:
        raise CaptureError(
            "attention needs four dims", given=str(query), required="[batch, heads, sequence, head size]"
        )
    args = (*call.op.args, *(None,) * 6)
    if args[4]:
        raise CaptureError(
            "attention with dropout is not supported yet",
            given=f"dropout {args[4]} in {call.op.module or 'the model'}",
            required="0",
            todo="set the model's attention dropout to 0",
        )
    text = "batch (heads group) query! size!, batch heads key! size!, batch heads key! value!"
    if len(call.inputs) > 3:
        mask = ["batch", "(heads group)", "query!", "key!"][4 - len(call.inputs[3]) :]
        text += ", " + " ".join(mask)
    sizes = {"heads": key[1], "group": query[1] // key[1], "batch": query[0]}
    return notate(f"{text} -> batch (heads group) query! value!", *call.shapes, sizes=sizes, kind="contraction")
