"""Forms of constants and indices."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from planloom.capture.canonical.shapes import expanded, reshaped
from planloom.capture.canonical.table import Result, argument, form, val
from planloom.graph import Arg, reference

if TYPE_CHECKING:
    from planloom.capture.translate import Translator


@form(
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
    word, value = str(node.target).split(".")[1], val(node)
    fill: Any = 1 if "ones" in word else 0
    if "full" in word:
        fill = t.arg(node.args[2] if word == "new_full" else node.args[1])
    kwargs = {"dtype": str(value.dtype)}
    return t.emit("aten.full.default", [list(value.shape), fill], value.shape, value.dtype, kwargs)


@form("aten.index.Tensor")
def _index(t: Translator, node: fx.Node) -> Result:
    source, indices = t.name(node.args[0]), list(node.args[1])  # type: ignore[arg-type]
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if any(val(index).dtype == torch.bool for _, index in given):
        raise t.error(
            "a boolean mask selects elements: the shape depends on values",
            required="a fixed shape",
            todo="use torch.where(mask, x, 0) instead of x[mask]",
        )
    shape = t.tensors[source].shape
    if len(given) == 1:
        dim, index = given[0]
        return _taken(t, source, dim, _not_negative(t, t.name(index), shape[dim]))
    if [dim for dim, _ in given] == [0, 1] and all(val(index).shape == shape[:1] for _, index in given):
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
    wide = expanded(t, column, [shape[0], 1, *shape[2:]])
    found = gathered(t, source, 1, wide)
    return reshaped(t, found, [shape[0], *shape[2:]])


def gathered(t: Translator, source: str, dim: int, index: str) -> str:
    args: list[Arg] = [reference(source), dim, reference(index)]
    return t.emit("aten.gather.default", args, t.tensors[index].shape, t.tensors[source].dtype)


@form("aten.topk.default", "aten.sort.default", "aten.sort.stable")
def _topk(t: Translator, node: fx.Node) -> Result:
    """The indices by an operator of their own, the values by a gather: the same gradients, one result each."""
    source, values = t.name(node.args[0]), val(node)[0]  # type: ignore[arg-type]
    word = str(node.target).split(".")[1]
    if word == "topk":
        options = [argument(node, 2, -1, "dim"), argument(node, 3, True, "largest"), argument(node, 4, True)]
        count = values.shape[options[0]]
    else:
        stable = str(node.target).endswith("stable")
        dim = argument(node, 2 if stable else 1, -1, "dim")
        options = [dim, argument(node, 3 if stable else 2, False, "descending"), True]
        count = values.shape[dim]
    options[0] %= values.dim()
    index = t.emit("planloom.topk", [reference(source), count, *options], values.shape, torch.int64)
    return [gathered(t, source, options[0], index), index]


@form("aten.max.dim", "aten.min.dim")
def _extreme(t: Translator, node: fx.Node) -> Result:
    source, values = t.name(node.args[0]), val(node)[0]  # type: ignore[arg-type]
    shape = list(t.tensors[source].shape)
    dim = int(node.args[1]) % len(shape)  # type: ignore[arg-type]
    shape[dim] = 1
    target = "aten.argmax.default" if "max" in str(node.target) else "aten.argmin.default"
    index = t.emit(target, [reference(source), dim, True], shape, torch.int64)
    found = gathered(t, source, dim, index)
    return [reshaped(t, found, values.shape), reshaped(t, index, values.shape)]
