"""`planloom reduce`: every placement, every goal, figures in order, pictures; and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from planloom.cli.app import app
from planloom.cli.reductions import Goal, choice_document, parse_goal
from planloom.cluster import load_cluster
from planloom.collective import Choice, Move, find_reductions
from planloom.errors import ClusterError, LayoutError, PlanloomError
from planloom.layout import Placement, enumerate_placements, mesh_of
from planloom.report.reductions import choice_words

ISSUE = ["--cluster", "gcp-a2-megagpu-16g", "--nodes", "4", "--axes", "data=4,model=16", "--bytes", "2GiB"]
BOTH = [*ISSUE, "--over", "data,model"]
DATA = [*ISSUE, "--over", "data"]
SMALL = ["--cluster", "dgx-a100", "--nodes", "2", "--axes", "data=4,model=4", "--over", "data", "--bytes", "64MiB"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["reduce", *arguments], env={"COLUMNS": "100"})


def text(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return "\n".join(line.rstrip() for line in result.stdout.splitlines())


def document(*arguments: str) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


def require_sound(found: dict[str, Any]) -> None:
    for placed in found["placements"]:
        best = placed["best"]["seconds"]
        assert placed["lower_bound_seconds"] <= best <= placed["default_seconds"] * (1 + 1e-9)
        assert placed["speedup"] == pytest.approx(placed["default_seconds"] / best)
        assert placed["best_over_lower_bound"] == pytest.approx(best / placed["lower_bound_seconds"])
        assert placed["verified"] is True


def test_the_example_of_the_issue() -> None:
    found = document(*DATA)
    expected = enumerate_placements((4, 16), {"data": 4, "model": 16})
    assert [p["matrix"] for p in found["placements"]] == [[list(row) for row in p.matrix] for p in expected]
    assert [p["number"] for p in found["placements"]] == [1, 2, 3]
    require_sound(found)
    about = {"cluster": "gcp-a2-megagpu-16g", "axes": {"data": 4, "model": 16}, "over": ["data"], "bytes": 2 << 30}
    assert about.items() <= found.items()
    assert found["levels"] == {"node": 4, "gpu": 16}
    assert found["goal"] == {"name": "all_reduce", "from": "partial", "to": "whole"}
    times = [p["best"]["seconds"] for p in found["placements"]]
    assert times[2] > 100 * times[0]  # the spread between placements


def test_steps_are_objects() -> None:
    found = document(*BOTH, "--placement", "[[4,1],[1,16]]")
    (placed,) = found["placements"]
    assert placed["matrix"] == [[4, 1], [1, 16]]
    assert placed["number"] == 3
    best = placed["best"]
    assert [step["kind"] for step in best["steps"]] == ["reduce_scatter", "all_reduce", "all_gather"]
    assert best["steps"][0]["over"] == [{"axis": "model", "level": "gpu", "size": 16}]
    assert best["steps"][1]["over"] == [{"axis": "data", "level": "node", "size": 4}]
    assert [step["num_bytes"] for step in best["steps"]] == [2 << 30, 2 << 26, 2 << 26]
    assert best["num_chunks"] > 1
    assert best["seconds"] < sum(step["seconds"] for step in best["steps"])  # chunks overlap
    words = "reduce-scatter gpu×16 → all-reduce node×4 → all-gather gpu×16"
    assert best["words"] == f"{words}, {best['num_chunks']} chunks"
    assert placed["default"]["words"] == "all-reduce node×4·gpu×16"
    assert placed["default"]["seconds"] == placed["default_seconds"]
    require_sound(found)


def test_without_chunks_the_steps_add_up() -> None:
    for placed in document(*BOTH, "--no-chunks", "--top", "5")["placements"]:
        for choice in placed["top"]:
            assert choice["num_chunks"] == 1
            assert choice["seconds"] == pytest.approx(sum(step["seconds"] for step in choice["steps"]))


def test_programs_that_take_turns_share_the_bytes() -> None:
    cluster = load_cluster("gcp-a2-megagpu-16g", num_outer=4)
    mesh = mesh_of(Placement(axes=("data",), matrix=((4, 16),)))
    source, target = parse_goal(["data"], "partial", "whole").layouts(mesh)
    first, second, *_ = find_reductions(cluster, mesh, source, target, (1 << 20,), num_best=2, chunked=False).choices
    both = Choice(programs=(*first.programs, *second.programs), num_chunks=4, seconds=1.0)
    found = choice_document(cluster, mesh, both)
    assert found["words"] == f"{_words(first)} | {_words(second)}, 4 chunks"
    assert [step["program"] for step in found["steps"]] == [0] * len(_moves(first)) + [1] * len(_moves(second))
    assert sum(step["num_bytes"] for step in (found["steps"][0], found["steps"][-len(_moves(second))])) == 4 << 20


def _moves(choice: Choice) -> tuple[Move, ...]:
    return choice.programs[0].moves


def _words(choice: Choice) -> str:
    return choice_words(choice, ("node", "gpu"))


def test_the_top_is_sorted_and_has_the_best() -> None:
    for placed in document(*BOTH, "--top", "10")["placements"]:
        seconds = [choice["seconds"] for choice in placed["top"]]
        assert len(seconds) == 10
        assert seconds == sorted(seconds)
        assert placed["best"] in placed["top"]
    shown = text(*BOTH, "--top", "10", "--placement", "[[4,1],[1,16]]")
    assert "the fastest choices" in shown
    assert shown.count("×  ") >= 10
    assert "✓" in shown


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ("partial", "whole", "all_reduce"),
        ("partial", "shard:0", "reduce_scatter"),
        ("partial", "shard:1", "reduce_scatter"),
        ("shard:0", "whole", "all_gather"),
        ("shard:0", "shard:1", "all_to_all"),
        ("shard:2", "shard:0", "all_to_all"),
        ("master", "whole", "broadcast"),
        ("partial", "master", "reduce"),
        ("shard:0", "master", "gather"),
        ("master", "shard:0", "scatter"),
    ],
)
def test_every_goal(before: str, after: str, name: str) -> None:
    found = document(*SMALL, "--from", before, "--to", after)
    assert found["goal"] == {"name": name, "from": before, "to": after}
    require_sound(found)
    for placed in found["placements"]:
        assert [step["kind"] for step in placed["default"]["steps"]] == [name]
    first = found["placements"][0]["default"]["steps"][0]
    assert first["num_bytes"] == (64 << 20) // (4 if before.startswith("shard") else 1)  # --bytes is the whole array


def test_a_mixture_of_places() -> None:
    places = ["--over", "data,model", "--from", "data=partial,model=shard:0"]
    found = document(*ISSUE, *places)
    require_sound(found)
    assert found["goal"]["name"] == "change_of_layout"
    assert "change from data=partial,model=shard:0 to whole of 2.00 GiB" in text(*ISSUE, *places)
    stays = document(*ISSUE, *places, "--to", "data=whole,model=shard:0")
    assert stays["goal"]["name"] == "all_reduce"
    require_sound(stays)
    assert stays["placements"][0]["default"]["steps"][0]["num_bytes"] == (2 << 30) // 16


def test_slices_send_nothing_and_have_no_bound() -> None:
    placed = document(*SMALL, "--from", "whole", "--to", "shard:0")["placements"][0]
    assert (placed["lower_bound_seconds"], placed["best_over_lower_bound"]) == (0.0, None)
    assert "–" in text(*SMALL, "--from", "whole", "--to", "shard:0")


def test_masters_are_told() -> None:
    shown = [
        choice["words"]
        for placed in document(*BOTH, "--from", "partial", "--to", "master", "--top", "24")["placements"]
        for choice in placed["top"]
    ]
    assert any("(first gpu)" in words for words in shown)


def test_axes_are_told_where_a_level_has_two_digits() -> None:
    shown = [
        choice["words"]
        for choice in document(*BOTH, "--placement", "[[2,2],[2,8]]", "--top", "24")["placements"][0]["top"]
    ]
    assert any("reduce-scatter gpu×2·gpu×8 → all-reduce node×2·node×2 → all-gather" in words for words in shown)
    assert any("data:node×2" in words and "model:node×2" in words for words in shown)
    assert len(set(shown)) == len(shown)


def test_sizes_are_rounded_up_and_this_is_said() -> None:
    uneven = [*SMALL[:-1], "1000001B"]
    found = document(*uneven)
    assert (found["bytes_given"], found["bytes"], found["shape"]) == (1_000_001, 1_000_016, [250_004])
    assert "1,000,001 bytes were rounded up to 1,000,016" in text(*uneven)
    assert "rounded" not in text(*SMALL)
    assert document(*uneven, "--dtype", "bfloat16")["bytes"] == 1_000_008


def test_the_shape_is_even_for_every_split() -> None:
    axes = {"a": 4, "b": 3, "c": 2}
    goal = Goal(before={"a": 0, "b": "partial"}, after={"a": 2, "b": 0})
    assert goal.shape(axes, 1) == (12, 1, 12)
    assert goal.shape(axes, 1000) == (12, 1, 84)
    assert Goal(before={"a": "partial"}, after={"a": "whole"}).shape(axes, 5) == (8,)
    assert parse_goal(["a", "b"], "shard:0", "a=whole, b=shard:1").after == {"a": "whole", "b": 1}


def test_the_terminal_shows_figures_words_and_bars() -> None:
    shown = text(*BOTH)
    assert shown.startswith("all-reduce of 2.00 GiB over data,model on gcp-a2-megagpu-16g: 4 node × 16 gpu")
    for word in ("default", "best", "speed-up", "bound", "best/bound", "█"):
        assert word in shown
    assert "reduce-scatter gpu×16 → all-reduce node×4 → all-gather gpu×16" in shown
    assert "3 placements, fastest first" in shown
    assert "verified: every program" in shown


def test_the_fastest_placement_is_first_and_the_rest_can_be_left_out() -> None:
    shown = text("--cluster", "two-by-two", "--axes", "data=2,model=2", "--over", "model", "--bytes", "4MiB")
    assert shown.index("2: data 2×1, model 1×2") < shown.index("1: data 1×2, model 2×1")
    assert "as long as the fastest" in shown
    cut = text(*DATA, "--limit", "1")
    assert "data 4×1" not in cut
    assert "the first 1 are shown, --limit 0 shows all" in cut


def test_many_devices_are_not_verified() -> None:
    many = ["--cluster", "dgx-h100", "--nodes", "64", "--axes", "data=512", "--over", "data", "--bytes", "1GiB"]
    assert document(*many)["placements"][0]["verified"] is None
    assert "not verified: more than 256 devices" in text(*many)


def test_the_picture_is_valid_xml(tmp_path: Path) -> None:
    picture = tmp_path / "out.svg"
    found = document(*BOTH, "--picture", str(picture))
    root = ElementTree.parse(picture).getroot()
    name = "{http://www.w3.org/2000/svg}"
    assert root.tag == f"{name}svg"
    bars = [bar for bar in root.iter(f"{name}rect") if bar.find(f"{name}title") is not None]
    assert len(bars) == 2 * len(found["placements"])
    widths = [float(bar.attrib["width"]) for bar in bars]
    first = min(found["placements"], key=lambda p: p["best"]["seconds"])
    assert widths[0] / widths[1] == pytest.approx(first["speedup"], rel=1e-3)
    assert len(list(root.iter(f"{name}line"))) == len(found["placements"])


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        ([*ISSUE, "--over", "dp"], ("no axis 'dp' (--over)", "some of data, model", "--over data")),
        ([*ISSUE, "--over", "data,data"], ("axis 'data' is named twice",)),
        ([*DATA[:4], "--axes", "data=4,model=8", *DATA[6:]], ("do not fill", "= 64", "= 32", "change an axis")),
        ([*DATA, "--placement", "[[4,1],[1,16]"], ("not a matrix", "JSON", "[[4,1],[1,16]]")),
        ([*DATA, "--placement", "[[4,true],[1,16]]"], ("not a matrix",)),
        ([*DATA, "--placement", "[4,1]"], ("not a matrix",)),
        ([*DATA, "--placement", "[[4,4],[1,4]]"], ("no placement of these", "data=4, model=16", "node=4, gpu=16")),
        ([*DATA, "--placement", "[[4,1]]"], ("no placement of these", "planloom placements")),
        ([*DATA, "--to", "split:0"], ("--to: 'split:0' is no place", "shard:0", "data=partial")),
        ([*DATA, "--to", "shard:8"], ("--to: 'shard:8' is no place",)),
        ([*DATA, "--from", "shard"], ("--from: 'shard' is no place",)),
        ([*DATA, "--from", "whole"], ("nothing is to be done", "--from whole --to whole")),
        ([*DATA, "--from", "model=partial"], ("--from: 'model' is not in --over", "each of data")),
        ([*BOTH, "--from", "data=partial"], ("--from: no place for model", "leave the axis out")),
        ([*BOTH, "--from", "data=partial,data=whole"], ("'data' is named twice",)),
        ([*DATA, "--from", "whole", "--to", "master"], ("cannot stay", "from partial or shard:N")),
        ([*BOTH, "--from", "data=0"], ("'0' is no place",)),
        ([*BOTH, "--from", "shard:0", "--to", "data=whole,model=shard:0"], ("no single program", "first in --over")),
        ([*DATA, "--dtype", "float31"], ("unknown dtype 'float31'", "float32")),
    ],
)
def test_what_is_refused(arguments: list[str], messages: tuple[str, ...]) -> None:
    error = run(*arguments).exception
    assert isinstance(error, LayoutError)
    for message in messages:
        assert message in str(error)
    assert error.given
    assert error.required


def test_naming_the_axis_that_stays_first_helps() -> None:
    require_sound(document(*ISSUE, "--over", "model,data", "--from", "shard:0", "--to", "data=whole,model=shard:0"))


def test_an_axis_of_size_one_has_nothing_to_do() -> None:
    error = run("--cluster", "two-by-two", "--axes", "a=4,b=1", "--over", "b", "--bytes", "1MiB").exception
    assert isinstance(error, LayoutError)
    assert "size 1" in str(error)


def test_bad_bytes_and_clusters_and_paths(tmp_path: Path) -> None:
    for arguments in ([*DATA, "--bytes", "2 gigs"], ["--cluster", "no-such", *DATA[2:]]):
        assert isinstance(run(*arguments).exception, ClusterError)
    error = run(*SMALL, "--picture", str(tmp_path / "missing" / "out.svg")).exception
    assert isinstance(error, PlanloomError)
    assert "cannot be written" in str(error)


def test_help_has_an_example() -> None:
    assert "Example: planloom reduce --cluster gcp-a2-megagpu-16g --nodes 4" in " ".join(text("--help").split())


def test_torch_is_not_imported() -> None:
    program = (
        "import sys\n"
        "from planloom.cli.app import app\n"
        f"app({['reduce', *SMALL, '--json']!r}, standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["placements"]) == 2
