"""Examples of calls of every operator that has a written rule: shapes and arguments, drawn by Hypothesis.

Most sizes are even, so that factors can be cut in two; some are one, which is no factor, or odd.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from planloom.execute.operators import operator, plain
from planloom.graph import Op, reference, referenced
from planloom.graph import Tensor as GraphTensor

Draw = Callable[[st.SearchStrategy[Any]], Any]
Kind = Literal["normal", "unit", "index", "mask"]


@dataclass(frozen=True)
class X:
    """A tensor argument: normal numbers, numbers between 0.1 and 0.9, indices below `high`, or a mask."""

    shape: tuple[int, ...]
    kind: Kind = "normal"
    high: int = 0

    def value(self, generator: torch.Generator) -> Tensor:
        if self.kind == "index":
            return torch.randint(self.high, self.shape, generator=generator)
        if self.kind == "mask":
            return torch.rand(self.shape, generator=generator) < 0.75
        if self.kind == "unit":
            return 0.1 + 0.8 * torch.rand(self.shape, generator=generator, dtype=torch.float64)
        return torch.randn(self.shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Ragged:
    """Which inputs, and whether the output, hold only the rows of a mask [experts, tokens]; a case has them whole."""

    mask: int
    inputs: tuple[int, ...]
    output: bool

    def names(self, op: Op) -> set[str]:
        return {op.inputs[i] for i in self.inputs} | ({"y"} if self.output else set())


RAGGED = {
    "planloom.dispatch.default": Ragged(mask=1, inputs=(), output=True),
    "planloom.grouped_linear.default": Ragged(mask=2, inputs=(0,), output=True),
    "planloom.grouped_bias.default": Ragged(mask=2, inputs=(0,), output=True),
    "planloom.combine.default": Ragged(mask=2, inputs=(0,), output=False),
}


def pack(whole: Tensor, mask: Tensor) -> Tensor:
    """[experts, tokens, features] → [1, rows, features]."""
    return whole[mask].unsqueeze(0)


def unpack(rows: Tensor, mask: Tensor) -> Tensor:
    """[1, rows, features] → [experts, tokens, features], zero where there is no row."""
    whole = torch.zeros(*mask.shape, rows.shape[2], dtype=rows.dtype)
    return whole.index_put((mask,), rows[0])


@dataclass(frozen=True)
class Case:
    """An operator without its rule, its tensors, and their values."""

    op: Op
    tensors: dict[str, GraphTensor]
    values: dict[str, Tensor]

    def call(self, values: Mapping[str, Tensor]) -> Tensor:
        """The whole operator on these values."""
        ragged = RAGGED.get(self.op.target)
        if ragged is not None:
            mask = values[self.op.inputs[ragged.mask]]
            values = {n: pack(v, mask) if n in ragged.names(self.op) else v for n, v in values.items()}
        result = self._call(values)
        return unpack(result, mask) if ragged is not None and "y" in ragged.names(self.op) else result

    def _call(self, values: Mapping[str, Tensor]) -> Tensor:
        def filled(arg: Any) -> Any:
            if isinstance(arg, str) and arg.startswith("%"):
                return values[arg[1:]]
            return [filled(item) for item in arg] if isinstance(arg, list | tuple) else plain(arg)

        kwargs = {key: filled(value) for key, value in self.op.kwargs.items()}
        return operator(self.op.target)(*map(filled, self.op.args), **kwargs)


def build(target: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, *, seed: int = 0) -> Case:
    """A case with random values; an `X` that appears twice (the same object) is one tensor."""
    generator = torch.Generator().manual_seed(seed)
    names: dict[int, str] = {}
    values: dict[str, Tensor] = {}

    def written(arg: Any) -> Any:
        if isinstance(arg, X):
            if id(arg) not in names:
                names[id(arg)] = f"t{len(names)}"
                values[names[id(arg)]] = arg.value(generator)
            return reference(names[id(arg)])
        if isinstance(arg, list | tuple):
            return [written(item) for item in arg]
        return str(arg) if isinstance(arg, torch.dtype) else arg

    plain_args = [written(arg) for arg in args]
    plain_kwargs = {key: written(value) for key, value in (kwargs or {}).items()}
    op = Op(
        name="y",
        target=target,
        args=tuple(plain_args),
        kwargs=plain_kwargs,
        inputs=tuple(referenced([plain_args, plain_kwargs])),
        outputs=("y",),
    )
    case = Case(op=op, tensors={}, values=values)
    for name, value in {**values, "y": case.call(values)}.items():
        dtype = str(value.dtype).removeprefix("torch.")
        case.tensors[name] = GraphTensor(name=name, shape=tuple(value.shape), dtype=dtype)
    return case


@dataclass(frozen=True)
class Call:
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


EXAMPLES: dict[str, Callable[[Draw], Call]] = {}
"""Target → a function that draws a call."""

EVEN = st.sampled_from((2, 4, 6))
SIZE = st.sampled_from((2, 4, 6, 4, 2, 1, 3))
Function = Callable[[Draw], Call]


def example(*targets: str) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        EXAMPLES.update(dict.fromkeys(targets, function))
        return function

    return register


def shape(draw: Draw, least: int = 1, most: int = 3) -> tuple[int, ...]:
    return tuple(draw(st.lists(SIZE, min_size=least, max_size=most)))


def some_dim(draw: Draw, rank: int) -> int:
    return draw(st.integers(-rank, rank - 1))  # type: ignore[no-any-return]


def some_dims(draw: Draw, rank: int, least: int = 1) -> list[int]:
    dims = draw(st.lists(st.integers(0, rank - 1), min_size=least, max_size=rank, unique=True))
    return [dim - rank * draw(st.booleans()) for dim in dims]


def broadcast(draw: Draw, whole: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to this one."""
    kept = whole[draw(st.integers(0, len(whole))) :]
    return tuple(draw(st.sampled_from((size, 1))) for size in kept)


