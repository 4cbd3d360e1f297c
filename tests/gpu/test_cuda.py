"""On a GPU: the graph is the same, and training equals eager PyTorch on the same device.

NCCL refuses two ranks on one GPU; gloo carries CUDA tensors there, so several ranks share one.
"""

import copy

import pytest
import torch

from planloom.blocks import find_blocks
from planloom.capture import batch_spec, capture
from planloom.capture.experts import grouped_linear
from planloom.execute.random import dropout
from planloom.graph import fingerprint
from planloom.plan import named_plan, parse_named
from planloom.train import parallelize
from tests.dist.workers import Pool
from tests.models import build, lifted, loss_of
from tests.zoo import SMALL

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("name", ["gpt", "llama", *(f"zoo/{name}" for name in SMALL)])
def test_the_graph_does_not_depend_on_the_device(name: str) -> None:
    model, batch = build(name, torch.float32)
    on_cpu = fingerprint(capture(model, batch))
    model, batch = build(name, torch.float32)
    assert fingerprint(capture(model.cuda(), batch)) == on_cpu


def train(rank: int, name: str, plan_name: str) -> tuple[list[float], list[float], float]:
    """Losses under a plan, losses of eager training, and the largest difference of a parameter afterwards."""
    device = torch.device("cuda")
    model, batch = build(name, torch.float64)
    batch = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    with lifted(torch.float64):
        blocks = find_blocks(capture(model.to(device), batch))
    plan = named_plan(blocks, parse_named(plan_name), batch=batch_spec(batch))
    eager_model = copy.deepcopy(model)  # the trainer takes the parameters of the model that it is given
    trainer = parallelize(model, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.05), blocks=blocks)
    losses = [trainer.step(batch) for _ in range(3)]
    parameters = trainer.parameters()
    trainer.close()
    optimizer, expected = torch.optim.SGD(eager_model.parameters(), lr=0.05), []
    with lifted(torch.float64):
        for _ in range(3):
            optimizer.zero_grad()
            loss = loss_of(eager_model, batch)
            loss.backward()
            optimizer.step()
            expected.append(float(loss.detach()))
    eager = dict(eager_model.named_parameters())
    return losses, expected, max(float((p - eager[n].detach()).abs().max()) for n, p in parameters.items())


@pytest.mark.parametrize("name", ["gpt", "llama", "zoo/mixtral", "zoo/swin"])
@pytest.mark.parametrize("plan", ["single", "micro=2", "dp=2", "tp=2,vocab", "dp=2,zero3", "tp=2,sequence"])
def test_training_equals_eager(name: str, plan: str, gpu_pools: dict[int, Pool]) -> None:
    for losses, expected, error in gpu_pools[parse_named(plan).num_devices].run(train, name, plan):
        assert losses == pytest.approx(expected, rel=1e-10)
        assert error <= 1e-10


def test_dropout_draws_the_same_numbers_on_a_gpu() -> None:
    x, state = torch.ones(64, 48, dtype=torch.float64), torch.tensor([5, 7])
    assert torch.equal(dropout(x, 0.3, 2, state), dropout(x.cuda(), 0.3, 2, state.cuda()).cpu())


def test_experts_in_bfloat16_use_one_grouped_product() -> None:
    """Rows, mask and weights on the GPU: the grouped kernel gives what the products one by one give."""
    torch.manual_seed(0)
    mask = torch.rand(8, 256) < 0.25
    rows = torch.randn(1, int(mask.sum()), 64).bfloat16()
    weight = torch.randn(8, 96, 64).bfloat16()
    expected = grouped_linear(rows.float(), weight.float(), mask, False)
    found = grouped_linear(rows.cuda(), weight.cuda(), mask.cuda(), False).float().cpu()
    assert float((found - expected).abs().max()) <= 0.02 * float(expected.abs().max())


@pytest.mark.parametrize("plan", ["dp=2,experts", "dp=2,experts,zero1,micro=2"])
def test_expert_parallel_equals_eager(plan: str, gpu_pools: dict[int, Pool]) -> None:
    for losses, expected, error in gpu_pools[2].run(train, "zoo/mixtral", plan):
        assert losses == pytest.approx(expected, rel=1e-10)
        assert error <= 1e-10
