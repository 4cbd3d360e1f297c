"""Translate an exported program's nodes into operators.

Every operator of a `Graph` has one tensor as result and no side effect. What torch spells in several ways is spelt in
one (`canonical`); identities (aliases, copies, dropout of zero, metadata assertions) vanish: whether a tensor must be
copied depends on its strides, and these on the device. Parameters keep the model's names, results are numbered by
operator; a tied parameter is one tensor. Operators that depend on inputs and buffers alone go to `given`; what nobody
reads is dropped.
"""

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from planloom.capture.canonical import CANONICAL, is_identity
from planloom.errors import CaptureError
from planloom.graph import FLOAT_MARK, RANDOM_STATE, Arg, Graph, Op, Tensor, reference, referenced

_DROPPED_KWARGS = ("device", "layout", "pin_memory", "non_blocking", "memory_format")
_LARGEST_CONSTANT = 1 << 14
_PREFIX = "model."
_TORCH = os.path.dirname(torch.__file__)
_RECURRENT = ("aten.lstm", "aten.gru", "aten.rnn_", "aten._thnn_fused_", "aten.mkldnn_rnn_layer")
_INSTEAD = {  # for operators with several results
    "var_mean": "var and mean",
    "std_mean": "std and mean",
    "aminmax": "amin and amax",
    "median": "sort and the element in the middle",
    "nanmedian": "sort and the element in the middle",
    "kthvalue": "topk or sort",
    "max_pool2d_with_indices": "max_pool2d without indices",
}


def translate(program: ExportedProgram, model: nn.Module, inputs: Sequence[str]) -> Graph:
    """The graph of an exported `_WithLoss` module, without rules; `inputs` names the leaves of the batch in order."""
    return Translator(program, model, inputs).graph()


