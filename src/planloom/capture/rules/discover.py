"""The rule of an operator that has none written, found by running it on small random inputs.

A *factor* is a choice of at most one dim of every input and at most one of every output, all of one size. It can be
split if the operator on its two pieces, put together, equals the operator on the whole, forward and backward
(`trials.py` runs it):

    kept        an output has the factor: its pieces are joined along that dim
    contracted  no output has it: the results are summed, averaged (rewrite `mean`), or, if the result is a statistic
                without a gradient, their maximum is taken

Candidates for a kept factor come from what changes: if one half of a dim of an input reaches the other half of a dim
of the output, the two are not the same factor. What is left is tried. Every dim belongs to at most one factor; a dim
without one gets a factor of its own that is fixed. Products of factors and one-hot contractions are not looked for:
what is found is true, what is not found may still be so.

What was found is a `Pattern`, without sizes: it holds for every operator whose arguments, dtypes and equal sizes are
alike. Patterns are kept in the process and, if a folder is given, in JSON files; one that comes from a file is tried
again before it is believed, as the operator may have changed since.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, combinations, product
from math import prod
from pathlib import Path

import msgspec
import torch

from planloom.capture.rules.trials import LARGEST, SMALL_SIZE, Factor, Function, Refusal, Shape, Trials, Way
from planloom.graph import Arg, Op, Rule, Tensor
from planloom.graph.rules import Rewrite, Term
from planloom.layout import Combine

MOST_CANDIDATES = 4096
"""So many choices of dims are tried for one factor: a few seconds of a small operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """What is known of an operator, whatever its sizes. `reason`: why nothing of it can be split."""

    factors: tuple[Factor, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    combine: Combine = "sum"
    rewrite: Rewrite = "none"
    differentiable: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """A rule, and, where none of its dims can be split, the reason."""

    rule: Rule
    reason: str


class DiscoveryCache:
    """Patterns by key: in memory, and in one JSON file each if there is a folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._known: dict[str, Pattern] = {}

    def find(self, key: str) -> Pattern | None:
        return self._known.get(key)

    def read(self, key: str) -> Pattern | None:
        """A pattern from the folder, to be tried before it is kept; a file that cannot be read is none."""
        if self.folder is None:
            return None
        try:
            return msgspec.json.decode(self._path(key).read_bytes(), type=Pattern)
        except (OSError, msgspec.MsgspecError):
            return None

    def keep(self, key: str, pattern: Pattern) -> None:
        self._known[key] = pattern
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self._path(key)
            partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
            partial.write_bytes(msgspec.json.format(msgspec.json.encode(pattern)))
            partial.replace(path)

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        target = "".join(c if c.isalnum() or c in "._" else "_" for c in msgspec.json.decode(key)[0])
        return self.folder / f"{target}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


# The one cache of a process, so that the layers of a model ask once.
_IN_PROCESS = DiscoveryCache()


def discover(
    op: Op,
    tensors: Mapping[str, Tensor],
    *,
    cache: DiscoveryCache | None = None,
    function: Function | None = None,
) -> Rule:
    """The rule of an operator of any namespace; `function` is its callable if torch does not know it."""
    return explain(op, tensors, cache=cache, function=function).rule


def explain(
    op: Op,
    tensors: Mapping[str, Tensor],
    *,
    cache: DiscoveryCache | None = None,
    function: Function | None = None,
) -> Discovery:
    """The rule, and the reason if nothing of it can be split."""
    cache = cache if cache is not None else _IN_PROCESS
    key = operator_key(op, tensors)
    pattern = cache.find(key)
    if pattern is None:
        pattern = _find(op, tensors, function, cache.read(key))
        cache.keep(key, pattern)
    return Discovery(rule=_resolve(pattern, op, tensors), reason=pattern.reason)


def unsplittable(op: Op, tensors: Mapping[str, Tensor]) -> Rule:
    """The rule that fixes every dim."""
    return _resolve(Pattern(), op, tensors)


def _find(op: Op, tensors: Mapping[str, Tensor], function: Function | None, recorded: Pattern | None) -> Pattern:
    try:
        trials = Trials(op, tensors, function=function)
    except Refusal as refusal:
        return Pattern(reason=str(refusal))
    if recorded is not None and _holds(recorded, trials):
        return recorded
    rewrites = [False, True] if trials.has_shape_argument else [False]
    found = max((_Search(trials, rewrites_shape=r).pattern() for r in rewrites), key=lambda p: len(p.factors))
    if not found.factors and any(size > 1 for shape in trials.shapes for size in shape):
        return replace(found, reason="no split of any dim gives the same results")
    return found


def _holds(pattern: Pattern, trials: Trials) -> bool:
    """Is what a file says of an operator still true of it?"""
    if pattern.reason or pattern.differentiable != trials.is_differentiable:
        return False
    ranks = [len(shape) for shape in (*trials.shapes, *trials.output_shapes)]
    for factor in pattern.factors:
        dims = (*factor.inputs, *factor.outputs)
        if len(dims) != len(ranks) or any(d is not None and d >= rank for d, rank in zip(dims, ranks, strict=True)):
            return False
    way: Way = "mean" if pattern.rewrite == "mean" else pattern.combine
    return all(
        trials.splits(factor, way, rewrites_shape=pattern.rewrite == "shape") for factor in pattern.factors
    ) and all(trials.is_linear(group) for group in pattern.linear)


class _Search:
    """The factors of one operator."""

    def __init__(self, trials: Trials, *, rewrites_shape: bool) -> None:
        self.trials, self.rewrites_shape = trials, rewrites_shape
        self.inputs, self.outputs = trials.shapes, trials.output_shapes
        self.used: set[tuple[int, int]] = set()
        """(input, dim) pairs that already have a factor."""

    def pattern(self) -> Pattern:
        kept = [factor for dim in range(len(self.outputs[0])) if (factor := self._kept(dim)) is not None]
        way, contracted = self._contracted()
        rewrite: Rewrite = "mean" if way == "mean" else "shape" if self.rewrites_shape else "none"
        return Pattern(
            factors=(*kept, *contracted),
            linear=tuple(group for group in self._groups() if self.trials.is_linear(group)),
            combine="max" if way == "max" else "sum",
            rewrite=rewrite,
            differentiable=self.trials.is_differentiable,
        )

    def _kept(self, dim: int) -> Factor | None:
        """The factor of a dim of the first output, if it can be split."""
        size = self.outputs[0][dim]
        if size < 2:
            return None
        others = [self._dims(shape, size) for shape in self.outputs[1:]]
        choices = [[*self._partners(number, dim), None] for number in range(len(self.inputs))]
        for inputs in _limited(product(*choices)):
            for rest in product(*others):
                factor = Factor(inputs=inputs, outputs=(dim, *rest))
                if self.trials.splits(factor, "sum", rewrites_shape=self.rewrites_shape):
                    self._use(factor)
                    return factor
        return None

    def _partners(self, number: int, output_dim: int) -> list[int]:
        """The dims of an input whose halves reach only their own half of the output's dim."""
        size, found = self.outputs[0][output_dim], []
        for dim in self._free(number, size):
            reached = [self.trials.touches(number, dim, half) for half in (0, 1)]
            first = size // 2
            if all(
                changed is None or not _beyond(changed[0], output_dim, first, half)
                for half, changed in enumerate(reached)
            ):
                found.append(dim)
        return found

    def _contracted(self) -> tuple[Way, list[Factor]]:
        """Factors that no output has; all of them are put together in one way, the first that is found."""
        ways: tuple[Way, ...] = ("sum",) if self.rewrites_shape else ("sum", "mean")
        if not self.trials.is_differentiable:
            ways = (*ways, "max")
        best: tuple[Way, list[Factor]] = ("sum", [])
        for way in ways:
            before, found = set(self.used), []
            for size in sorted({size for shape in self.inputs for size in shape if size > 1}):
                for inputs in self._contractions(size):
                    if any((number, dim) in self.used for number, dim in enumerate(inputs) if dim is not None):
                        continue
                    if way == "mean" and inputs[0] is None:  # the share is that of the first input's piece
                        continue
                    factor = Factor(inputs=inputs, outputs=(None,) * len(self.outputs))
                    if self.trials.splits(factor, way, rewrites_shape=self.rewrites_shape):
                        self._use(factor)
                        found.append(factor)
            self.used = before
            if len(found) > len(best[1]):
                best = (way, found)
        return best

    def _contractions(self, size: int) -> Iterator[tuple[int | None, ...]]:
        """Choices of dims of one size; with many inputs only those that split all or one of them."""
        dims: list[list[int | None]] = [[*self._free(number, size), None] for number in range(len(self.inputs))]
        count = 1
        for choice in dims:
            count *= len(choice)
        if count <= MOST_CANDIDATES:
            yield from (inputs for inputs in product(*dims) if any(dim is not None for dim in inputs))
            return
        for dim in range(max(map(len, self.inputs))):
            yield tuple(dim if dim in choice else None for choice in dims)
        for number, choice in enumerate(dims):
            for single in choice[:-1]:
                yield tuple(single if i == number else None for i in range(len(dims)))

    def _groups(self) -> Iterator[tuple[int, ...]]:
        """Sets of inputs that may be partial together."""
        numbers = self.trials.float_inputs
        sizes = range(1, len(numbers) + 1) if len(numbers) <= 4 else (1, len(numbers))
        return chain.from_iterable(combinations(numbers, size) for size in sizes)

    def _free(self, number: int, size: int) -> list[int]:
        return [
            dim for dim, found in enumerate(self.inputs[number]) if found == size and (number, dim) not in self.used
        ]

    def _dims(self, shape: Shape, size: int) -> list[int | None]:
        return [*(dim for dim, found in enumerate(shape) if found == size), None]

    def _use(self, factor: Factor) -> None:
        self.used.update((number, dim) for number, dim in enumerate(factor.inputs) if dim is not None)


def _limited(choices: Iterator[tuple[int | None, ...]]) -> Iterator[tuple[int | None, ...]]:
    for count, choice in enumerate(choices):
        if count == MOST_CANDIDATES:
            return
        yield choice


def _beyond(changed: torch.Tensor, dim: int, first: int, half: int) -> bool:
    """Did anything change outside this half?"""
    outside = changed.narrow(dim, first, changed.shape[dim] - first) if half == 0 else changed.narrow(dim, 0, first)
    return bool(outside.any())


# --- from a pattern to a rule -----------------------------------------------------------------------------------------


def _resolve(pattern: Pattern, op: Op, tensors: Mapping[str, Tensor]) -> Rule:
    """The rule at true sizes: kept factors are named after the output's dim, others are numbered."""
    shapes = [tensors[name].shape for name in (*op.inputs, *op.outputs)]
    terms: list[list[tuple[str, ...] | None]] = [[() if size == 1 else None for size in shape] for shape in shapes]
    sizes: dict[str, int] = {}
    for factor in pattern.factors:
        places = [(i, dim) for i, dim in enumerate((*factor.inputs, *factor.outputs)) if dim is not None]
        lengths = {shapes[i][dim] for i, dim in places}
        if len(lengths) > 1 or 1 in lengths:  # equal when tried, not here
            continue
        kept = next((dim for dim in factor.outputs if dim is not None), None)
        name = f"sum{len(sizes)}" if kept is None else f"d{kept}"
        sizes[name] = lengths.pop()
        for i, dim in places:
            terms[i][dim] = (name,)
    fixed: list[str] = []
    for i, shape in enumerate(shapes):
        for dim, size in enumerate(shape):
            if terms[i][dim] is None:
                name = f"x{len(fixed)}"
                fixed.append(name)
                sizes[name], terms[i][dim] = size, (name,)
    resolved: list[Term] = [tuple(names or () for names in term) for term in terms]
    rule = Rule(
        inputs=tuple(resolved[: len(op.inputs)]),
        outputs=tuple(resolved[len(op.inputs) :]),
        sizes=sizes,
        fixed=tuple(sorted(fixed)),
        linear=pattern.linear,
        combine=pattern.combine,
        rewrite=pattern.rewrite,
        differentiable=pattern.differentiable,
    )
    return replace(rule, kind="contraction" if rule.contracted else "pointwise")


def operator_key(op: Op, tensors: Mapping[str, Tensor]) -> str:
    """What a pattern depends on: the operator, its plain arguments, dtypes, and which sizes are equal, or one.

    Sizes up to 16 stand for themselves, larger ones for the order in which they appear: numbers among the arguments
    that are such a size are written alike.
    """
    names: dict[int, str] = {}
    outputs = {size for name in op.outputs for size in tensors[name].shape}

    def size(number: int) -> int | str:
        return number if number <= SMALL_SIZE else names.setdefault(number, f"n{len(names)}")

    shapes = [[size(n) for n in tensors[name].shape] for name in (*op.inputs, *op.outputs)]

    def plain(arg: Arg) -> Arg:
        if isinstance(arg, list | tuple):
            return [plain(item) for item in arg]
        if isinstance(arg, dict):
            return {key: plain(value) for key, value in arg.items()}
        if isinstance(arg, str) and arg.startswith("%"):
            return "%"
        return size(arg) if type(arg) is int and arg in outputs else arg

    dtypes = [tensors[name].dtype for name in op.inputs]
    is_large = any(prod(tensors[name].shape) > LARGEST for name in op.inputs)  # too large to be tried as it is
    line = [op.target, plain(list(op.args)), plain(op.kwargs), shapes, dtypes, is_large, str(torch.__version__)]
    return msgspec.json.encode(line).decode()
