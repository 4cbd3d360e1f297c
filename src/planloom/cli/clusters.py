"""`planloom cluster`: the known clusters, one of them, or this machine."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table

from planloom.cli.output import JsonOption, messages, progress_bar, screen, show, write_file
from planloom.cluster import Cluster, Link, cluster_to_yaml, list_presets, load_cluster
from planloom.errors import ClusterError
from planloom.report.tables import cluster_table, collectives_table

DISCOVER = "discover"


def register(app: typer.Typer) -> None:
    example = "Example: planloom cluster dgx-h100 --nodes 16, or planloom cluster discover --out mine.yaml"
    app.command(name="cluster", epilog=example)(cluster_command)


def cluster_command(
    name: Annotated[
        str | None,
        typer.Argument(help="A preset, a YAML file, or `discover` for this machine; without it, all presets."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(help="The number of outermost members.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the cluster to this YAML file.")] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="With discover: the CPUs, even where there are GPUs.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a cluster: its levels, links and devices; or describe this machine as one."""
    if cpu and name != DISCOVER:
        raise ClusterError(
            "--cpu goes with discover only",
            given=f"planloom cluster {name or ''} --cpu".replace("  ", " "),
            required="planloom cluster discover --cpu",
        )
    if name is None:
        _show_presets(nodes=nodes, out=out, as_json=as_json)
        return
    notices: tuple[str, ...] = ()
    if name == DISCOVER:
        cluster, text, notices = _discover(nodes=nodes, cpu=cpu)
    else:
        cluster = load_cluster(name, num_outer=nodes)
        text = cluster_to_yaml(cluster)
    if out is not None:
        write_file(text, out, failing=ClusterError)
    document = cluster_document(cluster)
    if name == DISCOVER:
        document |= {"notices": list(notices)}
    if out is not None:
        document |= {"out": str(out)}
    collectives = collectives_table(cluster)
    tables: list[RenderableType] = [cluster_table(cluster), *([collectives] if collectives is not None else [])]
    show(document, *tables, as_json=as_json)
    for notice in notices:
        messages.print(f"• {notice}", markup=False)
    if out is not None and not as_json:
        screen.print(f"written to {out}", markup=False)


def cluster_document(cluster: Cluster) -> dict[str, Any]:
    """A cluster for machines."""
    device = cluster.device
    return {
        "name": cluster.name,
        "num_devices": cluster.num_devices,
        "library": cluster.library,
        "levels": [
            {"name": level.name, "count": level.count, **_link_document(level.link)} for level in cluster.levels
        ],
        "device": {
            "name": device.name,
            "flops_per_second": dict(device.flops_per_second),
            "memory_bytes": device.memory_bytes,
            "memory_bytes_per_second": device.memory_bytes_per_second,
            "launch_seconds": device.launch_seconds,
        },
    }


def _link_document(link: Link) -> dict[str, Any]:
    efficiency: dict[str, dict[str, float]] = {}
    for (collective, members), share in link.efficiency.items():
        efficiency.setdefault(collective, {})[str(members or "any")] = share
    return {
        "bandwidth_bytes_per_second": link.bandwidth_bytes_per_second,
        "latency_seconds": link.latency_seconds,
        "shared": link.shared,
        "shape": link.shape,
        "efficiency": efficiency,
        "hop_seconds": dict(link.hop_seconds),
        "start_seconds": dict(link.start_seconds),
        "flow": dict(link.flow),
    }


def _show_presets(*, nodes: int | None, out: Path | None, as_json: bool) -> None:
    if nodes is not None or out is not None:
        raise ClusterError(
            "no cluster is named",
            given="--nodes" if nodes is not None else "--out",
            required="the name of a preset, a YAML file, or discover",
            todo="for example planloom cluster dgx-h100 --nodes 16",
        )
    found = {preset: load_cluster(preset) for preset in list_presets()}
    table = Table("preset", "levels", "device", "links in GB/s", box=SIMPLE_HEAD, pad_edge=False)
    for preset, cluster in found.items():
        levels = " × ".join(f"{level.count} {level.name}" for level in cluster.levels)
        links = ", ".join(
            f"{level.link.bandwidth_bytes_per_second / 1e9:.4g}{' shared' if level.link.shared else ''}"
            for level in cluster.levels
        )
        table.add_row(preset, levels, cluster.device.name, links)
    show({"presets": [cluster_document(cluster) for cluster in found.values()]}, table, as_json=as_json)


def _discover(*, nodes: int | None, cpu: bool) -> tuple[Cluster, str, tuple[str, ...]]:
    """This machine, the text of its file, and what has to be known about its figures."""
    if nodes is not None:
        raise ClusterError(
            "--nodes does not go with discover",
            given=f"--nodes {nodes}",
            required="one machine: this one",
            todo="write it with --out mine.yaml, then planloom cluster mine.yaml --nodes …",
        )
    from planloom.cluster.discover import Machine, discover
    from planloom.cluster.nvml import load_nvml

    with progress_bar("measuring this machine"):
        found = discover(Machine(nvml=None if cpu else load_nvml()))
    return found.cluster, found.to_yaml(), found.notices
