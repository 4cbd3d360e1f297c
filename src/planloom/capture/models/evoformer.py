"""A compact Evoformer with recycling: the trunk of AlphaFold 2 in plain PyTorch.

Jumper et al., Highly accurate protein structure prediction with AlphaFold (2021), supplement: a multiple sequence
alignment (MSA) of shape [batch, sequences, residues] becomes an MSA representation m [b, s, r, c_m] and a pair
representation z [b, r, r, c_z]. A block (algorithm 6) updates both: row attention of m biased by z, column attention of
m, transition, outer product mean of m into z, triangle multiplications and triangle attentions of z, transition.

The whole trunk, with its embeddings, runs `num_recycles` + 1 times; the first row of m and z of a pass enter the next
one, cut from the graph of gradients: only the last pass is differentiated. The loss is that of masked MSA entries plus
that of binned distances (weights 2 and 0.3, equation 7 of the supplement). There are no templates, no extra MSA and no
structure module.

It is here, and not in `examples/`, so that the preset `evoformer` works from an installed package.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_TOKENS = 23  # 20 amino acids, unknown, gap, mask
MAX_OFFSET = 32  # residues further apart than this share one embedding of their relative position
NUM_DISTANCE_BINS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EvoformerConfig:
    """Sizes; the defaults are AlphaFold's, apart from dropout."""

    num_blocks: int = 48
    num_sequences: int = 128
    num_residues: int = 256
    msa_channels: int = 256
    pair_channels: int = 128
    msa_heads: int = 8
    pair_heads: int = 4
    head_size: int = 32
    outer_channels: int = 32
    transition_factor: int = 4
    num_recycles: int = 3
    msa_dropout: float = 0.0
    pair_dropout: float = 0.0


