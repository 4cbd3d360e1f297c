"""Ranks that reduce again and again, of which one dies or stops: `tests.dist.dying_reduction VICTIM SIGNAL LIMIT`."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from planloom.execute.reduce import Reducer
from planloom.execute.wire import PeerLostError, Wire
from tests.dist.reductions import choices, cluster_of, placed

NUM_ELEMENTS = 1 << 19


def main() -> None:
    victim, how, limit = int(sys.argv[1]), getattr(signal, sys.argv[2]), float(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    cluster = cluster_of((2, 1e7, True, "crossbar"), (2, 1e8, False, "crossbar"))
    mesh = placed(("data",), ((2, 2),))
    chunked = next(c for c in choices(cluster, mesh, mesh.digits, NUM_ELEMENTS, 20) if c.num_chunks > 1)
    reducer = Reducer(Wire(rank, timeout_seconds=limit), chunked, mesh)
    reducer.all_reduce(torch.ones(NUM_ELEMENTS))
    dist.barrier()
    if rank == victim:
        os.kill(os.getpid(), how)
    start = time.monotonic()
    try:
        while True:
            reducer.all_reduce(torch.ones(NUM_ELEMENTS))
    except PeerLostError as error:
        print(f"lost after {time.monotonic() - start:.1f} s: {error}", flush=True)
        os._exit(3)  # not by way of torch's own teardown, which waits for the others


if __name__ == "__main__":
    main()
