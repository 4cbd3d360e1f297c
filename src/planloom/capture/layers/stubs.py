"""Distinct layers are traced once and stamped: the trace of a model with a hundred equal layers costs that of two.

While `torch.export` runs, the `forward` of every class whose modules are layers (children of a `ModuleList`,
`ModuleDict` or `Sequential`) is replaced. A call belongs to a *group*: layers of one structure (class, modules,
parameters, attributes) called with arguments of one signature (nesting, shapes, strides, dtypes, plain values).

- The first two calls of a group run as they are, between two `planloom::probe` operators. A probe reads the arguments
  or the results and returns nothing: the trace does not change, but it says where the layer begins, where it ends and
  which nodes its arguments and results are.
- Every later call adds one `planloom::stamp` operator with results of the same shapes.

Then `stamping.expand_stamps` compares the two traced bodies and writes a copy for every stamp. The result is the graph
that a full trace gives, node by node. What cannot be told from two calls is not stamped: arguments or buffers that
are written, attributes that change, results that share memory with arguments, hooks inside a layer, opaque objects as
arguments. An integer that merely numbers the layers (`layer_idx`) is no part of the structure, as long as nobody reads
it: a descriptor on the class watches, and a dict that reports reads is the instance's `__dict__` meanwhile. Outermost
layers win; inside a layer that is being traced nothing is stamped.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial, wraps
from itertools import islice
from types import BuiltinFunctionType, FunctionType
from typing import Any, cast
from unittest.mock import patch

import msgspec
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # tried on torch 2.11 and 2.13; export flattens with it too

from planloom.capture.layers.structure import MODULE_DICTS, PLAIN, TRACED_CALLS, Layer, attributes_of, find_layers

_BY_IDENTITY = (type, FunctionType, BuiltinFunctionType)


@cache
def operators() -> tuple[torch.library.Library, Any, Any]:
    """The operators `probe` and `stamp`, registered with torch once; the library must outlive them.

    `torch.fx.node.has_side_effect` keeps probes from being removed as dead code (not private, but not stable either;
    tried on torch 2.11 and 2.13).
    """
    library = torch.library.Library("planloom", "FRAGMENT")
    library.define("probe(str place, int call, Tensor[] tensors) -> ()")
    library.define("stamp(int call, Tensor[] inputs, Tensor[] own, str results) -> Tensor[]")
    for name, function in (("probe", _probe), ("stamp", _stamp)):
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"planloom::{name}", function, lib=library)
    probe, stamp = torch.ops.planloom.probe.default, torch.ops.planloom.stamp.default
    torch.fx.node.has_side_effect(probe)
    return library, probe, stamp


def _probe(place: str, call: int, tensors: list[Tensor]) -> None:
    return None


def _stamp(call: int, inputs: list[Tensor], own: list[Tensor], results: str) -> list[Tensor]:
    return [
        torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=device)
        for shape, stride, dtype, device in msgspec.json.decode(results)
    ]


# --- calls -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorResult:
    """A result that the layer makes: all that a later stand-in for it must be."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """`leaves`: a new tensor, the number of the argument that is passed on, or a plain value in a tuple of one."""

    nesting: pytree.TreeSpec
    leaves: tuple[TensorResult | int | tuple[Any], ...]


@dataclass(slots=True, kw_only=True)
class Group:
    """Calls that are alike. `traced` and `stamped` number calls; `refused` says why there is nothing to stamp."""

    results: Results | None = None
    traced: list[int] = field(default_factory=list)
    stamped: list[int] = field(default_factory=list)
    refused: str = ""


class ShellError(Exception):
    """A layer that was taken for a copy of others must be traced after all."""


class Calls:
    """What happened to the calls of layers in one trace."""

    def __init__(self, layers: list[Layer], refused: dict[Hashable, str]) -> None:
        self.layers = {id(vars(layer.module)): layer for layer in layers}
        self.layers |= {id(vars(layer.shell)): layer for layer in layers if layer.shell is not None}
        self.groups: dict[Hashable, Group] = {key: Group(refused=why) for key, why in refused.items()}
        self.module_of: list[nn.Module] = []  # of every call that was traced or stamped
        self._active: Group | None = None

    def take(self, cls: type, forward: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """One call of a layer: as it is, traced between probes, or stamped."""
        layer = self.layers.get(id(vars(module)))  # torch's stand-in for a shared module has the dict of the original
        if layer is None or type(layer.module) is not cls or (self._active is not None and layer.shell is None):
            return forward(module, *args, **kwargs)
        if layer.shell is not None and vars(module) is not vars(layer.shell):
            raise ShellError(f"{cls.__name__} is called past its container")
        leaves, nesting = pytree.tree_flatten((args, kwargs))
        changed = attributes_of(layer.shell or layer.module) != layer.attributes
        signature = None if changed else _signature(leaves)
        key = (layer.structure, signature, str(nesting))
        group = None if signature is None else self.groups.setdefault(key, Group())
        if layer.shell is not None and (group is None or group.refused or len(group.traced) < TRACED_CALLS):
            raise ShellError(f"{cls.__name__} is called in a way of its own")
        if group is None or group.refused:
            return forward(module, *args, **kwargs)
        self.module_of.append(layer.module)
        call = partial(forward, module, *args, **kwargs)
        if len(group.traced) < TRACED_CALLS:
            return self._traced(group, layer, call, leaves, (args, kwargs))
        return self._stamped(group, layer, call, leaves)

    def read(self, name: str) -> None:
        """A number was read: within its layer's own call it counts, and no layer of this group is like another."""
        if self._active is not None:
            self._active.refused = f"reads its number {name}"

    def _traced(self, group: Group, layer: Layer, forward: Callable[[], Any], leaves: list[Any], arguments: Any) -> Any:
        _, probe, _ = operators()
        call = len(self.module_of) - 1
        before = _state(layer.module, leaves)
        probe("enter", call, _tensors(leaves))
        self._active = group
        try:
            returned = forward()
        finally:
            self._active = None
        results, nesting = pytree.tree_flatten(returned)
        probe("leave", call, _tensors(results))
        group.traced.append(call)
        found = _results(results, nesting, leaves, layer.module)
        if isinstance(found, str):
            group.refused = found
        elif _state(layer.module, leaves) != before or _changed(arguments, leaves):
            group.refused = "writes arguments, buffers or attributes"
        elif group.results is not None and group.results != found:
            group.refused = "returns other shapes or values the second time"
        group.results = found if isinstance(found, Results) else None
        return returned

    def _stamped(self, group: Group, layer: Layer, forward: Callable[[], Any], leaves: list[Any]) -> Any:
        _, _, stamp = operators()
        assert group.results is not None
        call = len(self.module_of) - 1
        new = [leaf for leaf in group.results.leaves if isinstance(leaf, TensorResult)]
        whole = layer.shell is None
        trainable = (p for p in layer.module.parameters() if p.requires_grad and whole)
        own = list(islice(trainable, 1))  # so that results require gradients as they would
        described = msgspec.json.encode([(r.shape, r.stride, r.dtype, r.device) for r in new]).decode()
        made = stamp(call, _tensors(leaves), own, described)
        if [t.requires_grad for t in made] != [r.requires_grad for r in new]:
            if not whole:
                raise ShellError("results require gradients that arguments do not")
            group.refused = "returns tensors of which only some require gradients"
            return forward()
        group.stamped.append(call)
        results, stand_ins = [], iter(made)
        for leaf in group.results.leaves:
            if isinstance(leaf, TensorResult):
                results.append(next(stand_ins))
            else:
                results.append(leaves[leaf] if isinstance(leaf, int) else leaf[0])
        return pytree.tree_unflatten(results, group.results.nesting)


