"""Blocks: what is grouped, and by execution that a split of any of their dims needs no communication."""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planloom.blocks import BlockGraph, find_blocks, find_segments
from planloom.blocks.segments import block_fingerprint
from planloom.capture import batch_spec, capture
from planloom.layout import Mesh
from planloom.plan import draft
from tests.models import MODELS
from tests.pure.tiny_graph import tiny_graph
from tests.torch.captured import captured, of
from tests.torch.split_execution import Execution, even_dims

# Of the Evoformer some sizes are odd; it is split along its even dims in `test_zoo`.
BOTH = pytest.mark.parametrize("model", [name for name in MODELS if name != "recycled"])


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors are tiny here: several threads only wait for each other."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@cache
def deep_llama(num_layers: int) -> BlockGraph:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        use_cache=False,
    )
    tokens = torch.zeros(4, 8, dtype=torch.long)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    return find_blocks(capture(model, {"input_ids": tokens, "labels": tokens}))


# --- grouping --------------------------------------------------------------------------------------------------------


def test_a_llama_layer_is_thirteen_blocks() -> None:
    blocks = captured("llama", torch.float64).blocks
    layer = "model.layers.1."
    assert [block.name for block in blocks.blocks if block.name.startswith(layer)] == [
        f"{layer}{name}"
        for name in (
            "input_layernorm:statistics",
            "input_layernorm:apply",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn:attention",
            "self_attn.o_proj",
            "post_attention_layernorm:statistics",
            "post_attention_layernorm:apply",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp:apply",
            "mlp.down_proj",
        )
    ]


def test_a_gpt_layer_keeps_the_fused_map_apart_from_attention() -> None:
    blocks = captured("gpt", torch.float64).blocks
    names = [block.name for block in blocks.blocks]
    assert names[:2] == ["embed", "position"]
    assert names[-5:] == ["head", "loss:max", "loss:statistics", "loss:pick", "loss"]
    assert [name.removeprefix("layers.1") for name in names if name.startswith("layers.1")] == [
        ".norm1:statistics",
        ".norm1:statistics#2",
        ".norm1:apply",
        ".attention.qkv",
        ".attention:apply",
        ".attention:attention",
        ".attention.out",
        ".norm2:statistics",
        ".norm2:statistics#2",
        ".norm2:apply",
        ".up",
        ":apply",
        ".down",
    ]


@BOTH
def test_every_operator_is_in_one_block(model: str) -> None:
    blocks = captured(model, torch.float64).blocks
    assert sorted(i for block in blocks.blocks for i in block.ops) == list(range(len(blocks.graph.ops)))
    assert [block.index for block in blocks.blocks] == list(range(len(blocks.blocks)))
    assert len({block.name for block in blocks.blocks}) == len(blocks.blocks)


@BOTH
def test_producers_come_first_and_boundaries_are_complete(model: str) -> None:
    blocks = captured(model, torch.float64).blocks
    graph, made = blocks.graph, set()
    for block in blocks.blocks:
        assert made.issuperset(block.inputs), block.name
        inside = {name for i in block.ops for name in graph.ops[i].outputs}
        read = {name for i in block.ops for name in graph.ops[i].inputs} - inside
        assert read == {*block.inputs, *block.parameters, *block.given}
        assert set(block.parameters) <= set(graph.parameters)
        assert set(block.given) <= graph.given_names
        others = {name for i, op in enumerate(graph.ops) if i not in block.ops for name in op.inputs}
        assert set(block.outputs) == inside & {*others, graph.loss}
        made.update(block.outputs)


@BOTH
def test_maps_split_along_what_goes_in_and_out(model: str) -> None:
    blocks = captured(model, torch.float64).blocks
    for block in blocks.blocks:
        ops = [blocks.graph.ops[i] for i in block.ops]
        kinds = {dim.name.split(".")[0] for dim in block.dims}
        if ops[0].target == "aten.linear.default":
            assert {"batch", "sequence", "in", "out"} <= kinds, block.name
        if any(op.target == "aten.scaled_dot_product_attention.default" for op in ops):
            assert {"batch", "heads"} <= kinds, block.name


