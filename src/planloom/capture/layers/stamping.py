"""Write the bodies of stamped layers into an exported program.

A *body* is what a traced call left between its two probes. It may refer to the call's arguments, to the layer's own
parameters and buffers, and to nodes of its own; these references are numbers and names, so that the bodies of two
calls can be compared. Two calls of a group with equal bodies vouch for the others: each stamp becomes a copy of the
body, with the stamp's arguments, the own parameters of that very layer, and its path in `nn_module_stack`. Anything
else is reported by group, and the caller traces again without stamping it.
"""

import operator
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from planloom.capture.layers.stubs import Calls, Group, TensorResult, operators

Reference = tuple[str, Hashable]
"""("argument", number), ("own", name in the layer) or ("body", number); two bodies are compared by these."""


_STORED = (InputKind.PARAMETER, InputKind.BUFFER)


class _UnequalError(Exception):
    """Why a group cannot be stamped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    """The nodes of one traced call; `reads` are the nodes in their arguments, in the order of `fx.map_arg`.

    They are resolved at once: when an earlier stamp is replaced, arguments of these nodes are replaced with it.
    """

    nodes: tuple[fx.Node, ...]
    reads: tuple[tuple[Reference, ...], ...]
    results: tuple[Reference, ...]
    stack: dict[str, Any]


def expand_stamps(program: ExportedProgram, model: nn.Module, calls: Calls) -> dict[Hashable, str]:
    """Replace every stamp, in place, and remove the probes; or return the groups that must not be stamped, and why."""
    _, probe, stamp = operators()
    if not any(group.stamped for group in calls.groups.values()):
        _Writer(program).remove([node for node in program.graph.nodes if node.target is probe])
        return {}
    _add_placeholders(program, model)
    nodes = list(program.graph.nodes)
    places = {(n.args[0], n.args[1]): i for i, n in enumerate(nodes) if n.target is probe}
    stamps = {n.args[0]: n for n in nodes if n.target is stamp}
    own = _OwnTensors(program, model)
    bodies: dict[int, _Body] = {}
    refused: dict[Hashable, str] = {}
    for key, group in calls.groups.items():
        if group.stamped:
            try:
                bodies.update(_agreed_body(group, calls, nodes, places, own))
            except _UnequalError as why:
                refused[key] = str(why)
    if refused:
        return refused
    writer = _Writer(program)
    for call, node in stamps.items():  # in the order of the graph: arguments that are stamps were replaced before
        if call in bodies:
            writer.replace(node, bodies[call], own.placeholders(calls.module_of[call]))
    writer.remove([n for n in nodes if n.target is probe])
    writer.finish()
    return {}


def _add_placeholders(program: ExportedProgram, model: nn.Module) -> None:
    """Placeholders for parameters and buffers of layers that were shells, at their places in the order of the model."""
    graph, signature = program.graph, program.graph_signature
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    specs = {spec.target: spec for spec in signature.input_specs if spec.kind in _STORED}
    alike = {_kind(node.meta["val"]): node for node in placeholders.values() if isinstance(node.meta["val"], Tensor)}
    rest = [spec for spec in signature.input_specs if spec.kind not in _STORED]
    anchor = placeholders[rest[0].arg.name]
    ordered: list[InputSpec] = []
    persistent = set(model.state_dict(keep_vars=True))
    stored: list[tuple[InputKind, str, Tensor]] = [
        (InputKind.PARAMETER, name, value) for name, value in model.named_parameters(remove_duplicate=False)
    ]
    stored += [(InputKind.BUFFER, name, value) for name, value in model.named_buffers(remove_duplicate=False)]
    for kind, name, value in reversed(stored):
        spec = specs.get(name)
        if spec is None:
            with graph.inserting_before(anchor):
                node = graph.placeholder("stored_" + name.replace(".", "_"))
            node.meta = dict(alike[_kind(value)].meta)
            is_persistent = None if kind == InputKind.PARAMETER else name in persistent
            spec = InputSpec(kind=kind, arg=TensorArgument(name=node.name), target=name, persistent=is_persistent)
            placeholders[node.name] = node
        ordered.append(spec)
        anchor = placeholders[spec.arg.name]
    signature.input_specs[:] = [*ordered[::-1], *rest]


def _kind(value: Tensor) -> Hashable:
    return (tuple(value.shape), value.stride(), value.dtype, value.device)


class _OwnTensors:
    """From placeholders to the tensors of a layer by their names in it, and back."""

    def __init__(self, program: ExportedProgram, model: nn.Module) -> None:
        named = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        self.tensor_of: dict[fx.Node, Tensor] = {}
        self.node_of: dict[int, fx.Node] = {}
        for spec in program.graph_signature.input_specs:
            if spec.kind in _STORED and spec.target in named:
                tensor, node = named[spec.target], nodes[spec.arg.name]
                self.tensor_of[node] = tensor
                self.node_of[id(tensor)] = node  # the last of the names of a tied tensor is the one that export uses
        self.odd = {n for n, t in self.tensor_of.items() if n.users and self.node_of[id(t)] is not n}

    def names(self, layer: nn.Module) -> dict[fx.Node, str]:
        found: dict[fx.Node, str] = {}
        for name, node in self.placeholders(layer).items():
            found.setdefault(node, name)
        return found

    def placeholders(self, layer: nn.Module) -> dict[str, fx.Node]:
        tensors = [*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False)]
        return {name: self.node_of[id(tensor)] for name, tensor in tensors if id(tensor) in self.node_of}


def _agreed_body(
    group: Group, calls: Calls, nodes: list[fx.Node], places: dict[Any, int], own: _OwnTensors
) -> dict[int, _Body]:
    """For every stamped call of the group, the body that all its traced calls have in common."""
    if own.odd:
        raise _UnequalError(f"export reads tied tensors by other names than expected: {sorted(map(str, own.odd))[:3]}")
    bodies = []
    for call in group.traced:
        if ("enter", call) not in places or ("leave", call) not in places:
            raise _UnequalError("it is called where its nodes cannot be found, inside a region of its own")
        enter, leave = places["enter", call], places["leave", call]
        bodies.append(_body(nodes[enter], nodes[enter + 1 : leave], nodes[leave], own.names(calls.module_of[call])))
    first, *others = bodies
    written = _written(first)
    for other in others:
        if _written(other) != written:
            raise _UnequalError("two calls of it left different operators")
    new = [i for i, leaf in enumerate(_tensor_leaves(group)) if isinstance(leaf, TensorResult)]
    made = _Body(nodes=first.nodes, reads=first.reads, results=tuple(first.results[i] for i in new), stack=first.stack)
    return dict.fromkeys(group.stamped, made)


def _tensor_leaves(group: Group) -> list[Any]:
    assert group.results is not None
    return [leaf for leaf in group.results.leaves if not isinstance(leaf, tuple)]


def _body(enter: fx.Node, between: list[fx.Node], leave: fx.Node, own: dict[fx.Node, str]) -> _Body:
    references: dict[fx.Node, Reference] = {node: ("own", name) for node, name in own.items()}
    reads = []
    for i, node in enumerate(enter.args[2]):  # type: ignore[arg-type]
        references.setdefault(node, ("argument", i))
    for i, node in enumerate(between):
        if node.op != "call_function" or not (
            isinstance(node.target, torch._ops.OpOverload) or node.target is operator.getitem
        ):
            raise _UnequalError(f"it holds {node.op} {node.target}, which is not an operator")
        sources = _sources(node)
        for source in sources:
            if source not in references:
                raise _UnequalError(f"it reads {source}, which is neither an argument nor a parameter of its own")
        reads.append(tuple(references[source] for source in sources))
        references[node] = ("body", i)
    results = tuple(references.get(node, ("elsewhere", node.name)) for node in leave.args[2])  # type: ignore[union-attr, arg-type]
    if any(place == "elsewhere" for place, _ in results):
        raise _UnequalError("it returns a tensor made elsewhere")
    inside = {*between, leave}
    for i, node in enumerate(between):
        if ("body", i) not in results and any(user not in inside for user in node.users):
            raise _UnequalError(f"{node} leaves it otherwise than by being returned")
    return _Body(nodes=tuple(between), reads=tuple(reads), results=results, stack=_stack(enter))


def _sources(node: fx.Node) -> list[fx.Node]:
    """All nodes in the arguments, in order, one as often as it occurs."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _stack(node: fx.Node) -> dict[str, Any]:
    return dict(node.meta.get("nn_module_stack") or {})


