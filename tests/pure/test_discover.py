"""Discovery: GPUs through an NVML that is not there, CPUs and adapters through a sysfs of our own, and this one."""

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from planloom.cluster import Cluster, load_cluster
from planloom.cluster.discover import Discovery, Machine, discover
from planloom.cluster.nvml import load_nvml, read_gpus
from planloom.cluster.probe import CoreRates, Loopback, measure_cores, measure_loopback
from planloom.errors import ClusterError

SUCCESS, INVALID_ARGUMENT, NOT_SUPPORTED = 0, 2, 3
GPU, SWITCH = "gpu", 2


@dataclass(kw_only=True)
class FakeGpu:
    name: str = "NVIDIA H100 80GB HBM3"
    memory: int = 85520809984
    pcie: tuple[int, int] | None = (5, 16)
    version: int = 4
    speed: int | None = 26562
    links: Sequence[int | str] = ()  # what is at the other end of each: a GPU's number, or "switch"


@dataclass(kw_only=True)
class FakeNvml:
    """The functions of NVML that are called, with the same signatures: pointers last, a status returned."""

    gpus: Sequence[FakeGpu]
    init_status: int = SUCCESS
    name_status: int = SUCCESS
    num_open: int = field(default=0)

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.num_open += self.init_status == SUCCESS
        return self.init_status

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.num_open -= 1
        return SUCCESS

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.gpus)
        return SUCCESS

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, handle: Any) -> int:  # noqa: N802
        handle._obj.value = index.value + 1
        return SUCCESS

    def nvmlDeviceGetName(self, handle: Any, name: Any, length: ctypes.c_uint) -> int:  # noqa: N802
        name.value = self._gpu(handle).name.encode()[: length.value - 1]
        return self.name_status

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:  # noqa: N802
        memory._obj.total = self._gpu(handle).memory
        return SUCCESS

    def nvmlDeviceGetPciInfo_v3(self, handle: Any, pci: Any) -> int:  # noqa: N802
        pci._obj.bus_id = self._address(handle.value - 1)
        return SUCCESS

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any, value: Any) -> int:  # noqa: N802
        return self._answer(value, (self._gpu(handle).pcie or (None,))[0])

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Any, value: Any) -> int:  # noqa: N802
        return self._answer(value, (self._gpu(handle).pcie or (None,))[-1])

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: ctypes.c_uint, value: Any) -> int:  # noqa: N802
        links = self._gpu(handle).links
        if link.value >= len(links):
            return INVALID_ARGUMENT if links else NOT_SUPPORTED
        return self._answer(value, int(links[link.value] != "down"))

    def nvmlDeviceGetNvLinkVersion(self, handle: Any, link: ctypes.c_uint, value: Any) -> int:  # noqa: N802
        return self._answer(value, self._gpu(handle).version)

    def nvmlDeviceGetNvLinkRemotePciInfo_v2(self, handle: Any, link: ctypes.c_uint, pci: Any) -> int:  # noqa: N802
        end = self._gpu(handle).links[link.value]
        pci._obj.bus_id = self._address(end).lower() if isinstance(end, int) else b"00000000:FF:00.0"
        return SUCCESS

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Any, link: ctypes.c_uint, value: Any) -> int:  # noqa: N802
        return self._answer(value, SWITCH if self._gpu(handle).links[link.value] == "switch" else 255)

    def nvmlDeviceGetFieldValues(self, handle: Any, count: ctypes.c_int, values: Any) -> int:  # noqa: N802
        speed = self._gpu(handle).speed
        assert (count.value, values._obj.field) == (1, 90)
        values._obj.status, values._obj.value = (NOT_SUPPORTED, 0) if speed is None else (SUCCESS, speed)
        return SUCCESS

    def _gpu(self, handle: Any) -> FakeGpu:
        return self.gpus[handle.value - 1]

    def _address(self, index: int) -> bytes:
        return f"00000000:{0x10 + index:02X}:00.0".encode()

    def _answer(self, value: Any, number: int | None) -> int:
        if number is None:
            return NOT_SUPPORTED
        value._obj.value = number
        return SUCCESS


