"""Profiles on local processes, and sessions that are killed."""

import json
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planloom.blocks import BlockGraph, find_blocks
from planloom.capture import batch_spec, capture, load_model
from planloom.cost.keys import OVERLAP_COMMUNICATION_KEY, OVERLAP_COMPUTE_KEY, REST_SECONDS_KEY, REST_SHARE_KEY
from planloom.plan import Plan, named_plan, parse_named
from planloom.profile import is_measured, local_store, missing_work, profile_locally, work_of
from planloom.profile.rounds import NUM_ROUNDS
from planloom.program import build_program

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "examples/models/gpt.py:tiny")


@pytest.fixture(scope="module")
def blocks() -> BlockGraph:
    return find_blocks(capture(*load_model(TINY)))


def plans_of(blocks: BlockGraph, *specs: str) -> list[Plan]:
    batch = batch_spec(load_model(TINY)[1])
    return [named_plan(blocks, parse_named(spec), batch=batch) for spec in specs]


def test_processes_measure_runs_and_what_they_send(blocks: BlockGraph, tmp_path: Path) -> None:
    store, seen = tmp_path / "prices.sqlite", []
    plans = plans_of(blocks, "dp=2,zero3", "tp=2,vocab", "pp=2,micro=2")
    profile_locally(
        TINY,
        plans,
        store,
        num_processes=2,
        progress=lambda done, total: seen.append((done, total)),
        budget_seconds=0.0,
    )
    programs = [build_program(blocks, plan) for plan in plans]
    work = work_of(blocks, programs, with_links=True)
    again = (NUM_ROUNDS["cpu"] - 1) * (len(work.runs) + len(work.updates))
    num_tasks = missing_work(work, set()).num_tasks + again
    assert seen == [(i, num_tasks) for i in range(num_tasks + 1)]
    assert len(work.runs) < sum(len(program.runs) for program in programs)
    known = local_store(store, 2).load()
    assert is_measured(blocks, programs, known)
    assert not is_measured(blocks, programs, {key: v for key, v in known.items() if "all_reduce" not in key})
    kinds = {key.split("/")[1] for key in known if key.startswith("collective/")}
    assert kinds == {"all_gather", "all_reduce", "exchange", "reduce_scatter"}
    assert known[OVERLAP_COMPUTE_KEY] >= 1
    assert known[OVERLAP_COMMUNICATION_KEY] >= 1
    assert 0 <= known[REST_SECONDS_KEY] < 0.02
    assert 0 < known[REST_SHARE_KEY] <= 1
    assert {key.split("/")[1] for key in known if key.startswith("accumulate/")} == {
        key.split("/")[1] for key in known if key.startswith("memory/")
    }
    assert all(known[key] > 0 for key in known if key.endswith(("/forward", "/backward")))
    assert local_store(store, 1).load() == {}


def command(store: Path, *more: str) -> list[str]:
    arguments = ["profile", TINY, "--named", "dp=2", "--named", "tp=2,vocab", "--store", str(store), *more]
    return [sys.executable, "-m", "planloom", *arguments]


def count_runs(store: Path) -> int:
    try:
        with sqlite3.connect(f"file:{store}?mode=ro", uri=True) as connection:
            rows = connection.execute("SELECT COUNT(*) FROM figures WHERE key LIKE 'run/%/forward'").fetchone()
        connection.close()
    except sqlite3.Error:  # not made yet
        return 0
    return int(rows[0])


@pytest.mark.slow
def test_a_session_that_is_killed_goes_on_where_it_ended(tmp_path: Path) -> None:
    store = tmp_path / "prices.sqlite"
    first = subprocess.Popen(command(store), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while count_runs(store) < 3 and time.monotonic() < deadline and first.poll() is None:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    done = count_runs(store)
    assert done >= 3
    again = subprocess.run(
        command(store, "--budget", "0", "--json"), capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert again.returncode == 0, again.stderr
    found = json.loads(again.stdout)
    assert found["known_runs"] == done
    assert found["measured_runs"] == found["distinct_runs"] - done > 0
    assert found["runs_in_plans"] > found["distinct_runs"]
    assert found["operators_in_plans"] > found["runs_in_plans"]
    third = subprocess.run(command(store, "--json"), capture_output=True, text=True, cwd=tmp_path, check=False)
    assert json.loads(third.stdout)["measured_runs"] == 0
