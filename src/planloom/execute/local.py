"""A run as a function of one device's local tensors.

The run's operators are prepared once: shape arguments become those of the piece, means divide by the whole size,
one-hot contractions get the piece's offset, and expansions of which the run holds every part become their original
operator again. What is left at call time is a list of callables over a table of values, each freed after its last use.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor

from planloom.blocks import BlockGraph
from planloom.execute.given import local_slice
from planloom.execute.operators import ONE_HOT, operator, plain
from planloom.graph import Arg, Op, is_reference, referenced
from planloom.graph.rules import ONE_HOT_FACTOR, flat
from planloom.layout import Box, Digit
from planloom.program import BlockPiece, Run, piece_of

Key = tuple[str, str]
"""Where a value lies: ("slot", number), ("given", block:tensor) or ("made", tensor)."""


@dataclass(frozen=True, slots=True)
class _Step:
    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Key
    finished: tuple[Key, ...]


class _At:
    """A place in the table of values, inside prepared arguments."""

    __slots__ = ("key",)

    def __init__(self, key: Key) -> None:
        self.key = key


@dataclass(frozen=True, slots=True)
class _Part:
    """Inside prepared arguments: which part of a whole tensor this is, in the index of the whole batch."""

    piece: BlockPiece
    sizes: tuple[int, ...]
    tensor: str


class LocalRun:
    """The forward function of a run at the given coordinates of its mesh."""

    def __init__(self, blocks: BlockGraph, run: Run, coordinates: Mapping[Digit, int], *, num_micro: int) -> None:
        self.run = run
        self._graph = blocks.graph
        self._pieces = [piece_of(blocks.blocks[part.block], part, coordinates, num_micro) for part in run.blocks]
        self._given: dict[Key, tuple[BlockPiece, str]] = {}
        self._steps = self._prepare()

    def __call__(self, inputs: Sequence[Tensor], given: Mapping[str, Tensor], micro: int) -> tuple[Tensor, ...]:
        """Outputs in the order of the run's output slots; `given` holds the whole given tensors."""
        table: dict[Key, Tensor] = {("slot", str(i)): tensor for i, tensor in enumerate(inputs)}
        for key, (piece, name) in self._given.items():
            tensor = self._graph.tensors[name]
            table[key] = local_slice(given[name], tensor.factors, piece.box(tensor.sizes, name, micro))
        for step in self._steps:
            table[step.result] = step.function(*_fill(step.args, table, micro), **_fill(step.kwargs, table, micro))
            for key in step.finished:
                del table[key]
        return tuple(table["made", slot.tensor] for slot in self.run.outputs)

    # -- preparation

    def _prepare(self) -> list[_Step]:
        members = [(index, piece) for piece in self._pieces for index in piece.block.ops]
        members.sort(key=lambda member: member[0])
        originals = self._whole_expansions([index for index, _ in members])
        steps: list[_Step] = []
        for index, piece in members:
            op = self._graph.ops[index]
            if op.expansion in originals:
                if op.outputs[0] == self._graph.expansions[op.expansion].output:
                    steps.append(self._original(op, members))
            else:
                steps.append(self._step(op, piece))
        return self._with_lifetimes(steps)

    def _whole_expansions(self, indices: Sequence[int]) -> set[int]:
        """Expansions of which this run holds every operator and nobody else reads an inner result."""
        inside = set(indices)
        touched = {self._graph.ops[i].expansion for i in indices} - {-1}
        outputs = {slot.tensor for slot in self.run.outputs}
        whole = set()
        for expansion in touched:
            ops = self._graph.expansion_members[expansion]
            result = self._graph.expansions[expansion].output
            inner = {name for i in ops for name in self._graph.ops[i].outputs} - {result}
            read = {name for i in inside - set(ops) for name in self._graph.ops[i].inputs}
            needed = set(referenced(self._graph.expansions[expansion].args))
            is_read = needed.issubset(name for i in ops for name in self._graph.ops[i].inputs)
            if is_read and inside.issuperset(ops) and not inner & (outputs | read) and self._reads_alike(ops):
                whole.add(expansion)
        return whole

    def _reads_alike(self, ops: Sequence[int]) -> bool:
        """Does every operator read a tensor from outside at the same place and as the same piece?"""
        places: dict[str, tuple[int | None, Box]] = {}
        for piece in self._pieces:
            for index in set(ops).intersection(piece.block.ops):
                for name in self._graph.ops[index].inputs:
                    place = (piece.part.reads.get(name), self._local_box(piece, name))
                    if places.setdefault(name, place) != place:
                        return False
        return True

    def _original(self, last: Op, members: Sequence[tuple[int, BlockPiece]]) -> _Step:
        """The original operator of an expansion; each tensor is read as the expanded operator that uses it reads it."""
        expansion = self._graph.expansions[last.expansion]
        readers = {
            name: piece
            for index, piece in reversed(members)
            if self._graph.ops[index].expansion == last.expansion
            for name in self._graph.ops[index].inputs
        }
        args = tuple(self._argument(arg, readers) for arg in expansion.args)
        return _Step(operator(expansion.target), args, {}, ("made", expansion.output), ())

    def _step(self, op: Op, piece: BlockPiece) -> _Step:
        readers = dict.fromkeys(op.inputs, piece)
        args = [self._argument(arg, readers) for arg in op.args]
        kwargs = {key: self._argument(value, readers) for key, value in op.kwargs.items()}
        function = operator(op.target)
        rule = op.rule
        assert rule is not None
        if rule.rewrite == "shape":
            args[1] = list(self._local_shape(piece, op.outputs[0]))
        elif rule.rewrite == "slice":
            args = self._local_slice_args(op, piece, args)
        elif rule.rewrite == "mean":
            function = _scaled(function, self._contracted_share(op, piece))
        elif rule.rewrite == "random":
            sizes = self._graph.tensors[op.outputs[0]].sizes
            kwargs = {"sizes": sizes, "box": _Part(piece, sizes, op.outputs[0])}
        elif rule.rewrite == "one_hot":
            offset = self._one_hot_offset(op, piece)
            if offset is not None:
                function, kwargs = ONE_HOT[op.target], {"offset": offset}
        return _Step(function, tuple(args), kwargs, ("made", op.outputs[0]), ())

    def _argument(self, arg: Arg, readers: Mapping[str, BlockPiece]) -> Any:
        if is_reference(arg):
            return _At(self._key(arg[1:], readers[arg[1:]]))
        if isinstance(arg, list | tuple) and any(True for _ in referenced(arg)):
            return [self._argument(item, readers) for item in arg]
        return plain(arg)

    def _key(self, tensor: str, piece: BlockPiece) -> Key:
        if tensor in piece.part.reads:
            return ("slot", str(piece.part.reads[tensor]))
        if tensor in self._graph.given_names:
            key = ("given", f"{piece.block.index}:{tensor}")
            self._given[key] = (piece, tensor)
            return key
        return ("made", tensor)

    def _local_shape(self, piece: BlockPiece, name: str) -> tuple[int, ...]:
        tensor = self._graph.tensors[name]
        box = iter(self._local_box(piece, name))
        return tuple(prod(stop - start for start, stop in (next(box) for _ in dim)) for dim in tensor.factors)

    def _local_box(self, piece: BlockPiece, name: str) -> Box:
        return piece.box(self._graph.tensors[name].sizes, name)

    def _local_slice_args(self, op: Op, piece: BlockPiece, args: list[Any]) -> list[Any]:
        """A slice of one of several equal pieces: start and stop shrink with the piece."""
        if len(op.args) > 4 and op.args[4] != 1:  # every n-th element, from the same place in every piece
            size = self._graph.tensors[op.inputs[0]].shape[op.args[1]]
            start = op.args[2] or 0
            return [*args[:2], start % size if start < 0 else start, *args[3:]]
        dim = op.args[1] % len(self._graph.tensors[op.inputs[0]].shape)
        whole = self._graph.tensors[op.outputs[0]].shape[dim]
        local = self._local_shape(piece, op.outputs[0])[dim]
        start = (op.args[2] or 0) if len(op.args) > 2 else 0
        if start < 0:
            start += self._graph.tensors[op.inputs[0]].shape[dim]
        if local == whole:
            return args
        return [args[0], dim, start // whole * local, (start // whole + 1) * local]

    def _contracted_share(self, op: Op, piece: BlockPiece) -> float:
        sizes = self._graph.tensors[op.inputs[0]].sizes
        assert op.rule is not None
        contracted = op.rule.contracted
        names = flat(op.rule.inputs[0])
        box = self._local_box(piece, op.inputs[0])
        pairs = [(b, s) for b, s, name in zip(box, sizes, names, strict=True) if name in contracted]
        return prod((stop - start) / size for (start, stop), size in pairs)

    def _one_hot_offset(self, op: Op, piece: BlockPiece) -> int | None:
        """The first index of this device's part of the vocabulary; None if it holds all of it."""
        assert op.rule is not None
        names, sizes = flat(op.rule.inputs[0]), self._graph.tensors[op.inputs[0]].sizes
        factors = [i for i, name in enumerate(names) if name.split(".")[0] == ONE_HOT_FACTOR]
        if not factors:
            return None
        start, stop = self._local_box(piece, op.inputs[0])[factors[0]]
        inner = prod(sizes[i] for i in factors[1:])
        return None if stop - start == sizes[factors[0]] else start * inner

    def _with_lifetimes(self, steps: list[_Step]) -> list[_Step]:
        kept = {("made", slot.tensor) for slot in self.run.outputs}
        last: dict[Key, int] = {}
        for i, step in enumerate(steps):
            for key in (step.result, *_keys((step.args, step.kwargs))):
                last[key] = i
        finished: dict[int, list[Key]] = {}
        for key, i in last.items():
            if key not in kept:
                finished.setdefault(i, []).append(key)
        return [
            _Step(step.function, step.args, step.kwargs, step.result, tuple(finished.get(i, ())))
            for i, step in enumerate(steps)
        ]


def _scaled(function: Callable[..., Tensor], share: float) -> Callable[..., Tensor]:
    return function if share == 1 else lambda *args, **kwargs: function(*args, **kwargs) * share


def _fill(args: Any, table: Mapping[Key, Tensor], micro: int) -> Any:
    if isinstance(args, _At):
        return table[args.key]
    if isinstance(args, tuple | list):
        return [_fill(arg, table, micro) for arg in args]
    if isinstance(args, dict):
        return {key: _fill(value, table, micro) for key, value in args.items()}
    if isinstance(args, _Part):
        return args.piece.box(args.sizes, args.tensor, micro)
    return args


def _keys(args: Any) -> list[Key]:
    if isinstance(args, _At):
        return [args.key]
    if isinstance(args, tuple | list):
        return [key for arg in args for key in _keys(arg)]
    if isinstance(args, dict):
        return [key for value in args.values() for key in _keys(value)]
    return []
