"""Memory of one run, modelled: what is kept between forward and backward, and the peaks of both.

A run is a list of operators over a table of values, each freed after its last use; its backward is autograd's. Both are
executed here without elements (`cost.eager`): every storage enters a meter when it is made and leaves it when nobody
refers to it, so

    forward_peak_bytes    the meter's peak over the forward
    saved_bytes           storages that nodes hold afterwards, and neither a slot of the run nor the batch does
    backward_peak_bytes   the meter's peak over the backward, above where it stood before

Inputs, given tensors, cotangents and outputs are held by the caller throughout: buffers of the program hold them. A run
that is compiled makes and keeps less: `cost.compiled_memory`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from planloom.blocks import BlockGraph
from planloom.cost.compiled_memory import PRODUCTS, FusedTensor, fused_memory
from planloom.cost.eager.operators import Call, execute, is_known
from planloom.cost.eager.tape import Node, Tape
from planloom.cost.eager.values import Meter, Storage, Value, contiguous_strides, item_bytes
from planloom.cost.eager.views import contiguous, local_part
from planloom.cost.rings import with_queries
from planloom.graph import Tensor, is_reference
from planloom.graph.rules import ONE_HOT_FACTOR, flat
from planloom.program import Operand, Operation, Program, Run, run_operations

_BIAS = 2
"""The place of the bias among the tensors of a norm."""

Key = tuple[str, int, str]
"""Where a value lies: ("slot", number, ""), ("given", block of the run, tensor) or ("made", 0, tensor)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMemory:
    """What one forward and backward of a run holds on one device, in bytes.

    saved_bytes: kept between forward and backward in storages that are neither those of an input nor of an output;
    saved_inputs, saved_outputs: whose storage autograd keeps; forward_peak_bytes: the most that was made in the forward
    and alive at one time; backward_peak_bytes: the most above what was alive before the backward.
    """

    saved_bytes: int
    saved_inputs: tuple[bool, ...]
    saved_outputs: tuple[bool, ...]
    forward_peak_bytes: int
    backward_peak_bytes: int


def run_memory(blocks: BlockGraph, program: Program, run: Run, *, fused: bool) -> RunMemory:
    """Memory of one micro-batch of a run on one device, by liveness; `fused`: compiled, which rings are not.

    Of a ring it is that of its opening, queries included; that of its turns is `rings.turn_memory`.
    """
    operations = run_operations(blocks, run, num_micro=program.num_micro_batches)
    if run.turn is not None:
        return _EagerRun(blocks, with_queries(blocks, run), operations).memory()
    if fused:
        return _FusedRun(blocks, run, operations).memory()
    return _EagerRun(blocks, run, operations).memory()


def unknown_targets(blocks: BlockGraph) -> tuple[str, ...]:
    """Operators of a graph of which it is not known what autograd saves: their inputs and outputs are counted."""
    targets = {op.target for op in blocks.graph.ops} | {e.target for e in blocks.graph.expansions}
    return tuple(sorted(target for target in targets if not is_known(target)))


class _AbstractRun:
    """One run without elements."""

    def __init__(self, blocks: BlockGraph, run: Run, operations: Sequence[Operation]) -> None:
        self._graph = blocks.graph
        self._run = run
        self._operations = operations
        self._meter = Meter()
        self._tape = Tape(self._meter)
        self._inputs = [self._slot_value(slot.tensor, slot.layout.local_sizes(slot.sizes)) for slot in run.inputs]

    def _entered(self) -> list[Value]:
        return [
            value if slot.cotangent is None else self._tape.enter(value)
            for slot, value in zip(self._run.inputs, self._inputs, strict=True)
        ]

    def _call(self, operation: Operation, table: Mapping[Key, Value]) -> Call:
        op = self._graph.ops[operation.op]
        values = {operand.tensor: table[_key(operand)] for operand in operation.inputs}
        if operation.is_original:
            args, kwargs = self._graph.expansions[op.expansion].args, {}
        else:
            args, kwargs = op.args, op.kwargs
        filled = [_filled(arg, values) for arg in args]
        is_split, share, rule = False, 1.0, op.rule
        assert rule is not None
        if not operation.is_original and rule.rewrite in ("one_hot", "mean", "shape", "slice"):
            first, whole = operation.inputs[0], self._graph.tensors[op.inputs[0]]
            names = flat(rule.inputs[0])
            if rule.rewrite == "one_hot":
                own = [i for i, name in enumerate(names) if name.split(".")[0] == ONE_HOT_FACTOR]
                is_split = bool(own) and first.sizes[own[0]] != whole.sizes[own[0]]
            elif rule.rewrite == "mean":
                parts = [i for i, name in enumerate(names) if name in rule.contracted]
                share = prod(first.sizes[i] / whole.sizes[i] for i in parts)
            elif rule.rewrite == "shape":
                filled[1] = list(operation.outputs[0].shape)
            elif operation.outputs[0].shape != self._graph.tensors[op.outputs[0]].shape and op.args[4:] in ((), (1,)):
                dim = op.args[1] % len(whole.shape)
                filled = [filled[0], dim, 0, operation.outputs[0].shape[dim]]
        return Call(
            target=operation.target,
            args=filled,
            kwargs=kwargs,
            result=operation.outputs[0],
            is_split=is_split,
            share=share,
        )

    def _slot_value(self, name: str, sizes: Sequence[int]) -> Value:
        tensor = self._graph.tensors[name]
        return _external(_stored_shape(tensor, sizes), tensor.dtype)

    def _given(self, operand: Operand) -> Value:
        """A device's part of a whole given tensor: mostly a view of it."""
        tensor = self._graph.tensors[operand.tensor]
        return local_part(self._tape, _external(tensor.shape, tensor.dtype), tensor.factors, operand.sizes)


