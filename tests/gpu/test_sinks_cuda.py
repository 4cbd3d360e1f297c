"""On a GPU: attention with sinks in each of its kernels equals the one written out, and GPT-OSS trains compiled."""

import pytest
import torch

from planloom.capture.sinks import sink_attention
from tests.gpu import test_compiled_cuda
from tests.torch.test_sinks import SCALE, written_out

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("window", [0, 8, 128])
@pytest.mark.parametrize("length", [40, 256])
@pytest.mark.parametrize(
    ("dtype", "is_masked", "error"),
    [
        (torch.bfloat16, False, 2e-2),  # flash attention
        (torch.bfloat16, True, 2e-2),  # the memory-efficient kernel
        (torch.float32, False, 2e-3),
        (torch.float32, True, 2e-3),
    ],
)
def test_each_kernel_equals_what_is_written_out(
    dtype: torch.dtype, is_masked: bool, error: float, length: int, window: int
) -> None:
    generator = torch.Generator(device="cuda").manual_seed(length + window)
    shapes = ((2, 8, length, 64), (2, 2, length, 64), (2, 2, length, 64), (8,))
    given = [torch.randn(shape, device="cuda", dtype=dtype, generator=generator).requires_grad_() for shape in shapes]
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    seen = torch.ones(length, length, dtype=torch.bool, device="cuda").tril()
    seen = seen.triu(1 - window) if window else seen
    how = (seen[None, None], False, 0) if is_masked else (None, True, window)
    found = sink_attention(*given[:3], how[0], given[3], how[1], how[2], SCALE)
    expected = written_out(*exact[:3], seen, exact[3])
    cotangent = torch.randn(expected.shape, device="cuda", dtype=dtype, generator=generator)
    ours = torch.autograd.grad(found, given, cotangent)
    theirs = torch.autograd.grad(expected, exact, cotangent.double())
    for one, other in zip((found, *ours), (expected, *theirs), strict=True):
        assert float((one.double() - other).detach().norm() / other.detach().norm()) <= error


def test_gpt_oss_compiled_equals_eager() -> None:
    test_compiled_cuda.test_compiled_steps_equal_eager_steps("zoo/gpt_oss", "tp=2,vocab")
