"""`planloom.plan(model, batch, cluster=…)`: from a model in Python to the best plan."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from planloom.blocks import find_blocks
from planloom.capture import Batch, batch_spec, capture
from planloom.cluster import Cluster, load_cluster
from planloom.cost import Prices
from planloom.plan import Plan
from planloom.search import Best, NothingFitsError, Planner, Wishes, find_best, try_relaxations, with_relaxations


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The best plan, its simulated step, and the search that found it (finalists, certificate)."""

    plan: Plan
    step_seconds: float
    memory_bytes: int
    found: Best


def plan_model(
    model: nn.Module,
    batch: Batch,
    *,
    cluster: Cluster | str | Path,
    nodes: int | None = None,
    compiled: bool | None = None,
    **wishes: Any,
) -> Planned:
    """The fastest plan for a model and a global batch on a cluster (a preset's name, a file, or a `Cluster`).

    `wishes` are the fields of `Wishes`: `tp=8`, `pp=4`, `micro=16`, `recompute=False`, `memory_bytes=…`. `compiled`:
    are runs compiled? Without it: on GPUs yes. If nothing fits, the error says which wish would have to give way.
    """
    machine = cluster if isinstance(cluster, Cluster) else load_cluster(cluster, num_outer=nodes)
    blocks = find_blocks(capture(model, batch))
    fused = machine.library == "nccl" if compiled is None else compiled
    prices = Prices(blocks=blocks, cluster=machine, fused=fused)
    planner, spec, wanted = Planner(blocks, machine, fused=fused), batch_spec(batch), Wishes(**wishes)
    try:
        found = find_best(planner, prices, spec, wanted)
    except NothingFitsError as error:
        raise with_relaxations(error, try_relaxations(planner, prices, spec, wanted)) from None
    winner = found.winner
    return Planned(plan=winner.plan, step_seconds=winner.step_seconds, memory_bytes=winner.memory_bytes, found=found)