# --- pointwise --------------------------------------------------------------------------------------------------------


@example("aten._to_copy.default")
def _(draw: Draw) -> Call:
    return Call([X(shape(draw))], {"dtype": draw(st.sampled_from((torch.float64, torch.float32, torch.int64)))})


@example("aten.detach.default", "aten.relu.default", "aten.gelu.default", "aten.neg.default", "aten.exp.default")
def _(draw: Draw) -> Call:
    return Call([X(shape(draw))])


@example("aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Tensor")
def _(draw: Draw) -> Call:
    whole = shape(draw)
    one, two = X(whole), X(broadcast(draw, whole))
    first, second = draw(st.sampled_from(((one, two), (two, one), (one, one), (one, 2.5))))
    return Call([first, second])


@example("aten.where.self")
def _(draw: Draw) -> Call:
    whole = shape(draw)
    return Call([X(broadcast(draw, whole), "mask"), X(whole), X(broadcast(draw, whole))])


@example("aten.where.ScalarOther")
def _(draw: Draw) -> Call:
    whole = shape(draw)
    return Call([X(broadcast(draw, whole), "mask"), X(whole), 0.5])


@example("aten.where.ScalarSelf")
def _(draw: Draw) -> Call:
    whole = shape(draw)
    return Call([X(broadcast(draw, whole), "mask"), 0.5, X(whole)])


@example("aten.where.Scalar")
def _(draw: Draw) -> Call:
    return Call([X(shape(draw), "mask"), 0.5, 1.5])


@example("planloom.dropout")
def _(draw: Draw) -> Call:
    return Call([X(shape(draw)), draw(st.sampled_from((0.0, 0.3, 1.0))), draw(st.integers(0, 9)), X((2,), "index", 99)])


# --- views ------------------------------------------------------------------------------------------------------------


@example("aten.reshape.default", "aten.view.default", "aten._unsafe_view.default")
def _(draw: Draw) -> Call:
    """Two groupings of the same factors."""
    factors = shape(draw, 1, 5)

    def grouped() -> list[int]:
        sizes = [1]
        for factor in factors:
            if draw(st.booleans()):
                sizes.append(1)
            sizes[-1] *= factor
        return sizes

    return Call([X(tuple(grouped())), grouped()])


