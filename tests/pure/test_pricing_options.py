"""Which measured figures a command takes for a cluster: those of its device, and of its network."""

from pathlib import Path

import pytest

from planloom.cli.pricing import Pricing, lab_for, pricing_of
from planloom.cluster import Cluster, load_cluster
from planloom.collective import Step
from planloom.cost import Prices, PriceStore, collective_key, find_profile, is_one_machine, serves
from planloom.cost.keys import OVERLAP_COMMUNICATION_KEY, OVERLAP_COMPUTE_KEY
from planloom.errors import PriceError
from tests.pure.tiny_graph import tiny_blocks

CPU = "cpu x86_64 AMD EPYC ×2"
H100 = "NVIDIA H100 80GB HBM3"
EAGER, COMPILED = "torch 2.13.0, python 3.11.2, eager", "torch 2.13.0, python 3.11.2, compiled"
PAIR = Step(kind="all_reduce", groups=((0, 1),), shape=(2,))
NUM_BYTES = 1 << 20
FIGURES = {
    collective_key("all_reduce", PAIR.groups, NUM_BYTES): (0.25, 0.0),
    OVERLAP_COMPUTE_KEY: (1.5, 0.0),
    OVERLAP_COMMUNICATION_KEY: (2.0, 0.0),
}


def store(folder: Path) -> Path:
    """A CPU, and a GPU both ways, with the same figures."""
    path = folder / "prices.sqlite"
    for device, software in ((CPU, EAGER), (H100, EAGER), (H100, COMPILED)):
        PriceStore(path, device=device, software=software).save(FIGURES)
    return path


def pricing(folder: Path, cluster: Cluster, profile: str | None, **options: bool | None) -> Pricing:
    given = {"compiled": None, "links": None, **options}
    return pricing_of(tiny_blocks(), cluster, profile=profile, store=store(folder), **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "cluster", "expected"),
    [
        (CPU, "two-by-two", True),
        (CPU, "local", True),
        (CPU, "dgx-h100", False),
        (H100, "dgx-h100", True),
        (H100, "aws-p5", True),
        (H100, "dgx-h200", False),
        (H100, "two-by-two", False),
        ("NVIDIA H200", "dgx-h200", True),
        ("NVIDIA GH200 480GB", "dgx-h200", False),
        ("NVIDIA A100-SXM4-80GB", "dgx-a100", True),
        ("NVIDIA RTX A6000", "nvlink-pairs", True),
        ("NVIDIA L40S", "pcie-8gpu", True),
        ("NVIDIA L40S", "nvlink-pairs", False),
    ],
)
def test_figures_serve_clusters_of_their_device(device: str, cluster: str, expected: bool) -> None:
    assert serves(device, load_cluster(cluster)) is expected


def test_processes_of_one_machine_have_the_links_of_one_node() -> None:
    assert is_one_machine(load_cluster("local"))
    assert is_one_machine(load_cluster("dgx-h100"))
    assert not is_one_machine(load_cluster("dgx-h100", num_outer=2))
    assert not is_one_machine(load_cluster("two-by-two"))


@pytest.mark.parametrize(
    ("cluster", "links", "is_measured"),
    [("local", None, True), ("local", False, False), ("two-by-two", None, False), ("two-by-two", True, True)],
)
def test_measured_collectives_and_overlap_go_together(
    tmp_path: Path, cluster: str, links: bool | None, is_measured: bool
) -> None:
    found = pricing(tmp_path, load_cluster(cluster), "cpu", links=links)
    price = found.prices.step(PAIR, NUM_BYTES)
    assert (price.source == "measured") is is_measured
    assert (price.seconds == 0.25) is is_measured
    assert (found.prices.compute_slowdown == 1.5) is is_measured
    assert (found.prices.communication_slowdown == 2.0) is is_measured
    assert found.document()["links"] == ("measured" if is_measured else "cluster")


def test_a_profile_says_whether_runs_are_compiled(tmp_path: Path) -> None:
    machine = load_cluster("dgx-h100")
    for profile, fused in (("H100 eager", False), ("H100 compiled", True)):
        found = pricing(tmp_path, machine, profile)
        assert found.prices.fused is fused
        assert found.document()["compiled"] is fused
        assert H100 in found.words()
    with pytest.raises(PriceError, match=r"(?s)eager, and --compiled.*both compiled or both eager"):
        pricing(tmp_path, machine, "H100 eager", compiled=True)
    assert "compile=True" in pricing(tmp_path, machine, None).words()
    assert "eager" in pricing(tmp_path, load_cluster("local"), None).words()


def test_a_profile_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "h100.json"
    PriceStore.choose(store(tmp_path), "H100 compiled").export(path)
    found = find_profile(str(path), tmp_path / "no-such.sqlite")
    assert (found.device, found.software, found.figures) == (H100, COMPILED, FIGURES)


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PriceError, match=r"(?s)another device.*×2.*H100-SXM5-80GB.*nccl"):
        pricing(tmp_path, load_cluster("dgx-h100"), "cpu")
    with pytest.raises(PriceError, match="one of them"):
        pricing(tmp_path, load_cluster("local"), "cpu", measuring=True)
    with pytest.raises(PriceError, match="no links are measured"):
        pricing(tmp_path, load_cluster("local"), None, links=True)


@pytest.mark.parametrize(("cluster", "with_links"), [("local", True), ("two-by-two", False)])
def test_links_that_nobody_uses_are_not_measured(tmp_path: Path, cluster: str, with_links: bool) -> None:
    machine = load_cluster(cluster)
    prices = pricing(tmp_path, machine, None, measuring=True).prices
    lab = lab_for(prices, tmp_path / "own.sqlite")
    assert (lab.with_links, lab.num_processes, lab.device) == (with_links, machine.num_devices, "cpu")


def test_prices_without_measured_links_take_no_measured_overlap() -> None:
    measured = {key: value for key, (value, _) in FIGURES.items()}
    prices = Prices(blocks=tiny_blocks(), cluster=load_cluster("two-by-two"), measured=measured)
    assert (prices.compute_slowdown, prices.communication_slowdown) == (1.1, 1.0)
