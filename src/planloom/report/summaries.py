"""What a simulated step comes to, for a terminal: time, and the memory of every role."""

from rich.box import SIMPLE_HEAD
from rich.table import Table

from planloom.cluster import Cluster, format_bytes, format_seconds
from planloom.simulate import Summary, Timeline
from planloom.simulate.memory import PARTS

_MAX_ROLES = 16


def summary_tables(timeline: Timeline, cluster: Cluster) -> list[Table]:
    """A table of the step and one of memory."""
    assert timeline.summary is not None
    return [_step_table(timeline.summary, timeline.sources), _memory_table(timeline.summary, cluster)]


def _step_table(summary: Summary, sources: tuple[str, ...]) -> Table:
    table = Table(title="Step", title_justify="left", box=SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    deviation = f" ± {summary.uncertainty:.0%}" if summary.uncertainty else ""
    table.add_row("seconds", f"[bold]{format_seconds(summary.step_seconds)}[/bold]{deviation}")
    table.add_row("of what the devices can compute (MFU)", f"{summary.mfu:.1%}")
    table.add_row("waiting for other stages (bubble)", f"{summary.bubble:.1%}")
    for axis, seconds in sorted(summary.exposed_communication.items(), key=lambda item: -item[1]):
        share = seconds / summary.step_seconds
        table.add_row(f"waiting for communication over {axis}", f"{format_seconds(seconds)}, {share:.1%}")
    table.add_row("prices", ", ".join(sources))
    return table


def _memory_table(summary: Summary, cluster: Cluster) -> Table:
    """One row a role; of many stages those with the largest peaks."""
    limit = cluster.device.memory_bytes
    title = f"Memory of a device at its peak, of {format_bytes(limit)}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    roles = sorted(enumerate(summary.memory), key=lambda item: -item[1].peak_bytes)[:_MAX_ROLES]
    parts = [part for part in PARTS if any(role.parts.get(part) for _, role in roles)]
    table.add_column("stage")
    for name in ("peak", *parts):
        table.add_column(name, justify="right")
    table.add_column("when")
    for stage, role in sorted(roles):
        peak = format_bytes(role.peak_bytes)
        cells = [format_bytes(role.parts.get(part, 0)) if role.parts.get(part) else "" for part in parts]
        table.add_row(
            str(stage), f"[bold red]{peak}[/bold red]" if role.peak_bytes > limit else peak, *cells, role.when
        )
    left_out = len(summary.memory) - len(roles)
    if left_out:
        table.caption = f"{left_out} stages with smaller peaks are left out"
    return table