@example("aten.transpose.int")
def _(draw: Draw) -> Call:
    source = shape(draw, 2, 4)
    return Call([X(source), some_dim(draw, len(source)), some_dim(draw, len(source))])


@example("aten.permute.default")
def _(draw: Draw) -> Call:
    source = shape(draw, 1, 4)
    order = draw(st.permutations(range(len(source))))
    return Call([X(source), [dim - len(source) * draw(st.booleans()) for dim in order]])


@example("aten.t.default")
def _(draw: Draw) -> Call:
    return Call([X(shape(draw, 2, 2))])


@example("aten.unsqueeze.default")
def _(draw: Draw) -> Call:
    source = shape(draw, 0, 3)
    return Call([X(source), some_dim(draw, len(source) + 1)])


@example("aten.squeeze.dim")
def _(draw: Draw) -> Call:
    before, after = shape(draw, 0, 2), shape(draw, 0, 2)
    return Call([X((*before, 1, *after)), len(before) - draw(st.booleans()) * (len(before) + 1 + len(after))])


@example("aten.squeeze.dims")
def _(draw: Draw) -> Call:
    return Call([X((1, *shape(draw), 1)), [0, -1]])


@example("aten.expand.default")
def _(draw: Draw) -> Call:
    whole = shape(draw)
    source = broadcast(draw, whole)
    start = len(whole) - len(source)
    asked = [
        -1 if i >= start and source[i - start] == size and draw(st.booleans()) else size for i, size in enumerate(whole)
    ]
    return Call([X(source), asked])


@example("aten.slice.Tensor")
def _(draw: Draw) -> Call:
    source = shape(draw)
    dim = some_dim(draw, len(source))
    size = source[dim]
    start = draw(st.integers(-size, size - 1))
    first = start % size
    stop = draw(st.one_of(st.integers(first + 1, size), st.just(2**63 - 1)))
    stop -= size if stop < size and draw(st.booleans()) else 0
    step = draw(st.sampled_from((1, 1, 2, 3)))
    return Call([X(source), dim, start, stop, *([step] if step > 1 or draw(st.booleans()) else [])])


@example("aten.select.int")
def _(draw: Draw) -> Call:
    source = shape(draw)
    dim = some_dim(draw, len(source))
    return Call([X(source), dim, draw(st.integers(-source[dim], source[dim] - 1))])


@example("aten.cat.default")
def _(draw: Draw) -> Call:
    source = shape(draw)
    dim = some_dim(draw, len(source))
    sizes = [draw(SIZE) for _ in range(draw(st.integers(1, 3)))]
    sizes = [sizes[0]] * len(sizes) if draw(st.booleans()) else sizes
    at = dim % len(source)
    return Call([[X((*source[:at], size, *source[at + 1 :])) for size in sizes], dim])


@example("aten.stack.default")
def _(draw: Draw) -> Call:
    source = shape(draw)
    return Call([[X(source) for _ in range(draw(st.integers(1, 3)))], some_dim(draw, len(source) + 1)])


# --- reductions -------------------------------------------------------------------------------------------------------


@example("aten.sum.dim_IntList", "aten.mean.dim", "aten.amax.default", "aten.amin.default", "aten.logsumexp.default")
def _(draw: Draw) -> Call:
    source = shape(draw)
    return Call([X(source), some_dims(draw, len(source)), draw(st.booleans())])


@example("aten.sum.default", "aten.mean.default")
def _(draw: Draw) -> Call:
    return Call([X(shape(draw))])


@example("aten.var.correction", "aten.std.correction")
def _(draw: Draw) -> Call:
    source = shape(draw)
    dims = draw(st.sampled_from((None, some_dims(draw, len(source)))))
    return Call([X(source), dims], {"correction": 0, "keepdim": draw(st.booleans())})


@example("aten.prod.dim_int", "aten.argmax.default", "aten.argmin.default")
def _(draw: Draw) -> Call:
    source = shape(draw)
    return Call([X(source), some_dim(draw, len(source)), draw(st.booleans())])


