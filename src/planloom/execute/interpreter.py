"""The reference interpreter: a graph on one device, with autograd.

Operators are prepared once: names become places in a list, expansions become their original operator, and each tensor
is forgotten after its last use. What is left at call time is a loop over functions, as in eager execution.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from planloom.execute.given import Given, own_dims
from planloom.execute.operators import operator, plain
from planloom.graph import RANDOM_STATE, Arg, Graph, is_reference, referenced


class _Place:
    """A place in the list of values, inside prepared arguments."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


_Step = tuple[Callable[..., Tensor], tuple[tuple[int, int], ...], list[Any], dict[str, Any], int, tuple[int, ...]]
"""(function, positional tensors as (argument, place), other arguments, keyword arguments, result, finished)"""


class Interpreter:
    """The loss of a batch: `interpreter(parameters, batch)`; gradients by `loss.backward()`."""

    def __init__(self, graph: Graph, buffers: Mapping[str, Tensor], device: torch.device) -> None:
        self.graph = graph
        self._given = Given(graph, buffers, device)
        self._buffers = {name: buffers[name] for name in graph.updates}
        self._places: dict[str, int] = {}
        self._read: list[str] = []
        self._steps = self._prepare()
        self._results = [(self._places[name], name) for name in (graph.loss, *graph.updates.values())]

    def __call__(
        self, parameters: Mapping[str, Tensor], batch: Mapping[str, Tensor], *, seed: int = 0, step: int = 0
    ) -> Tensor:
        """The loss; written buffers are written."""
        known = {**batch, **self._buffers}
        if self.graph.random:
            device = next(iter(parameters.values())).device
            known[RANDOM_STATE] = torch.tensor([seed, step], device=device)
        given = self._given(known)
        values: list[Any] = [None] * len(self._places)
        for name in self._read:
            value = parameters[name] if name in parameters else given[name]
            in_factors = name in self._given.in_factors
            values[self._places[name]] = own_dims(value, self.graph.tensors[name].factors) if in_factors else value
        del given, known
        for function, tensors, args, kwargs, result, finished in self._steps:
            filled = args.copy()
            for i, place in tensors:
                filled[i] = values[place]
            if kwargs:
                kwargs = {key: _filled(value, values) for key, value in kwargs.items()}
            for i, arg in enumerate(filled):
                if type(arg) is list:
                    filled[i] = _filled(arg, values)
            values[result] = function(*filled, **kwargs)
            for place in finished:
                values[place] = None
        for (place, _), buffer in zip(self._results[1:], self.graph.updates, strict=True):
            self._buffers[buffer].copy_(values[place].detach())
        return values[self._results[0][0]]  # type: ignore[no-any-return]

    def _prepare(self) -> list[_Step]:
        graph = self.graph
        calls: list[tuple[str, Sequence[Arg], Mapping[str, Arg], str]] = []
        for op in graph.ops:
            if op.expansion < 0:
                calls.append((op.target, op.args, op.kwargs, op.outputs[0]))
            elif op.outputs[0] == graph.expansions[op.expansion].output:
                original = graph.expansions[op.expansion]
                calls.append((original.target, original.args, original.kwargs, original.output))
        made = {result for *_, result in calls}
        kept = {graph.loss, *graph.updates.values()}
        self._read = list(dict.fromkeys(n for _, a, k, _ in calls for n in referenced([a, k]) if n not in made))
        self._read += [name for name in kept if name not in made and name not in self._read]
        self._places = {name: i for i, name in enumerate((*self._read, *(result for *_, result in calls)))}
        last: dict[str, int] = {}
        for i, (_, args, kwargs, result) in enumerate(calls):
            last.update(dict.fromkeys((*referenced([args, kwargs]), result), i))
        finished: dict[int, list[int]] = {}
        for name, i in last.items():
            if name not in kept:
                finished.setdefault(i, []).append(self._places[name])
        steps = []
        for i, (target, args, kwargs, result) in enumerate(calls):
            tensors = tuple((j, self._places[arg[1:]]) for j, arg in enumerate(args) if is_reference(arg))
            plain_args = [None if is_reference(arg) else self._prepared(arg) for arg in args]
            plain_kwargs = {key: self._prepared(value) for key, value in kwargs.items()}
            steps.append(
                (operator(target), tensors, plain_args, plain_kwargs, self._places[result], tuple(finished.get(i, ())))
            )
        return steps

    def _prepared(self, arg: Arg) -> Any:
        if is_reference(arg):
            return _Place(self._places[arg[1:]])
        if isinstance(arg, list | tuple) and any(True for _ in referenced(arg)):
            return [self._prepared(item) for item in arg]
        value = plain(arg)
        return tuple(value) if isinstance(value, list) else value


def _filled(arg: Any, values: Sequence[Any]) -> Any:
    if type(arg) is _Place:
        return values[arg.index]
    return [_filled(item, values) for item in arg] if type(arg) is list else arg
