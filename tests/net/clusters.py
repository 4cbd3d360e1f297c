"""Clusters for tests of the testbed: small ones by their links, and the example files."""

from pathlib import Path

from planloom.cluster import Cluster, Device, Level, Link, Shape

EXAMPLES = sorted((Path(__file__).parents[2] / "testbed" / "clusters").glob("*.yaml"))

DEVICE = Device(
    name="cpu-core",
    flops_per_second={"float32": 5e10},
    memory_bytes=1 << 32,
    memory_bytes_per_second=1e10,
    launch_seconds=1e-5,
)


def level(name: str, count: int, megabits: float, *, shape: Shape = "crossbar", shared: bool = False) -> Level:
    link = Link(bandwidth_bytes_per_second=megabits * 125e3, latency_seconds=1e-4, shape=shape, shared=shared)
    return Level(name=name, count=count, link=link)


def cluster(*levels: Level) -> Cluster:
    return Cluster(name="-".join(part.name for part in levels), levels=levels, device=DEVICE)


TWO_BY_TWO = cluster(level("node", 2, 100, shared=True), level("device", 2, 400))
"""Four devices, two levels, one uplink a node."""

ODD = (
    cluster(level("only", 1, 100), level("ring", 5, 100, shape="ring")),
    cluster(level("ring", 2, 100, shape="ring")),
    cluster(level("torus", 2, 100, shape="torus"), level("inner", 3, 100, shape="torus")),
    cluster(level("outer", 2, 100), level("x", 3, 100, shape="torus"), level("y", 3, 100, shape="torus")),
    cluster(level("z", 2, 90, shape="torus"), level("x", 3, 80, shape="torus"), level("y", 4, 70, shape="torus")),
    cluster(level("torus", 3, 100, shape="torus"), level("device", 3, 100)),
    cluster(level("torus", 3, 90, shape="torus"), level("node", 2, 80, shared=True), level("device", 2, 70)),
    cluster(
        level("torus", 3, 90, shape="torus"),
        level("ring", 4, 80, shape="ring", shared=True),
        level("pair", 2, 70, shape="pairs"),
    ),
    cluster(level("pairs", 4, 100, shape="pairs", shared=True), level("single", 1, 80), level("device", 2, 70)),
)
"""Shapes in unusual mixtures: one member, two in a ring, a torus around switches, around routers."""
