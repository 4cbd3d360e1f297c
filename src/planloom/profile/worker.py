"""One process of a profiling session, started by torchrun: `python -m planloom.profile.worker --model …`."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

from planloom.blocks import find_blocks
from planloom.capture import load_model, tensors_of
from planloom.execute.processes import report, reporting_errors
from planloom.execute.sharing import shared_capture
from planloom.plan import load_plan
from planloom.profile.measure import measure_programs
from planloom.profile.session import local_store
from planloom.program import build_program


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "plans", "store"):
        parser.add_argument(f"--{name}", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with reporting_errors(rank):
        model, batch = load_model(arguments.model, device="cpu")
        blocks = find_blocks(shared_capture(model, batch))
        plans = [load_plan(path) for path in sorted(Path(arguments.plans).glob("*.json"))]
        programs = [build_program(blocks, plan) for plan in plans]
        store = local_store(arguments.store, dist.get_world_size())
        fixed = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        buffers = {name: fixed[name].detach() for name in blocks.graph.buffers}
        measured = measure_programs(
            blocks,
            programs,
            tensors_of(batch, model),
            buffers,
            store.load(),
            progress=lambda done, total: report("progress", done=done, total=total) if rank == 0 else None,
        )
        if rank == 0:
            store.save(measured)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
