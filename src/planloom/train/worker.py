"""One process of a local training run, started by torchrun: `python -m planloom.train.worker --model … --plan …`."""

import argparse
import functools
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from planloom.capture import load_model
from planloom.execute.processes import report, reporting_errors
from planloom.plan import load_plan
from planloom.simulate import Timeline
from planloom.train.trainer import parallelize


def write_timeline(path: str, own: Timeline, rank: int) -> None:
    """Gather the events of all ranks at rank 0, each rank's clock from its own start of the step."""
    gathered: list[Timeline | None] = [None] * dist.get_world_size()
    dist.gather_object(own, gathered if rank == 0 else None)
    if rank == 0:
        events = tuple(event for timeline in gathered if timeline is not None for event in timeline.events)
        Path(path).write_bytes(msgspec.json.encode(Timeline(events=events)))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "plan"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--timeline", default="", help="write the last step's timeline of all ranks here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with reporting_errors(rank):
        model, batch = load_model(arguments.model, device="cpu")
        optimizer = functools.partial(torch.optim.AdamW, lr=arguments.learning_rate)
        trainer = parallelize(model, load_plan(arguments.plan), optimizer=optimizer, compile=arguments.compile)
        for step in range(arguments.steps):
            dist.barrier()
            start = time.perf_counter()
            loss = trainer.step(batch)
            seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if rank == 0:
                report("step", step=step, loss=loss, seconds=float(seconds))
        if arguments.timeline:
            write_timeline(arguments.timeline, trainer.timed_step(batch)[1], rank)
        dist.barrier()
        trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
