"""The dimension rules of ATen operators: from an operator and its shapes to a resolved `Rule`.

Families come first: pointwise operators (torch tags them), views by arithmetic, reductions. Single operators follow.
An operator without a rule is not guessed: users write rules for their own (`custom`), the rest is tried out
(`discover`), and what cannot be split in any way that was tried is unsplittable, and `planloom rules` says so.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from planloom.capture.rules.custom import registered
from planloom.capture.rules.discover import discover
from planloom.errors import CaptureError
from planloom.graph import Op, Rule, Tensor, is_reference, notate, referenced
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


def attach_rules(ops: Sequence[Op], tensors: Mapping[str, Tensor]) -> list[Op]:
    """Every operator with its rule; equal calls, as layers repeat them, share one."""
    known: dict[str, Rule] = {}
    ruled = []
    for op in ops:
        shapes = [(tensors[name].shape, tensors[name].dtype) for name in (*op.inputs, *op.outputs)]
        plain = [None if is_reference(arg) else arg for arg in op.args]
        key = repr((op.target, plain, op.kwargs, shapes)) if not any(map(_holds_tensors, plain)) else ""
        rule = known.get(key) if key else None
        if rule is None:
            rule = attach_rule(op, tensors)
            if key:
                known[key] = rule
        ruled.append(replace(op, rule=rule))
    return ruled


def _holds_tensors(arg: Any) -> bool:
    return isinstance(arg, list | tuple) and any(True for _ in referenced(arg))


def attach_rule(op: Op, tensors: Mapping[str, Tensor]) -> Rule:
    """The rule of an operator: written, registered by the user, of the pointwise family, or discovered by execution."""
    call = Call(op=op, inputs=tuple(tensors[n].shape for n in op.inputs), output=tensors[op.outputs[0]].shape)
    function = _RULES.get(op.target) or registered(op.target)
    if function is None and _is_pointwise(op.target):
        function = _pointwise
    return discover(op, tensors) if function is None else function(call)


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


@_rule("aten._to_copy.default", "planloom.root", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def _pointwise(call: Call) -> Rule:
    rank, target, count = len(call.output), call.op.target, len(call.inputs)
    names = [f"d{i}" for i in range(rank)]
    text = ", ".join(" ".join(names[rank - len(shape) :]) for shape in call.inputs) + " -> " + " ".join(names)
    linear: tuple[tuple[int, ...], ...] = ()
    if target in _JOINTLY_LINEAR and count == 2:
        linear = ((0, 1),)
    elif target == "aten._to_copy.default" and "int" in str(call.op.kwargs.get("dtype", "")):
        linear = ()  # it rounds
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
    found = _regroup(call.inputs[0], call.output)
    if found is None:
        return _regroup_as_a_whole(call)
    before, after, sizes = found
    return Rule(inputs=(before,), outputs=(after,), sizes=sizes, linear=((0,),), kind="view", rewrite="shape")


def _regroup_as_a_whole(call: Call) -> Rule:
    """A view without common factors: equal dims in front and behind pass, what lies between cannot be split."""
    before, after = call.inputs[0], call.output
    front = next(i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
    back = next(i for i, (a, b) in enumerate(zip(before[::-1], after[::-1], strict=False)) if a != b)

    def term(shape: Shape, word: str) -> str:
        middle = [f"{word}{i}!" for i in range(front, len(shape) - back)]
        return " ".join([*(f"f{i}" for i in range(front)), *middle, *(f"b{i}" for i in reversed(range(back)))])

    return _view(f"{term(before, 'from')} -> {term(after, 'to')}", call, rewrite="shape")


def _regroup(before: Shape, after: Shape) -> tuple[Term, Term, dict[str, int]] | None:
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
            return None
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
    found = _regroup(call.inputs[0], call.output)
    assert found is not None, "dims of size one come and go"
    before, after, sizes = found
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
    """One of several equal pieces, or every n-th element, is a view and a selection; any other slice fixes the dim."""
    args, shape = call.op.args, call.inputs[0]
    dim = args[1] % len(shape) if len(args) > 1 else 0
    start, step = (args[2] or 0) if len(args) > 2 else 0, args[4] if len(args) > 4 else 1
    start, length = start % shape[dim] if start < 0 else start, call.output[dim]
    names = [f"d{i}" for i in range(len(shape))]
    before, after = list(names), list(names)
    sizes = {f"d{dim}": length, "pick": shape[dim] // max(length, 1)}
    if step == 1 and length and shape[dim] % length == 0 and start % length == 0:
        before[dim] = f"(pick! d{dim})"
    elif step > 1 and length * step == shape[dim] and start < step:
        before[dim] = f"(d{dim} pick!)"
    else:
        before[dim], after[dim], sizes = "from!", "to!", {}
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


@_rule(
    "aten.amax.default",
    "aten.amin.default",
    "aten.argmax.default",
    "aten.argmin.default",
    "aten.logsumexp.default",
    "aten.var.correction",
    "aten.std.correction",
    "aten.prod.dim_int",
    "aten.linalg_vector_norm.default",
)
def _nonlinear(call: Call) -> Rule:
    """Reductions that no sum of pieces gives: what they reduce cannot be split."""
    at = 2 if "norm" in call.op.target else 1
    dims = call.op.args[at] if len(call.op.args) > at else None
    shape = call.inputs[0]
    dims = [dims] if isinstance(dims, int) else dims
    reduced = [d % len(shape) for d in dims] if dims else list(range(len(shape)))
    names = [f"d{i}{'!' * (i in reduced)}" for i in range(len(shape))]
    keep = len(call.output) == len(shape)
    kept = ["1" if i in reduced else name for i, name in enumerate(names) if keep or i not in reduced]
    return notate(f"{' '.join(names)} -> {' '.join(kept)}", *call.shapes, kind="contraction")


@_rule("aten.cumsum.default", "aten.flip.default", "aten.cumprod.default", "aten.roll.default")
def _along(call: Call) -> Rule:
    """Operators that mix a dim with itself and leave all others apart."""
    at = 2 if "roll" in call.op.target else 1
    dims = call.op.args[at] if len(call.op.args) > at else []
    rank = len(call.output)
    mixed = {d % rank for d in ([dims] if isinstance(dims, int) else dims)} or set(range(rank))
    names = " ".join(f"d{i}{'!' * (i in mixed)}" for i in range(rank))
    linear: tuple[tuple[int, ...], ...] = () if "prod" in call.op.target else ((0,),)
    return notate(f"{names} -> {names}", *call.shapes, linear=linear)


@_rule("aten.tril.default", "aten.triu.default")
def _triangle(call: Call) -> Rule:
    names = " ".join([*(f"d{i}" for i in range(len(call.output) - 2)), "row!", "column!"])
    return notate(f"{names} -> {names}", *call.shapes, linear=((0,),))


@_rule("aten.constant_pad_nd.default", "aten.pad.default")
def _pad(call: Call) -> Rule:
    args, rank = call.op.args, len(call.output)
    pads = {rank - 1 - i // 2 for i, count in enumerate(args[1]) if count}
    before = [f"from{i}!" if i in pads else f"d{i}" for i in range(rank)]
    after = [f"to{i}!" if i in pads else f"d{i}" for i in range(rank)]
    value = args[-1] if len(args) > 2 and not isinstance(args[-1], str) else 0
    linear: tuple[tuple[int, ...], ...] = () if value else ((0,),)
    return notate(f"{' '.join(before)} -> {' '.join(after)}", *call.shapes, linear=linear)


@_rule("planloom.topk")
def _topk(call: Call) -> Rule:
    rank, dim = len(call.output), call.op.args[2]
    names = [f"d{i}" for i in range(rank)]
    before, after = ([*names[:dim], f"{word}!", *names[dim + 1 :]] for word in ("from", "to"))
    return notate(f"{' '.join(before)} -> {' '.join(after)}", *call.shapes, kind="contraction", differentiable=False)


@_rule("aten.gather.default")
def _gather(call: Call) -> Rule:
    """A one-hot contraction over the gathered dim."""
    rank, dim = len(call.output), call.op.args[1] % len(call.output)
    source = ["vocab" if i == dim else f"d{i}" for i in range(rank)]
    index = ["picked" if i == dim else f"d{i}" for i in range(rank)]
    for i in range(rank):
        if i != dim and call.inputs[0][i] != call.inputs[1][i]:  # only the first elements are read
            source[i], index[i] = f"from{i}!", f"to{i}!"
    text = f"{' '.join(source)}, {' '.join(index)} -> {' '.join(index)}"
    return notate(text, *call.shapes, linear=((0,),), kind="contraction", rewrite="one_hot")


@_rule("aten.index_select.default")
def _index_select(call: Call) -> Rule:
    rank, dim = len(call.output), call.op.args[1] % len(call.output)
    source, target = ([word if i == dim else f"d{i}" for i in range(rank)] for word in ("vocab", "picked"))
    text = f"{' '.join(source)}, picked -> {' '.join(target)}"
    return notate(text, *call.shapes, linear=((0,),), kind="contraction", rewrite="one_hot")


@_rule("aten.scatter.value", "aten.scatter.src", "aten.scatter_add.default")
def _scatter(call: Call) -> Rule:
    rank, dim = len(call.output), call.op.args[1] % len(call.output)
    target = ["at!" if i == dim else f"d{i}" for i in range(rank)]
    index = ["of!" if i == dim else f"d{i}" for i in range(rank)]
    for i in range(rank):
        if i != dim and len({shape[i] for shape in call.inputs}) > 1:
            target[i], index[i] = f"from{i}!", f"to{i}!"
    sources = [" ".join(target), *[" ".join(index)] * (len(call.inputs) - 1)]
    linear: tuple[tuple[int, ...], ...] = ((0, 2),) if len(call.inputs) > 2 else ()
    return notate(f"{', '.join(sources)} -> {' '.join(target)}", *call.shapes, linear=linear)


@_rule("planloom.dropout")
def _dropout(call: Call) -> Rule:
    names = " ".join(f"d{i}" for i in range(len(call.output)))
    return notate(f"{names}, state! -> {names}", *call.shapes, linear=((0,),), rewrite="random")


@_rule("planloom.pick")
def _pick(call: Call) -> Rule:
    return notate("token vocab, token -> token", *call.shapes, linear=((0,),), kind="contraction", rewrite="one_hot")


@_rule("aten.linear.default")
def _linear(call: Call) -> Rule:
    return notate("... in, out in -> ... out", *call.shapes, linear=((0,), (1,)), kind="contraction")


@_rule("aten.mm.default")
def _mm(call: Call) -> Rule:
    return notate("rows in, in out -> rows out", *call.shapes, linear=((0,), (1,)), kind="contraction")


@_rule("aten.bmm.default", "aten.matmul.default")
def _matmul(call: Call) -> Rule:
    """Products of matrices; leading dims are broadcast, as in pointwise operators."""
    first, second = call.inputs
    lead = len(call.output) - (len(first) > 1) - (len(second) > 1)

    def term(shape: Shape, words: Sequence[str]) -> str:
        words = words if len(shape) > 1 else ["in"]
        outer = [f"lead{lead - 1 - i}" for i in range(lead)][lead - (len(shape) - len(words)) :]
        return " ".join([*outer, *words])

    result = [*(["rows"] if len(first) > 1 else []), *(["out"] if len(second) > 1 else [])]
    text = f"{term(first, ['rows', 'in'])}, {term(second, ['in', 'out'])} -> "
    text += " ".join([*(f"lead{lead - 1 - i}" for i in range(lead)), *result])
    sizes = {f"lead{lead - 1 - i}": call.output[i] for i in range(lead)}
    return notate(text, *call.shapes, sizes=sizes, linear=((0,), (1,)), kind="contraction")


@_rule("aten.einsum.default")
def _einsum(call: Call) -> Rule:
    """The equation is the rule; a letter twice in one operand is a diagonal and cannot be split."""
    equation = call.op.args[0].replace(" ", "")
    left, arrow, right = equation.partition("->")
    operands = left.split(",")
    if not arrow:
        letters = sorted(set(left) - {",", "."})
        right = "..." * ("..." in left) + "".join(c for c in letters if left.count(c) == 1)
    twice = {c for operand in operands for c in operand if c != "." and operand.count(c) > 1}

    def term(text: str) -> str:
        return " ".join("..." if c == "." else f"e{ord(c)}{'!' * (c in twice)}" for c in text.replace("...", "."))

    text = ", ".join(map(term, operands)) + " -> " + term(right)
    linear = tuple((i,) for i in range(len(call.inputs)))
    kind = "contraction" if any(c not in right for c in left if c not in ",.") else "pointwise"
    return notate(text, *call.shapes, linear=linear, kind=kind)


@_rule("planloom.convolution")
def _convolution(call: Call) -> Rule:
    """Channels are products of groups and their channels; patches that do not overlap can be split."""
    x, weight, *_ = call.inputs
    stride, padding, dilation = call.op.args[3:6]
    groups = x[1] // weight[1]
    before, kernel, after = [], [], []
    sizes = {"group": groups, "chan": weight[1], "out": weight[0] // groups}
    for i, size in enumerate(x[2:]):
        width = weight[2 + i]
        kernel.append(f"k{i}!")
        apart = stride[i] == width and not padding[i] and dilation[i] == 1 and size % width == 0
        before.append(f"(patch{i} k{i}!)" if apart else f"from{i}!")
        after.append(f"patch{i}" if apart else f"to{i}!")
        sizes[f"k{i}"] = width
    text = f"batch (group chan) {' '.join(before)}, (group out) chan {' '.join(kernel)}"
    text += f" -> batch (group out) {' '.join(after)}"
    return notate(text, *call.shapes, sizes=sizes, linear=((0,), (1,)), kind="contraction")


@_rule("planloom.dispatch.default")
def _dispatch(call: Call) -> Rule:
    text = "tokens in, experts tokens -> experts tokens in"
    return notate(text, *call.shapes, linear=((0,),), kind="contraction")


@_rule("planloom.grouped_linear.default")
def _grouped_linear(call: Call) -> Rule:
    weight = "experts in out" if call.op.args[3] else "experts out in"
    text = f"experts tokens in, {weight}, experts tokens -> experts tokens out"
    return notate(text, *call.shapes, linear=((0,), (1,)), kind="contraction")


@_rule("planloom.grouped_bias.default")
def _grouped_bias(call: Call) -> Rule:
    text = "experts tokens out, experts out, experts tokens -> experts tokens out"
    return notate(text, *call.shapes, linear=((0, 1),), kind="pointwise")


@_rule("planloom.combine.default")
def _combine(call: Call) -> Rule:
    text = "experts tokens out, experts tokens, experts tokens -> tokens out"
    return notate(text, *call.shapes, linear=((0,), (1,)), kind="contraction")


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
    row = "query!" if len(call.op.args) > 5 and call.op.args[5] else "query"  # a causal mask knows its rows by number
    text = f"batch (heads group) {row} size!, batch heads key! size!, batch heads key! value!"
    if len(call.inputs) > 3:
        mask = ["batch", "(heads group)", row, "key!"][4 - len(call.inputs[3]) :]
        text += ", " + " ".join(mask)
    sizes = {"heads": key[1], "group": query[1] // key[1], "batch": query[0], "query": query[2]}
    text += f" -> batch (heads group) {row} value!"
    return notate(text, *call.shapes, sizes=sizes, kind="contraction")


@_rule("planloom.sink_attention.default")
def _sink_attention(call: Call) -> Rule:
    query, key, _, *masks, _ = call.inputs
    row = "query!" if call.op.args[5] else "query"
    text = f"batch (heads group) {row} size!, batch heads key! size!, batch heads key! value!"
    if masks:
        text += ", " + " ".join(["batch", "(heads group)", row, "key!"][4 - len(masks[0]) :])
    text += f", (heads group) -> batch (heads group) {row} value!"
    sizes = {"heads": key[1], "group": query[1] // key[1], "batch": query[0], "query": query[2]}
    return notate(text, *call.shapes, sizes=sizes, kind="contraction")