class _EagerRun(_AbstractRun):
    """Every operator makes its result, every node keeps what it saves."""

    def memory(self) -> RunMemory:
        anchor = self._tape.new((), "float32")  # the leaf through which inputs enter
        entered = self._entered()
        wanted = [value.edge[0] for value in entered if value.edge is not None]
        outputs = self._forward(entered)
        sent = (
            [contiguous(self._tape, value.detached()) for value in outputs[:-1]] if self._run.turn is not None else []
        )
        del entered, anchor, sent
        forward_peak = self._meter.peak
        held = {id(value.storage) for value in (*self._inputs, *outputs)}
        kept = _saved([value.edge[0] for value in outputs if value.edge is not None])
        roots = [
            (value.edge, _external(value.shape, value.dtype))
            for slot, value in zip(self._run.outputs, outputs, strict=True)
            if value.edge is not None and slot.cotangent is not None
        ]
        saved_bytes = sum(s.num_bytes for key, s in kept.items() if key not in held and s.is_counted)
        saved_inputs = tuple(id(value.storage) in kept for value in self._inputs)
        saved_outputs = tuple(id(value.storage) in kept for value in outputs)
        outputs = [value.detached() for value in outputs]
        del kept
        before = self._meter.restart()
        gradients = self._tape.backward(roots, wanted)
        del roots
        entering = zip(self._run.inputs, self._inputs, strict=True)
        own = [value for slot, value in entering if slot.cotangent is not None]
        results = [
            self._tape.new(value.shape, value.dtype) if gradient is None else contiguous(self._tape, gradient)
            for value, gradient in zip(own, gradients, strict=True)
        ]
        del gradients, results
        return RunMemory(
            saved_bytes=saved_bytes,
            saved_inputs=saved_inputs,
            saved_outputs=saved_outputs,
            forward_peak_bytes=forward_peak,
            backward_peak_bytes=self._meter.peak - before,
        )

    def _forward(self, entered: Sequence[Value]) -> list[Value]:
        table: dict[Key, Value] = {("slot", i, ""): value for i, value in enumerate(entered)}
        last: dict[Key, int] = {}
        for i, operation in enumerate(self._operations):
            for operand in operation.inputs:
                key = _key(operand)
                last[key] = i
                if operand.is_given and key not in table:
                    table[key] = self._given(operand)
            last["made", 0, operation.outputs[0].tensor] = i
        results = [self._result(slot.tensor) for slot in self._run.outputs]
        kept = set(results)
        finished: dict[int, list[Key]] = {}
        for key, i in last.items():
            if key not in kept:
                finished.setdefault(i, []).append(key)
        for i, operation in enumerate(self._operations):
            table["made", 0, operation.outputs[0].tensor] = execute(self._tape, self._call(operation, table))
            for key in finished.get(i, ()):
                del table[key]
        return [table[key] for key in results]

    def _result(self, tensor: str) -> Key:
        """Where an output lies; what opens a ring may hand on what it reads."""
        read = [part.reads[tensor] for part in self._run.blocks if part.turn is not None and tensor in part.reads]
        return ("slot", read[0], "") if read else ("made", 0, tensor)


