"""This machine as a `Cluster`: what the driver and the kernel say, and what a short measurement shows.

Where there are GPUs they are the devices:

    node    the network adapters (sysfs), left out where no speed is known
    group   GPUs that NVLink joins with each other, over PCIe; left out where it joins all or none
    gpu     NVLink (`planloom.cluster.nvml`), or PCIe

Otherwise one process on each physical core is a device, with measured figures (`planloom.cluster.probe`):

    node, socket (if there are several), process

No figure is invented. A GPU's rates are those of the preset with that GPU; one that no preset has is an error that
names the keys to fill in. What could not be found out, and what stands for it, is in `Discovery.notices`.
"""

import os
import platform
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from planloom.cluster.files import cluster_to_yaml, list_presets, load_cluster
from planloom.cluster.model import Cluster, Device, Level, Link, Shape
from planloom.cluster.nvml import Gpu, read_gpus
from planloom.cluster.probe import CoreRates, Loopback, measure_cores, measure_loopback
from planloom.cluster.units import format_bytes, write_bandwidth, write_bytes
from planloom.errors import ClusterError

# One hop of a ring in NCCL's Simple protocol: NVIDIA/nccl@5067397c2676, src/graph/tuning.cc.
_NVLINK_SECONDS, _PCI_SECONDS, _NET_SECONDS = 3.4e-6, 5.7e-6, 14e-6

# What NVML calls a GPU, without the maker's name, where the presets call it otherwise.
_PRESET_NAMES = {"H100-80GB-HBM3": "H100-SXM5-80GB", "H200": "H200-SXM-141GB", "B200": "B200-SXM-180GB"}

