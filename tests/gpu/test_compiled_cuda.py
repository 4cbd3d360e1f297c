"""On a GPU: compiled runs compute what runs one operator at a time compute, on torch's own kernels."""

import pytest
import torch

from planloom.blocks import find_blocks
from planloom.capture import batch_spec, capture
from planloom.execute.compiled import CompiledRuns
from planloom.execute.silent import SilentWire
from planloom.plan import named_plan, parse_named
from planloom.program import build_program
from planloom.train.runtime import Runtime
from tests.models import build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _sgd(tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=0.05)


@pytest.mark.parametrize(
    ("model", "plan"),
    [("gpt", "micro=2"), ("llama", "tp=2,vocab"), ("llama", "dp=2,zero3"), ("zoo/gpt2+dropout", "single")],
)
def test_compiled_steps_equal_eager_steps(model: str, plan: str) -> None:
    """One rank on a silent wire: values are not those of training, and the same with and without the compiler.

    Parameters of ZeRO-3 are freed after the forward and gathered again into the same storage, where the compiled
    backward must find them.
    """
    device = torch.device("cuda")
    built, batch = build(model, torch.float32)
    built = built.to(device)
    batch = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    blocks = find_blocks(capture(built, batch))
    program = build_program(blocks, named_plan(blocks, parse_named(plan), batch=batch_spec(batch)))
    held = {**dict(built.named_parameters()), **dict(built.named_buffers())}
    known = {name: held[name] for name in blocks.graph.parameters}
    fixed = {name: held[name].detach() for name in blocks.graph.buffers}
    losses, gradients, runs = [], [], CompiledRuns()
    for is_compiled in (False, True):
        more = {"make_local": runs.compile} if is_compiled else {}
        runtime = Runtime(blocks, program, 0, known, fixed, _sgd, SilentWire(0), **more)
        runtime.keep_gradients = True
        losses.append([float(runtime.step(batch)) for _ in range(2)])
        gradients.append({name: gradient.clone() for name, gradient in runtime.gradients.items()})
    assert runs.num_compilations == runs.num_structures
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    for name, expected in gradients[0].items():
        scale = max(float(expected.abs().max()), 1e-3)
        assert float((gradients[1][name] - expected).abs().max()) <= 2e-3 * scale, name  # products may use tf32
