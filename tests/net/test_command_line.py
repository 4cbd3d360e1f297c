"""`python -m testbed`: JSON, exit codes, and errors that say what to do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from planloom.cluster import cluster_to_yaml
from testbed import TestbedError, open_devices, requirements
from tests.net.clusters import cluster, level
from tests.net.conftest import Traces

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 90.0


def command_line(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "testbed", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


def test_run_measures_first_where_asked_and_reports_as_json(traces: Traces) -> None:
    path = "testbed/clusters/three-level-2x2x2.yaml"
    ended = command_line("run", path, "--check", "--json", "--", "bash", "-c", "echo $RANK; exit $((RANK == 5))")
    document = json.loads(ended.stdout)
    assert (ended.returncode, document["exit_code"], document["timed_out"]) == (1, 1, False)
    assert document["check"]["ok"]
    assert {trial["level"] for trial in document["check"]["trials"]} == {"rack", "node", "device", "all"}
    assert all(abs(trial["deviation"]) <= 0.1 for trial in document["check"]["trials"])
    assert [rank["stdout"] for rank in document["ranks"]] == [f"{rank}\n" for rank in range(8)]
    assert "Links of three-level-2x2x2" in ended.stderr


def test_check_prints_a_table(traces: Traces, tmp_path: Path) -> None:
    path = tmp_path / "pair.yaml"
    path.write_text(cluster_to_yaml(cluster(level("device", 2, 100))))
    ended = command_line("check", str(path))
    assert ended.returncode == 0, ended
    assert "both directions" in ended.stdout


def test_a_rank_killed_by_a_signal_is_128_and_the_signal(traces: Traces, tmp_path: Path) -> None:
    path = tmp_path / "pair.yaml"
    path.write_text(cluster_to_yaml(cluster(level("device", 2, 100))))
    assert command_line("run", str(path), "--grace", "0", "--", "bash", "-c", "kill -ABRT $$").returncode == 134


def test_a_missing_file_and_a_cluster_too_fast_are_explained() -> None:
    missing = command_line("check", "nowhere.yaml")
    assert missing.returncode == 2
    assert "there is no cluster 'nowhere.yaml'" in missing.stderr
    fast = command_line("check", "dgx-a100", "--json")
    assert fast.returncode == 2
    assert "faster than a link of the testbed" in json.loads(fast.stdout)["error"]["what"]


def test_without_root_it_says_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(TestbedError, match=r"need root[\s\S]*user 1000[\s\S]*ip and tc of iproute2[\s\S]*run as root"):
        requirements.require()


def test_root_of_a_plain_container_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(requirements, "_may_build", lambda: False)
    with pytest.raises(TestbedError, match=r"container without --privileged"):
        requirements.require()


def test_without_iproute2_it_installs_it_or_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(requirements, "_may_build", lambda: True)
    monkeypatch.setattr(requirements, "_SEARCH_PATH", str(tmp_path))
    monkeypatch.setattr(requirements.shutil, "which", _which_with_apt_get(requirements.shutil.which))
    asked: list[list[str]] = []

    def install(command: list[str], **_: object) -> None:
        asked.append(command)
        if len(asked) == 3:  # the first try fails: the package lists are old
            for tool in ("ip", "tc"):
                (tmp_path / tool).touch(mode=0o755)

    monkeypatch.setattr(requirements.subprocess, "run", install)
    requirements.require()
    assert [words[1] for words in asked] == ["install", "update", "install"]
    (tmp_path / "tc").unlink()
    opened = open_devices("two-by-two")
    assert opened.kind == "plain processes"
    assert "tc of iproute2 not found" in opened.why
    with pytest.raises(TestbedError, match=r"tc of iproute2 not found[\s\S]*install the package iproute2"):
        requirements.require()


def _which_with_apt_get(original):  # type: ignore[no-untyped-def]
    return lambda name, path=None: "/usr/bin/apt-get" if name == "apt-get" else original(name, path=path)
