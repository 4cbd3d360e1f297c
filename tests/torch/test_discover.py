"""Rules found by execution: the same as the written ones, and those of operators that nobody has written a rule for."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planloom.capture import capture
from planloom.capture.rules import trials
from planloom.capture.rules.custom import (
    dimension_rule,
    forget_rule,
    known_rules,
    registered,
    require_registered_rules,
    rule_source,
)
from planloom.capture.rules.discover import DiscoveryCache, discover, explain
from planloom.capture.rules.written import Call, attach_rule
from planloom.cli.rules import operator_rules, rules_command
from planloom.errors import CaptureError
from planloom.graph import Graph, Op, Rule, notate
from planloom.graph import Tensor as GraphTensor
from tests.torch.operator_examples import Case, X, build
from tests.torch.test_rules_by_execution import require_rule

Meaning = set[tuple[object, ...]]


def meaning(rule: Rule) -> Meaning:
    """What can be split: for every factor, where it is in every tensor, and what becomes of an output without it."""
    found: Meaning = set()
    for factor in rule.sizes:
        if factor not in rule.fixed:
            places = tuple(
                next((dim for dim, names in enumerate(term) if factor in names), None)
                for term in (*rule.inputs, *rule.outputs)
            )
            found.add((*places, "mean" if rule.rewrite == "mean" else rule.combine) if places[-1] is None else places)
    return found


def found_rule(case: Case) -> Rule:
    return discover(case.op, case.tensors, cache=DiscoveryCache())


def written_rule(case: Case) -> Rule:
    return attach_rule(case.op, case.tensors)


# --- against the written rules ----------------------------------------------------------------------------------------

SAME = {
    "linear": ("aten.linear.default", [X((2, 4, 6)), X((8, 6))]),
    "linear, all sizes equal": ("aten.linear.default", [X((4, 4, 4)), X((4, 4))]),
    "sum": ("aten.sum.dim_IntList", [X((2, 4, 6)), [1]]),
    "sum that keeps": ("aten.sum.dim_IntList", [X((2, 4, 6)), [0, -1], True]),
    "sum of all": ("aten.sum.default", [X((2, 4))]),
    "mean": ("aten.mean.dim", [X((2, 4, 6)), [1, 2]]),
    "mean of all": ("aten.mean.default", [X((4, 4))]),
    "mm": ("aten.mm.default", [X((4, 6)), X((6, 8))]),
    "bmm": ("aten.bmm.default", [X((2, 4, 6)), X((2, 6, 8))]),
    "bmm, all sizes equal": ("aten.bmm.default", [X((4, 4, 4)), X((4, 4, 4))]),
    "matmul": ("aten.matmul.default", [X((2, 4, 6, 8)), X((2, 1, 8, 10))]),
    "matmul with a vector": ("aten.matmul.default", [X((2, 4, 6)), X((6,))]),
    "einsum": ("aten.einsum.default", ["bqhd,bkhd->bhqk", [X((2, 4, 8, 6)), X((2, 10, 8, 6))]]),
    "cumsum": ("aten.cumsum.default", [X((2, 4, 6)), 1]),
    "flip": ("aten.flip.default", [X((2, 4)), [0]]),
    "roll": ("aten.roll.default", [X((2, 4, 6)), [1], [1]]),
    "tril": ("aten.tril.default", [X((2, 4, 6))]),
    "pad": ("aten.constant_pad_nd.default", [X((2, 4)), [1, 1], 0.0]),
    "topk": ("planloom.topk", [X((2, 8)), 4, 1, True, True]),
    "amax": ("aten.amax.default", [X((2, 4, 6)), [1]]),
    "argmax": ("aten.argmax.default", [X((2, 6)), 1]),
    "maximum as a statistic": ("planloom.statistic_max", [X((2, 6)), 1]),
    "gelu": ("aten.gelu.default", [X((2, 4))]),
    "addition": ("aten.add.Tensor", [X((2, 4, 6)), X((4, 1))]),
    "addition of a number": ("aten.add.Tensor", [X((2, 4)), 1e-12]),
    "product": ("aten.mul.Tensor", [X((2, 4)), X((2, 4))]),
    "division": ("aten.div.Tensor", [X((2, 4)), X((4,))]),
    "copy": ("aten._to_copy.default", [X((2, 4))], {"dtype": "torch.bfloat16"}),
    "where": ("aten.where.self", [X((2, 4), "mask"), X((2, 4)), X((4,))]),
    "expand": ("aten.expand.default", [X((2, 1, 6)), [2, 4, -1]]),
    "transpose": ("aten.transpose.int", [X((2, 4, 4)), 1, 2]),
    "permute": ("aten.permute.default", [X((4, 4, 4)), [1, 2, 0]]),
    "select": ("aten.select.int", [X((2, 4, 6)), 1, -1]),
    "odd slice": ("aten.slice.Tensor", [X((2, 4)), 1, 1, 4]),
    "unequal parts joined": ("aten.cat.default", [[X((2, 4)), X((2, 6))], 1]),
    "scatter": ("aten.scatter.value", [X((2, 4)), 1, X((2, 6), "index", 4), 0.5]),
    "triangular attention": (
        "aten.scaled_dot_product_attention.default",
        [X((2, 4, 6, 8)), X((2, 4, 6, 8)), X((2, 4, 6, 8)), None, 0.0, True],
    ),
    "detach": ("aten.detach.default", [X((2, 4))]),
}


@pytest.mark.parametrize("call", SAME.values(), ids=SAME.keys())
def test_what_is_discovered_is_what_is_written(call: Sequence[object]) -> None:
    case = build(*call)  # type: ignore[arg-type]
    function = case_function(case)
    found = explain(case.op, case.tensors, cache=DiscoveryCache(), function=function)
    rule, written = found.rule, written_rule(case)
    assert meaning(rule) >= meaning(written), f"{rule} for {written}"
    extra = meaning(rule) - meaning(written)
    assert not extra or "attention" in case.op.target, f"{rule} for {written}"
    assert set(rule.linear) >= set(written.linear)
    assert rule.differentiable == written.differentiable or not case.tensors["y"].is_float
    assert not found.reason
    require_rule(case, rule)


def case_function(case: Case) -> trials.Function | None:
    from planloom.execute.operators import OWN

    return OWN.get(case.op.target)


LESS = {
    "the rows of a table": ("aten.embedding.default", [X((6, 8)), X((2, 4), "index", 6)], {(1, None, 2)}),
    "what is gathered from": ("aten.gather.default", [X((2, 6)), 1, X((2, 4), "index", 6)], set()),
    "heads of several sizes": ("aten.reshape.default", [X((2, 12)), [2, 3, 4]], set()),
    "equal parts joined": ("aten.cat.default", [[X((2, 4)), X((2, 4))], 1], set()),
}


@pytest.mark.parametrize(("target", "args", "_"), LESS.values(), ids=LESS.keys())
def test_one_hot_contractions_and_products_of_factors_are_not_found(target: str, args: list[object], _: object) -> None:
    case = build(target, args)
    rule = found_rule(case)
    assert meaning(rule) < meaning(written_rule(case))
    assert meaning(rule)
    require_rule(case, rule)


def test_operators_without_a_written_rule() -> None:
    def found(target: str, *args: object) -> tuple[str, str, tuple[tuple[int, ...], ...]]:
        rule = found_rule(build(target, args))
        return str(rule), rule.kind, rule.linear

    assert found("aten.softmax.int", X((2, 4, 6)), -1) == ("d0 d1 x0! -> d0 d1 x1!", "contraction", ())
    assert found("aten.layer_norm.default", X((2, 4, 6)), [6], X((6,)), X((6,))) == (
        "d0 d1 x0!, x1!, x2! -> d0 d1 x3!",
        "contraction",
        ((1, 2),),
    )
    assert found("aten.conv1d.default", X((2, 4, 10)), X((6, 4, 3)), X((6,)), [1], [1]) == (
        "d0 x0! x1!, d1 x2! x3!, d1 -> d0 d1 x4!",
        "contraction",
        ((0, 2), (1, 2)),
    )
    assert found("aten.conv2d.default", X((2, 4, 6, 6)), X((8, 4, 3, 3)))[0] == (
        "d0 sum2 x0! x1!, d1 sum2 x2! x3! -> d0 d1 x4! x5!"
    )
    assert found("aten.addmm.default", X((6,)), X((2, 4)), X((4, 6))) == (
        "d1, d0 x0!, x1! d1 -> d0 d1",
        "contraction",
        ((0, 1), (0, 2)),
    )
    assert found("aten.clamp.default", X((2, 4)), -100.0, 100.0) == ("d0 d1 -> d0 d1", "pointwise", ())
    assert found("aten.mse_loss.default", X((2, 4)), X((2, 4)))[0] == "sum0 sum1, sum0 sum1 -> "
    assert found("aten.group_norm.default", X((2, 8, 4)), 4)[0] == "d0 x0! x1! -> d0 x2! x3!"


def large(
    target: str, args: Sequence[object], output: tuple[int, ...], **dtypes: str
) -> tuple[Op, dict[str, GraphTensor]]:
    """An operator at sizes at which nobody would run it; shapes stand for tensors."""
    numbers = count()
    tensors = {"y": GraphTensor(name="y", shape=output, dtype="bfloat16")}

    def written(arg: object) -> object:
        if not isinstance(arg, tuple):
            return arg
        name = f"t{next(numbers)}"
        tensors[name] = GraphTensor(name=name, shape=arg, dtype=dtypes.get(name, "bfloat16"))
        return f"%{name}"

    plain = tuple(written(arg) for arg in args)
    inputs = tuple(name for name in tensors if name != "y")
    return Op(name="y", target=target, args=plain, kwargs={}, inputs=inputs, outputs=("y",)), tensors


def test_large_operators_are_tried_at_small_sizes() -> None:
    op, tensors = large("aten.linear.default", [(64, 8192, 16384), (53248, 16384)], (64, 8192, 53248))
    rule = discover(op, tensors, cache=DiscoveryCache())
    assert str(rule) == "d0 d1 sum3, d2 sum3 -> d0 d1 d2"
    assert rule.sizes == {"d0": 64, "d1": 8192, "d2": 53248, "sum3": 16384}
    op, tensors = large("aten.layer_norm.default", [(64, 8192, 16384), [16384]], (64, 8192, 16384))
    assert str(discover(op, tensors, cache=DiscoveryCache())) == "d0 d1 x0! -> d0 d1 x1!"
    op, tensors = large("aten.expand.default", [(64, 1, 16384), [64, 8192, 16384]], (64, 8192, 16384))
    rule = discover(op, tensors, cache=DiscoveryCache())
    assert (str(rule), rule.rewrite) == ("d0 1 d2 -> d0 d1 d2", "shape")


def test_a_number_among_the_arguments_keeps_its_meaning() -> None:
    """A roll by 512 of a dim that was made 4 long would be an identity."""
    op, tensors = large("aten.roll.default", [(64, 8192), [512], [1]], (64, 8192))
    assert str(discover(op, tensors, cache=DiscoveryCache())) == "d0 x0! -> d0 x1!"


def test_what_cannot_be_tried_cannot_be_split() -> None:
    op, tensors = large("aten.roll.default", [(64, 1 << 22), [1 << 20], [1]], (64, 1 << 22))
    found = explain(op, tensors, cache=DiscoveryCache())
    assert "sizes too large to try" in found.reason
    assert str(found.rule) == "x0! x1! -> x2! x3!"
    case = build("aten.dropout.default", [X((2, 4)), 0.5, True])
    assert explain(case.op, case.tensors, cache=DiscoveryCache()).reason == "it draws random numbers"
    case = build("aten.det.default", [X((4, 4))])
    assert explain(case.op, case.tensors, cache=DiscoveryCache()).reason == "no split of any dim gives the same results"
    case = build("aten.relu.default", [X((2, 4))])
    gone = replace(case.op, target="aten.no_such.default")
    assert explain(gone, case.tensors, cache=DiscoveryCache()).reason == "torch has no operator aten.no_such.default"
    with pytest.raises(CaptureError, match=r"(?s)aten.relu_.default writes into its inputs.*to do:"):
        discover(replace(case.op, target="aten.relu_.default"), case.tensors, cache=DiscoveryCache())


# --- operators of a user's own ----------------------------------------------------------------------------------------

LIBRARY = "planloom_test_operators"


@torch.library.custom_op(f"{LIBRARY}::scale_rows", mutates_args=())
def scale_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Each row, with its mean taken away, times its weight: [rows, columns], [rows]."""
    return (x - x.mean(1, keepdim=True)) * weight[:, None]


