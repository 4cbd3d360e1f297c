"""Translate an exported program's nodes into operators.

Identities (alias, dropout of zero, metadata assertions) vanish; `split` and its `getitem` become slices, so that every
operator has one output; names are the model's own; a tied parameter is one tensor. Operators that depend on inputs and
buffers alone go to `given`.
"""

from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from planloom.errors import CaptureError
from planloom.graph import Arg, Graph, Op, Tensor, reference, referenced

_DROPPED_KWARGS = ("device", "layout", "pin_memory", "non_blocking")
_RANDOM = ("aten.dropout.default", "aten.native_dropout.default", "aten.bernoulli.p", "aten.rand.default")
_PREFIX = "model."


def translate(program: ExportedProgram, model: nn.Module) -> Graph:
    """The graph of an exported `_WithLoss` module, without rules."""
    return _Translator(program, model).graph()


class _Translator:
    def __init__(self, program: ExportedProgram, model: nn.Module) -> None:
        self.program = program
        self.names: dict[str, str] = {}
        self.tensors: dict[str, Tensor] = {}
        self.ops: list[Op] = []
        self.pieces: dict[str, list[str]] = {}
        first: dict[int, str] = {}
        self.tied = {
            name: first[id(p)]
            for name, p in model.named_parameters(remove_duplicate=False)
            if first.setdefault(id(p), name) != name
        }
        self.frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        self.kinds: dict[InputKind, list[str]] = {kind: [] for kind in InputKind}

    def graph(self) -> Graph:
        specs = {spec.arg.name: spec for spec in self.program.graph_signature.input_specs}
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node, specs[node.name])
            elif node.op == "call_function":
                self._call(node)
        parameters = self.kinds[InputKind.PARAMETER]
        buffers = [*self.kinds[InputKind.BUFFER], *self.kinds[InputKind.CONSTANT_TENSOR]]
        buffers += [name for name in parameters if name in self.frozen]
        inputs = self.kinds[InputKind.USER_INPUT]
        given, ops = _separate(self.ops, {*inputs, *buffers})
        used = {name for op in (*given, *ops) for name in (*op.inputs, *op.outputs)}
        return Graph(
            tensors={name: t for name, t in self.tensors.items() if name in used or name in inputs},
            inputs=tuple(inputs),
            parameters=tuple(name for name in parameters if name in used and name not in self.frozen),
            buffers=tuple(name for name in buffers if name in used),
            given=tuple(given),
            ops=tuple(ops),
            expansions=(),
            loss=self._loss(),
            tied=self.tied,
        )

    def _placeholder(self, node: fx.Node, spec: Any) -> None:
        name = (spec.target or spec.arg.name).removeprefix(_PREFIX)
        name = self.tied.get(name, name)
        self.names[node.name] = name
        if name not in self.tensors:
            self._add_tensor(name, node.meta["val"])
            self.kinds[spec.kind].append(name)

    def _add_tensor(self, name: str, value: Any) -> None:
        shape, dtype = tuple(value.shape), str(value.dtype).removeprefix("torch.")
        self.tensors[name] = Tensor(name=name, shape=shape, dtype=dtype)

    def _call(self, node: fx.Node) -> None:
        target = str(node.target)
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            return
        if target in ("aten.split_with_sizes.default", "aten.split.Tensor", "aten.chunk.default"):
            self._split(node)
            return
        first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if first is not None and first.name in self.pieces:  # getitem
            self.names[node.name] = self.pieces[first.name][int(str(node.args[1]))]
            return
        if first is not None and (target == "aten.alias.default" or self._is_idle(node, target)):
            self.names[node.name] = self.names[first.name]
            return
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise CaptureError(
                f"operator {target} returns several results, which is not supported yet",
                given=f"{node.name} in {_module(node) or 'the model'}",
                required="operators with one tensor as result",
                todo="express this operator with others",
            )
        kwargs = {k: self._arg(v) for k, v in node.kwargs.items() if k not in _DROPPED_KWARGS}
        self._emit(node, node.name, target, [self._arg(a) for a in node.args], kwargs, node.meta["val"])

    def _is_idle(self, node: fx.Node, target: str) -> bool:
        if target not in _RANDOM:
            return False
        if target == "aten.dropout.default" and (node.args[1] == 0 or not node.args[2]):
            return True
        raise CaptureError(
            "random operators are not supported yet",
            given=f"{target} in {_module(node) or 'the model'}",
            required="a forward pass without random numbers",
            todo="set the model's dropout to 0",
        )

    def _split(self, node: fx.Node) -> None:
        source, dim = node.args[0], node.args[2] if len(node.args) > 2 else 0
        start, names = 0, []
        for i, value in enumerate(node.meta["val"]):
            at = dim % value.dim()  # type: ignore[operator]
            stop = start + value.shape[at]
            self._emit(node, f"{node.name}_{i}", "aten.slice.Tensor", [self._arg(source), at, start, stop], {}, value)
            names.append(f"{node.name}_{i}")
            start = stop
        self.pieces[node.name] = names

    def _emit(self, node: fx.Node, name: str, target: str, args: list[Arg], kwargs: dict[str, Arg], value: Any) -> None:
        self._add_tensor(name, value)
        self.names[name] = name
        inputs = tuple(referenced([args, kwargs]))
        self.ops.append(
            Op(
                name=name,
                target=target,
                args=tuple(args),
                kwargs=kwargs,
                inputs=inputs,
                outputs=(name,),
                module=_module(node),
            )
        )

    def _arg(self, arg: Any) -> Arg:
        if isinstance(arg, fx.Node):
            return reference(self.names[arg.name])
        if isinstance(arg, list | tuple):
            return [self._arg(item) for item in arg]
        if isinstance(arg, torch.dtype | torch.memory_format):
            return str(arg)
        if arg is None or isinstance(arg, bool | int | float | str):
            return arg
        raise CaptureError(
            "an argument is not a plain value",
            given=f"{arg!r} ({type(arg).__name__})",
            required="numbers, strings and tensors: shapes must not depend on values",
        )

    def _loss(self) -> str:
        outputs = self.program.graph_signature.output_specs
        for spec in outputs:
            if spec.kind == OutputKind.BUFFER_MUTATION:
                raise CaptureError(
                    "buffers that change in the forward pass are not supported yet",
                    given=f"{(spec.target or '').removeprefix(_PREFIX)} is written",
                    required="a forward pass that writes no buffer",
                    todo="put this module into eval mode, or use a norm without running statistics",
                )
        return self.names[outputs[-1].arg.name]


def _module(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    return str(path).removeprefix("model").removeprefix(".")


def _separate(ops: list[Op], known: set[str]) -> tuple[list[Op], list[Op]]:
    """Operators that depend on inputs and buffers alone, and all others."""
    known, given, rest = set(known), [], []
    for op in ops:
        if all(name in known for name in op.inputs):
            given.append(op)
            known.update(op.outputs)
        else:
            rest.append(op)
    return given, rest
