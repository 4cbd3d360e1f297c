"""Forms of views, slices and what is put together."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from torch import fx

from planloom.capture.canonical.table import Result, argument, form, val
from planloom.graph import reference

if TYPE_CHECKING:
    from planloom.capture.translate import Translator


@form(
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten.flatten.using_ints",
    "aten.squeeze.default",
)
def _reshape(t: Translator, node: fx.Node) -> Result:
    return reshaped(t, t.name(node.args[0]), val(node).shape)  # type: ignore[arg-type]


def reshaped(t: Translator, name: str, shape: Sequence[int]) -> str:
    """The tensor in another shape; two views in a row are one."""
    if tuple(shape) == t.tensors[name].shape:
        return name
    return t.emit("aten.reshape.default", [reference(name), list(shape)], shape, t.tensors[name].dtype)


def unsqueezed(t: Translator, name: str, dim: int) -> str:
    shape = list(t.tensors[name].shape)
    shape.insert(dim, 1)
    return t.emit("aten.unsqueeze.default", [reference(name), dim], shape, t.tensors[name].dtype)


def expanded(t: Translator, name: str, shape: Sequence[int]) -> str:
    if tuple(shape) == t.tensors[name].shape:
        return name
    return t.emit("aten.expand.default", [reference(name), list(shape)], shape, t.tensors[name].dtype)


def cast(t: Translator, name: str, dtype: Any) -> str:
    text = str(dtype).removeprefix("torch.")
    if t.tensors[name].dtype == text:
        return name
    kwargs = {"dtype": f"torch.{text}"}
    return t.emit("aten._to_copy.default", [reference(name)], t.tensors[name].shape, text, kwargs)


@form("aten.type_as.default", "aten.to.dtype")
def _type_as(t: Translator, node: fx.Node) -> Result:
    return cast(t, t.name(node.args[0]), val(node).dtype)  # type: ignore[arg-type]


@form("aten.split_with_sizes.default", "aten.split.Tensor", "aten.chunk.default")
def _split(t: Translator, node: fx.Node) -> Result:
    source, dim = t.name(node.args[0]), argument(node, 2, 0, "dim")  # type: ignore[arg-type]
    start, names = 0, []
    for value in val(node):
        at = dim % value.dim()
        stop = start + value.shape[at]
        names.append(sliced(t, source, at, start, stop))
        start = stop
    return names


@form("aten.broadcast_tensors.default")
def _broadcast_tensors(t: Translator, node: fx.Node) -> Result:
    listed: Any = node.args[0]
    return [expanded(t, t.name(part), value.shape) for part, value in zip(listed, val(node), strict=True)]


@form("aten.unbind.int")
def _unbind(t: Translator, node: fx.Node) -> Result:
    source, dim = t.name(node.args[0]), argument(node, 1, 0, "dim")  # type: ignore[arg-type]
    dim %= len(t.tensors[source].shape)
    dtype = t.tensors[source].dtype
    return [t.emit("aten.select.int", [reference(source), dim, i], v.shape, dtype) for i, v in enumerate(val(node))]


@form("aten.slice.Tensor")
def _slice(t: Translator, node: fx.Node) -> Result:
    source = t.name(node.args[0])  # type: ignore[arg-type]
    shape = t.tensors[source].shape
    dim = argument(node, 1, 0) % len(shape)
    if argument(node, 4, 1) != 1:
        return None
    start = argument(node, 2, 0) or 0
    start = max(0, start + shape[dim]) if start < 0 else start
    return sliced(t, source, dim, start, start + val(node).shape[dim])


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


@form("aten.cat.default")
def _cat(t: Translator, node: fx.Node) -> Result:
    dim = argument(node, 1, 0, "dim") % val(node).dim()
    listed: Any = node.args[0]
    parts = [t.name(part) for part in listed if val(part).shape != (0,)]
    return joined(t, [cast(t, part, val(node).dtype) for part in parts], dim)


def joined(t: Translator, parts: Sequence[str], dim: int) -> str:
    parts = [part for part in parts if t.tensors[part].shape[dim]]
    if len(parts) == 1:
        return parts[0]
    first = t.tensors[parts[0]]
    shape = list(first.shape)
    shape[dim] = sum(t.tensors[part].shape[dim] for part in parts)
    name = t.emit("aten.cat.default", [[reference(part) for part in parts], dim], shape, first.dtype)
    t.assembled[name] = (dim, list(parts))
    return name


@form("aten.stack.default")
def _stack(t: Translator, node: fx.Node) -> Result:
    dim = argument(node, 1, 0, "dim") % val(node).dim()
    parts: Any = node.args[0]
    return joined(t, [unsqueezed(t, t.name(part), dim) for part in parts], dim)


@form("aten.slice_scatter.default")
def _slice_scatter(t: Translator, node: fx.Node) -> Result:
    target, source = t.name(node.args[0]), t.name(node.args[1])  # type: ignore[arg-type]
    if argument(node, 5, 1) != 1:
        return None
    size = t.tensors[target].shape
    dim = argument(node, 2, 0) % len(size)
    start = argument(node, 3, 0) or 0
    start = max(0, start + size[dim]) if start < 0 else start
    return _written(t, target, source, dim, start, start + t.tensors[source].shape[dim])


@form("aten.select_scatter.default")
def _select_scatter(t: Translator, node: fx.Node) -> Result:
    target, source = t.name(node.args[0]), t.name(node.args[1])  # type: ignore[arg-type]
    size = t.tensors[target].shape
    dim = int(node.args[2]) % len(size)  # type: ignore[arg-type]
    at = int(node.args[3]) % size[dim]  # type: ignore[arg-type]
    return _written(t, target, unsqueezed(t, source, dim), dim, at, at + 1)


def _written(t: Translator, target: str, source: str, dim: int, start: int, stop: int) -> str:
    """`target` with the part from start to stop replaced: its pieces around it, put together."""
    size = t.tensors[target].shape[dim]
    before = [sliced(t, target, dim, 0, start)] if start else []
    after = [sliced(t, target, dim, stop, size)] if stop < size else []
    return joined(t, [*before, source, *after], dim)


@form("aten.copy.default")
def _copy(t: Translator, node: fx.Node) -> Result:
    source = t.name(node.args[1])  # type: ignore[arg-type]
    return expanded(t, cast(t, source, val(node).dtype), val(node).shape)


@form("aten.repeat_interleave.self_int")
def _repeat_interleave(t: Translator, node: fx.Node) -> Result:
    source, count, dim = t.name(node.args[0]), node.args[1], argument(node, 2, None, "dim")  # type: ignore[arg-type]
    shape = list(t.tensors[source].shape)
    if dim is None:
        shape, dim = [prod(shape)], 0
        source = reshaped(t, source, shape)
    dim %= len(shape)
    wide = [*shape[: dim + 1], int(count), *shape[dim + 1 :]]  # type: ignore[arg-type]
    return reshaped(t, expanded(t, unsqueezed(t, source, dim + 1), wide), val(node).shape)


@form("aten.repeat.default")
def _repeat(t: Translator, node: fx.Node) -> Result:
    source, counts = t.name(node.args[0]), list(node.args[1])  # type: ignore[arg-type]
    shape = [1] * (len(counts) - len(t.tensors[source].shape)) + list(t.tensors[source].shape)
    apart = [n for size in shape for n in (1, size)]
    wide = [n for count, size in zip(counts, shape, strict=True) for n in (count, size)]
    return reshaped(t, expanded(t, reshaped(t, source, apart), wide), val(node).shape)
