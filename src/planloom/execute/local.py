"""A run as a function of one device's local tensors.

The run's operators are prepared once: shape arguments become those of the piece, means divide by the whole size,
one-hot contractions get the piece's offset, and expansions of which the run holds every part become their original
operator again. What is left at call time is a list of callables over a table of values, each freed after its last use.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import Tensor

from planloom.blocks import BlockGraph
from planloom.execute.given import local_slice
from planloom.execute.operators import ONE_HOT, operator, plain
from planloom.graph import Arg, Op, is_reference, referenced
from planloom.graph.rules import ONE_HOT_FACTOR, flat
from planloom.layout import Box, Digit
from planloom.program import BlockPiece, Executed, Run, coordinates_in, executed, piece_of

Key = tuple[str, str]
"""Where a value lies: ("slot", number), ("given", block:tensor) or ("made", tensor)."""


@dataclass(frozen=True, slots=True)
class Step:
    """One prepared operator, its arguments with places in the table of values, and the values that it uses last."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Key
    finished: tuple[Key, ...]


class At:
    """A place in the table of values, inside prepared arguments."""

    __slots__ = ("key",)

    def __init__(self, key: Key) -> None:
        self.key = key


@dataclass(frozen=True, slots=True)
class Part:
    """Inside prepared arguments: which part of a whole tensor this is, in the index of the whole batch."""

    piece: BlockPiece
    sizes: tuple[int, ...]
    tensor: str


_OPEN = (list, dict, Part)
"""Prepared arguments that may name values, besides `At`: all others are passed as they are, often."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """An operator whose result is this share of the whole's: a mean over a part."""

    function: Callable[..., Tensor]
    share: float

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.function(*args, **kwargs) * self.share


