"""Collectives along an axis: the search's curves against the prices of the same steps, and of programs of several."""

import numpy as np
import pytest

from planloom.cluster import Cluster, cluster_from_yaml, load_cluster
from planloom.collective import StepKind
from planloom.collective.pricing import digits_cost
from planloom.layout import Digit, Placement, enumerate_placements, mesh_of
from planloom.search.curves import axis_curves

SIZES = np.array([0.0, 100.0, 5e3, 65536.0, 1e6, 2.5e8])
KINDS: tuple[StepKind, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
CLUSTERS = [
    ("two-by-two", None, {"pp": 1, "dp": 2, "tp": 2}),
    ("nvlink-pairs", None, {"pp": 2, "dp": 2, "tp": 2}),
    ("pcie-8gpu", None, {"pp": 1, "dp": 2, "tp": 4}),
    ("dgx-h100", 4, {"pp": 2, "dp": 4, "tp": 4}),
    ("dgx-a100", 2, {"pp": 1, "dp": 2, "tp": 4, "tp2": 2}),
    ("aws-p4d", 4, {"pp": 4, "dp": 2, "tp": 4}),
]

TORUS = """
name: torus
library: nccl
levels:
  - name: row
    count: 4
    link: {bandwidth: 50 GB/s, latency: 5 us, shape: torus}
  - name: device
    count: 4
    link: {bandwidth: 50 GB/s, latency: 5 us, shape: torus}
device: {name: chip, flops: {float32: 50 TFLOP/s}, memory: 16 GiB, memory_bandwidth: 1 TB/s, launch: 5 us}
"""


def clusters() -> list[tuple[Cluster, dict[str, int]]]:
    found = [(load_cluster(name, num_outer=count), axes) for name, count, axes in CLUSTERS]
    return [*found, (cluster_from_yaml(TORUS, name="torus"), {"pp": 1, "dp": 4, "tp": 4})]


def placements(cluster: Cluster, axes: dict[str, int]) -> tuple[Placement, ...]:
    return enumerate_placements(cluster.level_counts, axes)


@pytest.mark.parametrize(("cluster", "axes"), clusters(), ids=lambda own: getattr(own, "name", ""))
def test_a_flat_collective_costs_what_the_step_does(cluster: Cluster, axes: dict[str, int]) -> None:
    """Exactly, for an axis on one level; where it lies on several, a program level by level may be cheaper."""
    num_compared = 0
    for placement in placements(cluster, axes):
        mesh = mesh_of(placement)
        for axis, curves in zip(mesh.axes, axis_curves(cluster, placement), strict=True):
            digits = tuple(digit for digit in axis.digits if digit.size > 1)
            if not digits:
                continue
            assert curves.size == axis.size
            for kind in KINDS:
                cost = digits_cost(cluster, mesh, kind, digits)
                expected = np.array([cost.seconds(size) for size in SIZES])
                found = getattr(curves, kind)(SIZES)
                if len(digits) == 1 or kind == "all_to_all":
                    assert found == pytest.approx(expected, rel=1e-12), (str(placement), axis.name, kind)
                    num_compared += 1
                else:
                    assert (found <= expected * (1 + 1e-12)).all(), (str(placement), axis.name, kind)
    assert num_compared


def test_over_two_levels_the_cheaper_of_flat_and_level_by_level_counts() -> None:
    cluster = load_cluster("two-by-two")
    placement = Placement(axes=("pp", "dp"), matrix=((1, 1), (2, 2)))
    mesh, curves = mesh_of(placement), axis_curves(cluster, placement)[1]
    outer, inner = mesh.axis("dp").digits

    def seconds(kind: StepKind, over: tuple[Digit, ...], sizes: np.ndarray) -> np.ndarray:
        step = digits_cost(cluster, mesh, kind, over)
        return np.array([step.seconds(size) for size in sizes])

    scattered = seconds("reduce_scatter", (inner,), SIZES)
    by_level: dict[StepKind, np.ndarray] = {
        "reduce_scatter": scattered + seconds("reduce_scatter", (outer,), SIZES / 2),
        "all_gather": seconds("all_gather", (outer,), SIZES) + seconds("all_gather", (inner,), 2 * SIZES),
        "all_reduce": scattered
        + seconds("all_reduce", (outer,), SIZES / 2)
        + seconds("all_gather", (inner,), SIZES / 2),
    }
    flat = {kind: seconds(kind, (outer, inner), SIZES) for kind in by_level}
    for kind, other in by_level.items():
        assert getattr(curves, kind)(SIZES) == pytest.approx(np.minimum(flat[kind], other), rel=1e-12), kind
    assert (by_level["all_reduce"] < flat["all_reduce"]).any(), "else nothing was tested"


def test_an_axis_of_one_device_costs_nothing() -> None:
    cluster = load_cluster("two-by-two")
    curves = axis_curves(cluster, Placement(axes=("pp", "dp"), matrix=((1, 1), (2, 2))))[0]
    assert curves.size == 1
    for kind in KINDS:
        assert not getattr(curves, kind)(SIZES).any()


def test_by_volume_only_the_bytes_that_a_device_sends_count() -> None:
    cluster = load_cluster("dgx-h100", num_outer=2)
    rows = [axis_curves(cluster, own, by_volume=True) for own in placements(cluster, {"pp": 1, "dp": 4, "tp": 4})]
    for _, data, free in rows:
        assert data.all_reduce(SIZES) == pytest.approx(2 * data.reduce_scatter(SIZES))
        assert data.all_gather(SIZES / 4) == pytest.approx(data.reduce_scatter(SIZES))
        assert free.all_to_all(SIZES) == pytest.approx(data.all_to_all(SIZES)), "wherever the axis lies"