def test_a_map_that_reads_features_contracts_in() -> None:
    first = find_blocks(tiny_graph(sequence=())).blocks[0]
    assert [dim.name for dim in first.dims] == ["batch", "in", "out"]


class Positions(nn.Module):
    """Tokens [4, 6] and their positions [6], which no batch has a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(8, 2), nn.Embedding(6, 2)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        return (self.tokens(x) + self.positions(at)).pow(2).sum()


def test_an_input_without_a_batch_makes_no_batch() -> None:
    blocks = find_blocks(capture(Positions(), {"x": torch.zeros(4, 6).long(), "at": torch.arange(6)})).blocks
    assert [block.name for block in blocks if block.dim("batch") is None] == ["positions"]
    assert {dim.size for block in blocks for dim in block.dims if dim.name == "batch"} == {4}


def test_a_dim_may_be_named_without_its_number() -> None:
    """The fused map's rows are kv heads × head size = 4 × 8 (and the 4 of q, q, k, v, which nobody can split)."""
    found = captured("gpt", torch.float64)
    spec = batch_spec(found.batch)
    index = next(block.index for block in found.blocks.blocks if block.name == "layers.0.attention.qkv")
    for size, dim in ((4, "out.0"), (8, "out.1")):
        plan = (
            draft(found.blocks, Mesh.of(range(size), tp=size), batch=spec).split("layers.0.*.qkv", out="tp").plan("p")
        )
        assert plan.strategies[index] == {dim: ("tp",)}


# --- segments --------------------------------------------------------------------------------------------------------


def test_deeper_models_have_no_more_segments_to_profile() -> None:
    four, eight = find_segments(deep_llama(4)), find_segments(deep_llama(8))
    assert {s.fingerprint for s in four} == {s.fingerprint for s in eight}
    assert len(eight) == len(four) + 4


@pytest.mark.parametrize("num_layers", [4, 8])
def test_segments_follow_one_another_and_equal_ones_do_equal_work(num_layers: int) -> None:
    blocks = deep_llama(num_layers)
    segments = find_segments(blocks)
    assert [s.start for s in segments] == [0, *(s.stop for s in segments[:-1])]
    assert segments[-1].stop == len(blocks.blocks)
    work: dict[str, set[tuple[str, ...]]] = {}
    for s in segments:
        prints = tuple(block_fingerprint(blocks, block) for block in blocks.blocks[s.start : s.stop])
        work.setdefault(s.fingerprint, set()).add(prints)
    assert all(len(prints) == 1 for prints in work.values())
    assert len(work) == len({prints for found in work.values() for prints in found})


# --- splits, by execution --------------------------------------------------------------------------------------------
#
# Every tensor at a block's boundary is seen with one dim a factor. A split of a block dim in two cuts the tensors that
# have it; the pieces run alone; their results put together as the dim says must be the whole block's.


@cache
def executed(model: str) -> Execution:
    return Execution(captured(model, torch.float64))


@BOTH
def test_every_block_can_be_split_along_every_dim(model: str) -> None:
    execution = executed(model)
    for block in execution.blocks.blocks:
        assert block.dims, block.name
        assert even_dims(block) == list(block.dims)
        for dim in block.dims:
            execution.require_free_split(block, [dim])


@BOTH
def test_different_blocks_can_be_split_along_every_two_dims(model: str) -> None:
    execution = executed(model)
    different = {block_fingerprint(execution.blocks, block): block for block in execution.blocks.blocks}
    for block in different.values():
        for pair in combinations(block.dims, 2):
            execution.require_free_split(block, pair)


