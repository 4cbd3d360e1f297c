"""The Evoformer of `openfold3`, if it is installed.

pip install --no-deps openfold3==0.5.0 ml_collections absl-py einops gemmi biotite biotraj 'rdkit<2026'
"""

import warnings

import pytest
import torch
from torch import Tensor, nn

from planloom.blocks import find_blocks
from planloom.blocks.segments import block_fingerprint
from planloom.capture import capture
from planloom.execute import Interpreter
from tests.torch.captured import of
from tests.torch.split_execution import Execution, even_dims

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about kernels that this machine lacks
    evoformer = pytest.importorskip("openfold3.core.model.latent.evoformer", reason="openfold3 is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SEQUENCES, RESIDUES, MSA, PAIR = 4, 8, 32, 16


class Folding(nn.Module):
    """A stack of three blocks and a loss of what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = evoformer.EvoformerStack(
            c_m=MSA,
            c_z=PAIR,
            c_hidden_msa_att=8,
            c_hidden_opm=8,
            c_hidden_mul=16,
            c_hidden_pair_att=8,
            c_s=32,
            no_heads_msa=4,
            no_heads_pair=4,
            no_blocks=3,
            transition_type="relu",
            transition_n=2,
            msa_dropout=0.0,
            pair_dropout=0.0,
            no_column_attention=False,
            opm_first=False,
            fuse_projection_weights=False,
            blocks_per_ckpt=None,
            inf=1e9,
            eps=1e-8,
        )

    def forward(self, m: Tensor, z: Tensor, msa_mask: Tensor, pair_mask: Tensor) -> Tensor:
        m, z, s = self.stack(m, z, msa_mask, pair_mask)
        return m.pow(2).mean() + z.pow(2).mean() + s.pow(2).mean()


def folding() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(3)
    model = Folding().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    batch = {
        "m": torch.randn(2, SEQUENCES, RESIDUES, MSA, dtype=torch.float64),
        "z": torch.randn(2, RESIDUES, RESIDUES, PAIR, dtype=torch.float64),
        "msa_mask": torch.ones(2, SEQUENCES, RESIDUES, dtype=torch.float64),
        "pair_mask": torch.ones(2, RESIDUES, RESIDUES, dtype=torch.float64),
    }
    return model, batch


def test_it_is_captured_interpreted_and_split() -> None:
    model, batch = folding()
    graph = capture(model, batch)
    expected = model(**batch)
    expected.backward()
    parameters = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters() if n in graph.parameters}
    loss = Interpreter(graph, dict(model.named_buffers()), torch.device("cpu"))(parameters, batch)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.allclose(parameters[name].grad, parameter.grad, rtol=1e-9, atol=1e-12), name
    execution = Execution(of(model, batch, find_blocks(graph)))
    for block in {block_fingerprint(execution.blocks, b): b for b in execution.blocks.blocks}.values():
        for dim in even_dims(block):
            execution.require_free_split(block, [dim])
