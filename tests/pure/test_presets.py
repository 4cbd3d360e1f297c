"""Presets: which machines there are, that figures agree with each other, and that every one names its sources."""

import re
from importlib.resources import files
from math import prod

import pytest

from planloom.cluster import Cluster, list_presets, load_cluster

PRESETS = files("planloom.cluster") / "presets"
GPU_PRESETS = sorted(set(list_presets()) - {"local", "two-by-two"})


def comments(name: str) -> str:
    text = (PRESETS / f"{name}.yaml").read_text(encoding="utf-8")
    return "\n".join(line for line in text.splitlines() if line.startswith("#"))


def test_the_machines_that_must_be_there() -> None:
    assert set(list_presets()) >= {
        "dgx-v100",
        "dgx-a100",
        "dgx-h100",
        "dgx-h200",
        "dgx-b200",
        "dgx-b300",
        "gb200-nvl72",
        "gb300-nvl72",
        "aws-p3.16xlarge",
        "aws-p4d",
        "aws-p5",
        "gcp-a2-megagpu-16g",
        "gcp-a3-high",
        "pcie-8gpu",
        "nvlink-pairs",
        "local",
        "two-by-two",
    }


@pytest.mark.parametrize("name", list_presets())
def test_the_outermost_level_is_the_node_so_that_nodes_scale(name: str) -> None:
    cluster = load_cluster(name, num_outer=16)
    assert cluster.levels[0].name == "node"
    assert cluster.num_devices == 16 * prod(cluster.level_counts[1:])
    if name != "two-by-two":
        assert load_cluster(name).levels[0].count == 1


@pytest.mark.parametrize("name", list_presets())
def test_every_preset_names_its_sources(name: str) -> None:
    text = comments(name)
    assert "Sources" in text or "[Empirical]" in text
    assert max(map(len, text.splitlines())) <= 135


@pytest.mark.parametrize("name", GPU_PRESETS)
def test_every_figure_of_a_gpu_has_a_source(name: str) -> None:
    text, cluster = comments(name), load_cluster(name)
    for word in ("float64", "float32", "launch", "Latencies"):
        assert word in text
    if any(level.link.efficiency for level in cluster.levels):
        assert "efficiency" in text
    assert re.search(r"https://|@[0-9a-f]{12}", text)


@pytest.mark.parametrize("name", GPU_PRESETS)
def test_inner_links_are_no_slower_than_outer_ones(name: str) -> None:
    links = [level.link for level in load_cluster(name).levels]
    bandwidths = [link.bandwidth_bytes_per_second for link in links]
    latencies = [link.latency_seconds for link in links]
    assert bandwidths == sorted(bandwidths)
    assert latencies == sorted(latencies, reverse=True)
    assert load_cluster(name).library == "nccl"


def test_the_same_device_has_the_same_figures_everywhere() -> None:
    by_name: dict[str, Cluster] = {}
    for cluster in map(load_cluster, list_presets()):
        assert by_name.setdefault(cluster.device.name, cluster).device == cluster.device


@pytest.mark.parametrize(
    ("name", "counts", "node_gigabits", "shared", "gpu_gigabytes", "bfloat16", "memory"),
    [
        ("dgx-a100", (1, 8), 200, False, 300, 312, 80 * 2**30),
        ("dgx-h100", (1, 8), 400, False, 450, 989, 80 * 2**30),
        ("dgx-h200", (1, 8), 400, False, 450, 989, 141 * 10**9),
        ("dgx-b200", (1, 8), 400, False, 900, 2250, 180 * 10**9),
        ("dgx-b300", (1, 8), 800, False, 900, 2250, 288 * 10**9),
        ("gb200-nvl72", (1, 64), 400, False, 900, 2500, 186 * 10**9),
        ("gb300-nvl72", (1, 64), 800, False, 900, 2500, 288 * 10**9),
        ("dgx-v100", (1, 8), 50, False, 150, None, 32 * 2**30),
        ("aws-p3.16xlarge", (1, 8), 25, True, 150, None, 16 * 2**30),
        ("aws-p4d", (1, 8), 50, False, 300, 312, 40 * 2**30),
        ("aws-p5", (1, 8), 400, False, 450, 989, 80 * 2**30),
        ("gcp-a2-megagpu-16g", (1, 16), 100, True, 300, 312, 40 * 2**30),
        ("gcp-a3-high", (1, 8), 100, False, 450, 989, 80 * 2**30),
        ("pcie-8gpu", (1, 2, 4), 100, True, 31, 362.05, 48 * 2**30),
        ("nvlink-pairs", (1, 4, 2), 100, True, 56.25, 154.8, 48 * 2**30),
    ],
)
def test_figures_of_data_sheets(
    name: str,
    counts: tuple[int, ...],
    node_gigabits: float,
    shared: bool,
    gpu_gigabytes: float,
    bfloat16: float | None,
    memory: int,
) -> None:
    cluster = load_cluster(name)
    node, gpu = cluster.levels[0].link, cluster.levels[-1].link
    assert cluster.level_counts == counts
    assert node.bandwidth_bytes_per_second == pytest.approx(node_gigabits * 1e9 / 8)
    assert node.shared is shared
    assert gpu.bandwidth_bytes_per_second == pytest.approx(gpu_gigabytes * 1e9)
    rate = cluster.device.flops_per_second.get("bfloat16")
    assert rate == (None if bfloat16 is None else pytest.approx(bfloat16 * 1e12))
    assert cluster.device.memory_bytes == memory


def test_efficiencies_say_what_was_measured() -> None:
    """The NVSwitch of an H100 adds on the way; two V100 have one of six links; the pairs have nothing published."""
    h100 = load_cluster("dgx-h100").levels[1].link
    assert h100.efficiency_of("all_reduce", 8) == pytest.approx(445.049 / 450, abs=0.005)
    assert h100.efficiency_of("all_gather", 8) == pytest.approx(335.185 / 450, abs=0.005)
    assert h100.efficiency_of("all_reduce", 8) / h100.efficiency_of("all_gather", 8) > 1.29
    v100 = load_cluster("aws-p3.16xlarge").levels[1].link
    assert v100.efficiency_of("all_reduce", 2) == pytest.approx(22.56 / 150, abs=0.005)
    assert v100.efficiency_of("all_reduce", 8) == pytest.approx(135.3 / 150, abs=0.005)
    assert not load_cluster("nvlink-pairs").levels[2].link.efficiency
    for name in GPU_PRESETS:  # NCCL moves what these move over the same rings
        for level in load_cluster(name).levels:
            for members in (2, 4, 8):
                link = level.link
                assert link.efficiency_of("broadcast", members) == link.efficiency_of("all_gather", members)
                assert link.efficiency_of("reduce", members) == link.efficiency_of("reduce_scatter", members)


def test_local_is_what_the_demo_machine_is() -> None:
    local = load_cluster("local", num_outer=2)
    assert local.num_devices == 4
    assert local.library == "gloo"
    assert local.levels[0].link == local.levels[1].link  # all on one host, over one loopback
