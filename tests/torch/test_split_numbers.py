"""What tests in float64 cannot see: norms over split features in short dtypes, and complex numbers."""

import pytest
import torch
from torch import Tensor, nn

from planloom.blocks import find_blocks
from planloom.capture import batch_spec, capture
from planloom.layout import Mesh
from planloom.plan import draft, named_plan, parse_named
from planloom.program import build_program, verify_program
from tests.emulation import Emulation


class Normed(nn.Module):
    """A norm of features with a large mean, between two linear maps."""

    def __init__(self, norm: nn.Module, mean: float) -> None:
        super().__init__()
        self.first, self.norm, self.second, self.mean = nn.Linear(16, 32), norm, nn.Linear(32, 16), mean

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x) + self.mean)).pow(2).mean()


def losses(model: nn.Module, x: Tensor) -> tuple[float, float]:
    """The loss of eager PyTorch, and with the features split over two devices through the norm."""
    blocks = find_blocks(capture(model, {"x": x}))
    written = draft(blocks, Mesh.of(range(2), tp=2), batch=batch_spec({"x": x}))
    for block in blocks.blocks:
        dim = "in" if block.name == "second" else "out" if block.name == "first" else "features"
        if any(d.name.split(".")[0] == dim for d in block.dims):
            written = written.split(block.name, **{dim: "tp"})
    program = build_program(blocks, written.plan("features"))
    verify_program(blocks, program)
    assert any("statistics" in block.name and block.dim("features") is not None for block in blocks.blocks)
    emulation = Emulation(blocks, program, {n: p.detach().clone() for n, p in model.named_parameters()}, {}, 0.05)
    emulation.run({"x": x})
    return float(model(x).detach()), float(emulation.results()["loss", 0, ""])


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize(
    ("dtype", "mean", "tolerance"),
    [
        (torch.bfloat16, 1.0, 0.01),
        (torch.bfloat16, 10.0, 0.01),
        (torch.float32, 100.0, 1e-5),
        (torch.float32, 1e3, 1e-4),
    ],
)
def test_norms_of_split_features(norm: type[nn.Module], dtype: torch.dtype, mean: float, tolerance: float) -> None:
    torch.manual_seed(0)
    model = Normed(norm(32), mean).to(dtype)
    eager, split = losses(model, torch.randn(8, 16).to(dtype))
    assert split == pytest.approx(eager, rel=tolerance)


class Rotary(nn.Module):
    """Positions as rotations of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.view_as_complex(self.first(x).unflatten(-1, (-1, 2)).contiguous())
        turn = torch.polar(torch.ones(8), torch.arange(8.0)).to(h.dtype)
        return self.second(torch.view_as_real(h * turn).flatten(-2)).pow(2).mean()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "dp=2,micro=2"])
def test_complex_numbers_have_gradients_under_a_plan(plan: str) -> None:
    torch.manual_seed(0)
    model, batch = Rotary().double(), {"x": torch.randn(8, 16, dtype=torch.float64)}
    blocks = find_blocks(capture(model, batch))
    program = build_program(blocks, named_plan(blocks, parse_named(plan), batch=batch_spec(batch)))
    verify_program(blocks, program)
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    emulation = Emulation(blocks, program, parameters, {}, 0.05)
    emulation.run(batch)
    model(**batch).backward()
    results = emulation.results()
    for name, parameter in model.named_parameters():
        box = next(p for p in program.stages[0].parameters if p.name == name).optimizer_layout
        if not box.split_digits:
            assert torch.allclose(results["gradient", 0, name].reshape(parameter.shape), parameter.grad), name
        else:
            assert ("gradient", 0, name) in results
