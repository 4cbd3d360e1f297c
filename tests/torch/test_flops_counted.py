"""Operations of captured models against torch's own counter, which counts what eager execution calls."""

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from planloom.capture import capture
from planloom.graph.flops import graph_flops, training_flops
from tests.models import loss_of
from tests.zoo import SMALL

pytest.importorskip("transformers")

NAMES = ("llama", "gpt2", "gemma3", "t5", "mbart", "bert", "vit", "swin", "swinv2", "clip", "evoformer")
EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")
"""Not mamba2: for the backward of a convolution torch counts as if it had one group."""
FAST = ("gpt2", "vit", "mixtral")
ALL = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in (*NAMES, *EXPERTS)]


@pytest.mark.parametrize("name", ALL)
def test_forward_and_training_agree_with_torch(name: str) -> None:
    model, batch = SMALL[name]()
    graph = capture(model, batch)
    if name in EXPERTS:  # torch's counter does not know grouped products
        model.set_experts_implementation("eager")
    with sdpa_kernel(SDPBackend.MATH):  # the counter does not know the processor's fused attention
        with FlopCounterMode(display=False) as forward:
            loss = loss_of(model, batch)
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    assert graph_flops(graph) == forward.get_total_flops()
    assert training_flops(graph) == forward.get_total_flops() + backward.get_total_flops()