@scale_rows.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _backward(ctx, cotangent: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    x, weight = ctx.saved_tensors
    weighted = cotangent * weight[:, None]
    return weighted - weighted.mean(1, keepdim=True), ((x - x.mean(1, keepdim=True)) * cotangent).sum(1)


scale_rows.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op(f"{LIBRARY}::without_backward", mutates_args=())
def without_backward(x: Tensor) -> Tensor:
    return x * 2


@without_backward.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op(f"{LIBRARY}::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@noisy.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


noisy.register_autograd(lambda ctx, cotangent: cotangent)
ROWS = f"{LIBRARY}.scale_rows.default"


@pytest.fixture(autouse=True)
def _no_rules_left() -> Iterator[None]:
    yield
    forget_rule(ROWS)


def rows_case() -> Case:
    return build(ROWS, [X((4, 6)), X((4,))])


def test_a_users_operator_is_discovered() -> None:
    case = rows_case()
    assert rule_source(ROWS) == "discovered"
    rule = found_rule(case)
    assert str(rule) == "d0 x0!, d0 -> d0 x1!"
    assert rule.linear == ((0,), (1,))
    assert require_rule(case, rule) == 1


def test_a_backward_counts() -> None:
    """A forward that can be split, with a backward that cannot: by a mistake of the user's, or on purpose."""

    @torch.library.custom_op(f"{LIBRARY}::odd_backward", mutates_args=())
    def odd_backward(x: Tensor) -> Tensor:
        return x * 2

    odd_backward.register_fake(torch.empty_like)
    odd_backward.register_autograd(lambda ctx, cotangent: cotangent / cotangent.norm())
    case = build(f"{LIBRARY}.odd_backward.default", [X((4, 6))])
    assert explain(case.op, case.tensors, cache=DiscoveryCache()).reason == "no split of any dim gives the same results"


def test_halves_that_are_whole_windows_do_not_show_that_a_dim_can_be_split() -> None:
    @torch.library.custom_op(f"{LIBRARY}::windows", mutates_args=())
    def windows(x: Tensor, size: int) -> Tensor:
        """Less the mean of its window; the last window may be shorter."""
        return torch.cat([part - part.mean(0) for part in x.split(size)])

    windows.register_fake(lambda x, size: torch.empty_like(x))

    def backward(ctx, cotangent: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return windows(cotangent, ctx.size), None

    def save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        ctx.size = inputs[1]

    windows.register_autograd(backward, setup_context=save)
    case = build(f"{LIBRARY}.windows.default", [X((14, 6)), 7])
    assert str(found_rule(case)) == "x0! d1 -> x1! d1"


def test_operators_that_cannot_be_tried() -> None:
    case = build(f"{LIBRARY}.without_backward.default", [X((4, 6))])
    assert "it fails on random inputs" in explain(case.op, case.tensors, cache=DiscoveryCache()).reason
    case = build(f"{LIBRARY}.noisy.default", [X((4, 6))])
    found = explain(case.op, case.tensors, cache=DiscoveryCache())
    assert found.reason == "it gives different results on the same inputs"


def call_of(case: Case) -> Call:
    return Call(
        op=case.op,
        inputs=tuple(case.tensors[name].shape for name in case.op.inputs),
        output=case.tensors["y"].shape,
    )


@pytest.mark.parametrize("name", [f"{LIBRARY}::scale_rows", f"{LIBRARY}.scale_rows", ROWS])
def test_a_user_gives_notation(name: str) -> None:
    dimension_rule(name, "row column!, row -> row column!", linear=((0,), (1,)))
    rule = registered(ROWS)
    assert rule is not None
    case = rows_case()
    made = rule(call_of(case))
    assert (str(made), made.linear) == ("row column!, row -> row column!", ((0,), (1,)))
    assert made.kind == "pointwise"
    assert rule_source(ROWS) == "registered"
    assert ROWS in [target for group in known_rules() if group.source == "registered" for target in group.targets]
    assert require_rule(case, made) == 1


def test_a_user_gives_a_function() -> None:
    @dimension_rule(f"{LIBRARY}::scale_rows")
    def rows(call: Call) -> str:
        assert call.inputs == ((4, 6), (4,))
        return "row column!, row -> row column!"

    rule = registered(ROWS)
    assert rule is not None
    assert str(rule(call_of(rows_case()))) == "row column!, row -> row column!"

    @dimension_rule(f"{LIBRARY}::scale_rows", replacing=True)
    def as_a_rule(call: Call) -> Rule:
        return notate("r c!, r -> r c!", *call.shapes)

    rule = registered(ROWS)
    assert rule is not None
    assert str(rule(call_of(rows_case()))) == "r c!, r -> r c!"


def test_a_file_that_is_loaded_twice_registers_its_rules_twice() -> None:
    for _ in range(2):
        dimension_rule(ROWS, "row column!, row -> row column!")

        @dimension_rule(f"{LIBRARY}::noisy")
        def other(call: Call) -> str:
            return "a -> a"

    forget_rule(f"{LIBRARY}::noisy")


def test_rules_that_are_refused() -> None:
    for target in ("aten::linear", "aten::gelu", "aten.add.Tensor"):
        with pytest.raises(CaptureError, match="already has a rule"):
            dimension_rule(target, "a -> a")
    with pytest.raises(CaptureError, match="is not the name of an operator"):
        dimension_rule("scale_rows", "a -> a")
    with pytest.raises(CaptureError, match="is not notation"):
        dimension_rule(ROWS, "row column")
    with pytest.raises(CaptureError, match="is not notation"):
        dimension_rule(ROWS, "row column, row --> (row column")
    with pytest.raises(CaptureError, match=rf"(?s)torch has no operator.*did you mean {ROWS}"):
        dimension_rule(f"{LIBRARY}::scale_row", "a -> a")
    dimension_rule(ROWS, "row column, row -> row column")
    with pytest.raises(CaptureError, match=r"(?s)has two rules.*'row column, row -> row column' and 'a b, a -> a b'"):
        dimension_rule(ROWS, "a b, a -> a b")


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        ("row column -> row column", {}, "2 terms for 3 tensors"),
        ("row column, column -> row column", {}, "does not fit shape"),
        ("row column, row -> row column", {"linear": ((2,),)}, "linear in inputs"),
    ],
)
def test_a_rule_that_does_not_fit(text: str, fields: dict[str, object], message: str) -> None:
    dimension_rule(ROWS, text, **fields)  # type: ignore[arg-type]
    rule = registered(ROWS)
    assert rule is not None
    with pytest.raises(CaptureError, match=rf"(?s)registered for {ROWS} does not fit.*{message}.*to do:"):
        rule(call_of(rows_case()))


# --- the cache --------------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets of all searches."""
    found: list[str] = []
    pattern = discover.__globals__["_Search"].pattern

    def counting(search):  # type: ignore[no-untyped-def]
        found.append(search.trials.op.target)
        return pattern(search)

    monkeypatch.setattr(discover.__globals__["_Search"], "pattern", counting)
    return found


def test_an_operator_is_discovered_once(tmp_path: Path, runs: list[str]) -> None:
    cache = DiscoveryCache(tmp_path / "rules")
    first = discover(rows_case().op, rows_case().tensors, cache=cache)
    assert discover(rows_case().op, rows_case().tensors, cache=cache) == first
    assert runs == [ROWS]
    assert discover(rows_case().op, rows_case().tensors, cache=DiscoveryCache(tmp_path / "rules")) == first
    assert runs == [ROWS]
    other = build(ROWS, [X((6, 10)), X((6,))])
    assert str(discover(other.op, other.tensors, cache=cache)) == str(first)
    assert runs == [ROWS, ROWS]


def test_large_sizes_share_a_discovery(runs: list[str]) -> None:
    cache = DiscoveryCache()
    for width in (1024, 4096):
        op, tensors = large("aten.layer_norm.default", [(64, width), [width]], (64, width))
        assert discover(op, tensors, cache=cache).sizes["d0"] == 64
    assert len(runs) == 1
    op, tensors = large("aten.layer_norm.default", [(64, 64), [64]], (64, 64))
    assert str(discover(op, tensors, cache=cache)) == "d0 x0! -> d0 x1!"
    assert len(runs) == 2


@pytest.mark.parametrize("damage", [lambda text: text[:20], lambda text: text.replace("null", "1"), lambda text: "[]"])
def test_a_file_that_is_wrong_is_not_believed(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    case = rows_case()
    rule = discover(case.op, case.tensors, cache=DiscoveryCache(tmp_path))
    (path,) = tmp_path.glob("*.json")
    path.write_text(damage(path.read_text()))
    assert discover(case.op, case.tensors, cache=DiscoveryCache(tmp_path)) == rule


def test_a_file_that_claims_too_much_is_not_believed(tmp_path: Path) -> None:
    case = build("aten.softmax.int", [X((2, 4)), 1])
    rule = discover(case.op, case.tensors, cache=DiscoveryCache(tmp_path))
    gelu = build("aten.gelu.default", [X((2, 4))])
    discover(gelu.op, gelu.tensors, cache=DiscoveryCache(tmp_path))
    mine, free = sorted(tmp_path.glob("*softmax*")), sorted(tmp_path.glob("*gelu*"))
    mine[0].write_text(free[0].read_text())
    assert discover(case.op, case.tensors, cache=DiscoveryCache(tmp_path)) == rule


def test_discovery_leaves_no_trace() -> None:
    """Neither torch's random numbers nor its default device matter, and neither is changed."""
    case = rows_case()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with torch.device("meta"), torch.no_grad():
        rule = found_rule(case)
    assert torch.equal(torch.get_rng_state(), state)
    assert str(rule) == "d0 x0!, d0 -> d0 x1!"


# --- a model, and the command line ------------------------------------------------------------------------------------


class Rows(nn.Module):
    """A user's operator between two linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.weight = nn.Linear(8, 6), nn.Linear(6, 2), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(scale_rows(self.up(x), self.weight)).pow(2).sum()


def captured_rows() -> Graph:
    return capture(Rows(), {"x": torch.zeros(4, 8)})


def test_a_model_with_an_operator_of_the_users() -> None:
    (op,) = [op for op in captured_rows().ops if op.target == ROWS]
    assert str(op.rule) == "d0 x0!, d0 -> d0 x1!"
    dimension_rule(ROWS, "row column!, row -> row column!", linear=((0,), (1,)))
    (op,) = [op for op in captured_rows().ops if op.target == ROWS]
    assert str(op.rule) == "row column!, row -> row column!"


@pytest.mark.parametrize(
    ("text", "linear", "message"),
    [
        ("row column, row -> row column", (), "factor 'column' cannot be split.*the results differ"),
        ("row column!, row -> row column!", ((0, 1),), r"not linear in inputs \[0, 1\].*the results differ"),
        ("row column!, other! -> row column!", (), "factor 'row' cannot be split.*the operator fails on a part"),
    ],
)
def test_a_registered_rule_that_does_not_hold(text: str, linear: tuple[tuple[int, ...], ...], message: str) -> None:
    dimension_rule(ROWS, text, linear=linear)
    with pytest.raises(CaptureError, match=f"(?s)registered for {ROWS} does not hold: .*{message}.*to do:"):
        captured_rows()


def test_a_registered_rule_with_products_of_factors_is_tried() -> None:
    case = build("aten.pixel_shuffle.default", [X((4, 18, 6, 4)), 3])

    def ruled(*fixed: str) -> Op:
        text = "b (c i j) h w -> b c (h i) (w j)"
        for name in fixed:
            text = text.replace(name, f"{name}!")
        shapes = [case.tensors[name].shape for name in (*case.op.inputs, *case.op.outputs)]
        return replace(case.op, rule=notate(text, *shapes, sizes={"c": 2, "i": 3, "j": 3, "h": 6, "w": 4}))

    dimension_rule("aten::pixel_shuffle", "a -> a")
    try:
        require_registered_rules([ruled("i", "j")], case.tensors)
        assert rule_source(case.op.target) == "registered"
        with pytest.raises(CaptureError, match="factor 'i' cannot be split"):
            require_registered_rules([ruled("j")], case.tensors)
    finally:
        forget_rule("aten::pixel_shuffle")


def test_a_registered_rule_that_cannot_be_tried_is_said_to_be_unchecked() -> None:
    case = build(f"{LIBRARY}.noisy.default", [X((4, 6))])
    dimension_rule(case.op.target, "a b -> a b")
    try:
        require_registered_rules([replace(case.op, rule=attach_rule(case.op, case.tensors))], case.tensors)
        assert rule_source(case.op.target) == "registered, not checked"
    finally:
        forget_rule(case.op.target)


def test_the_rules_of_a_model() -> None:
    graph = captured_rows()
    rules = {rule.target: rule for rule in operator_rules(graph)}
    assert sum(rule.count for rule in operator_rules(graph)) == len(graph.ops)
    assert (rules[ROWS].source, rules[ROWS].rule) == ("discovered", "d0 x0!, d0 -> d0 x1!")
    assert rules["aten.linear.default"].source == "written"
    assert rules["aten.linear.default"].flops > 0
    assert rules["aten.add.Tensor"].source == "family"
    assert all(rule.is_splittable for rule in rules.values())
    assert rules[ROWS].moved_bytes == 4 * (4 * 6 + 4 + 4 * 6)


def test_what_cannot_be_split_is_shown_with_its_reason() -> None:
    case = build("aten.det.default", [X((4, 4))])
    op = replace(case.op, rule=discover(case.op, case.tensors))
    graph = Graph(
        tensors=case.tensors,
        inputs=(),
        parameters=("t0",),
        buffers=(),
        given=(),
        ops=(op,),
        expansions=(),
        loss="y",
        tied={},
    )
    (rule,) = operator_rules(graph)
    assert not rule.is_splittable
    assert rule.reason == "no split of any dim gives the same results"
    assert rule.moved_bytes == 8 * 17


def test_known_rules_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    rules_command(None, as_json=True)
    rules = json.loads(capsys.readouterr().out)["rules"]
    by_source = {rule["source"]: rule["targets"] for rule in rules}
    assert "aten.gelu.default" in by_source["family"]
    assert any("aten.linear.default" in rule["targets"] for rule in rules if rule["source"] == "written")
    rules_command(None)


def test_the_rules_of_a_model_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    source = str(Path(__file__).parents[2] / "examples/models/gpt.py:tiny")
    rules_command(source, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["operators"] == sum(rule["count"] for rule in document["rules"])
    assert sum(rule["flops_share"] for rule in document["rules"]) == pytest.approx(1)
    assert sum(rule["bytes_share"] for rule in document["rules"]) == pytest.approx(1)
    assert {"target", "rule", "source", "count", "splittable", "reason"} <= document["rules"][0].keys()
    rules_command(source)
