"""Rotation along a ring of devices: what it means, and what it costs."""

import pytest

from planloom.cluster import load_cluster
from planloom.collective import CollectiveProgram, Step, step_cost
from planloom.collective.oracle import check_program
from planloom.collective.steps import StepKind
from planloom.errors import VerificationError
from planloom.layout import Layout, Mesh

MESH = Mesh.of(range(4), cp=4)
SPLIT = Layout(splits=(MESH.digits,))


def rotations(count: int) -> CollectiveProgram:
    step = Step(kind="rotate", groups=MESH.groups(MESH.digits), shape=(4,))
    return CollectiveProgram(factors=((8,),), steps=(step,) * count)


def test_once_round_is_home() -> None:
    check_program(rotations(4), mesh=MESH, source=SPLIT, target=SPLIT)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_elsewhere_it_is_not(count: int) -> None:
    with pytest.raises(VerificationError):
        check_program(rotations(count), mesh=MESH, source=SPLIT, target=SPLIT)


def test_it_costs_one_hop_and_the_array_once() -> None:
    cluster, num_bytes = load_cluster("two-by-two"), 1e9
    groups = ((0, 1, 2, 3),)

    def seconds(kind: StepKind) -> float:
        return step_cost(cluster, Step(kind=kind, groups=groups, shape=(4,))).seconds(num_bytes)

    link = cluster.levels[0].link
    assert seconds("rotate") == pytest.approx(num_bytes / link.bandwidth_bytes_per_second, rel=0.01)
    assert 0 < seconds("rotate") < seconds("all_gather")
