"""Every rule by execution: for every factor that it calls splittable, the combined pieces equal the whole.

One operator is a graph of one block. Its float inputs are parameters (they have cotangents), all others are given. The
pieces run through `LocalRun`, as in a plan: arguments are rewritten as the rule says. The whole runs as torch does it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from planloom.blocks import Block, BlockDim, BlockGraph
from planloom.capture.rules.custom import pointwise_targets, rule_source
from planloom.capture.rules.discover import DiscoveryCache, discover
from planloom.capture.rules.written import _RULES, attach_rule
from planloom.execute import LocalRun, RunVjp
from planloom.execute.operators import operator
from planloom.graph import Graph, Rule, notate, refine_factors
from planloom.graph.rules import flat
from planloom.layout import Mesh
from tests.torch.hand_runs import hand_run
from tests.torch.operator_examples import EXAMPLES, RAGGED, Case, X, broadcast, build, pack, shape, unpack

HALVES = 2
CLOSE = 1e-10  # relative, in float64
QUICK, THOROUGH = 6, 60  # examples an operator
Index = tuple[int, ...]
DISCOVERIES = DiscoveryCache()


class Execution:
    """A case as a graph with one block, and what the whole operator makes of it."""

    def __init__(self, case: Case, rule: Rule) -> None:
        self.case = case
        tensors, (op,) = refine_factors(case.tensors, [replace(case.op, rule=rule)])
        assert op.rule is not None
        self.op, self.rule, self.tensors = op, op.rule, tensors
        floats = [name for name in case.values if tensors[name].is_float]
        self.given = {name: value for name, value in case.values.items() if name not in floats}
        graph = Graph(
            tensors=tensors,
            inputs=tuple(self.given),
            parameters=tuple(floats),
            buffers=(),
            given=(),
            ops=(op,),
            expansions=(),
            loss="y",
            tied={},
        )
        self.dims = self._dims()
        block = Block(
            index=0,
            name="operator",
            ops=(0,),
            inputs=(),
            parameters=tuple(floats),
            given=tuple(self.given),
            outputs=("y",),
            dims=tuple(self.dims),
        )
        self.blocks = BlockGraph(graph=graph, blocks=(block,))
        inputs = {name: v.clone().requires_grad_(name in floats) for name, v in case.values.items()}
        whole = case.call(inputs)
        self.whole, self.gradients = whole.detach(), dict[str, Tensor]()
        self.cotangent = torch.randn(whole.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
        self.cotangent = self.cotangent.to(whole.dtype)
        if whole.requires_grad:
            assert self.rule.differentiable, f"{op.target} has a gradient, its rule says that it has none"
            self.gradients = _gradients(whole, {name: inputs[name] for name in floats}, self.cotangent)

    def _dims(self) -> list[BlockDim]:
        """Every factor that the rule calls splittable, as a dim of the block."""
        terms = [*zip(self.op.inputs, self.rule.inputs, strict=True), ("y", self.rule.outputs[0])]
        dims = []
        for factor, size in self.rule.sizes.items():
            places = {(tensor, i) for tensor, term in terms for i, name in enumerate(flat(term)) if name == factor}
            shards = dict(places)
            halved = {tensor for tensor, term in terms if tensor in shards and factor not in flat(term)}
            # a tensor that is read twice and would be cut in two ways, or cut and whole, is no business of the rule
            if factor not in self.rule.fixed and size % HALVES == 0 and len(shards) == len(places) and not halved:
                partials = {} if "y" in shards else {"y": self.rule.combine}
                dims.append(BlockDim(name=factor, size=size, shards=shards, partials=partials))
        return dims

    def require_free_split(self, dims: Sequence[BlockDim]) -> None:
        pieces = {index: self._run(dims, index) for index in product(range(HALVES), repeat=len(dims))}
        what = f"{self.op.target}{self.op.args} {self.rule} split along {' and '.join(d.name for d in dims)}"
        found = _assembled({i: outputs for i, (outputs, _) in pieces.items()}, "y", dims, partial=True)
        require_close(found.reshape(self.whole.shape), self.whole, f"{what}: result")
        for name, gradient in self.gradients.items():
            found = _assembled(
                {i: cotangents[name] for i, (_, cotangents) in pieces.items()}, name, dims, partial=False
            )
            require_close(found.reshape(gradient.shape), gradient, f"{what}: cotangent of {name}")

    def _run(self, dims: Sequence[BlockDim], index: Index) -> tuple[Tensor, dict[str, Tensor]]:
        """(output, cotangents of the inputs) of one piece, with one dim a factor."""
        mesh = Mesh.of(range(HALVES ** len(dims)), **{f"axis{i}": HALVES for i in range(len(dims))})
        splits = {dim.name: digit for dim, digit in zip(dims, mesh.digits, strict=True)}
        run = hand_run(self.blocks, self.blocks.blocks, ("y",), splits)
        local = LocalRun(self.blocks, run, dict(zip(mesh.digits, index, strict=True)), num_micro=1)
        names = [slot.tensor for slot in run.inputs]
        vjp = RunVjp(local, [self._held(self.case.values[n], n, dims, index) for n in names], self.given, 0)
        (output,) = vjp.take_outputs()
        backward = vjp.backward([self._held(self.cotangent, "y", dims, index) if self.gradients else None])
        found = {n: c for n, c in zip(names, backward, strict=True) if c is not None}
        seen = {n: self._factored(value, n, dims, index) for n, value in found.items()}
        return self._factored(output, "y", dims, index), seen

    def _held(self, value: Tensor, name: str, dims: Sequence[BlockDim], index: Index) -> Tensor:
        """What a device holds of a whole tensor: its piece, of ragged ones the rows that there are."""
        piece, mask = self._cut(value, name, dims, index), self._mask(name, dims, index)
        return piece if mask is None else pack(piece, mask)

    def _mask(self, name: str, dims: Sequence[BlockDim], index: Index) -> Tensor | None:
        ragged = RAGGED.get(self.op.target)
        if ragged is None or name not in ragged.names(self.op):
            return None
        mask = self.op.inputs[ragged.mask]
        return self._cut(self.case.values[mask], mask, dims, index)

    def _cut(self, value: Tensor, name: str, dims: Sequence[BlockDim], index: Index) -> Tensor:
        tensor = self.tensors[name]
        piece = value.reshape(tensor.sizes)
        for dim, i in zip(dims, index, strict=True):
            if name in dim.shards:
                piece = piece.chunk(HALVES, dim.shards[name])[i]
        lengths = iter(piece.shape)
        return piece.reshape([prod(next(lengths) for _ in factors) for factors in tensor.factors])

    def _factored(self, value: Tensor, name: str, dims: Sequence[BlockDim], index: Index) -> Tensor:
        mask = self._mask(name, dims, index)
        value = value if mask is None else unpack(value, mask)
        sizes = list(self.tensors[name].sizes)
        for dim in dims:
            if name in dim.shards:
                sizes[dim.shards[name]] //= HALVES
        return value.reshape(sizes)

    def require_linear(self) -> None:
        """If exactly the inputs of a group are partial sums, so is the output."""
        generator = torch.Generator().manual_seed(8)
        floats = {name: value for name, value in self.case.values.items() if value.is_floating_point()}
        fresh = {name: torch.randn(v.shape, dtype=v.dtype, generator=generator) for name, v in floats.items()}
        for group in self.rule.linear:
            names = {self.op.inputs[i] for i in group}
            outside = {name for i, name in enumerate(self.op.inputs) if i not in group}
            if names & outside or not names <= fresh.keys():  # mul(x, x) is linear in neither; a mask is never partial
                continue
            other = {n: fresh[n] if n in names else v for n, v in self.case.values.items()}
            total = {n: v + fresh[n] if n in names else v for n, v in self.case.values.items()}
            parts = [self.case.call(values).detach() for values in (self.case.values, other)]
            whole = self.case.call(total).detach()
            require_close(parts[0] + parts[1], whole, f"{self.op.target}{self.op.args} linear in inputs {group}")


def _gradients(whole: Tensor, inputs: Mapping[str, Tensor], cotangent: Tensor) -> dict[str, Tensor]:
    """Nothing where torch has no derivative, as of igamma: nobody can train with it."""
    try:
        found = torch.autograd.grad(whole, list(inputs.values()), cotangent, allow_unused=True)
    except RuntimeError as error:  # NotImplementedError is one
        if "derivative" not in str(error):
            raise
        return {}
    pairs = zip(inputs.items(), found, strict=True)
    return {name: torch.zeros_like(value) if gradient is None else gradient for (name, value), gradient in pairs}


def _assembled(pieces: Mapping[Index, Tensor], name: str, dims: Sequence[BlockDim], *, partial: bool) -> Tensor:
    """Put pieces together along the last dim first: joined, or combined as the dim says, cotangents summed."""
    if not dims:
        return pieces[()]
    last, joined = dims[-1], {}
    for index in product(range(HALVES), repeat=len(dims) - 1):
        parts = [pieces[(*index, i)] for i in range(HALVES)]
        if name in last.shards:
            joined[index] = torch.cat(parts, last.shards[name])
        elif partial and last.partials[name] == "max":
            joined[index] = torch.maximum(*parts)
        else:
            joined[index] = torch.stack(parts).sum(0)
    return _assembled(joined, name, dims[:-1], partial=partial)


def require_close(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.shape == expected.shape, what
    bound = {torch.float64: CLOSE, torch.bfloat16: 0.02}.get(expected.dtype, 1e-5)
    torch.testing.assert_close(
        found, expected, rtol=bound, atol=bound, equal_nan=True, msg=lambda text: f"{what}\n{text}"
    )


def require_rule(case: Case, rule: Rule) -> int:
    """Try every factor and every two factors; how many factors there were."""
    execution = Execution(case, rule)
    for count in (1, 2):
        for dims in combinations(execution.dims, count):
            execution.require_free_split(dims)
    execution.require_linear()
    return len(execution.dims)


def rule_of(case: Case) -> Rule:
    if rule_source(case.op.target) == "discovered":
        return discover(case.op, case.tensors, cache=DISCOVERIES)
    return attach_rule(case.op, case.tensors)


def try_rule(target: str, data: st.DataObject) -> None:
    call = EXAMPLES[target](data.draw)
    case = build(target, call.args, call.kwargs, seed=data.draw(st.integers(0, 99), label="seed"))
    require_rule(case, rule_of(case))


def test_every_written_rule_has_examples() -> None:
    assert sorted(_RULES.keys() - EXAMPLES.keys()) == []


@pytest.mark.parametrize("target", sorted(EXAMPLES))
@settings(max_examples=QUICK)
@given(data=st.data())
def test_a_rule_by_execution(target: str, data: st.DataObject) -> None:
    try_rule(target, data)


@pytest.mark.slow
@pytest.mark.parametrize("target", sorted(EXAMPLES))
@settings(max_examples=THOROUGH)
@given(data=st.data())
def test_a_rule_by_execution_thoroughly(target: str, data: st.DataObject) -> None:
    try_rule(target, data)


FOUND = {
    "every third from the end": ("aten.slice.Tensor", [X((12,)), 0, -10, 2**63 - 1, 3]),
    "an empty slice": ("aten.slice.Tensor", [X((4, 6)), 1, 3, 3]),
    "all in order": ("planloom.topk", [X((2, 4)), 4, 1, True, True]),
}
"""What chance finds rarely."""


@pytest.mark.parametrize(("target", "args"), FOUND.values(), ids=FOUND.keys())
def test_a_rule_of_a_single_call(target: str, args: list[object]) -> None:
    case = build(target, args)
    require_rule(case, rule_of(case))


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("aten.gather.default", [X((2, 4)), 1, X((2, 6), "index", 4)]),
        ("aten.index_select.default", [X((2, 4)), 1, X((6,), "index", 4)]),
        ("aten.embedding.default", [X((4, 2)), X((6,), "index", 4)]),
        ("planloom.pick", [X((2, 4)), X((2,), "index", 4)]),
    ],
)
def test_an_infinity_that_is_not_picked_from_a_piece_is_no_part_of_it(target: str, args: list[X]) -> None:
    """Masked logits are −∞: what lies outside a piece must count as zero, not as zero times infinity."""
    case = build(target, args)
    case.values["t0"].fill_(-torch.inf)
    require_rule(case, rule_of(case))


WRONG = {
    "a softmax split along itself": ("aten.softmax.int", [X((4, 6)), 1], "a b -> a b", {}),
    "a mean that is a sum": ("aten.mean.dim", [X((4, 6)), [1]], "a b -> a", {}),
    "a maximum that is summed": ("planloom.statistic_max", [X((4, 6)), 1], "a b -> a 1", {"differentiable": False}),
    "a maximum with a gradient": ("aten.amax.default", [X((4, 6)), [1]], "a b -> a", {"combine": "max"}),
    "an activation of partial sums": ("aten.relu.default", [X((4, 6))], "a b -> a b", {"linear": ((0,),)}),
    "a bias in every partial sum": ("aten.addmm.default", [X((6,)), X((2, 4)), X((4, 6))], "o, r i, i o -> r o", {}),
    "a running sum": ("aten.cumsum.default", [X((4, 6)), 0], "a b -> a b", {}),
    "indices without an offset": ("aten.embedding.default", [X((4, 6)), X((2,), "index", 4)], "v o, a -> a o", {}),
    "sizes that stay": ("aten.expand.default", [X((4, 1)), [4, 6]], "a 1 -> a b", {}),
}


@pytest.mark.parametrize(("target", "args", "text", "fields"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_rule_is_found(target: str, args: list[object], text: str, fields: dict[str, object]) -> None:
    case = build(target, args)
    shapes = [case.tensors[name].shape for name in (*case.op.inputs, "y")]
    with pytest.raises((AssertionError, IndexError, RuntimeError)):
        require_rule(case, notate(text, *shapes, **fields))


# --- the pointwise family ---------------------------------------------------------------------------------------------

WHOLE = (2, 4, 6)


def pointwise_case(target: str, shapes: Sequence[tuple[int, ...]]) -> Case | None:
    """A call from the schema: tensors of these shapes in turn, numbers where a number is asked for."""
    schema = operator(target)._schema  # type: ignore[attr-defined]
    is_random = torch.Tag.nondeterministic_seeded in operator(target).tags  # type: ignore[attr-defined]
    if is_random or [str(result.type) for result in schema.returns] != ["Tensor"]:
        return None
    for kind in ("unit", "index", "mask"):
        supply, args, kwargs = iter(shapes), [], {}
        for argument in schema.arguments:
            type_name = str(argument.type)
            if type_name in ("Tensor", "Optional[Tensor]"):
                value: object = X(next(supply), kind, 4)  # type: ignore[arg-type]
            elif argument.has_default_value():
                continue
            else:
                value = {"number": 0.7 if kind == "unit" else 1, "float": 0.7, "int": 1, "bool": False}.get(type_name)
                if value is None:
                    return None
            if argument.kwarg_only or len(args) < schema.arguments.index(argument):
                kwargs[argument.name] = value
            else:
                args.append(value)
        try:
            return build(target, args, kwargs)
        except (RuntimeError, TypeError, NotImplementedError, IndexError):
            continue
    return None


POINTWISE = pointwise_targets()


def test_pointwise_operators_by_execution() -> None:
    tried = 0
    for target in POINTWISE:
        case = pointwise_case(target, [WHOLE] * 5)
        if case is not None and rule_source(target) == "family":
            assert require_rule(case, rule_of(case)) == len(WHOLE), target
            tried += 1
    assert tried >= 150


@pytest.mark.slow
@pytest.mark.parametrize("target", POINTWISE)
@settings(max_examples=QUICK)
@given(data=st.data())
def test_a_pointwise_operator_by_execution(target: str, data: st.DataObject) -> None:
    whole = shape(data.draw)
    case = pointwise_case(target, [whole, *(broadcast(data.draw, whole) for _ in range(4))])
    if case is not None and rule_source(target) == "family":
        require_rule(case, rule_of(case))
