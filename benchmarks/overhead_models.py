"""The models of `runtime_overhead`, with the same initial weights and the same batch in every process."""

import importlib
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A GPT of the examples or a Llama of Hugging Face."""

    kind: Literal["gpt", "llama"]
    hidden: int
    inner: int = 0
    layers: int
    heads: int
    kv_heads: int = 0
    vocab: int
    batch: int
    seq: int


MODELS = {
    "gpt-tiny": Sizes(kind="gpt", hidden=64, layers=4, heads=4, vocab=256, batch=4, seq=32),
    "gpt-small": Sizes(kind="gpt", hidden=256, layers=4, heads=8, vocab=2048, batch=4, seq=128),
    "gpt-medium": Sizes(kind="gpt", hidden=512, layers=8, heads=8, vocab=4096, batch=4, seq=128),
    "llama-tiny": Sizes(kind="llama", hidden=64, inner=128, layers=4, heads=4, kv_heads=2, vocab=256, batch=4, seq=32),
    "llama-small": Sizes(
        kind="llama", hidden=256, inner=768, layers=6, heads=8, kv_heads=4, vocab=2048, batch=4, seq=128
    ),
    "llama-medium": Sizes(
        kind="llama", hidden=512, inner=1536, layers=8, heads=8, kv_heads=4, vocab=4096, batch=4, seq=128
    ),
    # Llama 3.2 1B and 3B with their vocabulary, of which input and output have a table each: 1.5 and 3.6 billion
    "llama-1b": Sizes(
        kind="llama", hidden=2048, inner=8192, layers=16, heads=32, kv_heads=8, vocab=128256, batch=4, seq=2048
    ),
    "llama-3b": Sizes(
        kind="llama", hidden=3072, inner=8192, layers=28, heads=24, kv_heads=8, vocab=128256, batch=2, seq=2048
    ),
}


def build(name: str, device: str = "cpu", *, num_ranks: int = 1) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model in training and the batch of so many ranks; on CUDA in bfloat16."""
    sizes, before = MODELS[name], torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    try:
        with torch.device(device):
            model = _gpt(sizes) if sizes.kind == "gpt" else _llama(sizes)
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(sizes.vocab, (num_ranks * sizes.batch, sizes.seq), generator=generator).to(device)
    key = "tokens" if sizes.kind == "gpt" else "input_ids"
    return model.train(), {key: tokens, "labels": tokens.clone()}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(**batch)
    found: Tensor = getattr(output, "loss", output)
    return found


def _gpt(sizes: Sizes) -> nn.Module:
    example: Any = importlib.import_module("examples.models.gpt")
    config = example.GPTConfig(
        num_layers=sizes.layers,
        hidden=sizes.hidden,
        num_heads=sizes.heads,
        num_kv_heads=sizes.heads,
        vocab=sizes.vocab,
        sequence=sizes.seq,
    )
    model: nn.Module = example.GPT(config)
    return model


def _llama(sizes: Sizes) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=sizes.seq,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model