class Features(nn.Module):
    """Features [batch 4, sequence 6, 24] of a linear map, made into a loss by a function."""

    def __init__(self, finish: Callable[[Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.map, self.finish = nn.Linear(8, 24), finish
        self.modules_by_name = nn.ModuleDict(modules)

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.map(x), **self.modules_by_name)


def model_of(finish: Callable[..., Tensor], **modules: nn.Module) -> Execution:
    torch.manual_seed(3)
    batch = {"x": torch.randn(4, 6, 8, dtype=torch.float64)}
    model = Features(finish, **modules).double()
    return Execution(of(model, batch, find_blocks(capture(model, batch))))


ASSORTED: dict[str, Callable[[Tensor], Tensor]] = {
    "equal pieces of a dim": lambda y: (y[..., 8:16] * y[..., :8]).sum(),
    "an odd part of a dim": lambda y: (y[..., 5:16] ** 2).sum(),
    "the last of a dim": lambda y: (y[..., -12:] ** 2).sum(),
    "one of a dim": lambda y: (y[:, 0] ** 2).sum() + (y[..., -1] ** 2).sum(),
    "equal parts joined": lambda y: (torch.cat([y, 2 * y], -1) ** 3).sum(),
    "unequal parts joined": lambda y: (torch.cat([y, y[..., :5]], -1) ** 3).sum(),
    "a mean over two dims": lambda y: ((y - y.mean((0, 2), keepdim=True)) ** 4).sum(),
    "a mean of everything": lambda y: (y**2).mean(),
    "heads regrouped": lambda y: (y.view(4, 6, 3, 2, 4).permute(0, 3, 1, 2, 4).reshape(8, 6, 12) ** 3).sum(),
    "batch and sequence joined": lambda y: (y.flatten(0, 1) ** 3).sum(0).pow(2).sum(),
    "a dim repeated": lambda y: (y.unsqueeze(2).expand(4, 6, 2, 24) * torch.arange(2.0)[:, None]).exp().sum(),
    "rows against columns": lambda y: (y[:, :, None, :6] * y[:, None, :, :6]).sum(),
    "sums of sums": lambda y: y.sum(-1).pow(2).sum(0).pow(2).sum(),
    "a mask": lambda y: y.masked_fill(torch.arange(24) % 3 == 0, 0.5).pow(2).sum(),
    "two chunks multiplied": lambda y: (lambda a, b: (F.silu(a) * b).sum())(*y.chunk(2, -1)),
}


@pytest.mark.parametrize("finish", ASSORTED.values(), ids=ASSORTED.keys())
def test_assorted_operators_can_be_split(finish: Callable[[Tensor], Tensor]) -> None:
    execution = model_of(finish)
    for block in execution.blocks.blocks:
        for count in (1, 2):
            for dims in combinations(even_dims(block), count):
                execution.require_free_split(block, dims)


class Table(nn.Module):
    """An embedding [8, 4] and a function of what it finds and of itself."""

    def __init__(self, finish: Callable[[Tensor, Tensor], Tensor], **options: int) -> None:
        super().__init__()
        self.table, self.finish = nn.Embedding(8, 4, **options), finish

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.table(x), self.table.weight)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: Table(lambda y, table: F.linear(y, table).pow(2).sum()), id="tied"),
        pytest.param(
            lambda: Table(lambda y, table: F.linear(y, table).unflatten(-1, (2, 4)).sum(-1).pow(2).sum()),
            id="tied and regrouped",
        ),
        pytest.param(
            lambda: Table(lambda y, table: y.pow(2).sum(), padding_idx=1),
            id="padded",
        ),
    ],
)
def test_an_embedding_can_be_split(model: Callable[[], nn.Module]) -> None:
    torch.manual_seed(3)
    built, batch = model().double(), {"x": torch.randint(8, (4, 6))}
    execution = Execution(of(built, batch, find_blocks(capture(built, batch))))
    for block in execution.blocks.blocks:
        for dim in even_dims(block):
            execution.require_free_split(block, [dim])
