"""Operations and bytes, counted by hand."""

from dataclasses import replace
from typing import Any

import pytest

from planloom.graph import Expansion, Graph, Op, Rule, Tensor, notate
from planloom.graph.flops import (
    Counting,
    graph_bytes,
    graph_flops,
    is_product,
    op_bytes,
    op_flops,
    product_flops,
    tensor_bytes,
    training_flops,
)
from tests.pure.tiny_graph import BATCH, HIDDEN, SEQUENCE, WIDE, linear, op, tensor, tiny_graph

TOKENS = BATCH * SEQUENCE
PRODUCT: dict[str, Any] = {"linear": ((0,), (1,)), "kind": "contraction"}


def single(target: str, text: str, *shapes: tuple[int, ...], **fields: Any) -> tuple[Op, dict[str, Tensor]]:
    """One operator with inputs and a result of these shapes, and its tensors."""
    sizes = fields.pop("sizes", None)
    names = [f"x{i}" for i in range(len(shapes) - 1)]
    rule = notate(text, *shapes, sizes=sizes, **fields)
    tensors = [tensor(name, *shape) for name, shape in zip([*names, "y"], shapes, strict=True)]
    return op("y", target, names, rule), {t.name: t for t in tensors}


def attention(
    *args: Any, query: int = 7, key: int = 7, size: int = 4, value: int = 4, **kwargs: Any
) -> tuple[Op, dict[str, Tensor]]:
    text = "batch (heads group) query size, batch heads key size, batch heads key value"
    made, tensors = single(
        "aten.scaled_dot_product_attention.default",
        f"{text} -> batch (heads group) query value",
        (2, 6, query, size),
        (2, 3, key, size),
        (2, 3, key, value),
        (2, 6, query, value),
        sizes={"heads": 3, "group": 2, "batch": 2},
        kind="contraction",
    )
    return replace(made, args=(*made.args, *args), kwargs=kwargs), tensors


# Operators


@pytest.mark.parametrize(
    ("target", "text", "shapes", "flops"),
    [
        ("aten.linear.default", "... in, out in -> ... out", ((5, 3, 4), (6, 4), (5, 3, 6)), 2 * 5 * 3 * 4 * 6),
        ("aten.mm.default", "rows in, in out -> rows out", ((5, 4), (4, 6), (5, 6)), 2 * 5 * 4 * 6),
        ("aten.mm.default", "rows in, in out -> rows out", ((1, 4), (4, 6), (1, 6)), 2 * 4 * 6),
        ("aten.bmm.default", "b rows in, b in out -> b rows out", ((3, 5, 4), (3, 4, 6), (3, 5, 6)), 2 * 3 * 5 * 4 * 6),
        ("aten.einsum.default", "i a, j a -> i j", ((5, 4), (6, 4), (5, 6)), 2 * 5 * 4 * 6),
    ],
)
def test_products(target: str, text: str, shapes: tuple[tuple[int, ...], ...], flops: int) -> None:
    made, tensors = single(target, text, *shapes, **PRODUCT)
    assert is_product(made)
    assert op_flops(made, tensors) == flops


def test_patches_that_do_not_overlap() -> None:
    made, tensors = single(
        "planloom.convolution",
        "batch chan (patch0 k0!) (patch1 k1!), out chan k0! k1! -> batch out patch0 patch1",
        (2, 3, 8, 8),
        (16, 3, 4, 4),
        (2, 16, 2, 2),
        sizes={"k0": 4, "k1": 4},
        **PRODUCT,
    )
    assert op_flops(made, tensors) == 2 * (2 * 16 * 2 * 2) * (3 * 4 * 4)


def test_a_convolution_that_overlaps_counts_its_results_and_not_its_places() -> None:
    made, tensors = single(
        "planloom.convolution",
        "batch (group chan) from0!, (group out) chan k0! -> batch (group out) to0!",
        (2, 6, 10),
        (6, 1, 4),
        (2, 6, 13),
        sizes={"group": 6, "chan": 1, "out": 1, "k0": 4},
        **PRODUCT,
    )
    assert op_flops(made, tensors) == 2 * (2 * 6 * 13) * (1 * 4)


