"""Every plan with a name of its own on real processes, four and eight of them: it trains like one device."""

import pytest
import torch

from planloom.plan import FAMILIES, find_named
from tests.dist.cases import reference, require_equal, train
from tests.dist.workers import Pool

TRIED = [
    ("gpt", "megatron:tp=2,pp=2,micro=4"),
    pytest.param("gpt", "megatron:tp=2,pp=2,dp=2,micro=2", marks=pytest.mark.slow),
    pytest.param("llama-deep", "megatron:pp=4,tp=2,micro=8,recompute", marks=pytest.mark.slow),
    pytest.param("llama-deep", "megatron:pp=4,micro=4,chunks=2", marks=pytest.mark.slow),
    pytest.param("llama", "fsdp:dp=4", marks=pytest.mark.slow),
    pytest.param("gpt", "hsdp:replicas=2,shards=2", marks=pytest.mark.slow),
    pytest.param("llama", "atp:d1=2,d2=2", marks=pytest.mark.slow),
    pytest.param("gpt", "atp:d1=2,d2=2,chunks=4", marks=pytest.mark.slow),
    pytest.param("llama", "atp:dp=2,d1=2,d2=2", marks=pytest.mark.slow),
    pytest.param("zoo/qwen3_moe", "experts:ep=2,tp=2", marks=pytest.mark.slow),
    pytest.param("gpt-deep", "looped:pp=4,dp=2,micro=4", marks=pytest.mark.slow),
    pytest.param("gpt-deep", "zb:pp=4,micro=8", marks=pytest.mark.slow),
    pytest.param("llama-deep", "zb:pp=4,tp=2,micro=4,v", marks=pytest.mark.slow),
    pytest.param("zoo/swin", "coshard:tp=2,dp=2,pieces=2", marks=pytest.mark.slow),
    pytest.param("llama-deep", "coshard:pp=4,micro=2,pieces=2", marks=pytest.mark.slow),
    pytest.param("zoo/t5", "coshard:dp=2,tp=2,pieces=2,no-recompute", marks=pytest.mark.slow),
    pytest.param("llama", "context:cp=2,dp=2", marks=pytest.mark.slow),
    pytest.param("zoo/t5", "interlaced:pp=4,micro=4", marks=pytest.mark.slow),
    pytest.param("zoo/mbart", "interlaced:pp=2,tp=2,dp=2,micro=2", marks=pytest.mark.slow),
    pytest.param("recycled", "3f1b:pp=4,micro=8", marks=pytest.mark.slow),
    pytest.param("recycled", "3f1b:pp=4,dp=2,micro=4", marks=pytest.mark.slow),
    pytest.param("recycled", "dap:dap=4", marks=pytest.mark.slow),
    pytest.param("recycled", "dap:dap=2,dp=2,zero1", marks=pytest.mark.slow),
]
CASES = [tuple(getattr(case, "values", case)) for case in TRIED]


@pytest.mark.parametrize(("model", "text"), TRIED)
def test_gradients_and_parameters_in_float64(pools: dict[int, Pool], model: str, text: str) -> None:
    results = pools[find_named(text).num_devices].run(train, model, text, torch.float64, "sgd", 2)
    require_equal(results, reference(model, torch.float64, "sgd", 2))


def test_every_family_is_tried_on_four_processes_or_more() -> None:
    assert {text.partition(":")[0] for _, text in CASES} == set(FAMILIES)
    assert {find_named(text).num_devices for _, text in CASES} == {4, 8}