class LocalRun:
    """The forward function of a run, in its moment, at the given coordinates of its mesh."""

    def __init__(self, blocks: BlockGraph, run: Run, coordinates: Mapping[Digit, int], *, num_micro: int) -> None:
        self.run = run
        self.graph = blocks.graph
        at = coordinates_in(run, coordinates)
        self._pieces = [piece_of(blocks.blocks[part.block], part, at, num_micro) for part in run.blocks]
        self._given: dict[Key, tuple[BlockPiece, str]] = {}
        self._slices: dict[Key, tuple[int, int, int, int]] = {}
        """By result: the dim, its size, start and stop, of every slice that takes all elements between them."""
        self.steps = self._prepare(blocks)
        self._called = self._with_splits()

    def __call__(self, inputs: Sequence[Tensor], given: Mapping[str, Tensor], micro: int) -> tuple[Tensor, ...]:
        """Outputs in the order of the run's output slots; `given` holds the whole given tensors."""
        table: dict[Key, Tensor] = {("slot", str(i)): tensor for i, tensor in enumerate(inputs)}
        table.update(self.given_tensors(given, micro))
        for step in self._called:
            args = [
                table[arg.key] if type(arg) is At else fill(arg, table, micro) if type(arg) in _OPEN else arg
                for arg in step.args
            ]
            kwargs = fill(step.kwargs, table, micro) if step.kwargs else step.kwargs
            table[step.result] = step.function(*args, **kwargs)
            for key in step.finished:
                del table[key]
        return tuple(table["made", slot.tensor] for slot in self.run.outputs)

    @property
    def given_keys(self) -> tuple[Key, ...]:
        """Where the given tensors lie in the table of values."""
        return tuple(self._given)

    def given_tensors(self, given: Mapping[str, Tensor], micro: int) -> dict[Key, Tensor]:
        """This device's part of every given tensor that the run reads."""
        table = {}
        for key, (piece, name) in self._given.items():
            tensor = self.graph.tensors[name]
            table[key] = local_slice(given[name], tensor.factors, piece.box(tensor.sizes, name, micro))
        return table

    # -- preparation

    def _prepare(self, blocks: BlockGraph) -> list[Step]:
        steps = [
            self._original(item) if item.is_original else self._step(self.graph.ops[item.op], self._pieces[item.part])
            for item in executed(blocks, self.run)
        ]
        return self._with_lifetimes(steps)

    def _original(self, item: Executed) -> Step:
        """The original operator of an expansion; each tensor is read as the expanded operator that uses it reads it."""
        expansion = self.graph.expansions[self.graph.ops[item.op].expansion]
        readers = {
            name: self._pieces[member.part]
            for member in reversed(item.members)
            for name in self.graph.ops[member.op].inputs
        }
        args = tuple(self._argument(arg, readers) for arg in expansion.args)
        return Step(operator(expansion.target), args, {}, ("made", expansion.output), ())

    def _step(self, op: Op, piece: BlockPiece) -> Step:
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
            self._note_slice(op, piece, args)
        elif rule.rewrite == "mean":
            share = self._contracted_share(op, piece)
            function = function if share == 1 else Scaled(function, share)
        elif rule.rewrite == "random":
            sizes = self.graph.tensors[op.outputs[0]].sizes
            kwargs = {"sizes": sizes, "box": Part(piece, sizes, op.outputs[0])}
        elif rule.rewrite == "one_hot":
            offset = self._one_hot_offset(op, piece)
            if offset is not None:
                function, kwargs = ONE_HOT[op.target], {"offset": offset}
        return Step(function, tuple(args), kwargs, ("made", op.outputs[0]), ())

    def _argument(self, arg: Arg, readers: Mapping[str, BlockPiece]) -> Any:
        if is_reference(arg):
            return At(self._key(arg[1:], readers[arg[1:]]))
        if isinstance(arg, list | tuple) and any(True for _ in referenced(arg)):
            return [self._argument(item, readers) for item in arg]
        return plain(arg)

    def _key(self, tensor: str, piece: BlockPiece) -> Key:
        if tensor in piece.part.reads:
            return ("slot", str(piece.part.reads[tensor]))
        if tensor in self.graph.given_names:
            key = ("given", f"{piece.block.index}:{tensor}")
            self._given[key] = (piece, tensor)
            return key
        return ("made", tensor)

    def _local_shape(self, piece: BlockPiece, name: str) -> tuple[int, ...]:
        tensor = self.graph.tensors[name]
        box = iter(self._local_box(piece, name))
        return tuple(prod(stop - start for start, stop in (next(box) for _ in dim)) for dim in tensor.factors)

    def _local_box(self, piece: BlockPiece, name: str) -> Box:
        return piece.box(self.graph.tensors[name].sizes, name)

    def _local_slice_args(self, op: Op, piece: BlockPiece, args: list[Any]) -> list[Any]:
        """A slice of one of several equal pieces: start and stop shrink with the piece."""
        if len(op.args) > 4 and op.args[4] != 1:  # every n-th element, from the same place in every piece
            size = self.graph.tensors[op.inputs[0]].shape[op.args[1]]
            start = op.args[2] or 0
            return [*args[:2], start % size if start < 0 else start, *args[3:]]
        dim = op.args[1] % len(self.graph.tensors[op.inputs[0]].shape)
        whole = self.graph.tensors[op.outputs[0]].shape[dim]
        local = self._local_shape(piece, op.outputs[0])[dim]
        start = (op.args[2] or 0) if len(op.args) > 2 else 0
        if start < 0:
            start += self.graph.tensors[op.inputs[0]].shape[dim]
        if local == whole:
            return args
        return [args[0], dim, start // whole * local, (start // whole + 1) * local]

    def _note_slice(self, op: Op, piece: BlockPiece, args: Sequence[Any]) -> None:
        given: list[Any] = [*args[1:], *(0, None, None, None)[len(args) - 1 :]]
        dim, shape = given[0], self._local_shape(piece, op.inputs[0])
        start, stop, step = slice(*given[1:]).indices(shape[dim])
        if step == 1 and not self.graph.tensors[op.inputs[0]].rows:
            dim %= len(shape)
            self._slices["made", op.outputs[0]] = (dim, shape[dim], start, stop)

    def _contracted_share(self, op: Op, piece: BlockPiece) -> float:
        sizes = self.graph.tensors[op.inputs[0]].sizes
        assert op.rule is not None
        contracted = op.rule.contracted
        names = flat(op.rule.inputs[0])
        box = self._local_box(piece, op.inputs[0])
        pairs = [(b, s) for b, s, name in zip(box, sizes, names, strict=True) if name in contracted]
        return prod((stop - start) / size for (start, stop), size in pairs)

    def _one_hot_offset(self, op: Op, piece: BlockPiece) -> int | None:
        """The first index of this device's part of the vocabulary; None if it holds all of it."""
        assert op.rule is not None
        names, sizes = flat(op.rule.inputs[0]), self.graph.tensors[op.inputs[0]].sizes
        factors = [i for i, name in enumerate(names) if name.split(".")[0] == ONE_HOT_FACTOR]
        if not factors:
            return None
        start, stop = self._local_box(piece, op.inputs[0])[factors[0]]
        inner = prod(sizes[i] for i in factors[1:])
        return None if stop - start == sizes[factors[0]] else start * inner

    def _with_lifetimes(self, steps: list[Step]) -> list[Step]:
        kept = {("made", slot.tensor) for slot in self.run.outputs}
        last: dict[Key, int] = {}
        for i, step in enumerate(steps):
            for key in (step.result, *keys_of((step.args, step.kwargs))):
                last[key] = i
        finished: dict[int, list[Key]] = {}
        for key, i in last.items():
            if key not in kept:
                finished.setdefault(i, []).append(key)
        return [
            Step(step.function, tuple(map(_settled, step.args)), step.kwargs, step.result, tuple(finished.get(i, ())))
            for i, step in enumerate(steps)
        ]

    def _with_splits(self) -> list[Step]:
        """The steps as they are called: slices that are all parts of one tensor are taken together.

        The cotangent of a split is a concatenation; that of each slice is a whole tensor of zeros, written and added.
        """
        slices: dict[tuple[Key, int], list[int]] = {}
        for i, step in enumerate(self.steps):
            if step.result in self._slices:
                slices.setdefault((step.args[0].key, self._slices[step.result][0]), []).append(i)
        called = list(self.steps)
        for (key, dim), members in sorted(slices.items(), key=lambda item: item[1][0], reverse=True):
            _, size, *_ = self._slices[self.steps[members[0]].result]
            parts = {self.steps[i].result: self._slices[self.steps[i].result][2:] for i in members}
            order = sorted(set(parts.values()))
            if len(order) == 1 or [0, *(stop for _, stop in order)] != [*(start for start, _ in order), size]:
                continue
            whole = ("split", f"{key[1]} along {dim}")
            for i in members:
                step = self.steps[i]
                finished = (*step.finished, whole) if i == members[-1] else step.finished
                called[called.index(step)] = Step(
                    getitem, (At(whole), order.index(parts[step.result])), {}, step.result, finished
                )
            sizes = tuple(stop - start for start, stop in order)
            split = Step(torch.split_with_sizes, (At(key), sizes, dim), {}, whole, ())
            called.insert(members[0], split)  # from the back, so that places of those before stay
        return called


def _settled(arg: Any) -> Any:
    """A list that names no value as a tuple, which need not be looked through at every call."""
    return tuple(arg) if isinstance(arg, list) and all(type(item) is int for item in arg) else arg


def fill(args: Any, table: Mapping[Key, Tensor], micro: int) -> Any:
    """Prepared arguments with the values that they name."""
    if isinstance(args, At):
        return table[args.key]
    if isinstance(args, tuple | list):
        return [fill(arg, table, micro) for arg in args]
    if isinstance(args, dict):
        return {key: fill(value, table, micro) for key, value in args.items()}
    if isinstance(args, Part):
        return args.piece.box(args.sizes, args.tensor, micro)
    return args


def keys_of(args: Any) -> list[Key]:
    """The places that prepared arguments name."""
    if isinstance(args, At):
        return [args.key]
    if isinstance(args, tuple | list):
        return [key for arg in args for key in keys_of(arg)]
    if isinstance(args, dict):
        return [key for value in args.values() for key in keys_of(value)]
    return []
