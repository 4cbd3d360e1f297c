"""A run compiled: its operators as one function of plain tensors, compiled once for each structure.

The *structure* of a run is its list of operators with their constants and their wiring; names of tensors and of layers
are no part of it, so 32 equal layers have one. What differs between runs of equal structure, or between micro-batches,
enters as a tensor:

    slots                what the run is given by others
    given tensors        sliced outside, as in a run that is not compiled
    places of dropout    [number of the random operator, first index along each factor], one small tensor a micro-batch

For each structure, and for each signature of these tensors (shape, strides, dtype, device, whether a gradient is
wanted), torch's compiler makes a forward and a backward ahead of time, from fake tensors. There are no guards and no
limits of recompilation: the signature is looked up at every call. What the backward needs of a parameter is saved as a
view of it, so a parameter that is gathered again into the same storage is read there; where the compiler saves a copy
instead (of another dtype), the copy has the same value and lives longer.

Operators on ragged tensors (rows of experts, as many as the routing gives) and others whose result has a shape that
depends on data stay as they are; the run is then compiled in stretches between them, and `eager_runs` says why.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch._inductor  # `compile`: tried with torch 2.11 and 2.13
from torch import Tensor, fx
from torch._ops import OpOverload  # tried with torch 2.11 and 2.13
from torch._subclasses.fake_tensor import FakeTensorMode  # tried with torch 2.11 and 2.13

from planloom.blocks import BlockGraph
from planloom.errors import TrainingError
from planloom.execute.given import compute_given
from planloom.execute.local import At, Key, LocalRun, Part, Scaled, Step, fill, keys_of
from planloom.execute.random import dropout, uniform_numbers
from planloom.graph import RANDOM_STATE
from planloom.layout import Box
from planloom.program import Program

Structure = tuple[object, ...]
Signature = tuple[object, ...]
Function = Callable[..., Sequence[Tensor]]
"""From the tensors that a stretch reads to those that it makes."""
Compiler = Callable[[fx.GraphModule, list[Tensor]], Function]
"""From a graph and fake examples of its inputs; whether they want gradients decides whether there is a backward."""

_RAGGED = "rows of experts: their number depends on data"
_DATA_DEPENDENT = "the shape of its result depends on data"
_DYNAMIC_TAGS = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerRun:
    """A run of which some operators are not compiled."""

    run: int
    operators: tuple[str, ...]
    num_operators: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """Consecutive steps, compiled together or carried out one by one."""

    steps: tuple[Step, ...]
    is_compiled: bool
    reads: tuple[Key, ...]
    makes: tuple[Key, ...]
    finished: tuple[Key, ...]
    number: int
    """Of its structure; -1 if it is not compiled."""


class CompiledRuns:
    """Compiled functions by structure and signature, shared by all runs that are compiled with it.

    `compiler` is torch's inductor unless another is given.
    """

    def __init__(self, compiler: Compiler | None = None) -> None:
        self._compiler: Compiler = _inductor if compiler is None else compiler
        self._functions: dict[tuple[int, Signature], Function] = {}
        self._numbers: dict[Structure, int] = {}
        self._eager: list[EagerRun] = []

    @property
    def num_structures(self) -> int:
        """Distinct structures among the runs so far."""
        return len(self._numbers)

    @property
    def num_compilations(self) -> int:
        """Functions compiled so far: one for each structure and signature."""
        return len(self._functions)

    def compile(self, local: LocalRun) -> "CompiledRun":
        """The compiled counterpart of a run; it is compiled at its first call."""
        compiled = CompiledRun(local, self)
        if (eager := compiled.eager) is not None:
            self._eager.append(eager)
        return compiled

    def eager_runs(self) -> tuple[EagerRun, ...]:
        """Runs with operators that are not compiled, and why."""
        return tuple(self._eager)

    def number(self, structure: Structure) -> int:
        """The number by which a structure is known here."""
        return self._numbers.setdefault(structure, len(self._numbers))

    def function(self, stretch: _Stretch, inputs: Sequence[Tensor]) -> Function:
        """The compiled function of a stretch for tensors like these."""
        key = (stretch.number, _signature(inputs))
        found = self._functions.get(key)
        if found is None:
            found = self._functions[key] = _compiled(stretch, inputs, self._compiler)
        return found


class CompiledRun:
    """The forward function of a run at the given coordinates of its mesh, as `LocalRun`, compiled."""

    def __init__(self, local: LocalRun, runs: CompiledRuns) -> None:
        self.run, self.graph, self._local, self._runs = local.run, local.graph, local, runs
        self._places: dict[Key, tuple[int, Part]] = {}
        self._held_places: dict[tuple[Key, int, torch.device], Tensor] = {}
        ragged = {("made", name) for name, tensor in local.graph.tensors.items() if tensor.rows}
        ragged |= {("slot", str(i)) for i, slot in enumerate(self.run.inputs) if ("made", slot.tensor) in ragged}
        steps = [self._placed(i, step) for i, step in enumerate(local.steps)]
        self._reasons = [_why_eager(step, ragged) for step in steps]
        self._outputs: tuple[Key, ...] = tuple(("made", slot.tensor) for slot in self.run.outputs)
        self.stretches = _stretches(steps, self._reasons, self._outputs, runs.number)

    @property
    def eager(self) -> EagerRun | None:
        """What is not compiled; None if all is."""
        left = [(step, reason) for step, reason in zip(self._local.steps, self._reasons, strict=True) if reason]
        if not left:
            return None
        return EagerRun(
            run=self.run.index,
            operators=tuple(dict.fromkeys(str(_name(step.function)) for step, _ in left)),
            num_operators=len(left),
            reason="; ".join(dict.fromkeys(reason for _, reason in left)),
        )

    def __call__(self, inputs: Sequence[Tensor], given: Mapping[str, Tensor], micro: int) -> tuple[Tensor, ...]:
        """Outputs in the order of the run's output slots; `given` holds the whole given tensors."""
        table = self._table(inputs, given, micro)
        for key in self._places:
            table[key] = self._place(key, micro, next(iter(table.values())).device)
        for stretch in self.stretches:
            if stretch.is_compiled:
                arguments = [table[key] for key in stretch.reads]
                results = self._runs.function(stretch, arguments)(*arguments)
                table.update(zip(stretch.makes, results, strict=True))
                del arguments, results
            else:
                for step in stretch.steps:
                    table[step.result] = step.function(
                        *fill(step.args, table, micro), **fill(step.kwargs, table, micro)
                    )
                    for key in step.finished:
                        del table[key]
            for key in stretch.finished:
                table.pop(key, None)
        return tuple(table[key] for key in self._outputs)

    def prepare(self, inputs: Sequence[Tensor], given: Mapping[str, Tensor]) -> None:
        """Compile for tensors like these, which may be fake, as far as shapes do not depend on data; compute nothing.

        torch keeps what it compiled on disk, so processes can prepare runs for each other.
        """
        first = self.stretches[0]
        if first.is_compiled:
            table = self._table(inputs, given)
            places = {key: self._make_place(key, 0, next(iter(table.values())).device) for key in self._places}
            with torch.enable_grad():
                self._runs.function(first, [places[key] if key in places else table[key] for key in first.reads])

    def _placed(self, index: int, step: Step) -> Step:
        """Dropout whose place in the whole is a tensor; any other step as it is."""
        if step.function is not dropout:
            return step
        x, p, number, state = step.args
        key, part = ("place", str(index)), step.kwargs["box"]
        self._places[key] = (number, part)
        lengths = tuple(stop - start for start, stop in _box(part, 0))
        kwargs = {"sizes": step.kwargs["sizes"], "lengths": lengths}
        return replace(step, function=placed_dropout, args=(x, p, At(key), state), kwargs=kwargs)

    def _table(self, inputs: Sequence[Tensor], given: Mapping[str, Tensor], micro: int = 0) -> dict[Key, Tensor]:
        slots: dict[Key, Tensor] = {("slot", str(i)): tensor for i, tensor in enumerate(inputs)}
        return slots | self._local.given_tensors(given, micro)

    def _place(self, key: Key, micro: int, device: torch.device) -> Tensor:
        """A place as a tensor, made once: a copy to a GPU in every step would make the host wait for it."""
        if (key, micro, device) not in self._held_places:
            self._held_places[key, micro, device] = self._make_place(key, micro, device)
        return self._held_places[key, micro, device]

    def _make_place(self, key: Key, micro: int, device: torch.device) -> Tensor:
        number, part = self._places[key]
        return torch.tensor([number, *(start for start, _ in _box(part, micro))], device=device)


