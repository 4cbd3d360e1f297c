"""The notation of dimension rules, and the factors on which operators agree."""

from dataclasses import replace

import pytest

from planloom.graph import Op, Rule, Tensor, notate, refine_factors
from planloom.graph.rules import flat
from tests.pure.tiny_graph import linear, op, tensor

# --- notation --------------------------------------------------------------------------------------------------------


def test_a_linear_map_contracts_what_its_output_lacks() -> None:
    rule = notate("... in, out in -> ... out", (8, 16, 4), (6, 4), (8, 16, 6))
    assert rule.inputs == ((("lead1",), ("lead0",), ("in",)), (("out",), ("in",)))
    assert rule.outputs == ((("lead1",), ("lead0",), ("out",)),)
    assert rule.sizes == {"lead1": 8, "lead0": 16, "in": 4, "out": 6}
    assert rule.contracted == ("in",)
    assert str(rule) == "lead1 lead0 in, out in -> lead1 lead0 out"


def test_leading_dims_are_aligned_from_the_right() -> None:
    rule = notate("... a, ... a -> ... a", (5, 7, 3), (7, 3), (5, 7, 3))
    assert rule.inputs == ((("lead1",), ("lead0",), ("a",)), (("lead0",), ("a",)))


def test_leading_dims_may_be_none() -> None:
    assert notate("... in, out in -> ... out", (4,), (6, 4), (6,)).outputs == ((("out",),),)


def test_fixed_factors_are_marked() -> None:
    rule = notate("batch query! size!, batch key! size! -> batch query! key!", (2, 3, 4), (2, 5, 4), (2, 3, 5))
    assert rule.fixed == ("key", "query", "size")
    assert str(rule) == "batch query! size!, batch key! size! -> batch query! key!"


def test_a_dim_is_a_product_of_factors() -> None:
    rule = notate("(heads size) -> heads size", (64,), (4, 16), sizes={"heads": 4})
    assert rule.inputs == ((("heads", "size"),),)
    assert rule.outputs == ((("heads",), ("size",)),)
    assert rule.sizes == {"heads": 4, "size": 16}
    assert str(rule) == "(heads size) -> heads size"


def test_the_last_open_factor_takes_what_is_left() -> None:
    rule = notate("(a b c) -> a (b c)", (24,), (2, 12), sizes={"a": 2, "c": 3})
    assert rule.sizes == {"a": 2, "c": 3, "b": 4}


def test_a_dim_of_size_one_has_no_factors_and_broadcasts() -> None:
    rule = notate("d0 d1, d0 d1 -> d0 d1", (8, 1), (1, 4), (8, 4), sizes={"d0": 8, "d1": 4})
    assert rule.inputs == ((("d0",), ()), ((), ("d1",)))
    assert rule.outputs == ((("d0",), ("d1",)),)
    assert str(rule) == "d0 1, 1 d1 -> d0 d1"


def test_a_reduction_that_keeps_its_dim_writes_one() -> None:
    rule = notate("d0 d1 -> d0 1", (8, 4), (8, 1))
    assert rule.contracted == ("d1",)
    assert str(rule) == "d0 d1 -> d0 1"


def test_sizes_of_factors_that_nobody_has_are_dropped() -> None:
    assert notate("a -> a", (3,), (3,), sizes={"a": 3, "unused": 5}).sizes == {"a": 3}
    assert notate("(a b) -> b", (3,), (3,), sizes={"a": 1}).sizes == {"b": 3}


def test_a_scalar_has_an_empty_term() -> None:
    rule = notate("d0 ->", (8,), ())
    assert rule.outputs == ((),)
    assert rule.contracted == ("d0",)


def test_fields_of_the_rule_are_passed_on() -> None:
    rule = notate("a -> ", (3,), (), combine="max", kind="contraction", differentiable=False, linear=((0,),))
    assert (rule.combine, rule.kind, rule.differentiable, rule.linear) == ("max", "contraction", False, ((0,),))


