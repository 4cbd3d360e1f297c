"""Calibration: links whose figures are known, measured on contiguous groups of two sizes, and found again."""

from collections.abc import Iterable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planloom.cluster import Cluster, Library, cluster_from_yaml, cluster_to_yaml
from planloom.collective import StepKind
from planloom.collective.calibration import calibrate
from planloom.collective.measurements import Measurement
from planloom.collective.pricing import groups_cost
from planloom.errors import ClusterError
from tests.pure.test_routes import cluster_of, link

Groups = tuple[tuple[int, ...], ...]

NUM_NODES, NUM_INSIDE = 4, 8
NUM_DEVICES = NUM_NODES * NUM_INSIDE
TWO_SIZES = (4096.0, float(1 << 28))
OTHER_SIZES = (1e3, 1e5, 1e6, 1e7, 1e9)


def contiguous(size: int) -> Groups:
    return tuple(tuple(range(first, first + size)) for first in range(0, NUM_DEVICES, size))


def strided(size: int) -> Groups:
    stride = NUM_DEVICES // size
    return tuple(tuple(range(first, NUM_DEVICES, stride)) for first in range(stride))


CONTIGUOUS = tuple(contiguous(size) for size in (2, 4, 8, 16, 32))
STRIDED = tuple(strided(size) for size in (2, 4, 8, 16))


def true_cluster(
    *kinds: StepKind,
    library: Library = "nccl",
    shared: bool = True,
    hops: tuple[float, float] = (8e-6, 2e-6),
    starts: tuple[float, float] = (3e-5, 9e-6),
    efficiencies: tuple[float, float] = (0.9, 0.8),
) -> Cluster:
    """Nodes around devices; figures of both levels, a little different from collective to collective."""
    outer, inner = (
        {
            "hop_seconds": {kind: hop * (1 + 0.2 * i) for i, kind in enumerate(kinds)},
            "start_seconds": {kind: start * (1 + 0.1 * i) for i, kind in enumerate(kinds)},
            "efficiency": {(kind, 0): share - 0.03 * i for i, kind in enumerate(kinds)},
        }
        for hop, start, share in zip(hops, starts, efficiencies, strict=True)
    )
    return cluster_of(
        (NUM_NODES, link(shared=shared, bandwidth=1e10, latency=1e-5, **outer)),
        (NUM_INSIDE, link(bandwidth=1e11, latency=1e-6, **inner)),
        library=library,
    )


def nominal_cluster(true: Cluster, factor: float = 1.25) -> Cluster:
    """What a data sheet says: the same levels, other rates, and nothing about collectives."""
    levels = (
        (level.count, link(shared=level.link.shared, bandwidth=factor * level.link.bandwidth_bytes_per_second))
        for level in true.levels
    )
    return cluster_of(*levels, library=true.library)


def measure(
    cluster: Cluster,
    kinds: Iterable[StepKind],
    all_groups: Iterable[Groups] = CONTIGUOUS,
    sizes: Iterable[float] = TWO_SIZES,
    noise: Random | None = None,
) -> list[Measurement]:
    return [
        Measurement(
            kind=kind,
            groups=groups,
            num_bytes=size,
            seconds=groups_cost(cluster, kind, groups).seconds(size) * (noise.uniform(0.95, 1.05) if noise else 1.0),
        )
        for kind in kinds
        for groups in all_groups
        for size in sizes
    ]


def errors_of(fitted: Cluster, measurements: Iterable[Measurement]) -> list[float]:
    return [abs(groups_cost(fitted, m.kind, m.groups).seconds(m.num_bytes) / m.seconds - 1) for m in measurements]


RING_KINDS: tuple[StepKind, ...] = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")


