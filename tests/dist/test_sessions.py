"""Whole sessions on local processes: profile, train, demo."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from planloom.blocks import find_blocks
from planloom.capture import batch_spec, capture, load_model
from planloom.errors import TrainingError
from planloom.plan import Plan, named_plan, parse_named, save_plan
from planloom.profile import is_measured, local_store, profile_locally
from planloom.program import build_program
from planloom.train.session import train_locally

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "examples/models/gpt.py:tiny")


def plan_of(spec: str) -> Plan:
    model, batch = load_model(TINY)
    return named_plan(find_blocks(capture(model, batch)), parse_named(spec), batch=batch_spec(batch))


def test_training_on_local_processes_learns_and_gives_a_timeline(tmp_path: Path) -> None:
    save_plan(plan_of("pp=2,micro=2,1f1b"), tmp_path / "plan.json")
    steps: list[int] = []
    run = train_locally(
        TINY,
        tmp_path / "plan.json",
        num_processes=2,
        num_steps=4,
        with_timeline=True,
        on_step=lambda step, loss, seconds: steps.append(step),
    )
    assert steps == [0, 1, 2, 3]
    assert run.losses[-1] < run.losses[0]
    assert run.timeline is not None
    assert run.timeline.devices == (0, 1)
    names = {event.name.split()[0] for event in run.timeline.events}
    assert names >= {"Forward", "Backward", "Wait", "Update"}
    assert {event.stream for event in run.timeline.events} >= {"compute", "waiting"}


def test_too_few_processes_are_refused_with_the_users_error(tmp_path: Path) -> None:
    save_plan(plan_of("dp=4"), tmp_path / "plan.json")
    with pytest.raises(TrainingError, match="fewer ranks than devices in the plan"):
        train_locally(TINY, tmp_path / "plan.json", num_processes=2, num_steps=1, on_step=lambda *_: None)


def test_a_profile_measures_each_distinct_run_once(tmp_path: Path) -> None:
    """And, without links, nothing that is sent."""
    store, seen = tmp_path / "prices.sqlite", []
    plans = [plan_of("dp=2"), plan_of("tp=2,vocab")]
    profile_locally(
        TINY, plans, store, num_processes=2, progress=lambda *progress: seen.append(progress), with_links=False
    )
    model, batch = load_model(TINY)
    blocks = find_blocks(capture(model, batch))
    programs = [build_program(blocks, plan) for plan in plans]
    known = local_store(store, 2).load()
    assert is_measured(blocks, programs, known, with_links=False)
    assert not [key for key in known if key.startswith(("collective/", "overlap/"))]
    assert all(value > 0 for key, value in known.items() if key.endswith(("/forward", "/backward")))
    assert seen[-1][0] == seen[-1][1]
    distinct = [key for key in known if key.startswith("run/") and key.endswith("/forward")]
    assert len(distinct) < sum(len(program.runs) for program in programs)


@pytest.mark.slow
def test_the_demo_runs_the_whole_path(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "planloom",
        "demo",
        "--steps",
        "5",
        "--json",
        "--store",
        str(tmp_path / "p.sqlite"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["verified"] is True
    assert len(found["plans"]) >= 12
    assert 0 < found["measured_runs"] <= found["known_runs"] <= found["distinct_runs"]
    assert found["losses"][-1] < found["losses"][0]
    assert found["predicted_step_seconds"] > 0
    assert found["measured_step_seconds"] > 0