_MEMORY_TOLERANCE = 0.1  # between a preset's nominal size and what the driver leaves of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """A machine found, and what has to be known about the figures."""

    cluster: Cluster
    notices: tuple[str, ...]

    def to_yaml(self) -> str:
        """A cluster file with the notices as comments at its head."""
        lines = ["Written by `planloom cluster discover`.", *self.notices]
        if self.cluster.levels[0].name == "node":
            lines.insert(1, "One node; `--nodes N` (num_outer) makes it N.")
        wrapped = [part for line in lines for part in textwrap.wrap(line, 118, subsequent_indent="  ")]
        return "".join(f"# {line}\n" for line in wrapped) + cluster_to_yaml(self.cluster)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where this machine is read and measured; tests pass their own."""

    sys: Path = Path("/sys")
    proc: Path = Path("/proc")
    name: str = field(default_factory=lambda: platform.node() or "this-machine")
    cpus: frozenset[int] = frozenset()  # those this process may use; none: ask the kernel
    nvml: Any | None = None
    measure_cores: Callable[[Sequence[int]], CoreRates] = measure_cores
    measure_loopback: Callable[[int, int], Loopback] = measure_loopback


def discover(machine: Machine) -> Discovery:
    """The GPUs of a machine, or its CPU cores where it has none, as a cluster of one node."""
    gpus = read_gpus(machine.nvml) if machine.nvml is not None else ()
    notices: list[str] = []
    cluster = _gpu_cluster(machine, gpus, notices) if gpus else _cpu_cluster(machine, notices)
    return Discovery(cluster=cluster, notices=tuple(notices))


# --- GPUs ------------------------------------------------------------------------------------------------------------


def _gpu_cluster(machine: Machine, gpus: Sequence[Gpu], notices: list[str]) -> Cluster:
    kinds = sorted({gpu.name for gpu in gpus})
    if len(kinds) > 1:
        raise ClusterError(
            "the GPUs of this machine are of several kinds",
            given=", ".join(kinds),
            required="one kind: all devices of a cluster are equal",
            todo="write a cluster file for those that you want to use",
        )
    levels = (*_gpu_node(machine, len(gpus), notices), *_gpu_levels(gpus, notices))
    notices.append("Latencies: one hop of a ring in NCCL's Simple protocol (NVIDIA/nccl, src/graph/tuning.cc).")
    return Cluster(name=machine.name, levels=levels, device=_find_device(gpus[0], levels, notices))


def _gpu_levels(gpus: Sequence[Gpu], notices: list[str]) -> tuple[Level, ...]:
    """The levels inside a node: one, or two where NVLink joins some GPUs but not all."""
    if all(gpu.links and all(link.remote == "switch" for link in gpu.links) for gpu in gpus):
        rate = min(sum(link.bytes_per_second for link in gpu.links) for gpu in gpus)
        return (_level("gpu", len(gpus), rate, _NVLINK_SECONDS),)
    rates = _rates_between(gpus)
    groups = _joined(rates, len(gpus))
    size = len(groups[0])
    if any(gpu.links for gpu in gpus) and (size == 1 or any(len(group) != size for group in groups)):
        notices.append("NVLink joins unequal groups of GPUs, or other things than GPUs; the links are those of PCIe.")
        size, groups = 1, [[index] for index in range(len(gpus))]
    if size == 1:
        return (_level("gpu", len(gpus), _pcie(gpus), _PCI_SECONDS),)
    if [index for group in groups for index in group] != list(range(len(gpus))):
        order = ",".join(str(index) for group in groups for index in group)
        notices.append(f"Devices are numbered so that joined GPUs are neighbours: set CUDA_VISIBLE_DEVICES={order}.")
    shape, rate = _group_link(groups, rates, notices)
    inner = _level("gpu", size, rate, _NVLINK_SECONDS, shape=shape)
    if len(groups) == 1:
        return (inner,)
    return (_level("pair" if size == 2 else "group", len(groups), _pcie(gpus), _PCI_SECONDS), inner)


def _rates_between(gpus: Sequence[Gpu]) -> dict[tuple[int, int], float]:
    """Bytes per second from one GPU to another over all NVLinks that join them."""
    rates: dict[tuple[int, int], float] = {}
    for index, gpu in enumerate(gpus):
        for link in gpu.links:
            if link.remote_gpu is not None:
                key = (index, link.remote_gpu)
                rates[key] = rates.get(key, 0.0) + link.bytes_per_second
    return rates


def _joined(rates: Mapping[tuple[int, int], float], num_gpus: int) -> list[list[int]]:
    """The connected parts, each in order, by their first GPU."""
    part = list(range(num_gpus))
    for first, second in rates:
        low, high = sorted((part[first], part[second]))
        part = [low if one == high else one for one in part]
    return [[index for index in range(num_gpus) if part[index] == first] for first in sorted(set(part))]


def _group_link(
    groups: list[list[int]], rates: Mapping[tuple[int, int], float], notices: list[str]
) -> tuple[Shape, float]:
    """Shape and bandwidth of the NVLinks within groups: all pairs alike, a ring, or what comes nearest."""
    size, slowest = len(groups[0]), min(rates.values())
    if all(rates.get((a, b)) == slowest for group in groups for a in group for b in group if a != b):
        return "pairs", slowest
    around = [(group[i], group[(i + 1) % size]) for group in groups for i in range(size)]
    if set(rates) == {*around, *((b, a) for a, b in around)} and len(set(rates.values())) == 1:
        return "ring", slowest
    totals: dict[int, float] = {}
    for (first, _), rate in rates.items():
        totals[first] = totals.get(first, 0.0) + rate
    notices.append(
        "NVLink joins the GPUs in a mesh with unequal links, written as a switch with all links of a GPU: measure"
        " collectives among few neighbours before you trust their prices."
    )
    return "crossbar", min(totals.values())


def _pcie(gpus: Sequence[Gpu]) -> float:
    rates = [gpu.pcie_bytes_per_second for gpu in gpus]
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates):
        raise ClusterError(
            "the bandwidth between the GPUs of this machine cannot be read",
            given="NVML names neither NVLink nor PCIe generation and width",
            required="the key link.bandwidth of the level of the GPUs",
            todo="write a cluster file by hand; `planloom cluster pcie-8gpu --out my.yaml` writes one to start from",
        )
    return min(known)


def _find_device(gpu: Gpu, levels: Sequence[Level], notices: list[str]) -> Device:
    """The preset device with this GPU's name and memory size."""
    name = re.sub(r"^(NVIDIA|Tesla|Quadro)\s+", "", gpu.name).replace(" ", "-")
    for preset in list_presets():
        device = load_cluster(preset).device
        size = gpu.memory_bytes / device.memory_bytes
        if device.name == _PRESET_NAMES.get(name, name) and abs(1 - size) <= _MEMORY_TOLERANCE:
            notices.append(f"{gpu.name}: rates and memory bandwidth from the preset {preset}; memory from NVML.")
            return replace(device, memory_bytes=gpu.memory_bytes)
    links = "".join(
        f"\n  - {{name: {level.name}, count: {level.count}, link: {{bandwidth: "
        f"{write_bandwidth(level.link.bandwidth_bytes_per_second)}, latency: {level.link.latency_seconds * 1e6:g} us, "
        f"shared: {str(level.link.shared).lower()}, shape: {level.link.shape}}}}}"
        for level in levels
    )
    raise ClusterError(
        f"the rates of the GPU {gpu.name!r} are not known",
        given=f"{gpu.name} with {format_bytes(gpu.memory_bytes)}, which no preset has",
        required="the keys device.flops, device.memory_bandwidth and device.launch, from its data sheet",
        todo=f"put this into a file, with figures in place of the dots:\n\nname: my-cluster\nlevels:{links}\n"
        f"device:\n  name: {name}\n  flops: {{float32: ... TFLOP/s, bfloat16: ... TFLOP/s}}\n"
        f"  memory: {write_bytes(gpu.memory_bytes)}\n  memory_bandwidth: ... GB/s\n  launch: ... us\n",
    )