class Translator:
    """Emits operators node by node; what `canonical` uses of it is public."""

    def __init__(self, program: ExportedProgram, model: nn.Module, inputs: Sequence[str]) -> None:
        self.program = program
        self.tensors: dict[str, Tensor] = {}
        self.ops: list[Op] = []
        self.assembled: dict[str, tuple[int, list[str]]] = {}
        """Results of `cat`: (dim, pieces), so that a slice of one piece is that piece."""
        self._names: dict[str, str] = {}
        self._results: dict[str, Sequence[str | None]] = {}
        self._counts: dict[str, int] = {}
        self._num_random = 0
        self._node: fx.Node | None = None
        specs = program.graph_signature.input_specs
        user = iter(inputs)
        self._input_names = {spec.arg.name: next(user) for spec in specs if spec.kind == InputKind.USER_INPUT}
        self._reserved = {(spec.target or "").removeprefix(_PREFIX) for spec in specs} | {*inputs, RANDOM_STATE}
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
            self._node = node
            if node.op == "placeholder":
                self._placeholder(node, specs[node.name])
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "get_attr":
                raise self.error("a part of the model was traced as a graph of its own", given=str(node.target))
        loss, updates = self._outputs()
        parameters = self.kinds[InputKind.PARAMETER]
        buffers = list(self.kinds[InputKind.BUFFER])
        buffers += [name for name in parameters if name in self.frozen]
        inputs = self.kinds[InputKind.USER_INPUT]
        live = _live(self.ops, {loss, *updates.values()})
        random = self._num_random > 0
        given, ops = _separate(live, {*inputs, *buffers, RANDOM_STATE})
        used = {name for op in live for name in (*op.inputs, *op.outputs)} | {*updates, *updates.values()}
        return Graph(
            tensors={name: t for name, t in self.tensors.items() if name in used or name in inputs},
            inputs=tuple(inputs),
            parameters=tuple(name for name in parameters if name in used and name not in self.frozen),
            buffers=tuple(name for name in buffers if name in used),
            given=tuple(given),
            ops=tuple(ops),
            expansions=(),
            loss=loss,
            tied=self.tied,
            updates=updates,
            random=random and RANDOM_STATE in used,
        )

    # -- what canonical forms use

    def emit(
        self, target: str, args: Sequence[Arg], shape: Sequence[int], dtype: Any, kwargs: dict[str, Arg] | None = None
    ) -> str:
        """Add an operator; its result is named after it, with a number, unlike anything of the model's."""
        word = target.split(".")[1]
        self._counts[word] = self._counts.get(word, -1) + 1
        name = f"{word}_{self._counts[word]}"
        while name in self._reserved:
            name += "_"
        inputs = tuple(referenced([list(args), kwargs or {}]))
        self._add_tensor(name, tuple(shape), str(dtype).removeprefix("torch."), *self._rows(target, args, inputs))
        self.ops.append(
            Op(
                name=name,
                target=target,
                args=tuple(args),
                kwargs=kwargs or {},
                inputs=inputs,
                outputs=(name,),
                module=_module(self._node),
            )
        )
        return name

    def arg(self, arg: Any) -> Arg:
        """An argument of a node as JSON."""
        if isinstance(arg, fx.Node):
            return reference(self.name(arg))
        if isinstance(arg, list | tuple):
            return [self.arg(item) for item in arg]
        if isinstance(arg, torch.dtype):
            return str(arg)
        if isinstance(arg, float) and not math.isfinite(arg):
            return f"{FLOAT_MARK}{arg}"  # JSON has no infinity
        if arg is None or isinstance(arg, bool | int | float | str):
            return arg
        raise self.error(
            "an argument is not a plain value",
            given=f"{arg!r} ({type(arg).__name__})",
            required="numbers, strings and tensors: shapes must not depend on values",
        )

    def name(self, node: fx.Node) -> str:
        """The tensor that a node stands for."""
        if node.name not in self._names:
            raise self.error(
                f"the second result of {node.target} is used", given=node.name, required="only its first result"
            )
        return self._names[node.name]

    def producer(self, name: str) -> Op | None:
        """The operator that made a tensor, if it is among the last few."""
        return next((op for op in reversed(self.ops) if op.outputs[0] == name), None)

    def random_number(self) -> int:
        """The number of the next random operator."""
        self._num_random += 1
        if RANDOM_STATE not in self.tensors:
            self._add_tensor(RANDOM_STATE, (2,), "int64")
        return self._num_random - 1

    def error(self, what: str, *, given: str = "", required: str = "", todo: str = "") -> CaptureError:
        """An error at the present node, with its module and line of user code."""
        place = place_of(self._node)
        return CaptureError(what, given=f"{given}{' ' * bool(given)}in {place}", required=required, todo=todo)

    # -- nodes

    def _placeholder(self, node: fx.Node, spec: Any) -> None:
        if isinstance(spec.arg, ConstantArgument):
            return
        name = self._input_names.get(node.name, (spec.target or spec.arg.name).removeprefix(_PREFIX))
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
        self._names[node.name] = name
        if name not in self.tensors:
            value = node.meta["val"]
            self._add_tensor(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
            self.kinds[spec.kind].append(name)

    def _constant(self, node: fx.Node, value: torch.Tensor) -> None:
        """A tensor written into the forward pass: its values become an operator's argument."""
        if value.numel() > _LARGEST_CONSTANT:
            raise CaptureError(
                "a large tensor is written into the forward pass",
                given=f"{value.numel()} elements in {place_of(node)}",
                required=f"at most {_LARGEST_CONSTANT}",
                todo="register it as a buffer",
            )
        values = [self.arg(value.tolist()), str(value.dtype)]
        self._names[node.name] = self.emit("planloom.constant", values, value.shape, value.dtype)

    def _add_tensor(self, name: str, shape: tuple[int, ...], dtype: str, rows: str = "", density: float = 1.0) -> None:
        self.tensors[name] = Tensor(name=name, shape=shape, dtype=dtype, rows=rows, density=density)

    def _rows(self, target: str, args: Sequence[Arg], inputs: Sequence[str]) -> tuple[str, float]:
        """The mask and density of an operator's result: that of its ragged input."""
        if target == "planloom.dispatch.default":
            mask = self.tensors[inputs[1]]
            return mask.name, args[2] / mask.shape[0]
        ragged = [self.tensors[name] for name in inputs if self.tensors[name].rows]
        if not ragged or target == "planloom.combine.default":
            return "", 1.0
        if target in ("aten.reshape.default", "aten.expand.default", "aten.permute.default", "aten.transpose.int"):
            raise self.error(
                "the rows of experts are regrouped between their products",
                given=target,
                required="operators that keep [experts, tokens] in front and apart",
                todo="let the experts' activation work on the last dim alone",
            )
        return ragged[0].rows, ragged[0].density

    def _call(self, node: fx.Node) -> None:
        target = str(node.target)
        if "_assert" in target:
            return
        if target == "<built-in function getitem>":
            source: Any = node.args[0]
            found = self._results[source.name][int(str(node.args[1]))]
            if found is not None:
                self._names[node.name] = found
            return
        if is_identity(self, node):
            self._names[node.name] = self.name(node.args[0])  # type: ignore[arg-type]
            return
        canonical = CANONICAL.get(target)
        if canonical is not None:
            result = canonical(self, node)
            if result is not None:
                if isinstance(result, str):
                    self._names[node.name] = result
                else:
                    self._results[node.name] = result
                return
        self._refuse(node, target)
        value = node.meta["val"]
        kwargs = {k: self.arg(v) for k, v in node.kwargs.items() if k not in _DROPPED_KWARGS}
        self._names[node.name] = self.emit(target, [self.arg(a) for a in node.args], value.shape, value.dtype, kwargs)

    def _refuse(self, node: fx.Node, target: str) -> None:
        tags = getattr(node.target, "tags", ())
        if target.startswith(_RECURRENT):
            raise self.error(
                f"recurrent layers are not supported: {target}",
                required="layers without a hidden state of their own (nn.LSTM, nn.GRU and nn.RNN have one)",
                todo="write the steps as a loop with torch operators, or use attention or convolution instead",
            )
        if torch.Tag.nondeterministic_seeded in tags and not target.startswith("aten.scaled_dot_product_attention"):
            raise self.error(
                f"random operator {target} is not supported",
                required="dropout, rand, randn, bernoulli",
                todo="draw these random numbers outside the model and pass them in the batch",
            )
        value = node.meta.get("val")
        results = [item for item in value if isinstance(item, torch.Tensor)] if isinstance(value, tuple | list) else []
        if len(results) > 1 and all(isinstance(size, int) for item in results for size in item.shape):
            instead = _INSTEAD.get(target.split(".")[1])
            raise self.error(
                f"operator {target} has {len(results)} results",
                given=node.name,
                required="operators with one tensor as result",
                todo=f"use {instead}" if instead else "compute each of the results by an operator of its own",
            )
        if not isinstance(value, torch.Tensor):
            raise self.error(
                f"operator {target} does not return one tensor, or one whose shape depends on values",
                given=node.name,
                required="operators with one tensor of a fixed shape as result; no .item(), no boolean indexing",
                todo="express it with other operators, e.g. torch.where",
            )
        if any(not isinstance(size, int) for size in value.shape):
            raise self.error(
                f"the shape of {target} depends on values",
                given=f"{node.name} of shape {tuple(value.shape)}",
                required="shapes that depend on the batch's shape alone; no .item(), no boolean indexing",
                todo="express it with other operators, e.g. torch.where",
            )

    def _outputs(self) -> tuple[str, dict[str, str]]:
        """The loss, and for every buffer that the forward pass writes its new value."""
        updates = {}
        for spec in self.program.graph_signature.output_specs:
            if spec.kind == OutputKind.BUFFER_MUTATION:
                updates[(spec.target or "").removeprefix(_PREFIX)] = self._names[spec.arg.name]
            elif spec.kind == OutputKind.USER_INPUT_MUTATION:
                raise CaptureError(
                    "the forward pass writes into its input",
                    given=f"{spec.target} is written",
                    required="a forward pass that leaves the batch as it is",
                    todo="clone the input before writing into it",
                )
        return self._names[self.program.graph_signature.output_specs[-1].arg.name], updates


def _module(node: fx.Node | None) -> str:
    stack = (node.meta.get("nn_module_stack") if node is not None else None) or {}
    path = list(stack.values())[-1][0] if stack else ""
    return str(path).removeprefix("model").removeprefix(".")


def place_of(node: fx.Node | None) -> str:
    """Module and line of user code of a node, for errors."""
    module = _module(node) or "the model"
    trace = (node.meta.get("stack_trace") if node is not None else None) or ""
    lines = [line.strip() for line in str(trace).splitlines()]
    files = [i for i, line in enumerate(lines) if line.startswith("File ") and not is_machinery(line)]
    if not files:
        return module
    return f"{module}, {lines[files[-1]]}" + (f": {lines[files[-1] + 1]}" if files[-1] + 1 < len(lines) else "")


def is_machinery(line: str) -> bool:
    return f'"{_TORCH}' in line or "/planloom/capture/" in line


def _live(ops: Sequence[Op], wanted: set[str]) -> list[Op]:
    """Operators of whose results something depends."""
    wanted, live = set(wanted), []
    for op in reversed(ops):
        if wanted.intersection(op.outputs):
            wanted.update(op.inputs)
            live.append(op)
    return live[::-1]


def _separate(ops: Sequence[Op], known: set[str]) -> tuple[list[Op], list[Op]]:
    """Operators that depend on inputs and buffers alone, and all others."""
    known, given, rest = set(known), [], []
    for op in ops:
        if all(name in known for name in op.inputs):
            given.append(op)
            known.update(op.outputs)
        else:
            rest.append(op)
    return given, rest
