"""Stamped layers: the graph is that of a full trace, whatever the layers do, and the model is left as it was."""

import copy
import operator
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook

from examples.models.gpt import GPT, GPTConfig, batch_for
from planloom.capture import capture
from planloom.capture.layers.stubs import Group, stamping_layers
from planloom.errors import CaptureError
from planloom.graph import Graph

NUM_LAYERS, HIDDEN = 6, 16


def both(model: nn.Module, batch: dict[str, Any], loss: Any = None) -> Graph:
    """The graph, after asserting that it is the same stamped and traced in full."""
    graph, _ = stamped_and_runs(model, batch, loss)
    return graph


def stamped_and_runs(model: nn.Module, batch: dict[str, Any], loss: Any = None) -> tuple[Graph, int]:
    """The graph, and how many calls of layers were traced for it. Stamped first: a full trace may change the model."""
    Layer.runs = 0
    stamped = capture(model, batch, loss=loss)
    runs = Layer.runs
    full = capture(model, batch, loss=loss, stamp=False)
    assert [op.name for op in stamped.ops] == [op.name for op in full.ops]
    assert stamped == full
    assert list(stamped.tensors) == list(full.tensors)
    return stamped, runs


class Layer(nn.Module):
    """Counts how often its forward runs, which it does only where it is traced."""

    runs = 0

    def __init__(self, number: int, size: int = HIDDEN) -> None:
        super().__init__()
        self.number = number
        self.up, self.down = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        Layer.runs += 1
        return x + self.down(F.relu(self.up(x)))


class Stack(nn.Module):
    """An embedding of the batch, layers, and a sum of squares."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed, self.layers = nn.Linear(4, HIDDEN), nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return (self.run(self.embed(x)) ** 2).sum()

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


BATCH = {"x": torch.randn(2, 4)}


def runs_of(model: nn.Module) -> int:
    """How many calls of layers a stamped capture traces; the graph is that of a full trace."""
    _, runs = stamped_and_runs(model, BATCH)
    return runs


# --- what is stamped -------------------------------------------------------------------------------------------------


def test_gpt() -> None:
    config = GPTConfig(num_layers=NUM_LAYERS)
    graph = both(GPT(config), batch_for(config, 2))
    assert {op.module.split(".")[1] for op in graph.ops if op.module.startswith("layers.")} == set("012345")


def test_two_layers_of_many_are_traced() -> None:
    assert runs_of(Stack(*(Layer(i) for i in range(NUM_LAYERS)))) == 2


def test_a_layer_that_is_called_often_is_traced_twice() -> None:
    class Recycled(Stack):
        def run(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = super().run(x)
            return x

    assert runs_of(Recycled(Layer(0))) == 2
    assert runs_of(Recycled(Layer(0), Layer(1))) == 2


@pytest.mark.slow
def test_a_layer_in_two_places_keeps_its_own_parameters() -> None:
    first = Layer(0)
    graph = both(Stack(first, *(Layer(i) for i in range(1, 5)), first), BATCH)
    readers = [op.module for op in graph.ops if "layers.0.up.weight" in op.inputs]
    assert len(readers) == 2


@pytest.mark.slow
def test_layers_with_a_tied_weight() -> None:
    layers = [Layer(i) for i in range(NUM_LAYERS)]
    for layer in layers:
        layer.up.weight = layers[0].up.weight
    both(Stack(*layers), BATCH)


@pytest.mark.slow
def test_blocks_of_stages() -> None:
    class Stage(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Layer(i, size) for i in range(4))
            self.grow = nn.Linear(size, 2 * size)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return self.grow(x)

    assert runs_of(Stack(Stage(HIDDEN), Stage(2 * HIDDEN))) == 2 * 2


def test_arguments_that_are_passed_on_and_values_that_are_returned() -> None:
    class Passing(Layer):
        def forward(self, x: Tensor, more: dict[str, Any]) -> tuple[Tensor, dict[str, Any], int]:  # type: ignore[override]
            return super().forward(x) * more["scale"] + more["bias"], {**more, "unused": x + 1}, 2

    class Model(Stack):
        def run(self, x: Tensor) -> Tensor:
            more: dict[str, Any] = {"bias": x[:1], "scale": 0.5}
            for layer in self.layers:
                x, more, two = layer(x, {k: more[k] for k in ("bias", "scale")})
            return x * two

    assert runs_of(Model(*(Passing(i) for i in range(NUM_LAYERS)))) == 2


@pytest.mark.slow
def test_own_buffers_and_frozen_parameters() -> None:
    class Scaled(Layer):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.register_buffer("scale", torch.ones(HIDDEN))
            self.register_buffer("shift", torch.ones(HIDDEN), persistent=False)
            self.down.bias.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale + self.shift

    model = Stack(*(Scaled(i) for i in range(NUM_LAYERS)))
    assert runs_of(model) == 2
    assert len(capture(model, BATCH).buffers) == 3 * NUM_LAYERS
    for layer in (3, 4):
        model.layers[layer].up.weight.requires_grad_(False)
    assert runs_of(model) == 4


# --- what is not stamped, or not all ---------------------------------------------------------------------------------


class ByNumber(Layer):
    """Differs from the third layer on, where two traced calls would not show it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2 if self.number > 2 else super().forward(x)