def _gpu_node(machine: Machine, num_gpus: int, notices: list[str]) -> tuple[Level, ...]:
    """Adapters for GPUs: one or more each, or all that there are divided among them, or one for all."""
    adapters = _infiniband(machine.sys) or _ethernet(machine.sys)
    if not adapters:
        notices.append(_no_adapter())
        return ()
    fastest = [speed for speed in adapters.values() if speed == max(adapters.values())]
    names = ", ".join(name for name, speed in adapters.items() if speed == fastest[0])
    notices.append(f"Network: {names} (sysfs), {len(fastest)} of {write_bandwidth(fastest[0])} for {num_gpus} GPUs.")
    if len(fastest) == 1 and num_gpus > 1:
        return (_level("node", 1, fastest[0], _NET_SECONDS, shared=True),)
    return (_level("node", 1, sum(fastest) / num_gpus, _NET_SECONDS),)


# --- network adapters ------------------------------------------------------------------------------------------------


def _infiniband(sys: Path) -> dict[str, float]:
    """Bytes per second of every active InfiniBand or RoCE port, by name."""
    found = {}
    for port in sorted(sys.glob("class/infiniband/*/ports/*")):
        rate = re.match(r"([\d.]+)\s*Gb/sec", _read(port / "rate"))
        if rate is not None and "ACTIVE" in _read(port / "state"):
            found[f"{port.parts[-3]} port {port.name}"] = float(rate[1]) * 1e9 / 8
    return found


def _ethernet(sys: Path) -> dict[str, float]:
    """Bytes per second of every adapter with hardware behind it that is up and knows its speed, by name."""
    found = {}
    for adapter in sorted(sys.glob("class/net/*")):
        speed = _read(adapter / "speed")  # Mbit/s; -1 or an error where there is none, as for most virtual adapters
        if (adapter / "device").exists() and _read(adapter / "operstate") == "up" and speed.isdigit() and int(speed):
            found[adapter.name] = int(speed) * 1e6 / 8
    return found


def _no_adapter() -> str:
    return (
        "No network adapter tells its speed, so there is no level for nodes: for several nodes add one,"
        " {name: node, count: 1, link: {bandwidth: ..., latency: ..., shared: true}}, as the first of the levels."
    )


# --- CPUs ------------------------------------------------------------------------------------------------------------


