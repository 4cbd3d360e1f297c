"""One process that measures segments, started by torchrun: `python -m planloom.train.segment_worker --model …`."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

from planloom.blocks import find_blocks
from planloom.capture import load_model
from planloom.execute.processes import report, reporting_errors
from planloom.execute.sharing import shared_capture
from planloom.plan import load_plan
from planloom.profile import local_store
from planloom.profile.examples import example_tensors
from planloom.profile.measure import agreed
from planloom.profile.worker import join
from planloom.program import build_program
from planloom.train.segments import measure_segments


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "plans", "store"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--label", default="")
    parser.add_argument("--compiled", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = join(arguments.device)
    rank, world = dist.get_rank(), dist.get_world_size()
    with reporting_errors(rank):
        model, batch = load_model(arguments.model)
        blocks = find_blocks(shared_capture(model, batch))
        programs = [build_program(blocks, load_plan(path)) for path in sorted(Path(arguments.plans).glob("*.json"))]
        store = local_store(arguments.store, world, device=device, compiled=arguments.compiled, label=arguments.label)
        filled, buffers = example_tensors(blocks.graph, model, batch, torch.device(device))
        measure_segments(
            blocks,
            programs,
            filled,
            buffers,
            agreed(store.load()),
            progress=lambda done, total: report("progress", done=done, total=total) if rank == 0 else None,
            save=store.save if rank == 0 else lambda measured: None,
            compiled=arguments.compiled,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
