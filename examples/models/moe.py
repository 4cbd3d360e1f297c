"""A mixture-of-experts transformer as in GShard: groups of tokens, top-2 gating, expert capacity. Plain PyTorch.

Lepikhin et al., GShard (arXiv:2006.16668), algorithm 1 without its random choices. A group's tokens are sent to experts
by a one-hot mask [group, token, expert, capacity] and brought back by the same mask times the gates, both by einsum; a
token that finds its expert full is dropped there. Shapes are static.

planloom plan examples/models/moe.py:small --cluster two-by-two
"""

from dataclasses import dataclass
from math import ceil

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class MoEConfig:
    num_layers: int = 2
    hidden: int = 32
    num_heads: int = 4
    vocab: int = 64
    sequence: int = 16
    num_experts: int = 4
    group_size: int = 16  # tokens
    capacity_factor: float = 1.0
    auxiliary_weight: float = 0.01

    @property
    def capacity(self) -> int:
        """Tokens of a group that one expert takes: two choices a token, spread evenly, rounded up to multiples of 4."""
        return 4 * ceil(2 * self.capacity_factor * self.group_size / self.num_experts / 4)


class Attention(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(config.hidden, config.hidden) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(config.hidden, 4 * config.hidden), nn.Linear(4 * config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


def one_hot(index: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """All zeros where the index is not below the size: this is how tokens beyond the capacity are dropped."""
    return (index.unsqueeze(-1) == torch.arange(size, device=index.device)).to(dtype)


class Experts(nn.Module):
    """The feed-forward layers of all experts and the gate that sends every token to two of them."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.num_experts, self.capacity, self.group_size = config.num_experts, config.capacity, config.group_size
        self.gate = nn.Linear(config.hidden, config.num_experts, bias=False)
        self.up = nn.Parameter(torch.empty(config.num_experts, config.hidden, 4 * config.hidden))
        self.down = nn.Parameter(torch.empty(config.num_experts, 4 * config.hidden, config.hidden))
        nn.init.normal_(self.up, std=config.hidden**-0.5)
        nn.init.normal_(self.down, std=(4 * config.hidden) ** -0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's output and its auxiliary loss."""
        batch, sequence, hidden = x.shape
        grouped = x.reshape(-1, self.group_size, hidden)
        combine, dispatch, auxiliary = self.route(grouped)
        sent = torch.einsum("gsec,gsm->egcm", dispatch, grouped)
        inner = F.relu(torch.einsum("egcm,emh->egch", sent, self.up))
        out = torch.einsum("egch,ehm->egcm", inner, self.down)
        return torch.einsum("gsec,egcm->gsm", combine, out).reshape(batch, sequence, hidden), auxiliary

    def route(self, grouped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The masks [group, token, expert, capacity] that combine and dispatch, and the auxiliary loss."""
        gates = torch.softmax(self.gate(grouped), dim=-1)
        first = one_hot(gates.argmax(dim=-1), self.num_experts, gates.dtype)
        second = one_hot((gates - 2 * first).argmax(dim=-1), self.num_experts, gates.dtype)
        auxiliary = (first.mean(dim=1) * gates.mean(dim=1)).sum(dim=-1).mean() * self.num_experts
        # Places are given in the order of tokens; all first choices come before all second ones.
        first_place = ((first.cumsum(dim=1) - 1) * first).sum(dim=-1)
        second_place = ((second.cumsum(dim=1) - 1 + first.sum(dim=1, keepdim=True)) * second).sum(dim=-1)
        first_gate, second_gate = (gates * first).sum(dim=-1), (gates * second).sum(dim=-1)
        total = first_gate + second_gate
        first_mask, second_mask = (
            chosen.unsqueeze(-1) * one_hot(place, self.capacity, gates.dtype).unsqueeze(-2)
            for chosen, place in ((first, first_place), (second, second_place))
        )
        combine = (first_gate / total)[..., None, None] * first_mask + (second_gate / total)[
            ..., None, None
        ] * second_mask
        return combine, first_mask + second_mask, auxiliary


class Layer(nn.Module):
    """Every other layer has experts."""

    def __init__(self, config: MoEConfig, index: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.hidden), nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.has_experts = index % 2 == 1
        self.feed_forward = Experts(config) if self.has_experts else FeedForward(config)

    def forward(self, x: Tensor, auxiliary: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm1(x))
        if not self.has_experts:
            return x + self.feed_forward(self.norm2(x)), auxiliary
        out, added = self.feed_forward(self.norm2(x))
        return x + out, auxiliary + added


class MoE(nn.Module):
    """Returns the mean loss of predicting `labels` plus the weighted auxiliary loss; labels of -100 are left out."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.auxiliary_weight = config.auxiliary_weight
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.position = nn.Embedding(config.sequence, config.hidden)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        auxiliary = torch.zeros((), dtype=x.dtype, device=x.device)
        for layer in self.layers:
            x, auxiliary = layer(x, auxiliary)
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
        return loss + self.auxiliary_weight * auxiliary


def batch_for(config: MoEConfig, batch: int, *, seed: int = 0) -> dict[str, Tensor]:
    """Random tokens and the tokens that follow them; the last label of each sequence is left out."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab, (batch, config.sequence), generator=generator)
    labels = torch.cat([tokens[:, 1:], torch.full((batch, 1), -100)], dim=1)
    return {"tokens": tokens, "labels": labels}


def tiny() -> tuple[nn.Module, dict[str, Tensor]]:
    """One dense layer and one with four experts, for tests."""
    config = MoEConfig()
    return MoE(config), batch_for(config, 4)


def small() -> tuple[nn.Module, dict[str, Tensor]]:
    """Four layers, two of them with eight experts, 11 million parameters, for the demo."""
    config = MoEConfig(num_layers=4, hidden=256, num_heads=8, vocab=1024, sequence=128, num_experts=8, group_size=128)
    return MoE(config), batch_for(config, 16)