def never(*_: Any) -> Any:
    raise AssertionError("GPUs are not measured")


def with_gpus(tmp_path: Path, *gpus: FakeGpu) -> Machine:
    return Machine(
        sys=tmp_path, proc=tmp_path, name="box", nvml=FakeNvml(gpus=gpus), measure_cores=never, measure_loopback=never
    )


def write(root: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")


def reloaded(discovery: Discovery, tmp_path: Path) -> Cluster:
    path = tmp_path / "found.yaml"
    path.write_text(discovery.to_yaml(), encoding="utf-8")
    cluster = load_cluster(path)
    assert cluster == discovery.cluster
    return cluster


def shape_of(cluster: Cluster) -> list[tuple[str, int, float, str]]:
    return [(n.name, n.count, n.link.bandwidth_bytes_per_second / 1e9, n.link.shape) for n in cluster.levels]


# --- GPUs ------------------------------------------------------------------------------------------------------------


def test_a_box_with_nvswitch_and_an_adapter_for_each_gpu(tmp_path: Path) -> None:
    for index in range(8):
        port = f"class/infiniband/mlx5_{index}/ports/1"
        write(tmp_path, {f"{port}/rate": "400 Gb/sec (4X NDR)", f"{port}/state": "4: ACTIVE"})
    write(
        tmp_path,
        {"class/infiniband/mlx5_9/ports/1/rate": "400 Gb/sec", "class/infiniband/mlx5_9/ports/1/state": "1: DOWN"},
    )
    write(
        tmp_path,
        {"class/infiniband/mlx5_8/ports/1/rate": "100 Gb/sec", "class/infiniband/mlx5_8/ports/1/state": "4: ACTIVE"},
    )
    machine = with_gpus(tmp_path, *(FakeGpu(links=["switch"] * 18) for _ in range(8)))
    found = discover(machine)
    cluster = reloaded(found, tmp_path)
    assert shape_of(cluster) == [("node", 1, 50.0, "crossbar"), ("gpu", 8, 450.0, "crossbar")]
    assert not cluster.levels[0].link.shared
    preset = load_cluster("dgx-h100")
    assert cluster.device == replace(preset.device, memory_bytes=85520809984)
    assert [n.link.latency_seconds for n in cluster.levels] == [n.link.latency_seconds for n in preset.levels]
    assert any("preset" in notice and "NVIDIA H100 80GB HBM3" in notice for notice in found.notices)
    assert machine.nvml.num_open == 0  # type: ignore[union-attr]  # shut down again
    assert "# Written by `planloom cluster discover`" in found.to_yaml()


def test_fewer_adapters_than_gpus_are_divided_and_one_is_shared(tmp_path: Path) -> None:
    gpus = [FakeGpu(name="NVIDIA A100-SXM4-40GB", memory=42949672960, version=3, links=["switch"] * 12)] * 8
    adapter = {"device/vendor": "0x15b3", "operstate": "up", "speed": "100000"}
    write(tmp_path, {f"class/net/eth0/{name}": text for name, text in adapter.items()})
    shared = discover(with_gpus(tmp_path, *gpus)).cluster.levels[0].link
    assert (shared.bandwidth_bytes_per_second, shared.shared) == (12.5e9, True)
    for index in range(1, 4):
        write(tmp_path, {f"class/net/eth{index}/{name}": text for name, text in adapter.items()})
    divided = discover(with_gpus(tmp_path, *gpus)).cluster
    assert divided.levels[0].link.bandwidth_bytes_per_second == 6.25e9
    assert not divided.levels[0].link.shared
    assert divided.device.name == "A100-SXM4-40GB"
    assert divided.levels[1].link.bandwidth_bytes_per_second == 300e9


def test_bridged_pairs_over_pcie(tmp_path: Path) -> None:
    """Four links of 14 GB/s a pair, of which the version alone would say 25; the joined GPUs are not neighbours."""
    kind = {"name": "NVIDIA RTX A6000", "memory": 51527024640, "version": 3, "speed": 14062, "pcie": (4, 16)}
    gpus = [FakeGpu(**kind, links=[other] * 4) for other in (2, 3, 0, 1)]
    found = discover(with_gpus(tmp_path, *gpus))
    cluster = reloaded(found, tmp_path)
    assert shape_of(cluster) == [("pair", 2, 31.51, "crossbar"), ("gpu", 2, 56.25, "pairs")]
    assert cluster.device.name == "RTX-A6000"
    assert any("CUDA_VISIBLE_DEVICES=0,2,1,3" in notice for notice in found.notices)
    assert any("no level for nodes" in notice for notice in found.notices)


def v100(*ends: int) -> FakeGpu:
    return FakeGpu(name="Tesla V100-SXM2-16GB", memory=16945512448, version=2, speed=25781, pcie=(3, 16), links=ends)


def test_rings_meshes_and_what_has_no_form(tmp_path: Path) -> None:
    ring = discover(with_gpus(tmp_path, *(v100((i + 1) % 4, (i - 1) % 4) for i in range(4))))
    assert shape_of(ring.cluster) == [("gpu", 4, 25.0, "ring")]
    every = discover(with_gpus(tmp_path, *(v100(*(j for j in range(4) if j != i)) for i in range(4))))
    assert shape_of(every.cluster) == [("gpu", 4, 25.0, "pairs")]
    mesh = discover(with_gpus(tmp_path, v100(1, 1, 2), v100(0, 0, 3), v100(3, 3, 0), v100(2, 2, 1)))
    assert shape_of(mesh.cluster) == [("gpu", 4, 75.0, "crossbar")]
    assert any("mesh with unequal links" in notice for notice in mesh.notices)
    uneven = discover(with_gpus(tmp_path, v100(1), v100(0), v100()))
    assert shape_of(uneven.cluster) == [("gpu", 3, 15.75, "crossbar")]
    assert any("unequal groups" in notice for notice in uneven.notices)
    down = discover(with_gpus(tmp_path, *(replace(v100(), links=["down"] * 6) for _ in range(2))))
    assert shape_of(down.cluster) == [("gpu", 2, 15.75, "crossbar")]


def test_drivers_that_know_less(tmp_path: Path) -> None:
    class OldNvml(FakeNvml):
        def __getattribute__(self, name: str) -> Any:
            if name in ("nvmlDeviceGetNvLinkRemoteDeviceType", "nvmlDeviceGetFieldValues"):
                raise AttributeError(name)
            return super().__getattribute__(name)

    gpus = [FakeGpu(links=[1] * 18, speed=None), FakeGpu(links=[0] * 18, speed=None)]
    old, new = (read_gpus(kind(gpus=gpus)) for kind in (OldNvml, FakeNvml))
    assert old == new
    assert {link.remote_gpu for link in old[0].links} == {1}
    assert read_gpus(FakeNvml(gpus=gpus, init_status=9)) == ()  # a library without a driver


@pytest.mark.parametrize(
    ("gpus", "messages"),
    [
        (
            [FakeGpu(name="NVIDIA X9000", memory=2**36)] * 2,
            (
                "the rates of the GPU 'NVIDIA X9000' are not known",
                "device.flops, device.memory_bandwidth and device.launch",
                "name: gpu, count: 2, link: {bandwidth: 63020 MB/s, latency: 5.7 us, shared: false, shape: crossbar}",
                "memory: 64 GiB",
            ),
        ),
        # The same name as a preset's device, half its memory: another card, whose rates are not the same.
        ([FakeGpu(memory=2**35)], ("'NVIDIA H100 80GB HBM3' are not known", "32.0 GiB")),
        ([FakeGpu(name="NVIDIA H100 PCIe")], ("'NVIDIA H100 PCIe' are not known",)),
        ([FakeGpu(), FakeGpu(name="NVIDIA H200")], ("several kinds", "NVIDIA H100 80GB HBM3, NVIDIA H200", "one kind")),
        ([FakeGpu(pcie=None)], ("bandwidth between the GPUs", "link.bandwidth", "--out my.yaml")),
        ([FakeGpu(links=["switch"], version=9)], ("NVLink has an unknown version", "9", "one of 1, 2, 3, 4, 5")),
    ],
)
def test_gpus_that_cannot_be_described(tmp_path: Path, gpus: list[FakeGpu], messages: tuple[str, ...]) -> None:
    with pytest.raises(ClusterError) as caught:
        discover(with_gpus(tmp_path, *gpus))
    for message in messages:
        assert message in str(caught.value)


def test_the_form_in_the_error_needs_nothing_but_the_figures(tmp_path: Path) -> None:
    with pytest.raises(ClusterError) as caught:
        discover(with_gpus(tmp_path, *[FakeGpu(name="NVIDIA X9000", memory=2**36, links=["switch"] * 18)] * 4))
    path = tmp_path / "mine.yaml"
    path.write_text(caught.value.todo.partition("\n\n")[2].replace("...", "7"), encoding="utf-8")
    cluster = load_cluster(path)
    assert shape_of(cluster) == [("gpu", 4, 450.0, "crossbar")]
    assert cluster.device.memory_bytes == 2**36


def test_an_nvml_that_fails_is_an_error_that_says_where(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"(?s)cannot be read.*nvmlDeviceGetName of NVML returned 15.*nvidia-smi"):
        read_gpus(FakeNvml(gpus=[FakeGpu()], name_status=15))


# --- CPUs ------------------------------------------------------------------------------------------------------------

RATES = CoreRates(
    float32_flops_per_second=1.23456e11,
    float64_flops_per_second=6e10,
    memory_bytes_per_second=2e10,
    call_seconds=8e-7,
)


def with_cpus(root: Path, *, sockets: Sequence[Sequence[int]], threads: int = 1, **others: Any) -> Machine:
    """A machine whose CPUs are numbered core by core, each with so many threads."""
    asked: list[Any] = others.pop("asked", [])
    for package, cores in enumerate(sockets):
        for core in cores:
            for cpu in range(core * threads, (core + 1) * threads):
                topology = f"devices/system/cpu/cpu{cpu}/topology"
                write(root, {f"{topology}/physical_package_id": str(package), f"{topology}/core_id": str(core)})
    write(root, {"meminfo": "MemTotal:       16777216 kB\nMemFree: 1 kB", "cpuinfo": "model name\t: Some CPU"})

    def cores(cpus: Sequence[int]) -> CoreRates:
        asked.append(tuple(cpus))
        return RATES

    def loopback(cpu: int, other: int) -> Loopback:
        asked.append((cpu, other))
        return Loopback(bytes_per_second=1e9 if len(asked) > 2 else 2e9, latency_seconds=2e-5)

    cpus = frozenset(cpu for s in sockets for core in s for cpu in range(core * threads, (core + 1) * threads))
    return Machine(sys=root, proc=root, name="box", cpus=cpus, measure_cores=cores, measure_loopback=loopback, **others)


def test_one_process_a_physical_core(tmp_path: Path) -> None:
    asked: list[Any] = []
    found = discover(with_cpus(tmp_path, sockets=[[0, 1], [2, 3]], threads=2, asked=asked))
    cluster = reloaded(found, tmp_path)
    assert shape_of(cluster) == [("socket", 2, 1.0, "crossbar"), ("process", 2, 2.0, "crossbar")]
    assert asked == [(0, 2, 4, 6), (0, 2), (0, 4)]  # one thread a core; within a socket; between two
    assert cluster.device.name == "Some CPU core"
    assert cluster.device.memory_bytes == 4 * 2**30
    assert cluster.device.flops_per_second == {"float64": 6e10, "float32": 1.235e11}
    assert cluster.library == "gloo"


def test_an_adapter_makes_the_machine_a_node(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "class/net/lo/operstate": "unknown",
            "class/net/eth0/speed": "10000",
            "class/net/eth0/operstate": "up",
            "class/net/eth0/device/vendor": "0x8086",
            "class/net/eth1/speed": "25000",
            "class/net/eth1/operstate": "down",
            "class/net/eth1/device/vendor": "0x8086",
            "class/net/veth7/speed": "10000",
            "class/net/veth7/operstate": "up",
            "class/net/eth2/speed": "-1",
            "class/net/eth2/operstate": "up",
            "class/net/eth2/device/vendor": "0x1af4",
        },
    )
    found = discover(with_cpus(tmp_path, sockets=[[0, 1]]))
    assert shape_of(found.cluster) == [("node", 1, 1.25, "crossbar"), ("process", 2, 2.0, "crossbar")]
    assert found.cluster.levels[0].link.shared
    assert "--nodes N" in found.to_yaml()
    assert load_cluster_text(found.to_yaml(), tmp_path, num_outer=4).num_devices == 8


