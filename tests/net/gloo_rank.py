"""A rank of a testbed: torch.distributed with gloo; an all-reduce, and the bandwidth from rank 0 to some others."""

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

NUM_ELEMENTS = 1_500_000


def main() -> None:
    peers = [int(word) for word in sys.argv[1:]]
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    values = torch.arange(100_003, dtype=torch.float64) * (rank + 1)
    dist.all_reduce(values)
    equal = bool((values == torch.arange(100_003, dtype=torch.float64) * (world * (world + 1) // 2)).all())
    bytes_per_second = {}
    message, answer = torch.ones(NUM_ELEMENTS, dtype=torch.float32), torch.ones(1)
    for peer in peers:
        dist.barrier()
        if rank == 0:
            started = time.perf_counter()
            dist.send(message, peer)
            dist.recv(answer, peer)
            bytes_per_second[peer] = message.nbytes / (time.perf_counter() - started)
        elif rank == peer:
            dist.recv(message, 0)
            dist.send(answer, 0)
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps({"equal": equal, "bytes_per_second": bytes_per_second}))


if __name__ == "__main__":
    main()
