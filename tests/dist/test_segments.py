"""Segments with their collectives, measured as a whole on local processes, and what predictions make of them."""

from itertools import pairwise
from pathlib import Path

import pytest

from planloom.blocks import BlockGraph, find_blocks
from planloom.capture import batch_spec, capture, load_model
from planloom.cluster import load_cluster
from planloom.cost import Prices
from planloom.cost.segments import body_segments
from planloom.plan import Plan, named_plan, parse_named
from planloom.profile import local_store, profile_locally
from planloom.program import build_program
from planloom.simulate import simulate
from planloom.train.segments import measure_segments_locally, segment_keys

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "examples/models/gpt.py:tiny")
PLANS = ("dp=2", "dp=2,zero3", "tp=2,vocab", "pp=2,micro=4,1f1b")


@pytest.fixture(scope="module")
def blocks() -> BlockGraph:
    return find_blocks(capture(*load_model(TINY)))


def plans_of(blocks: BlockGraph, *specs: str) -> list[Plan]:
    batch = batch_spec(load_model(TINY)[1])
    return [named_plan(blocks, parse_named(spec), batch=batch) for spec in specs]


def test_equal_layers_have_one_key_and_other_sizes_another() -> None:
    keys = []
    for seq in (16, 32):
        model, batch = load_model(f"gpt2?n_layer=6&n_embd=32&n_head=4&vocab_size=64&seq={seq}&batch=8&dtype=float32")
        blocks = find_blocks(capture(model, batch))
        plan = named_plan(blocks, parse_named("tp=2,vocab"), batch=batch_spec(batch))
        bodies = body_segments(blocks, build_program(blocks, plan), 0).values()
        for found in filter(None, bodies):
            assert len({segment.key for segment in found}) <= len(found) - 3, "four of six layers are interior"
            assert all(before.stop <= after.start for before, after in pairwise(found))
            keys.append({segment.key for segment in found})
    assert len(keys) == 4, "forward and backward of either"
    assert len(set[str]().union(*keys)) == sum(map(len, keys))


def test_segments_are_measured_once_and_predictions_use_them(blocks: BlockGraph, tmp_path: Path) -> None:
    store, plans = tmp_path / "prices.sqlite", plans_of(blocks, *PLANS)
    programs = [build_program(blocks, plan) for plan in plans]
    profile_locally(TINY, plans, store, num_processes=2, progress=lambda done, total: None, budget_seconds=0.0)
    before = local_store(store, 2).load()
    seen: list[tuple[int, int]] = []
    for _ in range(2):
        measure_segments_locally(TINY, plans, store, num_processes=2, progress=lambda *of: seen.append(of))
    known = local_store(store, 2).load()
    assert seen == [*((i, len(plans)) for i in range(len(plans) + 1)), (0, 0)]
    wanted = set[str]().union(*(segment_keys(blocks, program) for program in programs))
    assert known.keys() - before.keys() == wanted
    assert all(known[key] > 0 for key in wanted)
    prices = Prices(blocks=blocks, cluster=load_cluster("local", num_outer=2), measured=known, measured_links=True)
    for program in programs:
        for stage in range(len(program.stages)):
            for segments in body_segments(blocks, program, stage).values():
                assert all(prices.segment(segment.key) is not None for segment in segments)
        dear = Prices(
            blocks=blocks,
            cluster=prices.cluster,
            measured={key: value * (10 if key in wanted else 1) for key, value in known.items()},
            measured_links=True,
        )
        # What was not scaled may take longer than all segments on a busy machine: what counts is what the step grows by.
        own = [segment for segments in body_segments(blocks, program, 0).values() for segment in segments]
        grown = simulate(program, dear).step_seconds - simulate(program, prices).step_seconds
        assert grown > 5 * sum(known[segment.key] for segment in own)


def test_what_a_collective_brought_may_be_on_its_way_to_another_stage(blocks: BlockGraph, tmp_path: Path) -> None:
    """A stage of two ranks sends what it has reduced: waiting for that message before a segment would never end."""
    store, plans = tmp_path / "prices.sqlite", plans_of(blocks, "tp=2,pp=2,vocab,micro=4,1f1b")
    measure_segments_locally(TINY, plans, store, num_processes=4, progress=lambda done, total: None)
    assert set(local_store(store, 4).load()) == segment_keys(blocks, build_program(blocks, plans[0]))
