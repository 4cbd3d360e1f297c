"""`planloom calibrate`: a table of measured collectives to the links of a cluster file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planloom.cli.app import app
from planloom.cluster import load_cluster
from planloom.collective.measurements import read_measurements
from planloom.collective.pricing import groups_cost
from planloom.errors import ClusterError

GROUPS = ("0-1-2-3-4-5-6-7;8-9-10-11-12-13-14-15", "0-1;2-3;4-5;6-7;8-9;10-11;12-13;14-15", "0-8;1-9;2-10;3-11")


def write_table(path: Path, *, scale: float = 2.0) -> Path:
    """What a DGX A100 pair would show if everything took `scale` times as long as its preset says."""
    cluster = load_cluster("dgx-a100", num_outer=2)
    lines = ["collective,groups,bytes,seconds,note"]
    for text in GROUPS:
        groups = tuple(tuple(map(int, group.split("-"))) for group in text.split(";"))
        for kind in ("all_reduce", "all_gather"):
            for num_bytes in (1 << 18, 1 << 28):
                seconds = scale * groups_cost(cluster, kind, groups).seconds(num_bytes)
                lines.append(f"{kind},{text},{num_bytes},{seconds},made up")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_fitted_cluster_predicts_the_table(tmp_path: Path) -> None:
    table, out = write_table(tmp_path / "table.csv"), tmp_path / "mine.yaml"
    command = ["calibrate", str(table), "--cluster", "dgx-a100", "--nodes", "2", "--out", str(out), "--json"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["num_measurements"] == 12
    assert document["error"] < 0.02
    fitted = load_cluster(out)
    for measured in read_measurements(table, fitted):
        again = groups_cost(fitted, measured.kind, measured.groups).seconds(measured.num_bytes)
        assert again == pytest.approx(measured.seconds, rel=0.05)


def test_tables_for_people(tmp_path: Path) -> None:
    table = write_table(tmp_path / "table.csv")
    result = CliRunner().invoke(app, ["calibrate", str(table), "--cluster", "dgx-a100", "--nodes", "2"])
    assert result.exit_code == 0
    assert "all_gather" in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("collective,groups,seconds\n", "no column bytes"),
        ("collective,groups,bytes,seconds\nall_sum,0-1,8,1\n", "line 2: unknown collective"),
        ("collective,groups,bytes,seconds\nall_reduce,0-1-1,8,1\n", "line 2: groups that"),
        ("collective,groups,bytes,seconds\nall_reduce,0-99,8,1\n", "line 2: groups that"),
        ("collective,groups,bytes,seconds\nall_reduce,0-1;2,8,1\n", "line 2: groups that"),
        ("collective,groups,bytes,seconds\nall_reduce,a-b,8,1\n", "line 2: these are no groups"),
        ("collective,groups,bytes,seconds\nall_reduce,0-1,-8,1\n", "bytes is not a positive number"),
        ("collective,groups,bytes,seconds\nall_reduce,0-1,8,soon\n", "seconds is not a positive number"),
    ],
)
def test_bad_tables_name_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(ClusterError, match=message):
        read_measurements(path, load_cluster("dgx-a100", num_outer=2))


def test_a_missing_table_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot be read"):
        read_measurements(tmp_path / "nothing.csv", load_cluster("dgx-a100"))


def test_it_needs_no_torch(tmp_path: Path) -> None:
    table = write_table(tmp_path / "table.csv")
    code = (
        "import sys; from typer.testing import CliRunner; from planloom.cli.app import app; "
        f"r = CliRunner().invoke(app, ['calibrate', {str(table)!r}, '--cluster', 'dgx-a100', '--nodes', '2']); "
        "assert r.exit_code == 0, r.output; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
