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
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from planloom.graph.rules import Rule

Arg = Any
"""An argument as JSON: numbers, strings, lists; a tensor is a string `%name`, a dtype `torch.float32`."""


FLOAT_MARK = "float:"
"""Before numbers that JSON cannot hold: `float:inf`, `float:-inf`, `float:nan`."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor: `factors[i]` are the sizes of the factors of dim i, major to minor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    factors: tuple[tuple[int, ...], ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of all factors in order."""
        return tuple(size for factors in self.factors for size in factors)

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        bits = "".join(c for c in self.dtype.split("_")[0] if c.isdigit())
        return int(bits) // 8 if bits else 1

    @property
    def is_float(self) -> bool:
        return self.dtype.startswith(("float", "bfloat"))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """The original operator that the operators with this expansion number stand for."""

    target: str
    args: tuple[Arg, ...]
    kwargs: dict[str, Arg]
    output: str


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A model's forward pass and loss. `tied` maps every further name of a parameter to its first."""

    tensors: dict[str, Tensor]
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    given: tuple[Op, ...]
    ops: tuple[Op, ...]
    expansions: tuple[Expansion, ...]
    loss: str
    tied: dict[str, str]

    @cached_property
    def producer(self) -> dict[str, int]:
        """The index in `ops` of the operator that makes a tensor."""
        return {name: i for i, op in enumerate(self.ops) for name in op.outputs}

    @cached_property
    def given_names(self) -> frozenset[str]:
        """Tensors that every device knows whole."""
        return frozenset((*self.inputs, *self.buffers, *(name for op in self.given for name in op.outputs)))

    @cached_property
    def given_from_inputs(self) -> frozenset[str]:
        """Given tensors that change with the batch."""
        found = set(self.inputs)
        for op in self.given:
            if found.intersection(op.inputs):
                found.update(op.outputs)
        return frozenset(found)

    def is_differentiable(self, tensor: str) -> bool:
        """Does this tensor carry a cotangent? Given tensors, integers and statistics do not."""
        if not self.tensors[tensor].is_float or tensor in self.given_names:
            return False
        index = self.producer.get(tensor)
        rule = self.ops[index].rule if index is not None else None
        return rule is None or rule.differentiable
