"""Given tensors that repeat are computed and held once, and are what they were."""

from math import prod

import pytest
import torch

from planloom.capture import capture, load_model, tensors_of
from planloom.execute import compute_given
from planloom.execute.operators import operator, plain
from planloom.graph import Graph, held_elements, is_reference, repeated_dims
from planloom.simulate.memory import given_bytes

MODELS = (
    "gpt-oss-120b?num_hidden_layers=2&hidden_size=32&intermediate_size=32&num_attention_heads=4&num_key_value_heads=2"
    "&head_dim=8&num_local_experts=4&vocab_size=64&seq=16&batch=4&dtype=float32",
    "mixtral-8x7b?num_hidden_layers=2&hidden_size=32&intermediate_size=32&num_attention_heads=4&num_key_value_heads=2"
    "&num_local_experts=4&vocab_size=64&seq=16&batch=4&dtype=float32",
)


def _plainly(graph: Graph, known: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    values = dict(known)

    def resolve(arg: object) -> object:
        if isinstance(arg, list | tuple):
            return [resolve(item) for item in arg]
        return values[str(arg)[1:]] if is_reference(arg) else plain(arg)  # type: ignore[arg-type]

    for op in graph.given:
        kwargs = {key: resolve(value) for key, value in op.kwargs.items()}
        values[op.outputs[0]] = operator(op.target)(*(resolve(arg) for arg in op.args), **kwargs)
    return values


@pytest.mark.parametrize("source", MODELS, ids=lambda source: source.split("?")[0])
def test_what_repeats_is_equal_and_held_once(source: str) -> None:
    torch.manual_seed(0)
    model, example = load_model(source)
    graph = capture(model, example)
    known = {name: torch.randint(0, 64, tensor.shape) for name, tensor in tensors_of(example, model).items()}
    real, _ = load_model(source, device="cpu")
    held = dict(real.named_buffers()) | dict(real.named_parameters())
    known |= {name: held[name].detach() for name in graph.buffers}
    found, expected = compute_given(graph, known, torch.device("cpu")), _plainly(graph, known)
    repeated = repeated_dims(graph)
    assert repeated, "nothing repeats in this model: the test shows nothing"
    for name in found:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=0)
    assert found.keys() & repeated.keys()
    for name, dims in ((name, dims) for name, dims in repeated.items() if name in found):
        assert all(found[name].stride(dim) == 0 for dim in dims), name
        assert found[name].untyped_storage().nbytes() <= 8 * held_elements(tuple(found[name].shape), dims)


def test_a_mask_of_positions_does_not_grow_with_the_batch() -> None:
    def mask_bytes(batch: int) -> int:
        model, example = load_model(MODELS[0].replace("batch=4", f"batch={batch}"))
        graph = capture(model, example)
        inputs = sum(prod(graph.tensors[name].shape) * graph.tensors[name].item_bytes for name in graph.inputs)
        return given_bytes(graph) - inputs

    assert mask_bytes(4) - mask_bytes(2) < 2 * 16 * 16 * 4  # masks of two samples; shifted labels are less
