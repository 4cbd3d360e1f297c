"""ATP inside the search: on tensor parallelism alone the best mesh is that of its closed formula.

On a mesh (d1, d2), column-first maps have their output dim on d1 and their input dim on d2, row-first ones the other
way round; a layer alternates them, and its boundary stays [batch, sequence, hidden / d2]. With ring costs and e bytes
an element, per layer

    T = b·s·h·e · [24 (d2 - 1) / (d1·d2·B2) + 8 (d1 - 1) / (d1·d2·B1)].

The search's own space is richer: it would split batch and sequence where ATP replicates, and turn all-reduces into
scatters and gathers. So for this comparison every block has the one strategy that ATP gives it, computation is free,
and links have no latency. What remains beside T are the sums of the norms' statistics, which are hidden times smaller.
"""

from functools import cache
from math import inf

import pytest
import torch

from examples.models.gpt import GPT, GPTConfig, batch_for
from planloom.blocks import Block, BlockGraph, find_blocks
from planloom.capture import capture
from planloom.cluster import Cluster, cluster_from_yaml
from planloom.search import Planner, Wishes
from planloom.search import tables as search_tables
from planloom.search.space import Shape
from planloom.search.strategies import Strategies, block_strategies
from tests.torch.searches import solvers

BATCH, HIDDEN, ITEM_BYTES = 2, 4096, 4
SIZES = (8, 16, 64)
PUBLISHED = {8: 1.17, 16: 1.50, 64: 2.62}
"""How much faster than Megatron's (N, 1) the best mesh is, by the formula with equal bandwidths."""


@cache
def blocks(num_layers: int) -> BlockGraph:
    config = GPTConfig(num_layers=num_layers, hidden=HIDDEN, num_heads=64, num_kv_heads=64)
    with torch.device("meta"):
        model = GPT(config)
    return find_blocks(capture(model, {name: own.to("meta") for name, own in batch_for(config, BATCH).items()}))


def cluster(outer: int, inner: int, outer_gbs: float, inner_gbs: float) -> Cluster:
    """Every device has links of its own to both levels; it computes at once, and nothing is late."""
    levels = [("node", outer, outer_gbs), ("device", inner, inner_gbs)]
    lines = [
        f"  - {{name: {name}, count: {count}, link: {{bandwidth: {speed:g} GB/s, latency: 0.001 ns}}}}"
        for name, count, speed in levels
        if count > 1
    ]
    text = "name: even\nlibrary: nccl\nlevels:\n" + "\n".join(lines)
    device = "flops: {float32: 1e12 TFLOP/s}, memory: 1000 TB, memory_bandwidth: 1e12 TB/s, launch: 0.001 ns"
    return cluster_from_yaml(f"{text}\ndevice: {{name: free, {device}}}\n", name="even")


def atp_dims(block: Block) -> dict[str, str]:
    """ATP's strategy: which dim lies on d1 (tp) and which on d2 (tp2)."""
    first = {dim.name.split(".")[0]: dim.name for dim in reversed(block.dims)}
    kind = block.name.rsplit(".", 1)[-1]
    if kind in ("qkv", "up", "head"):
        return {"tp": first["out"], "tp2": first["in"]}
    if kind in ("out", "down"):
        return {"tp": first["in"], "tp2": first["out"]}
    if "norm" in block.name:
        return {"tp2": "features"}
    if kind in ("embed", "position"):
        return {"tp2": "out"}
    wanted = next((name for name in ("heads", "features", "vocab") if name in first), None)
    return {"tp": wanted} if wanted else {}


def atp_only(block: Block, shape: Shape, *_: object, **__: object) -> Strategies:
    """The one strategy that ATP gives a block."""
    every = block_strategies(block, shape)
    dims = atp_dims(block)
    places = {dim.name: d for d, dim in enumerate(block.dims)}
    wanted = [places[dims[name]] if name in dims else -1 for name in shape.names]
    (kept,) = (every.dims == wanted).all(axis=1).nonzero()
    assert len(kept) == 1, (block.name, wanted)
    return Strategies(dims=every.dims[kept], pieces=every.pieces[kept])


@cache
def layer_seconds(d1: int, d2: int, outer_gbs: float, inner_gbs: float) -> float:
    """What one more layer takes, d1 across nodes and d2 inside."""

    def step(num_layers: int) -> float:
        own = Planner(blocks(num_layers), cluster(d1, d2, outer_gbs, inner_gbs), fused=False)
        found = inf
        for solver in solvers(own, Wishes(dp=1, tp=d1, tp2=d2, pp=1, micro=1), 1e18):
            for g, candidate in enumerate(solver.tables.candidates):
                rows = dict(zip(candidate.placement.axes, candidate.placement.matrix, strict=True))
                if d1 == 1 or rows["tp"][0] == d1:
                    found = min(found, float(solver.bounds[g]))
        return found

    return (step(4) - step(2)) / 2


def formula(d1: int, d2: int, first_gbs: float, second_gbs: float) -> float:
    elements = BATCH * GPTConfig().sequence * HIDDEN
    second = 24 * (d2 - 1) / (d1 * d2 * second_gbs * 1e9)
    return elements * ITEM_BYTES * (second + 8 * (d1 - 1) / (d1 * d2 * first_gbs * 1e9))


def meshes(count: int) -> list[tuple[int, int]]:
    return [(d1, count // d1) for d1 in (1, 2, 4, 8, 16, 32, 64) if count % d1 == 0]


@pytest.fixture(autouse=True)
def _only_atp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_tables, "block_strategies", atp_only)


@pytest.mark.parametrize(("first_gbs", "second_gbs"), [(10, 10), (10, 40), (10, 160), (40, 10)])
@pytest.mark.parametrize("count", SIZES)
def test_the_best_mesh_is_that_of_the_formula(count: int, first_gbs: float, second_gbs: float) -> None:
    found = {mesh: layer_seconds(*mesh, first_gbs, second_gbs) for mesh in meshes(count)}
    expected = {mesh: formula(*mesh, first_gbs, second_gbs) for mesh in meshes(count)}
    assert found == pytest.approx(expected, rel=0.05)
    assert min(found, key=found.__getitem__) == min(expected, key=expected.__getitem__)


def test_the_best_mesh_beats_megatron_as_published_and_communication_falls_with_devices() -> None:
    best = []
    for count in SIZES:
        found = {mesh: layer_seconds(*mesh, 10, 10) for mesh in meshes(count)}
        assert found[count, 1] / min(found.values()) == pytest.approx(PUBLISHED[count], rel=0.02)
        best.append(min(found.values()))
    assert best == sorted(best, reverse=True)
