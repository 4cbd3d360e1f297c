"""One spelling for what torch spells in several ways.

| torch                                        | here                                                              |
|----------------------------------------------|-------------------------------------------------------------------|
| view, _unsafe_view, flatten, squeeze         | reshape                                                           |
| split, chunk, unbind                         | slices, selects                                                   |
| stack, slice_scatter, select_scatter, copy   | cat of pieces; a slice of one piece is that piece                 |
| repeat, repeat_interleave                    | reshape, expand, reshape                                          |
| topk, sort, max and min along a dim          | the indices, and a gather                                         |
| zeros_like, new_ones, empty, …               | full                                                              |
| x[i], x[:, i]; x[arange(n), i]               | index_select; gather                                              |
| batch norm                                   | its parts; running statistics are results                         |
| losses with a reduction                      | the same without, then mean or sum                                |
| convolutions                                 | our own, whose number of groups follows from the shapes           |
| dropout                                      | our own, whose mask depends on the element alone                  |
| rand, randn, bernoulli                       | our own uniform and normal numbers                                |
| attention with dropout                       | products, softmax, dropout                                        |

A form is a function from the translator and a node to the name of the result (or of all results, None for those that
have none); None leaves the node as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod, sqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from planloom.graph import FLOAT_MARK, RANDOM_STATE, Arg, reference

if TYPE_CHECKING:
    from planloom.capture.translate import Translator

Result = str | Sequence[str | None] | None
Form = Callable[["Translator", fx.Node], Result]
CANONICAL: dict[str, Form] = {}

_COPIES = (
    "aten.alias.default",
    "aten.clone.default",
    "aten.lift_fresh_copy.default",
    "aten.contiguous.default",
)


def _form(*targets: str) -> Callable[[Form], Form]:
    def register(function: Form) -> Form:
        CANONICAL.update(dict.fromkeys(targets, function))
        return function

    return register


def is_identity(t: Translator, node: fx.Node) -> bool:
    """Does a node return its first argument unchanged?"""
    target, args = str(node.target), node.args
    if not args or not isinstance(args[0], fx.Node):
        return False
    if target in _COPIES:
        return True
    if target == "aten.dropout.default":
        return bool(args[1] == 0 or not args[2])
    if target == "aten.native_dropout.default":
        return False  # it has two results
    if target in ("aten.pad.default", "aten.constant_pad_nd.default"):
        return not any(args[1])  # type: ignore[arg-type]
    if target == "aten.roll.default":
        shape, dims = _val(args[0]).shape, _argument(node, 2, [])
        return bool(dims) and all(s % shape[d] == 0 for s, d in zip(args[1], dims, strict=True))  # type: ignore[arg-type]
    if target in ("aten._to_copy.default", "aten.to.dtype", "aten.type_as.default"):
        return bool(_val(node).dtype == _val(args[0]).dtype)
    if target in ("aten.expand.default", "aten.reshape.default", "aten.view.default", "aten._unsafe_view.default"):
        return bool(_val(node).shape == _val(args[0]).shape)
    if target == "aten.slice.Tensor":
        return bool(_val(node).shape == _val(args[0]).shape and _argument(node, 4, 1) == 1)
    return False


def _val(node: Any) -> Any:
    return node.meta["val"]


def _argument(node: fx.Node, index: int, default: Any, key: str = "") -> Any:
    """A positional or keyword argument."""
    if len(node.args) > index:
        return node.args[index]
    return node.kwargs.get(key, default)


# -- shapes


@_form(
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten.flatten.using_ints",
    "aten.squeeze.default",
)
def _reshape(t: Translator, node: fx.Node) -> Result:
    return reshaped(t, t.name(node.args[0]), _val(node).shape)  # type: ignore[arg-type]


def reshaped(t: Translator, name: str, shape: Sequence[int]) -> str:
    """The tensor in another shape; two views in a row are one."""
    if tuple(shape) == t.tensors[name].shape:
        return name
    return t.emit("aten.reshape.default", [reference(name), list(shape)], shape, t.tensors[name].dtype)


def _unsqueezed(t: Translator, name: str, dim: int) -> str:
    shape = list(t.tensors[name].shape)
    shape.insert(dim, 1)
    return t.emit("aten.unsqueeze.default", [reference(name), dim], shape, t.tensors[name].dtype)


def _expanded(t: Translator, name: str, shape: Sequence[int]) -> str:
    if tuple(shape) == t.tensors[name].shape:
        return name
    return t.emit("aten.expand.default", [reference(name), list(shape)], shape, t.tensors[name].dtype)


def _cast(t: Translator, name: str, dtype: Any) -> str:
    text = str(dtype).removeprefix("torch.")
    if t.tensors[name].dtype == text:
        return name
    kwargs = {"dtype": f"torch.{text}"}
    return t.emit("aten._to_copy.default", [reference(name)], t.tensors[name].shape, text, kwargs)


@_form("aten.type_as.default", "aten.to.dtype")
def _type_as(t: Translator, node: fx.Node) -> Result:
    return _cast(t, t.name(node.args[0]), _val(node).dtype)  # type: ignore[arg-type]


@_form("aten.split_with_sizes.default", "aten.split.Tensor", "aten.chunk.default")
def _split(t: Translator, node: fx.Node) -> Result:
    source, dim = t.name(node.args[0]), _argument(node, 2, 0, "dim")  # type: ignore[arg-type]
    start, names = 0, []
    for value in _val(node):
        at = dim % value.dim()
        stop = start + value.shape[at]
        names.append(sliced(t, source, at, start, stop))
        start = stop
    return names


@_form("aten.broadcast_tensors.default")
def _broadcast_tensors(t: Translator, node: fx.Node) -> Result:
    listed: Any = node.args[0]
    return [_expanded(t, t.name(part), value.shape) for part, value in zip(listed, _val(node), strict=True)]


@_form("aten.unbind.int")
def _unbind(t: Translator, node: fx.Node) -> Result:
    source, dim = t.name(node.args[0]), _argument(node, 1, 0, "dim")  # type: ignore[arg-type]
    dim %= len(t.tensors[source].shape)
    dtype = t.tensors[source].dtype
    return [t.emit("aten.select.int", [reference(source), dim, i], v.shape, dtype) for i, v in enumerate(_val(node))]


@_form("aten.slice.Tensor")
def _slice(t: Translator, node: fx.Node) -> Result:
    source = t.name(node.args[0])  # type: ignore[arg-type]
    shape = t.tensors[source].shape
    dim = _argument(node, 1, 0) % len(shape)
    if _argument(node, 4, 1) != 1:
        return None
    start = _argument(node, 2, 0) or 0
    start = max(0, start + shape[dim]) if start < 0 else start
    return sliced(t, source, dim, start, start + _val(node).shape[dim])


def sliced(t: Translator, source: str, dim: int, start: int, stop: int) -> str:
    """A slice; of a tensor that was put together from pieces, one whole piece is that piece."""
    shape = list(t.tensors[source].shape)
    if start == 0 and stop == shape[dim]:
        return source
    if source in t.assembled and t.assembled[source][0] == dim:
        at = 0
        for piece in t.assembled[source][1]:
            size = t.tensors[piece].shape[dim]
            if (at, at + size) == (start, stop):
                return piece
            at += size
    shape[dim] = stop - start
    return t.emit("aten.slice.Tensor", [reference(source), dim, start, stop], shape, t.tensors[source].dtype)


@_form("aten.cat.default")
def _cat(t: Translator, node: fx.Node) -> Result:
    dim = _argument(node, 1, 0, "dim") % _val(node).dim()
    listed: Any = node.args[0]
    parts = [t.name(part) for part in listed if _val(part).shape != (0,)]
    return _joined(t, [_cast(t, part, _val(node).dtype) for part in parts], dim)


def _joined(t: Translator, parts: Sequence[str], dim: int) -> str:
    parts = [part for part in parts if t.tensors[part].shape[dim]]
    if len(parts) == 1:
        return parts[0]
    first = t.tensors[parts[0]]
    shape = list(first.shape)
    shape[dim] = sum(t.tensors[part].shape[dim] for part in parts)
    name = t.emit("aten.cat.default", [[reference(part) for part in parts], dim], shape, first.dtype)
    t.assembled[name] = (dim, list(parts))
    return name


@_form("aten.stack.default")
def _stack(t: Translator, node: fx.Node) -> Result:
    dim = _argument(node, 1, 0, "dim") % _val(node).dim()
    parts: Any = node.args[0]
    return _joined(t, [_unsqueezed(t, t.name(part), dim) for part in parts], dim)


@_form("aten.slice_scatter.default")
def _slice_scatter(t: Translator, node: fx.Node) -> Result:
    target, source = t.name(node.args[0]), t.name(node.args[1])  # type: ignore[arg-type]
    if _argument(node, 5, 1) != 1:
        return None
    size = t.tensors[target].shape
    dim = _argument(node, 2, 0) % len(size)
    start = _argument(node, 3, 0) or 0
    start = max(0, start + size[dim]) if start < 0 else start
    return _written(t, target, source, dim, start, start + t.tensors[source].shape[dim])


@_form("aten.select_scatter.default")
def _select_scatter(t: Translator, node: fx.Node) -> Result:
    target, source = t.name(node.args[0]), t.name(node.args[1])  # type: ignore[arg-type]
    size = t.tensors[target].shape
    dim = int(node.args[2]) % len(size)  # type: ignore[arg-type]
    at = int(node.args[3]) % size[dim]  # type: ignore[arg-type]
    return _written(t, target, _unsqueezed(t, source, dim), dim, at, at + 1)


def _written(t: Translator, target: str, source: str, dim: int, start: int, stop: int) -> str:
    """`target` with the part from start to stop replaced: its pieces around it, put together."""
    size = t.tensors[target].shape[dim]
    before = [sliced(t, target, dim, 0, start)] if start else []
    after = [sliced(t, target, dim, stop, size)] if stop < size else []
    return _joined(t, [*before, source, *after], dim)


@_form("aten.copy.default")
def _copy(t: Translator, node: fx.Node) -> Result:
    source = t.name(node.args[1])  # type: ignore[arg-type]
    return _expanded(t, _cast(t, source, _val(node).dtype), _val(node).shape)


@_form("aten.repeat_interleave.self_int")
def _repeat_interleave(t: Translator, node: fx.Node) -> Result:
    source, count, dim = t.name(node.args[0]), node.args[1], _argument(node, 2, None, "dim")  # type: ignore[arg-type]
    shape = list(t.tensors[source].shape)
    if dim is None:
        shape, dim = [prod(shape)], 0
        source = reshaped(t, source, shape)
    dim %= len(shape)
    wide = [*shape[: dim + 1], int(count), *shape[dim + 1 :]]  # type: ignore[arg-type]
    return reshaped(t, _expanded(t, _unsqueezed(t, source, dim + 1), wide), _val(node).shape)


@_form("aten.repeat.default")
def _repeat(t: Translator, node: fx.Node) -> Result:
    source, counts = t.name(node.args[0]), list(node.args[1])  # type: ignore[arg-type]
    shape = [1] * (len(counts) - len(t.tensors[source].shape)) + list(t.tensors[source].shape)
    apart = [n for size in shape for n in (1, size)]
    wide = [n for count, size in zip(counts, shape, strict=True) for n in (count, size)]
    return reshaped(t, _expanded(t, reshaped(t, source, apart), wide), _val(node).shape)


# -- constants and indices


@_form(
    "aten.zeros_like.default",
    "aten.ones_like.default",
    "aten.full_like.default",
    "aten.empty_like.default",
    "aten.new_zeros.default",
    "aten.new_ones.default",
    "aten.new_full.default",
    "aten.new_empty.default",
    "aten.zeros.default",
    "aten.ones.default",
    "aten.empty.memory_format",
)
def _full(t: Translator, node: fx.Node) -> Result:
    word, value = str(node.target).split(".")[1], _val(node)
    fill: Any = 1 if "ones" in word else 0
    if "full" in word:
        fill = t.arg(node.args[2] if word == "new_full" else node.args[1])
    kwargs = {"dtype": str(value.dtype)}
    return t.emit("aten.full.default", [list(value.shape), fill], value.shape, value.dtype, kwargs)


@_form("aten.index.Tensor")
def _index(t: Translator, node: fx.Node) -> Result:
    source, indices = t.name(node.args[0]), list(node.args[1])  # type: ignore[arg-type]
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if any(_val(index).dtype == torch.bool for _, index in given):
        raise t.error(
            "a boolean mask selects elements: the shape depends on values",
            required="a fixed shape",
            todo="use torch.where(mask, x, 0) instead of x[mask]",
        )
    shape = t.tensors[source].shape
    if len(given) == 1:
        dim, index = given[0]
        return _taken(t, source, dim, _not_negative(t, t.name(index), shape[dim]))
    if [dim for dim, _ in given] == [0, 1] and all(_val(index).shape == shape[:1] for _, index in given):
        first = t.producer(t.name(given[0][1]))
        if first is not None and _counts_rows(first, shape[0]):
            return _picked_rows(t, source, _not_negative(t, t.name(given[1][1]), shape[1]))
    return None


def _not_negative(t: Translator, index: str, size: int) -> str:
    """Indices that count from the end, as [] takes them and other operators do not, counted from the start."""
    shape = t.tensors[index].shape
    is_negative = t.emit("aten.lt.Scalar", [reference(index), 0], shape, torch.bool)
    shifted = t.emit("aten.add.Tensor", [reference(index), size], shape, torch.int64)
    args: list[Arg] = [reference(is_negative), reference(shifted), reference(index)]
    return t.emit("aten.where.self", args, shape, torch.int64)


def _taken(t: Translator, source: str, dim: int, index: str) -> str:
    """x[:, …, index]: index_select for an index of any shape."""
    shape, wanted = t.tensors[source].shape, t.tensors[index].shape
    flat = reshaped(t, index, [prod(wanted)])
    rows = [*shape[:dim], prod(wanted), *shape[dim + 1 :]]
    args: list[Arg] = [reference(source), dim, reference(flat)]
    found = t.emit("aten.index_select.default", args, rows, t.tensors[source].dtype)
    return reshaped(t, found, [*shape[:dim], *wanted, *shape[dim + 1 :]])


def _counts_rows(op: Any, num_rows: int) -> bool:
    """Is this arange(num_rows)?"""
    if op.target == "aten.arange.default":
        return bool(op.args[0] == num_rows)
    is_range = op.target in ("aten.arange.start", "aten.arange.start_step")
    return bool(is_range and list(op.args[:2]) == [0, num_rows] and op.args[2:] in ((), (1,)))


def _picked_rows(t: Translator, source: str, index: str) -> str:
    """x[arange(n), index]: of every row one element."""
    shape = t.tensors[source].shape
    column = reshaped(t, index, [shape[0], *[1] * (len(shape) - 1)])
    wide = _expanded(t, column, [shape[0], 1, *shape[2:]])
    found = gathered(t, source, 1, wide)
    return reshaped(t, found, [shape[0], *shape[2:]])


def gathered(t: Translator, source: str, dim: int, index: str) -> str:
    args: list[Arg] = [reference(source), dim, reference(index)]
    return t.emit("aten.gather.default", args, t.tensors[index].shape, t.tensors[source].dtype)


@_form("aten.topk.default", "aten.sort.default", "aten.sort.stable")
def _topk(t: Translator, node: fx.Node) -> Result:
    """The indices by an operator of their own, the values by a gather: the same gradients, one result each."""
    source, values = t.name(node.args[0]), _val(node)[0]  # type: ignore[arg-type]
    word = str(node.target).split(".")[1]
    if word == "topk":
        options = [_argument(node, 2, -1, "dim"), _argument(node, 3, True, "largest"), _argument(node, 4, True)]
        count = values.shape[options[0]]
    else:
        stable = str(node.target).endswith("stable")
        dim = _argument(node, 2 if stable else 1, -1, "dim")
        options = [dim, _argument(node, 3 if stable else 2, False, "descending"), True]
        count = values.shape[dim]
    options[0] %= values.dim()
    index = t.emit("planloom.topk", [reference(source), count, *options], values.shape, torch.int64)
    return [gathered(t, source, options[0], index), index]


@_form("aten.max.dim", "aten.min.dim")
def _extreme(t: Translator, node: fx.Node) -> Result:
    source, values = t.name(node.args[0]), _val(node)[0]  # type: ignore[arg-type]
    shape = list(t.tensors[source].shape)
    dim = int(node.args[1]) % len(shape)  # type: ignore[arg-type]
    shape[dim] = 1
    target = "aten.argmax.default" if "max" in str(node.target) else "aten.argmin.default"
    index = t.emit(target, [reference(source), dim, True], shape, torch.int64)
    found = gathered(t, source, dim, index)
    return [reshaped(t, found, values.shape), reshaped(t, index, values.shape)]


# -- reductions


@_form("aten.var_mean.correction")
def _var_mean(t: Translator, node: fx.Node) -> Result:
    source, dims = reference(t.name(node.args[0])), t.arg(_argument(node, 1, None, "dim"))  # type: ignore[arg-type]
    keep, (variance, mean) = bool(node.kwargs.get("keepdim", False)), _val(node)
    dims = dims if dims is not None else list(range(_val(node.args[0]).dim()))
    kwargs = {"correction": t.arg(node.kwargs.get("correction")), "keepdim": keep}
    return [
        t.emit("aten.var.correction", [source, dims], variance.shape, variance.dtype, kwargs),
        t.emit("aten.mean.dim", [source, dims, keep], mean.shape, mean.dtype),
    ]


@_form("aten.adaptive_avg_pool1d.default", "aten.adaptive_avg_pool2d.default")
def _pool(t: Translator, node: fx.Node) -> Result:
    if any(size != 1 for size in node.args[1]):  # type: ignore[union-attr]
        return None
    value = _val(node)
    dims = [-1] if "1d" in str(node.target) else [-2, -1]
    args: list[Arg] = [reference(t.name(node.args[0])), dims, True]  # type: ignore[arg-type]
    return t.emit("aten.mean.dim", args, value.shape, value.dtype)


def _loss_form(reduction_at: int) -> Form:
    def form(t: Translator, node: fx.Node) -> Result:
        reduction = _argument(node, reduction_at, 1, "reduction")
        if reduction == 0:
            return None
        source = t.tensors[t.name(node.args[0])]  # type: ignore[arg-type]
        args = [t.arg(a) for a in node.args[:reduction_at]]
        args += [None] * (reduction_at - len(args)) + [0]
        rest = [t.arg(a) for a in node.args[reduction_at + 1 :]]
        kwargs = {k: t.arg(v) for k, v in node.kwargs.items() if k != "reduction"}
        name = t.emit(str(node.target), [*args, *rest], source.shape, _val(node).dtype, kwargs)
        target = "aten.mean.default" if reduction == 1 else "aten.sum.default"
        return t.emit(target, [reference(name)], (), _val(node).dtype)

    return form


LOSSES: dict[str, Form] = {
    "aten.mse_loss.default": _loss_form(2),
    "aten.l1_loss.default": _loss_form(2),
    "aten.smooth_l1_loss.default": _loss_form(2),
    "aten.huber_loss.default": _loss_form(2),
    "aten.binary_cross_entropy_with_logits.default": _loss_form(4),
    "aten.binary_cross_entropy.default": _loss_form(3),
}


@_form("aten.embedding_renorm.default", "aten.embedding_renorm_.default")
def _embedding_renorm(t: Translator, node: fx.Node) -> Result:
    raise t.error(
        "an embedding with max_norm writes into its parameter",
        required="a forward pass that leaves parameters as they are",
        todo="leave out max_norm, and normalize what the embedding returns",
    )


@_form("aten.conv1d.default", "aten.conv2d.default", "aten.conv3d.default", "aten.convolution.default")
def _convolution(t: Translator, node: fx.Node) -> Result:
    """Without the number of groups: it follows from the shapes, of a piece as of the whole."""
    source, weight = (t.name(node.args[i]) for i in range(2))  # type: ignore[arg-type]
    num_dims = len(t.tensors[weight].shape) - 2
    bias = _argument(node, 2, None, "bias")
    if str(node.target) == "aten.convolution.default":
        if node.args[6]:  # transposed
            return None
        stride, padding, dilation = node.args[3:6]
    else:
        stride, padding, dilation = (
            _argument(node, i, default, key) for i, default, key in ((3, 1, "stride"), (4, 0, "padding"), (5, 1, ""))
        )
    if isinstance(padding, str) or len(t.tensors[source].shape) != num_dims + 2:
        return None
    sizes: list[Arg] = [_each(value, num_dims) for value in (stride, padding, dilation)]
    args = [reference(source), reference(weight), t.arg(bias), *sizes]
    return t.emit("planloom.convolution", args, _val(node).shape, _val(node).dtype)


def _each(value: Any, count: int) -> list[int]:
    values = [value] * count if isinstance(value, int) else list(value)
    return values * count if len(values) == 1 else values


@_form(
    "aten._native_batch_norm_legit_functional.default",
    "aten._native_batch_norm_legit_no_training.default",
    "aten._native_batch_norm_legit.no_stats",
)
def _batch_norm(t: Translator, node: fx.Node) -> Result:
    """Batch norm by its parts, in float32 at least; in training the running statistics are results, too."""
    has_running = not str(node.target).endswith("no_stats")
    training = not str(node.target).endswith("no_training.default")
    tensors: list[Any] = [None if a is None else t.name(a) for a in node.args[: 5 if has_running else 3]]  # type: ignore[arg-type]
    source, weight, bias, running_mean, running_var = [*tensors, None, None][:5]
    momentum, eps = (node.args[-2], node.args[-1])
    wide = torch.promote_types(_val(node.args[0]).dtype, torch.float32)
    source = _cast(t, source, wide)
    shape, dtype = t.tensors[source].shape, t.tensors[source].dtype
    column = (1, shape[1], *[1] * (len(shape) - 2))

    def emit(target: str, *args: Any, shape: Sequence[int] = column) -> str:
        return t.emit(target, [reference(a) if isinstance(a, str) else a for a in args], shape, dtype)

    dims: list[Arg] = [i for i in range(len(shape)) if i != 1]
    if training:
        mean = emit("aten.mean.dim", source, dims, True)
        centered = emit("aten.sub.Tensor", source, mean, shape=shape)
        square = emit("aten.mul.Tensor", centered, centered, shape=shape)
        variance = emit("aten.mean.dim", square, dims, True)
    else:
        mean, variance = (reshaped(t, str(name), column) for name in (running_mean, running_var))
        centered = emit("aten.sub.Tensor", source, mean, shape=shape)
    scale = emit("aten.rsqrt.default", emit("aten.add.Tensor", variance, eps))
    result = emit("aten.mul.Tensor", centered, scale, shape=shape)
    if weight is not None:
        result = emit("aten.mul.Tensor", result, reshaped(t, weight, column), shape=shape)
    if bias is not None:
        result = emit("aten.add.Tensor", result, reshaped(t, bias, column), shape=shape)
    result = _cast(t, result, _val(node)[0].dtype)
    if not training or not has_running:
        return [result, None, None]
    count = prod(shape) // shape[1]
    updated = []
    for old, new, factor in ((running_mean, mean, 1.0), (running_var, variance, count / max(count - 1, 1))):
        flat = emit("aten.detach.default", reshaped(t, new, [shape[1]]), shape=[shape[1]])
        share = emit("aten.mul.Tensor", flat, momentum * factor, shape=[shape[1]])  # type: ignore[operator]
        kept = emit("aten.mul.Tensor", old, 1 - momentum, shape=[shape[1]])  # type: ignore[operator]
        updated.append(emit("aten.add.Tensor", kept, share, shape=[shape[1]]))
    return [result, None, None, *updated]


# -- random numbers


@_form("aten.dropout.default", "aten.native_dropout.default")
def _dropout(t: Translator, node: fx.Node) -> Result:
    source, p = t.name(node.args[0]), float(node.args[1])  # type: ignore[arg-type]
    train = node.args[2] is not False
    name = dropped(t, source, p) if p and train else source
    return [name, None] if "native" in str(node.target) else name


def dropped(t: Translator, source: str, p: float) -> str:
    """Dropout whose mask is a function of the element, the operator's number, the step and the seed."""
    tensor, number = t.tensors[source], t.random_number()
    args: list[Arg] = [reference(source), p, number, reference(RANDOM_STATE)]
    return t.emit("planloom.dropout", args, tensor.shape, tensor.dtype)


