"""The Evoformer of AlphaFold 2, compact and with recycling; the model itself is in `planloom.capture.models.evoformer`.

planloom plan examples/models/evoformer.py:small --cluster two-by-two
"""

from torch import Tensor, nn

from planloom.capture.models.evoformer import Evoformer, EvoformerConfig, batch_for


def tiny(dropout: float = 0.0) -> tuple[nn.Module, dict[str, Tensor]]:
    """Two blocks and one recycling, for tests."""
    config = EvoformerConfig(
        num_blocks=2,
        num_sequences=4,
        num_residues=8,
        msa_channels=32,
        pair_channels=16,
        msa_heads=4,
        pair_heads=4,
        head_size=8,
        outer_channels=8,
        num_recycles=1,
        msa_dropout=dropout,
        pair_dropout=dropout,
    )
    return Evoformer(config), batch_for(config, 4)


def small() -> tuple[nn.Module, dict[str, Tensor]]:
    """Four blocks and one recycling, for the demo."""
    config = EvoformerConfig(
        num_blocks=4,
        num_sequences=16,
        num_residues=32,
        msa_channels=64,
        pair_channels=32,
        msa_heads=4,
        pair_heads=4,
        head_size=16,
        outer_channels=16,
        num_recycles=1,
    )
    return Evoformer(config), batch_for(config, 8)