class GatedAttention(nn.Module):
    """Attention along rows, or along columns, gated, and biased by a pair representation where it has one.

    With m it is row attention (algorithm 7), or column attention without a bias (8); with z, which is its own bias,
    triangle attention around the starting node (13), along columns around the ending node (14). Only queries, keys and
    values are turned: norms and maps read x as it is.
    """

    def __init__(
        self, channels: int, heads: int, head_size: int, *, pair_channels: int | None, along_columns: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.head_size, self.along_columns = heads, head_size, along_columns
        self.norm = nn.LayerNorm(channels)
        self.query, self.key, self.value = (nn.Linear(channels, heads * head_size, bias=False) for _ in range(3))
        self.gate = nn.Linear(channels, heads * head_size)
        self.out = nn.Linear(heads * head_size, channels)
        self.bias = None
        if pair_channels is not None:
            self.pair_norm = nn.LayerNorm(pair_channels)
            self.bias = nn.Linear(pair_channels, heads, bias=False)

    def forward(self, x: Tensor, pair: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        q, k, v = (self._by_head(linear(x)) for linear in (self.query, self.key, self.value))
        logits = q @ k.transpose(-1, -2) * self.head_size**-0.5
        if self.bias is not None:
            assert pair is not None
            bias = self.bias(self.pair_norm(pair)).permute(0, 3, 1, 2)
            logits = logits + (bias.transpose(-1, -2) if self.along_columns else bias).unsqueeze(1)
        mixed = (torch.softmax(logits, dim=-1) @ v).permute(
            *((0, 3, 1, 2, 4) if self.along_columns else (0, 1, 3, 2, 4))
        )
        return self.out(torch.sigmoid(self.gate(x)) * mixed.flatten(-2))

    def _by_head(self, x: Tensor) -> Tensor:
        """[b, rows, n, heads · size] to [b, rows, heads, n, size]; [b, n, columns, …] to [b, columns, heads, n, size]."""
        x = x.unflatten(-1, (self.heads, self.head_size))
        return x.permute(*((0, 2, 3, 1, 4) if self.along_columns else (0, 1, 3, 2, 4)))


class Transition(nn.Module):
    """Algorithms 9 and 15."""

    def __init__(self, channels: int, factor: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.up, self.down = nn.Linear(channels, factor * channels), nn.Linear(factor * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.norm(x))))


class OuterProductMean(nn.Module):
    """Algorithm 10: from m to z, by the mean over sequences of outer products of features."""

    def __init__(self, msa_channels: int, pair_channels: int, outer_channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(msa_channels)
        self.left, self.right = (nn.Linear(msa_channels, outer_channels) for _ in range(2))
        self.out = nn.Linear(outer_channels * outer_channels, pair_channels)

    def forward(self, msa: Tensor) -> Tensor:
        msa = self.norm(msa)
        outer = torch.einsum("bsic,bsjd->bijcd", self.left(msa), self.right(msa)) / msa.shape[1]
        return self.out(outer.flatten(-2))


class TriangleMultiplication(nn.Module):
    """Algorithms 11 (outgoing edges) and 12 (incoming edges)."""

    def __init__(self, channels: int, *, outgoing: bool) -> None:
        super().__init__()
        self.equation = "bikc,bjkc->bijc" if outgoing else "bkic,bkjc->bijc"
        self.norm, self.norm_out = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.left, self.right, self.left_gate, self.right_gate = (nn.Linear(channels, channels) for _ in range(4))
        self.gate, self.out = nn.Linear(channels, channels), nn.Linear(channels, channels)

    def forward(self, pair: Tensor) -> Tensor:
        pair = self.norm(pair)
        left = torch.sigmoid(self.left_gate(pair)) * self.left(pair)
        right = torch.sigmoid(self.right_gate(pair)) * self.right(pair)
        updated = torch.einsum(self.equation, left, right)
        return torch.sigmoid(self.gate(pair)) * self.out(self.norm_out(updated))


class EvoformerBlock(nn.Module):
    """Algorithm 6. Dropout masks are shared along rows, or along columns where the operation goes along columns."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        c_m, c_z, size = config.msa_channels, config.pair_channels, config.head_size
        self.msa_dropout, self.pair_dropout = config.msa_dropout, config.pair_dropout
        self.row_attention = GatedAttention(c_m, config.msa_heads, size, pair_channels=c_z)
        self.column_attention = GatedAttention(c_m, config.msa_heads, size, pair_channels=None, along_columns=True)
        self.msa_transition = Transition(c_m, config.transition_factor)
        self.outer_product_mean = OuterProductMean(c_m, c_z, config.outer_channels)
        self.triangle_out = TriangleMultiplication(c_z, outgoing=True)
        self.triangle_in = TriangleMultiplication(c_z, outgoing=False)
        self.triangle_start = GatedAttention(c_z, config.pair_heads, size, pair_channels=c_z)
        self.triangle_end = GatedAttention(c_z, config.pair_heads, size, pair_channels=c_z, along_columns=True)
        self.pair_transition = Transition(c_z, config.transition_factor)

    def forward(self, msa: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        msa = msa + self._dropout(self.row_attention(msa, pair), self.msa_dropout, shared=1)
        msa = msa + self.column_attention(msa)
        msa = msa + self.msa_transition(msa)
        pair = pair + self.outer_product_mean(msa)
        pair = pair + self._dropout(self.triangle_out(pair), self.pair_dropout, shared=1)
        pair = pair + self._dropout(self.triangle_in(pair), self.pair_dropout, shared=1)
        pair = pair + self._dropout(self.triangle_start(pair, pair), self.pair_dropout, shared=1)
        pair = pair + self._dropout(self.triangle_end(pair, pair), self.pair_dropout, shared=2)
        return msa, pair + self.pair_transition(pair)

    def _dropout(self, x: Tensor, rate: float, *, shared: int) -> Tensor:
        if rate == 0.0 or not self.training:
            return x
        return x * F.dropout(torch.ones_like(x.narrow(shared, 0, 1)), rate)


class Evoformer(nn.Module):
    """Returns the loss of predicting `msa_labels` (-100 where nothing was masked) and `distances` (bins)."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        c_m, c_z = config.msa_channels, config.pair_channels
        self.num_recycles = config.num_recycles
        self.embed_msa, self.embed_target = nn.Embedding(NUM_TOKENS, c_m), nn.Embedding(NUM_TOKENS, c_m)
        self.embed_left, self.embed_right = nn.Embedding(NUM_TOKENS, c_z), nn.Embedding(NUM_TOKENS, c_z)
        self.embed_offset = nn.Embedding(2 * MAX_OFFSET + 1, c_z)
        self.norm_row, self.norm_pair = nn.LayerNorm(c_m), nn.LayerNorm(c_z)
        self.blocks = nn.ModuleList(EvoformerBlock(config) for _ in range(config.num_blocks))
        self.msa_head = nn.Linear(c_m, NUM_TOKENS)
        self.distance_head = nn.Linear(c_z, NUM_DISTANCE_BINS)

    def forward(self, msa: Tensor, msa_labels: Tensor, distances: Tensor) -> Tensor:
        before = None
        for _ in range(self.num_recycles):
            _, row, pair = self._pass(msa, before)
            before = row.detach(), pair.detach()
        last, _, pair = self._pass(msa, before)
        distance_logits = self.distance_head(pair + pair.transpose(1, 2))
        msa_loss = F.cross_entropy(self.msa_head(last).flatten(0, 2), msa_labels.flatten())
        distance_loss = F.cross_entropy(distance_logits.flatten(0, 2), distances.flatten())
        return 2.0 * msa_loss + 0.3 * distance_loss

    def _embed(self, msa: Tensor) -> tuple[Tensor, Tensor]:
        """Algorithms 3 and 4; the first sequence is the target."""
        target = msa[:, 0]
        positions = torch.arange(msa.shape[2], device=msa.device)
        offsets = (positions[:, None] - positions[None, :]).clamp(-MAX_OFFSET, MAX_OFFSET) + MAX_OFFSET
        pair = self.embed_left(target).unsqueeze(2) + self.embed_right(target).unsqueeze(1)
        return self.embed_msa(msa) + self.embed_target(target).unsqueeze(1), pair + self.embed_offset(offsets)

    def _pass(self, msa: Tensor, before: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """One pass over all blocks, from what the pass before it left (algorithm 32, without positions).

        Each pass embeds anew, as AlphaFold's iterations do: a pass that is not differentiated is so as a whole. The row
        is added and taken through a mask, because a slice of one sequence cannot be split over devices.
        """
        m, z = self._embed(msa)
        row, pair = (torch.zeros_like(m[:, 0]), torch.zeros_like(z)) if before is None else before
        is_first = (torch.arange(m.shape[1], device=m.device) == 0).to(m.dtype)[:, None, None]
        m = m + is_first * self.norm_row(row).unsqueeze(1)
        z = z + self.norm_pair(pair)
        for block in self.blocks:
            m, z = block(m, z)
        return m, (is_first * m).sum(dim=1), z


def batch_for(config: EvoformerConfig, batch: int, *, seed: int = 0) -> dict[str, Tensor]:
    """Random alignments with 15 % of the entries masked, and random distances."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, config.num_sequences, config.num_residues)
    true = torch.randint(NUM_TOKENS - 1, shape, generator=generator)
    masked = torch.rand(shape, generator=generator) < 0.15
    distances = torch.randint(NUM_DISTANCE_BINS, (batch, shape[2], shape[2]), generator=generator)
    return {
        "msa": true.masked_fill(masked, NUM_TOKENS - 1),
        "msa_labels": true.masked_fill(~masked, -100),
        "distances": distances,
    }
