"""Batches: whatever a model's `forward` takes, as named tensors.

A batch is a tensor, a tuple of positional arguments or a dict of keyword arguments; values may be nested tuples, lists
and dicts, and leaves may be plain values (`return_loss=True`). Every leaf has a name: `input_ids`, `images.0`. A plan
records the *spec* of its batch, name → (shape, dtype); a plain value is recorded as `((), "=…")` with its JSON.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from planloom.errors import CaptureError

Batch = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any]
Spec = Mapping[str, tuple[tuple[int, ...], str]]
_VALUE_MARK = "="


def keyword_arguments(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """The batch as keyword arguments of the model's `forward`."""
    if isinstance(batch, Mapping):
        return dict(batch)
    positional = (batch,) if isinstance(batch, Tensor) else tuple(batch)
    parameters = inspect.signature(model.forward).parameters
    names = [name for name, p in parameters.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    star = next((name for name, p in parameters.items() if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
    if len(positional) > len(names) and star is not None:
        raise CaptureError(
            f"{type(model).__name__}.forward takes *{star}, and the tensors of a batch need names",
            given=f"forward{inspect.signature(model.forward)} and {len(positional)} positional arguments",
            required="a name for every argument of the batch",
            todo=f"name them, forward(self, x, y) for forward(self, *{star}), or wrap the model in a module that does",
        )
    if len(positional) > len(names):
        raise CaptureError(
            f"{type(model).__name__} takes fewer positional arguments than the batch has",
            given=f"{len(positional)} arguments",
            required=f"at most {len(names)}: {', '.join(names)}",
            todo="pass the batch as a dict of keyword arguments",
        )
    return dict(zip(names, positional, strict=False))


def leaves(arguments: Mapping[str, Any], *, with_empty: bool = False) -> dict[str, Any]:
    """Name → leaf, in the order of the arguments; `with_empty`: empty lists, tuples and dicts are leaves too."""
    found: dict[str, Any] = {}

    def visit(name: str, value: Any) -> None:
        if with_empty and isinstance(value, Mapping | list | tuple) and not value:
            found[name] = value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                visit(f"{name}.{key}", item)
        elif isinstance(value, list | tuple):
            for i, item in enumerate(value):
                visit(f"{name}.{i}", item)
        else:
            found[name] = value

    for key, value in arguments.items():
        visit(key, value)
    return found


def tensors_of(batch: Batch, model: nn.Module | None = None) -> dict[str, Tensor]:
    """The tensors of a batch by name; the model tells the names of positional arguments."""
    if not isinstance(batch, Mapping):
        if model is None:
            raise TypeError("a batch of positional arguments has no names without its model")
        batch = keyword_arguments(model, batch)
    return {name: leaf for name, leaf in leaves(batch).items() if isinstance(leaf, Tensor)}


def batch_spec(batch: Batch, model: nn.Module | None = None) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every input: what a plan records of its batch."""
    if not isinstance(batch, Mapping):
        if model is None:
            raise TypeError("a batch of positional arguments has no names without its model: batch_spec(batch, model)")
        batch = keyword_arguments(model, batch)
    spec: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, leaf in leaves(batch, with_empty=True).items():
        if isinstance(leaf, Tensor):
            spec[name] = (tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."))
        else:
            spec[name] = ((), _VALUE_MARK + _as_json(name, leaf))
    return spec


def _as_json(name: str, value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return msgspec.json.encode(value).decode()
    if isinstance(value, Mapping | list | tuple) and not value:
        return "{}" if isinstance(value, Mapping) else "[]"
    raise CaptureError(
        f"{name!r} of the batch is neither a tensor nor a plain value",
        given=type(value).__name__,
        required="tensors, numbers, strings, None, and tuples, lists and dicts of them",
        todo="pass it to the model's constructor, or convert it",
    )


def arguments_from_spec(spec: Spec) -> dict[str, Any]:
    """Keyword arguments with empty tensors of these shapes, without any memory."""
    nested: dict[str, Any] = {}
    for name, (shape, dtype) in spec.items():
        if dtype.startswith(_VALUE_MARK):
            leaf: Any = msgspec.json.decode(dtype.removeprefix(_VALUE_MARK))
        else:
            leaf = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        at, *path = name.split(".")
        inside = nested
        for key in path:
            inside, at = inside.setdefault(at, {}), key
        inside[at] = leaf
    return {name: _tuples(value) for name, value in nested.items()}


def _tuples(value: Any) -> Any:
    """Dicts with the keys 0, 1, … were tuples; so were lists, which are empty here."""
    if isinstance(value, list):
        return tuple(value)
    if not isinstance(value, dict) or not value:
        return value
    items = {key: _tuples(item) for key, item in value.items()}
    if list(items) == [str(i) for i in range(len(items))]:
        return tuple(items.values())
    return items
