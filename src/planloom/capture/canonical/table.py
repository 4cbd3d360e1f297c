"""The table of canonical forms, and what all of them use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

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


def form(*targets: str) -> Callable[[Form], Form]:
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
        shape, dims = val(args[0]).shape, argument(node, 2, [])
        return bool(dims) and all(s % shape[d] == 0 for s, d in zip(args[1], dims, strict=True))  # type: ignore[arg-type]
    if target in ("aten._to_copy.default", "aten.to.dtype", "aten.type_as.default"):
        return bool(val(node).dtype == val(args[0]).dtype)
    if target in ("aten.expand.default", "aten.reshape.default", "aten.view.default", "aten._unsafe_view.default"):
        return bool(val(node).shape == val(args[0]).shape)
    if target == "aten.slice.Tensor":
        return bool(val(node).shape == val(args[0]).shape and argument(node, 4, 1) == 1)
    return False


def val(node: Any) -> Any:
    return node.meta["val"]


def argument(node: fx.Node, index: int, default: Any, key: str = "") -> Any:
    """A positional or keyword argument."""
    if len(node.args) > index:
        return node.args[index]
    return node.kwargs.get(key, default)