def _written(body: _Body) -> Hashable:
    """The body without names: what two calls must have in common."""

    def plain(arg: Any) -> Hashable:
        if isinstance(arg, fx.Node):
            return "%"
        if isinstance(arg, list | tuple):
            return tuple(plain(item) for item in arg)
        if isinstance(arg, dict):
            return tuple((key, plain(item)) for key, item in arg.items())
        return (type(arg), repr(arg))

    def value(found: Any) -> Hashable:
        if isinstance(found, Tensor):
            return (tuple(found.shape), found.stride(), found.dtype, found.device)
        return tuple(map(value, found)) if isinstance(found, list | tuple) else repr(found)

    return (
        tuple((n.target, plain(n.args), plain(n.kwargs), value(n.meta.get("val"))) for n in body.nodes),
        tuple(tuple(_inner_path(node, body.stack)) for node in body.nodes),
        body.reads,
        body.results,
    )


def _inner_path(node: fx.Node, stack: dict[str, Any]) -> list[tuple[str, Any]]:
    """Where in the layer: the modules of a node's stack that are inside the layer, by their paths in it."""
    entries = list(_stack(node).values())
    outer = list(stack.values())
    prefix = str(outer[-1][0]) + "." if outer else ""
    inner = entries[len(outer) :]
    if entries[: len(outer)] != outer or not all(str(path).startswith(prefix) for path, _ in inner):
        raise _UnequalError(f"{node} is recorded under modules outside of it")
    return [(str(path).removeprefix(prefix), cls) for path, cls in inner]


