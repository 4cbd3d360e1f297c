"""The command line: what it prints, what it refuses, and how it ends."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
TINY = "examples/models/gpt.py:tiny"


def planloom(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "planloom", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def document(*arguments: str) -> dict[str, Any]:
    done = planloom(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_help_does_not_import_torch_and_every_command_has_an_example() -> None:
    code = "import sys; from planloom.cli.app import app; print(len(app.registered_commands), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["18", "False"]
    for command in (
        "demo",
        "plan",
        "fit",
        "explain",
        "compare",
        "profile",
        "verify",
        "simulate",
        "plans",
        "schedule",
        "blocks",
        "models",
        "train",
        "cluster",
    ):
        done = planloom(command, "--help")
        assert done.returncode == 0
        assert f"Example: planloom {command}" in " ".join(done.stdout.split())
        assert "--json" in done.stdout


def test_clusters_are_listed_and_scaled() -> None:
    assert "dgx-h100" in [preset["name"] for preset in document("cluster")["presets"]]
    assert document("cluster", "dgx-h100", "--nodes", "16")["num_devices"] == 128


def test_blocks_of_a_model(tmp_path: Path) -> None:
    picture = tmp_path / "blocks.dot"
    found = document("blocks", TINY, "--dot", str(picture))
    assert found["operators"] > found["blocks"] > found["segments"] >= found["distinct_segments"] > 1
    assert "layers.0.attention.qkv" in [block["name"] for block in found["block_list"]]
    assert len(found["block_list"]) == found["blocks"]
    assert len(found["segment_list"]) == found["segments"]
    assert sum(segment["stop"] - segment["start"] for segment in found["segment_list"]) == found["blocks"]
    assert sum(segment["count"] for segment in found["distinct_segment_list"]) == found["segments"]
    assert sum(block["flops"] for block in found["block_list"]) == found["flops"]
    assert 2 * found["flops"] < found["training_flops"] <= 3 * found["flops"]
    assert found["parameters"] > 0
    assert 0 < found["capture_seconds"] < 120
    assert 1 << 26 < found["peak_rss_bytes"] < 1 << 33
    strategies = found["strategies_log10"]
    assert strategies["operators"] > strategies["blocks"] >= strategies["distinct_segments"] > 0
    assert picture.read_text().startswith("digraph blocks {")


def test_plan_then_verify_then_simulate(tmp_path: Path) -> None:
    path, picture = tmp_path / "plan.json", tmp_path / "timeline.svg"
    found = document("plan", TINY, "--cluster", "two-by-two", "--out", str(path))
    losses = [other["loses"] for other in found["alternatives"]]
    assert len(losses) == 3
    assert losses == sorted(losses)
    assert losses[0] >= 0
    assert 0 <= found["gap"] < 1
    assert found["verified"] is True
    assert found["memory_bytes"] > 0
    assert found["axes"].keys() >= {"pp"}
    proof = document("verify", str(path), TINY)
    assert proof["verified"] is True
    assert proof["devices"] == 4
    timed = document("simulate", str(path), TINY, "--cluster", "two-by-two", "--picture", str(picture))
    assert timed["step_seconds"] == pytest.approx(found["step_seconds"])
    assert (found["compiled"], found["links"], found["profile"]) == (False, "cluster", None)
    assert timed["compiled"] is False
    assert picture.read_text().startswith("<svg")


def test_a_plan_is_explained_and_compared(tmp_path: Path) -> None:
    path, other = tmp_path / "plan.json", tmp_path / "other.json"
    chosen = document("plan", TINY, "--cluster", "two-by-two", "--out", str(path))
    document("plan", TINY, "--cluster", "two-by-two", "--named", "tp=4,vocab", "--out", str(other))
    blocks = document("explain", str(path))["blocks"]
    assert sum(block["count"] for block in blocks) == document("blocks", TINY)["blocks"]
    strategies = document("explain", str(path), "layers.0.up")["alternatives"]
    assert strategies[0]["lost_seconds"] == 0
    assert sum(own["is_chosen"] for own in strategies) == 1
    both = document("compare", str(path), str(other))
    assert both["plans"][0]["step_seconds"] == pytest.approx(chosen["step_seconds"])
    assert both["second_over_first"] > 1


def test_whether_a_model_fits() -> None:
    found = document("fit", TINY, "--cluster", "two-by-two")
    assert found["fits"] is True
    assert found["devices_needed"] == 2
    assert document("fit", TINY, "--cluster", "two-by-two", "--memory", "50KiB")["fits"] is False


REFUSED = [
    (["cluster", "no-such"], "no-such"),
    (["blocks", "no/such/file.py:x"], "path/to/file.py:factory"),
    (["blocks", "examples/models/gpt.py:nothing"], "has no 'nothing'"),
    (["blocks", TINY, "--dot", "no/such/folder/x.dot"], "cannot be written"),
    (["plan", TINY, "--cluster", "two-by-two", "--named", "dp=3"], "does not fill the cluster"),
    (["plan", TINY, "--cluster", "two-by-two", "--named", "dp=4,cats"], "unknown word 'cats'"),
    (["plan", TINY, "--cluster", "two-by-two", "--named", "dp=4,micro=3"], "does not divide"),
    (["plan", TINY, "--cluster", "dgx-h100", "--measure"], "H100-SXM5-80GB cannot be measured here"),
    (["plan", TINY, "--cluster", "two-by-two", "--profile", "B200", "--store", "no.sqlite"], "no store of measured"),
    (["plan", TINY, "--cluster", "two-by-two", "--tp", "3"], "do not fill the devices"),
    (["plan", TINY, "--cluster", "two-by-two", "--micro", "7"], "does not divide"),
    (
        ["plan", TINY, "--cluster", "two-by-two", "--memory", "50KiB", "--pp", "1", "--relax-seconds", "0"],
        "no plan fits into memory",
    ),
    (["plan", TINY, "--cluster", "two-by-two", "--pin", "nothing=out:tp"], "a pin concerns nothing"),
    (["plan", TINY, "--cluster", "two-by-two", "--pricing", "gold"], "seconds or volume"),
    (["plan", TINY, "--cluster", "two-by-two", "--global-batch", "8"], "the one that its factory returns"),
    (["verify", "README.md", TINY], "is not a plan file"),
    (["verify", "absent.json", TINY], "cannot be read"),
]


@pytest.mark.parametrize(("arguments", "text"), REFUSED)
def test_bad_input_is_one_readable_message_and_exit_code_two(arguments: list[str], text: str) -> None:
    done = planloom(*arguments)
    assert done.returncode == 2
    assert text in done.stderr.replace("\n", " ").replace("  ", " ") or text in done.stderr
    assert "error:" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_an_error_as_json_and_with_a_traceback() -> None:
    done = planloom("cluster", "no-such", "--json")
    assert done.returncode == 2
    assert "no-such" in json.dumps(json.loads(done.stdout)["error"])
    assert "Traceback" in planloom("--debug", "cluster", "no-such").stderr


def test_a_plan_for_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    document("plan", TINY, "--cluster", "two-by-two", "--named", "dp=4", "--out", str(path))
    done = planloom("verify", str(path), "examples/models/gpt.py:small")
    assert done.returncode == 2
    assert "another model" in done.stderr
    assert "in the plan" in done.stderr
