"""An operator on small random inputs: whole, on the pieces of a factor, on the parts of a sum.

Discovery (`discover.py`) asks questions of an operator that only running it can answer. Here is how they are put:

- inputs are small: every large size is replaced, wherever it occurs, by the smallest even one with which the operator
  still runs (tried on the meta device, where nothing is computed). No size goes below a number among the arguments: a
  roll by 512 of a dim of 4 would be an identity;
- inputs are random, from fixed seeds: normal numbers, indices below the smallest piece's size (so that no piece is read
  beyond its end), masks of which three quarters hold. One trial is a million times larger: `clamp(x, -100, 100)` looks
  linear near zero;
- pieces are halves, and once a shorter and a longer part. A piece takes its part of the inputs that have the factor and
  of the cotangents of the outputs that have it; the gradient of an input that has the factor is joined, that of any
  other is summed.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from planloom.errors import CaptureError
from planloom.graph import FLOAT_MARK, Arg, Op, is_reference
from planloom.graph import Tensor as GraphTensor

Function = Callable[..., Any]
Shape = tuple[int, ...]
Way = Literal["sum", "max", "mean"]
"""How pieces of a contracted factor are put together; `mean` is a sum weighted by the pieces' shares of the whole."""

LARGEST = 1 << 20  # elements of a tensor that is tried: about 10 ms an operator on one core
SMALL_SIZE = 16  # sizes up to here are left as they are
_END = 1 << 31  # larger numbers mean "to the end"
_RELATIVE_ERROR = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4}
_COARSE_ERROR = 3e-2  # float16, bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """For every input and output the dim that is split, or None: replicated inputs, partial outputs."""

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Outputs, and the gradients of the inputs (None for those that have none)."""

    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Inputs, cotangents of the outputs, and what the whole operator makes of them.

    `shift`: by how much its first piece is shorter than half. What holds for halves alone (windows of seven in a dim of
    fourteen) does not hold for every split.
    """

    values: tuple[Tensor, ...]
    cotangents: tuple[Tensor | None, ...]
    whole: Result
    scale: float
    shift: int


class Refusal(Exception):  # noqa: N818 - not an error: the answer to a question
    """An operator cannot be tried; the message says why."""