class _Writer:
    """Edits a program's graph."""

    def __init__(self, program: ExportedProgram) -> None:
        self.graph, self.signature = program.graph, program.graph_signature

    def replace(self, stamp: fx.Node, body: _Body, own: dict[str, fx.Node]) -> None:
        arguments: list[fx.Node] = list(stamp.args[1])  # type: ignore[arg-type]
        copies: list[fx.Node] = []

        def resolve(reference: Reference) -> fx.Node:
            place, which = reference
            if place == "own":
                return own[str(which)]
            return (arguments if place == "argument" else copies)[which]  # type: ignore[call-overload]

        outer = _stack(stamp)
        prefix = str(list(outer.values())[-1][0]) if outer else ""
        with self.graph.inserting_before(stamp):
            for node, reads in zip(body.nodes, body.reads, strict=True):
                sources = map(resolve, reads)
                copy = self.graph.node_copy(node, lambda _, sources=sources: next(sources))
                inner = {f"{prefix}.{path}": (f"{prefix}.{path}", cls) for path, cls in _inner_path(node, body.stack)}
                copy.meta = {**node.meta, "nn_module_stack": {**outer, **inner}}
                copies.append(copy)
        for user in list(stamp.users):  # getitem, one a result
            user.replace_all_uses_with(resolve(body.results[user.args[1]]))  # type: ignore[index]
            self.graph.erase_node(user)
        self.graph.erase_node(stamp)
        self._erase_dead([*arguments, *copies])

    def remove(self, probes: list[fx.Node]) -> None:
        read = [source for node in probes for source in node.all_input_nodes]
        for node in probes:
            self.graph.erase_node(node)
        self._erase_dead(read)

    def _erase_dead(self, nodes: list[fx.Node]) -> None:
        """Nodes that only a probe or a stamp kept alive: export would have removed them."""
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if not node.users and not node._erased and not node.is_impure():
                waiting += node.all_input_nodes
                self.graph.erase_node(node)

    def finish(self) -> None:
        """The signature knows results by the names of nodes, and some nodes are new."""
        for spec, node in zip(self.signature.output_specs, self.graph.output_node().args[0], strict=True):  # type: ignore[arg-type]
            if isinstance(node, fx.Node) and hasattr(spec.arg, "name"):
                spec.arg.name = node.name
