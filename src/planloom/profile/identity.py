"""Who measures: the device and the software that a figure belongs to."""

import platform
from pathlib import Path

import torch

from planloom.cost.matching import CPU_PREFIX


def device_name(device: str, *, num_processes: int = 1, label: str = "") -> str:
    """A device as stores name it; `label`: a quota.

    Processes share a CPU, so their number is part of its name; so it is where there are fewer GPUs than processes.
    """
    if device == "cpu":
        name = f"{CPU_PREFIX}{platform.machine()} {_cpu_model()} ×{num_processes}"
    else:
        name = torch.cuda.get_device_name(torch.device(device))
        count = torch.cuda.device_count()
        name += f" ×{num_processes} on {count}" if num_processes > count else ""
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
