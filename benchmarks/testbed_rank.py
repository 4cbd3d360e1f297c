"""One rank on the testbed: measures its links, or the programs of cases. Started by `reductions_testbed`.

`python -m benchmarks.testbed_rank links OUT` times messages between two devices at every level. `… cases IN OUT` runs
all programs of all cases, in a new order in every round, and checks every result. Times are those of the slowest rank.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from random import Random
from statistics import median

import msgspec
import torch
import torch.distributed as dist

from benchmarks.testbed_cases import Case
from planloom.cluster import Cluster, load_cluster
from planloom.execute.reduce import Reducer
from planloom.execute.wire import Wire

NUM_ROUNDS = 3
"""The first one warms up; a program that takes this much longer than the best in it is not run again."""
OUT_OF_THE_RUNNING = 1.25

_SMALL, _LARGE = 1 << 20, 4 << 20
_NUM_BURSTS, _BURST = 20, 16
_LIMIT = timedelta(seconds=120)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_LIMIT)
    if sys.argv[1] == "links":
        found: object = measure_links(load_cluster(Path(os.environ["TESTBED_CLUSTER"])))
    else:
        cases = msgspec.json.decode(Path(sys.argv[2]).read_bytes(), type=list[Case])
        found = [measure_case(case) for case in cases]
    if dist.get_rank() == 0:
        Path(sys.argv[-1]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def measure_links(cluster: Cluster) -> list[dict[str, float]]:
    """For every level, bandwidth and latency of messages between device 0 and its neighbour at that level."""
    rank, found = dist.get_rank(), []
    for level in range(len(cluster.levels)):
        peer = 1
        for inner in cluster.level_counts[level + 1 :]:
            peer *= inner
        seconds = {size: _one_way(rank, peer, size) for size in (4, _SMALL, _LARGE)}
        bandwidth = (_LARGE - _SMALL) / (seconds[_LARGE] - seconds[_SMALL]) if rank == 0 else 0.0
        found.append({"bandwidth": bandwidth, "latency": seconds[4], "message": _message_seconds(rank, peer)})
    return found


def _message_seconds(rank: int, distance: int) -> float:
    """What a host takes to send and receive one small message, of many at once, while all other devices do so too."""
    partner = rank + distance if rank // distance % 2 == 0 else rank - distance
    if partner >= dist.get_world_size():
        partner = rank
    here, there = torch.zeros(_BURST, 1), torch.zeros(_BURST, 1)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(_NUM_BURSTS if partner != rank else 0):
        works = [dist.irecv(there[i], partner, tag=1 + i) for i in range(_BURST)]
        works += [dist.isend(here[i], partner, tag=1 + i) for i in range(_BURST)]
        for work in works:
            assert work is not None
            work.wait()
    seconds = torch.tensor([(time.perf_counter() - start) / (_NUM_BURSTS * _BURST)])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def _one_way(rank: int, peer: int, num_bytes: int) -> float:
    """Seconds from device 0 to its peer: half of there and back."""
    array, times = torch.zeros(num_bytes, dtype=torch.uint8), []
    for _ in range(7):
        dist.barrier()
        start = time.perf_counter()
        if rank == 0:
            dist.send(array, peer)
            dist.recv(array, peer)
        elif rank == peer:
            dist.recv(array, 0)
            dist.send(array, 0)
        times.append((time.perf_counter() - start) / 2)
    return median(times[1:])


def measure_case(case: Case) -> list[float]:
    """Seconds of every choice of a case, and, last, of torch's own all-reduce."""
    rank, mesh = dist.get_rank(), case.mesh
    wire = Wire(rank, timeout_seconds=_LIMIT.total_seconds())
    group = next(group for group in mesh.groups(case.digits) if rank in group)
    wire.create_groups(mesh.groups(case.digits))
    mine = wire.process_group(group)
    local = _contribution(rank, case.num_elements)
    expected = sum((_contribution(member, case.num_elements) for member in group), torch.zeros_like(local))
    reducers = [Reducer(wire, choice, mesh) for choice in case.choices]

    def default() -> torch.Tensor:
        result = local.clone()
        dist.all_reduce(result, group=mine)
        return result

    runs: list[Callable[[], torch.Tensor]] = [
        *(lambda reducer=reducer: reducer.all_reduce(local) for reducer in reducers),
        default,
    ]
    times: list[list[float]] = [[] for _ in runs]
    random = Random(case.label)
    for number in range(NUM_ROUNDS):
        best = min((median(row) for row in times if row), default=0.0)
        order = [
            i
            for i in range(len(runs))
            if number == 0 or median(times[i]) <= OUT_OF_THE_RUNNING * best or i in (0, len(runs) - 1)
        ]
        for i in random.sample(order, len(order)):
            seconds, result = _timed(runs[i])
            assert torch.equal(result, expected), f"{case.label}: choice {i} is wrong"
            times[i].append(seconds)
    wire.close()
    return [median(row[1:] or row) for row in times]


def _contribution(rank: int, num_elements: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 9, (num_elements,), generator=generator).float()


def _timed(run: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    dist.barrier()
    start = time.perf_counter()
    result = run()
    seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds), result


if __name__ == "__main__":
    main()