@pytest.mark.parametrize(
    ("text", "shapes", "message"),
    [
        ("a b -> a", [(2,), (2,)], r"'a b ' has 2 dims, the tensor has shape \(2,\)"),
        ("a -> a", [(2,), (3,)], r"' a' does not fit shape \(3,\): sizes \{'a': 2\}"),
        ("a, b -> a b", [(2,), (3,)], "shorter"),
        pytest.param(
            "(a b) -> a b",
            [(6,), (2, 3)],
            "(?s)'a'.*'b'",
        ),
    ],
)
def test_a_term_that_does_not_fit(text: str, shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        notate(text, *shapes)


def test_a_factor_that_does_not_divide_its_dim() -> None:
    with pytest.raises(ValueError, match=r"does not fit shape \(7,\)"):
        notate("(a b) -> a b", (7,), (2, 3), sizes={"a": 2})


# --- common factors ---------------------------------------------------------------------------------------------------


def view(name: str, source: Tensor, text: str, *shape: int, sizes: dict[str, int]) -> tuple[Op, Tensor]:
    result = tensor(name, *shape)
    rule = notate(text, source.shape, shape, sizes=sizes, linear=((0,),), kind="view")
    return op(name, "aten.view.default", [source.name], rule), result


def rule_of(op: Op) -> Rule:
    assert op.rule is not None
    return op.rule


def test_a_view_cuts_the_linear_map_before_it() -> None:
    """8 × 6 features become 4 heads of 12: the weight's rows are cut with them."""
    x, weight = tensor("x", 5, 7), tensor("w", 48, 7)
    mapped, y = linear("y", x, weight)
    viewed, z = view("z", y, "d0 (heads size) -> d0 heads size", 5, 4, 12, sizes={"heads": 4})
    tensors, (mapped, viewed) = refine_factors({t.name: t for t in (x, weight, y, z)}, [mapped, viewed])
    assert tensors["w"].factors == ((4, 12), (7,))
    assert tensors["y"].factors == ((5,), (4, 12))
    assert tensors["z"].sizes == (5, 4, 12)
    assert tensors["x"].factors == ((5,), (7,))
    assert str(mapped.rule) == "lead0 in, (out.0 out.1) in -> lead0 (out.0 out.1)"
    assert rule_of(mapped).sizes == {"lead0": 5, "in": 7, "out.0": 4, "out.1": 12}
    assert str(viewed.rule) == "d0 (heads size) -> d0 heads size"


def test_cuts_travel_through_several_operators_both_ways() -> None:
    x, first, second = tensor("x", 5, 12), tensor("w1", 12, 12), tensor("w2", 8, 12)
    split, a = view("a", x, "d0 (p q) -> d0 p q", 5, 3, 4, sizes={"p": 3})
    joined, b = view("b", a, "d0 p q -> d0 (p q)", 5, 12, sizes={})
    map1, c = linear("c", b, first)
    map2, d = linear("d", c, second)
    last, e = view("e", c, "d0 (r s) -> d0 r s", 5, 6, 2, sizes={"r": 6})
    tensors, ops = refine_factors(
        {t.name: t for t in (x, first, second, a, b, c, d, e)}, [split, joined, map1, map2, last]
    )
    assert tensors["x"].factors == ((5,), (3, 4))
    assert tensors["w1"].factors == ((6, 2), (3, 4))
    assert tensors["w2"].factors == ((8,), (6, 2))
    for each in ops:
        for name, term in zip(
            (*each.inputs, *each.outputs), (*rule_of(each).inputs, *rule_of(each).outputs), strict=True
        ):
            assert tuple(rule_of(each).sizes[factor] for factor in flat(term)) == tensors[name].sizes


def test_views_that_have_no_common_factors() -> None:
    x = tensor("x", 5, 12)
    one, a = view("a", x, "d0 (p q) -> d0 p q", 5, 3, 4, sizes={"p": 3})
    two, b = view("b", x, "d0 (p q) -> d0 p q", 5, 2, 6, sizes={"p": 2})
    tensors, (first, second) = refine_factors({t.name: t for t in (x, a, b)}, [one, two])
    assert str(first.rule) == "d0 (p q) -> d0 p q"
    assert str(second.rule) == "d0 (whole0.0! whole0.1!) -> d0 whole1! whole2!"
    assert [t.factors for t in tensors.values()] == [((5,), (3, 4)), ((5,), (3,), (4,)), ((5,), (2,), (6,))]


def test_factors_that_a_later_view_selects_from_are_fixed() -> None:
    """The 3 of a fused map for queries, keys and values cannot be split: each of them needs its own third."""
    x, weight = tensor("x", 5, 7), tensor("w", 24, 7)
    mapped, y = linear("y", x, weight)
    picked, z = view("z", y, "d0 (pick! d1) -> d0 d1", 5, 8, sizes={"pick": 3})
    _, (mapped, picked) = refine_factors({t.name: t for t in (x, weight, y, z)}, [mapped, picked])
    assert rule_of(mapped).fixed == ("out.0",)
    assert str(mapped.rule) == "lead0 in, (out.0! out.1) in -> lead0 (out.0! out.1)"


def test_a_fixed_factor_stays_fixed_in_all_its_parts() -> None:
    x = tensor("x", 12)
    frozen = op("a", "aten.flip.default", ["x"], notate("d0! -> d0!", (12,), (12,)))
    split, b = view("b", tensor("a", 12), "(p q) -> p q", 3, 4, sizes={"p": 3})
    _, (frozen, _) = refine_factors({t.name: t for t in (x, tensor("a", 12), b)}, [frozen, split])
    assert rule_of(frozen).fixed == ("d0.0", "d0.1")


def test_dims_of_size_one_have_no_factors() -> None:
    rule = notate("d0 d1 -> d0 1", (8, 4), (8, 1), kind="contraction")
    summed = op("y", "aten.sum.dim_IntList", ["x"], rule)
    tensors, _ = refine_factors({"x": tensor("x", 8, 4), "y": tensor("y", 8, 1)}, [summed])
    assert tensors["y"].factors == ((8,), ())


def test_refining_twice_changes_nothing() -> None:
    x, weight = tensor("x", 5, 7), tensor("w", 48, 7)
    mapped, y = linear("y", x, weight)
    viewed, z = view("z", y, "d0 (heads size) -> d0 heads size", 5, 4, 12, sizes={"heads": 4})
    tensors, ops = refine_factors({t.name: t for t in (x, weight, y, z)}, [mapped, viewed])
    again, ops_again = refine_factors({name: replace(t, factors=()) for name, t in tensors.items()}, ops)
    assert (again, ops_again) == (tensors, ops)
