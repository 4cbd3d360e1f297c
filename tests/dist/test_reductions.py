"""Synthesized programs on gloo: equal to the sum, whatever the program, dtype, size, in chunks or not."""

import os
import re
import subprocess
import sys
from itertools import product

import pytest
import torch

from planloom.collective import find_reductions
from planloom.layout import Layout, Mesh
from tests.dist.reductions import (
    all_reduce,
    change,
    choices,
    cluster_of,
    contribution,
    of_complex_numbers,
    placed,
)
from tests.dist.workers import Pool, free_port

SHARED = cluster_of((2, 1e7, True, "crossbar"), (2, 1e8, False, "crossbar"))
TORUS = cluster_of((2, 1e7, False, "torus"), (2, 1e7, False, "torus"))
THREE = cluster_of((2, 1e6, True, "crossbar"), (2, 1e7, False, "crossbar"), (2, 1e8, False, "crossbar"))
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32]


def require_sums(
    pool: Pool, mesh: Mesh, axis: str, found: list, num_elements: int, dtypes: list[torch.dtype], asynchronous: bool
) -> None:
    results = pool.run(all_reduce, mesh, found, num_elements, dtypes, asynchronous)
    for group in mesh.groups(mesh.axis(axis).digits):
        for column, dtype in enumerate(dtypes):
            expected = sum(contribution(rank, num_elements, torch.int64) for rank in group).to(dtype)
            for rank, number in product(group, range(len(found))):
                assert torch.equal(results[rank][number][column], expected), f"rank {rank}, choice {number}, {dtype}"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_all_programs_of_two_digits_in_all_dtypes(pools: dict[int, Pool], asynchronous: bool) -> None:
    mesh = placed(("data",), ((2, 2),))
    found = choices(SHARED, mesh, mesh.digits, 1 << 12, 20)
    assert len({tuple(m.kind for p in c.programs for m in p.moves) for c in found}) > 8
    require_sums(pools[4], mesh, "data", found, 4001, DTYPES, asynchronous)


@pytest.mark.parametrize("num_elements", [1, 3, 7, 1001])
def test_odd_sizes_and_sizes_below_the_number_of_chunks(pools: dict[int, Pool], num_elements: int) -> None:
    mesh = placed(("data",), ((2, 2),))
    found = choices(SHARED, mesh, mesh.digits, 64 * (-(-num_elements // 64)), 6)
    require_sums(pools[4], mesh, "data", found, num_elements, [torch.float32, torch.int64], False)


def test_replicas_reduce_at_once(pools: dict[int, Pool]) -> None:
    mesh = placed(("data", "model"), ((1, 2), (2, 1)))
    for axis in ("data", "model"):
        found = choices(SHARED, mesh, mesh.axis(axis).digits, 1 << 12, 6)
        require_sums(pools[4], mesh, axis, found, 4096, [torch.float64], False)


@pytest.mark.parametrize("cluster", [SHARED, TORUS], ids=["shared", "torus"])
def test_many_chunks_on_their_way_at_once(pools: dict[int, Pool], cluster: object) -> None:
    """Large enough for rings, and for sixteen chunks; on a torus two programs take turns."""
    mesh = placed(("data",), ((2, 2),))
    found = [c for c in choices(cluster, mesh, mesh.digits, 1 << 19, 20) if c.num_chunks > 1]
    assert found
    require_sums(pools[4], mesh, "data", found[:4], (1 << 19) - 5, [torch.float32], False)


@pytest.mark.slow
def test_three_levels_on_eight_processes(pools: dict[int, Pool]) -> None:
    mesh = placed(("data",), ((2, 2, 2),))
    found = choices(THREE, mesh, mesh.digits, 1 << 18, 40)
    require_sums(pools[8], mesh, "data", found, (1 << 18) - 1, [torch.float32, torch.bfloat16], False)


A = placed(("a", "b"), ((1, 2), (2, 1)))
DIGITS = A.digits
GOALS = {
    "reduce-scatter": (Layout(splits=((), ()), partial=DIGITS), Layout(splits=(DIGITS, ()))),
    "all-gather": (Layout(splits=(DIGITS, ())), Layout(splits=((), ()))),
    "all-to-all": (Layout(splits=(DIGITS, ())), Layout(splits=((), DIGITS))),
    "broadcast": (Layout(splits=((), ()), master=DIGITS), Layout(splits=((), ()))),
    "scatter": (Layout(splits=((), ()), master=DIGITS), Layout(splits=(DIGITS, ()))),
    "partial over one axis, split over another": (
        Layout(splits=((DIGITS[0],), ()), partial=DIGITS[1:]),
        Layout(splits=((), (DIGITS[0],))),
    ),
}


@pytest.mark.parametrize("goal", GOALS)
def test_every_goal(pools: dict[int, Pool], goal: str) -> None:
    """The six best choices of every goal make the target's pieces, checked element by element."""
    source, target = GOALS[goal]
    sizes = (16, 64)
    whole = torch.arange(16 * 64, dtype=torch.int64).reshape(sizes)
    partial = 1
    for digit in source.partial:
        partial *= digit.size
    local = []
    for device in sorted(A.devices):
        box = source.box(sizes, A.coordinates(device))
        local.append(whole[tuple(slice(*interval) for interval in box)].contiguous())
    for choice in find_reductions(SHARED, A, source, target, sizes, item_bytes=8, num_best=6).choices:
        results = pools[4].run(change, A, choice, local)
        for device in A.devices:
            box = target.box(sizes, A.coordinates(device))
            expected = partial * whole[tuple(slice(*interval) for interval in box)]
            assert torch.equal(results[device].reshape(expected.shape), expected), (goal, device)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_dead_peer_is_an_error_on_all_ranks_within_the_limit(how: str) -> None:
    limit, port, victim = 8.0, str(free_port()), 2
    environment = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "4"}
    command = [sys.executable, "-m", "tests.dist.dying_reduction", str(victim), how, str(limit)]
    processes = [
        subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(4)
    ]
    try:
        for rank, process in enumerate(processes):
            if rank == victim:
                continue
            output, _ = process.communicate(timeout=90)
            assert process.returncode == 3, output
            assert f"failed on rank {rank}: another one is gone, or did not answer within 8 s" in output
            lost = re.search(r"lost after ([\d.]+) s", output)
            assert lost is not None
            assert float(lost.group(1)) < 2 * limit + 5
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_complex_numbers_travel_as_pairs(pools: dict[int, Pool]) -> None:
    own = [torch.complex(torch.arange(4.0) + rank, torch.arange(4.0) * (rank + 1)) for rank in range(2)]
    for total, gathered in pools[2].run(of_complex_numbers):
        assert torch.equal(total, own[0] + own[1])
        assert torch.equal(gathered, torch.cat(own))