def _box(part: Part, micro: int) -> Box:
    return part.piece.box(part.sizes, part.tensor, micro)


def _why_eager(step: Step, ragged: set[Key]) -> str:
    """Why a step cannot be compiled; nothing if it can."""
    if not ragged.isdisjoint((step.result, *keys_of((step.args, step.kwargs)))):
        return _RAGGED
    function = step.function.function if isinstance(step.function, Scaled) else step.function
    if isinstance(function, OpOverload) and any(tag in function.tags for tag in _DYNAMIC_TAGS):
        return _DATA_DEPENDENT
    return ""


def placed_dropout(
    x: Tensor, p: float, place: Tensor, state: Tensor, *, sizes: Sequence[int], lengths: Sequence[int]
) -> Tensor:
    """`dropout` whose number and first indices are a tensor: [number, first index along each factor]."""
    if p >= 1:
        return x * 0
    index, stride = torch.zeros((), dtype=torch.int64, device=x.device), prod(sizes)
    for i, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        stride //= size
        along = (torch.arange(length, dtype=torch.int64, device=x.device) + place[i + 1]) * stride
        index = index + along.view(-1, *[1] * (len(sizes) - 1 - i))
    kept = uniform_numbers(index, place[0], state) >= p  # type: ignore[arg-type]
    return x * (kept.reshape(x.shape).to(x.dtype) * (1 / (1 - p)))


