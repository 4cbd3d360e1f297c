"""Who measures: the device and the software that a figure belongs to."""

import platform
from pathlib import Path

import torch


def device_name(device: str, *, num_processes: int = 1, label: str = "") -> str:
    """A device as stores name it. Processes share a CPU, so their number is part of its name; `label`: a quota."""
    if device == "cpu":
        name = f"cpu {platform.machine()} {_cpu_model()} ×{num_processes}"
    else:
        name = torch.cuda.get_device_name(torch.device(device))
    return " ".join(f"{name} {label}".split())


def software_name(*, compiled: bool = False) -> str:
    """The versions on which seconds depend."""
    how = "compiled" if compiled else "eager"
    return f"torch {torch.__version__}, python {platform.python_version()}, {how}"


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.is_file() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