@pytest.mark.parametrize(
    ("library", "kinds", "shared"),
    [
        ("nccl", RING_KINDS, True),
        ("gloo", ("all_reduce", "broadcast"), True),
        ("gloo", ("all_reduce", "broadcast"), False),
    ],
    ids=str,
)
def test_other_sizes_and_strided_groups_are_predicted(
    library: Library, kinds: tuple[StepKind, ...], shared: bool
) -> None:
    true = true_cluster(*kinds, library=library, shared=shared)
    fit = calibrate(nominal_cluster(true), measure(true, kinds))
    assert fit.num_measurements == len(kinds) * len(CONTIGUOUS) * len(TWO_SIZES)
    assert fit.error < 0.005
    assert max(errors_of(fit.cluster, measure(true, kinds, (*CONTIGUOUS, *STRIDED), OTHER_SIZES))) < 0.03


@settings(max_examples=15)
@given(
    kind=st.sampled_from(RING_KINDS),
    hops=st.tuples(st.floats(2e-6, 3e-5), st.floats(5e-7, 5e-6)),
    starts=st.tuples(st.floats(5e-6, 1e-4), st.floats(2e-6, 3e-5)),
    efficiencies=st.tuples(st.floats(0.5, 1.0), st.floats(0.5, 1.0)),
    factor=st.floats(0.5, 2.0),
)
def test_any_figures_are_found(
    kind: StepKind,
    hops: tuple[float, float],
    starts: tuple[float, float],
    efficiencies: tuple[float, float],
    factor: float,
) -> None:
    true = true_cluster(kind, hops=hops, starts=starts, efficiencies=efficiencies)
    fit = calibrate(nominal_cluster(true, factor), measure(true, [kind]))
    assert max(errors_of(fit.cluster, measure(true, [kind], (*CONTIGUOUS, *STRIDED), OTHER_SIZES))) < 0.03


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather"])
def test_gloo_needs_a_size_of_direct_messages_and_two_of_rings(kind: StepKind) -> None:
    true = true_cluster(kind, library="gloo")
    fit = calibrate(nominal_cluster(true), measure(true, [kind], sizes=(4096.0, float(1 << 18), float(1 << 28))))
    assert max(errors_of(fit.cluster, measure(true, [kind], (*CONTIGUOUS, *STRIDED), OTHER_SIZES))) < 0.03


@settings(max_examples=10)
@given(st.integers(0, 2**32 - 1))
def test_noise_is_not_amplified(seed: int) -> None:
    """Five per cent either way; latencies of strided groups, which nothing like them was measured for, excepted."""
    kinds: tuple[StepKind, ...] = ("all_reduce", "all_gather")
    true = true_cluster(*kinds)
    fit = calibrate(nominal_cluster(true), measure(true, kinds, noise=Random(seed)))
    assert fit.error < 0.05
    everything = errors_of(fit.cluster, measure(true, kinds, (*CONTIGUOUS, *STRIDED), OTHER_SIZES))
    assert sum(everything) / len(everything) < 0.05
    assert max(errors_of(fit.cluster, measure(true, kinds, CONTIGUOUS, OTHER_SIZES))) < 0.1
    assert max(errors_of(fit.cluster, measure(true, kinds, STRIDED, (1e7, 1e9)))) < 0.1


def test_more_flows_prolong_direct_messages() -> None:
    """How much, groups with other numbers of flows show."""
    true = true_cluster("all_reduce", "all_to_all")
    outer = replace(true.levels[0].link, flow={"all_to_all": 0.05})
    true = replace(true, levels=(replace(true.levels[0], link=outer), true.levels[1]))
    measured = measure(true, ["all_reduce", "all_to_all"], (*CONTIGUOUS, *STRIDED))
    fit = calibrate(nominal_cluster(true), measured)
    assert fit.cluster.levels[0].link.flow["all_to_all"] == pytest.approx(0.05, rel=0.25)
    assert fit.error < 0.03


# --- what is kept


