"""`planloom placements`: grids, pictures, groups, folding, JSON; and what it refuses."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from planloom.cli.app import app
from planloom.errors import ClusterError, LayoutError, PlanloomError
from planloom.layout import Placement, mesh_of
from planloom.report.placements import axis_coordinates

FOUR_BY_SIXTEEN = ["--levels", "node=4,gpu=16", "--axes", "data=4,model=16"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["placements", *arguments], env={"COLUMNS": "100"})


def text(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return "\n".join(line.rstrip() for line in result.output.splitlines())


def document(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def test_json_has_count_matrices_and_digits() -> None:
    found = document(*FOUR_BY_SIXTEEN)
    assert found["count"] == 3
    assert [p["matrix"] for p in found["placements"]] == [[[1, 4], [4, 4]], [[2, 2], [2, 8]], [[4, 1], [1, 16]]]
    assert (found["levels"], found["axes"]) == ({"node": 4, "gpu": 16}, {"data": 4, "model": 16})
    assert found["placements"][0]["digits"] == {
        "data": [{"level": "gpu", "size": 4}],
        "model": [{"level": "node", "size": 4}, {"level": "gpu", "size": 4}],
    }
    assert "groups" not in found["placements"][0]


def test_groups_are_ordered_tuples() -> None:
    found = document("--levels", "node=2,gpu=4", "--axes", "data=4,model=2", "--groups", "data")
    assert found["placements"][-1]["matrix"] == [[2, 2], [1, 2]]
    assert found["placements"][-1]["groups"] == {"data": [[0, 2, 4, 6], [1, 3, 5, 7]]}
    assert "(0, 2, 4, 6)" in text("--levels", "node=2,gpu=4", "--axes", "data=4,model=2", "--groups", "data")


def test_a_cluster_gives_the_levels() -> None:
    found = document("--cluster", "gcp-a2-megagpu-16g", "--nodes", "4", "--axes", "data=4,model=16")
    assert found["placements"] == document(*FOUR_BY_SIXTEEN)["placements"]


def test_folding() -> None:
    axes = ["--levels", "node=2,gpu=4", "--axes", "a=2,b=2,c=2"]
    assert document(*axes)["count"] == 3
    assert document(*axes, "--fold", "a,b")["count"] == 2
    assert document(*axes, "--fold", "a,b,c")["count"] == 1
    assert document("--levels", "x=4,y=4", "--axes", "a=2,b=2,c=2,d=2", "--fold", "a,b", "--fold", "c,d")["count"] == 3


def test_a_grid_and_a_picture() -> None:
    shown = text("--levels", "node=2,gpu=4", "--axes", "data=2,model=4", "--limit", "1")
    assert shown.startswith("1: data 1×2, model 2×2")
    assert "model 2 2 4" in " ".join(shown.split())
    assert "data·model of each gpu:" in shown
    assert "node 0  0·0 0·1 1·0 1·1" in shown
    assert "node 1  0·2 0·3 1·2 1·3" in shown
    assert shown.endswith("2 placements of data=2,model=4 on node=2,gpu=4; the first 1 are shown, --limit 0 shows all")


def test_many_devices_have_no_picture_and_many_groups_are_cut() -> None:
    shown = text("--levels", "node=16,gpu=8", "--axes", "data=2,model=64", "--groups", "data", "--limit", "1")
    assert "of each gpu" not in shown
    assert "and 48 more; --json has them all" in shown
    assert "of each gpu" in text("--levels", "node=8,gpu=8", "--axes", "data=64")


def test_thousands_are_counted_and_fifty_shown() -> None:
    levels = ["--levels", "pod=16,rack=8,node=8,gpu=8", "--axes", "a=16,b=8,c=8,d=8"]
    shown = text(*levels)
    assert "2,746 placements" in shown
    assert "50: a " in shown
    assert "51: a " not in shown
    assert document(*levels)["count"] == 2746


def test_one_device() -> None:
    assert "1 placement of data=1 on gpu=1" in text("--levels", "gpu=1", "--axes", "data=1")


def test_coordinates_by_axis() -> None:
    mesh = mesh_of(Placement(axes=("dp", "tp"), matrix=((1, 2), (2, 2))))
    assert axis_coordinates(mesh)[5] == (0, 3)
    assert sorted(axis_coordinates(mesh).values()) == [(i, j) for i in range(2) for j in range(4)]


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["--levels", "node=4,gpu=16", "--axes", "data=4,model=8"], ("do not fill", "= 64", "= 32", "change an axis")),
        ([*FOUR_BY_SIXTEEN, "--groups", "dp"], ("no axis 'dp' (--groups)", "one of data, model")),
        ([*FOUR_BY_SIXTEEN, "--fold", "data,dp"], ("axis 'dp' does not exist", "data, model, each once")),
        ([*FOUR_BY_SIXTEEN, "--fold", "data,"], ("--fold: a name is missing", "--fold data,model")),
        (["--axes", "data=4"], ("are not given", "neither --levels nor --cluster", "--cluster dgx-h100")),
        ([*FOUR_BY_SIXTEEN, "--cluster", "dgx-h100"], ("given twice", "one of --levels and --cluster")),
        ([*FOUR_BY_SIXTEEN, "--nodes", "2"], ("--nodes does not go with --levels", "into --levels")),
        (["--levels", "node=4,gpu", "--axes", "d=4"], ("--levels: 'gpu' is not a name and a size", "node=4,gpu=16")),
        (["--levels", "node=4", "--axes", "d=0"], ("--axes: 'd=0' is not", "whole numbers from 1", "--axes data=4")),
        (["--levels", "node=-4", "--axes", "d=4"], ("--levels: 'node=-4' is not",)),
        (["--levels", "node=4,,", "--axes", "d=4"], ("--levels: '' is not",)),
        (["--levels", "node=2,node=2", "--axes", "d=4"], ("--levels: 'node' is given twice", "each once")),
        (["--levels", "node=4", "--axes", "d=²"], ("--axes: 'd=²' is not",)),
    ],
)
def test_what_is_refused(arguments: list[str], messages: tuple[str, ...]) -> None:
    error = run(*arguments).exception
    assert isinstance(error, LayoutError)
    for message in messages:
        assert message in str(error)
    assert error.given
    assert error.required


def test_an_unknown_cluster_is_the_cluster_s_error() -> None:
    error = run("--cluster", "no-such", "--axes", "d=4").exception
    assert isinstance(error, ClusterError)
    assert isinstance(error, PlanloomError)


def test_help_has_an_example() -> None:
    assert "Example: planloom placements --levels node=4,gpu=16" in " ".join(text("--help").split())
