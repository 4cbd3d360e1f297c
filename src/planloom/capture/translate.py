"""Translate an exported program's nodes into operators.

Identities (alias, copies, dropout of zero, metadata assertions) vanish: whether a tensor must be copied depends on its
strides, and these on the device. `split` and its `getitem` become slices, so that every operator has one output; views
are all `reshape`. Parameters keep the model's names, results are numbered by operator; a tied parameter is one tensor.
Operators that depend on inputs and buffers alone go to `given`.
"""

import math
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from planloom.errors import CaptureError
from planloom.graph import FLOAT_MARK, Arg, Graph, Op, Tensor, reference, referenced

_DROPPED_KWARGS = ("device", "layout", "pin_memory", "non_blocking")
_IDENTITIES = ("aten.alias.default", "aten.clone.default", "aten.lift_fresh_copy.default")
_VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
_LARGEST_CONSTANT = 1 << 14
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
        self.counts: dict[str, int] = {}
        specs = program.graph_signature.input_specs
        self.reserved = {(spec.target or spec.arg.name).removeprefix(_PREFIX) for spec in specs}
        first: dict[int, str] = {}
        self.tied = {
            name: first[id(p)]
            for name, p in model.named_parameters(remove_duplicate=False)
            if first.setdefault(id(p), name) != name
        }
        self.frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        self.kinds: dict[InputKind, list[str]] = {kind: [] for kind in InputKind}

    def graph(self) -> Graph:
        self._refuse_mutations()
        specs = {spec.arg.name: spec for spec in self.program.graph_signature.input_specs}
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node, specs[node.name])
            elif node.op == "call_function":
                self._call(node)
        parameters = self.kinds[InputKind.PARAMETER]
        buffers = list(self.kinds[InputKind.BUFFER])
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
        if spec.kind == InputKind.CONSTANT_TENSOR:
            self._constant(node, self.program.constants[spec.target])
            return
        if spec.kind == InputKind.USER_INPUT and name in self.tensors:
            raise CaptureError(
                f"the batch and the model both have {name!r}",
                given=f"an input and a parameter or buffer named {name!r}",
                required="inputs named otherwise than parameters and buffers",
                todo="rename one of them",
            )
        self.names[node.name] = name
        if name not in self.tensors:
            self._add_tensor(name, node.meta["val"])
            self.kinds[spec.kind].append(name)

    def _constant(self, node: fx.Node, value: torch.Tensor) -> None:
        """A tensor written into the forward pass: its values become an operator's argument."""
        if value.numel() > _LARGEST_CONSTANT:
            raise CaptureError(
                "a large tensor is written into the forward pass",
                given=f"{value.numel()} elements in {_module(node) or 'the model'}",
                required=f"at most {_LARGEST_CONSTANT}",
                todo="register it as a buffer",
            )
        dtype = str(value.dtype)
        self._emit(node, "planloom.constant", [self._arg(value.tolist()), dtype], {}, value)

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
        if first is not None and (target in _IDENTITIES or self._is_idle(node, target)):
            self.names[node.name] = self.names[first.name]
            return
        self._refuse_random(node, target)
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise CaptureError(
                f"operator {target} does not return one tensor, or one whose shape depends on values",
                given=f"{node.name} in {_module(node) or 'the model'}",
                required="operators with one tensor of a fixed shape as result; no .item(), no boolean indexing",
                todo="express it with other operators, e.g. torch.where",
            )
        if any(not isinstance(size, int) for size in node.meta["val"].shape):
            raise CaptureError(
                f"the shape of {target} depends on values",
                given=f"{node.name} of shape {tuple(node.meta['val'].shape)} in {_module(node) or 'the model'}",
                required="shapes that depend on the batch's shape alone; no .item(), no boolean indexing",
                todo="express it with other operators, e.g. torch.where",
            )
        kwargs = {k: self._arg(v) for k, v in node.kwargs.items() if k not in _DROPPED_KWARGS}
        target = _VIEWS[-1] if target in _VIEWS else target
        self._emit(node, target, [self._arg(a) for a in node.args], kwargs, node.meta["val"])

    def _is_idle(self, node: fx.Node, target: str) -> bool:
        return target == "aten.dropout.default" and bool(node.args[1] == 0 or not node.args[2])

    def _refuse_random(self, node: fx.Node, target: str) -> None:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and not _is_attention(target):
            raise CaptureError(
                "random operators are not supported yet",
                given=f"{target} in {_module(node) or 'the model'}",
                required="a forward pass without random numbers",
                todo="set the model's dropout to 0, and draw random numbers outside the model",
            )

    def _split(self, node: fx.Node) -> None:
        source, dim = node.args[0], node.args[2] if len(node.args) > 2 else 0
        start, names = 0, []
        for value in node.meta["val"]:
            at = dim % value.dim()  # type: ignore[operator]
            stop = start + value.shape[at]
            names.append(self._emit(node, "aten.slice.Tensor", [self._arg(source), at, start, stop], {}, value))
            start = stop
        self.pieces[node.name] = names

    def _emit(self, node: fx.Node, target: str, args: list[Arg], kwargs: dict[str, Arg], value: Any) -> str:
        """Add an operator; its result is named after it, with a number, unlike anything of the model's."""
        word = target.split(".")[1]
        self.counts[word] = self.counts.get(word, -1) + 1
        name = f"{word}_{self.counts[word]}"
        while name in self.reserved:
            name += "_"
        self._add_tensor(name, value)
        self.names[node.name] = name
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
        return name

    def _arg(self, arg: Any) -> Arg:
        if isinstance(arg, fx.Node):
            return reference(self.names[arg.name])
        if isinstance(arg, list | tuple):
            return [self._arg(item) for item in arg]
        if isinstance(arg, torch.dtype | torch.memory_format):
            return str(arg)
        if isinstance(arg, float) and not math.isfinite(arg):
            return f"{FLOAT_MARK}{arg}"  # JSON has no infinity
        if arg is None or isinstance(arg, bool | int | float | str):
            return arg
        raise CaptureError(
            "an argument is not a plain value",
            given=f"{arg!r} ({type(arg).__name__})",
            required="numbers, strings and tensors: shapes must not depend on values",
        )

    def _refuse_mutations(self) -> None:
        for spec in self.program.graph_signature.output_specs:
            if spec.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION):
                raise CaptureError(
                    "buffers and inputs that change in the forward pass are not supported yet",
                    given=f"{(spec.target or '').removeprefix(_PREFIX)} is written",
                    required="a forward pass that writes no buffer and no input",
                    todo="use a norm without running statistics, such as LayerNorm or GroupNorm",
                )

    def _loss(self) -> str:
        return self.names[self.program.graph_signature.output_specs[-1].arg.name]


def _is_attention(target: str) -> bool:
    """Attention carries the tag for its dropout; its rule refuses dropout."""
    return target.startswith("aten.scaled_dot_product_attention")


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