def test_levels_that_nothing_crosses_stay_as_they_are() -> None:
    true = true_cluster("all_reduce")
    nominal = nominal_cluster(true)
    inside = calibrate(nominal, measure(true, ["all_reduce"], CONTIGUOUS[:3])).cluster
    assert inside.levels[0] == nominal.levels[0]
    assert inside.levels[1] != nominal.levels[1]
    across = calibrate(nominal, measure(true, ["all_reduce"], STRIDED[:2])).cluster
    assert across.levels[1] == nominal.levels[1]
    assert across.levels[0] != nominal.levels[0]
    assert (across.name, across.device, across.library) == (nominal.name, nominal.device, nominal.library)


def test_figures_of_other_collectives_keep_their_rates() -> None:
    true = true_cluster("all_reduce", "all_gather")
    fit = calibrate(true, measure(true, ["all_reduce"]))
    assert max(errors_of(fit.cluster, measure(true, ["all_gather"], sizes=OTHER_SIZES))) < 0.03


def test_a_fitted_cluster_survives_its_file() -> None:
    true = true_cluster(*RING_KINDS, "all_to_all")
    fitted = calibrate(nominal_cluster(true), measure(true, (*RING_KINDS, "all_to_all"))).cluster
    assert cluster_from_yaml(cluster_to_yaml(fitted), name="fitted") == fitted


def test_the_best_rate_is_the_bandwidth_and_the_others_are_shares_of_it() -> None:
    true = true_cluster("all_reduce", "all_gather")
    link = calibrate(nominal_cluster(true), measure(true, ["all_reduce", "all_gather"])).cluster.levels[0].link
    assert link.bandwidth_bytes_per_second == pytest.approx(0.9 * 1e10, rel=0.01)
    assert max(link.efficiency.values()) == pytest.approx(1.0, rel=1e-3)
    assert link.efficiency_of("all_gather", 4) == pytest.approx(0.87 / 0.9, rel=0.01)
    assert link.efficiency_of("all_gather", 3) == link.efficiency_of("all_gather", 4)
    assert link.hop_of("all_reduce") == pytest.approx(8e-6, rel=0.05)
    assert link.start_seconds["all_reduce"] == pytest.approx(3e-5, rel=0.05)


@pytest.mark.parametrize(
    "measurement",
    [
        None,
        Measurement(kind="all_reduce", groups=((0,), (1,)), num_bytes=1e6, seconds=1e-3),
        Measurement(kind="all_reduce", groups=((0, 1),), num_bytes=1e6, seconds=0.0),
        Measurement(kind="all_reduce", groups=((0, 1),), num_bytes=0.0, seconds=1e-3),
    ],
    ids=["nothing", "devices alone", "no time", "no bytes"],
)
def test_nothing_to_calibrate_from_is_an_error(measurement: Measurement | None) -> None:
    with pytest.raises(ClusterError, match="nothing to calibrate from"):
        calibrate(true_cluster(), [measurement] if measurement else [])


# --- what does not work


def test_a_level_that_the_data_sheet_has_as_no_bottleneck() -> None:
    true = true_cluster("all_reduce", shared=False)  # eight uplinks of 9 GB/s around devices with 80 GB/s
    fit = calibrate(nominal_cluster(true), measure(true, ["all_reduce"]))
    assert max(errors_of(fit.cluster, measure(true, ["all_reduce"]))) < 0.03


def test_a_link_that_is_far_slower_than_its_data_sheet() -> None:
    nominal = cluster_of((4, link(bandwidth=1e10, efficiency={("all_gather", 0): 0.9})))
    true = cluster_of((4, link(bandwidth=1e9)))
    fit = calibrate(nominal, measure(true, ["all_reduce"], [((0, 1, 2, 3),)]))
    assert fit.error < 0.03


def test_a_link_that_is_far_faster_than_its_data_sheet() -> None:
    true = cluster_of((4, link(bandwidth=1e10)))
    fit = calibrate(cluster_of((4, link(bandwidth=1e9))), measure(true, ["all_reduce"], [((0, 1, 2, 3),)]))
    assert fit.error < 0.03