# -- stretches


def _stretches(
    steps: Sequence[Step], reasons: Sequence[str], outputs: tuple[Key, ...], number_of: Callable[[Structure], int]
) -> tuple[_Stretch, ...]:
    """The steps cut where compiled ones and others meet."""
    groups: list[list[Step]] = []
    for i, step in enumerate(steps):
        if i == 0 or bool(reasons[i]) != bool(reasons[i - 1]):
            groups.append([])
        groups[-1].append(step)
    kinds = [not reasons[i] for i in range(len(steps)) if i == 0 or bool(reasons[i]) != bool(reasons[i - 1])]
    result: list[_Stretch] = []
    for number, (group, is_compiled) in enumerate(zip(groups, kinds, strict=True)):
        made = [step.result for step in group]
        read = dict.fromkeys(key for step in group for key in keys_of((step.args, step.kwargs)))
        later = {key for after in groups[number + 1 :] for step in after for key in keys_of((step.args, step.kwargs))}
        needed = later.union(outputs)
        reads = tuple(key for key in read if key not in set(made))
        makes = tuple(key for key in made if key in needed)
        result.append(
            _Stretch(
                steps=tuple(group),
                is_compiled=is_compiled,
                reads=reads,
                makes=makes,
                finished=tuple(key for key in reads if key not in needed),
                number=number_of(_structure(group, reads, makes)) if is_compiled else -1,
            )
        )
    return tuple(result)


def _structure(steps: Sequence[Step], reads: Sequence[Key], makes: Sequence[Key]) -> Structure:
    """What two stretches must have in common to be compiled as one: wiring by number, not by name."""
    numbers = {key: i for i, key in enumerate(reads)}
    lines: list[object] = []
    for step in steps:
        lines.append((_name(step.function), _form(step.args, numbers), _form(step.kwargs, numbers)))
        numbers[step.result] = len(numbers)
    return (len(reads), tuple(lines), tuple(numbers[key] for key in makes))


def _name(function: Any) -> object:
    if isinstance(function, Scaled):
        return ("scaled", _name(function.function), function.share)
    if isinstance(function, OpOverload):
        return str(function)
    return f"{function.__module__}.{function.__qualname__}"


