"""`planloom calibrate`: the links of a cluster, fitted to measured collectives."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from planloom.cli.output import JsonOption, messages, show, write_file
from planloom.cli.plans import ClusterOption, NodesOption
from planloom.cluster import cluster_to_yaml, load_cluster
from planloom.collective.measurements import read_measurements
from planloom.errors import ClusterError
from planloom.report.tables import cluster_table, collectives_table


def register(app: typer.Typer) -> None:
    example = "Example: planloom calibrate table.csv --cluster dgx-a100 --nodes 4 --out mycluster.yaml"
    app.command(name="calibrate", epilog=example)(calibrate_command)


def calibrate_command(
    table: Annotated[Path, typer.Argument(help="CSV with the columns collective, groups (0-1;2-3), bytes, seconds.")],
    cluster: ClusterOption,
    nodes: NodesOption = None,
    out: Annotated[Path | None, typer.Option(help="Write the fitted cluster to this YAML file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Fit latencies, bandwidths and efficiencies of a cluster's links to measured collectives."""
    from planloom.collective.calibration import calibrate  # loads scipy

    machine = load_cluster(cluster, num_outer=nodes)
    fit = calibrate(machine, read_measurements(table, machine))
    if out is not None:
        write_file(cluster_to_yaml(fit.cluster), out, failing=ClusterError)
    errors = Table("collective", "measurements", "mean error", "largest error")
    for kind, own in fit.errors.items():
        errors.add_row(kind, str(len(own)), f"{sum(own) / len(own):.1%}", f"{max(own):.1%}")
    collectives = collectives_table(fit.cluster)
    document = {
        "cluster": cluster_to_yaml(fit.cluster),
        "num_measurements": fit.num_measurements,
        "error": fit.error,
        "errors": {kind: sum(own) / len(own) for kind, own in fit.errors.items()},
        "out": str(out) if out else None,
    }
    tables = [cluster_table(fit.cluster), *([collectives] if collectives is not None else []), errors]
    show(document, *tables, as_json=as_json)
    if not as_json:
        text = f"{fit.num_measurements} measurements, predicted again with a mean error of {fit.error:.1%}"
        messages.print(text + (f"; written to {out}" if out else "; --out writes the cluster"))
