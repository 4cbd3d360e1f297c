"""Given tensors that repeat are computed and held once, and are what they were."""

from math import prod

import pytest
import torch

from planloom.capture import capture, load_model, tensors_of
from planloom.execute import compute_given
from planloom.execute.operators import operator, plain
from planloom.graph import Graph, held_elements, is_reference, repeated_factors
from planloom.graph.repeats import _through_view
from planloom.simulate.memory import given_bytes

MODELS = (
    "gpt-oss-120b?num_hidden_layers=2&hidden_size=32&intermediate_size=32&num_attention_heads=4&num_key_value_heads=2"
    "&head_dim=8&num_local_experts=4&vocab_size=64&seq=16&batch=4&dtype=float32",
    "mixtral-8x7b?num_hidden_layers=2&hidden_size=32&intermediate_size=32&num_attention_heads=4&num_key_value_heads=2"
    "&num_local_experts=4&vocab_size=64&seq=16&batch=4&dtype=float32",
    "swin-large?image_size=32&embed_dim=16&depths=2,2&num_heads=2,2&window_size=4&batch=4&num_labels=8&drop_path_rate=0"
    "&dtype=float32",
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
    known = {
        name: torch.randint(0, 8, tensor.shape).to(tensor.dtype) for name, tensor in tensors_of(example, model).items()
    }
    real, _ = load_model(source, device="cpu")
    held = dict(real.named_buffers()) | dict(real.named_parameters())
    known |= {name: held[name].detach() for name in graph.buffers}
    found, expected = compute_given(graph, known, torch.device("cpu")), _plainly(graph, known)
    repeated = repeated_factors(graph)
    assert repeated, "nothing repeats in this model: the test shows nothing"
    for name in found:
        own = found[name].reshape(expected[name].shape)
        torch.testing.assert_close(own, expected[name], rtol=0, atol=0)
    assert found.keys() & repeated.keys()
    for name, factors in ((name, factors) for name, factors in repeated.items() if name in found):
        sizes = graph.tensors[name].sizes
        assert found[name].untyped_storage().nbytes() <= 8 * held_elements(sizes, factors)


def test_a_part_of_a_dim_repeats() -> None:
    """Of the shifted windows' masks, which are joined with the samples in one dim, those of one sample are held."""
    model, example = load_model(MODELS[2])
    graph = capture(model, example)
    first = {name: graph.tensors[name].factors[0] for name, at in repeated_factors(graph).items() if at == {0}}
    read = {name for op in graph.ops for name in op.inputs}
    assert any(dim[0] == 4 and prod(dim) == 4 * 4 for name, dim in first.items() if name in read)


@pytest.mark.parametrize(
    ("before", "repeated", "after", "expected"),
    [
        ((4, 6), {0}, (4, 2, 3), {0}),
        ((4, 6), {1}, (4, 2, 3), {1, 2}),
        ((4, 6), {0}, (2, 2, 6), {0, 1}),
        ((4, 6), {0}, (24,), set()),
        ((4, 6), {0}, (8, 3), set()),
        ((4, 1, 6), {0}, (4, 6), {0}),
        ((2, 3, 4), {0, 1}, (6, 4), set()),
    ],
)
def test_what_repeats_through_a_view(
    before: tuple[int, ...], repeated: set[int], after: tuple[int, ...], expected: set[int]
) -> None:
    """(2, 3, 4) → (6, 4): two factors that repeat are one that does, which is not seen, and so held whole."""
    assert _through_view(before, frozenset(repeated), after) == expected


@pytest.mark.parametrize(("source", "mask_bytes"), [(MODELS[0], 16 * 16 * 4), (MODELS[2], 4 * 16 * 16 * 4)])
def test_a_mask_of_positions_does_not_grow_with_the_batch(source: str, mask_bytes: int) -> None:
    def masks(batch: int) -> int:
        model, example = load_model(source.replace("batch=4", f"batch={batch}"))
        graph = capture(model, example)
        inputs = sum(prod(graph.tensors[name].shape) * graph.tensors[name].item_bytes for name in graph.inputs)
        return given_bytes(graph) - inputs

    assert masks(4) - masks(2) < 2 * mask_bytes  # masks of two samples; shifted labels are less