def load_cluster_text(text: str, tmp_path: Path, *, num_outer: int) -> Cluster:
    path = tmp_path / "text.yaml"
    path.write_text(text, encoding="utf-8")
    return load_cluster(path, num_outer=num_outer)


@pytest.mark.parametrize(
    "files",
    [
        {"self/cgroup": "0::/a/b", "fs/cgroup/a/memory.max": str(2**30), "fs/cgroup/a/b/cpu.max": "200000 100000"},
        {"self/cgroup": "0::/", "fs/cgroup/memory.max": str(2**30), "fs/cgroup/cpu.max": "250000 100000"},
        {
            "self/cgroup": "3:cpu,cpuacct:/x\n4:memory:/x",
            "fs/cgroup/memory/x/memory.limit_in_bytes": str(2**30),
            "fs/cgroup/cpu/x/cpu.cfs_quota_us": "200000",
            "fs/cgroup/cpu/x/cpu.cfs_period_us": "100000",
        },
    ],
)
def test_control_groups_limit_cores_and_memory(tmp_path: Path, files: Mapping[str, str]) -> None:
    write(tmp_path, files)
    found = discover(with_cpus(tmp_path, sockets=[[0, 1], [2, 3]]))
    assert shape_of(found.cluster) == [("process", 2, 2.0, "crossbar")]
    assert found.cluster.device.memory_bytes == 2**29
    assert any("quota allows 2 of 4" in notice for notice in found.notices)


