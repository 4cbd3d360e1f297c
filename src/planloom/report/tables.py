"""Tables for a terminal."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from planloom.cluster import COLLECTIVES, Cluster, format_bytes, format_seconds
from planloom.plan import Plan
from planloom.plan.families.recipe import Family
from planloom.search import Candidate
from planloom.simulate import Timeline


def candidates_table(candidates: Sequence[Candidate], *, cluster: str, num_more: int = 0) -> Table:
    """Plans, fastest first, those that do not fit into memory behind; `num_more` of them are not shown."""
    table = Table(title=f"Plans for {cluster}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("plan", no_wrap=True)
    table.add_column("placement", no_wrap=True)
    for name in ("step", "waits", "bubble", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("prices", no_wrap=True)
    for i, candidate in enumerate(candidates):
        timeline = candidate.timeline
        if timeline is None or timeline.summary is None:
            table.add_row(candidate.name, candidate.placement, f"[dim]{candidate.refused}[/dim]")
            continue
        waits = sum(timeline.summary.exposed_communication.values())
        row = [candidate.name, candidate.placement, format_seconds(timeline.step_seconds), format_seconds(waits)]
        memory = format_bytes(candidate.memory_bytes)
        row += [f"{timeline.summary.bubble:.0%}", memory if candidate.fits else f"[red]{memory}: too much[/red]"]
        style = "dim" if not candidate.fits else "bold green" if i == 0 else ""
        table.add_row(*row, sources_words(timeline.sources), style=style)
    if num_more > 0:
        table.caption = f"and {num_more} more plans"
    return table


def sources_words(sources: Sequence[str]) -> str:
    """Where prices come from, in a word or two."""
    if "modelled" not in sources:
        return "measured"
    return "modelled" if set(sources) == {"modelled"} else "mixed"


def cluster_table(cluster: Cluster) -> Table:
    """The levels of a cluster and their links; below, what a device does."""
    device = cluster.device
    title = f"{cluster.name}: {cluster.num_devices} × {device.name}, {format_bytes(device.memory_bytes)} each"
    table = Table(title=escape(title), title_justify="left", caption_justify="left")
    for name in ("level", "count", "bandwidth", "latency", "shape", "uplink"):
        table.add_column(name)
    for level in cluster.levels:
        link = level.link
        table.add_row(
            escape(level.name),
            str(level.count),
            f"{link.bandwidth_bytes_per_second / 1e9:.4g} GB/s",
            format_seconds(link.latency_seconds),
            link.shape,
            "shared" if link.shared else "one a device",
        )
    rates = ", ".join(f"{dtype} {_rate(rate)}" for dtype, rate in device.flops_per_second.items())
    memory = f"memory {device.memory_bytes_per_second / 1e9:.4g} GB/s, launch {format_seconds(device.launch_seconds)}"
    table.caption = f"{rates}; {memory}; collectives by {cluster.library}"
    return table


def _rate(flops_per_second: float) -> str:
    scale, unit = (1e12, "TFLOP/s") if flops_per_second >= 1e12 else (1e9, "GFLOP/s")
    return f"{flops_per_second / scale:.4g} {unit}"


def collectives_table(cluster: Cluster) -> Table | None:
    """What is known of single collectives at the levels of a cluster, or None where nothing is."""
    rows = []
    for level in cluster.levels:
        link = level.link
        for collective in COLLECTIVES:
            shares = {members: share for (name, members), share in link.efficiency.items() if name == collective}
            cells = {
                "share of bandwidth among": ", ".join(f"{n or 'any'}: {share:.4g}" for n, share in shares.items()),
                "hop": format_seconds(link.hop_seconds[collective]) if collective in link.hop_seconds else "",
                "start": format_seconds(link.start_seconds[collective]) if collective in link.start_seconds else "",
                "flow": f"{link.flow[collective]:.4g}" if collective in link.flow else "",
            }
            if any(cells.values()):
                rows.append({"level": escape(level.name), "collective": collective, **cells})
    columns = [name for name in rows[0] if any(row[name] for row in rows)] if rows else []
    table = Table(*columns, title="Collectives", title_justify="left")
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    return table if rows else None


def plan_tables(plan: Plan, timeline: Timeline | None) -> list[Table]:
    """A plan in short: its stages, meshes and schedule."""
    table = Table(title=f"Plan {plan.name}", title_justify="left")
    for name in ("stage", "devices", "axes", "blocks", "calls"):
        table.add_column(name)
    for stage, mesh in enumerate(plan.meshes):
        axes = " ".join(f"{axis.name}={axis.size}" for axis in mesh.axes if axis.size > 1) or "–"
        calls = " ".join(
            str(call) for call in dict.fromkeys(c for order in plan.orders for c in order if c.stage == stage)
        )
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


def families_table(families: Sequence[Family]) -> Table:
    """Plans that have a name: what they are, and their options with defaults."""
    table = Table(title="Plans by name", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("name", "options", "what it is"):
        table.add_column(name, overflow="fold")
    for family in families:
        options = [f"no-{n}" if v is True else n if v is False else f"{n}={v}" for n, v in family.options.items()]
        table.add_row(family.name, ",".join(options), escape(family.about))
    table.caption = "as planloom plan MODEL --cluster … --plan megatron:tp=2,pp=2,dp=2"
    table.caption_justify = "left"
    return table
