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
    assert done.stdout.split() == ["13", "False"]
    for command in ("demo", "plan", "profile", "verify", "simulate", "blocks", "models", "train", "cluster"):
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
    seconds = [plan["step_seconds"] for plan in found["plans"] if "step_seconds" in plan]
    assert len(seconds) >= 12
    assert seconds == sorted(seconds)
    proof = document("verify", str(path), TINY)
    assert proof["verified"] is True
    assert proof["devices"] == 4
    timed = document("simulate", str(path), TINY, "--cluster", "two-by-two", "--picture", str(picture))
    assert timed["step_seconds"] == pytest.approx(seconds[0])
    assert (found["compiled"], found["links"], found["profile"]) == (False, "cluster", None)
    assert all(plan["fits"] and plan["memory_bytes"] > 0 for plan in found["plans"] if "step_seconds" in plan)
    assert timed["compiled"] is False
    assert picture.read_text().startswith("<svg")


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