def _cpu_cluster(machine: Machine, notices: list[str]) -> Cluster:
    cpus = sorted(machine.cpus or os.sched_getaffinity(0))
    sockets = _even_sockets(machine.sys, cpus, _cpu_quota(machine), notices)
    used = [cpu for socket in sockets for cpu in socket]
    rates = machine.measure_cores(used)
    near = machine.measure_loopback(sockets[0][0], sockets[0][-1])
    levels = [_level("process", len(sockets[0]), near.bytes_per_second, near.latency_seconds)]
    if len(sockets) > 1:
        far = machine.measure_loopback(sockets[0][0], sockets[1][0])
        levels.insert(0, _level("socket", len(sockets), far.bytes_per_second, far.latency_seconds))
    adapters = _ethernet(machine.sys)
    if adapters:
        name, speed = max(adapters.items(), key=lambda item: item[1])
        levels.insert(0, _level("node", 1, speed, near.latency_seconds, shared=True))
        notices.append(f"Network: {name} (sysfs). Its latency is that of loopback, without the wire: measure it.")
    else:
        notices.append(_no_adapter())
    notices.append(
        f"Measured with {len(used)} pinned processes at work at once: products of matrices, copies in memory and the"
        " smallest operation in numpy (launch; torch's operations cost more), TCP over loopback."
    )
    device = Device(
        name=_cpu_name(machine.proc),
        flops_per_second={
            "float64": _four_digits(rates.float64_flops_per_second),
            "float32": _four_digits(rates.float32_flops_per_second),
        },
        memory_bytes=_memory_bytes(machine) // len(used),
        memory_bytes_per_second=_four_digits(rates.memory_bytes_per_second),
        launch_seconds=_four_digits(rates.call_seconds),
    )
    return Cluster(name=machine.name, levels=tuple(levels), device=device, library="gloo")


def _even_sockets(sys: Path, cpus: Sequence[int], quota: int | None, notices: list[str]) -> list[list[int]]:
    """One CPU for each physical core that may be used, by socket; as many in each."""
    by_socket: dict[str, dict[str, int]] = {}
    for cpu in cpus:
        topology = sys / f"devices/system/cpu/cpu{cpu}/topology"
        core = _read(topology / "core_id") or f"cpu{cpu}"
        by_socket.setdefault(_read(topology / "physical_package_id"), {}).setdefault(core, cpu)
    sockets = [sorted(cores.values()) for cores in by_socket.values()]
    num_cores = sum(map(len, sockets))
    if quota is not None and quota < num_cores:
        notices.append(f"A quota allows {quota} of {num_cores} cores.")
        sockets = [[cpu for socket in sockets for cpu in socket][:quota]]
    if len({len(socket) for socket in sockets}) > 1:
        notices.append("The sockets have unequal numbers of usable cores and are written as one.")
        sockets = [[cpu for socket in sockets for cpu in socket]]
    return sockets


def _cpu_quota(machine: Machine) -> int | None:
    """How many CPUs' time the control groups allow, rounded down, at least one; None: no limit."""
    quotas = []
    for folder in _control_groups(machine, "cpu"):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if not quota:
            quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(max(1, int(quota) // int(period)))
    return min(quotas, default=None)


def _memory_bytes(machine: Machine) -> int:
    """The machine's memory, or what the control groups leave of it."""
    total = re.search(r"^MemTotal:\s*(\d+) kB", _read(machine.proc / "meminfo"), re.MULTILINE)
    if total is None:
        raise ClusterError(
            "the memory of this machine cannot be read", given=f"{machine.proc}/meminfo", required="a line MemTotal"
        )
    sizes = [int(total[1]) * 1024]
    for folder in _control_groups(machine, "memory"):
        limit = _read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")
        sizes += [int(limit)] if limit.isdigit() else []
    return min(sizes)


def _control_groups(machine: Machine, controller: str) -> list[Path]:
    """The folders of this process's control groups and all around them, versions 2 and 1."""
    folders = []
    for line in _read(machine.proc / "self/cgroup").splitlines() or ["0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = machine.sys / "fs/cgroup" / (controller if controllers else "")
        inside = root / path.lstrip("/")
        folders += [folder for folder in (inside, *inside.parents) if folder.is_relative_to(root)]
    return folders


def _cpu_name(proc: Path) -> str:
    model = re.search(r"^model name\s*:\s*(\S.*)$", _read(proc / "cpuinfo"), re.MULTILINE)
    return f"{model[1].strip() if model is not None else platform.machine()} core"


def _level(
    name: str, count: int, rate: float, latency: float, *, shared: bool = False, shape: Shape = "crossbar"
) -> Level:
    link = Link(
        bandwidth_bytes_per_second=_four_digits(rate),
        latency_seconds=_four_digits(latency),
        shared=shared,
        shape=shape,
    )
    return Level(name=name, count=count, link=link)


def _four_digits(figure: float) -> float:
    """More digits than these no measurement has; data sheet figures lose nothing."""
    return float(f"{figure:.4g}")


def _read(path: Path) -> str:
    """A small file of the kernel's; empty where it does not exist or has nothing to say."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
