"""A profiling session on this machine: in this process, or on local processes that also measure what they send.

Every figure is in the store as soon as it is measured: a session that is killed goes on where it ended.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from planloom.blocks import BlockGraph
from planloom.capture import Batch
from planloom.cost import PriceStore
from planloom.errors import PriceError
from planloom.execute.compiled import CompiledRuns
from planloom.execute.processes import Launch, run_workers
from planloom.plan import Plan, save_plan
from planloom.profile.examples import example_tensors
from planloom.profile.identity import device_name, software_name
from planloom.profile.measure import measure_programs
from planloom.profile.runs import Measured
from planloom.profile.timing import BUDGET_SECONDS
from planloom.program import Program

Progress = Callable[[int, int], None]


def local_store(
    path: str | Path, num_processes: int = 1, *, device: str = "cpu", compiled: bool = False, label: str = ""
) -> PriceStore:
    """The store for this machine's device; a CPU's with so many processes at once, `label`: under which quota."""
    require_device(device)
    name = device_name(device, num_processes=num_processes, label=label)
    return PriceStore(path, device=name, software=software_name(compiled=compiled))


def local_gpus() -> tuple[str, ...]:
    """The names of the CUDA devices of this machine."""
    return tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))


def require_device(device: str) -> None:
    """Refuse a device that is not there."""
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise PriceError(
            "there is no CUDA device to profile on",
            given=f"torch {torch.__version__}, which sees none",
            required="an NVIDIA GPU with its driver, and a build of torch for CUDA",
            todo="profile on the machine that has one, with --export FILE, and here use --import FILE",
        )


def profile_here(
    blocks: BlockGraph,
    model: torch.nn.Module,
    batch: Batch,
    programs: Sequence[Program],
    store: PriceStore,
    *,
    device: str = "cpu",
    compiled: bool = False,
    progress: Progress,
    writes: bool = True,
    with_links: bool = True,
    budget_seconds: float = BUDGET_SECONDS,
) -> Measured:
    """Measure in this process what the store lacks; with a process group on all of its ranks, of which one `writes`."""
    if torch.device(device).type == "cpu":
        torch.set_num_threads(1)  # as training on local processes does
    filled, buffers = example_tensors(blocks.graph, model, batch, torch.device(device))
    runs = CompiledRuns()
    return measure_programs(
        blocks,
        programs,
        filled,
        buffers,
        {*store.load(), *store.skipped()},
        progress=progress,
        save=store.save if writes else lambda measured: None,
        skip=store.skip if writes else lambda reasons: None,
        make_local=runs.compile if compiled else lambda local: local,
        with_links=with_links,
        budget_seconds=budget_seconds,
    )


def profile_locally(
    model: str,
    plans: Sequence[Plan],
    store: Path,
    *,
    num_processes: int,
    progress: Progress,
    device: str = "cpu",
    compiled: bool = False,
    label: str = "",
    with_links: bool = True,
    budget_seconds: float = BUDGET_SECONDS,
    launch: Launch = run_workers,
) -> None:
    """Measure on local processes what plans of a model use and the store lacks; `with_links`: what they send, too."""
    require_device(device)
    with tempfile.TemporaryDirectory(prefix="planloom-profile-") as folder:
        for i, plan in enumerate(plans):
            save_plan(plan, Path(folder) / f"{i:06d}.json")
        arguments = ["--model", model, "--plans", folder, "--store", str(store), "--device", device, "--label", label]
        arguments += ["--budget", str(budget_seconds)]
        arguments += ["--compiled"] if compiled else []
        arguments += [] if with_links else ["--no-links"]
        launch(
            "planloom.profile.worker", arguments, num_processes, lambda event: progress(event["done"], event["total"])
        )
