"""What `torch.export` would lose without a word is refused.

A trace holds operators. A custom `autograd.Function` loses its own backward in it, a tensor hook its effect, and a
`torch.no_grad()` region its boundary: the graph would have other gradients than the model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from planloom.errors import CaptureError


@contextmanager
def refusing_own_backwards() -> Iterator[None]:
    """While a model is traced: no backward of the user's own, no hooks on tensors."""
    apply = torch.autograd.Function.apply

    def guarded_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if cls.__module__.startswith("torch."):
            return apply.__func__(cls, *args, **kwargs)  # type: ignore[attr-defined]
        raise CaptureError(
            f"{cls.__qualname__} is an autograd.Function with a backward of its own, which a capture loses",
            given=f"{cls.__module__}.{cls.__qualname__}",
            required="operators whose backward torch knows",
            todo="write it with torch operators; x.detach() cuts gradients",
        )

    def refuse_hook(tensor: torch.Tensor, hook: Any) -> Any:
        raise CaptureError(
            "a tensor hook changes gradients, and a capture loses it",
            given=f"register_hook({getattr(hook, '__name__', hook)!r}) in the forward pass",
            required="a forward pass without hooks on tensors",
            todo="change the value instead of its gradient, or the gradient in the optimizer",
        )

    with (
        patch.object(torch.autograd.Function, "apply", classmethod(guarded_apply)),
        patch.object(torch.Tensor, "register_hook", refuse_hook),
    ):
        yield


def refuse_hidden_no_grad(program: ExportedProgram) -> None:
    """Refuse a `torch.no_grad()` region that reads what has a gradient; others (masks, positions) change nothing."""
    trainable = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind == InputKind.PARAMETER}
    for node in program.graph.nodes:
        if any(source.name in trainable for source in node.all_input_nodes):
            trainable.add(node.name)
            if node.op == "call_function" and "set_grad_enabled" in str(node.target) and node.args[0] is False:
                raise CaptureError(
                    "a torch.no_grad() region of the forward pass computes with parameters",
                    given=f"it reads {', '.join(n.name for n in _tensors(node))} in {_module(node)}",
                    required="a forward pass in which gradients are cut by detach alone",
                    todo="replace `with torch.no_grad():` by .detach() on what the region returns",
                )


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [source for source in node.all_input_nodes if source.op != "get_attr"]


def _module(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]).removeprefix("model").removeprefix(".") if stack else "the model"