@example("aten.linalg_vector_norm.default")
def _(draw: Draw) -> Call:
    source = shape(draw)
    return Call([X(source), draw(st.sampled_from((2.0, 1.0))), some_dims(draw, len(source)), draw(st.booleans())])


@example("planloom.root")
def _(draw: Draw) -> Call:
    return Call([X(shape(draw))])


@example("planloom.statistic_max")
def _(draw: Draw) -> Call:
    source = shape(draw)
    return Call([X(source), some_dim(draw, len(source))])


# --- along a dim ------------------------------------------------------------------------------------------------------


@example("aten.cumsum.default", "aten.cumprod.default")
def _(draw: Draw) -> Call:
    source = shape(draw)
    return Call([X(source), some_dim(draw, len(source))])


@example("aten.softmax.int", "aten.log_softmax.int")
def _(draw: Draw) -> Call:
    source = shape(draw)
    return Call([X(source), some_dim(draw, len(source))])


@example("aten._softmax.default", "aten._log_softmax.default")
def _(draw: Draw) -> Call:
    source = shape(draw)
    return Call([X(source), some_dim(draw, len(source)), False])


@example("aten.flip.default")
def _(draw: Draw) -> Call:
    source = shape(draw)
    return Call([X(source), some_dims(draw, len(source))])


@example("aten.roll.default")
def _(draw: Draw) -> Call:
    source = shape(draw)
    dims = some_dims(draw, len(source))
    shifts = [draw(st.integers(-3, 3)) for _ in dims]
    return Call([X(source), shifts, dims] if draw(st.booleans()) else [X(source), [1]])


@example("aten.tril.default", "aten.triu.default")
def _(draw: Draw) -> Call:
    return Call([X(shape(draw, 2, 4)), draw(st.integers(-2, 2))])


@example("aten.constant_pad_nd.default")
def _(draw: Draw) -> Call:
    source = shape(draw)
    pads = [draw(st.integers(0, 2)) for _ in range(2 * draw(st.integers(1, len(source))))]
    return Call([X(source), pads, draw(st.sampled_from((0.0, 1.5)))])


@example("aten.pad.default")
def _(draw: Draw) -> Call:
    source = (*shape(draw, 2, 2), draw(EVEN))
    if draw(st.booleans()):
        return Call([X(source), [1, draw(st.integers(0, 1))], "reflect"])
    pads = [draw(st.integers(0, 2)) for _ in range(2 * draw(st.integers(1, len(source))))]
    return Call([X(source), pads, *draw(st.sampled_from(([], ["constant"], ["constant", 1.5])))])


@example("planloom.topk")
def _(draw: Draw) -> Call:
    source = shape(draw)
    dim = draw(st.integers(0, len(source) - 1))
    return Call([X(source), draw(st.integers(1, source[dim])), dim, draw(st.booleans()), True])


@example("aten.layer_norm.default")
def _(draw: Draw) -> Call:
    source = shape(draw)
    weights = [X(source[-1:]), X(source[-1:])] if draw(st.booleans()) else []
    return Call([X(source), [source[-1]], *weights])


@example("aten.rms_norm.default")
def _(draw: Draw) -> Call:
    source = shape(draw)
    return Call([X(source), [source[-1]], X(source[-1:]), 1e-6])


@example("aten.group_norm.default")
def _(draw: Draw) -> Call:
    return Call([X((draw(SIZE), 4, *shape(draw, 1, 2))), draw(st.sampled_from((1, 2, 4)))])


# --- indices ----------------------------------------------------------------------------------------------------------


@example("aten.embedding.default")
def _(draw: Draw) -> Call:
    vocab = draw(SIZE)
    padding = draw(st.integers(-1, vocab - 1))
    return Call([X((vocab, draw(SIZE))), X(shape(draw, 0, 3), "index", vocab), padding])


