"""One process of a profiling session, started by torchrun: `python -m planloom.profile.worker --model …`."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist

from planloom.blocks import find_blocks
from planloom.capture import load_model
from planloom.execute.processes import report, reporting_errors
from planloom.execute.sharing import shared_capture
from planloom.plan import load_plan
from planloom.profile.session import local_store, profile_here
from planloom.profile.timing import BUDGET_SECONDS
from planloom.program import build_program


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "plans", "store"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--label", default="")
    parser.add_argument("--budget", type=float, default=BUDGET_SECONDS)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--no-links", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = join(arguments.device)
    rank = dist.get_rank()
    with reporting_errors(rank):
        model, batch = load_model(arguments.model)
        blocks = find_blocks(shared_capture(model, batch))
        plans = [load_plan(path) for path in sorted(Path(arguments.plans).glob("*.json"))]
        store = local_store(
            arguments.store,
            dist.get_world_size(),
            device=device,
            compiled=arguments.compiled,
            label=arguments.label,
        )
        profile_here(
            blocks,
            model,
            batch,
            [build_program(blocks, plan) for plan in plans],
            store,
            device=device,
            compiled=arguments.compiled,
            progress=lambda done, total: report("progress", done=done, total=total) if rank == 0 else None,
            writes=rank == 0,
            with_links=not arguments.no_links,
            budget_seconds=arguments.budget,
        )
    dist.destroy_process_group()


def join(device: str) -> str:
    """Join the process group; this rank's device. Ranks that share a GPU talk by gloo: NCCL refuses them."""
    if device == "cpu":
        dist.init_process_group("gloo")
        return device
    count = torch.cuda.device_count()
    own_gpus = count >= int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("cpu:gloo,cuda:nccl" if own_gpus else "gloo")
    chosen = f"cuda:{int(os.environ['LOCAL_RANK']) % count}"
    torch.cuda.set_device(chosen)
    return chosen


if __name__ == "__main__":
    main()
