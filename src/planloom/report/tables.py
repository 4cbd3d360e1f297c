"""Tables for a terminal."""

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from planloom.blocks import BlockGraph, Segment
from planloom.cluster import Cluster, format_bytes, format_seconds
from planloom.plan import Plan
from planloom.search import Candidate
from planloom.simulate import Timeline


def candidates_table(candidates: Sequence[Candidate], here: Mapping[str, float], *, cluster: str) -> Table:
    """Plans, fastest first. `here`: predicted seconds on this machine's own links, by label, where known."""
    table = Table(title=f"Plans for {cluster}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("plan", no_wrap=True)
    table.add_column("placement", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("waits", justify="right", no_wrap=True)
    if here:
        table.add_column("here", justify="right", no_wrap=True)
    for i, candidate in enumerate(candidates):
        if candidate.timeline is None:
            table.add_row(candidate.name, candidate.placement, f"[dim]{candidate.refused}[/dim]")
            continue
        compute = max(candidate.timeline.busy_seconds(d, "compute") for d in candidate.timeline.devices)
        step = candidate.step_seconds
        row = [candidate.name, candidate.placement]
        row += [format_seconds(seconds) for seconds in (step, step - compute)]
        row += [format_seconds(here[candidate.label])] if candidate.label in here else []
        table.add_row(*row, style="bold green" if i == 0 else "")
    return table


def blocks_table(blocks: BlockGraph, segments: Sequence[Segment]) -> Table:
    """One row a block, a line between segments."""
    table = Table(title=f"{len(blocks.graph.ops)} operators in {len(blocks.blocks)} blocks", title_justify="left")
    for name in ("block", "operators", "dims", "parameters"):
        table.add_column(name)
    starts = {segment.start for segment in segments}
    for block in blocks.blocks:
        if block.index in starts and block.index:
            table.add_section()
        dims = " ".join(f"{dim.name}={dim.size}" for dim in block.dims)
        table.add_row(block.name, str(len(block.ops)), dims, " ".join(block.parameters))
    return table


def cluster_table(cluster: Cluster) -> Table:
    """The levels of a cluster."""
    device = cluster.device
    title = f"{cluster.name}: {cluster.num_devices} × {device.name}, {format_bytes(device.memory_bytes)} each"
    table = Table(title=title, title_justify="left")
    for name in ("level", "count", "bandwidth", "latency", "uplink"):
        table.add_column(name)
    for level in cluster.levels:
        link = level.link
        table.add_row(
            level.name,
            str(level.count),
            f"{format_bytes(int(link.bandwidth_bytes_per_second))}/s",
            format_seconds(link.latency_seconds),
            "shared" if link.shared else "one a device",
        )
    return table


def plan_tables(plan: Plan, timeline: Timeline | None) -> list[Table]:
    """A plan in short: its stages, meshes and schedule."""
    table = Table(title=f"Plan {plan.name}", title_justify="left")
    for name in ("stage", "devices", "axes", "blocks", "calls"):
        table.add_column(name)
    for stage, mesh in enumerate(plan.meshes):
        axes = " ".join(f"{axis.name}={axis.size}" for axis in mesh.axes if axis.size > 1) or "–"
        calls = " ".join(map(str, plan.orders[stage]))
        table.add_row(
            str(stage),
            " ".join(map(str, mesh.devices)),
            axes,
            str(sum(1 for s in plan.stages if s == stage)),
            calls if len(calls) < 60 else f"{plan.schedule}, {plan.num_micro_batches} micro-batches",
        )
    if timeline is not None:
        table.caption = f"simulated step {format_seconds(timeline.step_seconds)}"
    return [table]