def _signature(leaves: list[Any]) -> Hashable:
    """What two calls must have in common; None where an argument is an object that a call could change or read."""
    order: dict[int, int] = {}
    signature: list[Hashable] = ["call"]
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            place = order.setdefault(id(leaf), len(order))
            described = (tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.device)
            signature.append((place, *described, leaf.requires_grad))
        elif isinstance(leaf, PLAIN):
            signature.append((type(leaf), repr(leaf)))
        elif isinstance(leaf, _BY_IDENTITY):
            signature.append(id(leaf))
        else:
            return None
    return (tuple(signature), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))


def _results(leaves: list[Any], nesting: pytree.TreeSpec, arguments: list[Any], module: nn.Module) -> Results | str:
    """What a call returned, or why no stand-in for it can be made."""
    given = {id(leaf): i for i, leaf in enumerate(arguments) if isinstance(leaf, Tensor)}
    shared = {_memory(t) for t in (*_tensors(arguments), *module.parameters(), *module.buffers())}
    described: list[TensorResult | int | tuple[Any]] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor) and id(leaf) in given:
            described.append(given[id(leaf)])
        elif isinstance(leaf, Tensor):
            if _memory(leaf) in shared:
                return "returns a tensor that shares memory with an argument, a parameter or another result"
            shared.add(_memory(leaf))
            shape, dtype = tuple(leaf.shape), str(leaf.dtype).removeprefix("torch.")
            grad = leaf.requires_grad
            result = TensorResult(
                shape=shape, stride=leaf.stride(), dtype=dtype, device=str(leaf.device), requires_grad=grad
            )
            described.append(result)
        elif isinstance(leaf, PLAIN):
            described.append((leaf,))
        else:
            return f"returns a {type(leaf).__name__}"
    return Results(nesting=nesting, leaves=tuple(described))