class ByNumberInDict(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2 if self.__dict__["number"] > 2 else super().forward(x)


class ByNumberInVars(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2 if {**vars(self)}["number"] > 2 else super().forward(x)


class Remembering(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = x * 2
        return super().forward(x)


class Writing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        x.add_(1)
        return y


class Counting(Layer):
    total: Tensor

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.register_buffer("total", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(1)
        return super().forward(x)


class WithConstant(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.tensor([0.5, 2.0]).repeat(HIDDEN // 2)


class Viewing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return x.view(2, HIDDEN)


class Reading(Stack):
    """Layers see the model's input past their arguments."""

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer.forward_input = x  # type: ignore[assignment]
        y = super().run(x)
        for layer in self.layers:
            del layer.forward_input
        return y


class ReadingLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.forward_input


class Collecting(Stack):
    """Reads what a late layer left in an attribute."""

    def run(self, x: Tensor) -> Tensor:
        y = super().run(x) + self.layers[4].seen  # type: ignore[operator]
        for layer in self.layers:
            del layer.seen
        return y


class KeepingInputs(Stack):
    """Reads an input of a late layer that the layer has changed."""

    def run(self, x: Tensor) -> Tensor:
        inputs = []
        for layer in self.layers:
            inputs.append(x)
            x = layer(x)
        return x + inputs[4]


@pytest.mark.parametrize(
    ("stack", "layer"),
    [
        (Stack, ByNumber),
        (Stack, ByNumberInDict),
        (Stack, ByNumberInVars),
        (Collecting, Remembering),
        (KeepingInputs, Writing),
        (Stack, Counting),
        pytest.param(Stack, WithConstant, marks=pytest.mark.slow),
        pytest.param(Stack, Viewing, marks=pytest.mark.slow),
        pytest.param(Reading, ReadingLayer, marks=pytest.mark.slow),
    ],
)
def test_what_two_calls_do_not_show_is_traced(stack: type[Stack], layer: Callable[[int], nn.Module]) -> None:
    assert runs_of(stack(*(layer(i) for i in range(NUM_LAYERS)))) >= NUM_LAYERS


def test_a_hook_inside_one_layer() -> None:
    model = Stack(*(Layer(i) for i in range(NUM_LAYERS)))
    model.layers[4].up.register_forward_hook(lambda module, args, output: output * 2)
    assert runs_of(model) == 2 + 1


@pytest.mark.parametrize(
    "read",
    [
        lambda d: d["number"],
        lambda d: d.get("number"),
        lambda d: dict(d)["number"],
        lambda d: {**d}["number"],
        lambda d: {"number": 0} | d,
        lambda d: d | {},
        lambda d: {}.update(d),
        lambda d: d.copy(),
        lambda d: list(d.values()),
        operator.itemgetter("number"),
        lambda d: "{number}".format(**d),
        copy.copy,
        repr,
    ],
)
def test_every_way_of_reading_a_number_is_seen(read: Callable[[dict[str, Any]], Any]) -> None:
    layers = [Layer(i) for i in range(3)]
    with stamping_layers(Stack(*layers), {}, shells=False) as calls:
        watched, group = vars(layers[0]), Group()
        calls._active = group
        assert watched["training"]
        assert len(watched) == len(list(watched))
        assert not group.refused
        read(watched)
        assert group.refused == "reads its number number"
    assert type(vars(layers[0])) is dict


def test_backward_hooks_are_refused() -> None:
    def tripled(*gradients: Any) -> Any:
        return tuple(g * 3 for g in gradients[1])

    for register, given in (
        (lambda m: m.embed.register_full_backward_hook(tripled), "module embed"),
        (lambda m: m.register_full_backward_hook(tripled), "module Stack"),
        (lambda m: m.layers[1].up.register_full_backward_pre_hook(tripled), r"module layers\.1\.up"),
        (lambda m: m.embed.weight.register_hook(tripled), r"parameter embed\.weight"),
        (lambda m: m.embed.weight.register_post_accumulate_grad_hook(tripled), r"parameter embed\.weight"),
        (lambda m: register_module_full_backward_hook(tripled), "all modules"),
    ):
        model = Stack(Layer(0), Layer(1))
        handle = register(model)
        try:
            with pytest.raises(CaptureError, match=given):
                capture(model, BATCH)
        finally:
            handle.remove()
    capture(model, BATCH)


def test_forward_hooks_are_traced() -> None:
    plain, hooked = (Stack(*(Layer(i) for i in range(3))) for _ in range(2))
    hooked.layers[1].register_forward_hook(lambda module, args, output: output * 2)
    hooked.embed.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert len(both(hooked, BATCH).ops) == len(both(plain, BATCH).ops) + 1
    assert "add" in str([op.target for op in both(hooked, BATCH).given])


def test_attributes_that_the_parent_sets() -> None:
    class Doubling(Layer):
        factor = 1

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor

    class Setting(Stack):
        def run(self, x: Tensor) -> Tensor:
            self.layers[4].factor = 2
            return super().run(x)

    both(Setting(*(Doubling(i) for i in range(NUM_LAYERS))), BATCH)


@pytest.mark.slow
def test_layers_that_differ_in_an_attribute_are_told_apart() -> None:
    layers = [Layer(i) for i in range(NUM_LAYERS)]
    for i, layer in enumerate(layers):
        layer.eps = 0.1 * (i % 2)
    assert runs_of(Stack(*layers)) == 2 * 2


# --- the model -------------------------------------------------------------------------------------------------------


def attributes(model: nn.Module) -> list[dict[str, Any]]:
    return [{k: dict(v) if isinstance(v, dict) else v for k, v in vars(module).items()} for module in model.modules()]


def test_the_model_is_left_as_it_was() -> None:
    class Failing(Stack):
        def run(self, x: Tensor) -> Tensor:
            x = super().run(x)
            raise ValueError("nothing to see")

    forward = Layer.forward
    for stack in (Stack, Failing):
        model = stack(*(Layer(i) for i in range(NUM_LAYERS)))
        before = attributes(model)
        if stack is Failing:
            with pytest.raises(CaptureError, match="nothing to see"):
                capture(model, BATCH)
        else:
            capture(model, BATCH)
        assert attributes(model) == before
        assert Layer.forward is forward
        assert "number" not in vars(Layer)
        assert [layer.number for layer in model.layers] == list(range(NUM_LAYERS))  # type: ignore[union-attr]


# --- models of others ------------------------------------------------------------------------------------------------


def _text() -> dict[str, Tensor]:
    tokens = torch.randint(128, (2, 16))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _image(size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.randint(8, (2,))}


_DECODER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "use_cache": False,
}
_ENCODER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_WINDOWS = {
    "image_size": 64,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [2, 8, 2],
    "num_heads": [2, 4, 8],
    "window_size": 4,
    "num_labels": 8,
    "drop_path_rate": 0.0,
}
_GPT2 = {
    "n_layer": 6,
    "n_head": 4,
    "n_embd": 64,
    "vocab_size": 128,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "use_cache": False,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
_DEEPSEEK = {
    **_DECODER,
    "num_hidden_layers": 8,
    "num_key_value_heads": 8,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 3,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_T5 = {
    "vocab_size": 128,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 6,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "use_cache": False,
}
_SLIDING = ["sliding_attention", "sliding_attention", "full_attention"] * 4
_HUGGING_FACE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _DECODER),
    "llama with a cache": ("LlamaForCausalLM", "LlamaConfig", {**_DECODER, "use_cache": True}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "gpt2 by number": ("GPT2LMHeadModel", "GPT2Config", {**_GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_DECODER, "head_dim": 16}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_DECODER, "num_hidden_layers": 12, "head_dim": 16, "sliding_window": 4, "layer_types": _SLIDING},
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_DECODER, "num_local_experts": 4}),
    "deepseek": ("DeepseekV3ForCausalLM", "DeepseekV3Config", _DEEPSEEK),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5),
    "bert": ("BertForMaskedLM", "BertConfig", {**_ENCODER, "vocab_size": 128}),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**_ENCODER, "vocab_size": 128, "embedding_size": 32}),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {**_ENCODER, "image_size": 32, "patch_size": 8, "num_labels": 8},
    ),
    "swin": ("SwinForImageClassification", "SwinConfig", _WINDOWS),
    "swinv2": ("Swinv2ForImageClassification", "Swinv2Config", _WINDOWS),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _HUGGING_FACE)
def test_hugging_face(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    model, config, settings = _HUGGING_FACE[name]
    images = {"vit": _image(32), "swin": _image(64), "swinv2": _image(64)}
    both(getattr(transformers, model)(getattr(transformers, config)(**settings)), images.get(name) or _text())


_LARGEST = """
import resource, sys, time
start = time.perf_counter()
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from planloom.capture import capture_from_spec
config = LlamaConfig(
    hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128, num_key_value_heads=8,
    vocab_size=128256, max_position_embeddings=8192, use_cache=False,
)
with torch.device("meta"):
    model = LlamaForCausalLM(config)
graph = capture_from_spec(model, {name: ((1, 8192), "int64") for name in ("input_ids", "labels")})
assert len(graph.parameters) == 9 * 126 + 3
print(time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


@pytest.mark.slow
@pytest.mark.alone
def test_llama_405b_takes_seconds_and_little_memory() -> None:
    pytest.importorskip("transformers")
    done = subprocess.run([sys.executable, "-c", _LARGEST], capture_output=True, text=True, check=True)
    seconds, gibibytes = map(float, done.stdout.split())
    assert seconds <= 15
    assert gibibytes <= 4
