"""Small versions of the models that people train: `SMALL[name]()` is a model on the CPU in float32, and a batch.

Each has the fewest layers that show every pattern of its kind (a dense layer and one with experts, sliding and full
attention, shifted windows), and sizes that four divides wherever something may be split. Values depend on the name
alone, so all processes build alike; biases and norms are random too. Where a model has dropout,
`SMALL[name](dropout=0.1)` turns it on.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from examples.models import evoformer as evoformer_example
from examples.models import gpt as gpt_example
from examples.models import moe as moe_example

Built = tuple[nn.Module, dict[str, Any]]

BATCH, SEQ, VOCAB, NUM_CLASSES, IMAGE = 4, 16, 64, 8, 16
TEXT = {"vocab_size": VOCAB, "max_position_embeddings": 2 * SEQ, "use_cache": False}
DECODER = {
    **TEXT,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
}


def llama(dropout: float = 0.0) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _randomized(LlamaForCausalLM, LlamaConfig(**DECODER, attention_dropout=dropout)), _text()


def gpt2(dropout: float = 0.0) -> Built:
    """Tied embeddings; one linear map for queries, keys and values."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=2 * SEQ,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return _randomized(GPT2LMHeadModel, config), _text()


def qwen3(dropout: float = 0.0) -> Built:
    """Norms of queries and keys."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _randomized(Qwen3ForCausalLM, Qwen3Config(**DECODER, attention_dropout=dropout)), _text()


def gemma3(dropout: float = 0.0) -> Built:
    """A layer with a sliding window and one without; norms before and after."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        **DECODER,
        query_pre_attn_scalar=8,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        attention_dropout=dropout,
    )
    return _randomized(Gemma3ForCausalLM, config), _text()


def mixtral(dropout: float = 0.0) -> Built:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**DECODER, num_local_experts=4, num_experts_per_tok=2, attention_dropout=dropout)
    return _randomized(MixtralForCausalLM, config), _text()


def qwen3_moe(dropout: float = 0.0) -> Built:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **DECODER,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        attention_dropout=dropout,
    )
    return _randomized(Qwen3MoeForCausalLM, config), _text()


def deepseek_v3(dropout: float = 0.0) -> Built:
    """Latent attention; a dense layer, then one with a shared expert and experts in groups."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        **TEXT,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        num_mtp_layers=0,
        attention_dropout=dropout,
    )
    return _randomized(DeepseekV3ForCausalLM, config), _text()


def gpt_oss(dropout: float = 0.0) -> Built:
    """Sinks in attention, a sliding window in the first layer, experts with biases."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        **{**DECODER, "intermediate_size": 64},
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
        attention_dropout=dropout,
    )
    return _randomized(GptOssForCausalLM, config), _text()


def t5(dropout: float = 0.0) -> Built:
    """The position bias of the first layer serves all; the model itself shifts the labels for its decoder."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=dropout,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return _randomized(T5ForConditionalGeneration, config), _text()


def mbart(dropout: float = 0.0) -> Built:
    """The decoder's inputs are given, as data collators give them."""
    from transformers import MBartConfig, MBartForConditionalGeneration

    config = MBartConfig(
        **TEXT,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        dropout=dropout,
        attention_dropout=dropout,
        activation_dropout=dropout,
        scale_embedding=True,
    )
    batch = _text()
    batch["decoder_input_ids"] = _integers(VOCAB, BATCH, SEQ, seed=1)
    return _randomized(MBartForConditionalGeneration, config), batch


def bert(dropout: float = 0.0) -> Built:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        **TEXT,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return _randomized(BertForMaskedLM, config), _text()


def vit(dropout: float = 0.0) -> Built:
    """Sixteen patches and a class token: seventeen tokens, which nothing divides."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=IMAGE,
        patch_size=4,
        num_labels=NUM_CLASSES,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return _randomized(ViTForImageClassification, config), _images(IMAGE)


def _swin_settings(dropout: float) -> dict[str, Any]:
    """Two stages, 16 × 16 and 8 × 8 patches in windows of 4 × 4, which are shifted in the second layer of each."""
    return {
        "image_size": 2 * IMAGE,
        "patch_size": 2,
        "window_size": 4,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [4, 8],
        "num_labels": NUM_CLASSES,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "drop_path_rate": dropout,
    }


def swin(dropout: float = 0.0) -> Built:
    from transformers import SwinConfig, SwinForImageClassification

    return _randomized(SwinForImageClassification, SwinConfig(**_swin_settings(dropout))), _images(2 * IMAGE)


def swinv2(dropout: float = 0.0) -> Built:
    """Cosine attention, positions by a small network, norms after."""
    from transformers import Swinv2Config, Swinv2ForImageClassification

    return _randomized(Swinv2ForImageClassification, Swinv2Config(**_swin_settings(dropout))), _images(2 * IMAGE)


def clip(dropout: float = 0.0) -> Built:
    """Two encoders and the contrastive loss over all pairs of the batch; a text ends with the last word.

    Its batch holds a flag beside the tensors: without it the model returns no loss.
    """
    from transformers import CLIPConfig, CLIPModel

    shared = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "attention_dropout": dropout,
    }
    words = {"vocab_size": VOCAB, "max_position_embeddings": SEQ, "bos_token_id": 0, "eos_token_id": VOCAB - 1}
    config = CLIPConfig(
        text_config={**shared, **words},
        vision_config={**shared, "image_size": IMAGE, "patch_size": 4},
        projection_dim=32,
    )
    tokens = _integers(VOCAB - 1, BATCH, SEQ)
    tokens[:, -1] = VOCAB - 1
    batch = {"input_ids": tokens, "pixel_values": _images(IMAGE)["pixel_values"], "return_loss": True}
    return _randomized(CLIPModel, config), batch


def mamba2() -> Built:
    """Two chunks a sequence."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        state_size=8,
        n_groups=4,
        chunk_size=SEQ // 2,
        use_cache=False,
    )
    return _randomized(Mamba2ForCausalLM, config), _text()


def gpt() -> Built:
    return _with_random_values(gpt_example.tiny)


def gshard_moe() -> Built:
    return _with_random_values(moe_example.tiny)


def evoformer(dropout: float = 0.0) -> Built:
    return _with_random_values(lambda: evoformer_example.tiny(dropout))


SMALL: dict[str, Callable[..., Built]] = {
    function.__name__: function
    for function in (
        llama,
        gpt2,
        qwen3,
        gemma3,
        mixtral,
        qwen3_moe,
        deepseek_v3,
        gpt_oss,
        t5,
        mbart,
        bert,
        vit,
        swin,
        swinv2,
        clip,
        mamba2,
        gpt,
        gshard_moe,
        evoformer,
    )
}


def _randomized(model_class: Any, config: Any) -> nn.Module:
    return _with_random_values(lambda: (model_class(config), {}))[0]


def _with_random_values(build: Callable[[], Built]) -> Built:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model, batch = build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
    return model, batch


def _integers(below: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def _text() -> dict[str, Tensor]:
    """Random tokens, which are their own labels; some labels are left out, unevenly."""
    tokens = _integers(VOCAB, BATCH, SEQ)
    labels = tokens.clone()
    labels[0, 3:] = -100
    labels[2, :9] = -100
    return {"input_ids": tokens, "labels": labels}


def _images(size: int) -> dict[str, Tensor]:
    pixels = torch.randn((BATCH, 3, size, size), generator=torch.Generator().manual_seed(0))
    return {"pixel_values": pixels, "labels": _integers(NUM_CLASSES, BATCH)}