def _state(module: nn.Module, leaves: list[Any]) -> Hashable:
    """Changes when a call writes into its arguments, parameters or buffers, or sets an attribute of its modules."""
    tensors = (*_tensors(leaves), *module.parameters(), *module.buffers())
    return (tuple(t._version for t in tensors), attributes_of(module))


def _changed(arguments: Any, leaves: list[Any]) -> bool:
    """Does a list or dict among the arguments hold other things than before?"""
    now = pytree.tree_leaves(arguments)
    return len(now) != len(leaves) or any(a is not b for a, b in zip(now, leaves, strict=True))


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(leaves: list[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


# --- while tracing ---------------------------------------------------------------------------------------------------


class _WatchedNumber:
    """A data descriptor that tells who reads an attribute which instances keep in their own dict."""

    def __init__(self, name: str, calls: Calls) -> None:
        self.name, self.calls = name, calls

    def __get__(self, instance: Any, owner: type) -> Any:
        if instance is None or self.name not in vars(instance):
            raise AttributeError(self.name)
        self.calls.read(self.name)
        return vars(instance)[self.name]

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self.name] = value

    def __delete__(self, instance: Any) -> None:
        del vars(instance)[self.name]


class _WatchedDict(dict[str, Any]):
    """The `__dict__` of a module with numbers: tells who reads one past the descriptor, `vars(self)["layer_idx"]`.

    Python itself looks attributes up without these methods. `__iter__` is here so that `dict(d)`, `{**d}` and `update`
    take the items by `keys` and `__getitem__`, as of any mapping.
    """

    __slots__ = ("calls", "numbers")

    def __init__(self, content: dict[str, Any], numbers: set[str]) -> None:
        super().__init__(content)
        self.numbers, self.calls = numbers, cast("Calls | None", None)

    def _read(self, names: Iterable[Any]) -> None:
        if self.calls is not None:
            for name in names:
                if name in self.numbers:
                    self.calls.read(name)

    def __getitem__(self, name: str) -> Any:
        self._read((name,))
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._read((name,))
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self._read((name,))
        return super().pop(name, *default)

    def setdefault(self, name: str, default: Any = None) -> Any:
        self._read((name,))
        return super().setdefault(name, default)

    def __iter__(self) -> Iterator[str]:
        return super().__iter__()

    def _of_all(name: str) -> Any:  # type: ignore[misc]  # noqa: N805
        method = getattr(dict, name)

        def read_all(self: "_WatchedDict", *args: Any) -> Any:
            self._read(self.numbers)
            return method(self, *args)

        return read_all

    items, values, copy, popitem = map(_of_all, ("items", "values", "copy", "popitem"))
    __eq__, __ne__, __or__, __ror__, __repr__ = map(_of_all, ("__eq__", "__ne__", "__or__", "__ror__", "__repr__"))
    __hash__ = None  # type: ignore[assignment]


@contextmanager
def _watched_dicts(layers: list[Layer]) -> Iterator[list[_WatchedDict]]:
    """While this is open, modules with numbers have a `__dict__` that tells who reads these."""
    numbers: dict[int, tuple[nn.Module, set[str]]] = {}
    for layer in layers:
        for path, name in layer.numbers:
            module = layer.module.get_submodule(path)
            numbers.setdefault(id(module), (module, set()))[1].add(name)
    before = [(module, vars(module)) for module, _ in numbers.values()]
    dicts = [_WatchedDict(vars(module), names) for module, names in numbers.values()]
    try:
        for (module, _), watched in zip(before, dicts, strict=True):
            object.__setattr__(module, "__dict__", watched)
        yield dicts
    finally:
        for module, original in before:
            object.__setattr__(module, "__dict__", original)


@contextmanager
def stamping_layers(model: nn.Module, refused: dict[Hashable, str], *, shells: bool) -> Iterator[Calls]:
    """While this is open, calls of layers are taken note of and repeated ones stamped; all is restored after.

    With `shells`, layers that will presumably be stamped are out of the model meanwhile: torch.export spends time on
    every parameter, read or not. Where the presumption is wrong there is an error, and the caller tries without.
    """
    layers = find_layers(model)
    with ExitStack() as stack:
        stack.enter_context(_restored(list(model.modules())))
        dicts = stack.enter_context(_watched_dicts(layers))  # before any dict is known by its identity
        if shells:
            layers = _with_shells(model, layers)
        calls = Calls(layers, refused)
        for watched_dict in dicts:
            watched_dict.calls = calls
        shell_of = {id(layer.module): layer.shell for layer in layers if layer.shell is not None}
        for parent in list(model.modules()) if shell_of else ():
            parent._modules |= {name: shell_of[id(m)] for name, m in parent._modules.items() if id(m) in shell_of}
        for cls in {type(layer.module) for layer in layers}:
            stack.enter_context(patch.object(cls, "forward", _replacement(cls, calls)))
        watched = {(type(layer.module.get_submodule(path)), name) for layer in layers for path, name in layer.numbers}
        for cls, name in watched:
            stack.enter_context(patch.object(cls, name, _WatchedNumber(name, calls), create=True))
        yield calls


@contextmanager
def _restored(modules: list[nn.Module]) -> Iterator[None]:
    """All attributes of these modules, and the modules and hooks in them, are afterwards what they were.

    A forward may set attributes, and Hugging Face's may install hooks, once for all: while some layers are shells.
    """
    saved = [
        (module, dict(vars(module)), {k: dict(v) for k, v in vars(module).items() if k in MODULE_DICTS})
        for module in modules
    ]
    try:
        yield
    finally:
        for module, attributes, inner in saved:
            vars(module).clear()
            vars(module).update(attributes)
            for name, items in inner.items():
                attributes[name].clear()
                attributes[name].update(items)


def _with_shells(model: nn.Module, layers: list[Layer]) -> list[Layer]:
    """Shells for all but the first layers of a structure, where they are in one place only and share no tensor."""
    places = Counter(id(child) for parent in model.modules() for child in parent._modules.values())
    names = Counter(id(tensor) for tensor in _named_tensors(model).values())
    seen: Counter[Hashable] = Counter()
    result = []
    for layer in layers:
        seen[layer.structure] += 1
        tensors = _named_tensors(layer.module).values()
        alone = places[id(layer.module)] == 1 and Counter(map(id, tensors)) == {id(t): names[id(t)] for t in tensors}
        shell = _shell(layer.module) if alone and seen[layer.structure] > TRACED_CALLS else None
        result.append(layer if shell is None else replace(layer, shell=shell, attributes=attributes_of(shell)))
    return result


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    tensors = dict(module.named_parameters(remove_duplicate=False))
    return tensors | dict(module.named_buffers(remove_duplicate=False))


def _shell(module: nn.Module) -> nn.Module:
    shell = type(module).__new__(type(module))
    vars(shell).update(vars(module), _parameters={}, _buffers={}, _modules={}, _non_persistent_buffers_set=set())
    return shell


def _replacement(cls: type, calls: Calls) -> Callable[..., Any]:
    forward = cls.forward  # type: ignore[attr-defined]

    @wraps(forward)
    def take(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return calls.take(cls, forward, self, args, kwargs)

    return take