def test_attention_is_two_products() -> None:
    made, tensors = attention(query=7, key=5, size=4, value=3)
    assert op_flops(made, tensors) == 2 * (2 * 6 * 7 * 5) * (4 + 3)


def test_attention_to_a_single_key_is_two_products_too() -> None:
    made, tensors = attention(query=7, key=1, size=4, value=1)
    assert op_flops(made, tensors) == 2 * (2 * 6 * 7 * 1) * (4 + 1)


@pytest.mark.parametrize(
    ("args", "kwargs", "share"),
    [((), {}, 1.0), ((None, 0.0, True), {}, 0.5), ((None, 0.0, False), {}, 1.0), ((), {"is_causal": True}, 0.5)],
)
def test_causal_attention_counts_half_if_asked(args: tuple[Any, ...], kwargs: dict[str, Any], share: float) -> None:
    made, tensors = attention(*args, **kwargs)
    whole = 2 * (2 * 6 * 7 * 7) * (4 + 4)
    assert op_flops(made, tensors) == whole
    assert op_flops(made, tensors, counting="causal") == whole * share


def test_experts_count_the_rows_that_are_routed() -> None:
    made, tensors = single(
        "planloom.grouped_linear.default",
        "experts tokens in, experts out in, experts tokens -> experts tokens out",
        (8, 10, 4),
        (8, 6, 4),
        (8, 10),
        (8, 10, 6),
        **PRODUCT,
    )
    ragged = {name: replace(t, density=2 / 8) if name in ("x0", "y") else t for name, t in tensors.items()}
    assert op_flops(made, ragged) == 2 * (10 * 2) * 4 * 6
    assert tensor_bytes(ragged["y"]) == 10 * 2 * 6 * 4


@pytest.mark.parametrize(
    ("target", "text", "shapes", "fields"),
    [
        ("aten.mul.Tensor", "... d, ... d -> ... d", ((5, 4), (5, 4), (5, 4)), {"linear": ((0,), (1,))}),
        ("aten.sum.default", "a b ->", ((5, 4), ()), {"linear": ((0,),), "kind": "contraction"}),
        (
            "aten.embedding.default",
            "vocab out, ... -> ... out",
            ((9, 4), (5,), (5, 4)),
            {"linear": ((0,),), "kind": "contraction", "rewrite": "one_hot"},
        ),
        (
            "planloom.dispatch.default",
            "tokens in, experts tokens -> experts tokens in",
            ((5, 4), (3, 5), (3, 5, 4)),
            {"linear": ((0,),), "kind": "contraction"},
        ),
        ("planloom.combine.default", "e t out, e t -> t out", ((3, 5, 4), (3, 5), (5, 4)), PRODUCT),
    ],
)
def test_what_is_no_product_counts_nothing(
    target: str, text: str, shapes: tuple[tuple[int, ...], ...], fields: dict[str, Any]
) -> None:
    made, tensors = single(target, text, *shapes, **fields)
    assert not is_product(made)
    assert op_flops(made, tensors) == 0


def test_an_operator_without_a_rule_is_no_product() -> None:
    made, tensors = single("aten.mm.default", "rows in, in out -> rows out", (5, 4), (4, 6), (5, 6), **PRODUCT)
    assert op_flops(replace(made, rule=None), tensors) == 0


