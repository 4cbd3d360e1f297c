"""Plans with a name of their own: read and written, refused with the reason, proven and equal to one device."""

import pytest
import torch

from planloom.capture import batch_spec
from planloom.errors import PlanError
from planloom.plan import FAMILIES, find_named, named_plan
from tests.dist.cases import captured
from tests.models import build
from tests.torch.equality import require_equal_to_one_device

CASES = [
    ("gpt", "megatron:tp=2,pp=2,dp=2,micro=2"),
    ("llama", "megatron:pp=2,micro=4,chunks=2"),
    ("llama", "fsdp:dp=4"),
    ("gpt", "hsdp"),
    ("llama", "atp"),
    ("gpt", "looped"),
    ("gpt", "zb:pp=2,tp=2,micro=4"),
    ("llama", "zb:pp=2,micro=4,v"),
    ("zoo/t5", "interlaced:pp=2,dp=2,micro=2"),
    ("zoo/qwen3_moe", "experts:ep=2,tp=2"),
    ("llama", "context:cp=2,dp=2"),
    ("gpt", "interlaced:pp=2,micro=2"),
    ("gpt", "atp:d1=2,d2=2,chunks=4"),
    ("llama", "coshard:tp=2,pieces=2"),
    ("zoo/swin", "coshard:tp=2,pieces=2"),
    ("zoo/t5", "coshard:dp=2,tp=2,pieces=2,no-recompute"),
    ("zoo/vit", "coshard:dp=2,pp=2,micro=2,pieces=2,samples"),
]


@pytest.mark.parametrize(("model", "text"), CASES)
def test_a_family_is_proven_and_equal_to_one_device(model: str, text: str) -> None:
    spec = batch_spec(build(model, torch.float64)[1])
    plan = named_plan(captured(model, torch.float64), find_named(text), batch=spec)
    require_equal_to_one_device(model, plan)


def test_every_family_is_tried() -> None:
    tried_in_test_recycling = {"3f1b", "dap"}
    assert {text.partition(":")[0] for _, text in CASES} | tried_in_test_recycling == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_name_is_written_as_it_is_read(name: str) -> None:
    family = FAMILIES[name]
    words = [f"{option}=3" if not isinstance(value, bool) else f"{'no-' * value}{option}"
             for option, value in family.options.items()]  # fmt: skip
    for text in (name, f"{name}:{','.join(words)}"):
        recipe = find_named(text)
        assert find_named(str(recipe)) == recipe


@pytest.mark.parametrize("text", ["megatron:tp=0", "megatron:tp", "megatron:dap=2", "megatron:no-tp", "megatron:v=1"])
def test_unknown_options_are_refused_with_those_there_are(text: str) -> None:
    with pytest.raises(PlanError, match=r"unknown option (.|\n)*required: megatron: .*tp=N.*sequence or no-sequence"):
        find_named(text)


def test_unknown_families_are_refused_with_those_there_are() -> None:
    with pytest.raises(PlanError, match=r"no plans are named 'deepspeed'(.|\n)*megatron"):
        find_named("deepspeed:dp=2")
