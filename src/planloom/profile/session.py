"""A profiling session on this machine: start local processes, let them measure, keep the prices in the store."""

import platform
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from planloom.cost import PriceStore
from planloom.execute.processes import run_workers
from planloom.plan import Plan, save_plan


def local_store(path: str | Path, num_processes: int) -> PriceStore:
    """The store for this machine's CPU with so many processes at once."""
    device = f"cpu {platform.machine()} {platform.processor() or ''} ×{num_processes}".replace("  ", " ")
    software = f"torch {torch.__version__}, python {platform.python_version()}"
    return PriceStore(path, device=device, software=software)


def profile_locally(
    model: str, plans: Sequence[Plan], store: Path, *, num_processes: int, progress: Callable[[int, int], None]
) -> None:
    """Measure everything that these plans of a model (`file.py:factory`) use and the store lacks."""
    with tempfile.TemporaryDirectory(prefix="planloom-profile-") as folder:
        for i, plan in enumerate(plans):
            save_plan(plan, Path(folder) / f"{i}.json")
        run_workers(
            "planloom.profile.worker",
            ["--model", model, "--plans", folder, "--store", str(store)],
            num_processes,
            lambda event: progress(event["done"], event["total"]),
        )