def test_a_piece_has_the_operations_of_its_sizes() -> None:
    made, _ = linear("y", tensor("x", 8, 4), tensor("w", 6, 4))
    rule = made.rule
    assert isinstance(rule, Rule)
    halved = {name: size // 2 if name.startswith("lead") else size for name, size in rule.sizes.items()}
    assert product_flops(made, halved) == 2 * 4 * 4 * 6


# Graphs


def test_a_graph_is_its_two_products() -> None:
    assert graph_flops(tiny_graph()) == 2 * (2 * TOKENS * WIDE * HIDDEN)


def test_training_is_three_times_forward_but_for_what_needs_no_gradient() -> None:
    """The input of the first map is given: its backward is the gradient of the weight alone."""
    product = 2 * TOKENS * WIDE * HIDDEN
    assert training_flops(tiny_graph()) == 2 * product + 3 * product


def test_a_frozen_weight_takes_no_gradient() -> None:
    graph = tiny_graph()
    frozen = replace(graph, parameters=("first.weight",), buffers=("second.weight",))
    product = 2 * TOKENS * WIDE * HIDDEN
    assert training_flops(frozen) == 2 * product + 2 * product


def with_attention() -> Graph:
    """Two linear maps, and attention of the first's results to themselves before the second."""
    graph = tiny_graph()
    shape = graph.tensors["active"].shape
    attend = op(
        "attended",
        "mylib.attention.default",
        ["active", "active", "active"],
        notate("b q d!, b k d!, b k d! -> b q d!", shape, shape, shape, shape, kind="contraction"),
    )
    attend = replace(attend, kwargs={"is_causal": True})
    last = replace(graph.ops[2], args=("%attended", graph.ops[2].args[1]), inputs=("attended", "second.weight"))
    tensors = {**graph.tensors, "attended": tensor("attended", *shape)}
    return replace(graph, tensors=tensors, ops=(*graph.ops[:2], attend, last, graph.ops[3]))


@pytest.mark.parametrize(("counting", "share"), [("full", 1.0), ("causal", 0.5), ("weights", 0.0)])
def test_attention_in_full_at_half_or_left_out(counting: Counting, share: float) -> None:
    attended = 4 * BATCH * SEQUENCE * SEQUENCE * HIDDEN
    forward, training = graph_flops(tiny_graph()), training_flops(tiny_graph())
    assert graph_flops(with_attention(), counting=counting) == forward + share * attended
    assert training_flops(with_attention(), counting=counting) == training + 3 * share * attended


def test_given_operators_count_nothing() -> None:
    graph = tiny_graph()
    table, _ = linear("table", tensor("x", 8, 4), tensor("w", 6, 4))
    assert graph_flops(replace(graph, given=(table,))) == graph_flops(graph)


def test_an_expanded_operator_counts_once() -> None:
    """A linear map with bias stands as product and sum; its original is the expansion, not an operator."""
    graph = tiny_graph()
    product = replace(graph.ops[0], name="made", outputs=("made",), expansion=0)
    shape = graph.tensors["map1"].shape
    biased = op("map1", "aten.add.Tensor", ["made", "bias"], notate("... d, d -> ... d", shape, (HIDDEN,), shape))
    expanded = replace(
        graph,
        tensors={**graph.tensors, "made": tensor("made", *shape), "bias": tensor("bias", HIDDEN)},
        parameters=(*graph.parameters, "bias"),
        ops=(product, replace(biased, expansion=0), *graph.ops[1:]),
        expansions=(
            Expansion(target="aten.linear.default", args=("%x", "%first.weight", "%bias"), kwargs={}, output="map1"),
        ),
    )
    assert graph_flops(expanded) == graph_flops(graph)
    assert graph_bytes(expanded) == graph_bytes(graph) + 4 * HIDDEN


# Bytes


def test_bytes_are_read_and_written_and_views_are_free() -> None:
    graph = tiny_graph()
    sizes = {"x": TOKENS * WIDE, "w": HIDDEN * WIDE, "h": TOKENS * HIDDEN}
    assert op_bytes(graph.ops[0], graph.tensors) == 4 * sum(sizes.values())
    view, tensors = single("aten.t.default", "a b -> b a", (3, 4), (4, 3), kind="view")
    assert op_bytes(view, tensors) == 0
    half = {name: replace(t, dtype="bfloat16") for name, t in graph.tensors.items()}
    assert op_bytes(graph.ops[0], half) == 2 * sum(sizes.values())
    relu, loss = 2 * sizes["h"], sizes["x"] + 1
    assert graph_bytes(graph) == 4 * (2 * sum(sizes.values()) + relu + loss)
