"""One process of a local training run, started by torchrun: `python -m planloom.train.worker --model … --plan …`."""

import argparse
import functools
import time

import torch
import torch.distributed as dist

from planloom.capture import load_model
from planloom.execute.processes import report, reporting_errors
from planloom.plan import load_plan
from planloom.train.trainer import parallelize


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model", "plan"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    with reporting_errors(rank):
        model, batch = load_model(arguments.model)
        optimizer = functools.partial(torch.optim.AdamW, lr=arguments.learning_rate)
        trainer = parallelize(model, load_plan(arguments.plan), optimizer=optimizer)
        for step in range(arguments.steps):
            dist.barrier()
            start = time.perf_counter()
            loss = trainer.step(batch)
            seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if rank == 0:
                report("step", step=step, loss=loss, seconds=float(seconds))
        dist.barrier()
        trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