@_form("aten.rand.default", "aten.rand_like.default", "aten.randn.default", "aten.randn_like.default")
def _random(t: Translator, node: fx.Node) -> Result:
    word = "planloom.normal" if "randn" in str(node.target) else "planloom.uniform"
    return _drawn(t, word, _val(node).shape, _val(node).dtype)


def _drawn(t: Translator, target: str, shape: Sequence[int], dtype: Any) -> str:
    args: list[Arg] = [list(shape), str(dtype), t.random_number(), reference(RANDOM_STATE)]
    return t.emit(target, args, shape, dtype)


@_form("aten.bernoulli.default", "aten.bernoulli.p")
def _bernoulli(t: Translator, node: fx.Node) -> Result:
    value = _val(node)
    dtype = value.dtype if value.dtype.is_floating_point else torch.float32
    drawn = reference(_drawn(t, "planloom.uniform", value.shape, dtype))
    if str(node.target).endswith(".p"):
        chosen = t.emit("aten.lt.Scalar", [drawn, node.args[1]], value.shape, torch.bool)  # type: ignore[list-item]
    else:
        chosen = t.emit("aten.lt.Tensor", [drawn, t.arg(node.args[0])], value.shape, torch.bool)
    return _cast(t, chosen, value.dtype)


@_form("aten.scaled_dot_product_attention.default")
def _attention(t: Translator, node: fx.Node) -> Result:
    """With dropout: products, softmax and dropout one by one, for the fused operator draws its own numbers."""
    p, rank = float(_argument(node, 4, 0.0, "dropout_p")), _val(node).dim()
    if not p:
        return _attention_of_one_head(t, node) if rank == 3 else None
    q, k, v = (t.name(node.args[i]) for i in range(3))  # type: ignore[arg-type]
    mask, is_causal = _argument(node, 3, None, "attn_mask"), _argument(node, 5, False, "is_causal")
    scale = _argument(node, 6, None, "scale")
    shape, keys, dtype = t.tensors[q].shape, t.tensors[k].shape, t.tensors[q].dtype
    group = shape[1] // keys[1] if rank == 4 else 1
    if group > 1:
        k, v = (_grouped(t, name, group) for name in (k, v))
        keys = t.tensors[k].shape
    scale = 1 / sqrt(shape[-1]) if scale is None else scale
    scaled = t.emit("aten.mul.Tensor", [reference(q), scale], shape, dtype)
    turned = t.emit("aten.transpose.int", [reference(k), -2, -1], [*keys[:-2], keys[-1], keys[-2]], dtype)
    grid = [*shape[:-1], keys[-2]]
    scores = t.emit("aten.matmul.default", [reference(scaled), reference(turned)], grid, dtype)
    if is_causal:
        causal = t.emit("planloom.causal_mask", [shape[-2], keys[-2]], [shape[-2], keys[-2]], torch.bool)
        scores = _masked(t, scores, causal)
    if mask is not None:
        name = t.name(mask)
        if t.tensors[name].dtype == "bool":
            scores = _masked(t, scores, name)
        else:
            scores = t.emit("aten.add.Tensor", [reference(scores), reference(name)], grid, dtype)
    weights = t.emit("aten._safe_softmax.default", [reference(scores), -1], grid, dtype)
    kept = dropped(t, weights, p)
    out = [*shape[:-1], t.tensors[v].shape[-1]]
    return t.emit("aten.matmul.default", [reference(kept), reference(v)], out, dtype)


