"""`planloom cluster`: lists, shows, scales, writes, describes this machine; and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from planloom.cli.app import app
from planloom.cluster import list_presets, load_cluster
from planloom.errors import ClusterError, PlanloomError

SOURCE = Path(__file__).parents[2] / "src"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["cluster", *arguments], env={"COLUMNS": "160"})


def text(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def document(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def test_all_presets_are_listed() -> None:
    listed = text()
    for name in list_presets():
        assert name in listed
    assert [preset["name"] for preset in document()["presets"]] == list(list_presets())


def test_a_cluster_is_shown_with_shape_uplink_and_efficiencies() -> None:
    shown = text("aws-p3.16xlarge", "--nodes", "4")
    for word in ("32 × V100-SXM2-16GB", "crossbar", "shared", "3.125 GB/s", "all_reduce", "4: 0.56", "nccl"):
        assert word in shown
    assert "pairs" in text("nvlink-pairs")
    assert "all_reduce" not in text("nvlink-pairs")  # nothing is known of single collectives there
    assert "GFLOP/s" in text("local")


def test_a_cluster_for_machines() -> None:
    found = document("dgx-h100", "--nodes", "16")
    assert found["num_devices"] == 128
    node, gpu = found["levels"]
    assert (node["count"], node["shared"], node["shape"]) == (16, False, "crossbar")
    assert gpu["efficiency"]["all_gather"] == {"2": 0.57, "4": 0.71, "any": 0.74}
    assert found["device"]["flops_per_second"]["bfloat16"] == 989e12
    assert found["library"] == "nccl"


def test_a_file_is_written_and_shown(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    assert "written to" in text("gcp-a2-megagpu-16g", "--nodes", "4", "--out", str(path))
    assert load_cluster(path) == load_cluster("gcp-a2-megagpu-16g", num_outer=4)
    assert document(str(path))["num_devices"] == 64


def test_this_machine_is_discovered(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    found = document("discover", "--cpu", "--out", str(path))
    cluster = load_cluster(path)
    assert found["num_devices"] == cluster.num_devices
    assert 1 <= cluster.num_devices <= len(os.sched_getaffinity(0))
    assert found["library"] == "gloo"
    assert set(cluster.device.flops_per_second) == {"float32", "float64"}
    assert found["notices"]
    assert found["out"] == str(path)


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["no-such"], ("no cluster 'no-such'", "dgx-h100")),
        (["--nodes", "2"], ("no cluster is named", "--nodes", "dgx-h100 --nodes 16")),
        (["--out", "x.yaml"], ("no cluster is named", "--out")),
        (["dgx-h100", "--nodes", "0"], ("--nodes", "a whole number from 1")),
        (["dgx-h100", "--cpu"], ("--cpu goes with discover only", "planloom cluster dgx-h100 --cpu")),
        (["discover", "--nodes", "2"], ("--nodes does not go with discover", "--out mine.yaml")),
        (["dgx-h100", "--out", "/no/such/folder/x.yaml"], ("cannot be written", "a folder that exists")),
    ],
)
def test_what_is_refused(arguments: list[str], messages: tuple[str, ...]) -> None:
    error = run(*arguments).exception
    assert isinstance(error, ClusterError)
    for message in messages:
        assert message in str(error)
    assert isinstance(error, PlanloomError)


def test_help_has_an_example() -> None:
    assert "planloom cluster discover" in " ".join(text("--help").split())


@pytest.mark.parametrize("command", ["cluster dgx-h100", "placements --levels node=2 --axes data=2"])
def test_these_commands_do_not_import_torch(command: str) -> None:
    program = f"""
import sys
sys.path.insert(0, {str(SOURCE)!r})
from planloom.cli.app import app
try:
    app({command.split()!r})
except SystemExit as end:
    assert not end.code, end.code
print("torch" in sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.split() == ["False"]