def _form(args: Any, numbers: Mapping[Key, int]) -> object:
    """Arguments as something that can be compared; 1, 1.0 and True differ."""
    if isinstance(args, At):
        return ("at", numbers[args.key])
    if isinstance(args, tuple | list):
        return tuple(_form(arg, numbers) for arg in args)
    if isinstance(args, dict):
        return tuple((key, _form(value, numbers)) for key, value in sorted(args.items()))
    assert not isinstance(args, Part | Tensor), args
    return (type(args).__name__, args)


def _signature(inputs: Sequence[Tensor]) -> Signature:
    grad = torch.is_grad_enabled()
    return (
        grad,
        *((t.shape, t.stride(), t.dtype, t.device, grad and t.requires_grad) for t in inputs),
    )


# -- ahead of time


def prepare_runs(
    blocks: BlockGraph, program: Program, device: int, known: Mapping[str, Tensor], at: torch.device, runs: CompiledRuns
) -> None:
    """Compile the runs of a device of a program for tensors at `at`, without any: `known` tells of batch and buffers.

    Nothing is computed and nothing allocated, so many programs can be prepared by processes side by side.
    """
    graph, mode = blocks.graph, FakeTensorMode()
    with mode:
        fakes = {name: torch.empty(t.shape, dtype=t.dtype, device=at) for name, t in known.items()}
        if graph.random:
            fakes[RANDOM_STATE] = torch.empty(2, dtype=torch.int64, device=at)
        given = compute_given(graph, fakes, at)
    for run in program.runs:
        mesh = program.mesh_of(run.stage)
        if device not in mesh.devices or run.turn is not None:  # a turn of a ring is a kernel of torch's
            continue
        inputs = []
        for slot in run.inputs:
            tensor, lengths = graph.tensors[slot.tensor], iter(slot.layout.local_sizes(slot.sizes))
            shape, dtype = [prod(next(lengths) for _ in dim) for dim in tensor.factors], getattr(torch, tensor.dtype)
            with mode:
                inputs.append(torch.empty(shape, dtype=dtype, device=at, requires_grad=slot.cotangent is not None))
        local = LocalRun(blocks, run, mesh.coordinates(device), num_micro=program.num_micro_batches)
        runs.compile(local).prepare(inputs, given)


# -- compilation


def _inductor(module: fx.GraphModule, examples: list[Tensor]) -> Function:
    return torch._inductor.compile(module, list(examples))  # type: ignore[no-any-return]


def _compiled(stretch: _Stretch, inputs: Sequence[Tensor], compiler: Compiler) -> Function:
    """A stretch's function for tensors like these, forward and backward compiled ahead of time."""
    module = fx.GraphModule(torch.nn.Module(), _graph_of(stretch))
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        examples = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device, requires_grad=t.requires_grad)
            for t in inputs
        ]
    try:
        return compiler(module, examples)
    except Exception as error:  # the compiler raises types of its own
        raise TrainingError(
            "a run cannot be compiled",
            given=f"{len(stretch.steps)} operators, {_name(stretch.steps[0].function)} first: {error}",
            required="operators that torch's compiler takes",
            todo="train without compile=True",
        ) from error


def _graph_of(stretch: _Stretch) -> fx.Graph:
    graph = fx.Graph()
    nodes: dict[Key, fx.Node] = {key: graph.placeholder(f"input_{i}") for i, key in enumerate(stretch.reads)}

    def resolved(args: Any) -> Any:
        if isinstance(args, At):
            return nodes[args.key]
        if isinstance(args, tuple | list):
            return [resolved(arg) for arg in args]
        if isinstance(args, dict):
            return {key: resolved(value) for key, value in args.items()}
        return args

    for step in stretch.steps:
        args, kwargs = tuple(resolved(step.args)), resolved(step.kwargs)
        function = step.function
        if isinstance(function, Scaled):
            inner = graph.call_function(function.function, args, kwargs)
            nodes[step.result] = graph.call_function(torch.mul, (inner, function.share))
        else:
            nodes[step.result] = graph.call_function(function, args, kwargs)
    graph.output(tuple(nodes[key] for key in stretch.makes))
    return graph
