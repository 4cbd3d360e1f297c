"""`planloom cluster`: the known clusters, or one of them."""

from typing import Annotated

import typer
from rich.table import Table

from planloom.cli.output import JsonOption, show
from planloom.cluster import Cluster, list_presets, load_cluster
from planloom.report import cluster_table


def register(app: typer.Typer) -> None:
    app.command(name="cluster", epilog="Example: planloom cluster dgx-h100 --nodes 16")(cluster_command)


def cluster_command(
    name: Annotated[str | None, typer.Argument(help="A preset or a YAML file; without it, all presets.")] = None,
    nodes: Annotated[int | None, typer.Option(help="The number of outermost members.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show a cluster: its levels, links and devices."""
    if name is None:
        table = Table("preset", "devices", "device")
        found = {preset: load_cluster(preset) for preset in list_presets()}
        for preset, cluster in found.items():
            table.add_row(preset, " × ".join(f"{n.count} {n.name}" for n in cluster.levels), cluster.device.name)
        show({"presets": [_document(c) for c in found.values()]}, table, as_json=as_json)
        return
    cluster = load_cluster(name, num_outer=nodes)
    show(_document(cluster), cluster_table(cluster), as_json=as_json)


def _document(cluster: Cluster) -> dict[str, object]:
    return {
        "name": cluster.name,
        "num_devices": cluster.num_devices,
        "levels": [
            {
                "name": level.name,
                "count": level.count,
                "bandwidth_bytes_per_second": level.link.bandwidth_bytes_per_second,
                "latency_seconds": level.link.latency_seconds,
                "shared": level.link.shared,
            }
            for level in cluster.levels
        ],
        "device": {"name": cluster.device.name, "memory_bytes": cluster.device.memory_bytes},
    }
