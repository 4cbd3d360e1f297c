"""Models by name: published sizes, overrides and errors; and the small models that all other tests use."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from examples.models import moe
from planloom.capture.guards import without_idle_layer_drop
from planloom.capture.models.evoformer import Evoformer, EvoformerConfig, batch_for
from planloom.capture.models.source import load_model
from planloom.errors import CaptureError
from planloom.graph.catalog import model_preset, preset_names
from tests.zoo import SMALL

pytest.importorskip("transformers")

WITH_DROPOUT = sorted(set(SMALL) - {"mamba2", "gpt", "gshard_moe"})


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# Presets


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_has_the_published_number_of_parameters_and_holds_no_memory(name: str) -> None:
    preset = model_preset(name)
    model, batch = load_model(name)
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    if preset.parameters is None:
        assert name == "evoformer"
    else:
        assert preset.parameters_source
        assert num_parameters(model) == pytest.approx(preset.parameters, rel=0.01)
    assert {t.device.type for t in (*model.parameters(), *model.buffers(), *tensors)} == {"meta"}
    assert {str(p.dtype) for p in model.parameters()} == {f"torch.{preset.dtype}"}
    assert model.training
    assert all(tensor.shape[0] == preset.batch for tensor in tensors)
    assert all(flops.per_unit > 0 and flops.source for flops in preset.flops)


@pytest.mark.parametrize("name", [n for n in preset_names() if model_preset(n).active_parameters])
def test_published_active_parameters_are_those_outside_experts_and_the_chosen_ones(name: str) -> None:
    preset = model_preset(name)
    model, _ = load_model(name)
    config: Any = model.config
    in_experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    active = num_parameters(model) - in_experts * (1 - config.num_experts_per_tok / config.num_local_experts)
    if name == "gpt-oss-120b":
        active -= config.vocab_size * config.hidden_size  # its card leaves out the embedding, which is looked up
    assert active == pytest.approx(preset.active_parameters, rel=0.02)


@pytest.mark.parametrize(
    ("source", "settings", "shape"),
    [
        ("llama3-8b?num_hidden_layers=4&seq=4096&batch=2", {"num_hidden_layers": 4, "use_cache": False}, (2, 4096)),
        ("llama3-8b?hidden_size=1024&num_attention_heads=4&num_key_value_heads=2", {"head_dim": 256}, (8, 8192)),
        ("llama3-8b?max_position_embeddings=16384&seq=16384&batch=1", {"head_dim": 128}, (1, 16384)),
        ("gpt2?num_hidden_layers=3&attn_pdrop=0", {"n_layer": 3, "attn_pdrop": 0.0}, (8, 1024)),
        ("gpt2?n_layer=3", {"num_hidden_layers": 3}, (8, 1024)),
        ("t5-11b?num_hidden_layers=2", {"num_layers": 2, "num_decoder_layers": 2}, (8, 512)),
        ("t5-11b?num_decoder_layers=1&num_hidden_layers=2", {"num_layers": 2, "num_decoder_layers": 1}, (8, 512)),
        ("mbart-large?num_hidden_layers=2", {"encoder_layers": 2, "decoder_layers": 2}, (8, 1024)),
        ("qwen3-moe?num_experts=8&num_hidden_layers=2", {"num_local_experts": 8, "head_dim": 128}, (8, 4096)),
        ("mixtral-8x7b?sliding_window=4096&num_hidden_layers=1", {"sliding_window": 4096}, (8, 4096)),
        ("mixtral-8x7b?output_router_logits=true&num_hidden_layers=1", {"output_router_logits": True}, (8, 4096)),
        ("gemma3-4b?num_hidden_layers=6&sliding_window=512", {"sliding_window": 512}, (8, 4096)),
        ("vit-large?image_size=384&num_labels=10&batch=2", {"num_labels": 10}, (2, 3, 384, 384)),
        ("swin-large?depths=2,2&num_heads=6,12", {"depths": [2, 2]}, (64, 3, 224, 224)),
    ],
)
def test_overrides_change_the_model_and_its_batch(
    source: str, settings: dict[str, Any], shape: tuple[int, ...]
) -> None:
    model, batch = load_model(source)
    assert {key: getattr(model.config, key) for key in settings} == settings
    assert tuple(next(iter(batch.values())).shape) == shape


def test_the_dtype_is_that_of_parameters_and_images() -> None:
    model, batch = load_model("vit-large?dtype=bfloat16&num_hidden_layers=1")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert batch["pixel_values"].dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32


def test_parts_of_a_configuration_are_overridden_by_dotted_names() -> None:
    model, batch = load_model("clip-vit-large?vision_config.image_size=336&text_config.num_hidden_layers=2&batch=4")
    assert len(model.text_model.encoder.layers) == 2
    assert len(model.vision_model.encoder.layers) == 24
    assert batch["pixel_values"].shape == (4, 3, 336, 336)


def test_the_evoformer_takes_overrides_too() -> None:
    model, batch = load_model("evoformer?num_blocks=2&seq=64&num_sequences=16&pair_dropout=0&dtype=float32")
    assert len(model.blocks) == 2
    assert batch["msa"].shape == (8, 16, 64)
    assert batch["distances"].shape == (8, 64, 64)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("lama3-8b", "did you mean llama3-8b"),
        ("no-such-model", "presets: bert-large, clip-vit-large"),
        ("no/such/config.json", "neither a preset nor a file"),
        ("no/such/file.py:factory", "neither a preset nor a file"),
        ("llama3-8b?num_hidden_layer=4", "num_hidden_layers"),
        ("clip-vit-large?image_size=336", "vision_config.image_size"),
        ("evoformer?blocks=3", "num_blocks"),
        ("llama3-8b?to_dict=3", "has no setting 'to_dict'"),
        ("llama3-8b?model_type=bert", "has no setting 'model_type'"),
        ("llama3-8b?num_hidden_layers=four", "int, as in num_hidden_layers=32"),
        ("llama3-8b?num_hidden_layers=4.0", "int, as in num_hidden_layers=32"),
        ("llama3-8b?tie_word_embeddings=1", "bool, as in tie_word_embeddings=false"),
        ("llama3-8b?num_hidden_layers=-1", "a whole number from 1"),
        ("llama3-8b?rope_parameters=3", "cannot be overridden"),
        ("swin-large?num_hidden_layers=2", "follows from other settings"),
        ("llama3-8b?hidden_size=4097", "not a multiple of the number of attention heads"),
        ("llama3-8b?vocab_size=none", "expected int, got NoneType"),
        ("llama3-8b?seq=16384", "add max_position_embeddings=16384"),
        ("clip-vit-large?seq=78", "add text_config.max_position_embeddings=78"),
        ("vit-large?seq=3", "has no sequence"),
        ("llama3-8b?batch=0", "a whole number from 1"),
        ("llama3-8b?dtype=int8", "one of float32, bfloat16"),
        ("llama3-8b?seq", "key=value"),
        ("llama3-8b?seq=1&seq=2", "given twice"),
    ],
)
def test_a_wrong_name_or_override_is_an_error_that_says_what_is_right(source: str, message: str) -> None:
    with pytest.raises(CaptureError) as caught:
        load_model(source)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (":fails", r"raises KeyError.*KeyError: 'x' \(.*models.py, line 2\)"),
        ("", r"not named.*use one of \S*models.py:fails, \S*models.py:small$"),
        (":", r"not named.*use one of"),
        (":NUMBER", r"has no 'NUMBER'"),
        (":small", r"does not return a model and a batch"),
    ],
)
def test_a_factory_that_fails_is_an_error_with_its_line(tmp_path: Path, name: str, message: str) -> None:
    path = tmp_path / "models.py"
    path.write_text("def fails():\n    raise KeyError('x')\ndef small(): pass\ndef more(n): pass\nNUMBER = 1\n")
    with pytest.raises(CaptureError, match=f"(?s){message}"):
        load_model(f"{path}{name}")


def test_a_file_that_is_no_python_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "models.py"
    path.write_text("x = 1\ndef small(:\n")
    with pytest.raises(CaptureError, match=r"(?s)raises SyntaxError.*line 2"):
        load_model(f"{path}:small")


# Configurations of Hugging Face


def write_config(folder: Path, **settings: Any) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(settings))
    return str(path)


GEMMA = {
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("settings", "name", "inputs"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM", ["input_ids", "labels"]),
        ({"model_type": "bert"}, "BertForMaskedLM", ["input_ids", "labels"]),
        ({"model_type": "t5"}, "T5ForConditionalGeneration", ["input_ids", "decoder_input_ids", "labels"]),
        ({"model_type": "swin"}, "SwinForImageClassification", ["pixel_values", "labels"]),
        (GEMMA, "Gemma3ForCausalLM", ["input_ids", "labels"]),
    ],
)
def test_a_config_file_names_its_class(tmp_path: Path, settings: Any, name: str, inputs: list[str]) -> None:
    model, batch = load_model(write_config(tmp_path, **settings))
    assert type(model).__name__ == name
    assert list(batch) == inputs


@pytest.mark.parametrize("num_layers", [1, 2, 4, 7])
def test_what_is_listed_by_layer_follows_the_number_of_layers(tmp_path: Path, num_layers: int) -> None:
    model, batch = load_model(f"{write_config(tmp_path, **GEMMA)}?num_hidden_layers={num_layers}&batch=2")
    pattern = ["sliding_attention", "full_attention"]
    assert model.config.layer_types == [pattern[i % 2] for i in range(num_layers)]
    assert next(model.parameters()).dtype == torch.bfloat16
    assert batch["input_ids"].shape == (2, 2048)


def test_a_list_without_a_pattern_is_not_prolonged(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]
    path = write_config(tmp_path, **{**GEMMA, "layer_types": kinds})
    with pytest.raises(CaptureError, match="without a pattern"):
        load_model(f"{path}?num_hidden_layers=5")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_type": "no-such-type"}, "names no model of transformers"),
        ({"model_type": "bert", "architectures": ["BertModel"]}, "no training batch is known for BertModel"),
        ({"model_type": "llama", "num_attention_heads": 7}, "not a multiple of the number of attention heads"),
    ],
)
def test_a_config_file_that_is_no_model_is_an_error(tmp_path: Path, settings: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        load_model(write_config(tmp_path, **settings))


def test_a_file_that_is_no_json_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(CaptureError, match="cannot be read"):
        load_model(str(path))


# The small models


@pytest.mark.parametrize("name", SMALL)
def test_a_small_model_trains_all_its_parameters_and_is_always_the_same(name: str) -> None:
    losses = []
    for _ in range(2):
        model, batch = SMALL[name]()
        output = model(**batch)
        losses.append(getattr(output, "loss", output))
    assert torch.equal(losses[0], losses[1])
    losses[1].backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []
    assert [n for n, p in model.named_parameters() if not p.grad.any()] == []


@pytest.mark.parametrize("name", WITH_DROPOUT)
def test_dropout_of_a_small_model_is_random(name: str) -> None:
    model, batch = SMALL[name](dropout=0.5)
    first, second = (getattr(output, "loss", output) for output in (model(**batch), model(**batch)))
    assert first != second


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_small_model_is_exported(name: str) -> None:
    model, batch = SMALL[name]()
    if name in ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"):
        model.set_experts_implementation("batched_mm")  # the others have shapes that depend on values
    output = model(**batch)
    with without_idle_layer_drop(model):
        program = torch.export.export(model, (), batch, strict=False)
    exported = program.module(check_guards=False)(**batch)
    expected, got = (getattr(value, "loss", value) for value in (output, exported))
    torch.testing.assert_close(got, expected)


# The two models that are ours


def test_gshard_experts_with_room_for_all_are_a_mixture_of_the_two_best() -> None:
    torch.manual_seed(0)
    layer = moe.Experts(replace(moe.MoEConfig(), capacity_factor=4.0))
    x = torch.randn(4, 16, 32)
    gates, best = torch.softmax(layer.gate(x), dim=-1).topk(2, dim=-1)
    all_outputs = torch.einsum("bseh,ehm->bsem", torch.relu(torch.einsum("bsm,emh->bseh", x, layer.up)), layer.down)
    chosen = torch.gather(all_outputs, 2, best[..., None].expand(-1, -1, -1, 32))
    expected = (gates / gates.sum(dim=-1, keepdim=True)).unsqueeze(-1).mul(chosen).sum(dim=2)
    torch.testing.assert_close(layer(x)[0], expected)


def test_gshard_experts_take_no_more_tokens_than_their_capacity() -> None:
    torch.manual_seed(0)
    config = replace(moe.MoEConfig(), capacity_factor=0.5)
    _, dispatch, auxiliary = moe.Experts(config).route(torch.randn(8, 16, 32))
    assert dispatch.shape == (8, 16, 4, config.capacity)
    assert dispatch.sum(dim=1).max() == 1  # one token a place
    assert dispatch.sum(dim=(2, 3)).max() <= 2  # two experts a token
    assert dispatch.sum() < 8 * 16 * 2  # some are dropped
    assert auxiliary >= 1  # one where all experts are equally used


class _NoGradBeforeTheLastPass(Evoformer):
    passes = 0

    def _pass(self, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self.passes += 1
        with torch.set_grad_enabled(self.passes > self.num_recycles):
            return super()._pass(*args)


def test_the_evoformer_is_differentiated_through_its_last_pass_only() -> None:
    config = EvoformerConfig(
        num_blocks=1, num_sequences=4, num_residues=4, msa_channels=16, pair_channels=8, msa_heads=2, pair_heads=2,
        head_size=4, outer_channels=4, num_recycles=2,
    )  # fmt: skip
    gradients = []
    for model_class in (Evoformer, _NoGradBeforeTheLastPass):
        torch.manual_seed(0)
        model = model_class(config)
        loss = model(**batch_for(config, 2))
        gradients.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    assert model.passes == 3
    for ours, reference in zip(*gradients, strict=True):
        assert torch.equal(ours, reference)
