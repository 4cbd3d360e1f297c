"""Whether a run fits into memory, known before it is tried: on a CPU, who asks for too much is killed."""

from math import prod
from pathlib import Path

import torch

from planloom.blocks import BlockGraph
from planloom.cost.memory import run_memory
from planloom.program import Program, Run

_USABLE_SHARE = 0.9
# Two forwards are in flight, and the gradients of three backwards are kept (`runs`).
_IN_FLIGHT, _KEPT_BACKWARDS = 2, 3
_MIB = 1 << 20


def why_not(blocks: BlockGraph, program: Program, run: Run, device: torch.device) -> str:
    """Why a run cannot be measured here; nothing if it can, or if the device itself will say so."""
    return too_large(_needed_bytes(blocks, program, run), device) if device.type == "cpu" else ""


def too_large(needed_bytes: int, device: torch.device) -> str:
    """Why so much memory cannot be taken; nothing if it can, or if the device itself will say so."""
    if device.type != "cpu" or needed_bytes <= _USABLE_SHARE * (free := available_bytes()):
        return ""
    return f"needs about {needed_bytes // _MIB} MiB, {free // _MIB} MiB are free"


def _needed_bytes(blocks: BlockGraph, program: Program, run: Run) -> int:
    memory = run_memory(blocks, program, run, fused=False)
    inputs = 0
    for slot in run.inputs:
        inputs += prod(slot.layout.local_sizes(slot.sizes)) * blocks.graph.tensors[slot.tensor].item_bytes
    return (1 + _KEPT_BACKWARDS) * inputs + _IN_FLIGHT * memory.forward_peak_bytes + memory.backward_peak_bytes


def available_bytes() -> int:
    """Memory that this process may still take: the machine's, or what its control group leaves."""
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").is_file() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([*found, *_control_group_bytes()], default=1 << 62)


def _control_group_bytes() -> list[int]:
    """What the limits of Linux control groups, version 1 or 2, leave."""
    path, left = Path("/proc/self/cgroup"), []
    for line in path.read_text().splitlines() if path.is_file() else ():
        _, controllers, group = line.split(":", 2)
        if not controllers:
            folder, names = Path("/sys/fs/cgroup") / group.lstrip("/"), ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            folder = Path("/sys/fs/cgroup/memory") / group.lstrip("/")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        texts = [(folder / name).read_text().strip() for name in names if (folder / name).is_file()]
        if len(texts) == 2 and texts[0] != "max":
            left.append(max(0, int(texts[0]) - int(texts[1])))
    return left
