"""Which modules of a model are layers, and which of them are alike.

Layers are the children of a `ModuleList`, `ModuleDict` or `Sequential`. The *structure* of a layer is all that its
forward may depend on but the values of parameters and buffers: class, modules, shapes, dtypes, training flags and
attributes; plain attributes by value, functions, configurations and other objects by identity. An integer that merely
numbers the layers (`layer_idx`) is left out; whoever relies on that must make sure that nobody reads it.
"""

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

TRACED_CALLS = 2
"""Two, so that a body which depends on the layer's place (a reference to layer 0, a scale by number) is told apart."""

_FEWEST_LAYERS = TRACED_CALLS + 1
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.memory_format)
_MODULE_FIELDS = frozenset(nn.Module().__dict__)  # parameters, buffers, modules and hooks, which are looked at apart
MODULE_DICTS = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, dict))
HOOKS = tuple(name for name in MODULE_DICTS if name.endswith("_hooks"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A module that may be stamped; `numbers` are the attributes of its modules that only number it.

    `shell` stands in for a layer that will be stamped: class and attributes without parameters, buffers and modules.
    `attributes` are those of the shell, or of the layer: a parent may change them before the call.
    """

    module: nn.Module
    structure: Hashable
    numbers: frozenset[tuple[str, str]]
    attributes: Hashable
    shell: nn.Module | None = None


def find_layers(model: nn.Module) -> list[Layer]:
    """The outermost layers that repeat; of those that do not, but may be called often, the ones with none inside."""
    found: dict[int, Layer] = {}
    for container in model.modules():
        if isinstance(container, _CONTAINERS):
            children = [child for child in container.children() if _can_be_layer(child)]
            numbers = _numbers(children)
            for child in children:
                found.setdefault(id(child), _layer(child, numbers))
    count = Counter(layer.structure for layer in found.values())
    repeated = {key for key, layer in found.items() if count[layer.structure] >= _FEWEST_LAYERS}
    chosen: dict[int, Layer] = {}

    def visit(module: nn.Module) -> None:
        if id(module) in found and (
            id(module) in repeated or not any(id(inner) in repeated for inner in module.modules())
        ):
            chosen[id(module)] = found[id(module)]
        else:
            for child in module.children():
                visit(child)

    visit(model)
    return list(chosen.values())


def _can_be_layer(module: nn.Module) -> bool:
    """A layer has modules inside (one operator costs as much stamped as traced) and a forward of its class."""
    traceable = not isinstance(module, torch.jit.ScriptModule | torch.fx.GraphModule | nn.ModuleList | nn.ModuleDict)
    return traceable and "forward" not in vars(module) and next(module.children(), None) is not None


def _layer(module: nn.Module, numbers: frozenset[tuple[str, str]]) -> Layer:
    own = frozenset((path, name) for path, name in numbers if (path, name) in _integers(module))
    return Layer(module=module, structure=_structure(module, own), numbers=own, attributes=attributes_of(module))


def _integers(module: nn.Module) -> dict[tuple[str, str], int]:
    return {
        (path, name): value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if type(value) is int and not hasattr(type(part), name)  # a default of the class could be read as well
    }


def _numbers(layers: list[nn.Module]) -> frozenset[tuple[str, str]]:
    """Integers that are the layer's place in its container, counted from anything, wherever a layer has them."""
    offsets: dict[tuple[str, str], list[int]] = {}
    for place, layer in enumerate(layers):
        for key, value in _integers(layer).items():
            offsets.setdefault(key, []).append(value - place)
    return frozenset(key for key, found in offsets.items() if len(found) > 1 and len(set(found)) == 1)


def _structure(layer: nn.Module, numbers: frozenset[tuple[str, str]]) -> Hashable:
    """Equal for two layers exactly if their forwards cannot differ but by the values of parameters and buffers."""
    order: dict[int, int] = {}  # a module or tensor that occurs twice is known by its first place

    def tensor(value: Tensor | None) -> Hashable:
        if value is None:
            return None
        place = order.setdefault(id(value), len(order))
        return (place, type(value), tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad)

    def structure(module: nn.Module | None, path: str) -> Hashable:
        if module is None or id(module) in order:
            return None if module is None else order[id(module)]
        order[id(module)] = len(order)
        return (
            type(module),
            module.training,
            module is not layer and _hooks(module),
            tuple((name, tensor(value)) for name, value in module._parameters.items()),
            tuple((name, tensor(value)) for name, value in module._buffers.items()),
            tuple(
                (name, frozen(value, module))
                for name, value in vars(module).items()
                if name not in _MODULE_FIELDS and (path, name) not in numbers
            ),
            tuple(
                (name, structure(child, f"{path}.{name}" if path else name)) for name, child in module._modules.items()
            ),
        )

    return structure(layer, "")


def attributes_of(layer: nn.Module) -> Hashable:
    """All attributes of a layer's modules, and the hooks inside; its own hooks run outside of its forward."""
    return tuple(
        (
            part.training,
            part is not layer and _hooks(part),
            tuple((name, frozen(value, part)) for name, value in vars(part).items() if name not in _MODULE_FIELDS),
        )
        for part in layer.modules()
    )


def _hooks(module: nn.Module) -> Hashable:
    """Hooks are told apart by the module that they are on: no two modules with hooks are alike."""
    return any(vars(module)[name] for name in HOOKS) and (id(module), tuple(len(vars(module)[name]) for name in HOOKS))


def frozen(value: Any, owner: nn.Module) -> Hashable:
    """A value to compare by: plain ones by value, functions, configurations and everything else by identity."""
    if isinstance(value, PLAIN):
        return (type(value), repr(value))  # repr: nan equals nan, and 0.0 is not -0.0
    if isinstance(value, list | tuple | set | frozenset):
        return (type(value), tuple(frozen(item, owner) for item in value))
    if isinstance(value, dict):
        return (type(value), tuple((frozen(k, owner), frozen(v, owner)) for k, v in value.items()))
    if isinstance(value, MethodType) and value.__self__ is owner:
        return (MethodType, id(value.__func__))
    if isinstance(value, partial):
        return (partial, *(frozen(part, owner) for part in (value.func, value.args, value.keywords)))
    return (type(value), id(value))