def _attention_of_one_head(t: Translator, node: fx.Node) -> str:
    """Attention [batch, sequence, size]: the same with one head."""
    args: list[Arg] = [reference(_unsqueezed(t, t.name(a), 1)) for a in node.args[:3]]  # type: ignore[arg-type]
    rest = [t.arg(a) for a in node.args[3:]]
    kwargs = {key: t.arg(value) for key, value in node.kwargs.items()}
    mask = rest[0] if rest else kwargs.get("attn_mask")
    if isinstance(mask, str) and len(t.tensors[mask[1:]].shape) == 3:
        raised = reference(_unsqueezed(t, mask[1:], 1))
        rest, kwargs = ([raised, *rest[1:]], kwargs) if rest else (rest, {**kwargs, "attn_mask": raised})
    batch, length, size = _val(node).shape
    name = t.emit(str(node.target), [*args, *rest], (batch, 1, length, size), _val(node).dtype, kwargs)
    return reshaped(t, name, _val(node).shape)


def _masked(t: Translator, scores: str, mask: str) -> str:
    shape, dtype = t.tensors[scores].shape, t.tensors[scores].dtype
    inverse = t.emit("aten.logical_not.default", [reference(mask)], t.tensors[mask].shape, torch.bool)
    args: list[Arg] = [reference(scores), reference(inverse), f"{FLOAT_MARK}-inf"]
    return t.emit("aten.masked_fill.Scalar", args, shape, dtype)


def _grouped(t: Translator, name: str, group: int) -> str:
    """Keys or values [batch, heads, …] once for each of a group of queries."""
    batch, heads, length, size = t.tensors[name].shape
    wide = _expanded(t, _unsqueezed(t, name, 2), [batch, heads, group, length, size])
    return reshaped(t, wide, [batch, heads * group, length, size])