def test_control_groups_without_limits(tmp_path: Path) -> None:
    write(tmp_path, {"self/cgroup": "0::/", "fs/cgroup/memory.max": "max", "fs/cgroup/cpu.max": "max 100000"})
    found = discover(with_cpus(tmp_path, sockets=[[0, 1, 2], [3]]))
    assert found.cluster.level_counts == (4,)  # unequal sockets are one
    assert any("unequal numbers of usable cores" in notice for notice in found.notices)
    assert found.cluster.device.memory_bytes == 4 * 2**30


def test_a_machine_without_meminfo(tmp_path: Path) -> None:
    machine = with_cpus(tmp_path, sockets=[[0]])
    (tmp_path / "meminfo").unlink()
    with pytest.raises(ClusterError, match=r"(?s)memory of this machine.*MemTotal"):
        discover(machine)


# --- this machine ----------------------------------------------------------------------------------------------------


def test_measurements_of_this_machine_are_plausible() -> None:
    allowed = os.sched_getaffinity(0)
    cpu = min(allowed)
    rates, loopback = measure_cores([cpu]), measure_loopback(cpu, max(allowed))
    assert 1e8 < rates.float64_flops_per_second < rates.float32_flops_per_second < 1e13
    assert 1e8 < rates.memory_bytes_per_second < 1e12
    assert 1e-8 < rates.call_seconds < 1e-3
    assert 1e7 < loopback.bytes_per_second < 1e12
    assert 1e-7 < loopback.latency_seconds < 1e-2
    assert os.sched_getaffinity(0) == allowed


def test_this_machine_s_driver_answers() -> None:
    library = load_nvml()
    if library is None:
        pytest.skip("no NVIDIA driver on this machine")
    for gpu in read_gpus(library):
        assert gpu.name
        assert gpu.memory_bytes > 2**30
