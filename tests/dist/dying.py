"""A training process of which one rank dies, or stops, in its second step: `tests.dist.dying VICTIM SIGNAL`."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from planloom.blocks import find_blocks
from planloom.capture import batch_spec, capture
from planloom.execute.processes import reporting_errors
from planloom.plan import named_plan, parse_named
from planloom.train import parallelize
from tests.models import build


def main() -> None:
    victim, how = int(sys.argv[1]), getattr(signal, sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    steps_done = [0]

    class Dying(torch.optim.SGD):
        def step(self, closure=None):  # type: ignore[no-untyped-def, override]
            steps_done[0] += 1
            if rank == victim and steps_done[0] == 2:
                print(f"died at {time.time()}", file=sys.stderr, flush=True)
                os.kill(os.getpid(), how)
            return super().step(closure)

    with reporting_errors(rank):
        model, batch = build("gpt", torch.float32)
        blocks = find_blocks(capture(model, batch))
        plan = named_plan(blocks, parse_named("dp=2,tp=2,vocab,zero1"), batch=batch_spec(batch))
        trainer = parallelize(model, plan, optimizer=lambda p: Dying(p, lr=0.1), blocks=blocks)
        for _ in range(5):
            trainer.step(batch)


if __name__ == "__main__":
    main()
