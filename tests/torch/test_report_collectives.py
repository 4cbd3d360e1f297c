"""The collective programs of a program, in words."""

from dataclasses import replace

import torch

from planloom.capture import batch_spec
from planloom.cluster import Level, cluster_to_yaml, load_cluster
from planloom.layout import enumerate_placements
from planloom.plan import named_plan, parse_named
from planloom.program import build_program, verify_program
from planloom.report.collectives import collectives_of
from tests.models import build
from tests.torch.captured import captured


def test_a_slow_network_makes_gradients_reduced_in_three_steps() -> None:
    """Data parallel over two nodes of two devices: the plan's own cluster decides, and the proof holds."""
    blocks, cluster = captured("gpt", torch.float64).blocks, load_cluster("two-by-two")
    (placement,) = enumerate_placements(cluster.level_counts, {"dp": 4})
    batch = batch_spec(build("gpt", torch.float64)[1])
    plan = named_plan(blocks, parse_named("dp=4"), batch=batch, placement=placement)
    by_bytes = build_program(blocks, plan)
    assert set(collectives_of(cluster, by_bytes)) == {"all-reduce node×2·device×2"}
    slow = replace(cluster, levels=(_slower(cluster.levels[0]), cluster.levels[1]))
    by_seconds = build_program(blocks, replace(plan, cluster=cluster_to_yaml(slow)))
    words = collectives_of(cluster, by_seconds)
    assert words["reduce-scatter device×2 → all-reduce node×2 → all-gather device×2"] > 0
    verify_program(blocks, by_seconds)


def _slower(level: Level) -> Level:
    return replace(level, link=replace(level.link, bandwidth_bytes_per_second=1e3))