@example("aten.gather.default")
def _(draw: Draw) -> Call:
    source = shape(draw)
    dim = some_dim(draw, len(source))
    picked = [max(1, size - draw(st.sampled_from((0, 0, 1)))) for size in source]
    picked[dim] = draw(SIZE)
    return Call([X(source), dim, X(tuple(picked), "index", source[dim])])


@example("aten.index_select.default")
def _(draw: Draw) -> Call:
    source = shape(draw)
    dim = some_dim(draw, len(source))
    return Call([X(source), dim, X((draw(SIZE),), "index", source[dim])])


@example("aten.index.Tensor")
def _(draw: Draw) -> Call:
    source = shape(draw, 2, 3)
    return Call([X(source), [X(shape(draw, 1, 2), "index", source[0])]])


@example("aten.scatter.src", "aten.scatter_add.default")
def _(draw: Draw) -> Call:
    source = shape(draw)
    dim = some_dim(draw, len(source))
    written = [max(1, size - draw(st.sampled_from((0, 0, 1)))) for size in source]
    written[dim] = 1  # several writes to one place have no order
    return Call([X(source), dim, X(tuple(written), "index", source[dim]), X(tuple(written))])


@example("aten.scatter.value")
def _(draw: Draw) -> Call:
    source = shape(draw)
    dim = some_dim(draw, len(source))
    written = list(source)
    written[dim] = draw(SIZE)
    return Call([X(source), dim, X(tuple(written), "index", source[dim]), 0.5])


@example("aten.one_hot.default")
def _(draw: Draw) -> Call:
    classes = draw(SIZE)
    return Call([X(shape(draw), "index", classes), classes])


@example("planloom.pick")
def _(draw: Draw) -> Call:
    tokens, vocab = draw(SIZE), draw(SIZE)
    return Call([X((tokens, vocab)), X((tokens,), "index", vocab)])


# --- products ---------------------------------------------------------------------------------------------------------


@example("aten.linear.default")
def _(draw: Draw) -> Call:
    source = shape(draw)
    return Call([X(source), X((draw(SIZE), source[-1]))])


@example("aten.mm.default")
def _(draw: Draw) -> Call:
    rows, inner, out = draw(SIZE), draw(SIZE), draw(SIZE)
    return Call([X((rows, inner)), X((inner, out))])


@example("aten.addmm.default")
def _(draw: Draw) -> Call:
    rows, inner, out = draw(SIZE), draw(SIZE), draw(SIZE)
    return Call([X((out,)), X((rows, inner)), X((inner, out))])


@example("aten.bmm.default")
def _(draw: Draw) -> Call:
    batch, rows, inner, out = draw(SIZE), draw(SIZE), draw(SIZE), draw(SIZE)
    return Call([X((batch, rows, inner)), X((batch, inner, out))])


@example("aten.matmul.default")
def _(draw: Draw) -> Call:
    lead, inner = shape(draw, 0, 2), draw(SIZE)
    first = (inner,) if draw(st.booleans()) else (*broadcast(draw, lead), draw(SIZE), inner)
    second = (inner,) if draw(st.booleans()) else (*broadcast(draw, lead), inner, draw(SIZE))
    return Call([X(first), X(second)])


EQUATIONS = {
    "bqhd,bkhd->bhqk": ((2, 4, 2, 6), (2, 6, 2, 6)),
    "ij,jk": ((2, 4), (4, 6)),
    "...i,oi->...o": ((2, 4, 6), (2, 6)),
    "bi,bj->bij": ((2, 4), (2, 6)),
    "ij->ji": ((2, 4),),
    "ij->": ((2, 4),),
    "ii->i": ((4, 4),),
    "bii,bj->bj": ((2, 4, 4), (2, 6)),
    "ab,bc,cd->ad": ((2, 4), (4, 6), (6, 2)),
    "i,i->": ((4,), (4,)),
    "bij,ij->bij": ((1, 4, 6), (4, 6)),
}


@example("aten.einsum.default")
def _(draw: Draw) -> Call:
    equation = draw(st.sampled_from(list(EQUATIONS)))
    return Call([equation, [X(operand) for operand in EQUATIONS[equation]]])


