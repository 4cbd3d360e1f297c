"""The GPUs of this machine and their links, read through NVML.

NVML is the library of NVIDIA's driver (`libnvidia-ml.so.1`): C functions that return a status and write what was asked
for behind a pointer. They are called through ctypes, so nothing has to be installed. Every function here takes the
library as an argument; a test passes an object with the same functions.

What a GPU or a driver does not support has a status of its own and is no error: such a thing is then not known (None).
"""

import ctypes
from dataclasses import dataclass
from typing import Any, Literal

from planloom.errors import ClusterError

_SUCCESS = 0
_MAX_LINKS = 18  # NVML_NVLINK_MAX_LINKS
_REMOTE_SWITCH = 2  # NVML_NVLINK_DEVICE_TYPE_SWITCH
_FIELD_SPEED = 90  # NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON

# Payload of one NVLink in each direction, by version: stas00/ml-engineering@744d01e18b79, network/README.md, the GPU's
# bandwidth over its number of links.
_LINK_BYTES_PER_SECOND = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}

# Transfers per second and lane, and the share of payload, by PCIe generation (PCI-SIG's base specifications: 8b/10b
# up to 2, 128b/130b up to 5, 242 of 256 bytes of a flit in 6).
_PCIE = {
    1: (2.5e9, 0.8),
    2: (5e9, 0.8),
    3: (8e9, 128 / 130),
    4: (16e9, 128 / 130),
    5: (32e9, 128 / 130),
    6: (64e9, 242 / 256),
}

Remote = Literal["gpu", "switch", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NvLink:
    """One active NVLink of a GPU: what is at its other end (a GPU's index), and its payload in each direction."""

    remote: Remote
    remote_gpu: int | None
    bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as NVML describes it."""

    name: str
    memory_bytes: int
    pcie_bytes_per_second: float | None
    links: tuple[NvLink, ...]


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Pci(ctypes.Structure):
    _fields_ = (
        ("legacy_bus_id", ctypes.c_char * 16),
        ("domain", ctypes.c_uint),
        ("bus", ctypes.c_uint),
        ("device", ctypes.c_uint),
        ("device_id", ctypes.c_uint),
        ("subsystem_id", ctypes.c_uint),
        ("bus_id", ctypes.c_char * 32),
    )


class _FieldValue(ctypes.Structure):
    _fields_ = (
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency", ctypes.c_longlong),
        ("value_type", ctypes.c_int),
        ("status", ctypes.c_int),
        ("value", ctypes.c_ulonglong),
    )


def load_nvml() -> Any | None:
    """The driver's library, or None where there is no NVIDIA driver."""
    try:
        return ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None


def read_gpus(library: Any) -> tuple[Gpu, ...]:
    """All GPUs of this machine, in NVML's order, which is that of their PCI addresses."""
    if library.nvmlInit_v2() != _SUCCESS:
        return ()  # a library without a driver or a device behind it, as in many containers
    try:
        count = ctypes.c_uint()
        _require(library, "nvmlDeviceGetCount_v2", ctypes.byref(count))
        handles = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            _require(library, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            handles.append(handle)
        addresses = [_bus_id(library, "nvmlDeviceGetPciInfo_v3", handle) for handle in handles]
        return tuple(_read_gpu(library, handle, addresses) for handle in handles)
    finally:
        library.nvmlShutdown()


def _read_gpu(library: Any, handle: ctypes.c_void_p, addresses: list[str | None]) -> Gpu:
    name, memory = ctypes.create_string_buffer(96), _Memory()
    _require(library, "nvmlDeviceGetName", handle, name, ctypes.c_uint(len(name)))
    _require(library, "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    return Gpu(
        name=name.value.decode(),
        memory_bytes=memory.total,
        pcie_bytes_per_second=_pcie_rate(library, handle),
        links=tuple(
            link for number in range(_MAX_LINKS) if (link := _read_link(library, handle, number, addresses)) is not None
        ),
    )


def _read_link(library: Any, handle: ctypes.c_void_p, number: int, addresses: list[str | None]) -> NvLink | None:
    """One NVLink, or None if it does not exist or is not active."""
    link = ctypes.c_uint(number)
    if not _number(library, "nvmlDeviceGetNvLinkState", handle, link):
        return None
    version = _number(library, "nvmlDeviceGetNvLinkVersion", handle, link)
    if version not in _LINK_BYTES_PER_SECOND:
        raise ClusterError(
            "an NVLink has an unknown version",
            given=str(version),
            required=f"one of {', '.join(map(str, _LINK_BYTES_PER_SECOND))}",
            todo="write the cluster file by hand; `planloom cluster dgx-h100 --out my.yaml` writes one to start from",
        )
    remote: Remote = "other"
    address = _bus_id(library, "nvmlDeviceGetNvLinkRemotePciInfo_v2", handle, link)
    remote_gpu = addresses.index(address) if address is not None and address in addresses else None
    if remote_gpu is not None:
        remote = "gpu"
    elif _number(library, "nvmlDeviceGetNvLinkRemoteDeviceType", handle, link) == _REMOTE_SWITCH:
        remote = "switch"
    rate = _LINK_BYTES_PER_SECOND[version]
    # Some GPUs run their links slower than the version allows (RTX A6000: 14 GB/s). The speed that the driver names is
    # the signalling rate, which is a little above the payload (26.6 for 25 GB/s on Hopper), so the smaller one counts.
    speed = _FieldValue(field=_FIELD_SPEED)
    if _ask(library, "nvmlDeviceGetFieldValues", handle, ctypes.c_int(1), ctypes.byref(speed)) and not speed.status:
        rate = min(rate, speed.value * 1e6) or rate
    return NvLink(remote=remote, remote_gpu=remote_gpu, bytes_per_second=rate)


def _pcie_rate(library: Any, handle: ctypes.c_void_p) -> float | None:
    """In each direction, at the highest generation and width: an idle GPU lowers the current ones."""
    generation = _number(library, "nvmlDeviceGetMaxPcieLinkGeneration", handle)
    width = _number(library, "nvmlDeviceGetMaxPcieLinkWidth", handle)
    if generation not in _PCIE or not width:
        return None
    transfers, share = _PCIE[generation]
    return transfers * share * width / 8


def _number(library: Any, function: str, *arguments: object) -> int | None:
    value = ctypes.c_uint()
    return value.value if _ask(library, function, *arguments, ctypes.byref(value)) else None


def _bus_id(library: Any, function: str, *arguments: object) -> str | None:
    pci = _Pci()
    return pci.bus_id.decode().lower() if _ask(library, function, *arguments, ctypes.byref(pci)) else None


def _ask(library: Any, function: str, *arguments: object) -> bool:
    """Whether the driver knows the function and it succeeded."""
    try:
        call = getattr(library, function)
    except AttributeError:  # an older driver
        return False
    return bool(call(*arguments) == _SUCCESS)


def _require(library: Any, function: str, *arguments: object) -> None:
    status = getattr(library, function)(*arguments)
    if status != _SUCCESS:
        raise ClusterError(
            "the GPUs of this machine cannot be read",
            given=f"{function} of NVML returned {status}",
            required="a driver that answers",
            todo="see whether nvidia-smi works; --cpu describes the CPUs instead",
        )
