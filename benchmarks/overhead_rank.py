"""One of four ranks on a CPU: a training step of ours beside DDP's or FSDP2's of the same split.

    torchrun --nproc-per-node 4 -m benchmarks.overhead_rank --model llama-small --rival ddp --rounds 15

DDP is `dp=4`, FSDP2 (`fully_shard` of every layer and of the whole) is `dp=4,zero3`. Every rank trains a copy of one
model with the same optimizer on its part of the same global batch, as large as a process alone has in the other parts
of the benchmark. The two take turns, in alternating order, with a barrier before each; a round counts with its slowest
rank.
"""

import argparse
import copy
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.overhead_case import NUM_WARM_UP, make_optimizer, our_trainer
from benchmarks.overhead_models import build, loss_of
from planloom.execute.processes import report

PLANS = {"ddp": "dp={world}", "fsdp2": "dp={world},zero3"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--rival", required=True, choices=tuple(PLANS))
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, batch = build(arguments.model, num_ranks=world)
    plan = PLANS[arguments.rival].format(world=world)
    trainer = our_trainer(copy.deepcopy(model), batch, plan, "cpu", is_compiled=False)
    rows = next(iter(batch.values())).shape[0] // world
    quarter = {key: tensor[rank * rows : (rank + 1) * rows] for key, tensor in batch.items()}
    theirs = _rival(model, quarter, arguments.rival)
    num_parameters = sum(parameter.numel() for parameter in trainer.runtime.shards.values())

    def ours() -> float:
        return trainer.step(batch)

    first = (ours(), theirs())
    for _ in range(NUM_WARM_UP):
        ours()
        theirs()
    rounds = []
    for number in range(arguments.rounds):
        order = (ours, theirs) if number % 2 else (theirs, ours)
        seconds = {step: _round(step) for step in order}
        rounds.append((seconds[theirs], seconds[ours]))
    if rank == 0:
        report(
            "compared",
            model=arguments.model,
            rival=arguments.rival,
            plan=plan,
            parameters_of_rank=num_parameters,
            rounds=arguments.rounds,
            theirs_seconds=median(other[0] for other, _ in rounds),
            ours_seconds=median(own[0] for _, own in rounds),
            ratio=median(own[0] / other[0] for other, own in rounds),
            processor_ratio=median(own[1] / other[1] for other, own in rounds),
            ratios=sorted(own[0] / other[0] for other, own in rounds),
            loss_difference=abs(first[0] - first[1]) / abs(first[1]),
        )
    trainer.close()
    dist.destroy_process_group()


def _rival(model: nn.Module, batch: dict[str, Tensor], rival: str) -> Callable[[], float]:
    """A step of DDP or FSDP2, which returns the mean loss of all ranks, as ours does."""
    trained = model
    if rival == "ddp":
        trained = DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = make_optimizer(trained.parameters(), "cpu")

    def step() -> float:
        loss = loss_of(trained, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total = loss.detach()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    return step


def _round(step: Callable[[], float]) -> tuple[float, float]:
    """Elapsed seconds of the slowest rank, and the processor's seconds of all."""
    dist.barrier()
    start, processor_start = time.perf_counter(), time.process_time()
    step()
    elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    processor = torch.tensor(time.process_time() - processor_start, dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    dist.all_reduce(processor)
    return float(elapsed), float(processor)


if __name__ == "__main__":
    main()
