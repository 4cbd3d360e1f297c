"""Searches of the tests: small models on small clusters, and all solutions of all problems of a search."""

from collections.abc import Iterator
from functools import cache

import numpy as np
import torch

from planloom.capture import batch_spec
from planloom.cluster import Cluster, cluster_from_yaml, load_cluster
from planloom.search import Planner, Wishes
from planloom.search.solutions import Solution, Solver
from planloom.search.space import Candidate
from tests.dist.cases import captured
from tests.models import build

DEVICE = """
device:
  name: cpu-core
  flops: {float64: 25 GFLOP/s, float32: 50 GFLOP/s}
  memory: 4 GiB
  memory_bandwidth: 10 GB/s
  launch: 10 us
"""
FLAT = """
name: flat
library: gloo
levels:
  - {name: device, count: 4, link: {bandwidth: 1 GB/s, latency: 20 us}}
"""
THREE_LEVELS = """
name: three-levels
library: gloo
levels:
  - {name: rack, count: 2, link: {bandwidth: 1 Gbit/s, latency: 100 us, shared: true}}
  - {name: node, count: 2, link: {bandwidth: 4 Gbit/s, latency: 50 us, shared: true}}
  - {name: device, count: 2, link: {bandwidth: 4 GB/s, latency: 5 us}}
"""
CLUSTERS = ("flat", "two-by-two", "three-levels")
"""Of four, four and eight devices."""


@cache
def cluster(name: str) -> Cluster:
    texts = {"flat": FLAT, "three-levels": THREE_LEVELS}
    return cluster_from_yaml(texts[name] + DEVICE, name=name) if name in texts else load_cluster(name)


@cache
def planner(model: str, cluster_name: str) -> Planner:
    """In float64, so that what is found can be run against one device."""
    return Planner(captured(model, torch.float64), cluster(cluster_name), fused=False)


@cache
def spec(model: str) -> dict[str, tuple[tuple[int, ...], str]]:
    return batch_spec(build(model, torch.float64)[1])


def solvers(own: Planner, wishes: Wishes, limit_bytes: float, *, max_problems: int | None = None) -> Iterator[Solver]:
    """One a shape and schedule of the space, for all its placements and numbers of micro-batches, or the first so
    many."""
    space = own.space(wishes)
    for shape in space.shapes:
        for schedule in space.schedules_of(shape.num_stages):
            candidates = [
                Candidate(shape=shape, placement=placement, num_micro=num_micro, schedule=schedule)
                for placement in space.placements(own.cluster, shape)
                for num_micro in space.micro_batches
                if schedule.is_possible(shape.num_stages, num_micro)
            ]
            if not candidates:
                continue
            tables = own.tables(candidates[:max_problems], wishes)
            if tables.is_possible:
                yield Solver(tables, own.places, limit_bytes=limit_bytes, recompute=wishes.recompute)


def solutions(solver: Solver) -> list[Solution]:
    """Of all problems that have one."""
    return solver.solve([int(g) for g in np.flatnonzero(np.isfinite(solver.bounds))], below=np.inf)