class _FusedRun(_AbstractRun):
    """What derivatives need is taken from the eager nodes; what is stored and kept is the compiler's choice."""

    def memory(self) -> RunMemory:
        run = self._run
        table: dict[Key, Value] = {("slot", i, ""): value for i, value in enumerate(self._entered())}
        tensors: dict[str, FusedTensor] = {}
        name_of: dict[int, str] = {}
        for i, (slot, value) in enumerate(zip(run.inputs, self._inputs, strict=True)):
            name_of[id(value.storage)] = f"slot {i}"
            tensors[f"slot {i}"] = FusedTensor(
                num_bytes=_num_bytes(value),
                is_input=True,
                carries_cotangent=slot.cotangent is not None,
            )
        kept_values: list[Value] = []
        for number, operation in enumerate(self._operations):
            for operand in operation.inputs:
                if operand.is_given and _key(operand) not in table:
                    table[_key(operand)] = given = self._given(operand)
                    name_of[id(given.storage)] = name = f"given {number} {operand.tensor}"
                    tensors[name] = FusedTensor(num_bytes=operand.num_bytes, is_input=True)
            self._add(number, operation, table, tensors, name_of, kept_values)
        outputs = [name_of[id(table["made", 0, slot.tensor].storage)] for slot in run.outputs]
        found = fused_memory(tensors, outputs)
        held = {*outputs, *(name for name, tensor in tensors.items() if tensor.is_input)}
        return RunMemory(
            saved_bytes=sum(tensors[name].num_bytes for name in found.kept - held),
            saved_inputs=tuple(f"slot {i}" in found.kept for i in range(len(run.inputs))),
            saved_outputs=tuple(name in found.kept for name in outputs),
            forward_peak_bytes=found.forward_peak_bytes,
            backward_peak_bytes=found.backward_peak_bytes,
        )

    def _add(
        self,
        number: int,
        operation: Operation,
        table: dict[Key, Value],
        tensors: dict[str, FusedTensor],
        name_of: dict[int, str],
        kept_values: list[Value],
    ) -> None:
        """One operator: its result, and what else its derivative needs, as tensors with names."""
        made = operation.outputs[0]
        before = self._tape.num_nodes
        call = self._call(operation, table)
        result = table["made", 0, made.tensor] = execute(self._tape, call)
        inputs = tuple(dict.fromkeys(name_of[id(table[_key(operand)].storage)] for operand in operation.inputs))
        name = name_of.setdefault(id(result.storage), f"made {number}")
        if name in tensors:  # a view
            return
        needs: list[str] = []
        for value in _saved_since(result, before):
            kept_values.append(value)
            key = id(value.storage)
            if key not in name_of:
                inner = f"inside {number}.{len(needs)}"
                name_of[key] = inner
                is_random = operation.target == "planloom.dropout"
                tensors[inner] = FusedTensor(
                    num_bytes=_num_bytes(value),
                    inputs=() if is_random else inputs,
                    is_product=operation.target in PRODUCTS,
                )
            needs.append(name_of[key])
        if operation.target == "aten.layer_norm.default" and len(inputs) > _BIAS:
            needs = [need for need in needs if need != inputs[_BIAS]]  # eager's node keeps it, no formula has it
        if operation.target == "aten.relu.default" and needs:
            tensors[f"sign {number}"] = FusedTensor(num_bytes=result.num_elements, inputs=inputs)
            needs = [f"sign {number}"]
        tensors[name] = FusedTensor(
            num_bytes=_num_bytes(result),
            inputs=inputs,
            is_product=operation.target in PRODUCTS,
            is_lookup=operation.target == "aten.embedding.default",
            is_sum=operation.target == "aten.add.Tensor",
            needs=tuple(dict.fromkeys(needs)),
            carries_cotangent=result.edge is not None,
        )


def _num_bytes(value: Value) -> int:
    return value.num_elements * item_bytes(value.dtype)


def _saved_since(result: Value, before: int) -> list[Value]:
    """What the nodes behind a result hold, as far as they were made after a given number of nodes."""
    found: list[Value] = []
    waiting = [result.edge[0]] if result.edge is not None else []
    seen = {node.number for node in waiting}
    while waiting:
        node = waiting.pop()
        if node.number <= before:
            continue
        found += node.saved
        for edge in node.next:
            if edge is not None and edge[0].number not in seen:
                seen.add(edge[0].number)
                waiting.append(edge[0])
    return found


def _key(operand: Operand) -> Key:
    if operand.slot is not None:
        return ("slot", operand.slot, "")
    return ("given", operand.part, operand.tensor) if operand.is_given else ("made", 0, operand.tensor)


def _external(shape: tuple[int, ...], dtype: str) -> Value:
    """A tensor that somebody else holds and counts."""
    return Value(Storage(0, None), shape, contiguous_strides(shape), dtype)


def _stored_shape(tensor: Tensor, sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape of a local tensor with these lengths of its factors; of a ragged one, its rows."""
    lengths = iter(sizes)
    shape = tuple(prod(next(lengths) for _ in dim) for dim in tensor.factors)
    return (1, round(shape[0] * shape[1] * tensor.density), *shape[2:]) if tensor.rows else shape


def _filled(arg: Any, values: Mapping[str, Value]) -> Any:
    if is_reference(arg):
        return values[arg[1:]]
    if isinstance(arg, list | tuple):
        return [_filled(item, values) for item in arg]
    return arg


def _saved(roots: Sequence[Node]) -> dict[int, Storage]:
    """Everything that the nodes under these hold, by storage."""
    found: dict[int, Storage] = {}
    seen = {node.number for node in roots}
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        found.update((id(value.storage), value.storage) for value in node.saved)
        for edge in node.next:
            if edge is not None and edge[0].number not in seen:
                seen.add(edge[0].number)
                waiting.append(edge[0])
    return found
