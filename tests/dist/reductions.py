"""What a rank does in a reduction case: carry out choices and return what it holds."""

from typing import Any

import torch

from planloom.cluster import Cluster, Device, Level, Link, Shape
from planloom.collective import Choice, Step, find_reductions
from planloom.execute.reduce import Reducer
from planloom.execute.wire import Wire
from planloom.layout import Digit, Layout, Mesh, Placement, mesh_of


def cluster_of(*levels: tuple[int, float, bool, Shape]) -> Cluster:
    """(count, bytes a second, shared, shape) a level, outermost first."""
    device = Device(
        name="d",
        flops_per_second={"float32": 1e9},
        memory_bytes=1 << 30,
        memory_bytes_per_second=1e10,
        launch_seconds=1e-6,
    )
    made = [
        Level(
            name=f"level{i}",
            count=count,
            link=Link(bandwidth_bytes_per_second=rate, latency_seconds=1e-4, shared=shared, shape=shape),
        )
        for i, (count, rate, shared, shape) in enumerate(levels)
    ]
    return Cluster(name="c", levels=tuple(made), device=device, library="gloo")


def placed(axes: tuple[str, ...], matrix: tuple[tuple[int, ...], ...]) -> Mesh:
    return mesh_of(Placement(axes=axes, matrix=matrix))


def choices(cluster: Cluster, mesh: Mesh, over: tuple[Digit, ...], num_elements: int, num_best: int) -> list[Choice]:
    """The best ways to all-reduce, for a size rounded up so that every program fits."""
    source, target = Layout(splits=((),), partial=over), Layout(splits=((),))
    return list(find_reductions(cluster, mesh, source, target, (num_elements,), num_best=num_best).choices)


def contribution(rank: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers: sums of them are exact in every dtype, bfloat16 included."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-4, 5, (num_elements,), generator=generator).to(dtype)


def all_reduce(
    rank: int, mesh: Mesh, found: list[Choice], num_elements: int, dtypes: list[torch.dtype], asynchronous: bool
) -> list[list[Any]]:
    """For every choice and dtype, what this rank holds after an all-reduce."""
    wire = Wire(rank, timeout_seconds=60)
    results = []
    for choice in found:
        reducer = Reducer(wire, choice, mesh)
        row = []
        for dtype in dtypes:
            local = contribution(rank, num_elements, dtype)
            before = local.clone()
            if asynchronous:
                result = reducer.start(local)().reshape(-1)[:num_elements]
            else:
                result = reducer.all_reduce(local)
            assert torch.equal(local, before), "the tensor given is not written to"
            assert result.dtype == dtype
            row.append(result)
        results.append(row)
    wire.close()
    return results


def change(rank: int, mesh: Mesh, choice: Choice, local: list[torch.Tensor]) -> Any:
    """What this rank holds after any change of layout."""
    wire = Wire(rank, timeout_seconds=60)
    result = Reducer(wire, choice, mesh).run(local[rank])
    wire.close()
    return result


def of_complex_numbers(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(the sum, the pieces one after another) of a complex array on two ranks."""
    wire = Wire(rank, timeout_seconds=30)
    wire.create_groups([(0, 1)])
    own = torch.complex(torch.arange(4.0) + rank, torch.arange(4.0) * (rank + 1))
    steps = [
        Step(kind="all_reduce", groups=((0, 1),), shape=(2,), along=(), into=()),
        Step(kind="all_gather", groups=((0, 1),), shape=(2,), along=(0,), into=()),
    ]
    results = tuple(wire.run_steps((step,), own, (4,))() for step in steps)
    wire.close()
    return results[0], results[1]