@example("planloom.dispatch.default")
def _(draw: Draw) -> Call:
    experts, tokens, features = draw(SIZE), draw(SIZE), draw(SIZE)
    return Call([X((tokens, features)), X((experts, tokens), "mask"), experts])


@example("planloom.grouped_linear.default")
def _(draw: Draw) -> Call:
    experts, tokens, inner, out = draw(SIZE), draw(SIZE), draw(SIZE), draw(SIZE)
    transposed = draw(st.booleans())
    weight = (experts, inner, out) if transposed else (experts, out, inner)
    return Call([X((experts, tokens, inner)), X(weight), X((experts, tokens), "mask"), transposed])


@example("planloom.grouped_bias.default")
def _(draw: Draw) -> Call:
    experts, tokens, out = draw(SIZE), draw(SIZE), draw(SIZE)
    return Call([X((experts, tokens, out)), X((experts, out)), X((experts, tokens), "mask")])


@example("planloom.combine.default")
def _(draw: Draw) -> Call:
    experts, tokens, out = draw(SIZE), draw(SIZE), draw(SIZE)
    return Call([X((experts, tokens, out)), X((experts, tokens)), X((experts, tokens), "mask")])


@example("planloom.convolution")
def _(draw: Draw) -> Call:
    groups, channels, out = (
        draw(st.sampled_from((1, 2, 4))),
        draw(st.sampled_from((1, 2))),
        draw(st.sampled_from((1, 2))),
    )
    rank = draw(st.integers(1, 2))
    widths = [draw(st.integers(1, 3)) for _ in range(rank)]
    apart = draw(st.booleans())
    lengths = [width * draw(st.sampled_from((2, 4))) for width in widths]
    stride = widths if apart else [draw(st.integers(1, 2)) for _ in widths]
    padding = [0 if apart else draw(st.integers(0, 1)) for _ in widths]
    x = X((draw(SIZE), groups * channels, *lengths))
    return Call([x, X((groups * out, channels, *widths)), None, stride, padding, [1] * rank])


@example("aten.conv1d.default")
def _(draw: Draw) -> Call:
    return Call([X((2, 4, 6)), X((draw(SIZE), 4, 3)), None, [1], [draw(st.integers(0, 1))]])


@example("aten.conv2d.default")
def _(draw: Draw) -> Call:
    return Call([X((2, 4, 6, 4)), X((draw(SIZE), 4, 2, 2)), None, [2, 2]])


@example("planloom.sink_attention.default")
def _(draw: Draw) -> Call:
    batch, heads, queries, size = (draw(SIZE) for _ in range(4))
    group = draw(st.sampled_from((1, 2)))
    q, k = X((batch, heads * group, queries, size)), X((batch, heads, queries, size))
    sinks, window = X((heads * group,)), draw(st.sampled_from((0, 1, 2)))
    if draw(st.booleans()):
        lead = draw(st.sampled_from(((1, 1), (batch, 1), (batch, heads * group))))
        return Call([q, k, k, X((*lead, queries, queries), "mask"), sinks, False, 0, 0.5])
    is_causal = draw(st.booleans())
    return Call([q, k, k, None, sinks, is_causal, window if is_causal else 0, 0.5])


@example("aten.scaled_dot_product_attention.default")
def _(draw: Draw) -> Call:
    batch, heads, queries, keys, size, value = (draw(SIZE) for _ in range(6))
    group = draw(st.sampled_from((1, 2)))
    tensors = [X((batch, heads * group, queries, size)), X((batch, heads, keys, size)), X((batch, heads, keys, value))]
    options: dict[str, Any] = {"enable_gqa": True} if group > 1 else {}
    if draw(st.booleans()):
        lead = draw(st.sampled_from(((), (1, 1), (batch, 1), (1, heads * group), (batch, heads * group))))
        mask = X((*lead, queries, keys), draw(st.sampled_from(("mask", "normal"))))
        return Call([*tensors, mask, 0.0, False], options)
    return Call([*tensors, None, 0.0, draw(st.booleans())], options)
