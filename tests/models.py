"""The models of the tests, built alike in every process: values depend on the name and dtype alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from examples.models.gpt import GPT, GPTConfig, batch_for, tiny
from planloom.capture.models.evoformer import Evoformer, EvoformerConfig
from planloom.capture.models.evoformer import batch_for as alignments_for


def gpt() -> tuple[nn.Module, dict[str, Tensor]]:
    return tiny()


def gpt_deep() -> tuple[nn.Module, dict[str, Tensor]]:
    """Four layers, so that there are segments that repeat: of two, cut anywhere but between them, one is left."""
    config = GPTConfig(num_layers=4, hidden=32)
    return GPT(config), batch_for(config, 8)


def llama_deep() -> tuple[nn.Module, dict[str, Tensor]]:
    return llama(num_layers=4, hidden=32)


def llama(num_layers: int = 2, hidden: int = 64) -> tuple[nn.Module, dict[str, Tensor]]:
    """An unchanged Hugging Face Llama with grouped queries; some labels are left out, unevenly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=128,
        max_position_embeddings=64,
        use_cache=False,
    )
    tokens = torch.randint(128, (8, 16), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[0, 3:] = -100
    labels[5, :9] = -100
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": labels}


def recycled() -> tuple[nn.Module, dict[str, Any]]:
    """An Evoformer of four blocks and three passes."""
    config = EvoformerConfig(
        num_blocks=4,
        num_sequences=4,
        num_residues=8,
        msa_channels=16,
        pair_channels=8,
        msa_heads=4,
        pair_heads=4,
        head_size=4,
        outer_channels=4,
        num_recycles=2,
    )
    return Evoformer(config), alignments_for(config, 8)


def gpt_wide() -> tuple[nn.Module, dict[str, Tensor]]:
    """Samples enough for chunks, also where an axis splits them."""
    config = GPTConfig(sequence=64)
    return GPT(config), batch_for(config, 8)


def gpt_long() -> tuple[nn.Module, dict[str, Tensor]]:
    """Activations are many times the parameters."""
    config = GPTConfig(hidden=32, vocab=64, sequence=512)
    return GPT(config), batch_for(config, 2)


def gpt_three_heads() -> tuple[nn.Module, dict[str, Tensor]]:
    """One long sample, and heads that two devices cannot share."""
    config = GPTConfig(num_layers=1, hidden=48, num_heads=3, num_kv_heads=3, vocab=64, sequence=512)
    return GPT(config), batch_for(config, 1)


def gpt_words() -> tuple[nn.Module, dict[str, Tensor]]:
    """Embedding and head are most of the work and of the parameters."""
    config = GPTConfig(hidden=32, vocab=2048, sequence=32)
    return GPT(config), batch_for(config, 8)


MODELS = {"recycled": recycled, "gpt": gpt, "gpt-deep": gpt_deep, "llama": llama, "llama-deep": llama_deep}
OF_VARIANTS = {"gpt-wide": gpt_wide, "gpt-long": gpt_long, "gpt-three-heads": gpt_three_heads, "gpt-words": gpt_words}
"""Each is one that a variant of the search is for."""


def build(name: str, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    """A model with random parameters (biases and norms too) that are the same in every process.

    Models of the zoo are named `zoo/…`, with dropout `zoo/…+dropout`; their experts run as eager PyTorch.
    """
    if name.startswith("zoo/"):
        return _from_zoo(name.removeprefix("zoo/"), dtype)
    torch.manual_seed(7)
    model, batch = {**MODELS, **OF_VARIANTS}[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model.to(dtype), batch


def _from_zoo(name: str, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    from tests.zoo import SMALL

    name, _, dropout = name.partition("+")
    model, batch = SMALL[name](dropout=0.25) if dropout else SMALL[name]()
    if hasattr(getattr(model, "config", None), "_experts_implementation"):
        model.set_experts_implementation("eager")
    floats = {key for key, value in batch.items() if isinstance(value, Tensor) and value.is_floating_point()}
    return model.to(dtype), {key: value.to(dtype) if key in floats else value for key, value in batch.items()}


class _Lift(TorchFunctionMode):
    """The model's own casts to float32 become casts to float64."""

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return function(*args, **kwargs)


@contextmanager
def lifted(dtype: torch.dtype) -> Iterator[None]:
    """In float64, lift casts to float32; in float32 do nothing."""
    if dtype == torch.float64:
        with _Lift():
            yield
    else:
        yield


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    output = model(**batch)
    return getattr(output, "loss", output)
