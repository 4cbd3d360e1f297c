"""The values `Graph`, `Op` and `Tensor`.

A graph holds the forward pass and the loss. There are no backward operators: the backward of a run is the
vector-Jacobian product of its local forward function.

- `given`: operators that depend on inputs and buffers alone (masks, position tables, label counts). Every device
  computes them whole, once a step; their results are sliced for free and carry no cotangent. They need no rules.
- `ops`: all others, each with its rule, in an order in which producers come first.
- `expansions`: several consecutive operators may stand for one original (a norm as statistics and finish, a linear map
  as product and bias). A run that holds all of them computes the original instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from planloom.graph.rules import Rule

Arg = Any
"""An argument as JSON: numbers, strings, lists; a tensor is a string `%name`, a dtype `torch.float32`."""


FLOAT_MARK = "float:"
"""Before numbers that JSON cannot hold: `float:inf`, `float:-inf`, `float:nan`."""


RANDOM_STATE = "random_state"
"""The given tensor that random operators read: the seed and the step."""


def reference(name: str) -> str:
    """The argument that stands for a tensor."""
    return "%" + name


def is_reference(arg: Arg) -> bool:
    return isinstance(arg, str) and arg.startswith("%")


def referenced(arg: Arg) -> Iterator[str]:
    """All tensors in an argument, in order."""
    if is_reference(arg):
        yield arg[1:]
    elif isinstance(arg, list | tuple):
        for item in arg:
            yield from referenced(item)
    elif isinstance(arg, dict):
        for item in arg.values():
            yield from referenced(item)


@cache
def _item_bytes(dtype: str) -> int:
    bits = "".join(c for c in dtype.split("_")[0] if c.isdigit())
    return int(bits) // 8 if bits else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor: `factors[i]` are the sizes of the factors of dim i, major to minor.

    A *ragged* tensor [experts, tokens, features] holds rows only where the mask `rows` [experts, tokens] is true, which
    is the share `density` of all; a device stores its rows as [1, n, features], in the order of the mask's elements.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    factors: tuple[tuple[int, ...], ...] = ()
    rows: str = ""
    density: float = 1.0

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of all factors in order."""
        return tuple(size for factors in self.factors for size in factors)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return _item_bytes(self.dtype)

    @property
    def is_float(self) -> bool:
        """Can it carry a cotangent? Complex numbers can, too."""
        return self.dtype.startswith(("float", "bfloat", "complex"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operator: `target` is its ATen name, `inputs` its tensors in the order in which the arguments name them."""

    name: str
    target: str
    args: tuple[Arg, ...]
    kwargs: dict[str, Arg]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    module: str = ""
    rule: Rule | None = None
    expansion: int = -1

    @property
    def work_args(self) -> tuple[Arg, ...]:
        """The arguments without the number of a random operator, dropout(x, p, number, state): it is the same work."""
        is_random = self.rule is not None and self.rule.rewrite == "random"
        return (*self.args[:2], *self.args[3:]) if is_random else self.args


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """The original operator that the operators with this expansion number stand for."""

    target: str
    args: tuple[Arg, ...]
    kwargs: dict[str, Arg]
    output: str


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A model's forward pass and loss.

    `tied` maps every further name of a parameter to its first. `updates` maps buffers that the forward pass writes to
    their new values. `random`: some operator reads the random state.
    """

    tensors: dict[str, Tensor]
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    given: tuple[Op, ...]
    ops: tuple[Op, ...]
    expansions: tuple[Expansion, ...]
    loss: str
    tied: dict[str, str]
    updates: dict[str, str] = field(default_factory=dict)
    random: bool = False

    @cached_property
    def producer(self) -> dict[str, int]:
        """The index in `ops` of the operator that makes a tensor."""
        return {name: i for i, op in enumerate(self.ops) for name in op.outputs}

    @cached_property
    def readers(self) -> dict[str, tuple[int, ...]]:
        """The indices in `ops` of the operators that read a tensor."""
        found: dict[str, list[int]] = {}
        for i, op in enumerate(self.ops):
            for name in dict.fromkeys(op.inputs):
                found.setdefault(name, []).append(i)
        return {name: tuple(indices) for name, indices in found.items()}

    @cached_property
    def parameter_names(self) -> frozenset[str]:
        return frozenset(self.parameters)

    @cached_property
    def expansion_members(self) -> tuple[tuple[int, ...], ...]:
        """For every expansion, the indices in `ops` of the operators that stand for it."""
        members: list[list[int]] = [[] for _ in self.expansions]
        for i, op in enumerate(self.ops):
            if op.expansion >= 0:
                members[op.expansion].append(i)
        return tuple(map(tuple, members))

    @cached_property
    def given_names(self) -> frozenset[str]:
        """Tensors that every device knows whole."""
        made = (name for op in self.given for name in op.outputs)
        return frozenset((*self.inputs, *self.buffers, *made, *((RANDOM_STATE,) if self.random else ())))

    @cached_property
    def given_from_inputs(self) -> frozenset[str]:
        """Given tensors that change from step to step."""
        found = {*self.inputs, RANDOM_STATE}
        for op in self.given:
            if found.intersection(op.inputs):
                found.update(op.outputs)
        return frozenset(found)

    def is_differentiable(self, tensor: str) -> bool:
        """Does this tensor carry a cotangent?"""
        return tensor in self._with_cotangent

    @cached_property
    def _with_cotangent(self) -> frozenset[str]:
        """What the loss depends on by derivatives, and what depends on a parameter.

        Neither given tensors, integers, statistics nor what only they read; nor what is made of detached tensors alone.
        """
        found = {self.loss}
        for op in reversed(self.ops):
            if not found.intersection(op.outputs):
                continue
            if not _passes_cotangents(op):
                found.difference_update(op.outputs)
                continue
            found.update(name for name in op.inputs if self.tensors[name].is_float and name not in self.given_names)
        learned = set(self.parameters)
        for op in self.ops:
            if _passes_cotangents(op) and learned.intersection(op.inputs):
                learned.update(op.outputs)
        return frozenset(found & learned)


def _passes_cotangents(op: Op) -> bool:
    return op.rule is None or op.rule.differentiable
