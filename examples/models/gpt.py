"""A small GPT: fused queries, keys and values, grouped queries, tied embeddings, dropout. Plain PyTorch.

planloom plan examples/models/gpt.py:small --cluster two-by-two
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTConfig:
    num_layers: int = 2
    hidden: int = 64
    num_heads: int = 8
    num_kv_heads: int = 4
    vocab: int = 128
    sequence: int = 16
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal attention with grouped queries; one linear map for queries, keys and values."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.kv_heads, self.group = config.num_kv_heads, config.num_heads // config.num_kv_heads
        self.size = config.hidden // config.num_heads
        self.qkv = nn.Linear(config.hidden, (self.group + 2) * self.kv_heads * self.size)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        fused = self.qkv(x).view(batch, sequence, self.group + 2, self.kv_heads, self.size)
        q, k, v = fused.split([self.group, 1, 1], dim=2)
        q = q.permute(0, 3, 2, 1, 4).reshape(batch, self.kv_heads * self.group, sequence, self.size)
        k, v = (t.squeeze(2).transpose(1, 2) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, sequence, hidden))


class Layer(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.hidden), nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.up, self.down = nn.Linear(config.hidden, 4 * config.hidden), nn.Linear(4 * config.hidden, config.hidden)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Returns the mean loss of predicting `labels`; labels of -100 are left out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.position = nn.Embedding(config.sequence, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.position(positions)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch_for(config: GPTConfig, batch: int, *, seed: int = 0) -> dict[str, Tensor]:
    """Random tokens and the tokens that follow them; the last label of each sequence is left out."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab, (batch, config.sequence), generator=generator)
    labels = torch.cat([tokens[:, 1:], torch.full((batch, 1), -100)], dim=1)
    return {"tokens": tokens, "labels": labels}


def tiny() -> tuple[nn.Module, dict[str, Tensor]]:
    """Two layers, for tests."""
    config = GPTConfig()
    return GPT(config), batch_for(config, 8)


def small() -> tuple[nn.Module, dict[str, Tensor]]:
    """Four layers, 3.2 million parameters and dropout, for the demo."""
    config = GPTConfig(num_layers=4, hidden=256, num_heads=8, num_kv_heads=4, vocab=1024, sequence=128, dropout=0.1)
    return GPT(config), batch_for(config, 16)