class Trials:
    """One operator, at small sizes. Raises `Refusal` if it cannot be run, or is not the same twice."""

    def __init__(self, op: Op, tensors: Mapping[str, GraphTensor], *, function: Function | None = None) -> None:
        self.op = op
        self.function = function or find_function(op.target)
        _refuse_by_schema(op, self.function)
        self._true_shapes = [tensors[name].shape for name in op.inputs]
        self._true_outputs = [tensors[name].shape for name in op.outputs]
        self._dtypes = [getattr(torch, tensors[name].dtype) for name in op.inputs]
        self._sizes: dict[int, int] = {}
        self._precision, self._in_unit_interval = torch.float64, False
        self._knows_shapes = False
        self._choose_sizes()
        self._choose_inputs()

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of the inputs as tried."""
        return [tuple(self._sizes.get(size, size) for size in shape) for shape in self._true_shapes]

    @property
    def output_shapes(self) -> list[Shape]:
        return [tuple(output.shape) for output in self.examples[0].whole.outputs]

    @property
    def float_inputs(self) -> list[int]:
        return [i for i, dtype in enumerate(self._dtypes) if dtype.is_floating_point]

    @property
    def has_shape_argument(self) -> bool:
        """Is the second argument the output's shape, as in expand and reshape?"""
        given = self.op.args[1] if len(self.op.args) > 1 else None
        shape = self._true_outputs[0]
        if not isinstance(given, list | tuple) or len(given) != len(shape) or not shape:
            return False
        return all(type(size) is int and size in (-1, true) for size, true in zip(given, shape, strict=True))

    @property
    def is_differentiable(self) -> bool:
        """False if a real output has real inputs and no gradient."""
        example = self.examples[0]
        is_real = any(output.is_floating_point() for output in example.whole.outputs)
        return not (is_real and self.float_inputs) or any(g is not None for g in example.whole.gradients)

    # -- questions

    def splits(self, factor: Factor, way: Way, *, rewrites_shape: bool) -> bool:
        """Do the two pieces of a factor, put together, equal the whole: forward and backward, in every example?

        Pieces that do not fit together are told by their shapes first: not every kernel checks them (attention on the
        CPU of torch 2.13 with fewer values than keys corrupts memory).
        """
        if self._knows_shapes and not self._fits(factor, rewrites_shape):
            return False
        return all(self._splits(factor, way, rewrites_shape, example) for example in self.examples)

    def touches(self, number: int, dim: int, half: int, seed: int = 90) -> list[Tensor] | None:
        """Where the outputs change when one half of an input's dim does; None if the operator fails."""
        example = self.examples[0]
        other = self._draw(seed, 1.0)[number]
        changed = example.values[number].clone()
        piece, fresh = _half(changed, dim, half), _half(other, dim, half)
        piece.copy_(~piece if piece.dtype == torch.bool else fresh)
        values = [*example.values[:number], changed, *example.values[number + 1 :]]
        try:
            with torch.no_grad():
                outputs = self._call(values)
        except Exception:  # whatever an operator raises, it does not take these values
            return None
        if any(a.shape != b.shape for a, b in zip(outputs, example.whole.outputs, strict=True)):
            return None
        return [self._differs(a, b) for a, b in zip(outputs, example.whole.outputs, strict=True)]

    def is_linear(self, group: Sequence[int]) -> bool:
        """Jointly in these inputs: f(a + b) = f(a) + f(b) and f(0) = 0, with gradients that partial sums get right."""
        for seed, example in enumerate(self.examples, start=50):
            other, zeros = list(example.values), list(example.values)
            fresh = self._draw(seed, example.scale)
            for i in group:
                other[i], zeros[i] = fresh[i], torch.zeros_like(fresh[i])
            total = [b + a if i in group else a for i, (a, b) in enumerate(zip(example.values, other, strict=True))]
            try:
                parts = [example.whole, self._run(other, example.cotangents)]
                whole, zero = self._run(total, example.cotangents), self._call(zeros)
            except Exception:  # whatever an operator raises, it does not take these values
                return False
            if any(output.count_nonzero() for output in zero if output.is_floating_point()):
                return False
            if not all(o.is_floating_point() for o in whole.outputs):
                return False
            summed = [a + b for a, b in zip(parts[0].outputs, parts[1].outputs, strict=True)]
            if not all(self._close(a, b, example.scale) for a, b in zip(summed, whole.outputs, strict=True)):
                return False
            for i, gradient in enumerate(whole.gradients):
                if gradient is None:
                    continue
                found = [_or_zero(part.gradients[i], gradient) for part in parts]
                checked = found if i in group else [found[0] + found[1]]
                if not all(self._close(value, gradient, example.scale) for value in checked):
                    return False
        return True

    # -- running

    @cached_property
    def examples(self) -> list[Example]:
        """Two ordinary examples and a large one, if its results are numbers."""
        found = [self._example(0, 1.0), self._example(1, 1.0, shift=1)]
        if not self._in_unit_interval:
            large = self._example(2, 1e6)
            if _mostly_finite(large.whole.outputs):
                found.append(large)
        return found

    def _example(self, seed: int, scale: float, *, shift: int = 0) -> Example:
        values = self._draw(seed, scale, shift)
        with torch.no_grad():
            outputs = self._call(values)
        generator = torch.Generator("cpu").manual_seed(1000 + seed)
        cotangents = tuple(
            torch.randn(o.shape, generator=generator, dtype=torch.float64, device="cpu").to(o.dtype)
            if o.is_floating_point()
            else None
            for o in outputs
        )
        whole = self._run(values, cotangents)
        return Example(values=tuple(values), cotangents=cotangents, whole=whole, scale=scale, shift=shift)

    def _splits(self, factor: Factor, way: Way, rewrites_shape: bool, example: Example) -> bool:
        try:
            pieces = [self._piece(factor, way, half, rewrites_shape, example) for half in (0, 1)]
        except Exception:  # whatever an operator raises, it does not take this piece
            return False
        whole = example.whole
        for i, expected in enumerate(whole.outputs):
            parts = [piece.outputs[i] for piece in pieces]
            joined = _join(parts, factor.outputs[i], "max" if way == "max" else "sum")
            if joined is None or not self._close(joined, expected, example.scale):
                return False
        for i, gradient in enumerate(whole.gradients):
            if gradient is not None:
                dim = factor.inputs[i]
                likes = [gradient if dim is None else _half(gradient, dim, half, example.shift) for half in (0, 1)]
                parts = [_or_zero(piece.gradients[i], like) for piece, like in zip(pieces, likes, strict=True)]
                joined = _join(parts, dim, "sum")
                if joined is None or not self._close(joined, gradient, example.scale):
                    return False
        return True

    def _fits(self, factor: Factor, rewrites_shape: bool) -> bool:
        """Does the first piece have the right shapes, on the meta device?"""
        example = self.examples[0]
        pieces = [
            (value if dim is None else _half(value, dim, 0)).to("meta")
            for value, dim in zip(example.values, factor.inputs, strict=True)
        ]
        outputs = zip(example.whole.outputs, factor.outputs, strict=True)
        wanted = [(output if dim is None else _half(output, dim, 0)).shape for output, dim in outputs]
        try:
            with torch.no_grad():
                made = self._call(pieces, list(wanted[0]) if rewrites_shape else None)
        except Exception:  # whatever an operator raises, it does not take these shapes
            return False
        return [output.shape for output in made] == wanted

    def _piece(self, factor: Factor, way: Way, half: int, rewrites_shape: bool, example: Example) -> Result:
        def cut(tensor: Tensor, dim: int | None) -> Tensor:
            return tensor if dim is None else _half(tensor, dim, half, example.shift)

        values = [cut(value, dim) for value, dim in zip(example.values, factor.inputs, strict=True)]
        cotangents = [
            None if cotangent is None else cut(cotangent, dim)
            for cotangent, dim in zip(example.cotangents, factor.outputs, strict=True)
        ]
        shape = None
        if rewrites_shape:
            shape = list(cut(example.whole.outputs[0], factor.outputs[0]).shape)
        share = 1.0
        if way == "mean":
            number = next(i for i, dim in enumerate(factor.inputs) if dim is not None)
            share = values[number].numel() / example.values[number].numel()
        return self._run(values, cotangents, shape=shape, share=share)

    def _run(
        self,
        values: Sequence[Tensor],
        cotangents: Sequence[Tensor | None],
        *,
        shape: list[int] | None = None,
        share: float = 1.0,
    ) -> Result:
        inputs = [v.detach().clone().requires_grad_(v.is_floating_point()) for v in values]
        with torch.enable_grad():
            outputs = self._call(inputs, shape)
            if share != 1:
                outputs = [output * share for output in outputs]
        pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad and c is not None]
        if any(output.shape != cotangent.shape for output, cotangent in pairs):
            raise Refusal("a result of another shape")
        wanted = [i for i, tensor in enumerate(inputs) if tensor.requires_grad]
        gradients: list[Tensor | None] = [None] * len(inputs)
        if pairs and wanted:
            found: Sequence[Tensor | None] = torch.autograd.grad(
                [o for o, _ in pairs], [inputs[i] for i in wanted], [c for _, c in pairs], allow_unused=True
            )
            for i, gradient in zip(wanted, found, strict=True):
                gradients[i] = torch.zeros_like(inputs[i]) if gradient is None else gradient.detach()
        return Result(outputs=tuple(o.detach() for o in outputs), gradients=tuple(gradients))

    def _call(self, values: Sequence[Tensor], shape: list[int] | None = None) -> list[Tensor]:
        """The outputs; `shape` replaces the second argument."""
        supply = iter(values)
        args = [self._argument(arg, supply) for arg in self.op.args]
        kwargs = {key: self._argument(value, supply) for key, value in self.op.kwargs.items()}
        if shape is not None:
            args[1] = shape
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what an operator says about odd inputs is nobody's business here
            made = self.function(*args, **kwargs)
        outputs = [made] if isinstance(made, Tensor) else [item for item in made if isinstance(item, Tensor)]
        return outputs[: len(self.op.outputs)]

    def _argument(self, arg: Arg, supply: Iterator[Tensor]) -> Any:
        if is_reference(arg):
            return next(supply)
        if isinstance(arg, list | tuple):
            return [self._argument(item, supply) for item in arg]
        if isinstance(arg, str) and arg.startswith(FLOAT_MARK):
            return float(arg.removeprefix(FLOAT_MARK))
        if isinstance(arg, str) and arg.startswith("torch."):
            value = getattr(torch, arg.removeprefix("torch."))
            is_real = isinstance(value, torch.dtype) and value.is_floating_point
            return self._precision if is_real else value
        if type(arg) is int and arg in self._sizes and self._is_output_size(arg):
            return self._sizes[arg]
        return arg

    def _draw(self, seed: int, scale: float, shift: int = 0) -> list[Tensor]:
        generator = torch.Generator("cpu").manual_seed(seed)
        sizes = [size for shape in self.shapes for size in shape if size > 1]
        highest = max(1, min(sizes, default=4) // 2 - shift)
        values = []
        for shape, dtype in zip(self.shapes, self._dtypes, strict=True):
            if dtype == torch.bool:
                values.append(torch.rand(shape, generator=generator, device="cpu") < 0.75)
            elif dtype.is_complex:
                values.append(torch.randn(shape, generator=generator, dtype=torch.complex128, device="cpu") * scale)
            elif not dtype.is_floating_point:
                drawn = torch.randint(highest, shape, generator=generator, device="cpu")
                values.append(drawn.to(dtype))
            elif self._in_unit_interval:
                drawn = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu")
                values.append((0.1 + 0.8 * drawn).to(self._precision))
            else:
                drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
                values.append((drawn * scale).to(self._precision))
        return values

    def _close(self, found: Tensor, expected: Tensor, scale: float) -> bool:
        if found.shape != expected.shape:
            return False
        if not (expected.is_floating_point() or expected.is_complex()):
            return torch.equal(found.to(expected.dtype), expected)
        finite = expected.isfinite()
        if not torch.equal(found.isfinite(), finite):
            return False
        if not torch.equal(found[~finite].nan_to_num(), expected[~finite].nan_to_num()):
            return False
        if not finite.any():
            return True
        errors = (_RELATIVE_ERROR.get(dtype, _COARSE_ERROR) for dtype in (found.dtype, expected.dtype, self._precision))
        bound = max(errors) * max(float(expected[finite].abs().max()), scale)
        return float((found[finite] - expected[finite]).abs().max()) <= bound

    def _differs(self, found: Tensor, expected: Tensor) -> Tensor:
        """Where two results differ by more than rounding: with gradients an operator may take another kernel."""
        if not found.is_floating_point():
            return found != expected
        error = _RELATIVE_ERROR.get(min(found.dtype, self._precision, key=lambda d: d.itemsize), _COARSE_ERROR)
        return ~torch.isclose(found, expected, rtol=error, atol=error, equal_nan=True)

    # -- small sizes and inputs that it takes

    def _choose_sizes(self) -> None:
        """Replace large sizes by small ones, one after the other, as long as the operator runs on the meta device."""
        lowest = max((abs(number) + 1 for number in self._numbers()), default=4)
        lowest = max(4, lowest + lowest % 2)
        sizes = sorted({size for shape in self._true_shapes for size in shape}, reverse=True)
        taken = set(sizes)
        self._knows_shapes = self._runs_at({})
        if self._knows_shapes:
            for size in sizes:
                for small in range(lowest, min(size, 4 * lowest + 2 * SMALL_SIZE), 2) if size > SMALL_SIZE else ():
                    if small not in taken and self._runs_at({**self._sizes, size: small}):
                        self._sizes[size] = small
                        taken.add(small)
                        break
        largest = max((prod(shape) for shape in self.shapes), default=0)
        if largest > LARGEST:
            raise Refusal(f"it only runs at sizes too large to try ({largest:,} elements)")
        if any(0 in shape for shape in self.shapes):
            raise Refusal("an input is empty")

    def _runs_at(self, sizes: dict[int, int]) -> bool:
        """Does it run with these sizes, and do they appear in the outputs as the true ones do?"""
        before, self._sizes = self._sizes, sizes
        try:
            values = [
                torch.empty(shape, dtype=self._precision if dtype.is_floating_point else dtype, device="meta")
                for shape, dtype in zip(self.shapes, self._dtypes, strict=True)
            ]
            with torch.no_grad():
                made = [tuple(output.shape) for output in self._call(values)]
        except Exception:  # whatever an operator raises, it does not take these sizes
            return False
        finally:
            self._sizes = before
        inside = {size for shape in self._true_shapes for size in shape}
        return len(made) == len(self._true_outputs) and all(
            len(small) == len(true)
            and all(s == sizes.get(t, t) for s, t in zip(small, true, strict=True) if t in inside)
            for small, true in zip(made, self._true_outputs, strict=True)
        )

    def _numbers(self) -> list[int]:
        """Whole numbers among the arguments that are not sizes of outputs."""
        found: list[int] = []

        def visit(arg: Arg) -> None:
            if isinstance(arg, list | tuple):
                for item in arg:
                    visit(item)
            elif type(arg) is int and abs(arg) < _END and not self._is_output_size(arg):
                found.append(arg)

        visit([*self.op.args, *self.op.kwargs.values()])
        return found

    def _is_output_size(self, number: int) -> bool:
        return number > SMALL_SIZE and any(number in shape for shape in self._true_outputs)

    def _choose_inputs(self) -> None:
        """Find a precision and a range that the operator takes, at small sizes or else at its own."""
        problem = ""
        for sizes in [self._sizes, {}] if self._sizes else [{}]:
            self._sizes = sizes
            if max((prod(shape) for shape in self.shapes), default=0) > LARGEST:
                continue
            for precision in (torch.float64, torch.float32, *self._own_precisions()):
                for in_unit_interval in (False, True):
                    self._precision, self._in_unit_interval = precision, in_unit_interval
                    self.__dict__.pop("examples", None)
                    problem = self._problem() or ""
                    if not problem:
                        return
        raise Refusal(problem)

    def _own_precisions(self) -> list[torch.dtype]:
        own = {dtype for dtype in self._dtypes if dtype.is_floating_point}
        return sorted(own - {torch.float64, torch.float32}, key=str)

    def _problem(self) -> str | None:
        try:
            with torch.random.fork_rng(devices=[]):
                first, again = self.examples[0], self._example(0, 1.0)
        except Exception as error:  # whatever an operator raises is the reason
            lines = str(error).strip().splitlines()
            return f"it fails on random inputs: {type(error).__name__}: {lines[0] if lines else ''}"
        if not _mostly_finite(first.whole.outputs):
            return "its results on random inputs are not finite"
        one, two = ((*example.whole.outputs, *example.whole.gradients) for example in (first, again))
        pairs = [(a, b) for a, b in zip(one, two, strict=True) if a is not None and b is not None]
        if not all(self._close(a, b, 1.0) for a, b in pairs):
            return "it gives different results on the same inputs"
        return None


def find_function(target: str) -> Function:
    """The callable of an operator of any namespace."""
    parts = target.split(".", 2)
    try:
        namespace, name, overload = parts
        return getattr(getattr(getattr(torch.ops, namespace), name), overload)  # type: ignore[no-any-return]
    except (ValueError, AttributeError):
        raise Refusal(f"torch has no operator {target}") from None


def _refuse_by_schema(op: Op, function: Function) -> None:
    """Operators that write their inputs have no rule; random ones cannot be split unless their chance is zero."""
    schema = getattr(function, "_schema", None)  # of torch._ops.OpOverload (tried: torch 2.13.0)
    if schema is not None and schema.is_mutable:
        raise CaptureError(
            f"operator {op.target} writes into its inputs",
            given=f"{op.name} in {op.module or 'the model'}: {schema}",
            required="operators that return new tensors",
            todo="use its form without an underscore, or declare mutates_args=() and return a copy",
        )
    if torch.Tag.nondeterministic_seeded in getattr(function, "tags", ()):
        names = [argument.name for argument in schema.arguments] if schema is not None else []
        given = {**dict(zip(names, op.args, strict=False)), **op.kwargs}
        chances = [name for name in ("p", "dropout_p") if name in names]
        if not chances or any(given.get(name, 0.0 if name == "dropout_p" else None) != 0 for name in chances):
            raise Refusal("it draws random numbers")


def _half(tensor: Tensor, dim: int, half: int, shift: int = 0) -> Tensor:
    first = max(1, tensor.shape[dim] // 2 - shift)
    start, length = (0, first) if half == 0 else (first, tensor.shape[dim] - first)
    return tensor.narrow(dim, start, length)


def _join(parts: Sequence[Tensor], dim: int | None, way: Literal["sum", "max"]) -> Tensor | None:
    if dim is not None:
        if any(part.dim() <= dim for part in parts):
            return None
        sizes = [(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts]
        return torch.cat(list(parts), dim) if sizes[0] == sizes[1] else None
    if parts[0].shape != parts[1].shape or parts[0].dtype == torch.bool:
        return None
    return torch.maximum(*parts) if way == "max" else parts[0] + parts[1]


def _or_zero(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient


def _mostly_finite(outputs: Sequence[Tensor]) -> bool:
    """At least a quarter: the logarithm of a normal number is one half of the time."""
    return all(float(o.isfinite().double().mean()) >= 0.25 for o in outputs if o.is_floating_point() and o.numel())
