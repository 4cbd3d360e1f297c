"""What `torch.export` would lose without a word is refused.

A trace holds operators. A custom `autograd.Function` loses its own backward in it, a tensor hook its effect, and a
`torch.no_grad()` region its boundary: the graph would have other gradients than the model.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.nn.modules.module import _global_backward_hooks, _global_backward_pre_hooks
from torch.overrides import TorchFunctionMode

from planloom.capture.translate import place_of
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
            given=f"a hook {getattr(hook, '__name__', hook)!r} registered in the forward pass",
            required="a forward pass without hooks on tensors",
            todo="change the value instead of its gradient, or the gradient in the optimizer",
        )

    with (
        patch.object(torch.autograd.Function, "apply", classmethod(guarded_apply)),
        patch.object(torch.Tensor, "register_hook", refuse_hook),
        patch.object(torch.Tensor, "register_post_accumulate_grad_hook", refuse_hook),
    ):
        yield


def refuse_backward_hooks(model: nn.Module, loss: Any = None) -> None:
    """Refuse hooks on gradients that were registered before the capture; hooks of the forward pass are traced."""
    given = None
    if _global_backward_hooks or _global_backward_pre_hooks:
        given = "a backward hook on all modules (torch.nn.modules.module.register_module_full_backward_hook)"
    for part in (model, loss):
        if isinstance(part, nn.Module) and given is None:
            given = _backward_hook(part)
    if given is not None:
        raise CaptureError(
            "a backward hook sees or changes gradients, and a capture loses it",
            given=given,
            required="modules and parameters without backward hooks",
            todo="remove it (handle.remove()); change gradients in the optimizer, or values in a forward hook",
        )


def _backward_hook(model: nn.Module) -> str | None:
    """The first hook on a gradient, in words."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            return f"a backward hook on module {name or type(model).__name__}"
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
                return f"a gradient hook on {kind} {name}"
    return None


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """While a model is traced: no keys and values kept for generation, of which a training loss knows nothing."""
    found: dict[int, Any] = {
        id(module.config): module.config for module in model.modules() if hasattr(module, "config")
    }
    configs = [config for config in found.values() if getattr(config, "use_cache", None) is True]
    try:
        for config in configs:
            config.use_cache = False
        yield
    finally:
        for config in configs:
            config.use_cache = True


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Tracing makes many objects and leaves few cycles: looking for them takes a fifth of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def without_idle_layer_drop(model: nn.Module) -> Iterator[None]:
    """While a model is traced: no draw of random numbers for skipping layers, where the probability is zero.

    BART, mBART, Whisper and others decide before every layer in training whether to skip it: `torch.rand([]) < rate`.
    A trace cannot branch on a value; with a rate of zero, as in nearly all configurations, the answer is always no.
    """
    for name, module in model.named_modules():
        rate = vars(module).get("layerdrop")
        if module.training and rate:
            raise CaptureError(
                "layers that are skipped at random cannot be captured",
                given=f"layerdrop {rate} in {name or 'the model'}",
                required="layerdrop 0",
                todo="set layerdrop (encoder_layerdrop, decoder_layerdrop in the config) to 0",
            )
    with _NoLayerDropAtZero():
        yield


class _NoLayerDropAtZero(TorchFunctionMode):
    """Within it, `torch.rand([]) < rate` is False where the rate is not above zero."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: WeakSet[torch.Tensor] = WeakSet()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.lt and isinstance(args[1], int | float) and args[1] <= 0:
            drawn = any(args[0] is number for number in self._numbers)
            if drawn:
                return False
        result = function(*args, **(kwargs or {}))
        if function is torch.rand and result.dim() == 0:
            self._numbers.add(result)
        return result


def refuse_hidden_no_grad(program: ExportedProgram) -> None:
    """Refuse a `torch.no_grad()` region that reads what has a gradient; others (masks, positions) change nothing."""
    trainable = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind == InputKind.PARAMETER}
    for node in program.graph.nodes:
        if any(source.name in trainable for source in node.all_input_nodes):
            trainable.add(node.name)
            if node.op == "call_function" and "set_grad_enabled" in str(node.target) and node.args[0] is False:
                inside = next((n for n in _region(program, node) if n.meta.get("stack_trace")), node)
                if "torch/utils/checkpoint.py" in (inside.meta.get("stack_trace") or ""):
                    raise CaptureError(
                        "reentrant checkpointing runs the forward pass without gradients, which a capture loses",
                        given=f"torch.utils.checkpoint in {place_of(inside)}",
                        required="checkpointing without reentrance, or none",
                        todo="pass use_reentrant=False to checkpoint (or gradient_checkpointing_kwargs)",
                    )
                raise CaptureError(
                    "a torch.no_grad() region of the forward pass computes with parameters",
                    given=f"it reads {', '.join(n.name for n in _tensors(node))} in {place_of(inside)}",
                    required="a forward pass in which gradients are cut by detach alone",
                    todo="replace `with torch.no_grad():` by .detach() on what the region returns",
                )


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [source for source in node.all_input_nodes if source.op != "get_attr"]


def _region(program: ExportedProgram, node: fx.Node) -> list[fx.Node]:
    """The operators of a region with its own setting of gradients."""
    found = program.graph_module.get_submodule(str(node.args[1].target))  # type: ignore[union-attr]
    return [inside for inside in found.graph.nodes if inside.op == "call_function"]  # type: ignore[union-attr]
