"""The settings of `prediction_gpu`: four layers of a width, with embedding and head, under a plan, one rank of it.

Widths are those of Llama 3.2 1B and 3B, Llama 3 8B, GPT-2 XL, GPT-3 2.7B (Brown et al. 2020, table 2.1) and of a
Mixtral of half the width. Vocabularies are smaller than Llama 3's and multiples of 64, so that layers, not the head,
decide; two settings have Llama 3's.
"""

from dataclasses import dataclass

LAYERS = 4

_LLAMA = "llama3-8b?num_hidden_layers=4&vocab_size=32000&max_position_embeddings=8192"
_WIDTHS = {
    "llama-1b": f"{_LLAMA}&hidden_size=2048&intermediate_size=8192&num_attention_heads=32&head_dim=64",
    "llama-3b": f"{_LLAMA}&hidden_size=3072&intermediate_size=8192&num_attention_heads=24&head_dim=128",
    "llama-8b": _LLAMA,
    "llama-8b-128k": _LLAMA.replace("vocab_size=32000", "vocab_size=128256"),
    "gpt2-xl": "gpt2-xl?n_layer=4&vocab_size=50304&resid_pdrop=0.0&embd_pdrop=0.0&attn_pdrop=0.0",
    "gpt-2.7b": "gpt2-xl?n_layer=4&n_embd=2560&n_head=32&n_positions=2048&vocab_size=50304"
    "&resid_pdrop=0.0&embd_pdrop=0.0&attn_pdrop=0.0",
    "moe-8x": "mixtral-8x7b?num_hidden_layers=4&hidden_size=2048&intermediate_size=7168&num_attention_heads=16"
    "&num_key_value_heads=4&head_dim=128&num_local_experts=8",
    "moe-4x": "mixtral-8x7b?num_hidden_layers=4&hidden_size=2048&intermediate_size=7168&num_attention_heads=16"
    "&num_key_value_heads=4&head_dim=128&num_local_experts=4",
    # tiny, to try the benchmark on a CPU
    "tiny-llama": "llama3-8b?num_hidden_layers=4&vocab_size=256&hidden_size=64&intermediate_size=128"
    "&num_attention_heads=4&num_key_value_heads=2&head_dim=16",
    "tiny-gpt": "gpt2-xl?n_layer=4&n_embd=64&n_head=4&vocab_size=256&resid_pdrop=0.0&embd_pdrop=0.0&attn_pdrop=0.0",
    "tiny-moe": "mixtral-8x7b?num_hidden_layers=4&vocab_size=256&hidden_size=64&intermediate_size=128"
    "&num_attention_heads=4&num_key_value_heads=2&head_dim=16&num_local_experts=4",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A model of four layers, its batch, and the plan of which one rank runs."""

    width: str
    batch: int
    seq: int
    plan: str = "single"
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"{self.width} {self.batch}×{self.seq} {self.plan}"

    @property
    def source(self) -> str:
        """As `load_model` takes it."""
        return f"{_WIDTHS[self.width]}&batch={self.batch}&seq={self.seq}&dtype={self.dtype}"


def _setting(width: str, batch: int, seq: int, plan: str = "single") -> Setting:
    dtype = "float32" if width.startswith("tiny") else "bfloat16"
    return Setting(width=width, batch=batch, seq=seq, plan=plan, dtype=dtype)


# The first twenty are the most different ones: what does not fit into the time is at the end.
SETTINGS = (
    _setting("llama-8b", 2, 2048),
    _setting("llama-8b", 4, 4096, "tp=4"),
    _setting("gpt-2.7b", 4, 2048),
    _setting("moe-8x", 2, 2048),
    _setting("llama-1b", 4, 2048),
    _setting("llama-3b", 2, 4096),
    _setting("llama-8b", 1, 8192),
    _setting("gpt2-xl", 8, 1024),
    _setting("llama-3b", 4, 4096, "tp=2,vocab"),
    _setting("llama-8b", 8, 4096, "tp=8,vocab"),
    _setting("llama-1b", 8, 2048),
    _setting("moe-4x", 4, 2048),
    _setting("gpt-2.7b", 8, 2048, "tp=2"),
    _setting("llama-1b", 2, 8192),
    _setting("llama-8b", 4, 2048),
    _setting("llama-3b", 4, 2048),
    _setting("gpt2-xl", 16, 1024),
    _setting("llama-8b", 4, 2048, "tp=2"),
    _setting("gpt-2.7b", 8, 2048, "tp=4,vocab"),
    _setting("llama-1b", 8, 4096, "tp=2"),
    _setting("llama-8b-128k", 2, 2048),
    _setting("llama-3b", 8, 2048, "tp=4"),
    _setting("moe-8x", 4, 2048),
    _setting("llama-8b-128k", 4, 4096, "tp=8,vocab"),
)
QUICK_SETTINGS = (SETTINGS[0], SETTINGS[1], SETTINGS[2], SETTINGS[3])
TINY_SETTINGS = (
    _setting("tiny-llama", 2, 64),
    _setting("tiny-llama", 4, 64, "tp=2,vocab"),
    _setting("tiny-gpt", 2, 64),
    _setting("tiny-moe", 2, 64),
)
