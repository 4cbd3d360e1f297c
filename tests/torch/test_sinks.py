"""Attention with sinks as one operator: equal to the one written out, with its gradients, eager and compiled."""

import pytest
import torch
from torch import Tensor, fx

from planloom.capture import capture
from planloom.capture.sinks import sink_attention
from planloom.execute.compiled import _inductor
from planloom.graph import Graph
from planloom.graph.flops import graph_flops
from tests.zoo import gpt_oss

SCALE = 0.3


def written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor) -> Tensor:
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * SCALE
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    beside = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, beside], -1).softmax(-1)[..., :-1] @ v.repeat_interleave(group, 1)


def tensors(length: int, *, group: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length + group)
    shapes = ((2, 2 * group, length, 8), (2, 2, length, 8), (2, 2, length, 8), (2 * group,))
    return [torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("window", [0, 1, 5, 40])
@pytest.mark.parametrize("length", [3, 40, 257])
def test_it_equals_what_is_written_out_with_its_gradients(length: int, window: int, group: int) -> None:
    q, k, v, sinks = tensors(length, group=group)
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    seen = seen.triu(1 - window) if window else seen
    expected = written_out(q, k, v, seen, sinks)
    cotangent = torch.randn_like(expected)
    of_expected = torch.autograd.grad(expected, (q, k, v, sinks), cotangent)
    by_mask = sink_attention(q, k, v, seen[None, None], sinks, False, 0, SCALE)
    for found in (sink_attention(q, k, v, None, sinks, True, window, SCALE), by_mask):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        for one, other in zip(torch.autograd.grad(found, (q, k, v, sinks), cotangent), of_expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_compiled_it_is_the_same() -> None:
    q, k, v, sinks = tensors(40, group=2, dtype=torch.float32)
    graph = fx.Graph()
    nodes = [graph.placeholder(name) for name in ("q", "k", "v", "sinks")]
    made = graph.call_function(sink_attention, (*nodes[:3], None, nodes[3], True, 8, SCALE))
    graph.output((made,))
    compiled = _inductor(fx.GraphModule(torch.nn.Module(), graph), [q, k, v, sinks])
    found, expected = compiled(q, k, v, sinks)[0], sink_attention(q, k, v, None, sinks, True, 8, SCALE)
    torch.testing.assert_close(found, expected)
    cotangent = torch.randn_like(expected)
    ours = torch.autograd.grad(found, (q, k, v, sinks), cotangent)
    for one, other in zip(ours, torch.autograd.grad(expected, (q, k, v, sinks), cotangent), strict=True):
        torch.testing.assert_close(one, other)


def captured(dropout: float = 0.0) -> Graph:
    model, batch = gpt_oss(dropout)
    return capture(model, batch)


def test_gpt_oss_is_captured_with_it_and_its_windows_are_known() -> None:
    graph = captured()
    found = [op for op in graph.ops if op.target == "planloom.sink_attention.default"]
    assert [(op.args[3], op.args[5], op.args[6]) for op in found] == [(None, True, 8), (None, True, 0)]
    length = graph.tensors[found[0].inputs[0]].shape[2]
    for op in graph.ops:
        for name in op.outputs:
            shape = graph.tensors[name].shape
            assert shape[-2:].count(length) < 2, "no scores of all pairs"
    assert graph_flops(graph, counting="causal") < graph_flops(graph)


def test_with_dropout_of_its_weights_attention_stays_written_out() -> None:
    assert not [op for op in captured(0.1).ops if "sink" in op.target]
